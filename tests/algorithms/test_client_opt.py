"""`client_opt`: the optimizer of the local steps, in every method that runs local SGD."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.normalized import model_for
from helpers.quick import quick
from helpers.rounds import play, shared
from helpers.toys import distance, gradient, identical, initial_states, toy
from tfpfl.algorithms import ALGORITHMS, build_algorithm, fedavg, fedrep
from tfpfl.algorithms.exchanges import message_for
from tfpfl.algorithms.parts import OptimizerChoice, adam, local_solver, sgd
from tfpfl.checks import InvalidArgument
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights

TAKE_IT = [name for name, row in ALGORITHMS.items() if "client_opt" in row.hyperparameters]
ADAM = {"client_opt": "adam", "client_beta_1": 0.8, "client_epsilon": 1e-3, "client_weight_decay": 0.1}
SECOND = {"eta_p", "eta_b", "eta_f", "eta_ft"}  # rates beside a first one, for the same optimizer


def test_who_takes_it_and_who_says_why_not():
    gradients = {"pflego", "fedrecon", "fedsgd", "scaffold", "feddyn", "per_fedavg"}
    assert set(TAKE_IT) == set(ALGORITHMS) - gradients - {"fed3r"}
    for name, row in ALGORITHMS.items():
        assert ("client_opt" in inspect.signature(row.builder).parameters) == (not row.no_client_opt)
        assert not row.no_client_opt or "Use " in row.no_client_opt, name


def test_a_method_that_cannot_take_it_says_why_and_what_to_use(data):
    with pytest.raises(ValueError, match="scaffold has no hyperparameter client_opt: its control variates.*Use fedavg"):
        build_algorithm("scaffold", data.model, data.population, client_opt="adam")


def adam_by_hand(function, weights, steps, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-8, decay=0.0):
    """Adam as in algorithm 1 of its paper, with decoupled weight decay, in NumPy."""
    w = [np.array(x) for x in tf.nest.flatten(weights)]
    m, v = [0 * x for x in w], [0 * x for x in w]
    for t in range(1, steps + 1):
        g = tf.nest.flatten(gradient(function, tf.nest.pack_sequence_as(weights, list(map(tf.constant, w))))[0])
        for i, slope in enumerate(np.array(x) for x in g):
            m[i], v[i] = beta_1 * m[i] + (1 - beta_1) * slope, beta_2 * v[i] + (1 - beta_2) * slope**2
            m_hat, v_hat = m[i] / (1 - beta_1**t), v[i] / (1 - beta_2**t)
            w[i] = w[i] - rate * decay * w[i] - rate * m_hat / (np.sqrt(v_hat) + epsilon)
    return tf.nest.pack_sequence_as(weights, w)


@pytest.mark.parametrize("prox", [0.0, 0.5])
def test_local_steps_are_adams(data, prox):
    """With a penalty, Adam gets the gradient of both."""
    start, visit = shared(data), data.visit(1)
    objective, anchor = client_loss(data.model), tree.scale(0.5, start)
    choice = OptimizerChoice("adam", 0.8, None, 1e-3, 0.1)
    solve = local_solver(eta=0.05, steps=4, client_opt=choice, prox=prox)
    found, _ = tf.function(solve, autograph=False)(objective, start, visit, anchor)

    def whole(w):
        away = tree.subtract(w, anchor)
        return objective(w, visit.x, visit.y) + prox / 2 * tree.dot(away, away)

    expected = adam_by_hand(whole, start, 4, 0.05, beta_1=0.8, epsilon=1e-3, decay=0.1)
    assert distance(found, expected) < 1e-12 and distance(found, start) > 0.05


@pytest.mark.slow
def test_momentum_by_name_is_sgds_momentum_to_the_bit(data):
    """And 'sgd' by name is the default: tests of the methods compare that with closed forms."""
    by_name = fedavg(data.model, data.population, steps=3, client_opt="momentum")
    plain = fedavg(data.model, data.population, steps=3, momentum=0.9)
    assert identical(play(by_name, data, [(0, 2)]), play(plain, data, [(0, 2)]))
    without = play(fedavg(data.model, data.population, steps=3), data, [(0, 2)])
    no_decay = build_algorithm("fedavg", data.model, data.population, steps=3, client_weight_decay=0.0)
    assert identical(play(no_decay, data, [(0, 2)]), without)


def test_a_round_of_fedavg_with_adam(data):
    """w + sum_i q_i (w_i - w), with w_i from Adam, whose state starts anew in every visit."""
    algorithm = build_algorithm("fedavg", data.model, data.population, eta=0.05, steps=3, **ADAM)
    (first, second), _ = play(algorithm, data, cohorts=[(0, 2), (0, 2)], server=shared(data))
    number = data.population.num_examples[[0, 2]]

    def round_from(w):
        parts = []
        for i in (0, 2):
            visit = data.visit(i)

            def loss(u, visit=visit):
                return client_loss(data.model)(u, visit.x, visit.y)

            parts.append(adam_by_hand(loss, w, 3, 0.05, beta_1=0.8, epsilon=1e-3, decay=0.1))
        share = number / number.sum()
        return tree.add(tree.scale(share[0], parts[0]), tree.scale(share[1], parts[1]))

    after = round_from(shared(data))
    assert distance(first, after) < 1e-12
    assert distance(second, round_from(after)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(TAKE_IT, "fedper"))
def test_every_method_trains_with_it(name):
    """By name and with the optimizer itself; with the rate of the method. SGD gives other weights."""
    data = toy(dtype="float32")._replace(model=model_for(name))
    hyper = quick(name) | ({"momentum": 0.0} if name == "fedbabu" else {})
    rates = {"eta", "eta_h", "eta_b", "eta_p", "eta_f", "eta_g", "eta_ft"}
    hyper |= dict.fromkeys(rates & set(ALGORITHMS[name].hyperparameters), 0.02)

    def trained(**more):
        algorithm = build_algorithm(name, data.model, data.population, **hyper | more)
        path, states = play(algorithm, data, cohorts=[(0, 2)])
        return path[-1], list(states.values())

    by_name = trained(client_opt="adam", client_epsilon=1e-3)
    defaults = {rate: ALGORITHMS[name].hyperparameters[rate].default for rate in SECOND & set(hyper)}
    assert identical(trained(client_opt=adam(0.02, epsilon=1e-3), **defaults), by_name)
    assert identical(trained(client_opt=lambda rate: adam(rate, epsilon=1e-3)), by_name)
    assert distance(trained(), by_name) > 1e-4
    assert all(np.isfinite(x).all() for x in tf.nest.flatten(by_name))


def with_second_rate() -> list:
    return [(name, rate) for name in TAKE_IT for rate in sorted(SECOND & set(ALGORITHMS[name].hyperparameters))]


@pytest.mark.parametrize(("name", "rate"), slow_but(with_second_rate(), ("fedrep", "eta_b")))
def test_a_second_rate_beside_an_optimizer_object(data, name, rate):
    """0 stops its steps, as it does by name; another value than the default, which was dropped, is refused."""
    hyper = {"steps": 2, "momentum": 0.0}
    hyper = {key: value for key, value in hyper.items() if key in ALGORITHMS[name].hyperparameters}
    first = {"eta", "eta_h", "eta_g"} & set(ALGORITHMS[name].hyperparameters)

    def ended(opt, **rates):
        algorithm = build_algorithm(name, data.model, data.population, client_opt=opt, **hyper, **rates)
        (*_, server), states = play(algorithm, data, [(0, 2)] * 2)
        message = message_for(algorithm, server, data.visit(0).info)
        return server, states, algorithm.personal_model(message, states[0], data.visit(0))

    by_name = ended("adam", **dict.fromkeys(first, 0.05), **{rate: 0.0})
    assert distance(ended(adam(0.05), **{rate: 0.0}), by_name) < 1e-12
    assert distance(ended(adam(0.05)), by_name) > 1e-3
    with pytest.raises(InvalidArgument, match=f"{rate}=0.5 would have no effect.*as a name or a class"):
        ended(adam(0.05), **{rate: 0.5})


@pytest.mark.parametrize("name", slow_but(TAKE_IT, "fedrep"))
def test_a_new_client_adapts_with_it(name):
    data = toy(dtype="float32")._replace(model=model_for(name))
    hyper = quick(name) | ({"momentum": 0.0} if name == "fedbabu" else {})

    def adapted(**more):
        algorithm = build_algorithm(name, data.model, data.population, **hyper | more)
        if algorithm.adapt is None:
            pytest.skip("this method has no adaptation")
        if algorithm.adapt.predictor is not None or algorithm.adapt.message is not None:
            pytest.skip("its new clients take no such steps: none at all, or steps on an embedding")
        server = Simulation(algorithm).initialize()
        message = algorithm.message(server, 1) if algorithm.message_per_client else algorithm.message(server)
        adapt, visit = algorithm.adapt, data.visit(1)
        carry = adapt.start(message, initial_states(algorithm, data.population)[1], visit)
        for n in range(2):
            carry = adapt.epoch(carry, visit, n)
        return adapt.model(carry)

    assert distance(adapted(client_opt="adam"), adapted()) > 1e-3


def test_the_head_on_stored_features_follows_it(data):
    """FedRep's first phase: Adam on the head alone, with the gradient in closed form."""
    rates = {"eta_h": 0.05, "tau_h": 3, "tau_b": 0}
    algorithm = fedrep(data.model, data.population, client_opt="adam", **rates)
    theta, head, visit = data.model.theta(), algorithm.init_client(data.population.info(1)), data.visit(1)
    found = algorithm.client_update(theta, head, visit).state

    def loss(head):
        return client_loss(data.model)(Weights(theta, head), visit.x, visit.y)

    assert distance(found, adam_by_hand(loss, head, 3, 0.05)) < 1e-9


def test_an_optimizer_of_keras_in_a_builder(data):
    by_keras = fedavg(data.model, data.population, steps=3, client_opt=keras.optimizers.SGD(0.25, momentum=0.5))
    ours = fedavg(data.model, data.population, steps=3, client_opt=sgd(0.25, 0.5))
    assert distance(play(by_keras, data)[0], play(ours, data)[0]) < 1e-12


@pytest.mark.parametrize(
    ("name", "wrong", "why"),
    [
        ("fedavg", {"client_opt": "lion"}, "unknown client_opt 'lion'"),
        ("fedavg", {"client_opt": "adam", "momentum": 0.5}, "set momentum to 0"),
        ("fedbabu", {"client_opt": "adam"}, "momentum=0.9 belongs to client_opt='sgd'"),
        ("fedprox", {"client_opt": "adam", "implicit_prox": True}, "implicit_prox needs client_opt='sgd'"),
        ("fedper", {"client_opt": "adam", "keep_momentum": True}, "keep_momentum keeps what the option momentum makes"),
    ],
)
def test_what_does_not_fit_is_refused(data, name, wrong, why):
    with pytest.raises(ValueError, match=why):
        build_algorithm(name, data.model, data.population, **wrong)
