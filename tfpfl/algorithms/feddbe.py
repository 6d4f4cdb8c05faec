"""FedDBE: a vector on each client holds what is particular to its features (Zhang et al., NeurIPS 2023).

Objective: sum_i alpha_i [l_i(theta, W; c_i) + (kappa / 2 M) |z_i - z|^2], where l_i is the loss of the head W on
phi(x; theta) + c_i. c_i is the client's representation bias memory (PRBM), z_i its mean feature, and z the mean feature
of all, on which they agree once, before the training. The second term is the mean regularization (MR).

Messages: 4 (d + M) bytes down, 4 (d + M) up, with M features; after the agreement the M numbers up are zeros. On the
device: c_i. A client predicts with phi + c_i under the newest w, which is the model (theta, (W, b + c_i W)). A new
client has c_i = 0 and adapts it. The local model is (theta_i, W_i) with c_i.

The code trains all clients once before round 1, to agree on z, and throws these weights away. Here this is the first
round, or the first `agreement_rounds` in which somebody takes part, of those who are sampled: with few clients in a
round, z is closer to the mean of all after several. The paper calls the second term the MSE, the code has half of it,
which is the rule here. Our defaults of kappa and mu are those of the paper's experiments and the code's command line;
the bare code has kappa = 0 and mu = 0.1. In the code the running mean starts at 0 in every visit, so that mu < 1 makes
it too small at first; so it is here. c_i has the rate of w (`eta_p` is another one). What limits the norm of updates,
such as --clip-norm, also limits z_i in the agreement: below the norm of the mean feature it makes z too small, for
good.

In PFLlib (commit d832e76, system/) the training before round 1 is in flcore/servers/serverdbe.py lines 15 to 35, here
in `server_update`; the defaults are in main.py lines 493 and 494. All else computes the same where mini-batches divide
N_i; PFLlib leaves out the last examples, which fill none (tests/algorithms/test_pfllib.py).

With kappa = 0 and eta_p = 0 this is FedAvg after the agreement.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer, at_second_rate
from tfpfl.algorithms.parts.local_training import batch_loop, example_weight, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.schedules import paced
from tfpfl.checks import check_fractions, check_rates, check_whole_number
from tfpfl.models import tree
from tfpfl.models.losses import logits
from tfpfl.models.weights import Head, Weights


class Agreement(NamedTuple):
    """The server's state: the model w, and how far the clients have agreed on z, the mean feature."""

    w: Weights
    z: Any  # [M]: the mean feature of those who came in the rounds of the agreement
    mass: Any  # float []: the sum of their weights
    rounds: Any  # int32 []: rounds of the agreement done


class Shared(NamedTuple):
    """The message; and the update, of which `agreed` is ()."""

    w: Weights  # in the update the difference w_i - w; 0 in the rounds of the agreement
    z: Any  # [M]; in the update z_i, and 0 after the agreement
    agreed: Any  # bool []: z is final


def shifted(head: Head, c) -> Head:
    """The head that gives for phi what `head` gives for phi + c."""
    return Head(head.kernel, head.bias + tf.linalg.matvec(head.kernel, c, transpose_a=True))


def feddbe(
    model,
    population,
    *,
    kappa: float = 50.0,
    mu: float = 1.0,
    agreement_rounds: int = 1,
    eta: float = 0.007,
    eta_p: float | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
) -> Algorithm:
    """FedDBE: each client keeps a vector for the bias of its own features, and the rest of them is held together.

    Update rule:

        client(w, z):   (theta_i, W_i) = w;  m = 0;  for every mini-batch D, all gradients before all steps:
                            m <- (1 - mu) m + mu mean over D of phi(x; theta_i)        no gradient through the old m
                            r = l(theta_i, W_i, c_i; D) + (kappa / 2 M) |m - z|^2      in the agreement: l with c_i = 0
                            (theta_i, W_i) <- (theta_i, W_i) - eta grad r              as in FedAvg
                            c_i <- c_i - eta_p grad r                                  not in the agreement
                        keep c_i, send w_i - w;  in the agreement send z_i = m, and no w_i - w
        server:         w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j
                        in the agreement:  z <- (n z + sum_{i in S} N_i z_i) / (n + sum_{i in S} N_i),
                                           n <- n + sum_{i in S} N_i

    l(theta, W, c; D) is the mean cross-entropy of W on phi(x; theta) + c over a mini-batch D. phi has M features. c_i,
    z and n are 0 at first. The agreement is the first `agreement_rounds` rounds in which an update arrives. S is the
    cohort, N_i the number of client i's training examples.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        kappa: the weight of the mean regularization, >= 0.
        mu: how fast the running mean m follows the mini-batches, in [0, 1]; the paper's momentum. 1: m is that of the
            mini-batch.
        agreement_rounds: the number of rounds in which clients agree on z, >= 1.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of both means, as in `fedavg`.
        eta_p: rate of c_i, >= 0; None for eta, 0 to leave c_i at 0. An optimizer object has one rate for all, so that
            with one this is None or 0.

    Returns:
        The `Algorithm`. A client keeps c_i and predicts with W on phi + c_i.

    Raises:
        InvalidArgument: kappa, eta, eta_p or momentum is negative or not finite, or eta_p has no effect beside an
            optimizer object; mu is outside [0, 1]; agreement_rounds, steps, epochs or batch_size is below 1, or steps
            and epochs are both given; weighting is neither 'examples' nor 'uniform'; clients have different numbers of
            classes (this method shares one head) and the population has no `num_labels`.

    Source:
        Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, NeurIPS 2023, arXiv 2311.14975, algorithm 1.
    """
    check_rates(kappa=kappa, eta=eta, momentum=momentum)
    check_fractions(mu=mu)
    check_whole_number(1, agreement_rounds=agreement_rounds)
    second = at_second_rate(client_opt, eta_p=eta_p)
    eta_p = eta if eta_p is None else eta_p
    check_rates(eta_p=eta_p)
    loop, one_epoch = (
        batch_loop(**work, batch_size=batch_size) for work in ({"steps": steps, "epochs": epochs}, {"epochs": 1})
    )
    of_w = paced(as_optimizer(client_opt, eta, momentum=momentum), "eta")
    of_c = paced(as_optimizer(second, eta_p, momentum=momentum), "eta_p")
    weight, num_labels = example_weight(model, weighting), population.shared_labels()

    def nothing():
        return tf.zeros([model.num_features], model.dtype)

    def init_server():
        w = Weights(model.theta(), model.shared_head(num_labels))
        return Agreement(w, nothing(), tf.zeros([], model.dtype), tf.constant(0))

    def client_update(message, c, data):
        on = tf.cast(message.agreed, model.dtype)

        def objective(values, m, x, y):
            (theta, head), c = values
            phi = model.features(theta, x)
            m = (1 - mu) * m + mu * tf.reduce_mean(phi, 0)
            apart = kappa / 2 * tf.reduce_mean(tf.square(m - message.z))
            return model.kind.loss(logits(head, phi + on * c), y) + on * apart, m

        def step(carry, x, y):
            w, c, m, slots_w, slots_c, _ = carry
            with tf.GradientTape() as tape:
                tape.watch((w, c))
                loss, new_m = objective((w, c), m, x, y)
            by_w, by_c = tape.gradient(loss, (w, c), unconnected_gradients=tf.UnconnectedGradients.ZERO)
            slots_w, w = of_w.step(slots_w, w, tree.shaped(tree.dense(by_w), w))
            slots_c, c = of_c.step(slots_c, c, by_c)
            return w, c, new_m, slots_w, slots_c, loss

        start = (message.w, c, nothing(), of_w.init(message.w), of_c.init(c), tf.zeros([], model.dtype))
        w_i, c, m, _, _, loss = loop(step, start, data)
        update = Shared(tree.scale(on, tree.subtract(w_i, message.w)), (1 - on) * m, ())
        return ClientOutput(update, weight(data), c, {"loss": loss})

    def server_update(server, mean, total):
        here = tf.where(server.rounds < agreement_rounds, total, tf.zeros_like(total))
        mass = server.mass + here
        share = tf.math.divide_no_nan(here, mass)
        z = server.z + share * (mean.z - server.z)
        return Agreement(tree.add(server.w, mean.w), z, mass, server.rounds + tf.cast(here > 0, tf.int32))

    def personal_model(message, c, data):
        return Weights(message.w.theta, shifted(message.w.head, c))

    def local_model(message, output):
        w_i = tree.add(message.w, output.update.w)
        return Weights(w_i.theta, shifted(w_i.head, output.state))

    def adapt_start(message, c, data):
        return message, c, of_c.init(c), model.features_in_chunks(message.w.theta, data.x)

    def adapt_epoch(carry, data, n):
        message, c, slots, phi = carry

        def step(carry, phi, y):
            c, slots = carry
            _, g = value_and_gradient(lambda c: model.kind.loss(logits(message.w.head, phi + c), y), c)
            slots, c = of_c.step(slots, c, g)
            return c, slots

        c, slots = one_epoch(step, (c, slots), data._replace(x=phi), first=n)
        return message, c, slots, phi

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=lambda info: nothing(),
        message=lambda server: Shared(server.w, server.z, server.rounds >= agreement_rounds),
        client_update=client_update,
        server_update=server_update,
        personal_model=personal_model,
        local_model=local_model,
        global_model=lambda message: message.w,
        aggregate="mean",
        adapt=Adaptation(adapt_start, adapt_epoch, lambda carry: personal_model(carry[0], carry[1], None)),
        shares="backbone",
    )


FEDDBE = Method(
    name="feddbe",
    title="FedDBE",
    builder=feddbe,
    head="shared",
    message="broadcast",
    state="vector (M)",
    down="d + M",
    up="d + M",
    reference="Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: Eliminating Domain Bias for Federated Learning in "
    "Representation Space, NeurIPS 2023",
    no_server_opt="its server also keeps the mean feature, which is no step. Use client_opt",
    no_objective="the mean feature counts clients by their examples, not by their losses. Use fedavg or fedala",
)
