"""The clients of a live run, how what their devices send is checked, and what a message of the server is.

Most runs have a population that the server knows. In a run on places (`tfpfl.live.enrolled`) it grows with the devices
that join. Devices run the exported program of PFLEGO's visit; or, for other methods, they compute with TensorFlow, and
messages and updates are what `tfpfl.live.plan.Vectors` says.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tflite_export.device import payload as payloads
from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument
from tfpfl.data.population import ClientInfo, Population
from tfpfl.engines.visit import server_step
from tfpfl.live.enrolled import enrolled_of
from tfpfl.live.plan import Vectors, exported_training, refusal
from tfpfl.live.rules import MOST_SCORE, Refused, Rules
from tfpfl.models import tree
from tfpfl.runs import protocols

_MOST_EXAMPLES = 10**9  # of a split; a device that says more did not count them


class Clients:
    """The clients of a live run, and checks of what they send.

    Args:
        run: an open `tfpfl.runs.run.Run`.
        rules: see `Rules`.

    Raises:
        InvalidArgument: devices cannot take part in this run.
    """

    def __init__(self, run, rules: Rules):
        self.run, self.rules = run, rules
        self.algorithm, self.population, self.model = run.algorithm, run.population, run.model
        self._exported = isinstance(exported_training(run), dict)
        if not self._exported and (why := refusal(run)):
            raise InvalidArgument(f"{run.folder}: devices cannot take part: {why}")
        if (patience := run.config.patience) is not None:
            raise InvalidArgument(
                f"{run.folder} ends after {patience} evaluations without a better one (patience), which only a "
                "simulation does: make the run without --patience, and stop the server when the scores are good enough"
            )
        if run.config.metrics:
            raise InvalidArgument(
                f"{run.folder} has other metrics than loss and score ({', '.join(run.config.metrics)}), and devices "
                "compute no others: make the run without --metric"
            )
        if rules.payload == "int8" and self.algorithm.balance is not None:
            raise InvalidArgument(
                f"{run.folder}: {run.config.algorithm}'s clients keep what they have sent, and int8 would change it on "
                "its way: leave --payload out"
            )
        if rules.payload == "int8" and self.algorithm.aggregate == "sum" and run.config.method.sends == "update":
            raise InvalidArgument(
                f"{run.folder}: {run.config.algorithm}'s clients send sums that the server divides or solves with, and "
                "int8 rounds the small ones of them away: leave --payload out"
            )
        self.enrolled = enrolled_of(run, rules.most_examples)
        self.on_enrolled: Callable[[ClientInfo], None] = lambda info: None  # makes the bundle of a client
        self._use(self.population)

    failed: BaseException | None = None  # what has ended the rounds
    book: Any  # of members and of what arrived; `LiveRounds` opens it

    def _check_on(self) -> None:
        """Raises what has ended the rounds: "the round is over" would be wrong, a new start may count what comes."""
        if self.failed is not None:
            raise self.failed

    def state(self, client: int, number: int) -> dict:
        """What became of a client in a round: whether what it sent is counted."""
        return {"round": number, "state": self.book.state(number, client)}

    def _use(self, population: Population) -> None:
        """Makes these the clients of the next round."""
        if population is not self.population:
            self.algorithm = self.run.recipe.algorithm(self.model, population)
        self.population, self.ids = population, population.client_ids.tolist()
        self._step = server_step(self.algorithm)
        # how messages and updates are read, if devices compute with TensorFlow; None: they run the exported program
        self.vectors = None if self._exported else Vectors(self.algorithm, self.run.config.seed)
        self.update_size = self.vectors.update_size if self.vectors else self.model.num_backbone_weights

    def _enrol(self, number: int, opens: bool = False) -> None:
        """In a run on places, the clients of a round are those that count in it, and if it `opens` now all."""
        found = self.enrolled.population(number, opens) if self.enrolled is not None else None
        if found is not None and (self.population is self.run.population or _sizes(found) != _sizes(self.population)):
            self._use(found)

    def info(self, client: int) -> ClientInfo:
        """The facts about a client that has joined."""
        return self.enrolled.info(client) if self.enrolled is not None else self.population.info(client)

    def head(self, client: int):
        """The head with which every engine begins this client: a `tfpfl.models.weights.Head` of arrays.

        Raises:
            Refused: the devices of this run compute with TensorFlow, and make their first states themselves (404).
        """
        if self.vectors:
            raise Refused(404, "devices of this run make their first state themselves")
        return tree.arrays(self.algorithm.init_client(self.info(client)))

    @property
    def oldest_scored(self) -> int | None:
        """The first saved round whose scores may still come; None: there is none. Asynchronous rounds have some."""
        return None

    def _check_update(self, client, about, payload, view) -> None:
        if (theta := wire.entry(about, "theta", str)) != view.theta:
            raise Refused(409, f"this update is for another theta ({theta[:12]}), not for {view.theta[:12]}")
        examples = int(self.population.info(client).num_examples)
        if (found := wire.entry(about, "examples", int)) != examples:
            raise Refused(422, f"client {client} has {examples} examples in this run, and the update says {found}")
        wire.entry(about, "loss", float, -MOST_SCORE, MOST_SCORE)
        self._check_scores(about, client, view.splits)
        try:
            gradient = payloads.decode(payload, self.update_size)
        except payloads.PayloadError as error:
            raise Refused(422, str(error)) from None
        norm = float(np.sqrt(np.square(gradient, dtype=np.float64).sum()))  # no product of BLAS, which wakes threads
        if not np.isfinite(norm):
            raise Refused(422, "the gradient holds NaN or infinity")
        if self.vectors:
            weight, found = self.vectors.weight(client, view.round_num), wire.entry(about, "weight", float)
            if found != weight:
                raise Refused(422, f"client {client} has the weight {weight:g} in this run, and its update {found:g}")
        if self.rules.max_norm is not None and norm > self.rules.max_norm:
            raise Refused(422, f"the gradient's norm is {norm:.3g}, and at most {self.rules.max_norm:g} is taken")

    def _check_scores(self, about, client, splits, beside: str | None = None) -> list[dict]:
        """The scores of a message; each is of the client's model, or of the one `beside` it."""
        rows = wire.entry(about, "scores", list, 0, len(splits) * (1 if beside is None else 2))
        bounds = (0, 1) if self.run.config.score.is_fraction else (-MOST_SCORE, MOST_SCORE)
        for row in rows:
            if not isinstance(row, dict):
                raise wire.WireError("a score must be a JSON object")
            if (split := wire.entry(row, "split", str)) not in splits:
                raise wire.WireError(f"no scores of the split {split[:40]!r} are wanted")
            if "model" in row and (beside is None or wire.entry(row, "model", str) != beside):
                raise wire.WireError("no scores of this model are wanted")
            known, found = self._num_examples(split, client), wire.entry(row, "examples", int)
            if not found:
                raise Refused(422, f"a score of no {split} examples came, and has no meaning: leave it out")
            if found != known if known is not None else not 1 <= found <= _MOST_EXAMPLES:
                has = f"1 to {_MOST_EXAMPLES}" if known is None else known
                raise Refused(422, f"client {client} has {has} {split} examples in this run, and its score {found}")
            wire.entry(row, "loss", float, -MOST_SCORE, MOST_SCORE)
            wire.entry(row, "score", float, *bounds)
        if len({(row["split"], row.get("model")) for row in rows}) < len(rows):
            raise wire.WireError("a split is scored twice")
        return rows

    def _num_examples(self, split: str, client: int) -> int | None:
        """The number of a client's examples in a split; None: only its device knows it."""
        if self.enrolled is not None:
            return int(self.info(client).num_examples) if split == "train" else None
        return int(self.run.federation.num_examples(split)[client])


def _sizes(population: Population) -> list[list[int]]:
    return [part.tolist() for part in (population.client_ids, population.num_examples, population.num_classes)]


def score_rows(scores: list[dict], number: int, client: int, model: str) -> list[protocols.Score]:
    """What a client sent of its scores after a round, as the run's store takes it."""

    def of(row: dict) -> protocols.Score:
        counted = row["split"], row["examples"], float(row["loss"]), float(row["score"])
        return protocols.Score(number, client, row.get("model", model), *counted)

    return [of(row) for row in scores]
