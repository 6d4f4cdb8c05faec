"""Networks with BatchNormalization, for methods that need one."""

from helpers.toys import backbone
from tfpfl.algorithms import ALGORITHMS
from tfpfl.models import SplitModel


def normed(name: str) -> bool:
    """Whether the method of this name needs a network with BatchNormalization."""
    return ALGORITHMS[name].batch_norm is not None


def model_for(name: str, dtype="float32", kind="classification") -> SplitModel:
    """`backbone` as a model, with BatchNormalization if the method of this name needs it."""
    return SplitModel(backbone(dtype, batch_norm=normed(name)), kind=kind)
