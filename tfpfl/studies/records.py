"""`Record`: the results of a run, read from its folder without its model or data. Tables and plots use it."""

import csv
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation, FederationError
from tfpfl.data.kinds import ScoreName
from tfpfl.runs import participation, protocols
from tfpfl.runs.config import RunConfig, RunError, read_config
from tfpfl.runs.protocols import EV_ALL, Protocol, Result, Score
from tfpfl.runs.results import matrices_after, seconds_per_round, visits_of
from tfpfl.runs.store import OtherRun, RunStore
from tfpfl.runs.store_content import check_of_run

SPENT = ("rounds", "bytes", "passes", "flops", "seconds", "virtual seconds")


class Described(NamedTuple):
    """A run that may not exist yet, or whose results are not needed, as `check_comparable` takes it."""

    folder: Path
    config: RunConfig

    @property
    def title(self) -> str:
        """The algorithm's name as papers write it, such as FedAvg."""
        return self.config.title


def common_federations(records: Sequence[Any], baseline: Sequence[Any]) -> set[str]:
    """The hashes of the federations that both sides have, whose clients can be compared one by one.

    Args:
        records, baseline: records, or `Described` runs.

    Raises:
        InvalidArgument: the two sides have no federation in common, so that no client is in both.
    """
    hashes = [{r.config.federation_hash for r in runs} for runs in (records, baseline)]
    both = hashes[0] & hashes[1]
    if not both:
        mine, other = (", ".join(sorted(h[:12] for h in found)) for found in hashes)
        raise InvalidArgument(
            f"{records[0].title} and {baseline[0].title} cannot be compared client by client: their federations are "
            f"{mine} and {other}. Take runs with one split of the data: --data-seed chooses it"
        )
    return both


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
            with RunStore(state, config.run_id, read_only=True, named=config.score) as store, store.reading():
                history, evaluations, ids = store.history(), store.evaluations(), store.client_ids()
        except OtherRun as error:
            raise RunError(
                f"config.json and {state.name} in {folder} are not of one run: config.json does not say what was run"
            ) from error
        if not history:
            raise RunError(f"{folder} has no rounds yet")
        check_of_run(str(state), history, evaluations, ids, range(config.clients or 0), config.score)
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            summary = {}
        return cls(folder, config, history, evaluations, summary if isinstance(summary, dict) else {})

    @property
    def score(self) -> ScoreName:
        """The name, unit and direction of the run's score: the accuracy, if labels are classes."""
        return self.config.score

    @property
    def title(self) -> str:
        """The algorithm's name as papers write it, such as FedAvg."""
        return self.config.title

    @cached_property
    def _federation(self) -> Federation | None:
        """The run's federation, its files unchecked; None if its folder is not at its place any more, or another is."""
        try:
            federation = Federation.load(self.config.federation or "", verify=False)
        except (FederationError, OSError):
            return None
        return federation if federation.hash == self.config.federation_hash else None

    @property
    def client_names(self) -> list[str]:
        """The names of the federation's clients; [] if they have none, or if its folder is at its place no more."""
        found = self._federation
        return found.client_names if found and "names" in found.manifest["clients"] else []

    @property
    def classes_differ(self) -> bool:
        """Whether some client lacks a class, so that local and global labels are different tasks.

        True also if the federation's folder is not at its place any more. False if labels are not classes.
        """
        if self.config.kind not in (None, "classification"):
            return False
        return self._federation is None or bool((self._federation.num_classes < self._federation.num_labels).any())

    @property
    def shares_head(self) -> bool:
        """Whether all clients have one head, in a method of tfpfl; it is not known of those of a user's own."""
        return self.config.own_method is None and self.config.method.head == "shared"

    @property
    def rounds(self) -> int:
        """Number of rounds that the run has so far."""
        return self.history[-1]["round"]

    @cached_property
    def took_part(self) -> dict[int, int] | None:
        """{client id: the first round in which the server used its work}; None if it cannot be known."""
        work = self._work() if self.config.client_seconds else None
        return participation.took_part(self.config, self.history, self.evaluations, work)

    def _work(self) -> np.ndarray | None:
        """float [I], examples times passes of every training client; None if the folder does not say."""
        try:
            with open(self.folder / "clients.csv", newline="", encoding="utf-8") as file:
                examples = [int(row["num_examples"]) for row in csv.DictReader(file)]
            return np.array(examples) * sum(self.summary["passes"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def seen_counts(self, protocol: Protocol = EV_ALL) -> tuple[int, int] | None:
        """(number of clients that had taken part, number of the others) in the last round of a protocol.

        None if it cannot be known, or if nothing was measured by the protocol.
        """
        scored = "sampled" if protocol.model == protocols.LOCAL_COPY else "all"
        by_round = protocols.rows_of(self.evaluations, protocol._replace(clients=scored), named=self.score)
        people = len(self.config.training_ids(self.config.clients or 0, self.config.data_seed or 0))
        return participation.counts(self.took_part, people, max(by_round)) if by_round else None

    @cached_property
    def results(self) -> list[Result]:
        """All results of the run, each with the protocol that it was measured by."""
        return protocols.results(self.evaluations, self.took_part, self.score)

    @property
    def predicts(self) -> str | None:
        """The model that clients predict with after the server's step: 'personal', 'fine-tuned' or 'global'."""
        return protocols.predicts(self.evaluations)

    def result(self, protocol: Protocol | str = EV_ALL) -> Result | None:
        """The result of a protocol, or of the one with this name; None if the run was not evaluated by it."""
        protocol = protocols.as_protocol(protocol)
        if protocol.clients in protocols.SIDES:  # where all have taken part, `results` leaves these two out
            return protocols.result(self.evaluations, protocol, self.took_part, self.score)
        return protocols.find(self.results, protocol)

    def per_client(
        self, split: str = "test", model: str | None = None, when: str = "last10", clients: str = "all"
    ) -> dict[int, float]:
        """{client id: score}, such as accuracies in [0, 1]; see `tfpfl.runs.protocols.per_client` for the arguments."""
        clients = "sampled" if model == protocols.LOCAL_COPY and clients == "all" else clients
        wanted = EV_ALL._replace(split=split, when=when, model=model or EV_ALL.model, clients=clients)
        return protocols.per_client(self.evaluations, wanted, self.took_part, self.score)

    def worst(self, fraction: float, protocol: Protocol = EV_ALL) -> float:
        """The mean score of the worst `fraction` of the clients; see `tfpfl.runs.protocols.worst`."""
        return protocols.worst(self.evaluations, fraction, protocol, self.took_part, self.score)

    @property
    def seconds_per_round(self) -> float:
        """The median seconds of the rounds that had clients; see `tfpfl.runs.results.seconds_per_round`."""
        seconds = seconds_per_round(self.history)
        return np.nan if seconds is None else seconds

    def rows_of(self, protocol: Protocol) -> dict[int, list[Score]]:
        """The scores from which the result of a protocol is computed: {round: scores}; {} if there are none."""
        return protocols.rows_of(self.evaluations, protocol, self.took_part, self.score)

    def curve(self, protocol: Protocol | str = EV_ALL, what: str | None = None) -> dict[int, float]:
        """{evaluated round: mean over clients} of the score (None, or its name), 'loss' or a metric."""
        protocol = protocols.as_protocol(protocol)
        return protocols.curve(self.evaluations, protocol, what, self.took_part, self.score)

    def spent(self, what: str) -> np.ndarray:
        """float [rounds]: what the run had spent in all after each round.

        Args:
            what: 'rounds'; 'bytes' (sent to and by all clients); 'passes' (of clients' examples through the backbone,
                forward and backward, over all visits); 'flops' (floating point operations of all visits, each
                counted for a client with the mean number of examples and classes); 'seconds' (of the rounds' work,
                without evaluation: the run's `seconds_per_round` for each round that had clients, so that the building
                of graphs does not count); 'virtual seconds' (of the clock of `Availability`).

        Raises:
            InvalidArgument: another word; 'passes' or 'flops' of a run without a summary, or that could not count
                operations; 'virtual seconds' of a run without a virtual clock.
        """
        if what not in SPENT:
            raise InvalidArgument(f"what a run spends is one of {', '.join(SPENT)}; found {what!r}")
        if what in ("passes", "flops") and what not in self.summary:
            raise InvalidArgument(
                f"{self.folder} has no summary.json, which has the {what}; `tfpfl evaluate` writes it"
            )
        if what == "flops" and self.summary["flops"] is None:
            raise InvalidArgument(f"the operations of {self.folder} could not be counted: take 'passes'")
        if what == "virtual seconds" and not self.config.client_seconds:
            raise InvalidArgument(f"{self.folder} has no virtual clock: it was run without client_seconds")
        of: dict[str, Callable[[dict], float]] = {
            "rounds": lambda row: 1,
            "bytes": lambda row: row.get("bytes_down", 0) + row.get("bytes_up", 0),
            "passes": lambda row: visits_of(row) * sum(self.summary["passes"].values()),
            "flops": lambda row: visits_of(row) * self.summary["flops"],
            "seconds": lambda row: self.seconds_per_round if row["clients"] else 0.0,
            "virtual seconds": lambda row: row["virtual_seconds"],
        }
        return np.cumsum([of[what](row) for row in self.history])

    def rounds_for(self, what: str, amount: float) -> int:
        """The number of rounds by whose end the run had spent no more than `amount`; see `spent` for `what`."""
        within = self.spent(what) <= amount * (1 + 1e-9)
        return max((row["round"] for row, there in zip(self.history, within, strict=True) if there), default=0)

    def until(self, round_num: int) -> "Record":
        """The record as if the run had ended after a round, but for its summary."""
        rows = [row for row in self.history if row["round"] <= round_num]
        return replace(
            self, history=rows, evaluations=[score for score in self.evaluations if score.round_num <= round_num]
        )

    @cached_property
    def matrix_rounds(self) -> list[int]:
        """The rounds after which the algorithm's matrices were saved; [] if it has no matrices."""
        with RunStore(self.folder / "state.sqlite", read_only=True) as store:
            return [t for t in store.matrix_rounds() if t <= self.rounds]  # the run may go on, or see `until`

    def matrices(self, round_num: int | None = None) -> dict[str, np.ndarray]:
        """{name: float [I, I]}: how much client i takes from client j, after a round; default: the last one saved.

        Raises:
            InvalidArgument: the run has matrices, but not of this round.
        """
        if not (rounds := self.matrix_rounds):
            return {}
        with RunStore(self.folder / "state.sqlite", read_only=True) as store:
            return matrices_after(store, rounds, round_num)
