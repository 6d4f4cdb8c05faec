"""Groups of runs that differ only in their seeds: each is one row of a table or one line of a plot.

`group_runs` makes the groups and `check_comparable` refuses runs on different data. `clients`, `measured` and `paired`
compute numbers over clients and seeds.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument, check_type, unknown
from tfpfl.data import PARTITIONERS
from tfpfl.data.kinds import CLASSIFICATION, ScoreName
from tfpfl.models.modules_beside import sha256_of, with_beside
from tfpfl.runs import protocols, statistics
from tfpfl.runs.config import RunConfig
from tfpfl.runs.metrics import in_unit
from tfpfl.runs.protocols import EV_ALL, Protocol
from tfpfl.studies.records import Record, common_federations


class RunGroup(NamedTuple):
    """Runs that differ only in their seed.

    Attributes:
        label: the algorithm's title; if there are several settings of it, also what differs.
        records: the runs, one for each seed.
        variant: number of this setting among those of the same algorithm, from 0; all methods of the user's own are
            counted together.
    """

    label: str
    records: list[Record]
    variant: int = 0

    @property
    def algorithm(self) -> str:
        """The algorithm's name, such as fedavg, or fedala.py:fedala for a method of the user's own."""
        return self.records[0].config.algorithm

    @property
    def score(self) -> ScoreName:
        """The name, unit and direction of the runs' score."""
        return self.records[0].score

    @property
    def is_own(self) -> bool:
        """Whether the algorithm is a method of the user's own, which is not in `ALGORITHMS`."""
        return self.records[0].config.own_method is not None

    def shares(self, other: "RunGroup") -> bool:
        """Whether the two groups have a run in common."""
        return not {r.config.run_id for r in self.records}.isdisjoint(r.config.run_id for r in other.records)


def group_runs(records: Sequence[Record]) -> list[RunGroup]:
    """Puts the runs together that differ only in their seeds, see `by_setting`, in the order of their first runs.

    Raises:
        InvalidArgument: no runs, or one of them twice.
    """
    check_records(records)
    if not records:
        raise InvalidArgument("there is nothing to compare: no runs were given")
    check_one_kind(records)
    place = check_different(records)
    variants: Counter[str] = Counter()
    found, kinds = [], by_data(records)
    for told, on_it in kinds.items():
        for name, together in by_setting(on_it).items():
            config = together[0].config
            algorithm = config.algorithm if config.own_method is None else ""
            label = f"{name}, {told}" if len(kinds) > 1 else name
            found.append(RunGroup(label, together, variants[algorithm]))
            variants[algorithm] += 1
    return sorted(found, key=lambda s: place[s.records[0].config.run_id])


def check_records(records: Sequence[Record]) -> None:
    """Checks that records are given as a list.

    Raises:
        InvalidArgument: they are something else, such as one record.
    """
    what = "a list of records, such as [Record.read(folder)]"
    check_type("what is compared", records, Sequence, what)
    if wrong := [record for record in records if not hasattr(record, "config")]:
        raise InvalidArgument(f"what is compared must be {what}; found {wrong[0]!r} in it")


def check_one_kind(records: Sequence[Any]) -> None:
    """Refuses runs whose scores are different things, such as an accuracy and an RMSE.

    Args:
        records: records, or other objects with `folder` and `config`.

    Raises:
        InvalidArgument: two runs have labels of different kinds.
    """
    kinds = {(r.config.kind or CLASSIFICATION.text): r for r in reversed(records)}
    if len(kinds) > 1:
        (one, first), (other, second), *_ = reversed(kinds.items())
        raise InvalidArgument(
            f"{first.folder} and {second.folder} cannot be compared: their kinds are {one} and {other}, whose scores "
            f"are {in_unit(first.config.score)} and {in_unit(second.config.score)}. Make a table for each kind"
        )


def check_different(records: Sequence[Any]) -> dict[str, int]:
    """Refuses a run that is there twice; the result is {run id: place among the records}.

    Args:
        records: records, or other objects with `folder` and `config`.

    Raises:
        InvalidArgument: two are the same run.
    """
    place: dict[str, int] = {}
    for i, record in enumerate(records):
        if (first := place.setdefault(record.config.run_id, i)) != i:
            raise InvalidArgument(
                f"{records[first].folder} and {record.folder} are the same run: algorithm, configuration, data and "
                "seed. Give each run once"
            )
    return place


def by_data(records: Sequence[Record]) -> dict[str, list[Record]]:
    """{description of the data: runs on them}. Runs whose data differ only by the seed of the split stand together."""
    found: dict[tuple, list[Record]] = {}
    for record in records:
        c = record.config
        arguments = ", ".join(f"{name}={value}" for name, value in c.partition_args.items())
        told = f"{c.dataset} {c.partition}({arguments}), {c.clients} clients"
        found.setdefault((told, str(c.source), c.validation, c.new_clients), []).append(record)
    same_words = Counter(told for told, *_ in found)
    named: dict[str, list[Record]] = {}
    for (told, *_), alike in found.items():
        clear = same_words[told] == 1 and all(
            len({seed for seed, _ in pairs}) == len(pairs) for pairs in (_splits(alike, "seed"), _by_data_seed(alike))
        )
        for record in alike:
            name = told if clear else f"{told}, federation {record.config.federation_hash[:8]}"
            named.setdefault(name, []).append(record)
    return named


def _splits(records: Iterable[Any], seed: str) -> set[tuple]:
    """{(the seed of this name, hash of the federation)}"""
    return {(getattr(r.config, seed), r.config.federation_hash) for r in records}


def _by_data_seed(records: Iterable[Any]) -> set[tuple]:
    """The splits that tfpfl made from a data seed: of one seed there is one, as long as the data are the same."""
    return _splits((r for r in records if r.config.partition in PARTITIONERS), "data_seed")


def clients(record: Record, protocol: Protocol = EV_ALL) -> np.ndarray:
    """float [n]: the scores, such as accuracies in [0, 1], of the clients with examples, in the order of their ids."""
    values = np.array(list(_per_client(record, protocol).values()), np.float64)
    return values[~np.isnan(values)]


def _per_client(record: Record, protocol: Protocol) -> dict[int, float]:
    return protocols.per_client(record.evaluations, protocol, record.took_part, record.score)


def is_mixed(record: Record, protocol: Protocol = EV_ALL) -> bool:
    """Whether the protocol is over all clients, and some of them had never taken part in one of its rounds."""
    if protocol.clients != "all":
        return False
    return bool(record.rows_of(protocol._replace(clients="unseen")))


class Side(NamedTuple):
    """The clients of a group that stand in one row of a table or one line of a plot."""

    group: RunGroup
    protocol: Protocol  # over all of them, or over those that had taken part, or over the others
    words: str  # such as '65 seen' or '35 never seen'; '' for all

    @property
    def label(self) -> str:
        """The label of the group, with the words."""
        return f"{self.group.label}, {self.words}" if self.words else self.group.label


def sides(group: RunGroup, protocol: Protocol = EV_ALL) -> list[Side]:
    """The group as one `Side`; or as two, where some clients had never taken part: those that had, and the others."""
    if not any(is_mixed(r, protocol) for r in group.records):
        return [Side(group, protocol, "")]
    found = []
    for i, (which, word) in enumerate(zip(protocols.SIDES, SIDE_WORDS, strict=True)):
        numbers = [counted[i] for r in group.records if (counted := r.seen_counts(protocol))]
        found.append(Side(group, protocol._replace(clients=which), f"{span(numbers)} {word}"))
    return found


SIDE_WORDS = ("seen", "never seen")


def span(numbers: Sequence[int]) -> str:
    """'3', or '3 to 5' if the numbers differ."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def pairs_protocol(records: Sequence[Record], protocol: Protocol = EV_ALL, pairs: str = "seen") -> Protocol:
    """The protocol of paired tests: by default over the clients that had taken part, which are then those of both runs.

    Args:
        records: all runs that are compared.
        protocol: how the scores are measured.
        pairs: 'seen' or 'all'.

    Returns:
        The protocol itself if `pairs` is 'all', if it is not over all clients, or if it is not known of some run which
        clients had taken part.

    Raises:
        InvalidArgument: another word.
    """
    if pairs not in PAIRS:
        raise InvalidArgument(unknown("kind of pairs", pairs, PAIRS))
    if pairs == "all" or protocol.clients != "all" or any(r.took_part is None for r in records):
        return protocol
    return protocol._replace(clients="seen")


PAIRS = ("seen", "all")


def measured(records: Sequence[Record], of: Callable, protocol: Protocol = EV_ALL) -> tuple[float, float]:
    """A number over clients, such as the worst tenth's mean, averaged over runs that differ only in their seed.

    Args:
        records: the runs.
        of: function (float [n], scores of a run's clients) -> float.
        protocol: how the scores are measured.

    Returns:
        The mean over the runs, and half its 95 % interval: NaN for a single run. Both are NaN if the number is not
        defined for the scores of one of the runs, as Jain's index where a client diverged.
    """
    of_runs = [clients(record, protocol) for record in records]
    found = [of(scores) for scores in of_runs]
    if any(len(scores) and math.isnan(number) for scores, number in zip(of_runs, found, strict=True)):
        return math.nan, math.nan
    return statistics.over_seeds(found)


def paired(
    records: Sequence[Record], baseline: Sequence[Record], protocol: Protocol = EV_ALL
) -> tuple[np.ndarray, np.ndarray]:
    """The score of each client, and the score of the same client in the baseline.

    A client's score is its mean over all runs on the same federation; of those whose seeds both sides have, over the
    seeds that have a score of it on both sides, if there are such seeds. Clients of different federations are different
    clients, whatever their ids. With a protocol over the 'seen' clients, pairs are the clients that had taken part on
    both sides.

    Returns:
        Two float [n], in the order of federation and client id; NaN if a client has no examples, or is only in one of
        the two sides.

    Raises:
        InvalidArgument: the two sides have no federation in common, so that no client is in both.
    """
    sides = [_by_client(runs, protocol) for runs in (records, baseline)]
    both = common_federations(records, baseline)
    seeds = [{(r.config.federation_hash, r.config.seed) for r in runs} for runs in (records, baseline)]
    with_shared = {of_hash for of_hash, _ in seeds[0] & seeds[1]}
    pairs = []
    for key in sorted(key for key in {*sides[0], *sides[1]} if key[0] in both):
        mine, theirs = (side.get(key, {}) for side in sides)
        if mine and theirs and key[0] in with_shared:
            # Over other seeds of one client, it would be told who took part when.
            same = [seed for seed in mine if seed in theirs]
            mine, theirs = ({seed: side[seed] for seed in same} for side in (mine, theirs))
        pairs.append([statistics.mean_over_clients([*side.values()]) if side else np.nan for side in (mine, theirs)])
    return tuple(np.array(pairs, np.float64).reshape(-1, 2).T)


def _by_client(records, protocol) -> dict:
    """{(hash of the federation, client id): {seed: mean score over the runs with this seed}}."""
    found: dict[tuple, dict] = {}
    for record in records:
        for client, score in _per_client(record, protocol).items():
            its = found.setdefault((record.config.federation_hash, client), {})
            its.setdefault(record.config.seed, []).append(score)
    return {
        key: {seed: statistics.mean_over_clients(values) for seed, values in its.items()} for key, its in found.items()
    }


DATA_ENTRIES = ("dataset", "source", "partition", "partition_args", "clients", "validation", "new_clients")


def check_comparable(records: Sequence[Any]) -> None:
    """Refuses runs that must not be compared: their data, or the split of the same seed, differ.

    Args:
        records: records, or other objects with `folder` and `config`.

    Raises:
        InvalidArgument: two runs differ in their kind or in one of `DATA_ENTRIES`, or have the same seed, or a split by
            the same data seed, and different federations. The message names both and the difference.
    """
    check_one_kind(records)
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
        same_split = next(other for other in records if other.config.data_seed == r.config.data_seed)
        if len(_by_data_seed([same_split, r])) > 1:
            hashes = (x.config.federation_hash[:12] for x in (same_split, r))
            raise InvalidArgument(
                f"{same_split.folder} and {r.folder} cannot be compared: their federations, {' and '.join(hashes)}, "
                f"were split by the same data seed, {r.config.data_seed}. So the data themselves were others, such as "
                "two files of one name"
            )


def by_setting(records: Iterable[Record]) -> dict[str, list[Record]]:
    """{name of a setting: its runs}. A setting is all that decides a run's numbers but the seeds and the data.

    Engines and groupings give the same numbers up to rounding. They are told apart only where runs of one setting would
    have the same seed twice.

    The name is the algorithm's title; if there are several settings of it, with what differs. Entries of the
    configuration that are off, such as dropout=0, are not named. If another algorithm has the same title, a method of
    the user's own is also called by its file or module.
    """
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(_setting(record.config), []).append(record)
    for what in _TOLD_APART:
        groups = _without_seeds_twice(groups, what)
    titles = _titles({setting[0]: members[0].title for setting, members in groups.items()})
    named = {}
    for setting, members in groups.items():
        others = [dict(s[1:]) for s in groups if s[0] == setting[0]]
        differ = [words for name, value in setting[1:] if (words := _named_apart(name, value, others))]
        name = titles[setting[0]]
        named[f"{name} ({', '.join(differ)})" if differ else name] = members
    return named


_TOLD_APART = ("engine", "grouping", "preset", "format", "data_seed")
_NO_SETTING = {  # `by_data` tells the data apart; what a file holds stands with what names it
    *("seed", "data_seed", "federation", "federation_hash", *DATA_ENTRIES, "kind", "versions"),
    *("algorithm", "own_method", "own_metrics", "hyperparameters", *_TOLD_APART),
    *("network", "network_hash", "network_place", "network_beside", "network_weights"),
}
_ENTRIES = {entry.name: entry.default for entry in fields(RunConfig) if entry.name not in _NO_SETTING}
_OFF = (None, (), 0, "stop")  # where an entry has such a default, the default means that nothing is done


def settings_of(config: RunConfig) -> dict[str, Any]:
    """{entry of the configuration: value} of all that sets a run apart but its data, seed, method and hyperparameters.

    The network is its name, or (name, sha256) if it comes from a file.
    """
    sha256 = config.network_hash and with_beside(config.network_hash, config.network_beside)
    network = (config.network, sha256) if sha256 else config.network
    return {"network": network} | {name: getattr(config, name) for name in _ENTRIES}


def _setting(config: RunConfig) -> tuple:
    """((algorithm, sha256 of the user's own, else ''), (name, value), (name, value), ...)."""
    own, hyper = config.own_method, config.hyperparameters
    if own is None:  # runs of older formats lack hyperparameters that came later
        defaults = {name: p.default for name, p in config.method.hyperparameters.items()}
        hyper = defaults | config.method.presets.get(config.preset, {}) | hyper
    entries = hyper | settings_of(config)
    # A metric of the user's own is another one where its code is another.
    hashes = {name: sha256_of(entry)[:8] for name, entry in config.own_metrics.items() if entry["sha256"]}
    entries["metrics"] = tuple(f"{name}@{hashes[name]}" if name in hashes else name for name in config.metrics)
    return ((config.algorithm, sha256_of(own) if own else ""), *entries.items())


def _without_seeds_twice(groups: dict[tuple, list[Record]], what: str) -> dict[tuple, list[Record]]:
    """The groups; one that has a seed twice is divided by an entry of the configuration."""
    found: dict[tuple, list[Record]] = {}
    for setting, members in groups.items():
        values, seeds = ({getattr(r.config, name) for r in members} for name in (what, "seed"))
        apart = len(seeds) < len(members) and len(values) > 1
        for record in members:
            more = ((what, getattr(record.config, what)),) if apart else ()
            found.setdefault((*setting, *more), []).append(record)
    return found


def _named_apart(name: str, value: Any, others: Sequence[dict]) -> str:
    """Such as 'beta=0.05'; '' if the others have the same value, or the value means that nothing is done."""
    values = {other.get(name) for other in others}
    if values == {value} or (name in _ENTRIES and value == _ENTRIES[name] and value in _OFF):
        return ""
    texts = {_short(name, v) for v in values}
    return f"{name}={_short(name, value) if len(texts) == len(values) else value}"


def _short(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(str(part)[:8] if name == "network" and i else str(part) for i, part in enumerate(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _titles(methods: dict[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """{(algorithm, sha256 of the user's own, else ''): title}, so that no two of them have the same title."""
    found = {}
    for (algorithm, sha256), title in methods.items():
        alike = [other for other, its in methods.items() if its == title and other != (algorithm, sha256)]
        if sha256 and alike:
            version = f", sha256 {sha256[:8]}" if any(name == algorithm for name, _ in alike) else ""
            title = f"{title}, {algorithm}{version}"
        found[algorithm, sha256] = title
    return found


def methods_of(records: Sequence[Record]) -> list[str]:
    """The title of each run's method, as in `by_setting`: no two methods have the same."""
    methods = [_setting(record.config)[0] for record in records]
    titles = _titles({method: record.title for method, record in zip(methods, records, strict=True)})
    return [titles[method] for method in methods]


def mean_score(group: RunGroup, protocol: Protocol) -> tuple[float, float]:
    """The score and half its interval: over seeds, or over clients if there is one seed.

    Half the interval is NaN where there are several seeds, and only one of them has such clients.
    """
    results = [record.result(protocol) for record in group.records]
    if protocol.clients in protocols.SIDES:  # a seed may have no such clients
        results = [result for result in results if result is not None]
    if None in results or not results:
        return math.nan, math.nan
    if len(group.records) == 1:
        return results[0].score, results[0].score_ci95
    return statistics.over_seeds([result.score for result in results])
