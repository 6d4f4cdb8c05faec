"""FedALA: its listing written out in NumPy's manner over rounds with absent clients, FedAvg where it learns nothing."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, by_hand, loss_of, nothing_arrives, play, shared
from helpers.toys import distance, gradient, identical, initial_states
from tfpfl.algorithms import fedala, fedavg
from tfpfl.algorithms.fedala import Aggregation, first_of_the_top
from tfpfl.algorithms.parts.local_training import shuffled
from tfpfl.data.randomness import Fold
from tfpfl.models import tree

SOLVER = {"eta": 0.3, "steps": 3, "momentum": 0.5}
FIRST = {None: 0, 1: 4, 2: 2, 3: 0}  # place in theta of the first mixed array: two layers of kernel and bias


def flat(weights):
    return tf.nest.flatten(weights)


def mixture(own, w, a, first):
    """w below, own + (w - own) a above, all as flat lists of arrays; own and a have only what lies above."""
    above = [v + (u - v) * b for v, u, b in zip(own, flat(w)[first:], a, strict=True)]
    return tf.nest.pack_sequence_as(w, flat(w)[:first] + above)


def aggregate(loss, own, w, a, first, eta_w, epochs, threshold=0.0):
    """(A_i, the number of epochs) by GradientTape, all examples in every step."""
    losses = []
    for _ in range(epochs):
        v = mixture(own, w, a, first)
        losses.append(float(loss(v)))
        g = flat(gradient(loss, v)[0])[first:]
        a = [np.clip(b - eta_w * k * (u - o), 0, 1) for b, k, u, o in zip(a, g, flat(w)[first:], own, strict=True)]
        if len(losses) > 10 and np.std(losses[-10:]) < threshold:
            break
    return a, len(losses)


@pytest.mark.parametrize("p", slow_but([1, 2, None], 1, ci=(2,)))
def test_rounds_are_written_out(data, p):
    """Four rounds with clients that skip some, come late, and return; what each keeps, and what the server has."""
    first, hyper = FIRST[p], {"eta_w": 3.0, "threshold": 0.02, "max_epochs": 40}
    algorithm = fedala(data.model, data.population, p=p, s=1.0, **hyper, **SOLVER)
    path, states = play(algorithm, data)
    w = algorithm.init_server()
    top = {i: flat(w)[first:] for i in data.ids}
    a = {i: [np.ones(v.shape) for v in top[i]] for i in data.ids}
    started, counts = dict.fromkeys(data.ids, False), []
    for t, cohort in enumerate(COHORTS):
        moved, num = tree.zeros_like(w), sum(data.population.num_examples[i] for i in cohort)
        for i in cohort:
            if distance(top[i], flat(w)[first:]) > 0:
                a[i], count = aggregate(
                    loss_of(data, i), top[i], w, a[i], first, 3.0, 1 if started[i] else 40, threshold=0.02
                )
                counts += [] if started[i] else [count]
                started[i] = True
            w_i = by_hand(loss_of(data, i), mixture(top[i], w, a[i], first), 0.3, 3, 0.5)
            top[i] = flat(w_i)[first:]
            moved = tree.add_scaled(moved, data.population.num_examples[i] / num, tree.subtract(w_i, w))
        w = tree.add(w, moved)
        assert distance(path[t], w) < 1e-9
    for i in data.ids:
        assert distance(flat(states[i].top), top[i]) < 1e-9 and distance(flat(states[i].a), a[i]) < 1e-9
        assert bool(states[i].started) == started[i]
        found = algorithm.personal_model(w, states[i], data.visit(i))
        assert distance(found, mixture(top[i], w, a[i], first)) < 1e-9
    assert min(counts) >= 11 and len(set(counts)) > 1  # the threshold ended the start phase, at different epochs
    assert min(float(b.min()) for i in data.ids for b in map(np.asarray, a[i])) < 0.99


@pytest.mark.slow
@pytest.mark.parametrize("p", slow_but([1, None], 1))
def test_without_learning_it_is_fedavg(data, p):
    """Mini-batches, absent clients: A_i stays 1, so every client starts from w."""
    work = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}
    expected, _ = play(fedavg(data.model, data.population, **work), data)
    path, states = play(fedala(data.model, data.population, p=p, eta_w=0.0, **work), data)
    assert distance(path, expected) < 1e-9
    assert all(distance(a, tf.ones_like(a)) == 0 for a in flat([state.a for state in states.values()]))


def test_in_round_1_nothing_is_learned(data):
    algorithm = fedala(data.model, data.population, eta_w=100.0, **SOLVER)
    w, state = algorithm.init_server(), initial_states(algorithm, data.population)[1]
    kept = algorithm.client_update(w, state, data.visit(1)).state
    assert not kept.started and identical(kept.a, state.a)
    late = algorithm.client_update(shared(data), state, data.visit(1)).state  # w^0 is mixed in, as in the paper
    assert late.started and distance(late.a, state.a) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "most", "expected"), [(0.0, 25, 25), (1e9, 25, 11), (1e9, 4, 4)])
def test_the_start_phase_ends(data, threshold, most, expected):
    """At max_epochs, or where the last 10 of at least 11 losses are alike; then it is one epoch a visit."""
    w, own, visit = shared(data), shared(data, seed=5), data.visit(1)
    algorithm = fedala(data.model, data.population, s=1.0, eta_w=0.1, threshold=threshold, max_epochs=most, **SOLVER)
    state = initial_states(algorithm, data.population)[1]._replace(top=own._replace(theta=()))
    kept = algorithm.client_update(w, state, visit).state
    a, top = flat(state.a), flat(own.head)
    assert distance(flat(kept.a), aggregate(loss_of(data, 1), top, w, a, 4, 0.1, expected)[0]) < 1e-9
    assert distance(flat(kept.a), aggregate(loss_of(data, 1), top, w, a, 4, 0.1, expected + 1)[0]) > 1e-6
    again = algorithm.client_update(w, state._replace(started=tf.constant(True)), visit).state
    assert distance(flat(again.a), aggregate(loss_of(data, 1), top, w, a, 4, 0.1, 1)[0]) < 1e-9


def test_a_part_of_the_examples_is_used(data):
    """floor(0.5 * 9) = 4 of client 1's, drawn by the key of the visit; the others have no part in A_i."""
    visit, w = data.visit(1), shared(data)
    algorithm = fedala(data.model, data.population, s=0.5, eta_w=0.5, threshold=0.0, max_epochs=3, **SOLVER)
    state = initial_states(algorithm, data.population)[1]
    rows = shuffled(9, visit.key, Fold.SPLIT)[:4].numpy()
    others = np.setdiff1d(np.arange(9), rows)
    found = algorithm.client_update(w, state, visit).state.a

    def without(places):
        x = visit.x.numpy()
        x[places] += 1.0
        return algorithm.client_update(w, state, visit._replace(x=tf.constant(x))).state.a

    assert distance(without(others), found) == 0 and distance(without(rows[:1]), found) > 1e-6
    next_round = algorithm.client_update(w, state, data.visit(1, 2)).state.a
    assert distance(next_round, found) > 1e-6


@pytest.mark.slow
def test_absent_and_new_clients(data):
    some = [(0, 2, 3), (2, 3), (0, 2), (3,), (2, 3)]  # 1 and 4 never come, 0 leaves
    algorithm = fedala(data.model, data.population, eta_w=3.0, **SOLVER)
    path, states = play(algorithm, data, some)
    fresh = initial_states(algorithm, data.population)
    for i in (1, 4):
        assert identical(states[i], fresh[i])
        assert distance(algorithm.personal_model(path[-1], states[i], data.visit(i)), path[-1]) < 1e-12
    assert identical(states[0], play(algorithm, data, some[:3])[1][0])
    assert identical(nothing_arrives(algorithm, data, path[-1]), path[-1])


def test_layers_are_counted_from_the_top(data):
    theta = data.model.initial_theta
    assert [first_of_the_top(theta, p) for p in (1, 2, 3, None)] == [4, 2, 0, 0]
    scales = [np.ones(3), *theta]  # a vector before the first kernel is a layer of its own
    assert [first_of_the_top(scales, p) for p in (1, 2, 3, 4)] == [5, 3, 1, 0]
    algorithm = fedala(data.model, data.population, p=2)
    assert [len(flat(part)) for part in initial_states(algorithm, data.population)[0]] == [4, 4, 1]
    assert Aggregation._fields == ("top", "a", "started") and algorithm.shares is None
    assert fedala(data.model, data.population).shares == "backbone"


@pytest.mark.parametrize(
    ("name", "value"),
    [("p", 0), ("p", 4), ("s", 0.0), ("s", 1.1), ("eta_w", -1.0), ("threshold", -1.0), ("max_epochs", 0), ("eta", -1.0)]
    + [("steps", 0), ("weighting", "q"), ("p", 1.5), ("max_epochs", 20.5)],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        fedala(data.model, data.population, **{name: value})
