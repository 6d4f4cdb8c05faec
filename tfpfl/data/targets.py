"""Targets: what a model is to predict where it is no class. A vector of numbers for every example, float32 [N, D].

real      finite numbers, for regression
count     finite numbers >= 0
binary    0 or 1 for each output: an example may have several labels, or none
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tfpfl.checks import InvalidArgument, check_choice, one_line, warn_user
from tfpfl.data.arrays import as_array, coarse, first_of
from tfpfl.data.manifest import SORTS, FederationError
from tfpfl.data.source import LARGE, LARGEST, listed_names

FILE = "targets.raw"

# What the targets of each sort must be, and what to do about others.
_RULES = {
    "real": ("finite", "fill them in, or leave these examples out"),
    "count": ("finite and not below 0", "correct them, or take targets='real' for numbers of any sign"),
    "binary": (
        "0 or 1",
        "give a 1 to every output that an example has and a 0 to all others; numbers are targets='real', and the ids "
        "of classes are labels, without targets=",
    ),
}


class Targets(NamedTuple):
    """What the targets of a federation are."""

    sort: str  # 'real', 'count' or 'binary'
    width: int  # D, the number of outputs
    names: tuple[str, ...]  # [D], of the outputs, as they were given; by default 'y0', 'y1', ...

    @classmethod
    def of_manifest(cls, manifest: dict) -> "Targets | None":
        """The targets of a federation with this manifest; None if its examples have classes."""
        entry = manifest.get("targets")
        if entry is None:
            return None
        return cls(entry["sort"], entry["width"], tuple(entry["names"] or _numbered(entry["width"])))

    @classmethod
    def named(cls, sort: str, width: int, names: Sequence[str] | None) -> "Targets":
        """Targets with these names of outputs; None: 'y0', 'y1', ...

        Raises:
            InvalidArgument: the names are no list, there are more or fewer than outputs, or two outputs have one name.
        """
        given = listed_names(names)
        names = _numbered(width) if given is None else given
        if len(names) != width:
            raise InvalidArgument(f"targets have {width} outputs, but class_names has {len(names)} names: name each")
        if len(set(names)) < width:
            raise InvalidArgument("class_names has one name twice: make them different, as tables name outputs by them")
        return cls(sort, width, tuple(names))

    def entry(self) -> dict[str, Any]:
        """The entry of the manifest."""
        own = list(self.names) != _numbered(self.width)
        return {"sort": self.sort, "width": self.width, "names": list(self.names) if own else None}


def _numbered(width: int) -> list[str]:
    return [f"y{i}" for i in range(width)]


def check_sort(sort: str | None) -> None:
    """Checks the argument `targets=`.

    Raises:
        InvalidArgument: it is none of the sorts, and not None.
    """
    if sort is not None:
        check_choice(targets=(sort, SORTS))


def as_targets(y: ArrayLike, sort: str, what: str, row: str = "number {}", first: int = 0) -> np.ndarray:
    """Targets as an array float32 [N, D]; a vector [N] becomes [N, 1].

    Args:
        y: anything that NumPy makes an array of.
        sort: 'real', 'count' or 'binary'.
        what: whose targets they are, for errors, such as "client 'ann': train".
        row: how an error calls the first bad example; it is formatted with the example's place.
        first: the place of the first example.

    Raises:
        InvalidArgument: y is not numeric or has another shape, or a number is not one of this sort.
    """
    y = as_array(y, f"{what} targets")
    if y.ndim not in (1, 2) or 0 in y.shape[1:] or (y.dtype.kind not in "biuf" and len(y)):
        raise InvalidArgument(
            f"{what} targets must be numbers [N] or [N, D], found {y.dtype} of shape {y.shape}. Names of classes are "
            "labels: give them without targets="
        )
    y = y.reshape(len(y), -1) if len(y) else np.zeros((0, *(y.shape[1:] or (1,))))
    check_values(y, sort, what, row, first)
    most = max(-float(y.min()), float(y.max())) if len(y) else 0.0  # the smallest int64 has no np.abs
    if most > LARGEST:
        raise InvalidArgument(
            f"{what} targets are at most {LARGEST:g}, because float32 overflows; found {most:.3g}: take a larger unit"
        )
    stored = y.astype(np.float32)
    if len(y) and (bad := coarse(y)).any():
        largest = np.abs(stored[:, bad]).max()
        warn_user(
            f"targets near {largest:.1g} are stored as float32, in which numbers of this size are rounded to "
            f"multiples of {np.spacing(largest):g}: too coarse for targets that lie so near each other. Subtract one "
            "number from all of them, such as the mean of the training targets"
        )
    return stored


def say_large(y: np.ndarray, targets: Targets) -> None:
    """Warns of numbers of any sign, float32 [N, D], that are so large that a squared error's gradient soon explodes."""
    if targets.sort != "real" or not len(y):
        return
    size = np.sqrt(np.square(y, dtype=np.float64).mean(0))
    sizes = zip(targets.names, size, strict=True)
    found = [f"{one_line(name, 30)} ({value:.3g})" for name, value in sizes if value > LARGE]
    if found:
        warn_user(
            f"targets are large numbers, with their root mean square: {first_of(found, 8)}. The gradient of a "
            "squared error grows with them, and the usual rates are too large: subtract the mean and divide by the "
            "standard deviation of the training targets first, or take a larger unit"
        )


def check_values(y: np.ndarray, sort: str, what: str, row: str = "number {}", first: int = 0) -> None:
    """Checks that all targets [N, D] are numbers of a sort; arguments as for `as_targets`.

    Raises:
        InvalidArgument: one is not.
    """
    bad = ~_fine(y, sort).all(1)
    if bad.any():
        place = int(bad.argmax())
        found = y[place][~_fine(y[place], sort)][0]
        wanted, mend = _RULES[sort]
        raise InvalidArgument(
            f"{what} targets must be {wanted}: {bad.sum()} {'is' if bad.sum() == 1 else 'are'} not, the first is "
            f"{row.format(place + first)} with {found:g}. What to do: {mend}"
        )


def _fine(y: np.ndarray, sort: str) -> np.ndarray:
    if sort == "binary":
        return (y == 0) | (y == 1)
    return np.isfinite(y) & (y >= 0) if sort == "count" else np.isfinite(y)


def check_widths(ys: Sequence[np.ndarray], whose: Sequence[str]) -> None:
    """Checks that the targets of all clients are equally wide.

    Args:
        ys: arrays [N, D].
        whose: the name of each, for the error.

    Raises:
        InvalidArgument: one has another width than the first.
    """
    for y, name in zip(ys, whose, strict=True):
        if y.shape[1] != ys[0].shape[1]:
            raise InvalidArgument(
                f"targets must have one width: those of {whose[0]} are {ys[0].shape[1]} wide, those of {name} "
                f"{y.shape[1]}. Give every example a number for each output"
            )


def strata(y: np.ndarray, sort: str) -> np.ndarray:
    """A number for every example, so that each part of a cut gets its share of each number: int64 [N].

    Of binary targets, examples with the same outputs have the same number. Numbers have no kinds: all get 0.
    """
    if sort != "binary":
        return np.zeros(len(y), np.int64)
    return np.unique(y, axis=0, return_inverse=True)[1].reshape(-1)


def check_stored(manifest: dict, targets: np.ndarray) -> None:
    """Checks the targets of all examples, float32 [N, D], against a manifest that `check_manifest` accepts.

    Raises:
        FederationError: one is not a number of its sort.
    """
    sort = manifest["targets"]["sort"]
    bad = ~_fine(targets, sort).all(1)
    if bad.any():
        wanted = _RULES[sort][0]
        raise FederationError(f"{FILE} was changed: the targets of example {int(bad.argmax())} are not {wanted}")


def ones(y: np.ndarray, targets: Targets) -> np.ndarray:
    """The number of examples that have each output: int64 [D], from binary targets [N, D].

    Raises:
        InvalidArgument: the targets are numbers.
    """
    if targets.sort != "binary":
        raise InvalidArgument(
            f"there are no classes to count: the targets of this federation are {describe(targets)}. Read them with "
            "arrays() or raw()"
        )
    return np.asarray(y).sum(0, dtype=np.float64).astype(np.int64)


def describe(targets: Targets) -> str:
    """The targets in a few words.

    Examples:
        >>> describe(Targets("count", 2, ("visits", "falls")))
        'count, 2 wide: visits, falls'
        >>> describe(Targets("real", 1, ("y0",)))
        'real, 1 wide'
    """
    told = f"{targets.sort}, {targets.width} wide"
    if targets.entry()["names"] is None:
        return told
    shown = ", ".join(one_line(name, 30) for name in targets.names[:8])
    return f"{told}: {shown}{', ...' if targets.width > 8 else ''}"
