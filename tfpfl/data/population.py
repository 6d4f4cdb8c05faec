"""The clients of a training run (`Population`), their sampling (`Sampling`), and a client's facts (`ClientInfo`)."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from tfpfl.checks import InvalidArgument, check_numbers, check_whole_number
from tfpfl.data.arrays import as_written

Tensor = Any


class ClientInfo(NamedTuple):
    """The facts about one client that an algorithm may use besides the client's data."""

    client_id: Tensor  # int32 []
    num_examples: Tensor  # int32 []: N_i, the number of training examples
    num_classes: Tensor  # int32 []: K_i, the number of outputs of its head
    alpha: Tensor  # float []: alpha_i = N_i / N over all clients of the population


@dataclass(frozen=True)
class Sampling:
    """How the cohort of a round is sampled; `tfpfl.data.cohorts.cohort` draws it.

    Args:
        kind: 'fixed': r = max(floor(rate * I), 1) clients, uniformly without replacement. 'binomial': every client with
            probability `rate`, independently. 'range': r is uniform in [low, high] in every round; the r clients are
            then drawn as with 'fixed'. While clients are away, r is smaller in proportion to those that are there.
        rate: the participation rate in (0, 1], for 'fixed' and 'binomial'; default 1, everyone.
        low, high: the smallest and the largest r, for 'range'; 1 <= low <= high.
        old_sizes: for 'range': draw r as run folders up to format 4 did, so that such runs continue unchanged.
        old_shares: while clients are away, take as many as run folders up to format 5 did: with 'range' r, with
            'fixed' r = max(floor(rate * n), 1) of the n that are there.

    Raises:
        InvalidArgument: an unknown kind; a rate outside (0, 1]; low and high without 1 <= low <= high, or not
            whole; no number; a number that the kind does not use.
    """

    kind: str = "fixed"
    rate: float = 1.0
    low: int = 0
    high: int = 0
    old_sizes: bool = False
    old_shares: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("fixed", "binomial", "range"):
            raise InvalidArgument(f"unknown sampling {self.kind!r}: one of fixed, binomial, range")
        check_numbers(participation=self.rate, low=self.low, high=self.high)
        object.__setattr__(self, "rate", as_written(self.rate))
        unused = f"rate={self.rate}" if self.rate != 1 else ""
        if self.kind != "range":
            unused = f"low={self.low} and high={self.high}" if self.low or self.high else ""
        if unused:
            raise InvalidArgument(
                f"{unused} would not be used with kind={self.kind!r}: 'range' has low and high, 'fixed' and 'binomial' "
                "have a rate. Take the other kind, or leave this out"
            )
        if self.kind == "range":
            if not 1 <= self.low <= self.high or self.low % 1 or self.high % 1:
                raise InvalidArgument(
                    f"sampling range needs whole numbers 1 <= low <= high, found low={self.low}, high={self.high}"
                )
            for name in ("low", "high"):  # with a NumPy number, a draw of 64 bits would become a float
                object.__setattr__(self, name, int(getattr(self, name)))
        elif not 0 < self.rate <= 1:
            raise InvalidArgument(f"participation must lie in (0, 1], found {self.rate}")

    def expected(self, num_clients: int) -> float:
        """The expected number of clients in a round, r, of `num_clients` clients in all.

        Examples:
            >>> Sampling("fixed", rate=0.25).expected(10), Sampling("binomial", rate=0.25).expected(10)
            (2, 2.5)
        """
        if self.kind == "range":
            return (self.low + self.high) / 2
        return self.rate * num_clients if self.kind == "binomial" else max(int(self.rate * num_clients + 1e-9), 1)

    def most(self, num_clients: int) -> int:
        """The largest possible number of clients in a round, of `num_clients` clients in all."""
        return {"range": self.high, "binomial": num_clients}.get(self.kind) or int(self.expected(num_clients))


def whole_numbers(name: str, values: ArrayLike) -> np.ndarray:
    """The values as int64, after the check that they are whole numbers; `name` names them in the error.

    Raises:
        InvalidArgument: they are something else, such as truth values, or a number has a fraction.
    """
    found = np.asarray(values)
    if found.dtype.kind not in "iuf" or (found % 1 != 0).any():
        raise InvalidArgument(f"{name} must be whole numbers, found {found.dtype} such as {found.ravel()[:5].tolist()}")
    return found.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Population:
    """The clients that take part in training, as the builder of an algorithm needs them.

    Args:
        num_examples: int [I], the number of training examples N_i of every client, >= 1.
        num_classes: int [I], the number of classes K_i of every client, >= 1: the outputs of its own head.
        num_labels: C, the number of outputs of a head that all clients share. Needed only if the clients' classes or
            their numbers K_i differ.
        labels: the labels that engines read from a federation: 'local' (class ids 0..K_i-1 in the client's own class
            set) or 'global' (class ids of the data set; every head then has C outputs).
        sampling: how the cohort of a round is sampled; default: everyone takes part.
        client_ids: int [I], ascending, >= 0; default 0..I-1. The other clients of the federation are never trained on
            ("new clients").
        arrival: float [I], the probability in [0, 1] that the work of a sampled client reaches the server; default 1.
            See `tfpfl.runs.availability`.
        same_classes: whether label k is the same class with all clients.

    Raises:
        InvalidArgument: the vectors differ in length or are empty; client_ids are not ascending; a client has no
            training example or no class; num_labels is smaller than a K_i; sampling asks for more clients than there
            are; a number is not whole; labels or arrival is not one of the values above.
    """

    num_examples: np.ndarray
    num_classes: np.ndarray
    num_labels: int | None = None
    labels: str = "local"
    sampling: Sampling = field(default_factory=Sampling)
    client_ids: np.ndarray = cast(np.ndarray, None)  # all of them, once it is made
    arrival: np.ndarray | None = None
    same_classes: bool = True

    if TYPE_CHECKING:  # what may be given; the attributes are arrays

        def __init__(
            self,
            num_examples: ArrayLike,
            num_classes: ArrayLike,
            num_labels: int | None = None,
            labels: str = "local",
            sampling: Sampling = ...,
            client_ids: ArrayLike | None = None,
            arrival: ArrayLike | None = None,
            same_classes: bool = True,
        ) -> None: ...

    def __post_init__(self) -> None:
        examples = whole_numbers("num_examples", self.num_examples)
        classes = whole_numbers("num_classes", self.num_classes)
        ids = np.arange(examples.size) if self.client_ids is None else whole_numbers("client_ids", self.client_ids)
        if examples.ndim != 1 or not len(examples) or examples.shape != classes.shape or examples.shape != ids.shape:
            raise InvalidArgument(
                "num_examples, num_classes and client_ids must be vectors of one length >= 1, found shapes "
                f"{examples.shape}, {classes.shape}, {ids.shape}"
            )
        if (np.diff(ids) <= 0).any() or ids[0] < 0:
            raise InvalidArgument(f"client_ids must be ascending and not negative, found {ids.tolist()[:10]}")
        for name, values in (("training examples", examples), ("classes", classes)):
            if (values < 1).any():
                bad = int(np.argmax(values < 1))
                raise InvalidArgument(
                    f"every client needs at least one of its {name}; client {ids[bad]} has {values[bad]}"
                )
        if self.labels not in ("local", "global"):
            raise InvalidArgument(f"labels are 'local' or 'global', found {self.labels!r}")
        if not isinstance(self.sampling, Sampling):
            raise InvalidArgument(
                f"sampling must be a tfpfl.Sampling, such as tfpfl.Sampling('fixed', rate=0.5); found {self.sampling!r}"
            )
        if self.sampling.kind == "range" and self.sampling.high > len(ids):
            raise InvalidArgument(f"sampling range goes up to {self.sampling.high} but there are {len(ids)} clients")
        if self.num_labels is not None:
            check_whole_number(1, num_labels=self.num_labels)
        if self.num_labels is not None and self.num_labels < classes.max():
            raise InvalidArgument(
                f"num_labels={self.num_labels} is too small: a shared head needs an output for every class, and client "
                f"{ids[classes.argmax()]} has {classes.max()} classes"
            )
        if self.arrival is not None:
            arrival = np.asarray(self.arrival)
            arrival = arrival.astype(np.float64) if arrival.dtype.kind in "iuf" else np.full(0, np.nan)
            if arrival.shape != ids.shape or not ((arrival >= 0) & (arrival <= 1)).all():
                raise InvalidArgument(
                    f"arrival is a probability for each of the {len(ids)} clients, found {self.arrival}"
                )
            object.__setattr__(self, "arrival", arrival)
        object.__setattr__(self, "num_examples", examples)
        object.__setattr__(self, "num_classes", classes)
        object.__setattr__(self, "client_ids", ids)

    @cached_property
    def _total(self) -> int:
        """N, the number of training examples of all clients; computed once, not again for every client."""
        return self.num_examples.sum()

    @property
    def num_clients(self) -> int:
        """The number of clients, I."""
        return len(self.client_ids)

    @property
    def clients_per_round(self) -> float:
        """The expected number of clients in a round, r."""
        return self.sampling.expected(self.num_clients)

    @property
    def clients_that_arrive(self) -> float:
        """The expected number of clients in a round whose work reaches the server; see `arrival`."""
        return self.clients_per_round * (1.0 if self.arrival is None else float(np.mean(self.arrival)))

    def shared_labels(self) -> int:
        """The number of outputs C of a head that all clients share, for the builders of methods with such a head.

        Raises:
            InvalidArgument: the clients' classes or K_i differ, and num_labels is not given. With 'local' labels,
                output k of a shared head means a different class for each client, so num_labels must be given on
                purpose.
        """
        if self.num_labels is not None:
            return self.num_labels
        low, high = self.num_classes.argmin(), self.num_classes.argmax()
        fewest, most = self.num_classes[low], self.num_classes[high]
        if fewest != most or not self.same_classes:
            what = "clients have different classes, each numbered from 0 on"
            if fewest != most:
                ids = self.client_ids
                what = f"client {ids[low]} has {fewest} classes and client {ids[high]} has {most}"
            raise InvalidArgument(
                f"this method shares one head, but {what}. Use --labels global, in Python labels='global' (one output "
                "per class of the data set), or federation.population(..., shared_slots=True) if output k may mean a "
                "different class for each client"
            )
        return int(most)

    def info(self, client_id: int, dtype: DTypeLike = np.float32) -> ClientInfo:
        """The `ClientInfo` of one client.

        Args:
            client_id: the id of the client.
            dtype: the dtype of alpha.

        Raises:
            InvalidArgument: the population has no client of this id.
        """
        i = int(np.searchsorted(self.client_ids, client_id))
        if i == len(self.client_ids) or self.client_ids[i] != client_id:
            raise InvalidArgument(f"client {client_id} is not among the {self.num_clients} clients of the population")
        return ClientInfo(
            client_id=np.int32(client_id),
            num_examples=np.int32(self.num_examples[i]),
            num_classes=np.int32(self.num_classes[i]),
            alpha=np.asarray(self.num_examples[i] / self._total, dtype),
        )

    def arrival_of(self, client_id: int) -> float:
        """The probability that the work of one client reaches the server when it is sampled; see `arrival`."""
        return 1.0 if self.arrival is None else float(self.arrival[np.searchsorted(self.client_ids, client_id)])
