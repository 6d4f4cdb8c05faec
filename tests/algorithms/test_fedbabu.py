"""FedBABU: a head that is orthogonal and never moves, a body that descends against it, and fine-tuning on top."""

import numpy as np
import pytest
from scipy.linalg import polar

from helpers.rounds import by_hand, loss_of, play
from helpers.toys import distance, gradient, identical, objective
from tfpfl.algorithms import fedbabu
from tfpfl.algorithms.fedbabu import orthogonal_head
from tfpfl.models import tree
from tfpfl.models.weights import Weights


def matrix(head):
    """W: [K, M + 1]."""
    return np.vstack([head.kernel, np.asarray(head.bias)[None]]).T


@pytest.mark.parametrize("num_labels", [1, 2, 4, 6, 9])
def test_the_head_is_the_polar_factor_of_a_uniform_matrix(data, num_labels):
    """M + 1 = 6: orthonormal rows up to six labels, orthonormal columns from there."""
    uniform = matrix(data.model.shared_head(num_labels, "uniform01"))
    w = matrix(orthogonal_head(data.model, num_labels))
    assert 0 <= uniform.min() and uniform.max() < 1 and w.shape == (num_labels, 6)
    gram = w @ w.T if num_labels <= 6 else w.T @ w
    np.testing.assert_allclose(gram, np.eye(min(num_labels, 6)), atol=1e-12)
    np.testing.assert_allclose(w, polar(uniform)[0], atol=1e-9)


def test_the_head_never_moves_and_is_everyones(data):
    algorithm = fedbabu(data.model, data.population, eta=0.3, steps=3, steps_ft=0)
    path, states = play(algorithm, data)
    head = algorithm.personal_model(data.model.theta(), (), data.visit(0)).head
    assert identical(head, orthogonal_head(data.model, data.population.shared_labels()))
    for i in data.ids:
        assert identical(algorithm.personal_model(path[-1], states[i], data.visit(i)).head, head)
    output = algorithm.client_update(path[-1], (), data.visit(2))
    assert identical(algorithm.local_model(path[-1], output).head, head)
    assert distance(path[-1], data.model.theta()) > 1e-3  # and all the while theta did


def test_neither_message_nor_update_has_a_head(data):
    algorithm = fedbabu(data.model, data.population, steps=1)
    theta = data.model.theta()
    update = algorithm.client_update(algorithm.message(theta), (), data.visit(0)).update
    assert [w.shape for w in update] == [w.shape for w in algorithm.message(theta)] == [w.shape for w in theta]


def test_one_step_with_everyone_is_gradient_descent_on_theta(data):
    algorithm = fedbabu(data.model, data.population, eta=0.3, steps=1)
    head = algorithm.local_model(
        data.model.theta(), algorithm.client_update(data.model.theta(), (), data.visit(0))
    ).head
    theta = data.model.theta()
    for found in play(algorithm, data, [data.ids] * 3)[0]:
        slope = gradient(lambda theta: objective(data, theta, dict.fromkeys(data.ids, head)), theta)[0]
        theta = tree.add_scaled(theta, -0.3, slope)
        assert distance(found, theta) < 1e-9


def test_clients_have_momentum_09(data):
    algorithm = fedbabu(data.model, data.population, eta=0.1, steps=4)
    theta = data.model.theta()
    held = algorithm.local_model(theta, algorithm.client_update(theta, (), data.visit(1)))
    expected = by_hand(lambda t: loss_of(data, 1)(Weights(t, held.head)), theta, 0.1, 4, momentum=0.9)
    assert distance(held.theta, expected) < 1e-9


def test_fine_tuning_of_everything_moves_also_the_head(data):
    algorithm = fedbabu(data.model, data.population, eta=0.1, steps=4, eta_ft=0.2, epochs_ft=3)
    plain = fedbabu(data.model, data.population, eta=0.1, steps=4, epochs_ft=0)
    theta = data.model.theta()
    start = plain.personal_model(theta, (), data.visit(1))
    expected = by_hand(loss_of(data, 1), start, 0.2, 3, momentum=0.9)
    assert distance(algorithm.personal_model(theta, (), data.visit(1)), expected) < 1e-9
    assert identical(play(algorithm, data)[0], play(plain, data)[0])


def test_refusals(data):
    for wrong in ({"eta": -1.0}, {"momentum": -1.0}, {"steps": 0}, {"weighting": "alpha"}, {"part": "tail"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fedbabu(data.model, data.population, **wrong)
