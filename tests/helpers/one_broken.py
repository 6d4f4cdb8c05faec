"""Algorithms on small clients; client `BROKEN` has a fault in every round."""

import tensorflow as tf

from helpers.normalized import model_for
from helpers.quick import quick
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.transforms import faults
from tfpfl.data.population import Sampling

BROKEN = 2


def build(name, federation, **more) -> Algorithm:
    """Builds an algorithm with quick hyperparameters; half of the clients take part in a round."""
    population = federation.population(Sampling("fixed", 0.5), shared_slots=True)
    return build_algorithm(name, model_for(name), population, **quick(name) | more)


def only(kind):
    """Makes (data) -> kind of fault: client `BROKEN` has this fault in every round, the others have none."""
    return lambda data: tf.where(tf.equal(data.info.client_id, BROKEN), faults.KINDS.index(kind), 0)
