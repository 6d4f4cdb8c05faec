"""Backbone and head: any Keras model as a function of its weights, and the papers' networks."""

from tfpfl.models.networks import NETWORKS, build_network
from tfpfl.models.split import SplitModel

__all__ = ["NETWORKS", "SplitModel", "build_network"]
