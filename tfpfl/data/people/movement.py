"""Shoulder exercises by person: the watch data of seglearn (Burns et al. 2018)."""

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.people.files import read_members
from tfpfl.data.randomness import Stream, generator
from tfpfl.data.source import Source

RATE = 50  # samples a second
WINDOW = 100  # samples: 2 s
STRETCH = 500  # samples, 10 s: validation takes whole stretches


class Series(NamedTuple):
    """One recording: a person does one exercise with one arm."""

    x: np.ndarray  # float32 [T, 6]: acceleration (in g) and rotation (radian a second), three axes each
    exercise: int
    person: int
    side: int  # of the arm: 1 right, 0 left


def load_watch(path: Path, step: int = 50, seed: int = 0) -> Source:
    """Reads windows of 2 s, [100, 6], with the 10 people as natural clients, split by recording.

    A person does each of 7 exercises once with each arm: of these two recordings, one is for training and one for test;
    `seed` draws which. The training recordings are cut into stretches of 10 s before the windows are taken, and a
    client's validation part has whole stretches, so that no sample is in two parts. Of partitions, only 'natural' gives
    whole stretches to a client; the others warn, or are refused if they join train and test.

    Args:
        path: watch_dataset.npy, or the archive that has it.
        step: samples from one window to the next, >= 1; 50 makes windows overlap by half.
        seed: the seed of the split, >= 0.

    Raises:
        InvalidArgument: the file holds anything but arrays and their names; or there are not 140 recordings, one for
            each of 10 people, 7 exercises and 2 arms; or `step` is below 1.
    """
    if not isinstance(step, int) or step < 1:
        raise InvalidArgument(f"step must be a whole number of samples >= 1, found {step!r}")
    series, names = read_series(path)
    each = {(person, exercise, side) for person in range(1, 11) for exercise in range(7) for side in (0, 1)}
    if len(series) != 140 or {(s.person, s.exercise, s.side) for s in series} != each:
        raise InvalidArgument(
            f"{path} has {len(series)} recordings, but the watch data have 140: 10 people (1 to 10), 7 exercises, 2 "
            "arms"
        )
    right_trains = generator(seed, Stream.SOURCE).integers(0, 2, (11, 7))
    parts: dict[str, list] = {"train": [], "test": []}
    stretch = 0
    for s in series:
        training = s.side == right_trains[s.person, s.exercise]
        for piece in stretches(s.x) if training else [s.x]:
            x = windows(piece, step)
            about = np.tile([s.exercise, s.person, stretch], (len(x), 1))
            parts["train" if training else "test"].append((x, about))
            stretch += 1
    (x, about), (x_test, about_test) = ([np.concatenate(part) for part in zip(*p, strict=True)] for p in parts.values())
    source = Source.from_arrays(
        x,
        about[:, 0],
        x_test,
        about_test[:, 0],
        name="watch",
        version="seglearn 1.2.5",
        class_names=names,
        key=_named(about[:, 1]),
        key_test=_named(about_test[:, 1]),
        options={"step": step, "seed": seed},
    )
    return source._replace(group_train=about[:, 2])


def _named(people: np.ndarray) -> np.ndarray:
    return np.array([f"person {n:02d}" for n in range(100)])[people]


def windows(x: np.ndarray, step: int) -> np.ndarray:
    """The windows of 100 samples of a recording [T, 6], one every `step` samples: [n, 100, 6]."""
    if len(x) < WINDOW:
        return np.zeros((0, WINDOW, x.shape[1]), x.dtype)
    return np.lib.stride_tricks.sliding_window_view(x, WINDOW, 0)[::step].swapaxes(1, 2)


def stretches(x: np.ndarray) -> list[np.ndarray]:
    """A recording in pieces of 10 s; what is left over is part of the last piece."""
    return np.split(x, range(STRETCH, len(x) - STRETCH + 1, STRETCH))


def read_series(path: Path) -> tuple[list[Series], list[str]]:
    """Reads all recordings, in the order person, exercise, arm; and the names of the exercises.

    Raises:
        InvalidArgument: the file holds anything but arrays and their names.
    """
    contents = list(read_members(path, r"watch_dataset\.npy").values())
    if len(contents) != 1:
        raise InvalidArgument(f"{path} has no file watch_dataset.npy")
    data = _arrays_of(contents[0], path)
    try:
        x, y, person, side = data["X"], data["y"], data["subject"], data["side"]
        rows = [Series(np.asarray(x[i], np.float32), int(y[i]), int(person[i]), int(side[i])) for i in range(len(x))]
        names = [str(name) for name in data["y_labels"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{path} does not have the arrays X, y, subject, side and y_labels: {error}") from error
    if not all(s.x.ndim == 2 and 0 <= s.exercise < len(names) and 0 <= s.person < 100 for s in rows):
        raise InvalidArgument(f"{path} has a recording that is not [samples, axes], or an unknown exercise or person")
    return sorted(rows, key=lambda s: (s.person, s.exercise, s.side)), names


def _arrays_of(content: bytes, path: Path) -> dict[str, Any]:
    """The dict in an .npy file of a Python object. Such a file can run code; this one may only make arrays."""
    try:
        file = io.BytesIO(content)
        form: Any = np.lib.format  # has no types
        version = form.read_magic(file)
        read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, _, dtype = read(file)
        if shape != () or dtype.kind != "O":
            raise pickle.UnpicklingError(f"it has an array {dtype} {shape} and not a dict of arrays")
        value = _ArraysOnly(file).load()
        return dict(value.item() if isinstance(value, np.ndarray) else value)
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError, AttributeError, IndexError, KeyError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}. Get the file again") from error


class _ArraysOnly(pickle.Unpickler):
    """Reads a pickle that is made of NumPy's arrays and plain values, and refuses all others."""

    ALLOWED = {  # found without importing what the file names
        "_reconstruct": np.empty(0).__reduce__()[0],
        "scalar": np.float64(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }
    MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")

    def find_class(self, module: str, name: str) -> Any:
        """One of NumPy's four functions, or what makes bytes.

        Raises:
            pickle.UnpicklingError: any other one.
        """
        if module in self.MODULES and name in self.ALLOWED:
            return self.ALLOWED[name]
        if (module, name) == ("_codecs", "encode"):  # older pickles have bytes as text
            return lambda text, _: text.encode("latin-1")
        raise pickle.UnpicklingError(f"it would call {module}.{name}, and only arrays are allowed")
