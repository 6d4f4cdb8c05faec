"""Networks with BatchNormalization or adapters, for methods that need them."""

from helpers.toys import backbone
from tfpfl.algorithms import ALGORITHMS
from tfpfl.models import SplitModel


def normed(name: str) -> bool:
    """Whether the method of this name needs a network with BatchNormalization."""
    return ALGORITHMS[name].batch_norm is not None


def adapters_of(name: str) -> str | None:
    """The adapters that the method of this name needs; None for none."""
    return "lora:2" if ALGORITHMS[name].personal else None


def model_for(name: str, dtype="float32", kind="classification") -> SplitModel:
    """`backbone` as a model, with BatchNormalization or adapters if the method of this name needs them."""
    return SplitModel(backbone(dtype, batch_norm=normed(name)), kind=kind, adapters=adapters_of(name))
