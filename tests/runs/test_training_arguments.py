"""A training with a wrong argument is refused before the first round, with what was found."""

import pytest

from helpers import small_runs as runs
from helpers import toys
from tfpfl import Sampling, SplitModel, Training, build_algorithm
from tfpfl.checks import InvalidArgument
from tfpfl.runs.callbacks import Callback
from tfpfl.runs.run import Run
from tfpfl.runs.store import RunStore


@pytest.fixture(scope="module")
def algorithm(federation):
    population = federation.population(Sampling("fixed", 0.5), "local", shared_slots=True)
    return build_algorithm("fedsgd", SplitModel(toys.backbone("float32")), population)


class _StartOnly:
    def start(self, training, rounds):
        pass


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("algorithm", "pflego", "the algorithm must be a tfpfl.Algorithm"),
        ("algorithm", RunStore, "the algorithm must be a tfpfl.Algorithm, the first argument.*found type"),
        ("engine", "locla", "unknown engine 'locla'; did you mean 'local'"),
        ("seed", -1, "the seed must be an integer >= 0, found -1"),
        ("seed", None, "the seed must be an integer >= 0, found None"),
        ("federation", {"a": 1}, "the federation must be a tfpfl.Federation.*found dict"),
        ("federation", "folder", "the federation must be a tfpfl.Federation.*found 'folder'"),
        ("store", "state.sqlite", "the store must be a RunStore"),
        ("threads", float("nan"), "threads must be at least 1, found nan"),
        ("threads", "2", "threads must be a number, found '2'"),
        ("machines", "localhost:8000", "machines must be a tfpfl.Machines"),
        ("availability", 0.9, "availability must be an Availability"),
        ("quorum", 3, "quorum must be a function.*found 3"),
        ("passes", "2", "passes must be a number, found '2'"),
        ("passes", -1, "passes.*-1"),
        ("model_name", None, "model_name must be a text"),
        ("evaluate_every", "2", "evaluate_every must be a whole number >= 0, found '2'"),
        ("evaluate_every", 2.5, "evaluate_every must be a whole number >= 0, found 2.5"),
        ("evaluate_every", -1, "evaluate_every must be at least 0, found -1"),
        ("splits", "test", r"splits must be a list, such as \('validation', 'test'\); found 'test'"),
        ("splits", ["tset"], "unknown split 'tset'"),
        ("metrics", "macro_f1", "metrics must be a list.*found 'macro_f1'"),
        ("metrics", [3], "a metric is a name, a function or a Metric; found 3"),
        ("callbacks", None, "callbacks must be a list.*found None"),
        ("callbacks", [print], "a callback must be an object.*without start, round, end"),
        ("callbacks", [_StartOnly()], "without round, end"),
        ("callbacks", [Callback], "which is a class: call it"),
    ],
)
def test_wrong_arguments(federation, algorithm, name, value, said):
    with pytest.raises(InvalidArgument, match=said):
        Training(**({"algorithm": algorithm, "federation": federation} | {name: value}))


@pytest.mark.parametrize("rounds", [0, "3", 2.5, None])
def test_rounds_are_whole(federation, algorithm, rounds):
    with pytest.raises(InvalidArgument, match="rounds must be"):
        Training(algorithm, federation).run(rounds)


class _WithoutFinish(_StartOnly):
    """What `Training` calls, and not all of what `Run.train` does."""

    round = end = begin = lambda self, *_: None


def test_a_run_refuses_what_it_cannot_call_to_the_end(federation, algorithm, tmp_path):
    assert Training(algorithm, federation, callbacks=[_WithoutFinish()]).callbacks
    with (
        Run.create(runs.config(), tmp_path / "run", federation) as run,
        pytest.raises(InvalidArgument, match="without finish"),
    ):
        run.train([_WithoutFinish()])
    with Run.open(tmp_path / "run") as run:
        assert not run.store.round_num
