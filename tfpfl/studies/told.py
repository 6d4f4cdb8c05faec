"""Sentences that a reader of a comparison needs: who had taken part, what differs, which means are not alike."""

from collections.abc import Sequence

from tfpfl.runs import participation, protocols
from tfpfl.runs.protocols import EV_ALL, Protocol
from tfpfl.studies.records import Record
from tfpfl.studies.run_groups import group_runs, is_mixed, methods_of, settings_of, span


def told_seen(records: Sequence[Record], protocol: Protocol = EV_ALL) -> str:
    """A sentence: how many clients had taken part in the last round of a protocol; '' if it has no such clients."""
    if protocol.clients not in ("all", *protocols.SIDES):
        return ""
    scored = [r for r in records if protocols.rows_of(r.evaluations, protocol._replace(clients="all"))]
    counted = [r.seen_counts(protocol) for r in scored]
    known = [c for c in counted if c]
    if not scored:
        return ""
    if len(known) < len(scored):
        runs = "of these runs" if not known else f"of {len(scored) - len(known)} of these runs"
        return f"It is not known which clients {runs} had taken part."
    if not any(never for _, never in known) and not any(is_mixed(r, protocol) for r in scored):
        last = max(max((r.took_part or {}).values(), default=0) for r in scored)
        return f"All clients had taken part by round {last}."
    seen, never = (span(side) for side in zip(*known, strict=True))
    when = "round that is shown" if protocol.when.startswith("best") else "last round"
    return f"In the {when} {seen} clients had taken part, and {never} never. {participation.SIDES_TOLD}"


def told_lengths(records: Sequence[Record], baselines: Sequence[str] = ()) -> str:
    """Sentences on means that do not compare: over seeds with different rounds, and beside a baseline of other seeds.

    Args:
        records: the runs.
        baselines: names of algorithms; the first of them among the runs is what gains and p are computed with.
    """
    found, told = group_runs(records), []
    for s in found:
        rounds: dict[int, list[str]] = {}
        for record in s.records:
            rounds.setdefault(record.rounds, []).append(str(record.config.seed))
        if len(rounds) > 1:
            which = "; ".join(f"{n} of seed {', '.join(seeds)}" for n, seeds in sorted(rounds.items(), reverse=True))
            told.append(
                f"The mean of {s.label} is over seeds with different rounds: {which}. Curves end where the first does."
            )
    first = next((s for name in baselines for s in found if s.algorithm == name), None)
    seeds_of = {s.label: sorted(record.config.seed for record in s.records) for s in found}
    if first is None:
        if len(set(map(tuple, seeds_of.values()))) > 1:
            which = "; ".join(f"{name} {', '.join(map(str, its))}" for name, its in seeds_of.items())
            told.append(f"Means are over different seeds: {which}.")
    else:
        own = seeds_of[first.label]
        for name, its in seeds_of.items():
            both = [str(seed) for seed in its if seed in own]
            if not both:
                shown = "; ".join(f"{who} {', '.join(map(str, seeds_of[who]))}" for who in (first.label, name))
                told.append(f"Gains and p compare means over different seeds: {shown}.")
            elif its != own:
                seeds = f"seed {both[0]}" if len(both) == 1 else f"seeds {', '.join(both)}"
                told.append(f"Gains and p of {name} are over {seeds}, which {first.label} has too.")
    return " ".join(told)


def told_ends(records: Sequence[Record]) -> list[str]:
    """Sentences on runs that ended before their last round, or did not evaluate the last ones before they ended.

    They say why, and of which rounds the means are. A run that was begun for more rounds has not evaluated them.
    """
    told = []
    for r in records:
        scored = sorted(protocols.rows_of(r.evaluations, EV_ALL, named=r.score))[-protocols.LAST_ROUNDS :]
        sparse = bool(scored) and scored[-1] - scored[0] >= protocols.LAST_ROUNDS
        if stopped := r.summary.get("stopped"):
            ended = f"stopped after round {r.rounds}: {stopped}."
        elif r.rounds < r.config.rounds:
            ended = f"has {r.rounds} of its {r.config.rounds} rounds."
        elif sparse:
            ended = f"has {r.rounds} rounds, and not all of the last ones were evaluated."
        else:
            continue
        if sparse:
            ended += f" Its mean is of rounds {scored[0]} to {scored[-1]}."
        told.append(f"{r.title}, seed {r.config.seed}, {ended}")
    return told


def told_stops(records: Sequence[Record], titles: Sequence[str]) -> str:
    """`told_ends` in short, as a sentence for the caption of a large table; '' if all runs ended as they were to.

    Args:
        records: the runs.
        titles: of each run's method.
    """
    rounds: dict[str, list[int]] = {}
    for record, title in zip(records, titles, strict=True):
        if told_ends([record]):
            rounds.setdefault(title, []).append(record.rounds)
    if not rounds:
        return ""
    found = _listed([f"{title} after {span(numbers)} rounds" for title, numbers in rounds.items()])
    return f"Runs ended early, and their means are of the last rounds that were evaluated by then: {found}."


def told_unscored(records: Sequence[Record], protocol: Protocol) -> str:
    """A sentence: why no record, or that of some methods, has a score of this protocol; '' if nothing is missing."""
    chosen_by = ("validation",) if protocol.when == "best_validation" else ()
    for split in (protocol.split, *chosen_by):
        found = [result.num_clients for record in records for result in record.results if result.split == split]
        if not any(found):
            told = f"No client has {split} examples" if found else f"Nothing was scored on {split} examples"
            return f"{told}." if split == protocol.split else f"{told}, by which this protocol chooses its round."
    if protocol.model in (protocols.PREDICTS, protocols.LOCAL_COPY):
        return ""
    without = [r.title for r in records if all(result.model != protocol.model for result in r.results)]
    names = _listed([*dict.fromkeys(without)])
    return f"By this protocol, {names} have no score: they have no {protocol.model} model." if without else ""


def told_splits(records: Sequence[Record]) -> str:
    """A sentence: whether the seeds have one split of the data; '' if there is one seed."""
    if len({r.config.seed for r in records}) < 2:
        return ""
    splits = {r.config.federation_hash: r.config.data_seed for r in records}
    if len(splits) == 1:
        return f"All seeds have one split of the data, that of data seed {next(iter(splits.values()))}."
    seeds = sorted({seed for seed in splits.values() if seed is not None})
    return (
        f"The runs have {len(splits)} splits of the data, with the data seeds {', '.join(map(str, seeds))}: intervals "
        "over seeds are also over splits."
    )


_NO_CONDITIONS = ("metrics", "monitor", "labels")  # what is measured beside; and `told_classes` tells of the labels


def told_conditions(records: Sequence[Record], titles: Sequence[str] = ()) -> str:
    """What differs between methods besides themselves, as a sentence, or ''. `titles`: of each run's method."""
    found, methods = [], titles or methods_of(records)
    conditions = [_conditions(record) for record in records]
    for name in conditions[0] if conditions else ():
        of_methods: dict[str, set] = {}
        values: dict[str, list[str]] = {}
        for each, title in zip(conditions, methods, strict=True):
            value = each[name]
            of_methods.setdefault(title, set()).add(value)
            if title not in values.setdefault(value, []):
                values[value].append(title)
        if any(each != next(iter(of_methods.values())) for each in of_methods.values()):
            found.append(f"{name} {', '.join(f'{value} ({_listed(names)})' for value, names in values.items())}")
    return f"The methods were run under different conditions: {'; '.join(found)}." if found else ""


def _conditions(record: Record) -> dict[str, str]:
    """What is the same for all methods of a fair comparison; `by_setting` names what differs within one method."""
    found = {"rounds": record.rounds} | settings_of(record.config)
    if isinstance(found["network"], tuple):
        name, sha256 = found["network"]
        found["network"] = f"{name} {sha256[:8]}"
    return {name: str(value) for name, value in found.items() if name not in _NO_CONDITIONS}


def told_classes(records: Sequence[Record], titles: Sequence[str] = ()) -> str:
    """Sentences if methods choose among different classes, or share a head whose outputs differ; '' otherwise.

    Args:
        records: the runs.
        titles: of each run's method; by default those of tables.
    """
    by_labels: dict[str | None, list[str]] = {}
    mixed: list[str] = []
    for record, title in zip(records, titles or methods_of(records), strict=True):
        labels = record.config.labels if record.classes_differ else None
        found = by_labels.setdefault(labels, [])
        if title not in found:
            found.append(title)
        if labels == "local" and record.shares_head and title not in mixed:
            mixed.append(title)
    told = ""
    if mixed:
        told = (
            f"Labels are local for {_listed(mixed)}, which share one head: each of its outputs stands for another "
            "class with each client."
        )
    own, every = by_labels.get("local", []), by_labels.get("global", [])
    if not own or not every or set(own) == set(every):
        return told
    different = (
        f"Labels are local for {_listed(own)}, whose heads choose among the client's own classes, and global for "
        f"{_listed(every)}, whose heads choose among all. The second is harder: a part of the difference may be this."
    )
    return f"{told} {different}".strip()


def _listed(titles: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(titles[:-1]), titles[-1])))
