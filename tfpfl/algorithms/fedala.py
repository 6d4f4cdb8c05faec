"""FedALA: a client starts from a mixture of its own and the global model, which it learns (Zhang et al., AAAI 2023).

Objective: client i looks for its own minimum of l_i. It starts there from w^_i: below its top p layers this is w; in
them every single weight is mixed, by a number in [0, 1] that the client has learned on a part of its examples.

Messages: 4d bytes down, 4d up. On the device: the top p layers of the client's last model w_i, and the A_i. A client
predicts with w^_i, made of the newest w with the A_i of its last visit. A new client predicts with w, since A_i is 1 at
first, and adapts it (with p = 1 only the head, since the backbone is the same for all). The local model is w_i.

A layer is a kernel and the vectors after it, such as its bias; the head is the topmost. So an LSTM is two layers, a GRU
three, because its bias has two rows, and a low-rank adapter two. The code counts arrays, so that its layer_idx = 2 is p
= 1. Before its first visit a client has the layers of w^0, as in paper and code: a client that comes first in a later
round mixes them in. Where all its layers equal those of w, as in round 1, it learns nothing. The paper says "until
convergence" in the start phase. We do as the code: until the losses of the last 10 epochs have a standard deviation
below the threshold; but at most `max_epochs`, where the code goes on without an end. The code takes a window of the
examples, in their order; here they are drawn at random. In the code, all clients learn A_i before every evaluation,
also those that are not in the cohort. Here, as in algorithm 1 of the paper, only a visit changes A_i.

In PFLlib (commit d832e76, system/), that all learn is in flcore/servers/serverala.py line 73, the window in
utils/ALA.py lines 71 to 74, the start phase without an end in its lines 119 to 153, and the test for equal layers, of
the first array's sum alone, in its line 82. All else computes the same where mini-batches divide N_i; PFLlib leaves out
the last examples, which fill none (tests/algorithms/test_pfllib.py).

Without learning (eta_w = 0) every w^_i is w, and FedALA is FedAvg.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import (
    batch_loop,
    example_weight,
    local_solver,
    shuffled,
    value_and_gradient,
)
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.schedules import rate
from tfpfl.checks import InvalidArgument, check_fractions, check_rates, check_whole_number
from tfpfl.data.randomness import Fold
from tfpfl.models import tree
from tfpfl.models.losses import client_loss, logits
from tfpfl.models.weights import Weights

LAST = 10  # the losses of so many epochs must be alike before the start phase ends


class Aggregation(NamedTuple):
    """What a client keeps: its own top layers, and how it mixes the global ones into them."""

    top: Weights  # its own top p layers after its last visit; `theta` has the arrays of the backbone among them
    a: Weights  # A_i, in [0, 1], of the same shapes: how much of the global layers is taken
    started: Any  # bool []: the start phase is over


def first_of_the_top(theta, p):
    """The place in theta of the first array that belongs to the top p layers of the model; len(theta) for p = 1.

    Raises:
        InvalidArgument: the model has fewer layers, or p is below 1.
    """
    begins = [k for k, w in enumerate(theta) if k == 0 or len(w.shape) >= 2]
    if p is None:
        return 0
    if not 1 <= p <= len(begins) + 1:
        raise InvalidArgument(
            f"p must be a number of layers, 1 to {len(begins) + 1} for this model with its head; found {p}"
        )
    return [*begins, len(theta)][-p]


def mixed(own, w, a):
    """own + (w - own) * a, for every single weight."""
    return tf.nest.map_structure(lambda v, u, a: v + (u - v) * a, own, w, a)


def same(a, b):
    """Whether two structures are equal in every number: bool []."""
    equal = tf.nest.map_structure(lambda u, v: tf.reduce_all(tf.equal(u, v)), a, b)
    return tf.reduce_all(tf.stack(tf.nest.flatten(equal)))


def fedala(
    model,
    population,
    *,
    p: int | None = 1,
    s: float = 0.8,
    eta_w: float = 1.0,
    threshold: float = 0.1,
    max_epochs: int = 200,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
) -> Algorithm:
    """FedALA: every client learns which of its own weights and which of the global ones it starts from.

    Update rule:

        client(w):  if top(w) differs from top_i:                                  adaptive local aggregation
                        draw max(1, floor(s N_i)) examples;  v = w^(A_i);  for every mini-batch D of them:
                            g = grad of l(v; D) for the top layers
                            A_i <- clip(A_i - eta_w g * (top(w) - top_i), 0, 1);   v = w^(A_i)
                        one such epoch; in the first visit in which they differ, epochs until the losses of the last 10
                        have a standard deviation < threshold, at least 11 and at most max_epochs
                    w_i <- w^(A_i);  for every mini-batch D:  w_i <- w_i - eta grad l(w_i; D)
                    keep top_i <- top(w_i) and A_i, send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j

    w^(A) has the arrays of w below the top p layers, and top_i + (top(w) - top_i) * A in them, with a product for each
    weight. At first A_i = 1 and top_i = top(w^0). The loss of an epoch is that of its last mini-batch, before the step.
    w is a whole model, l(w; D) the mean cross-entropy on a mini-batch D, N_i the number of client i's training
    examples. S is the cohort.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        p: the number of layers, from the top, that are mixed; the head is one layer. None for all.
        s: the share of a client's examples on which it learns A_i, in (0, 1].
        eta_w: the learning rate of A_i, >= 0; the paper's eta.
        threshold: how small the standard deviation of the losses is where the start phase ends, >= 0.
        max_epochs: the most epochs of the start phase, >= 1.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`. A_i is learned in mini-batches
            of the same size.

    Returns:
        The `Algorithm`. A client keeps top_i and A_i, and predicts with w^(A_i) of the newest w.

    Raises:
        InvalidArgument: p is no number of layers of the model; s is outside (0, 1]; eta_w, threshold, eta or momentum
            is negative or not finite; max_epochs, steps, epochs or batch_size is below 1, or steps and epochs are both
            given; weighting is neither 'examples' nor 'uniform'; clients have different numbers of classes (this method
            shares one head) and the population has no `num_labels`.

    Source:
        Zhang, Hua, Wang, Song, Xue, Ma, Guan, AAAI 2023, arXiv 2212.01197, algorithm 1.
    """
    check_fractions(s=s)
    check_rates(eta_w=eta_w, threshold=threshold)
    check_whole_number(1, max_epochs=max_epochs, **({} if p is None else {"p": p}))
    if s == 0:
        raise InvalidArgument("s must be above 0, found 0: A_i would be learned on no examples")
    rates: dict[str, Any] = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    work: dict[str, Any] = {"steps": steps, "epochs": epochs, "batch_size": batch_size}
    base = fedavg(model, population, weighting=weighting, **rates, **work)
    solve, one_epoch = local_solver(**rates, **work), batch_loop(epochs=1, batch_size=batch_size)
    weight, objective = example_weight(model, weighting), client_loss(model)
    first = first_of_the_top(model.initial_theta, p)
    only_head = first == len(model.initial_theta)

    def top(w):
        return Weights(w.theta[first:], w.head)

    def whole(w, layers):
        return Weights((*w.theta[:first], *layers.theta), layers.head)

    def init_client(info):
        layers = top(base.init_server())
        return Aggregation(layers, tf.nest.map_structure(tf.ones_like, layers), tf.constant(False))

    def sample(w, data):
        """The share s of the examples; their features, if only the head is mixed, because these do not change."""
        if s < 1:
            count = tf.cast(tf.floor(s * tf.cast(tree.num_rows(data.x), tf.float64)), tf.int32)
            rows = shuffled(tree.num_rows(data.x), data.key, Fold.SPLIT)[: tf.maximum(count, 1)]
            data = data._replace(x=tree.gather_rows(data.x, rows), y=tf.gather(data.y, rows))
        return data._replace(x=model.features_in_chunks(w.theta, data.x)) if only_head else data

    def learned(w, state, data):
        """A_i after the adaptive local aggregation, and whether the start phase is over."""
        examples, own, global_top, equal = sample(w, data), state.top, top(w), same(state.top, top(w))

        def loss(layers, x, y):
            return model.kind.loss(logits(layers.head, x), y) if only_head else objective(whole(w, layers), x, y)

        def step(carry, x, y):
            a, _ = carry
            value, g = value_and_gradient(lambda layers: loss(layers, x, y), mixed(own, global_top, a))
            speed = tree.as_dtype(rate("eta_w", eta_w), model.dtype)
            moved = tf.nest.map_structure(
                lambda a, g, u, v: tf.clip_by_value(a - speed * (g * (u - v)), 0, 1), a, g, global_top, own
            )
            return moved, value

        def epoch(n, a, losses):
            a, value = one_epoch(step, (a, tf.zeros([], model.dtype)), examples, first=n)
            return n + 1, a, tf.concat([losses[1:], value[None]], 0)

        most = tf.where(equal, 0, tf.where(state.started, 1, max_epochs))

        def goes_on(n, a, losses):
            settled = tf.logical_and(n > LAST, tf.math.reduce_std(losses) < threshold)
            return tf.logical_and(n < most, tf.logical_not(settled))

        start = (tf.constant(0), state.a, tf.zeros([LAST], model.dtype))
        _, a, _ = tf.while_loop(goes_on, epoch, start, parallel_iterations=1)
        return a, tf.logical_or(state.started, tf.logical_not(equal))

    def personal(w, state):
        return whole(w, mixed(state.top, top(w), state.a))

    def client_update(w, state, data):
        a, started = learned(w, state, data)
        w_i, loss = solve(objective, personal(w, state._replace(a=a)), data)
        return ClientOutput(tree.subtract(w_i, w), weight(data), Aggregation(top(w_i), a, started), {"loss": loss})

    return base._replace(
        init_client=init_client,
        client_update=client_update,
        personal_model=lambda w, state, data: personal(w, state),
        global_model=lambda w: w,
        local_model=lambda w, output: tree.add(w, output.update),
        adapt=adaptation(
            model,
            lambda w, state, data: personal(w, state),
            as_optimizer(client_opt, eta, momentum=momentum),
            part="head" if only_head else "full",
            batch_size=batch_size,
        ),
        shares="backbone" if only_head else None,
    )


FEDALA = Method(
    name="fedala",
    title="FedALA",
    builder=fedala,
    head="shared",
    message="broadcast",
    state="top layers, twice",
    down="d",
    up="d",
    reference="Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated "
    "Learning, AAAI 2023",
    no_batch_norm=SEVERAL_MODELS,
)
