"""Layer-wise regularization: a penalty keeps every neuron near the global one; personal models take it in slowly.

Reference: the thesis on layer-wise regularization and personalized mixing. Its method chapter is lost. Known are: a
penalty on every layer and neuron for dissimilarity and distance between local and global weights, partial work as in
FedProx, and two kinds of personal models that take in the global one slowly. The formulas are a reconstruction.

Objective: client i minimizes l_i(w) + R(w; w_t), where R is a sum over layers and their neurons. A neuron is the vector
of the weights into one output unit and its bias: a column of a kernel, or a filter. Units are found by a kernel's last
axis, as Dense and Conv layers have it. The kernel of a depthwise or transposed convolution is grouped by that axis too,
which is not the output there, and the two kernels of a recurrent layer are two layers; the bias of a GRU, which has two
rows, is a third.

Messages: 4d bytes down, 4d up. On the device: the whole model p_i. At the first visit p_i is w_t, which is then trained
(PM-A), or w_i (PM-B). A new client predicts with w_t and adapts it as PM-A does at its first visit. The local model is
p_i.

Decisions: cos(a, b) = (<a, b> + e) / sqrt((|a|^2 + e)(|b|^2 + e)) with e = 1e-12; the e in the numerator makes R(w; w)
exactly 0. A neuron that is 0 in the global model has no direction, so its 1 - cos counts as 0. A vector without a
kernel before it (such as a scale of the input) is one neuron. A straggler does only a part of both trainings. The
additive penalty with l_cos = 0 is FedProx with mu = l_2, and with l_2 = 0 too it is FedAvg. For the same sequence of
w_t, the p_i of PM-A with l_cos = 0 and kappa = 1 are those of Ditto with init='first_broadcast'; but Ditto's own w_t
has no penalty.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.adaptation import adaptation, near
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import example_weight, local_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import InvalidArgument, check_choice, check_fractions, check_penalty, check_rates, warn_user
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights

EPSILON = 1e-12


class Personal(NamedTuple):
    """What a client keeps: its personal model."""

    p: Weights  # p_i
    started: Any  # bool []: the client had a visit; before the first one p has no meaning


def neurons(weights: Weights) -> list:
    """The layers as matrices [weights into a unit, units]; biases and scales belong to the kernel before them."""
    layers = []
    for w in weights.theta:
        if w.shape.rank >= 2:
            layers.append([tf.reshape(w, [-1, w.shape[-1]])])
        elif w.shape.rank == 1 and layers and w.shape[0] == layers[-1][0].shape[1]:
            layers[-1].append(w[None])
        else:
            layers.append([tf.reshape(w, [-1, 1])])
    layers.append([weights.head.kernel, weights.head.bias[None]])
    return [tf.concat(parts, 0) for parts in layers]


def dissimilarity(w, wg):
    """1 - cos between the columns of two matrices; 0 for columns of wg that are 0: [units]."""
    squared, squared_g = tf.reduce_sum(w * w, 0), tf.reduce_sum(wg * wg, 0)
    norms = tf.sqrt((squared + EPSILON) * (squared_g + EPSILON))
    return tf.where(squared_g > 0, 1 - (tf.reduce_sum(w * wg, 0) + EPSILON) / norms, tf.zeros_like(squared))


def penalty(weights, anchor, *, kind, l_cos, l_2, layer_weights):
    """The penalty R(weights; anchor) of `layerwise`: float []."""
    total = tf.zeros([], weights.head.bias.dtype)
    for w, wg in zip(neurons(weights), neurons(anchor), strict=True):
        distance = l_2 / 2 * tf.reduce_sum(tf.square(w - wg), 0)
        d = dissimilarity(w, wg)
        each = l_cos * d + distance if kind == "additive" else d * distance
        total += tf.reduce_mean(each) if layer_weights == "mean" else tf.reduce_sum(each)
    return total


def mixed(kappa, state, newest):
    """The mixture kappa p_i + (1 - kappa) newest; at the client's first visit, `newest`."""
    mix = tree.add_scaled(tree.scale(kappa, state.p), 1 - kappa, newest)
    return tree.where(state.started, mix, newest)


def layerwise(
    model,
    population,
    *,
    penalty_kind: str = "additive",
    l_cos: float = 0.1,
    l_2: float = 0.01,
    layer_weights: str = "sum",
    scheme: str = "pm_b",
    kappa: float = 0.5,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    steps_p: int | None = None,
    epochs_p: int | None = None,
    straggler: float = 0.0,
    implicit_prox: bool = False,
    weighting: str = "uniform",
) -> Algorithm:
    """Layer-wise regularization: a penalty keeps every neuron near the global one, in direction and in distance;
    personal models take in the global model slowly.

    Update rule:

        additive:  R(w; wg) = sum_l c_l sum_n [ l_cos (1 - cos(w_ln, wg_ln)) + (l_2 / 2) |w_ln - wg_ln|^2 ]
        gated:     R(w; wg) = sum_l c_l sum_n (l_2 / 2) (1 - cos(w_ln, wg_ln)) |w_ln - wg_ln|^2

        client(w_t):  w_i = SGD from w_t on l_i + R(.; w_t); a straggler does a part of it, as in FedProx
                      PM-A, mix then train:  p_i <- SGD from kappa p_i + (1 - kappa) w_t on l_i + R(.; w_t)
                      PM-B, train then mix:  p_i <- kappa p_i + (1 - kappa) w_i
                      keep p_i, send w_i - w_t
        server:       w <- w + (1/r) sum_{i in S} (w_i - w)                        stragglers included

    w, w_t and p_i are whole models, w_ln neuron n of layer l (the weights into one output unit, and its bias), wg =
    w_t; l_i is client i's mean cross-entropy. S is the cohort of r clients.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        penalty_kind: R is 'additive' or 'gated' (aligned neurons are not pulled; l_cos is unused).
        l_cos, l_2: weights of dissimilarity and of distance, >= 0.
        layer_weights: c_l: 'sum' (1) or 'mean' (1 / the neurons of the layer).
        scheme: 'pm_a' (mix, then train) or 'pm_b' (train, then mix, which costs no computation).
        kappa: the personalization degree, in [0, 1]: how much of p_i survives a visit.
        eta, steps, epochs, batch_size, momentum, client_opt: rate, amount, mini-batches, momentum and optimizer of the
            local steps, as in `fedavg`.
        steps_p, epochs_p: PM-A's work on p_i, one of the two, >= 1; default: as much as on w_i.
        straggler: the probability in [0, 1] that a client does only a part of its work; default 0.
        implicit_prox: take an implicit step on the l_2 penalty, which is stable for every coefficient; only for the
            additive penalty with layer_weights='sum'.
        weighting: a client's weight in the average: 'uniform' (1 / r) or 'examples' (q_i = N_i / sum_{j in S} N_j).

    Returns:
        The `Algorithm`. A client keeps p_i and predicts with it; before its first visit, with w.

    Raises:
        InvalidArgument: l_cos, l_2, eta or momentum is negative or not finite; kappa or straggler is outside [0, 1];
            steps, epochs or batch_size is below 1, or steps and epochs are both given; the same for steps_p and
            epochs_p; penalty_kind, layer_weights, scheme or weighting is not one of the values above; implicit_prox is
            given for another penalty; clients have different numbers of classes (this method shares one head) and the
            population has no `num_labels`. Warns if eta l_2 >= 2 and the step is explicit: such steps diverge; and if
            PM-B is given work on p_i, which it does not train.

    Source:
        The thesis on layer-wise regularization and personalized mixing; its method chapter is lost, the formulas are a
        reconstruction.
    """
    check_choice(
        penalty_kind=(penalty_kind, ("additive", "gated")),
        layer_weights=(layer_weights, ("sum", "mean")),
        scheme=(scheme, ("pm_a", "pm_b")),
    )
    check_fractions(kappa=kappa)
    check_rates(l_cos=l_cos)
    check_penalty(eta, implicit_prox, l_2=l_2)
    if implicit_prox and (penalty_kind, layer_weights) != ("additive", "sum"):
        raise InvalidArgument(
            "implicit_prox needs one quadratic penalty: penalty_kind='additive' with layer_weights='sum'"
        )
    solver: dict[str, Any] = {"eta": eta, "batch_size": batch_size, "momentum": momentum, "client_opt": client_opt}
    base = fedavg(model, population, steps=steps, epochs=epochs, weighting=weighting, **solver)
    if steps_p is None and epochs_p is None:
        steps_p, epochs_p = steps, epochs
    elif scheme == "pm_b":
        warn_user("steps_p and epochs_p are PM-A's work on p_i; with scheme='pm_b' p_i is not trained: leave them out")
    solver |= {"straggler": straggler, "prox": l_2 if implicit_prox else 0.0, "implicit_prox": implicit_prox}
    solve = local_solver(steps=steps, epochs=epochs, **solver)
    solve_p = local_solver(steps=steps_p, epochs=epochs_p, suffix="_p", name="eta", **solver)
    weight, objective = example_weight(model, weighting), client_loss(model)
    explicit_l_2 = 0.0 if implicit_prox else l_2
    coefficients = {"kind": penalty_kind, "l_cos": l_cos, "l_2": explicit_l_2, "layer_weights": layer_weights}

    def client_update(w, state, data):
        def near_w(v):
            return penalty(v, w, **coefficients)

        w_i, loss = solve(objective, w, data, anchor=w, penalty=near_w)
        if scheme == "pm_a":
            p, loss = solve_p(objective, mixed(kappa, state, w), data, anchor=w, penalty=near_w)
        else:
            p = mixed(kappa, state, w_i)
        return ClientOutput(tree.subtract(w_i, w), weight(data), Personal(p, tf.constant(True)), {"loss": loss})

    return base._replace(
        init_client=lambda info: Personal(base.init_server(), tf.constant(False)),
        client_update=client_update,
        personal_model=lambda w, state, data: tree.where(state.started, state.p, w),
        global_model=lambda w: w,
        local_model=lambda w, output: output.state.p,
        adapt=adaptation(
            model,
            lambda w, state, data: w,
            as_optimizer(client_opt, eta, momentum=momentum),
            batch_size=batch_size,
            penalty=lambda v, w: penalty(v, w, **coefficients),
            then=near(eta, l_2, True)["then"] if implicit_prox else None,
        ),
        shares=None,
    )


LAYERWISE = Method(
    name="layerwise",
    title="Layer-wise regularization",
    builder=layerwise,
    head="shared",
    message="broadcast",
    state="whole model",
    down="d",
    up="d",
    reference="the thesis on layer-wise regularization and personalized mixing, reconstructed",
    presets={"pm_a": {"scheme": "pm_a"}, "pm_b": {"scheme": "pm_b"}},
    no_batch_norm=SEVERAL_MODELS,
)
