"""Callbacks of the training: a progress bar, TensorBoard events, early stopping.

The training calls `start(training, rounds)` at the beginning, `round(training, row)` after every committed round, with
its history row, and `end(training)`. A callback stops the training by setting `training.stop_reason` to a text.
`Run.train` calls `begin(run)` before all of this, and `finish(run)` after it.
"""

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.scalar.summary import scalar_pb

from tfpfl.checks import InvalidArgument, check_choice, check_whole_number, warn_user
from tfpfl.data.kinds import ACCURACY
from tfpfl.runs.metrics import DIRECTIONS, NEITHER


class Callback:
    """The base class of callbacks; its methods do nothing. Override those that you need."""

    def begin(self, run) -> None:
        """Called by `Run.train`, and not by a plain `Training`, before all else."""

    def start(self, training, rounds: int) -> None:
        """Called before the first round. A resumed training has `training.store.round_num` rounds already."""

    def round(self, training, row: dict) -> None:
        """Called after every committed round, with its row of the history, {name: value}."""

    def end(self, training) -> None:
        """Called after the last round, and also after an error."""

    def finish(self, run) -> None:
        """Called by `Run.train` at its very end, when tables and summary are written, and also after an error."""


class Progress(Callback):
    """Shows a progress bar with the rounds, the time left and the mean loss of the round's clients at their last step.

    Args:
        label: the text before the bar.
        console: a `rich.console.Console`; default: standard output. If it is not a terminal, only the last state is
            printed.
    """

    def __init__(self, label: str, console=None):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds, left"),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}"),
            console=console,
        )
        self._label = label

    def start(self, training, rounds):
        """Shows the bar, with the rounds that are done already."""
        self._task = self._bar.add_task(self._label, total=rounds, completed=training.store.round_num, loss="-")
        self._bar.start()

    def round(self, training, row):
        """Moves the bar forward, and shows the round's loss."""
        self._bar.update(self._task, completed=row["round"], loss=f"{row['loss']:.4f}" if "loss" in row else "-")

    def end(self, training):
        """Stops updating the bar, which stays visible."""
        self._bar.stop()


_FILES = itertools.count()  # of this process: no two of its event files have the same name


class TensorBoard(Callback):
    """Writes every number of the history as a TensorBoard scalar over rounds.

    It does not use `tf.summary`, which keeps about half a kB of memory for every number that it has written.

    The events of a round are written before the next round begins. A resumed training writes those of the last saved
    round again, because it may have been killed after saving the round and before writing the events.

    Args:
        folder: where the event files are written.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def start(self, training, rounds):
        """Opens an event file, and writes the last saved round to it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILES)}.v2"
        self._writer = tf.io.TFRecordWriter(str(self._folder / name))
        self._write(file_version="brain.Event:2")  # every event file begins with this
        for row in training.store.history()[-1:]:
            self.round(training, row)

    def round(self, training, row):
        """Writes the numbers of a round; a write error gives a warning only."""
        try:
            for name, value in numbers(row).items():
                self._write(step=row["round"], summary=scalar_pb(name.replace(" ", "/"), value))
            self._writer.flush()
        except tf.errors.OpError as error:  # not a reason to end the run: history.csv has the same numbers
            warn_user(f"TensorBoard events of round {row['round']} were not written: {error}")

    def end(self, training):
        """Closes the event file after the last round; a write error gives a warning only."""
        try:
            self._writer.close()
        except tf.errors.OpError as error:
            warn_user(f"the last TensorBoard events were not written: {error}")

    def _write(self, **event):
        self._writer.write(Event(wall_time=time.time(), **event).SerializeToString())


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row of the history, but for that of the round."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "round" and isinstance(value, int | float) and np.isfinite(value)
    }


class EarlyStopping(Callback):
    """Stops the training when a mean over clients on validation examples has not got better for some evaluated rounds.

    Only every `evaluate_every`th round counts, so that patience is as long in the last ten rounds, which are all
    evaluated; if it is 0, these count. The history is read from the store. So a resumed training stops in the same
    round as an uninterrupted one.

    Args:
        patience: the number of rounds that count, at least 1.
        monitor: 'loss', or the name of the score, such as 'accuracy', or of a metric that the training measures.
            Default: the score.
        mode: 'max' if larger is better, 'min' if smaller is. Default: as the metric itself says.

    Raises:
        InvalidArgument: `patience` is less than 1, or `mode` is another word. Raised when the training starts: it does
            not measure what is monitored, or on no validation examples; or neither more nor less of it is better.
    """

    def __init__(self, patience: int, monitor: str | None = None, mode: str | None = None):
        check_whole_number(1, patience=patience)
        if mode is not None:
            check_choice(mode=(mode, DIRECTIONS))
        self.patience, self.monitor, self.mode = patience, monitor, mode

    def start(self, training, rounds):
        """Reads the scores of the rounds that are saved already: each goes through `round`, as a new one does."""
        score = getattr(training, "score", ACCURACY)
        self._looks_at = self.monitor or score.name  # of this training; the next one may have another score
        measured = {score.name: score.direction, "loss": "min"}
        measured |= {metric.name: metric.direction for metric in getattr(training, "metrics", ())}
        if self._looks_at not in measured:
            raise InvalidArgument(
                f"early stopping looks at {self._looks_at}, which this training does not measure; it measures "
                f"{', '.join(measured)}. Add it to `metrics`"
            )
        splits, federation = getattr(training, "splits", ("validation",)), getattr(training, "federation", None)
        if "validation" not in splits or (federation is not None and not federation.num_examples("validation").any()):
            raise InvalidArgument(
                f"early stopping looks at validation examples, and this training would never stop: it scores "
                f"{', '.join(splits) or 'nothing'}, or its federation has no validation examples. Give it "
                "splits=('validation', 'test') and a federation with validation=0.1, or leave early stopping out"
            )
        self._best_is = self.mode or measured[self._looks_at]
        if self._best_is == NEITHER:
            raise InvalidArgument(
                f"early stopping cannot look at {self._looks_at}, of which neither more nor less is better: look at "
                f"{score.name} or loss, or, in Python, give a mode"
            )
        self._scores = []
        for row in training.store.history():
            self.round(training, row)

    def round(self, training, row):
        """Reads the score of a round, and stops the training if it is time."""
        score = row.get(f"{training.model_name} validation {self._looks_at}")
        every = getattr(training, "evaluate_every", 1) or 1
        if score is None or np.isnan(score) or row["round"] % every:  # the last ten, which are evaluated in any case
            return
        self._scores.append(score)
        best = int(np.argmax(self._scores) if self._best_is == "max" else np.argmin(self._scores))
        if len(self._scores) - 1 - best >= self.patience:
            than = f"{'risen above' if self._best_is == 'max' else 'fallen below'} {self._scores[best]:.4f}"
            training.stop_reason = f"validation {self._looks_at} has not {than} in {self.patience} evaluated rounds"
