"""The tables and files of a study: rows for each run, each setting that was tried, and methods by data sets."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tfpfl.runs.command import command
from tfpfl.runs.config import RunError
from tfpfl.runs.files import replaced, write_csv, write_whole
from tfpfl.runs.metrics import told_score
from tfpfl.runs.participation import SIDES_TOLD
from tfpfl.runs.protocols import EV_LOCAL, SIDES, Protocol
from tfpfl.studies.comparison import BASELINES, rows
from tfpfl.studies.paper_tables import SCORE, PaperTable, latex, markdown, paper_table
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import group_runs, is_mixed, span
from tfpfl.studies.search import VALIDATION, about_the_diverged, about_the_edge, written
from tfpfl.studies.study.file import Study
from tfpfl.studies.study.plan import Cell, Failure
from tfpfl.studies.told import told_classes, told_conditions, told_ends, told_seen, told_stops

_WRITTEN = ("search.csv", "results.csv", "results.parquet", "commands.sh", "table.md", "table.tex")


@dataclass(frozen=True)
class StudyResults:
    """What a study has found, as far as it has run.

    Attributes:
        study: the study.
        out: its folder.
        cells: one for each data set and method, in the order of the file: what was tried, the winner, its run folders.
        files: the result files that `write` has written.
        notes: what `write` could not write, and why.
    """

    study: Study
    out: Path
    cells: list[Cell] = field(repr=False)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Failure]:
        """The runs that failed, and why."""
        return [failure for cell in self.cells for failure in cell.failures]

    @cached_property
    def records(self) -> dict[Path, Record]:
        """{run folder: its results}, of all finished runs of the winners but those that diverged in round 1."""
        found = {}
        for cell in self.cells:
            for seed, folder in cell.folders.items():
                with suppress(*([RunError] if seed in cell.diverged else [])):  # it has no rounds
                    found[folder] = Record.read(folder)
        return found

    @cached_property
    def by_data(self) -> dict[str, list[dict]]:
        """{title of a data set: one row for each method}; for the columns see `tfpfl.studies.comparison.rows`.

        A method without all of its seeds is left out: its mean would be of other seeds than those of the others.
        """
        return {data.title: self._rows(data.name) for data in self.study.data}

    def _rows(self, data: str) -> list[dict]:
        whole = [cell for cell in self.cells if cell.data.name == data and self.is_whole(cell)]
        finished = [self.records[folder] for cell in whole for folder in cell.folders.values()]
        baselines = [record for record in finished if record.config.algorithm in BASELINES]
        sides = any(is_mixed(record, self.study.protocol) for record in finished)  # as the table has one head for all
        found = []
        for cell in whole:
            mine = [self.records[folder] for folder in cell.folders.values()]
            # Two methods may have chosen the same settings; and which baseline is the first, all rows must agree on.
            every = {record.config.run_id: record for record in (*baselines, *mine)}
            records = list(every.values())
            its_row = [mine[0].config.run_id in {r.config.run_id for r in s.records} for s in group_runs(records)]
            row: dict = rows(records, self.study.protocol, BASELINES, sides=sides)[its_row.index(True)]
            found.append(row | {"algorithm": cell.method.title})
        return found

    def is_whole(self, cell: Cell) -> bool:
        """Whether the winner of a cell came to its end with all seeds."""
        return len(cell.folders) == len(self.study.seeds) and not cell.diverged

    def table(self, columns: tuple[str, ...] = SCORE) -> PaperTable:
        """The table of methods by data sets.

        Raises:
            InvalidArgument: there is no column of this name, or no method is finished.
        """
        told = [_sentences(self._of_each_data_set(of)) for of in (told_conditions, told_classes, told_stops)]
        told = [self._about_the_clients(), *told, self._about_the_search()]
        return paper_table(self.by_data, columns, self.study.protocol, more=" ".join(filter(None, told)))

    def _about_the_clients(self) -> str:
        """How many clients had taken part and how many never, for each data set; what that means is said once."""

        def told(records: list[Record], titles: list[str]) -> str:
            return told_seen(records, self.study.protocol).removesuffix(SIDES_TOLD).strip()

        found = self._of_each_data_set(told)
        sides = SIDES_TOLD if any("never" in words for words in found.values()) else ""
        return f"{_sentences(found)} {sides}".strip()

    def _of_each_data_set(self, told: Callable[[list[Record], list[str]], str]) -> dict[str, str]:
        """{title of a data set: what `told` says of (the runs in its rows, the title of each run's method)}."""
        found = {}
        for data in self.study.data:
            whole = [cell for cell in self.cells if cell.data == data and self.is_whole(cell)]
            runs = [(self.records[folder], cell.method.title) for cell in whole for folder in cell.folders.values()]
            found[data.title] = told([record for record, _ in runs], [title for _, title in runs])
        return found

    def _about_the_search(self) -> str:
        words = ["All seeds have the same split of the data."]
        counts = [_number_tried(cell) for cell in self.cells if cell.tried]
        if counts:
            search = self.study.search
            seeds = "seed" if len(search.seeds) == 1 else "seeds"
            words.append(
                f"Hyperparameters were chosen on validation examples, for each data set: {span(counts)} settings of "
                f"every method that is searched, {seeds} {', '.join(map(str, search.seeds))}."
            )
            fixed = [method.title for method in self.study.methods if not method.space]
            if fixed:
                words.append(f"Not searched: {', '.join(fixed)}.")
        return " ".join(words)

    @property
    def run_rows(self) -> list[dict]:
        """One row for each run of a winner; accuracies in [0, 1], other scores in their unit."""
        found = []
        for cell in self.cells:
            for seed, folder in cell.folders.items():
                if folder not in self.records:
                    continue
                record = self.records[folder]
                protocol = self.study.protocol
                test, local = record.result(protocol), record.result(EV_LOCAL)
                validation = record.result(VALIDATION)
                found.append(
                    {
                        "data": cell.data.title,
                        "method": cell.method.title,
                        "algorithm": record.config.algorithm,
                        "seed": seed,
                        "rounds": record.rounds,
                        record.score.name: test.score if test else math.nan,
                        "ci95_over_clients": test.score_ci95 if test else math.nan,
                        "worst_decile": test.worst_decile if test else math.nan,
                        "loss": test.loss if test else math.nan,
                        "clients": test.num_clients if test else 0,
                        **_sides(record, protocol),
                        f"ev_local_{record.score.name}": local.score if local else math.nan,
                        f"validation_{record.score.name}": validation.score if validation else math.nan,
                        "diverged": seed in cell.diverged,
                        "hyperparameters": json.dumps(record.config.hyperparameters, sort_keys=True),
                        "protocol": str(protocol),
                        "folder": str(folder.relative_to(self.out)),
                        "run_id": record.config.run_id,
                        "federation_hash": record.config.federation_hash,
                    }
                )
        return found

    @property
    def search_rows(self) -> list[dict]:
        """One row for each setting that was tried, with its score on validation examples; NaN if it diverged."""
        return [
            {
                "data": cell.data.title,
                "method": cell.method.title,
                "setting": json.dumps(tried.setting, sort_keys=True),
                "rounds": tried.rounds,
                "seeds": len(tried.scores),
                f"validation_{cell.score.name}": tried.score,
                "diverged": not math.isfinite(tried.score),
                "chosen": tried is cell.best,
            }
            for cell in self.cells
            for tried in cell.tried
        ]

    def commands(self, cell: Cell) -> list[str]:
        """The command lines that repeat the winner's runs exactly, one for each seed."""
        return [
            command(self.records[folder].config, folder, out=Path("runs") / f"{cell.data.name}-{folder.name}")
            for folder in cell.folders.values()
            if folder in self.records
        ]

    def ends(self, cell: Cell) -> list[str]:
        """Why runs of a method on a data set ended early, and of which rounds their means are."""
        found = [self.records[folder] for folder in cell.folders.values() if folder in self.records]
        return [f"{cell.data.title}, {sentence}" for sentence in told_ends(found)]

    def said(self, cell: Cell) -> list[str]:
        """What is to be said about a method on a data set: the winner, values at the edge, its command, failures."""
        name = f"{cell.data.title}, {cell.method.title}"
        if cell.winner is None and not cell.failures:
            return [f"{name}: every setting diverged. Try smaller learning rates"]
        said, best = [], cell.best
        if best is not None:
            count = _number_tried(cell)
            said.append(
                f"{name}: {written(best.setting)} is the best of {count} settings on validation examples, "
                f"{told_score(cell.score, best.score)}"
            )
            stages = ((t.setting, t.rounds, t.score) for t in cell.tried)
            said += [f"{name}: {sentence}" for sentence in about_the_diverged(stages)]
            for setting in cell.passed_over:
                said.append(f"{name}: {written(setting)} was better in the search, but diverged with all rounds")
            tried = [t.setting for t in cell.tried]
            said += [f"{name}: {sentence}" for sentence in about_the_edge(best.setting, tried)]
        if cell.diverged:
            said.append(f"{name}: diverged with seed {', '.join(map(str, cell.diverged))}, so it is not in the table")
        said += [f"{name}: failed: {failure.label}: {failure.why}" for failure in cell.failures]
        return said

    def write(self, columns: tuple[str, ...] = SCORE) -> None:
        """Writes search.csv, results.csv, results.parquet, commands.sh, table.md and table.tex; `files` has the paths.

        results.parquet needs pyarrow; without it, `notes` says so. The tables are left out if no method is finished.

        Raises:
            InvalidArgument: there is no column of this name; all files but the tables are written.
        """
        self.files.clear()
        self.notes.clear()
        runs = self.run_rows
        for name, table in (("search.csv", self.search_rows), ("results.csv", runs)):
            if table:
                write_csv(self._file(name), list(table[0]), table)
        if runs:
            try:
                _write_parquet(self.out / "results.parquet", runs)
                self.files.append(self.out / "results.parquet")
            except ImportError as error:  # it is not installed, or needs another NumPy
                self.notes.append(f"results.parquet was not written: it needs pyarrow (the extra 'tables'): {error}")
        lines = [line for cell in self.cells for line in self.commands(cell)]
        if lines:
            write_whole(self._file("commands.sh"), "\n".join(["#!/bin/sh", *lines, ""]))
        if any(self.by_data.values()):
            made = self.table(columns)
            write_whole(self._file("table.md"), markdown(made))
            write_whole(self._file("table.tex"), latex(made))
        for path in [self.out / name for name in _WRITTEN if (self.out / name) not in self.files]:
            if path.exists():  # of an earlier call; a paper that includes it would go on showing its numbers
                path.replace(path.with_name(f"{path.name}.old"))
                self.notes.append(f"{path.name} of an earlier call is {path.name}.old now: nothing takes its place")

    def _file(self, name: str) -> Path:
        self.files.append(self.out / name)
        return self.out / name


def _sentences(told: dict[str, str]) -> str:
    """{title of a data set: words} as a text: once without a title if they are the same for all data sets."""
    if len(set(told.values())) == 1:
        return next(iter(told.values()))
    return " ".join(f"{title}: {words}" for title, words in told.items() if words)


def _sides(record: Record, protocol: Protocol) -> dict[str, float | None]:
    """The scores of the clients that had taken part and of the others, and their numbers; None if unknown."""
    found: dict[str, float | None] = {}
    counts = record.seen_counts(protocol) or (None, None)
    for side, word, count in zip(SIDES, ("seen", "never_seen"), counts, strict=True):
        result = record.result(protocol._replace(clients=side)) if protocol.clients == "all" else None
        found |= {f"{record.score.name}_{word}": result.score if result else math.nan, f"clients_{word}": count}
    return found


def _number_tried(cell: Cell) -> int:
    """The number of different settings: halving tries one in several stages, and Optuna may propose it again."""
    return len({json.dumps(tried.setting, sort_keys=True) for tried in cell.tried})


def _write_parquet(path: Path, table: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    with replaced(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), temporary)
