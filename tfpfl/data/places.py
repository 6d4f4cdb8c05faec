"""A federation of places: clients whose examples nobody has but they themselves, and whose sizes are not known yet.

It says what an example and a label are, and how many clients there may be at most. A run on it is a live one: N_i and
K_i are what a device says when it joins (`tfpfl.live.enrolled`). On disk it is a federation like any other, in which
every place has two examples of zeros; nothing is trained on them.
"""

import math
import os
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, check_listed, check_numbers, check_whole_number
from tfpfl.data.federation import Federation
from tfpfl.data.population import whole_numbers
from tfpfl.data.source import MOST_CLASSES, Source, listed_names
from tfpfl.data.writing import absent, describe_source, write_federation

PLACES = "places"  # what the manifest has in place of a partitioner
_MOST_BYTES = 2**31  # of zeros
_DTYPES = ("uint8", "int32", "float32")


def is_places(federation: Federation) -> bool:
    """Whether a federation is one of places."""
    return federation.manifest["partitioner"]["name"] == PLACES


def make_places(
    out: str | os.PathLike,
    *,
    clients: int,
    example_shape: Sequence[int],
    class_names: Sequence[str] | int,
    dtype: str = "uint8",
    scale: float | None = None,
    shift: float = 0.0,
    name: str = "devices",
) -> Federation:
    """Makes a federation of places in the new folder `out`.

    Args:
        out: the folder to make; it must not exist yet.
        clients: the number of places: at most so many clients can join.
        example_shape: the shape of an example, such as (28, 28, 1).
        class_names: the names of the classes of all clients, or their number C.
        dtype: of an example before it is preprocessed: 'uint8' (pixels), 'int32' or 'float32'.
        scale, shift: how a device preprocesses an example: x * scale + shift. Default: 1/255 of pixels, 1 of others.
        name: the name of the data, for tables.

    Raises:
        InvalidArgument: a number is none or out of range; the names have no order, or one is empty or missing; or the
            zeros would take more than 2 GB.
        FederationError: `out` exists already.
    """
    folder = absent(out)
    check_whole_number(1, clients=clients)
    check_listed("example_shape", example_shape, "[28, 28, 1]")
    shape = tuple(whole_numbers("example_shape", list(example_shape)).tolist())
    if isinstance(class_names, Integral):
        names = [str(i) for i in range(min(int(class_names), MOST_CLASSES + 1))]
    else:
        names = listed_names(class_names) or []
    if clients >= 2**31 or not shape or min(shape) < 1 or not 2 <= len(names) <= MOST_CLASSES:
        found = class_names if isinstance(class_names, Integral) else len(names)
        raise InvalidArgument(
            f"places need fewer than 2^31 clients, a shape of positive numbers, and 2 to {MOST_CLASSES:,} classes; "
            f"found {clients} clients, shape {shape} and {found} classes"
        )
    if "" in names:
        raise InvalidArgument(
            f"class {names.index('')} has an empty name, and a device knows classes by their names: give it one"
        )
    if dtype not in _DTYPES:
        raise InvalidArgument(f"dtype must be one of {', '.join(_DTYPES)}; found {dtype!r}")
    if 2 * clients * math.prod(shape) * np.dtype(dtype).itemsize > _MOST_BYTES:
        raise InvalidArgument(f"{clients} places with examples of shape {shape} take more than 2 GB: take fewer")
    check_numbers(shift=shift, **({} if scale is None else {"scale": scale}))
    if scale is None:
        scale = 1 / 255 if dtype == "uint8" else 1.0
    if not all(map(math.isfinite, (scale, shift))):
        raise InvalidArgument(f"scale and shift must be finite, found {scale} and {shift}")
    x = np.zeros((2 * clients, *shape), dtype)
    y = np.zeros(len(x), np.int32)
    how: dict[str, Any] = {"name": name, "class_names": names, "scale": scale, "shift": shift}
    source = Source.from_arrays(x, y, x_test=x[:0], y_test=y[:0], **how)
    rows = [[np.array([2 * i, 2 * i + 1]), np.empty(0, np.int64), np.empty(0, np.int64)] for i in range(clients)]
    manifest = describe_source(source) | {
        "partitioner": {"name": PLACES, "arguments": {}},
        "seed": 0,
        "validation": 0.0,
    }
    path: Path = write_federation(folder, [(source.x_train, source.x_test)], y, rows, manifest, None)
    return Federation.load(path, verify=False)
