"""FedProto against GradientTape and NumPy, over rounds with absent clients; its limits; the three ways to predict."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.rounds import COHORTS, play
from helpers.toys import backbone, distance, gradient, identical, initial_states
from tfpfl.algorithms import build_algorithm, fedproto, separate
from tfpfl.algorithms.fedproto import FAR
from tfpfl.data.population import Population
from tfpfl.models import SplitModel, tree

ETA = 0.2


def phi_of(theta, x):
    w_1, b_1, w_2, b_2 = theta
    return tf.tanh(tf.tanh(x @ w_1 + b_1) @ w_2 + b_2)


def penalty_by_hand(phi, y, prototypes: dict, penalty):
    """`prototypes`: {class: vector}."""
    if penalty == "examples":
        parts = [tf.reduce_sum((phi[n] - prototypes[c]) ** 2) for n, c in enumerate(y) if c in prototypes]
        return tf.add_n([*parts, tf.zeros([], phi.dtype)]) / (phi.shape[0] * phi.shape[1])
    own = {c: tf.reduce_mean(phi[y == c], 0) for c in np.unique(y)}
    parts = [tf.reduce_mean((own[c] - prototypes[c]) ** 2) for c in own if c in prototypes]
    return tf.add_n([*parts, tf.zeros([], phi.dtype)])


def rounds_by_hand(data, weights, cohorts, lam, penalty, weighting, steps=2):
    """Yields (prototypes {class: vector}, every client's model) after each round."""
    prototypes: dict = {}
    for cohort in cohorts:
        sent: dict = {}
        for i in cohort:
            x, y = data.data[i]

            def loss(w, x=x, y=y):
                phi = phi_of(w.theta, x)
                z = tf.matmul(phi, w.head.kernel) + w.head.bias
                fit = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))
                return fit + lam * penalty_by_hand(phi, y, prototypes, penalty)

            for _ in range(steps):
                weights[i] = tree.add_scaled(weights[i], -ETA, gradient(loss, weights[i])[0])
            phi = phi_of(weights[i].theta, x).numpy()
            for c in np.unique(y):
                share = 1 if weighting == "uniform" else (y == c).sum()
                sent.setdefault(c, []).append((share, phi[y == c].mean(0)))
        for c, parts in sent.items():
            prototypes[c] = sum(p * v for p, v in parts) / sum(p for p, _ in parts)
        yield dict(prototypes), dict(weights)


@pytest.mark.parametrize("penalty", ["examples", "prototypes"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_it_is_written_out_over_rounds(data, penalty, weighting):
    """Client 3 alone has class 3, and comes in one round only: its prototype stays."""
    hyper = {"lam": 0.7, "penalty": penalty, "weighting": weighting, "eta": ETA, "steps": 2}
    algorithm = fedproto(data.model, data.population, **hyper)
    path, states = play(algorithm, data)
    start = initial_states(algorithm, data.population)
    by_hand = list(rounds_by_hand(data, dict(start), COHORTS, 0.7, penalty, weighting))
    for server, (prototypes, _) in zip(path, by_hand, strict=True):
        assert {c for c in range(4) if server.counts[c] > 0} == set(prototypes)
        for c, vector in prototypes.items():
            np.testing.assert_allclose(server.values[c], vector, atol=1e-9)
    assert distance(states, by_hand[-1][1]) < 1e-9
    assert set(by_hand[0][0]) == {0, 1, 2, 3} and 3 not in COHORTS[-1]
    assert identical(path[3].values[3], path[2].values[3])  # nobody of the last cohort has class 3
    assert distance(path[3].values[0], path[2].values[0]) > 1e-3


def test_without_lambda_each_client_trains_alone(data):
    """Its models are those of Local whose heads are as wide; only the prototypes are told."""
    people = Population(data.population.num_examples, [4] * 5)
    algorithm = fedproto(data.model, people, lam=0.0, eta=0.1, epochs=2, batch_size=2)
    alone = separate.local(data.model, people, eta=0.1, epochs=2, batch_size=2)
    start = initial_states(algorithm, people)
    data = data._replace(population=people)
    _, states = play(algorithm, data, states=start)
    _, expected = play(alone, data, states=start)
    assert distance(states, expected) < 1e-9


@pytest.mark.parametrize("predict", ["prototypes", "own_prototypes", "head"])
def test_how_it_predicts(data, predict):
    """By the definition: the least distance, or the client's own head; a class without a prototype is far away."""
    algorithm = fedproto(data.model, data.population, eta=ETA, steps=2, predict=predict)
    (*_, server), states = play(algorithm, data, [(0, 2, 4)] * 2)  # class 3 has no prototype
    new = np.random.default_rng(0).standard_normal((40, 4))
    for i in (0, 1):
        found = algorithm.personal_model(server, states[i], data.visit(i))
        phi, z = phi_of(states[i].theta, new).numpy(), data.model.logits(found, new).numpy()
        if predict == "head":
            assert identical(found, states[i])
            continue
        known = [c for c in range(3) if predict == "prototypes" or c in data.data[i][1]]
        away = np.stack([((phi - server.values[c].numpy()) ** 2).sum(1) for c in known], 1)
        np.testing.assert_allclose((phi**2).sum(1)[:, None] - away, z[:, known], atol=1e-9)
        assert (z.argmax(1) == np.array(known)[away.argmin(1)]).all() and len(set(z.argmax(1))) > 1
        others = [c for c in range(4) if c not in known]
        assert others and (z[:, others] == -FAR * phi.shape[1]).all()


def test_a_new_client_trains_near_to_the_prototypes_and_sends_nothing(data):
    """Its epochs are the steps of a client that takes part."""
    algorithm = fedproto(data.model, data.population, lam=2.0, eta=ETA, steps=3, predict="head")
    (*_, server), _ = play(algorithm, data, [(0, 2, 3)] * 2)
    new, visit = algorithm.init_client(data.population.info(1, "float64")), data.visit(1)
    fit = algorithm.adapt.start(server, new, visit)
    for n in range(3):
        fit = algorithm.adapt.epoch(fit, visit, n)
    assert distance(algorithm.adapt.model(fit), algorithm.client_update(server, new, visit).state) < 1e-9


def test_shared_statistics_of_normalization_are_refused():
    model = SplitModel(backbone(batch_norm=True), batch_norm="shared")
    people = Population([4] * 3, [2] * 3)
    with pytest.raises(ValueError, match="no common meaning"):
        build_algorithm("fedproto", model, people)


def test_refusals(data):
    wrong = ({"lam": -1.0}, {"penalty": "l1"}, {"predict": "svm"}, {"weighting": "alpha"}, {"eta": -1.0}, {"steps": 0})
    for each in wrong:
        with pytest.raises(ValueError, match=next(iter(each))):
            fedproto(data.model, data.population, **each)
