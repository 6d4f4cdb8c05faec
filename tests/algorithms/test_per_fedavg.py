"""Per-FedAvg: the Hessian exactly on quadratics, the meta-objective by a second tape, and FedAvg without alpha."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.quadratics import flat, quadratic, use
from helpers.rounds import COHORTS, by_hand, loss_of, nothing_arrives, play, shared
from helpers.toys import client_loss, distance, gradient, identical, toy
from tfpfl.algorithms import fedavg, per_fedavg
from tfpfl.algorithms.parts.local_training import shuffled
from tfpfl.models import tree

QUICK = {"eta_inner": 0.1, "beta": 0.2, "epochs": 2, "batch_size": 2}
VARIANTS = ("fo", "hf")


def halves(data, client, batch_size, epochs, t=1):
    """The rows of (D, D') of every step."""
    n = len(data.data[client][1])
    for epoch in range(epochs):
        order = shuffled(n, data.visit(client, t).key, epoch).numpy()
        for start in range(0, n, 2 * batch_size):
            rows = order[start : start + 2 * batch_size]
            if len(rows) > 1:
                yield rows[: len(rows) // 2], rows[len(rows) // 2 :]


def loss_on(data, client, rows):
    x, y = data.data[client]
    batch = data._replace(data=[(x[rows], y[rows])])
    return lambda weights: client_loss(batch, 0, *weights)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_without_alpha_it_is_fedavg_on_the_second_halves(data, variant):
    beta, w = 0.2, shared(data)
    algorithm = per_fedavg(data.model, data.population, variant=variant, **{**QUICK, "beta": beta, "eta_inner": 0.0})
    for client in data.ids:
        expected = w
        for _, rows in halves(data, client, 2, 2):
            expected = by_hand(loss_on(data, client, rows), expected, beta, 1)
        output = algorithm.client_update(w, (), data.visit(client))
        assert distance(algorithm.local_model(w, output), expected) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("variant", slow_but(VARIANTS, "hf"))
def test_without_alpha_and_batches_it_is_fedavg(data, variant):
    path, _ = play(per_fedavg(data.model, data.population, variant=variant, eta_inner=0.0, beta=0.3, steps=4), data)
    expected, _ = play(fedavg(data.model, data.population, eta=0.3, steps=4, weighting="uniform"), data)
    assert distance(path, expected) < 1e-9


@pytest.mark.parametrize("delta", [1e-3, 0.1, 30.0])
def test_the_difference_of_gradients_is_exact_on_a_quadratic(data, delta, monkeypatch):
    """g - alpha A g = (I - alpha A) g, for any delta, where A is that of D', as D is another batch."""
    use(monkeypatch, "per_fedavg")
    alpha, beta, b, client, w = 0.3, 0.2, 2, 3, shared(data)
    work = {"eta_inner": alpha, "beta": beta, "epochs": 2, "batch_size": b}
    algorithm = per_fedavg(data.model, data.population, variant="hf", delta=delta, **work)
    found = flat(algorithm.client_update(w, (), data.visit(client)).update)
    at = flat(w).numpy()
    for d, d_prime in halves(data, client, b, 2):
        (a_d, b_d), (a, c) = (quadratic(data, client, len(at), rows) for rows in (d, d_prime))
        g = a @ (at - alpha * (a_d @ at - b_d)) - c
        at = at - beta * (np.eye(len(at)) - alpha * a) @ g
    assert distance(found, at - flat(w).numpy()) < 1e-9


def test_both_variants_agree_where_the_loss_is_linear(data, monkeypatch):
    """The Hessian is 0."""
    slope = tf.random.stateless_normal([89], [0, 1], dtype=tf.float64)
    use(monkeypatch, "per_fedavg", objective=lambda w, x, y: tf.reduce_mean(x) * tf.reduce_sum(slope * flat(w)))
    w = shared(data)
    a, b = (per_fedavg(data.model, data.population, variant=v, **QUICK) for v in VARIANTS)
    a, b = (algorithm.client_update(w, (), data.visit(1)).update for algorithm in (a, b))
    assert distance(a, b) < 1e-9 and distance(a, tree.zeros_like(w)) > 1e-3


def test_on_all_examples_hf_descends_on_the_meta_objective(data):
    """grad of l_i(w - alpha grad l_i(w)), through the inner gradient; FO leaves out what the Hessian says."""
    alpha, w, loss = 0.4, shared(data), loss_of(data, 1)

    def meta(v):
        return loss(tree.add_scaled(v, -alpha, gradient(loss, v)[0]))

    expected = by_hand(meta, w, 0.3, 3)
    work = {"eta_inner": alpha, "beta": 0.3, "steps": 3, "delta": 1e-4}
    hf, fo = (
        algorithm.local_model(w, algorithm.client_update(w, (), data.visit(1)))
        for algorithm in (per_fedavg(data.model, data.population, variant=v, **work) for v in ("hf", "fo"))
    )
    assert distance(hf, expected) < 1e-7 < 1e-3 < distance(fo, expected)


def test_first_order_is_the_gradient_at_the_adapted_model(data):
    alpha, beta, client, w = 0.4, 0.3, 3, shared(data)
    work = {"eta_inner": alpha, "beta": beta, "epochs": 2, "batch_size": 2}
    output = per_fedavg(data.model, data.population, **work).client_update(w, (), data.visit(client))
    at = w
    for d, d_prime in halves(data, client, 2, 2):
        adapted = by_hand(loss_on(data, client, d), at, alpha, 1)
        last = loss_on(data, client, d_prime)(adapted)
        at = tree.add_scaled(at, -beta, gradient(loss_on(data, client, d_prime), adapted)[0])
    assert distance(tree.add(w, output.update), at) < 1e-9
    assert distance(output.metrics["loss"], last) < 1e-9


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_that_cannot_be_halved_is_left_out(variant):
    """Of seven examples by six the last one; a client with a single example has it in both halves."""
    data = toy((7, 6, 1), (2, 2, 2))
    assert [len(rows) for pair in halves(data, 0, 3, 1) for rows in pair] == [3, 3]
    work = {"variant": variant, "eta_inner": 0.1, "beta": 0.2, "batch_size": 3}
    one, two = (per_fedavg(data.model, data.population, epochs=1, **work), None)
    w = shared(toy((7, 6, 1), (2, 2, 2)))
    output = one.client_update(w, (), data.visit(0))
    two = per_fedavg(data.model, data.population, steps=1, **work).client_update(w, (), data.visit(0))
    assert identical(output.update, two.update)
    alone = one.client_update(w, (), data.visit(2))
    both = per_fedavg(data.model, data.population, epochs=1, **{**work, "batch_size": None})
    expected = both.client_update(w, (), data.visit(2))
    assert identical((alone.update, alone.metrics), (expected.update, expected.metrics))
    assert float(alone.metrics["loss"]) > 0


def test_clients_count_the_same(data):
    algorithm, w, cohort = per_fedavg(data.model, data.population, **QUICK), shared(data), (0, 1, 4)
    updates = [algorithm.client_update(w, (), data.visit(i)).update for i in cohort]
    (found,), _ = play(algorithm, data, [cohort], w)
    total = tf.nest.map_structure(lambda *u: tf.add_n(u), *updates)
    assert distance(found, tree.add_scaled(w, 1 / 3, total)) < 1e-9


@pytest.mark.parametrize("adapt_steps", [0, 1, 3])
def test_a_client_predicts_with_an_adapted_copy(data, adapt_steps):
    """Whoever it is: nothing is kept, and a new client, or one that left, does the same."""
    algorithm, w = per_fedavg(data.model, data.population, adapt_steps=adapt_steps, **QUICK), shared(data)
    for i in data.ids:
        assert algorithm.init_client(data.population.info(i)) == ()
        found = algorithm.personal_model(w, (), data.visit(i))
        assert distance(found, by_hand(loss_of(data, i), w, 0.1, adapt_steps)) < 1e-9


def test_adaptation_may_take_one_random_batch(data):
    algorithm, w = per_fedavg(data.model, data.population, adapt_batch_size=3, **QUICK), shared(data)
    rows = shuffled(9, data.visit(1, 4).key, 0).numpy()[:3]
    expected = by_hand(loss_on(data, 1, rows), w, 0.1, 1)
    assert distance(algorithm.personal_model(w, (), data.visit(1, 4)), expected) < 1e-9


def test_a_round_in_which_nothing_arrives_changes_nothing(data):
    algorithm = per_fedavg(data.model, data.population, **QUICK)
    w = play(algorithm, data, COHORTS[:1])[0][-1]
    assert identical(nothing_arrives(algorithm, data, w), w)


@pytest.mark.parametrize(
    ("name", "value"),
    [("variant", "maml"), ("eta_inner", -1.0), ("beta", -1.0), ("delta", 0.0), ("delta", -1.0), ("steps", 0)]
    + [("batch_size", 0), ("adapt_steps", -1), ("adapt_batch_size", 0)],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        per_fedavg(data.model, data.population, **{name: value})
