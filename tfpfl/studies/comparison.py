"""Compares algorithms on one federation, with the same cohorts, batches and initial weights: a table, one row each.

A number over clients is computed for each seed and then averaged. The interval beside the accuracy is over seeds if
there are several, otherwise over clients. Paired tests compare each client with itself, by its mean over the seeds.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from tabulate import tabulate

from tfpfl.algorithms import get_method
from tfpfl.checks import InvalidArgument
from tfpfl.runs import statistics
from tfpfl.runs.config import RunConfig, RunError, read_config
from tfpfl.runs.federations import open_federation
from tfpfl.runs.files import csv_text, markdown
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL, Protocol
from tfpfl.runs.run import Run
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import RunGroup, check_comparable, group_runs, measured, paired

FORMATS = ("csv", "md")  # `tfpfl.studies.paper_tables` writes LaTeX


def compare_runs(
    configs: Iterable[RunConfig],
    out: Path,
    *,
    callbacks: Callable = lambda label: (),
    allow_download: bool = False,
) -> list[Path]:
    """Trains the runs that are missing, and continues those that have fewer rounds than asked for.

    Args:
        configs: one for each algorithm and seed.
        out: the folder with the run folders, ALGORITHM-sSEED.
        callbacks: function (label of a run) -> its callbacks.
        allow_download: whether TensorFlow Datasets may download a data set that is not on this machine.

    Returns:
        The run folders, in the order of `configs`.

    Raises:
        RunError: a folder holds a run with another configuration.
    """
    folders = []
    for config in configs:
        folder = Path(out) / f"{config.algorithm}-s{config.seed}"
        folders.append(folder)
        label = f"{get_method(config.algorithm).title}, seed {config.seed}"
        federation = open_federation(config, allow_download=allow_download)
        if (folder / "config.json").exists():
            before = read_config(folder)
            config.rounds = max(config.rounds, before.rounds)
            asked = config.resolved(federation)
            asked.versions, asked.format = before.versions, before.format
            if asked.run_id != before.run_id:
                raise RunError(f"{folder} is a run with another configuration; take another --out")
        with Run.create_or_resume(config, folder, federation) as run:
            if run.store.round_num < run.config.rounds or not (folder / "summary.json").exists():
                run.train(callbacks(label))
    return folders


def rows(
    records: Sequence[Record], protocol: Protocol = EV_ALL, baselines: Sequence[str] = ("local", "fedavg_ft")
) -> list[dict]:
    """The rows of the comparison: one dict for each algorithm and setting, in the order of the records.

    Args:
        records: runs on the same federation.
        protocol: how the accuracies are measured that all numbers over clients are computed from.
        baselines: names of algorithms. For each of them among the records, every row has the share of clients that
            are worse than with it. For the first of them, a row also has the mean and standard deviation of the
            clients' gains in points, and the p-value of Wilcoxon's one-sided test that clients gain.

    Returns:
        Accuracies, gains and shares are in %. NaN stands for a number that a run does not have.

    Raises:
        InvalidArgument: no records, one run twice, or runs on different data.
    """
    check_comparable(records)
    found = group_runs(records)
    references = [s for name in baselines for s in found if s.algorithm == name]
    return [_row(s, protocol, references) for s in found]


def _row(s: RunGroup, protocol: Protocol, references: list[RunGroup]) -> dict:
    def over_clients(function, times=100):
        return times * measured(s.records, function, protocol)[0]

    history = [row for record in s.records for row in record.history]
    visits = sum(row["clients"] for row in history)
    sent = sum(row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in history)
    passes, flops = (s.records[0].summary.get(name) for name in ("passes", "flops"))
    (score, half), (local, local_half) = _accuracy(s, protocol), _accuracy(s, EV_LOCAL)
    row = {
        "algorithm": s.label,
        "seeds": len(s.records),
        "rounds": min(record.rounds for record in s.records),
        "accuracy": score,
        "accuracy ±": half,
        "EV-local": local,
        "EV-local ±": local_half,
        "std": over_clients(statistics.std),
        "worst 5 %": over_clients(lambda values: statistics.worst(values, 0.05)),
        "worst 10 %": over_clients(lambda values: statistics.worst(values, 0.1)),
        "worst 25 %": over_clients(lambda values: statistics.worst(values, 0.25)),
        "Jain": over_clients(statistics.jain, 1),
        "Gini": over_clients(statistics.gini, 1),
    }
    for i, reference in enumerate(references):
        mine, theirs = paired(s.records, reference.records, protocol)
        if i == 0:
            gains = 100 * statistics.gains(mine, theirs)
            row |= {
                f"gain over {reference.label}": statistics.mean_over_clients(gains),
                "gain std": statistics.std(gains),
                f"p ({reference.label})": statistics.wilcoxon(mine, theirs).p_value,
            }
        row[f"worse than {reference.label} %"] = 100 * statistics.share_worse(mine, theirs)
    return row | {
        "bytes a visit": sent / max(visits, 1),
        "passes": sum(passes.values()) if passes else math.nan,
        "GFLOP a visit": flops / 1e9 if flops else math.nan,
        "s a round": float(np.median([h["seconds"] for h in history if h["clients"]])),
    }


def _accuracy(s: RunGroup, protocol: Protocol) -> tuple[float, float]:
    """The accuracy in %, and half its interval: over seeds, or over clients if there is one seed."""
    results = [record.result(protocol) for record in s.records]
    if None in results:
        return math.nan, math.nan
    if len(results) == 1:
        return 100 * results[0].accuracy, 100 * results[0].accuracy_ci95
    mean, half = statistics.over_seeds([result.accuracy for result in results])
    return 100 * mean, 100 * half


def text(table: list[dict], kind: str, protocol: Protocol = EV_ALL) -> str:
    """The rows as CSV or Markdown.

    Args:
        table: from `rows`.
        kind: 'csv' (all digits; see `tfpfl.runs.files.csv_cell`) or 'md' (rounded, with the protocol).
        protocol: how the accuracies were measured; it is written below the table.

    Raises:
        InvalidArgument: `kind` is not one of `FORMATS`.
    """
    if kind not in FORMATS:
        raise InvalidArgument(f"a table is written as {', '.join(FORMATS)}; found {kind!r}")
    if kind == "csv":
        return csv_text(list(table[0]), table)
    rounded = [{markdown(name): markdown(shown(name, value)) for name, value in row.items()} for row in table]
    return tabulate(rounded, headers="keys", tablefmt="github", disable_numparse=True) + f"\n\naccuracy: {protocol}\n"


def shown(name: str, value) -> str:
    """The text of a cell, rounded to the digits of its column; '-' for NaN."""
    if isinstance(value, str | int):
        return str(value)
    if np.isnan(value):
        return "-"
    if name.startswith("p ("):
        return f"{value:.1e}" if value < 1e-3 else f"{value:.3f}"
    digits = {"Jain": 4, "Gini": 4, "s a round": 3, "bytes a visit": 0, "passes": 3, "GFLOP a visit": 3}
    return f"{value:.{digits.get(name, 2)}f}"
