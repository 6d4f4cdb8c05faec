"""Prediction by the nearest examples, against scikit-learn's."""

import numpy as np
import pytest
import tensorflow as tf
from sklearn.neighbors import KNeighborsClassifier

from tflite_export import BundleError, DeviceClient, Neighbours, SavedHead


@pytest.fixture
def client(bundle):
    return DeviceClient(bundle, interpreter=tf.lite.Interpreter)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "weight", "scale"), [(1, 1.0, 1.0), (5, 0.3, 2.0), (10, 0.0, 1.0), (1000, 0.8, 0.5)])
def test_votes_are_those_of_scikit_learn(client, federation, k, weight, scale):
    (x, y), (new, _) = federation.arrays(4, "train"), federation.arrays(4, "test")
    judge = KNeighborsClassifier(min(k, len(x)), weights=lambda d: np.exp(-d / scale), algorithm="brute")
    votes = judge.fit(client.features(x).astype(float), y).predict_proba(client.features(new).astype(float))
    found = Neighbours(client, x, y).predict(new, k=k, weight=weight, scale=scale)
    np.testing.assert_allclose(found, weight * votes + (1 - weight) * client.predict(new), atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)


def test_a_new_client_predicts_before_any_training(client, federation):
    kernel, bias = client.head
    client.start_from(SavedHead(np.zeros_like(kernel), np.zeros_like(bias), "0" * 64))
    x, y = federation.arrays(4, "train")
    first = np.concatenate([np.flatnonzero(y == c)[:2] for c in range(3)])
    rest = np.setdiff1d(np.arange(len(y)), first)

    def mean_recall(probabilities):
        right = probabilities.argmax(1) == y[rest]
        return np.mean([right[y[rest] == c].mean() for c in range(3)])

    found = Neighbours(client, x[first], y[first]).predict(x[rest], weight=1.0)
    assert mean_recall(client.predict(x[rest])) == pytest.approx(1 / 3) and mean_recall(found) > 0.8
    nobody = Neighbours(client, x[:0], y[:0])
    assert np.array_equal(nobody.predict(x[rest], weight=1.0), client.predict(x[rest]))


def test_classes_that_come_and_go_after_the_features_were_computed(client, federation):
    """Examples keep their class by its name; those of a class that is gone do not vote."""
    x, y = federation.arrays(4, "train")
    near, (first, second, third) = Neighbours(client, x, y), client.labels
    before = near.predict(x, k=len(x), weight=1.0)
    client.remove_class(first)
    assert client.labels == (second, third)
    found = near.predict(x[y > 0], k=1, weight=1.0)
    assert np.array_equal(found, np.eye(2, dtype=np.float32)[y[y > 0] - 1])  # each is its own nearest example
    found = near.predict(x, k=len(x), weight=1.0)  # all that are left vote, with the same weights as before
    np.testing.assert_allclose(found, before[:, 1:] / before[:, 1:].sum(1, keepdims=True), atol=1e-6)
    client.add_class("new")
    assert np.array_equal(near.predict(x, k=len(x), weight=1.0)[:, :2], found)
    for name in (second, third):
        client.add_class(f"not {name}")
        client.remove_class(name)
    assert np.array_equal(near.predict(x, weight=1.0), client.predict(x)), "nobody is left who could vote"


def test_far_from_all_examples_the_nearest_decides(client, federation):
    x, y = federation.arrays(4, "train")
    near = Neighbours(client, x, y)
    for scale in (1e-3, 5e-324):  # the smallest number: a distance divided by it is infinite
        found = near.predict(100 * x[:3], weight=1.0, scale=scale)
        assert np.isfinite(found).all() and np.allclose(found.sum(1), 1)


def test_what_does_not_fit_is_refused(client, federation):
    x, y = federation.arrays(4, "train")
    near = Neighbours(client, x, y)
    wrong = {"k": (0, 2.5), "weight": (1.1, "0.5"), "scale": (0.0, np.nan, None)}
    for given in ({name: value} for name, values in wrong.items() for value in values):
        with pytest.raises(BundleError, match="are needed, found"):
            near.predict(x, **given)
    with pytest.raises(BundleError, match="label 3 is out of range"):
        Neighbours(client, x, y + 1)
    client.receive(client.theta + np.float32(0.01))
    with pytest.raises(BundleError, match="theta has changed"):
        near.predict(x)
