"""FedALA, in a file of its own, as a user would write it: `tfpfl run --algorithm fedala.py:fedala`.

The mixed layers are the last one (p = 1 in the paper), and the weights are learned on all examples of the client.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl import Algorithm, ClientOutput, Weights
from tfpfl.algorithms.parts import adaptation, example_weight, local_solver, sgd
from tfpfl.checks import check_rates
from tfpfl.models import client_loss, tree


class Kept(NamedTuple):
    """What a client keeps."""

    head: Any  # theta_i: the head after its last visit
    mix: Any  # W_i in [0, 1], shaped like the head
    visited: Any  # bool []


def mixed(own, shared, mix):
    """own + W * (shared - own), number by number."""
    return tf.nest.map_structure(lambda o, s, w: o + w * (s - o), own, shared, mix)


def fedala(model, population, *, eta: float = 0.05, steps: int = 10, eta_mix: float = 1.0, first: int = 10):
    """FedALA (Zhang et al., AAAI 2023): a client learns, for each number of the head, how much of the shared one it
    takes.

    Args:
        eta, steps: rate and number of the local SGD steps, as in `fedavg`.
        eta_mix: learning rate of the weights W_i, >= 0.
        first: number of steps on W_i in the client's first visit; one step in each later visit.
    """
    check_rates(eta=eta, eta_mix=eta_mix)
    solve, objective = local_solver(eta=eta, steps=steps), client_loss(model)
    weight, num_labels = example_weight(model, "examples"), population.shared_labels()

    def head():
        return model.shared_head(num_labels)

    def learned(w, kept, data):
        def step(n, mix):
            with tf.GradientTape() as tape:
                tape.watch(mix)
                loss = objective(Weights(w.theta, mixed(kept.head, w.head, mix)), data.x, data.y)
            moved = tree.add_scaled(mix, -eta_mix, tape.gradient(loss, mix))
            return n + 1, tf.nest.map_structure(lambda m: tf.clip_by_value(m, 0.0, 1.0), moved)

        count = tf.where(kept.visited, 1, first)
        return tf.while_loop(lambda n, _: n < count, step, (0, kept.mix))[1]

    def personal_model(w, kept, data):
        return Weights(w.theta, mixed(kept.head, w.head, kept.mix))

    def client_update(w, kept, data):
        mix = learned(w, kept, data)
        end, loss = solve(objective, Weights(w.theta, mixed(kept.head, w.head, mix)), data)
        return ClientOutput(tree.subtract(end, w), weight(data), Kept(end.head, mix, tf.constant(True)), {"loss": loss})

    return Algorithm(
        model=model,
        population=population,
        init_server=lambda: Weights(model.theta(), head()),
        init_client=lambda info: Kept(head(), tf.nest.map_structure(tf.ones_like, head()), tf.constant(False)),
        message=lambda w: w,
        client_update=client_update,
        server_update=tree.add,
        personal_model=personal_model,
        local_model=lambda w, output: tree.add(w, output.update),
        global_model=lambda w: w,
        adapt=adaptation(model, personal_model, sgd(eta), part="head"),
        shares="backbone",
    )
