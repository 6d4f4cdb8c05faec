"""A source: a train and a test set of labelled examples, as arrays that were checked once."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tfpfl.checks import InvalidArgument

MOST_CLASSES = 1_000_000  # if no class names are given; every class gets a name in the manifest
LARGEST = 1e15  # of an example's numbers; sums of squares of larger ones soon overflow in float32


class Source(NamedTuple):
    """Examples with global labels, before they are divided among clients.

    Make one with `load_source` or `Source.from_arrays`: these check the arrays, `Source(...)` does not.
    """

    name: str
    version: str
    x_train: np.ndarray  # uint8 or float32 [N, ...]
    y_train: np.ndarray  # int32 [N], in [0, C)
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: Sequence[str]  # [C]
    scale: float = 1.0  # x as floats is raw * scale + shift
    shift: float = 0.0
    key_train: np.ndarray | None = None  # [N]: the natural client of every example, for the partitioner `natural`
    key_test: np.ndarray | None = None
    group_train: np.ndarray | None = None  # int [N], >= 0: examples of one group stay together in a validation cut
    options: Mapping[str, Any] = {}  # the other options that made this source, for the manifest

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
        scale: float | None = None,
        shift: float = 0.0,
        key: ArrayLike | None = None,
        key_test: ArrayLike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> "Source":
        """Makes a source of arrays in memory.

        Args:
            x, y: training examples [N, ...] and integer labels [N]. uint8 stays uint8; other numbers become float32.
            x_test, y_test: the test set. Default: every fourth example of each class is taken from the training set.
            name, version: the name and the version of the source, for the manifest.
            class_names: the names of all C classes; default: the numbers 0..C-1, up to the largest label.
            scale, shift: x as floats is raw * scale + shift. Default: scale 1/255 for uint8 and 1 otherwise, shift 0.
            key, key_test: the natural client of every example, such as its writer; default: none.
            options: more entries for the manifest.

        Raises:
            InvalidArgument: there are no training examples; examples and labels (or keys) differ in number; x is not
                numeric, not finite or without features; labels are not integers in [0, C), or are above a million
                without class names; train and test examples differ in shape or dtype; only one of x_test and y_test,
                or of key and key_test, is given; scale or shift is not finite, or makes examples larger than 1e15.
        """
        x, y = as_examples(x, "training"), as_labels(y, "training")
        check_same_length(x, y, "training")
        if not len(x):
            raise InvalidArgument("there are no training examples")
        if (x_test is None) != (y_test is None):
            raise InvalidArgument("x_test and y_test come together: one of them is missing")
        key = None if key is None else np.asarray(key)
        if key is not None and key.shape != (len(x),):
            raise InvalidArgument(f"key must have one entry per training example: shape {key.shape} for {len(x)}")
        if x_test is None or y_test is None:
            test = every_nth(y, 4)
            x, y, x_test, y_test = x[~test], y[~test], x[test], y[test]
            if key is not None:
                key, key_test = key[~test], key[test]
        x_test, y_test = as_examples(x_test, "test"), as_labels(y_test, "test")
        check_same_length(x_test, y_test, "test")
        if x.shape[1:] != x_test.shape[1:] or (len(x_test) and x.dtype != x_test.dtype):
            raise InvalidArgument(
                f"training and test examples must be alike in dtype and shape, found {x.dtype} {x.shape[1:]} and "
                f"{x_test.dtype} {x_test.shape[1:]}"
            )
        key_test = None if key_test is None else np.asarray(key_test)
        if (key is None) != (key_test is None) or (key_test is not None and key_test.shape != (len(x_test),)):
            raise InvalidArgument("key and key_test come together, one entry per example")
        top = int(max(y.max(initial=-1), y_test.max(initial=-1)))
        if class_names is None and top >= MOST_CLASSES:
            raise InvalidArgument(
                f"labels go up to {top}, which would make {top + 1} classes, and at most {MOST_CLASSES} are possible: "
                "number the classes from 0 on, as np.unique(y, return_inverse=True) does"
            )
        class_names = [str(c) for c in (range(top + 1) if class_names is None else class_names)]
        if top >= len(class_names):
            raise InvalidArgument(f"labels go up to {top}, but there are only {len(class_names)} class names")
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
        return cls(name, version, x, y, x_test.astype(x.dtype), y_test, class_names, scale, float(shift), key, key_test,
                   None, dict(options or {}))  # fmt: skip


def as_examples(x: ArrayLike, what: str) -> np.ndarray:
    """The examples as an array uint8 or float32 [N, ...]; a vector [N] becomes [N, 1].

    Args:
        x: anything that NumPy makes an array of.
        what: the name of the part in errors, such as 'training'.

    Raises:
        InvalidArgument: x is not numeric, a scalar, without features, or not finite as float32.
    """
    x = as_array(x, f"{what} examples")
    if x.ndim < 1 or x.dtype.kind not in "biuf":
        raise InvalidArgument(
            f"{what} examples must be an array of numbers [N, ...], found {x.dtype} of shape {x.shape}"
        )
    if x.ndim == 1:
        x = x[:, None]  # one feature
    if 0 in x.shape[1:]:
        raise InvalidArgument(f"{what} examples have no features: the array has shape {x.shape}")
    if x.dtype == np.uint8:
        return x
    with np.errstate(over="ignore"):  # the next lines say it
        x = x.astype(np.float32)
    bad = ~np.isfinite(x).reshape(len(x), -1).all(1) if len(x) else np.zeros(0, bool)
    if bad.any():
        raise InvalidArgument(f"{what} examples must be finite: {bad.sum()} are not, first number {int(bad.argmax())}")
    return x


def as_labels(y: ArrayLike, what: str) -> np.ndarray:
    """The labels as an array int32 [N]; the arguments are those of `as_examples`.

    Raises:
        InvalidArgument: y is not a vector, its values are not integers, or one is negative or above 2^31 - 1.
    """
    y = as_array(y, f"{what} labels")
    if y.ndim != 1:
        raise InvalidArgument(f"{what} labels must be a vector of class ids, found shape {y.shape}")
    if y.dtype.kind not in "iu" and len(y):
        raise InvalidArgument(f"{what} labels must be integers, found {y.dtype}")
    if len(y) and (y.min() < 0 or y.max() > np.iinfo(np.int32).max):
        raise InvalidArgument(f"{what} labels must be class ids >= 0, found {y.min()}..{y.max()}")
    return y.astype(np.int32)


def as_array(values: ArrayLike, what: str) -> np.ndarray:
    """The values as an array; `what` names them in errors.

    Raises:
        InvalidArgument: they are lists of different lengths.
    """
    try:
        return np.asarray(values)
    except ValueError as error:
        raise InvalidArgument(f"{what} cannot be made an array: {error}") from error


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
