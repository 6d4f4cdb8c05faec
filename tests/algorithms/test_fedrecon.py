"""FedRecon against FedRep and PFLEGO, and its own options written out with GradientTape."""

from functools import partial

import pytest

from helpers.rounds import by_hand, loss_of, play
from helpers.toys import distance, gradient, identical, initial_states
from tfpfl.algorithms import fedrecon, fedrep, pflego
from tfpfl.algorithms.parts.local_training import support_and_query
from tfpfl.models import tree
from tfpfl.models.losses import cross_entropy
from tfpfl.models.weights import Weights
from tfpfl.runs.cost import count_work

TAU, BETA, RHO = 5, 0.2, 0.15


def thetas(path):
    return [server.theta for server in path]


@pytest.mark.slow
def test_with_sgd_it_is_fedrep_with_one_body_step(data):
    algorithm = fedrecon(data.model, data.population, tau=TAU, beta=BETA, rho=RHO, server_opt="sgd")
    path, heads = play(algorithm, data)
    sibling = fedrep(data.model, data.population, tau_h=TAU, tau_b=1, eta_h=BETA, eta_b=RHO)
    expected, expected_heads = play(sibling, data)
    assert distance(thetas(path), expected) < 1e-9 and distance(heads, expected_heads) < 1e-9


@pytest.mark.parametrize("tau", [1, 2, TAU])
def test_theta_moves_as_in_pflego_with_one_more_tau(data, tau):
    algorithm = fedrecon(data.model, data.population, tau=tau - 1, beta=BETA, rho=RHO, server_opt="sgd")
    sibling = pflego(data.model, data.population, tau=tau, beta=BETA, rho=RHO, server_opt="sgd")
    path, expected = (play(a, data, [data.ids])[0] for a in (algorithm, sibling))
    assert distance(thetas(path), thetas(expected)) < 1e-9


@pytest.mark.slow
def test_with_adam_on_both_servers_as_well(data):
    algorithm = fedrecon(data.model, data.population, tau=TAU - 1, beta=BETA, rho=0.01)
    sibling = pflego(data.model, data.population, tau=TAU, beta=BETA, rho=0.01, server_opt="adam")
    path, expected = (play(a, data, [data.ids])[0] for a in (algorithm, sibling))
    assert distance(thetas(path), thetas(expected)) < 1e-9


def test_more_steps_on_theta_send_the_distance_over_their_rate(data):
    algorithm = fedrecon(data.model, data.population, tau=TAU, beta=BETA, k_theta=3, eta=0.1)
    theta, head = data.model.theta(), initial_states(algorithm, data.population)[1]
    output = algorithm.client_update(theta, head, data.visit(1))
    new_head = by_hand(lambda h: loss_of(data, 1)(Weights(theta, h)), head, BETA, TAU)
    moved = by_hand(lambda t: loss_of(data, 1)(Weights(t, new_head)), theta, 0.1, 3)
    assert distance(output.update, tree.scale(10, tree.subtract(theta, moved))) < 1e-9
    assert distance(output.state, new_head) < 1e-9
    assert distance(output.metrics["loss"], loss_of(data, 1)(Weights(theta, new_head))) < 1e-9


def test_a_reset_head_forgets_its_last_visit(data):
    algorithm = fedrecon(data.model, data.population, tau=TAU, beta=BETA, reset_head=True)
    theta, start = data.model.theta(), initial_states(algorithm, data.population)[1]
    first = algorithm.client_update(theta, start, data.visit(1))
    second = algorithm.client_update(theta, first.state, data.visit(1))
    assert identical(first, second) and distance(first.state, start) > 1e-3
    rebuilt = by_hand(lambda h: loss_of(data, 1)(Weights(theta, h)), start, BETA, TAU)
    other = tree.scale(7, start)  # whatever is stored
    assert distance(algorithm.personal_model(theta, other, data.visit(1)), Weights(theta, rebuilt)) < 1e-9
    kept = fedrecon(data.model, data.population, tau=TAU, beta=BETA)
    assert identical(kept.personal_model(theta, other, data.visit(1)).head, other)


def rows(part):
    return sorted(map(tuple, part.x.numpy()))


@pytest.mark.parametrize(("fraction", "sizes"), [(0.01, 1), (0.34, 3), (0.5, 4), (1.0, 8)])
def test_support_and_query_are_two_parts_of_the_examples(data, fraction, sizes):
    """Client 1 has nine examples."""
    support, query = support_and_query(data.visit(1), fraction)
    assert len(rows(query)) == sizes and rows(support) + rows(query) != rows(data.visit(1))
    assert sorted(rows(support) + rows(query)) == rows(data.visit(1))
    again = support_and_query(data.visit(1, 2), fraction)[1]
    assert rows(again) != rows(query)  # another round, another split
    assert identical(support_and_query(data.visit(1), fraction)[1], query)


def test_a_single_example_is_support_and_query(data):
    visit = data.visit(0)
    one = visit._replace(x=visit.x[:1], y=visit.y[:1])
    assert all(identical((part.x, part.y), (one.x, one.y)) for part in support_and_query(one, 0.5))


def test_the_head_sees_the_support_and_theta_the_query(data):
    algorithm = fedrecon(data.model, data.population, tau=TAU, beta=BETA, query_fraction=0.4)
    theta, head = data.model.theta(), initial_states(algorithm, data.population)[3]
    support, query = support_and_query(data.visit(3), 0.4)

    def loss(part, theta, head):
        return cross_entropy(data.model.logits(Weights(theta, head), part.x), part.y)

    output = algorithm.client_update(theta, head, data.visit(3))
    new_head = by_hand(lambda h: loss(support, theta, h), head, BETA, TAU)
    slope = gradient(lambda t: loss(query, t, new_head), theta)[0]
    assert distance(output.state, new_head) < 1e-9 and distance(output.update, slope) < 1e-9
    assert distance(output.metrics["loss"], loss(query, theta, new_head)) < 1e-9


@pytest.mark.parametrize(
    ("options", "passes"),
    [({}, (1, 1)), ({"query_fraction": 0.5, "reset_head": True}, (1, 4 / 9)), ({"k_theta": 3}, (4, 3))],
)
def test_passes_through_the_backbone(data, options, passes):
    """With a split, the support (five of nine examples) only goes forward."""
    build = partial(fedrecon, population=data.population, tau=50, **options)
    assert count_work(build, data.model, data.visit(1)).passes == pytest.approx(passes)


def test_refusals(data):
    for wrong in (
        {"tau": -1},
        {"beta": -0.1},
        {"rho": -0.1},
        {"k_theta": 0},
        {"query_fraction": 1.1},
        {"server_opt": "lamb"},
        {"weighting": "alpha"},
        {"head_init": "ones"},
        {"eta": 0.0, "k_theta": 2},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fedrecon(data.model, data.population, **wrong)
