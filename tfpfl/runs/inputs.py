"""Reads the examples for which a client's model shall predict: from arrays, tables of numbers and pictures."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument, one_line
from tfpfl.data import Federation
from tfpfl.data.arrays import EXACT
from tfpfl.data.description import feature_columns
from tfpfl.data.layout import is_several, shape_text
from tfpfl.data.table import table_examples
from tfpfl.models import SplitModel

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif")
KINDS = (".npy", ".npz", ".csv", ".parquet", *PICTURES)


class Examples(NamedTuple):
    """Examples from a file, and their labels if the file has them."""

    x: np.ndarray  # float32 [N, ...], of the federation's example shape
    y: np.ndarray | None = None  # labels [N] as they stand in the file; `label_outputs` says what they mean


def read_examples(path: str | Path, federation: Federation) -> Examples:
    """Reads a file of examples, and checks that they have the shape of the federation's.

    Args:
        path: FILE.npy, an array [N, ...] or a single example; FILE.npz, which has such an array called x (or only one
            array) and may have labels y [N]; FILE.csv or FILE.parquet, one example in each row; or a picture, PNG or
            JPEG, which is one example. If `Federation.from_table` made the federation, the columns of a table are found
            by their names, and those of the client, the label and the split are left out, with a warning. Otherwise, or
            if a CSV file does not name them, they are taken in the order of the example's array. Grey pictures become
            coloured, and coloured ones grey, as the federation's examples are.
        federation: says what an example is.

    Raises:
        InvalidArgument: the file cannot be read, is of another kind, has no examples, has examples of another shape, or
            has NaN, infinity or something that is no number; a column of a table is missing or unknown.
        Unavailable: a Parquet file, and pyarrow is not installed.
    """
    path = Path(path)
    if is_several(federation.example_shape):
        raise InvalidArgument(
            f"an example of this run is several arrays, {shape_text(federation.example_shape)}, and a file of examples "
            "has one: take `Run.keras_model` in Python and give it the arrays"
        )
    kind = path.suffix.lower()
    readers: dict[str, Callable[[Path, Federation], Examples]] = {
        ".csv": _table,
        ".parquet": _table,
        ".npy": _npy,
        ".npz": _npz,
    }
    if kind not in KINDS:
        raise InvalidArgument(f"{path} cannot be read: examples are in files {', '.join(f'*{k}' for k in KINDS)}")
    if not path.exists():
        raise InvalidArgument(f"there is no file {path}")
    try:
        found = readers.get(kind, _picture)(path, federation)
    except (OSError, EOFError, ValueError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{path} cannot be read as {kind}: {_first_line(error)}") from error
    x = _shaped(found.x, federation.example_shape, path)
    bad = ~np.isfinite(x).reshape(len(x), -1).all(1)
    if bad.any():
        raise InvalidArgument(
            f"{path}: {bad.sum()} of {len(x)} examples have NaN or infinity, first number {int(bad.argmax())}. Replace "
            "or remove them"
        )
    axes = (1,) if federation.targets is None else (1, 2)  # of targets, an example may have several
    if found.y is not None and (found.y.ndim not in axes or len(found.y) != len(x)):
        raise InvalidArgument(
            f"{path}: the labels y must be one for each of the {len(x)} examples, found {found.y.shape}"
        )
    return Examples(x, found.y)


def label_outputs(y: np.ndarray, classes: Sequence[str], names: Sequence[str], path: str | Path) -> np.ndarray:
    """The outputs of a client's head for labels: int64 [N].

    Args:
        y: labels: names of classes, or integers. Integers are names, where the names of all classes are integers (such
            as 1 to 3, which the federation numbers 0 to 2). Otherwise they are ids, 0 for the first name.
        classes: what the outputs stand for; see `class_names`.
        names: the names of all classes of the federation.
        path: the file, for messages.

    Raises:
        InvalidArgument: a label is no class of this client.
    """
    place = {name: k for k, name in enumerate(classes)}
    if y.dtype.kind == "f":
        raise InvalidArgument(f"{path}: the labels y must be whole numbers or names of classes, found {y.dtype}")
    if y.dtype.kind in "iu":
        are_names = all(re.fullmatch(r"0|-?[1-9][0-9]*", name) for name in names)
        given = [str(c) if are_names else names[c] if 0 <= c < len(names) else f"id {c}" for c in y.tolist()]
    else:
        given = [one_line(c.decode() if isinstance(c, bytes) else c) for c in y.tolist()]
    unknown = sorted(set(given) - set(place))
    if unknown:
        raise InvalidArgument(
            f"{path}: the labels y have classes that this client's model does not know: {', '.join(unknown[:10])}. It "
            f"knows {', '.join(list(place)[:20])}. Remove these examples, or take the model of a client that has the "
            "classes"
        )
    return np.array([place[name] for name in given], np.int64)


def check_tokens(x: np.ndarray, model: SplitModel, path: str | Path) -> None:
    """Checks examples for a backbone that takes whole numbers, such as tokens for an Embedding.

    Args:
        x: the examples, float32 [N, ...].
        model: the run's model.
        path: the file, for messages.

    Raises:
        InvalidArgument: a number is not whole, is no row of the Embedding, or is too large to be exact in float32.
    """
    if model.reads != "whole":
        return
    low, high = (-EXACT, EXACT) if model.vocabulary is None else (0, model.vocabulary - 1)
    wrong = (x % 1 != 0) | (x < low) | (x > high)
    if wrong.any():
        example = int(np.argwhere(wrong)[0, 0])
        raise InvalidArgument(
            f"{path}: example {example} has {x[wrong][0]:.8g}, but the backbone takes whole numbers from {low} to "
            f"{high} (such as tokens for an Embedding). Number the tokens as in the run's examples"
        )


def looks_decoded(x: np.ndarray, federation: Federation) -> bool:
    """Whether examples that should be raw look as if they were decoded already: no number is above 1, but raw ones are.

    That can be only if the federation stores integers that are scaled.
    """
    scale = federation.manifest["preprocessing"]["scale"]
    return federation.manifest["dtype"] == "uint8" and scale < 0.5 and float(x.max()) <= 1 and bool((x % 1).any())


def _npy(path: Path, _: Federation) -> Examples:
    return Examples(np.load(path, allow_pickle=False))


def _npz(path: Path, _: Federation) -> Examples:
    with np.load(path, allow_pickle=False) as file:
        if isinstance(file, np.ndarray):
            return Examples(file)
        names = file.files
        if "x" not in names and len(names) != 1:
            raise InvalidArgument(f"{path} must have an array called x, found {', '.join(names) or 'no array'}")
        x = "x" if "x" in names else names[0]
        return Examples(file[x], file["y"] if "y" in names and x != "y" else None)


def _table(path: Path, federation: Federation) -> Examples:
    """A table of the columns from which the federation was made, or, if they have no names, of numbers in order."""
    options = federation.manifest["source"]["options"]
    named, size = feature_columns(federation), int(np.prod(federation.example_shape))
    special = {options[what]: what for what in ("client", "label", "split") if isinstance(options.get(what), str)}
    if isinstance(options.get("label"), list):  # of targets, one column for each output
        special |= {str(name): "label" for name in options["label"]}
    x = table_examples(path, named, size, special if named else None)
    return Examples(x.reshape(len(x), *federation.example_shape))


def _picture(path: Path, federation: Federation) -> Examples:
    shape, preprocessing = federation.example_shape, federation.manifest["preprocessing"]
    channels = shape[2] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or channels not in (1, 3):
        raise InvalidArgument(
            f"{path} is a picture, but examples of this run are {_shape(shape)}: give arrays, as .npy"
        )
    # The largest pixel value of the data set, which is decoded to 1: 255 in most, 16 in scikit-learn's digits.
    most = (1 - preprocessing["shift"]) / preprocessing["scale"]
    if federation.manifest["dtype"] != "uint8" or not 1 < most < 256:
        raise InvalidArgument(
            f"{path} is a picture, but the examples of this run are {federation.manifest['dtype']} numbers that are "
            "not pixels from 0 to a largest value: give them as .npy"
        )
    picture = tf.io.decode_image(path.read_bytes(), channels=channels, expand_animations=False).numpy()
    if picture.shape[:2] != tuple(shape[:2]):
        raise InvalidArgument(
            f"{path} is {picture.shape[1]} x {picture.shape[0]} pixels, but examples of this run are {shape[1]} x "
            f"{shape[0]}: make the picture of that size first"
        )
    return Examples(np.rint(picture.astype(np.float64) * (most / 255)).reshape(1, *shape))


def _shaped(x: np.ndarray, shape: tuple, path: Path) -> np.ndarray:
    """The examples as float32 [N, *shape]; a single example gets N = 1, and axes of size 1 may be missing."""
    if x.dtype.kind not in "biuf":
        raise InvalidArgument(f"{path} must have numbers, found {x.dtype}")
    if x.size == 0:
        raise InvalidArgument(f"{path} has no examples: its array has the shape {_shape(x.shape)}")
    forms = [x.shape[1:]] + [x.shape] * (len(x.shape) <= len(shape))  # [3, 1] is not one example of 3 numbers
    if _large_axes(shape) not in map(_large_axes, forms):
        found = f"an array of {_shape(x.shape)}" if x.shape else "a single number"
        raise InvalidArgument(
            f"{path} has {found}, but an example of this run is {_shape(shape)}: give an array of N x {_shape(shape)}"
        )
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused
        return np.asarray(x, np.float32).reshape(-1, *shape)


def _large_axes(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _first_line(error: Exception) -> str:
    return one_line((str(error) or type(error).__name__).splitlines()[0], 200)
