"""A source: a train and a test set of labelled examples, as arrays that were checked once."""

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tfpfl.checks import InvalidArgument, check_numbers, check_type, unknown, warn_user
from tfpfl.data.arrays import (
    as_array,
    as_text,
    check_same_columns,
    coarse,
    is_missing,
    plain,
    rounded_whole,
    say_alike,
    without_nul,
)
from tfpfl.data.keys import as_keys

MOST_CLASSES = 1_000_000  # if no class names are given; every class gets a name in the manifest
ONE_SHAPE = ". Give all examples one shape: for example, resize images, and pad lists of tokens to one length"
LARGE = 100.0  # a root mean square: there, least squares diverge with rates above 2 / LARGE² = 0.0002
LARGEST = 1e15  # of an example's numbers; sums of squares of larger ones soon overflow in float32


class Source(NamedTuple):
    """Examples with global labels, before they are divided among clients.

    Make one with `load_source` or `Source.from_arrays`: these check the arrays, `Source(...)` does not.
    """

    name: str
    version: str
    x_train: np.ndarray  # uint8, int32 or float32 [N, ...]
    y_train: np.ndarray  # int32 [N], in [0, C); with `targets`, float32 [N, D]
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: Sequence[str]  # [C]; with `targets`, the names of the D outputs
    scale: float = 1.0  # x as floats is raw * scale + shift
    shift: float = 0.0
    key_train: np.ndarray | None = None  # [N]: the natural client of every example, for the partitioner `natural`
    key_test: np.ndarray | None = None
    group_train: np.ndarray | None = None  # int [N], >= 0: examples of one group stay together in a validation cut
    options: Mapping[str, Any] = {}  # the other options that made this source, for the manifest
    targets: str | None = None  # the sort of targets, such as 'real', if these are no classes

    @classmethod
    def from_arrays(
        cls,
        x: ArrayLike,
        y: ArrayLike,
        x_test: ArrayLike | None = None,
        y_test: ArrayLike | None = None,
        *,
        name: str = "arrays",
        version: str = "",
        class_names: Sequence[str] | None = None,
        compact_labels: bool = False,
        scale: float | None = None,
        shift: float = 0.0,
        key: ArrayLike | None = None,
        key_test: ArrayLike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> "Source":
        """Makes a source of arrays in memory.

        Args:
            x, y: training examples [N, ...] and labels [N]. uint8 stays uint8, other integers become int32 if they
                fit, other numbers become float32. Labels are integers from 0 on, or names of classes (text).
            x_test, y_test: the test set. Default: every fourth example of each class is taken from the training set.
            name, version: the name and the version of the source, for the manifest.
            class_names: the names of all C classes. Default: if labels are names, these names, sorted; otherwise the
                numbers 0..C-1, up to the largest label.
            compact_labels: number the integer labels that occur anew, 0..C-1 in their order; each class is then named
                by its number in `y`. Otherwise classes that no example has stay, and a warning says so.
            scale, shift: x as floats is raw * scale + shift. Default: scale 1/255 for uint8, which is taken for pixels,
                and 1 otherwise, shift 0. For tokens stored as uint8 give scale=1.
            key, key_test: the natural client of every example, such as its writer; none may be missing. Default: no
                example has one.
            options: more entries for the manifest.

        Raises:
            InvalidArgument: there are no training examples; examples and labels (or keys) differ in number; x is not
                numeric, not finite or without features; labels are neither integers in [0, C) nor names, or are above a
                million without class names; train and test examples differ in shape or dtype; only one of x_test and
                y_test, or of key and key_test, is given; scale or shift is not finite, or makes examples larger than
                1e15.
        """
        for what, text in (("name", name), ("version", version)):
            check_type(what, text, str, "a text")
        check_type("options", options, (Mapping, NoneType), "a dict")
        check_numbers(shift=shift, **({} if scale is None else {"scale": scale}))
        check_same_columns((("the training examples", x), ("the test examples", x_test)))
        x, y = as_examples(x, "training"), as_labels(y, "training")
        check_same_length(x, y, "training")
        if not len(x):
            raise InvalidArgument("there are no training examples")
        if (x_test is None) != (y_test is None):
            raise InvalidArgument("x_test and y_test come together: one of them is missing")
        key = None if key is None else as_keys(key, "key")
        if key is not None and key.shape != (len(x),):
            raise InvalidArgument(f"key must have one entry per training example: shape {key.shape} for {len(x)}")
        if x_test is None or y_test is None:
            test = every_nth(y, 4)
            x, y, x_test, y_test = x[~test], y[~test], x[test], y[test]
            if key is not None:
                key, key_test = key[~test], key[test]
        x_test, y_test = as_examples(x_test, "test"), as_labels(y_test, "test")
        check_same_length(x_test, y_test, "test")
        if {x.dtype, x_test.dtype} == {np.dtype(np.int32), np.dtype(np.float32)}:
            x, x_test = x.astype(np.float32), x_test.astype(np.float32)
        if x.shape[1:] != x_test.shape[1:] or (len(x_test) and x.dtype != x_test.dtype):
            raise InvalidArgument(
                f"training and test examples must be alike in dtype and shape, found {x.dtype} {x.shape[1:]} and "
                f"{x_test.dtype} {x_test.shape[1:]}"
            )
        key_test = None if key_test is None else as_keys(key_test, "key_test")
        if (key is None) != (key_test is None) or (key_test is not None and key_test.shape != (len(x_test),)):
            raise InvalidArgument("key and key_test come together, one entry per example")
        (y, y_test), class_names = class_ids((y, y_test), class_names, compact_labels)
        scale_is_ours = scale is None
        scale = (1 / 255 if x.dtype == np.uint8 else 1.0) if scale is None else float(scale)
        if not (np.isfinite(scale) and np.isfinite(shift)):
            raise InvalidArgument(f"scale and shift must be finite, found {scale} and {shift}")
        for part in filter(len, (x, x_test)):
            largest = max(abs(float(value) * scale + shift) for value in (part.min(), part.max()))
            if not largest <= LARGEST:
                raise InvalidArgument(
                    f"examples are at most {LARGEST:g}, because float32 overflows; x * scale + shift goes up to "
                    f"{largest:.3g} with scale={scale:g} and shift={shift:g}. Take a smaller scale"
                )
        if scale_is_ours and x.dtype != np.uint8:
            _say_large(x)
        elif scale_is_ours and len(x) and x.max() <= 1:
            warn_user(
                "examples are uint8, as pixels from 0 to 255 are, and are divided by 255; but none is above 1. If they "
                "are zeros and ones, such as a mask or one-hot classes, give scale=1"
            )
        return cls(name, version, x, y, x_test.astype(x.dtype), y_test, class_names, scale, float(shift), key, key_test,
                   None, dict(options or {}))  # fmt: skip


def as_examples(x: ArrayLike, what: str) -> np.ndarray:
    """The examples as an array uint8, int32 or float32 [N, ...]; a vector [N] becomes [N, 1].

    Args:
        x: anything that NumPy makes an array of.
        what: the name of the part in errors, such as 'training'.

    Raises:
        InvalidArgument: x is not numeric, a scalar, without features, or not finite as float32.
    """
    x = as_array(x, f"{what} examples", ONE_SHAPE)
    if x.ndim < 1 or x.dtype.kind not in "biuf":
        raise InvalidArgument(
            f"{what} examples must be an array of numbers [N, ...], found {x.dtype} of shape {x.shape}"
            + (": convert them with .astype('float32')" if x.dtype.name == "bfloat16" else "")
        )
    if x.ndim == 1:
        x = x[:, None]  # one feature
    if 0 in x.shape[1:]:
        raise InvalidArgument(f"{what} examples have no features: the array has shape {x.shape}")
    if x.dtype == np.uint8:
        return x
    given = x
    if x.dtype.kind in "iu" and (not len(x) or _fits_int32(x)):
        x = x.astype(np.int32)
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # the next lines say it
            x = x.astype(np.float32)
    bad = ~np.isfinite(x).reshape(len(x), -1).all(1) if len(x) else np.zeros(0, bool)
    if bad.any():
        first = int(bad.argmax())
        if np.isfinite(given[first]).all():
            raise InvalidArgument(
                f"{what} examples must be finite as float32, whose largest number is 3.4e+38: {bad.sum()} are not, "
                f"first number {first}. Take a larger unit"
            )
        raise InvalidArgument(f"{what} examples must be finite: {bad.sum()} are not, first number {first}")
    if len(x) and given.dtype.itemsize > 2 and given.dtype != np.float32:
        _say_rounded(given.reshape(len(x), -1))
    return x


def _say_rounded(x: np.ndarray) -> None:
    """Warns of examples [N, D] that are not what a model gets: float32 makes one number of different ones."""
    whole = rounded_whole(x)
    if whole.any():
        warn_user(
            "examples have whole numbers beyond 2^24, which are rounded, because a model computes with float32: "
            "different ones may become one. If they are identifiers, leave them out; otherwise subtract one number "
            "from all of them, or take a larger unit"
        )
    if (coarse(x) & ~whole).any():
        warn_user(
            "examples have numbers that lie near each other and far from 0, such as times since 1970. A model computes "
            "with float32, which is too coarse for them: different ones may become one. Subtract one number from all "
            "of them, such as the mean of the training examples"
        )


def _say_large(x: np.ndarray) -> None:
    """A head's loss is curved as the features are squared: for large ones, the usual rates make steps too long.

    Whole numbers [N] and [N, T] may be tokens, whose size means nothing.
    """
    if x.dtype == np.int32 and x.ndim < 3:
        return
    size = np.linalg.norm(x.astype(np.float32, copy=False)) / np.sqrt(x.size)
    if size > LARGE:
        warn_user(
            f"examples are large numbers, with a root mean square of {size:.3g}. They are not scaled, and the usual "
            "rates are too large for them. Give pixels from 0 to 255 as uint8, which is divided by 255; standardize "
            "other numbers first; or say with scale=1 that the backbone scales them itself"
        )


def _fits_int32(x: np.ndarray) -> bool:
    return bool(x.min() >= np.iinfo(np.int32).min and x.max() <= np.iinfo(np.int32).max)


def as_labels(y: ArrayLike, what: str) -> np.ndarray:
    """The labels as an array [N], int32 or text; the arguments are those of `as_examples`.

    Raises:
        InvalidArgument: y is not a vector, its values are neither integers nor text, one is missing, or a number is
            negative or above 2^31 - 1.
    """
    y = as_array(y, f"{what} labels")
    if y.ndim != 1:
        raise InvalidArgument(
            f"{what} labels must be a vector of class ids, found shape {y.shape}. For one-hot rows give "
            "labels.argmax(1), for a single column labels[:, 0]. Several numbers that are to be predicted are targets: "
            "say so with targets='real', 'count' or 'binary'"
        )
    if not len(y):
        return y.astype(np.int32)
    if y.dtype.kind == "S" or (y.dtype == object and all(isinstance(name, bytes) for name in y)):
        y = np.array([as_text(name, f"{what} labels: number {i}") for i, name in enumerate(y)], object)
    whole = y.dtype == object and all(isinstance(label, Integral) and not isinstance(label, bool) for label in y)
    if y.dtype == object and not whole:  # integers are objects in pandas' Int64
        others = [i for i, name in enumerate(y) if not isinstance(name, str)]
        bad = next((i for i in others if is_missing(y[i])), next(iter(others), None))
        if bad is not None:
            raise InvalidArgument(
                f"{what} labels must be integers, or all names (text), found {type(y[bad]).__name__} "
                f"{plain(y[bad])!r} as number {bad}"
            )
    if y.dtype.kind in "OUT" and not whole:
        return y if y.dtype.kind == "U" else np.array(without_nul(y, f"{what} labels"))
    if y.dtype.kind == "b":
        return np.where(y, "True", "False")
    if y.dtype.kind not in "iu" and not whole:
        raise InvalidArgument(f"{what} labels must be integers, found {y.dtype}; or names of classes (text)")
    if y.min() < 0 or y.max() > np.iinfo(np.int32).max:
        raise InvalidArgument(
            f"{what} labels must be class ids >= 0, found {y.min()}..{y.max()}: number the classes from 0 on, or give "
            "their names, for example y.astype(str)"
        )
    return y.astype(np.int32)


def class_ids(
    parts: Sequence[np.ndarray], class_names: Sequence[str] | None, compact: bool
) -> tuple[list[np.ndarray], list[str]]:
    """Numbers the classes: the labels as ids int32 [N] in [0, C), and the names of the C classes.

    Args:
        parts: labels from `as_labels`, such as those of training and test.
        class_names, compact: as in `Source.from_arrays`.

    Raises:
        InvalidArgument: some labels are integers and some are names; `class_names` is no list, or lacks a name; two
            classes have one name; an id is not below C; or there are more than a million classes without names.
    """
    class_names = listed_names(class_names)
    found = [part for part in parts if len(part)]
    if len({part.dtype.kind == "U" for part in found}) > 1:
        raise InvalidArgument("labels must be all integers or all names of classes, found both")
    present = np.unique(np.concatenate(found)) if found else np.zeros(0, np.int32)
    if class_names is not None and len(set(class_names)) < len(class_names):
        raise InvalidArgument("class_names has one name twice: make them different, as tables name classes by them")
    if present.dtype.kind == "U":
        names = present.tolist() if class_names is None else class_names
        say_alike("classes", names)
        place = {name: i for i, name in enumerate(names)}
        absent = next((name for name in present.tolist() if name not in place), None)
        if absent is not None:
            raise InvalidArgument(unknown("class of a label", absent, names))
        ids = np.array([place[name] for name in present.tolist()], np.int32)
        return [ids[np.searchsorted(present, part)] if len(part) else np.zeros(0, np.int32) for part in parts], names
    if compact:
        if class_names is not None and len(class_names) != len(present):
            raise InvalidArgument(
                f"compact_labels numbers the {len(present)} classes that occur, and class_names has {len(class_names)} "
                "names: give one name for each"
            )
        names = [str(name) for name in (present.tolist() if class_names is None else class_names)]
        return [np.searchsorted(present, part).astype(np.int32) for part in parts], names
    top = int(present.max(initial=-1))
    if class_names is None and top >= MOST_CLASSES:
        raise InvalidArgument(
            f"labels go up to {top}, which would make {top + 1} classes, and at most {MOST_CLASSES} are possible: "
            "number the classes from 0 on with compact_labels=True"
        )
    names = [str(c) for c in (range(top + 1) if class_names is None else class_names)]
    if top >= len(names):
        raise InvalidArgument(f"labels go up to {top}, but there are only {len(names)} class names")
    if class_names is None and len(present) < top + 1:
        unused = np.setdiff1d(np.arange(top + 1), present)
        shown = ", ".join(map(str, unused[:5])) + (", ..." if len(unused) > 5 else "")
        warn_user(
            f"labels go up to {top}, but no example has the label {shown}: {len(unused)} of {top + 1} classes are "
            "empty, and their outputs in a head for all classes are never used. compact_labels=True (--compact-labels) "
            "numbers the other classes from 0 on; class_names=[...] says that the empty classes are meant"
        )
    return list(parts), names


def listed_names(class_names: Any, what: str = "class_names") -> list[str] | None:
    """Names of classes or outputs as texts, or None, after the check that they have an order: they are numbered by it.

    Raises:
        InvalidArgument: they are a set, or a dict, of which only the keys would be read; or one text, or no list at
            all; or a name is missing, such as None, or bytes that are no text.
    """
    if class_names is None:
        return None
    if isinstance(class_names, Mapping | Set | str) or not isinstance(class_names, Iterable):
        raise InvalidArgument(
            f"{what} must be a list with one name for each class, in the order of their numbers; found a "
            f"{type(class_names).__name__}"
        )
    names = list(class_names)  # it may be a generator
    for place, name in enumerate(names):
        if not isinstance(name, str | bytes) and is_missing(name):
            raise InvalidArgument(f"{what} has {plain(name)!r} as number {place}, which is no name: give every one")
    return [as_text(name, f"{what}: number {place}") for place, name in enumerate(names)]


def check_same_length(x: np.ndarray, y: np.ndarray, what: str) -> None:
    """Checks that there is one label for every example.

    Raises:
        InvalidArgument: x and y differ in length.
    """
    if len(x) != len(y):
        raise InvalidArgument(f"{what} examples and labels differ in number: {len(x)} and {len(y)}")


def every_nth(y: np.ndarray, n: int) -> np.ndarray:
    """Marks every n-th example of each class, in the order of y: bool [N]. A stratified split without randomness."""
    chosen = np.zeros(len(y), bool)
    for c in np.unique(y):
        chosen[np.flatnonzero(y == c)[n - 1 :: n]] = True
    return chosen
