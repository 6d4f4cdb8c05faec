"""pFedHN against NumPy's chain rule and its own optimizer over rounds with absent clients; its limits; new clients."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, by_hand, loss_of, play
from helpers.toys import client_loss, distance, gradient
from tfpfl.algorithms import pfedhn
from tfpfl.data.population import Population
from tfpfl.models import tree
from tfpfl.models.weights import Weights

SMALL = {"hidden_dim": 6, "n_hidden": 1, "eta": 0.1, "momentum": 0.5, "steps": 2}


def forward(layers, v):
    """(w, the inputs of each layer, which relus let through) of one embedding, in NumPy."""
    inputs, opens = [], []
    for place, (kernel, bias) in enumerate(layers):
        inputs.append(v)
        v = v @ kernel + bias
        through = v > 0 if place < len(layers) - 2 else np.ones_like(v, bool)
        opens.append(through)
        v = np.where(through, v, 0)
    return v, inputs, opens


def backward(layers, inputs, opens, out):
    """The gradient of <w, out> by the layers, and by the embedding."""
    found = []
    for (kernel, _), v, through in zip(layers[::-1], inputs[::-1], opens[::-1], strict=True):
        out = np.where(through, out, 0)
        found.append((np.outer(v, out), out))
        out = kernel @ out
    return found[::-1], out


def model_of(data, vector):
    like = Weights(data.model.theta(), data.model.shared_head(4))
    return tree.from_vector(tf.constant(vector), like)


def trained(data, weights, i, steps=2):
    return np.asarray(tree.to_vector(by_hand(loss_of(data, i), weights, 0.1, steps, 0.5)))


@pytest.mark.parametrize(
    "how",
    slow_but(
        [
            {"hyper_momentum": 0.0, "wd": 0.0, "clip": None, "alpha": 0.05},
            {"alpha": 0.03, "embed_alpha": 0.07},  # with the authors' momentum and decay
            {"alpha": 0.03, "clip": 0.01, "n_hidden": 2, "embed_dim": 4},
            {"n_hidden": 0, "bias_init": "uniform"},
        ],
        {"alpha": 0.03, "embed_alpha": 0.07},
    ),
)
def test_it_is_written_out_over_rounds(data, how):
    """Embeddings of absent clients move by momentum and decay only."""
    how = SMALL | how
    algorithm = pfedhn(data.model, data.population, **how)
    path, _ = play(algorithm, data)
    alpha, m, wd, clip = (
        how.get(k, d) for k, d in (("alpha", 0.01), ("hyper_momentum", 0.9), ("wd", 0.001), ("clip", 50))
    )
    rates = [how.get("embed_alpha", alpha), *[alpha] * 20]
    table, layers = tree.arrays(algorithm.init_server().hyper)
    assert table.shape == (5, how.get("embed_dim", 2)) and len(layers) == how["n_hidden"] + 2
    numbers = [table, *[w for layer in layers for w in layer]]
    velocity = [np.zeros_like(w) for w in numbers]
    clipped = 0
    for server, cohort in zip(path, COHORTS, strict=True):
        slopes = [np.zeros_like(w) for w in numbers]
        layers = list(zip(numbers[1::2], numbers[2::2], strict=True))
        for i in cohort:
            w, inputs, opens = forward(layers, numbers[0][i])
            move = w - trained(data, model_of(data, w), i)
            of_layers, slopes[0][i] = backward(layers, inputs, opens, move)
            for place, slope in enumerate([s for layer in of_layers for s in layer], 1):
                slopes[place] += slope / len(cohort)
        norm = np.sqrt(sum((s**2).sum() for s in slopes))
        if clip is not None and norm > clip:
            slopes, clipped = [s * clip / norm for s in slopes], clipped + 1
        velocity = [m * u + s + wd * w for u, s, w in zip(velocity, slopes, numbers, strict=True)]
        numbers = [w - rate * u for w, rate, u in zip(numbers, rates, velocity, strict=False)]
        found = [server.hyper.embeddings, *[w for layer in server.hyper.layers for w in layer]]
        assert max(np.abs(np.asarray(a) - b).max() for a, b in zip(found, numbers, strict=True)) < 1e-9
    assert (clipped > 0) == (how.get("clip", 50) == 0.01)


def test_all_start_near_the_initial_model_and_apart_from_each_other(data):
    """With a last kernel of zeros they would be w^0 itself."""
    algorithm = pfedhn(data.model, data.population, **SMALL)
    server = algorithm.init_server()
    w_0 = Weights(data.model.theta(), data.model.shared_head(4))
    made = [algorithm.message(server, tf.constant(i)) for i in data.ids]
    assert 1e-3 < min(distance(w, w_0) for w in made) and distance(made[0], made[1]) > 1e-3
    layers = (*server.hyper.layers[:-1], (tf.zeros_like(server.hyper.layers[-1][0]), server.hyper.layers[-1][1]))
    flat = server._replace(hyper=server.hyper._replace(layers=layers))
    assert distance(algorithm.message(flat, tf.constant(3)), w_0) == 0


def test_it_does_not_depend_on_anything_but_the_seed(data):
    a, b = (pfedhn(data.model, data.population, **SMALL).init_server() for _ in range(2))
    assert distance(a, b) == 0
    wide = pfedhn(data.model, Population([4] * 40, [2] * 40)).init_server()
    assert wide.hyper.embeddings.shape == (40, 11)  # floor(1 + 40 / 4)
    assert abs(float(tf.math.reduce_std(wide.hyper.embeddings)) - 1) < 0.1


@pytest.mark.slow
def test_a_new_client_fits_an_embedding_and_the_hypernetwork_stays(data):
    """By GradientTape for the weights, and the chain rule for the embedding."""
    algorithm = pfedhn(data.model, data.population, **SMALL, alpha=0.05, eta_new=0.3)
    (*_, server), _ = play(algorithm, data)
    outside = tf.constant(77)
    sent, visit = algorithm.adapt.message(server), data.visit(1)
    fit = algorithm.adapt.start(sent, (), visit)
    predicts = algorithm.message(server, outside)
    assert distance(algorithm.adapt.model(fit), predicts) < 1e-12
    layers = tree.arrays(server.hyper.layers)
    v = np.asarray(server.hyper.embeddings).mean(0)
    losses = []
    for n in range(4):
        fit = algorithm.adapt.epoch(fit, visit, n)
        w, inputs, opens = forward(layers, v)
        w = model_of(data, w)
        losses.append(float(client_loss(data, 1, *w)))
        slope = tree.to_vector(gradient(lambda w: client_loss(data, 1, *w), w)[0]).numpy()
        v = v - 0.3 * backward(layers, inputs, opens, slope)[1]
        np.testing.assert_allclose(fit.embedding, v, atol=1e-9)
    assert distance(fit.layers, server.hyper.layers) == 0 and losses[-1] < losses[0] - 1e-3


def test_refusals(data):
    wrong = (
        {"embed_dim": 0},
        {"hidden_dim": 0},
        {"n_hidden": -1},
        {"clip": 0.0},
        {"clip": float("inf")},
        {"alpha": -1.0},
        {"wd": -1.0},
    )
    for each in (*wrong, {"bias_init": "zeros"}, {"eta_new": float("nan")}, {"steps": 0}):
        with pytest.raises(ValueError, match=next(iter(each))):
            pfedhn(data.model, data.population, **each)
    with pytest.raises(ValueError, match="of memory are available"):
        pfedhn(data.model, data.population, hidden_dim=10**9)
