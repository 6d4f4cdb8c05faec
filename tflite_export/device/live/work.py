"""The work of a device in live rounds, whoever brings the question: a visit, and scores. It knows no network."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tflite_export.device.arrays import as_array, check_columns
from tflite_export.device.client import DeviceClient
from tflite_export.device.errors import InvalidInput
from tflite_export.device.files import write_whole
from tflite_export.device.head_file import load_head, save_head
from tflite_export.device.kinds import Kind
from tflite_export.device.live import wire
from tflite_export.device.live.answers import payload_of, round_and_theta, settings_of, splits_of
from tflite_export.device.live.kept_theta import keep_theta, receive_kept
from tflite_export.device.live.state import Pending, State
from tflite_export.device.runtime import Bundle

_MOST_SCORE = 1e30  # a larger loss is not sent, nor one that is not finite


def check_examples(examples: dict) -> None:
    """Checks that a device has training examples, and that examples and labels are numbers.

    Raises:
        InvalidInput: it has none, they are something else or masked, or a label is not finite; or the labels of
            classes, without `classes`, do not show how many there are.
    """
    if not len(examples.get("train", ((), ()))[0]):
        raise InvalidInput("a device needs training examples")
    for split in (s for s in wire.SPLITS if s in examples):
        x, y = examples[split]
        x, y = as_array(x, f"the examples x of {split}"), as_array(y, f"the labels y of {split}")
        if y.dtype.kind not in "fiub":
            raise InvalidInput(
                f"the labels y of {split} must be numbers, found {y.dtype}: classes are numbered from 0, in the order "
                "in which the client's head has them"
            )
        if x.dtype.kind not in "fiub":
            raise InvalidInput(f"the examples x of {split} must be numbers, preprocessed, found {x.dtype}")
        if not np.isfinite(y).all():
            raise InvalidInput(f"the labels y of {split} hold {y[~np.isfinite(y)][0]}: leave such examples out")
    y = np.asarray(examples["train"][1])
    if examples.get("classes") is None and y.ndim == 1 and ((y < 0) | (y % 1 != 0)).any():
        raise InvalidInput(
            f"the labels y of train hold {y[(y < 0) | (y % 1 != 0)][0]}, and classes are numbered from 0. If they are "
            'numbers to predict, say so with "classes": the number of outputs'
        )


def check_before_joining(examples: dict, classes: int) -> None:
    """Checks what a visit needs of examples and labels, as far as it can be seen without the bundle.

    A server may take a device in for good, with its numbers of examples and classes.

    Args:
        examples: see `Work`; `check_examples` has checked them.
        classes: K.

    Raises:
        InvalidInput: an example is not finite, or a label is none of the K classes.
    """
    for split in (s for s in wire.SPLITS if s in examples):
        x, y = map(np.asarray, examples[split])
        if not len(y):
            continue
        with np.errstate(over="ignore"):  # a number that float32 does not have is infinite, and told below
            x = x.astype(np.float32) if x.dtype.kind == "f" else x
        bad = ~np.isfinite(x.reshape(len(x), -1)).all(1)
        if bad.any():
            which = f"example {bad.argmax()} holds NaN or infinity"
            raise InvalidInput(f"the examples of {split}: {which}: the head is untouched")
        if y.ndim == 1 and y.dtype.kind in "iu" and classes > 1:  # of 1, they may be numbers to predict
            try:
                Kind().checked(y, len(x), classes)
            except InvalidInput as error:
                raise InvalidInput(f"the examples of {split}: {error}") from None


def about_device(examples: dict, signer: wire.Signer) -> dict:
    """What a device says of itself when it joins, but for its token and its program.

    Args:
        examples: see `Work`.
        signer: the device's key.
    """
    y, k = np.asarray(examples["train"][1]), examples.get("classes")
    k = k if k is not None else int(y.max()) + 1 if y.ndim == 1 else y.shape[1]
    return {"protocol": wire.PROTOCOL, "examples": len(y), "classes": int(k), "key": signer.public}


class Work:
    """A device that has its bundle and its head. It goes on with the theta that it computed with last.

    Args:
        state: the device's folder, with both.
        examples: {'train', and if there are, 'validation', 'test': (x, y)}, with x preprocessed as the manifest says;
            'classes': K, if the labels do not show it.
        interpreter: class of the interpreter, see `Runtime`.

    Raises:
        InvalidInput: the examples are not preprocessed, or of another shape than the model's; or a label is none of the
            head's.
    """

    def __init__(self, state: State, examples: dict, interpreter=None):
        self.client = DeviceClient(Bundle(state.bundle), state.head, interpreter=interpreter)
        self._kept = state.theta
        receive_kept(self.client, self._kept)
        self.examples = {}
        for split, (x, labels) in ((s, examples[s]) for s in wire.SPLITS if s in examples):
            if len(labels):
                check_columns(x, self.client.bundle.columns, f"the examples x of {split}")
                self.examples[split] = self._checked(split, self._taken(split, np.asarray(x)), labels)

    def _checked(self, split: str, x: np.ndarray, labels: Any) -> tuple[np.ndarray, np.ndarray]:
        """Examples and labels that a visit takes: one that it refused would be lost when its round is computed."""
        try:
            return self.client.checked(self.client.examples(x), labels)
        except InvalidInput as error:
            raise InvalidInput(f"the examples of {split}: {error}") from None

    def _taken(self, split: str, x: np.ndarray) -> np.ndarray:
        """Examples in the type of what the model takes, or with a frozen trunk of what the trunk does."""
        about = self.client.bundle
        stored = about.manifest["preprocessing"]
        scale, shift = stored.get("scale", 1), stored.get("shift", 0)
        if str(x.dtype) == "uint8" == stored.get("stored_dtype") and (scale, shift) != (1, 0):
            raise InvalidInput(
                f"the examples x of {split} are pixels as they are stored (uint8), and the model takes them as "
                f"{scale:g} x + {shift:g}, float32. Write these numbers into the file"
            )
        dtype = np.dtype(np.float32) if about.manifest.get("trunk") else about.example_dtype
        with np.errstate(invalid="ignore"):  # what is no whole number is told below
            taken = x.astype(dtype, copy=False)
        if dtype == np.int32 and not np.array_equal(taken, x):
            raise InvalidInput(
                f"the examples x of {split} must be whole numbers of 32 bits, such as tokens; found {x.dtype}, "
                f"of which one is {x[taken != x][0]}"
            )
        return taken

    def receive(self, theta: np.ndarray) -> None:
        """Takes a newer theta, float32 [P], and keeps it: also after a restart, it is the client's."""
        self.client.receive(theta)
        keep_theta(self._kept, self.client.theta)

    def visit(self, work: dict, theta: np.ndarray) -> Pending:
        """Computes a round.

        Args:
            work: a visit, as docs/live_protocol.md describes it.
            theta: float32 [P].

        Raises:
            InvalidInput: the work has no settings that a device can use, or the round diverged.
        """
        (number, name), payload = round_and_theta(work), payload_of(work)
        self.client.settings = {**self.client.settings, **settings_of(work), "rounds": True}
        update = self.client.round(theta, *self.examples["train"], payload=payload)
        keep_theta(self._kept, self.client.theta)  # before the head that was trained on it can become current
        about = {"theta": name, "examples": update.num_examples, "loss": update.loss}
        about["scores"] = self.scores(splits_of(work), update.head)
        return Pending(number, wire.pack(about, update.payload), update.head)

    def scores(self, splits, head=None) -> list[dict]:
        """Loss and score on the splits that the device has, with its head or another one."""
        kernel, bias = self.client.head if head is None else (head.kernel, head.bias)
        rows = []
        for split in splits:
            if split in self.examples:
                x, y = self.examples[split]
                found = self.client.kind.score(self.client.features(x) @ kernel + bias, y)
                if max(abs(found.loss), abs(found.value)) < _MOST_SCORE:  # and not NaN
                    rows.append({"split": split, "examples": len(x), "loss": found.loss, "score": found.value})
        return rows


def keep_bundle(state: State, files: Iterable[tuple[str, bytes]], check: Callable[[Path], object] = Bundle) -> None:
    """Keeps a bundle that a server sent.

    Args:
        state: the device's folder.
        files: name and content of each.
        check: checks the folder of the new bundle. Default: every hash.

    Raises:
        InvalidInput: a name is none of a file, a file is missing or damaged.
    """
    new = state.bundle.with_name("bundle.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for name, content in files:
        if Path(name).name != name or name.startswith("."):
            raise InvalidInput(f"the server names a file {name!r}, which is no file of a bundle")
        write_whole(new / name, content)
    check(new)
    new.replace(state.bundle)


def keep_first_head(state: State, content: bytes) -> None:
    """Keeps the head that the client begins with, as a server sent it.

    Raises:
        HeadError: it is damaged, or of another shape than the bundle's.
    """
    about, path = Bundle(state.bundle, check=False), state.folder / "head.first"
    write_whole(path, content)
    save_head(state.head, load_head(path, about.num_features, about.num_classes))
    path.unlink()
