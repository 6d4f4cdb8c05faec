"""What users give as arrays: NumPy's own, lists, or columns of other packages."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tfpfl.checks import InvalidArgument, warn_user

LISTED = 20  # at most so many columns are named in a message
EXACT = 2**24  # float32 has every whole number up to this one
COARSE = 1e-3  # of the range of a column: if float32 moves a number further, it is too coarse for the column
NOISE = 1e-10  # of its largest number: a smaller range is what rounding in float64 leaves of a constant


def as_array(values: ArrayLike, what: str, mend: str = "") -> np.ndarray:
    """The values as an array; `what` names them in errors, and `mend` says what to do about different shapes.

    A list of texts and something else is an array of objects: NumPy would make the text 'nan' of NaN, and '1' of 1.

    Raises:
        InvalidArgument: they are lists of different lengths, values of a masked array are masked, or a text has a NUL.
    """
    _check_mask(values, what)
    try:
        found = np.asarray(values)
        texts = found.dtype.kind in "US" and not hasattr(values, "dtype")
        whole = np.asarray(values, object) if texts else found
    except ValueError as error:
        shapes = _shapes(values)
        told = f"they have different shapes, {shapes}" if shapes else str(error)
        raise InvalidArgument(f"{what} cannot be made an array: {told}{mend}") from error
    if texts:
        if not all(isinstance(value, str | bytes) for value in whole.flat):
            return whole
        without_nul(whole.flat, what)
    return found


def _shapes(values: Any) -> str:
    """The first two different shapes of a list's parts, in words; '' if that is not what is wrong."""
    shapes: dict[tuple[int, ...], int] = {}
    for number, part in enumerate(values if isinstance(values, list | tuple) else []):
        try:
            shapes.setdefault(np.shape(part), number)
        except ValueError:  # lists of different lengths inside
            return ""
        if len(shapes) == 2:
            return " and ".join(f"{list(shape)} (number {first})" for shape, first in shapes.items())
    return ""


def _check_mask(values: Any, what: str) -> None:
    """Checks that nothing is masked, because `np.asarray` keeps the numbers under a mask, which nobody may mean."""
    for part in values if isinstance(values, list | tuple) else [values]:
        if isinstance(part, np.ma.MaskedArray) and (number := int(np.sum(part.mask))):
            raise InvalidArgument(
                f"{what}: {number} values of a masked array are masked. Fill them in, for example with "
                "np.ma.filled(array, 0), or leave these examples out"
            )


def check_same_columns(parts: Iterable[tuple[str, Any]]) -> None:
    """Checks that DataFrames have the same columns in the same order, as their numbers are read by their places.

    Args:
        parts: (what it is, for the error; examples). Other examples than DataFrames have no names of columns.

    Raises:
        InvalidArgument: the columns of one have other names than those of the first.
    """
    frames = [(what, list(x.columns)) for what, x in parts if hasattr(x, "columns") and hasattr(x, "to_numpy")]
    for what, names in frames[1:]:
        for place, (first, name) in enumerate(zip(frames[0][1], names, strict=False), 1):
            if name != first:
                raise InvalidArgument(
                    f"the columns of DataFrames differ: number {place} is {cut(first)} in {frames[0][0]}, and "
                    f"{cut(name)} in {what}. The numbers of a DataFrame are read by their places: give all of them "
                    "the same columns in one order, for example with x[columns]"
                )


def without_nul(texts: Iterable[Any], what: str) -> list[Any]:
    """Texts or bytes, after the check that none has the character NUL; `what` names them in errors.

    NumPy drops it at the end of a text, so that two names would become one.

    Raises:
        InvalidArgument: one has it.
    """
    found = list(texts)
    for text in found:
        if ("\0" if isinstance(text, str) else b"\0") in text:
            raise InvalidArgument(
                f"{what}: the text {cut(text)} has the character NUL (\\0) in it, which is lost at the end of a text, "
                "so that two names could become one: remove it from the data"
            )
    return found


def say_alike(what: str, names: Iterable[str]) -> None:
    """Warns of names that differ only in spaces or only in capitals; `what` says of what they are.

    Single letters may differ in capitals: classes of handwriting do.
    """
    spaces: dict[str, str] = {}
    capitals: dict[str, str] = {}
    pairs = []
    for name in names:
        plain_name = " ".join(name.split())
        first = spaces.setdefault(plain_name, name)
        if first != name:
            warn_user(
                f"the {what} {cut(first)} and {cut(name)} differ only in spaces: they are taken for two. If they are "
                "one, correct the data"
            )
            continue
        first = capitals.setdefault(plain_name.lower(), name)
        if first != name and len(plain_name) > 1:
            pairs.append((first, name))
    if pairs:
        more = f", and {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
        warn_user(
            f"the {what} {cut(pairs[0][0])} and {cut(pairs[0][1])} differ only in capitals{more}: they are taken for "
            "two. If they are one, correct the data"
        )


def first_of(texts: Sequence[str], most: int = LISTED) -> str:
    """At most so many of them, and how many more there are."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def rounded_whole(x: np.ndarray) -> np.ndarray:
    """Which columns of finite numbers [N, D] are whole numbers that float32 cannot all tell apart: bool [D]."""
    found = np.maximum(np.abs(x.min(0).astype(np.float64)), np.abs(x.max(0).astype(np.float64))) > EXACT
    for place in np.flatnonzero(found):  # one by one, to save memory
        column = x[:, place].astype(np.float64)
        found[place] = (column == np.rint(column)).all() and (_as_float32(column) != column).any()
    return found


def coarse(x: np.ndarray) -> np.ndarray:
    """Which columns of finite numbers [N, D] lie so near each other and so far from 0 that float32 is too coarse."""
    low, high = x.min(0).astype(np.float64), x.max(0).astype(np.float64)
    spread, largest = high - low, np.maximum(np.abs(low), np.abs(high))
    found = (largest * np.finfo(np.float32).eps > COARSE * spread) & (spread > NOISE * largest)
    for place in np.flatnonzero(found):
        column = x[:, place].astype(np.float64)
        found[place] = np.abs(_as_float32(column) - column).max() > COARSE * spread[place]
    return found


def _as_float32(column: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # such numbers are refused elsewhere
        return column.astype(np.float32)


def is_missing(value: Any) -> bool:
    """Whether a value is empty: None, NaN, NaT, pandas' NA, or a text without characters other than spaces."""
    if isinstance(value, np.ndarray | list | tuple):  # several values
        return False
    if isinstance(value, str | bytes):
        return not value.strip()
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas' NA is neither equal nor unequal to itself
        return True


def as_text(value: Any, what: str) -> str:
    """A name as text. Bytes, which columns of some files have, are text in UTF-8; `what` names the value in errors.

    Raises:
        InvalidArgument: the bytes are no text in UTF-8: what cannot be read would make one name of different ones.
    """
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"{what} is {plain(value)!r}, which is no text in UTF-8. Give texts, for example name.decode('latin-1')"
        ) from None


def plain(value: Any) -> Any:
    """A NumPy scalar as Python's own, which `repr` shows without its type on every version of NumPy."""
    return value.item() if isinstance(value, np.generic) else value


def as_written(value: Any) -> Any:
    """A NumPy scalar as Python's own; of a smaller float the number that was written: np.float32(0.7) is 0.7.

    As a float64 it is 0.699999988, and seven of ten clients would be six.
    """
    return float(str(value)) if isinstance(value, np.float16 | np.float32) else plain(value)


def cut(value: Any) -> str:
    """A cell or a name for messages, in at most 40 characters."""
    shown = repr(plain(value))
    return shown if len(shown) <= 40 else shown[:39] + "…"


def add_arrays(digest: Any, arrays: Iterable[np.ndarray]) -> None:
    """Adds arrays to a hash of hashlib: of each its dtype, its shape and its numbers."""
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
