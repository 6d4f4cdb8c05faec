"""The functions of tfpfl's metrics, which `tfpfl.runs.metrics` gives names, units and directions.

Those of classes take labels int [N] and logits [N, K]; the others take targets [N, K] and outputs z [N, K]. What a
model predicts is z itself for numbers and quantiles, exp(z) for counts, and z > 0 for each of several labels.
"""

from collections.abc import Callable

import numpy as np


def macro_f1(labels: np.ndarray, logits: np.ndarray) -> float:
    """The mean of the classes' F1, over the classes that are among the labels or the predictions."""
    right, labelled, predicted = _counts(labels, logits)
    total = labelled + predicted
    return float(np.mean(2 * right[total > 0] / total[total > 0]))


def balanced_accuracy(labels: np.ndarray, logits: np.ndarray) -> float:
    """The mean of the classes' recall, over the classes that are among the labels."""
    right, labelled, _ = _counts(labels, logits)
    return float(np.mean(right[labelled > 0] / labelled[labelled > 0]))


def top2_accuracy(labels: np.ndarray, logits: np.ndarray) -> float:
    """The fraction of the examples whose class has one of the two largest logits; of equal logits the first count."""
    best = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    return float((best == labels[:, None]).any(1).mean())


def ece(labels: np.ndarray, logits: np.ndarray) -> float:
    """The expected calibration error, with 15 bins of equal width (Guo et al., ICML 2017).

    The examples are sorted into bins by the probability of the predicted class. The error is the mean over examples of
    |accuracy of the bin - mean probability in the bin|. It is NaN if a probability is, as of a model that diverged.
    """
    p = softmax(logits)
    top, right = p.max(1), p.argmax(1) == labels
    if np.isnan(top).any():
        return float("nan")
    bins = np.minimum((top * 15).astype(np.int64), 14)
    gaps = np.bincount(bins, right, 15) - np.bincount(bins, top, 15)
    return float(np.abs(gaps).sum() / len(labels))


def brier(labels: np.ndarray, logits: np.ndarray) -> float:
    """The Brier score: the mean of the squared distances between probabilities and one-hot labels, in [0, 2]."""
    return float(((softmax(logits) - np.eye(logits.shape[1])[labels]) ** 2).sum(1).mean())


def _counts(labels: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every class: how many examples are predicted right, have this label, and are predicted to have it."""
    found, k = logits.argmax(1), logits.shape[1]
    return tuple(np.bincount(of, minlength=k) for of in (labels[found == labels], labels, found))  # type: ignore[return-value]


def softmax(logits: np.ndarray) -> np.ndarray:
    """The probabilities of the classes: float64 [N, K]."""
    z = np.asarray(logits, np.float64)
    z = np.exp(z - z.max(1, keepdims=True, initial=-np.inf))
    return z / z.sum(1, keepdims=True)


def nll(labels: np.ndarray, logits: np.ndarray) -> float:
    """The mean negative log-likelihood of the labels: the cross-entropy, in nats."""
    z = np.asarray(logits, np.float64)
    z = z - z.max(1, keepdims=True)
    return float((np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), labels]).mean())


def rmse(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The root of the mean squared error, over examples and outputs, in the unit of the targets."""
    return float(np.sqrt(np.mean(_errors(targets, outputs) ** 2)))


def mae(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The mean absolute error, over examples and outputs, in the unit of the targets."""
    return float(np.abs(_errors(targets, outputs)).mean())


def r2(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The coefficient of determination: 1 - squared error / squared distance of the targets from their means.

    It is the mean over the outputs whose targets are not all the same; NaN if there are none.
    """
    y = np.asarray(targets, np.float64)
    varies = np.ptp(y, axis=0) > 0
    if not varies.any():
        return float("nan")
    around, errors = ((y - y.mean(0)) ** 2).sum(0), (_errors(targets, outputs) ** 2).sum(0)
    return float(np.mean(1 - errors[varies] / around[varies]))


def coverage(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The fraction of the targets that are at or below the prediction: about Q for a good quantile:Q."""
    return float((np.asarray(targets) <= np.asarray(outputs)).mean())


def deviance(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The mean deviance of Poisson's distribution, 2 (y log(y / m) - y + m) with m = exp(z); 0 for m = y."""
    y, z = np.asarray(targets, np.float64), np.asarray(outputs, np.float64)
    return float(2 * np.mean(y * np.log(np.where(y > 0, y, 1)) - y * z - y + np.exp(z)))


def of_rates(function: Callable[[np.ndarray, np.ndarray], float]) -> Callable[[np.ndarray, np.ndarray], float]:
    """The function of a metric for counts: what is predicted is exp(z)."""

    def of_counts(targets: np.ndarray, outputs: np.ndarray) -> float:
        return function(targets, np.exp(np.asarray(outputs, np.float64)))

    return of_counts


def exact_match(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The fraction of the examples of which every label is predicted right."""
    return float(_right(targets, outputs).all(1).mean())


def hamming(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The fraction of the labels, over examples and outputs, that are predicted wrong."""
    return float((~_right(targets, outputs)).mean())


def f1(targets: np.ndarray, outputs: np.ndarray) -> float:
    """The mean of the outputs' F1, over those that are set in some target or prediction; NaN if none is."""
    there, found = np.asarray(targets) > 0.5, np.asarray(outputs) > 0
    total = there.sum(0) + found.sum(0)
    if not total.any():
        return float("nan")
    return float(np.mean(2 * (there & found).sum(0)[total > 0] / total[total > 0]))


def _errors(targets: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return np.asarray(predicted, np.float64) - np.asarray(targets, np.float64)


def _right(targets: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    return (np.asarray(outputs) > 0) == (np.asarray(targets) > 0.5)
