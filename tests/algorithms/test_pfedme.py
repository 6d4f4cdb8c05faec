"""pFedMe: the inner problem in closed form on a quadratic, and its listing written out."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.quadratics import flat, quadratic, use
from helpers.rounds import COHORTS, nothing_arrives, play, shared
from helpers.toys import client_loss, distance, gradient, identical, initial_states
from tfpfl.algorithms import pfedme
from tfpfl.algorithms.parts.local_training import shuffled
from tfpfl.models import tree

QUICK = {"lam": 2.0, "eta_p": 0.1, "eta": 0.2, "epochs": 2, "batch_size": 2}
SOME = [(0, 2, 3), (2, 3), (0, 2), (3,), (2, 3)]  # 1 and 4 never come, 0 leaves


def visit(data, algorithm, client, w, t=1):
    return algorithm.client_update(w, algorithm.init_client(None), data.visit(client, t))


@pytest.mark.slow
def test_beta_0_leaves_the_model(data):
    path, states = play(pfedme(data.model, data.population, beta=0.0, **QUICK), data)
    assert identical(path[-1], path[0]) and distance(states[0].theta, path[0]) > 1e-3


@pytest.mark.parametrize("batches", [{"steps": 3}, {"epochs": 2, "batch_size": 2}], ids=str)
def test_a_whole_step_takes_the_personal_model(data, batches):
    """eta lambda = 1: w_i = theta_i."""
    algorithm, w = pfedme(data.model, data.population, lam=4.0, eta=0.25, eta_p=0.1, **batches), shared(data)
    output = visit(data, algorithm, 1, w)
    assert distance(tree.add(w, output.update), output.state.theta) < 1e-9
    assert distance(output.update, tree.zeros_like(w)) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("implicit", slow_but([False, True], False))
def test_many_inner_steps_reach_the_closed_form_on_a_quadratic(data, implicit, monkeypatch):
    """theta = (A + lambda I)^-1 (A c + lambda w_i), and w_i follows it; the fewer steps, the farther."""
    use(monkeypatch, "pfedme")
    lam, eta, w = 1.5, 0.3, shared(data)
    a, b = quadratic(data, 3, len(flat(w)))
    w_i = flat(w).numpy()
    for _ in range(3):
        theta = np.linalg.solve(a + lam * np.eye(len(b)), b + lam * w_i)
        w_i = w_i - eta * lam * (w_i - theta)
    apart = []
    for inner_steps in (2, 8, 120):
        work = {"lam": lam, "eta": eta, "eta_p": 0.4, "steps": 3, "inner_steps": inner_steps, "implicit_prox": implicit}
        output = visit(data, pfedme(data.model, data.population, **work), 3, w)
        apart.append(distance((flat(output.state.theta), flat(output.update)), (theta, w_i - flat(w))))
    assert apart[0] > apart[1] > 1e-9 > apart[2]


def test_without_a_gradient_nothing_moves(data, monkeypatch):
    use(monkeypatch, "pfedme", objective=lambda weights, x, y: tf.constant(1.0, tf.float64))
    w = shared(data)
    output = visit(data, pfedme(data.model, data.population, **QUICK), 0, w)
    assert distance(output.state.theta, w) < 1e-9 and distance(output.update, tree.zeros_like(w)) < 1e-9


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"weight_decay": 0.3}, marks=pytest.mark.slow),
        pytest.param({"implicit_prox": True}, marks=pytest.mark.slow),
        {"implicit_prox": True, "weight_decay": 0.3},
    ],
    ids=str,
)
def test_a_visit_is_written_out(data, options):
    """theta goes on from batch to batch; w_i takes one step a batch."""
    lam, eta, eta_p, w, client, b = 2.0, 0.15, 0.1, shared(data), 3, 3
    algorithm = pfedme(
        data.model, data.population, lam=lam, eta=eta, eta_p=eta_p, inner_steps=4, epochs=2, batch_size=b, **options
    )
    found, (x, y) = visit(data, algorithm, client, w), data.data[client]
    decay, w_i, theta = options.get("weight_decay", 0.0), w, w
    for epoch in range(2):
        order = shuffled(len(y), data.visit(client).key, epoch).numpy()
        for start in range(0, len(y), b):
            rows = order[start : start + b]
            batch = data._replace(data=[(x[rows], y[rows])] * 5)
            for _ in range(4):
                last = client_loss(batch, 0, *theta)
                slope = gradient(lambda v: client_loss(batch, 0, *v), theta)[0]  # noqa: B023
                slope = tree.add_scaled(slope, decay, theta)
                if "implicit_prox" in options:
                    theta = tree.add_scaled(tree.add_scaled(theta, -eta_p, slope), eta_p * lam, w_i)
                    theta = tree.scale(1 / (1 + eta_p * lam), theta)
                else:
                    theta = tree.add_scaled(theta, -eta_p, tree.add_scaled(slope, lam, tree.subtract(theta, w_i)))
            w_i = tree.add_scaled(w_i, -eta * lam, tree.subtract(w_i, theta))
    assert distance(found.state.theta, theta) < 1e-9
    assert distance(found.update, tree.subtract(w_i, w)) < 1e-9
    assert distance(found.metrics["loss"], last) < 1e-9
    assert identical(algorithm.local_model(w, found), found.state.theta)


@pytest.mark.slow
@pytest.mark.parametrize("beta", slow_but([0.5, 1.0, 1.6], 0.5))
def test_the_server_goes_beta_of_the_way_to_the_unweighted_mean(data, beta):
    algorithm, w, cohort = pfedme(data.model, data.population, beta=beta, **QUICK), shared(data), (0, 1, 4)
    updates = [visit(data, algorithm, i, w).update for i in cohort]
    (found,), _ = play(algorithm, data, [cohort], w)
    total = tf.nest.map_structure(lambda *u: tf.add_n(u), *updates)
    assert distance(found, tree.add_scaled(w, beta / 3, total)) < 1e-9


@pytest.mark.slow
def test_a_visit_starts_from_what_comes_and_not_from_the_last_personal_model(data):
    algorithm, w = pfedme(data.model, data.population, **QUICK), shared(data)
    (_,), states = play(algorithm, data, [data.ids])
    again = algorithm.client_update(w, states[2], data.visit(2, 2))
    assert identical(again.state.theta, visit(data, algorithm, 2, w, 2).state.theta)


@pytest.mark.slow
def test_who_never_came_predicts_with_the_global_model_and_who_left_with_its_last(data):
    algorithm = pfedme(data.model, data.population, **QUICK)
    path, states = play(algorithm, data, SOME)
    w, fresh = path[-1], initial_states(algorithm, data.population)
    for i in (1, 4):
        assert identical(states[i], fresh[i])
        assert identical(algorithm.personal_model(w, states[i], data.visit(i)), w)
    last = visit(data, algorithm, 0, path[1], 3).state.theta
    assert distance(algorithm.personal_model(w, states[0], data.visit(0)), last) < 1e-9
    late = algorithm.client_update(w, fresh[4], data.visit(4, 6))
    assert distance(algorithm.personal_model(w, late.state, data.visit(4)), w) > 1e-3


@pytest.mark.slow
def test_a_round_in_which_nothing_arrives_changes_nothing(data):
    algorithm = pfedme(data.model, data.population, **QUICK)
    w = play(algorithm, data, COHORTS[:1])[0][-1]
    assert identical(nothing_arrives(algorithm, data, w), w)


@pytest.mark.slow
def test_a_stiff_lambda_warns_and_its_implicit_step_is_stable(data):
    stiff, w = {"lam": 100.0, "eta_p": 0.1, "eta": 0.005, "steps": 20}, shared(data)
    with pytest.warns(UserWarning, match="lam=100.0 with a rate of 0.1"):
        pfedme(data.model, data.population, **stiff)
    output = visit(data, pfedme(data.model, data.population, **stiff, implicit_prox=True), 0, w)
    assert distance(output.state.theta, w) < 0.1


@pytest.mark.parametrize(
    ("name", "value"),
    [("lam", -1.0), ("eta", -1.0), ("eta_p", -1.0), ("beta", -1.0), ("inner_steps", 0), ("weight_decay", -1.0)]
    + [("steps", 0), ("batch_size", 0)],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        pfedme(data.model, data.population, **{name: value})
