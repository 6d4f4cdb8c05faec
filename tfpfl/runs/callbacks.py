"""What happens beside the rounds: a progress bar, TensorBoard events, stopping early.

A callback has `start(training, rounds)`, `round(training, row)` after every committed round, with its history row, and
`end(training)`. It stops the run by setting `training.stop_reason`.
"""

import warnings
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument


class Callback:
    """Does nothing; derive from it."""

    def start(self, training, rounds: int) -> None:
        """Before the first round; `training.store.round_num` rounds are there already."""

    def round(self, training, row: dict) -> None:
        """After a round was committed."""

    def end(self, training) -> None:
        """After the last round, or an error."""


class Progress(Callback):
    """A progress bar with rounds, the time left and the cohort's loss.

    Args:
        label: shown before the bar.
        console: a `rich.console.Console`; on something that is not a terminal only the last state is printed.
    """

    def __init__(self, label: str, console=None):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds, left"),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}"),
            console=console,
        )
        self._label = label

    def start(self, training, rounds):
        """Shows the bar."""
        self._task = self._bar.add_task(self._label, total=rounds, completed=training.store.round_num, loss="-")
        self._bar.start()

    def round(self, training, row):
        """Moves it."""
        self._bar.update(self._task, completed=row["round"], loss=f"{row['loss']:.4f}" if "loss" in row else "-")

    def end(self, training):
        """Leaves it as it is."""
        self._bar.stop()


class TensorBoard(Callback):
    """Writes every number of the history as a scalar over rounds.

    A round's events are in the file before the next round begins. Those of the last saved round are written again on
    resuming: a kill may have come between the two.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def start(self, training, rounds):
        """Opens an event file."""
        self._writer = tf.summary.create_file_writer(str(self._folder))
        for row in training.store.history()[-1:]:
            self.round(training, row)

    def round(self, training, row):
        """Adds a round."""
        try:
            with self._writer.as_default(step=row["round"]):
                for name, value in row.items():
                    if name != "round" and isinstance(value, int | float) and np.isfinite(value):
                        tf.summary.scalar(name.replace(" ", "/"), value)
            self._writer.flush()
        except tf.errors.OpError as error:  # a picture of the history is not worth a run; history.csv has it all
            warnings.warn(f"TensorBoard events of round {row['round']} were not written: {error}", stacklevel=2)

    def end(self, training):
        """Closes the file."""
        self._writer.close()


class EarlyStopping(Callback):
    """Stops when mean validation accuracy over clients has not risen for `patience` evaluated rounds.

    It reads the history in the store, so a resumed run stops where an uninterrupted one would have.
    """

    def __init__(self, patience: int):
        if patience < 1:
            raise InvalidArgument(f"patience must be at least 1 evaluated round, found {patience}")
        self.patience = patience

    def start(self, training, rounds):
        """Reads what is there already."""
        self._scores = []
        for row in training.store.history():
            self._see(training, row)

    def round(self, training, row):
        """Adds a round."""
        self._see(training, row)

    def _see(self, training, row):
        score = row.get(f"{training.model_name} validation accuracy")
        if score is None or np.isnan(score):
            return
        self._scores.append(score)
        best = int(np.argmax(self._scores))
        if len(self._scores) - 1 - best >= self.patience:
            training.stop_reason = (
                f"validation accuracy has not risen above {self._scores[best]:.4f} in {self.patience} evaluated rounds"
            )
