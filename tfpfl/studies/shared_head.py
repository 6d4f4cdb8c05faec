"""One head for all clients, on the features of a trained backbone, and how well it predicts beside the clients' own.

It is fitted to the pooled training examples by L-BFGS on decorrelated features, with the loss of the run's kind. How
strongly its weights are held back (a ridge penalty) is chosen on a fifth of these training examples. Targets that are
numbers are divided by their standard deviation meanwhile: L-BFGS ends where losses and gradients are small, which they
would be from the start for small targets, such as 0.000001 A.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from scipy.optimize import minimize

from tfpfl.checks import InvalidArgument
from tfpfl.engines.rounds import Messages
from tfpfl.models.heads import HeadKind, head_kind
from tfpfl.models.weights import Head
from tfpfl.runs.client_model import ClientModels
from tfpfl.runs.scores import or_worst

PENALTIES = (100.0, 10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-5)
_ABSENT = -1e9  # added to the output of a class that a client does not have


class Examples(NamedTuple):
    """A client's examples, as a head sees them."""

    features: np.ndarray  # float [N, M]
    labels: np.ndarray  # int [N], among all classes; or targets [N, D]
    classes: np.ndarray | None = None  # the classes among which this client's own head chooses; None: all


class HeldOut(NamedTuple):
    """How well a client's own head and the shared one predict its held-out examples."""

    client: int
    name: str
    own_losses: np.ndarray  # float [n], of each example
    shared_losses: np.ndarray  # float [n], of the same examples
    own_score: float
    shared_score: float


def fit_shared(kind: HeadKind, clients: Sequence[Examples], outputs: int) -> Head:
    """Fits one head to the examples of all clients.

    Args:
        kind: the kind of the head, which has the loss.
        clients: the training examples of each client.
        outputs: the number of all classes, or of the targets.

    Returns:
        The kernel [M, outputs] and the bias [outputs], float64.
    """
    phi = np.concatenate([np.asarray(c.features, np.float64) for c in clients])
    y, kind, unit = _in_their_unit(np.concatenate([c.labels for c in clients]), kind)
    mask = np.zeros([len(phi), outputs]) if any(c.classes is not None for c in clients) else None
    if mask is not None:
        mask += np.concatenate([np.broadcast_to(_mask(c.classes, outputs), [len(c.labels), outputs]) for c in clients])
    center = phi.mean(0)
    values, vectors = np.linalg.eigh(np.cov(phi - center, rowvar=False, bias=True).reshape(phi.shape[1], -1))
    kept = values > 1e-9 * max(values.max(), 1e-30)
    whiten = vectors[:, kept] / np.sqrt(values[kept] + 0.01 * values.mean())  # directions without variance stay small
    x = (phi - center) @ whiten
    held = np.arange(len(x)) % 5 == 0
    tuned = ~held if len(x) > 1 else held
    weights, losses = _start(kind, y, x.shape[1], outputs), {}
    path = {}
    for penalty in PENALTIES:  # from the strongest, each from where the one before ended
        weights = path[penalty] = _minimum(kind, x[tuned], y[tuned], _rows(mask, tuned), penalty, weights)
        losses[penalty] = _loss(kind, x[held], y[held], _rows(mask, held), weights)
    best = min(losses, key=lambda penalty: losses[penalty])
    w = _minimum(kind, x, y, mask, best, path[best])
    return Head(unit * (whiten @ w[:-1]), unit * (w[-1] - center @ whiten @ w[:-1]))


def _in_their_unit(y: np.ndarray, kind: HeadKind) -> tuple[np.ndarray, HeadKind, float]:
    """(targets with the standard deviation 1, the kind for them, the number that they were divided by)."""
    if kind.label.name not in ("regression", "huber", "quantile"):  # classes, and counts, have no unit
        return y, kind, 1.0
    y = np.asarray(y, np.float64)
    unit = float(np.sqrt(np.square(y - y.mean(0)).mean()))
    if not 0 < unit < np.inf:
        return y, kind, 1.0
    if kind.label.name == "huber" and kind.label.parameter is not None:  # it is in the unit of the targets
        kind = head_kind(kind.label._replace(parameter=kind.label.parameter / unit))
    return y / unit, kind, unit


def _mask(classes: np.ndarray | None, outputs: int) -> np.ndarray:
    found = np.zeros(outputs)
    if classes is not None:
        found[:] = _ABSENT
        found[classes] = 0
    return found


def _rows(mask: np.ndarray | None, which: np.ndarray) -> np.ndarray | None:
    return None if mask is None else mask[which]


def _start(kind: HeadKind, y: np.ndarray, width: int, outputs: int) -> np.ndarray:
    """Weights [width + 1, outputs] that predict the mean, or the same probability of all."""
    weights = np.zeros([width + 1, outputs])
    if kind.label.name in ("regression", "huber", "quantile"):
        weights[-1] = y.mean(0)
    elif kind.label.name == "poisson":
        weights[-1] = np.log(np.maximum(y.mean(0), 1e-3))
    return weights


def _outputs(x: np.ndarray, mask: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
    z = x @ weights[:-1] + weights[-1]
    return z if mask is None else z + mask


def _loss(kind: HeadKind, x: np.ndarray, y: np.ndarray, mask: np.ndarray | None, weights: np.ndarray) -> float:
    value = float(kind.loss(tf.constant(_outputs(x, mask, weights)), tf.constant(y)))
    return value if np.isfinite(value) else np.inf


def _minimum(
    kind: HeadKind, x: np.ndarray, y: np.ndarray, mask: np.ndarray | None, penalty: float, start: np.ndarray
) -> np.ndarray:
    """The weights of the least mean loss + penalty / 2 |kernel|^2."""
    labels, shape = tf.constant(y), start.shape
    targets = kind.targets(labels, shape[1], tf.float64)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(shape)
        z = tf.constant(_outputs(x, mask, weights))
        error = kind.error(z, targets).numpy() / len(x)
        held = penalty * np.vstack([weights[:-1], np.zeros([1, shape[1]])])
        gradient = np.vstack([x.T @ error, error.sum(0)[None]]) + held
        return float(kind.loss(z, labels)) + 0.5 * float((held * weights).sum()), gradient.ravel()

    options = {"maxiter": 500, "ftol": 1e-9, "gtol": 1e-5}
    return minimize(objective, start.ravel(), jac=True, method="L-BFGS-B", options=options).x.reshape(shape)


def measured(kind: HeadKind, head: Head, examples: Examples, own: bool) -> tuple[np.ndarray, float]:
    """(float [n], the loss of every example; the score) of a head; infinity in place of what is not finite.

    Args:
        kind: the kind of the head.
        head: its weights.
        examples: n >= 1 examples. The labels of an `own` head's are among the client's `classes`, if it has them.
        own: whether the head has the outputs of the client's classes only.
    """
    z = np.asarray(examples.features, np.float64) @ np.asarray(head.kernel, np.float64) + np.asarray(head.bias)
    y = examples.labels
    if examples.classes is not None:
        y = np.searchsorted(examples.classes, y)
        z = z if own else z[:, examples.classes]
    z, y = tf.constant(z), tf.constant(y)
    if kind.label.is_classes:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=z)
    else:
        losses = tf.reduce_sum(kind.losses(z, tf.cast(y, z.dtype)), 1)
    each = or_worst(losses.numpy())
    if kind.counts:
        y = tf.cast(y, tf.int32) if kind.label.is_classes else y
        return each, float(np.mean(kind.correct(z, y).numpy()))
    return each, float(or_worst(kind.score(z, y)))


def held_out_of(run: Any, split: str) -> tuple[list[HeldOut], int]:
    """What the clients' own heads and the shared one do on the held-out examples of a run.

    Args:
        run: an open `Run` with at least one round.
        split: 'validation' or 'test'.

    Returns:
        (one for each client that took part and has such examples, the number of the run's clients).

    Raises:
        InvalidArgument: see `tfpfl.studies.advice.advise`.
    """
    algorithm, federation, kind = run.algorithm, run.federation, run.model.kind
    name = run.config.algorithm
    if run.recipe.row.evaluated(run.config.hyperparameters) == "global":
        raise InvalidArgument(
            f"the clients of {name} predict with one model for all, so there is no head of their own to compare. Train "
            "a method with personal heads on the same data, such as pflego or fedavg_ft, and ask for advice on it"
        )
    if not algorithm.shares_backbone and algorithm.global_model is None:
        without = ""
        if any(run.model.own):  # the method itself may share the backbone
            without = ", without personal" if run.config.personal is not None else ", without batch_norm='local'"
        raise InvalidArgument(
            f"the clients of {name} share no backbone on which one head for all could stand. Train a method with a "
            f"shared backbone on the same data, such as pflego, fedper or fedavg_ft{without}, and ask for advice on it"
        )
    if not federation.num_examples(split).any():
        other = "test" if split == "validation" else "validation"
        raise InvalidArgument(f"no client has {split} examples: take --split {other}, or train on data that have some")
    models, local = ClientModels(run), run.population.labels == "local"
    everyone = [int(i) for i in run.population.client_ids]
    first = run.took_part
    ids = [i for i in everyone if first is None or i in first]
    if not ids:
        raise InvalidArgument("no client has taken part yet: train the run for more rounds with `tfpfl resume`")
    classes_local = local and kind.label.is_classes
    theta = models.weights(ids[0]).theta
    if not algorithm.shares_backbone:
        loop, t = run.training(), run.store.round_num
        message = Messages(algorithm)(loop.server_state(), loop.visits(t, [ids[0]]))(0)
        theta = algorithm.global_model(message).theta

    def examples(client: int, part: str, weights: Any) -> Examples:
        x, y = run.examples.arrays(client, part, labels="global")  # of a frozen trunk, its features
        weights = tuple(map(tf.constant, weights))
        phi = run.model.features_in_chunks(weights, tf.nest.map_structure(tf.constant, x)).numpy()
        return Examples(phi, np.asarray(y), federation.classes(client) if classes_local else None)

    with_examples = [i for i in ids if federation.num_examples("train")[i]]
    outputs = federation.num_labels
    shared = fit_shared(kind, [examples(i, "train", theta) for i in with_examples], outputs)
    found = []
    for i in (i for i in ids if federation.num_examples(split)[i]):
        own = models.weights(i)
        held_out = examples(i, split, theta)
        its = held_out if algorithm.shares_backbone else examples(i, split, own.theta)
        (own_losses, own_score), (losses, score) = (
            measured(kind, own.head, its, True), measured(kind, shared, held_out, False)
        )  # fmt: skip
        found.append(HeldOut(i, federation.client_names[i], own_losses, losses, own_score, score))
    return found, len(everyone)
