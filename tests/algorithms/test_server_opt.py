"""`server_opt`: the server takes a step of an optimizer with the mean of the updates (Reddi et al., algorithm 2)."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.normalized import model_for
from helpers.one_broken import build
from helpers.quick import quick
from helpers.rounds import after_rounds, nothing_arrives, play, shared
from helpers.toys import distance, identical, on_disk
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.algorithms.parts import adam, sgd
from tfpfl.algorithms.transforms import median, scheduled, screened, server_optimized, with_objective
from tfpfl.algorithms.transforms.server_optimizer import SERVER_OPTIMIZERS, Optimized, adds_mean
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.tff.process import federate
from tfpfl.models import tree

TAKE_IT = [name for name, row in ALGORITHMS.items() if not row.no_server_opt]
OPTIONS = {"server_eta": 0.1, "server_beta_1": 0.7, "server_beta_2": 0.8, "server_epsilon": 0.01}


def options_of(name) -> dict:
    """Those of `OPTIONS` that this server_opt has."""
    betas = {"sgd": 0, "momentum": 1, "adagrad": 1}.get(name, 2)
    kept = ["server_eta", *["server_beta_1", "server_beta_2"][:betas]]
    kept += ["server_epsilon"] * (name not in ("sgd", "momentum"))
    return {"server_opt": name} | {key: OPTIONS[key] for key in kept}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("server_opt") / "federation")


@pytest.mark.slow
def test_who_takes_it_and_who_says_why_not(data):
    """What the list says is what the algorithm is: with its defaults, its server adds a mean and does nothing else."""
    assert set(TAKE_IT) == {
        *("fedavg", "fedprox", "fedavg_ft", "fedprox_ft", "fedper", "fedrep", "fedbabu", "lg_fedavg", "fedrod"),
        *("ditto", "pfedme", "apfl", "per_fedavg", "layerwise", "fedala", "fedas", "fedcp", "gpfl"),
        "knn_per",
    }
    for name, row in ALGORITHMS.items():
        assert adds_mean(build_algorithm(name, model_for(name), data.population)) == (name in TAKE_IT), name
        assert name in TAKE_IT or "Use " in row.no_server_opt or "server_opt" in row.no_server_opt
        assert "server_eta" in row.hyperparameters or name not in TAKE_IT


def test_what_new_clients_get_is_the_methods_own_also_where_it_is_no_message_of_a_round(data):
    """Twice the model, say, and with a threshold beside it under another objective."""
    base = build_algorithm("fedavg", data.model, data.population, steps=1)
    base = base._replace(adapt=base.adapt._replace(message=lambda w: tree.scale(2.0, w)))
    made = server_optimized(base, server_opt="momentum")
    server = made.init_server()
    assert distance(made.adapt.message(server), tree.scale(2.0, server.own)) == 0
    tail = with_objective(base, "cvar:0.5")
    server = tail.init_server()
    found = tail.adapt.message(server)
    assert distance(found.own, tree.scale(2.0, server.own)) == 0
    assert distance(tail.adapt.start(found, (), data.visit(1)).weights, found.own) == 0


@pytest.mark.parametrize(
    ("name", "option", "why"),
    [
        ("scaffold", "server_opt", "control variates.*Use eta_g"),
        ("feddyn", "server_opt", "sum of what its clients keep"),
        ("pgfed", "server_opt", "keeps what every client sends"),
        ("pflego", "server_eta", "server_opt, with the rate rho"),
        ("local", "server_opt", "nothing is sent"),
        ("fedsgd", "server_eta", "Use fedavg with steps=1 and eta=1"),
    ],
)
def test_a_method_that_cannot_take_it_says_why_and_what_to_use(data, name, option, why):
    with pytest.raises(ValueError, match=f"{name} has no hyperparameter {option}: .*{why}"):
        build_algorithm(name, data.model, data.population, **{option: "adam"})


@pytest.mark.parametrize(
    ("name", "hyper", "why"),
    [
        ("scaffold", {}, "keeps a sum of what its clients keep"),
        ("fedamp", {}, "every client's own update"),
        ("pfedme", {"beta": 0.5}, "a rate, an optimizer or a rule of its own"),
        ("lg_fedavg", {"pretrain_rounds": 1}, "a rate, an optimizer or a rule of its own"),
        ("pflego", {}, "'sum' of the updates"),
    ],
)
def test_the_transform_refuses_a_server_that_does_something_else(data, name, hyper, why):
    algorithm = build_algorithm(name, data.model, data.population, **hyper)
    with pytest.raises(ValueError, match=why):
        server_optimized(algorithm, server_opt="adam")


def test_a_schedule_goes_around_it(data):
    algorithm = build_algorithm("fedavg", data.model, data.population)
    with pytest.raises(ValueError, match=r"scheduled\(server_optimized\(\.\.\.\)\), not the other way round"):
        server_optimized(scheduled(algorithm, "cosine:0:20"), server_opt="adam")
    scheduled(server_optimized(algorithm, server_opt="adam"), "cosine:0:20")


def by_hand(name, w, deltas, eta, beta_1=0.9, beta_2=0.99, tau=0.001):
    """Algorithm 2 of Reddi et al. in NumPy: the weights after every round."""
    m, v, found = 0 * w, 0 * w + tau**2, []
    for delta in deltas:
        if name == "sgd":
            w = w + eta * delta
        elif name == "momentum":
            m = beta_1 * m + delta
            w = w + eta * m
        else:
            m = beta_1 * m + (1 - beta_1) * delta
            v = {
                "adagrad": v + delta**2,
                "yogi": v - (1 - beta_2) * delta**2 * np.sign(v - delta**2),
                "adam": beta_2 * v + (1 - beta_2) * delta**2,
            }[name]
            w = w + eta * m / (np.sqrt(v) + tau)
        found.append(w)
    return found


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
@pytest.mark.parametrize("given", ["options", "defaults"])
def test_the_servers_steps_are_those_of_the_paper(data, name, given):
    """The clients do nothing that depends on the server's weights: they send numbers of their own."""
    base = build_algorithm("fedavg", data.model, data.population)
    sent = [tree.scale(0.1 * (t + 1) * (-1) ** t, shared(data, seed=t)) for t in range(4)]
    options = options_of(name) if given == "options" else {"server_opt": name, "server_eta": 0.1}
    algorithm = server_optimized(base, **options)
    server, found = algorithm.init_server(), []
    start = tree.to_vector(server.own).numpy()
    for delta in sent:
        server = algorithm.step(server, delta, tf.constant(1.0, tf.float64))
        found.append(tree.to_vector(server.own).numpy())
    rates = {} if given == "options" else {"beta_1": 0.0} if name == "adagrad" else {"beta_1": 0.9}
    if given == "options":
        rates = {"beta_1": 0.7, "beta_2": 0.8, "tau": 0.01}
    expected = by_hand(name, start, [tree.to_vector(d).numpy() for d in sent], 0.1, **rates)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(TAKE_IT, "fedper"))
def test_plain_sgd_with_rate_1_is_the_method_to_the_bit(data, name):
    plain = play(build_algorithm(name, data.model, data.population, **quick(name)), data)
    same = build_algorithm(name, data.model, data.population, server_opt="sgd", server_eta=1.0, **quick(name))
    assert identical(play(same, data), plain)
    half = play(build_algorithm(name, data.model, data.population, server_eta=0.5, **quick(name)), data, [(0, 2)])
    full = play(build_algorithm(name, data.model, data.population, **quick(name)), data, [(0, 2)])
    before = tree.to_vector(Simulation(same).initialize())
    moved = 2 * (tree.to_vector(half[0][0].own) - before)  # half a step in the first round
    assert distance(moved, tree.to_vector(full[0][0]) - before) < 1e-12


def test_a_round_in_which_nothing_arrives_changes_nothing(data):
    algorithm = build_algorithm("fedavg", data.model, data.population, server_opt="adam", **quick("fedavg"))
    path, _ = play(algorithm, data)
    assert identical(nothing_arrives(algorithm, data, path[-1]), path[-1])


def rounds(engine, algorithm):
    return after_rounds(engine, algorithm, [[0, 2, 3], [1, 2, 4]])


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(SERVER_OPTIMIZERS[1:], "yogi"))
def test_both_engines_agree(tff, federation, name):
    algorithm = build("fedper", federation, **options_of(name))
    server, states = rounds(Simulation(algorithm, federation), algorithm)
    assert isinstance(server, Optimized)
    assert distance(rounds(federate(algorithm, federation), algorithm), (server, states)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("grouping", slow_but(["one_by_one", "stacked"], "stacked"))
def test_every_grouping_agrees(federation, grouping):
    """With an optimizer on both sides; FedAvg's clients cannot be fused."""
    algorithm = build("fedavg", federation, **options_of("adam"), client_opt="adam", client_epsilon=0.01)
    expected = rounds(Simulation(algorithm, federation), algorithm)
    found = rounds(Simulation(algorithm, federation, grouping=grouping), algorithm)
    assert distance(found, expected) < 1e-5


@pytest.mark.slow
def test_other_transforms_stand_around_it(federation):
    algorithm = build("fedavg", federation, **options_of("adam"))
    plain = rounds(Simulation(algorithm, federation), algorithm)
    assert distance(rounds(Simulation(screened(algorithm), federation), algorithm), plain) < 1e-6
    robust = rounds(Simulation(median(algorithm), federation), algorithm)
    assert distance(robust, plain) > 1e-3 and isinstance(robust[0], Optimized)


@pytest.mark.slow
def test_an_optimizer_of_python(data):
    """By name and as an object: minus the mean is the gradient."""
    hyper = quick("fedavg")

    def trained(**more):
        return play(build_algorithm("fedavg", data.model, data.population, **hyper | more), data)[0][-1].own

    by_name = trained(server_opt="momentum", server_eta=0.5)
    assert distance(trained(server_opt=keras.optimizers.SGD(0.5, momentum=0.9)), by_name) < 1e-6
    assert identical(trained(server_opt=sgd(0.5, 0.9)), by_name)
    assert identical(trained(server_opt=lambda rate: sgd(rate, 0.9), server_eta=0.5), by_name)
    assert distance(trained(server_opt=adam(0.5)), by_name) > 1e-2


@pytest.mark.slow
def test_an_optimizer_of_tff(tff, federation):
    algorithm = build("fedavg", federation, server_opt=tff.learning.optimizers.build_adam(0.05, epsilon=0.01))
    ours = build("fedavg", federation, server_opt=adam(0.05, epsilon=0.01, epsilon_hat=True))
    found = rounds(federate(algorithm, federation), algorithm)
    assert distance(found[0].own, rounds(Simulation(ours, federation), ours)[0].own) < 1e-5


@pytest.mark.slow
def test_pflego_takes_an_optimizer_too(data):
    hyper = quick("pflego")
    by_name = play(build_algorithm("pflego", data.model, data.population, **hyper | {"server_opt": "momentum"}), data)
    given = build_algorithm("pflego", data.model, data.population, **hyper | {"server_opt": sgd(hyper["rho"], 0.9)})
    assert identical(play(given, data), by_name)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"server_opt": "lion"}, "unknown server_opt 'lion'"),
        ({"server_opt": sgd(0.1), "server_eta": 0.5}, "server_eta=0.5 has no effect"),
        ({"server_beta_2": 0.5}, "server_beta_2=0.5 has no effect with server_opt='sgd'"),
        ({"server_opt": "adagrad", "server_beta_2": 0.5}, "has no effect with server_opt='adagrad'"),
        ({"server_opt": "adam", "server_beta_1": 1.0}, "server_beta_1 must be below 1"),
        ({"server_opt": "adam", "server_epsilon": 0.0}, "server_epsilon must be positive"),
        ({"server_opt": "adam", "server_eta": -1.0}, "server_eta must be a finite number"),
        ({"server_opt": "adam", "server_eta": float("nan")}, "server_eta must be a finite number"),
    ],
)
def test_bad_options(data, wrong, why):
    with pytest.raises(ValueError, match=why):
        build_algorithm("fedavg", data.model, data.population, **wrong)
