"""SCAFFOLD: gradient descent on the whole objective in its limit, its control variates by hand, and where it ends."""

import pytest

from helpers.marks import slow_but
from helpers.quadratics import flat, optimum, use
from helpers.rounds import COHORTS, loss_of, mean, nothing_arrives, play, rounds_of, shared
from helpers.toys import distance, gradient, identical, initial_states, toy
from tfpfl.algorithms import ALGORITHMS, fedavg, scaffold
from tfpfl.algorithms.scaffold import Control, Server
from tfpfl.data.population import Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import tree

BATCHES = {"eta": 0.1, "epochs": 2, "batch_size": 2}
SOME = [(0, 2, 3), (2, 3), (0, 2), (3,), (2,)]  # 1 and 4 never come, 0 leaves


@pytest.fixture(scope="module")
def data():
    """Two of five clients a round, where the tests do not say another number: I is not r."""
    return toy(sampling=Sampling("fixed", 0.4))


@pytest.mark.slow
@pytest.mark.parametrize("option", slow_but(["I", "II"], "II"))
@pytest.mark.parametrize(
    "work", [BATCHES, pytest.param({"eta": 0.2, "steps": 7}, marks=pytest.mark.slow)], ids=["batches", "steps"]
)
def test_round_1_is_uniform_fedavg(data, option, work):
    (found,), _ = play(scaffold(data.model, data.population, option=option, **work), data, COHORTS[:1])
    (expected,), _ = play(fedavg(data.model, data.population, weighting="uniform", **work), data, COHORTS[:1])
    assert distance(found.x, expected) < 1e-9


@pytest.mark.parametrize("option", slow_but(["I", "II"], "II"))
def test_c_is_the_mean_of_all_clients_control_variates_always(data, option):
    """Of all I: those that never came and those that left as well."""
    algorithm = scaffold(data.model, data.population, option=option, eta_g=0.7, **BATCHES)

    def visits(_, ids, t):
        return [data.visit(i, t) for i in ids]

    for t, (output, states) in enumerate(rounds_of(Simulation(algorithm), algorithm, SOME + COHORTS, visits), 1):
        server = output.server
        assert distance(server.c, mean(s.c for s in states.values())) < 1e-9
        assert distance(server.c, tree.zeros_like(server.c)) > 1e-3
        if t == len(SOME):
            zero = tree.zeros_like(server.c)
            assert all(identical(states[i].c, zero) == (i in (1, 4)) for i in data.ids)


@pytest.mark.parametrize("option", slow_but(["I", "II"], ci=("II",)))
def test_one_full_step_of_everyone_is_gradient_descent_in_every_round(data, option):
    """On the unweighted mean loss, with c_i = grad l_i at the model received."""
    algorithm = scaffold(data.model, data.population, eta=0.3, steps=1, option=option)
    server, states = algorithm.init_server(), initial_states(algorithm, data.population)
    x = server.x
    for t in range(1, 6):
        slopes = {i: gradient(loss_of(data, i), x)[0] for i in data.ids}
        x = tree.add_scaled(x, -0.3, mean(slopes.values()))
        (server,), states = play(algorithm, data, [data.ids], server, states, first=t)
        assert distance(server.x, x) < 1e-9
        assert distance({i: s.c for i, s in states.items()}, slopes) < 1e-9
    assert distance(x, algorithm.init_server().x) > 0.1


@pytest.mark.parametrize("option", ["I", "II"])
def test_a_visit_is_written_out(data, option):
    eta, steps, x, c, c_i = 0.2, 4, shared(data), shared(data, seed=5), shared(data, seed=6)
    algorithm = scaffold(data.model, data.population, eta=eta, steps=steps, option=option)
    output = algorithm.client_update(Server(x, c), Control(c_i, (), ()), data.visit(1))
    y, seen = x, []
    for _ in range(steps):
        seen.append(gradient(loss_of(data, 1), y)[0])
        last_loss = loss_of(data, 1)(y)
        y = tree.add_scaled(y, -eta, tree.add(tree.subtract(seen[-1], c_i), c))
    assert distance(output.update.dy, tree.subtract(y, x)) < 1e-9
    new = seen[0] if option == "I" else mean(seen)  # c_i - c + (x - y) / (K eta) is the mean of the gradients seen
    assert distance(output.state.c, new) < 1e-9
    assert distance(output.update.dc, tree.subtract(new, c_i)) < 1e-9
    assert distance(algorithm.local_model(Server(x, c), output), y) < 1e-9
    assert distance(output.metrics["loss"], last_loss) < 1e-9


@pytest.mark.slow
def test_the_server_takes_the_mean_step_and_a_cohorts_share_of_the_controls(data):
    cohort, eta_g = (1, 3), 0.6
    algorithm = scaffold(data.model, data.population, eta_g=eta_g, **BATCHES)
    server, states = Server(shared(data), shared(data, seed=5)), initial_states(algorithm, data.population)
    updates = [algorithm.client_update(server, states[i], data.visit(i)).update for i in cohort]
    (found,), _ = play(algorithm, data, [cohort], server, states)
    assert distance(found.x, tree.add_scaled(server.x, eta_g, mean(u.dy for u in updates))) < 1e-9
    assert distance(found.c, tree.add_scaled(server.c, len(cohort) / 5, mean(u.dc for u in updates))) < 1e-9


@pytest.mark.slow
def test_it_ends_where_the_objective_is_smallest_and_fedavg_does_not(data, monkeypatch):
    """On quadratics, with many local steps and two or three of five clients a round."""
    use(monkeypatch, "scaffold", "fedavg")
    work, rounds = {"eta": 0.2, "steps": 5}, [(0, 2, 3), (1, 2), (1, 4), (0, 3, 4)] * 60
    (*_, ours), _ = play(scaffold(data.model, data.population, **work), data, rounds)
    (*_, theirs), _ = play(fedavg(data.model, data.population, weighting="uniform", **work), data, rounds[:40])
    best = optimum(data, len(flat(ours.x)))
    assert distance(flat(ours.x), best) < 1e-9 < 1e-3 < distance(flat(theirs), best)
    assert distance(ours.c, tree.zeros_like(ours.c)) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("eval_model", slow_but(["global", "local"], "local"))
def test_the_model_that_a_client_predicts_with(data, eval_model):
    """x, or what the client held after its last visit; x also where it was never visited."""
    algorithm = scaffold(data.model, data.population, eval_model=eval_model, eta_g=0.5, **BATCHES)
    earlier, before = play(algorithm, data, SOME[:3])
    held = algorithm.client_update(earlier[-1], before[3], data.visit(3, 4))  # round 4, client 3's last
    (*_, server), states = play(algorithm, data, SOME)
    expected = {1: server.x, 3: server.x, 4: server.x}
    if eval_model == "local":
        expected[3] = algorithm.local_model(earlier[-1], held)
        assert distance(expected[3], server.x) > 1e-4
    for i, model in expected.items():
        assert distance(algorithm.personal_model(server, states[i], data.visit(i)), model) < 1e-9
    label = ALGORITHMS["scaffold"].evaluated({"eval_model": eval_model})
    assert label == ("personal" if eval_model == "local" else "global")


@pytest.mark.slow
def test_predicting_with_the_local_model_changes_nothing_else(data):
    ours, theirs = (scaffold(data.model, data.population, eval_model=m, **BATCHES) for m in ("global", "local"))
    assert identical(play(ours, data)[0], play(theirs, data)[0])


def test_a_round_in_which_nothing_arrives_changes_nothing(data):
    algorithm = scaffold(data.model, data.population, **BATCHES)
    server = play(algorithm, data)[0][-1]
    assert identical(nothing_arrives(algorithm, data, server), server)


def test_a_client_that_comes_late_starts_without_a_correction_of_its_own(data):
    """y steps along g + c; and whoever is new predicts with x."""
    algorithm = scaffold(data.model, data.population, eta=0.2, steps=1)
    (*_, server), _ = play(algorithm, data, SOME)
    new = algorithm.init_client(data.population.info(4))
    assert identical(new.c, tree.zeros_like(server.x))
    assert identical(algorithm.personal_model(server, new, data.visit(4)), server.x)
    slope = gradient(loss_of(data, 4), server.x)[0]
    output = algorithm.client_update(server, new, data.visit(4))
    assert distance(output.update.dy, tree.scale(-0.2, tree.add(slope, server.c))) < 1e-9


def test_every_client_counts_the_same(data):
    algorithm = scaffold(data.model, data.population, **BATCHES)
    server = algorithm.init_server()
    outputs = [algorithm.client_update(server, algorithm.init_client(None), data.visit(i)) for i in data.ids]
    assert {float(output.weight) for output in outputs} == {1.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [("eta", -1.0), ("eta", 0.0), ("eta_g", -1.0), ("steps", 0), ("option", "III"), ("eval_model", "personal")],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        scaffold(data.model, data.population, **{name: value})
