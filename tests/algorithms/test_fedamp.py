"""FedAMP and HeurFedAMP: the attention against its definition and against GradientTape; clients by hand."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import by_hand, loss_of, play, shared
from helpers.toys import distance, identical, initial_states, toy
from tfpfl.algorithms import fedamp, heurfedamp, local
from tfpfl.algorithms.fedamp import attention, heuristic_attention
from tfpfl.models import tree

SOLVER = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}
ALL = tf.fill([6], True)
SOME = tf.constant([True, False, True, True, False, True])


@pytest.fixture(scope="module")
def models():
    """Six vectors, some near each other: [6, 9]."""
    rng = np.random.default_rng(5)
    return tf.constant(np.repeat(rng.standard_normal((3, 9)), 2, 0) + 0.3 * rng.standard_normal((6, 9)))


def attraction(models, sigma):
    """A(W) = sum over pairs of 1 - exp(-|w_i - w_j|^2 / sigma)."""
    pairs = [(i, j) for i in range(len(models)) for j in range(i + 1, len(models))]
    return tf.add_n([1 - tf.exp(-tf.reduce_sum(tf.square(models[i] - models[j])) / sigma) for i, j in pairs])


@pytest.mark.parametrize(("alpha", "sigma"), [(0.5, 4.0), (3.0, 1.0), (0.01, 50.0)])
def test_attention_is_the_papers(models, alpha, sigma):
    xi = attention(models, ALL, alpha=alpha, sigma=sigma).numpy()
    apart = np.sum((models.numpy()[:, None] - models.numpy()[None]) ** 2, -1)
    expected = alpha * np.exp(-apart / sigma) / sigma
    np.fill_diagonal(expected, 0)
    np.fill_diagonal(expected, 1 - expected.sum(1))
    assert distance(xi, expected) < 1e-9
    assert distance(xi.sum(1), np.ones(6)) < 1e-9 and distance(xi, xi.T) < 1e-9
    u = xi @ models.numpy()
    assert distance(u.mean(0), models.numpy().mean(0)) < 1e-9  # symmetric: column means are preserved
    assert distance(u, models) > 1e-3


@pytest.mark.parametrize(("alpha", "sigma"), [(0.5, 4.0), (3.0, 1.0)])
def test_a_step_of_attention_is_a_gradient_step_on_the_attraction(models, alpha, sigma):
    with tf.GradientTape() as tape:
        tape.watch(models)
        value = attraction(models, sigma)
    expected = models - alpha / 2 * tape.gradient(value, models)
    assert distance(attention(models, ALL, alpha=alpha, sigma=sigma) @ models, expected) < 1e-9


def test_equal_models_attend_to_each_other_and_stay(models):
    equal = tf.tile(models[:1], [6, 1])
    xi = attention(equal, ALL, alpha=0.5, sigma=4.0).numpy()
    assert distance(xi[~np.eye(6, dtype=bool)], np.full(30, 0.5 / 4.0)) < 1e-9
    assert distance(xi @ equal.numpy(), equal) < 1e-9


def test_without_alpha_nobody_listens(models):
    # -0.0 counts as 0.0: TensorFlow gives the one for the other where a process has used both.
    assert np.array_equal(attention(models, ALL, alpha=0.0, sigma=4.0), np.eye(6))


@pytest.mark.parametrize("weigh", [attention, heuristic_attention])
def test_who_never_sent_a_model_is_not_there(models, weigh):
    options = {"alpha": 0.5} if weigh is attention else {"self_weight": 0.3}
    xi, there = weigh(models, SOME, sigma=4.0, **options).numpy(), SOME.numpy()
    alone = tf.boolean_mask(models, SOME)
    assert distance(xi[there][:, there], weigh(alone, tf.fill([4], True), sigma=4.0, **options)) < 1e-9
    assert identical(xi[~there], np.eye(6)[~there]) and not xi[there][:, ~there].any()
    for nobody in (tf.fill([6], False), tf.one_hot(2, 6, True, False, dtype=tf.bool)):
        assert identical(weigh(models, nobody, sigma=4.0, **options), tf.eye(6, dtype=tf.float64))


def test_rescaled_weights_leave_something_for_oneself(models):
    literal = attention(models, ALL, alpha=9.0, sigma=4.0).numpy()
    xi = attention(models, ALL, alpha=9.0, sigma=4.0, rescale=True).numpy()
    assert literal.diagonal().min() < -0.5 and xi.diagonal().min() >= -1e-12
    off = ~np.eye(6, dtype=bool)
    assert np.ptp(literal[off] / xi[off]) < 1e-9 and literal[off][0] > xi[off][0]  # one factor for all: still symmetric
    assert distance(xi.sum(1), np.ones(6)) < 1e-9
    small = {"alpha": 0.5, "sigma": 4.0}
    assert identical(attention(models, ALL, **small, rescale=True), attention(models, ALL, **small))


def test_models_far_from_0_and_close_to_each_other_keep_their_distances_in_float32(models):
    close = 30 + 1e-3 * models.numpy()
    expected = attention(tf.constant(close), ALL, alpha=0.5, sigma=1e-5)
    found = attention(tf.constant(close, tf.float32), ALL, alpha=0.5e-5, sigma=1e-5)
    off = ~np.eye(6, dtype=bool)
    assert distance(found.numpy()[off], 1e-5 * expected.numpy()[off]) < 0.02


def test_heuristic_attention_is_a_softmax_of_cosines(models):
    xi = heuristic_attention(models, ALL, sigma=3.0, self_weight=0.2).numpy()
    unit = models.numpy() / np.linalg.norm(models, axis=1, keepdims=True)
    powers = np.exp(3.0 * unit @ unit.T)
    np.fill_diagonal(powers, 0)
    expected = 0.8 * powers / powers.sum(1, keepdims=True) + 0.2 * np.eye(6)
    assert distance(xi, expected) < 1e-9
    assert distance(xi.sum(1), np.ones(6)) < 1e-9 and identical(xi.diagonal(), np.full(6, 0.2))


def test_limits_of_heuristic_attention(models):
    uniform = heuristic_attention(models, ALL, sigma=0.0, self_weight=0.4).numpy()
    assert distance(uniform[~np.eye(6, dtype=bool)], np.full(30, 0.6 / 5)) < 1e-9
    mean = heuristic_attention(models, ALL, sigma=0.0, self_weight=1 / 6) @ models
    assert distance(mean, tf.tile(tf.reduce_mean(models, 0)[None], [6, 1])) < 1e-9
    assert np.array_equal(heuristic_attention(models, ALL, sigma=9.0, self_weight=1.0), np.eye(6))
    sharp = heuristic_attention(models, ALL, sigma=1e6, self_weight=0.0).numpy()  # no overflow: all for the nearest
    assert distance(sharp[[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]], np.ones(6)) < 1e-9


def test_heuristic_attention_does_not_see_the_length_of_models(models):
    longer = models * tf.constant([[1.0], [7.0], [0.02], [300.0], [1.0], [2.0]], tf.float64)
    options = {"sigma": 5.0, "self_weight": 0.2}
    assert distance(heuristic_attention(longer, ALL, **options), heuristic_attention(models, ALL, **options)) < 1e-9
    with_zero = models * tf.constant([[0.0], [1.0], [1.0], [1.0], [1.0], [1.0]], tf.float64)
    assert np.isfinite(heuristic_attention(with_zero, ALL, **options)).all()


@pytest.mark.parametrize("build", [fedamp, heurfedamp])
@pytest.mark.parametrize("start", ["u", "w"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_client_descends_on_its_loss_near_u(data, build, start, momentum):
    algorithm = build(data.model, data.population, lam=0.6, alpha=0.4, start=start, eta=0.1, steps=5, momentum=momentum)
    u, w = shared(data), shared(data, seed=4)
    message = algorithm.message(algorithm.init_server(), tf.constant(2))._replace(u=u)
    output = algorithm.client_update(message, w, data.visit(2))

    def penalized(v):
        apart = tree.subtract(v, u)
        return loss_of(data, 2)(v) + 0.6 / (2 * 0.4) * tree.dot(apart, apart)

    expected = by_hand(penalized, u if start == "u" else w, 0.1, 5, momentum)
    assert distance(output.state, expected) < 1e-9
    assert identical(output.update, tree.to_vector(output.state))
    assert identical(algorithm.local_model(message, output), output.state)
    assert identical(algorithm.personal_model(message, w, data.visit(2)), w)  # its own, not the newest u


@pytest.mark.slow
@pytest.mark.parametrize("build", slow_but([fedamp, heurfedamp], fedamp))
def test_rounds_in_which_clients_are_missing(data, build):
    """Client 0 leaves after round 1, client 1 joins in round 3, client 4 never comes; weights and messages by hand."""
    options = {"alpha": 0.7, "sigma": 4.0} if build is fedamp else {"sigma": 4.0, "self_weight": 0.3}
    algorithm = build(data.model, data.population, **options, **SOLVER)
    cohorts = [(0, 2, 3), (2, 3), (1, 2)]
    first = initial_states(algorithm, data.population)
    last, present = [tree.to_vector(first[i]) for i in range(5)], np.zeros(5, bool)
    server, states = algorithm.init_server(), first
    for t, cohort in enumerate(cohorts, 1):
        for i in range(5):  # before the round
            message = algorithm.message(server, tf.constant(i))
            expected = np.asarray(server.attention)[i] @ np.stack(last)
            assert distance(tree.to_vector(message.u), expected) < 1e-9
            assert float(message.self_weight) == float(server.attention[i, i])
            if not present[i]:
                assert distance(message.u, first[i]) < 1e-12
        [server], states = play(algorithm, data, [cohort], server, states, first=t)
        for i in cohort:
            last[i], present[i] = tree.to_vector(states[i]), True
        assert identical(server.models, np.stack(last)) and identical(server.present, present)
        weigh = attention if build is fedamp else heuristic_attention
        assert distance(server.attention, weigh(tf.stack(last), tf.constant(present), **options)) < 1e-12
    xi = server.attention.numpy()
    assert present.tolist() == [True, True, True, True, False] and identical(states[4], first[4])
    assert identical(xi[4], np.eye(5)[4]) and not xi[:4, 4].any()
    assert (xi[1:4, 0] > 0).all() and xi[0, 2] > 0  # who left is still attended to
    assert xi[2, 1] > 0  # and who came late as well


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "options"), [(fedamp, {"alpha": 1e-14, "sigma": 1.0}), (heurfedamp, {"self_weight": 1.0})]
)
def test_without_attention_and_penalty_it_is_local_training(build, options):
    data = toy(classes=(4,) * 5)  # own heads are as wide as the shared one
    algorithm = build(data.model, data.population, lam=0.0, **options, **SOLVER)
    start = initial_states(algorithm, data.population)
    _, expected = play(local(data.model, data.population, **SOLVER), data, states=start)
    _, states = play(algorithm, data)
    assert distance(states, expected) < 1e-9 and distance(states, start) > 1e-2


@pytest.mark.slow
def test_the_uniform_heuristic_without_penalty_is_uniform_averaging(data):
    """sigma = 0 and xi_ii = 1 / m with everyone present: FedAvg with equal weights."""
    from tfpfl.algorithms import fedavg

    algorithm = heurfedamp(data.model, data.population, lam=0.0, sigma=0.0, self_weight=0.2, **SOLVER)
    everyone = [range(5)] * 3
    path, _ = play(algorithm, data, everyone)
    expected, _ = play(fedavg(data.model, data.population, weighting="uniform", **SOLVER), data, everyone)
    for server, w in zip(path, expected, strict=True):
        assert distance(algorithm.message(server, tf.constant(3)).u, w) < 1e-9


def test_stiff_penalties_and_negative_weights_warn(data):
    with pytest.warns(UserWarning, match=r"lam / alpha=1000.0 with a rate of 0.1"):
        fedamp(data.model, data.population, lam=10.0, alpha=0.01, eta=0.1)
    with pytest.warns(UserWarning, match=r"alpha \(I - 1\) / sigma is 20"):
        fedamp(data.model, data.population, alpha=5.0, sigma=1.0)
    algorithm = fedamp(data.model, data.population, lam=10.0, alpha=0.01, eta=0.1, steps=20, implicit_prox=True)
    message, state = algorithm.message(algorithm.init_server(), tf.constant(0)), shared(data)
    assert distance(algorithm.client_update(message, state, data.visit(0)).state, message.u) < 0.05


@pytest.mark.parametrize("build", [fedamp, heurfedamp])
def test_refusals(data, build):
    wrong = [{"lam": -1.0}, {"alpha": 0.0}, {"alpha": -1.0}, {"sigma": -1.0}, {"start": "x"}, {"eta": -1.0}]
    wrong += [{"steps": 0}, {"sigma": 0.0}] if build is fedamp else [{"self_weight": 1.2}]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            build(data.model, data.population, **options)
