"""FedRoD: a global model that is fair to all classes, and a private head for every client (Chen, Chao; ICLR 2022).

Objective: the generic model w = (theta, W) minimizes the sum over clients of alpha_i times the balanced softmax loss.
The private head P_i minimizes l_i and corrects the generic logits for client i. The two objectives are separate: the
gradient of the second does not change w.

Messages: 4d bytes down, 4d up. On the device: the head P_i. A client predicts with z + phi P_i, that is with the model
(theta, W + P_i), where w is the newest generic model. The global score is that of z. A new client gets w and an initial
P_i, and adapts P_i. The local model is (theta_i, W_i + P_i).

log n_i is -1e9 for classes that the client does not have: this gives probability 0 without NaN. P_i starts as a copy of
the initial W, as in PGFed's code, or at 0, the paper's residual (`init`). It is linear; the paper's hypernetwork is not
implemented. Both steps use the same batches. The reported loss is that of z + phi P_i.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientOutput
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer, at_second_rate
from tfpfl.algorithms.parts.local_training import batch_loop, example_weight, local_step, value_and_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_choice, check_rates
from tfpfl.models import tree
from tfpfl.models.heads import check_classes
from tfpfl.models.losses import cross_entropy, logits
from tfpfl.models.weights import Weights

ONLY_CLASSES = (
    "its balanced softmax weighs the logits by how often a client has each class. FedPer and FedAvg with fine-tuning "
    "(fedavg_ft) also have a generic and a personal part, for every kind"
)
NEVER = -1e9  # log n of a class that a client does not have


class Fit(NamedTuple):
    """What a new client carries from epoch to epoch."""

    w: Weights
    p: Any  # P_i
    slots: Any
    given: Any  # (phi [N_i, M], z [N_i, C]): they do not change


def log_frequencies(y, num_labels, dtype):
    """The logarithm of the number of examples of each class in y, `NEVER` for classes without examples: [C]."""
    n = tf.reduce_sum(tf.one_hot(y, num_labels, dtype=dtype), 0)
    return tf.where(n > 0, tf.math.log(tf.maximum(n, 1)), tf.constant(NEVER, dtype))


def generic_loss(head, phi, y, log_n):
    """The balanced softmax loss CE(z + log n_i, y) with z = phi W; its gradient reaches W and, through phi, theta."""
    return cross_entropy(logits(head, phi) + log_n, y)


def private_loss(p, phi, z, y):
    """The loss CE(z + phi P_i, y) of client i's predictions, as a function of P_i only: z and phi are constants."""
    return cross_entropy(z + logits(p, phi), y)


def fedrod(
    model,
    population,
    *,
    eta: float = 0.007,
    eta_p: float | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
    init: str = "copy",
) -> Algorithm:
    """FedRoD: a generic model that is trained to be fair to all classes, and for every client a private head that is
    trained on the client's own class frequencies.

    Update rule:

        client(w):  w_i <- w = (theta, W);  for every mini-batch (x, y), with phi = phi(x; theta_i), z = phi W_i:
                        w_i <- w_i - eta grad_w CE(z + log n_i, y)            the generic loss, a balanced softmax
                        P_i <- P_i - eta_p grad_P CE(z + phi P_i, y)          the private loss; z and phi are held fixed
                    keep P_i, send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j

    theta is the backbone and phi its features, W the generic head, P_i the private one; n_i counts client i's examples
    of every class. S is the cohort, N_i the client's training examples.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the generic model's steps, and the weights of the average, as in `fedavg`.
        eta_p: rate of P_i, >= 0; None for eta, 0 to leave P_i as it is. Its mini-batches, momentum and optimizer are
            the generic model's.
        init: P_i at first: 'copy' (of W in round 0, as in PGFed's code) or 'zeros' (the paper's residual).

    Returns:
        The `Algorithm`. A client keeps P_i and predicts with z + phi P_i.

    Raises:
        InvalidArgument: eta, eta_p or momentum is negative or not finite, or eta_p has no effect beside an optimizer
            object; steps, epochs or batch_size is below 1, or steps and epochs are both given; weighting is neither
            'examples' nor 'uniform'; init is neither 'copy' nor 'zeros'; the model's kind is not 'classification';
            clients have different numbers of classes (this method shares one head) and the population has no
            `num_labels`.

    Source:
        Chen, Chao, ICLR 2022: Fed-RoD with the balanced softmax and a linear personalized head.
    """
    check_classes(model.kind, "FedRoD", ONLY_CLASSES)
    check_choice(init=(init, ("copy", "zeros")))
    second = at_second_rate(client_opt, eta_p=eta_p)
    eta_p = eta if eta_p is None else eta_p
    check_rates(eta=eta, eta_p=eta_p)
    work = {"steps": steps, "epochs": epochs, "batch_size": batch_size}
    rates: dict[str, Any] = {"momentum": momentum, "client_opt": client_opt}
    base = fedavg(model, population, eta=eta, weighting=weighting, **rates, **work)
    generic, private = local_step(eta, **rates), local_step(eta_p, momentum, second, name="eta_p")
    loop, weight, num_labels = batch_loop(**work), example_weight(model, weighting), population.shared_labels()
    one_epoch = batch_loop(epochs=1, batch_size=batch_size)
    optimizer = as_optimizer(second, eta_p, momentum=momentum)

    def client_update(w, p, data):
        log_n = log_frequencies(data.y, num_labels, model.dtype)

        def step(carry, x, y):
            w, p, slots_w, slots_p, _ = carry
            phi, pull_back = model.record(w.theta, x)  # one forward pass for both losses
            z = logits(w.head, phi)
            # with SGD: -eta times the gradient of the one, -eta_p times that of the other
            _, (by_head, by_phi) = value_and_gradient(
                lambda at: generic_loss(*at, y, log_n), (w.head, phi), generic.times
            )
            its_phi = heads.counted(phi)  # a step on a head alone
            loss, by_p = value_and_gradient(lambda p: private_loss(p, its_phi, z, y), p, private.times)
            slots_w, w = generic.step(slots_w, w, Weights(pull_back(by_phi), by_head))
            slots_p, p = private.step(slots_p, p, by_p)
            return w, p, slots_w, slots_p, loss

        w_i, p, _, _, loss = loop(step, (w, p, generic.init(w), private.init(p), tf.zeros([], model.dtype)), data)
        return ClientOutput(tree.subtract(w_i, w), weight(data), p, {"loss": loss})

    def personal(w, p):
        return Weights(w.theta, tree.add(w.head, p))

    def start(w, p, data):
        phi = model.features_in_chunks(w.theta, data.x)
        return Fit(w, p, optimizer.init(p), (phi, logits(w.head, phi)))

    def epoch(fit, data, n):
        def step(carry, given, y):  # on P_i, as in a visit: a decay of W + P_i would be another one
            p, slots = carry
            _, by_p = value_and_gradient(lambda p: private_loss(p, *given, y), p)
            slots, p = optimizer.step(slots, p, by_p)
            return p, slots

        p, slots = one_epoch(step, (fit.p, fit.slots), data._replace(x=fit.given), first=n)
        return fit._replace(p=p, slots=slots)

    return base._replace(
        init_client=lambda info: model.shared_head(num_labels, "zeros" if init == "zeros" else None),
        client_update=client_update,
        personal_model=lambda w, p, data: personal(w, p),
        global_model=lambda w: w,
        local_model=lambda w, output: personal(tree.add(w, output.update), output.state),
        adapt=Adaptation(start, epoch, lambda fit: personal(fit.w, fit.p)),
        shares="backbone",
    )


FEDROD = Method(
    name="fedrod",
    only_classes=ONLY_CLASSES,
    title="FedRoD",
    builder=fedrod,
    head="shared",
    message="broadcast",
    state="head",
    down="d",
    up="d",
    reference="Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022",
    no_objective="its shared model is trained on a balanced softmax, not on the clients' losses. Use fedavg or fedper",
    no_median="a client sends zeros for the head of classes that it does not have, so a class that few clients have "
    "would never be learned. Use fedavg or fedper, or on_broken='reject' (--on-broken reject) against broken clients",
)
