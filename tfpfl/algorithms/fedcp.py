"""FedCP: a policy network splits every example's features between a personal and the global head (Zhang, Hua, Wang,
Song, Xue, Ma, Guan; KDD 2023).

Objective: client i minimizes the loss l_i of what both heads say together, plus lam times the distance (MMD) of its
features from those of the backbone that it received. The global head is frozen; it learns from what clients send.

Messages: 4 (d + 2 M^2 + 6 M) bytes down and up, with M features. On the device: the head W_i. A client predicts with
the newest theta, W and P, and its own head. A new client trains its own head only; its gates stay those of its first
head. Every example has gates of its own, so no linear head predicts the same: `Algorithm.predictor` makes the outputs,
and a Keras file or a bundle is refused. The head of `personal_model` and of the local model is what the two heads say
together where every gate is 1/2.

"Conditional policy network" (CPN) is P in the paper, "context" is v_i. Paper and the authors' code agree but for this:
the code draws Gumbel noise for every gate, also to predict, where the paper has a softmax, as here; and the context of
a client's first visit is random in the code, where the paper takes the head's, as here. In both, a visit's gates come
from the head as it was before the visit. lam is that of the authors' command line for a CNN; the bare code has 0.

In PFLlib (commit d832e76, system/flcore/) the noise is in servers/servercp.py line 175, and the random context in
clients/clientcp.py line 18. Clients outside of the cohort get the new backbone (servers/servercp.py lines 43 and 44),
but no new global head and policy (lines 134 and 153). All else computes the same where mini-batches divide N_i; PFLlib
leaves out the last examples, which fill none (tests/algorithms/test_pfllib.py).
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientOutput
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import batch_loop, example_weight, local_solver, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_rates
from tfpfl.data.randomness import ModelKey
from tfpfl.models import tree
from tfpfl.models.losses import logits
from tfpfl.models.weights import Head, Weights

LAYER_NORM = 1e-5  # PyTorch's
SMALLEST = 1e-12  # a context is divided by at least this length
BANDWIDTHS = (10, 15, 20, 50)  # of the MMD's kernels, in the authors' code


class Policy(NamedTuple):
    """The conditional policy network: a linear layer, a layer normalization and a rectifier."""

    kernel: Any  # [M, 2M]: the first M outputs speak for the personal head, the others for the global one
    bias: Any  # [2M]
    scale: Any  # [2M]
    shift: Any  # [2M]


class Shared(NamedTuple):
    """The server's state, the message and, as differences, the update."""

    theta: Any
    head: Head  # W, the global head
    policy: Policy


class Fit(NamedTuple):
    """What a new client carries from epoch to epoch."""

    message: Shared
    context: Any  # [M]
    head: Head  # W_i
    slots: Any
    parts: Any  # (r phi [N_i, M], what the global head says [N_i, K]): they do not change


def context_of(head: Head):
    """The client's context v_i: the sum of its head's columns, divided by its length: [M]."""
    v = tf.reduce_sum(head.kernel, 1)
    return v * tf.math.rsqrt(tf.maximum(tf.reduce_sum(tf.square(v)), SMALLEST**2))


def gates(policy: Policy, context, phi):
    """The gates r of the personal head, [N, M]; those of the global head are s = 1 - r."""
    a = tf.matmul(phi * context, policy.kernel) + policy.bias
    a = a - tf.reduce_mean(a, 1, keepdims=True)
    a = a * tf.math.rsqrt(tf.reduce_mean(tf.square(a), 1, keepdims=True) + LAYER_NORM) * policy.scale + policy.shift
    personal, of_all = tf.split(tf.nn.relu(a), 2, 1)
    return tf.sigmoid(personal - of_all)  # the softmax of the two


def mmd(a, b):
    """The squared maximum mean discrepancy of two sets of features [N, M], summed over the kernels: float []."""

    def kernels(u, v):
        squares = tf.reduce_sum(tf.square(u), 1)[:, None] + tf.reduce_sum(tf.square(v), 1)
        squares -= 2 * tf.matmul(u, v, transpose_b=True)
        return tf.add_n([tf.exp(squares / (-2 * width)) for width in BANDWIDTHS])

    return tf.reduce_mean(kernels(a, a) + kernels(b, b) - 2 * kernels(a, b))


def initial_policy(model) -> Policy:
    """The policy network at first: a linear layer uniform in +-1 / sqrt(M), as PyTorch begins it."""
    m, limit = model.num_features, model.num_features**-0.5
    key = tf.constant([model.seed, ModelKey.POLICY], tf.int32)
    drawn = tf.random.stateless_uniform([m + 1, 2 * m], key, -limit, limit, model.dtype, alg="philox")
    return Policy(drawn[:m], drawn[m], tf.ones([2 * m], model.dtype), tf.zeros([2 * m], model.dtype))


def fedcp(
    model,
    population,
    *,
    lam: float = 5.0,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
) -> Algorithm:
    """FedCP: a shared policy network splits the features of every example between a personal and the global head.

    Update rule:

        client(theta, W, P):  v = u / |u| with u = sum of the columns of W_i                     the context
                              (theta_i, P_i) = (theta, P);  for every mini-batch D, all gradients before steps:
                                  phi = phi(x; theta_i)
                                  a   = max(0, layernorm((phi * v) A + a_0))                     [2M], of P_i
                                  r   = exp(a_1) / (exp(a_1) + exp(a_2)),  s = 1 - r             a_1, a_2: halves of a
                                  f   = mean over D of CE(W_i(r * phi) + W(s * phi); y)
                                        + lam MMD(phi, phi(x; theta))
                                  (theta_i, W_i, P_i) <- (theta_i, W_i, P_i) - eta grad f
                              keep W_i, send (theta_i - theta, (W_i - W) / 2, P_i - P)
        server:               (theta, W, P) <- (theta, W, P) + sum_{i in S} q_i (what i has sent)
        to predict:           W_i(r * phi(x; theta)) + W(s * phi(x; theta)),  r and s of P and the context of W_i

        MMD(p, h) = mean over n, m of  k(p_n, p_m) + k(h_n, h_m) - 2 k(p_n, h_m)
        k(p, h)   = sum over c = 10, 15, 20, 50 of  exp(-|p - h|^2 / 2c)

    theta is the backbone, W(phi) = phi W + b the global head, whose columns belong to classes, W_i the client's head.
    P, the policy network, is A [M, 2M], a_0, and the scale and shift of layernorm, [2M] each; layernorm takes off the
    mean and divides by sqrt(variance + 1e-5), then scales and shifts. No gradient goes through v, W and theta. At
    first W_i = W. For other kinds of labels, CE is the kind's loss. q_i = N_i / sum_{j in S} N_j; S is the cohort.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        lam: the weight of the MMD, >= 0; the paper's lambda. The MMD takes a mini-batch's size, squared, of memory.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.

    Returns:
        The `Algorithm`. A client keeps W_i and predicts with both heads.

    Raises:
        InvalidArgument: lam, eta or momentum is negative or not finite; steps, epochs or batch_size is below 1, or
            steps and epochs are both given; weighting is neither 'examples' nor 'uniform'; clients have different
            numbers of classes (this method shares one head) and the population has no `num_labels`.

    Source:
        Zhang, Hua, Wang, Song, Xue, Ma, Guan, KDD 2023, arXiv 2307.01217, and the authors' code.
    """
    check_rates(lam=lam)
    num_labels, weight = population.shared_labels(), example_weight(model, weighting)
    rates: dict[str, Any] = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    solve = local_solver(**rates, steps=steps, epochs=epochs, batch_size=batch_size)
    one_epoch, optimizer = batch_loop(epochs=1, batch_size=batch_size), as_optimizer(client_opt, eta, momentum=momentum)

    def separated(shared: Shared, context, phi):
        """(r phi, what the global head says of s phi)."""
        r = gates(shared.policy, context, phi)
        return r * phi, logits(shared.head, (1 - r) * phi)

    def with_context(shared: Shared, head: Head, context):
        def outputs(phi):
            personal, of_all = separated(shared, context, phi)
            return tf.ensure_shape(logits(head, personal) + of_all, [None, head.bias.shape[0]])

        return outputs

    def client_update(message, own, data):
        context, received = context_of(own), model.features_in_chunks(message.theta, data.x)

        def objective(values, x, y):
            (theta, head, policy), (x, before) = values, x
            phi = model.features(theta, x)
            z = with_context(Shared(theta, message.head, policy), head, context)(phi)
            return model.kind.loss(z, y) + lam * mmd(phi, before)

        examples = data._replace(x=(data.x, received))
        trained, loss = solve(objective, Shared(message.theta, own, message.policy), examples)
        moved = tree.subtract(trained, message)
        sent = moved._replace(head=tree.scale(0.5, moved.head))
        return ClientOutput(sent, weight(data), trained.head, {"loss": loss})

    def both(theta, own, head):
        """The model with gates of 1/2."""
        return Weights(theta, Head((own.kernel + head.kernel) / 2, own.bias + head.bias))

    def start(message, own, data):
        context = context_of(own)
        phi = model.features_in_chunks(message.theta, data.x)
        return Fit(message, context, own, optimizer.init(own), separated(message, context, phi))

    def epoch(fit: Fit, data, n):
        def step(carry, x, y):
            (personal, of_all), (head, slots) = x, carry
            _, by_head = value_and_gradient(lambda w: model.kind.loss(logits(w, personal) + of_all, y), head)
            slots, head = optimizer.step(slots, head, by_head)
            return head, slots

        head, slots = one_epoch(step, (fit.head, fit.slots), data._replace(x=fit.parts), first=n)
        return fit._replace(head=head, slots=slots)

    return Algorithm(
        model=model,
        population=population,
        init_server=lambda: Shared(model.theta(), model.shared_head(num_labels), initial_policy(model)),
        init_client=lambda info: model.shared_head(num_labels),
        message=lambda server: server,
        client_update=client_update,
        server_update=tree.add,
        personal_model=lambda message, own, data: both(message.theta, own, message.head),
        local_model=lambda message, output: both(
            tree.add(message.theta, output.update.theta), output.state, message.head
        ),
        aggregate="mean",
        adapt=Adaptation(
            start=start,
            epoch=epoch,
            model=lambda fit: both(fit.message.theta, fit.head, fit.message.head),
            predictor=lambda fit, data: with_context(fit.message, fit.head, fit.context),
        ),
        shares="backbone",
        predictor=lambda message, own, data: with_context(message, own, context_of(own)),
    )


FEDCP = Method(
    name="fedcp",
    title="FedCP",
    builder=fedcp,
    head="shared",
    message="broadcast",
    state="head",
    down="d + 2M*M + 6M",
    up="d + 2M*M + 6M",
    reference="Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedCP: Separating Feature Information for Personalized Federated "
    "Learning via Conditional Policy, KDD 2023",
    no_objective="its clients minimize more than their loss. Use fedper or fedrep",
    no_batch_norm=SEVERAL_MODELS,
)
