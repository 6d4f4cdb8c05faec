"""FedAS: its listing written out by GradientTape over rounds with absent clients; FedPer without its two parts."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, by_hand, loss_of, nothing_arrives, play, shared
from helpers.toys import distance, gradient, identical, initial_states, toy_of
from tfpfl.algorithms import fedas, fedper
from tfpfl.algorithms.fedas import Personal
from tfpfl.algorithms.parts.local_training import shuffled
from tfpfl.models import tree
from tfpfl.models.weights import Weights

WORK = {"eta": 0.2, "steps": 3}


def away(data, i, own, rows=None):
    """The loss of the alignment, class by class, as a function of theta."""
    x, y = data.data[i]
    rows = np.arange(len(y)) if rows is None else rows
    means = {k: np.mean(data.model.features(own, tf.constant(x[y == k])), 0) for k in set(y.tolist())}

    def loss(theta):
        phi, labels = data.model.features(theta, tf.constant(x[rows])), y[rows]
        return tf.add_n([tf.reduce_mean((phi[labels == k] - means[k]) ** 2) for k in means if (labels == k).any()])

    return loss


def trace(data, i, weights, size, mean=False):
    """The squared gradients of chunks of the examples, added up."""
    x, y = (tf.constant(a) for a in data.data[i])
    found = []
    for start in range(0, len(y), size):
        chunk = slice(start, start + size)
        (g,) = gradient(
            lambda w, c=chunk: tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y[c], data.model.logits(w, x[c]))
            ),
            weights,
        )
        found.append(float(tree.dot(g, g)))
    return np.mean(found) if mean else np.sum(found)


@pytest.mark.parametrize("init", slow_but(["w0", "first_broadcast"], "w0"))
@pytest.mark.parametrize("fisher", slow_but(["batches", "examples"], "batches"))
def test_rounds_are_written_out(data, init, fisher):
    """Clients that skip rounds, come late, and return; two full-batch steps of alignment."""
    hyper = {"eta_align": 0.3, "epochs_align": 2, "batch_size_align": None}
    algorithm = fedas(data.model, data.population, init=init, fisher=fisher, **hyper, **WORK)
    path, states = play(algorithm, data)
    theta, start = algorithm.init_server(), initial_states(algorithm, data.population)
    own = {i: Weights(None if init == "first_broadcast" else theta, start[i].head) for i in data.ids}
    for t, cohort in enumerate(COHORTS):
        moved, f = {}, {}
        for i in cohort:
            near = by_hand(away(data, i, theta if own[i].theta is None else own[i].theta), theta, 0.3, 2)
            own[i] = by_hand(loss_of(data, i), Weights(near, own[i].head), 0.2, 3)
            moved[i] = tree.subtract(own[i].theta, theta)
            size = 1 if fisher == "examples" else len(data.data[i][1])
            f[i] = trace(data, i, own[i], size, mean=fisher == "examples")
        for i in cohort:
            theta = tree.add_scaled(theta, f[i] / sum(f.values()), moved[i])
        assert distance(path[t], theta) < 1e-9
    for i in data.ids:
        assert distance(algorithm.personal_model(path[-1], states[i], data.visit(i)), own[i]) < 1e-9
        assert bool(states[i].started)


def test_the_alignment_brings_class_means_near_to_the_own(data):
    """Client 1 with three classes, its own backbone apart from the received one."""
    own, received = shared(data, seed=5).theta, shared(data).theta
    state = Personal(own, shared(data).head, tf.constant(True))
    algorithm = fedas(data.model, data.population, eta_align=0.5, epochs_align=30, batch_size_align=None, eta=0.0)
    near = tree.add(received, algorithm.client_update(received, state, data.visit(1)).update)
    loss = away(data, 1, own)
    assert float(loss(near)) < 0.5 * float(loss(received))


def test_a_mini_batch_counts_the_classes_in_it(data):
    """One epoch of mini-batches of 4 of 9 examples, in the order of the visit's key."""
    own, received = shared(data, seed=5).theta, shared(data).theta
    state, visit = Personal(own, shared(data).head, tf.constant(True)), data.visit(1)
    algorithm = fedas(data.model, data.population, eta_align=0.3, batch_size_align=4, eta=0.0)
    near, order = received, shuffled(9, visit.key, 0).numpy()
    for start in (0, 4, 8):
        near = by_hand(away(data, 1, own, order[start : start + 4]), near, 0.3, 1)
    assert distance(algorithm.client_update(received, state, visit).update, tree.subtract(near, received)) < 1e-9


@pytest.mark.parametrize(("batch_size", "size"), [(None, 9), (4, 4), (20, 20)])
def test_the_weight_is_the_trace_after_the_training(data, batch_size, size):
    theta, state = shared(data).theta, initial_states(fedas(data.model, data.population), data.population)[1]
    work = {"eta": 0.1, "steps": 2, "batch_size": batch_size}
    output = fedas(data.model, data.population, **work).client_update(theta, state, data.visit(1))
    trained = Weights(output.state.theta, output.state.head)
    assert distance(output.weight, trace(data, 1, trained, size)) < 1e-9
    each = fedas(data.model, data.population, fisher="examples", **work).client_update(theta, state, data.visit(1))
    assert distance(each.weight, trace(data, 1, trained, 1, mean=True)) < 1e-9
    weights = [
        float(fedas(data.model, data.population, weighting=w, **work).client_update(theta, state, data.visit(1)).weight)
        for w in ("examples", "uniform")
    ]
    assert weights == [9, 1]


@pytest.mark.slow
@pytest.mark.parametrize("weighting", slow_but(["examples", "uniform"], "examples"))
def test_without_its_parts_it_is_fedper(data, weighting):
    work = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5, "weighting": weighting}
    expected, heads = play(fedper(data.model, data.population, **work), data)
    path, states = play(fedas(data.model, data.population, eta_align=0.0, **work), data)
    assert distance(path, expected) < 1e-9
    assert distance({i: state.head for i, state in states.items()}, heads) < 1e-9


@pytest.mark.slow
def test_absent_and_new_clients(data):
    """Who left predicts with the model of its last visit; who never came, with the newest backbone."""
    some = [(0, 2, 3), (2, 3), (0, 2), (3,), (2, 3)]  # 1 and 4 never come, 0 leaves
    algorithm = fedas(data.model, data.population, **WORK)
    path, states = play(algorithm, data, some)
    fresh = initial_states(algorithm, data.population)
    for i in (1, 4):
        assert identical(states[i], fresh[i])
        found = algorithm.personal_model(path[-1], states[i], data.visit(i))
        assert identical(found, Weights(path[-1], fresh[i].head))
    left = play(algorithm, data, some[:3])[1][0]
    assert identical(states[0], left)
    found = algorithm.personal_model(path[-1], states[0], data.visit(0))
    assert identical(found, Weights(left.theta, left.head))
    assert identical(nothing_arrives(algorithm, data, path[-1]), path[-1])


@pytest.mark.parametrize(
    ("name", "value"),
    [("eta_align", -1.0), ("epochs_align", 0), ("batch_size_align", 0), ("weighting", "q"), ("fisher", "no")]
    + [("init", "zeros"), ("head_init", "no"), ("eta", -1.0), ("steps", 0)],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name.removesuffix('_align')}"):
        fedas(data.model, data.population, **{name: value})


def test_kinds_without_classes_are_refused():
    other = toy_of("regression")
    with pytest.raises(ValueError, match="FedAS is for classification only"):
        fedas(other.model, other.population)
