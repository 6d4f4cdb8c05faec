"""What a client that never took part in training does by itself before it predicts: the usual `Adaptation`s."""

from typing import Any, NamedTuple

from tfpfl.algorithms.contract import Adaptation, ClientData
from tfpfl.algorithms.parts.local_training import PARTS, batch_loop, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_choice
from tfpfl.models import tree
from tfpfl.models.losses import client_loss, cross_entropy, logits
from tfpfl.models.weights import Weights

FEATURES_CHUNK = 512  # examples at a time where features need no gradient


class Fit(NamedTuple):
    """What an `adaptation` carries from epoch to epoch."""

    message: Any
    weights: Weights
    slots: Any  # the optimizer's, for the part that is fitted
    phi: Any  # [N_i, M] where only the head is fitted: the features do not change; () otherwise


def adaptation(
    model, start, optimizer: Optimizer, *, part="full", batch_size=None, penalty=None, then=None
) -> Adaptation:
    """A client fits a part of its model to its own examples, by an optimizer whose slots go on from epoch to epoch.

    Args:
        start: (message, client state, ClientData) -> the whole model at first.
        optimizer: of the part; its gradient is that of the mean cross-entropy of a mini-batch.
        part: 'full', 'head' (on features that are computed once) or 'body'.
        batch_size: examples a step; None for all, and an epoch is then a step.
        penalty: (the whole weights, message) -> float [], minimized as well.
        then: (the whole weights, message) -> weights, after every step: an implicit step on a penalty.
    """
    check_choice(part=(part, PARTS))
    loop, objective = batch_loop(epochs=1, batch_size=batch_size), client_loss(model)

    def free(weights: Weights):
        return weights if part == "full" else weights.head if part == "head" else weights.theta

    def whole(values, weights: Weights) -> Weights:
        return values if part == "full" else weights._replace(**{"head" if part == "head" else "theta": values})

    def begin(message, state, data: ClientData) -> Fit:
        weights = start(message, state, data)
        phi = model.features_in_chunks(weights.theta, data.x, FEATURES_CHUNK) if part == "head" else ()
        return Fit(message, weights, optimizer.init(free(weights)), phi)

    def epoch(fit: Fit, data: ClientData, n) -> Fit:
        def value(values, x, y):
            weights = whole(values, fit.weights)
            loss = cross_entropy(logits(weights.head, x), y) if part == "head" else objective(weights, x, y)
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
    """Holds an `adaptation` of all weights to the message, a whole model: (coefficient / 2) |w - message|^2.

    Explicitly, by the gradient, or implicitly: w <- (w + eta coefficient message) / (1 + eta coefficient).

    Returns:
        The arguments for `adaptation`.
    """
    if not implicit_prox:
        return {"penalty": lambda weights, w: coefficient / 2 * squared_distance(weights, w)}
    pull = eta * coefficient
    return {"then": lambda weights, w: tree.scale(1 / (1 + pull), tree.add_scaled(weights, pull, w))}


def squared_distance(a, b):
    """|a - b|^2 of two structures: float []."""
    away = tree.subtract(a, b)
    return tree.dot(away, away)
