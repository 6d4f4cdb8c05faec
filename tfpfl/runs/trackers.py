"""Callbacks that write runs to MLflow and to Weights & Biases; each is an extra of setup.py.

Both get the configuration as parameters, the history by round, and the results at the end. Nothing leaves this machine
unless your own settings of these libraries say so: MLflow writes to a folder, Weights & Biases works offline.
"""

import hashlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfpfl.checks import Unavailable, extra, one_line, warn_user
from tfpfl.runs.callbacks import Callback, numbers
from tfpfl.runs.protocols import SIDES
from tfpfl.runs.training import DivergedError

if TYPE_CHECKING:
    from tfpfl.runs.run import Run

TABLES = ("config.json", "history.csv", "clients.csv", "summary.json")  # the artifacts


class Tracker(Callback, ABC):
    """What the two have in common: what is written, and when.

    Only `Run.train` calls `begin` and `finish`. A tracker of a plain `Training` writes the history without parameters
    and results, and is closed after the last round. What cannot be opened ends the run before its first round. What
    cannot be written later, such as when a server is away, is no reason to end it: there is a warning, and numbers are
    sent again after the next round and at the end.

    Args:
        name: the name of the run; default: that of its folder.
        tables: whether the files of the run folder (configuration, history, clients, summary) are written as artifacts.
    """

    def __init__(self, name: str | None = None, *, tables: bool = False):
        self._name, self._tables = name, tables
        self._run: Run | None = None
        self._is_open = False
        self._waiting: list[tuple[dict[str, float], int]] = []  # numbers and steps that are not written yet

    def begin(self, run: "Run") -> None:
        """Remembers the run, whose configuration and results are written."""
        self._run = run

    def start(self, training: Any, rounds: int) -> None:
        """Opens the run, and writes the rounds that it does not have yet.

        The last saved round is written again, because a process may have been killed between the two.
        """
        self._waiting.clear()  # of a run before: what it lacks is in its history
        last, self._is_open = self._open(self._identity(training)), True
        if last == 0 and self._run is not None:
            self._parameters(parameters(self._run))
        history = training.store.history()
        from_round = min(last, history[-1]["round"]) if history else last
        for row in history:
            if row["round"] >= from_round:
                self._numbers(numbers(row), row["round"])

    def round(self, training: Any, row: dict) -> None:
        """Writes the numbers of a round, at step `round`."""
        self._waiting.append((numbers(row), row["round"]))
        self._send()

    def end(self, training: Any) -> None:
        """Closes the run, unless `Run.train` calls `finish` later."""
        if self._run is None:
            self._finished(True, [])

    def finish(self, run: "Run") -> None:
        """Writes the results and, if asked for, the files of the run folder; then closes the run."""
        if not self._is_open:  # an error before the first round
            return
        ended = bool(run.stop_reason) or run.store.round_num >= run.config.rounds
        done = ended and not isinstance(sys.exc_info()[1], DivergedError)  # which `Run.train` raises after this
        self._waiting.append((summary(run), run.store.round_num))
        tables = [path for name in TABLES if (path := run.folder / name).exists()] if self._tables else []
        self._finished(done, tables)

    def _send(self) -> None:
        """Writes the numbers that are waiting, the oldest first, as far as they are taken."""
        try:
            while self._waiting:
                self._numbers(*self._waiting[0])
                del self._waiting[0]
        except Exception as error:  # the library's own, of its network, files or database
            if len(self._waiting) == 1:
                told = f"{type(self).__name__} did not take the numbers of round {self._waiting[0][1]}"
                warn_user(f"{told} ({one_line(repr(error))}). The training goes on; they are sent again later")

    def _finished(self, done: bool, tables: list[Path]) -> None:
        """Writes what is waiting and the files, closes the run, and warns of what is not written."""
        self._send()
        try:
            try:
                if tables:
                    self._artifacts(tables)
            finally:
                self._is_open = False
                self._close(done)
        except Exception as error:
            warn_user(f"{type(self).__name__} did not take the end of the run ({one_line(repr(error))})")
        if self._waiting:
            where = "" if self._run is None else ". history.csv in the run folder has them"
            warn_user(f"{type(self).__name__} lacks the numbers from round {self._waiting[0][1]} on{where}")

    def _identity(self, training: Any) -> tuple[str, str]:
        """A name for the run, and a text that is the same whenever the same run folder is continued."""
        if self._run is None:
            return self._name or "training", ""
        folder = self._run.folder.resolve()
        of = hashlib.sha256(f"{self._run.config.run_id} {folder}".encode()).hexdigest()
        return self._name or folder.name, of[:16]

    @abstractmethod
    def _open(self, identity: tuple[str, str]) -> int:
        """Opens the run of this name and identity; the last step that it has, 0 if it is a new one."""

    @abstractmethod
    def _parameters(self, values: dict[str, Any]) -> None:
        """Writes the configuration."""

    @abstractmethod
    def _numbers(self, values: dict[str, float], step: int) -> None:
        """Writes the numbers of a round, or the results."""

    @abstractmethod
    def _artifacts(self, files: list[Path]) -> None:
        """Writes files of the run folder."""

    @abstractmethod
    def _close(self, done: bool) -> None:
        """Closes the run; `done` says whether it has all of its rounds."""


class MLflow(Tracker):
    """Writes a run to MLflow: parameters, metrics by round, results, and the run folder's tables as artifacts.

    It goes where MLflow's own settings say (MLFLOW_TRACKING_URI, or `mlflow.set_tracking_uri`). Without such settings
    it goes to `folder`; `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db` shows it. MLflow's own report of
    how it is used is switched off, unless MLFLOW_DISABLE_TELEMETRY is set.

    Args:
        name, tables: as in `Tracker`.
        experiment: the name of MLflow's experiment.
        folder: the folder for what is written without a tracking URI.

    Raises:
        Unavailable: MLflow is not installed.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        tables: bool = False,
        experiment: str = "tfpfl",
        folder: str | os.PathLike = "mlruns",
    ):
        super().__init__(name, tables=tables)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before the import, which starts it
        self._mlflow = _library("mlflow")
        self._experiment, self._folder = experiment, Path(folder).resolve()
        self._client: Any = None

    def _open(self, identity: tuple[str, str]) -> int:
        name, identity_text = identity
        own = not self._mlflow.is_tracking_uri_set()
        if own:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._client = self._mlflow.MlflowClient(f"sqlite:///{self._folder / 'mlflow.db'}" if own else None)
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            place = {"artifact_location": (self._folder / "artifacts").as_uri()} if own else {}
            experiment_id = self._client.create_experiment(self._experiment, **place)
        else:
            experiment_id = experiment.experiment_id
        if identity_text:
            found = self._client.search_runs([experiment_id], f"tags.`tfpfl.run` = '{identity_text}'", max_results=1)
            if found:
                self._id = found[0].info.run_id
                self._client.set_terminated(self._id, "RUNNING")
                by_name = (self._client.get_metric_history(self._id, name) for name in found[0].data.metrics)
                return max((metric.step for metrics in by_name for metric in metrics), default=0)
        self._id = self._client.create_run(experiment_id, run_name=name, tags={"tfpfl.run": identity_text}).info.run_id
        return 0

    def _parameters(self, values: dict[str, Any]) -> None:
        params = [self._mlflow.entities.Param(name, str(value)[:500]) for name, value in values.items()]
        for start in range(0, len(params), 100):  # MLflow takes so many at a time
            self._client.log_batch(self._id, params=params[start : start + 100])

    def _numbers(self, values: dict[str, float], step: int) -> None:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        metrics = [metric(name.replace(" ", "/"), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def _artifacts(self, files: list[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._id, str(file))

    def _close(self, done: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if done else "KILLED")


class WandB(Tracker):
    """Writes a run to Weights & Biases: parameters, metrics by round, results, and the run folder's tables.

    It works offline, and writes to the folder `wandb`; `wandb sync` sends that folder, if you want to. If WANDB_MODE is
    set, for example to online, that holds instead.

    Args:
        name, tables: as in `Tracker`.
        project: the name of the project.
        folder: the folder in which the folder `wandb` is made.

    Raises:
        Unavailable: Weights & Biases is not installed.
    """

    def __init__(
        self, name: str | None = None, *, tables: bool = False, project: str = "tfpfl", folder: str | os.PathLike = "."
    ):
        super().__init__(name, tables=tables)
        if os.environ.get("WANDB_MODE", "offline") == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # before the import, which starts it
        self._wandb = _library("wandb")
        self._project, self._folder = project, Path(folder)
        self._tracked: Any = None

    def _open(self, identity: tuple[str, str]) -> int:
        name, identity_text = identity
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tracked = self._wandb.init(
            project=self._project,
            name=name,
            id=identity_text or None,
            dir=str(self._folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        return int(self._tracked.step) if self._tracked.resumed else 0

    def _parameters(self, values: dict[str, Any]) -> None:
        self._tracked.config.update(values, allow_val_change=True)

    def _numbers(self, values: dict[str, float], step: int) -> None:
        self._tracked.log({name.replace(" ", "/"): value for name, value in values.items()}, step=step)

    def _artifacts(self, files: list[Path]) -> None:
        artifact = self._wandb.Artifact(f"run-{self._tracked.id}", type="run")
        for file in files:
            artifact.add_file(str(file))
        self._tracked.log_artifact(artifact)

    def _close(self, done: bool) -> None:
        self._tracked.finish(exit_code=0 if done else 1)


TRACKERS: dict[str, Callable[..., Tracker]] = {"mlflow": MLflow, "wandb": WandB}


def parameters(run: "Run") -> dict[str, Any]:
    """The configuration of a run as a flat dict of numbers and texts: {'eta': 0.1, 'versions.keras': '2.14.0', ...}.

    A hyperparameter that is named like an entry of the configuration, such as Ditto's init, is 'hyperparameters.init'.
    """
    entries = asdict(run.config)
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, Mapping):
            free = name == "hyperparameters"
            found |= {key if free and key not in entries else f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in found.items() if v is not None}


def summary(run: "Run") -> dict[str, float]:
    """The results of a run, as means over clients: {'result last10 personal test accuracy': ...}."""
    found: dict[str, float] = {}
    for r in run.results():
        if r.mean == "clients":
            values = {r.named.name: r.score, "loss": r.loss, "worst_decile": r.worst_decile, **r.metrics}
            model = f"{r.model} {r.clients}" if r.clients in SIDES else r.model
            found |= {f"result {r.when} {model} {r.split} {name}": value for name, value in values.items()}
    return numbers(found)


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise Unavailable(
            f"--log {name} needs the package {name}, which is not installed: {extra(name)}; the import said: {error}"
        ) from error
