"""The usual `Adaptation`s: how a client that never took part in training adapts its model before it predicts."""

from typing import Any, NamedTuple

from tfpfl.algorithms.contract import Adaptation, ClientData
from tfpfl.algorithms.parts.local_training import PARTS, batch_loop, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_choice
from tfpfl.models import tree
from tfpfl.models.losses import client_loss, logits
from tfpfl.models.weights import Weights


class Fit(NamedTuple):
    """The state that an `adaptation` carries from epoch to epoch."""

    message: Any
    weights: Weights
    slots: Any  # the optimizer's state, for the part that is trained
    phi: Any  # [N_i, M]: the features, if only the head is trained and they do not change; otherwise ()


def adaptation(
    model, start, optimizer: Optimizer, *, part="full", batch_size=None, penalty=None, then=None
) -> Adaptation:
    """The adaptation that trains a part of the client's model on its own examples.

    Every step uses the gradient of the mean loss of a mini-batch. The optimizer's state is kept from epoch to
    epoch.

    Args:
        model: the `SplitModel`.
        start: (message, client state, ClientData) -> the initial `Weights`.
        optimizer: the `Optimizer` of the steps.
        part: what is trained: 'full' (all weights), 'head' (on features that are computed once) or 'body' (the
            backbone).
        batch_size: examples per step; None for all, so that an epoch is one step.
        penalty: (Weights, message) -> float [], added to the loss; default: none.
        then: (Weights, message) -> Weights, applied after every step, such as an implicit step on a penalty; default:
            none.

    Raises:
        InvalidArgument: part is unknown, or batch_size is below 1.
    """
    check_choice(part=(part, PARTS))
    loop, objective = batch_loop(epochs=1, batch_size=batch_size), client_loss(model)

    def free(weights: Weights):
        return weights if part == "full" else weights.head if part == "head" else weights.theta

    def whole(values, weights: Weights) -> Weights:
        return values if part == "full" else weights._replace(**{"head" if part == "head" else "theta": values})

    def begin(message, state, data: ClientData) -> Fit:
        weights = start(message, state, data)
        phi = model.features_in_chunks(weights.theta, data.x) if part == "head" else ()
        return Fit(message, weights, optimizer.init(free(weights)), phi)

    def epoch(fit: Fit, data: ClientData, n) -> Fit:
        def value(values, x, y):
            weights = whole(values, fit.weights)
            loss = model.kind.loss(logits(weights.head, x), y) if part == "head" else objective(weights, x, y)
            return loss if penalty is None else loss + penalty(weights, fit.message)

        def step(carry, x, y):
            values, slots = carry
            slots, values = optimizer.step(slots, values, value_and_gradient(lambda v: value(v, x, y), values)[1])
            return (values if then is None else free(then(whole(values, fit.weights), fit.message))), slots

        examples = data._replace(x=fit.phi) if part == "head" else data
        values, slots = loop(step, (free(fit.weights), fit.slots), examples, first=n)
        return fit._replace(weights=whole(values, fit.weights), slots=slots)

    return Adaptation(begin, epoch, lambda fit: fit.weights)


def near(eta, coefficient, implicit_prox=False) -> dict:
    """Arguments of `adaptation` for the penalty (coefficient / 2) |w - message|^2; the message is a whole model.

    Args:
        eta: the learning rate of the steps.
        coefficient: the weight of the penalty, >= 0.
        implicit_prox: take an implicit step, w <- (w + eta coefficient message) / (1 + eta coefficient), instead of the
            gradient of the penalty.

    Returns:
        A dict with `penalty` or with `then`.
    """
    if not implicit_prox:
        return {"penalty": lambda weights, w: coefficient / 2 * squared_distance(weights, w)}
    pull = eta * coefficient
    return {"then": lambda weights, w: tree.scale(1 / (1 + pull), tree.add_scaled(weights, pull, w))}


def squared_distance(a, b):
    """The squared distance |a - b|^2 of two structures: float []."""
    away = tree.subtract(a, b)
    return tree.dot(away, away)
