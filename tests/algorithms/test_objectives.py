"""Objectives that care for large losses: GradientTape on the whole objective, limits, and both engines."""

from itertools import combinations

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers import small_runs as runs
from helpers.marks import slow_but
from helpers.one_broken import build
from helpers.quick import quick
from helpers.rounds import after_rounds, play
from helpers.toys import backbone, client_loss, distance, gradient, initial_states, on_disk, toy
from helpers.toys import visits as visits_of
from tfpfl.algorithms import ALGORITHMS, build_algorithm, fedavg, fedrecon, fedsgd, pflego
from tfpfl.algorithms.parts.objectives import parsed_objective
from tfpfl.algorithms.transforms import scheduled, screened, with_objective
from tfpfl.algorithms.transforms.objective import WithTail, quantile
from tfpfl.algorithms.transforms.schedule import check_follows
from tfpfl.data.population import Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.tff.process import federate
from tfpfl.models import SplitModel, passes, tree
from tfpfl.models.losses import client_loss as losses_of

EVERYONE = (0, 1, 2, 3, 4)
TAKE_IT = {  # method -> what its clients send
    **dict.fromkeys(("pflego", "fedsgd", "fedrecon"), "gradient"),
    **dict.fromkeys(("fedavg", "fedprox", "fedavg_ft", "fedprox_ft", "fedper", "fedrep", "fedbabu"), "update"),
    **dict.fromkeys(("lg_fedavg", "ditto", "apfl", "layerwise", "fedala", "knn_per"), "update"),
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("objectives") / "federation")


def losses(data, theta, heads) -> dict:
    return {i: client_loss(data, i, theta, heads[i]) for i in data.ids}


def fair(data, theta, heads, q):
    """sum_i alpha_i l_i^(q + 1) / (q + 1), from its definition."""
    alpha = data.population.num_examples / data.population.num_examples.sum()
    return tf.add_n([alpha[i] * l_i ** (q + 1) / (q + 1) for i, l_i in losses(data, theta, heads).items()])


def tail(data, theta, heads, p, t):
    """t + (1 / p) sum_i alpha_i max(l_i - t, 0), from its definition."""
    alpha = data.population.num_examples / data.population.num_examples.sum()
    return t + tf.add_n([alpha[i] * tf.nn.relu(l_i - t) / p for i, l_i in losses(data, theta, heads).items()])


def start(data):
    return data.model.theta(), {i: data.model.head(data.population.info(i)) for i in data.ids}


def descend(data, function, theta, heads, rate):
    d_theta, d_heads = gradient(lambda theta, heads: function(data, theta, heads), theta, heads)
    return tree.add_scaled(theta, -rate, d_theta), tree.add_scaled(heads, -rate, d_heads)


EXACT = {"tau": 1, "rho": 0.4, "rule": "exact", "server_opt": "sgd"}


@pytest.mark.parametrize("q", slow_but([0.5, 2.0], 2.0))
def test_pflego_with_fair_descends_the_objective_of_q_ffl(data, q):
    """On backbone and heads, with everybody, one step a round: to 1e-12."""
    algorithm = with_objective(pflego(data.model, data.population, **EXACT), f"fair:{q}", sends="gradient")
    path, states = play(algorithm, data, [EVERYONE] * 3)
    theta, heads = start(data)
    for _ in range(3):
        theta, heads = descend(data, lambda *a: fair(*a, q), theta, heads, 0.4)
    assert distance(path[-1].theta, theta) < 1e-12 and distance(states, heads) < 1e-12


@pytest.mark.parametrize("name", ["fair:1.5", pytest.param("cvar:0.4", marks=pytest.mark.slow)])
def test_inverse_probabilities_stay(name):
    """The mean of one round over all cohorts of two is the step with everybody."""
    some, everybody = toy(sampling=Sampling("fixed", 0.4)), toy()

    def steps(data, cohorts):
        algorithm = with_objective(pflego(data.model, data.population, **EXACT), name, sends="gradient")
        engine, states = Simulation(algorithm), initial_states(algorithm, data.population)
        server = engine.initialize()
        if isinstance(server, WithTail):
            server = server._replace(t=tf.constant(0.9, tf.float64), known=tf.constant(True))
        for cohort in cohorts:
            out = engine.next(server, [states[i] for i in cohort], [data.visit(i) for i in cohort])
            own = out.server.own if isinstance(server, WithTail) else out.server
            yield tree.to_vector(own.theta).numpy()

    expected = next(steps(everybody, [EVERYONE]))
    found = list(steps(some, combinations(range(5), 2)))
    assert len(found) == 10 and np.ptp(found, axis=0).max() > 1e-3
    np.testing.assert_allclose(np.mean(found, axis=0), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("t", [0.8, 1.1])
def test_pflego_with_a_fixed_threshold_descends_the_conditional_value_at_risk(data, t):
    algorithm = with_objective(pflego(data.model, data.population, **EXACT), "cvar:0.3", sends="gradient")
    server = algorithm.init_server()._replace(t=tf.constant(t, tf.float64), known=tf.constant(True))
    theta, heads = start(data)
    above = [float(x) > t for x in losses(data, theta, heads).values()]
    (after,), states = play(algorithm, data, [EVERYONE], server)
    new_theta, new_heads = descend(data, lambda *a: tail(*a, 0.3, t), theta, heads, 0.4)
    assert any(above) and not all(above)
    assert distance(after.own.theta, new_theta) < 1e-12 and distance(states, new_heads) < 1e-12
    alpha = data.population.num_examples / data.population.num_examples.sum()
    found = np.array([float(x) for x in losses(data, theta, heads).values()])
    assert float(after.t) in found and alpha[found > float(after.t)].sum() <= 0.3
    assert alpha[found >= float(after.t)].sum() > 0.3


def test_the_first_round_of_cvar_is_that_of_the_mean(data):
    algorithm = pflego(data.model, data.population, **EXACT)
    plain, plain_states = play(algorithm, data, [EVERYONE])
    found, states = play(with_objective(algorithm, "cvar:0.3", sends="gradient"), data, [EVERYONE])
    assert distance(found[0].own, plain[0]) < 1e-15 and distance(states, plain_states) < 1e-15


def test_a_quantile_with_weights():
    values, weights = tf.constant([3.0, 1.0, 2.0, 4.0]), tf.constant([0.2, 0.3, 0.3, 0.2])
    shares = {0.0: 1, 0.3: 1, 0.31: 2, 0.6: 2, 0.7: 3, 0.8: 3, 0.9: 4, 1.0: 4}
    assert {s: int(quantile(values, weights, s)) for s in shares} == shares


@pytest.mark.parametrize("name", slow_but(["fedsgd", "fedrecon"], "fedsgd"))
def test_other_methods_that_send_gradients(data, name):
    """The server's step is that with l_i^q times the gradient; FedSGD's is a step on q-FFL's objective."""
    if name == "fedsgd":
        algorithm = with_objective(fedsgd(data.model, data.population, eta=0.3), "fair:2", sends="gradient")
        (after,), _ = play(algorithm, data, [EVERYONE])
        w = algorithm.init_server()
        step = gradient(lambda w: fair(data, w.theta, dict.fromkeys(data.ids, w.head), 2.0), w)[0]
        assert distance(after, tree.add_scaled(w, -0.3, step)) < 1e-12
    else:
        plain = fedrecon(data.model, data.population, tau=3, beta=0.1, server_opt="sgd", rho=0.3)
        algorithm = with_objective(plain, "fair:2", sends="gradient")
        (after,), states = play(algorithm, data, [(2,)])
        (base,), same = play(plain, data, [(2,)])
        theta = data.model.theta()
        l_2 = float(client_loss(data, 2, theta, same[2]))
        moved, base_moved = tree.subtract(after.theta, theta), tree.subtract(base.theta, theta)
        assert distance(states, same) == 0 and distance(moved, tree.scale(l_2**2, base_moved)) < 1e-12


@pytest.mark.parametrize("name", slow_but([k for k, sends in TAKE_IT.items() if sends == "update"], "fedper"))
def test_updates_are_averaged_with_the_losses_before_the_visit(data, name):
    """fair: q_i l_i^q, normalized. cvar: the updates of clients above t, by 1 / p. What clients keep is the same."""
    plain = build_algorithm(name, data.model, data.population, **quick(name))
    fair_one, tail_one = with_objective(plain, "fair:2"), with_objective(plain, "cvar:0.3")
    server, message = plain.init_server(), plain.message(plain.init_server())
    states, cohort = initial_states(plain, data.population), (0, 2, 3)
    out = {i: plain.client_update(message, states[i], data.visit(i)) for i in cohort}
    start = plain.global_model or (lambda message: plain.personal_model(message, states[i], data.visit(i)))
    found = {}
    for i in cohort:
        w = start(message)
        found[i] = float(client_loss(data, i, w.theta, w.head))
    weights = {i: float(out[i].weight) * found[i] ** 2 for i in cohort}
    mean = tree.scale(0.0, out[0].update)
    for i in cohort:
        mean = tree.add_scaled(mean, weights[i] / sum(weights.values()), out[i].update)
    (after,), kept = play(fair_one, data, [cohort])
    assert distance(after, plain.step(server, mean, 1.0)) < 1e-12
    assert distance([kept[i] for i in cohort], [out[i].state for i in cohort]) < 1e-12
    t = sorted(found.values())[0] + 1e-6
    at = WithTail(server, tf.constant(t, tf.float64), tf.constant(True))
    (after,), kept = play(tail_one, data, [cohort], at)
    mean, total = tree.scale(0.0, mean), sum(float(out[i].weight) for i in cohort)
    for i in cohort:
        mean = tree.add_scaled(mean, (found[i] > t) / 0.3 * float(out[i].weight) / total, out[i].update)
    assert distance(after.own, plain.step(server, mean, 1.0)) < 1e-12


@pytest.mark.parametrize("name", slow_but([k for k, sends in TAKE_IT.items() if sends == "update"], "fedavg"))
@pytest.mark.parametrize("t", [0.0, 1e6])
def test_the_clients_own_model_is_that_of_its_whole_work(data, name, t):
    """With cvar, a client below t sends 0 times its update, one above it 1 / p times: neither is where it arrived."""
    plain = build_algorithm(name, data.model, data.population, **quick(name))
    weighed = screened(with_objective(plain, "cvar:0.3"))
    server, state, visit = plain.init_server(), initial_states(plain, data.population)[0], data.visit(0)
    message = weighed.message(WithTail(server, tf.constant(t, tf.float64), tf.constant(True)))
    found = weighed.local_model(message, weighed.client_update(message, state, visit))
    message = plain.message(server)
    output = plain.client_update(message, state, visit)
    assert distance(found, plain.local_model(message, output)) < 1e-12
    assert float(tf.linalg.global_norm(tf.nest.flatten(output.update))) > 1e-3


@pytest.mark.parametrize("limits", [None, {}, {"clip_norm": 1e-3}], ids=["plain", "screened", "clipped"])
def test_with_fair_the_model_of_a_client_that_sends_a_gradient_is_that_of_its_own_gradient(data, limits):
    """A method of one's own, whose client takes a step with the gradient that it sends: not with l_i^q times it."""
    own = fedsgd(data.model, data.population)._replace(
        local_model=lambda w, output: tree.add_scaled(w, -0.1, output.update), one_pass=None
    )
    algorithm, w, visit = with_objective(own, "fair:2", sends="gradient"), own.init_server(), data.visit(0)
    algorithm = algorithm if limits is None else screened(algorithm, **limits)
    found = algorithm.local_model(w, algorithm.client_update(w, (), visit))
    slope = gradient(lambda w: client_loss(data, 0, *w), w)[0]
    assert distance(found, tree.add_scaled(w, -0.1, slope)) < 1e-12


def test_masks_of_dropout_are_not_in_the_loss_that_weighs():
    """l_i is the loss of the model, as an evaluation finds it; with a mask it would be another one in each round."""
    layers = keras.layers.Dense(8, "tanh", dtype="float64"), keras.layers.Dropout(0.5, dtype="float64")
    some, model = toy(), SplitModel(keras.Sequential([keras.Input((4,), dtype="float64"), *layers]))
    algorithm = with_objective(fedavg(model, some.population, steps=1), "fair:1")
    w, visit = algorithm.init_server(), some.visit(0)
    with passes.drawing(visit.key):
        weight = algorithm.client_update(algorithm.message(w), (), visit).weight
    assert abs(float(weight) / len(visit.y) - float(losses_of(model)(w, visit.x, visit.y))) < 1e-12


def test_a_weight_of_integers_is_multiplied_as_a_number(data):
    """l_i^q was cut down to a whole number, often 0, where a method's weight is N_i as an int32."""
    plain = fedavg(data.model, data.population, eta=0.1, steps=2)

    def client_update(message, state, its):
        return plain.client_update(message, state, its)._replace(weight=its.info.num_examples)

    (wanted,), _ = play(with_objective(plain, "fair:2"), data, [EVERYONE])
    (found,), _ = play(with_objective(plain._replace(client_update=client_update), "fair:2"), data, [EVERYONE])
    assert distance(found, wanted) < 1e-12


def test_a_loss_of_0_gives_no_nan(data):
    """0^0.5 has no derivative at 0, but only its value is used; a loss counts as at least 1e-30."""
    algorithm = with_objective(fedavg(data.model, data.population, steps=1), "fair:0.5")
    w = tree.scale(1e4, algorithm.init_server())  # sure of everything: some losses are 0, others are large
    (after,), _ = play(algorithm, data, [EVERYONE], w)
    assert all(np.isfinite(leaf).all() for leaf in tf.nest.flatten(after))


@pytest.mark.parametrize("name", ["mean", "fair:0", "cvar:1"])
def test_the_mean_is_the_algorithm_itself(data, name):
    algorithm = fedavg(data.model, data.population)
    assert with_objective(algorithm, name) is algorithm


def test_who_takes_it_and_who_says_why_not(data):
    assert {name for name, row in ALGORITHMS.items() if not row.no_objective} == set(TAKE_IT)
    for name, row in ALGORITHMS.items():
        if name in TAKE_IT:
            assert row.sends == TAKE_IT[name]
            with_objective(build_algorithm(name, data.model, data.population), "fair:1", sends=row.sends)
        else:
            with pytest.raises(ValueError, match=f"{name} has no objective cvar:0.5: .*Use "):
                row.check_objective("cvar:0.5")
            row.check_objective("fair:0")
    for name, why in {"scaffold": "keeps a sum", "fedamp": "updates of single clients"}.items():
        with pytest.raises(ValueError, match=why):
            with_objective(build_algorithm(name, data.model, data.population), "fair:1")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("median", "unknown objective 'median'"),
        ("mean:1", "without a number"),
        ("fair", "such as fair:1"),
        ("fair:-1", "such as fair:1"),
        ("fair:inf", "such as fair:1"),
        ("fair:1:2", "such as fair:1"),
        ("cvar:0", "such as cvar:0.1"),
        ("cvar:1.1", "such as cvar:0.1"),
        ("cvar:x", "such as cvar:0.1"),
    ],
)
def test_a_text_that_is_none_says_how_it_is_written(text, why):
    with pytest.raises(ValueError, match=why):
        parsed_objective(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "objective"),
    slow_but(
        [("pflego", "fair:1"), ("pflego", "cvar:0.5"), ("fedper", "fair:1"), ("fedper", "cvar:0.5")],
        ("fedper", "cvar:0.5"),
    ),
)
def test_both_engines_and_all_groupings_agree(tff, federation, name, objective):
    """With a schedule and with screening around it."""
    algorithm = with_objective(build(name, federation), objective, sends=TAKE_IT[name])
    algorithm = screened(scheduled(algorithm, "inverse"))

    def rounds(engine):
        return after_rounds(engine, algorithm, [[0, 2, 3], [1, 2, 4], [0, 1, 2]])

    expected = rounds(Simulation(algorithm, federation, grouping="one_by_one"))
    assert distance(rounds(Simulation(algorithm, federation, grouping="stacked")), expected) < 1e-5
    assert distance(rounds(federate(algorithm, federation)), expected) < 1e-5


@pytest.mark.slow
def test_fused_is_one_by_one(federation):
    algorithm = with_objective(build("pflego", federation), "fair:2", sends="gradient")
    states = list(initial_states(algorithm, algorithm.population).values())
    found = []
    for grouping in ("one_by_one", "fused"):
        engine = Simulation(algorithm, federation, grouping=grouping)
        out = engine.next(engine.initialize(), states, visits_of(algorithm, EVERYONE, 1))
        found.append((out.server, out.client_states))
    assert distance(*found) < 1e-5


@pytest.mark.slow
def test_a_run_lowers_the_largest_losses(six_clients, short_end, tmp_path):
    """The same run with the mean and with the worst clients alone; it is interrupted and resumed as well."""
    asked = {"algorithm": "fedsgd", "participation": 1.0, "rounds": 60, "hyperparameters": {"eta": 0.3}}
    worst = {}
    for name in ("mean", "cvar:0.3"):
        run = runs.train(tmp_path / name, six_clients, **asked, objective=name)
        run = run.open(tmp_path / name)
        with run:
            training = run.training()
            server, ids = training.server_state(), run.population.client_ids.tolist()
            scores = [s for s in training.evaluate(server, splits=["train"]) if s.split == "train"]
            worst[name] = max(s.loss for s in scores)
            assert len(scores) == len(ids)
    assert worst["cvar:0.3"] < worst["mean"] - 0.01
    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path / "half", six_clients, [runs.Interrupt(7)], **asked | {"objective": "cvar:0.3"})
    with run.open(tmp_path / "half") as half:
        half.train()
    assert runs.saved(tmp_path / "half") == runs.saved(tmp_path / "cvar:0.3")


def test_a_run_of_a_method_that_cannot_is_refused():
    with pytest.raises(ValueError, match="scaffold has no objective fair:1"):
        runs.config(algorithm="scaffold", objective="fair:1")
    with pytest.raises(ValueError, match="fair:q with a number q >= 0"):
        runs.config(objective="fair")


def test_heads_of_other_kinds():
    """cvar is for every kind; the Poisson loss can be negative, which has no power q."""
    population = toy(classes=(2,) * 5).population
    counts = SplitModel(backbone("float64"), kind="poisson")
    with pytest.raises(ValueError, match="can be negative. Use cvar:p"):
        with_objective(fedavg(counts, population), "fair:1")
    with_objective(fedavg(counts, population), "cvar:0.5")
    check_follows(with_objective(fedavg(counts, population), "cvar:0.5"))
