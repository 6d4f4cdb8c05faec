"""FedRoD: its balanced softmax by the definition, and that the private head's loss reaches nothing else."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, by_hand, nothing_arrives, play, shared
from helpers.toys import distance, gradient, identical, initial_states, toy
from tfpfl.algorithms import build_algorithm, fedavg, fedrod
from tfpfl.algorithms.fedrod import NEVER, log_frequencies
from tfpfl.models import tree
from tfpfl.models.weights import Weights

SOLVER = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}
SOME = [(0, 2, 3), (2, 3), (0, 2), (3,), (2, 3)]  # 1 and 4 never come, 0 leaves


@pytest.fixture(scope="module")
def data():
    """Four outputs; client 1 has nine examples of three classes, and client 2 two of two each."""
    found = toy()
    x, y = found.data[1]
    skewed = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2], np.int32)
    return found._replace(data=[(x, skewed) if i == 1 else d for i, d in enumerate(found.data)])


def parts(weights, x):
    """(phi, z) of the toy's network, written out."""
    (w_1, b_1, w_2, b_2), head = weights
    phi = tf.tanh(tf.tanh(x @ w_1 + b_1) @ w_2 + b_2)
    return phi, tf.matmul(phi, head.kernel) + head.bias


def balanced(data, client_id):
    """-mean log (n_y e^z_y / sum_c n_c e^z_c), the sum over the classes that the client has."""
    x, y = data.data[client_id]
    n = np.bincount(y).astype(float)

    def loss(weights):
        _, z = parts(weights, x)
        weighed = n * tf.exp(z[:, : len(n)])
        return -tf.reduce_mean(tf.math.log(tf.gather(weighed, y, batch_dims=1) / tf.reduce_sum(weighed, 1)))

    return loss


def residual(data, client_id, weights):
    """CE(z + phi P, y) with z and phi given."""
    x, y = data.data[client_id]
    phi, z = parts(weights, x)

    def loss(p):
        logits = z + tf.matmul(phi, p.kernel) + p.bias
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

    return loss


@pytest.mark.slow
def test_with_balanced_classes_the_generic_model_is_fedavgs():
    data = toy((6, 9, 3, 12, 6), (3,) * 5)  # every client has as many of each class
    for options in ({}, {"init": "zeros", "weighting": "uniform"}, {"eta_p": 0.7}):
        path, _ = play(fedrod(data.model, data.population, **SOLVER, **options), data)
        weighting = options.get("weighting", "examples")
        expected, _ = play(fedavg(data.model, data.population, weighting=weighting, **SOLVER), data)
        assert distance(path, expected) < 1e-9


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("client", [1, 2])
def test_the_generic_model_descends_on_the_balanced_softmax(data, client, momentum):
    """With classes that the client does not have: they take no part, and nothing is NaN."""
    algorithm, w = fedrod(data.model, data.population, eta=0.2, steps=5, momentum=momentum), shared(data)
    output = algorithm.client_update(w, shared(data, seed=5).head, data.visit(client))
    found, expected = tree.add(w, output.update), by_hand(balanced(data, client), w, 0.2, 5, momentum)
    assert distance(found, expected) < 1e-9
    absent = slice(int(data.population.num_classes[client]), None)
    assert distance(output.update.head.kernel[:, absent], tf.zeros([5, 4])[:, absent]) == 0
    plain = fedavg(data.model, data.population, eta=0.2, steps=5, momentum=momentum).client_update(
        w, (), data.visit(client)
    )
    assert distance(output.update, plain.update) > 1e-3


def test_the_frequencies_of_a_clients_classes():
    found = log_frequencies(tf.constant([0, 3, 3, 0, 3]), 5, np.float64)
    np.testing.assert_allclose(found, [np.log(2), NEVER, NEVER, np.log(3), NEVER], atol=1e-12)


@pytest.mark.parametrize("eta_p", [None, 0.5])
def test_both_parts_take_their_steps_at_the_same_point(data, eta_p):
    """The residual head sees z and phi as they were before the generic step."""
    algorithm = fedrod(data.model, data.population, eta=0.2, eta_p=eta_p, steps=4)
    w, p = shared(data), shared(data, seed=5).head
    output = algorithm.client_update(w, p, data.visit(1))
    for _ in range(4):
        loss = residual(data, 1, w)
        last = loss(p)
        p = tree.add_scaled(p, -(eta_p or 0.2), gradient(loss, p)[0])
        w = by_hand(balanced(data, 1), w, 0.2, 1)
    assert distance(output.state, p) < 1e-9
    assert distance(algorithm.local_model(shared(data), output), Weights(w.theta, tree.add(w.head, p))) < 1e-9
    assert distance(output.metrics["loss"], last) < 1e-9


def test_the_private_head_fits_a_generic_model_that_stands_still(data):
    w, p = shared(data), shared(data, seed=5).head
    algorithm = fedrod(data.model, data.population, eta=0.0, eta_p=0.2, steps=4, momentum=0.5)
    output = algorithm.client_update(w, p, data.visit(1))
    assert identical(tree.add(w, output.update), w)
    assert distance(output.state, by_hand(residual(data, 1, w), p, 0.2, 4, 0.5)) < 1e-9


@pytest.mark.parametrize("options", [{}, {"client_weight_decay": 0.5}], ids=str)
def test_a_new_client_adapts_its_private_head_as_in_a_visit(data, options):
    """With a generic model that stands still; only P_i decays, and not W + P_i."""
    algorithm = build_algorithm("fedrod", data.model, data.population, eta=0.0, eta_p=0.1, steps=5, **options)
    w, p, visit = shared(data), shared(data, seed=5).head, data.visit(1)
    expected = algorithm.personal_model(w, algorithm.client_update(w, p, visit).state, visit)
    fit = algorithm.adapt.start(w, p, visit)
    for n in range(5):
        fit = algorithm.adapt.epoch(fit, visit, n)
    assert distance(algorithm.adapt.model(fit), expected) < 1e-12


@pytest.mark.slow
def test_nothing_of_the_private_loss_reaches_the_generic_model(data):
    """Its gradient with respect to theta and W is 0: the path is the same whatever the private head does."""
    variants = [{}, {"eta_p": 0.0}, {"eta_p": 3.0}, {"init": "zeros"}]
    paths = [play(fedrod(data.model, data.population, **SOLVER, **v), data)[0] for v in variants]
    for path in paths[1:]:
        assert distance(path, paths[0]) < 1e-9
    algorithm, w = fedrod(data.model, data.population, **SOLVER), shared(data)
    a, b = (algorithm.client_update(w, shared(data, seed=s).head, data.visit(1)) for s in (5, 6))
    assert distance(a.update, b.update) < 1e-9 < 1e-2 < distance(a.state, b.state)


def test_a_private_head_of_zeros_that_stays_predicts_as_the_generic_model(data):
    algorithm = fedrod(data.model, data.population, init="zeros", eta_p=0.0, **SOLVER)
    (*_, w), states = play(algorithm, data)
    for i in data.ids:
        assert identical(algorithm.personal_model(w, states[i], data.visit(i)), w)


def test_a_client_predicts_with_the_newest_model_and_its_own_head(data):
    algorithm = fedrod(data.model, data.population, **SOLVER)
    (*_, w), states = play(algorithm, data, SOME)
    x, _ = data.data[0]
    phi, z = parts(w, x)
    expected = z + tf.matmul(phi, states[0].kernel) + states[0].bias
    found = data.model.logits(algorithm.personal_model(w, states[0], data.visit(0)), x)
    assert distance(found, expected) < 1e-9


@pytest.mark.parametrize("init", slow_but(["copy", "zeros"], "zeros"))
def test_who_never_came_has_the_initial_private_head(data, init):
    algorithm = fedrod(data.model, data.population, init=init, **SOLVER)
    (*_, w), states = play(algorithm, data, SOME)
    first = algorithm.init_server().head
    expected = first if init == "copy" else tree.zeros_like(first)
    fresh = initial_states(algorithm, data.population)
    for i in data.ids:
        assert identical(states[i], fresh[i]) == (i in (1, 4))
    for i in (1, 4):
        assert identical(states[i], expected)
        found = algorithm.personal_model(w, states[i], data.visit(i))
        assert identical(found, Weights(w.theta, tree.add(w.head, expected)))
    assert identical(states[0], play(algorithm, data, SOME[:3])[1][0])  # who left has the head of its last visit


def test_a_round_in_which_nothing_arrives_changes_nothing(data):
    algorithm = fedrod(data.model, data.population, **SOLVER)
    w = play(algorithm, data, COHORTS[:1])[0][-1]
    assert identical(nothing_arrives(algorithm, data, w), w)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("eta", {"eta": -1.0}),
        ("eta_p", {"eta_p": -1.0}),
        ("steps", {"steps": 0}),
        ("weighting", {"weighting": "q"}),
        ("init", {"init": "ones"}),
    ],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, values):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        fedrod(data.model, data.population, **values)
