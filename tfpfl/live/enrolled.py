"""The clients of a run on places (`tfpfl.data.places`): their N_i and K_i are what their devices said when they joined.

A client counts from the first round that opens after it has joined. This round is written down with its sizes, before
the round opens. So the population of a round never changes while the round is open, nor when the server is killed.
Until then, its device may join again with other sizes, such as after an example that cannot be used was taken out.

    enrolled.json   {"3": {"examples": N_i, "classes": K_i, "since": the first round, or null if none has opened yet}}
"""

import json
from typing import Any

import numpy as np

from tflite_export.device.files import write_whole
from tfpfl.checks import InvalidArgument
from tfpfl.data.places import is_places
from tfpfl.data.population import ClientInfo, Population
from tfpfl.live.rules import Refused

FILE = "enrolled.json"


class Enrolled:
    """Who has joined a run on places.

    Args:
        run: an open `tfpfl.runs.run.Run`.
        most_examples: a device that says that it has more examples is refused.

    Raises:
        InvalidArgument: enrolled.json is damaged; or the method's server keeps a mean over all clients, or clients with
            different classes would share one head.
    """

    def __init__(self, run, most_examples: int):
        self._places, self._path, self._most = run.population, run.folder / FILE, most_examples
        self._outputs = run.federation.num_labels
        if run.algorithm.balance is not None:
            raise InvalidArgument(
                f"{run.folder}: {run.config.algorithm}'s server keeps a mean over all clients, which is wrong as soon "
                "as another client joins. Take another method, or make the run for clients whose sizes are known"
            )
        if run.recipe.row.head == "shared" and self._places.labels == "local":
            raise InvalidArgument(f"{run.folder}: {run.config.algorithm} shares one head: give --labels global")
        self._known: dict[int, dict[str, Any]] = {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
            for client, about in found.items():
                since = about["since"]
                sizes = {"examples": int(about["examples"]), "classes": int(about["classes"])}
                self._known[int(client)] = sizes | {"since": None if since is None else int(since)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"{self._path} is damaged: put the file back, or make a new run: {error}") from error

    def checked(self, client: int, examples: int, classes: int) -> ClientInfo:
        """What a device says that it has: the facts about its client, with alpha_i as if all who have joined counted.

        Raises:
            Refused: the sizes cannot be, or are not those with which the client counts already (409).
        """
        sizes = {"examples": examples, "classes": classes}
        before = self._known.get(client)
        if before is not None and sizes == {name: before[name] for name in sizes}:
            return self.info(client)
        if before is not None and before["since"] is not None:  # the weights of all depend on it, also after a restart
            raise Refused(
                409,
                f"client {client} joined with {before['examples']} examples of {before['classes']} classes, and says "
                f"{examples} of {classes} now: these stay what they were, since it counts from round "
                f"{before['since']} on",
            )
        if not 1 <= examples <= self._most:
            raise Refused(409, f"a device must have 1 to {self._most} training examples, and this one has {examples}")
        fewest = self._outputs if self._places.labels == "global" else 1
        if not fewest <= classes <= self._outputs:
            wanted = f"{fewest} to {self._outputs}" if fewest < self._outputs else f"{self._outputs}"
            raise Refused(409, f"a client of this run has {wanted} classes, and this one {classes}")
        total = examples + sum(each["examples"] for i, each in self._known.items() if i != client)
        return ClientInfo(np.int32(client), np.int32(examples), np.int32(classes), np.float32(examples / total))

    def add(self, client: int, examples: int, classes: int) -> None:
        """Takes a client in, which `checked` has checked, for the rounds that open from now on."""
        sizes = {"examples": examples, "classes": classes}
        if (before := self._known.get(client)) is None or before != before | sizes:
            known = self._known | {client: sizes | {"since": None}}
            self._write(known)
            self._known = known  # not before it is on disk

    def count(self, number: int) -> None:
        """Lets all who have joined count from this round on, which is about to open."""
        new = {i: about | {"since": number} for i, about in self._known.items() if about["since"] is None}
        if new:
            self._write(self._known | new)
            self._known |= new

    def _write(self, found: dict[int, dict]) -> None:
        known = {str(i): found[i] for i in sorted(found)}
        write_whole(self._path, (json.dumps(known, indent=2) + "\n").encode(), 0o600)

    def population(self, number: int, opens: bool = False) -> Population | None:
        """The clients that count in a round, with their alpha_i; None if they are fewer than a cohort needs.

        Args:
            number: the round.
            opens: whether it opens now, so that all who have joined count in it.
        """
        found = {i: self._known[i] for i in sorted(self._known)}
        counted = {i: about for i, about in found.items() if opens or (about["since"] or np.inf) <= number}
        if len(counted) < max(1, self._places.sampling.high):
            return None
        sizes = {name: [about[name] for about in counted.values()] for name in ("examples", "classes")}
        outputs = self._outputs if self._places.labels == "global" else None
        how: dict[str, Any] = {"labels": self._places.labels, "sampling": self._places.sampling, "num_labels": outputs}
        return Population(sizes["examples"], sizes["classes"], client_ids=list(counted), **how)

    def info(self, client: int) -> ClientInfo:
        """The facts about a client that has joined; alpha_i as if all who have joined counted."""
        about = self._known[client]
        total = sum(each["examples"] for each in self._known.values())
        sizes = np.int32(about["examples"]), np.int32(about["classes"])
        return ClientInfo(np.int32(client), *sizes, np.float32(about["examples"] / total))

    @property
    def ids(self) -> list[int]:
        """The clients that have joined, ascending."""
        return sorted(self._known)


def enrolled_of(run, most_examples: int) -> Enrolled | None:
    """The clients of a run on places; None of any other run."""
    return Enrolled(run, most_examples) if is_places(run.federation) else None
