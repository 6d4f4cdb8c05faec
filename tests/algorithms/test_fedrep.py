"""FedRep against GradientTape in its two phases, and against PFLEGO's theta step."""

from functools import partial

import pytest

from helpers.marks import slow_but
from helpers.rounds import by_hand, loss_of, play
from helpers.toys import distance, identical, initial_states
from tfpfl.algorithms import fedrep, pflego
from tfpfl.models import tree
from tfpfl.models.weights import Weights
from tfpfl.runs.cost import count_work

ETA_H, ETA_B = 0.2, 0.1


@pytest.mark.slow
@pytest.mark.parametrize("batch", [{}, {"batch_size": 2, "unit": "epochs"}])
def test_a_phase_without_steps_leaves_its_part(data, batch):
    body_only = fedrep(data.model, data.population, tau_h=0, tau_b=2, eta_b=ETA_B, **batch)
    heads = initial_states(body_only, data.population)
    path, states = play(body_only, data)
    assert identical(states, heads) and distance(path[-1], data.model.theta()) > 1e-3
    head_only = fedrep(data.model, data.population, tau_h=2, tau_b=0, eta_h=ETA_H, **batch)
    path, states = play(head_only, data)
    assert identical(path[-1], data.model.theta()) and distance(states, heads) > 1e-3


@pytest.mark.slow
def test_theta_moves_as_in_pflego(data):
    """tau_h = tau - 1, one body step and eta_b = rho, from equal state, with everyone."""
    tau, rho = 6, 0.15
    algorithm = fedrep(data.model, data.population, tau_h=tau - 1, tau_b=1, eta_h=ETA_H, eta_b=rho)
    sibling = pflego(data.model, data.population, tau=tau, beta=ETA_H, rho=rho, server_opt="sgd")
    path, _ = play(algorithm, data, [data.ids])
    expected, _ = play(sibling, data, [data.ids])
    assert distance(path[0], expected[0].theta) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("momentum", slow_but([0.0, 0.9], 0.9))
@pytest.mark.parametrize("unit", ["steps", "epochs"])  # the same with all examples in one batch
def test_the_head_first_then_the_body_at_the_new_head(data, momentum, unit):
    algorithm = fedrep(
        data.model, data.population, tau_h=4, tau_b=3, eta_h=ETA_H, eta_b=ETA_B, momentum=momentum, unit=unit
    )
    theta = data.model.theta()
    for i, head in initial_states(algorithm, data.population).items():
        loss, output = loss_of(data, i), algorithm.client_update(theta, head, data.visit(i))
        new_head = by_hand(lambda h: loss(Weights(theta, h)), head, ETA_H, 4, momentum)  # noqa: B023
        new_theta = by_hand(lambda t: loss(Weights(t, new_head)), theta, ETA_B, 3, momentum)  # noqa: B023
        assert distance(algorithm.local_model(theta, output), Weights(new_theta, new_head)) < 1e-9
        assert identical(output.state, algorithm.local_model(theta, output).head)


@pytest.mark.slow
def test_a_batch_of_all_examples_is_the_closed_form_on_cached_features(data):
    """Full batches take the head's gradient in closed form; batches of more than N_i examples take it from autodiff."""
    work = {"tau_h": 5, "tau_b": 2, "eta_h": ETA_H, "eta_b": ETA_B, "momentum": 0.5}
    path, states = play(fedrep(data.model, data.population, **work), data)
    expected, expected_states = play(fedrep(data.model, data.population, **work, batch_size=100), data)
    assert distance(path, expected) < 1e-9 and distance(states, expected_states) < 1e-9


def test_the_server_averages_by_examples(data):
    algorithm = fedrep(data.model, data.population, tau_h=2, tau_b=2)
    theta, heads = data.model.theta(), initial_states(algorithm, data.population)
    cohort, total = (0, 1, 3), tree.scale(0, theta)
    for i in cohort:
        output = algorithm.client_update(theta, heads[i], data.visit(i))
        total = tree.add_scaled(total, int(data.population.num_examples[i]), output.update)
    expected = tree.add_scaled(theta, 1 / sum(int(data.population.num_examples[i]) for i in cohort), total)
    assert distance(play(algorithm, data, [cohort])[0][0], expected) < 1e-9


def test_passes_through_the_backbone(data):
    """One forward pass for all head steps; then one in each direction for a body step."""
    build = partial(fedrep, population=data.population, tau_h=45, tau_b=5)
    assert count_work(build, data.model, data.visit(1)).passes == pytest.approx((6, 5))
    head_only = partial(fedrep, population=data.population, tau_h=45, tau_b=0)
    assert count_work(head_only, data.model, data.visit(1)).passes == pytest.approx((1, 0))


def test_refusals(data):
    with pytest.raises(ValueError, match=r"tau_h \+ tau_b"):
        fedrep(data.model, data.population, tau_h=0, tau_b=0)
    for wrong in ({"tau_h": -1}, {"tau_b": -1}, {"unit": "rounds"}, {"momentum": -1.0}, {"head_init": "ones"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fedrep(data.model, data.population, **wrong)
    for rate in ("eta_h", "eta_b"):
        with pytest.raises(ValueError, match=rate):
            fedrep(data.model, data.population, **{rate: -1.0})
