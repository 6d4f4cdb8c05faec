"""What a backbone takes: one array for every example, or several, as a dict, a list or a tuple of arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument, one_line
from tfpfl.data.layout import is_several, names_of_arrays, packed, parts_of, shape_text

# TensorFlow's words for another shape, for numbers where texts are wanted, and for a table that was never filled.
_NOT_TAKEN = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.FailedPreconditionError)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list | tf.TensorShape) and all(
        n is None or isinstance(n, int | np.integer) for n in shape
    )


def _said(backbone: keras.Model) -> Any:
    """The shapes that a model says it takes, with the axis of the examples, in the structure of its inputs."""
    inputs = getattr(backbone, "_inputs_struct", None)  # Keras 3 has no public name for it: input_shape is a list there
    if isinstance(inputs, Mapping):
        return {name: getattr(part, "shape", part) for name, part in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(getattr(part, "shape", part) for part in inputs)
    try:
        return backbone.input_shape
    except (AttributeError, ValueError) as error:  # Keras's words for a model without an Input that was never called
        raise InvalidArgument(
            "the backbone does not say what it takes: begin it with keras.Input(federation.example_shape); a "
            "subclassed model needs SplitModel(backbone, input_shape=...)"
        ) from error


class Inputs:
    """The arrays of a backbone's input.

    Args:
        backbone: the Keras model.
        shape: the shape of one example, or a dict, list or tuple of shapes, for a subclassed model; None: what the
            model says.

    Attributes:
        shape: of one example: a tuple of numbers, or a dict or a tuple of such.
        integer: for each of several arrays, whether the Keras model declares it as integer.

    Raises:
        InvalidArgument: a shape is open, inputs are nested deeper, or the model does not say what it takes.
    """

    def __init__(self, backbone: keras.Model, shape: Any = None):
        given = shape is not None and shape != ()
        found = shape if given else _said(backbone)
        self._as_list = isinstance(found, list) and not _is_shape(found)
        axis = 0 if given else 1  # what a model says begins with the axis of the examples
        if _is_shape(found):
            self.shape: Any = tuple(found)[axis:]
        elif isinstance(found, list) and len(found) == 1 and _is_shape(found[0]):
            self.shape, self._as_list = tuple(found[0])[axis:], False
        else:
            parts = list(found.values()) if isinstance(found, Mapping) else found
            if not isinstance(parts, list | tuple):
                raise InvalidArgument(
                    f"input_shape is the shape of one example, such as (28, 28, 1), or a dict or a tuple of shapes; "
                    f"found {found!r}"
                )
            if not all(map(_is_shape, parts)):
                raise InvalidArgument(
                    f"the backbone's inputs {found} are nested: an example is an array, or a dict or a tuple of arrays"
                )
            if isinstance(found, Mapping):
                self.shape = {name: tuple(found[name])[axis:] for name in sorted(found)}
            else:
                self.shape = tuple(tuple(part)[axis:] for part in found)
        self.several = is_several(self.shape)
        if any(None in part for part in parts_of(self.shape, self.shape)):
            raise InvalidArgument(
                f"the backbone's input shape {shape_text(self.shape)} is open: all examples must have one shape. Build "
                "the backbone with a fixed input shape, or give input_shape"
            )
        declared = getattr(backbone, "inputs", None) or []
        known = self.several and not given and len(declared) == len(self.names)
        dtypes = [tf.as_dtype(x.dtype) for x in declared] if known else [tf.float32] * len(self.names)
        self.integer = [dtype.is_integer for dtype in dtypes]

    @property
    def names(self) -> list[str]:
        """How messages name the arrays; of a single one, ''."""
        return names_of_arrays(self.shape) if self.several else [""]

    def zeros(self, rows: int) -> Any:
        """Examples of zeros, NumPy arrays, with which the model is called for the first time."""
        shapes = parts_of(self.shape, self.shape)
        dtypes = ["int32" if integer else "float32" for integer in self.integer]
        return self.for_keras([np.zeros((rows, *s), d) for s, d in zip(shapes, dtypes, strict=True)])

    def called(self, backbone: keras.Model, rows: int) -> Any:
        """What the model gives for examples of zeros.

        Raises:
            InvalidArgument: it does not take them.
        """
        try:
            return backbone(self.zeros(rows))
        except (TypeError, ValueError, *_NOT_TAKEN) as error:
            raise InvalidArgument(
                f"the backbone {backbone.name!r} does not take {rows} examples of shape {shape_text(self.shape)}. It "
                f"must take any number of examples, numbers of the shape that it says or that input_shape gives. "
                f"Keras said: {one_line(error, 400)}"
            ) from error

    def for_keras(self, parts: list) -> Any:
        """Arrays in the structure in which the Keras model takes them."""
        return list(parts) if self._as_list else packed(parts, self.shape)

    def spec(self, rows: int | None, dtypes: list) -> Any:
        """The types of examples with these dtypes, in the structure of `shape`."""
        shapes = parts_of(self.shape, self.shape)
        return packed([tf.TensorSpec([rows, *s], d) for s, d in zip(shapes, dtypes, strict=True)], self.shape)

    def taken(self, apply: Callable, dtypes: list) -> tuple[Callable, Callable]:
        """How several arrays are given to a model.

        Args:
            apply: (weights, arrays as Keras takes them) -> features.
            dtypes: the dtype in which the model takes each array.

        Returns:
            (cast, apply) for `SplitModel`: examples -> examples of the right dtypes, and (weights, these) -> features.

        Raises:
            InvalidArgument: `cast` is given other arrays than the model takes.
        """

        def cast(x: Any) -> Any:
            if (
                isinstance(x, Mapping) != isinstance(self.shape, Mapping)
                or not isinstance(x, Mapping | tuple | list)
                or (names_of_arrays(x) != self.names)
            ):
                found = names_of_arrays(x) if isinstance(x, Mapping | tuple | list) else type(x).__name__
                kind = "dict" if isinstance(self.shape, Mapping) else "tuple"
                raise InvalidArgument(
                    f"the backbone takes a {kind} of the arrays {', '.join(self.names)}; found {found}"
                )
            parts = parts_of(x, self.shape)
            return packed([tf.cast(part, of) for part, of in zip(parts, dtypes, strict=True)], self.shape)

        return cast, lambda theta, x: apply(theta, self.for_keras(parts_of(x, self.shape)))
