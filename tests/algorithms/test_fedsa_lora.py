"""FedSA-LoRA: its listing written out by GradientTape over rounds with absent clients, and what it is a case of."""

import pytest
import tensorflow as tf

from helpers.rounds import COHORTS, nothing_arrives, play
from helpers.toys import distance, gradient, identical, initial_states, toy
from tfpfl.algorithms import adapters, build_algorithm, fedavg
from tfpfl.checks import InvalidArgument
from tfpfl.models import tree

WORK = {"eta": 0.3, "steps": 3}


@pytest.fixture(scope="module")
def data():
    return toy(adapters="lora:2:3")


def loss(data, i):
    """l_i of A, B and the head; two layers, ALPHA / R = 1.5."""
    x, y = data.data[i]
    frozen = data.model.backbone.get_weights()

    def of(a, b, head):
        phi = tf.constant(x)
        for layer in range(2):
            kernel = frozen[2 * layer] + 1.5 * a[layer] @ b[layer]
            phi = tf.tanh(phi @ kernel + frozen[2 * layer + 1])
        z = phi @ head.kernel + head.bias
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z))

    return of


def test_rounds_are_written_out(data):
    """Clients that skip rounds and come late: B_i stays where its client left it."""
    algorithm = build_algorithm("adapters", data.model, data.population, **WORK)
    path, states = play(algorithm, data)
    theta, head = algorithm.init_server()
    a, own = theta[::2], {i: state.own for i, state in initial_states(algorithm, data.population).items()}
    assert distance(own, tree.zeros_like(own)) == 0
    for t, cohort in enumerate(COHORTS):
        total, moved = sum(data.population.num_examples[i] for i in cohort), tree.zeros_like((a, head))
        for i in cohort:
            now = (a, own[i], head)
            for _ in range(3):
                now = tree.add_scaled(now, -0.3, gradient(loss(data, i), *now))
            own[i] = now[1]
            change = tree.subtract((now[0], now[2]), (a, head))
            moved = tree.add_scaled(moved, data.population.num_examples[i] / total, change)
        a, head = tree.add((a, head), moved)
        assert distance((path[t].theta[::2], path[t].head), (a, head)) < 1e-9
        assert distance(path[t].theta[1::2], theta[1::2]) == 0  # nobody sends a B
    assert distance({i: state.own for i, state in states.items()}, own) < 1e-9
    assert min(distance(b, tree.zeros_like(b)) for b in own.values()) > 1e-3
    for i in data.ids:
        found = algorithm.personal_model(algorithm.message(path[-1]), states[i], data.visit(i))
        assert distance((found.theta[::2], found.theta[1::2], found.head), (a, own[i], head)) < 1e-9


@pytest.mark.slow
def test_it_is_fedavg_whose_b_is_personal(data):
    """Mini-batches and momentum; the part may be named or not."""
    work = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}
    named = toy(adapters="lora:2:3", personal="B")
    expected = play(build_algorithm("fedavg", named.model, named.population, **work), named)
    for each in (data, named):
        found = play(build_algorithm("adapters", each.model, each.population, **work), each)
        assert distance(found, expected) == 0
    assert distance(play(fedavg(data.model, data.population, **work), data)[0], expected[0]) > 1e-3


def test_what_is_sent_and_what_a_new_client_has(data):
    algorithm = adapters(data.model, data.population, **WORK)
    some = [(0, 2, 3), (2, 3)]  # 1 never comes
    path, states = play(algorithm, data, some)
    message = algorithm.message(path[-1])
    update = algorithm.client_update(message, states[1], data.visit(1)).update
    assert [w == () for w in message.theta] == [w == () for w in update.theta] == [False, True] * 2
    model = algorithm.personal_model(message, states[1], data.visit(1))
    plain = toy().model  # with B = 0, the frozen backbone
    phi = plain.features(plain.theta(), data.visit(1).x)
    assert distance(data.model.features(model.theta, data.visit(1).x), phi) < 1e-12
    assert identical(model.head, path[-1].head)
    assert identical(nothing_arrives(algorithm, data, path[-1]), path[-1])


def test_the_model_of_the_caller_stays_what_it_is(data):
    algorithm = adapters(data.model, data.population)
    assert algorithm.model.own == (False, True) * 2 and data.model.own == (False,) * 4
    with pytest.raises(InvalidArgument, match="no adapters with a part 'B'"):
        toy().model.with_personal("B")
    with pytest.raises(InvalidArgument, match="no adapters with a part 'up'"):
        data.model.with_personal("up")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({}, "must have adapters 'lora:R', found none. Give --adapters lora:4"),
        ({"adapters": "scale_shift"}, "found 'scale_shift'"),
        ({"adapters": "lora:2", "personal": "A"}, "with personal='B', found another part. Leave personal out"),
    ],
)
def test_other_models_are_refused(model, why):
    other = toy(**model)
    with pytest.raises(InvalidArgument, match=why):
        build_algorithm("adapters", other.model, other.population)


@pytest.mark.parametrize(("name", "value"), [("eta", -1.0), ("momentum", -1.0), ("steps", 0), ("weighting", "q")])
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        adapters(data.model, data.population, **{name: value})
