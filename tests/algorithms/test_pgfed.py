"""PGFed and PGFedMo: FedAvg without mu, and otherwise the listing written out with GradientTape."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, loss_of, play
from helpers.toys import distance, gradient, identical, initial_states, toy
from tfpfl.algorithms import fedavg, pgfed, pgfedmo
from tfpfl.data.population import Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import tree

SOLVER = {"epochs": 2, "batch_size": 2, "momentum": 0.5}
FULL = {"steps": 4, "momentum": 0.5}  # full batches, which can be written out


@pytest.fixture(scope="module")
def data():
    """Five clients, of which two are expected in a round."""
    return toy(sampling=Sampling("fixed", 0.4))


@pytest.mark.slow
@pytest.mark.parametrize("build", slow_but([pgfed, pgfedmo], pgfedmo))
def test_without_mu_it_is_fedavg(data, build):
    base, algorithm = (
        fedavg(data.model, data.population, eta=0.1, **SOLVER),
        build(data.model, data.population, mu=0.0, eta=0.1, eta2=5.0, **SOLVER),
    )
    expected, _ = play(base, data)
    path, states = play(algorithm, data)
    assert distance([server.w for server in path], expected) < 1e-9
    assert identical(path[-1].A, np.full((5, 5), 0.5))
    before = [base.init_server(), *expected]
    for i, t in ((0, 3), (1, 3), (2, 4), (3, 3), (4, 4)):  # the last round of each
        copy = base.local_model(before[t - 1], base.client_update(before[t - 1], (), data.visit(i, t)))
        assert distance(states[i].v, copy) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("build", slow_but([pgfed, pgfedmo], pgfed))
def test_the_first_round_is_fedavg_for_any_mu(data, build):
    [expected], _ = play(fedavg(data.model, data.population, eta=0.1, **SOLVER), data, COHORTS[:1])
    [server], _ = play(build(data.model, data.population, mu=3.0, eta=0.1, eta2=2.0, **SOLVER), data, COHORTS[:1])
    assert distance(server.w, expected) < 1e-9
    assert identical(server.A, np.full((5, 5), 0.5))


def listing(data, cohorts, *, mu, eta, eta2, steps, momentum, beta=None):
    """The paper's listing, client by client: (server after every round, v and aux of every client)."""
    start = fedavg(data.model, data.population).init_server()
    w, A, known = start, np.full((5, 5), 0.5), {}
    v, aux, path = {}, {}, []
    for cohort in cohorts:
        uploads, rows = {}, A.copy()
        for i in cohort:
            # F_i but for its own loss, as a function of the model: mu sum_j A_ij (l_j(w_j) + G_j . (w - w_j))
            others = tree.zeros_like(w)
            for j, (_, G, _) in known.items():
                others = tree.add_scaled(others, mu * A[i, j], G)
            if known and beta is not None:
                others = tree.add(tree.scale(1 - beta, others), tree.scale(beta, aux[i])) if i in aux else others
                aux[i] = others
            x, velocity = w, tree.zeros_like(w)
            for _ in range(steps):
                for j in known:
                    mean = tf.add_n([mu * tree.dot(G, x) for _, G, _ in known.values()]) / len(known)
                    rows[i, j] = max(0.0, rows[i, j] - eta2 * (known[j][2] + float(mean)))
                g = tree.add(gradient(loss_of(data, i), x)[0], others)
                velocity = tree.add_scaled(g, momentum, velocity)
                x = tree.add_scaled(x, -eta, velocity)
            G = gradient(loss_of(data, i), x)[0]
            v[i], uploads[i] = x, (x, G, mu * (float(loss_of(data, i)(x)) - float(tree.dot(G, x))))
        n = data.population.num_examples
        total = sum(n[i] for i in cohort)
        w = tf.nest.map_structure(lambda *x: tf.add_n(x), *[tree.scale(n[i] / total, v[i]) for i in cohort])
        A, known = rows, uploads
        path.append((w, A.copy(), dict(known)))
    return path, v, aux


@pytest.mark.parametrize("beta", slow_but([None, 0.0, 0.6, 1.0], 0.6, ci=(1.0,)))
@pytest.mark.parametrize("momentum", slow_but([0.0, 0.9], 0.9))
def test_rounds_are_the_listings(data, beta, momentum):
    """Somebody skips rounds, somebody comes late, cohorts differ in size; A reaches 0 somewhere."""
    options = {"mu": 0.4, "eta": 0.1, "eta2": 0.2, "steps": 4, "momentum": momentum}
    build, more = (pgfed, {}) if beta is None else (pgfedmo, {"beta": beta})
    path, states = play(build(data.model, data.population, **options, **more), data)
    expected, v, aux = listing(data, COHORTS, **options, beta=beta)
    for server, (w, A, known) in zip(path, expected, strict=True):
        assert distance(server.w, w) < 1e-9 and distance(server.A, A) < 1e-9
        for i in range(5):
            assert bool(server.last[i]) == (i in known)
            G, s = (tree.to_vector(known[i][1]), known[i][2]) if i in known else (tf.zeros_like(server.gradients[i]), 0)
            assert distance(server.gradients[i], G) < 1e-9 and abs(float(server.offsets[i]) - s) < 1e-9
    for i in range(5):
        assert distance(states[i].v, v[i]) < 1e-9
        if beta is not None:
            assert distance(states[i].buffer.aux, aux[i]) < 1e-9 and bool(states[i].buffer.filled)
    A = path[-1].A.numpy()
    assert A.min() == 0 and distance(A, np.full((5, 5), 0.5)) > 0.1
    assert A[2, 2] != 0.5  # client 2 was in two rounds in a row: it is one of the others of its own


@pytest.mark.slow
def test_what_is_added_to_the_gradient_is_that_of_the_others_linearized_risks(data):
    """aux = grad of mu sum_j A_ij [l_j(w_j) + G_j . (w - w_j)], by autodiff of that sum."""
    algorithm = pgfed(data.model, data.population, mu=0.4, eta=0.1, eta2=0.2, **FULL)
    [*_, server], states = play(algorithm, data, COHORTS[:3])
    message = algorithm.message(server, tf.constant(4))

    def risks(w):
        total = 0.0
        for j in COHORTS[2]:
            l_j, G_j = loss_of(data, j)(states[j].v), gradient(loss_of(data, j), states[j].v)[0]
            total += 0.4 * server.A[4, j] * (l_j + tree.dot(G_j, tree.subtract(w, states[j].v)))
        return total

    assert distance(message.g_t, gradient(risks, server.w)[0]) < 1e-9
    for j in COHORTS[2]:  # s_j is what of it does not depend on w
        offset = loss_of(data, j)(states[j].v) - tree.dot(gradient(loss_of(data, j), states[j].v)[0], states[j].v)
        assert abs(float(server.offsets[j] - 0.4 * offset)) < 1e-9


@pytest.mark.table
@pytest.mark.slow
def test_beta_0_is_pgfed(data):
    options = {"mu": 0.4, "eta": 0.1, "eta2": 0.2, **SOLVER}
    path, states = play(pgfed(data.model, data.population, **options), data)
    path_mo, states_mo = play(pgfedmo(data.model, data.population, beta=0.0, **options), data)
    assert distance(path_mo, path) < 1e-9
    assert distance({i: s.v for i, s in states_mo.items()}, {i: s.v for i, s in states.items()}) < 1e-9
    other, _ = play(pgfedmo(data.model, data.population, beta=0.5, **options), data)
    assert distance(other[1].w, path[1].w) < 1e-9 and distance(other[2].w, path[2].w) > 1e-4  # no buffer in round 2


@pytest.mark.slow
def test_without_eta2_everybody_counts_the_same_in_round_2(data):
    algorithm = pgfed(data.model, data.population, mu=0.4, eta=0.1, eta2=0.0, **SOLVER)
    [server], _ = play(algorithm, data, [(1, 3)])  # as many as are expected
    for i in range(5):
        message = algorithm.message(server, tf.constant(i))
        assert distance(message.g_t, message.g_bar) < 1e-9 and distance(message.g_t, tree.zeros_like(server.w)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("build", slow_but([pgfed, pgfedmo], pgfedmo))
def test_only_what_could_be_learned_changes_in_A(data, build):
    """Rows of clients that were not there, and columns of those whose gradients were not: bit for bit."""
    algorithm = build(data.model, data.population, mu=0.4, eta=0.1, eta2=3.0, **SOLVER)
    path, _ = play(algorithm, data)
    path = [algorithm.init_server(), *path]
    for before, cohort, old, new in zip([(), *COHORTS], COHORTS, path, path[1:], strict=False):
        changed = old.A.numpy() != new.A.numpy()
        assert not changed[[i for i in range(5) if i not in cohort]].any()
        assert not changed[:, [j for j in range(5) if j not in before]].any()
        assert (new.A.numpy() >= 0).all()
        assert changed.any() == bool(before)
    assert (path[-1].A.numpy() == 0).any() and (path[-1].A.numpy() > 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("init", slow_but(["w0", "newest"], "w0"))
@pytest.mark.parametrize("build", slow_but([pgfed, pgfedmo], pgfedmo))
def test_who_never_came_and_who_left(data, build, init):
    """Client 4 is never there, client 0 only in round 1."""
    algorithm = build(data.model, data.population, mu=0.4, eta=0.1, eta2=0.2, init=init, **FULL)
    path, states = play(algorithm, data, [(0, 1), (1, 2), (2, 3)])
    server, first = path[-1], initial_states(algorithm, data.population)
    message = algorithm.message(server, tf.constant(4))
    assert identical(states[4], first[4]) and identical(server.A[4], np.full(5, 0.5))
    w_0 = algorithm.init_server().w
    before = w_0 if init == "w0" else server.w
    assert identical(algorithm.personal_model(message, states[4], data.visit(4)), before)
    assert distance(w_0, server.w) > 1e-3
    start = algorithm.adapt.start(message, first[4], data.visit(4))
    assert identical(algorithm.adapt.model(start), server.w)  # a new client starts from the newest w
    assert identical(algorithm.personal_model(message, states[0], data.visit(0)), states[0].v)  # stale
    assert not server.gradients.numpy()[[0, 1, 4]].any() and server.gradients.numpy()[[2, 3]].any(1).all()
    [after], states = play(algorithm, data, [(4,)], server, states, first=4)  # it joins late, as anybody else
    assert distance(states[4].v, server.w) > 1e-3 and distance(after.w, states[4].v) < 1e-12
    learned = after.A.numpy()[4] != 0.5
    assert learned.tolist() == [False, False, True, True, False]


@pytest.mark.slow
def test_a_buffer_begins_with_what_came_first(data):
    algorithm = pgfedmo(data.model, data.population, mu=0.4, beta=0.7, eta=0.1, **FULL)
    engine = Simulation(algorithm)
    path, states = play(algorithm, data, [(0, 1)])
    assert bool(states[0].started) and not bool(states[0].buffer.filled)  # in round 1 nothing came from others
    message = algorithm.message(path[0], tf.constant(0))
    output = engine.next(path[0], [states[0]], [data.visit(0, 2)])
    assert distance(output.client_states[0].buffer.aux, message.g_t) < 1e-9


def test_the_gradient_is_of_all_examples_and_at_the_end(data):
    algorithm = pgfed(data.model, data.population, mu=0.4, eta=0.1, **SOLVER)
    server, state = algorithm.init_server(), initial_states(algorithm, data.population)[1]
    output = algorithm.client_update(algorithm.message(server, tf.constant(1)), state, data.visit(1))
    G = gradient(loss_of(data, 1), output.state.v)[0]
    assert distance(output.update.report.gradient, tree.to_vector(G)) < 1e-9
    assert identical(algorithm.local_model((), output), output.state.v)


@pytest.mark.slow
def test_the_default_is_the_authors_rule_for_who_never_came(data):
    for build in (pgfed, pgfedmo):
        algorithm = build(data.model, data.population, mu=0.4, eta=0.1, **FULL)
        path, states = play(algorithm, data, [(0, 1), (1, 2)])
        message = algorithm.message(path[-1], tf.constant(4))
        found = algorithm.personal_model(message, states[4], data.visit(4))
        assert identical(found, algorithm.init_server().w)


@pytest.mark.slow
@pytest.mark.parametrize("build", slow_but([pgfed, pgfedmo], pgfed))
def test_momentum_that_is_kept_goes_on_in_the_next_visit(data, build):
    """With mu = 0 and one client, two visits of 4 steps are one of 8: w_i is the server's w."""
    options = {"mu": 0.0, "eta": 0.1, "momentum": 0.5}
    whole, _ = play(build(data.model, data.population, steps=8, **options), data, [(3,)])
    ends = {}
    for keep in (True, False):
        algorithm = build(data.model, data.population, steps=4, keep_momentum=keep, **options)
        path, states = play(algorithm, data, [(3,), (3,)])
        ends[keep] = distance(path[-1].w, whole[-1].w)
        assert len(tf.nest.flatten(states[3].slots)) == (len(tf.nest.flatten(path[-1].w)) if keep else 0)
    assert ends[True] < 1e-9 and ends[False] > 1e-3


def test_refusals(data):
    for build in (pgfed, pgfedmo):
        with pytest.raises(ValueError, match="keep_momentum keeps what the option momentum makes"):
            build(data.model, data.population, keep_momentum=True)
        with pytest.raises(ValueError, match="init must be one of w0, newest"):
            build(data.model, data.population, init="mean")
    for wrong in ({"mu": -1.0}, {"eta": -1.0}, {"eta2": -0.1}, {"momentum": -1.0}, {"steps": 0}, {"weighting": "x"}):
        for build in (pgfed, pgfedmo):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                build(data.model, data.population, **wrong)
    with pytest.raises(ValueError, match="beta"):
        pgfedmo(data.model, data.population, beta=1.1)
