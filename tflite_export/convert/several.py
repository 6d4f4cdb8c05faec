"""Models of several arrays: for a device, such a model is one of one array, in which the arrays stand side by side."""

from typing import Any

import numpy as np
import tensorflow as tf

from tflite_export.device.arrays import Arrays
from tfpfl.checks import InvalidArgument
from tfpfl.data.layout import is_several, names_of_arrays, packed, parts_of
from tfpfl.models.split import SplitModel


class Packed:
    """A `SplitModel` of several arrays whose examples are packed, float32 [N, D]; see tflite_export/device/arrays.py.

    Everything else is the model's own.

    Args:
        model: the `SplitModel`.

    Attributes:
        split: the same.
        about: the entry `model.inputs` of the manifest.
        arrays: the `Arrays`.
        whole: whether some of the arrays are whole numbers.

    Raises:
        InvalidArgument: the backbone takes only a part of an array as whole numbers.
    """

    reads, vocabulary = "numbers", None

    def __init__(self, model: SplitModel) -> None:
        self.split, shape = model, model.input_shape
        rows: list[dict[str, Any]] = []
        of = [parts_of(structure, shape) for structure in (shape, model.reads, model.vocabulary)]
        for name, size, reads, tokens in zip(names_of_arrays(shape), *of, strict=True):
            if reads == "mixed":
                raise InvalidArgument(
                    f"the backbone takes a part of {name!r} as whole numbers (such as tokens for an Embedding), and "
                    "the rest as floats: give them as two arrays"
                )
            offset = rows[-1]["offset"] + int(np.prod(rows[-1]["shape"], dtype=int)) if rows else 0
            row = {"name": name, "shape": list(map(int, size)), "dtype": "int32" if reads == "whole" else "float32"}
            rows.append(row | {"offset": offset} | ({"num_tokens": tokens} if reads == "whole" and tokens else {}))
        self.about = {"kind": "dict" if isinstance(shape, dict) else "tuple", "arrays": rows}
        self.arrays, self.whole = Arrays(self.about), any(row["dtype"] == "int32" for row in rows)
        self.input_shape = (self.arrays.size,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.split, name)

    def features(self, theta: tuple, x: Any) -> Any:
        """The features phi(x; theta) [N, M] of packed examples x [N, D]."""
        x = tf.convert_to_tensor(x)
        parts = tf.split(x, [int(np.prod(shape, dtype=int)) for shape in self.arrays.shapes], 1)
        rows = [
            tf.reshape(part, [-1 if x.shape[0] is None else x.shape[0], *shape])
            for part, shape in zip(parts, self.arrays.shapes, strict=True)
        ]
        return self.split.features(theta, packed(rows, self.split.input_shape))


def of_one_array(model: Any) -> Any:
    """The model itself, or, if it takes several arrays, the model of packed examples."""
    several = not isinstance(model, Packed) and is_several(model.input_shape)
    return Packed(model) if several else model


def packed_examples(model: Any, examples: tuple | None) -> tuple | None:
    """Examples (x, y) as a model of `of_one_array` takes them."""
    if examples is None or not isinstance(model, Packed):
        return examples
    return model.arrays.packed(examples[0]), examples[1]
