"""Fed3R against a ridge regression on the examples of all, whoever comes when; its refinement; a head for PFLEGO."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.rounds import COHORTS, by_hand, loss_of, play
from helpers.toys import distance, identical, toy
from tfpfl.algorithms import build_algorithm, fed3r, pflego
from tfpfl.algorithms.fed3r import MISSING, Sums, ridge, sums_of
from tfpfl.data.population import Population
from tfpfl.models import SplitModel, passes, tree
from tfpfl.models.weights import Head, Weights

PLAIN = {"normalize": False, "temperature": 1.0, "steps_ft": 0}


def features(data, i):
    return data.model.features(data.model.theta(), data.data[i][0]).numpy()


def centralized(data, clients, lam, normalize=False, temperature=1.0) -> Head:
    """Least squares of an augmented system, which needs neither the sums nor a Cholesky factorization."""
    phi, y = np.concatenate([features(data, i) for i in clients]), np.concatenate([data.data[i][1] for i in clients])
    a, targets = np.hstack([phi, np.ones((len(phi), 1))]), np.eye(4)[y]
    size = a.shape[1]
    augmented = np.vstack([a, np.sqrt(lam) * np.eye(size)]), np.vstack([targets, np.zeros((size, 4))])
    w = np.linalg.lstsq(*augmented, rcond=None)[0]
    if normalize:
        norms = np.linalg.norm(w[:-1], axis=0)
        w = np.divide(w, norms, out=np.zeros_like(w), where=norms > 0)  # a class that nobody has yet
    return Head(w[:-1] / temperature, w[-1] / temperature)


def head_of(algorithm, server) -> Head:
    return algorithm.global_model(algorithm.message(server)).head


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"normalize": True}, {"normalize": True, "temperature": 0.1}])
def test_it_is_the_ridge_regression_on_all_that_have_come(data, how):
    """After every round with absent clients, some of which come again, and after each of another order of rounds."""
    algorithm = fed3r(data.model, data.population, lam=0.05, **PLAIN | how)
    for cohorts in (COHORTS, COHORTS[::-1], [(4, 3), (0,), (1, 2), (0, 1, 2, 3, 4)]):
        path, states = play(algorithm, data, cohorts)
        come = set()
        for cohort, server in zip(cohorts, path, strict=True):
            come |= set(cohort)
            assert distance(head_of(algorithm, server), centralized(data, sorted(come), 0.05, **how)) < 1e-9
        assert all(bool(state) for state in states.values())


def test_a_second_visit_sends_zeros_and_who_never_came_is_not_counted(data):
    algorithm = fed3r(data.model, data.population, **PLAIN)
    (first, second), states = play(algorithm, data, [(1, 3), (1,)])
    assert identical(first, second)
    assert {i for i, counted in states.items() if bool(counted)} == {1, 3}
    output = algorithm.client_update(algorithm.message(second), states[1], data.visit(1))
    assert not any(np.any(leaf) for leaf in tf.nest.flatten(output.update))


def test_masks_of_dropout_are_not_in_the_sums():
    """They would be other sums in every visit, and by their diagonal too large however many examples there are."""
    data, layers = toy(), keras.layers
    stack = layers.Dense(6, "tanh", dtype="float64"), layers.Dropout(0.5, dtype="float64")
    network = keras.Sequential([keras.Input((4,), dtype="float64"), *stack])
    algorithm = fed3r(SplitModel(network), data.population, **PLAIN)
    head, (x, y) = algorithm.message(algorithm.init_server()), data.data[1]
    expected = sums_of(tf.constant(network(x).numpy()), tf.one_hot(y, 4, dtype="float64"))
    for visit in (data.visit(1, t) for t in (1, 2)):
        with passes.drawing(visit.key):
            assert distance(algorithm.client_update(head, tf.constant(False), visit).update, expected) < 1e-12


def test_a_class_that_nobody_has_keeps_zeros():
    data = toy(classes=(2, 3, 2, 3, 3))
    people = Population(data.population.num_examples, data.population.num_classes, num_labels=4)
    (*_, server), _ = play(fed3r(data.model, people, steps_ft=0), data)
    assert not np.any(server.head.kernel[:, 3]) and float(server.head.bias[3]) == 0
    norms = np.linalg.norm(server.head.kernel[:, :3], axis=0)
    np.testing.assert_allclose(norms, 10, atol=1e-9)  # 1 / the temperature


@pytest.mark.parametrize("part", ["head", "full", "body"])
def test_the_refinement_is_gradient_descent_on_the_head_before_it_is_divided(data, part):
    """As the authors' code: the logits are divided by the temperature, and the steps are on what gives them."""
    algorithm = fed3r(data.model, data.population, eta_ft=0.1, steps_ft=4, part=part, momentum=0.5)
    (*_, server), states = play(algorithm, data)
    loss = loss_of(data, 2)

    def divided(u):
        return u._replace(head=tree.scale(10.0, u.head))  # the default temperature is 0.1

    u = Weights(data.model.theta(), tree.scale(0.1, server.head))
    if part == "full":
        u = by_hand(lambda v: loss(divided(v)), u, 0.1, 4, 0.5)
    elif part == "head":
        u = u._replace(head=by_hand(lambda h: loss(divided(u._replace(head=h))), u.head, 0.1, 4, 0.5))
    else:
        u = u._replace(theta=by_hand(lambda t: loss(divided(u._replace(theta=t))), u.theta, 0.1, 4, 0.5))
    expected = divided(u)
    assert distance(expected, divided(Weights(data.model.theta(), tree.scale(0.1, server.head)))) > 1e-2
    found = algorithm.personal_model(algorithm.message(server), states[2], data.visit(2))
    assert distance(found, expected) < 1e-9


def test_with_local_labels_other_classes_have_no_probability(data):
    algorithm = fed3r(data.model, data.population, local_labels=True, steps_ft=3, eta_ft=0.1)
    (*_, server), states = play(algorithm, data)
    assert float(server.head.bias[3]) > MISSING  # the common head has all four
    for i in data.ids:
        x, y = data.data[i]
        found = algorithm.personal_model(algorithm.message(server), states[i], data.visit(i))
        p = tf.nn.softmax(data.model.logits(found, x)).numpy()
        others = [c for c in range(4) if c not in y]
        assert not p[:, others].any() and p[:, np.unique(y)].all()


def test_its_head_is_the_first_one_of_pflego_and_of_a_shared_head(data):
    """PFLEGO then starts with the ridge regression, and is right more often than with the heads that are drawn."""
    people = Population(data.population.num_examples, [4] * 5)  # the classes of all: global labels
    ridge = build_algorithm("fed3r", data.model, people)
    server = play(ridge, data)[0][-1]
    model = data.model.with_initial_head(head_of(ridge, server))
    info = people.info(2, "float64")
    algorithm = build_algorithm("pflego", model, people, tau=3, beta=0.01)
    assert distance(algorithm.init_client(info), server.head) == 0
    assert distance(model.shared_head(4), server.head) == 0
    assert distance(pflego(data.model, people).init_client(info), server.head) > 0.1
    zeros = build_algorithm("pflego", model, people, head_init="zeros").init_client(info)
    assert not np.any(zeros.kernel)  # a method's own choice comes first
    right = []
    for m in (model, data.model):
        algorithm = pflego(m, people)
        message, visits = algorithm.message(algorithm.init_server()), [data.visit(i) for i in data.ids]
        z = [m.logits(algorithm.personal_model(message, algorithm.init_client(v.info), v), v.x) for v in visits]
        right.append(sum(int(np.sum(np.argmax(z_i, 1) == v.y)) for z_i, v in zip(z, visits, strict=True)))
    assert right[0] > 1.5 * right[1], right


def test_its_head_is_the_fixed_one_of_fedbabu(data):
    """The authors' Fed3R+FT with a fixed head: FedBABU trains the backbone for it."""
    ridge = fed3r(data.model, data.population)
    head = head_of(ridge, play(ridge, data)[0][-1])
    algorithm = build_algorithm("fedbabu", data.model.with_initial_head(head), data.population, steps=3, steps_ft=0)
    path, _ = play(algorithm, data)
    w = algorithm.personal_model(algorithm.message(path[-1]), (), data.visit(0))
    assert distance(w.head, head) == 0 and distance(w.theta, data.model.theta()) > 1e-3


@pytest.mark.parametrize(("scale", "lam"), [(1.0, 1e-4), (255.0, 0.01)])
def test_rounding_of_what_clients_send_makes_no_nan(scale, lam):
    """The matrix of float32 sums has negative eigenvalues below -lam here; float64 sums have not."""
    rng = np.random.default_rng(0)
    phi = np.abs(rng.standard_normal((300, 400))).astype(np.float32) * scale
    y = np.eye(5)[rng.integers(0, 5, 300)]
    sent = sums_of(tf.constant(phi), tf.constant(y, tf.float32))
    sums = Sums(*(tf.cast(part, tf.float64) for part in sent))
    assert np.linalg.eigvalsh(sums.gram)[0] < -lam
    assert not np.isfinite(tf.linalg.cholesky(sums.gram + lam * np.eye(401)).numpy()).all()
    head = ridge(sums, lam)
    exact = ridge(sums_of(tf.constant(phi, tf.float64), tf.constant(y)), lam)
    scores = [phi @ each.kernel.numpy() + each.bias.numpy() for each in (head, exact)]
    assert np.isfinite(scores[0]).all() and np.abs(scores[0] - y).max() < 0.5
    assert (scores[0].argmax(1) == scores[1].argmax(1)).all()


def test_refusals(data):
    for wrong in ({"lam": 0.0}, {"lam": -1.0}, {"temperature": 0.0}, {"part": "tail"}, {"steps_ft": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fed3r(data.model, data.population, **wrong)
    head = Head(np.zeros((5, 4)), np.zeros(4))
    with pytest.raises(ValueError, match=r"has 4 outputs, and heads of pflego have 2, 3 for this population.*global"):
        build_algorithm("pflego", data.model.with_initial_head(head), data.population)
    with pytest.raises(ValueError, match=r"kernel \[5, K\] and a bias \[K\], found \[4, 4\] and \[4\]"):
        data.model.with_initial_head(Head(np.zeros((4, 4)), np.zeros(4)))
    with pytest.raises(ValueError, match="NaN or infinity"):
        data.model.with_initial_head(head._replace(bias=np.full(4, np.nan)))
