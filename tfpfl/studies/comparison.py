"""Compares algorithms on one federation, with the same cohorts, batches and initial weights: a table, one row each.

A number over clients is computed for each seed and then averaged. The interval beside the score is over seeds if
there are several, otherwise over clients. Paired tests compare each client with itself, by its mean over the seeds;
they are on the clients that had taken part in the runs of both methods.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from tfpfl.checks import InvalidArgument, check_listed, check_type, one_line, unknown, warn_user
from tfpfl.data import Federation
from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.models.modules_beside import sha256_of
from tfpfl.runs import statistics
from tfpfl.runs.config import RunConfig, read_config
from tfpfl.runs.continuing import config_to_continue
from tfpfl.runs.federations import open_federation
from tfpfl.runs.files import csv_text, markdown
from tfpfl.runs.folders import check_free
from tfpfl.runs.metrics import SCORES, direction_of, is_fraction, score_of, times
from tfpfl.runs.needs import check_needs, check_protocol
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL, SIDES, Protocol, as_protocol, half_interval, metrics_of
from tfpfl.runs.results import visits_of
from tfpfl.runs.run import Run
from tfpfl.runs.training import DivergedError
from tfpfl.studies.records import Described, Record, common_federations
from tfpfl.studies.run_groups import (
    SIDE_WORDS,
    RunGroup,
    check_comparable,
    check_different,
    check_records,
    group_runs,
    is_mixed,
    mean_score,
    measured,
    paired,
    pairs_protocol,
)
from tfpfl.studies.told import (
    told_classes,
    told_conditions,
    told_ends,
    told_lengths,
    told_seen,
    told_splits,
    told_unscored,
)

BASELINES = ("local", "fedavg_ft")  # what personalization has to beat: training alone, and plain fine-tuning
COLUMNS = (  # of every table from `rows`; some are NaN, or left out, where the runs have no such number
    *("seeds", "rounds", "accuracy", "seen", "clients seen", "never seen", "clients never seen", "EV-local", "std"),
    *("worst 5 %", "worst 10 %", "worst 25 %", "Jain", "Gini", "bytes a visit", "passes", "GFLOP a visit", "s a round"),
)
_OF_SCORES = ("seen", "never seen", "EV-local", "std", "worst ", "gain ")  # columns in the unit of the score
FORMATS = ("csv", "md")  # `tfpfl.studies.paper_tables` writes LaTeX


def compare_runs(
    configs: Iterable[RunConfig],
    out: Path,
    *,
    beside: Sequence[Path] = (),
    protocol: Protocol | str = EV_ALL,
    callbacks: Callable = lambda label: (),
    allow_download: bool = False,
) -> list[Path]:
    """Trains the runs that are missing, and continues those that have fewer rounds than asked for.

    Args:
        configs: one for each algorithm and seed. Those without a `data_seed` get one split of the data for all seeds:
            that of the runs that are there already, in `out` or `beside`; without any, that of the first such
            configuration's seed. If the runs that are there have several splits, it is that of the run of the same
            seed.
        out: the folder with the run folders, ALGORITHM-sSEED. For a file or module of the user's own, the first digits
            of its sha256 stand between, so that a changed method gets new runs.
        beside: other run folders that these runs will be compared with.
        protocol: that with which they will be compared, or its name. Nothing is trained if they could have no score.
        callbacks: function (label of a run) -> its callbacks.
        allow_download: whether TensorFlow Datasets may download a data set that is not on this machine.

    Returns:
        The run folders, in the order of `configs`.

    Raises:
        RunError: a folder holds a run with another configuration, or something else. As all errors about the
            configurations, it comes before anything is trained.
        InvalidArgument: a configuration is there twice, also `beside`, or does not fit its data; the protocol needs
            validation examples, and there are none; or the runs, with those `beside`, are on different data, or a
            baseline has no split in common with another row.
        DivergedError: one or more of the runs diverged. It comes after all others are trained, and names them.
    """
    check_listed("configs", configs, "[RunConfig(algorithm='pflego'), RunConfig(algorithm='fedper')]")
    check_listed("beside", beside, "[Path('runs/pflego')]")
    for folder in beside:
        check_type("a folder in beside", folder, (str, os.PathLike), "the path of a run folder")
    beside, configs = [Path(folder) for folder in beside], list(configs)
    for config in configs:
        check_type("a configuration", config, RunConfig, "a tfpfl.RunConfig, as in RunConfig(algorithm='pflego')")
    configs = [replace(config) for config in configs]  # the caller's stay as they are
    _choose_splits(configs, out, beside)
    planned = _checked(configs, out, beside, allow_download)
    for config, _, federation in planned:
        check_protocol(protocol, config, federation)
    diverged = []
    for config, folder, federation in planned:
        with Run.create_or_resume(config, folder, federation) as run:
            if not run.is_complete:
                try:
                    run.train(callbacks(f"{config.title}, seed {config.seed}"))
                except DivergedError as error:
                    diverged.append(f"{config.title}, seed {config.seed} ({folder}): {error}")
    if diverged:
        raise DivergedError(
            f"{len(diverged)} of {len(planned)} runs diverged; the others are trained. {'; '.join(diverged)}. Compare "
            "the others by their folders, or take other hyperparameters and another --out"
        )
    return [folder for _, folder, _ in planned]


def _checked(
    configs: list[RunConfig], out: Path, beside: Sequence[Path], allow_download: bool
) -> list[tuple[RunConfig, Path, Federation]]:
    """(configuration, folder, data) of all runs, after refusing what would be refused between or after the runs."""
    folders = [_folder(out, config) for config in configs]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise InvalidArgument(
                f"{configs[i].title}, seed {configs[i].seed}, is there twice: name every method and every seed once"
            )
    federations: dict[str, Federation] = {}
    described = [Described(folder, read_config(folder)) for folder in beside]
    planned = []
    for config, folder in zip(configs, folders, strict=True):
        federation = open_federation(config, allow_download=allow_download)
        federation = federations.setdefault(federation.hash, federation)
        if (folder / "config.json").exists():
            before = config_to_continue(config, folder, federation)
            if config.rounds < before.rounds:
                warn_user(
                    f"{folder} is a run of {before.rounds} rounds, and {config.rounds} were asked for: it keeps them, "
                    "and is compared by its last rounds. For fewer rounds take another --out"
                )
            config.rounds = before.rounds
            described.append(Described(folder, before))
        else:
            check_free(folder)
            check_needs(config)
            described.append(Described(folder, Run.planned(config, folder, federation).config))
        planned.append((config, folder, federation))
    check_comparable(described)
    check_different(described)
    groups = group_runs(list[Any](described)) if described else []
    for reference in (s for s in groups if s.algorithm in BASELINES):
        for s in groups:  # `rows` would refuse it after the training
            common_federations(s.records, reference.records)
    return planned


def _folder(out: Path, config: RunConfig) -> Path:
    version = f"-{sha256_of(config.own_method)[:8]}" if config.own_method else ""
    return Path(out) / f"{config.short_name}{version}-s{config.seed}"


def _choose_splits(configs: list[RunConfig], out: Path, beside: Sequence[Path]) -> None:
    """Fills in the `data_seed` of the configurations that have none, as `compare_runs` says."""
    open_ones = [c for c in configs if c.data_seed is None and c.federation is None]
    there = [folder for folder in (*beside, *(_folder(out, c) for c in configs)) if (folder / "config.json").exists()]
    of_seed = {before.seed: before.data_seed for before in map(read_config, there)}
    splits = set(of_seed.values())
    for config in open_ones:
        config.data_seed = of_seed.get(config.seed, next(iter(splits)) if len(splits) == 1 else open_ones[0].seed)


def rows(
    records: Sequence[Record],
    protocol: Protocol | str = EV_ALL,
    baselines: Sequence[str] = BASELINES,
    *,
    pairs: str = "seen",
    sides: bool | None = None,
) -> list[dict]:
    """The rows of the comparison: one dict for each algorithm and setting, in the order of the records.

    Args:
        records: runs on the same federation.
        protocol: how the scores are measured that all numbers over clients are computed from, or its name.
        baselines: names of algorithms. For each of them among the records, every row has the share of clients that
            are worse than with it. For the first of them, a row also has the mean and standard deviation of the
            clients' gains (in points, if the score is in %), the p-value of Wilcoxon's one-sided test that they gain,
            and the number of pairs: of clients that are compared with themselves.
        pairs: which clients are compared one by one: 'seen', those that had taken part in both runs, or 'all'; see
            `tfpfl.studies.run_groups.pairs_protocol`.
        sides: whether every row has the scores of the clients that had taken part ('seen') and of the others ('never
            seen'). Default: whether some clients of these records had never.

    Returns:
        Accuracies, gains of them and shares are in %; scores that are no fractions, such as 'rmse', are in their unit.
        NaN stands for a number that a run does not have.

    Raises:
        InvalidArgument: no records, one run twice, or runs on different data or of different kinds.
    """
    check_listed("baselines", baselines, "['local']")
    protocol = as_protocol(protocol)
    check_records(records)
    check_comparable(records)
    found = group_runs(records)
    references = [s for name in baselines for s in found if s.algorithm == name]
    mixed = any(is_mixed(record, protocol) for record in records) if sides is None else sides
    names = other_metrics(records, protocol)
    tested = pairs_protocol(records, protocol, pairs)
    return [_row(s, protocol, references, tested, mixed, names) for s in found]


def check_columns(columns: Iterable[str], configs: Iterable[RunConfig]) -> None:
    """Checks names of columns before the runs are there.

    Args:
        columns: names that `rows` gives.
        configs: the configurations of all runs that will be compared.

    Raises:
        InvalidArgument: the table of these runs will have no such column.
    """
    configs = list(configs)
    titles = list(dict.fromkeys(c.title for name in BASELINES for c in configs if c.algorithm == name))
    score = configs[0].score if configs else ACCURACY
    known = [*columns_for(score), *dict.fromkeys(name for config in configs for name in config.metrics)]
    if titles:
        known += [f"gain over {titles[0]}", "gain std", f"p ({titles[0]})", "pairs"]
    known += [f"worse than {title} %" for title in titles]
    settings = tuple(start for t in titles for start in (f"gain over {t} (", f"p ({t} (", f"worse than {t} ("))
    if any(config.kind is None and not config.versions for config in configs):
        known += SCORES  # the data, which are not there yet, say which
    asked = columns_named(columns, score.name)
    if not asked:
        raise InvalidArgument(f"a table needs at least one column; there are {', '.join(known)}")
    for column in asked:
        if column not in known and not column.startswith(settings):
            raise InvalidArgument(unknown("column", column, dict.fromkeys(known)))


def columns_for(score: ScoreName) -> list[str]:
    """`COLUMNS`, with the score's name in place of 'accuracy'."""
    return [score.name if column == ACCURACY.name else column for column in COLUMNS]


def columns_named(columns: Iterable[str], score: str) -> list[str]:
    """The columns, where 'score' stands for the column of this name.

    Examples:
        >>> columns_named(["score", "EV-local"], "rmse")
        ['rmse', 'EV-local']
    """
    return [score if column == "score" else column for column in columns]


def other_metrics(records: Sequence[Record], protocol: Protocol = EV_ALL) -> list[str]:
    """The names of the metrics besides score and loss that some of the runs measured; they are columns of `rows`."""
    return metrics_of(result for record in records if (result := record.result(protocol)))


def notes(
    records: Sequence[Record], protocol: Protocol = EV_ALL, *, pairs: str = "seen", gains: bool = True
) -> list[str]:
    """What a reader must know of a comparison: who had taken part, who is compared one by one, and the splits.

    Args:
        records, protocol, pairs: as for `rows`.
        gains: whether the table shows gains, p or shares of clients that are worse.
    """
    gains = gains and not {record.config.algorithm for record in records}.isdisjoint(BASELINES)
    told = [told_unscored(records, protocol), told_seen(records, protocol)]
    told += [told_conditions(records), told_classes(records)]
    if gains and any(is_mixed(record, protocol) for record in records):
        seen = pairs_protocol(records, protocol, pairs).clients == "seen"
        whose = "clients that both methods had seen" if seen else "all clients, seen or not"
        told.append(f"Gains, p and shares of clients that are worse: of {whose}.")
    told += [*told_ends(records), told_lengths(records, BASELINES if gains else ()), told_splits(records)]
    return [sentence for sentence in told if sentence]


def _row(
    s: RunGroup, protocol: Protocol, references: list[RunGroup], tested: Protocol, mixed: bool, names: list[str]
) -> dict:
    named = s.score
    factor, direction = times(named), named.direction

    def over_clients(function, factor=factor):
        return factor * measured(s.records, function, protocol)[0]

    def worst(fraction):
        return factor * statistics.over_seeds([record.worst(fraction, protocol) for record in s.records])[0]

    history = [row for record in s.records for row in record.history]
    visits = sum(map(visits_of, history))
    sent = sum(row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in history)
    passes = [sum(p.values()) for record in s.records if (p := record.summary.get("passes"))]
    flops = [f / 1e9 for record in s.records if (f := record.summary.get("flops"))]
    score, half = (factor * number for number in mean_score(s, protocol))
    local, local_half = (factor * number for number in mean_score(s, EV_LOCAL))
    row = {
        "algorithm": s.label,
        "seeds": len(s.records),
        "rounds": min(record.rounds for record in s.records),
        named.name: score,
        f"{named.name} ±": half,
        **_seen(s, protocol, mixed),
        **_metrics(s, protocol, names),
        "EV-local": local,
        "EV-local ±": local_half,
        "std": over_clients(statistics.std),
        "worst 5 %": worst(0.05),
        "worst 10 %": worst(0.1),
        "worst 25 %": worst(0.25),
        "Jain": over_clients(statistics.jain, 1),
        "Gini": over_clients(statistics.gini, 1),
    }
    for i, reference in enumerate(references):
        mine, theirs = paired(s.records, reference.records, tested)
        if i == 0:
            gains = factor * statistics.gains(mine, theirs) * (1 if named.larger_is_better else -1)
            row |= {
                f"gain over {reference.label}": statistics.mean_over_clients(gains),
                "gain std": statistics.std(gains),
                f"p ({reference.label})": statistics.wilcoxon(mine, theirs, direction).p_value,
                "pairs": statistics.num_tested(gains),
            }
        row[f"worse than {reference.label} %"] = 100 * statistics.share_worse(mine, theirs, direction)
    return row | {
        "bytes a visit": sent / max(visits, 1),
        "passes": statistics.over_seeds(passes)[0],
        "GFLOP a visit": statistics.over_seeds(flops)[0],
        "s a round": statistics.over_seeds([record.seconds_per_round for record in s.records])[0],
    }


def _seen(s: RunGroup, protocol: Protocol, mixed: bool) -> dict:
    """The numbers of clients that had taken part and of the others, means over the seeds; and their scores."""
    if protocol.clients != "all":
        return {}
    counted = [record.seen_counts(protocol) or (math.nan, math.nan) for record in s.records]
    found = {}
    for i, (which, word) in enumerate(zip(SIDES, SIDE_WORDS, strict=True)):
        if mixed:
            its = mean_score(s, protocol._replace(clients=which))
            found[word], found[f"{word} ±"] = (times(s.score) * number for number in its)
        found[f"clients {word}"] = float(np.mean([pair[i] for pair in counted]))
    return found


def _metrics(s: RunGroup, protocol: Protocol, names: list[str]) -> dict[str, float]:
    """The other metrics that the runs measured, and half their intervals as of the score; fractions in %."""
    measured_by = [(record, result) for record in s.records if (result := record.result(protocol))]
    found: dict[str, float] = {}
    for name in names:
        factor = 100 if is_fraction(name) else 1
        mean, half = statistics.over_seeds([result.metrics.get(name, math.nan) for _, result in measured_by])
        if len(measured_by) == len(s.records) == 1:
            ((record, _),) = measured_by
            half = half_interval(record.rows_of(protocol).values(), protocol.mean, s.score, name)
        found |= {name: factor * mean, f"{name} ±": factor * half}
    return found


INTERVALS = "±: half the 95 % interval (Student's t), over a row's seeds, or over clients where it has one seed."


def text(table: list[dict], kind: str, protocol: Protocol = EV_ALL, notes: Sequence[str] = ()) -> str:
    """The rows as CSV or Markdown.

    Args:
        table: from `rows`.
        kind: 'csv' (all digits; see `tfpfl.runs.files.csv_cell`) or 'md' (rounded, with the protocol).
        protocol: how the scores were measured; it is written below the table.
        notes: sentences that are written below it, too, from `notes`; CSV has none.

    Raises:
        InvalidArgument: `kind` is not one of `FORMATS`.
    """
    if kind not in FORMATS:
        raise InvalidArgument(f"a table is written as {', '.join(FORMATS)}; found {kind!r}")
    if kind == "csv":
        return csv_text(list(table[0]), table)
    score = score_of(table[0])
    rounded = [{markdown(name): markdown(shown(name, value, score)) for name, value in row.items()} for row in table]
    below = [f"{score.name}: {protocol}", *map(one_line, notes)]
    below += [INTERVALS] if any(name.endswith(" ±") for name in table[0]) else []
    written = tabulate(rounded, headers="keys", tablefmt="github", disable_numparse=True)
    return written + "".join(f"\n\n{sentence}" for sentence in below) + "\n"


def shown(name: str, value, score: ScoreName = ACCURACY) -> str:
    """The text of a cell, rounded to the digits of its column; '-' for NaN.

    Args:
        name: the column.
        value: the cell.
        score: the score of the table, from `tfpfl.runs.metrics.score_of`.
    """
    if isinstance(value, str | int):
        return str(value)
    if np.isnan(value):
        return "-"
    if name.startswith("p ("):
        return f"{value:.1e}" if value < 1e-3 else f"{value:.3f}"
    metric = name.removesuffix(" ±")
    if direction_of(metric) and not is_fraction(metric):
        return f"{value:.4g}"
    of_score = SCORES.get(name.removesuffix(" ±"), score if name.startswith(_OF_SCORES) else ACCURACY)
    if not of_score.is_fraction:
        return f"{value:.4g}"
    if name.startswith("clients "):
        return f"{value:.4g}"
    digits = {"Jain": 4, "Gini": 4, "s a round": 3, "bytes a visit": 0, "passes": 3, "GFLOP a visit": 3}
    return f"{value:.{digits.get(name, 2)}f}"
