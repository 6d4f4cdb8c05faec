"""What a head of every kind computes from its outputs z: loss, error dl/dz, curvature, prediction and score.

Softmax cross-entropy, logistic loss, half the squared error and the Poisson loss are generalized linear models with
their canonical link (McCullagh and Nelder, 1989): the error is mean(z) - y for all of them, so one closed form of the
head's gradient holds for all, and Newton's method has the variance of the mean as its curvature. The pinball loss of a
quantile (Koenker and Bassett, 1978) and Huber's loss (1964) have the same form with another error.

The loss of an example is the sum over its outputs; a client's loss is the mean over its examples.
"""

from typing import Any

import numpy as np
import tensorflow as tf
from scipy.special import xlogy

from tfpfl.checks import InvalidArgument
from tfpfl.data.kinds import LabelKind, label_kind
from tfpfl.data.population import Tensor


class HeadKind:
    """The functions of one kind of head.

    Args:
        kind: a `LabelKind`, or its text such as 'quantile:0.9'.

    Attributes:
        label: the `LabelKind`.

    Raises:
        InvalidArgument: there is no such kind; see `label_kind`.
    """

    def __init__(self, kind: str | LabelKind) -> None:
        self.label = label_kind(kind)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label.text!r})"

    @property
    def text(self) -> str:
        """The text of the kind, such as 'regression'."""
        return self.label.text

    @property
    def counts(self) -> bool:
        """Whether the score is a fraction of right examples, so that engines count them."""
        return self.label.score.is_fraction

    @property
    def has_curvature(self) -> bool:
        """Whether the loss has second derivatives, as Newton's method needs them."""
        return self.label.name not in ("quantile", "huber")

    @property
    def largest_curvature(self) -> float | None:
        """The largest second derivative of an example's loss with respect to its outputs; None: there is no bound.

        For classes it is the largest eigenvalue of diag(p) - p p^T, 1/2 (Böhning, 1992).
        """
        return {"classification": 0.5, "multilabel": 0.25, "regression": 1.0, "huber": 1.0}.get(self.label.name)

    def targets(self, y: Tensor, outputs: Any, dtype: Any) -> Tensor:
        """What the outputs are compared with: float [N, K]; one-hot for classes, else y itself.

        Args:
            y: int [N], or numbers [N, K].
            outputs: K.
            dtype: the dtype of the outputs.
        """
        return tf.cast(y, dtype)

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        """The mean loss over the examples: float [].

        Args:
            z: the outputs, float [N, K].
            y: int [N], or numbers [N, K].
        """
        return tf.reduce_mean(tf.reduce_sum(self.losses(z, tf.cast(y, z.dtype)), 1))

    def mean(self, z: Tensor) -> Tensor:
        """The prediction in the unit of the targets, of the shape of z: for a generalized linear model its mean."""
        return z

    def losses(self, z: Tensor, targets: Tensor) -> Tensor:
        """The loss of every output, of the shape of z."""
        raise NotImplementedError

    def error(self, z: Tensor, targets: Tensor) -> Tensor:
        """The derivative dl/dz of `losses`; at a kink one of its subgradients."""
        return self.mean(z) - targets

    def curvature(self, z: Tensor) -> Tensor:
        """The second derivative of `losses` with respect to z."""
        return tf.ones_like(z)

    def least(self, y: np.ndarray) -> float:
        """The loss of a perfect prediction of the targets y, float."""
        return 0.0

    def correct(self, z: Tensor, y: Tensor) -> Tensor:
        """For kinds whose score is a fraction: whether every example is predicted right: bool [N]."""
        raise NotImplementedError

    def score(self, z: Tensor, y: Tensor) -> Tensor:
        """For the other kinds: the score of N >= 1 examples, float []."""
        return tf.reduce_mean(self.losses(z, tf.cast(y, z.dtype)))


class Classification(HeadKind):
    """Softmax cross-entropy. Its outputs depend on each other, so it has its own way in `parts.linear_head`."""

    def targets(self, y: Tensor, outputs: Any, dtype: Any) -> Tensor:
        return tf.one_hot(y, outputs, dtype=dtype)

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))

    def mean(self, z: Tensor) -> Tensor:
        return tf.nn.softmax(z)

    def correct(self, z: Tensor, y: Tensor) -> Tensor:
        return tf.equal(tf.argmax(z, 1, tf.int32), y)


class Multilabel(HeadKind):
    """One logistic loss for each output; an example is right if all of its outputs are."""

    def mean(self, z: Tensor) -> Tensor:
        return tf.nn.sigmoid(z)

    def losses(self, z: Tensor, targets: Tensor) -> Tensor:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=z)

    def curvature(self, z: Tensor) -> Tensor:
        p = tf.nn.sigmoid(z)
        return p * (1 - p)

    def correct(self, z: Tensor, y: Tensor) -> Tensor:
        return tf.reduce_all(tf.equal(z > 0, tf.cast(y, z.dtype) > 0.5), 1)


class Regression(HeadKind):
    """Half the squared error; the score is the root of the mean squared error over examples and outputs."""

    def losses(self, z: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * tf.square(z - targets)

    def score(self, z: Tensor, y: Tensor) -> Tensor:
        return tf.sqrt(tf.reduce_mean(tf.reduce_mean(tf.square(z - tf.cast(y, z.dtype)), 1)))


class Poisson(HeadKind):
    """exp(z) - y z, the Poisson loss but for a constant. The score is the mean deviance, which is 0 for exp(z) = y."""

    def mean(self, z: Tensor) -> Tensor:
        return tf.exp(z)

    def losses(self, z: Tensor, targets: Tensor) -> Tensor:
        return tf.exp(z) - targets * z

    def curvature(self, z: Tensor) -> Tensor:
        return tf.exp(z)

    def least(self, y: np.ndarray) -> float:
        return float((y - xlogy(y, y)).sum(1).mean())

    def score(self, z: Tensor, y: Tensor) -> Tensor:
        y = tf.cast(y, z.dtype)
        away = z - tf.math.log(tf.where(y > 0, y, tf.ones_like(y)))
        # In y log(y) - y z - y + exp(z), large counts would cancel each other up to float32's rounding.
        return 2 * tf.reduce_mean(tf.where(y > 0, y * (tf.math.expm1(away) - away), tf.exp(z)))


class Quantile(HeadKind):
    """The pinball loss, whose minimum is the quantile `parameter` of the targets."""

    def losses(self, z: Tensor, targets: Tensor) -> Tensor:
        q, above = tf.constant(self.label.parameter, z.dtype), targets - z
        return tf.maximum(q * above, (q - 1) * above)

    def error(self, z: Tensor, targets: Tensor) -> Tensor:
        return tf.cast(z > targets, z.dtype) - tf.constant(self.label.parameter, z.dtype)


class Huber(HeadKind):
    """Huber's loss: squared up to a distance of `parameter`, then linear; the score is the mean absolute error."""

    def losses(self, z: Tensor, targets: Tensor) -> Tensor:
        delta, away = tf.constant(self.label.parameter, z.dtype), tf.abs(z - targets)
        near = tf.minimum(away, delta)
        return 0.5 * tf.square(near) + delta * (away - near)

    def error(self, z: Tensor, targets: Tensor) -> Tensor:
        delta = tf.constant(self.label.parameter, z.dtype)
        return tf.clip_by_value(z - targets, -delta, delta)

    def score(self, z: Tensor, y: Tensor) -> Tensor:
        return tf.reduce_mean(tf.abs(z - tf.cast(y, z.dtype)))


_KINDS: dict[str, type[HeadKind]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "poisson": Poisson,
    "quantile": Quantile,
    "huber": Huber,
}


def head_kind(kind: "str | LabelKind | HeadKind") -> HeadKind:
    """The `HeadKind` of a kind or of its text.

    Raises:
        InvalidArgument: there is no such kind; see `tfpfl.data.kinds.label_kind`.

    Examples:
        >>> head_kind("poisson").mean(tf.constant([0.0])).numpy().tolist()
        [1.0]
    """
    if isinstance(kind, HeadKind):
        return kind
    label = label_kind(kind)
    return _KINDS[label.name](label)


CLASSIFICATION = head_kind("classification")


def check_classes(kind: HeadKind, title: str, why: str) -> None:
    """Checks that the labels are classes, for a method that needs them.

    Args:
        kind: the kind of the head.
        title: the method's name in the paper.
        why: why it needs classes, and what to use instead.

    Raises:
        InvalidArgument: it is another kind.
    """
    if not kind.label.is_classes:
        raise InvalidArgument(f"{title} is for classification only, found the kind {kind.text}: {why}")


def check_curvature(kind: HeadKind, what: str) -> None:
    """Checks that Newton's method is possible.

    Args:
        kind: the kind of the head.
        what: the argument that asks for it, for the message.

    Raises:
        InvalidArgument: the loss has no second derivative everywhere.
    """
    if not kind.has_curvature:
        raise InvalidArgument(
            f"{what} needs second derivatives, which the loss of the kind {kind.text} does not have everywhere. Use "
            "inner_opt='gd', 'momentum' or 'adam'"
        )
