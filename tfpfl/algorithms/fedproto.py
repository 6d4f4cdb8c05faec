"""FedProto: clients exchange the mean features of their classes, and nothing else (Tan, Long, Liu, Zhou, Lu, Jiang,
Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022).

Objective: sum_i alpha_i l_i(w_i) + lambda sum_i R(w_i), with a whole model w_i of each client; R is how far its
features are from the prototypes of their classes.

Messages: 4h bytes down, 4h up: C prototypes of M numbers and C counts. On the device: the whole model w_i. A new client
starts from w^0 and the prototypes, and trains as all clients do, but sends nothing. The local model is w_i with its own
head. A class that nobody of the cohort has keeps its prototype.

The prediction is the class of the nearest prototype, as in the paper. That is a linear head on the client's backbone,
|phi - c|^2 = |phi|^2 - (2 c phi - |c|^2), so Keras files and devices have it. The outputs are minus the squared
distances, up to |phi|^2, which is the same for all classes.

Paper and code (yuetan031/FedProto; exps/federated_main.py, lib/update.py, lib/utils.py), where they differ:

* The penalty: the paper's is the sum over classes of a distance between the client's prototype and the global one; the
  code's is that of every single example's features to the prototype of its class (`penalty`; default: the code's, which
  made the numbers). The distance is the code's in both, the mean squared difference. The Euclidean norm would pull with
  full force in a direction of rounding errors, where the two are the same, as for a class that one client alone has.
* The server's mean: the paper weighs clients by their examples of the class, and also divides by the number of clients,
  which would shrink the prototypes; the code takes the plain mean over clients (`weighting`; default: the code's).
* The prediction: the code reports two, by the nearest prototype among the client's own classes and by the head
  (`predict`; default: the paper's, among all classes). A class without a prototype has the mean squared distance 100
  there, and here that to the features' origin plus 100.
* The client's prototypes: the code takes the features that the last epoch's steps have met, each under other weights.
  Here they are those of the trained w_i on all examples, without masks of Dropout.

PFLlib (commit d832e76, system/flcore/) takes the features that the steps of all epochs have met (clients/clientproto.py
lines 54 to 56; its own `collect_protos`, as here, is not called, line 66), and forgets the prototypes of classes that
the cohort does not have (servers/serverproto.py line 45; kept in `server_update` here). It has an infinite distance to
a class without a prototype. All else computes the same where mini-batches divide N_i; PFLlib leaves out the last
examples, which fill none (tests/algorithms/test_pfllib.py).
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import batch_loop, local_solver, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_choice, check_rates
from tfpfl.models import passes, tree
from tfpfl.models.losses import logits
from tfpfl.models.weights import Head, Weights

PENALTIES = ("examples", "prototypes")
PREDICTS = ("prototypes", "own_prototypes", "head")
FAR = 100.0  # the mean squared distance of a class without a prototype


class Prototypes(NamedTuple):
    """The server's state and the message; in the update, values are times counts."""

    values: Any  # [C, M]: the mean features of every class
    counts: Any  # [C]: of how many clients or examples; 0: the class has none yet


def class_sums(phi, y, num_labels) -> Prototypes:
    """The sums of features [N, M] over the examples of every class, and their numbers."""
    one_hot = tf.one_hot(y, num_labels, dtype=phi.dtype)
    return Prototypes(tf.matmul(one_hot, phi, transpose_a=True), tf.reduce_sum(one_hot, 0))


def means(sums: Prototypes):
    """The means of `class_sums`, [C, M]; 0 for a class without examples."""
    return tf.math.divide_no_nan(sums.values, sums.counts[:, None])


def distance(phi, y, prototypes: Prototypes, penalty):
    """R, how far features are from the prototypes of their classes: float []; classes without a prototype count 0."""
    if penalty == "examples":
        known = tf.gather(prototypes.counts, y) > 0
        away = tf.where(known[:, None], phi - tf.gather(prototypes.values, y), tf.zeros_like(phi))
        return tf.reduce_mean(tf.square(away))
    own = class_sums(phi, y, tf.shape(prototypes.counts)[0])
    both = (own.counts > 0) & (prototypes.counts > 0)
    away = tf.where(both[:, None], means(own) - prototypes.values, tf.zeros_like(prototypes.values))
    return tf.reduce_sum(tf.reduce_mean(tf.square(away), 1))


def nearest(prototypes: Prototypes, known) -> Head:
    """The linear head whose outputs are |phi|^2 minus the squared distances to the prototypes; `known`: bool [C]."""
    values = tf.where(known[:, None], prototypes.values, tf.zeros_like(prototypes.values))
    far = tree.as_dtype(-FAR * values.shape[1], values.dtype)
    bias = tf.where(known, -tf.reduce_sum(tf.square(values), 1), tf.fill(tf.shape(known), far))
    return Head(tf.transpose(2 * values), bias)


def fedproto(
    model,
    population,
    *,
    lam: float = 1.0,
    penalty: str = "examples",
    predict: str = "prototypes",
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "uniform",
) -> Algorithm:
    """FedProto: each client trains a whole model of its own, near to the common mean features of its classes.

    Update rule:

        client(c):  w_i = SGD from w_i on l_i(w) + lambda R_i(w)                   c_k: the prototype of class k
                    c_ik = mean of phi(x; theta_i) over its examples of class k    after the steps
                    keep w_i, send c_ik and their weights p_ik
        server:     c_k <- sum_{i in S} p_ik c_ik / sum_{i in S} p_ik              c_k stays if nobody in S has class k
        to predict: the class k of the least |phi(x; theta_i) - c_k|^2

        penalty 'examples':   R_i = 1 / (n M) sum_x |phi(x) - c_{y(x)}|^2 over the n examples of the mini-batch
        penalty 'prototypes': R_i = sum_k 1 / M |(mean of phi over those of class k) - c_k|^2
        weighting 'uniform':  p_ik = 1 if the client has class k, else 0;  'examples': its number of examples of class k

    w_i = (theta_i, W_i) is client i's whole model, theta_i its backbone with M features phi, W_i its head; l_i is its
    mean cross-entropy. S is the cohort. Examples of classes without a prototype add 0 to R_i, but count in n. All w_i
    start from one w^0. The outputs are 2 c_k phi - |c_k|^2, and -100 M for a class without a prototype. The metric
    'loss' is l_i + lambda R_i before the last step.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        lam: lambda, >= 0; 0 trains each client alone.
        penalty: what is near to the prototypes: 'examples', each for itself (the authors' code), or 'prototypes', the
            client's means of the mini-batch (the paper).
        predict: with the nearest of all 'prototypes' (the paper), with the nearest of the classes that the client has
            in training, 'own_prototypes', or with its 'head' (both in the authors' code).
        eta, steps, epochs, batch_size, momentum, client_opt: rate, amount, mini-batches, momentum and optimizer of the
            local steps, as in `fedavg`. The authors' code has 0.01, 1 epoch, 4 and 0.5.
        weighting: a client's weight in the mean of a class: 'uniform' (the authors' code) or 'examples'.

    Returns:
        The `Algorithm`. A client keeps w_i and predicts with its backbone and the prototypes.

    Raises:
        InvalidArgument: lam, eta or momentum is negative or not finite; penalty, predict or weighting is not one of the
            values above; steps, epochs or batch_size is below 1, or steps and epochs are both given; clients have
            different numbers of classes (this method has one prototype for each) and the population has no
            `num_labels`; the labels are no classes.

    Source:
        Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, AAAI 2022, algorithm 1.
    """
    check_choice(penalty=(penalty, PENALTIES), predict=(predict, PREDICTS))
    check_choice(weighting=(weighting, ("uniform", "examples")))
    check_rates(lam=lam)
    rates: dict[str, Any] = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    solve = local_solver(**rates, steps=steps, epochs=epochs, batch_size=batch_size)
    num_labels = population.shared_labels()

    def first():
        return Weights(model.theta(), model.shared_head(num_labels))

    def objective(prototypes):
        def value(w, x, y):
            phi = model.features(w.theta, x)
            return model.kind.loss(logits(w.head, phi), y) + lam * distance(phi, y, prototypes, penalty)

        return value

    def client_update(prototypes, w, data):
        w, loss = solve(objective(prototypes), w, data)
        with passes.without_masks():
            phi = model.features_in_chunks(w.theta, data.x)
        found = class_sums(phi, data.y, num_labels)
        if weighting == "uniform":
            found = Prototypes(means(found), tf.cast(found.counts > 0, model.dtype))
        return ClientOutput(found, tf.ones([], model.dtype), w, {"loss": loss})

    def server_update(prototypes, added):
        some = added.counts > 0
        values = tf.where(some[:, None], means(added), prototypes.values)
        return Prototypes(values, tf.where(some, added.counts, prototypes.counts))

    def predicting(prototypes, w, data):
        if predict == "head":
            return w
        known = prototypes.counts > 0
        if predict == "own_prototypes":
            known &= class_sums(tf.zeros([tf.size(data.y), 1], model.dtype), data.y, num_labels).counts > 0
        return w._replace(head=nearest(prototypes, known))

    loop, optimizer = batch_loop(epochs=1, batch_size=batch_size), as_optimizer(client_opt, eta, momentum=momentum)

    def epoch(fit, data, n):
        prototypes, value = fit[0], objective(fit[0])

        def step(carry, x, y):
            w, slots = carry
            slots, w = optimizer.step(slots, w, value_and_gradient(lambda v: value(v, x, y), w)[1])
            return w, slots

        w, slots = loop(step, fit[1:3], data, first=n)
        return prototypes, w, slots, predicting(prototypes, w, data)

    def start(prototypes, w, data):
        return prototypes, w, optimizer.init(w), predicting(prototypes, w, data)

    return Algorithm(
        model=model,
        population=population,
        init_server=lambda: Prototypes(
            *(tf.zeros(s, model.dtype) for s in ([num_labels, model.num_features], [num_labels]))
        ),
        init_client=lambda info: first(),
        message=lambda prototypes: prototypes,
        client_update=client_update,
        server_update=server_update,
        personal_model=predicting,
        local_model=lambda prototypes, output: output.state,
        aggregate="sum",
        adapt=Adaptation(start, epoch, lambda fit: fit[3]),
        shares="head" if predict == "prototypes" else None,
    )


FEDPROTO = Method(
    name="fedproto",
    title="FedProto",
    builder=fedproto,
    head="shared",
    message="broadcast",
    state="whole model",
    down="h",
    up="h",
    reference="Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous "
    "Clients, AAAI 2022",
    only_classes="a prototype is that of a class. Use fedper or lg_fedavg",
    no_server_opt="its server keeps means of what the clients send, and takes no steps. Use client_opt",
    no_objective="its server takes the mean of the clients' prototypes, in which no loss is. Use fedper",
    no_median="a client sends zeros for classes that it does not have, so a class that few clients have would lose its "
    "prototype. Use on_broken='reject' (--on-broken reject) against broken clients",
    no_batch_norm={
        "shared": "each client has a backbone of its own, so statistics have no common meaning. Use 'local'"
    },
)
