"""The server of PFLEGO's asynchronous rounds, and which runs can have them."""

from typing import Any

import numpy as np
import tensorflow as tf

from tflite_export.convert.program import unflatten
from tfpfl.algorithms.contract import Algorithm
from tfpfl.checks import InvalidArgument
from tfpfl.engines import aggregation
from tfpfl.engines.visit import server_step
from tfpfl.live.arrivals import AsyncServer
from tfpfl.live.plan import check_exported


def server_of(algorithm: Algorithm, buffer: int, state: Any) -> AsyncServer:
    """The server of PFLEGO's asynchronous rounds.

    Args:
        algorithm: PFLEGO, whose rounds have all clients.
        buffer: K.
        state: the algorithm's state after the last step.
    """
    update, population = server_step(algorithm), algorithm.population

    def step(server, total):
        gradient = tuple(map(tf.constant, unflatten(total, algorithm.model)))
        found = aggregation.Contribution((gradient,), tf.ones([]), ())
        server = tf.nest.map_structure(tf.convert_to_tensor, server)  # NumPy's int32 + 1 would be int64
        return update(server, aggregation.finish(algorithm, found, []), found.weight)

    alphas = {int(i): float(population.info(i).alpha) for i in population.client_ids}
    return AsyncServer(alphas, buffer, state, step, np.zeros(algorithm.model.num_backbone_weights, np.float32))


def check_asynchronous(run) -> None:
    """Checks that the rounds of a run can be asynchronous.

    Raises:
        InvalidArgument: see `check_exported`; or its rounds have cohorts, or weights relative to the others of one; or
            it simulates when clients come.
    """
    check_exported(run, "asynchronous rounds")
    population = run.population
    if not run.availability.is_perfect:
        raise InvalidArgument(
            f"{run.folder} simulates when clients come, drop out or are late; in asynchronous rounds a client comes "
            "when it comes, and is weighted by how often it did: make the run without --dropout, --client-seconds, "
            "--round-deadline, --joins and --leaves"
        )
    if population.clients_per_round != population.num_clients:
        raise InvalidArgument(
            f"{run.folder}: asynchronous rounds have no cohorts: whoever is there works, and is weighted by how often "
            f"it comes. Its participation is {population.clients_per_round / population.num_clients:g}: make the run "
            "with --participation 1"
        )
    if run.algorithm.aggregate != "sum":
        raise InvalidArgument(
            f"{run.folder}: its weighting is 'sampled', N_i over the examples of a cohort, and asynchronous rounds "
            "have no cohorts: make the run with --weighting alpha"
        )
