"""Results as tables for the terminal (rich): runs, protocols, comparisons, searches and new clients."""

import math
from collections.abc import Sequence

from tfpfl.algorithms import get_method
from tfpfl.data.kinds import ACCURACY
from tfpfl.runs import statistics
from tfpfl.runs.metrics import in_unit, is_fraction, score_of, shown_score, times, unit_of, word
from tfpfl.runs.metrics import shown as shown_metric
from tfpfl.runs.participation import SIDES_TOLD
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL, EV_SEEN, EV_UNSEEN, find, metrics_of
from tfpfl.studies.advice import Advice
from tfpfl.studies.comparison import INTERVALS, shown
from tfpfl.studies.fitted_table import FittedTable, text
from tfpfl.studies.new_clients import Adapted, check_one_score
from tfpfl.studies.run_groups import SIDE_WORDS


def bytes_text(amount: float) -> str:
    """A number of bytes as text, such as '1.23 MB' for 1234567; units are powers of 1000."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if float(f"{amount:.3g}") < 1000:  # as it is shown: 999,999 bytes are 1 MB
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.3g} {unit}"


def comparison(runs: list[tuple[dict, list]], title: str) -> FittedTable:
    """A table of runs, as `tfpfl demo` prints it: one row each.

    Where some clients had never taken part, two more rows follow, of those that had and of the others.

    Args:
        runs: (content of summary.json, results) of each run.
        title: the text above the table.
    """
    told = _told([(s.get("clients_seen"), s.get("clients_never_seen")) for s, _ in runs], [r for _, r in runs])
    named = next((r.named for _, results in runs for r in results), ACCURACY)
    table = FittedTable(title=text(title), caption=f"{CAPTION.format(in_unit(named))} {told}")
    table.add_columns("algorithm")
    table.add_columns("EV-all", WORST, "EV-local", "bytes", "passes", "s/round", justify="right")
    for summary, results in runs:
        row = get_method(summary["algorithm"])
        after, local = find(results, EV_ALL), find(results, EV_LOCAL)
        sent = (summary["bytes_down"] + summary["bytes_up"]) / max(summary["client_visits"], 1)
        seconds = summary["seconds_per_round_median"]
        table.add_row(
            row.title,
            *_score_and_worst(after),
            shown_score(local.named, local.score, local.score_ci95) if local else "-",
            bytes_text(sent),
            " + ".join(f"{n:.3g}" for n in summary["passes"].values()),
            f"{seconds:.3f}" if seconds is not None else "-",
        )
        for wanted, name, what in ((EV_SEEN, "clients_seen", "seen"), (EV_UNSEEN, "clients_never_seen", "never seen")):
            if result := find(results, wanted):
                table.add_row(f"  {summary[name]} {what}", *_score_and_worst(result))
    return table


WORST = "worst 10 %"  # the name of `Result.worst_decile` in all tables


def _score_and_worst(result) -> tuple[str, str]:
    if not result:
        return "-", "-"
    named = result.named
    return shown_score(named, result.score, result.score_ci95), shown_score(named, result.worst_decile)


def _told(counts: list[tuple], results: list[list]) -> str:
    """A sentence: how many clients had taken part after the last round of runs.

    Args:
        counts: (number of clients that had taken part, number of the others) of each run; None if unknown.
        results: the results of each run.
    """
    if any(seen is None for seen, _ in counts):
        return "It is not known which clients had taken part."
    if not any(r.clients == "unseen" for found in results for r in found):
        return "All clients had taken part." if not any(never for _, never in counts) else ""
    return SIDES_TOLD


CAPTION = (
    "Test {}, mean over clients ± half of Student's 95 % interval over clients, mean of the last ten rounds. EV-all: "
    "all clients, the model that a client predicts with after the server's step; worst 10 %: its mean over the worst "
    "tenth of them. EV-local: the round's clients, the model that each holds right after its local work (the PFLEGO "
    "paper's protocol). bytes: down and up; passes: of its examples through the backbone, forward + backward; both per "
    "client and round."
)


def protocols(results: list, title: str, counts: tuple[int, int] | None = None) -> FittedTable:
    """A table of all results of one run, each with the protocol that it was measured by; 80 columns wide.

    Args:
        results: from `Run.results`.
        title: the text above the table.
        counts: (number of clients that had taken part, number of the others) after the last round; None: unknown.
    """
    told = _told([counts or (None, None)], [results])
    if counts and counts[1]:
        told = f"After the last round {counts[0]} clients had taken part, and {counts[1]} never. {told}"
    named = results[0].named if results else ACCURACY
    caption = f"{word(named)}: {'% ' if named.is_fraction else ''}{_PROTOCOLS_CAPTION.format(word(named))} {told}"
    table = FittedTable(title=text(title), caption=caption, names=4, padding=0)
    table.add_columns("model", "clients", "when", "split")
    table.add_columns(word(named), "pooled", WORST.replace(" ", "\n", 1), "loss", "n", justify="right")
    pooled = {(r.model, r.clients, r.when, r.split): r.score for r in results if r.mean == "examples"}
    for r in results:
        if r.mean == "clients" and r.num_clients:  # no client has examples of a split that was not made
            examples = shown_score(named, pooled.get((r.model, r.clients, r.when, r.split), math.nan))
            cells = (
                shown_score(named, r.score, r.score_ci95),
                examples,
                shown_score(named, r.worst_decile),
                f"{r.loss:.4f}" if r.loss < 1e4 else f"{r.loss:.1e}",
                str(r.num_clients),
            )
            table.add_row(*_measured_how(r), *cells)
    return table


def _measured_how(r) -> tuple[str, str, str, str]:
    """(model, clients, when, split) of a result, as tables name them."""
    when, split = (name.replace("validation", "val.").replace("_", " ") for name in (r.when, r.split))
    when += " *" if r.protocol.selects_on_test else ""
    return r.model, r.clients.replace("unseen", "never seen"), when, split


_PROTOCOLS_CAPTION = (
    "over clients ± half of Student's 95 % interval over clients; pooled: over examples; worst 10 %: mean of the worst "
    "tenth of the clients; n: clients with examples, in the last of the rounds. local copy: right after a client's own "
    "work. last10: mean of the last ten evaluated rounds; best val.: the round with the best mean validation {}. "
    "* selected on test, as several papers do: it says nothing about new data."
)


def metrics(results: list, title: str) -> FittedTable | None:
    """A table of the metrics that a run measured besides score and loss; None if there are none."""
    names = metrics_of(results)
    if not names:
        return None
    table = FittedTable(title=text(title), caption=_METRICS_CAPTION, names=4)
    table.add_columns("model", "clients", "when", "split")
    table.add_columns(*map(_heading, names), justify="right")
    for r in results:
        if r.mean == "clients":
            cells = [shown_metric(name, r.metrics.get(name, math.nan)) for name in names]
            table.add_row(*_measured_how(r), *cells)
    return table


def metrics_of_algorithms(rows: list[dict], names: list[str]) -> FittedTable:
    """A table of the metrics of these names, for the rows of a comparison."""
    table = FittedTable(caption=f"{_METRICS_CAPTION} ±: over seeds, or clients where there is one.")
    table.add_columns("algorithm")
    table.add_columns(*map(_heading, names), justify="right")
    for row in rows:
        cells = []
        for name in names:
            half = row.get(f"{name} ±", math.nan)
            told = shown(name, row[name]) + (f" ± {shown(name, half)}" if math.isfinite(half) else "")
            unit = "" if is_fraction(name) else unit_of(name)
            cells.append(f"{told} {text(unit)}".rstrip())
        table.add_row(text(row["algorithm"]), *cells)
    return table


def _heading(name: str) -> str:
    return f"{name}, %" if is_fraction(name) else name


_METRICS_CAPTION = "Means over clients; a client for which a metric is not defined is left out."


def comparison_over_clients(
    rows: list[dict], protocol, notes: Sequence[str] = (), *, pairs: str = "seen"
) -> FittedTable:
    """A comparison of algorithms for the terminal.

    Where some clients had never taken part, the row of an algorithm is followed by one of those that had, with the
    gain and the test, and one of the others.

    Args:
        rows: from `tfpfl.studies.comparison.rows`; `tfpfl.studies.comparison.text` writes all of their columns.
        protocol: how the scores were measured.
        notes: more sentences for below the table, from `tfpfl.studies.comparison.notes`.
        pairs: as it was given to `tfpfl.studies.comparison.rows`; with 'all', gain and test stand in the first row.
    """
    gain = next((name for name in rows[0] if name.startswith("gain over")), None)
    p = next((name for name in rows[0] if name.startswith("p (")), None)
    than = f" gain: individual {gain.removeprefix('gain ')}, p: Wilcoxon's, one-sided, of these pairs." if gain else ""
    score = score_of(rows[0])
    head = f"{word(score)}{', %' if score.is_fraction else ''}"
    caption = f"{head}: {protocol}.{than} {INTERVALS} bytes, passes: a visit."
    table = FittedTable(caption=text(" ".join([caption, *notes])))
    names = {score.name: word(score), "EV-local": "EV-local", WORST: WORST, gain: "gain", p: "p", "pairs": "pairs"}
    names |= {"bytes a visit": "bytes", "passes": "passes", "s a round": "s/round"}
    shown_names = {name: title for name, title in names.items() if name in rows[0]}
    table.add_columns("algorithm")
    table.add_columns(*shown_names.values(), justify="right")
    tested = (gain, p, "pairs")

    def cell(row, name):
        half = row.get(f"{name} ±", math.nan)
        told = bytes_text(row[name]) if name == "bytes a visit" else shown(name, row[name], score)
        return told + (f" ± {half:.2f}" if score.is_fraction else f" ± {half:.2g}") if math.isfinite(half) else told

    for row in rows:
        mixed = "seen" in row and row["never seen"] == row["never seen"]
        cells = {name: cell(row, name) for name in shown_names}
        later = {name: cells.pop(name) for name in tested if name in cells} if mixed and pairs == "seen" else {}
        table.add_row(text(row["algorithm"]), *(cells.get(name, "") for name in shown_names))
        for side in ("seen", "never seen") if mixed else ():
            there = {score.name: cell(row, side)} | (later if side == "seen" else {})
            name = f"  {shown(f'clients {side}', row[f'clients {side}'])} {side}"
            table.add_row(name, *(there.get(name, "") for name in shown_names))
    return table


def rungs(found: list, config) -> FittedTable:
    """A table of what `tfpfl.studies.search.search_hyperparameters` found, the last stage on top."""
    named = found[0][0].named
    title = f"{text(config.title)}: validation {word(named)}, EV-all, mean of the last ten evaluated rounds"
    scored = [c for rung in found for c in rung if c.score == c.score]
    mixed = any(c.never_seen == c.never_seen for c in scored)
    if mixed:
        told = f"In brackets: how many clients there were in the last round. {SIDES_TOLD}"
    else:
        told = _told([c.counts or (None, None) for c in scored], []) if scored else ""
    table = FittedTable(title=title, title_justify="left", caption=told, names=0)
    names = list(found[0][0].hyperparameters)
    head = f"{word(named)}, %" if named.is_fraction else word(named)
    table.add_columns("rounds", *names, head, *(SIDE_WORDS if mixed else ()), justify="right")
    for rung in reversed(found):
        for candidate in rung:
            values = (text(candidate.hyperparameters[name]) for name in names)
            diverged = not math.isfinite(candidate.score)
            score = "diverged" if diverged else shown_score(named, candidate.score)
            numbers = candidate.counts or ("-", "-")
            sides = zip((candidate.seen, candidate.never_seen), numbers, strict=True)
            cells = ["" if diverged else f"{shown_score(named, side)} ({n})" for side, n in sides] if mixed else []
            table.add_row(str(candidate.rounds), *values, score, *cells)
        table.add_section()
    return table


EPOCHS_SHOWN = (0, 1, 5)  # columns of the table of new clients, besides the last epoch


def new_clients(results: Sequence[Adapted]) -> FittedTable:
    """A table of the mean score of new clients after some epochs, one row for each run."""
    last, named = max(r.score.shape[1] - 1 for r in results), check_one_score(results)
    epochs = [e for e in EPOCHS_SHOWN if e < last] + [last]
    title = f"New clients, {results[0].split} {word(named)} after so many epochs, protocol '{results[0].protocol}'"
    caption = "mean over new clients ± half of Student's 95 % interval over them; n: those with examples in this split."
    caption = f"%, {caption}" if named.is_fraction else caption.capitalize()
    people = {(tuple(r.client_ids.tolist()), tuple(r.num_examples.tolist())) for r in results}
    if len(people) > 1:
        caption += " Rows are over different clients: the runs have other splits of the data, or keep others out."
    rows = FittedTable(title=title, caption=caption)
    rows.add_columns("run")
    rows.add_columns("n", *map(str, epochs), justify="right")
    for r in results:
        cells = [shown_score(named, r.means[e], r.intervals[e]) if e < len(r.means) else "-" for e in epochs]
        rows.add_row(text(r.name), str(statistics.num_tested(r.score[:, 0])), *cells)
    return rows


def advice(found: Advice, title: str) -> FittedTable:
    """A table of what `tfpfl.studies.advice` found: one row for each client, those with the largest gain first."""
    named, factor = found.named, times(found.named)
    caption = (
        f"{in_unit(named, title=True)} and mean loss on {found.split} examples, with the client's own head and with "
        "one head for all. Gain: how much better the own head is. p: paired test of its examples' losses; adjusted for "
        "the number of clients (Benjamini and Hochberg). Better: where the test tells them apart at 5 %."
    )
    if found.left_out:
        caption += f" Left out, without a head of their own or without such examples: {found.left_out} clients."
    table = FittedTable(title=text(title), caption=caption)
    table.add_columns("client")
    table.add_columns("n", f"own {word(named)}", "shared", "gain", "loss gain", "p", "better", justify="right")
    for c in sorted(found.clients, key=lambda c: -c.loss_gain):
        gain = f"{factor * c.gain:+.2f}" if named.is_fraction else f"{c.gain:+.3g}"
        scores = (shown_score(named, c.own_score), shown_score(named, c.shared_score))
        p = "-" if math.isnan(c.adjusted) else f"{c.adjusted:.2g}"
        table.add_row(text(c.name), str(c.examples), *scores, gain, f"{c.loss_gain:+.3g}", p, c.better)
    return table
