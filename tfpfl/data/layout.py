"""What an example is: one array, or several, as a dict or a tuple of arrays.

The shape of one array is a tuple of numbers. The shape of several is a dict or a tuple of such shapes. Arrays of a dict
are in the order of their names, sorted, as TensorFlow has them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument


def is_several(shape: Any) -> bool:
    """Whether a shape is that of several arrays."""
    return isinstance(shape, Mapping) or any(isinstance(part, tuple | list) for part in shape)


def names_of_arrays(structure: Any) -> list[str]:
    """How messages name the arrays of a dict or a tuple: by their names or numbers."""
    return sorted(structure) if isinstance(structure, Mapping) else [str(i) for i in range(len(structure))]


def parts_of(structure: Any, like: Any) -> list:
    """The arrays, or whatever stands for them, of a structure like the shape `like`; of one array, that array alone."""
    if not is_several(like):
        return [structure]
    return [structure[name] for name in sorted(like)] if isinstance(like, Mapping) else list(structure)


def packed(parts: Sequence[Any], like: Any) -> Any:
    """Puts arrays in the order of `parts_of` into a structure like the shape `like`; one array stays as it is."""
    if not is_several(like):
        return parts[0]
    return dict(zip(sorted(like), parts, strict=True)) if isinstance(like, Mapping) else tuple(parts)


def split(x: Any) -> list:
    """The arrays of examples [N, ...]: of a dict in the order of its names, of a tuple, or the only one."""
    return [x[name] for name in sorted(x)] if isinstance(x, Mapping) else list(x) if isinstance(x, tuple) else [x]


def joined(parts: Sequence[Any], like: Any) -> Any:
    """The inverse of `split`, for examples `like` these."""
    if isinstance(like, Mapping):
        return dict(zip(sorted(like), parts, strict=True))
    return tuple(parts) if isinstance(like, tuple) else parts[0]


def num_rows(x: Any) -> int:
    """The number of examples in an array, or in a dict or a tuple of arrays."""
    return len(split(x)[0])


def shape_text(shape: Any) -> str:
    """A shape for messages.

    Examples:
        >>> shape_text((8, 8)), shape_text({"age": (1,), "image": (8, 8)})
        ('(8, 8)', "{'age': (1,), 'image': (8, 8)}")
    """
    return str({name: tuple(shape[name]) for name in sorted(shape)}) if isinstance(shape, Mapping) else str(shape)


class Array(NamedTuple):
    """One of the arrays of an example, as it is stored."""

    file: str
    shape: tuple[int, ...]  # without the axis of the examples
    dtype: str  # 'uint8', 'int32' or 'float32'
    scale: float  # as floats it is raw * scale + shift
    shift: float


class Layout(NamedTuple):
    """The arrays of a federation's examples."""

    arrays: tuple[Array, ...]
    shape: Any  # of an example: of its array, or a dict or a tuple of shapes

    @classmethod
    def of_manifest(cls, manifest: dict) -> "Layout":
        """The arrays that a manifest names."""
        if "inputs" not in manifest:
            preprocessing, shape = manifest["preprocessing"], tuple(manifest["example_shape"])
            only = Array("x.raw", shape, manifest["dtype"], preprocessing["scale"], preprocessing["shift"])
            return cls((only,), shape)
        entries = manifest["inputs"]["arrays"]
        arrays = tuple(
            Array(file_of(i), tuple(entry["shape"]), entry["dtype"], entry["scale"], entry["shift"])
            for i, entry in enumerate(entries)
        )
        shapes = [array.shape for array in arrays]
        if manifest["inputs"]["kind"] == "tuple":
            return cls(arrays, tuple(shapes))
        return cls(arrays, {entry["name"]: shape for entry, shape in zip(entries, shapes, strict=True)})

    @property
    def dtype(self) -> Any:
        """What is stored: the name of a dtype, or a dict or a tuple of such names."""
        return packed([array.dtype for array in self.arrays], self.shape)

    @property
    def names(self) -> list[str]:
        """How messages name the arrays; of a single one, ''."""
        return names_of_arrays(self.shape) if is_several(self.shape) else [""]

    def each(self, function: Callable, *structures: Any) -> Any:
        """The structure of function(array, value, ...) over the arrays; structures have the form of an example."""
        parts = [parts_of(structure, self.shape) for structure in structures]
        return packed([function(*of) for of in zip(self.arrays, *parts, strict=True)], self.shape)

    def whole(self, array: Array) -> bool:
        """Whether an array is read as the integers that it has: int32 beside other arrays, such as tokens or a mask."""
        return array.dtype == "int32" and is_several(self.shape)

    def decoded(self, array: Array, raw: np.ndarray) -> np.ndarray:
        """One array as models take it: float32 raw * scale + shift, or the integers that it has, see `whole`."""
        x = np.array(raw, np.int32 if self.whole(array) else np.float32)
        x = x if array.scale == 1 else x * np.float32(array.scale)
        return x if array.shift == 0 else x + np.float32(array.shift)

    def described(self) -> str:
        """The shapes and dtypes in one line."""
        shown = [f"{' x '.join(map(str, a.shape))} {a.dtype}" for a in self.arrays]
        if not is_several(self.shape):
            return shown[0]
        return "; ".join(f"{name}: {text}" for name, text in zip(self.names, shown, strict=True))


def file_of(place: int) -> str:
    """The file of one of several arrays."""
    return f"x.{place}.raw"


def entry(kind: str, names: Sequence[str], sources: Sequence[Any]) -> dict[str, Any]:
    """The entry 'inputs' of a manifest, from one `Source` for each array."""
    arrays = [
        {
            "name": name,
            "shape": list(source.x_train.shape[1:]),
            "dtype": source.x_train.dtype.name,
            "scale": float(source.scale),
            "shift": float(source.shift),
        }
        for name, source in zip(names, sources, strict=True)
    ]
    return {"kind": kind, "arrays": arrays}


def given_as_several(x: Any, number: int) -> bool | None:
    """Whether examples that a user gave are several arrays: a dict, or a tuple of arrays with `number` rows each.

    None: a tuple of `number` such arrays of one shape could also be one array, row by row.
    """
    if isinstance(x, Mapping):
        return True
    if not isinstance(x, tuple) or not x:
        return False
    if not all(hasattr(part, "shape") and len(part.shape) and part.shape[0] == number for part in x):
        return False
    return None if len(x) == number and len({part.shape for part in x}) == 1 else True


def which_are_several(given: Sequence[tuple[Any, int]]) -> list[bool]:
    """Which examples that a user gave are several arrays. What could be both is what the others are.

    Args:
        given: (x, the number of examples) of every part of every client.

    Raises:
        InvalidArgument: all of them could be both.
    """
    found = [given_as_several(x, number) for x, number in given]
    if found and all(several is None for several in found):
        number = given[0][1]
        raise InvalidArgument(
            f"examples are a tuple of {number} arrays of {number} rows: this may be {number} arrays side by side, or "
            "one array, row by row. Give several arrays as a dict, such as {'tokens': tokens, 'mask': mask}, and one "
            "array as one, with numpy.stack(x)"
        )
    return [any(found) if several is None else several for several in found]


def checked_examples(x: Any, what: str, check: Callable[[Any, str], np.ndarray]) -> Any:
    """The arrays of a dict or a tuple, each checked, in the same structure.

    Args:
        x: from a user; `given_as_several` is true for it.
        what: whose examples they are, for errors.
        check: (array, what) -> the checked array.

    Raises:
        InvalidArgument: there is no array; a name is no text; arrays are nested; or arrays differ in number of rows.
    """
    if not x:
        raise InvalidArgument(f"{what} examples are a dict without arrays: give at least one")
    for name in x if isinstance(x, Mapping) else ():
        if not isinstance(name, str):
            raise InvalidArgument(f"{what} examples: the arrays of a dict are named by texts, found {name!r}")
    found = {}
    for name, part in zip(names_of_arrays(x), split(x), strict=True):
        if isinstance(part, Mapping | tuple):
            raise InvalidArgument(
                f"{what} examples: {name!r} is itself a {type(part).__name__}. A dict or a tuple holds arrays only: "
                "give all arrays side by side"
            )
        found[name] = check(part, f"{what}, {name!r}:")
    rows = {name: len(part) for name, part in found.items()}
    if len(set(rows.values())) > 1:
        raise InvalidArgument(f"{what} examples: the arrays differ in number of rows: {rows}")
    return joined(list(found.values()), x)


def same_arrays(xs: Sequence[Any], whose: Sequence[str]) -> None:
    """Checks that the examples of all clients have the same arrays of the same shapes.

    Args:
        xs: arrays, or dicts or tuples of them, [N, ...] each.
        whose: the name of each, for the error.

    Raises:
        InvalidArgument: one has other arrays than the first.
    """

    def form(x: Any) -> Any:
        return joined([part.shape[1:] for part in split(x)], x)

    for x, name in zip(xs, whose, strict=True):
        if form(x) != form(xs[0]):
            raise InvalidArgument(
                f"all examples must have the same arrays: those of {whose[0]} are {shape_text(form(xs[0]))}, those of "
                f"{name} {shape_text(form(x))}. Sequences of different lengths are made equal by padding: fill them up "
                "with a number that means nothing, such as token 0, and give a mask or use Embedding(mask_zero=True)"
            )
