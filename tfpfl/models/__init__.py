"""Models: a Keras backbone and a linear head, arithmetic on their weights, and losses."""

from tfpfl.models.losses import client_loss, cross_entropy, logits
from tfpfl.models.networks import NETWORKS, build_network
from tfpfl.models.split import SplitModel
from tfpfl.models.trunk_features import trunk_federation
from tfpfl.models.weights import Head, Weights

__all__ = [
    "NETWORKS",
    "Head",
    "SplitModel",
    "Weights",
    "build_network",
    "client_loss",
    "cross_entropy",
    "logits",
    "trunk_federation",
]
