"""Checks that a model fits the examples: it gets the arrays that it takes, whole numbers such as tokens come as they
are, and labels are of its kind; and that an algorithm was built for a federation's clients.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpfl.algorithms.contract import Algorithm, check_is_algorithm
from tfpfl.checks import InvalidArgument, check_type
from tfpfl.data.federation import Federation
from tfpfl.data.kinds import kind_for
from tfpfl.data.layout import is_several, names_of_arrays, parts_of, shape_text
from tfpfl.data.reading import value_range
from tfpfl.models.split import SplitModel

OPENED = "a tfpfl.Federation: tfpfl.Federation.load(folder) opens one"


def check_fits(algorithm: Algorithm, federation: Any) -> None:
    """Checks that an algorithm was built for this federation.

    Raises:
        InvalidArgument: the algorithm's model or population differs from the federation in the shape of examples, the
            clients, their numbers of training examples N_i, or their numbers of classes K_i; or the backbone takes
            whole numbers, and the examples are others.
    """
    check_is_algorithm(algorithm)
    check_type("the federation", federation, Federation, OPENED)
    population = algorithm.population
    check_inputs(algorithm.model, federation)
    check_targets(algorithm.model, federation)
    ids = population.client_ids
    if ids[-1] >= federation.num_clients:
        raise InvalidArgument(
            f"the population has a client {ids[-1]}, but the federation has clients 0..{federation.num_clients - 1}"
        )
    examples = federation.num_examples("train")[ids]
    local = population.labels == "local"
    needed = federation.num_classes[ids] if local else np.full(len(ids), federation.num_labels)
    for what, found, bad in (
        ("training examples", examples, population.num_examples != examples),
        ("classes", needed, population.num_classes < needed),
    ):
        if bad.any():
            i = int(np.argmax(bad))
            given = (population.num_examples if what != "classes" else population.num_classes)[i]
            raise InvalidArgument(
                f"client {ids[i]} has {found[i]} {what} in the federation ({population.labels} labels), but {given} in "
                "the population: make the population with `federation.population(...)`"
            )


def check_targets(model: SplitModel, federation: Federation) -> None:
    """Checks that the model's kind of head learns from the federation's labels.

    Raises:
        InvalidArgument: it does not; the message names the kinds that do.
    """
    targets = federation.targets
    kind_for("class" if targets is None else targets.sort, model.kind.label)


def check_shapes(model: SplitModel, federation: Federation) -> None:
    """Checks that a model takes examples of the federation's shape, or its arrays of their shapes.

    Raises:
        InvalidArgument: it takes others.
    """
    shape, found = model.input_shape, federation.example_shape
    if is_several(shape) or is_several(found):
        if isinstance(shape, Mapping) == isinstance(found, Mapping) and shape == found:
            return
        advice = ""
        if is_several(shape) and is_several(found) and isinstance(shape, Mapping) != isinstance(found, Mapping):
            kinds = ("a dict", "inputs={...}") if isinstance(found, Mapping) else ("a tuple", "inputs=[...]")
            advice = f". The federation's examples are {kinds[0]}: build keras.Model({kinds[1]})"
        raise InvalidArgument(
            f"the model takes examples {shape_text(shape)}, the federation's are {shape_text(found)}{advice}"
        )
    if tuple(shape) != tuple(found):
        raise InvalidArgument(f"the model takes examples of shape {tuple(shape)}, the federation's are {found}")


def check_inputs(model: SplitModel, federation: Federation) -> None:
    """Checks a federation's examples for a backbone that casts its input, or a part of it, to integers.

    A cast to integers tells nothing: scaled tokens all become 0, and other numbers lose what is after the point.

    Raises:
        InvalidArgument: the examples are scaled or shifted; or, if the backbone takes whole numbers only, they are not
            whole, too large to be exact in the model's dtype, or outside of the Embedding's rows.
    """
    check_shapes(model, federation)
    for place, (name, reads, _) in enumerate(_arrays(model)):
        if reads == "numbers":
            continue
        array = federation.layout.arrays[place]
        what = f"takes whole numbers{name} (such as tokens for an Embedding)"
        if (array.scale, array.shift) != (1, 0):
            raise InvalidArgument(
                f"the backbone {what}, but the federation's examples are scaled: x = raw * {array.scale:.6g} + "
                f"{array.shift:g}, which would be cut down to whole numbers. Make the federation again with scale=1: "
                "then tokens stay as they are"
            )
        if reads == "mixed":
            continue
        low, high, whole = value_range(federation, place)
        if not whole:
            raise InvalidArgument(
                f"the backbone {what}, but examples of the federation are not whole (they lie between {low:g} and "
                f"{high:g}): give the tokens as integers, or take a backbone for numbers"
            )
        _check_range(model, place, low, high)


def check_whole(model: SplitModel, x: Any, client: int) -> None:
    """The same check for the examples x, [n, ...] each, that one client was given without a federation.

    Raises:
        InvalidArgument: as `check_inputs`; the message names the client.
    """
    parts = given_arrays(model, x, client)
    for place, (part, (name, reads, _)) in enumerate(zip(parts, _arrays(model), strict=True)):
        if reads != "whole":
            continue
        if part.dtype.kind == "f" and not (part == np.floor(part)).all():
            raise InvalidArgument(
                f"the backbone takes whole numbers{name} (such as tokens for an Embedding), but examples of client "
                f"{client} are not whole: give integers"
            )
        _check_range(model, place, float(part.min()), float(part.max()))


def given_arrays(model: SplitModel, x: Any, client: int) -> list[np.ndarray]:
    """The arrays of examples that one client was given without a federation.

    Raises:
        InvalidArgument: they are not those that the model takes.
    """
    shape = model.input_shape
    if is_several(shape):
        fine = isinstance(x, Mapping) == isinstance(shape, Mapping) and isinstance(x, Mapping | tuple | list)
        if not fine or names_of_arrays(x) != names_of_arrays(shape):
            kind = "a dict" if isinstance(shape, Mapping) else "a tuple"
            raise InvalidArgument(
                f"the backbone takes {kind} of the arrays {', '.join(names_of_arrays(shape))}, and client {client} has "
                f"others: found {type(x).__name__}"
            )
    elif isinstance(x, Mapping):
        raise InvalidArgument(f"the backbone takes one array, and client {client} has a dict of {names_of_arrays(x)}")
    return [np.asarray(part) for part in parts_of(x, shape)]


def _arrays(model: SplitModel) -> list[tuple[str, str, int | None]]:
    """Of every array: ' in <its name>' for messages, how the backbone reads it, and the rows of its Embedding."""
    shape = model.input_shape
    names = [f" in {name!r}" for name in names_of_arrays(shape)] if is_several(shape) else [""]
    return list(zip(names, parts_of(model.reads, shape), parts_of(model.vocabulary, shape), strict=True))


def _check_range(model: SplitModel, place: int, low: float, high: float) -> None:
    name, _, vocabulary = _arrays(model)[place]
    exact = 2 ** (np.finfo(model.dtype).nmant + 1)
    if max(abs(low), abs(high)) > exact and not is_several(model.input_shape):  # of several, integers stay integers
        raise InvalidArgument(
            f"examples go up to {max(abs(low), abs(high)):,.0f}, but whole numbers are exact in {model.dtype} only up "
            f"to {exact:,}: number the tokens from 0 on"
        )
    if vocabulary is not None and (low < 0 or high >= vocabulary):
        raise InvalidArgument(
            f"examples{name} go from {low:.0f} to {high:.0f}, but the backbone's Embedding has rows 0 to "
            f"{vocabulary - 1}: give it input_dim={max(high, 0) + 1:.0f} or more, and tokens from 0 on"
        )
