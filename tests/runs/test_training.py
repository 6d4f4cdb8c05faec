"""The round loop, with federations and models of the user's own."""

from collections import Counter
from functools import wraps

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers import small_runs as runs
from helpers import toys
from helpers.marks import slow_but
from tfpfl import Sampling, SplitModel, Training, build_algorithm
from tfpfl.algorithms.contract import ClientData
from tfpfl.data import Federation
from tfpfl.data.cohorts import cohort
from tfpfl.engines import engine
from tfpfl.engines.visit import evaluate, visits
from tfpfl.runs import training
from tfpfl.runs.availability import Availability
from tfpfl.runs.store import OtherRun, RunStore, StoreError
from tfpfl.runs.training import DivergedError


def make(name, federation, sampling=None, labels="local", **hyperparameters):
    population = federation.population(sampling or Sampling("fixed", 0.5), labels, shared_slots=True)
    return build_algorithm(name, SplitModel(toys.backbone("float32")), population, **hyperparameters)


def state(loop):
    """What the store holds, as comparable arrays."""
    return tf.nest.map_structure(np.asarray, (loop.server_state(), loop.client_states(range(6))))


@pytest.mark.slow
def test_without_splits_nothing_is_evaluated_and_all_else_is_the_same(federation):
    silent, usual = (Training(make("pflego", federation), federation, **how) for how in ({"splits": ()}, {}))
    for loop in (silent, usual):
        loop.run(3)
    assert not any("accuracy" in key for row in silent.store.history() for key in row)
    assert any("accuracy" in key for row in usual.store.history() for key in row)
    tf.nest.map_structure(np.testing.assert_array_equal, state(silent), state(usual))


def counted(algorithm, traces):
    """The same algorithm; every call of its functions, which is a trace where they run in graphs, is counted."""

    def count(name, function):
        @wraps(function)
        def run(*arguments):
            traces[name] += 1
            return function(*arguments)

        return run

    names = ("init_server", "init_client", "client_update", "server_update", "personal_model")
    one_pass = algorithm.one_pass
    if one_pass is not None:  # an engine calls its parts instead of client_update
        one_pass = one_pass._replace(on_features=count("client_update", one_pass.on_features))
    functions = {name: count(name, getattr(algorithm, name)) for name in names}
    return algorithm._replace(one_pass=one_pass, **functions)


@pytest.mark.parametrize(
    ("name", "way"),
    slow_but(
        [("pflego", "fused"), ("pflego", "one_by_one"), ("fedper", "auto"), ("ditto", "auto"), ("fedamp", "auto")],
        ci=(("pflego", "fused"),),
    ),
)
def test_every_function_is_traced_once_for_all_clients_and_cohorts(federation, monkeypatch, name, way):
    """`client_update` and `server_update` twice: rounds with scores on held-out splits are another graph."""
    monkeypatch.setattr(training.protocols, "LAST_ROUNDS", 1)
    traces, algorithm = Counter(), make(name, federation, Sampling("binomial", 0.5))
    loop = Training(counted(algorithm, traces), federation, grouping=way, evaluate_every=3, seed=1)
    loop.run(8)
    assert len({row["clients"] for row in loop.store.history()} - {0}) > 2
    # init_client: its type; the states of new clients; the shared backbone, which a fused evaluation takes from one.
    asked = 2 + (algorithm.shares_backbone and way != "one_by_one")
    # Where heads have K_i columns also the shapes of states, for rounds without and with scores, and for evaluations.
    asked += 3 * algorithm.shares_backbone
    assert traces["init_client"] == asked and traces["init_server"] <= 2
    assert traces["client_update"] == traces["server_update"] == 2
    assert traces["personal_model"] <= 2


@pytest.mark.slow
def test_your_own_backbone_on_your_own_data(tmp_path):
    rng = np.random.default_rng(0)
    means = rng.standard_normal((3, 6, 6, 1))

    def client(n):
        y = np.arange(n) % 3
        return (means[y] + 0.3 * rng.standard_normal((n, 6, 6, 1))).astype(np.float32), y

    federation = Federation.from_clients({name: client(30) for name in ("ann", "bob", "eve")}, out=tmp_path / "mine")
    backbone = keras.Sequential(
        [keras.Input((6, 6, 1)), keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten()]
    )
    algorithm = build_algorithm("pflego", SplitModel(backbone), federation.population(), tau=10, beta=0.1)
    loop = Training(algorithm, federation)
    loop.run(12)
    history = loop.store.history()
    assert [row["round"] for row in history] == list(range(1, 13))
    assert history[-1]["loss"] < history[0]["loss"] / 2
    assert history[-1]["personal test accuracy"] > 0.9
    # What the history says of an evaluation is the mean over the clients of what the store says.
    rows = [e for e in loop.store.evaluations(12) if (e.model, e.split) == ("personal", "test")]
    assert len(rows) == 3
    assert history[-1]["personal test accuracy"] == pytest.approx(np.mean([e.accuracy for e in rows]))


@pytest.mark.slow
def test_methods_are_compared_on_the_same_cohorts_and_keys(federation, monkeypatch):
    """Cohorts and the seeds of the shuffles are functions of (seed, round, client), not of the algorithm."""
    seen = []

    class Recorded(engine.Simulation):
        def next(self, server, states, visits):
            seen.append([(int(v.info.client_id), *v.key.tolist()) for v in visits])
            return super().next(server, states, visits)

    monkeypatch.setattr(engine, "Simulation", Recorded)

    def visits(name, seed, **kw):
        seen.clear()
        Training(make(name, federation, **kw), federation, seed=seed).run(3)
        return list(seen)

    pflego = visits("pflego", 0, tau=2)
    assert [len(cohort) for cohort in pflego] == [3, 3, 3]
    assert len({visit for cohort in pflego for visit in cohort}) == 9  # no two visits alike
    assert visits("fedavg", 0, labels="global", steps=2) == pflego
    assert visits("local", 0, steps=3, batch_size=5) == pflego
    assert visits("pflego", 1, tau=2) != pflego


@pytest.mark.slow
def test_empty_rounds_are_recorded_and_change_nothing(federation):
    algorithm = make("pflego", federation, Sampling("binomial", 0.15), tau=3)
    loop = Training(algorithm, federation, seed=4)
    before, empty, states = None, 0, state(loop)
    for t in range(1, 13):
        loop.run(t)
        row, now = loop.store.history()[-1], state(loop)
        if row["clients"] == 0:
            empty += 1
            assert toys.identical(now, states)
            assert "loss" not in row and "bytes_up" not in row
            evaluations = [e._replace(round_num=0) for e in loop.store.evaluations(t)]
            assert {e.model for e in evaluations} == {"personal"} and len(evaluations) == 12
            if before is not None:
                assert evaluations == before
        else:
            assert not toys.identical(now, states)
        states = now
        before = [e._replace(round_num=0) for e in loop.store.evaluations(t) if e.model == "personal"]
    assert 1 <= empty < 12


def test_a_client_that_diverges_is_named_and_the_rounds_before_are_kept(tmp_path):
    train = toys.clients(runs.EXAMPLES, runs.CLASSES, dtype="float32")
    train[4][0][:] = 1e3  # its features overflow
    named = {f"hospital {i + 1}": data for i, data in enumerate(train)}
    federation = Federation.from_clients(named, out=tmp_path / "federation", validation=0.0)
    dense = keras.layers.Dense(3, "exponential", kernel_initializer="ones")  # not every random kernel overflows
    backbone = keras.Sequential([keras.Input((4,)), dense])
    population = federation.population(Sampling("fixed", 0.5))
    algorithm = build_algorithm("pflego", SplitModel(backbone), population, tau=3)
    seed = next(s for s in range(50) if 4 not in cohort(s, 1, population) and 4 not in cohort(s, 2, population))
    first = next(t for t in range(1, 50) if 4 in cohort(seed, t, population))
    loop = Training(algorithm, federation, seed=seed)
    told = rf"round {first} diverged.*of client 4 \(hospital 5\) \(loss .*up to {first - 1} are saved"
    with pytest.raises(DivergedError, match=told):
        loop.run(50)
    assert loop.store.round_num == len(loop.store.history()) == first - 1 >= 2


@pytest.mark.slow
def test_a_server_that_diverges_is_told_apart(federation):
    algorithm = make("pflego", federation, tau=2)

    def explode(server, gradient):
        new = algorithm.server_update(server, gradient)
        return new._replace(theta=tuple(w / tf.zeros([], w.dtype) for w in new.theta))

    with pytest.raises(DivergedError, match=r"round 1 diverged: the server's state.*clients \d, \d, \d"):
        Training(algorithm._replace(server_update=explode), federation).run(2)


@pytest.mark.slow
def test_evaluation_in_a_round_is_that_of_the_states_it_commits(federation):
    loop = Training(make("pflego", federation, tau=3), federation)
    loop.run(2)
    again = loop.evaluate(loop.server_state())
    stored = [e for e in loop.store.evaluations(2) if e.model == "personal"]
    assert sorted(again) == sorted(stored) and len(stored) == 12


@pytest.mark.slow
def test_fine_tuning_for_scores_draws_with_the_keys_of_the_round_that_is_evaluated(federation):
    """Against the clients' models by `personal_model` itself, with the keys of each round."""
    algorithm = make("fedavg_ft", federation, labels="global", eta=0.05, steps=1, eta_ft=0.3, steps_ft=2, batch_size=4)
    loop = Training(algorithm, federation, seed=3, splits=("test",), model_name="fine-tuned")

    def losses(t):
        found = {}
        for visit in visits(algorithm, t, range(6), seed=3):
            i, message = int(visit.info.client_id), tf.nest.map_structure(tf.constant, loop.server_state())
            x, y = federation.arrays(i, labels="global")
            model = algorithm.personal_model(message, (), ClientData(x, y, visit.info, tf.constant(visit.key)))
            found[i] = float(evaluate(algorithm.model, model, *federation.arrays(i, "test", labels="global"))["loss"])
        return found

    for t in (1, 2):
        loop.run(t)
        stored = {e.client_id: e.loss for e in loop.store.evaluations(t) if e.model == "fine-tuned"}
        again = {e.client_id: e.loss for e in loop.evaluate(loop.server_state()) if e.model == "fine-tuned"}
        assert again == stored == pytest.approx(losses(t), rel=1e-4)
        assert stored != pytest.approx(losses(t + 1), rel=1e-2)


def test_the_quorum_counts_who_began_and_is_enough_itself(federation):
    """Of six clients one drops out, or two are too late: what the quorum is told, and rounds at it and below it."""
    began, algorithm = [], make("fedavg", federation, Sampling(), "global", steps=1)
    work = np.sort(algorithm.population.num_examples)
    late = Availability(seconds=1.0, deadline=float(work[3]) + 0.5)  # so two of the six are never in time
    drops = Availability(dropout=0.3)
    for availability in (late, drops):
        came = [len(availability.round(0, t, range(6), algorithm.population.num_examples).came) for t in (1, 2, 3)]
        least = came[0] if availability is late else sorted(came)[1]

        def quorum(number, least=least):
            began.append(number)
            return least

        how = {"splits": (), "availability": availability, "quorum": quorum, "evaluate_every": 0}
        loop = Training(algorithm, federation, **how)
        states = [loop.server_state()]
        for t, number in enumerate(came, 1):
            loop.run(t)
            row = loop.store.history()[-1]
            enough = number >= least
            assert (row["clients"], row.get("too_few")) == ((number, None) if enough else (0, number))
            states.append(loop.server_state())
            assert (toys.distance(*states[-2:]) > 0) == enough
    assert min(came) < least and set(began) == {6}


def test_one_graph_draws_the_states_of_any_number_of_new_clients(federation):
    """One graph a loop: TensorFlow warns of more, and whoever compares methods has several loops."""
    loop = Training(make("pflego", federation, tau=3), federation)
    for ids in ([0], [1, 2], [0, 3, 5]):
        loop.client_states(ids)
    assert loop._initial_states.experimental_get_tracing_count() == 1


def test_a_population_of_other_data_is_refused(federation, tmp_path):
    other = runs.federation(tmp_path / "other", validation=0.5)
    with pytest.raises(ValueError, match=r"client 0 has \d+ training examples in the federation.*but \d+ in the pop"):
        Training(make("pflego", federation), other)
    few = toys.on_disk(tmp_path / "few")
    with pytest.raises(ValueError, match="client 5, but the federation has clients 0..4"):
        Training(make("pflego", federation), few)
    flat = SplitModel(toys.backbone("float32", shape=(7,)))
    with pytest.raises(ValueError, match=r"the model takes examples of shape \(7,\), the federation's are \(4,\)"):
        Training(build_algorithm("pflego", flat, federation.population()), federation)
    narrow = federation.population()
    object.__setattr__(narrow, "num_classes", np.full(6, 2))
    algorithm = build_algorithm("pflego", SplitModel(toys.backbone("float32")), narrow)
    with pytest.raises(ValueError, match="client 1 has 3 classes in the federation.*but 2"):
        Training(algorithm, federation)


@pytest.mark.slow
def test_a_store_of_another_algorithm_is_refused(federation):
    store = RunStore()
    Training(make("pflego", federation, tau=2), federation, store=store).run(1)
    with pytest.raises(StoreError, match="server state has .* arrays"):
        Training(make("local", federation), federation, store=store).run(2)
    assert store.round_num == 1


@pytest.mark.slow
def test_a_store_is_continued_with_its_own_seed_only(federation, tmp_path):
    """Another seed would draw other clients: the result would be of neither seed. Before round 1 the seed is free."""
    algorithm, path = make("fedavg", federation, labels="global", steps=1), tmp_path / "state.sqlite"
    how = {"splits": (), "grouping": "one_by_one"}
    with RunStore(path) as store:
        Training(algorithm, federation, seed=5, store=store)  # which trains nothing
        loop = Training(algorithm, federation, seed=0, store=store, **how)
        loop.run(1)
    with RunStore(path) as store:
        with pytest.raises(OtherRun, match="state.sqlite holds 1 rounds of seed 0, and the training has seed 1: .*"):
            Training(algorithm, federation, seed=1, store=store)
        loop = Training(algorithm, federation, seed=0, store=store, **how)
        loop.run(2)
        straight = Training(algorithm, federation, seed=0, **how)
        straight.run(2)
        tf.nest.map_structure(np.testing.assert_array_equal, state(loop), state(straight))
    with pytest.raises(OtherRun, match="the store in memory holds 2 rounds of seed 0"):
        Training(algorithm, federation, seed=1, store=straight.store)
    with RunStore(tmp_path / "named.sqlite", "mine") as store:  # whoever names a run says what belongs to it
        Training(algorithm, federation, seed=0, store=store, **how).run(1)
        Training(algorithm, federation, seed=1, store=store, **how)
    RunStore(tmp_path / "named.sqlite", "mine").close()
