"""Clients' examples as datasets of TensorFlow: what their elements may be, and how a visit reads them."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm
from tfpfl.checks import InvalidArgument
from tfpfl.models.split import SplitModel


def check_dataset(algorithm: Algorithm, element: Any) -> None:
    """Checks the type of a dataset's elements: single examples, or batches.

    Args:
        algorithm: its model takes the examples, and its population has the clients' K_i.
        element: the `element_spec` of the dataset.

    Raises:
        InvalidArgument: the elements are no pairs (x, y) or {'x', 'y'}; x has another structure or shape than the model
            takes; or y is no integer, one class for each example, where the model is for classes, and otherwise no K_i
            numbers for each example.
    """
    model = algorithm.model
    x, y = _pair(element)
    wanted = model.example_spec()
    try:
        tf.nest.assert_same_structure(wanted, x, check_types=False)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"the model takes examples {_shown(wanted)}, a client's dataset has {_shown(x)}: map it to these arrays"
        ) from None
    pairs = list(zip(tf.nest.flatten(x), tf.nest.flatten(wanted), strict=True))
    fine = [part.shape.rank is not None and _fits(part.shape, one.shape) for part, one in pairs]
    if not all(fine) or len({part.shape.rank - one.shape.rank for part, one in pairs}) > 1:
        raise InvalidArgument(
            f"the model takes examples {_shown(wanted)}, or one of them at a time; a client's dataset has {_shown(x)}. "
            "Map it to this shape, such as with x[..., None] for pictures without an axis of channels"
        )
    batched = _is_batched(model, x)
    if not model.kind.label.is_classes:
        # One number beside K_i outputs would be taken for all of them: TensorFlow broadcasts it.
        outputs, rank = algorithm.population.num_classes, y.shape.rank
        width = 1 if rank == batched else y.shape[-1] if rank == batched + 1 else 0
        if width is not None and (outputs != width).any():
            raise InvalidArgument(
                f"targets of a client's dataset must be a number for each of the {outputs.max()} outputs; found "
                f"{_shown(y)} beside examples {_shown(x)}"
            )
        return
    if not (y.dtype.is_integer or y.dtype.is_bool):
        raise InvalidArgument(
            f"labels of a client's dataset must be integers, one class for each example; found {y.dtype.name}, which "
            "would be cut down to whole numbers. For one-hot rows give tf.argmax(y, -1)"
        )
    if y.shape.rank is None or y.shape.rank not in (batched, batched + 1) or y.shape[batched:] not in ([], [1]):
        raise InvalidArgument(
            f"labels of a client's dataset must be one class for each example; found {_shown(y)} beside examples "
            f"{_shown(x)}. For one-hot rows give tf.argmax(y, -1)"
        )


def dataset_reader(algorithm: Algorithm) -> Callable:
    """Makes (visit) -> (x, y) for visits that carry a dataset, all of whose examples become one batch."""
    model = algorithm.model

    def read(visit: Any) -> tuple:
        dataset = visit.x
        check_dataset(algorithm, dataset.element_spec)
        if isinstance(dataset.element_spec, dict):
            dataset = dataset.map(lambda e: (e["x"], e["y"]))
        if _is_batched(model, dataset.element_spec[0]):
            dataset = dataset.unbatch()
        x, y = dataset.batch(2**30).get_single_element()
        x = tf.nest.map_structure(lambda part, s: tf.cast(part, s.dtype), x, model.example_spec())
        if model.kind.label.is_classes:
            return x, tf.cast(tf.reshape(y, [-1]), tf.int32)
        return x, tf.cast(y if y.shape.rank == 2 else y[:, None], model.dtype)

    return read


def _pair(element: Any) -> tuple[Any, Any]:
    if isinstance(element, dict):
        if set(element) != {"x", "y"}:
            raise InvalidArgument(
                f"a client's dataset must have elements (x, y) or {{'x', 'y'}}; found the keys {sorted(element)}"
            )
        return element["x"], element["y"]
    if not isinstance(element, tuple) or len(element) != 2 or not hasattr(element[1], "shape"):
        raise InvalidArgument(
            f"a client's dataset must have elements (x, y) or {{'x', 'y'}}; found {_shown(element)}. Map it to pairs: "
            "dataset.map(lambda x, y, weight: (x, y))"
        )
    return element


def _fits(found: tf.TensorShape, wanted: tf.TensorShape) -> bool:
    """Whether a shape is that of examples, [rows, ...], or of a single one."""
    return any(found.is_compatible_with(shape) and found.rank == shape.rank for shape in (wanted, wanted[1:]))


def _is_batched(model: SplitModel, x: Any) -> bool:
    return tf.nest.flatten(x)[0].shape.rank == tf.nest.flatten(model.example_spec())[0].shape.rank


def _shown(spec: Any) -> str:
    def shape(part: Any) -> str:
        sizes = part.shape.as_list() if part.shape.rank is not None else ["..."]
        return f"{part.dtype.name} [{', '.join('N' if n is None else str(n) for n in sizes)}]"

    if isinstance(spec, dict):
        return "{" + ", ".join(f"{name!r}: {_shown(part)}" for name, part in spec.items()) + "}"
    if isinstance(spec, tuple | list):
        return f"({', '.join(map(_shown, spec))})"
    return shape(spec) if hasattr(spec, "shape") else str(spec)
