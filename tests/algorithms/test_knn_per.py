"""kNN-Per against NumPy, example by example; its limits; what scores it, and what a new client gets."""

import sys
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from helpers.rounds import play, shared
from helpers.toys import distance, identical, toy, visits_by_id
from tfpfl.algorithms import fedavg, fedcp, finetuned, knn_per, memorized, pflego
from tfpfl.algorithms.contract import ClientData
from tfpfl.algorithms.knn_per import votes_of_others
from tfpfl.algorithms.transforms import scheduled
from tfpfl.checks import InvalidArgument
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.scoring import Scorer
from tfpfl.engines.tff.evaluation import federated_evaluation
from tfpfl.models import SplitModel
from tfpfl.models.losses import client_loss
from tfpfl.studies import battery

SOLVER = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_hand(phi, keys, labels, width, k, weight_of, left_out=None):
    """The votes of one example, by the definition."""
    away = [(np.linalg.norm(phi - key), n) for n, key in enumerate(keys) if n != left_out]
    votes = np.zeros(width)
    for d, n in sorted(away)[:k]:
        votes[labels[n]] += weight_of(d)
    return votes / votes.sum()


def expected(data, w, client, new, k, weight_of, lam=None):
    """(the probabilities of new examples, lambda_i) in NumPy."""
    x, y = data.data[client]
    keys, phi = (data.model.features(w.theta, each).numpy() for each in (x, new))
    head = lambda f: softmax(f @ w.head.kernel.numpy() + w.head.bias.numpy())  # noqa: E731
    votes = partial(by_hand, keys=keys, labels=y, width=len(w.head.bias), k=k, weight_of=weight_of)
    if lam is None:
        others = np.stack([votes(key, left_out=n) for n, key in enumerate(keys)])
        mixtures = [m / 10 * others + (1 - m / 10) * head(keys) for m in range(11)]
        losses = [-np.log(np.maximum(p[np.arange(len(y)), y], 1e-12)).sum() for p in mixtures]
        lam = min(range(11), key=lambda m: (-(mixtures[m].argmax(1) == y).sum(), losses[m])) / 10
    return lam * np.stack([votes(f) for f in phi]) + (1 - lam) * head(phi), lam


def outputs(algorithm, data, w, client, new):
    theta = algorithm.personal_model(w, (), data.visit(client)).theta
    return algorithm.predictor(w, (), data.visit(client))(data.model.features(theta, new)).numpy()


@pytest.mark.parametrize("lam", [None, 0.3, 1.0])
@pytest.mark.parametrize("kernel", ["paper", "code"])
def test_it_is_its_definition(data, kernel, lam):
    """New examples, and one of the client's own, where the distance is 0 and the formula of squares is not."""
    weights_of = {"paper": lambda d: np.exp(-d / 0.7), "code": lambda d: np.exp(-(d**2) / (5 * 0.7))}
    algorithm = knn_per(data.model, data.population, k=3, lam=lam, scale=0.7, kernel=kernel)
    chosen = set()
    for seed in (3, 4):
        w = shared(data, seed)
        for client in data.ids:
            new = np.concatenate([np.random.default_rng(client).standard_normal((6, 4)), data.data[client][0][:1]])
            p, lam_i = expected(data, w, client, new, 3, weights_of[kernel], lam)
            found = outputs(algorithm, data, w, client, new)
            np.testing.assert_allclose(found, np.log(np.maximum(p, 1e-12)), atol=1e-9)
            chosen.add(lam_i)
    assert lam is not None or len(chosen) > 2, f"the clients of this test choose only {chosen}"


def test_with_lambda_0_it_is_the_shared_model_and_with_one_neighbour_its_label(data):
    w, client = shared(data), 1
    x, y = data.data[client]
    found = outputs(knn_per(data.model, data.population, lam=0.0), data, w, client, x)
    assert distance(found, tf.nn.log_softmax(data.model.logits(w, x))) < 1e-9
    alone = outputs(knn_per(data.model, data.population, lam=1.0, k=1), data, w, client, x)
    assert (alone.argmax(1) == y).all() and (np.sort(alone, 1)[:, :-1] < -27).all()  # log 1e-12


def test_votes_of_others_go_by_parts(monkeypatch):
    """Seven examples, three at a time: as by the definition, and no example is its own neighbour."""
    rng = np.random.default_rng(0)
    keys, labels = rng.standard_normal((7, 3)), np.array([0, 1, 0, 2, 1, 0, 2])
    monkeypatch.setattr(sys.modules[votes_of_others.__module__], "VOTERS", 3)
    found = votes_of_others(tf.constant(keys), tf.constant(labels, tf.int32), 3, k=2, scale=1.0, kernel="paper")
    alone = [by_hand(key, keys, labels, 3, 2, lambda d: np.exp(-d), left_out=n) for n, key in enumerate(keys)]
    np.testing.assert_allclose(found, alone, atol=1e-12)


def test_far_from_everything_it_still_votes(data):
    """exp(-distance) itself would be 0 for all neighbours."""
    w, client = shared(data), 3
    algorithm = knn_per(data.model, data.population, lam=1.0, k=7, scale=1e-3)
    found = np.exp(outputs(algorithm, data, w, client, 3 * np.ones((2, 4))))
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-9)


def test_a_client_with_one_example_has_the_shared_model_or_its_label():
    data = toy(examples=(1, 5), classes=(1, 3))
    w = shared(data)
    new = np.random.default_rng(0).standard_normal((4, 4))
    found = outputs(knn_per(data.model, data.population), data, w, 0, new)
    assert distance(found, tf.nn.log_softmax(data.model.logits(w, new))) < 1e-9


@pytest.mark.slow
def test_training_is_that_of_fedavg(data):
    """Bit for bit, with absent clients; and any other method can be given a memory."""
    path, _ = play(knn_per(data.model, data.population, **SOLVER), data)
    expected_path, _ = play(fedavg(data.model, data.population, **SOLVER), data)
    assert identical(path, expected_path)
    base = pflego(data.model, data.population, tau=3, beta=0.1)
    algorithm = memorized(base, lam=0.5, k=2)
    (*_, server), states = play(base, data)
    for i in data.ids:  # heads of their own width
        found = algorithm.predictor(server.theta, states[i], data.visit(i))
        phi = data.model.features(server.theta, data.data[i][0])
        votes, head = np.exp(found(phi)), softmax((phi @ states[i].kernel + states[i].bias).numpy())
        assert votes.shape == head.shape
        of_neighbours = 2 * votes - head
        assert of_neighbours.min() > -1e-9 and distance(of_neighbours.sum(1), np.ones(len(votes))) < 1e-9


@pytest.mark.parametrize("wrap", [finetuned, memorized])
@pytest.mark.parametrize("base", [fedcp, knn_per])
def test_what_predicts_with_more_than_a_head_is_refused(data, base, wrap):
    """Its predictor was dropped, so that fine-tuning of 0 steps changed the predictions."""
    with pytest.raises(InvalidArgument, match=f"{wrap.__name__} works with the head of the personal model alone"):
        wrap(base(data.model, data.population))


@pytest.mark.slow
def test_both_ways_of_scoring_are_its_definition(federation):
    """Many clients in one pass, and each by itself; with rates that follow a schedule, whose messages are others."""
    model, people = SplitModel(battery.backbone("float64")), battery.small_population(federation)
    algorithm = scheduled(knn_per(model, people, eta=0.2, steps=4), "inverse:2")
    trained = battery.Trained(algorithm, Simulation(algorithm, federation)).rounds(3)
    visits = visits_by_id(people, battery.EVERYONE, 9, dtype="float64")
    states, message = trained.states(battery.EVERYONE), algorithm.message(trained.server)
    fused, alone = (
        Scorer(algorithm, federation, ["test"], grouping=how)(trained.server, states, visits)
        for how in ("auto", "one_by_one")
    )
    for i in battery.EVERYONE:
        train, (x, y) = (federation.reader(split, dtype="float64")(i) for split in ("train", "test"))
        state = ClientData(*train, visits[i].info, visits[i].key)
        z = algorithm.predictor(message, (), state)(model.features(message.own.theta, x))
        loss = float(model.kind.loss(z, y))
        assert abs(float(fused[i]["test_loss"]) - loss) < 1e-9 and abs(float(alone[i]["test_loss"]) - loss) < 1e-9
        assert int(fused[i]["test_correct"]) == int(tf.reduce_sum(tf.cast(tf.argmax(z, 1, tf.int32) == y, tf.int32)))
        of_all = float(client_loss(model)(message.own, x, y))
        assert abs(float(fused[i]["global_test_loss"]) - of_all) < 1e-9
    assert any(abs(float(s["test_loss"]) - float(s["global_test_loss"])) > 1e-3 for s in fused)


def test_tff_has_the_same_neighbours(federation, tff):
    """In its graphs, == of two tensors compares objects: each example had been its own neighbour."""
    model, people = SplitModel(battery.backbone("float64")), battery.small_population(federation)
    algorithm = knn_per(model, people, k=2, eta=0.2, steps=2)
    visits, server = visits_by_id(people, battery.EVERYONE, 9, dtype="float64"), algorithm.init_server()
    states = [()] * len(visits)
    found = federated_evaluation(algorithm, federation, ["test"])(server, states, visits)
    expected = Scorer(algorithm, federation, ["test"])(server, states, visits)
    losses = [[float(s["test_loss"]) for s in scores] for scores in (found, expected)]
    np.testing.assert_allclose(*losses, atol=1e-9)


def test_refusals(data):
    for wrong in ({"k": 0}, {"k": 4.5}, {"lam": 1.5}, {"scale": 0.0}, {"scale": -1.0}, {"kernel": "gauss"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            knn_per(data.model, data.population, **wrong)
