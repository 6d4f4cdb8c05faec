"""`SplitModel(adapters=, personal=)`: a part of the adapters stays with the client, and the rest is shared.

The reference is written out by hand in float64: two dense layers with LoRA, and GradientTape.
"""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import CLASSES, EXAMPLES, backbone, distance, initial_states, run, toy
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.transforms import median, with_objective
from tfpfl.checks import InvalidArgument
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel, tree
from tfpfl.models.weights import Head, Weights
from tfpfl.studies import battery

FEDAVG = {"steps": 3, "eta": 0.2}
PFLEGO = {"tau": 1, "rho": 0.3, "rule": "exact", "server_opt": "sgd", "safeguard": False}
QUICK = {"fedavg": FEDAVG, "pflego": PFLEGO | {"tau": 3, "beta": 0.1}, "fedsgd": {"eta": 0.2}, "fedper": FEDAVG}
SHARED, OWN = 4 * 2 + 6 * 2, 2 * 6 + 2 * 5  # scalars of A and of B of layers 4 -> 6 -> 5 with rank 2
HEAD = (5 + 1) * max(CLASSES)


def fed_sa(personal="B"):
    return toy(adapters="lora:2", personal=personal)


def loss_by_hand(data, client, shared, own, head):
    """The loss of a client with adapters A and B of the two layers."""
    x, y = data.data[client]
    weights = data.model.backbone.get_weights()
    for i in range(2):
        x = tf.tanh(x @ (weights[2 * i] + shared[i] @ own[i]) + weights[2 * i + 1])
    z = x @ head.kernel + head.bias
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))


def gradients(data, client, *parts):
    with tf.GradientTape() as tape:
        tape.watch(parts)
        loss = loss_by_hand(data, client, *parts)
    return tape.gradient(loss, parts)


def minus(parts, rate, change):
    return tf.nest.map_structure(lambda w, g: w - rate * g, parts, change)


def middle(algorithm, data):
    """(server, states) in which no part is 0 and every client's B is another one."""
    rng = np.random.default_rng(2)
    states = {
        i: state._replace(own=tuple(tf.constant(0.4 * rng.standard_normal(w.shape)) for w in state.own))
        for i, state in initial_states(algorithm, data.population).items()
    }
    return tf.nest.map_structure(lambda w: w + 0.2 * rng.standard_normal(w.shape), algorithm.init_server()), states


def test_a_round_of_fedavg_is_the_one_written_by_hand():
    """Three local steps on A, B and head: the server averages A and the head, and B stays as the client left it."""
    data = fed_sa()
    algorithm = build_algorithm("fedavg", data.model, data.population, **FEDAVG)
    server, states = middle(algorithm, data)
    after, now = run(algorithm, data, server=server, states=states)
    mean = tf.nest.map_structure(tf.zeros_like, (server.theta[::2], server.head))
    for i in data.ids:
        parts = (server.theta[::2], states[i].own, server.head)
        for _ in range(3):
            parts = minus(parts, 0.2, gradients(data, i, *parts))
        assert distance(now[i].own, parts[1]) < 1e-12
        mean = minus(mean, -EXAMPLES[i] / sum(EXAMPLES), (parts[0], parts[2]))
    assert distance((after.theta[::2], after.head), mean) < 1e-12 and distance(after.theta, server.theta) > 1e-3
    assert distance(after.theta[1::2], server.theta[1::2]) == 0  # the server's own B, which nobody reads, stays


def test_a_round_of_pflego_is_a_gradient_step_on_all_parts():
    """tau = 1 and everyone: sum_i alpha_i l_i(A, B_i, W_i) with one rate for A, every B_i and every head."""
    data = fed_sa()
    algorithm = build_algorithm("pflego", data.model, data.population, **PFLEGO)
    server, states = middle(algorithm, data)
    after, now = run(algorithm, data, server=server, states=states)
    total = tf.nest.map_structure(tf.zeros_like, server.theta[::2])
    for i in data.ids:
        alpha = EXAMPLES[i] / sum(EXAMPLES)
        by_shared, by_own, by_head = gradients(data, i, server.theta[::2], states[i].own, states[i].state)
        assert distance(now[i].own, minus(states[i].own, 0.3 * alpha, by_own)) < 1e-12
        assert distance(now[i].state, minus(states[i].state, 0.3 * alpha, by_head)) < 1e-12
        total = minus(total, -alpha, by_shared)
    assert distance(after.theta[::2], minus(server.theta[::2], 0.3, total)) < 1e-12


@pytest.mark.parametrize("name", slow_but(["fedsgd", "pflego"], "fedsgd"))
def test_the_own_part_steps_on_the_objective_too(name):
    """fair:2 multiplies the gradient of what stays by l_i^2, as it does that of what is sent."""
    data = fed_sa()
    plain = build_algorithm(name, data.model, data.population, **({"eta": 0.2} if name == "fedsgd" else PFLEGO))
    server, states = middle(plain, data)
    fair = with_objective(plain, "fair:2", sends="gradient")
    (_, once), (_, now) = (run(one, data, server=server, states=states) for one in (plain, fair))
    for i in data.ids:
        head = server.head if name == "fedsgd" else states[i].state
        factor = loss_by_hand(data, i, server.theta[::2], states[i].own, head) ** 2
        before = states[i].own
        moved = tree.subtract(once[i].own, before)
        assert distance(tree.subtract(now[i].own, before), tree.scale(factor, moved)) < 1e-12
        assert distance(now[i].own, once[i].own) > 1e-4


@pytest.mark.parametrize(
    ("name", "personal"), slow_but([(name, part) for name in QUICK for part in "AB"], ("pflego", "B"), ("fedavg", "B"))
)
def test_only_the_shared_part_is_sent(name, personal):
    """By bytes, both ways. Clients have the shared part in common, and each has an own one."""
    data = fed_sa(personal)
    engine = Simulation(build_algorithm(name, data.model, data.population, **QUICK[name]))
    algorithm, (server, states) = engine.algorithm, run(engine, data)
    output = engine.next(server, [states[i] for i in data.ids], [data.visit(i, 2) for i in data.ids])
    wanted = 8 * ((SHARED if personal == "B" else OWN) + (HEAD if name in ("fedavg", "fedsgd") else 0))
    for metrics in output.client_metrics:
        assert (int(metrics["bytes_down"]), int(metrics["bytes_up"])) == (wanted, wanted)
    message, kept = algorithm.message(output.server), output.client_states
    models = [algorithm.personal_model(message, kept[i], data.visit(i, 3)) for i in (1, 3)]
    own = personal == "B"
    for i, (one, two, start) in enumerate(zip(models[0].theta, models[1].theta, data.model.theta(), strict=True)):
        assert distance(one, two) > 1e-4 if i % 2 == own else distance(one, two) == 0 < distance(one, start)
    assert distance(models[0].theta[own::2], kept[1].own) == 0


def test_above_a_cut_and_a_kind_of_batch_norm():
    """`personal` goes with the model above the cut, and stays when the stored statistics are asked for."""
    whole = backbone(batch_norm=True)
    model = SplitModel(whole, train_from=whole.layers[1].name, adapters="bottleneck:2", personal="up")
    for one in (model, model.above, model.with_batch_norm("frozen"), model.with_batch_norm("frozen").above):
        assert one.own == (False, False, True, True) and len(one.initial_theta) == 4
    with pytest.raises(InvalidArgument, match="batch_norm='local' trains BatchNormalization.*with adapters"):
        model.with_batch_norm("local")


@pytest.mark.parametrize(
    ("adapters", "personal", "message"),
    [
        (None, "B", "personal='B' names a part of adapters, but there are no adapters: give adapters='lora:4'"),
        ("lora:2", "up", "parts of lora adapters are A, B, and one of them can stay"),
        ("bottleneck:2", "up_bias", "parts of bottleneck adapters are down, up"),
        ("lora:2", "A,B", "If all should stay, use the method local, or lg_fedavg"),
    ],
)
def test_a_part_that_there_is_not_is_refused(adapters, personal, message):
    with pytest.raises(InvalidArgument, match=message):
        SplitModel(backbone(), adapters=adapters, personal=personal)


SEVERAL = ("ditto", "apfl", "pfedme", "per_fedavg", "layerwise", "fedfomo", "fedamp", "heurfedamp", "pgfed", "pgfedmo")
SEVERAL += ("fedala", "fedas")


def test_methods_that_cannot_are_refused_with_the_reason():
    data = fed_sa()
    for name in (*SEVERAL, "scaffold", "feddyn", "fedrecon"):
        with pytest.raises(InvalidArgument, match=f"{name} cannot leave a part of theta with the client: .*Use "):
            build_algorithm(name, data.model, data.population)
    for name in ("local", "lg_fedavg"):
        with pytest.raises(InvalidArgument, match=f"{name} sends no weights of the backbone.*Leave personal out"):
            build_algorithm(name, data.model, data.population)
        build_algorithm(name, toy(adapters="lora:2").model, data.population)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedprox", "fedrep", "fedbabu", "fedrod", "fedavg_ft", "fedprox_ft"])
def test_all_others_train(name):
    data = fed_sa()
    algorithm = build_algorithm(name, data.model, data.population)
    server, states = run(algorithm, data, rounds=2)
    model = algorithm.personal_model(algorithm.message(server), states[2], data.visit(2, 3))
    assert isinstance(model, Weights) and isinstance(model.head, Head) and algorithm.global_model is None
    assert distance(states[1].own, states[3].own) > 1e-4


@pytest.mark.slow
def test_a_robust_aggregator_sees_the_shared_part():
    """Of one client, the median is its update."""
    data = fed_sa()
    algorithm = build_algorithm("fedavg", data.model, data.population, **FEDAVG)
    one, other = (run(a, data, cohort=[2]) for a in (algorithm, median(algorithm)))
    assert distance(one[0], other[0]) < 1e-12 and distance(one[1][2].own, other[1][2].own) < 1e-12


def on(federation, name):
    model = SplitModel(backbone("float32"), adapters="lora:2", personal="B")
    return build_algorithm(name, model, battery.small_population(federation), **QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pflego", "fedavg"])
def test_both_engines_agree(name, federation, tff):
    battery.both_engines_agree(battery.Subject(on(federation, name), federation))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_contract_is_kept(name, federation):
    """The battery without the checks that need many rounds or TFF."""
    subject = battery.Subject(on(federation, name), federation)
    for check in battery.CHECKS:
        if check not in battery.NEED_TFF and check is not battery.the_loss_falls:
            check(subject)


@pytest.mark.parametrize("name", slow_but(["fedavg_ft", "fedprox_ft", "fedbabu", "fedavg", "fedper"], "fedavg_ft"))
def test_fair_weighs_with_the_loss_of_the_model_before_the_local_steps(name):
    """Not of the fine-tuned one, with which the clients of some of these methods predict."""
    data, tunes = fed_sa(), name in ("fedavg_ft", "fedprox_ft", "fedbabu")
    plain = build_algorithm(name, data.model, data.population, **FEDAVG)
    server, states = middle(plain, data)
    message, visit = plain.message(server), data.visit(2)
    weight = with_objective(plain, "fair:1").client_update(message, states[2], visit).weight
    untuned = build_algorithm(name, data.model, data.population, **FEDAVG, **({"steps_ft": 0} if tunes else {}))
    head = untuned.personal_model(message, states[2], visit).head
    theta = server.theta if hasattr(server, "theta") else server
    expected = loss_by_hand(data, 2, theta[::2], states[2].own, head)
    assert abs(float(weight) / EXAMPLES[2] - float(expected)) < 1e-12
