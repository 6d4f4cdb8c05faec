"""The natural keys of examples, such as their writers: a client for each, and never two people in one."""

from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from tfpfl.checks import InvalidArgument
from tfpfl.data.arrays import as_array, is_missing, plain


def as_keys(keys: ArrayLike, what: str) -> np.ndarray:
    """Keys as an array, as they are given; `what` names them in errors.

    Raises:
        InvalidArgument: a key is missing (None or NaN).
    """
    found = as_array(keys, what)
    if found.dtype.kind == "f" and not hasattr(keys, "dtype"):  # NumPy makes floats of a list of large integers
        whole = np.asarray(keys, object)
        found = whole if all(isinstance(key, int) for key in whole.flat) else found
    if found.dtype.kind in "fcmMO":
        missing = [is_missing(key) and not isinstance(key, str | bytes) for key in found.flat]
        if any(missing):
            raise InvalidArgument(
                f"{what}: {sum(missing)} examples have no key, the first is number {missing.index(True)}. Give every "
                "example the client that it is of, or leave these examples out"
            )
    return found


def sorted_keys(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different keys of the training and the test examples, sorted, and the place of every example's key.

    Args:
        train, test: the keys [N_train] and [N_test].

    Returns:
        (keys [K], int [N_train + N_test]).

    Raises:
        InvalidArgument: two different keys could be taken for one: floats so large that not every whole number is one,
            or texts beside numbers.
    """
    keys = np.concatenate([train, test])
    if len({part.dtype.kind in "US" for part in (train, test) if len(part)}) > 1:
        keys = np.concatenate([part.astype(object) for part in (train, test)])  # NumPy would make texts of numbers
    if keys.dtype.kind == "f":
        exact = 2 ** (np.finfo(keys.dtype).nmant + 1)  # up to here, every whole number is a float
        for part in (train, test):
            if part.dtype.kind == "f" and (np.abs(part) > exact).any():
                _refuse_large(part[np.abs(part) > exact][0])
        if any(part.dtype.kind in "iu" and len(part) and _largest(part) > exact for part in (train, test)):
            keys = np.concatenate([part.astype(object) for part in (train, test)])  # Python's integers are all exact
    if keys.dtype == object:
        sorts = {_sort(key): key for key in keys}
        if len(sorts) > 1:
            shown = " and ".join(f"{plain(key)!r} ({sort})" for sort, key in list(sorts.items())[:2])
            raise InvalidArgument(
                f"the natural keys must be all texts or all numbers, found {shown}: make them one type, for example "
                "with str"
            )
        large = [key for key in keys if isinstance(key, float | np.floating) and abs(float(key)) > 2**53]
        if large:
            _refuse_large(large[0])
    try:
        found, place = np.unique(keys, return_inverse=True)
    except TypeError:  # of objects
        raise InvalidArgument(
            f"natural keys that cannot be sorted, such as {plain(keys[0])!r}: give texts or numbers"
        ) from None
    return found, place.reshape(-1)


def _largest(keys: np.ndarray) -> int:
    return max(abs(int(keys.min())), abs(int(keys.max())))


def _sort(key: Any) -> str:
    if isinstance(key, str):
        return "text"
    is_number = isinstance(key, int | float | np.integer | np.floating) and not isinstance(key, bool)
    return "number" if is_number else type(key).__name__


def _refuse_large(key: Any) -> NoReturn:
    raise InvalidArgument(
        f"the natural key {plain(key)!r} is a float that is too large: from there on, different whole numbers are one "
        "float, so that two clients would become one. Give the keys as integers or texts"
    )
