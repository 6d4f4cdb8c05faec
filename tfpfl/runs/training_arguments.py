"""Checks of a training's arguments, before the first round."""

from collections.abc import Iterable, Iterator
from typing import Any

from tfpfl.algorithms.contract import check_is_algorithm
from tfpfl.checks import InvalidArgument, check_listed, check_rates, check_type, check_whole_number
from tfpfl.data.partitioners import check_seed
from tfpfl.data.reading import split_number
from tfpfl.engines.engine import check_engine, check_grouping
from tfpfl.engines.graphs import check_threads
from tfpfl.engines.inputs import check_fits
from tfpfl.engines.machines import Machines
from tfpfl.engines.ray.engine import check_recipe
from tfpfl.engines.visit import GLOBAL
from tfpfl.runs.availability import Availability
from tfpfl.runs.store import RunStore

BY_TRAINING = ("start", "round", "end")  # the methods of a callback that `Training` calls
BY_RUN = ("begin", *BY_TRAINING, "finish")  # and `Run.train`


def check_training(training: Any) -> None:
    """Checks the arguments of a `Training`.

    Raises:
        InvalidArgument: one has a wrong type or value, or does not fit another; see `Training`.
        Unavailable: TFF (for 'tff') or Ray (for 'ray') is not installed.
    """
    check_is_algorithm(training.algorithm)
    for name, value, kind, what in (
        ("machines", training.machines, Machines, "a tfpfl.Machines, as in Machines(workers=['localhost:8000'])"),
        ("availability", training.availability, Availability, "an Availability, as in Availability(dropout=0.1)"),
        ("model_name", training.model_name, str, "a text, such as 'personal'"),
    ):
        check_type(name, value, kind, what)
    if training.store is not None:
        check_type("the store", training.store, RunStore, "a RunStore: RunStore(FILE) saves the rounds in a file")
    check_seed(training.seed)
    check_engine(training.engine, training.machines)
    check_grouping(training.grouping, training.engine)
    check_threads(training.threads)
    if training.engine == "ray":
        check_recipe(training.recipe)
    check_fits(training.algorithm, training.federation)
    check_rates(passes=training.passes)
    check_whole_number(0, evaluate_every=training.evaluate_every)
    if training.quorum is not None and not callable(training.quorum):
        raise InvalidArgument(
            f"quorum must be a function (number of clients that began) -> how many must come back; found "
            f"{training.quorum!r}. For a fixed number n, give lambda began: n"
        )
    if training.model_name == GLOBAL and training.algorithm.global_model is not None:
        raise InvalidArgument(
            f"model_name={GLOBAL!r} is the name of the algorithm's global model, but its clients predict with "
            "another model: choose another name, such as 'personal'"
        )
    check_listed("splits", training.splits, "('validation', 'test')")
    for split in training.splits:
        split_number(split)
    check_listed("metrics", training.metrics, "['macro_f1']")
    check_callbacks(training.callbacks)


def as_list(values: Any) -> Any:
    """A generator as a list: it can be gone through once, and it is checked before it is used. All else stays."""
    return list(values) if isinstance(values, Iterator) else values


def check_callbacks(callbacks: Any, calls: Iterable[str] = BY_TRAINING) -> None:
    """Checks that callbacks are objects with the methods that will be called: those of a `Training` by default.

    Raises:
        InvalidArgument: one lacks a method, is a class and no object, or there is no list.
    """
    check_listed("callbacks", callbacks, "[tfpfl.runs.Progress('PFLEGO')]")
    for callback in callbacks:
        missing = [call for call in calls if not callable(getattr(callback, call, None))]
        if missing or isinstance(callback, type):
            raise InvalidArgument(
                f"a callback must be an object of a subclass of tfpfl.runs.Callback, found {callback!r}"
                + (f" without {', '.join(missing)}" if missing else ", which is a class: call it")
            )
