"""The reference client: what an app on a phone has to do with a bundle, in Python. It imports no TensorFlow.

    client = DeviceClient("bundle", state="head.bin")
    client.predict(x)                        # probabilities [N, K]
    client.personalize(x, y)                 # fits the head; keeps it only if it is better on held-out examples
    update = client.round(theta, x, y)       # a PFLEGO round: what to send is update.payload and update.num_examples

Examples are taken in chunks, and sums over chunks are exact, so memory does not grow with their number. What leaves the
device is `Update`, never examples, labels or the head.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tflite_export.device import payload as payloads
from tflite_export.device.head_file import HeadError, SavedHead, load_head, save_head, theta_sha256
from tflite_export.device.layout import HEAD, PROGRAM, STATIC_PROGRAM
from tflite_export.device.runtime import Bundle, BundleError, Runtime
from tflite_export.device.scores import Score, cut, log_softmax, score

CHUNK = 32


class Update(NamedTuple):
    """What is sent to the server after a round, and nothing else."""

    payload: bytes  # the gradient of the client's mean loss with respect to theta; see payload.py
    num_examples: int  # N_i
    loss: float  # the training loss at the joint point, for logs


class Personalized(NamedTuple):
    """The result of fitting the head."""

    kept: bool  # whether the new head replaced the old one
    before: Score  # of the old head, on the held-out examples
    after: Score  # of the new one
    loss_before: float  # the training loss
    loss: float


class DeviceClient:
    """One client: a bundle's program, theta, and a head that stays here.

    Args:
        bundle: the folder, or an open `Bundle`.
        state: the file that keeps the head between starts; where it does not exist, the head of the bundle is taken.
            None keeps the head in memory.
        interpreter: see `Runtime`.
        num_threads: of the interpreter.
        chunk: examples at a time.
        static: use program_static.tflite, whose shapes are fixed; `chunk` is then its number of examples.

    Raises:
        BundleError: the bundle is damaged, has no program, or the runtime cannot read it.
        HeadError: the saved head is damaged or has another shape.
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
    ):
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
        if chunk < 1:
            raise BundleError(f"chunk must be at least 1 example, found {chunk}")
        program = self.bundle.path(STATIC_PROGRAM if static else PROGRAM)
        self.runtime = Runtime(program, interpreter, num_threads)
        self.batch = self.bundle.manifest["model"]["static_batch"] if static else None
        self.chunk = self.batch or chunk
        self.settings = self.bundle.manifest["training"]
        self._state = None if state is None else Path(state)
        shape = self.bundle.num_features, self.bundle.num_classes
        saved = self._state is not None and self._state.exists()
        self._head = load_head(self._state if saved else self.bundle.path(HEAD), *shape)
        self.theta = self.bundle.theta()

    @property
    def head(self) -> tuple[np.ndarray, np.ndarray]:
        """(kernel [M, K], bias [K])."""
        return self._head.kernel, self._head.bias

    @property
    def head_is_stale(self) -> bool:
        """Whether theta has moved since the head was fitted: it still works, and is due for `personalize`."""
        return self._head.theta_sha256 != theta_sha256(self.theta)

    def receive(self, theta: np.ndarray) -> None:
        """Takes a new theta, float32 [P]; the head stays.

        Raises:
            BundleError: another size, or not finite.
        """
        theta = np.asarray(theta)
        expected = self.bundle.num_backbone_weights
        if theta.shape != (expected,) or theta.dtype != np.float32:
            raise BundleError(f"theta must be float32 [{expected}], found {theta.dtype} {list(theta.shape)}")
        if not np.isfinite(theta).all():
            raise BundleError("theta holds NaN or infinity: nothing was changed")
        self.theta = theta

    def start_from(self, head: SavedHead) -> None:
        """Takes another head, and saves it.

        Raises:
            HeadError: of another shape, or not finite.
        """
        shape = (self.bundle.num_features, self.bundle.num_classes)
        if head.kernel.shape != shape or head.bias.shape != shape[1:]:
            raise HeadError(f"this client's head is {list(shape)}, found {list(head.kernel.shape)}")
        if not (np.isfinite(head.kernel).all() and np.isfinite(head.bias).all()):
            raise HeadError("the head holds NaN or infinity")
        self._store(head)

    def features(self, x: np.ndarray) -> np.ndarray:
        """phi(x; theta): [N, M]."""
        return self._features(self._checked(x))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Probabilities of the client's classes: [N, K]."""
        logits = self.features(x) @ self._head.kernel + self._head.bias
        return np.exp(log_softmax(logits))

    def score(self, x: np.ndarray, y: np.ndarray) -> Score:
        """The present head on labelled examples."""
        x, y = self._checked(x, y)
        return score(self._features(x), y, *self.head)

    def personalize(self, x, y, *, steps: int | None = None, beta: float | None = None, held_out=0.25) -> Personalized:
        """Fits the head to the client's examples by gradient steps, with theta as it is.

        Args:
            x, y: float32 [N, ...], preprocessed as the manifest says; int32 [N] in [0, K).
            steps: default tau - 1.
            beta: their rate; default the run's.
            held_out: the new head is kept only if it does better here than the old one: by accuracy, and where that is
                the same, by loss. (x, y), or the part of the examples that is set aside for it; None: compare on the
                training examples.

        Raises:
            BundleError: NaN, a label out of range, a wrong shape; the head is untouched.
        """
        x, y = self._checked(x, y)
        if held_out is None:
            held_out = x, y
        elif isinstance(held_out, (int, float)):
            (x, y), held_out = cut(x, y, held_out)
        else:
            held_out = self._checked(*held_out)
        steps = self.settings["tau"] - 1 if steps is None else steps
        beta = self.settings["beta"] if beta is None else beta
        if steps < 0 or not 0 <= beta < np.inf:
            raise BundleError(f"steps and beta must be at least 0, found steps={steps}, beta={beta}")
        phi, phi_held_out = self._features(x), self._features(held_out[0])
        kernel, bias, before, after = self.fit_head(phi, y, steps, beta)
        old, new = (score(phi_held_out, held_out[1], *head) for head in (self.head, (kernel, bias)))
        kept = np.isfinite(new.loss) and (new.accuracy, -new.loss) > (old.accuracy, -old.loss)
        if kept:
            self._keep(kernel, bias)
        return Personalized(bool(kept), old, new, before, after)

    def round(self, theta: np.ndarray, x, y, *, payload: str = "float32") -> Update:
        """A client's visit in a PFLEGO round: tau - 1 steps on the head, then the joint step.

        Args:
            theta: the server's message, float32 [P].
            x, y: the client's training examples.
            payload: 'float32' or 'int8'.

        Raises:
            BundleError: NaN, a label out of range, a wrong shape; a result that is not finite; a bundle that was not
                exported for rounds. The head is untouched then.
        """
        x, y = self._checked(x, y)
        if payload not in payloads.KINDS:
            raise BundleError(f"unknown payload {payload!r}: one of {', '.join(payloads.KINDS)}")
        if "joint_gradient" not in self.runtime.signatures:
            raise BundleError("this bundle was exported for inference and personalization: it takes part in no rounds")
        self.receive(theta)
        n, steps = len(x), self.settings["tau"] - 1
        beta, rate = np.float32(self.settings["beta"]), np.float32(self.settings["head_rate"])
        if n <= self.chunk and self.runtime.can("round"):
            ((_, arrays),) = self._chunks(n, x, y, np.full(n, 1 / n, np.float32))
            example = dict(zip(("x", "labels", "weights"), arrays, strict=True))
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
        self._keep(kernel, bias)
        return Update(sent, n, float(loss))

    def _keep(self, kernel, bias):
        self._store(SavedHead(kernel, bias, theta_sha256(self.theta)))

    def _store(self, head):
        if self._state is not None:
            save_head(self._state, head)
        self._head = head

    def _checked(self, x, y=None):
        x = np.asarray(x)
        shape = self.bundle.example_shape
        if x.shape[1:] != shape or x.ndim != len(shape) + 1 or x.dtype != np.float32:
            raise BundleError(f"examples must be float32 {['N', *shape]}, found {x.dtype} {list(x.shape)}")
        if not len(x):
            raise BundleError("there are no examples")
        bad = ~np.isfinite(x.reshape(len(x), -1)).all(1)
        if bad.any():
            raise BundleError(f"example {int(bad.argmax())} holds NaN or infinity: the head is untouched")
        if y is None:
            return x
        y, k = np.asarray(y), self.bundle.num_classes
        if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer):
            raise BundleError(f"labels must be integers [{len(x)}], found {y.dtype} {list(y.shape)}")
        bad = (y < 0) | (y >= k)
        if bad.any():
            found = int(y[bad.argmax()])
            raise BundleError(f"label {found} is out of range: this client's are 0..{k - 1}; the head is untouched")
        return x, y.astype(np.int32)

    def _head_inputs(self, kernel, bias):
        return {"kernel": kernel.astype(np.float32, copy=False), "bias": bias.astype(np.float32, copy=False)}

    def _chunks(self, n, *arrays):
        """(how many examples, the arrays' chunk, filled up to the static variant's batch by zeros)."""
        for start in range(0, n, self.chunk):
            parts = [a[start : start + self.chunk] for a in arrays]
            size = len(parts[0])
            if self.batch is not None and size < self.batch:
                parts = [np.pad(p, [(0, self.batch - size)] + [(0, 0)] * (p.ndim - 1)) for p in parts]
            yield size, parts

    def _features(self, x):
        parts = [
            self.runtime("features", theta=self.theta, x=c)["phi"][:size] for size, (c,) in self._chunks(len(x), x)
        ]
        return np.concatenate(parts)

    def fit_head(self, phi, y, steps, beta):
        """(kernel, bias, loss before, loss after): gradient steps on the head, restored where they raised the loss."""
        n, (kernel, bias) = len(phi), self.head
        weights, beta = np.full(n, 1 / n, np.float32), np.float32(beta)
        if (self.batch is None or n <= self.batch) and self.runtime.can("personalize"):
            arrays = (phi, y, weights)
            if self.batch is not None:
                ((_, arrays),) = self._chunks(n, *arrays)
            example = dict(zip(("phi", "labels", "weights"), arrays, strict=True))
            work = {"steps": np.int32(steps), "beta": beta}
            out = self.runtime("personalize", **example, **self._head_inputs(kernel, bias), **work)
            return out["kernel"], out["bias"], float(out["loss_before"]), float(out["loss"])
        losses = []
        for _ in range(steps + 1):  # the last call only tells the loss
            moved_kernel, moved_bias, loss = np.zeros(kernel.shape), np.zeros(bias.shape), 0.0
            for _, (phi_c, y_c, w_c) in self._chunks(n, phi, y, weights):
                example = {"phi": phi_c, "labels": y_c, "weights": w_c}
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
        """(dtheta, dkernel, dbias, loss): chunks summed in double precision."""
        n = len(x)
        total = None
        for _, (x_c, y_c, w_c) in self._chunks(n, x, y, np.full(n, 1 / n, np.float32)):
            example = {"x": x_c, "labels": y_c, "weights": w_c}
            out = self.runtime("joint_gradient", theta=self.theta, **example, **self._head_inputs(kernel, bias))
            parts = [np.asarray(out[name], np.float64) for name in ("dtheta", "dkernel", "dbias", "loss")]
            total = parts if total is None else [a + b for a, b in zip(total, parts, strict=True)]
        return [np.float32(t) if t.ndim == 0 else t.astype(np.float32) for t in total]
