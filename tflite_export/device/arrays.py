"""Examples of several arrays, as a device's programs take them: side by side, in one row of numbers.

The programs have one input for examples, float32 [N, D]: every array of an example row-major, one after the other, a
dict's in the order of its names. The program cuts them out again. Whole numbers, such as tokens, stand among them as
floats, which are exact up to 2^24; the program makes integers of them. `model.inputs` in the manifest has names and
shapes, and where each array begins.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tflite_export.device.errors import BundleError, InvalidInput

EXACT = 2**24  # whole numbers up to this one are exact in float32


def as_array(values: Any, what: str) -> np.ndarray:
    """The values as an array; `what` names them in the error.

    Raises:
        BundleError: they are lists or arrays of different shapes, or values of a masked array are masked.
    """
    for part in values if isinstance(values, list | tuple) else [values]:  # NumPy keeps the numbers under a mask
        if isinstance(part, np.ma.MaskedArray) and (masked := int(np.sum(part.mask))):
            raise BundleError(
                f"{what}: {masked} values of a masked array are masked. Fill them in, for example with "
                "np.ma.filled(array, 0), or leave these examples out"
            )
    try:
        return np.asarray(values)
    except ValueError:
        raise BundleError(f"{what} must be one array, found lists or arrays of different shapes") from None


def check_columns(values: Any, names: Sequence[str], what: str) -> None:
    """Checks that a DataFrame has its columns in the order of these names, as its numbers are read by their places.

    Other arrays have no names of columns, and a DataFrame that has none of these names has names of its own.

    Raises:
        BundleError: the columns have another order, or other ones are among them.
    """
    found = [str(name) for name in values.columns] if hasattr(values, "to_numpy") and hasattr(values, "columns") else []
    for place, (name, column) in enumerate(zip(names, found, strict=False), 1):
        if name != column and set(names) & set(found):
            raise BundleError(
                f"{what}: column {place} of the DataFrame is {column!r}, and this model takes {name!r} in this place. "
                f"Give the columns in this order: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
            )


def side_by_side(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays [N, ...] of examples in one, float32 [N, D]."""
    return np.concatenate([part.reshape(len(part), -1).astype(np.float32, copy=False) for part in parts], 1)


class Arrays:
    """The arrays of an example.

    Args:
        about: the entry `model.inputs` of a manifest: 'kind', 'dict' or 'tuple', and 'arrays', a list of {'name',
            'shape', 'dtype', 'offset', and of whole numbers perhaps 'num_tokens'}.

    Attributes:
        names: of the arrays; of a tuple's, their numbers.
        size: how many numbers an example has, D.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._named, self._arrays = about["kind"] == "dict", about["arrays"]
        self.names = [array["name"] for array in self._arrays]
        self.shapes = [tuple(array["shape"]) for array in self._arrays]
        self.size = sum(map(math.prod, self.shapes))

    def __str__(self) -> str:
        each = zip(self.names, self._arrays, strict=True)
        shown = ", ".join(f"{name!r} {array['dtype']} {['N', *array['shape']]}" for name, array in each)
        return f"a {'dict' if self._named else 'tuple'} of {shown}"

    def packed(self, x: Any) -> np.ndarray:
        """Examples as the programs take them, float32 [N, D].

        Args:
            x: a dict or a tuple of the arrays [N, ...]; or examples that are packed already.

        Raises:
            InvalidInput: other arrays, or a shape or dtype is wrong.
        """
        if isinstance(x, Mapping) and self._named and sorted(x) == self.names:
            parts = [as_array(x[name], f"examples: {name!r}") for name in self.names]
        elif isinstance(x, tuple) and not self._named and len(x) == len(self.names):
            parts = [as_array(part, f"examples: {name!r}") for name, part in zip(self.names, x, strict=True)]
        elif isinstance(x, Mapping | tuple):
            found = ", ".join(map(repr, x)) if isinstance(x, Mapping) else f"{len(x)} arrays"
            raise InvalidInput(f"examples must be {self}, found a {type(x).__name__} of {found}")
        else:
            return as_array(x, "examples")
        for name, array, shape, part in zip(self.names, self._arrays, self.shapes, parts, strict=True):
            whole = array["dtype"] == "int32" and part.dtype.kind in "iu"
            fits = part.ndim == len(shape) + 1 and part.shape[1:] == shape
            if not fits or not (whole or part.dtype == np.float32):
                found = f"{part.dtype} {list(part.shape)}"
                raise InvalidInput(f"examples: {name!r} must be {array['dtype']} {['N', *shape]}, found {found}")
            if whole and part.size and max(int(part.max()), -int(part.min())) > EXACT:
                raise InvalidInput(
                    f"examples: {name!r} goes beyond {EXACT:,}, up to which whole numbers are exact here"
                )
        if len({len(part) for part in parts}) > 1:
            found = ", ".join(f"{len(part)} of {name!r}" for name, part in zip(self.names, parts, strict=True))
            raise InvalidInput(f"examples: there must be as many of each array, found {found}")
        return side_by_side(parts)

    def check(self, x: np.ndarray) -> None:
        """Checks packed examples float32 [N, D]: what must be whole numbers are such, and tokens are known.

        Raises:
            InvalidInput: they are not.
        """
        for name, array, part in zip(self.names, self._arrays, self.cut(x), strict=True):
            if array["dtype"] != "int32":
                continue
            if (part != np.floor(part)).any() or np.abs(part).max() > EXACT:
                raise InvalidInput(f"{name!r} of an example holds what is no whole number: the head is untouched")
            if "num_tokens" in array and (part.min() < 0 or part.max() >= array["num_tokens"]):
                found, last = int(part.min() if part.min() < 0 else part.max()), array["num_tokens"] - 1
                raise InvalidInput(
                    f"{name!r} of an example holds {found}, and this model knows 0..{last}: the head is untouched"
                )

    def cut(self, x: np.ndarray) -> list[np.ndarray]:
        """The arrays [N, ...] of packed examples [N, D], in the order of `names`."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        return [part.reshape(-1, *shape) for part, shape in zip(np.split(x, ends, 1), self.shapes, strict=True)]

    def drawn(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Packed examples float32 [count, D] of noise in [0, 1), and of random tokens."""
        parts = []
        for array, shape in zip(self._arrays, self.shapes, strict=True):
            noise = rng.random((count, math.prod(shape)), np.float32)
            whole = array["dtype"] == "int32"
            parts.append(np.floor(noise * np.float32(array.get("num_tokens", 2))) if whole else noise)
        return np.concatenate(parts, 1)


def check_sizes(about: Mapping[str, Any], example_shape: list[int]) -> None:
    """Checks that the arrays of `model.inputs` follow one another, and are what `model.example_shape` says.

    Raises:
        InvalidInput: they do not.
    """
    end = 0
    for i, array in enumerate(about["arrays"]):
        if array["offset"] != end:
            raise InvalidInput(
                f"model.inputs.arrays[{i}].offset is {array['offset']}, but the arrays before take {end} numbers"
            )
        end += math.prod(array["shape"])
    if example_shape != [end]:
        raise InvalidInput(f"model.example_shape is {example_shape}, but model.inputs has {end} numbers")
    names = [array["name"] for array in about["arrays"]]
    if about["kind"] == "dict" and names != sorted(set(names)):
        raise InvalidInput("model.inputs.arrays must be in the order of their names, found others")
