"""Saves the final states of every algorithm with this Python's TensorFlow and Keras.

Use: `python -m helpers.one_seed FILE.npz`. Tests compare the files of two versions.
"""

import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfpfl
from helpers.normalized import adapters_of
from helpers.quick import quick
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.models import build_network

ROUNDS = 5


def ends(folder: str) -> dict:
    """Server state, clients' states and losses after five rounds on digits, with half of ten clients in each round."""
    federation = tfpfl.Federation.build("digits", "round_robin", clients=10, K=2, seed=0, out=folder)
    population = federation.population(tfpfl.Sampling("fixed", rate=0.5), shared_slots=True)
    found = {}
    for name in ALGORITHMS:
        network = "conv_bn" if ALGORITHMS[name].batch_norm else "mlp200"
        model = tfpfl.SplitModel(build_network(network, federation.example_shape), adapters=adapters_of(name))
        training = tfpfl.Training(build_algorithm(name, model, population, **quick(name)), federation, evaluate_every=0)
        training.run(ROUNDS)
        clients = training.client_states(population.client_ids.tolist())
        for part, state in (("server", training.server_state()), ("clients", clients)):
            for i, leaf in enumerate(tf.nest.flatten(state)):
                found[f"{name}/{part}/{i}"] = np.asarray(leaf)
        found[f"{name}/loss"] = np.array([line["loss"] for line in training.store.history()])
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        stack = f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
        np.savez(sys.argv[1], **ends(f"{folder}/digits"), stack=stack)
