"""What a head of every kind says and how it is scored, in NumPy; on a device there is no TensorFlow.

The same functions as in `tfpfl.models.heads`, which a test compares them with.
"""

from typing import NamedTuple

import numpy as np

from tflite_export.device.arrays import as_array
from tflite_export.device.errors import InvalidInput

_QUANTILE = r"0\.[0-9]{1,30}|[0-9](\.[0-9]{1,30})?e-[0-9]{1,3}"
_NUMBER = r"[0-9]{1,30}(\.[0-9]{1,30})?(e[+-][0-9]{1,3})?"
PATTERN = rf"multilabel|regression|poisson|quantile:({_QUANTILE})|huber:{_NUMBER}"  # besides classes


class Score(NamedTuple):
    """Loss and score of a head on labelled examples."""

    loss: float  # the mean over the examples of the loss, summed over outputs; for classes cross-entropy in nats
    value: float  # for classes the accuracy in [0, 1]
    name: str = "accuracy"

    @property
    def accuracy(self) -> float:
        """The part of the examples that are predicted right; of heads for classes.

        Raises:
            AttributeError: the score is another one.
        """
        if self.name != "accuracy":
            raise AttributeError(f"this score is the {self.name}: take value")
        return self.value

    def better_than(self, other: "Score") -> bool:
        """Whether the score is better, or the same and the loss smaller. One that is not finite is never better."""
        if not (np.isfinite(self.loss) and np.isfinite(self.value)):
            return False
        sign = 1 if self.name in ("accuracy", "exact_match") else -1
        return (sign * self.value, -self.loss) > (sign * other.value, -other.loss)


class Kind:
    """The functions of one kind of head.

    Args:
        text: 'classification', 'multilabel', 'regression', 'poisson', 'quantile:Q' or 'huber:DELTA'.
    """

    def __init__(self, text: str = "classification"):
        self.text = text
        self.name, _, number = text.partition(":")
        self.parameter = float(number) if number else None
        self.is_classes = self.name == "classification"
        self.input = "labels" if self.is_classes else "targets"  # of the program
        self.output = "probabilities" if self.is_classes else "predictions"

    def mean(self, z: np.ndarray) -> np.ndarray:
        """The prediction for outputs z [N, K], of the same shape: probabilities, rates, or numbers."""
        if self.is_classes:
            return np.exp(log_softmax(z))
        if self.name == "multilabel":
            with np.errstate(over="ignore"):  # where it is infinite, the result is 0, as it should be
                return 1 / (1 + np.exp(-z))
        return np.exp(z) if self.name == "poisson" else z

    def score(self, z: np.ndarray, y: np.ndarray) -> Score:
        """Loss and score of outputs z [N, K] for labels y, int [N], or targets y [N, K]."""
        if self.is_classes:
            log_p = log_softmax(z)
            return Score(float(-log_p[np.arange(len(y)), y].mean()), float((log_p.argmax(1) == y).mean()))
        z, y = z.astype(np.float64), y.astype(np.float64)
        away = z - y
        if self.name == "multilabel":
            loss = np.maximum(z, 0) - z * y + np.log1p(np.exp(-np.abs(z)))
            return self._score(loss, "exact_match", ((z > 0) == (y > 0.5)).all(1).mean())
        if self.name == "regression":
            return self._score(0.5 * away**2, "rmse", np.sqrt((away**2).mean()))
        if self.name == "poisson":
            y_log_y = y * np.log(np.where(y > 0, y, 1.0))
            return self._score(np.exp(z) - y * z, "deviance", 2 * (y_log_y - y * z - y + np.exp(z)).mean())
        assert self.parameter is not None
        if self.name == "quantile":
            loss = np.maximum(-self.parameter * away, (1 - self.parameter) * away)
            return self._score(loss, "pinball", loss.mean())
        near = np.minimum(np.abs(away), self.parameter)
        return self._score(0.5 * near**2 + self.parameter * (np.abs(away) - near), "mae", np.abs(away).mean())

    @staticmethod
    def _score(losses, name, value) -> Score:
        return Score(float(losses.sum(1).mean()), float(value), name)

    def checked(self, y, examples: int, outputs: int) -> np.ndarray:
        """Labels int32 [N], or targets float32 [N, K].

        Raises:
            InvalidInput: a shape or dtype is wrong, or a value is out of range.
        """
        y = as_array(y, self.input)
        if self.is_classes:
            if y.shape != (examples,) or not np.issubdtype(y.dtype, np.integer):
                raise InvalidInput(f"labels must be integers [{examples}], found {y.dtype} {list(y.shape)}")
            bad = (y < 0) | (y >= outputs)
            if bad.any():
                raise InvalidInput(
                    f"label {int(y[bad.argmax()])} is out of range: this client's are 0..{outputs - 1}; the head is "
                    "untouched"
                )
            return y.astype(np.int32)
        if y.shape != (examples, outputs) or y.dtype.kind not in "fiub":
            raise InvalidInput(f"targets must be numbers [{examples}, {outputs}], found {y.dtype} {list(y.shape)}")
        y = y.astype(np.float32)
        allowed, what = np.isfinite(y), "finite"
        if self.name == "multilabel":
            allowed, what = (y == 0) | (y == 1), "0 or 1"
        elif self.name == "poisson":
            allowed, what = allowed & (y >= 0), "finite and not below 0"
        if not allowed.all():
            row, column = np.argwhere(~allowed)[0]
            raise InvalidInput(
                f"target {y[row, column]:g} of example {row} must be {what}: this client's kind is {self.text}; the "
                "head is untouched"
            )
        return y


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """The logarithm of softmax of each row of `logits`, [N, K]."""
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
