"""What happens beside the rounds."""

import gc
import io
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

from helpers import small_runs as runs
from helpers.one_broken import build
from helpers.toys import on_disk
from tfpfl.checks import InvalidArgument
from tfpfl.data.kinds import ACCURACY, KINDS
from tfpfl.runs.callbacks import Callback, EarlyStopping, Progress, TensorBoard
from tfpfl.runs.run import Run
from tfpfl.runs.store import RunStore
from tfpfl.runs.training import Training


class Recorder(Callback):
    """Writes down what it is told."""

    def __init__(self, log, name="", fail_at=None):
        self.log, self.name, self.fail_at = log, name, fail_at

    def _see(self, what):
        self.log.append(self.name + what)
        if what == self.fail_at:
            raise OSError(what)

    def start(self, training, rounds):
        self._see(f"start {training.store.round_num} {rounds}")

    def round(self, training, row):
        assert training.store.history()[-1] == row  # it is saved by now
        self._see(f"round {row['round']}")

    def end(self, training):
        self._see("end")


@pytest.mark.slow
def test_the_order_of_calls(federation, tmp_path):
    log = []
    folder = runs.train(tmp_path / "run", federation, [Recorder(log)], rounds=2).folder
    assert log == ["start 0 2", "round 1", "round 2", "end"]
    log.clear()
    with Run.open(folder, rounds=3) as run:
        run.train([Recorder(log)])
    assert log == ["start 2 3", "round 3", "end"]


@pytest.mark.parametrize(
    ("fail_at", "calls"),
    [
        pytest.param(
            "round 1",
            ["a start 0 2", "b start 0 2", "a round 1", "b round 1", "b end", "a end"],
            marks=pytest.mark.slow,
        ),
        ("start 0 2", ["a start 0 2", "b start 0 2", "a end"]),
    ],
)
def test_what_was_started_is_ended_after_an_error(federation, tmp_path, fail_at, calls):
    log = []
    with pytest.raises(OSError, match=fail_at):
        runs.train(tmp_path / "run", federation, [Recorder(log, "a "), Recorder(log, "b ", fail_at)], rounds=2)
    assert log == calls


@pytest.mark.slow
def test_a_callback_stops_a_run_with_a_reason(federation, tmp_path):
    class Stop(Callback):
        def round(self, training, row):
            training.stop_reason = "enough" if row["round"] == 2 else None

    run = runs.train(tmp_path / "run", federation, [Stop()], rounds=5)
    assert run.stop_reason == "enough" and len(runs.saved(run.folder)["history"]) == 2


def test_a_training_that_was_stopped_goes_on_when_it_is_called_again(tmp_path):
    """It did nothing, without a word."""

    class Stop(Callback):
        def round(self, training, row):
            training.stop_reason = "enough" if row["round"] == 2 else None

    federation = on_disk(tmp_path / "federation")
    training = Training(build("fedsgd", federation), federation, splits=(), callbacks=[Stop()])
    training.run(4)
    assert (training.store.round_num, training.stop_reason) == (2, "enough")
    training.run(4)
    assert (training.store.round_num, training.stop_reason) == (4, None)


@pytest.mark.slow
def test_progress_shows_rounds_and_loss(federation, tmp_path):
    text = io.StringIO()
    runs.train(tmp_path / "run", federation, [Progress("PFLEGO", Console(file=text, width=90))], rounds=2)
    loss = runs.saved(tmp_path / "run")["history"][-1]["loss"]
    assert "PFLEGO" in text.getvalue() and "2/2 rounds" in text.getvalue() and f"loss {loss:.4f}" in text.getvalue()


def events(folder) -> dict:
    """{(name, round): value} of all event files."""
    found = {}
    for path in sorted(folder.glob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found[value.tag, event.step] = tf.make_ndarray(value.tensor).item()
    return found


@pytest.mark.slow
def test_tensorboard_has_the_history_after_interruptions_too(federation, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):  # before TensorBoard hears of round 2, which is saved
        runs.train(folder, federation, [runs.Interrupt(2)], rounds=4)
    with Run.open(folder) as run:
        run.train()
        history = run.store.history()
    expected = {
        (name.replace(" ", "/"), row["round"]): pytest.approx(value, rel=1e-6)
        for row in history
        for name, value in row.items()
        if name != "round"
    }
    assert len(history) == 4 and ("personal/test/accuracy", 2) in expected
    assert events(folder / "tensorboard") == expected


def test_tensorboard_that_cannot_write_does_not_end_a_run(tmp_path):
    board = TensorBoard(tmp_path)
    board.start(SimpleNamespace(store=RunStore()), 1)

    class Full:
        def write(self, event):
            raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

        def close(self):
            self.write(None)

    board._writer = Full()
    with pytest.warns(UserWarning, match="round 3 were not written.*No space left"):
        board.round(None, {"round": 3, "loss": 1.0})
    with pytest.warns(UserWarning, match="last TensorBoard events were not written.*No space left"):
        board.end(None)


def test_tensorboard_has_a_round_on_disk_before_the_next_begins(tmp_path):
    """A process that is killed then loses none."""
    board = TensorBoard(tmp_path)
    board.start(SimpleNamespace(store=RunStore()), 1)
    for t in (1, 2):
        board.round(None, {"round": t, "loss": 0.5})
        assert events(tmp_path) == {("loss", i): 0.5 for i in range(1, t + 1)}
    again = TensorBoard(tmp_path)  # in the same second: another file
    again.start(SimpleNamespace(store=RunStore()), 1)
    board.end(None)
    again.end(None)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2 and len(events(tmp_path)) == 2


@pytest.mark.slow
def test_tensorboard_keeps_no_memory_of_what_it_wrote(tmp_path):
    """In 100,000 rounds a few hundred bytes for each number would be a quarter of a GB."""
    board = TensorBoard(tmp_path)
    board.start(SimpleNamespace(store=RunStore()), 1)

    def rounds(first, last):
        for t in range(first, last):
            board.round(None, {"round": t, "clients": 5, "loss": 1.0 / t, "personal test accuracy": 0.5})

    rounds(1, 100)
    tracemalloc.start()
    try:
        rounds(100, 200)
        before = tracemalloc.get_traced_memory()[0]
        rounds(200, 700)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()
    board.end(None)
    assert len(events(tmp_path)) == 3 * 699


@pytest.mark.parametrize(
    ("scores", "patience", "stops_after"),
    [
        ([0.1, 0.2, 0.3, 0.4], 2, None),
        ([0.5, 0.4, 0.3], 2, 3),
        ([0.5, 0.5, 0.5], 2, 3),  # equal is not better
        ([0.5, None, 0.4, None, 0.6, 0.1, 0.2], 2, 7),  # None: not evaluated
        ([0.5, float("nan"), 0.4], 2, None),  # nobody had validation examples
    ],
)
def test_early_stopping(scores, patience, stops_after):
    stopping = EarlyStopping(patience)
    training = SimpleNamespace(stop_reason=None, model_name="personal", store=RunStore())
    stopping.start(training, 10)
    stopped = None
    for t, score in enumerate(scores, 1):
        row = {"round": t} if score is None else {"round": t, "personal validation accuracy": score}
        stopping.round(training, row)
        if training.stop_reason and stopped is None:
            stopped = t
    assert stopped == stops_after
    if stops_after:
        assert f"not risen above {max(s for s in scores if s):.4f} in {patience}" in training.stop_reason


def test_early_stopping_looks_at_the_score_of_each_training():
    """One object for a training of classes, then for one of numbers, whose score is the RMSE."""
    stopping = EarlyStopping(1)
    for score in (ACCURACY, KINDS["regression"].score):
        training = SimpleNamespace(stop_reason=None, model_name="personal", store=RunStore(), score=score)
        stopping.start(training, 10)
        for t, value in enumerate((0.5, 0.6 if score.direction == "min" else 0.4), 1):
            stopping.round(training, {"round": t, f"personal validation {score.name}": value})
        assert training.stop_reason.startswith(f"validation {score.name} has not")


def test_patience_is_as_long_in_the_last_ten_rounds_which_are_all_evaluated():
    """Every tenth round counts: rounds 91 and 92 were two of patience, in place of 20 rounds."""
    stopping = EarlyStopping(2)
    training = SimpleNamespace(stop_reason=None, model_name="personal", store=RunStore(), evaluate_every=10)
    stopping.start(training, 119)
    for t in [*range(10, 120, 10), *range(111, 120)]:
        score = 0.5 + t / 1000 if t <= 100 else 0.1  # the first bad one is that of round 110
        stopping.round(training, {"round": t, "personal validation accuracy": score})
        assert training.stop_reason is None, t
    stopping.round(training, {"round": 120, "personal validation accuracy": 0.1})  # of a training that goes on
    assert training.stop_reason.endswith("in 2 evaluated rounds")


@pytest.mark.parametrize(("saved", "stops_at_once"), [([0.5, 0.6, 0.4, 0.3], True), ([0.5, 0.6, 0.4], False)])
def test_early_stopping_of_a_resumed_training_remembers_the_saved_rounds(saved, stops_at_once):
    """Where its patience had ended, it stops before another round; else the next bad round ends it."""
    stopping, store = EarlyStopping(2), RunStore()
    for t, score in enumerate(saved, 1):
        store.commit_round(t, np.zeros(1), {}, {"round": t, "personal validation accuracy": score})
    training = SimpleNamespace(stop_reason=None, model_name="personal", store=store)
    stopping.start(training, 10)
    assert (training.stop_reason is not None) == stops_at_once
    stopping.round(training, {"round": len(saved) + 1, "personal validation accuracy": 0.2})
    assert training.stop_reason == "validation accuracy has not risen above 0.6000 in 2 evaluated rounds"


def test_early_stopping_without_patience_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        EarlyStopping(0)


def test_early_stopping_without_validation_examples_is_refused(federation):
    """It would never stop, and say nothing."""
    from helpers import toys
    from tfpfl import build_algorithm

    algorithm = build_algorithm("pflego", toys.SplitModel(toys.backbone("float32")), federation.population())
    for splits, told in ((("test",), "it scores test, or"), ((), "it scores nothing, or")):
        training = Training(algorithm, federation, splits=splits, callbacks=[EarlyStopping(2)])
        with pytest.raises(InvalidArgument, match=f"looks at validation examples.*would never stop: {told}"):
            training.run(1)
    assert training.store.round_num == 0
    bare = SimpleNamespace(num_examples=lambda split: np.zeros(6, int))
    training = SimpleNamespace(stop_reason=None, model_name="personal", store=RunStore(), federation=bare)
    with pytest.raises(InvalidArgument, match="its federation has no validation examples"):
        EarlyStopping(2).start(training, 10)


def test_is_evaluated(federation):
    from helpers import toys
    from tfpfl import build_algorithm

    model = toys.SplitModel(toys.backbone("float32"))
    algorithm = build_algorithm("pflego", model, federation.population())

    def evaluated(every, rounds):
        training = Training(algorithm, federation, evaluate_every=every)
        return [t for t in range(1, rounds + 1) if training.is_evaluated(t, rounds)]

    assert evaluated(10, 25) == [10, *range(16, 26)]
    assert evaluated(7, 30) == [7, 14, *range(21, 31)]
    assert evaluated(0, 12) == list(range(3, 13))
    assert evaluated(5, 8) == list(range(1, 9))
