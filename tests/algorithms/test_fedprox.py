"""FedProx against FedAvg, the closed form on a quadratic, and the distribution of stragglers."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from helpers.rounds import by_hand, loss_of, play, shared
from helpers.toys import distance, identical
from tfpfl.algorithms import fedavg, fedprox
from tfpfl.algorithms.parts.local_training import local_solver, partial_work, straggles
from tfpfl.data.randomness import client_key
from tfpfl.models import tree

SOLVER = {"eta": 0.1, "epochs": 3, "batch_size": 2, "momentum": 0.5}


def late_and_done(data, t, probability, work):
    """{client: (late, what it gets done)} in round t."""
    keys = {i: data.visit(i, t).key for i in data.ids}
    return {i: (bool(straggles(k, probability)), int(partial_work(k, probability, work))) for i, k in keys.items()}


def test_without_penalty_and_stragglers_it_is_fedavg(data):
    path, _ = play(fedprox(data.model, data.population, mu=0.0, **SOLVER), data)
    expected, _ = play(fedavg(data.model, data.population, **SOLVER), data)
    assert identical(path, expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clients_descend_on_the_penalized_loss(data, momentum):
    w, mu = shared(data), 0.7
    algorithm = fedprox(data.model, data.population, mu=mu, eta=0.1, steps=6, momentum=momentum)

    def penalized(v):
        apart = tree.subtract(v, w)
        return loss_of(data, 1)(v) + mu / 2 * tree.dot(apart, apart)

    output = algorithm.client_update(w, (), data.visit(1))
    assert distance(algorithm.local_model(w, output), by_hand(penalized, w, 0.1, 6, momentum)) < 1e-9


@pytest.mark.parametrize("implicit", [False, True])
def test_closed_form_on_a_quadratic(data, implicit):
    """l_i = |v - c|^2 / 2: the distance to v* = (c + mu w) / (1 + mu) shrinks by the same factor in every step."""
    mu, eta, steps = 0.8, 0.15, 7
    c, w = tf.constant([1.0, -2.0, 0.5], tf.float64), tf.constant([0.3, 4.0, -1.0], tf.float64)
    solve = local_solver(eta=eta, steps=steps, prox=mu, implicit_prox=implicit)
    found, _ = solve(lambda v, x, y: 0.5 * tf.reduce_sum((v - c) ** 2), w, data.visit(0), anchor=w)
    fixed_point = (c + mu * w) / (1 + mu)
    factor = (1 - eta) / (1 + eta * mu) if implicit else 1 - eta * (1 + mu)
    assert distance(found, fixed_point + factor**steps * (w - fixed_point)) < 1e-9


@pytest.mark.slow
def test_a_straggler_that_has_one_epoch_to_do_does_it(data):
    late = fedprox(data.model, data.population, **{**SOLVER, "epochs": 1}, straggler=1.0)
    on_time = fedprox(data.model, data.population, **{**SOLVER, "epochs": 1})
    assert identical(play(late, data)[0], play(on_time, data)[0])


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_what_stragglers_did_is_kept_or_dropped(data, policy):
    """Against FedAvg's clients with as many steps as each got done, averaged here."""
    p_s, steps = 0.6, 9
    algorithm = fedprox(
        data.model, data.population, mu=0.0, eta=0.1, steps=steps, straggler=p_s, straggler_policy=policy
    )
    server = algorithm.init_server()
    drawn = late_and_done(data, 1, p_s, steps)
    assert len({late for late, _ in drawn.values()}) == 2 and min(done for _, done in drawn.values()) < steps
    total, expected = 0, tree.zeros_like(server)
    for i, (late, done) in drawn.items():
        if policy == "drop" and late:
            continue
        base = fedavg(data.model, data.population, eta=0.1, steps=done)
        n = int(data.population.num_examples[i])
        total, expected = total + n, tree.add_scaled(expected, n, base.client_update(server, (), data.visit(i)).update)
    path, _ = play(algorithm, data, [data.ids], server=server)
    assert distance(path[0], tree.add_scaled(server, 1 / total, expected)) < 1e-9


def test_a_round_in_which_all_are_dropped_changes_nothing(data):
    algorithm = fedprox(data.model, data.population, **SOLVER, straggler=1.0, straggler_policy="drop")
    path, _ = play(algorithm, data)
    assert identical(path[-1], algorithm.init_server())


@pytest.mark.slow
def test_stragglers_are_drawn_with_their_probability_and_their_work_uniformly():
    clients, p_s, work = 3000, 0.3, 5
    keys = tf.constant(np.concatenate([client_key(0, t, np.arange(clients // 3)) for t in (1, 2, 3)]))
    draw = tf.function(lambda k: (straggles(k, p_s), partial_work(k, p_s, work), straggles(k, 0.6)))
    late, done, later = (np.array(x) for x in tf.map_fn(draw, keys, fn_output_signature=(tf.bool, tf.int32, tf.bool)))
    assert stats.binomtest(int(late.sum()), clients, p_s).pvalue > 1e-3
    assert (done[~late] == work).all()
    assert stats.chisquare(np.bincount(done[late], minlength=work + 1)[1:]).pvalue > 1e-3
    assert (later | ~late).all()  # who is late at 30 % is late at 60 %


@pytest.mark.slow
def test_a_stiff_penalty_warns_and_its_implicit_step_is_stable(data):
    stiff = {"mu": 100.0, "eta": 0.05, "steps": 200}
    with pytest.warns(UserWarning, match=r"mu=100.* >= 2, here 5.*implicit_prox"):
        explicit = fedprox(data.model, data.population, **stiff)
    implicit = fedprox(data.model, data.population, **stiff, implicit_prox=True)  # filterwarnings would show one
    w = shared(data)
    apart = [tree.dot(u, u) for u in (a.client_update(w, (), data.visit(0)).update for a in (explicit, implicit))]
    assert not apart[0] < 1e6 and apart[1] < 0.01


def test_refusals(data):
    for wrong in ({"mu": -1}, {"eta": -1}, {"straggler": 1.5}, {"straggler_policy": "wait"}, {"weighting": "alpha"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fedprox(data.model, data.population, **wrong)
    with pytest.raises(ValueError, match="not both"):
        fedprox(data.model, data.population, steps=1, epochs=1)
