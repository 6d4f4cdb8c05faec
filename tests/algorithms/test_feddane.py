"""FedDANE: its rule by GradientTape, its limits, and clients that leave between the exchanges."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, loss_of, play
from helpers.toys import distance, gradient, initial_states
from tfpfl.algorithms import feddane, fedprox, fedsgd
from tfpfl.algorithms.contract import Between
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import tree


def rounds_by_hand(data, start, cohorts, eta, mu, steps, weighting="examples", gone=((),) * 9):
    """FedDANE from the paper, with full batches: w after every round. `gone` leave between the exchanges."""
    w, path = start, []
    for cohort, left in zip(cohorts, gone, strict=False):
        size = {i: len(data.data[i][1]) if weighting == "examples" else 1.0 for i in cohort}
        gradients = {i: gradient(loss_of(data, i), w)[0] for i in cohort}
        g = tree.zeros_like(w)
        for i in cohort:
            g = tree.add_scaled(g, size[i] / sum(size.values()), gradients[i])
        stay = [i for i in cohort if i not in left]
        new = w
        for i in stay:
            v = w
            for _ in range(steps):
                d = tree.add(gradient(loss_of(data, i), v)[0], tree.subtract(g, gradients[i]))
                v = tree.add_scaled(v, -eta, tree.add_scaled(d, mu, tree.subtract(v, w)))
            new = tree.add_scaled(new, size[i] / sum(size[j] for j in stay), tree.subtract(v, w))
        w = new
        path.append(w)
    return path


@pytest.mark.parametrize("weighting", slow_but(["examples", "uniform"], "examples", ci=("uniform",)))
def test_rounds_are_the_papers(data, weighting):
    algorithm = feddane(data.model, data.population, mu=0.4, eta=0.1, steps=3, weighting=weighting)
    path, _ = play(algorithm, data, COHORTS)
    expected = rounds_by_hand(data, algorithm.init_server().w, COHORTS, 0.1, 0.4, 3, weighting)
    for found, w in zip(path, expected, strict=True):
        assert distance(found.w, w) < 1e-12
    assert distance(expected[-1], expected[0]) > 1e-2


@pytest.mark.slow
def test_one_step_is_fedsgd(data):
    """Every client of the cohort takes the step -eta g, whatever mu is."""
    found, _ = play(feddane(data.model, data.population, mu=5.0, eta=0.2, steps=1), data)
    uniform = fedsgd(data.model, data.population, eta=0.2)
    server, expected = found[0]._replace(), []
    w = feddane(data.model, data.population).init_server().w
    for cohort in COHORTS:
        n = {i: len(data.data[i][1]) for i in cohort}
        for_all = {i: gradient(loss_of(data, i), w)[0] for i in cohort}
        for i in cohort:
            w = tree.add_scaled(w, -0.2 * n[i] / sum(n.values()), for_all[i])
        expected.append(w)
    assert max(distance(a.w, b) for a, b in zip(found, expected, strict=True)) < 1e-13
    assert uniform.population is data.population and server is not None


@pytest.mark.slow
def test_without_the_correction_it_is_fedprox(data):
    """A client alone in its round has g = g_i."""
    cohorts = [(2,), (0,), (4,)]
    dane, _ = play(feddane(data.model, data.population, mu=0.3, eta=0.1, steps=4), data, cohorts)
    prox, _ = play(fedprox(data.model, data.population, mu=0.3, eta=0.1, steps=4), data, cohorts)
    assert max(distance(a.w, b) for a, b in zip(dane, prox, strict=True)) < 1e-13


def test_corrections_of_a_round_add_up_to_zero(data):
    """So with mini-batches, too, the mean first step is the mean of the cohort's mini-batch gradients."""
    algorithm = feddane(data.model, data.population, weighting="uniform", eta=0.1, steps=1, batch_size=3)
    server = algorithm.init_server()
    kept = {i: algorithm.first.client_update(server.w, (), data.visit(i)).state for i in data.ids}
    g = tree.scale(1 / len(kept), tree.total(list(kept.values())) if hasattr(tree, "total") else _sum(kept.values()))
    message = server._replace(g=g)
    moves = [algorithm.client_update(message, Between((), kept[i]), data.visit(i)).update for i in data.ids]
    plain = fedprox(data.model, data.population, mu=0.0, eta=0.1, steps=1, batch_size=3)
    expected = [plain.client_update(server.w, (), data.visit(i)).update for i in data.ids]
    assert distance(_sum(moves), _sum(expected)) < 1e-13
    assert distance(moves[0], expected[0]) > 1e-3


def _sum(structures):
    return tf.nest.map_structure(lambda *leaves: tf.add_n(leaves), *structures)


@pytest.mark.slow
def test_who_leaves_between_the_exchanges_is_in_g_alone(data):
    algorithm = feddane(data.model, data.population, mu=0.4, eta=0.1, steps=3)
    engine, states = Simulation(algorithm), initial_states(algorithm, data.population)
    server, cohort = engine.initialize(), [0, 2, 3]
    given = [states[i] for i in cohort], [data.visit(i) for i in cohort]
    output = engine.next(server, *given, gone=[2])
    [expected] = rounds_by_hand(data, server.w, [cohort], 0.1, 0.4, 3, gone=[[2]])
    assert distance(output.server.w, expected) < 1e-12
    everyone = engine.next(server, *given)
    assert distance(output.server.g, everyone.server.g) < 1e-15  # the first exchange was the same
    assert distance(output.server.w, everyone.server.w) > 1e-4
    d = sum(np.size(leaf) for leaf in tf.nest.flatten(server.w))
    assert [int(m["bytes_up"]) // 8 for m in output.client_metrics] == [2 * d, d, 2 * d]
    assert [int(m["bytes_down"]) // 8 for m in output.client_metrics] == [3 * d, d, 3 * d]
    assert int(output.metrics["bytes_up"]) == 2 * 2 * d * 8


@pytest.mark.slow
def test_nothing_of_the_round_is_kept(data):
    algorithm = feddane(data.model, data.population)
    assert algorithm.init_client(data.population.info(0)) == ()
    _, states = play(algorithm, data)
    assert set(states.values()) == {()}
