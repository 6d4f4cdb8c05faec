"""kNN-Per: a global model, and at each client the nearest of its own examples (Marfoq, Neglia, Kameni, Vidal:
Personalized Federated Learning through Local Memorization, ICML 2022).

Objective: that of the global model, sum_i alpha_i l_i(w). Personalization trains nothing.

Messages: those of the global model; 4d bytes down and 4d up for FedAvg. On the device: nothing between rounds. The
datastore, the features and labels of the client's training examples, is computed anew for the newest w whenever the
client predicts: old features do not fit to a new backbone. A new client does the same, so it is personal at once, and
its adaptation takes no steps. The local model after a round is that of FedAvg.

The prediction is no linear head: `Algorithm.predictor` makes it, and its outputs are logarithms of probabilities. A
Keras file or a bundle has no place for the datastore, and is refused. `tflite_export.device.neighbours` predicts in the
same way on a device that has the bundle of a FedAvg run.

Paper and code: the paper weighs a neighbour by exp(-distance), where the authors' code (omarfoq/knn-per, client.py and
datastore.py) takes the squared distance, divided by the number of features: kernel='code'. Both have the scale. Each
client chooses lambda_i on its own data. The code scores all lambdas of a grid and leaves the choice to its reader; here
it is the one with most right answers when each training example is predicted by the others (leave one out), and of
several the one with the least loss. The head has seen these examples in training, and they are no neighbours of
themselves, so lambda_i is rather too small than too large. The code's limit of the datastore (`capacity`) is left out:
all examples are kept.
"""

from collections.abc import Callable

import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, check_head_predicts
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import InvalidArgument, check_choice, check_fractions, check_rates, check_whole_number
from tfpfl.models.losses import logits
from tfpfl.models.weights import Head, Weights

KERNELS = ("paper", "code")
GRID = tuple(i / 10 for i in range(11))  # the values of lambda_i that are tried
FLOOR = 1e-12  # the smallest probability of which a logarithm is taken
VOTERS = 512  # examples at a time whose distances to all others are in memory


def votes(phi, keys, labels, num_labels, *, k, scale, kernel, itself=None):
    """The probabilities of the classes among the k nearest keys, float64 [n, K]; zeros where there is no key.

    Args:
        phi: features of the examples to predict, [n, M].
        keys, labels: features [N, M] and labels int32 [N] of the datastore.
        num_labels: K.
        k: the number of neighbours; N if that is less.
        scale, kernel: as in `knn_per`.
        itself: int32 [n], the keys that phi are: an example is no neighbour of itself. None: phi are other examples.
    """
    phi, keys = tf.cast(phi, tf.float64), tf.cast(keys, tf.float64)
    squares = tf.reduce_sum(phi**2, 1)[:, None] - 2 * tf.matmul(phi, keys, transpose_b=True) + tf.reduce_sum(keys**2, 1)
    number = tf.shape(keys)[0]
    if itself is not None:
        own = tf.equal(itself[:, None], tf.range(number)[None])  # in TFF's graphs == would compare objects
        squares = tf.where(own, tf.constant(float("inf"), tf.float64), squares)
        number -= 1
    nearest = tf.math.top_k(-squares, tf.minimum(k, number)).indices
    # The formula above loses digits of small distances. It is good enough to choose, and these are exact.
    near = tf.reduce_sum(tf.square(phi[:, None] - tf.gather(keys, nearest)), 2)
    if kernel == "paper":
        near = tf.sqrt(near) / scale
    else:
        near /= scale * tf.cast(tf.shape(keys)[1], tf.float64)
    weights = tf.exp(near[:, :1] - near)  # as a ratio to the nearest one's: far from all, exp(-near) would be 0
    found = tf.reduce_sum(weights[..., None] * tf.one_hot(tf.gather(labels, nearest), num_labels, dtype=tf.float64), 1)
    return tf.math.divide_no_nan(found, tf.reduce_sum(weights, 1, keepdims=True))


def votes_of_others(keys, labels, num_labels, **how):
    """The `votes` for every key by the other keys, float64 [N, K], in memory for the distances of `VOTERS` keys."""
    number = tf.shape(keys)[0]
    size = tf.minimum(VOTERS, number)
    parts = tf.TensorArray(tf.float64, (number + VOTERS - 1) // VOTERS)

    def body(i, parts):
        rows = tf.minimum(i * VOTERS + tf.range(size), number - 1)  # the last key again, where a part is not full
        found = votes(tf.gather(keys, rows), keys, labels, num_labels, **how, itself=rows)
        return i + 1, parts.write(i, found)

    _, parts = tf.while_loop(lambda i, _: i * VOTERS < number, body, (0, parts), parallel_iterations=1)
    return parts.concat()[:number]


def mixed(of_neighbours, of_head, lam):
    """lambda p_kNN + (1 - lambda) p_h, with p_h in place of p_kNN where there are no neighbours; [..., n, K]."""
    some = tf.reduce_sum(of_neighbours, -1, keepdims=True) > 0
    return lam * tf.where(some, of_neighbours, of_head) + (1 - lam) * of_head


def tuned(of_neighbours, of_head, labels):
    """The lambda of `GRID` with which most examples are right; of several, the one of the least loss: float64 []."""
    grid = tf.constant(GRID, tf.float64)
    p = mixed(of_neighbours, of_head, grid[:, None, None])
    right = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(p, -1, labels.dtype), labels), tf.int32), 1)
    of_label = tf.reduce_sum(p * tf.one_hot(labels, tf.shape(p)[2], dtype=tf.float64), 2)
    losses = -tf.reduce_sum(tf.math.log(tf.maximum(of_label, FLOOR)), 1)
    best = tf.equal(right, tf.reduce_max(right))
    return tf.gather(grid, tf.argmin(tf.where(best, losses, tf.fill(tf.shape(losses), losses.dtype.max))))


def memorized(
    algorithm: Algorithm,
    *,
    k: int = 10,
    lam: float | None = None,
    scale: float = 1.0,
    kernel: str = "paper",
    global_model: Callable | None = None,
) -> Algorithm:
    """Any algorithm whose clients predict with their nearest examples, too; its training does not change.

    Update rule:

        to predict: p(x) = lambda_i p_kNN(x) + (1 - lambda_i) p_h(x), as in `knn_per`; p_h is the personal model's

    Args:
        algorithm: the `Algorithm` that trains the model, of classes, and whose clients predict with a head.
        k, lam, scale, kernel: as in `knn_per`.
        global_model: (message) -> the algorithm's model, where it has one for everyone: then that is scored as well.

    Returns:
        The `Algorithm`, with a `predictor` and another `adapt`: a new client takes no steps.

    Raises:
        InvalidArgument: as `knn_per` says of k, lam, scale and kernel; or the algorithm has a `predictor` already.

    Source:
        Marfoq, Neglia, Kameni, Vidal, ICML 2022, algorithm 1.
    """
    check_head_predicts(algorithm, "memorized")
    check_choice(kernel=(kernel, KERNELS))
    check_rates(scale=scale)
    check_whole_number(1, k=k)
    if scale == 0:
        raise InvalidArgument("scale must be greater than 0, found 0: distances are divided by it")
    if lam is not None:
        check_fractions(lam=lam)
    model, how = algorithm.model, {"k": k, "scale": scale, "kernel": kernel}

    def probabilities(head: Head, phi):
        return tf.nn.softmax(tf.cast(logits(head, phi), tf.float64))

    def with_datastore(weights: Weights, data) -> Callable:
        theta, head = weights
        keys, num_labels = model.features_in_chunks(theta, data.x), tf.shape(head.bias)[0]
        if lam is None:
            of_others = votes_of_others(keys, data.y, num_labels, **how)
            lam_i = tuned(of_others, probabilities(head, keys), data.y)
        else:
            lam_i = tf.constant(lam, tf.float64)

        def outputs(phi):
            p = mixed(votes(phi, keys, data.y, num_labels, **how), probabilities(head, phi), lam_i)
            z = tf.cast(tf.math.log(tf.maximum(p, FLOOR)), phi.dtype)
            return tf.ensure_shape(z, [None, head.bias.shape[0]])

        return outputs

    def predictor(message, state, data):
        return with_datastore(algorithm.personal_model(message, state, data), data)

    adapt = Adaptation(
        start=algorithm.personal_model,
        epoch=lambda weights, data, n: weights,
        model=lambda weights: weights,
        predictor=with_datastore,
    )
    return algorithm._replace(
        predictor=predictor,
        global_model=global_model or algorithm.global_model,
        adapt=adapt,
        shares="backbone" if algorithm.shares_backbone else None,
    )


def knn_per(
    model,
    population,
    *,
    k: int = 10,
    lam: float | None = None,
    scale: float = 1.0,
    kernel: str = "paper",
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
) -> Algorithm:
    """kNN-Per: FedAvg, and each client mixes the shared model's prediction with that of its own nearest examples.

    Update rule:

        client(w):  w_i = SGD from w on l_i;  send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j
        to predict: p(y | x) = lambda_i p_kNN(y | x) + (1 - lambda_i) p_w(y | x)
                    p_w      = softmax(W phi(x))
                    p_kNN(y) = sum_{n near x, y_n = y} e_n / sum_{n near x} e_n,   e_n = exp(-d_n / scale)
                    d_n      = |phi(x) - phi(x_n)|;  near x are the k of the N_i training examples with the least d_n

    w = (theta, W) is a whole model, theta the backbone, phi its features and W the head; l_i is client i's mean
    cross-entropy on its N_i training examples. S is the cohort of the round. lambda_i is that of 0, 0.1, ..., 1 with
    which the most of the client's training examples are predicted right, each by its k nearest among the N_i - 1 others
    and by p_w; of several, the one with the least mean of -log max(p(y | x), 1e-12) over them; of several still, the
    smallest. With N_i = 1 there are no others, and lambda_i is 0. Distances, weights and probabilities are computed in
    float64. Of equal distances the example that stands first is nearer, and of equal probabilities the class that
    stands first is predicted. The outputs are log max(p, 1e-12).

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        k: the number of neighbours, >= 1; all examples, if the client has fewer. The paper has 10.
        lam: lambda_i for every client, in [0, 1]: 0 is the shared model, 1 the neighbours alone. None: each client
            chooses its own.
        scale: of distances, > 0, in the unit of the features.
        kernel: the weight e_n of a neighbour: 'paper', exp(-d_n / scale), or 'code', exp(-d_n^2 / (M scale)) with the
            number of features M, as in the authors' code.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.

    Returns:
        The `Algorithm`. A client keeps nothing and predicts with p.

    Raises:
        InvalidArgument: k is below 1; lam is outside [0, 1]; scale is not positive or not finite; kernel or weighting
            is not one of the values above; eta or momentum is negative or not finite; steps, epochs or batch_size is
            below 1, or steps and epochs are both given; clients have different numbers of classes (this method shares
            one head) and the population has no `num_labels`; the labels are no classes.

    Source:
        Marfoq, Neglia, Kameni, Vidal, ICML 2022, algorithm 1.
    """
    base = fedavg(
        model,
        population,
        eta=eta,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        momentum=momentum,
        client_opt=client_opt,
        weighting=weighting,
    )
    return memorized(base, k=k, lam=lam, scale=scale, kernel=kernel, global_model=lambda w: w)


KNN_PER = Method(
    name="knn_per",
    title="kNN-Per",
    builder=knn_per,
    head="shared",
    message="broadcast",
    state="nothing",
    down="d",
    up="d",
    reference="Marfoq, Neglia, Kameni, Vidal: Personalized Federated Learning through Local Memorization, ICML 2022",
    only_classes="its neighbours vote for classes. Use fedavg_ft",
)
