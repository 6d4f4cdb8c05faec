"""The sections of a report. Each function returns a list of blocks; captions say how the numbers were measured."""

from functools import partial
from typing import Any

import numpy as np

from tfpfl.runs import statistics
from tfpfl.runs.command import command
from tfpfl.runs.metrics import in_unit, shown_score, times, word
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL, PROTOCOLS
from tfpfl.runs.results import visits_of
from tfpfl.studies import plots
from tfpfl.studies.comparison import INTERVALS
from tfpfl.studies.plots.clients import WORST
from tfpfl.studies.report.blocks import Commands, Folded, Note, Pictures, Table
from tfpfl.studies.run_groups import RunGroup, clients, mean_score, measured, paired, pairs_protocol, sides
from tfpfl.studies.tables import WORST as WORST_TENTH
from tfpfl.studies.tables import bytes_text
from tfpfl.studies.told import told_seen

_DOTS = 400  # in one row of a plot; with more, the distribution is drawn as a curve
_ALL = f"{str(EV_ALL)[:1].upper()}{str(EV_ALL)[1:]}."
_TOLD_BY_RUN = ("hyperparameters", "versions", "format", "seed", "data_seed", "federation", "federation_hash")


def results(rows: list[RunGroup]) -> list:
    """Tables of EV-all, the worst clients and EV-local; and of the scores by the papers' protocols.

    Where some clients had never taken part, those that had and the others are two more rows of an algorithm.
    """
    table = []
    for s in rows:
        local = [_score(s, EV_LOCAL), s.records[0].predicts or "-", len(s.records)]
        table.append([s.label, *_score_and_worst(s, EV_ALL), *local])
        for side in sides(s) if len(sides(s)) > 1 else ():
            table.append([side.label, *_score_and_worst(s, side.protocol), "", "", ""])
    head = ["algorithm", "EV-all", WORST_TENTH, "EV-local", "predicts with", "seeds"]
    seen = told_seen([r for s in rows for r in s.records])
    caption = (
        f"{_unit(rows)}. EV-all: {EV_ALL}. Worst 10 %: EV-all's mean over the worst tenth of the clients, in each of "
        f"the rounds. EV-local: {EV_LOCAL}. {INTERVALS} {seen}"
    )
    others = [[s.label, *(_score(s, wanted) for wanted in PROTOCOLS.values())] for s in rows]
    words = " ".join(f"{name}: {wanted}{_star(wanted)}." for name, wanted in PROTOCOLS.items())
    names = ["algorithm", *(name + _star(wanted) for name, wanted in PROTOCOLS.items())]
    selected = "* selected on test, as several papers do: it says nothing about new data."
    return [
        Table(caption, head, table),
        Folded(
            "The same by other protocols",
            [Table(f"{_unit(rows)}, by protocol. {words} {selected} {INTERVALS}", names, others)],
        ),
    ]


def _score_and_worst(s: RunGroup, protocol) -> list[str]:
    worst = statistics.over_seeds([r.worst(0.1, protocol) for r in s.records])
    return [_score(s, protocol), shown_score(s.score, *worst)]


def _unit(rows: list[RunGroup]) -> str:
    """How a caption begins that says what the numbers are."""
    return in_unit(rows[0].score, title=True)


def _star(protocol) -> str:
    return " *" if protocol.selects_on_test else ""


def _score(s: RunGroup, protocol) -> str:
    return shown_score(s.score, *mean_score(s, protocol))


def _index(value: float, half: float) -> str:
    """Jain's index or the Gini coefficient and half its interval, such as '0.9123 ± 0.0041'; '-' for NaN."""
    if np.isnan(value):
        return "-"
    return f"{value:.4f}" + ("" if np.isnan(half) else f" ± {half:.4f}")


def curves(pictures: Pictures, rows: list[RunGroup], records) -> list:
    """Curves of score and loss by rounds, and of the score by bytes, passes and seconds."""
    name = word(rows[0].score)
    said = f"{plots.words(EV_ALL, 'every evaluated round')}. {told_seen(records, EV_ALL._replace(when='last'))} "
    bands = "Bands: 95 % interval over seeds. " if len(rows) < len(records) else ""
    added = "Added up over all clients and rounds so far"
    passes = "passes through the backbone of a client's examples, forward and backward"
    seconds = "The rounds' work on the machine that ran them, without evaluation: rounds x median of a round. "
    training = "Before the step, on its examples (a mini-batch, or all); mean over the round's clients. "
    cases = [
        (f"Test {name} by rounds", "rounds", "score", said),
        ("Test loss by rounds", "rounds", "loss", said),
        ("Loss of the last local step by rounds", "rounds", "training loss", training),
        (f"Test {name} by bytes", "bytes", "score", f"{said}{added}, down and up; level: nothing is sent. "),
        (f"Test {name} by passes", "passes", "score", f"{said}{added}: {passes}. "),
        (f"Test {name} by seconds", "seconds", "score", said + seconds),
    ]
    return [
        pictures.draw(title, caption[:1].upper() + caption[1:] + bands, plots.curves, records, x, y, caption=False)
        for title, x, y, caption in cases
    ]


def single_clients(pictures: Pictures, rows: list[RunGroup], records, against: list[RunGroup]) -> list:
    """How the score is spread over the clients, and what they gain or lose against the baselines `against`."""
    comparable = [other for other in against if all(_on_one_federation(s, other) for s in rows)]
    baselines = [r for other in comparable for r in other.records]
    kind, shown = "box", "A dot for every client and seed, a box over the middle half, a line at the median."
    if max(sum(len(clients(r)) for r in s.records) for s in rows) > _DOTS:
        kind, shown = "ecdf", "The share of the clients that have at most so much."
    named, name = rows[0].score, word(rows[0].score)
    even = f"The deciles of the clients' {_several(named)}; the mean of the worst clients; how even it is."
    blocks = [
        pictures.draw(
            f"{named.title} of single clients", f"{shown} {_ALL}", plots.distribution, records, kind=kind, caption=False
        ),
        pictures.draw("How evenly clients do", f"{even} {_ALL}", plots.fairness, records, baselines, caption=False),
        _fairness(rows, comparable),
        Folded("Deciles as numbers", [_deciles(rows)]),
    ]
    rest = {other.label: [s for s in rows if not s.shares(other)] for other in against}
    for other in against:
        if rest[other.label]:
            title = f"Gains against {other.label}"
            said = f"Every client's {name} less its {name} with {other.label}, each the mean over the seeds. {_ALL}"
            if not named.larger_is_better:
                said = f"Every client's {name} with {other.label} less its own, each the mean over the seeds. {_ALL}"
            blocks.append(pictures.draw(title, said, plots.gains, records, other.records, caption=False))
    return blocks + [_tests(rest[other.label], other) for other in comparable if rest[other.label]]


def _several(named) -> str:
    return "accuracies" if named.name == "accuracy" else f"scores ({word(named)})"


def _on_one_federation(s: RunGroup, other: RunGroup) -> bool:
    hashes = ({r.config.federation_hash for r in each.records} for each in (s, other))
    return bool(set.intersection(*hashes))


def _fairness(rows, against) -> Table:
    head = ["algorithm", "mean", "std", "worst 5 %", "worst 10 %", "worst 25 %", "Jain", "Gini"]
    head += [f"worse than {s.label}" for s in against]
    table = []
    for side in (side for s in rows for side in sides(s)):
        s, own = side.group, side.protocol
        text = partial(shown_score, s.score)
        cells = [text(measured(s.records, of, own)[0]) for of in (statistics.mean_over_clients, statistics.std)]
        for fraction, _ in WORST.values():
            cells.append(text(*statistics.over_seeds([r.worst(fraction, own) for r in s.records])))
        cells += [_index(*measured(s.records, of, own)) for of in (statistics.jain, statistics.gini)]
        for other in against:
            pair = None if s.shares(other) else paired(s.records, other.records, own)
            share = np.nan if pair is None else statistics.share_worse(*pair, s.score.direction)
            cells.append("-" if np.isnan(share) else f"{100 * share:.1f} %")
        table.append([side.label, *cells])
    caption = (
        f"{_unit(rows)}, how it is spread over the clients; a client's is its mean over the rounds. Worst: the mean of "
        "the worst clients of a round, averaged over the rounds. Jain's index is 1 and the Gini coefficient 0 where "
        "all clients have the same. "
        + (
            f"Worse than: the share of the clients, their {_several(rows[0].score)} averaged over the seeds. "
            if against
            else ""
        )
        + f"{_ALL} ±: half the 95 % interval over seeds, where there are several."
    )
    return Table(caption, head, table)


def _deciles(rows) -> Table:
    table = []
    for side in (side for s in rows for side in sides(s)):
        deciles = np.transpose([statistics.deciles(clients(r, side.protocol)) for r in side.group.records])
        table.append(
            [side.label, *(shown_score(side.group.score, statistics.over_seeds(column)[0]) for column in deciles)]
        )
    caption = f"The {in_unit(rows[0].score)} that so many of the clients do not exceed, the mean over the seeds. {_ALL}"
    return Table(caption, ["algorithm", *(f"{p} %" for p in range(10, 100, 10))], table)


def _tests(rows, other) -> Table:
    table = []
    tested = pairs_protocol([r for s in (*rows, other) for r in s.records])
    for s in rows:
        pair = paired(s.records, other.records, tested)
        named = s.score
        factor = times(named) * (1 if named.larger_is_better else -1)
        gains, test = factor * statistics.gains(*pair), statistics.wilcoxon(*pair, named.direction)
        w, p = ("-", "-") if np.isnan(test.p_value) else (f"{test.statistic:g}", f"{test.p_value:.2g}")
        mean = statistics.mean_over_clients(gains)
        gain = f"{mean:+.2f}" if named.is_fraction else f"{mean:+.4g}"
        worse = f"{100 * statistics.share_worse(*pair, named.direction):.1f} %"
        table.append([s.label, statistics.num_tested(gains), gain, worse, test.pairs, test.zeros, w, p])
    head = ["algorithm", "clients", "mean gain", "clients worse", "pairs", "equal", "W+", "p"]
    caption = (
        f"Against {other.label}, client by client ({_several(other.score)} averaged over the seeds), "
        f"{'gains in points' if other.score.is_fraction else 'gains: how much less'}, of "
        f"{'clients that had taken part in the runs of both methods' if tested.clients == 'seen' else 'all clients'}. "
        "Clients: how many are compared. Wilcoxon's signed-rank test that clients do better: one-sided, equal pairs "
        f"dropped. Many tests on one page: small p come by chance too. {_ALL}"
    )
    return Table(caption, head, table)


def costs(rows: list[RunGroup]) -> list:
    """A table of bytes, passes and seconds: per client and round, and in all."""
    table = []
    for s in rows:
        visits = np.array([max(sum(map(visits_of, r.history)), 1) for r in s.records])
        down, up = (
            np.mean([sum(row.get(way, 0) for row in r.history) for r in s.records] / visits)
            for way in ("bytes_down", "bytes_up")
        )
        passes = [r.summary["passes"] for r in s.records if "passes" in r.summary]
        told, total = "-", "-"
        if len(passes) == len(s.records):
            told = " + ".join(f"{np.mean([p[way] for p in passes]):.3g}" for way in ("forward", "backward"))
            total = f"{np.mean([r.spent('passes')[-1] for r in s.records]):,.0f}"
        seconds = [r.seconds_per_round for r in s.records]
        rounds = f"{np.mean([r.rounds for r in s.records]):.10g}"  # seeds may have stopped after other rounds
        all_seconds = np.mean([r.spent("seconds")[-1] for r in s.records])
        all_bytes = bytes_text(np.mean([r.spent("bytes")[-1] for r in s.records]))
        cells = [bytes_text(down), bytes_text(up), told, f"{np.mean(seconds):.3g}"]
        table.append([s.label, *cells, rounds, all_bytes, total, f"{all_seconds:.3g}"])
    head = ["algorithm", "down", "up", "passes", "s a round", "rounds", "all bytes", "all passes", "all seconds"]
    caption = (
        "Per client and round: bytes down and up; passes of the client's examples through the backbone, forward + "
        "backward. Seconds: median of the rounds, without evaluation, on the machine that ran them. All: added up over "
        "clients and rounds; all seconds: the median times the rounds. Means over the seeds."
    )
    return [Table(caption, head, table)]


def matrices(pictures: Pictures, rows: list[RunGroup]) -> list:
    """Heat maps of how much clients take from each other: the first seed of each algorithm with such weights."""
    blocks = []
    for s in rows:
        record = s.records[0]
        for name, matrix in record.matrices().items():
            caption = (
                f"Row i: how much client i takes from each client j; clients in the order of their ids, their own "
                f"weights left out. After round {record.matrix_rounds[-1]}, seed {record.config.seed}."
            )
            how = {"label": f"{name} of j for i", "names": record.client_names}
            blocks.append(pictures.draw(f"{s.label}: {name}", caption, plots.heatmap, matrix, **how))
    return blocks


def runs(rows: list[RunGroup]) -> list:
    """Versions, run ids and configurations, and the commands that make the runs again."""
    records = [r for s in rows for r in s.records]
    packages = dict.fromkeys(name for r in records for name in r.config.versions)
    found = [[name, ", ".join(dict.fromkeys(str(r.config.versions.get(name)) for r in records))] for name in packages]
    blocks: list[Any] = [Table("Versions that the runs were started with.", ["package", "version"], found)]
    for s in rows:
        ids = [
            [str(r.folder), r.config.seed, r.config.data_seed, r.rounds, r.config.run_id, r.config.federation_hash]
            for r in s.records
        ]
        head = ["folder", "seed", "seed of the data", "rounds", "run id", "federation"]
        where = Table(f"Runs of {s.label}: where they are, and what decides every number of them.", head, ids)
        what = Table(f"Configuration of {s.label}, the same for all its seeds.", ["entry", "value"],
                     _entries([r.config for r in s.records]))  # fmt: skip
        blocks.append(Folded(f"{s.label}: runs and configuration", [where, what]))
    blocks.append(Note("The commands that make these runs again:"))
    blocks.append(Commands([command(r.config, r.folder) for r in records]))
    return blocks


def _entries(configs) -> list:
    """The entries of the configuration that all seeds have in common, hyperparameters first."""
    found = [[f"hyperparameter {name}", _shown(value)] for name, value in configs[0].hyperparameters.items()]
    for name in vars(configs[0]):
        if name not in _TOLD_BY_RUN:  # such as the engine, some entries may differ between the seeds
            values = dict.fromkeys(_shown(getattr(config, name)) for config in configs)
            found.append([name.replace("_", " "), " or ".join(values)])
    return found


def _shown(value) -> str:
    shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
    return "-" if shown in (None, "") else str(shown)
