"""batch_norm='frozen', 'local' and 'shared': against Keras's own layers, GradientTape, closed forms and the engines.

The reference is Keras itself: the backbone is called with training=True, which normalizes with the statistics of the
batch and moves the layers' variables, and tf.GradientTape differentiates the whole loss.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import (
    CLASSES,
    EXAMPLES,
    Toy,
    backbone,
    clients,
    distance,
    identical,
    initial_states,
    run,
    visits_by_id,
)
from tfpfl.algorithms import ALGORITHMS, build_algorithm, fedavg, fedper, finetuned
from tfpfl.algorithms.transforms import median, normalized, own_part, screened, with_objective
from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Population, Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.scoring import Scorer
from tfpfl.engines.tff.process import federate
from tfpfl.models import SplitModel, passes, tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Head
from tfpfl.studies import battery
from tfpfl.studies.new_clients import fine_tuning

RATE = {"rho": 0.05, "beta": 0.1, "rule": "exact", "server_opt": "sgd", "safeguard": False}
ONE_STEP = {"steps": 1, "eta": 0.1}


def normed(mode, sampling=None, dtype="float64", scales=None) -> Toy:
    """Five clients; with `scales`, their examples are multiplied by these numbers."""
    population = Population(EXAMPLES, CLASSES, max(CLASSES), sampling=sampling or Sampling())
    data = clients(dtype=dtype)
    if scales is not None:
        data = [(scale * x, y) for scale, (x, y) in zip(scales, data, strict=True)]
    model = backbone(dtype, batch_norm=True)
    layer = model.layers[1]
    rng = np.random.default_rng(4)
    layer.set_weights([rng.uniform(0.5, 1.5, 6) for _ in range(4)])
    return Toy(SplitModel(model, batch_norm=mode), population, data)


def head_loss(phi, y, head: Head):
    z = tf.matmul(phi, head.kernel) + head.bias
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))


def variables_of(network) -> list:
    """The tf.Variables of the trainable weights: Keras 3 has them inside its own."""
    return [v if isinstance(v, tf.Variable) else v.value for v in network.trainable_weights]


def by_keras(toy: Toy, client: int, head: Head, tau: int, batch: bool):
    """(new head before the joint step, l_i, its gradients) of a visit by Keras's own layers, from the initial theta."""
    x, y = toy.data[client]
    network = keras.models.clone_model(toy.model.backbone)
    network.set_weights(toy.model.backbone.get_weights())
    fixed = network(x, training=batch)  # in training this moves the clone's statistics once
    for _ in range(tau - 1):
        with tf.GradientTape() as tape:
            tape.watch(head)
            loss = head_loss(fixed, y, head)
        head = tree.add_scaled(head, -RATE["beta"], tape.gradient(loss, head))
    moved = [np.asarray(v) for v in network.non_trainable_weights]
    with tf.GradientTape() as tape:
        tape.watch(head)
        loss = head_loss(network(x, training=batch), y, head)
    return head, loss, *tape.gradient(loss, (variables_of(network), head)), moved


EXACT = [(mode, tau) for mode in ("frozen", "local", "shared") for tau in (3, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "tau"), slow_but(EXACT, *EXACT[::2]), ids=str)
def test_pflego_takes_the_exact_gradient_of_the_loss_that_it_computed(mode, tau):
    """Everyone takes part: a round is a step of gradient descent on sum_i alpha_i l_i, of all parts."""
    toy = normed(mode)
    algorithm = build_algorithm("pflego", toy.model, toy.population, tau=tau, **RATE)
    start = initial_states(algorithm, toy.population)
    server, states = run(algorithm, toy)
    theta, own, statistics = list(toy.model.theta()), toy.model.own, toy.model.statistics()
    assert own == ((False, False, True, True, False, False) if mode == "local" else (False,) * 6)
    change = [tf.zeros_like(w) for w in theta]
    for i in toy.ids:
        first, alpha = start[i], toy.population.info(i, "float64").alpha
        head = first.state.state if mode == "local" else first
        head, loss, by_theta, by_head, moved = by_keras(toy, i, head, tau, mode != "frozen")
        state = states[i]
        if mode == "local":
            by_own = [g for g, its_own in zip(by_theta, own, strict=True) if its_own]
            for value, g, place in zip(state.state.own, by_own, (2, 3), strict=True):
                np.testing.assert_allclose(value, theta[place] - RATE["rho"] * alpha * g, atol=1e-9)
            np.testing.assert_allclose(np.stack(state.statistics), np.stack(moved), atol=1e-7)  # Keras 2: 1 - m float32
            state = state.state.state
        assert distance(state, tree.add_scaled(head, -RATE["rho"] * alpha, by_head)) < 1e-9
        change = [c + (0 if o else alpha * g) for c, g, o in zip(change, by_theta, own, strict=True)]
        statistics = [s + alpha * (m - at) for s, m, at in zip(statistics, moved, toy.model.statistics(), strict=True)]
    found = server.own if mode == "shared" else server
    for value, w, g in zip(found.theta, theta, change, strict=True):
        np.testing.assert_allclose(value, w - RATE["rho"] * g, atol=1e-9)
    if mode == "shared":
        np.testing.assert_allclose(np.stack(server.statistics), np.stack(statistics), atol=1e-7)


def test_the_moved_statistics_are_a_closed_form():
    """Two steps on all examples of one client: m <- momentum m + (1 - momentum) mean, the rates never enter."""
    toy = normed("shared", Sampling("fixed", 0.2))
    layer = toy.model.backbone.layers[1]
    algorithm = build_algorithm("fedavg", toy.model, toy.population, steps=2, eta=0.0, momentum=0.9)
    server, _ = run(algorithm, toy, cohort=[3])
    hidden = np.asarray(toy.model.backbone.layers[0](toy.data[3][0]))
    mean, variance = (np.asarray(v) for v in (layer.moving_mean, layer.moving_variance))
    for _ in range(2):
        mean, variance = 0.6 * mean + 0.4 * hidden.mean(0), 0.6 * variance + 0.4 * hidden.var(0)
    np.testing.assert_allclose(server.statistics[0], mean, atol=1e-12)
    np.testing.assert_allclose(server.statistics[1], variance, atol=1e-12)


@pytest.mark.slow
def test_shared_statistics_never_pass_through_the_servers_optimizer():
    """The weighted mean over the cohort, whatever the server's optimizer does with the rest."""
    toy = normed("shared")
    plain = Simulation(build_algorithm("fedavg", toy.model, toy.population, **ONE_STEP))
    other = build_algorithm("fedavg", toy.model, toy.population, server_opt="adam", server_eta=0.3, **ONE_STEP)
    (first, _), (second, _) = (run(algorithm, toy) for algorithm in (plain, other))
    assert identical(first.statistics, second.statistics)
    assert distance(first.own, second.own.own) > 1e-3
    singles = [run(plain, toy, cohort=[i])[0].statistics for i in toy.ids]
    mean = [sum(n * s for n, s in zip(EXAMPLES, of, strict=True)) / sum(EXAMPLES) for of in zip(*singles, strict=True)]
    np.testing.assert_allclose(np.stack(first.statistics), np.stack(mean), atol=1e-12)


def test_what_build_algorithm_has_done_is_refused():
    toy = normed("shared")
    with pytest.raises(InvalidArgument, match="'statistics' beside them already.*build_algorithm applies"):
        normalized(build_algorithm("fedavg", toy.model, toy.population, **ONE_STEP))


@pytest.mark.slow
def test_frozen_is_the_default_and_statistics_stay():
    """The same bits as with batch_norm='frozen'; and as a layer of multiplications with the stored statistics."""
    models = [normed(mode).model for mode in (None, "frozen")]
    toy = normed(None)
    assert [m.batch_norm for m in models] == ["frozen", "frozen"]
    done = [run(fedavg(m, toy.population, steps=3, eta=0.1), toy) for m in models]
    assert identical(*done)
    assert SplitModel(backbone()).batch_norm is None
    before = [np.asarray(v) for v in models[0].backbone.get_weights()]
    assert identical(before, [np.asarray(v) for v in models[0].backbone.get_weights()])
    server, _ = done[0]
    assert len(server.theta) == 6 and distance(server.theta[2], models[0].theta()[2]) > 1e-4  # the scale is trained


@pytest.mark.parametrize("name", slow_but(["fedavg", "pflego", "fedbn"], "fedbn"))
def test_with_local_nothing_of_the_normalization_is_sent(name):
    """Neither in the message nor in the update: by bytes. Two clients on other scales keep other statistics."""
    toy = normed("local", scales=(1, 5, 1, 0.2, 1))
    quick = {"tau": 3, "rho": 0.05, "beta": 0.1} if name == "pflego" else {"steps": 3, "eta": 0.1}
    algorithm = build_algorithm(name, toy.model, toy.population, **quick)
    engine = Simulation(algorithm)
    states = initial_states(algorithm, toy.population)
    output = engine.next(engine.initialize(), [states[i] for i in toy.ids], [toy.visit(i) for i in toy.ids])
    head = 0 if name == "pflego" else 8 * (5 + 1) * max(CLASSES)
    wanted = 8 * (toy.model.num_backbone_weights - 2 * 6) + head
    for metrics in output.client_metrics:
        assert (int(metrics["bytes_down"]), int(metrics["bytes_up"])) == (wanted, wanted)
    one, two = output.client_states[1], output.client_states[3]
    assert distance(one.statistics, two.statistics) > 0.05
    assert distance(one.state.own, two.state.own) > 1e-4
    assert distance(states[1].state.own, states[3].state.own) == 0


@pytest.mark.slow
def test_local_is_fedavg_where_there_is_one_client():
    """Of one client, own and shared weights move alike: as those of FedAvg with shared statistics."""
    found = []
    for mode in ("local", "shared"):
        toy = normed(mode, Sampling("fixed", 0.2))
        algorithm = build_algorithm("fedavg", toy.model, toy.population, steps=4, eta=0.2, momentum=0.5)
        server, states = run(algorithm, toy, rounds=3, cohort=[2])
        message = algorithm.message(server)
        visit = toy.visit(2, 9)
        found.append(algorithm.personal_model(message, states[2], visit))
        assert algorithm.shares == ("head" if mode == "local" else "model")
    assert distance(*found) < 1e-12


def test_evaluation_uses_the_clients_moving_statistics():
    """The personal model gives what Keras gives in evaluation with the same numbers in its variables."""
    toy = normed("local")
    algorithm = build_algorithm("fedavg", toy.model, toy.population, steps=3, eta=0.2)
    server, states = run(algorithm, toy, rounds=2)
    weights = algorithm.personal_model(algorithm.message(server), states[1], toy.visit(1, 3))
    assert identical(weights.theta[6:], states[1].statistics) and identical(weights.theta[2:4], states[1].state.own)
    network = keras.models.clone_model(toy.model.backbone)
    for variable, value in zip(toy.model.variables, weights.theta, strict=True):
        place = [id(v) for v in toy.model.backbone.weights].index(id(variable))
        network.weights[place].assign(value)
    np.testing.assert_allclose(toy.model.features(weights.theta, toy.data[1][0]), network(toy.data[1][0]), atol=1e-12)


def test_a_client_that_never_trained_measures_its_own_statistics():
    toy = normed("local")
    algorithm = build_algorithm("fedavg", toy.model, toy.population, steps=3, eta=0.2)
    server = algorithm.init_server()
    data, state = toy.visit(4), algorithm.init_client(toy.population.info(4, "float64"))
    weights = algorithm.personal_model(algorithm.message(server), state, data)
    hidden = np.asarray(toy.model.backbone.layers[0](toy.data[4][0]))
    np.testing.assert_allclose(np.stack(weights.theta[6:]), [hidden.mean(0), hidden.var(0)], atol=1e-12)
    carry = algorithm.adapt.start(algorithm.message(server), state, data)
    assert distance(algorithm.adapt.model(carry), weights) < 1e-12
    after = algorithm.adapt.model(algorithm.adapt.epoch(carry, data, tf.constant(0)))
    assert distance(after.theta[2:4], weights.theta[2:4]) > 1e-4  # scale and offset adapt
    np.testing.assert_allclose(after.theta[6], weights.theta[6], atol=1e-12)  # the same examples, the same mean


def test_the_statistics_of_a_layer_that_is_used_twice_are_the_mean_of_both_uses():
    """To which moving statistics tend that both uses move. Those of the last use alone would not fit to the first."""
    example, layer = keras.Input((4,), dtype="float64"), keras.layers.BatchNormalization(dtype="float64")
    parts = [keras.layers.Dense(3, dtype="float64", name=name) for name in ("a", "b")]
    model = SplitModel(
        keras.Model(example, keras.layers.Add(dtype="float64")([layer(p(example)) for p in parts])), batch_norm="local"
    )
    x = np.random.default_rng(0).normal(size=(50, 4)) * [1.0, 2.0, 3.0, 4.0] + 1
    with passes.measuring(model.statistics()) as now:
        model.features(model.theta(), tf.constant(x))
    uses = [np.asarray(p(x)) for p in parts]
    truth = [np.mean([u.mean(0) for u in uses], 0), np.mean([u.var(0) for u in uses], 0)]
    np.testing.assert_allclose(np.stack(now.moved), truth, atol=1e-12)
    with passes.keeping(tuple(map(tf.constant, truth)), tf.zeros([2], tf.int32)) as now:
        model.features(model.theta(), tf.constant(x))  # in training the layer's own momentum counts: nearly at rest
    np.testing.assert_allclose(np.stack(now.moved), truth, atol=0.01 * np.ptp([u.var(0) for u in uses]))


@pytest.mark.parametrize("mode", ["shared", "frozen"])
def test_fine_tuning_of_a_new_client_trains_no_statistics(mode):
    """`tfpfl new-clients --protocol global`: as GradientTape on Keras's model in evaluation, whose statistics stay."""
    toy = normed(mode)
    algorithm = build_algorithm("fedavg", toy.model, toy.population)
    server, data = algorithm.init_server(), toy.visit(2)
    adapt = fine_tuning(algorithm, eta=0.1, momentum=0.0)
    carry = adapt.start(algorithm.message(server), (), data)
    found = adapt.model(adapt.epoch(carry, data, tf.constant(0)))
    head, variables = toy.model.shared_head(max(CLASSES)), variables_of(toy.model.backbone)
    with tf.GradientTape() as tape:
        tape.watch(head)
        loss = head_loss(toy.model.backbone(data.x, training=False), data.y, head)
    by_theta, by_head = tape.gradient(loss, (variables, head))
    assert distance(found.head, tree.add_scaled(head, -0.1, by_head)) < 1e-9
    theta = tuple(w - 0.1 * g for w, g in zip(toy.model.theta(), by_theta, strict=True))
    assert distance(found.theta, theta + (toy.model.statistics() if mode == "shared" else ())) < 1e-9


@pytest.mark.parametrize("mode", ["shared", "local"])
def test_fine_tuning_of_a_built_algorithm_trains_no_statistics(mode):
    """`finetuned` of fedavg is fedavg_ft, whose steps never see them; they were steps of SGD on a variance."""
    toy, rates = normed(mode), {"eta_ft": 0.3}
    base = build_algorithm("fedavg", toy.model, toy.population, **ONE_STEP)
    built = build_algorithm("fedavg_ft", toy.model, toy.population, **ONE_STEP, **rates, steps_ft=4)
    server, states = run(base, toy)
    asked = base.message(server), states[0], toy.visit(0)
    found = finetuned(base, **rates, steps_ft=4).personal_model(*asked)
    assert distance(found, built.personal_model(*asked)) < 1e-12
    assert distance(found.theta[:6], base.personal_model(*asked).theta[:6]) > 1e-2
    once = finetuned(base, **rates, steps_ft=1)  # and a new client's epoch of all examples is one step
    adapted = once.adapt.model(once.adapt.epoch(once.adapt.start(*asked), asked[2], tf.constant(0)))
    assert distance(adapted, once.personal_model(*asked)) < 1e-12


MODES = [(name, mode) for name in ("fedavg", "pflego", "fedper") for mode in ("local", "shared", "frozen")]
QUICK = {"pflego": {"tau": 3, "rho": 0.02, "beta": 0.1}}


def on(federation, name, mode, network=None, **more):
    model = SplitModel(network or backbone("float32", batch_norm=True), batch_norm=mode)
    small = QUICK.get(name, {"epochs": 2, "batch_size": 4, "eta": 0.1})
    return build_algorithm(name, model, battery.small_population(federation), **small, **more)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), MODES, ids=str)
def test_both_engines_agree(name, mode, federation, tff):
    algorithm = on(federation, name, mode)
    battery.both_engines_agree(battery.Subject(algorithm, federation))


@pytest.mark.slow
def test_both_engines_agree_in_a_round(federation, tff):
    """PFLEGO with own normalization: two clients."""
    algorithm = on(federation, "pflego", "local")
    states, visits = (
        initial_states(algorithm, algorithm.population),
        visits_by_id(algorithm.population, [1, 3], 1),
    )
    engines = Simulation(algorithm, federation), federate(algorithm, federation)
    ours, theirs = (e.next(e.initialize(), [states[1], states[3]], visits) for e in engines)
    assert distance(ours.server, theirs.server) < 1e-6
    assert distance(ours.client_states, theirs.client_states) < 1e-6


# A fine-tuned method with own normalization has no global model, from which the battery wants a new client to start.
OTHERS = {
    "local": ("fedprox", "fedper", "fedrod", "lg_fedavg", "local", "fedsgd"),
    "shared": ("fedrep", "fedavg_ft", "fedrecon"),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    slow_but(
        [(n, mode) for mode, names in OTHERS.items() for n in names],
        ci=[(names[0], m) for m, names in OTHERS.items()],
    ),
)
def test_other_methods_keep_the_contract(name, mode, federation):
    """The battery without the checks that need many rounds or TFF."""
    model = SplitModel(backbone("float32", batch_norm=True), batch_norm=mode)
    subject = battery.Subject(build_algorithm(name, model, battery.small_population(federation)), federation)
    for check in battery.CHECKS:
        if check not in battery.NEED_TFF and check is not battery.the_loss_falls:
            check(subject)


@pytest.mark.slow
def test_stacked_and_one_by_one_agree(federation):
    algorithm = on(federation, "fedavg", "local")
    states = initial_states(algorithm, algorithm.population)
    visits = visits_by_id(algorithm.population, [0, 2], 1)
    engines = [Simulation(algorithm, federation, grouping=how) for how in ("one_by_one", "stacked")]
    done = [e.next(e.initialize(), [states[0], states[2]], visits) for e in engines]
    assert distance(done[0].server, done[1].server) < 1e-5
    assert distance(done[0].client_states, done[1].client_states) < 1e-5
    Scorer(algorithm, federation, ["test"])(done[0].server, done[0].client_states, visits)


@pytest.mark.slow
def test_what_cannot_be_is_refused_with_the_reason():
    toy, plain = normed("local"), SplitModel(backbone())
    with pytest.raises(ValueError, match="no trainable BatchNormalization.*conv_bn"):
        SplitModel(backbone(), batch_norm="local")
    with pytest.raises(ValueError, match="batch_norm.*frozen, local"):
        SplitModel(backbone(batch_norm=True), batch_norm="locally")
    with pytest.raises(ValueError, match="FedBN keeps.*--network conv_bn, or use fedavg"):
        build_algorithm("fedbn", plain, toy.population)
    with pytest.raises(ValueError, match="FedBN is FedAvg with batch_norm='local', found 'shared'"):
        build_algorithm("fedbn", normed("shared").model, toy.population)
    for name in (
        "ditto",
        "apfl",
        "pfedme",
        "per_fedavg",
        "layerwise",
        "fedfomo",
        "fedamp",
        "heurfedamp",
        "pgfed",
        "fedala",
        "fedas",
    ):
        for mode in ("local", "shared"):
            with pytest.raises(ValueError, match=f"{name} cannot have batch_norm='{mode}': a client computes"):
                build_algorithm(name, normed(mode).model, toy.population)
    with pytest.raises(ValueError, match="local cannot have batch_norm='shared': nothing is sent"):
        build_algorithm("local", normed("shared").model, toy.population)
    for name in ("scaffold", "feddyn", "fedrecon"):
        with pytest.raises(ValueError, match=f"{name} cannot leave a part of theta with the client: .*Use pflego"):
            build_algorithm(name, toy.model, toy.population)


def test_what_cannot_be_is_refused_when_it_is_traced():
    toy = normed("local")
    with pytest.raises(ValueError, match="method does not carry the moving statistics: build it.*build_algorithm"):
        run(fedavg(toy.model, toy.population), toy)
    key = tf.constant([0, 1])
    with passes.keeping(toy.model.statistics(), key), pytest.raises(ValueError, match="cannot be computed in parts"):
        toy.model.features_in_chunks(toy.model.theta(), toy.data[0][0])


@pytest.mark.parametrize(
    ("name", "mode", "wrong", "told"),
    [
        ("scaffold", "shared", {"option": "I"}, "option='I'.*batch_norm='shared'.*Use option='II'"),
        pytest.param(
            "pflego",
            "local",
            {"chunk": 2},
            "found recompute=False, chunk=2.*Leave recompute and",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pflego", "shared", {"recompute": True}, "found recompute=True, chunk=None", marks=pytest.mark.slow
        ),
    ],
)
def test_a_gradient_in_parts_is_refused_before_a_run_begins(name, mode, wrong, told):
    """It was refused in the first round, when the run folder was made already."""
    toy = normed(mode)
    build_algorithm(name, toy.model, toy.population)
    build_algorithm(name, normed("frozen").model, toy.population, **wrong)
    with pytest.raises(InvalidArgument, match=told):
        build_algorithm(name, toy.model, toy.population, **wrong)


def test_what_treats_updates_as_gradients_refuses_shared_statistics():
    toy = normed("shared")
    algorithm = build_algorithm("fedavg", toy.model, toy.population)
    refused = [median, lambda a: screened(a, clip_norm=1.0), lambda a: screened(a, max_norm=1.0)]
    for wrong in (*refused, lambda a: with_objective(a, "fair:1"), lambda a: with_objective(a, "cvar:0.5")):
        with pytest.raises(ValueError, match="cannot be used with batch_norm='shared'.*batch_norm='local'"):
            wrong(algorithm)


@pytest.mark.slow
def test_screening_without_limits_changes_nothing():
    toy = normed("shared")
    algorithm = build_algorithm("fedavg", toy.model, toy.population)
    assert distance(run(screened(algorithm), toy)[0], run(algorithm, toy)[0]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["fedavg", "pflego"], "fedavg"))
def test_an_own_part_may_be_any_weight(name):
    """All of theta own: the client trains alone, and nothing but the head is sent. None: nothing changes."""
    toy = Toy(SplitModel(backbone()), normed(None).population, clients())
    quick = {"tau": 2, **RATE} if name == "pflego" else {"steps": 3, "eta": 0.1}
    algorithm = build_algorithm(name, toy.model, toy.population, **quick)
    assert own_part(algorithm, [False] * 4) is algorithm
    whole = own_part(algorithm, [True] * 4)
    _, states = run(whole, toy, rounds=3)
    if name == "fedavg":
        alone = fedper(toy.model, toy.population, steps=3, eta=0.1)  # of one client, what the server adds is its own
        head, client = toy.model.shared_head(max(CLASSES)), CLASSES.index(max(CLASSES))  # its own head is as wide
        one, _ = run(alone, toy, cohort=[client], states={client: head}, rounds=1)
        _, own = run(whole, toy, cohort=[client], rounds=1)
        assert distance(own[client].own, one) < 1e-12
    assert len(states[0].own) == 4 and distance(states[0].own, states[1].own) > 1e-4
    with pytest.raises(ValueError, match="each of theta's 4 weights, found 3"):
        own_part(algorithm, [True] * 3)


def test_normalized_does_nothing_without_batch_statistics():
    toy = normed("frozen")
    algorithm = fedavg(toy.model, toy.population)
    assert normalized(algorithm) is algorithm
    assert ALGORITHMS["fedbn"].batch_norm == "local"


def test_fair_weighs_with_the_loss_before_the_local_steps_where_statistics_are_local():
    """Of the shared weights, normalized as the client predicts; not of the fine-tuned ones."""
    data = normed("local")
    plain, tuned = (build_algorithm(n, data.model, data.population, steps=3, eta=0.2) for n in ("fedavg", "fedavg_ft"))
    server, states = run(plain, data)
    found = []
    for algorithm in (plain, tuned):
        fair = with_objective(algorithm, "fair:1")
        found.append(float(fair.client_update(plain.message(server), states[2], data.visit(2)).weight))
    w = plain.personal_model(plain.message(server), states[2], data.visit(2))
    expected = float(client_loss(data.model)(w, data.visit(2).x, data.visit(2).y))
    assert found == pytest.approx([EXAMPLES[2] * expected] * 2, rel=1e-12)
