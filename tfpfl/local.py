"""What a client does alone: losses, gradients, and SGD on its own examples."""

import tensorflow as tf

from tfpfl import tree
from tfpfl.algorithm import ClientData, Weights


def cross_entropy(logits, y):
    """Mean cross-entropy over examples: float []."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def client_loss(model):
    """l_i as a function of (weights, x, y): the mean cross-entropy of the split model (PFLEGO, eq. 2)."""

    def objective(weights: Weights, x, y):
        return cross_entropy(model.logits(weights, x), y)

    return objective


def value_and_gradient(function, weights):
    """(function(weights), its gradient), for a scalar function of a structure of tensors."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        value = function(weights)
    return value, tape.gradient(value, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def shuffled(num_examples, key, epoch):
    """The order of the examples in one epoch: a function of (seed, round, client, epoch) alone, int32 [N]."""
    seed = tf.random.experimental.stateless_fold_in(key, epoch)
    return tf.random.experimental.stateless_shuffle(tf.range(num_examples), seed, alg="philox")


def local_solver(*, eta, steps=None, epochs=None, batch_size=None, momentum=0.0):
    """Mini-batch SGD on a client's examples, with momentum slots that start at 0 (the specification's LocalSGD).

    Args:
        eta, momentum: v <- momentum v + g; w <- w - eta v.
        steps, epochs: exactly that many steps, or passes over the data; one of the two, 50 steps where neither is given
            (the PFLEGO study's tau).
        batch_size: at most this many examples a step; None for all of them. The last batch of an epoch may be smaller
            and is kept.

    Returns:
        solve(objective, weights, data) -> (weights, the objective before the last step), where `objective` maps
        (weights, x, y) to a mean over those examples and the shuffles follow `data.key`.

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    if steps is None and epochs is None:
        steps = 50
    if steps is not None and epochs is not None:
        raise ValueError(f"local work is given in steps or in epochs, not both; found steps={steps}, epochs={epochs}")
    for name, value in (("steps", steps), ("epochs", epochs), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")
    check_rates(eta=eta, momentum=momentum)

    def solve(objective, weights, data: ClientData):
        num_examples = tf.shape(data.x)[0]
        batch = num_examples if batch_size is None else tf.minimum(batch_size, num_examples)
        per_epoch = (num_examples + batch - 1) // batch
        total = steps if steps is not None else epochs * per_epoch

        def batch_of(step, order):
            if batch_size is None:
                return order, data.x, data.y
            epoch, position = step // per_epoch, step % per_epoch
            order = tf.cond(position == 0, lambda: shuffled(num_examples, data.key, epoch), lambda: order)
            rows = order[position * batch : (position + 1) * batch]
            return order, tf.gather(data.x, rows), tf.gather(data.y, rows)

        def body(step, weights, velocity, order, _):
            order, x, y = batch_of(step, order)
            value, gradient = value_and_gradient(lambda w: objective(w, x, y), weights)
            if momentum:
                gradient = velocity = tree.add_scaled(gradient, momentum, velocity)
            return step + 1, tree.add_scaled(weights, -eta, gradient), velocity, order, value

        order = tf.range(num_examples) if batch_size is not None else tf.zeros([0], tf.int32)
        velocity = tree.zeros_like(weights) if momentum else ()
        start = (0, weights, velocity, order, tf.zeros([], tf.nest.flatten(weights)[0].dtype))
        _, weights, _, _, value = tf.while_loop(lambda step, *_: step < total, body, start, parallel_iterations=1)
        return weights, value

    return solve


def check_rates(**rates) -> None:
    """Learning rates must be finite and not negative.

    Raises:
        ValueError: names the rate.
    """
    for name, value in rates.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a finite number >= 0, found {value}")
