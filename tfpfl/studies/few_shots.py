"""How well people do who never trained, by the number of examples that they give: curves over k examples a class."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument, check_listed, check_whole_number
from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.data.randomness import Stream, generator
from tfpfl.runs import statistics
from tfpfl.studies.new_clients import adapt_new_clients

SHOTS = (1, 2, 5, 10, 20)


class ShotCurve(NamedTuple):
    """The scores of new clients that adapted to a few examples of each class."""

    shots: tuple[int, ...]  # examples of a class, at most; of targets that are no classes, examples in all
    client_ids: np.ndarray  # int [n]
    examples: np.ndarray  # int [k, n]: how many examples each adapted to; fewer where it has no more
    score: np.ndarray  # float [k, D, n], such as the accuracy, after the last epoch; NaN without test examples
    # float [n]: before the first epoch, with the first draw of `shots[0]` examples at hand: a method that predicts with
    # a client's examples, as kNN-Per with its neighbours, uses them already.
    before: np.ndarray
    named: ScoreName = ACCURACY

    @property
    def by_client(self) -> np.ndarray:
        """float [k, n]: the mean over the draws."""
        return self.score.mean(1)

    @property
    def means(self) -> np.ndarray:
        """float [k]: the mean over clients and draws."""
        return np.array([statistics.mean_over_clients(row) for row in self.by_client])


def few_of_each(labels: np.ndarray, shots: int, seed: int, client: int, draw: int = 0) -> np.ndarray:
    """The places of up to `shots` random examples of each class, ascending: int64 [m].

    More shots add examples to those of fewer: the draws are nested.

    Args:
        labels: int [N], the classes; or targets [N, D], which are taken for one class.
        shots: examples of a class, >= 1.
        seed, client, draw: decide which, all >= 0.

    Raises:
        InvalidArgument: `shots` is below 1.
    """
    if shots < 1:
        raise InvalidArgument(f"shots must be numbers of examples >= 1, found {shots}")
    mixed = generator(seed, Stream.SHOTS, client + (draw << 32)).permutation(len(labels))
    classes = np.zeros(len(labels), int) if np.ndim(labels) > 1 else np.asarray(labels)[mixed]
    order = np.argsort(classes, kind="stable")
    first = np.searchsorted(classes[order], classes[order])
    return np.sort(mixed[order[np.arange(len(order)) - first < shots]])


def shot_curve(run, shots: Sequence[int] = SHOTS, *, draws: int = 3, epochs: int = 20, **how) -> ShotCurve:
    """Lets the clients of a run's federation that never trained adapt to a few examples of each class.

    Args:
        run: an open `Run` with at least one round and with new clients (`new_clients` of its configuration).
        shots: numbers of examples of a class.
        draws: how often the examples are drawn anew.
        epochs: epochs of each client.
        **how: `protocol`, `split`, `eta` and `batch_size` of `adapt_new_clients`.

    Raises:
        InvalidArgument: as in `adapt_new_clients`; `shots` is no list, or empty; one of them, or `draws`, is no whole
            number >= 1.
        CannotAdapt: the method cannot adapt.
    """
    check_listed("shots", shots, "[1, 5, 20]")
    if not (shots := list(shots)):
        raise InvalidArgument("shots must be numbers of examples >= 1, such as [1, 5, 20]; found none")
    for number in shots:
        check_whole_number(1, shots=number)
    check_whole_number(1, draws=draws)
    found = {}
    counts = {}
    for k in shots:
        for draw in range(draws):
            only = _places(run, k, draw)
            found[k, draw] = adapt_new_clients(run, epochs=epochs, only=only, **how)
            counts[k] = [len(only(i)) for i in found[k, draw].client_ids.tolist()]
    one = found[shots[0], 0]
    score = np.array([[found[k, draw].score[:, -1] for draw in range(draws)] for k in shots])
    examples = np.array([counts[k] for k in shots])
    return ShotCurve(tuple(shots), one.client_ids, examples, score, one.score[:, 0], one.named)


def _places(run, shots: int, draw: int) -> Callable[[int], np.ndarray]:
    def places(client: int) -> np.ndarray:
        labels = run.federation.raw(client, "train", "global")[1]
        return few_of_each(labels, shots, run.config.seed, client, draw)

    return places
