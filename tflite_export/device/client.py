"""The reference client: what an app on a phone does with a bundle, in Python and without TensorFlow.

    client = DeviceClient("bundle", state="head.bin")
    client.predict(x)                        # probabilities [N, K]
    client.personalize(x, y)                 # fits the head; keeps it only if it is better on held-out examples
    update = client.round(theta, x, y)       # a PFLEGO round: send update.payload and update.num_examples
    client.commit(update)                    # when the server has taken them: the head of the round becomes current

Examples are computed in chunks, so memory does not grow with their number; the sums over chunks are exact. Only the
payload and the number of examples leave the device; examples, labels and the head never do.
"""

import os
from numbers import Real
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tflite_export.device import classes
from tflite_export.device import payload as payloads
from tflite_export.device.arrays import as_array, check_columns
from tflite_export.device.chunks import filled_up, trunk_output, with_zeros
from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import HeadError, KeptHead, SavedHead, check_names, theta_sha256
from tflite_export.device.kinds import Score
from tflite_export.device.layout import BACKBONE, HEAD, PROGRAM, STATIC_PROGRAM, THETA
from tflite_export.device.manifest import LARGEST, LARGEST_NUMBER
from tflite_export.device.runtime import Bundle, BundleError, Runtime
from tflite_export.device.scores import cut

CHUNK = 32
_FIXED = "for a fixed number of classes: open the client in Python, without static"


class Update(NamedTuple):
    """The result of a round on the device, which sends the payload and the number of examples, and nothing else."""

    payload: bytes  # the gradient of the client's mean loss with respect to theta; see payload.py
    num_examples: int  # N_i
    loss: float  # the training loss at the joint point, for logs
    head: SavedHead  # the client's head after the round; it stays on the device, see `DeviceClient.commit`
    class_changes: int | None = None  # since the client was opened; None, as after a restart: only names are compared


class Personalized(NamedTuple):
    """The result of fitting the head, before and after."""

    kept: bool  # whether the new head replaced the old one
    before: Score  # of the old head, on the held-out examples
    after: Score  # of the new one
    loss_before: float  # the training loss of the old head
    loss: float  # the training loss of the new head


class DeviceClient:
    """One client on a device: it predicts, fits its head and takes part in rounds.

    Args:
        bundle: the folder, or an open `Bundle`.
        state: the file that keeps the head between starts. If there is none yet, the bundle's head is used. A client
            does not save over what another one has saved meanwhile (HeadError). None: the head is kept in memory only.
            Theta is not kept: after a start it is the bundle's, so an app keeps the newest one for `receive`.
        interpreter: class of the interpreter, see `Runtime`.
        num_threads: number of threads of the interpreter.
        chunk: number of examples that are computed at a time, at least 1.
        static: use program_static.tflite, whose shapes are fixed. It sets `chunk` to its number of examples.
        trunk: the file of the frozen trunk that `examples` uses, such as 'trunk_int8.tflite'; default: the manifest's,
            which is exact.

    Raises:
        BundleError: the bundle is damaged or has no program, the runtime cannot read it, or `chunk` or `trunk` is bad.
        HeadError: the saved head is damaged, has another shape, or is that of a bundle whose classes have other names;
            or `state` is a folder, or in none that exists.
    """

    def __init__(
        self,
        bundle: str | os.PathLike | Bundle,
        state: str | os.PathLike | None = None,
        *,
        interpreter=None,
        num_threads: int = 1,
        chunk: int = CHUNK,
        static: bool = False,
        trunk: str | None = None,
    ):
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
        if not isinstance(chunk, int | np.integer) or chunk < 1:
            raise BundleError(f"chunk must be a whole number of examples, at least 1; found {chunk!r}")
        program = self.bundle.path(STATIC_PROGRAM if static else PROGRAM)
        self.runtime = Runtime(program, interpreter, num_threads)
        if trunk is not None and not self.bundle.path(trunk).name.startswith("trunk"):  # path refuses an unknown file
            raise BundleError(f"trunk={trunk!r} is not the file of a frozen trunk: leave it out")
        self._how, self._trunk_file, self._trunk = (interpreter, num_threads), trunk, None
        self.batch = self.bundle.manifest["model"]["static_batch"] if static else None
        self.chunk = self.batch or chunk
        self.settings, self.kind, self._class_changes = self.bundle.manifest["training"], self.bundle.kind, 0
        self._kept = KeptHead(None if state is None else Path(state))
        about = self.bundle.num_features, self.bundle.num_classes, self.bundle.labels
        self._head = self._kept.load(self.bundle.path(HEAD), *about)
        if static and len(self._head.bias) != self.bundle.num_classes:
            raise HeadError(f"{state} has {len(self._head.bias)} classes, and {STATIC_PROGRAM} is {_FIXED}")
        self._backbone: Runtime | None = None
        self.receive(self.bundle.theta())

    @property
    def head(self) -> tuple[np.ndarray, np.ndarray]:
        """The client's head: (kernel float32 [M, K], bias float32 [K])."""
        return self._head.kernel, self._head.bias

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the K classes of the head."""
        return self._head.labels or self.bundle.labels

    def add_class(self, name: str) -> None:
        """Gives the head one more class at its end, with the mean of the other columns; see classes.py.

        In the next round the client simply has a head of K + 1 classes: theta's gradient is that of its own loss.

        Raises:
            HeadError: there is such a class, or the program's number of classes is fixed (`static`).
        """
        self._change(classes.with_class(self._named(), name))

    def remove_class(self, name: str) -> None:
        """Takes a class out of the head. Its examples must be left out of the next round.

        Raises:
            HeadError: there is no such class, only two are there, or the program's number is fixed (`static`).
        """
        self._change(classes.without_class(self._named(), name))

    def merge_classes(self, name: str, into: str) -> None:
        """Makes one class of two, named `into`; see classes.py.

        Raises:
            HeadError: there is no such class, only two are there, or the program's number is fixed (`static`).
        """
        self._change(classes.with_merged(self._named(), name, into))

    def _named(self) -> SavedHead:
        if not self.kind.is_classes:
            raise HeadError(f"this head is for {self.kind.text}, and has no classes that could be added or left out")
        return self._head._replace(labels=self.labels)

    def _change(self, head: SavedHead) -> None:
        if self.batch is not None:
            raise HeadError(f"{STATIC_PROGRAM} is {_FIXED}")
        self._store(head, class_changes=1)

    @property
    def head_is_stale(self) -> bool:
        """Whether theta has changed since the head was fitted. The head still works; `personalize` fits it again."""
        return self._head.theta_sha256 != self.theta_sha256

    def receive(self, theta: np.ndarray) -> None:
        """Replaces theta, float32 [P], by a copy of this one, which is read-only. The head stays as it is.

        Raises:
            BundleError: theta has another shape or dtype, or holds NaN or infinity.
        """
        theta = as_array(theta, "theta")
        expected = self.bundle.num_backbone_weights
        if theta.shape != (expected,) or theta.dtype != np.float32:
            raise BundleError(f"theta must be float32 [{expected}], found {theta.dtype} {list(theta.shape)}")
        if not np.isfinite(theta).all():
            raise BundleError("theta holds NaN or infinity: nothing was changed")
        theta = theta.copy()  # else it would change, and not its hash, with the array that the caller has
        theta.flags.writeable = False
        self.theta, self.theta_sha256 = theta, theta_sha256(theta)

    def start_from(self, head: SavedHead) -> None:
        """Replaces the head, and saves it if the client has a `state` file.

        Raises:
            HeadError: the head has another shape, or holds NaN or infinity; its labels are no different names of
                classes, or its theta_sha256 is no hash. The head stays as it was.
            NotOnDisk: the head is the new one, and after a loss of power it may be the old one again.
        """
        check_names(head)
        with np.errstate(over="ignore"):  # a number that float32 does not have is seen below
            head = head._replace(kernel=np.array(head.kernel, np.float32), bias=np.array(head.bias, np.float32))
        shape = (self.bundle.num_features, len(head.labels or self.bundle.labels))
        if self.batch is not None and shape[1] != self.bundle.num_classes:
            raise HeadError(f"{STATIC_PROGRAM} is {_FIXED}")
        if head.kernel.shape != shape or head.bias.shape != shape[1:]:
            raise HeadError(f"this client's head is {list(shape)}, found {list(head.kernel.shape)}")
        if not (np.isfinite(head.kernel).all() and np.isfinite(head.bias).all()):
            raise HeadError("the head holds NaN or infinity")
        self._store(head)

    def examples(self, raw: np.ndarray) -> np.ndarray:
        """The examples that all other methods take, float32 [N, ...], from preprocessed ones.

        In a bundle with a frozen trunk they are the trunk's output, which never changes: compute it once for each
        example, and keep it. Several arrays are packed into one (arrays.py). In any other bundle they are `raw` itself.

        Args:
            raw: float32 [N, ...], preprocessed as the manifest says; or a dict or a tuple of arrays [N, ...].

        Raises:
            BundleError: an example holds NaN or infinity, or a shape or dtype is wrong.
        """
        trunk = self.bundle.manifest.get("trunk")
        if trunk is None:
            return self.checked(raw)
        raw = _examples(raw, tuple(trunk["raw_shape"]), np.dtype(np.float32), self.bundle.columns)
        if self._trunk is None:
            self._trunk = Runtime(self.bundle.path(self._trunk_file or trunk["file"]), *self._how)
        return trunk_output(self._trunk, raw, self.bundle.manifest["model"]["static_batch"], self.chunk)

    def features(self, x: np.ndarray) -> np.ndarray:
        """The backbone's features of examples x, float32 [N, ...]: phi(x; theta), float32 [N, M]."""
        return self._features(self.checked(x))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predictions for x, float32 [N, ...]: float32 [N, K], for classes their probabilities; see `Kind.mean`."""
        return self.kind.mean(self.features(x) @ self._head.kernel + self._head.bias)

    def score(self, x: np.ndarray, y: np.ndarray) -> Score:
        """Loss and score of the present head on examples x, float32 [N, ...], with labels y, int [N].

        Of a head that is not for classes, y are targets, numbers [N, K]; here and in all other methods.
        """
        x, y = self.checked(x, y)
        return self._score(self._features(x), y, self.head)

    def _score(self, phi, y, head) -> Score:
        return self.kind.score(phi @ head[0] + head[1], y)

    def personalize(self, x, y, *, steps: int | None = None, beta: float | None = None, held_out=0.25) -> Personalized:
        """Fits the head to the client's examples by gradient steps; theta does not change.

        Args:
            x: examples, float32 [N, ...], preprocessed as the manifest says.
            y: labels, int [N] in [0, K).
            steps: number of gradient steps; default: tau - 1.
            beta: learning rate; default: the run's. (Of other methods than PFLEGO tau is 50 and beta 0.007.)
            held_out: the examples on which the new head must be better than the old one to be kept: a better score
                (for classes a higher accuracy), or the same and a lower loss. Give (x, y), or the part of the examples
                to set aside, in (0, 1). None: compare on the training examples.

        Raises:
            BundleError: an example holds NaN or infinity, a label is out of range, a shape or dtype is wrong, there are
                too few examples to hold some out, or `steps` or `beta` is out of range. The head is not changed then.
        """
        x, y = self.checked(x, y)
        if held_out is None:
            held_out = x, y
        elif isinstance(held_out, Real):
            (x, y), held_out = cut(x, y, held_out)
        elif isinstance(held_out, tuple | list) and len(held_out) == 2:
            held_out = self.checked(*held_out)
        else:
            raise BundleError("held_out must be a part of the examples in (0, 1), a pair (x, y), or None")
        steps = self.settings["tau"] - 1 if steps is None else steps
        beta = self.settings["beta"] if beta is None else beta
        if not (isinstance(steps, Real) and isinstance(beta, Real)):
            raise BundleError(f"steps and beta must be numbers, found steps={steps!r}, beta={beta!r}")
        if steps < 0 or not 0 <= beta <= LARGEST_NUMBER:
            raise BundleError(f"steps must be at least 0 and beta from 0 to 3.4e+38, found steps={steps}, beta={beta}")
        if not (steps <= LARGEST and steps % 1 == 0):  # and not NaN
            raise BundleError(f"steps must be a whole number of at most {LARGEST}, found {steps}")
        steps = int(steps)
        phi, phi_held_out = self._features(x), self._features(held_out[0])
        kernel, bias, before, after = self.fit_head(phi, y, steps, beta)
        old, new = (self._score(phi_held_out, held_out[1], head) for head in (self.head, (kernel, bias)))
        kept = new.better_than(old)
        if kept:
            self._store(self._fitted(kernel, bias))
        return Personalized(bool(kept), old, new, before, after)

    def round(self, theta: np.ndarray, x, y, *, payload: str = "float32") -> Update:
        """Takes part in a PFLEGO round: tau - 1 gradient steps on the head, then the joint step.

        The client's head does not change: a server that never gets the update has not counted this visit. Call
        `commit` when the server has taken it.

        Args:
            theta: the server's message, float32 [P].
            x, y: the client's training examples, float32 [N, ...], and labels, int [N] in [0, K).
            payload: how the gradient is sent: 'float32', or 'int8', which is smaller and less exact.

        Raises:
            BundleError: an input holds NaN or infinity, a label is out of range, a shape or dtype is wrong, the payload
                is unknown, the result is not finite, or the bundle was not exported for rounds. The head is not
                changed then.
        """
        x, y = self.checked(x, y)
        if payload not in payloads.KINDS:
            raise BundleError(f"unknown payload {payload!r}: one of {', '.join(payloads.KINDS)}")
        if "joint_gradient" not in self.runtime.signatures:
            raise BundleError("this bundle was exported for inference and personalization: it takes part in no rounds")
        self.receive(theta)
        n, steps = len(x), self.settings["tau"] - 1
        beta, rate = np.float32(self.settings["beta"]), np.float32(self.settings["head_rate"])
        if n <= self.chunk and self.runtime.can("round"):
            ((_, arrays),) = self._chunks(n, x, y, np.full(n, 1 / n, np.float32))
            example = dict(zip(("x", self.kind.input, "weights"), arrays, strict=True))
            work = {"steps": np.int32(steps), "beta": beta, "rate": rate}
            out = self.runtime("round", theta=self.theta, **example, **self._head_inputs(*self.head), **work)
            gradient, kernel, bias, loss = out["dtheta"], out["kernel"], out["bias"], out["loss"]
        else:
            kernel, bias, _, _ = self.fit_head(self._features(x), y, steps, beta)
            gradient, dkernel, dbias, loss = self.joint_gradient(x, y, kernel, bias)
            kernel, bias = kernel - rate * dkernel, bias - rate * dbias
        if not all(np.isfinite(a).all() for a in (gradient, kernel, bias, loss)):
            raise BundleError("the round diverged: a gradient or the head is not finite; nothing was kept")
        sent = payloads.encode(gradient, payload)
        return Update(sent, n, float(loss), self._fitted(kernel, bias), self._class_changes)

    def commit(self, update: Update) -> None:
        """Makes the head of a round current, and saves it if the client has a `state` file.

        Raises:
            HeadError: the head has another shape than this client's or other classes, such as after `add_class`, or
                holds NaN or infinity.
        """
        if update.head.labels != self._head.labels or update.class_changes not in (None, self._class_changes):
            raise HeadError("the classes have changed since the round: its head is of no use any more")
        self.start_from(update.head)

    def _fitted(self, kernel, bias) -> SavedHead:
        return SavedHead(kernel, bias, self.theta_sha256, self._head.labels)

    def _store(self, head, class_changes=0):
        with self._kept.saving(head, self.bundle.labels):
            self._head = head
            self._class_changes += class_changes

    def checked(self, x: np.ndarray, *y: np.ndarray):
        """Examples as arrays, float32 [N, ...] and, if given, labels y int32 [N] or targets y float32 [N, K].

        Examples of several arrays may be a dict or a tuple of them, as the model takes them; they are packed here.

        Raises:
            BundleError: a shape or dtype is wrong, a number is not finite, or a label is out of range; or the columns
                of a DataFrame have another order than the table's of the run.
        """
        x = self._one_array(x)
        if (tokens := self.bundle.num_tokens) is not None and (x.min() < 0 or x.max() >= tokens):
            found = int(x.min() if x.min() < 0 else x.max())
            raise BundleError(f"an example holds {found}, and this model knows 0..{tokens - 1}: the head is untouched")
        if not y:
            return x
        check_columns(*y, self.labels, self.kind.input)
        try:
            return x, self.kind.checked(*y, len(x), len(self.labels))
        except InvalidInput as error:
            raise BundleError(str(error)) from None

    def _one_array(self, x):
        """Examples as the program takes them, checked."""
        shape, dtype, arrays = self.bundle.example_shape, self.bundle.example_dtype, self.bundle.arrays
        if arrays is None:
            return _examples(x, shape, dtype, self.bundle.columns)
        try:
            x = _examples(arrays.packed(x), shape, dtype)
            arrays.check(x)
        except InvalidInput as error:  # also a BundleError, as such
            raise BundleError(str(error)) from None
        return x

    def _head_inputs(self, kernel, bias):
        return {"kernel": kernel.astype(np.float32, copy=False), "bias": bias.astype(np.float32, copy=False)}

    def _chunks(self, n, *arrays):
        """Yields (number of examples, chunk of each array): of x or phi, and of what belongs to them.

        The static program's chunks are filled up with examples of weight 0.
        """
        for start in range(0, n, self.chunk):
            parts = [a[start : start + self.chunk] for a in arrays]
            size = len(parts[0])
            if self.batch is not None and size < self.batch:
                parts = [filled_up(parts[0], self.batch), *(with_zeros(p, self.batch) for p in parts[1:])]
            yield size, parts

    def _features(self, x):
        constant = self._constant_backbone()
        if constant is not None:
            return np.concatenate([constant("features", x=c)["phi"] for _, (c,) in self._chunks(len(x), x)])
        parts = [
            self.runtime("features", theta=self.theta, x=c)["phi"][:size] for size, (c,) in self._chunks(len(x), x)
        ]
        return np.concatenate(parts)

    def _constant_backbone(self) -> Runtime | None:
        """The backbone with constant weights, which is several times faster, while theta is the exported one.

        None if theta is another one, the bundle has no such file, or the runtime may be unable to change shapes.
        """
        files = self.bundle.manifest["files"]
        if self.batch is not None or BACKBONE not in files or self.theta_sha256 != files[THETA]["sha256"]:
            return None
        if self._backbone is None:
            self._backbone = Runtime(self.bundle.path(BACKBONE), *self._how)
        return self._backbone

    def fit_head(self, phi, y, steps, beta):
        """Makes gradient steps on the head: (kernel, bias, loss before, loss after).

        With the run's `safeguard`, the old head is returned if the steps raised the loss.
        """
        n, (kernel, bias) = len(phi), self.head
        weights, beta = np.full(n, 1 / n, np.float32), np.float32(beta)
        if (self.batch is None or n <= self.batch) and self.runtime.can("personalize"):
            arrays = (phi, y, weights)
            if self.batch is not None:
                ((_, arrays),) = self._chunks(n, *arrays)
            example = dict(zip(("phi", self.kind.input, "weights"), arrays, strict=True))
            work = {"steps": np.int32(steps), "beta": beta}
            out = self.runtime("personalize", **example, **self._head_inputs(kernel, bias), **work)
            return out["kernel"], out["bias"], float(out["loss_before"]), float(out["loss"])
        losses = []
        for _ in range(steps + 1):  # the last call only computes the loss
            moved_kernel, moved_bias, loss = np.zeros(kernel.shape), np.zeros(bias.shape), 0.0
            for _, (phi_c, y_c, w_c) in self._chunks(n, phi, y, weights):
                example = {"phi": phi_c, self.kind.input: y_c, "weights": w_c}
                out = self.runtime("head_step", **example, **self._head_inputs(kernel, bias), beta=beta)
                moved_kernel += out["kernel"] - kernel  # the chunk's part of the step
                moved_bias += out["bias"] - bias
                loss += float(out["loss_before"])
            losses.append(loss)
            if len(losses) <= steps:
                kernel, bias = (kernel + moved_kernel).astype(np.float32), (bias + moved_bias).astype(np.float32)
        if self.settings["safeguard"] and not losses[-1] <= losses[0]:
            return *self.head, losses[0], losses[0]
        return kernel, bias, losses[0], losses[-1]

    def joint_gradient(self, x, y, kernel, bias):
        """Gradients at one point: (dtheta [P], dkernel, dbias, loss). Chunks are summed in float64."""
        n = len(x)
        total = None
        for _, (x_c, y_c, w_c) in self._chunks(n, x, y, np.full(n, 1 / n, np.float32)):
            example = {"x": x_c, self.kind.input: y_c, "weights": w_c}
            out = self.runtime("joint_gradient", theta=self.theta, **example, **self._head_inputs(kernel, bias))
            parts = [out[name] for name in ("dtheta", "dkernel", "dbias", "loss")]
            if total is None:
                total = [np.array(part, np.float64) for part in parts]
            else:
                for whole, part in zip(total, parts, strict=True):
                    np.add(whole, part, out=whole)  # in place: a new array of P numbers costs more than the sum
        return [np.float32(t) if t.ndim == 0 else t.astype(np.float32) for t in total]


def _examples(x, shape, dtype, columns=()):
    """Examples as an array, checked: [N, *shape] of this dtype, finite; of a DataFrame, with these columns."""
    check_columns(x, columns, "examples")
    x = as_array(x, "examples")
    if x.shape[1:] != shape or x.ndim != len(shape) + 1 or x.dtype != dtype:
        raise BundleError(f"examples must be {dtype} {['N', *shape]}, found {x.dtype} {list(x.shape)}")
    if not len(x):
        raise BundleError("there are no examples")
    bad = ~np.isfinite(x.reshape(len(x), -1)).all(1)
    if bad.any():
        raise BundleError(f"example {int(bad.argmax())} holds NaN or infinity: the head is untouched")
    return x
