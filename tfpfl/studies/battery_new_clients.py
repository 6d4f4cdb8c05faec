"""The battery's check of a client that never took part in training and adapts its model by itself."""

import numpy as np
import tensorflow as tf

from tfpfl.models.losses import client_loss
from tfpfl.studies.battery_subject import WIDEST, Subject, distance, kinds, require


def a_new_client_adapts(subject: Subject) -> None:
    """If new clients can adapt, adapting starts at the personal or global model and lowers the loss in nine epochs.

    If they predict with more than a head, they start with the outputs of `Algorithm.predictor`, and may train nothing.
    """
    algorithm = subject.algorithm
    if algorithm.adapt is None:
        return
    message, _, data, _ = subject.visit(WIDEST)
    state = algorithm.init_client(data.info)
    start, epoch, model, predictor, message_of = algorithm.adapt
    sent = message
    if message_of is not None:
        server, new = subject.trained.server, tf.constant(int(algorithm.population.client_ids[-1]) + 1)
        sent, message = message_of(server), algorithm.message(server, *([new] if algorithm.message_per_client else []))
    carry, losses = start(sent, state, data), []
    for n in range(9):
        losses.append(float(client_loss(algorithm.model)(model(carry), data.x, data.y)))
        carry = epoch(carry, data, tf.constant(n))
    falls = np.isfinite(losses).all() and (losses[-1] < losses[0] - 1e-3 or predictor is not None)
    require(falls, f"its loss over nine epochs is {', '.join(f'{loss:.4g}' for loss in losses)}")
    first = model(start(sent, state, data))
    require(
        (predictor is None) == (algorithm.predictor is None),
        "either both the algorithm and its `adapt` have a predictor, or none",
    )
    if predictor is not None and algorithm.predictor is not None:
        phi = algorithm.model.features(first.theta, data.x)
        of_both = predictor(start(sent, state, data), data), algorithm.predictor(message, state, data)
        away = distance(*(outputs(phi) for outputs in of_both))
        require(away < 1e-6, f"its outputs start {away:.1e} away from those of `Algorithm.predictor`")
    origins = [algorithm.personal_model(message, state, data)]
    if algorithm.global_model is not None:
        origins.append(algorithm.global_model(message))
    fits = [o for o in origins if kinds(o) == kinds(first)]
    away = min((distance(first, o) for o in fits), default=np.inf)
    require(away < 1e-6, f"it starts {away:.1e} away from what it would predict with, and from the global model")
    require(kinds(model(carry)) == kinds(first), "its model has other shapes after nine epochs")
