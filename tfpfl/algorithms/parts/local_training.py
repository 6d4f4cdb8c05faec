"""Local training: gradients, and SGD or another optimizer on a client's own examples."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import ClientData, ClientOutput, OnePass
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.optimizers import OptimizerChoice
from tfpfl.algorithms.parts.schedules import factor, paced, rate
from tfpfl.checks import InvalidArgument, check_choice, check_fractions, check_rates, check_whole_number
from tfpfl.data.population import Population
from tfpfl.data.randomness import Fold
from tfpfl.models import passes, tree
from tfpfl.models.loops import training_loop
from tfpfl.models.losses import MeanLoss, client_loss, logits
from tfpfl.models.weights import Head, Weights

PARTS = ("full", "head", "body")  # what is trained: all weights, the head, the backbone


def arrival_of(population: Population, dtype):
    """A function (ClientInfo) -> probability that a sampled client's work reaches the server, `population.arrival`."""
    if population.arrival is None:
        return lambda info: tf.ones([], dtype)
    table = np.ones(int(population.client_ids[-1]) + 1)
    table[population.client_ids] = population.arrival
    return lambda info: tf.gather(tf.constant(table, dtype), info.client_id)


def value_and_gradient(function, weights, times=None):
    """The value and the gradient of a scalar function of a structure of tensors.

    Args:
        function: (weights) -> float [].
        weights: the structure.
        times: multiply the gradient by this number; cheaper than scaling the gradient. None for 1.

    Returns:
        (value, gradient); the gradient is 0 for weights that do not enter the function.
    """
    with tf.GradientTape() as tape:
        tape.watch(weights)
        value = function(weights)
    seed = None if times is None else tree.as_dtype(times, value.dtype)
    zero = tf.UnconnectedGradients.ZERO
    gradient = tape.gradient(value, weights, output_gradients=seed, unconnected_gradients=zero)
    return value, tree.shaped(tree.dense(gradient), weights)


def whole_gradient(objective, weights, data: ClientData, chunk=None, times=None):
    """The value and the gradient of an objective on all examples of a client, in memory for two chunks of them.

    Args:
        objective: (weights, x, y) -> mean over these examples, float [].
        chunk: examples at a time; None: the objective's `block`, or 512 if it has none.
        times: as in `value_and_gradient`.
    """
    num_examples, chunk, now = tree.num_rows(data.x), chunk or block_of(objective) or 512, passes.current()

    def one_chunk(start, value, gradient):
        x, y = tree.rows(data.x, start, start + chunk), data.y[start : start + chunk]
        part = tf.cast(tf.shape(y)[0], value.dtype) / tf.cast(num_examples, value.dtype)
        of_all = part if times is None else part * tree.as_dtype(times, part.dtype)
        with passes.part(now, start):  # else examples at the same place of two chunks would have the same masks
            its_value, its_gradient = value_and_gradient(lambda w: objective(w, x, y), weights, of_all)
        return start + chunk, value + part * its_value, tree.add(gradient, its_gradient)

    start = (0, _no_value(weights, data), tree.zeros_like(weights))
    # Two chunks may overlap: the operations of one are too small for two cores. They are added in their order.
    return training_loop(lambda start, *_: start < num_examples, one_chunk, start, at_a_time=2)[1:]


def block_of(objective) -> int | None:
    """The `block` of an objective; None: its gradient is computed for all examples of a step at once."""
    return getattr(objective, "block", None)


def step_gradient(objective, weights, data: ClientData, batch_size: int | None, times=None):
    """The value and the gradient of an objective on the examples of one step.

    Args:
        objective: (weights, x, y) -> mean over these examples, float [].
        data: the examples of the step.
        batch_size: how many there are; None: all of the client's, so many that its `block` is worth it.
        times: as in `value_and_gradient`.
    """
    if batch_size is None and block_of(objective) is not None:
        return whole_gradient(objective, weights, data, times=times)
    return value_and_gradient(lambda w: objective(w, data.x, data.y), weights, times)


def _no_value(weights, data: ClientData):
    """A value of 0 in the dtype of the weights, or without weights (all are frozen) in that of alpha."""
    return tf.zeros([], tf.convert_to_tensor((*tf.nest.flatten(weights), data.info.alpha)[0]).dtype)


def one_pass_update(model, one_pass: OnePass, **how):
    """Makes the `client_update` of an algorithm from its `OnePass`.

    Args:
        model: the `SplitModel`.
        one_pass: the client's work between the forward and the backward pass.
        how: `recompute` and `chunk` of `SplitModel.record`.
    """

    def client_update(message, state, data: ClientData) -> ClientOutput:
        with passes.drawing(data.key):
            phi, pull_back = model.record(one_pass.theta(message), data.x, **how)
        output, dphi = one_pass.on_features(message, state, phi, data._replace(x=()))
        return output._replace(update=one_pass.join(pull_back(dphi), output.update))

    return client_update


def shuffled(num_examples, key, epoch):
    """The order of the examples in one epoch, a function of (seed, round, client, epoch) only: int32 [N]."""
    seed = tf.random.experimental.stateless_fold_in(key, epoch)
    return tf.random.experimental.stateless_shuffle(tf.range(num_examples), seed, alg="philox")


def straggles(key: Any, probability: float) -> Any:
    """Whether this client is a straggler in this round, a function of (seed, round, client) only: bool []."""
    return _uniform(key)[0] < probability


@tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int32), tf.TensorSpec([], tf.float64)], autograph=False)
def which_straggle(keys: Any, probability: float) -> Any:
    """`straggles` of several clients: bool [n]."""
    return tf.map_fn(lambda key: straggles(key, probability), keys, fn_output_signature=tf.bool)


def partial_work(key, probability, work):
    """How many of `work` epochs or steps a client does: all, or U{1..work} if it is a straggler; int32 []."""
    done = tf.cast(tf.floor(_uniform(key)[1] * tf.cast(work, tf.float64)), tf.int32) + 1
    return tf.where(straggles(key, probability), tf.minimum(done, work), work)


def _uniform(key):
    seed = tf.random.experimental.stateless_fold_in(key, Fold.STRAGGLER)
    return tf.random.stateless_uniform([2], seed, dtype=tf.float64, alg="philox")


def support_and_query(data: ClientData, query_fraction):
    """Splits the client's examples at random into (support, query), in a new way for every `data.key`.

    Both parts have at least one example; if the client has only one, it is in both.

    Args:
        data: the client's `ClientData`.
        query_fraction: the fraction of examples in the query part, in [0, 1].
    """
    num_examples = tree.num_rows(data.x)
    wanted = tf.cast(tf.round(query_fraction * tf.cast(num_examples, tf.float64)), tf.int32)
    query = tf.clip_by_value(wanted, 1, tf.maximum(num_examples - 1, 1))
    order = shuffled(num_examples, data.key, Fold.SPLIT)
    parts = order[tf.where(num_examples > 1, query, 0) :], order[:query]
    return tuple(data._replace(x=tree.gather_rows(data.x, rows), y=tf.gather(data.y, rows)) for rows in parts)


def batch_loop(*, steps=None, epochs=None, batch_size=None, straggler=0.0, at_least=1, suffix=""):
    """Makes a loop over a client's mini-batches; `data.key` determines their order.

    Args:
        steps, epochs: the number of mini-batches, or of passes over the data. Give at most one of the two; default: 50
            steps (tau in the PFLEGO study).
        batch_size: examples per mini-batch, >= 1; None for all. The last batch of an epoch may be smaller.
        straggler: the probability in [0, 1] that the client does only a part of its work, see `partial_work`.
        at_least: the smallest number of steps or epochs that is allowed, 0 or 1.
        suffix: added to the names steps and epochs in errors, for algorithms with several loops.

    Returns:
        loop(body, carry, data, first=0) -> carry, which calls `body(carry, x, y)` -> carry for every batch. A carry is
        a tuple. `first` is the number of the first epoch; the shuffles depend on it.

    Raises:
        InvalidArgument: steps and epochs are both given; one of them is below `at_least`; batch_size is below 1; one of
            these is no whole number; or straggler is outside [0, 1].
    """
    if steps is None and epochs is None:
        steps = 50
    if steps is not None and epochs is not None:
        found = f"steps{suffix}={steps}, epochs{suffix}={epochs}"
        raise InvalidArgument(f"give the local work in steps or in epochs, not both; found {found}")
    work = {f"steps{suffix}": (steps, at_least), f"epochs{suffix}": (epochs, at_least), "batch_size": (batch_size, 1)}
    for name, (value, low) in work.items():
        if value is not None:
            check_whole_number(low, **{name: value})
    check_fractions(straggler=straggler)
    # TensorFlow computes in int32, which NumPy's int64 does not become by itself.
    steps, epochs, batch_size = (None if number is None else int(number) for number in (steps, epochs, batch_size))

    def loop(body, carry, data: ClientData, first=0):
        num_examples = tree.num_rows(data.x)
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
            begins = tf.equal(position, 0)  # in TFF's graphs, == compares objects, not values
            new = tf.cond(begins, lambda: shuffled(num_examples, data.key, epoch), lambda: order)
            order = tf.ensure_shape(new, order.shape)  # if the graph knows N, the loop must keep it
            rows = order[position * batch : (position + 1) * batch]
            return order, tree.gather_rows(data.x, rows), tf.gather(data.y, rows)

        its_passes = passes.Loop(data.key)

        def one_batch(step, order, carry, statistics):
            order, x, y = batch_of(step, order)
            with its_passes.step(lambda: first * per_epoch + step, statistics) as now:
                carry = body(carry, x, y)
            return step + 1, order, carry, now.moved if statistics else ()

        order = tf.range(num_examples) if batch_size is not None else tf.zeros([0], tf.int32)
        start = (0, order, carry, its_passes.statistics)
        *_, carry, statistics = training_loop(lambda step, *_: step < total, one_batch, start)
        its_passes.end(statistics)
        return carry

    return loop


class LocalStep(NamedTuple):
    """How a client takes one local step with a gradient."""

    times: float  # what the gradient is multiplied by, on its way back: cheaper than scaling it afterwards
    init: Callable  # (weights) -> the slots before the first step
    step: Callable  # (slots, weights, gradient times `times`) -> (slots, weights)


def local_step(
    eta: float, momentum: float = 0.0, client_opt: Any = "sgd", name: str = "eta", **pace: bool
) -> LocalStep:
    """Makes the `LocalStep` of a local rate, momentum and optimizer.

    Args:
        eta: the learning rate; an optimizer object has its own, see `as_optimizer`.
        momentum: of SGD.
        client_opt: 'sgd', or another optimizer that `as_optimizer` accepts.
        name, pace: the rate's name and `by_default`, as in `schedules.factor`.

    Raises:
        InvalidArgument: see `as_optimizer`.
    """
    optimizer = paced(as_optimizer(client_opt, eta, momentum=momentum), name, **pace)
    if not is_sgd(client_opt):
        return LocalStep(1.0, optimizer.init, optimizer.step)
    opt = client_opt if isinstance(client_opt, str) else client_opt.name
    momentum = 0.9 if opt == "momentum" else momentum

    def step(velocity, weights, move):  # the move is -eta g; the velocity is -eta times the momentum buffer
        if momentum:
            move = velocity = tree.add_scaled(move, momentum, velocity)
        times = factor(name, **pace)
        return velocity, tree.add(weights, move) if times is None else tree.add_scaled(weights, times, move)

    return LocalStep(-eta, tree.zeros_like if momentum else lambda weights: (), step)


def is_sgd(client_opt: Any) -> bool:
    """Whether a `client_opt` is SGD with or without momentum, whose steps the code takes in place."""
    choice = OptimizerChoice(client_opt) if isinstance(client_opt, str) else client_opt
    return isinstance(choice, OptimizerChoice) and choice.is_sgd


def local_solver(
    *,
    eta,
    steps=None,
    epochs=None,
    batch_size=None,
    momentum=0.0,
    client_opt="sgd",
    prox=0.0,
    implicit_prox=False,
    straggler=0.0,
    at_least=1,
    suffix="",
    **pace,
):
    """Mini-batch SGD on a client's examples; the momentum starts at 0 in every call (the specification's LocalSGD).

    Args:
        eta, momentum: the rates of the step v <- momentum v + g; w <- w - eta v, >= 0. g is the gradient.
        client_opt: the optimizer that takes the steps; default 'sgd', the step above. See `as_optimizer`. Its state
            starts anew in every call.
        steps, epochs, batch_size, straggler, at_least: as in `batch_loop`.
        prox: the coefficient of a penalty (prox / 2) |w - anchor|^2, whose gradient is added to g.
        implicit_prox: take an implicit step on the penalty, w <- (w - eta v + eta prox anchor) / (1 + eta prox), which
            is stable for every prox.
        suffix: added to the names eta, steps and epochs in errors, for algorithms with several solvers.
        pace: `name` of the rate, default eta with the suffix, and `by_default`, as in `schedules.factor`.

    Returns:
        solve(objective, weights, data, anchor=None, penalty=None) -> (weights, the objective before the last step).
        `objective` maps (weights, x, y) to a mean over these examples. `anchor` is the anchor of `prox`. `penalty` is
        a function (weights) -> float [] that is minimized too, but is not part of the returned objective.

    Raises:
        InvalidArgument: eta or momentum is negative or not finite; implicit_prox with another optimizer than SGD; and
            the errors of `batch_loop` and `as_optimizer`.
    """
    work = {"steps": steps, "epochs": epochs, "batch_size": batch_size, "straggler": straggler, "at_least": at_least}
    held = {"prox": prox, "implicit_prox": implicit_prox}
    resumed = resumed_solver(eta=eta, momentum=momentum, client_opt=client_opt, **held, **work, suffix=suffix, **pace)
    start = local_step(eta, momentum, client_opt).init

    def solve(objective, weights, data: ClientData, anchor=None, penalty=None):
        weights, _, value = resumed(objective, weights, start(weights), data, anchor, penalty)
        return weights, value

    return solve


def resumed_solver(
    *,
    eta,
    momentum=0.0,
    client_opt="sgd",
    prox=0.0,
    implicit_prox=False,
    suffix="",
    name=None,
    by_default=True,
    **work,
):
    """`local_solver` whose momentum goes on where an earlier call ended, as in an optimizer that a client keeps.

    Args:
        eta, momentum, client_opt, prox, implicit_prox, suffix, name, by_default: as in `local_solver`. `prox` may be a
            function () -> coefficient, for one that changes from round to round.
        work: steps, epochs, batch_size, straggler, at_least, as in `batch_loop`.

    Returns:
        solve(objective, weights, velocity, data, anchor=None, penalty=None) -> (weights, velocity, the objective before
        the last step). The velocity is minus eta times the momentum buffer, in the structure of the weights; zeros at
        first, and () without momentum. With another `client_opt` it is that optimizer's state; `local_step` gives the
        first one.
    """
    loop = batch_loop(**work, suffix=suffix)
    check_rates(**{f"eta{suffix}": eta, "momentum": momentum})
    if implicit_prox and not is_sgd(client_opt):
        raise InvalidArgument(
            f"implicit_prox needs client_opt='sgd', found {client_opt!r}: an implicit step has the length of the rate, "
            "and another optimizer chooses the lengths of its steps itself. Leave implicit_prox out"
        )
    pace = {"name": name or f"eta{suffix}", "by_default": by_default}
    times, _, move_by = local_step(eta, momentum, client_opt, **pace)

    def solve(objective, weights, velocity, data: ClientData, anchor=None, penalty=None):
        strength = prox() if callable(prox) else prox
        pulled = tf.is_tensor(strength) or bool(strength)

        def step(carry, x, y):
            weights, velocity, _ = carry
            its = data._replace(x=x, y=y)
            value, move = step_gradient(objective, weights, its, work.get("batch_size"), times)  # SGD: -eta g
            if penalty is not None:
                move = tree.add(move, value_and_gradient(penalty, weights, times)[1])
            if pulled and not implicit_prox:
                move = tree.add_scaled(move, times * strength, tree.subtract(weights, anchor))
            velocity, weights = move_by(velocity, weights, move)
            if pulled and implicit_prox:
                pull = rate(pace["name"], eta, by_default=by_default) * strength
                weights = tree.scale(1 / (1 + pull), tree.add_scaled(weights, pull, anchor))
            return weights, velocity, value

        return loop(step, (weights, velocity, _no_value(weights, data)), data)

    return solve


def check_kept(keep_momentum: bool, momentum: float) -> None:
    """Checks `keep_momentum`.

    Raises:
        InvalidArgument: it is true without momentum.
    """
    if keep_momentum and not momentum:
        raise InvalidArgument(
            f"keep_momentum keeps what the option momentum makes, and needs one above 0; found momentum={momentum}. A "
            "client_opt such as 'momentum' begins anew in every visit"
        )


def head_solver(model, *, eta, steps=None, epochs=None, batch_size=None, momentum=0.0, client_opt="sgd", **checks):
    """`local_solver` for the head only: theta is fixed, so one forward pass computes the features for all steps.

    Args:
        model: the `SplitModel`.
        eta, steps, epochs, batch_size, momentum, client_opt, checks: the arguments of `local_solver`.

    Returns:
        fit(theta, head, data) -> (head, the loss at the new head). Full-batch steps use the gradient in closed form.
    """
    given = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    solve = local_solver(**given, steps=steps, epochs=epochs, batch_size=batch_size, **checks)
    optimizer = paced(as_optimizer(client_opt, eta, momentum=momentum), f"eta{checks.get('suffix', '')}")
    work = 50 if steps is None and epochs is None else epochs if steps is None else steps

    def fit(theta, head: Head, data: ClientData):
        phi = model.features(theta, data.x)
        targets = model.kind.targets(data.y, tf.shape(head.bias)[0], phi.dtype)
        if batch_size is None:
            head = heads.fit(head, phi, targets, work, optimizer, model.kind)
        else:
            head, _ = solve(
                lambda w, phi, y: model.kind.loss(logits(w, heads.counted(phi)), y), head, data._replace(x=phi)
            )
        return head, heads.loss(head, phi, targets, model.kind)

    return fit


def body_solver(model, **work):
    """`local_solver` for theta only, with a fixed head.

    Args:
        model: the `SplitModel`.
        work: the arguments of `local_solver`.

    Returns:
        solve(theta, head, data) -> (theta, the loss before the last step).
    """
    solve, objective = local_solver(**work), client_loss(model)

    def solve_body(theta, head: Head, data: ClientData):
        of_theta = MeanLoss(lambda theta, x, y: objective(Weights(theta, head), x, y), objective.block)
        return solve(of_theta, theta, data)

    return solve_body


def example_weight(model, weighting):
    """A function (ClientData) -> weight of the client in a weighted mean, float [].

    Args:
        model: the `SplitModel`.
        weighting: 'examples' (the weight is N_i, so q_i in the mean) or 'uniform' (the weight is 1, so 1 / r).

    Raises:
        InvalidArgument: weighting is neither 'examples' nor 'uniform'.
    """
    check_choice(weighting=(weighting, ("examples", "uniform")))
    if weighting == "uniform":
        return lambda data: tf.ones([], model.dtype)
    return lambda data: tf.cast(data.info.num_examples, model.dtype)
