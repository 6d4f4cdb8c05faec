"""Runs rounds with given cohorts, and computes clients' steps independently of the algorithms."""

import tensorflow as tf

from helpers.toys import Toy, client_loss, gradient, initial_states, visits
from tfpfl.engines import aggregation
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.visit import server_step
from tfpfl.models import tree
from tfpfl.models.weights import Weights

COHORTS = [(0, 2, 3), (1, 2), (0, 1, 2, 3, 4), (2, 4)]  # somebody skips rounds, somebody starts late


def play(algorithm, data: Toy, cohorts=COHORTS, server=None, states=None, first=1):
    """Runs one round per cohort, numbered from `first`: (the server's state after each, states by client id)."""
    engine = Simulation(algorithm)
    server = engine.initialize() if server is None else server
    states, path = dict(states or initial_states(algorithm, data.population)), []
    for t, cohort in enumerate(cohorts, first):
        output = engine.next(server, [states[i] for i in cohort], [data.visit(i, t) for i in cohort])
        server, states = output.server, states | dict(zip(cohort, output.client_states, strict=True))
        path.append(server)
    return path, states


def rounds_of(engine, algorithm, cohorts, visits=visits):
    """Runs one round per cohort, numbered from 1, in either engine: yields (its output, all clients' states by id)."""
    server, states = engine.initialize(), initial_states(algorithm, algorithm.population)
    for t, ids in enumerate(cohorts, 1):
        output = engine.next(server, [states[i] for i in ids], visits(algorithm, ids, t))
        server, states = output.server, states | dict(zip(ids, output.client_states, strict=True))
        yield output, states


def after_rounds(engine, algorithm, cohorts):
    """(the server's state, all clients' states by id) after the rounds of `rounds_of`."""
    output, states = list(rounds_of(engine, algorithm, cohorts))[-1]
    return output.server, states


def mean(structures):
    """The mean of structures of tensors."""
    structures = list(structures)
    return tree.scale(1 / len(structures), tf.nest.map_structure(lambda *x: tf.add_n(x), *structures))


def loss_of(data: Toy, client_id: int):
    """The client's loss l_i as a function of the whole model."""
    return lambda weights: client_loss(data, client_id, weights.theta, weights.head)


def by_hand(function, weights, rate, steps, momentum=0.0):
    """Gradient descent with momentum, by GradientTape."""
    velocity = tree.zeros_like(weights)
    for _ in range(steps):
        velocity = tree.add_scaled(gradient(function, weights)[0], momentum, velocity)
        weights = tree.add_scaled(weights, -rate, velocity)
    return weights


def shared(data: Toy, seed=3) -> Weights:
    """A model shared by all clients that differs from every initial model."""
    start = Weights(data.model.theta(), data.model.shared_head(data.population.shared_labels(), "glorot"))
    leaves = tf.nest.flatten(start)
    noise = [0.3 * tf.random.stateless_normal(x.shape, [seed, i], dtype=x.dtype) for i, x in enumerate(leaves)]
    return tf.nest.pack_sequence_as(start, [x + n for x, n in zip(leaves, noise, strict=True)])


def nothing_arrives(algorithm, data: Toy, server, client_id=0):
    """The server's state after a round whose only update has weight 0."""
    message, state = algorithm.message(server), algorithm.init_client(data.population.info(client_id))
    output = algorithm.client_update(message, state, data.visit(client_id))
    total = aggregation.contribution(algorithm, output._replace(weight=tf.zeros_like(output.weight)))
    arrived = aggregation.finish(algorithm, total, tf.constant([client_id]))
    return server_step(algorithm)(server, arrived, total.weight)
