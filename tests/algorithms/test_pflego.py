"""PFLEGO against one GradientTape on the whole objective (1), against its limits, and against its siblings."""

from itertools import combinations

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import client_loss, distance, gradient, identical, initial_states, objective, run, toy
from tfpfl.algorithms import build_algorithm, pflego, pflego_code, pflego_exact, pflego_paper
from tfpfl.data.population import Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel, tree
from tfpfl.models.weights import Head

RHO = 0.3


def descend(weights, rate, slope):
    return tree.add_scaled(weights, -rate, slope)


def central_step(data, theta, heads, rho):
    """One step of gradient descent on the whole of psi = (theta, W_1 .. W_I)."""
    theta_slope, head_slopes = gradient(lambda theta, heads: objective(data, theta, heads), theta, heads)
    return descend(theta, rho, theta_slope), {i: descend(heads[i], rho, head_slopes[i]) for i in heads}


def one_round(engine, data, cohort, server=None, states=None):
    """(theta, heads) after a round of this cohort."""
    server, heads = run(engine, data, cohort=cohort, server=server, states=states)
    return server.theta, heads


@pytest.fixture(scope="module")
def start(data):
    """psi before round 1."""
    algorithm = pflego_exact(data.model, data.population)
    return algorithm.init_server().theta, initial_states(algorithm, data.population)


@pytest.mark.slow
def test_everyone_with_tau_1_is_gradient_descent_on_the_whole_objective(data, start):
    algorithm = pflego_exact(data.model, data.population, tau=1, rho=RHO)
    server, heads = run(algorithm, data, rounds=5)
    theta, expected = start
    for _ in range(5):
        theta, expected = central_step(data, theta, expected, RHO)
    assert distance(start[0], theta) > 0.01  # it went somewhere
    assert distance(server.theta, theta) < 1e-9
    assert distance(heads, expected) < 1e-9


def mean_over_cohorts(data, start, cohorts_and_weights, sampling, **hyperparameters):
    """The expected (theta, heads) after a round; an empty cohort changes nothing."""
    population = toy(sampling=sampling).population
    engine = Simulation(pflego_exact(data.model, population, tau=1, rho=RHO, **hyperparameters))
    results = [(w, one_round(engine, data, c) if c else start) for c, w in cohorts_and_weights]
    assert sum(w for w, _ in results) == pytest.approx(1)
    expected = tree.scale(0, start)
    for weight, result in results:
        expected = tree.add_scaled(expected, weight, result)
    return expected


def fixed_cohorts(num_clients, size):
    cohorts = list(combinations(range(num_clients), size))
    return [(c, 1 / len(cohorts)) for c in cohorts]


def binomial_cohorts(num_clients, rate):
    sizes = range(num_clients + 1)
    return [
        (c, rate ** len(c) * (1 - rate) ** (num_clients - len(c)))
        for n in sizes
        for c in combinations(range(num_clients), n)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rate", slow_but([0.2, 0.4, 0.6], 0.4))
def test_the_mean_over_all_cohorts_is_the_full_step(data, start, rate):
    sampling = Sampling("fixed", rate)
    cohorts = fixed_cohorts(5, int(sampling.expected(5)))
    assert distance(mean_over_cohorts(data, start, cohorts, sampling), central_step(data, *start, RHO)) < 1e-9


@pytest.mark.slow
def test_the_mean_over_all_coin_flips_is_the_full_step(data, start):
    cohorts = binomial_cohorts(5, 0.3)
    assert len(cohorts) == 2**5
    expected = mean_over_cohorts(data, start, cohorts, Sampling("binomial", 0.3))
    assert distance(expected, central_step(data, *start, RHO)) < 1e-9


def test_weights_of_the_cohort_bias_theta_but_not_the_heads(data, start):
    theta, heads = mean_over_cohorts(data, start, fixed_cohorts(5, 2), Sampling("fixed", 0.4), weighting="sampled")
    full_theta, full_heads = central_step(data, *start, RHO)
    assert distance(theta, full_theta) > 1e-3
    assert distance(heads, full_heads) < 1e-9


def test_eq3_with_tau_1_and_everyone_is_a_fedper_step(data, start):
    """FedPer with one full-batch step: clients descend on (theta, W_i) with rate rho; thetas are averaged by alpha."""
    algorithm = pflego(data.model, data.population, tau=1, rho=RHO, rule="eq3", server_opt="sgd")
    found = one_round(algorithm, data, data.ids)
    alpha = data.population.num_examples / data.population.num_examples.sum()
    theta, heads = tree.scale(0, start[0]), {}
    for i in data.ids:
        slopes = gradient(lambda t, w: client_loss(data, i, t, w), start[0], start[1][i])  # noqa: B023
        theta = tree.add_scaled(theta, alpha[i], descend(start[0], RHO, slopes[0]))
        heads[i] = descend(start[1][i], RHO, slopes[1])
    assert distance(found, (theta, heads)) < 1e-9


def head_then_theta(data, start, tau_head, beta, rho):
    """FedRep with one body step, and FedRecon with SGD: heads first, then a step on theta at the new heads."""
    theta, heads = start
    heads = dict(heads)
    for i in data.ids:
        for _ in range(tau_head):
            (slope,) = gradient(lambda w: client_loss(data, i, theta, w), heads[i])  # noqa: B023
            heads[i] = descend(heads[i], beta, slope)
    (slope,) = gradient(lambda t: objective(data, t, heads), theta)
    return descend(theta, rho, slope), heads


@pytest.mark.parametrize("tau", slow_but([2, 8], 2))
def test_theta_moves_as_in_fedrep_and_fedrecon_with_tau_minus_1_head_steps(data, start, tau):
    algorithm = pflego_exact(data.model, data.population, tau=tau, beta=0.5, rho=RHO)
    theta, _ = one_round(algorithm, data, data.ids)
    assert distance(theta, head_then_theta(data, start, tau - 1, 0.5, RHO)[0]) < 1e-9
    assert distance(theta, head_then_theta(data, start, tau, 0.5, RHO)[0]) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "eq3"])
def test_the_head_takes_tau_minus_1_steps_of_beta_and_the_joint_step(data, start, rule):
    """Cached features and closed forms against autodiff, with a cohort of two of five."""
    population = toy(sampling=Sampling("fixed", 0.4)).population
    algorithm = pflego_exact(data.model, population, rule=rule, tau=6, beta=0.5, rho=RHO)
    _, heads = one_round(algorithm, data, [1, 3])
    _, fitted = head_then_theta(data, start, 5, 0.5, RHO)
    alpha = data.population.num_examples / data.population.num_examples.sum()
    for i in (1, 3):
        (slope,) = gradient(lambda w: client_loss(data, i, start[0], w), fitted[i])  # noqa: B023
        c = alpha[i] if rule == "exact" else 1
        assert distance(heads[i], descend(fitted[i], RHO * 5 / 2 * c, slope)) < 1e-9
    for i in (0, 2, 4):
        assert identical(heads[i], start[1][i])


@pytest.mark.parametrize(
    ("dtype", "tolerance", "switches"),
    [
        ("float64", 1e-9, {"recompute": True}),
        ("float64", 1e-9, {"chunk": 4}),
        *(pytest.param("float64", 1e-9, {"chunk": chunk}, marks=pytest.mark.slow) for chunk in (1, 2, 5, 9, 100)),
        pytest.param("float32", 1e-5, {"recompute": True}, marks=pytest.mark.slow),
        pytest.param("float32", 1e-5, {"chunk": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_chunks_and_recomputed_activations_give_the_same_round(dtype, tolerance, switches):
    data = toy(dtype=dtype)
    hyperparameters = {"tau": 5, "beta": 0.5, "rho": RHO}
    once = run(pflego_exact(data.model, data.population, **hyperparameters), data, rounds=3)
    parts = run(pflego_exact(data.model, data.population, **hyperparameters, **switches), data, rounds=3)
    assert distance(once, parts) < tolerance


class Counted(SplitModel):
    """Counts how often the backbone enters a graph; a loop's body is traced once, however often it runs."""

    calls = 0

    def features(self, theta, x):
        self.calls += 1
        return super().features(theta, x)


@pytest.mark.parametrize(
    ("switches", "passes"), [({}, 1), ({"tau": 1}, 1), ({"tau": 500}, 1), ({"recompute": True}, 2), ({"chunk": 2}, 2)]
)
def test_one_forward_pass_for_any_tau(data, switches, passes):
    model = Counted(data.model.backbone)
    algorithm = pflego(model, data.population, **switches)
    theta, visit = algorithm.init_server().theta, data.visit(1)
    head = algorithm.init_client(visit.info)
    model.calls = 0
    graph = tf.function(algorithm.client_update, autograph=False).get_concrete_function(theta, head, visit).graph
    assert model.calls == passes
    if passes == 1:  # and not in the loop of head steps
        assert [op.type for op in graph.inputs[0].consumers()] == ["MatMul"]


def test_beta_0_makes_tau_irrelevant(data):
    one = run(pflego_exact(data.model, data.population, tau=1, rho=RHO), data, rounds=2)
    many = run(pflego_exact(data.model, data.population, tau=7, beta=0.0, rho=RHO), data, rounds=2)
    assert identical(one, many)


@pytest.mark.slow
def test_rho_0_freezes_theta_but_not_the_heads(data, start):
    for server_opt in ("sgd", "momentum", "adam"):
        algorithm = pflego(data.model, data.population, tau=3, beta=0.5, rho=0.0, server_opt=server_opt)
        theta, heads = one_round(algorithm, data, data.ids)
        assert identical(theta, start[0])
        assert distance(heads, start[1]) > 1e-3


@pytest.mark.slow
def test_the_safeguard_restores_a_head_that_the_inner_steps_made_worse(data, start):
    def heads_after(**hyperparameters):
        algorithm = pflego(data.model, data.population, rho=0.0, **hyperparameters)
        return one_round(algorithm, data, data.ids)[1]

    huge = {"tau": 4, "beta": 1e4}
    guarded, free = heads_after(**huge), heads_after(**huge, safeguard=False)
    worse = {
        i for i in data.ids if client_loss(data, i, start[0], free[i]) > client_loss(data, i, start[0], start[1][i])
    }
    assert 0 < len(worse) < len(data.ids)
    for i in data.ids:
        assert identical(guarded[i], start[1][i] if i in worse else free[i])
        for safeguard in (True, False):
            algorithm = pflego(data.model, data.population, rho=0.0, safeguard=safeguard, **huge)
            found = algorithm.client_update(start[0], start[1][i], data.visit(i)).metrics
            assert bool(found["restored"]) == (safeguard and i in worse)


@pytest.mark.parametrize("inner_opt", slow_but(["gd", "newton"], "gd"))
def test_rounding_at_a_minimum_is_no_head_that_was_restored(data, start, inner_opt):
    """At the minimum of a client's loss its steps change nothing but rounding, up or down."""
    visit, options = data.visit(3), {"rho": 0.0, "beta": 0.5}
    fit = pflego(data.model, data.population, tau=41, inner_opt="newton", **options)
    head = fit.client_update(start[0], start[1][3], visit).state
    for tau in range(2, 9):
        again = pflego(data.model, data.population, tau=tau, inner_opt=inner_opt, **options)
        assert not again.client_update(start[0], head, visit).metrics["restored"]


def head_slope(data, theta, head, i) -> float:
    (slope,) = gradient(lambda w: client_loss(data, i, theta, w), head)
    return float(tf.sqrt(tree.dot(slope, slope)))


@pytest.mark.slow
def test_every_inner_optimizer_lowers_the_loss_and_newton_ends_at_the_minimum(data, start):
    theta, heads = start
    slopes = {}
    for inner_opt in ("gd", "momentum", "adam", "newton"):
        algorithm = pflego(data.model, data.population, tau=21, beta=0.1, rho=0.0, inner_opt=inner_opt, safeguard=False)
        _, fitted = one_round(algorithm, data, data.ids)
        for i in data.ids:
            assert client_loss(data, i, theta, fitted[i]) < client_loss(data, i, theta, heads[i])
        slopes[inner_opt] = sum(head_slope(data, theta, fitted[i], i) for i in data.ids)
    assert slopes["newton"] < 0.05 * min(slopes["gd"], slopes["momentum"], slopes["adam"])


def test_the_server_optimizer_sees_the_unbiased_gradient(data, start):
    """Adam's first step is rho * sign(gradient): scale does not matter; momentum's second step repeats the first."""
    (slope,) = gradient(lambda t: objective(data, t, start[1]), start[0])
    theta, _ = one_round(pflego(data.model, data.population, tau=1, rho=0.01), data, data.ids)
    moves = tree.subtract(start[0], theta)
    for move, g in zip(moves, slope, strict=True):
        np.testing.assert_allclose(move, 0.01 * g / (np.abs(g) + 1e-8), rtol=1e-6)


@pytest.mark.slow
def test_presets(data):
    uniform = initial_states(pflego_code(data.model, data.population), data.population)
    for head in uniform.values():
        numbers = np.concatenate([np.ravel(head.kernel), np.ravel(head.bias)])
        assert (numbers >= 0).all() and (numbers < 1).all() and np.ptp(head.bias) > 0

    spelled = {
        "exact": (pflego_exact, {"rule": "exact", "weighting": "alpha", "server_opt": "sgd"}),
        "paper": (pflego_paper, {"rule": "eq3", "weighting": "alpha", "server_opt": "adam"}),
        "code": (
            pflego_code,
            {"rule": "eq3", "weighting": "sampled", "server_opt": "adam", "head_init": "uniform01", "safeguard": False},
        ),
    }
    results = {}
    for name, (builder, switches) in spelled.items():
        knobs = {"tau": 3, "beta": 0.3, "rho": 0.05}
        results[name] = run(builder(data.model, data.population, **knobs), data, rounds=2)
        assert identical(results[name], run(pflego(data.model, data.population, **switches, **knobs), data, rounds=2))
        by_name = build_algorithm("pflego", data.model, data.population, preset=name, **knobs)
        assert identical(results[name], run(by_name, data, rounds=2))
    assert identical(results["paper"], run(pflego(data.model, data.population, **knobs), data, rounds=2))  # the default
    assert distance(results["exact"][1], results["paper"][1]) > 1e-3


@pytest.mark.parametrize(("name", "kind"), [("tau", "int"), ("beta", "float"), ("rho", "float")])
def test_none_is_no_number(data, name, kind):
    with pytest.raises(ValueError, match=f"{name} must be {kind}, found None"):
        build_algorithm("pflego", data.model, data.population, **{name: None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tau", 0),
        ("tau", -3),
        ("beta", -0.1),
        ("beta", float("nan")),
        ("beta", float("inf")),
        ("rho", -1.0),
        ("rho", float("nan")),
        ("rule", "eq4"),
        ("weighting", "examples"),
        ("server_opt", "lion"),
        ("inner_opt", "lbfgs"),
        ("chunk", 0),
        ("head_init", "orthogonal"),
    ],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{value}"):
        pflego(data.model, data.population, **{name: value})


def test_what_leaves_a_client(data):
    """What leaves is theta's gradient, alpha_i, the loss and whether steps raised it; the head stays."""
    algorithm = pflego(data.model, data.population, tau=4)
    theta, visit = algorithm.init_server().theta, data.visit(3)
    output = algorithm.client_update(theta, algorithm.init_client(visit.info), visit)
    assert [u.shape for u in output.update] == [w.shape for w in theta]
    assert isinstance(output.state, Head) and set(output.metrics) == {"loss", "raised", "restored"}
    assert float(output.weight) == pytest.approx(7 / 31)


def test_the_personal_and_the_local_model_are_the_newest_theta_or_the_received_one(data):
    algorithm = pflego(data.model, data.population)
    theta, visit = algorithm.init_server().theta, data.visit(0)
    head = algorithm.init_client(visit.info)
    output = algorithm.client_update(theta, head, visit)
    newer = tree.scale(2.0, theta)
    assert identical(algorithm.personal_model(newer, head, visit), (newer, head))
    assert identical(algorithm.local_model(theta, output), (theta, output.state))


def test_the_loss_is_the_one_at_the_joint_point(data, start):
    algorithm = pflego_exact(data.model, data.population, tau=1, rho=RHO)
    output = Simulation(algorithm).next(
        algorithm.init_server(), list(start[1].values()), [data.visit(i) for i in data.ids]
    )
    assert float(output.metrics["loss"]) == pytest.approx(float(objective(data, *start)), abs=1e-12)
