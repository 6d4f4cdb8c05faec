"""What a loop in NumPy gives: its numbers, and generators, in place of Python's numbers and lists.

SQLite keeps a NumPy whole number as bytes, JSON refuses it, and a generator can be gone through only once.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

import tfpfl
from helpers import small_runs
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation, Population, Sampling, Source, cohort
from tfpfl.runs.callbacks import Callback
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import Score
from tfpfl.runs.run import Run
from tfpfl.runs.store import RunStore, StoreError

SERVER = {"w": np.zeros(2, np.float32)}
MATRICES = {"A": np.eye(2, dtype=np.float32)}


def commit(store, number):
    store.commit_round(number, SERVER, {}, {"round": 1}, [Score(number, 3, "personal", "test", 9, 1.0, 0.5)])


def test_a_store_keeps_and_finds_rounds_by_any_whole_number(tmp_path):
    with RunStore(tmp_path / "s") as store:
        for number in (1, np.int64(2), np.int32(3)):
            scores = [Score(number, np.int64(3), "personal", "test", np.int64(9), 1.0, 0.5, {"f1": np.float32(0.5)})]
            store.commit_round(number, SERVER, {}, {"round": int(number)}, scores, MATRICES)
        store.add_scores(np.int64(2), {"late": 1}, scores[:0])
    with RunStore(tmp_path / "s") as store:  # it is not damaged
        assert store.round_num == 3 and [score.round_num for score in store.evaluations()] == [1, 3]
        assert store.evaluations(np.int64(3)) == store.evaluations(3) != []
        assert store.history(np.int64(1)) == store.history(1) and store.history(1)[0]["late"] == 1
        assert np.array_equal(store.matrices(np.int64(2))["A"], MATRICES["A"])
        for wrong in (4.0, "4", None):
            with pytest.raises(InvalidArgument, match="round_num must be a whole number"):
                commit(store, wrong)


def test_a_store_of_another_score_is_opened_again(tmp_path):
    """It was called damaged, as if the root of the mean squared error had to be a fraction."""
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    federation = Federation.from_clients([(x, x.sum(1) * 5)] * 4, targets="real", out=tmp_path / "f")

    def trained(rounds):
        keras.utils.set_random_seed(0)
        backbone = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu")])
        population = federation.population(Sampling("fixed", rate=0.5), labels="global")
        algorithm = tfpfl.build_algorithm("fedavg", tfpfl.SplitModel(backbone, kind="regression"), population)
        with RunStore(tmp_path / "s") as store:
            tfpfl.Training(algorithm, federation, store=store).run(rounds)
            return store.evaluations()

    trained(1)
    found = trained(2)
    assert max(score.score for score in found) > 1
    with RunStore(tmp_path / "s") as store:
        assert store.evaluations() == found  # whoever only reads need not know which score it is
        with pytest.raises(StoreError, match=r"the scores are damaged: one has the accuracy .* outside \[0, 1\]"):
            store.set_score(tfpfl.data.kinds.ACCURACY)


@pytest.mark.parametrize("number", [np.int64, np.int32, float])
def test_a_range_of_cohorts_is_the_same(number):
    def cohorts(low, high):
        population = Population([30] * 10, [2] * 10, sampling=Sampling("range", low=low, high=high))
        return [cohort(0, t, population).tolist() for t in range(1, 30)]

    assert cohorts(number(2), number(5)) == cohorts(2, 5)


@pytest.mark.parametrize("number", [np.float16, np.float32, np.float64])
def test_a_rate_is_the_number_that_was_written(number):
    """As a float64, np.float32(0.7) is 0.699999988, and a cohort of seven clients had six."""
    assert Sampling("fixed", rate=number(0.7)).expected(10) == 7
    assert RunConfig(participation=number(0.7)).sampling_plan() == Sampling("fixed", rate=0.7)
    sizes = np.int64(1), np.int64(2)
    config = RunConfig(sampling="range", sampling_range=sizes, hyperparameters={"rho": number(0.1)})
    assert config.sampling_range == (1, 2) and config.hyperparameters["rho"] == 0.1


def test_arguments_of_data_are_kept_as_json_keeps_them():
    given = {"partition_args": {"K": np.int64(2), "shares": np.array([1, 2])}, "source": {"data_dir": Path("/data")}}
    config = RunConfig(algorithm="fedavg", clients=5, **given)
    assert config.partition_args == {"K": 2, "shares": [1, 2]} and config.source == {"data_dir": "/data"}
    with pytest.raises(InvalidArgument, match="partition_args must hold texts, numbers and lists of them"):
        RunConfig(algorithm="fedavg", clients=5, partition_args={"K": object()})


def test_names_of_classes_may_come_from_a_generator(tmp_path):
    x, y = np.ones((6, 2), np.float32), np.arange(6) % 3
    assert Source.from_arrays(x, y, class_names=map(str, "abc")).class_names == ["a", "b", "c"]
    federation = Federation.from_clients([(x, y)] * 2, out=tmp_path / "f", class_names=(name for name in "abc"))
    assert federation.class_names == ["a", "b", "c"]


class Counted(Callback):
    rounds = 0

    def round(self, *_):
        self.rounds += 1


@pytest.mark.slow
def test_a_run_takes_generators_and_numpy_numbers(six_clients, short_end, tmp_path):
    folder, callback = tmp_path / "run", Counted()
    with Run.create(small_runs.config(rounds=2), folder, six_clients) as run:
        run.train(each for each in [callback])
    assert callback.rounds == 2
    with Run.open(folder, rounds=np.int64(3)) as run:
        assert run.config.rounds == 3
    for wrong in (1.5, "3", 0):
        with pytest.raises(InvalidArgument, match="rounds must"):
            Run.open(folder, rounds=wrong)
    with Run.open(folder) as run:  # no refused one has left it locked
        assert run.config.rounds == 3
        algorithm, federation = run.algorithm, run.examples
    training = tfpfl.Training(
        algorithm, federation, callbacks=iter([callback]), splits=iter(["test"]), metrics=map(str, ["macro_f1"])
    )
    training.run(1)
    assert callback.rounds == 3 and {score.split for score in training.store.evaluations()} == {"test"}
    assert all("macro_f1" in score.metrics for score in training.store.evaluations())


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read as somebody else")
def test_a_finished_run_can_be_read_in_a_folder_of_somebody_else():
    """SQLite wants to make files beside it. The folder is none of pytest's, to which it lets nobody else."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RunStore(folder / "s") as store:
            commit(store, 1)
        code = (
            f"import os, sys\nsys.path[:0] = {sys.path!r}\nfrom tfpfl.runs.store import RunStore\nos.setuid(65534)\n"
            f"print(len(RunStore({str(folder / 's')!r}, read_only=True).evaluations()))"
        )

        def read():
            return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        found = read()  # nobody else may enter it
        assert "StoreError" in found.stderr and not found.stdout
        folder.chmod(0o755)
        found = read()
        assert found.stdout == "1\n", found.stderr
        with RunStore(folder / "s") as store:  # its last round is in the file beside it
            store.commit_round(2, SERVER, {}, {"round": 2})
            found = read()
        assert "StoreError" in found.stderr and "Copy the run folder" in found.stderr


FORKS = """
import os, sys
sys.path[:0] = paths
from tfpfl.runs.locks import InUse, Lock

lock = Lock(place)
ended, wait = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.close(wait[1])
    if os.fork() == 0:
        lock.release()  # this is no owner: the lock stays
        os.write(ended[1], b"x")
        os._exit(0)
    os.read(wait[0], 1)  # until the owner has released it
    os._exit(0)
os.close(ended[1])
assert os.read(ended[0], 1) == b"x"
try:
    Lock(place)
except InUse:
    lock.release()
    Lock(place).release()
    print("released")
os.close(wait[1])
os.waitpid(child, 0)
"""


def test_a_lock_ends_with_its_owner_though_a_forked_process_lives(tmp_path):
    """Such as a pool of processes that was begun while a run was open.

    The owner is a new process: one in which gRPC has threads may not be forked.
    """
    code = f"paths, place = {sys.path!r}, {str(tmp_path / 'f')!r}\n{FORKS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800)
    assert done.stdout == "released\n", done.stderr
