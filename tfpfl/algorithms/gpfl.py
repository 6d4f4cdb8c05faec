"""GPFL: shared embeddings of all classes guide the backbone, and a valve opens for what is a client's own (Zhang, Hua,
Wang, Song, Xue, Ma, Cao, Guan; ICCV 2023).

Objective: client i minimizes l_i of its head on features that the valve has conditioned on its own classes, plus the
loss of the generic features against the embeddings of all classes, plus their distance from them.

Messages: 4 (b + C M + 2 M^2 + 4 M) bytes down and up, with C classes and M features, where b has the 2 M numbers of the
valve that are never sent as such. On the device: the head W_i, and two vectors of M. A client predicts with the newest
theta, table and valve, and its own head. A new client adapts its head. The local model is that of (theta_i, W_i), with
the table and the valve as the client has trained them.

"Conditional valve" (CoV), "global category embedding" (GCE) and personalized task are the paper's terms. We follow the
authors' code (PFLlib) in every formula. It computes the two conditions from the table as the client itself has trained
it, before it takes in the new one, and has zeros in the first round (conditions='trained'). By default they are
computed from the table that the client receives (conditions='received'), so that clients that were away are not behind;
the code gives the table of every round to them, too. lam and mu are those of the authors' command line for a CNN; the
bare code has lam = 1, mu = 0. The code's weight decay mu is in the steps of table and valve only, as here. It has no
momentum, and the magnitude is that of the whole mini-batch: it grows with the root of its size.

In PFLlib (commit d832e76, system/flcore/) the old table is read in clients/clientgpfl.py lines 105 to 108, and the new
one taken in line 111; the zeros are in lines 31 and 32. For a client that was away the old table is that of the round
before, and with conditions='trained' here that of its last visit; in rounds with everyone they are the same. All else
computes the same where mini-batches divide N_i; PFLlib leaves out the last examples, which fill none
(tests/algorithms/test_pfllib.py).
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import batch_loop, example_weight, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.schedules import paced
from tfpfl.checks import check_choice, check_rates
from tfpfl.data.randomness import ModelKey
from tfpfl.models import tree
from tfpfl.models.heads import check_classes
from tfpfl.models.losses import cross_entropy, logits
from tfpfl.models.split import HEAD_INITS
from tfpfl.models.valve import with_valve
from tfpfl.models.weights import Weights

ONLY_CLASSES = "it has an embedding for each class. FedPer and FedRep share a backbone, too, for every kind"
LAYER_NORM = 1e-5  # PyTorch's
SMALLEST = 1e-12  # a vector is divided by at least this length


class Branch(NamedTuple):
    """One half of the valve: a linear layer, a rectifier and a layer normalization."""

    kernel: Any  # [M, M]
    bias: Any  # [M]
    scale: Any  # [M]
    shift: Any  # [M]


class Valve(NamedTuple):
    """The conditional valve: what makes gamma and beta of a condition."""

    gamma: Branch
    beta: Branch


class Shared(NamedTuple):
    """The server's state, the message and, as differences, the update."""

    theta: Any
    table: Any  # [C, M]: E, the embedding of every class
    valve: Valve


class Conditions(NamedTuple):
    """What the valve is conditioned on, both [M]."""

    generic: Any  # g: the mean embedding
    personal: Any  # p_i: the mean embedding of the client's examples


class Personal(NamedTuple):
    """The state of a client: its head, and the conditions of its own that it may use at its next visit."""

    head: Any  # W_i
    conditions: Conditions  # of the table that it has trained last; zeros before


def combined(coefficients, rows):
    """sum_k coefficients_k rows_k. A product with a vector would depend, by rounding, on where the numbers lie."""
    return tf.reduce_sum(coefficients[:, None] * rows, 0)


@tf.custom_gradient
def centered(h):
    """h without its mean: [M]. Its gradient subtracts, see `client_update`; TensorFlow's own adds."""
    return h - tf.reduce_mean(h), lambda upstream: upstream - tf.reduce_mean(upstream)


def branch(b: Branch, condition):
    """gamma or beta: [M], of a condition [M]."""
    h = tf.nn.relu(combined(condition, b.kernel) + b.bias)
    h = centered(h)
    return h / tf.sqrt(tf.reduce_mean(tf.square(h)) + LAYER_NORM) * b.scale + b.shift


def opened(valve: Valve, phi, condition):
    """max(0, (1 + gamma) phi + beta): the features [N, M] that the valve lets through."""
    return tf.nn.relu((1 + branch(valve.gamma, condition)) * phi + branch(valve.beta, condition))


@tf.custom_gradient
def unit(vectors):
    """Vectors of length 1: [N, M]. The gradient is one term, so that at most two are added where it arrives."""
    squared = tf.reduce_sum(tf.square(vectors), 1, keepdims=True)
    inverse = tf.math.rsqrt(tf.maximum(squared, SMALLEST**2))
    result = vectors * inverse

    def gradient(upstream):
        along = tf.reduce_sum(upstream * result, 1, keepdims=True)
        return (upstream - tf.where(squared >= SMALLEST**2, along, tf.zeros_like(along)) * result) * inverse

    return result, gradient


def distance(a, b):
    """|a - b|, whose gradient is 0 at 0: float []."""
    squared = tf.reduce_sum(tf.square(a - b))
    return tf.where(squared > 0, tf.sqrt(tf.where(squared > 0, squared, tf.ones_like(squared))), 0 * squared)


def conditions_of(table, y) -> Conditions:
    """The conditions of a client with these labels."""
    n = tf.reduce_sum(tf.one_hot(y, tf.shape(table)[0], dtype=table.dtype), 0)
    return Conditions(tf.reduce_mean(table, 0), combined(n / tf.reduce_sum(n), table))


def initial(model, num_labels):
    """(table, valve): normal embeddings; linear layers uniform in +-1 / sqrt(M), as PyTorch begins them."""
    m, limit = model.num_features, model.num_features**-0.5
    key = tf.constant([model.seed, ModelKey.CATEGORIES], tf.int32)

    def drawn(number, shape):
        seed = tf.random.experimental.stateless_fold_in(key, number)
        return tf.random.stateless_uniform(shape, seed, -limit, limit, model.dtype, alg="philox")

    def half(number):
        return Branch(
            drawn(number, [m, m]), drawn(number + 1, [m]), tf.ones([m], model.dtype), tf.zeros([m], model.dtype)
        )

    table = tf.random.stateless_normal([num_labels, m], key, dtype=model.dtype, alg="philox")
    return table, Valve(half(1), half(3))


def gpfl(
    model,
    population,
    *,
    lam: float = 0.01,
    mu: float = 0.1,
    conditions: str = "received",
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
    head_init: str | None = None,
) -> Algorithm:
    """GPFL: a shared backbone, a shared embedding of every class, and a valve between the features and private heads.

    Update rule:

        client(theta, E, V):  g = mean over classes of E_c;  p_i = sum_c n_ic E_c / N_i          the conditions
                              (theta_i, E_i, V_i) = (theta, E, V);  for every mini-batch D, all gradients before steps:
                                  phi = phi(x; theta_i);  s = V_i(phi, g)                        generic features
                                  r =   mean over D of CE(W_i, V_i(phi, p_i); y)                 personalized task
                                      + mean over D of -log softmax(cos(s, E_i))_y               angle to the classes
                                      + lam |s - E_y|                                            magnitude
                                  (theta_i, W_i) <- (theta_i, W_i) - eta grad r
                                  (E_i, V_i) <- (E_i, V_i) - eta (grad r + mu (E_i, V_i))
                              keep W_i, send (theta_i, E_i, V_i) - (theta, E, V)
        server:               (theta, E, V) <- (theta, E, V) + sum_{i in S} q_i ((theta_i, E_i, V_i) - (theta, E, V))

        V(phi, c) = max(0, (1 + gamma) phi + beta);  gamma, beta = layernorm(max(0, c A + a)) u + v, each of its own

    E has an embedding of M features for each of C classes, V is the valve with A [M, M] and a, u, v [M] for gamma and
    for beta; n_ic counts client i's examples of class c. |s - E_y| is the Frobenius norm over the mini-batch, with the
    received E, through which no gradient goes; none goes through g and p_i either. cos(s, E) are the C cosines of s and
    the embeddings. layernorm takes off the mean and divides by sqrt(variance + 1e-5). q_i = N_i / sum_{j in S} N_j; S
    is the cohort.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on. The algorithm's model has a
            valve after it (`tfpfl.models.valve`).
        lam: the weight of the magnitude, >= 0; the paper's lambda.
        mu: the weight decay of E and V, >= 0.
        conditions: of which table g and p_i are: 'received' (E), or 'trained' (E_i after the client's last visit; 0
            before its first one, as in the code).
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.
        head_init: how heads start: 'glorot', 'uniform01' or 'zeros' (see `SplitModel`); None for the model's
            `head_init`.

    Returns:
        The `Algorithm`. A client keeps W_i and predicts with W_i on V(phi, p_i) of the newest theta, E and V.

    Raises:
        InvalidArgument: lam, mu, eta or momentum is negative or not finite; steps, epochs or batch_size is below 1, or
            steps and epochs are both given; conditions, weighting or head_init is not one of the values above; the
            model's kind is not 'classification', or it has a trunk, adapters, or moving statistics; clients have
            different numbers of classes (this method shares the embeddings) and the population has no `num_labels`.

    Source:
        Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, ICCV 2023, arXiv 2308.10279, and the authors' code.
    """
    check_classes(model.kind, "GPFL", ONLY_CLASSES)
    check_choice(conditions=(conditions, ("received", "trained")), head_init=(head_init or model.head_init, HEAD_INITS))
    check_rates(lam=lam, mu=mu, eta=eta, momentum=momentum)
    valved, num_labels = with_valve(model), population.shared_labels()
    model = valved.inner
    loop = batch_loop(steps=steps, epochs=epochs, batch_size=batch_size)
    optimizer = paced(as_optimizer(client_opt, eta, momentum=momentum), "eta")
    weight = example_weight(model, weighting)
    zeros = [0.0] * model.num_features

    def init_client(info):
        start = model.shared_head(num_labels, head_init)
        return Personal(start, Conditions(tf.constant(zeros, model.dtype), tf.constant(zeros, model.dtype)))

    def now(message, state, data):
        return conditions_of(message.table, data.y) if conditions == "received" else state.conditions

    def whole(theta, valve, head, condition):
        gamma, beta = branch(valve.gamma, condition), branch(valve.beta, condition)
        return Weights((*theta, 1 + gamma, beta), head)

    def client_update(message, state, data):
        g, p = now(message, state, data)

        def objective(values, x, y):
            (theta, table, valve), head = values
            phi = model.features(theta, x)
            generic = opened(valve, phi, g)
            task = cross_entropy(logits(head, opened(valve, phi, p)), y)
            angle = cross_entropy(tf.matmul(unit(generic), unit(table), transpose_b=True), y)
            return task + angle - -lam * distance(generic, tf.gather(message.table, y))  # subtracted, see `step`

        def step(carry, x, y):
            values, slots, _ = carry
            loss, move = value_and_gradient(lambda v: objective(v, x, y), values)
            shared, by_head = move
            # Subtracted: of three terms that are added, TensorFlow makes one AddN, which adds them in an order that
            # depends on which buffer is free at that moment, so that the last bit would differ from run to run.
            decay = tree.scale(-mu, (values[0].table, values[0].valve))
            decayed = tree.subtract((shared.table, shared.valve), decay)
            slots, values = optimizer.step(slots, values, (Shared(shared.theta, *decayed), by_head))
            return values, slots, loss

        start = (message, state.head)
        (trained, head), _, loss = loop(step, (start, optimizer.init(start), tf.zeros([], model.dtype)), data)
        state = Personal(head, conditions_of(trained.table, data.y))
        return ClientOutput(tree.subtract(trained, message), weight(data), state, {"loss": loss})

    def personal_model(message, state, data):
        return whole(message.theta, message.valve, state.head, now(message, state, data).personal)

    def local_model(message, output):
        trained = tree.subtract(message, tree.scale(-1.0, output.update))  # subtracted, see `step`
        return whole(trained.theta, trained.valve, output.state.head, output.state.conditions.personal)

    return Algorithm(
        model=valved,
        population=population,
        init_server=lambda: Shared(model.theta(), *initial(model, num_labels)),
        init_client=init_client,
        message=lambda server: server,
        client_update=client_update,
        server_update=tree.add,
        personal_model=personal_model,
        local_model=local_model,
        aggregate="mean",
        adapt=adaptation(
            valved, personal_model, as_optimizer(client_opt, eta, momentum=momentum), part="head", batch_size=batch_size
        ),
        shares=None,
    )


WHY_NO_NORM = "its layers are trained with a valve after them, and the server's table. Use fedper or fedrep"
GPFL = Method(
    name="gpfl",
    title="GPFL",
    builder=gpfl,
    head="shared",
    message="broadcast",
    state="head, 2M",
    down="b + C*M + 2M*M + 4M",
    up="b + C*M + 2M*M + 4M",
    reference="Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan: GPFL: Simultaneously Learning Global and Personalized "
    "Feature Information for Personalized Federated Learning, ICCV 2023",
    only_classes=ONLY_CLASSES,
    no_objective="its clients minimize more than their loss. Use fedper or fedrep",
    no_batch_norm={"local": WHY_NO_NORM, "shared": WHY_NO_NORM},
    model=with_valve,
)
