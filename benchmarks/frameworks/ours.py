"""tfpfl: the local engine with its defaults. Clients are read by id, from the federation's files."""

import os
import sys
from importlib.metadata import version

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_cnn
import numpy as np
import tensorflow as tf
from job import Turns, load_job

import tfpfl
from tfpfl.data.randomness import client_key
from tfpfl.models.weights import Head, Weights


def main():
    """Runs rounds when told."""
    job = load_job(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)  # clients run side by side; see docs/speed.md
    federation = tfpfl.Federation.load(job.federation, verify=False)
    population = federation.population(labels="global")
    model = tfpfl.SplitModel(keras_cnn.backbone())
    algorithm = tfpfl.build_algorithm("fedavg", model, population, eta=job.rate, epochs=1, batch_size=job.batch_size)
    simulation = tfpfl.Simulation(algorithm, federation)
    server = Weights(tuple(map(tf.constant, job.weights[:-2])), Head(*map(tf.constant, job.weights[-2:])))
    turns = Turns(lambda: [*server.theta, *server.head])
    turns.ready({"tfpfl": version("tfpfl"), "tensorflow": tf.__version__, "keras": keras.__version__})
    for t, ids in enumerate(job.cohorts, start=1):
        if not turns.begin():
            return
        keys = client_key(job.seed, t, ids)
        visits = [tfpfl.Visit(population.info(i), key) for i, key in zip(ids, keys, strict=True)]
        server = simulation.next(server, [()] * len(ids), visits).server
        tf.nest.map_structure(np.asarray, server)
        turns.end()
    turns.begin()


if __name__ == "__main__":
    main()
