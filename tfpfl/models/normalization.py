"""What a model does with its trainable BatchNormalization layers: `batch_norm`, the part of `SplitModel` about them.

    frozen   The stored statistics normalize, in training too; scale and offset are trained as the rest of theta. So
             features are a function of theta and one example, and everything is as without such layers.
    local    Statistics, scale and offset are the client's own and never sent (FedBN). In training, the statistics of a
             step's examples normalize, and the moving ones follow them; in evaluation the client's moving ones do.
    shared   As 'local', but only the statistics are special: the server averages them with the clients' weights. Scale
             and offset are trained as the rest of theta.

theta has the trainable weights in every mode. Statistics have no gradient, so they are not in it while a method trains:
`algorithms.transforms.normalization` carries them beside it. In the weights with which a client predicts, they follow
the trainable weights, as `Weights.theta = (*theta, *statistics)`.
"""

import copy
from typing import Any

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument, check_choice
from tfpfl.models import passes
from tfpfl.models.functional import PureModel

BATCH_NORMS = ("frozen", "local", "shared")


def check_batch_norm(batch_norm: str | None, **treated: Any) -> None:
    """Checks a `batch_norm` as far as that is possible without the backbone.

    Args:
        batch_norm: one of `BATCH_NORMS`; None for the default.
        treated: options that treat updates as gradients, by name; None for those that are not used.

    Raises:
        InvalidArgument: it is unknown; or it is 'shared' and one of the options is used.
    """
    if batch_norm is not None:
        check_choice(batch_norm=(batch_norm, BATCH_NORMS))
    for name, value in treated.items():
        if batch_norm == "shared" and value is not None:
            raise InvalidArgument(
                f"{name}={value!r} cannot be used with batch_norm='shared': it would change moving means and variances "
                f"as if they were gradients. Use batch_norm='local' or 'frozen', or leave {name} out"
            )


class Normalized:
    """The part of a `SplitModel` about layers that are not functions of weights and one example.

    Attributes:
        batch_norm: 'frozen', 'local' or 'shared'; None if the backbone has no trainable BatchNormalization.
        own: for each weight of theta whether it belongs to the client: the scales and offsets with 'local'; with
            adapters those of the part `personal`.
        draws: whether the backbone has layers that draw random numbers in training, such as Dropout.
    """

    initial_theta: tuple[np.ndarray, ...]
    backbone: Any
    inputs: Any
    above: Any = None
    adapters: Any = None

    def _set_batch_norm(self, pure: PureModel, batch_norm: str | None) -> None:
        check_batch_norm(batch_norm)
        if batch_norm in ("local", "shared"):
            # As many as in the model's first call: for other numbers, a Sequential of Keras 2 is built once more.
            pure.check_batch_statistics((self.above or self).inputs.zeros(2))
        self._pure, self.chosen_batch_norm = pure, batch_norm
        self.batch_norm = (batch_norm or "frozen") if pure.layers.moving else None
        self.draws = pure.layers.draws
        self.own = tuple(own and batch_norm == "local" for own in pure.layers.own)

    def _only_adapters_train(self, own: tuple[bool, ...]) -> None:
        """With adapters theta is their weights: the backbone's layers normalize with what they have stored.

        Args:
            own: for each of these weights whether it belongs to the client.

        Raises:
            InvalidArgument: batch_norm asks for something else.
        """
        if self.batch_statistics:
            raise InvalidArgument(
                f"batch_norm={self.batch_norm!r} trains BatchNormalization layers, but with adapters nothing else of "
                "the backbone trains. Use batch_norm='frozen', or no adapters"
            )
        self.own = own

    def with_batch_norm(self, batch_norm: str) -> Any:
        """The same model with another `batch_norm`.

        Raises:
            InvalidArgument: as for the argument of `SplitModel`.
        """
        other = copy.copy(self)
        other._set_batch_norm(self._pure, batch_norm)
        if self.adapters is not None:
            other._only_adapters_train(self.own)
        if other.above is not None:
            other.above = other.above.with_batch_norm(batch_norm)
        return other

    @property
    def batch_statistics(self) -> bool:
        """Whether the statistics of a step's examples normalize in training: batch_norm is 'local' or 'shared'."""
        return self.batch_norm in ("local", "shared")

    @property
    def alone(self) -> bool:
        """Whether a client's examples must go through the backbone alone in training, not with those of others."""
        return self.draws or self.batch_statistics

    def statistics(self) -> tuple:
        """The initial moving statistics, mean and variance of one layer after the other: a tuple of tensors."""
        return tuple(tf.constant(s) for s in self._pure.statistics)

    @property
    def variables(self) -> list:
        """The backbone's variables that `Weights.theta` of a prediction has the values of, in its order."""
        moving = self._pure.layers.moving if self.batch_statistics else []
        return [*self.backbone.trainable_weights, *moving]

    def _check_pass(self, theta: tuple) -> None:
        """Checks that training has statistics that can move.

        Raises:
            InvalidArgument: it has not: the algorithm does not know of the model's `batch_norm`.
        """
        now = passes.current()
        if self.batch_statistics and now is not None and now.statistics is None and len(theta) == len(self.own):
            raise InvalidArgument(
                f"the model has batch_norm={self.batch_norm!r}, but the method does not carry the moving "
                "statistics: build it with tfpfl.build_algorithm, or use tfpfl.algorithms.transforms.normalized"
            )
