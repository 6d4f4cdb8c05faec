"""What new clients do by themselves: against gradient descent by hand, and against the algorithms' own visits."""

from functools import partial

import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import distance, gradient, identical, initial_states, run
from tfpfl import algorithms
from tfpfl.algorithms import apfl, build_algorithm, ditto, fedavg_ft, fedfomo, fedrecon, fedrod, pfedme, pflego
from tfpfl.algorithms.parts.adaptation import adaptation, near, squared_distance
from tfpfl.algorithms.parts.local_training import local_solver
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights

BATCHES = {"eta": 0.1, "batch_size": 2, "momentum": 0.5}
CLIENT = 3


@pytest.fixture(scope="module")
def w(data):
    """Some model for all, and nobody's start."""
    start = Weights(data.model.theta(), data.model.shared_head(4))
    leaves = tf.nest.flatten(start)
    noise = [0.3 * tf.random.stateless_normal(x.shape, [3, i], dtype=x.dtype) for i, x in enumerate(leaves)]
    return tf.nest.pack_sequence_as(start, [x + n for x, n in zip(leaves, noise, strict=True)])


def models(adapt, message, state, visit, epochs) -> list:
    """The models after 0, 1, ..., `epochs` epochs."""
    carry = adapt.start(message, state, visit)
    found = [adapt.model(carry)]
    for n in range(epochs):
        carry = adapt.epoch(carry, visit, n)
        found.append(adapt.model(carry))
    return found


def descent(function, weights, rate, steps, momentum=0.0) -> list:
    """All iterates of gradient descent with momentum, by GradientTape."""
    found, velocity = [weights], tree.zeros_like(weights)
    for _ in range(steps):
        velocity = tree.add_scaled(gradient(function, weights)[0], momentum, velocity)
        weights = tree.add_scaled(weights, -rate, velocity)
        found.append(weights)
    return found


def loss(data, i=CLIENT):
    """l_i of a whole model."""
    visit, objective = data.visit(i), client_loss(data.model)
    return lambda weights: objective(weights, visit.x, visit.y)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("part", ["full", "head", "body"])
def test_full_batch_epochs_are_gradient_descent_on_the_part(data, w, part, momentum):
    """The momentum goes on from epoch to epoch, and the rest of the model stays bit for bit."""
    adapt = adaptation(data.model, lambda message, state, visit: message, sgd(0.2, momentum), part=part)
    free = {"full": lambda m: m, "head": lambda m: m.head, "body": lambda m: m.theta}[part]
    whole = {
        "full": lambda v: v,
        "head": lambda v: Weights(w.theta, v),
        "body": lambda v: Weights(v, w.head),
    }[part]
    expected = descent(lambda v: loss(data)(whole(v)), free(w), 0.2, 5, momentum)
    found = models(adapt, w, (), data.visit(CLIENT), 5)
    assert distance([free(m) for m in found], expected) < 1e-9
    if part != "full":
        rest = (lambda m: m.theta) if part == "head" else (lambda m: m.head)
        assert all(identical(rest(m), rest(w)) for m in found)


@pytest.mark.parametrize("held", [{}, {"prox": 0.7}, {"prox": 7.0, "implicit_prox": True}])
def test_epochs_one_by_one_are_those_of_the_local_solver(data, w, held):
    """Mini-batches in the same order, momentum and penalty included."""
    start, visit = tree.scale(0.5, w), data.visit(CLIENT)
    options = near(BATCHES["eta"], held["prox"], held.get("implicit_prox", False)) if held else {}
    optimizer = sgd(BATCHES["eta"], BATCHES["momentum"])
    adapt = adaptation(data.model, lambda *_: start, optimizer, batch_size=BATCHES["batch_size"], **options)
    found = models(adapt, w, (), visit, 3)
    for epochs in (1, 2, 3):
        expected, _ = local_solver(**BATCHES, epochs=epochs, **held)(client_loss(data.model), start, visit, anchor=w)
        assert distance(found[epochs], expected) < 1e-9


@pytest.mark.parametrize("inner_opt", ["gd", "momentum", "adam", "newton"])
def test_pflego_takes_its_head_steps(data, inner_opt):
    """The head that a visit of tau steps has before the joint one, which rho = 0 leaves out."""
    build = partial(pflego, data.model, data.population, beta=0.1, rho=0.0, inner_opt=inner_opt, safeguard=False)
    theta, visit = tree.scale(1.1, data.model.theta()), data.visit(CLIENT)
    head = initial_states(build(), data.population)[CLIENT]
    found = models(build().adapt, theta, head, visit, 4)
    assert identical(found[0], Weights(theta, head)) and head.bias.shape[0] == 4
    for tau in (1, 2, 5) if inner_opt in ("gd", "newton") else (2, 5):
        expected = build(tau=tau).client_update(theta, head, visit).state
        assert distance(found[tau - 1].head, expected) < 1e-9
        assert identical(found[tau - 1].theta, theta)


VISITS = {  # an algorithm whose visit of n epochs does to some model what n epochs of adapting do
    "local": ({**BATCHES}, "epochs"),
    "fedavg": ({**BATCHES}, "epochs"),
    "fedrep": ({"eta_h": 0.1, "batch_size": 2, "momentum": 0.5, "unit": "epochs", "tau_b": 0}, "tau_h"),
    "fedrecon": ({"beta": 0.1}, "tau"),
    "ditto": ({**BATCHES, "lam": 0.7, "epochs": 1}, "epochs_p"),
    "layerwise": ({**BATCHES, "l_2": 0.5, "l_cos": 0.3, "scheme": "pm_a", "epochs": 1}, "epochs_p"),
}


@pytest.mark.parametrize("implicit", slow_but([False, True], True))
@pytest.mark.parametrize("name", VISITS)
def test_epochs_are_those_of_a_visit(data, w, name, implicit):
    options, count = VISITS[name]
    if implicit:
        if name not in ("ditto", "layerwise"):
            return
        options = options | {"implicit_prox": True}

    def build(n):
        return build_algorithm(name, data.model, data.population, **options, **{count: n})

    message = {"local": (), "fedrep": w.theta, "fedrecon": w.theta}.get(name, w)
    visit, state = data.visit(CLIENT), initial_states(build(1), data.population)[CLIENT]
    found = models(build(1).adapt, message, state, visit, 3)
    for n in (1, 3):
        algorithm = build(n)
        held = algorithm.local_model(message, algorithm.client_update(message, state, visit))
        assert distance(found[n], held) < 1e-9


def test_what_is_a_fit_is_reached_by_as_many_epochs(data, w):
    """Fine-tuning, Per-FedAvg's step, FedRecon's reconstruction."""
    visit = data.visit(CLIENT)
    tuned = fedavg_ft(data.model, data.population, epochs_ft=3, **BATCHES)
    assert distance(models(tuned.adapt, w, (), visit, 3)[-1], tuned.personal_model(w, (), visit)) < 1e-9
    head = fedavg_ft(data.model, data.population, epochs_ft=3, part="head", **BATCHES)
    assert distance(models(head.adapt, w, (), visit, 3)[-1], head.personal_model(w, (), visit)) < 1e-9
    meta = algorithms.per_fedavg(data.model, data.population, eta_inner=0.2, adapt_steps=2)
    assert distance(models(meta.adapt, w, (), visit, 2)[-1], meta.personal_model(w, (), visit)) < 1e-9
    rebuilt = fedrecon(data.model, data.population, tau=4, beta=0.2, reset_head=True)
    state = initial_states(rebuilt, data.population)[CLIENT]
    found = models(rebuilt.adapt, w.theta, state, visit, 4)
    assert distance(found[-1], rebuilt.personal_model(w.theta, state, visit)) < 1e-9
    babu = algorithms.fedbabu(data.model, data.population, eta=0.1, epochs_ft=2)
    assert distance(models(babu.adapt, w.theta, (), visit, 2)[-1], babu.personal_model(w.theta, (), visit)) < 1e-9


@pytest.mark.slow
def test_pfedme_solves_its_inner_problem(data, w):
    """Near w, which stays; with weight decay."""
    algorithm = pfedme(data.model, data.population, lam=3.0, eta_p=0.1, weight_decay=0.2)
    state = initial_states(algorithm, data.population)[CLIENT]

    def inner(theta):
        return loss(data)(theta) + 1.5 * squared_distance(theta, w) + 0.1 * tree.dot(theta, theta)

    found = models(algorithm.adapt, w, state, data.visit(CLIENT), 5)
    assert distance(found, descent(inner, w, 0.1, 5)) < 1e-9
    implicit = pfedme(data.model, data.population, lam=300.0, eta_p=0.1, implicit_prox=True)
    found = models(implicit.adapt, w, state, data.visit(CLIENT), 60)
    slope = gradient(lambda theta: loss(data)(theta) + 150 * squared_distance(theta, w), found[-1])[0]
    assert distance(slope, tree.zeros_like(slope)) < 1e-9  # explicit steps would have diverged


def test_lg_fedavg_fits_its_body_under_the_shared_head(data, w):
    algorithm = algorithms.lg_fedavg(data.model, data.population, eta=0.1, momentum=0.5)
    message, state = algorithm.message(algorithm.init_server()), initial_states(algorithm, data.population)[CLIENT]
    message = message._replace(head=w.head)
    found = models(algorithm.adapt, message, state, data.visit(CLIENT), 4)
    expected = descent(lambda t: loss(data)(Weights(t, w.head)), data.model.theta(), 0.1, 4, 0.5)
    assert distance([m.theta for m in found], expected) < 1e-9
    assert all(identical(m.head, w.head) for m in found)


@pytest.mark.parametrize("init", ["copy", "zeros"])
def test_fedrod_fits_its_private_head_alone(data, w, init):
    algorithm = fedrod(data.model, data.population, eta=0.1, eta_p=0.3, momentum=0.5, init=init)
    p = initial_states(algorithm, data.population)[CLIENT]
    found = models(algorithm.adapt, w, p, data.visit(CLIENT), 4)
    expected = descent(lambda p: loss(data)(Weights(w.theta, tree.add(w.head, p))), p, 0.3, 4, 0.5)
    assert distance([m.head for m in found], [tree.add(w.head, p) for p in expected]) < 1e-9
    assert all(identical(m.theta, w.theta) for m in found)


@pytest.mark.parametrize(("eta_a", "momentum"), [(0.0, 0.0), (0.4, 0.0), (0.4, 0.5)])
def test_apfl_fits_its_own_part_of_the_mixture(data, w, eta_a, momentum):
    """The momentum goes on from epoch to epoch."""
    algorithm = apfl(data.model, data.population, eta=0.3, eta_a=eta_a, mixing=0.6, momentum=momentum)
    state = initial_states(algorithm, data.population)[CLIENT]
    v, a, velocity, expected = state.v, state.a, tree.zeros_like(state.v), []

    def mixture(v, a):
        return tree.add(tree.scale(a, v), tree.scale(1 - a, w))

    for _ in range(5):
        expected.append(mixture(v, a))
        of_v, of_a = gradient(lambda v, a: loss(data)(mixture(v, a)), v, a)
        velocity = tree.add_scaled(of_v, momentum, velocity)
        v, a = tree.add_scaled(v, -0.3, velocity), tf.clip_by_value(a - eta_a * of_a, 0, 1)
    assert (eta_a > 0) == (abs(float(a) - 0.6) > 1e-3)
    assert distance(models(algorithm.adapt, w, state, data.visit(CLIENT), 4), expected) < 1e-9


@pytest.mark.slow
def test_fedfomo_mixes_once_as_in_its_visit(data):
    def build(epochs):
        options = {"eta": 0.1, "batch_size": 2, "momentum": 0.5, "candidates": 3, "epochs": epochs}
        return fedfomo(data.model, data.population, **options)

    algorithm, new = build(1), 1
    server, _ = run(algorithm, data, rounds=2, cohort=[0, 2, 3, 4])
    message, visit = algorithm.message(server, tf.constant(new)), data.visit(new)
    state = initial_states(algorithm, data.population)[new]
    found = models(algorithm.adapt, message, state, visit, 2)
    assert identical(found[0], state.theta)
    for n in (1, 2):
        held = build(n).client_update(message, state, visit)
        assert float(tf.reduce_sum(held.update.weights)) > 0.99  # the others' models help it; its own is the start
        assert distance(found[n], held.state.theta) < 1e-9


def test_first_broadcast_is_where_it_starts(data, w):
    algorithm = ditto(data.model, data.population, init="first_broadcast", lam=0.5, eta=0.1)
    state = initial_states(algorithm, data.population)[CLIENT]
    found = models(algorithm.adapt, w, state, data.visit(CLIENT), 2)
    expected = descent(lambda v: loss(data)(v) + 0.25 * squared_distance(v, w), w, 0.1, 2)
    assert distance(found, expected) < 1e-9


def test_refusals(data):
    with pytest.raises(ValueError, match="part must be one of full, head, body; found 'tail'"):
        adaptation(data.model, None, sgd(0.1), part="tail")
    with pytest.raises(ValueError, match="batch_size must be at least 1, found 0"):
        adaptation(data.model, None, sgd(0.1), batch_size=0)
