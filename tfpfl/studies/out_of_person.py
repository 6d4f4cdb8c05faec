"""Personal models on their own and on other people's data, and how far their probabilities can be trusted."""

import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.data.kinds import ScoreName
from tfpfl.runs import statistics
from tfpfl.runs.client_model import ClientModels
from tfpfl.runs.metric_functions import ece, nll, softmax
from tfpfl.runs.scores import or_worst


class Exchange(NamedTuple):
    """The scores of every client's model on every client's data."""

    client_ids: np.ndarray  # int [n]
    score: np.ndarray  # float [n, n]: of the model of client i on the data of client j; NaN if j has no examples
    named: ScoreName

    @property
    def own(self) -> np.ndarray:
        """float [n]: every model on its own client's data."""
        return np.diag(self.score).copy()

    @property
    def others(self) -> np.ndarray:
        """float [n]: the mean of every model over the other clients; NaN if there is no other one with examples."""
        off = np.where(np.eye(len(self.score), dtype=bool), math.nan, self.score)
        return np.array([statistics.mean_over_clients(row) for row in off])


class Calibration(NamedTuple):
    """How far the probabilities of every client's own model can be trusted; float [n] each, NaN where there is none."""

    client_ids: np.ndarray  # int [n]
    ece: np.ndarray  # expected calibration error on test
    nll: np.ndarray  # negative log-likelihood on test, in nats
    coverage: np.ndarray  # fraction of the test examples whose class is in the conformal set
    set_size: np.ndarray  # mean number of classes in a set
    aim: float  # 1 - alpha: what the coverage is to be


def exchange(run, split: str = "test") -> Exchange:
    """Scores the personal model of every client of a run on the examples of every client, after the last round.

    With local labels, a prediction is the class for which the output stands; examples of classes that a model does not
    know count as wrong.

    Args:
        run: an open `Run` with at least one round. It is only read.
        split: the examples that are scored: 'train', 'validation' or 'test'.

    Raises:
        InvalidArgument: the run has no rounds yet, or there is no such split.
    """
    models, ids, kind = _Outputs(run), run.population.client_ids, run.model.kind
    data = [models.examples(int(j), split) for j in ids]
    score = np.full((len(ids), len(ids)), math.nan)
    for i, client in enumerate(ids.tolist()):
        outputs, classes = models.of(client), models.classes(client)
        for j, (x, y) in enumerate(data):
            if not len(y):
                continue
            z = outputs(x)
            if kind.label.is_classes:
                score[i, j] = (classes[z[:, : len(classes)].argmax(1)] == y).mean()
            elif kind.counts:
                score[i, j] = np.mean(kind.correct(tf.constant(z), tf.constant(y)))
            else:
                score[i, j] = or_worst(kind.score(tf.constant(z), tf.constant(y)))
    return Exchange(np.array(ids), score, kind.label.score)


def calibration(run, alpha: float = 0.1, pooled: bool = False) -> Calibration:
    """Measures calibration, and split conformal prediction (Vovk et al.; Lei et al. 2018), client by client.

    The threshold comes from the validation examples and the coverage from the test examples, under the personal model.

    Args:
        run: an open `Run` of classes with at least one round and a validation part. It is only read.
        alpha: the fraction of examples whose class may be outside of the set, in (0, 1).
        pooled: whether all clients' validation examples together give one threshold. Then the coverage can be low for
            some clients and high for others. False: every client has its own, which is infinite (all classes are in
            the set) for fewer than 1 / alpha - 1 examples.

    Raises:
        InvalidArgument: the labels are no classes, `alpha` is out of range, there are no validation examples, or the
            run has no rounds yet.
    """
    if not run.model.kind.label.is_classes:
        raise InvalidArgument(f"calibration is of classes, and this run's kind is {run.model.kind.label.text}")
    if not 0 < alpha < 1:
        raise InvalidArgument(f"alpha must lie in (0, 1), found {alpha}")
    if not run.federation.num_examples("validation").any():
        raise InvalidArgument(
            "calibration takes its thresholds from validation examples, and this run's federation has none: make it "
            "with a larger validation"
        )
    models, ids = _Outputs(run), run.population.client_ids
    parts = {split: [models.own(int(i), split) for i in ids] for split in ("validation", "test")}
    scores = [nonconformity(labels, z) for labels, z in parts["validation"]]
    one = threshold(np.concatenate(scores), alpha)
    found = np.full((4, len(ids)), math.nan)
    for i, (labels, z) in enumerate(parts["test"]):
        if len(labels):
            inside = or_worst(nonconformity(None, z)) <= (one if pooled else threshold(scores[i], alpha))
            found[:2, i] = or_worst([ece(labels, z), nll(labels, z)])  # NaN would say that there are no examples
            found[2:, i] = inside[np.arange(len(z)), labels].mean(), inside.sum(1).mean()
    return Calibration(np.array(ids), found[0], found[1], found[2], found[3], aim=1 - alpha)


def nonconformity(labels: np.ndarray | None, logits: np.ndarray) -> np.ndarray:
    """1 - the probability of the label: float64 [N]; without labels, of every class: [N, K]."""
    p = 1 - softmax(logits)
    return p if labels is None else p[np.arange(len(p)), labels]


def threshold(scores: np.ndarray, alpha: float) -> float:
    """The ceil((n + 1) (1 - alpha))-th smallest of n scores; infinity if there are too few.

    If the n scores and that of a new example are exchangeable, the latter is at most the threshold with probability
    1 - alpha or more. NaN, that of a model that diverged, is the largest score: infinity.
    """
    scores = or_worst(scores)
    place = math.ceil((len(scores) + 1) * (1 - alpha) - 1e-9)
    return float(np.sort(scores)[place - 1]) if place <= len(scores) else math.inf


class _Outputs:
    """The outputs of clients' models on any examples of a run's federation."""

    def __init__(self, run):
        self._run, self._models = run, ClientModels(run)
        self._local = run.population.labels == "local"

    def of(self, client: int):
        """(x) -> outputs [N, K] of a client's model."""
        return self._models.outputs(client)

    def examples(self, client: int, split: str) -> tuple:
        """(x, y) of a client's split; x decoded in the model's dtype, y with global labels."""
        reader = self._run.examples.reader(split, "global", self._run.model.dtype)
        x, y = reader(client)
        return x, y.numpy()

    def classes(self, client: int) -> np.ndarray:
        """The global classes for which the outputs of a client's head stand."""
        return self._run.federation.classes(client) if self._local else np.arange(self._run.federation.num_labels)

    def own(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        """(labels as the client's head numbers them, logits for its classes) of its own examples."""
        x, y = self.examples(client, split)
        classes = self.classes(client)
        return np.searchsorted(classes, y), self.of(client)(x)[:, : len(classes)]
