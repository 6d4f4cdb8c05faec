"""The server of asynchronous rounds alone: clients that differ 100 times in speed, by a virtual clock."""

import numpy as np
import pytest

from helpers.clocked import Quadratics
from helpers.marks import slow_but
from tfpfl.live.arrivals import MEMORY, Arrival, AsyncServer

CASES = {  # name: (rates, standard deviation of log seconds, arrivals, seed)
    "three": ((1.0, 9.7, 100.0), 0.0, 20_000, 0),
    "jitter": (tuple(np.geomspace(1, 100, 5)), 1.0, 400_000, 1),
}


class Equal(AsyncServer):
    """Every update counts the same, as in FedBuff."""

    def remember(self, arrival):
        super().remember(arrival)
        return 1 / self.buffer


@pytest.mark.parametrize("name", slow_but(CASES, "three", ci=("jitter",)))
def test_the_mean_step_is_the_full_gradient(name):
    """At a fixed theta. With equal weights, the gradient of the fastest client is what comes out."""
    rates, jitter, arrivals, seed = CASES[name]
    clients = Quadratics(len(rates), seed)
    full = clients.full_gradient(clients.start)
    mean, _ = clients.run(rates, arrivals, jitter=jitter)
    assert np.linalg.norm(mean - full) < 1e-3 * np.linalg.norm(full)
    equal, _ = clients.run(rates, min(arrivals, 5000), jitter=jitter, server=Equal)
    assert np.linalg.norm(equal - full) > 0.1 * np.linalg.norm(full)


RHOS = {"0.01": 0.01, "0.001": 0.001}


@pytest.mark.parametrize("rho", slow_but(RHOS, "0.01", ci=("0.001",)))
def test_theta_ends_where_the_full_gradient_is_zero(rho):
    """The gradient at the mean of theta is of the order of rho, the size of a step."""
    rates, arrivals, rho = (1.0, 9.7, 100.0), int(150 / RHOS[rho]), RHOS[rho]
    clients = Quadratics(3, 0)
    _, theta = clients.run(rates, arrivals, rho, jitter=0.5)
    first = np.linalg.norm(clients.full_gradient(clients.start))
    assert np.linalg.norm(clients.full_gradient(theta)) < 2 * rho * first
    _, theta = clients.run(rates, arrivals, rho, jitter=0.5, server=Equal)
    assert np.linalg.norm(clients.full_gradient(theta)) > 0.05 * first


def server_of(clients=4, buffer=3):
    alphas = {i: (i + 1) / 10 for i in range(clients)}
    return AsyncServer(alphas, buffer, np.zeros(2), lambda state, total: state - total, np.zeros(2))


def test_weights_add_up_to_all_arrivals():
    """For any order: a client's weights sum to alpha_i for each step, but for what is owed at the two ends."""
    rng, server = np.random.default_rng(0), server_of()
    weights, gaps, last = {i: [] for i in range(4)}, {i: [] for i in range(4)}, dict.fromkeys(range(4), 0)
    for n in range(1, 501):
        i = int(rng.choice(4, p=[0.7, 0.2, 0.09, 0.01]))
        weights[i].append(server.remember(Arrival(i, *server.begin(i)[:3])) * server.buffer / server.alphas[i])
        gaps[i].append(n - last[i])
        last[i] = n
    for i, found in weights.items():
        assert found[0] == max(4, gaps[i][0])
        owed = found[0] - gaps[i][0] + (1 / MEMORY - 1) * (found[0] - found[-1])
        assert sum(found) == pytest.approx(last[i] + owed) and sum(gaps[i]) == last[i]
        assert server.per_step(i) == pytest.approx(server.buffer / found[-1])


def test_who_was_away_is_not_paid_for_it():
    server = server_of()
    for _ in range(100):
        server.remember(server.arrival(0, server.version))
    assert server.begin(1, away=True).since == 100
    assert server.remember(server.arrival(1, server.version)) == pytest.approx(0.2 * 4 / 3)  # as if all were equal
    assert server.remember(server.arrival(2, server.version)) == pytest.approx(0.3 * 102 / 3)  # this one was at work


def test_equal_clients_count_alpha_from_the_first_step():
    """One step of K = I equal clients is a round of all clients."""
    server = server_of(buffer=4)
    for step in (1, 2, 3):
        for i in range(4):
            server.take(Arrival(i, *server.begin(i)[:3]), np.array([1.0, 10.0**i]))
        alphas = np.array(list(server.alphas.values()))
        assert np.allclose(server.state, -step * np.array([alphas.sum(), alphas @ 10.0 ** np.arange(4)]))
        assert server.version == step and server.visits == dict.fromkeys(range(4), step)


def test_an_update_is_of_a_theta_after_the_one_before():
    server = server_of(buffer=1)
    for i in (0, 1, 1):
        server.take(server.arrival(i, server.version), np.zeros(2))
    assert [server.may_have(0, v) for v in (0, 1, 3, 4)] == [False, True, True, False]
    assert [server.may_have(2, v) for v in (0, 3)] == [True, True]
