"""Tables with a row for every client: whether they fit, which row is whose; and runs that save matrices."""

import sqlite3

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.small_runs import Interrupt, federation, saved, train
from helpers.stores import as_format
from helpers.toys import Toy, backbone, clients, distance, identical, initial_states, run
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.algorithms.parts import server_rows
from tfpfl.data.population import Population, Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel
from tfpfl.runs.run import Run
from tfpfl.runs.store import RunStore, StoreError
from tfpfl.runs.training import Training

PER_CLIENT = [name for name, row in ALGORITHMS.items() if row.message == "per client"]
KEEP_MODELS = [
    name for name in PER_CLIENT if name != "pfedhn"
]  # it keeps a hypernetwork, and embeddings from the start
OF_EACH_KIND = slow_but(KEEP_MODELS, "fedamp", "fedfomo", "pgfed")  # HeurFedAMP and PGFedMo are theirs with an option
MATRICES = [("fedamp", "attention"), ("pgfed", "A"), ("fedfomo", "P")]
FULL = {"steps": 3, "eta": 0.1}  # full batches, so that a client's id does not matter for its shuffles
SPECIAL = {
    "fedfomo": FULL | {"validation_fraction": 0.0},
    "pgfed": FULL | {"eta2": 0.5},
    "pgfedmo": FULL | {"eta2": 0.5},
    "fedpac": {"tau_g": 2, "tau_f": 3, "unit": "steps", "eta_g": 0.1, "eta_f": 0.1, "batch_size": None},
}


@pytest.fixture(scope="module")
def a_federation(tmp_path_factory):
    return federation(tmp_path_factory.mktemp("table") / "federation")


def build(name, model, population):
    return build_algorithm(name, model, population, **SPECIAL.get(name, FULL))


def test_available_memory_is_that_of_this_machine():
    import os

    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1e8 < server_rows.available_memory() <= physical


def test_a_table_that_does_not_fit_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(server_rows, "available_memory", lambda: 3 * 2 * 1000 * 50 * 4)
    population = Population([5] * 1000, [2] * 1000)
    assert server_rows.check_table(population, 50, np.float32, tables=2) == 2 * 1000 * 50 * 4
    for scalars, tables, dtype in ((51, 2, np.float32), (50, 3, np.float32), (50, 2, np.float64)):
        with pytest.raises(ValueError, match="1,000 clients"):
            server_rows.check_table(population, scalars, dtype, tables=tables)
    monkeypatch.setattr(server_rows, "available_memory", lambda: 8_000_000_000)
    with pytest.raises(ValueError) as refusal:
        server_rows.check_table(population, 1_000_000, np.float32)
    assert "1 row of 1,000,000 numbers for each of 1,000 clients: 4 GB, and 12 GB during a round" in str(refusal.value)
    assert "8 GB of memory are available" in str(refusal.value)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_builders_refuse_it(name, monkeypatch):
    """What the server would keep is at least a model (FedPAC: a head) and a row of the matrix for every client."""
    model, population = SplitModel(backbone("float32")), Population([5] * 300, [4] * 300)
    d = (name != "fedpac") * model.num_backbone_weights + (model.num_features + 1) * 4
    state = build_algorithm(name, model, population).init_server()
    size = sum(np.asarray(leaf).nbytes for leaf in tf.nest.flatten(state))
    assert 300 * d * 4 <= size
    monkeypatch.setattr(server_rows, "available_memory", lambda: int(1.01 * server_rows.COPIES * 300 * (d + 300) * 4))
    build_algorithm(name, model, population)
    monkeypatch.setattr(server_rows, "available_memory", lambda: int(0.99 * server_rows.COPIES * 300 * (d + 300) * 4))
    with pytest.raises(ValueError, match=rf"{d + 300} numbers for each of 300 clients.*memory"):
        build_algorithm(name, model, population)


def test_rows_of_clients_whose_ids_have_gaps():
    population = Population([5] * 4, [2] * 4, client_ids=[1, 3, 4, 7])
    rows, known = server_rows.row_of(population, tf.constant([7, 1, 4, 3, 0, 5, 9]))
    assert rows.numpy()[:4].tolist() == [3, 0, 2, 1] and ((0 <= rows.numpy()) & (rows.numpy() < 4)).all()
    assert known.numpy().tolist() == [True] * 4 + [False] * 3
    row, known = server_rows.row_of(population, tf.constant(4))
    assert (int(row), bool(known)) == (2, True) and row.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(PER_CLIENT, "fedamp", ci=("pgfed",)))
def test_ids_with_gaps_are_only_names(name):
    """The same clients under other ids: the same rounds, row by row."""
    model, n, k = SplitModel(backbone("float64")), (6, 9, 4, 7), (3, 3, 3, 3)
    data = clients(n, k)
    plain = Toy(model, Population(n, k), data)
    ids = [1, 3, 4, 7]
    spread = dict(zip(ids, data, strict=True))
    gaps = Toy(model, Population(n, k, client_ids=ids), spread)
    ours, theirs = (Simulation(build(name, model, toy.population)) for toy in (plain, gaps))
    server, states = initial = None, None
    other, its_states = initial
    for cohort in ([0, 1, 3], [1, 2], [0, 1, 2, 3], [0, 3]):
        server, states = run(ours, plain, cohort=cohort, server=server, states=states)
        other, its_states = run(theirs, gaps, cohort=[ids[i] for i in cohort], server=other, states=its_states)
    assert distance(server, other) < 1e-12
    algorithm = ours.algorithm
    for i, client_id in enumerate(ids):
        a = algorithm.message(server, tf.constant(i))
        assert distance(a, theirs.algorithm.message(other, tf.constant(client_id))) < 1e-12
        assert identical(a, algorithm.message(server, i))  # an id may be a plain number
    assert distance(server, algorithm.init_server()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(KEEP_MODELS, "pgfed", ci=("fedfomo",)))
def test_a_client_from_outside_gets_what_one_that_never_came_gets(name):
    """Not the row of whoever is next to it."""
    model, n, k = SplitModel(backbone("float64")), (6, 9, 4, 7), (3, 3, 3, 3)
    population = Population(n, k, client_ids=[0, 1, 3, 6])
    data = Toy(model, population, dict(zip([0, 1, 3, 6], clients(n, k), strict=True)))
    algorithm = build(name, model, population)
    server, states = run(algorithm, data, rounds=2, cohort=[0, 1, 3])
    absent, first = algorithm.message(server, tf.constant(6)), initial_states(algorithm, population)[6]
    for outsider in (2, 5, 60):
        message = algorithm.message(server, tf.constant(outsider))
        assert identical(message, absent)
        assert identical(*(algorithm.personal_model(m, first, data.visit(6)) for m in (message, absent)))
        worked = algorithm.client_update(message, first, data.visit(6))
        assert np.isfinite(np.concatenate([np.ravel(leaf) for leaf in tf.nest.flatten(worked[:3])])).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(PER_CLIENT, "fedfomo", ci=("pgfed",)))
def test_a_round_without_clients_changes_nothing(name, a_federation):
    """And its matrices are saved like those of any evaluated round."""
    population = a_federation.population(Sampling("binomial", 0.2), shared_slots=True)
    algorithm = build(name, SplitModel(backbone("float32")), population)
    training = Training(algorithm, a_federation, seed=3, evaluate_every=1)
    server, sizes = training.server_state(), []
    for t in range(1, 9):
        before, states = server, training.client_states(range(6))
        training.run(t)
        server = training.server_state()
        sizes.append(training.store.history()[-1]["clients"])
        assert (sizes[-1] == 0) == identical(server, before)
        if not sizes[-1]:
            assert identical(training.client_states(range(6)), states)
    assert 0 in sizes[1:-1] and max(sizes) > 1
    if algorithm.matrices is None:
        return
    assert training.store.matrix_rounds() == list(range(1, 9))
    [(_, matrix)] = algorithm.matrices(server).items()
    assert identical(next(iter(training.store.matrices(8).values())), matrix)


@pytest.mark.slow
@pytest.mark.parametrize("engine", slow_but(["local", "tff"], "local"))
@pytest.mark.parametrize(("name", "matrix"), slow_but(MATRICES, MATRICES[0]))
def test_a_run_saves_its_matrix_at_every_evaluation(request, short_end, tmp_path, a_federation, name, matrix, engine):
    if engine == "tff":
        request.getfixturevalue("tff")
    asked = {"algorithm": name, "hyperparameters": {"steps": 2, "eta": 0.1}, "engine": engine, "rounds": 7}
    train(tmp_path / "run", a_federation, **asked)
    with Run.open(tmp_path / "run") as opened:
        rounds = sorted({e.round_num for e in opened.store.evaluations()})
        assert opened.store.matrix_rounds() == rounds == [3, 6, 7]
        assert set(opened.matrices()) == {matrix} and opened.matrices()[matrix].shape == (6, 6)
        server = opened.training().server_state()
        assert identical(opened.matrices(), opened.matrices(7)) and identical(
            opened.matrices()[matrix], opened.algorithm.matrices(server)[matrix]
        )
        assert distance(opened.matrices(3), opened.matrices(7)) > 0
        with pytest.raises(ValueError, match="evaluated rounds: 3, 6, 7; not 4"):
            opened.matrices(4)


@pytest.mark.table
@pytest.mark.slow
def test_interrupted_and_continued_gives_the_same_matrices(short_end, tmp_path, a_federation):
    asked = {"algorithm": "pgfed", "hyperparameters": {"steps": 2, "eta": 0.1, "eta2": 0.5}, "rounds": 7}
    train(tmp_path / "whole", a_federation, **asked)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "broken", a_federation, [Interrupt(6)], **asked)
    with Run.open(tmp_path / "broken") as run:
        assert run.store.matrix_rounds() == [3, 6]
        run.train()
    assert saved(tmp_path / "broken") == saved(tmp_path / "whole")
    assert len(saved(tmp_path / "whole")["matrix"]) == 3


@pytest.mark.slow
def test_an_algorithm_without_matrices_saves_none(a_run):
    with Run.open(a_run) as opened:
        assert opened.matrices() == {} and opened.matrices(3) == {} and opened.store.matrix_rounds() == []


def test_matrices_are_part_of_the_round(tmp_path):
    """All of a round or nothing; damage is seen."""
    path = tmp_path / "state.sqlite"
    with RunStore(path) as store:
        store.commit_round(1, (), {}, {}, matrices={"A": np.eye(3), "B": np.float32([[1, 2]])})
        store.commit_round(2, (), {}, {})
        with pytest.raises(StoreError):
            store.commit_round(4, (), {}, {}, matrices={"A": np.eye(3)})
        with pytest.raises(TypeError):
            store.commit_round(3, (), {}, {"x": object()}, matrices={"A": np.eye(3)})
    with RunStore(path) as store:
        assert store.matrix_rounds() == [1] and store.matrices(2) == {}
        assert identical(store.matrices(1), {"A": np.eye(3), "B": np.float32([[1, 2]])})
        store._db.execute("UPDATE matrix SET crc = crc + 1 WHERE name = 'B'")
        with pytest.raises(StoreError, match="B of round 1 is damaged"):
            store.matrices(1)


def test_a_store_without_matrices_goes_on(tmp_path):
    """One of format 1."""
    path = tmp_path / "state.sqlite"
    with RunStore(path, "run") as store:
        store.commit_round(1, (np.ones(2),), {}, {})
    as_format(path, 1)
    with RunStore(path, "run") as store:
        assert store.round_num == 1 and store.matrix_rounds() == []
        store.commit_round(2, (np.ones(2),), {}, {}, matrices={"A": np.eye(2)})
        assert identical(store.matrices(2)["A"], np.eye(2))


@pytest.mark.slow
def test_a_server_state_that_could_not_be_saved_is_refused_before_the_first_round(a_federation):
    population = a_federation.population(Sampling(), shared_slots=True)
    training = Training(build("fedamp", SplitModel(backbone("float32")), population), a_federation)
    size = sum(np.asarray(leaf).nbytes for leaf in tf.nest.flatten(training.server_state()))
    training.store._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000 + size - 1)
    with pytest.raises(StoreError, match="cannot take a server state"):
        training.run(1)
    assert training.store.round_num == 0
    training.store._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000 + size)
    training.run(1)
