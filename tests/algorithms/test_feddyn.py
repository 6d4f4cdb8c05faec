"""FedDyn: its invariant, its first round in closed form, and where it ends."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.quadratics import flat, optimum, quadratic, use
from helpers.rounds import COHORTS, by_hand, loss_of, mean, nothing_arrives, play, rounds_of, shared
from helpers.toys import distance, gradient, identical, initial_states, toy
from tfpfl.algorithms import fedavg, feddyn, fedprox
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.data.population import Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import tree

BATCHES = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}
SOME = [(0, 2, 3), (2, 3), (0, 2), (3,), (2,)]  # 1 and 4 never come, 0 leaves


@pytest.fixture(scope="module")
def data():
    """Two of five clients a round, where the tests do not say another number: I is not r."""
    return toy(sampling=Sampling("fixed", 0.4))


@pytest.mark.parametrize(
    "options", slow_but([{"dyn": 0.1}, {"dyn": 3.0, "implicit_prox": True}], {"dyn": 0.1}), ids=str
)
def test_h_is_the_mean_of_all_clients_gradients_always(data, options):
    """Of all I: those that never came and those that left as well."""
    algorithm = feddyn(data.model, data.population, **BATCHES, **options)

    def visits(_, ids, t):
        return [data.visit(i, t) for i in ids]

    for t, (output, states) in enumerate(rounds_of(Simulation(algorithm), algorithm, SOME + COHORTS, visits), 1):
        server = output.server
        assert distance(server.h, mean(states.values())) < 1e-9
        assert distance(server.h, tree.zeros_like(server.h)) > 1e-3
        if t == len(SOME):
            assert all(identical(states[i], tree.zeros_like(server.h)) == (i in (1, 4)) for i in data.ids)


@pytest.mark.slow
@pytest.mark.parametrize("dyn", slow_but([0.5, 1e-12], 0.5))
@pytest.mark.parametrize("cohort", slow_but([[0, 2, 3], [1], [0, 1, 2, 3, 4]], [0, 2, 3]))
def test_round_1_overshoots_the_mean_by_r_of_i(data, dyn, cohort):
    """w + (1 + r / I) mean (v_i - w): a -> 0 is not FedAvg. Without gradients yet, v_i is FedProx's with mu = a."""
    (found,), _ = play(feddyn(data.model, data.population, dyn=dyn, **BATCHES), data, [cohort])
    sibling = fedavg if dyn < 1e-9 else lambda *a, **k: fedprox(*a, **k, mu=dyn)
    sibling = sibling(data.model, data.population, weighting="uniform", **BATCHES)
    w = sibling.init_server()
    (average,), _ = play(sibling, data, [cohort])
    expected = tree.add_scaled(w, 1 + len(cohort) / 5, tree.subtract(average, w))
    assert distance(found.w, expected) < 1e-9
    assert distance(found.w, average) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_visit_is_written_out(data, momentum):
    """SGD on l_i(v) - <g_i, v> + (a / 2) |v - w|^2."""
    a, w, g = 0.7, shared(data), shared(data, seed=5)
    algorithm = feddyn(data.model, data.population, dyn=a, eta=0.1, steps=5, momentum=momentum)

    def regularized(v):
        apart = tree.subtract(v, w)
        return loss_of(data, 1)(v) - tree.dot(g, v) + a / 2 * tree.dot(apart, apart)

    output = algorithm.client_update(w, g, data.visit(1))
    v = by_hand(regularized, w, 0.1, 5, momentum)
    assert distance(algorithm.local_model(w, output), v) < 1e-9
    assert distance(output.update, tree.subtract(v, w)) < 1e-9
    assert distance(output.state, tree.add_scaled(g, -a, tree.subtract(v, w))) < 1e-9
    assert float(output.weight) == 1  # clients count the same, whatever their N_i


@pytest.mark.slow
def test_a_norm_is_that_of_the_change_of_the_model(data):
    """A limit above every |v_i - w| rejects nobody, clips nothing, and moves the server to the same place."""
    algorithm, ids = feddyn(data.model, data.population, **BATCHES), list(data.ids)
    server, states = shared(data), initial_states(algorithm, data.population)
    outputs = [algorithm.client_update(server, states[i], data.visit(i)) for i in ids]
    moves = [tree.subtract(algorithm.local_model(server, output), server) for output in outputs]
    norms = [float(tf.linalg.global_norm(tf.nest.flatten(move))) for move in moves]
    limit = 1.001 * max(norms)
    limited = screened(algorithm, max_norm=limit, clip_norm=limit)
    start, theirs = algorithm.init_server()._replace(w=server), [data.visit(i) for i in ids]
    plain, found = (Simulation(a).next(start, [states[i] for i in ids], theirs) for a in (algorithm, limited))
    assert [float(m["update_norm"]) for m in found.client_metrics] == pytest.approx(norms)
    assert int(found.metrics["rejected"]) == 0
    assert distance(found.server, plain.server) < 1e-12
    assert distance(found.client_states, plain.client_states) < 1e-12
    size = sum(int(tf.size(leaf)) for leaf in tf.nest.flatten(server))
    assert int(plain.metrics["bytes_up"]) == len(ids) * 8 * size  # float64, and nothing but the change


@pytest.mark.slow
@pytest.mark.parametrize("dyn", slow_but([0.4, 2.0], 0.4))
def test_an_exact_solve_leaves_the_clients_gradient_in_its_state(data, dyn, monkeypatch):
    """And solves it: (A + a I) v = b + g + a w on a quadratic."""
    use(monkeypatch, "feddyn")
    algorithm, w, g = feddyn(data.model, data.population, dyn=dyn, eta=0.4, steps=150), shared(data), shared(data, 5)
    output = algorithm.client_update(w, g, data.visit(3))
    a, b = quadratic(data, 3, len(flat(w)))
    v = np.linalg.solve(a + dyn * np.eye(len(b)), b + flat(g) + dyn * flat(w))
    assert distance(flat(algorithm.local_model(w, output)), v) < 1e-9
    assert distance(flat(output.state), a @ v - b) < 1e-9


@pytest.mark.slow
def test_exact_solves_end_at_the_optimum_of_the_whole_under_partial_participation(data, monkeypatch):
    use(monkeypatch, "feddyn")
    algorithm = feddyn(data.model, data.population, dyn=0.7, eta=0.5, steps=60)
    (*_, server), states = play(algorithm, data, [(0, 2, 3), (1, 2), (1, 4), (0, 3, 4)] * 60)
    best = optimum(data, len(flat(server.w)))
    assert distance(flat(server.w), best) < 1e-9
    for i in data.ids:
        a, b = quadratic(data, i, len(best))
        assert distance(flat(states[i]), a @ best - b) < 1e-9


@pytest.mark.slow
def test_the_server_subtracts_what_all_clients_have_gathered(data):
    a, cohort = 0.3, (1, 3)
    algorithm = feddyn(data.model, data.population, dyn=a, **BATCHES)
    before, states = play(algorithm, data, SOME)
    server = before[-1]
    dv = [algorithm.client_update(server.w, states[i], data.visit(i)).update for i in cohort]
    (found,), _ = play(algorithm, data, [cohort], server, states)
    h = tree.add_scaled(server.h, -a / 5, tree.add(*dv))
    assert distance(found.h, h) < 1e-9
    assert distance(found.w, tree.add_scaled(tree.add(server.w, mean(dv)), -1 / a, h)) < 1e-9


@pytest.mark.slow
def test_a_round_in_which_nothing_arrives_changes_nothing(data):
    algorithm = feddyn(data.model, data.population, **BATCHES)
    server = play(algorithm, data)[0][-1]
    assert identical(nothing_arrives(algorithm, data, server), server)  # without h / a


@pytest.mark.slow
def test_a_client_that_comes_late_starts_without_a_gradient(data):
    algorithm = feddyn(data.model, data.population, **BATCHES)
    (*_, server), _ = play(algorithm, data, SOME)
    new = algorithm.init_client(data.population.info(4))
    assert identical(new, tree.zeros_like(server.w))
    assert identical(algorithm.personal_model(algorithm.message(server), new, data.visit(4)), server.w)
    output = algorithm.client_update(server.w, new, data.visit(4))
    prox = fedprox(data.model, data.population, mu=0.1, **BATCHES).client_update(server.w, (), data.visit(4))
    assert distance(output.update, prox.update) < 1e-9


@pytest.mark.slow
def test_a_stiff_regularizer_warns_and_its_implicit_step_is_stable(data):
    stiff, w = {"dyn": 100.0, "eta": 0.05, "steps": 100}, shared(data)
    with pytest.warns(UserWarning, match="dyn=100.0"):
        feddyn(data.model, data.population, **stiff)
    algorithm = feddyn(data.model, data.population, **stiff, implicit_prox=True)
    output = algorithm.client_update(w, tree.zeros_like(w), data.visit(0))
    assert distance(algorithm.local_model(w, output), w) < 0.05


@pytest.mark.parametrize(
    ("name", "value"), [("dyn", 0.0), ("dyn", -1.0), ("eta", -1.0), ("steps", 0), ("momentum", -1.0)]
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        feddyn(data.model, data.population, **{name: value})


@pytest.mark.slow
def test_momentum_that_is_kept_goes_on_in_the_next_visit(data):
    """The second visit is written out from the velocity of the first one; without, from rest."""
    a, m, eta = 0.7, 0.9, 0.05

    def steps(w, g, velocity):
        v = w
        for _ in range(4):
            slope = tree.subtract(gradient(loss_of(data, 2), v)[0], g)
            slope = tree.add_scaled(slope, a, tree.subtract(v, w))
            velocity = tree.add_scaled(slope, m, velocity)
            v = tree.add_scaled(v, -eta, velocity)
        return v, velocity

    for keep in (True, False):
        options = {"dyn": a, "eta": eta, "steps": 4, "momentum": m, "keep_momentum": keep}
        algorithm = feddyn(data.model, data.population, **options)
        (first,), states = play(algorithm, data, [(2,)])
        g = states[2].g if keep else states[2]
        w_0 = algorithm.init_server().w
        _, velocity = steps(w_0, tree.zeros_like(g), tree.zeros_like(g))
        expected, _ = steps(first.w, g, velocity if keep else tree.zeros_like(g))
        output = algorithm.client_update(first.w, states[2], data.visit(2, 2))
        assert distance(algorithm.local_model(first.w, output), expected) < 1e-9
        after = output.state.g if keep else output.state
        assert distance(after, tree.add_scaled(g, -a, tree.subtract(expected, first.w))) < 1e-9
    assert distance(velocity, tree.zeros_like(velocity)) > 1e-3
    with pytest.raises(ValueError, match="keep_momentum keeps what the option momentum makes"):
        feddyn(data.model, data.population, keep_momentum=True)
