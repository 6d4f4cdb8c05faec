"""Metrics of the user's own, by name: FILE.py:FUNCTION or package.module:FUNCTION, a function or a `Metric`.

Loading one runs its code. So a name is looked up here only if the user has given it. The metric of a run folder, which
may come from somebody else, is loaded by `tfpfl.runs.own_methods`, which asks for consent first. A metric that a
program has registered is known in this program only; of it, a configuration keeps the unit and the direction.
"""

import re
from collections.abc import Iterable
from inspect import isclass
from typing import Any, NamedTuple

from tfpfl.algorithms.own import OwnCode, code_named, key_of
from tfpfl.checks import InvalidArgument, one_line
from tfpfl.data.kinds import ACCURACY
from tfpfl.models.modules_beside import sha256_of
from tfpfl.runs.metrics import (
    DIRECTIONS,
    METRICS,
    NEITHER,
    Metric,
    describe_metric,
    forget_description,
    is_own,
    metric_names,
    register_metric,
)

# `beside` is missing in runs that are older than this entry.
ENTRY = ("kind", "name", "place", "function", "package", "sha256", "beside", "unit", "direction")
REGISTERED = "registered"  # the kind of a metric that a program has registered


class OwnMetric(NamedTuple):
    """A metric of the user's own: where it comes from, and the metric itself."""

    code: OwnCode
    metric: Metric

    @property
    def entry(self) -> dict[str, Any]:
        """What a run's configuration keeps of it: {name: text} for `ENTRY`."""
        given = self.code._asdict() | {"unit": self.metric.unit, "direction": self.metric.direction}
        return {name: given[name] for name in ENTRY}


def loaded_metric(entry: dict) -> OwnMetric | None:
    """The metric of an entry, if this process has loaded it already; None otherwise."""
    return _loaded.get(key_of(entry))


def metric_of(code: OwnCode, entry: dict | None = None) -> OwnMetric:
    """Makes a metric of a function or a `Metric`, and lets this process know it by its name.

    Args:
        code: the function.
        entry: what a run's configuration keeps of it; `loaded_metric` then finds it by this entry.

    Raises:
        InvalidArgument: it is neither, or it has the name of a metric of tfpfl.
    """
    found = code.found
    if not isinstance(found, Metric):
        if not callable(found) or isclass(found):
            raise InvalidArgument(
                f"{code.function} in {code.place} is {type(found).__name__}, neither a function (labels, logits) -> "
                "number nor a tfpfl.runs.Metric"
            )
        found = Metric(code.function.rpartition(".")[2], found)
    made = _loaded[key_of(entry or code._asdict())] = OwnMetric(code, register_metric(found))
    return made


def resolved(metrics: Iterable[Any], monitor: str, own: dict) -> tuple[tuple[str, ...], str, dict]:
    """The metrics of a configuration by name, with what is kept of the user's own ones.

    Args:
        metrics: names, functions and `Metric`s; those written FILE.py:FUNCTION or package.module:FUNCTION are loaded.
        monitor: what early stopping looks at, written in the same way; it is measured, too.
        own: {name: entry} that is known already.

    Returns:
        The names, 'accuracy' too if it is listed; the name of `monitor`; and {name: entry} of the user's own.

    Raises:
        InvalidArgument: a metric cannot be loaded, two have the same name, or an entry is wrong.
    """
    entries: dict[str, dict] = {}

    def named(metric: Any) -> Any:
        if not isinstance(metric, str) or ":" not in metric:
            return metric
        made = metric_of(code_named(metric))
        name = made.metric.name
        if name in entries and sha256_of(entries[name]) != sha256_of(made.entry):
            raise InvalidArgument(f"two metrics have the name {name}: {entries[name]['place']} and {made.code.place}")
        entries[name] = made.entry
        return name

    listed, monitor = [named(metric) for metric in metrics], named(monitor)
    names = metric_names(listed if monitor in listed else [*listed, monitor])
    for name in set(own) & set(names):
        entries.setdefault(name, own[name])
    for name in set(names) - set(entries):
        if name in METRICS and is_own(name):
            metric = METRICS[name]
            given = {"kind": REGISTERED, "name": name, "unit": metric.unit, "direction": metric.direction}
            entries[name] = {key: given.get(key, "") for key in ENTRY}
        elif name in METRICS:
            forget_description(name)
    for name, entry in entries.items():
        check_entry(name, entry)
        describe_metric(name, entry["unit"], entry["direction"])
    asked = (ACCURACY.name,) if ACCURACY.name in listed else ()  # of other labels than classes it is refused later
    return asked + names, monitor, {name: entries[name] for name in names if name in entries}


def check_entry(name: str, entry: Any) -> None:
    """Checks what a configuration says of the user's own metric; it may come from somebody else.

    Raises:
        InvalidArgument: a key is missing or unknown, a value is no text, or the values do not go together.
    """
    texts = isinstance(entry, dict) and all(isinstance(v, str) or (k, v) == ("package", None) for k, v in entry.items())
    if not texts or {*entry, "beside"} != {*ENTRY} or entry["direction"] not in (*DIRECTIONS, NEITHER):
        raise InvalidArgument(
            f"own_metrics: {name} must have texts for {', '.join(ENTRY)}; found {one_line(entry, 200)}"
        )
    place, function, sha256 = entry["place"], entry["function"], entry["sha256"]
    names = {
        "file": (f"{place.rpartition('/')[2]}:{function}", place.endswith(".py")),
        "module": (f"{place}:{function}", not place.endswith(".py")),
        REGISTERED: (name, not place),
    }
    wanted, fits = names.get(entry["kind"], ("", False))
    if entry["name"] != wanted or not fits or place and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise InvalidArgument(
            f"own_metrics: kind, name, place, function and sha256 of {name} do not go together; found {entry}"
        )


_loaded: dict[tuple, OwnMetric] = {}  # `key_of` an entry -> what was loaded
