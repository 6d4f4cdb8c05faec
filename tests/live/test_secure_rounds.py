"""Secure rounds over HTTP are the rounds of a simulation, and the server holds no update."""

import numpy as np
import tensorflow as tf

from helpers.live import examples_of, in_threads, live_theta, same_scores, serving, simulated
from tflite_export.device.live.client import LiveDevice
from tfpfl.live.rules import Rules

ROUNDS = 4


def device(run, address, folder, client, token, **how):
    return LiveDevice(
        address, folder / f"device{client}", examples_of(run, client), token, interpreter=tf.lite.Interpreter, **how
    )


def test_a_secure_run_is_the_simulated_one(run, tmp_path):
    theta, heads, scores = simulated(run, ROUNDS)
    ids, devices = run.population.client_ids.tolist(), {}
    with serving(run, Rules(wait_for=len(ids), secure=True)) as (address, rounds, tokens):

        def work(client):
            devices[client] = device(run, address, tmp_path, client, tokens[client])
            devices[client].run()

        in_threads([lambda i=i: work(i) for i in ids])
        events = [event[2] for event in rounds.book.events()]
    assert run.store.round_num == ROUNDS
    assert np.abs(live_theta(run) - theta).max() < 1e-5
    for client, head in heads.items():
        for found, expected in zip(devices[client].client.head, head, strict=True):
            assert np.abs(found - np.asarray(expected)).max() < 1e-5
    wanted = {(e.round_num, e.client_id, e.model, e.split) for e in run.store.evaluations()}
    same_scores(run.store.evaluations(), [e for e in scores if (e.round_num, e.client_id, e.model, e.split) in wanted])
    assert sum(event.startswith("failed") for event in events) == 0
