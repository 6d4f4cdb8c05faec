"""Runs that differ in their seed alone, together: a line of a picture, a row of a table; and numbers of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.runs import protocols, statistics
from tfpfl.runs.protocols import EV_ALL, Protocol
from tfpfl.studies.records import Record


class RunGroup(NamedTuple):
    """Runs that differ in their seed alone.

    Attributes:
        label: the algorithm's title, with what tells it from others where that is needed.
        records: of the seeds.
        variant: which of the settings of this algorithm, from 0.
    """

    label: str
    records: list[Record]
    variant: int = 0

    @property
    def algorithm(self) -> str:
        """Its name in `ALGORITHMS`."""
        return self.records[0].config.algorithm

    def shares(self, other: "RunGroup") -> bool:
        """Whether some run is in both."""
        return not {r.config.run_id for r in self.records}.isdisjoint(r.config.run_id for r in other.records)


def group_runs(records: Sequence[Record]) -> list[RunGroup]:
    """The runs, those that differ in their seed alone together, in the order in which they come first.

    Raises:
        ValueError: no runs, or one of them twice.
    """
    if not records:
        raise InvalidArgument("there is nothing to compare: no runs were given")
    place: dict[Any, int] = {}
    for i, record in enumerate(records):
        other = records[place.setdefault(record.config.run_id, i)]
        if other is not record:
            raise InvalidArgument(
                f"{other.folder} and {record.folder} are the same run: algorithm, configuration, data and seed"
            )
    variants: Counter[str] = Counter()
    found, kinds = [], by_data(records)
    for told, on_it in kinds.items():
        for name, together in by_setting(on_it).items():
            algorithm = together[0].config.algorithm
            label = f"{name}, {told}" if len(kinds) > 1 else name
            found.append(RunGroup(label, together, variants[algorithm]))
            variants[algorithm] += 1
    return sorted(found, key=lambda s: place[s.records[0].config.run_id])


def by_data(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Runs by what their data are. Those that made them alike, each with the split of its seed, belong together."""
    found: dict[tuple, list[Record]] = {}
    for record in records:
        c = record.config
        arguments = ", ".join(f"{name}={value}" for name, value in c.partition_args.items())
        told = f"{c.dataset} {c.partition}({arguments}), {c.clients} clients"
        found.setdefault((told, str(c.source), c.validation, c.new_clients), []).append(record)
    same_words = Counter(told for told, *_ in found)
    named: dict[str, list[Record]] = {}
    for (told, *_), alike in found.items():
        splits = {(r.config.seed, r.config.federation_hash) for r in alike}
        clear = same_words[told] == 1 and len(splits) == len({seed for seed, _ in splits})
        for record in alike:
            name = told if clear else f"{told}, federation {record.config.federation_hash[:8]}"
            named.setdefault(name, []).append(record)
    return named


def clients(record: Record, protocol: Protocol = EV_ALL) -> np.ndarray:
    """[n], in [0, 1]: the accuracies of the clients that have examples, in the order of their ids."""
    values = np.array(list(protocols.per_client(record.evaluations, protocol).values()), np.float64)
    return values[~np.isnan(values)]


def measured(records: Sequence[Record], of: Callable, protocol: Protocol = EV_ALL) -> tuple[float, float]:
    """A number over clients, of runs that differ in their seed alone.

    Args:
        of: [n] accuracies of a run's clients -> a number.

    Returns:
        The mean over the runs and half the 95 % interval, NaN for a single run.
    """
    return statistics.over_seeds([of(clients(record, protocol)) for record in records])


def paired(
    records: Sequence[Record], baseline: Sequence[Record], protocol: Protocol = EV_ALL
) -> tuple[np.ndarray, np.ndarray]:
    """Clients of a federation in pairs: the accuracy that a client has, and the one that it has in the baseline.

    Several runs on one federation, of several seeds, count by their mean: a client is one pair. A client is another on
    another federation.

    Returns:
        two [n], by federation and client id; NaN where a client has no examples, or is in one of the two alone.

    Raises:
        ValueError: no federation is in both: then client 3 of one is not client 3 of the other.
    """
    sides = [_by_client(runs, protocol) for runs in (records, baseline)]
    hashes = [{r.config.federation_hash for r in runs} for runs in (records, baseline)]
    both = hashes[0] & hashes[1]
    if not both:
        mine, other = (", ".join(sorted(h[:12] for h in found)) for found in hashes)
        raise InvalidArgument(
            f"{records[0].title} and {baseline[0].title} cannot be compared client by client: their federations are "
            f"{mine} and {other}"
        )
    keys = sorted(key for key in {*sides[0], *sides[1]} if key[0] in both)
    mine, theirs = (np.array([side.get(key, np.nan) for key in keys], np.float64) for side in sides)
    return mine, theirs


def _by_client(records, protocol) -> dict:
    """{(federation, client id): the mean accuracy over the runs}."""
    found: dict[tuple, list[float]] = {}
    for record in records:
        for client, accuracy in protocols.per_client(record.evaluations, protocol).items():
            found.setdefault((record.config.federation_hash, client), []).append(accuracy)
    return {key: statistics.mean_over_clients(values) for key, values in found.items()}


DATA_ENTRIES = ("dataset", "source", "partition", "partition_args", "clients", "validation", "new_clients")


def check_comparable(records: Sequence[Record]) -> None:
    """Whether numbers of these runs may stand side by side: data made alike, and the same split for the same seed.

    Raises:
        ValueError: says which runs differ in what.
    """
    for r in records:
        for what in DATA_ENTRIES:
            mine, first = getattr(r.config, what), getattr(records[0].config, what)
            if mine != first:
                raise InvalidArgument(
                    f"{records[0].folder} and {r.folder} cannot be compared: {what} is {first!r} and {mine!r}"
                )
        same_seed = next(other for other in records if other.config.seed == r.config.seed)
        if same_seed.config.federation_hash != r.config.federation_hash:
            hashes = (x.config.federation_hash[:12] for x in (same_seed, r))
            raise InvalidArgument(
                f"{same_seed.folder} and {r.folder} cannot be compared: their federations are {' and '.join(hashes)}"
            )


def by_setting(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records that differ in nothing but seed, rounds and folder, in order of appearance, by a name for each setting.

    The name is the algorithm's title, with the hyperparameters that tell settings of one algorithm apart.
    """
    groups: dict[Any, Any] = {}
    for record in records:
        c = record.config
        hyper = tuple(sorted(c.hyperparameters.items()))
        setting = (c.algorithm, hyper, c.network, c.head_init, c.labels, c.participation, c.sampling, c.sampling_range)
        groups.setdefault(setting, []).append(record)
    named = {}
    for setting, members in groups.items():
        name = members[0].title
        others = [s for s in groups if s[0] == setting[0] and s != setting]
        if others:
            mine, theirs = dict(setting[1]), [dict(s[1]) for s in others]
            differ = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in mine.items()
                      if any(t.get(k) != v for t in theirs)]  # fmt: skip
            rest = ("network", "head_init", "labels", "participation", "sampling", "sampling_range")
            for i, what in enumerate(rest, 2):
                if any(s[i] != setting[i] for s in others):
                    differ.append(f"{what}={setting[i]}")
            name += f" ({', '.join(differ)})"
        named[name] = members
    return named
