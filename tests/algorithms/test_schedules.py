"""Schedules of learning rates: their formulas, loops written by hand, where a rate is divided out, and both engines."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.normalized import model_for
from helpers.one_broken import build
from helpers.quick import quick
from helpers.rounds import by_hand, loss_of, play, shared
from helpers.toys import client_loss, distance, gradient, identical, initial_states, objective, on_disk, toy
from helpers.toys import visits as visits_of
from tfpfl.algorithms import ALGORITHMS, build_algorithm, fedamp, fedavg, fedper, pfedhn, pflego, scaffold
from tfpfl.algorithms.contract import ClientOutput
from tfpfl.algorithms.parts import adam, local_solver, rate, sgd
from tfpfl.algorithms.parts.schedules import check_schedule, factor_of, with_end
from tfpfl.algorithms.transforms import at_round, scheduled, screened, server_optimized
from tfpfl.algorithms.transforms.schedule import Scheduled, check_follows
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.tff.process import federate
from tfpfl.engines.visit import server_step
from tfpfl.models import tree
from tfpfl.models.losses import client_loss as loss_on
from tfpfl.models.weights import Weights

EVERYONE = (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("schedules") / "federation")


def test_the_formulas():
    t = np.arange(1, 13)
    expected = {
        "constant": np.ones(12),
        "cosine": (1 + np.cos(np.pi * (t - 1) / 11)) / 2,
        "cosine:0.1:9": 0.1 + 0.9 * (1 + np.cos(np.pi * np.minimum(t - 1, 8) / 8)) / 2,
        "cosine:0.5:1": np.where(t == 1, 1, 0.5),
        "step:3,5:0.1": np.where(t <= 3, 1, np.where(t <= 5, 0.1, 0.01)),
        "step:4:0": t <= 4,
        "inverse_sqrt": t**-0.5,
        "inverse_sqrt:10": (1 + (t - 1) / 10) ** -0.5,
        "inverse:10": 1 / (1 + (t - 1) / 10),
    }
    for text, wanted in expected.items():
        found = [float(factor_of(text, rounds=12)(tf.constant(n, tf.float64))) for n in t]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-15, err_msg=text)
    assert with_end("cosine", 12) == "cosine:0.0:12" and with_end("cosine:0.1:9", 12) == "cosine:0.1:9"
    assert with_end("constant", 12) is None and with_end("inverse:10", 12) == "inverse:10"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cosin", "did you mean 'cosine'"),
        ("", "unknown schedule ''"),
        ("constant:1", "is written constant"),
        ("cosine:x", "cosine:F:T"),
        ("cosine:-0.1", "cosine:F:T"),
        ("cosine:0:0", "cosine:F:T"),
        ("cosine:nan", "cosine:F:T"),
        ("step", "such as step:30,60:0.1"),
        ("step:30", "such as step:30,60:0.1"),
        ("step:60,30:0.1", "such as step:30,60:0.1"),
        ("step:0:0.1", "such as step:30,60:0.1"),
        ("inverse:0", "T0 > 0"),
        ("inverse_sqrt:1:2", "T0 > 0"),
    ],
)
def test_a_text_that_is_none_says_how_it_is_written(text, why):
    with pytest.raises(ValueError, match=why):
        check_schedule(text, (), 10, ["eta"])


def test_names_of_rates_are_checked(data):
    with pytest.raises(ValueError, match="needs its last round"):
        factor_of("cosine")
    with pytest.raises(ValueError, match="there is none: found eta"):
        check_schedule(None, ("eta",), 10, ["eta"])
    with pytest.raises(ValueError, match="did you mean 'eta'"):
        check_schedule("cosine", ("etta",), 10, ["eta", "lam"])
    ditto = build_algorithm("ditto", data.model, data.population)
    check_follows(ditto, ("eta", "eta_p"))
    with pytest.raises(ValueError, match="'lam'; there are eta, eta_p"):
        check_follows(ditto, ("lam",))


@pytest.mark.parametrize("momentum", slow_but([0.0, 0.5], 0.5))
def test_fedavg_of_one_client_is_a_loop_with_the_rate_of_each_round(data, momentum):
    algorithm = fedavg(data.model, data.population, eta=0.3, steps=3, momentum=momentum)
    path, _ = play(scheduled(algorithm, "step:1,3:0.4"), data, [(2,)] * 4)
    w = algorithm.init_server()
    for after, times in zip(path, (1, 0.4, 0.4, 0.16), strict=True):
        w = by_hand(loss_of(data, 2), w, 0.3 * times, 3, momentum)
        assert distance(after.own, w) < 1e-12


SERVERS = {  # name -> (server_opt, whether it follows a schedule that names no rates)
    "momentum": (lambda: "momentum", False),
    "sgd of tfpfl": (lambda: sgd(0.5, 0.9), False),
    "sgd of Keras": (lambda: keras.optimizers.SGD(0.5, weight_decay=0.1), False),
    "a function that makes sgd": (lambda: sgd, False),
    "adam": (lambda: "adam", True),
    "adam of tfpfl": (lambda: adam(0.05), True),
    "adam of Keras": (lambda: keras.optimizers.Adam(0.05), True),
    "a function that makes adam": (lambda: adam, True),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_follows_if_shorter_updates_do_not_shorten_its_steps(data, name):
    """By name, and as an object: one of an adaptive optimizer stayed at its full rate."""
    make, follows = SERVERS[name]
    algorithm = server_optimized(fedavg(data.model, data.population), server_opt=make())
    halved, sent, weight = scheduled(algorithm, lambda t: 0.5 * t), shared(data, seed=3), tf.constant(1.0, tf.float64)
    start = algorithm.init_server()
    step = tree.subtract(algorithm.step(start, sent, weight).own, start.own)
    found = tree.subtract(halved.step(halved.init_server(), sent, weight).own.own, start.own)
    assert (
        distance(found, tree.scale(0.5 if follows else 1.0, step)) < 1e-12
        and distance(step, tree.zeros_like(step)) > 1e-2
    )


@pytest.mark.slow
@pytest.mark.parametrize("client_opt", slow_but(["adam", "adamw"], "adamw"))
def test_other_optimizers_take_a_part_of_their_step(data, client_opt):
    """In the first round the rate is what the method's would be."""
    rounds = [EVERYONE]
    short = fedavg(data.model, data.population, eta=0.03, steps=2, client_opt=client_opt)
    long = fedavg(data.model, data.population, eta=0.1, steps=2, client_opt=client_opt)
    found, _ = play(scheduled(long, lambda t: 0.3 * t), data, rounds)
    expected, _ = play(short, data, rounds)
    assert distance(found[0].own, expected[0]) < 1e-12


def test_a_kept_momentum_is_of_gradients(data):
    """v <- m v + g and w <- w - eta_t v over the rounds: the old rates are not in v."""
    algorithm = fedper(data.model, data.population, eta=0.3, steps=1, momentum=0.5, keep_momentum=True)
    path, states = play(scheduled(algorithm, "inverse:1"), data, [(1,)] * 3)
    theta, head = data.model.theta(), data.model.head(data.population.info(1))
    weights = Weights(theta, head)
    velocity = tree.zeros_like(weights)
    for t in range(1, 4):
        velocity = tree.add_scaled(gradient(loss_of(data, 1), weights)[0], 0.5, velocity)
        weights = tree.add_scaled(weights, -0.3 / t, velocity)
    assert distance(path[-1].own, weights.theta) < 1e-12 and distance(states[1].head, weights.head) < 1e-12


@pytest.mark.parametrize("of", slow_but(["", "beta"], ""))
def test_pflego_with_tau_1_is_gradient_descent_with_rho_t(data, of):
    """Equations (3) to (5) with rho_t = 0.4 / t. A schedule of beta alone changes nothing: there is no inner step."""
    algorithm = pflego(data.model, data.population, tau=1, rho=0.4, rule="exact", server_opt="sgd")
    path, states = play(scheduled(algorithm, "inverse", of=[of] if of else []), data, [EVERYONE] * 3)
    theta, heads = data.model.theta(), {i: data.model.head(data.population.info(i)) for i in data.ids}
    for t in range(1, 4):
        d_theta, d_heads = gradient(lambda theta, heads: objective(data, theta, heads), theta, heads)
        step = -0.4 / (1 if of else t)
        theta, heads = tree.add_scaled(theta, step, d_theta), tree.add_scaled(heads, step, d_heads)
    assert distance(path[-1].own.theta, theta) < 1e-12 and distance(states, heads) < 1e-12


RATES = {"beta": (0.02, 0.1), "rho": (0.2, 0.01), "": (0.02, 0.01)}


@pytest.mark.slow
@pytest.mark.parametrize("of", slow_but(RATES, "rho"))
def test_pflego_schedules_beta_and_rho_apart(data, of):
    hyper = {"tau": 3, "rule": "exact", "server_opt": "sgd"}
    algorithm = pflego(data.model, data.population, beta=0.2, rho=0.1, **hyper)
    beta, rho = RATES[of]
    found = play(scheduled(algorithm, lambda t: 0.1 * t, of=[of] if of else []), data, [EVERYONE])
    expected = play(pflego(data.model, data.population, beta=beta, rho=rho, **hyper), data, [EVERYONE])
    assert distance(found[0][0].own, expected[0][0]) < 1e-12 and distance(found[1], expected[1]) < 1e-12


# Methods whose clients do not only take steps: what changes after rates have fallen to 0, and why.
NOT_STILL = {
    "feddyn": "its server subtracts h / a in every round",
    "fedbn": "the statistics of the normalization follow the examples",
    "pfedme": "theta_i is computed anew from w, by a solver whose rate is not of training",
    "layerwise": "p_i is mixed with w in every visit",
    "fedala": "its clients start from a mixture of their model and w, and send what this moves",
    "fedfomo": "theta_i is mixed with the models of others",
    "heurfedamp": "u_i is mixed with the models of others, whose weights have no rate",
    "fedas": "a client's model is where its work from theta ends: at theta",
    "pgfed": "a client's model is where its work from w ends: at w",
    "pgfedmo": "a client's model is where its work from w ends: at w",
    "pfedhn": "its server's momentum and weight decay go on",
    "fedpac": "its server combines the heads of the cohort in every round",
    "fedcp": "the global head goes half of the way to the clients' heads in every round",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(ALGORITHMS, "pflego", ci=("fedavg", "scaffold", "fedamp", "pfedme")))
def test_with_rates_0_nothing_moves(data, name):
    data, more = data._replace(model=model_for(name, "float64")), {"option": "II"} if name == "scaffold" else {}
    algorithm = build_algorithm(name, data.model, data.population, **quick(name), **more)
    moving = scheduled(algorithm, "step:2:0")
    path, after_2 = play(moving, data, [EVERYONE] * 2)
    path += play(moving, data, [EVERYONE] * 2, path[-1], after_2, first=3)[0]
    after_4 = play(moving, data, [EVERYONE] * 2, path[1], after_2, first=3)[1]

    def models(server, states):
        return [
            moving.personal_model(
                moving.message(server, *([tf.constant(i)] if moving.message_per_client else [])),
                states[i],
                data.visit(i, 9),
            )
            for i in data.ids
        ]

    before, after = models(path[1], after_2), models(path[3], after_4)
    started = models(moving.init_server(), initial_states(moving, data.population))
    assert distance(before, started) > 1e-3  # the first two rounds moved them
    plain, plain_states = play(algorithm, data, [EVERYONE] * 2)
    assert distance([path[1].own, after_2], [plain[1], plain_states]) < 1e-12
    if name not in NOT_STILL:
        assert distance(before, after) < 1e-12
    elif name == "feddyn":
        a = ALGORITHMS[name].hyperparameters["dyn"].default
        w = tree.add_scaled(path[1].own.w, -2 / a, path[1].own.h)
        assert distance(path[3].own.w, w) < 1e-12 and distance(path[3].own.h, path[1].own.h) < 1e-12
        assert distance(after_2, after_4) < 1e-12
    elif name == "fedfomo":
        assert all(distance(s.theta, s.old) < 1e-12 for s in after_4.values())
    elif name.startswith("pgfed"):
        assert identical(path[3].own.w, path[1].own.w)
        assert all(distance(s.v, path[1].own.w) == 0 for s in after_4.values())
    elif name == "fedbn":
        assert distance(path[3].own, path[1].own) < 1e-12
        assert 0 < distance(before, after) < distance(before, started)
    elif name == "pfedhn":
        hyper, velocity = path[1].own
        for _ in range(2):
            velocity = tree.add_scaled(tree.scale(0.9, velocity), 0.001, hyper)
            hyper = tree.add_scaled(hyper, -quick(name)["alpha"], velocity)
        assert distance(path[3].own.hyper, hyper) < 1e-12
    elif name == "fedpac":
        assert identical(path[3].own.theta, path[1].own.theta)
    elif name == "fedcp":
        assert identical(
            [path[3].own.theta, path[3].own.policy, after_4], [path[1].own.theta, path[1].own.policy, after_2]
        )
        sizes = data.population.num_examples
        mean = tree.zeros_like(after_2[0])
        for i in data.ids:
            mean = tree.add_scaled(mean, sizes[i] / sizes.sum(), after_2[i])
        left = tree.scale(0.25, tree.subtract(path[1].own.head, mean))
        assert distance(tree.subtract(path[3].own.head, mean), left) < 1e-12
    elif name not in ("heurfedamp", "fedala"):
        assert identical(path[3].own, path[1].own)


@pytest.mark.parametrize("named", slow_but(["alpha", "embed_alpha"], "alpha"))
def test_the_rates_of_pfedhns_server_follow_if_they_are_named(data, named):
    rates = {"alpha": 0.2, "embed_alpha": 0.1}
    how = {"hidden_dim": 5, "n_hidden": 0, "steps": 2, "eta": 0.2}
    algorithm = pfedhn(data.model, data.population, **how, **rates)
    check_follows(algorithm, [named])
    found, _ = play(scheduled(algorithm, lambda t: 0.25 * t, of=[named]), data, [(0, 3)])
    slower = pfedhn(data.model, data.population, **how, **rates | {named: rates[named] / 4})
    assert distance(found[0].own, play(slower, data, [(0, 3)])[0][0]) < 1e-12


@pytest.mark.parametrize("option", slow_but(["I", "II"], "II"))
def test_scaffolds_control_variates_divide_by_the_rate_that_was_used(data, option):
    """c_i+ = c_i - c + (x - y_i) / (K eta_t), with option I the gradient at x."""
    algorithm = scaffold(data.model, data.population, eta=0.2, steps=3, option=option)
    (server, *_), states = play(algorithm, data, [(0, 3)])
    server = Scheduled(server, tf.constant(2))
    output = scheduled(algorithm, "inverse:1").client_update(server, states[3], data.visit(3, 2))
    x, c = server.own
    expected = tree.add_scaled(tree.subtract(states[3].c, c), -1 / (3 * 0.1), output.update.dy)
    if option == "I":
        expected = gradient(loss_of(data, 3), x)[0]
    assert distance(output.state.c, expected) < 1e-12 and distance(output.update.dy, tree.zeros_like(x)) > 1e-2


@pytest.mark.slow
def test_fedamps_alpha_k(data):
    """Both places of alpha_k: the weights of the message, and the pull lambda / alpha_k of the client's problem."""
    toy_3 = toy(classes=(3,) * 5)
    work = {"steps": 2, "sigma": 4.0, "lam": 0.3}
    slow = fedamp(toy_3.model, toy_3.population, alpha=0.2, eta=0.05, **work)
    fast = scheduled(fedamp(toy_3.model, toy_3.population, alpha=0.4, eta=0.1, **work), "step:1:0.5")
    (server,), states = play(fast, toy_3, [EVERYONE])
    own = server.own._replace(attention=slow.step(server.own, _nobody(server.own), 1.0).attention)
    for i in (0, 3):
        found, expected = fast.message(server, tf.constant(i)), slow.message(own, tf.constant(i))
        assert distance(found.own, expected) < 1e-12 and distance(expected.u, states[i]) > 1e-3
        outputs = [a.client_update(m, states[i], toy_3.visit(i, 2)) for a, m in ((fast, found), (slow, expected))]
        assert distance(outputs[0].update, outputs[1].update) < 1e-12


def _nobody(server):
    from tfpfl.algorithms.contract import Rows

    return Rows(tf.zeros([0], tf.int32), tf.zeros([0, server.models.shape[1]], server.models.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("grouping", slow_but(["one_by_one", "fused"], "fused"))
def test_bytes_are_those_of_the_method_and_no_graph_is_made_anew(federation, grouping):
    algorithm = build("pflego", federation)
    engine = Simulation(scheduled(algorithm, "cosine:0:9"), federation, grouping=grouping)
    plain = Simulation(algorithm, federation, grouping=grouping)
    states = list(initial_states(algorithm, algorithm.population).values())
    found, expected = engine.initialize(), plain.initialize()
    for t in (1, 2, 3):
        visits = visits_of(algorithm, EVERYONE, t)
        out, bare = engine.next(at_round(found, t), states, visits), plain.next(expected, states, visits)
        for name in ("bytes_down", "bytes_up"):
            assert [int(m[name]) for m in out.client_metrics] == [int(m[name]) for m in bare.client_metrics]
        found, expected = out.server, bare.server
    assert int(found.round_num) == 4 and engine._finish.experimental_get_tracing_count() == 1


def test_a_round_in_which_nothing_arrives(data):
    """The engine's round counts: `at_round` says which it is, also within a transform's state and an aggregator's."""
    algorithm = scheduled(fedavg(data.model, data.population, eta=0.3, steps=1), "step:1:0")
    server = algorithm.init_server()
    none = server_step(algorithm)(server, tree.zeros_like(server.own), tf.constant(0.0, tf.float64))
    assert identical(none, server)
    moved = play(algorithm, data, [(0,)], at_round(none, 2))[0][0]
    assert identical(moved.own, server.own) and int(moved.round_num) == 3
    assert distance(play(algorithm, data, [(0,)], none)[0][0].own, server.own) > 1e-3
    assert at_round(server.own, 2) is server.own
    assert int(play(screened(algorithm), data, [(0,)], at_round(server, 5))[0][0].round_num) == 6


ENGINES = {
    "pflego": {},
    "fedamp": {},  # a message for every client
    "scaffold": {"batch_size": 4},
    "fedper": {"client_opt": "adam", "server_opt": "adam", "server_eta": 0.02},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(ENGINES, "pflego"))
def test_both_engines_and_all_groupings_agree(tff, federation, name):
    algorithm = build(name, federation, **{k: v for k, v in ENGINES[name].items()})
    algorithm = scheduled(algorithm, "inverse:1")

    def rounds(engine):
        server, states = engine.initialize(), initial_states(algorithm, algorithm.population)
        for t, ids in ((1, [0, 2, 3]), (2, [1, 2, 4]), (4, [0, 1, 2])):
            output = engine.next(at_round(server, t), [states[i] for i in ids], visits_of(algorithm, ids, t))
            server, states = output.server, states | dict(zip(ids, output.client_states, strict=True))
        return server, states

    expected = rounds(Simulation(algorithm, federation, grouping="one_by_one"))
    assert isinstance(expected[0], Scheduled) and int(expected[0].round_num) == 5
    assert distance(rounds(Simulation(algorithm, federation)), expected) < 1e-5
    assert distance(rounds(federate(algorithm, federation)), expected) < 1e-5
    if name != "pflego":
        assert distance(rounds(Simulation(algorithm, federation, grouping="stacked")), expected) < 1e-5


def test_a_method_of_your_own(data):
    """Parts follow a schedule by themselves; a rate that is written out does so with `rate`, and else is refused."""
    base, eta = fedavg(data.model, data.population), 0.2
    solve = local_solver(eta=eta, steps=2)

    def by_parts(w, state, visit):
        w_i, loss = solve(loss_on(data.model), w, visit)
        return ClientOutput(tree.subtract(w_i, w), tf.ones([], tf.float64), state, {"loss": loss})

    def written_out(of_round):
        def client_update(w, state, visit):
            def loss(w):
                return client_loss(data, int(visit.info.client_id), w.theta, w.head)

            (g,) = gradient(loss, w)
            times = rate("eta", eta) if of_round else eta
            return ClientOutput(tree.scale(-times, g), tf.ones([], tf.float64), state, {"loss": loss(w)})

        return base._replace(client_update=client_update)

    check_follows(base._replace(client_update=by_parts))
    check_follows(base._replace(client_update=by_parts), ("eta",))
    with pytest.raises(ValueError, match='no learning rate.*write rate\\("eta", eta\\)'):
        check_follows(_traceable(written_out(False), data))
    check_follows(_traceable(written_out(True), data))


def _traceable(algorithm, data):
    """The algorithm on client 0, whose id a traced function cannot read."""
    own = algorithm.client_update
    info = data.population.info(0, data.model.dtype)
    return algorithm._replace(client_update=lambda w, s, visit: own(w, s, visit._replace(info=info)))
