"""Fed3R: one ridge regression for all clients in closed form, which each client then refines (Fani, Camoriano, Caputo,
Ciccone: Accelerating Heterogeneous Federated Learning with Closed-Form Classifiers, ICML 2024).

Objective: min_W sum_i sum_n |W^T a_n - y_n|^2 + lambda |W|^2 over all examples of all clients, a = (phi(x; theta^0), 1)
and one-hot y; then l_i for each client. theta^0 never changes, so take a backbone that is trained already.

Messages: 4h bytes down (the backbone is known to all), 4 (h + m^2) bytes up with m = M + 1, in every visit; only the
first visit's sums count. On the device: whether it has been counted, one bit. A new client gets the head and refines
it, as all clients do; nothing of it is counted. The local model after a round is the model that came.

The sums do not depend on who comes when, or how often, and are those of features without Dropout's masks: when all
clients have come, the head is that of a ridge regression on the data of all, up to the rounding of what they send.
Clients that never come are missing in it. The server needs only the sum over a cohort, as secure aggregation gives it;
an update that is clipped is no sum any more.

Paper and code: the authors' code (Erosinho13/Fed3R, fed3r.py) also penalizes the bias, by lambda, and scales every
class's weights to norm 1, so that frequent classes do not have the longer ones; the bias is divided by the same norm
(`normalize`). The softmax of fine-tuning has a temperature of 0.1. Here the head is divided by it, which changes no
prediction of a class, and the steps of the refinement are those on the head before it is divided: with 0.1, a hundred
times as long as plain steps. The paper's random features (Fed3R-RF) are a backbone's matter, and left out. Its
fine-tuning (Fed3R+FT) trains the shared model on: take this head as the first one of another method,
`model.with_initial_head(head)`. The refinement by each client is that of the authors' later paper (Resource-Efficient
Personalization in Federated Learning with Closed-Form Classifiers, IEEE Access 2025), and so are `local_labels`, its
"only local labels". There all weights are trained, `part='full'`.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.finetune import finetuned
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import InvalidArgument, check_rates
from tfpfl.models import passes, tree
from tfpfl.models.losses import logits
from tfpfl.models.weights import Head, Weights

MISSING = -1e4  # the bias of a class that a client does not have, with `local_labels`: its probability is 0


class Sums(NamedTuple):
    """Sums over examples. The update has those of one client, the server's state those of all, in float64."""

    gram: Any  # [M + 1, M + 1]: sum a a^T
    moments: Any  # [M + 1, C]: sum a y^T


class Server(NamedTuple):
    """The server's state: the sums over all clients that have come, and the head that they give."""

    sums: Sums
    head: Head  # the solution


def sums_of(phi, targets) -> Sums:
    """The `Sums` of features [N, M] and targets [N, C]."""
    a = tf.concat([phi, tf.ones_like(phi[:, :1])], 1)
    return Sums(tf.matmul(a, a, transpose_a=True), tf.matmul(a, targets, transpose_a=True))


def ridge(sums: Sums, lam, normalize=False) -> Head:
    """The head of the ridge regression, in float64: (gram + lam 1) [kernel; bias] = moments.

    Clients send float32. Its rounding can make eigenvalues of gram, which are 0 or more, smaller than -lam, if features
    are large or many. Then the negative ones count as 0.

    Args:
        sums: over all examples, float64.
        lam: the weight of |W|^2, > 0; the bias is a part of W.
        normalize: divide the weights and the bias of every class by the norm of its weights. A class without weights
            keeps zeros.
    """
    matrix = sums.gram + lam * tf.eye(tf.shape(sums.gram)[0], dtype=tf.float64)
    factor = tf.linalg.cholesky(matrix)

    def without_negatives():
        values, vectors = tf.linalg.eigh(sums.gram)
        right = tf.matmul(vectors, sums.moments, transpose_a=True) / (tf.maximum(values, 0.0) + lam)[:, None]
        return tf.matmul(vectors, right)

    definite = tf.reduce_all(tf.math.is_finite(factor))
    found = tf.cond(definite, lambda: tf.linalg.cholesky_solve(factor, sums.moments), without_negatives)
    kernel, bias = found[:-1], found[-1]
    if normalize:
        norms = tf.norm(kernel, axis=0)
        kernel, bias = tf.math.divide_no_nan(kernel, norms), tf.math.divide_no_nan(bias, norms)
    return Head(kernel, bias)


def fed3r(
    model,
    population,
    *,
    lam: float = 0.01,
    normalize: bool = True,
    temperature: float = 0.1,
    local_labels: bool = False,
    eta_ft: float = 0.001,
    steps_ft: int | None = None,
    epochs_ft: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    part: str = "head",
) -> Algorithm:
    """Fed3R: the clients' sums of features give the head of one ridge regression, which each client then refines.

    Update rule:

        client:     a_n = (phi(x_n; theta^0), 1);   at its first visit send  sum_n a_n a_n^T  and  sum_n a_n y_n^T,
                    later zeros
        server:     A <- A + the cohort's sum_n a_n a_n^T;   B <- B + the cohort's sum_n a_n y_n^T
                    (W, w) = (A + lambda 1)^-1 B
                    W_c, w_c <- W_c / |W_c|, w_c / |W_c|  for every class c        with normalize; 0 where W_c = 0
                    W, w <- W / temperature, w / temperature
        to predict: v <- (theta^0, W, w);  v <- v - eta_ft grad l_i(v), for E_ft epochs or steps;  predict with v
                    with eta_ft / temperature^2 in place of eta_ft for the head

    theta^0 is the backbone as it came, phi its M features, y the one-hot label of C classes, W [M, C] the kernel of the
    head and w [C] its bias, the last row of the solution; l_i is client i's mean cross-entropy on its N_i training
    examples. A and B start at zero and are kept in float64, and the head of round 0 is zero. A client sends in the
    dtype of the model; what rounding makes of A's eigenvalues is mended, see `ridge`.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        lam: lambda, > 0; it acts on the bias, too.
        normalize: whether every class's weights get the norm 1.
        temperature: what the head is divided by, > 0; it counts for the loss and the refinement, not for who is right
            before it.
        local_labels: whether a client's classes are those of its training examples only: the bias of the others is
            -10,000 before the refinement.
        eta_ft: learning rate of the refinement by a client, >= 0; the head's before it is divided. The authors have
            0.01 with a pretrained network; with large features that is too much.
        steps_ft, epochs_ft: E_ft, the refinement's mini-batches or passes; one of the two, >= 0, 0 for none. Default:
            50 steps.
        batch_size, momentum: of the refinement, as in `fedavg`.
        part: what is refined: 'head' (on cached features), 'full' (all weights) or 'body' (the backbone).

    Returns:
        The `Algorithm`. A client keeps one bit; v is thrown away after the prediction. The server's head is
        `algorithm.global_model(algorithm.message(server)).head`.

    Raises:
        InvalidArgument: lam or temperature is not positive or not finite; eta_ft or momentum is negative or not finite;
            batch_size is below 1; steps_ft or epochs_ft is negative, or both are given; part is not 'full', 'head' or
            'body'; clients have different numbers of classes (this method shares one head) and the population has no
            `num_labels`; the labels are no classes.

    Source:
        Fani, Camoriano, Caputo, Ciccone, ICML 2024, and their code; the refinement is that of their paper in IEEE
        Access, 2025.
    """
    check_rates(lam=lam, temperature=temperature, eta_ft=eta_ft, momentum=momentum)
    for name, value in (("lam", lam), ("temperature", temperature)):
        if value == 0:
            raise InvalidArgument(f"{name} must be greater than 0, found 0")
    num_labels, rows = population.shared_labels(), model.num_features + 1

    def init_server():
        gram, moments = (tf.zeros([rows, columns], tf.float64) for columns in (rows, num_labels))
        return Server(Sums(gram, moments), model.shared_head(num_labels, "zeros"))

    def shared(head):
        return Weights(model.theta(), head)

    def client_update(head, counted, data):
        with passes.without_masks():  # no step is taken, and Dropout's masks would be in the sums for ever
            phi = model.features_in_chunks(model.theta(), data.x)
        loss = model.kind.loss(logits(head, phi), data.y)
        sums = sums_of(phi, tf.one_hot(data.y, num_labels, dtype=model.dtype))
        update = tree.where(counted, tree.zeros_like(sums), sums)
        return ClientOutput(update, tf.ones([], model.dtype), tf.constant(True), {"loss": loss})

    def server_update(server, added):
        sums = tf.nest.map_structure(lambda a, b: a + tf.cast(b, tf.float64), server.sums, added)
        head = tree.scale(1 / temperature, ridge(sums, lam, normalize))
        return Server(sums, tf.nest.map_structure(lambda w: tf.cast(w, model.dtype), head))

    def personal_model(head, counted, data):
        if local_labels:
            own = tf.reduce_max(tf.one_hot(data.y, num_labels, dtype=model.dtype), 0)
            head = head._replace(
                bias=tf.where(own > 0, head.bias, tf.fill(tf.shape(own), tree.as_dtype(MISSING, own.dtype)))
            )
        return shared(head)

    base = Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=lambda info: tf.constant(False),
        message=lambda server: server.head,
        client_update=client_update,
        server_update=server_update,
        personal_model=personal_model,
        local_model=lambda head, output: shared(head),
        aggregate="sum",
        shares="backbone" if local_labels else "model",
    )
    work: dict[str, Any] = {"steps_ft": steps_ft, "epochs_ft": epochs_ft, "batch_size": batch_size}
    steps = before_division(as_optimizer("sgd", eta_ft, momentum=momentum), temperature)
    return finetuned(base, part=part, client_opt=steps, global_model=shared, **work)


def before_division(optimizer: Optimizer, temperature: float) -> Optimizer:
    """The optimizer whose steps on a head W / temperature are those that it would take on W.

    With W = temperature V, the gradient of W is that of V / temperature, and V moves by what W moves / temperature.
    """

    def step(slots, values, gradient):
        if isinstance(values, Weights):
            gradient = gradient._replace(head=tree.scale(1 / temperature**2, gradient.head))
        elif isinstance(values, Head):
            gradient = tree.scale(1 / temperature**2, gradient)
        return optimizer.step(slots, values, gradient)

    return Optimizer(optimizer.init, step)


FED3R = Method(
    name="fed3r",
    title="Fed3R",
    builder=fed3r,
    head="shared",
    message="broadcast",
    state="one bit",
    evaluates="fine-tuned",
    down="h",
    up="h + (M+1)*(M+1)",
    reference="Fani, Camoriano, Caputo, Ciccone: Accelerating Heterogeneous Federated Learning with Closed-Form "
    "Classifiers, ICML 2024",
    only_classes="its outputs are logits of classes. For numbers, use pflego with inner_opt='exact', which solves for "
    "each client's head",
    no_server_opt="its server solves a linear system, and takes no steps. Use fedavg for steps",
    no_client_opt="its clients take no steps in training. Use eta_ft and momentum for their refinement",
    no_objective="its server solves for the head on the examples of all clients, each counted once. Use fedavg",
    no_head_init="its first head is 0, and the next one is the solution",
    no_median="a client sends its sums once and zeros afterwards, and the head is that of all sums together. Use "
    "on_broken='reject' (--on-broken reject) against broken clients",
    no_compress="its server solves a linear system with the clients' sums, and rounding them to 8 bits changes the "
    "solution beyond use. Leave it out",
    no_batch_norm=dict.fromkeys(("local", "shared"), "its backbone is never trained. Use 'frozen'"),
)
