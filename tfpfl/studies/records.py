"""`Record`: the results of a run, read from its folder without its model or data. Tables and plots use it."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation, FederationError
from tfpfl.runs import protocols
from tfpfl.runs.config import RunConfig, RunError, read_config
from tfpfl.runs.protocols import EV_ALL, Protocol, Result
from tfpfl.runs.protocols import Score as Score
from tfpfl.runs.store import OtherRun, RunStore
from tfpfl.runs.store_content import check_of_run

SPENT = ("rounds", "bytes", "passes", "seconds", "virtual seconds")


@dataclass(frozen=True)
class Record:
    """The results of a run that is finished or still running.

    Attributes:
        folder: the run folder.
        config: the run's configuration.
        history: one dict for each round, with the columns of history.csv.
        evaluations: the score of each client in each evaluated round.
        summary: the content of summary.json; {} if the run is not finished.
    """

    folder: Path
    config: RunConfig
    history: list[dict]
    evaluations: list[Score]
    summary: dict

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Record":
        """Reads a run folder.

        Raises:
            RunError: the folder is not a run folder, its state is missing or of another run, or it has no rounds yet.
            StoreError: its state is damaged, or cannot be that of this run.
        """
        folder = Path(folder)
        config, state = read_config(folder), folder / "state.sqlite"
        if not state.exists():
            raise RunError(f"{state} is missing: the run's state is lost")
        try:
            with RunStore(state, config.run_id, read_only=True) as store:
                history, evaluations, ids = store.history(), store.evaluations(), store.client_ids()
        except OtherRun as error:
            raise RunError(
                f"config.json and {state.name} in {folder} are not of one run: config.json does not say what was run"
            ) from error
        if not history:
            raise RunError(f"{folder} has no rounds yet")
        check_of_run(str(state), history, evaluations, ids, range(config.clients or 0))
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            summary = {}
        return cls(folder, config, history, evaluations, summary if isinstance(summary, dict) else {})

    @property
    def title(self) -> str:
        """The algorithm's name as papers write it, such as FedAvg."""
        return self.config.title

    @cached_property
    def client_names(self) -> list[str]:
        """The names of the federation's clients; [] if they have none, or if its folder is at its place no more."""
        try:
            federation = Federation.load(self.config.federation or "", verify=False)
        except (FederationError, OSError):
            return []
        named = "names" in federation.manifest["clients"] and federation.hash == self.config.federation_hash
        return federation.client_names if named else []

    @property
    def rounds(self) -> int:
        """Number of rounds that the run has so far."""
        return self.history[-1]["round"]

    @cached_property
    def results(self) -> list[Result]:
        """All results of the run, each with the protocol that it was measured by."""
        return protocols.results(self.evaluations)

    @property
    def predicts(self) -> str | None:
        """The model that clients predict with after the server's step: 'personal', 'fine-tuned' or 'global'."""
        return protocols.predicts(self.evaluations)

    def result(self, protocol: Protocol = EV_ALL) -> Result | None:
        """The result of a protocol; None if the run was not evaluated by it."""
        return protocols.find(self.results, protocol)

    def per_client(self, split: str = "test", model: str | None = None, when: str = "last10") -> dict[int, float]:
        """{client id: accuracy in [0, 1]}; see `tfpfl.runs.protocols.per_client` for the arguments."""
        wanted = EV_ALL._replace(split=split, when=when, model=model or EV_ALL.model)
        return protocols.per_client(self.evaluations, wanted)

    def curve(self, protocol: Protocol = EV_ALL, what: str = "accuracy") -> dict[int, float]:
        """{evaluated round: mean over clients}; `what` is 'accuracy' (in [0, 1]), 'loss' (in nats) or a metric."""
        return protocols.curve(self.evaluations, protocol, what)

    def spent(self, what: str) -> np.ndarray:
        """float [rounds]: what the run had spent in all after each round.

        Args:
            what: 'rounds'; 'bytes' (sent to and by all clients); 'passes' (of clients' examples through the backbone,
                forward and backward, over all visits); 'seconds' (of the rounds' work, without evaluation); 'virtual
                seconds' (of the clock of `Availability`).

        Raises:
            InvalidArgument: another word; 'passes' of a run without a summary; 'virtual seconds' of a run without a
                virtual clock.
        """
        if what not in SPENT:
            raise InvalidArgument(f"what a run spends is one of {', '.join(SPENT)}; found {what!r}")
        if what == "passes" and "passes" not in self.summary:
            raise InvalidArgument(
                f"{self.folder} has no summary.json, which has the passes; `tfpfl evaluate` writes it"
            )
        if what == "virtual seconds" and not self.config.client_seconds:
            raise InvalidArgument(f"{self.folder} has no virtual clock: it was run without client_seconds")
        of: dict[str, Callable[[dict], float]] = {
            "rounds": lambda row: 1,
            "bytes": lambda row: row.get("bytes_down", 0) + row.get("bytes_up", 0),
            "passes": lambda row: row["clients"] * sum(self.summary["passes"].values()),
            "seconds": lambda row: row["seconds"],
            "virtual seconds": lambda row: row["virtual_seconds"],
        }
        return np.cumsum([of[what](row) for row in self.history])

    @cached_property
    def matrix_rounds(self) -> list[int]:
        """The rounds after which the algorithm's matrices were saved; [] if it has no matrices."""
        with RunStore(self.folder / "state.sqlite", read_only=True) as store:
            return store.matrix_rounds()

    def matrices(self, round_num: int | None = None) -> dict[str, np.ndarray]:
        """{name: float [I, I]}: how much client i takes from client j, after a round; default: the last one saved."""
        rounds = self.matrix_rounds
        if not rounds:
            return {}
        with RunStore(self.folder / "state.sqlite", read_only=True) as store:
            return store.matrices(rounds[-1] if round_num is None else round_num)
