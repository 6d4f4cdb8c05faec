"""Dropout in methods: masks from the key of the visit, against GradientTape with the same masks, in both engines."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from helpers.marks import slow_but
from helpers.toys import Toy, clients, distance, identical, initial_states, run, visits_by_id
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.exchanges import message_for
from tfpfl.algorithms.parts.local_training import whole_gradient
from tfpfl.algorithms.transforms import own_part
from tfpfl.data.population import Population, Sampling
from tfpfl.data.randomness import Fold
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.packed import one_pass_of
from tfpfl.engines.scoring import Scorer
from tfpfl.engines.tff.process import federate
from tfpfl.models import SplitModel, passes, tree
from tfpfl.models.losses import client_loss
from tfpfl.models.passes import fold
from tfpfl.models.weights import Head, Weights
from tfpfl.studies import battery

EXAMPLES, CLASSES, RATE = (6, 9, 4, 7, 5), (2, 3, 2, 4, 3), 0.4


def network(dtype="float64", rate=RATE):
    stack = layers.Dense(6, activation="tanh", dtype=dtype), layers.Dropout(rate, dtype=dtype)
    model = keras.Sequential([keras.Input((4,), dtype=dtype), *stack, layers.Dense(5, activation="tanh", dtype=dtype)])
    rng = np.random.default_rng(0)
    for variable in model.trainable_weights:
        variable.assign(0.7 * rng.standard_normal(variable.shape))
    return model


def random(dtype="float64", rate=RATE, **more) -> Toy:
    population = Population(EXAMPLES, CLASSES, max(CLASSES), sampling=Sampling())
    return Toy(SplitModel(network(dtype, rate), **more), population, clients(dtype=dtype))


def loss_with(kept, theta, head: Head, x, y):
    """The loss of the network written out, with a mask [N, 6] of 0 and 1 on its hidden units."""
    hidden = tf.tanh(tf.matmul(x, theta[0]) + theta[1]) * kept / (1 - RATE)
    phi = tf.tanh(tf.matmul(hidden, theta[2]) + theta[3])
    z = tf.matmul(phi, head.kernel) + head.bias
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))


def kept_units(key, n):
    uniform = tf.random.stateless_uniform([n, 6], fold(fold(key, 0), 0), alg="philox")
    return tf.cast(uniform >= RATE, tf.float64)


@pytest.mark.parametrize(
    ("tau", "how"),
    [(4, {}), *(pytest.param(t, h, marks=pytest.mark.slow) for t, h in ((1, {}), (4, {"recompute": True})))],
)
def test_pflego_takes_the_gradient_of_the_loss_under_one_mask(tau, how):
    """A round of everyone is a step of gradient descent on sum_i alpha_i l_i, with one mask for each client."""
    data, rates = random(), {"rho": 0.05, "beta": 0.1, "rule": "exact", "server_opt": "sgd", "safeguard": False}
    algorithm = build_algorithm("pflego", data.model, data.population, tau=tau, **rates, **how)
    start, (server, states) = initial_states(algorithm, data.population), run(algorithm, data)
    theta, heads = data.model.theta(), dict(start)
    kept = {i: kept_units(fold(data.visit(i).key, Fold.MASKS), EXAMPLES[i]) for i in data.ids}
    for _ in range(tau - 1):
        for i in data.ids:
            with tf.GradientTape() as tape:
                tape.watch(heads[i])
                loss = loss_with(kept[i], theta, heads[i], *data.data[i])
            heads[i] = tree.add_scaled(heads[i], -rates["beta"], tape.gradient(loss, heads[i]))
    with tf.GradientTape() as tape:
        tape.watch((theta, heads))
        alphas = {i: data.population.info(i, "float64").alpha for i in data.ids}
        whole = tf.add_n([alphas[i] * loss_with(kept[i], theta, heads[i], *data.data[i]) for i in data.ids])
    by_theta, by_heads = tape.gradient(whole, (theta, heads))
    assert distance(server.theta, tree.add_scaled(theta, -rates["rho"], by_theta)) < 1e-9
    for i in data.ids:
        assert distance(states[i], tree.add_scaled(heads[i], -rates["rho"], by_heads[i])) < 1e-9


def test_every_local_step_has_a_mask_of_its_own():
    """FedAvg by hand: step s has the key of the visit, folded with the loop and with s."""
    data = random()
    algorithm = build_algorithm("fedavg", data.model, data.population, steps=3, eta=0.3)
    server, _ = run(algorithm, data, cohort=[1])
    w, key = algorithm.init_server(), fold(fold(data.visit(1).key, Fold.MASKS), 0)
    masks = [kept_units(fold(key, step), EXAMPLES[1]) for step in range(3)]
    for kept in masks:
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = loss_with(kept, *w, *data.data[1])
        w = tree.add_scaled(w, -0.3, tape.gradient(loss, w))
    assert distance(server, w) < 1e-9
    assert not np.array_equal(masks[0], masks[1])


def test_chunks_of_a_whole_gradient_have_masks_of_their_own():
    """Seven examples, three at a time: the first three have the masks of a pass of all, the next others."""
    data = random()
    model, visit, (x, y) = data.model, data.visit(3), data.data[3]
    w, key = Weights(model.theta(), model.head(visit.info)), fold(visit.key, Fold.MASKS)
    with passes.drawing(visit.key):
        value, found = whole_gradient(client_loss(model), w, visit, chunk=3)
    masks = [kept_units(key if start == 0 else fold(key, start), min(3, 7 - start)) for start in (0, 3, 6)]
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = loss_with(tf.concat(masks, 0), w.theta, w.head, x, y)
    assert abs(float(value - loss)) < 1e-12 and distance(found, tape.gradient(loss, w)) < 1e-12
    assert distance(masks[0], masks[1]) == 1


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("fedproto", {"eta": 0.0}),
        pytest.param("fedpac", {"eta_f": 0.0, "eta_g": 0.0}, marks=pytest.mark.slow),
        pytest.param("fedas", {"eta": 0.0, "eta_align": 0.0}, marks=pytest.mark.slow),
    ],
)
def test_statistics_of_features_are_those_without_masks(name, rates):
    """Means, variances and Fisher traces that clients send are of the model as an evaluation sees it."""
    data = random()
    algorithm = build_algorithm(name, data.model, data.population, **rates)
    state = initial_states(algorithm, data.population)[1]
    message = message_for(algorithm, algorithm.init_server(), data.visit(1).info)
    sent = []
    for visit in (data.visit(1, 1), data.visit(1, 2)):
        with passes.drawing(visit.key):
            output = algorithm.client_update(message, state, visit)
        sent.append((output.update, output.weight))
    assert identical(*sent) and np.any(tf.nest.flatten(sent[0])[-1])


@pytest.mark.slow
def test_fedfomo_weighs_models_without_masks():
    """Its validation losses, which choose and weigh models of others, are those of an evaluation."""
    data = random()
    algorithm = build_algorithm("fedfomo", data.model, data.population, eta=0.3, steps=5)
    server, states = run(algorithm, data, rounds=2)
    message = message_for(algorithm, server, data.visit(1).info)
    weights = []
    for visit in (data.visit(1, 3), data.visit(1, 4)):
        with passes.drawing(visit.key):
            weights.append(algorithm.client_update(message, states[1], visit).update.weights)
    assert identical(*weights) and np.any(weights[0])


def test_masks_differ_between_visits_and_loops():
    """Rounds and clients with the same examples; the two loops of FedRep; and a rate of 0 draws nothing."""
    data = random()
    same = data._replace(data=[data.data[1]] * 5, population=Population([9] * 5, [3] * 5, 3))
    engine = Simulation(build_algorithm("fedavg", same.model, same.population, steps=1, eta=0.3))
    start = engine.initialize()

    def after(client, round_num):
        return engine.next(start, [()], [same.visit(client, round_num)]).server

    assert identical(after(0, 1), after(0, 1))
    assert distance(after(0, 1), after(1, 1)) > 1e-3 and distance(after(0, 1), after(0, 2)) > 1e-3
    assert not random(rate=0.0).model.draws


METHODS = ["fedavg", "pflego", "fedrep", "ditto", "per_fedavg", "apfl", "pfedme", "fedrod", "fedamp", "scaffold"]


@pytest.mark.parametrize("name", slow_but(METHODS, ci=("pflego", "fedrep")))
def test_both_engines_draw_the_same(name, federation, tff):
    model, population = SplitModel(network("float32")), battery.small_population(federation)
    hyper = {"pflego": {"tau": 3}, "fedrep": {"tau_h": 2, "tau_b": 2}}.get(name, {"steps": 2})
    battery.both_engines_agree(battery.Subject(build_algorithm(name, model, population, **hyper), federation))


@pytest.mark.slow
def test_both_engines_draw_the_same_in_a_round(federation, tff):
    algorithm = build_algorithm("fedavg", SplitModel(network("float32")), battery.small_population(federation), steps=2)
    visits = visits_by_id(algorithm.population, [1, 3], 1)
    engines = Simulation(algorithm, federation), federate(algorithm, federation)
    ours, theirs = (e.next(e.initialize(), [(), ()], visits).server for e in engines)
    assert distance(ours, theirs) < 1e-6


@pytest.mark.slow
def test_stacked_clients_draw_the_same_and_evaluation_draws_nothing(federation):
    model, population = SplitModel(network("float32")), battery.small_population(federation)
    algorithm = build_algorithm("fedavg", model, population, epochs=2, batch_size=4, eta=0.2)
    twins = [0, 2]
    visits, done = visits_by_id(population, twins, 1), []
    for how in ("one_by_one", "stacked"):
        engine = Simulation(algorithm, federation, grouping=how)
        done.append(engine.next(engine.initialize(), [(), ()], visits).server)
    assert distance(*done) < 1e-5
    scorer = Scorer(algorithm, federation, ["test"])
    first = scorer(done[0], [(), ()], visits)
    assert identical(first, scorer(done[0], [(), ()], visits_by_id(population, twins, 2)))
    plain = SplitModel(network("float32", rate=0.0))
    scores = Scorer(algorithm._replace(model=plain), federation, ["test"])(done[0], [(), ()], visits)
    assert distance(first, scores) < 1e-6


@pytest.mark.parametrize("batch_size", [4, None])
def test_epochs_of_adapting_draw_the_masks_of_one_visit(batch_size):
    """The masks of the second epoch are not those of the first again: they are numbered by the step of the visit."""
    data, how = random(), {"eta": 0.2, "batch_size": batch_size}
    one, two = (build_algorithm("fedavg", data.model, data.population, epochs=n, **how) for n in (1, 2))
    w, visit = one.init_server(), data.visit(1)
    carry = one.adapt.start(w, (), visit)
    for n, algorithm in enumerate((one, two)):
        carry = one.adapt.epoch(carry, visit, n)
        held = algorithm.local_model(w, algorithm.client_update(w, (), visit))
        assert distance(one.adapt.model(carry), held) < 1e-9


def test_clients_do_not_share_a_pass(federation):
    """With one batch for all, a client's mask would depend on who else is in the cohort."""
    model = SplitModel(network("float32"))
    algorithm = build_algorithm("pflego", model, battery.small_population(federation), tau=2)
    assert one_pass_of(algorithm) is None
    with pytest.raises(ValueError, match="grouping='fused' needs"):
        Simulation(algorithm, federation, grouping="fused")


def test_an_own_part_and_dropout_together():
    """The keys are those of the visit, whatever wraps the method."""
    data = random()
    algorithm = build_algorithm("fedavg", data.model, data.population, steps=2, eta=0.3)
    server, _ = run(algorithm, data, cohort=[1])
    other = own_part(algorithm, [True, False, False, False])
    its_server, its_states = run(other, data, cohort=[1])
    assert distance(its_states[1].own, (server.theta[0],)) < 1e-12
    assert distance(its_server.theta[1:], server.theta[1:]) < 1e-12
