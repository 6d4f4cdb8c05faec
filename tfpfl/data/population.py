"""Who takes part: the clients of a population, how a round's cohort is sampled, what a client knows about itself."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument

Tensor = Any


class ClientInfo(NamedTuple):
    """What a client knows about itself before it looks at its data."""

    client_id: Tensor  # int32 []
    num_examples: Tensor  # int32 []: N_i, the training examples
    num_classes: Tensor  # int32 []: K_i, the width of its head
    alpha: Tensor  # float []: alpha_i = N_i / N over all clients of the population


@dataclass(frozen=True)
class Sampling:
    """Who takes part in a round; see `tfpfl.data.cohorts.cohort`.

    'fixed': r = max(floor(rate * I), 1) clients, uniformly without replacement. 'binomial': an independent coin of
    probability `rate` for every client. 'range': r uniform in [low, high] every round, then as 'fixed'; with
    `old_sizes` r is drawn as in run folders of format 4 and before, which go on as they began.
    """

    kind: str = "fixed"
    rate: float = 1.0
    low: int = 0
    high: int = 0
    old_sizes: bool = False

    def __post_init__(self):
        if self.kind not in ("fixed", "binomial", "range"):
            raise InvalidArgument(f"unknown sampling {self.kind!r}: one of fixed, binomial, range")
        if self.kind == "range":
            if not 1 <= self.low <= self.high:
                raise InvalidArgument(f"sampling range needs 1 <= low <= high, found low={self.low}, high={self.high}")
        elif not 0 < self.rate <= 1:
            raise InvalidArgument(f"participation must lie in (0, 1], found {self.rate}")

    def expected(self, num_clients: int) -> float:
        """r, the expected number of clients in a round.

        Examples:
            >>> Sampling("fixed", rate=0.25).expected(10), Sampling("binomial", rate=0.25).expected(10)
            (2, 2.5)
        """
        if self.kind == "range":
            return (self.low + self.high) / 2
        return self.rate * num_clients if self.kind == "binomial" else max(int(self.rate * num_clients + 1e-9), 1)

    def most(self, num_clients: int) -> int:
        """The largest cohort that there can be."""
        return {"range": self.high, "binomial": num_clients}.get(self.kind) or int(self.expected(num_clients))


@dataclass(frozen=True, eq=False)
class Population:
    """The clients that take part in training, as the algorithm's builder sees them.

    Args:
        num_examples: int [I], N_i, the training examples of every client.
        num_classes: int [I], K_i, the width of every client's head.
        num_labels: C, the width of a head that clients share. It may be left out where all K_i are the same.
        labels: 'local' (class ids 0..K_i-1 of the client's own class set) or 'global' (the data set's class ids, and
            then every head has C outputs); what engines read from a federation.
        sampling: who takes part in a round; default: everyone.
        client_ids: int [I], ascending; default 0..I-1. Others of the federation are new to what was trained.
        arrival: float [I], the probability that a sampled client's work reaches the server; default 1. See
            `tfpfl.runs.availability`.
    """

    num_examples: np.ndarray
    num_classes: np.ndarray
    num_labels: int | None = None
    labels: str = "local"
    sampling: Sampling = field(default_factory=Sampling)
    client_ids: np.ndarray | None = None
    arrival: np.ndarray | None = None

    def __post_init__(self):
        examples = np.asarray(self.num_examples, np.int64)
        classes = np.asarray(self.num_classes, np.int64)
        ids = np.arange(len(examples)) if self.client_ids is None else np.asarray(self.client_ids, np.int64)
        if examples.ndim != 1 or not len(examples) or examples.shape != classes.shape or examples.shape != ids.shape:
            raise InvalidArgument(
                "num_examples, num_classes and client_ids must be vectors of one length >= 1, found shapes "
                f"{examples.shape}, {classes.shape}, {ids.shape}"
            )
        if (np.diff(ids) <= 0).any() or ids[0] < 0:
            raise InvalidArgument("client_ids must be ascending and not negative")
        for name, values in (("training examples", examples), ("classes", classes)):
            if (values < 1).any():
                bad = int(np.argmax(values < 1))
                raise InvalidArgument(
                    f"every client needs at least one of its {name}; client {ids[bad]} has {values[bad]}"
                )
        if self.labels not in ("local", "global"):
            raise InvalidArgument(f"labels are 'local' or 'global', found {self.labels!r}")
        if self.sampling.kind == "range" and self.sampling.high > len(ids):
            raise InvalidArgument(f"sampling range goes up to {self.sampling.high} but there are {len(ids)} clients")
        if self.num_labels is not None and self.num_labels < classes.max():
            raise InvalidArgument(
                f"a head that clients share would have num_labels={self.num_labels} outputs, but client "
                f"{ids[classes.argmax()]} has {classes.max()} classes"
            )
        if self.arrival is not None:
            arrival = np.asarray(self.arrival, np.float64)
            if arrival.shape != ids.shape or not ((arrival >= 0) & (arrival <= 1)).all():
                raise InvalidArgument(
                    f"arrival is a probability for each of the {len(ids)} clients, found {self.arrival}"
                )
            object.__setattr__(self, "arrival", arrival)
        object.__setattr__(self, "num_examples", examples)
        object.__setattr__(self, "num_classes", classes)
        object.__setattr__(self, "client_ids", ids)
        object.__setattr__(self, "_total", examples.sum())  # N, which `info` would add up for every client anew

    @property
    def num_clients(self) -> int:
        """I."""
        return len(self.client_ids)

    @property
    def clients_per_round(self) -> float:
        """r, in expectation."""
        return self.sampling.expected(self.num_clients)

    def shared_labels(self) -> int:
        """C, the width of a head that clients share; builders of such algorithms ask for it.

        Raises:
            ValueError: the K_i differ and num_labels is not given. With 'local' labels an output of a shared head is
                another class for every client, and some clients never use it: nothing to do by accident.
        """
        if self.num_labels is not None:
            return self.num_labels
        low, high = self.num_classes.argmin(), self.num_classes.argmax()
        if self.num_classes[low] != self.num_classes[high]:
            raise InvalidArgument(
                f"clients share a head here, but have different numbers of classes: client {self.client_ids[low]} has "
                f"{self.num_classes[low]}, client {self.client_ids[high]} has {self.num_classes[high]}. Take global "
                "labels, or give num_labels (federation.population(..., shared_slots=True)) to let output k be the "
                "k-th class of whoever predicts"
            )
        return int(self.num_classes[0])

    def info(self, client_id: int, dtype=np.float32) -> ClientInfo:
        """What client `client_id` knows about itself.

        Raises:
            KeyError: the client is not in the population.
        """
        i = int(np.searchsorted(self.client_ids, client_id))
        if i == len(self.client_ids) or self.client_ids[i] != client_id:
            raise KeyError(f"client {client_id} is not among the {self.num_clients} clients of the population")
        return ClientInfo(
            client_id=np.int32(client_id),
            num_examples=np.int32(self.num_examples[i]),
            num_classes=np.int32(self.num_classes[i]),
            alpha=np.asarray(self.num_examples[i] / self._total, dtype),
        )
