"""Layer-wise regularization: the penalty by its definition and in its limits, mixing as a closed sum."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, by_hand, loss_of, play, shared
from helpers.toys import distance, gradient, identical, initial_states
from tfpfl.algorithms import ditto, fedavg, fedprox, layerwise
from tfpfl.algorithms.layerwise import neurons, penalty
from tfpfl.models import tree
from tfpfl.models.weights import Head, Weights

KINDS = ("additive", "gated")
COEFFICIENTS = {"l_cos": 0.7, "l_2": 0.3, "layer_weights": "sum"}
SOLVER = {"eta": 0.1, "epochs": 2, "batch_size": 2}


@pytest.fixture(scope="module")
def pair(data):
    """Local and global weights."""
    return shared(data), shared(data, seed=9)


def by_definition(w, wg, kind, l_cos, l_2, layer_weights):
    """R, neuron by neuron: dense kernels with their biases."""
    layers = [(w.theta[i : i + 2], wg.theta[i : i + 2]) for i in (0, 2)] + [(w.head, wg.head)]
    total = 0.0
    for (kernel, bias), (kernel_g, bias_g) in layers:
        units = kernel.shape[1]
        for n in range(units):
            a, b = np.append(kernel[:, n], bias[n]), np.append(kernel_g[:, n], bias_g[n])
            cos, far = a @ b / np.linalg.norm(a) / np.linalg.norm(b), l_2 / 2 * np.sum((a - b) ** 2)
            value = l_cos * (1 - cos) + far if kind == "additive" else (1 - cos) * far
            total += value / units if layer_weights == "mean" else value
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer_weights", ["sum", "mean"])
def test_the_penalty_is_its_definition_and_not_negative(pair, kind, layer_weights):
    options = {**COEFFICIENTS, "kind": kind, "layer_weights": layer_weights}
    found = penalty(*pair, **options)
    assert abs(float(found) - by_definition(*pair, **options)) < 1e-9
    assert float(found) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_init", ["glorot", "zeros"])
def test_value_and_gradient_vanish_at_the_global_model(data, kind, head_init):
    wg = shared(data)
    if head_init == "zeros":  # neurons without a direction
        wg = wg._replace(head=tree.zeros_like(wg.head))
    assert float(penalty(wg, wg, kind=kind, **COEFFICIENTS)) == 0
    slope = gradient(lambda w: penalty(w, wg, kind=kind, **COEFFICIENTS), wg)[0]
    assert distance(slope, tree.zeros_like(wg)) < 1e-9


def test_a_global_neuron_of_zeros_has_no_direction_to_be_held_to(pair):
    """Otherwise the slope of the cosine at 0, 1e6 and more, would throw a head that starts at zero about."""
    w, wg = pair
    wg, w = (x._replace(head=tree.scale(s, x.head)) for x, s in ((wg, 0.0), (w, 1e-6)))
    options = {"kind": "additive", "l_cos": 1.0, "l_2": 0.0, "layer_weights": "sum"}
    slope = gradient(lambda w: penalty(w, wg, **options), w)[0]
    assert distance(slope.head, tree.zeros_like(w.head)) == 0 and distance(slope.theta, tree.zeros_like(w.theta)) > 0.1


def test_the_cosine_does_not_see_the_length_of_a_neuron(pair):
    w, wg = pair
    options = {"kind": "additive", "l_cos": 1.0, "l_2": 0.0, "layer_weights": "sum"}
    lengths = tf.constant([0.2, 3.0, 1.0, 7.0], tf.float64)
    longer = w._replace(head=Head(w.head.kernel * lengths, w.head.bias * lengths))
    assert abs(float(penalty(longer, wg, **options) - penalty(w, wg, **options))) < 1e-9
    only_kernel = w._replace(head=w.head._replace(kernel=w.head.kernel * lengths))  # the bias is part of the neuron
    assert abs(float(penalty(only_kernel, wg, **options) - penalty(w, wg, **options))) > 1e-3


def test_the_gate_lets_aligned_neurons_go(pair):
    _, wg = pair
    aligned = tree.scale(3.0, wg)
    additive, gated = (gradient(lambda w, k=k: penalty(w, wg, kind=k, **COEFFICIENTS), aligned)[0] for k in KINDS)
    assert distance(gated, tree.zeros_like(wg)) < 1e-9
    assert distance(additive, tree.scale(0.3 * 2, wg)) < 1e-9  # l_2 (3 wg - wg), and nothing from the cosine


def test_a_neuron_is_a_column_or_a_filter_with_its_bias():
    conv, bias = tf.random.stateless_normal([3, 3, 2, 5], [0, 1]), tf.range(5.0)
    scale, dense = tf.range(7.0), tf.random.stateless_normal([6, 4], [0, 2])
    weights = Weights((scale, conv, bias, dense), Head(tf.ones([4, 2]), tf.zeros([2])))
    layers = neurons(weights)
    assert [layer.shape for layer in layers] == [(7, 1), (19, 5), (6, 4), (5, 2)]
    expected = np.append(conv[..., 3].numpy().ravel(), bias[3])
    np.testing.assert_array_equal(np.sort(layers[1][:, 3]), np.sort(expected))


@pytest.mark.slow
def test_without_the_cosine_it_is_fedprox(data):
    for options in ({"momentum": 0.5, "straggler": 0.5}, {"implicit_prox": True}):
        algorithm = layerwise(data.model, data.population, l_cos=0.0, l_2=0.8, **SOLVER, **options)
        sibling = fedprox(data.model, data.population, mu=0.8, weighting="uniform", **SOLVER, **options)
        assert distance(play(algorithm, data)[0], play(sibling, data)[0]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scheme"), slow_but(zip(KINDS, ["pm_a", "pm_b"], strict=True), (KINDS[1], "pm_b")))
def test_without_both_it_is_fedavg(data, kind, scheme):
    algorithm = layerwise(data.model, data.population, l_cos=0.0, l_2=0.0, penalty_kind=kind, scheme=scheme, **SOLVER)
    expected, _ = play(fedavg(data.model, data.population, weighting="uniform", **SOLVER), data)
    assert distance(play(algorithm, data)[0], expected) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_clients_descend_on_loss_and_penalty(data, pair, kind):
    w, own = pair
    options = {"penalty_kind": kind, "l_cos": 0.7, "l_2": 0.3, "eta": 0.1, "steps": 5}
    algorithm = layerwise(data.model, data.population, **options, scheme="pm_a", kappa=0.25, steps_p=4)

    def regularized(v):
        return loss_of(data, 1)(v) + penalty(v, w, kind=kind, **COEFFICIENTS)

    state = algorithm.init_client(None)._replace(p=own, started=tf.constant(True))
    output = algorithm.client_update(w, state, data.visit(1))
    assert distance(tree.add(w, output.update), by_hand(regularized, w, 0.1, 5)) < 1e-9
    mixed = tree.add(tree.scale(0.25, own), tree.scale(0.75, w))
    assert distance(output.state.p, by_hand(regularized, mixed, 0.1, 4)) < 1e-9
    assert identical(algorithm.local_model(w, output), output.state.p)


def visits_of(client):
    return [t for t, cohort in enumerate(COHORTS, 1) if client in cohort]


@pytest.mark.slow
@pytest.mark.parametrize("kappa", slow_but([0.0, 0.75, 1.0], 0.75))
def test_pm_b_is_a_closed_sum_over_the_visits(data, kappa):
    """p = kappa^(m-1) w^(1) + (1 - kappa) sum_{s=2..m} kappa^(m-s) w^(s), w^(s) the local model of visit s."""
    algorithm = layerwise(data.model, data.population, kappa=kappa, eta=0.1, steps=2)
    start = algorithm.init_server()
    path, states = play(algorithm, data, server=start)
    received = [start, *path]
    assert max(len(visits_of(i)) for i in data.ids) == 4 and min(len(visits_of(i)) for i in data.ids) < 4
    fresh = initial_states(algorithm, data.population)
    for i in data.ids:
        updates = [algorithm.client_update(received[t - 1], fresh[i], data.visit(i, t)).update for t in visits_of(i)]
        held = [tree.add(received[t - 1], update) for t, update in zip(visits_of(i), updates, strict=True)]
        m = len(held)
        expected = tree.scale(kappa ** (m - 1), held[0])
        for s in range(2, m + 1):
            expected = tree.add_scaled(expected, (1 - kappa) * kappa ** (m - s), held[s - 1])
        assert distance(states[i].p, expected) < 1e-9
        assert distance(algorithm.personal_model(path[-1], states[i], data.visit(i)), expected) < 1e-9
        if kappa == 0:
            assert distance(states[i].p, held[-1]) < 1e-9


@pytest.mark.slow
def test_pm_a_that_keeps_everything_is_ditto(data):
    """kappa = 1 without the cosine, for the same sequence of global models."""
    algorithm = layerwise(data.model, data.population, scheme="pm_a", kappa=1.0, l_cos=0.0, l_2=0.6, **SOLVER)
    sibling = ditto(data.model, data.population, lam=0.6, init="first_broadcast", **SOLVER)
    state, other = (initial_states(a, data.population)[2] for a in (algorithm, sibling))
    for t in range(1, 5):
        w = shared(data, seed=t)
        state = algorithm.client_update(w, state, data.visit(2, t)).state
        other = sibling.client_update(w, other, data.visit(2, t)).state
        assert distance(state.p, other.v) < 1e-9


@pytest.mark.parametrize("scheme", ["pm_a", "pm_b"])
def test_who_never_came_predicts_with_the_global_model(data, scheme):
    algorithm, w = layerwise(data.model, data.population, scheme=scheme), shared(data)
    assert identical(algorithm.personal_model(w, algorithm.init_client(None), data.visit(0)), w)


def test_a_stiff_distance_warns(data):
    with pytest.warns(UserWarning, match="l_2=50.0"):
        layerwise(data.model, data.population, l_2=50.0, eta=0.1)
    layerwise(data.model, data.population, l_2=50.0, eta=0.1, implicit_prox=True)


def test_work_on_a_model_that_is_not_trained_warns(data):
    with pytest.warns(UserWarning, match="steps_p and epochs_p are PM-A's work on p_i"):
        layerwise(data.model, data.population, scheme="pm_b", steps_p=3)
    layerwise(data.model, data.population, scheme="pm_a", steps_p=3)


def test_refusals(data):
    for wrong in (
        {"kappa": 1.1},
        {"kappa": -0.1},
        {"l_cos": -1.0},
        {"l_2": -1.0},
        {"penalty_kind": "l1"},
        {"layer_weights": "max"},
        {"scheme": "pm_c"},
        {"straggler": 2.0},
        {"steps_p": 0},
        {"weighting": "alpha"},
        {"implicit_prox": True, "penalty_kind": "gated"},
        {"implicit_prox": True, "layer_weights": "mean"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            layerwise(data.model, data.population, **wrong)
