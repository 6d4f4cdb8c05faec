"""What a client does alone: losses, gradients, and SGD on its own examples."""

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import ClientData, ClientOutput, OnePass
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.checks import InvalidArgument, check_choice, check_fractions, check_rates
from tfpfl.data.population import Population
from tfpfl.data.randomness import Fold
from tfpfl.models import tree
from tfpfl.models.losses import client_loss, cross_entropy, logits
from tfpfl.models.weights import Head, Weights

PARTS = ("full", "head", "body")  # of a model that is fitted: all weights, the head, the backbone


def arrival_of(population: Population, dtype):
    """(ClientInfo) -> the probability that a sampled client's work reaches the server: float []."""
    if population.arrival is None:
        return lambda info: tf.ones([], dtype)
    table = np.ones(int(population.client_ids[-1]) + 1)
    table[population.client_ids] = population.arrival
    return lambda info: tf.gather(tf.constant(table, dtype), info.client_id)


def value_and_gradient(function, weights, times=None):
    """(function(weights), its gradient), for a scalar function of a structure of tensors.

    Args:
        times: gives this multiple of the gradient, without a pass over the weights to scale it.
    """
    with tf.GradientTape() as tape:
        tape.watch(weights)
        value = function(weights)
    seed = None if times is None else tree.as_dtype(times, value.dtype)
    zero = tf.UnconnectedGradients.ZERO
    return value, tape.gradient(value, weights, output_gradients=seed, unconnected_gradients=zero)


def whole_gradient(objective, weights, data: ClientData, chunk=512):
    """(the objective on all of a client's examples, its gradient), in memory for `chunk` examples."""
    num_examples = tf.shape(data.x)[0]

    def one_chunk(start, value, gradient):
        x, y = data.x[start : start + chunk], data.y[start : start + chunk]
        part = tf.cast(tf.shape(y)[0], value.dtype) / tf.cast(num_examples, value.dtype)
        its_value, its_gradient = value_and_gradient(lambda w: objective(w, x, y), weights)
        return start + chunk, value + part * its_value, tree.add_scaled(gradient, part, its_gradient)

    start = (0, tf.zeros([], tf.nest.flatten(weights)[0].dtype), tree.zeros_like(weights))
    return tf.while_loop(lambda start, *_: start < num_examples, one_chunk, start, parallel_iterations=1)[1:]


def one_pass_update(model, one_pass: OnePass, **passes):
    """The `client_update` of an algorithm that is a `OnePass`.

    Args:
        passes: `recompute` and `chunk`, see `SplitModel.record`.
    """

    def client_update(message, state, data: ClientData) -> ClientOutput:
        phi, pull_back = model.record(one_pass.theta(message), data.x, **passes)
        output, dphi = one_pass.on_features(message, state, phi, data._replace(x=()))
        return output._replace(update=one_pass.join(pull_back(dphi), output.update))

    return client_update


def shuffled(num_examples, key, epoch):
    """The order of the examples in one epoch: a function of (seed, round, client, epoch) alone, int32 [N]."""
    seed = tf.random.experimental.stateless_fold_in(key, epoch)
    return tf.random.experimental.stateless_shuffle(tf.range(num_examples), seed, alg="philox")


def straggles(key, probability):
    """Whether this client is late in this round, a function of (seed, round, client) alone: bool []."""
    return _uniform(key)[0] < probability


def partial_work(key, probability, work):
    """What a client gets done of `work` epochs or steps: all of it, or for a straggler U{1..work}; int32 []."""
    done = tf.cast(tf.floor(_uniform(key)[1] * tf.cast(work, tf.float64)), tf.int32) + 1
    return tf.where(straggles(key, probability), tf.minimum(done, work), work)


def _uniform(key):
    seed = tf.random.experimental.stateless_fold_in(key, Fold.STRAGGLER)
    return tf.random.stateless_uniform([2], seed, dtype=tf.float64, alg="philox")


def support_and_query(data: ClientData, query_fraction):
    """The client's examples in two parts, drawn anew in every round: (support, query).

    Both have at least one example; a client with one example has it in both.
    """
    num_examples = tf.shape(data.x)[0]
    wanted = tf.cast(tf.round(query_fraction * tf.cast(num_examples, tf.float64)), tf.int32)
    query = tf.clip_by_value(wanted, 1, tf.maximum(num_examples - 1, 1))
    order = shuffled(num_examples, data.key, Fold.SPLIT)
    parts = order[tf.where(num_examples > 1, query, 0) :], order[:query]
    return tuple(data._replace(x=tf.gather(data.x, rows), y=tf.gather(data.y, rows)) for rows in parts)


def batch_loop(*, steps=None, epochs=None, batch_size=None, straggler=0.0, at_least=1, suffix=""):
    """A client's work: its mini-batches one after the other, in an order that follows `data.key`.

    Args:
        steps, epochs: exactly that many batches, or passes over the data; one of the two, 50 steps where neither is
            given (the PFLEGO study's tau).
        batch_size: at most this many examples a batch; None for all of them. The last batch of an epoch may be smaller
            and is kept.
        straggler: the probability of `partial_work`.
        at_least: the smallest number of steps or epochs; 0 where no work at all makes sense.
        suffix: of the names steps and epochs in an algorithm that has several loops, for refusals.

    Returns:
        loop(body, carry, data, first=0) -> carry, with `body(carry, x, y)` -> carry for every batch; a carry is a
        tuple. The orders are those of the epochs from `first` on.

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    if steps is None and epochs is None:
        steps = 50
    if steps is not None and epochs is not None:
        found = f"steps{suffix}={steps}, epochs{suffix}={epochs}"
        raise InvalidArgument(f"local work is given in steps or in epochs, not both; found {found}")
    work = {f"steps{suffix}": (steps, at_least), f"epochs{suffix}": (epochs, at_least), "batch_size": (batch_size, 1)}
    for name, (value, low) in work.items():
        if value is not None and value < low:
            raise InvalidArgument(f"{name} must be at least {low}, found {value}")
    check_fractions(straggler=straggler)

    def loop(body, carry, data: ClientData, first=0):
        num_examples = tf.shape(data.x)[0]
        batch = num_examples if batch_size is None else tf.minimum(batch_size, num_examples)
        per_epoch = (num_examples + batch - 1) // batch
        work = steps if steps is not None else epochs
        if straggler:
            work = partial_work(data.key, straggler, work)
        total = work if steps is not None else work * per_epoch

        def batch_of(step, order):
            if batch_size is None:
                return order, data.x, data.y
            epoch, position = first + step // per_epoch, step % per_epoch
            begins = tf.equal(position, 0)  # in TFF's graphs, == between tensors asks whether they are the same object
            new = tf.cond(begins, lambda: shuffled(num_examples, data.key, epoch), lambda: order)
            order = tf.ensure_shape(new, order.shape)  # where N is known to the graph, the loop must not forget it
            rows = order[position * batch : (position + 1) * batch]
            return order, tf.gather(data.x, rows), tf.gather(data.y, rows)

        def one_batch(step, order, carry):
            order, x, y = batch_of(step, order)
            return step + 1, order, body(carry, x, y)

        order = tf.range(num_examples) if batch_size is not None else tf.zeros([0], tf.int32)
        return tf.while_loop(lambda step, *_: step < total, one_batch, (0, order, carry), parallel_iterations=1)[2]

    return loop


def local_solver(
    *,
    eta,
    steps=None,
    epochs=None,
    batch_size=None,
    momentum=0.0,
    prox=0.0,
    implicit_prox=False,
    straggler=0.0,
    at_least=1,
    suffix="",
):
    """Mini-batch SGD on a client's examples, with momentum slots that start at 0 (the specification's LocalSGD).

    Args:
        eta, momentum: v <- momentum v + g; w <- w - eta v.
        steps, epochs, batch_size, straggler, at_least: of the `batch_loop`.
        prox, implicit_prox: adds (prox / 2) |w - anchor|^2 to the objective, by its gradient in g; or, implicitly, by
            w <- (w - eta v + eta prox anchor) / (1 + eta prox), which is stable for any prox.
        suffix: of the names eta, steps and epochs in an algorithm that has several solvers, for refusals.

    Returns:
        solve(objective, weights, data, anchor=None, penalty=None) -> (weights, the objective before the last step),
        where `objective` maps (weights, x, y) to a mean over those examples and the shuffles follow `data.key`.
        `anchor` is that of `prox`; `penalty`, a function of the weights, is minimized as well but not reported.

    Raises:
        ValueError: names the argument, and says what it may be.
    """
    work = {"steps": steps, "epochs": epochs, "batch_size": batch_size, "straggler": straggler}
    loop = batch_loop(**work, at_least=at_least, suffix=suffix)
    check_rates(**{f"eta{suffix}": eta, "momentum": momentum})

    def solve(objective, weights, data: ClientData, anchor=None, penalty=None):
        def step(carry, x, y):
            weights, velocity, _ = carry
            value, move = value_and_gradient(lambda w: objective(w, x, y), weights, -eta)  # -eta g; velocity: -eta v
            if penalty is not None:
                move = tree.add(move, value_and_gradient(penalty, weights, -eta)[1])
            if prox and not implicit_prox:
                move = tree.add_scaled(move, -eta * prox, tree.subtract(weights, anchor))
            if momentum:
                move = velocity = tree.add_scaled(move, momentum, velocity)
            weights = tree.add(weights, move)
            if prox and implicit_prox:
                weights = tree.scale(1 / (1 + eta * prox), tree.add_scaled(weights, eta * prox, anchor))
            return weights, velocity, value

        velocity = tree.zeros_like(weights) if momentum else ()
        no_value = tf.zeros([], tf.nest.flatten(weights)[0].dtype)
        weights, _, value = loop(step, (weights, velocity, no_value), data)
        return weights, value

    return solve


def head_solver(model, *, eta, steps=None, epochs=None, batch_size=None, momentum=0.0, **checks):
    """`local_solver` for the head alone: with theta fixed, one forward pass gives the features of all steps.

    Args:
        checks: `at_least` and `suffix` of `local_solver`, and so are the others.

    Returns:
        fit(theta, head, data) -> (head, the loss at that head). Full-batch steps take the gradient in closed form.
    """
    solve = local_solver(eta=eta, steps=steps, epochs=epochs, batch_size=batch_size, momentum=momentum, **checks)
    work = 50 if steps is None and epochs is None else epochs if steps is None else steps

    def fit(theta, head: Head, data: ClientData):
        phi = model.features(theta, data.x)
        targets = tf.one_hot(data.y, tf.shape(head.bias)[0], dtype=phi.dtype)
        if batch_size is None:
            head = heads.fit(head, phi, targets, work, sgd(eta, momentum))
        else:
            head, _ = solve(lambda w, phi, y: cross_entropy(logits(w, phi), y), head, data._replace(x=phi))
        return head, heads.loss(head, phi, targets)

    return fit


def body_solver(model, **work):
    """`local_solver` for theta alone, with the head fixed: solve(theta, head, data) -> (theta, the last loss).

    Args:
        work: the arguments of `local_solver`.
    """
    solve, objective = local_solver(**work), client_loss(model)

    def solve_body(theta, head: Head, data: ClientData):
        return solve(lambda theta, x, y: objective(Weights(theta, head), x, y), theta, data)

    return solve_body


def example_weight(model, weighting):
    """A client's weight in the mean as a function of its data: N_i ('examples', so q_i) or 1 ('uniform', so 1 / r).

    Raises:
        ValueError: another `weighting`.
    """
    check_choice(weighting=(weighting, ("examples", "uniform")))
    if weighting == "uniform":
        return lambda data: tf.ones([], model.dtype)
    return lambda data: tf.cast(data.info.num_examples, model.dtype)
