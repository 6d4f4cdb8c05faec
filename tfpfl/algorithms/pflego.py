"""PFLEGO: backbone and heads trained by exact, distributed SGD (Nikoloutsopoulos et al., arXiv 2202.09848).

Objective (eq. 1): L(theta, W_1..W_I) = sum_i alpha_i l_i(W_i, theta), where l_i is the mean loss of client i:
cross-entropy for classes, half the squared error for regression, ... (`tfpfl.models.heads`).

Messages: 4b bytes down (theta), 4b up (its gradient). On the device: the head W_i, and its labels. A new client gets
the current theta and an initial head. It adapts only the head, with one inner step per epoch.

theta does not change between the first pass and the joint gradient. So the joint gradient can use the cached features:
the recorded forward pass is pulled back with the gradient of the features, E W_i^T / N_i; E = dl/dz is P - Y for
classes. This takes one forward and one backward pass for every tau; the paper counts two and one. `on_features` is the
work between the two passes.

The paper and its authors' code differ. The paper prints eq. (3), whose head step has no alpha_i, and says that it
equals eq. (5), which has it (`rule`). The code weights clients by N_i over the *sampled* clients, and also multiplies
by I/r (`weighting`). In the paper r is the size of every round, or its expectation. The code takes the number of
clients that came. Here it is the expected number, because the actual one biases the step if sampling is binomial. While
clients are away, cohorts are smaller in the same proportion (`data.cohorts`), so I / r still fits. If clients drop out
with known probabilities (`population.arrival`), what arrives is divided by the probability to arrive, so that the step
stays unbiased. The code does not restore a head if the inner steps have raised its loss (`safeguard`).

The preset 'code' takes these decisions from the authors' code, and its distribution of first weights (`init`). It does
not give the same numbers, because the rest of a run differs: (1) With sampling 'range' or 'binomial', the code divides
by the number of clients that came, the preset by the expected number; with 'fixed' these are the same. (2) The code's
rounds have int(I x fraction) clients, in floating point: 28 of 100 for 0.29, here 29. (3) The code trains on all
training examples; a run here sets a tenth aside for validation, except with --validation 0. With the same split, first
weights and cohorts the numbers are the same (`tests/algorithms/test_truth.py`).
"""

from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientOutput, OnePass
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import arrival_of, one_pass_update
from tfpfl.algorithms.parts.objectives import emphasis
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.parts.schedules import paced, rate
from tfpfl.checks import InvalidArgument, check_choice, check_rates
from tfpfl.models import tree
from tfpfl.models.heads import CLASSIFICATION, check_curvature
from tfpfl.models.split import HEAD_INITS
from tfpfl.models.weights import Weights

LAST = 20  # the rounds that a warning about the heads' steps looks at
OFTEN = 0.2  # it is given if more than this share of the examples is concerned
SOLVERS = ("newton", "exact")  # inner problems that are solved without a rate


class Server(NamedTuple):
    """The server's state: theta, and the state of its optimizer."""

    theta: tuple
    slots: tuple


def inner_steps(head, phi, targets, steps, inner, safeguard, kind=CLASSIFICATION):
    """Takes `steps` inner steps W_i <- W_i - beta grad_W l_i on the cached features.

    Args:
        inner: the optimizer; 'newton'; or 'exact' for the minimum, whatever `steps` is.
        safeguard: keep the old W_i if the steps have raised l_i.
        kind: the kind of the head.

    Returns:
        (W_i, l_i at this W_i, the errors dl/dz / N_i at this W_i, whether this is the old W_i because the steps had
        raised l_i by more than rounding does).
    """
    never = tf.zeros([], tf.bool)
    if inner == "exact":
        new = heads.fit_exact(head, phi, targets, kind)
    elif not steps:
        return head, *heads.loss_and_errors(head, phi, targets, kind), never
    elif inner == "newton":
        new = heads.fit_newton(head, phi, targets, steps, kind)
    else:
        new = heads.fit(head, phi, targets, steps, inner, kind)
    after = (new, *heads.loss_and_errors(new, phi, targets, kind))
    if not safeguard:
        return *after, never
    before = (head, *heads.loss_and_errors(head, phi, targets, kind))
    return *tree.where(after[1] <= before[1], after, before), was_raised(before[1], after[1])


def was_raised(before, after):
    """Whether a step has raised a loss by more than rounding does, which decides at a minimum; NaN was raised.

    What counts is more than a thousandth and 1e-6, so that losses below 1e-6 count as equal.
    """
    return tf.logical_not(after - before <= 1e-3 * tf.abs(before) + 1e-6)


def pflego(
    model,
    population,
    *,
    tau: int = 50,
    beta: float = 0.007,
    rho: float = 0.001,
    rule: str = "eq3",
    weighting: str = "alpha",
    server_opt: str | Optimizer = "adam",
    inner_opt: str | Optimizer = "gd",
    safeguard: bool = True,
    head_init: str | None = None,
    head_rate: str = "rho",
    recompute: bool = False,
    chunk: int | None = None,
) -> Algorithm:
    """PFLEGO: a shared backbone and private heads, trained together by exact, distributed SGD: a client fits its head,
    then takes one joint gradient step. The defaults are the preset 'paper'. The preset 'code' has the decisions of the
    authors' code; cohort sizes and the validation examples still differ (see the file's docstring).

    Update rule:

        client(theta):  Phi = phi(X_i; theta), once
                        tau - 1 times:  W_i <- W_i - beta grad_W l_i          on the cached Phi, in closed form
                        gW, gT = grad l_i(W_i, theta)                         both at the same point
                        W_i <- W_i - rho (I/r) c_i gW                         or at another rate: `head_rate`
                        send gT
        server:         theta <- optimizer(theta, (I/r) sum_{i in S} a_i gT_i)

    theta is the shared backbone, Phi its features on client i's N_i training examples, W_i client i's own head, l_i its
    mean loss (of its kind: cross-entropy for classes). S is the cohort; r of I clients are in it, in expectation.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        tau: local steps, >= 1, of which tau - 1 are on the head alone; 1 is plain SGD on all parameters.
        beta: rate of these tau - 1 steps, >= 0 (unused with inner_opt='newton' and 'exact').
        rho: rate of the joint step, >= 0: of theta's optimizer and of the head's last step.
        rule: 'exact' (c_i = alpha_i = N_i / N over all clients, eq. 5: the step is an unbiased gradient step) or 'eq3'
            (c_i = 1, eq. 3).
        weighting: 'alpha' (a_i = alpha_i, eq. 4) or 'sampled' (a_i = N_i / sum_{j in S} N_j, as the authors' code
            does).
        server_opt: theta's optimizer: 'sgd', 'momentum' (0.9), 'adam', 'adamw', 'adagrad' or 'yogi', with the rate rho.
            In Python also an optimizer of Keras, TFF or tfpfl, which has a rate of its own.
        inner_opt: of the tau - 1 steps: 'gd', 'momentum', 'adam' or 'newton' (damped, conjugate gradients); any will do
            that lowers l_i. For regression also 'exact': the head of least error in place of the tau - 1 steps, which
            is tau = infinity for the price of one solve. In Python also an optimizer.
        safeguard: restore W_i where the inner steps raised l_i.
        head_init: how a client's head starts: 'glorot', 'uniform01' or 'zeros' (see `SplitModel`); None for the model's
            `head_init`.
        head_rate: the rate of the head's last step: 'rho' (rho (I/r) c_i, as in the paper), 'beta', or 'safe': that of
            'rho', but at most 1 / L_i. L_i is the smoothness constant of l_i as a function of W_i, from a few products
            with the cached features (`linear_head.smoothness`). The paper's condition for convergence, rho < 2 r / (L
            I), is rho (I/r) < 2 / L. Beyond it a step may raise l_i. theta's step is the same for all three; with
            'beta' and 'safe' the step on (theta, W) is no longer one gradient step at one rate.
        recompute: run the forward pass twice instead of keeping its activations: less memory, more time.
        chunk: run the forward pass twice, for at most this many examples at a time, >= 1, which bounds the memory; None
            for all at once.

    Returns:
        The `Algorithm`. A client keeps W_i and predicts with (theta, W_i).

    Raises:
        InvalidArgument: tau or chunk is below 1; beta or rho is negative or not finite; rule, weighting, server_opt,
            inner_opt, head_init or head_rate is not one of the values above; head_rate is 'safe' and the kind of the
            heads is 'poisson' or 'quantile', whose curvature has no bound; or recompute or chunk is given and the model
            has batch_norm 'local' or 'shared'.

    Source:
        Nikoloutsopoulos, Koutsopoulos, Titsias, arXiv 2202.09848: objective in eq. (1), steps in eqs. (3) to (5).
    """
    check_choice(
        rule=(rule, ("exact", "eq3")),
        weighting=(weighting, ("alpha", "sampled")),
        inner_opt=(inner_opt if isinstance(inner_opt, str) else "gd", ("gd", "momentum", "adam", *SOLVERS)),
        head_init=(head_init or model.head_init, HEAD_INITS),
        head_rate=(head_rate, ("rho", "beta", "safe")),
    )
    if head_rate == "safe":
        heads.check_smooth(model.kind, "head_rate='safe'")
    if inner_opt == "newton":
        check_curvature(model.kind, "inner_opt='newton'")
    if inner_opt == "exact":
        heads.check_exact(model.kind)
    if tau < 1:
        raise InvalidArgument(f"tau must be at least 1 (the joint step), found {tau}")
    if chunk is not None and chunk < 1:
        raise InvalidArgument(f"chunk must be at least 1 example, found {chunk}")
    if (recompute or chunk) and model.batch_statistics:
        raise InvalidArgument(
            f"with batch_norm={model.batch_norm!r}, the statistics of all examples of a step normalize, so their "
            f"features cannot be computed in parts or again; found recompute={recompute}, chunk={chunk}. Leave "
            "recompute and chunk out, or use batch_norm='frozen'"
        )
    check_rates(beta=beta, rho=rho)
    server_optimizer = paced(as_optimizer(server_opt, rho, what="server_opt"), "rho")
    inner: Any = inner_opt
    if inner not in SOLVERS:
        inner = paced(as_optimizer("sgd" if inner_opt == "gd" else inner_opt, beta, what="inner_opt"), "beta")
    scale = population.num_clients / population.clients_per_round
    arrival = arrival_of(population, model.dtype)

    def init_server():
        theta = model.theta()
        return Server(theta, server_optimizer.init(theta))

    def init_client(info):
        return model.head(info, head_init)

    def own_step(info, loss):
        c = info.alpha if rule == "exact" else tf.ones([], model.dtype)
        c /= arrival(info)
        if (times := emphasis(loss)) is not None:  # of another objective than the mean: the same as for theta
            c *= times
        return -rate("rho", rho) * scale * c

    def on_features(theta, head, phi, data):
        targets = model.kind.targets(data.y, tf.shape(head.bias)[0], phi.dtype)
        head, loss, errors, restored = inner_steps(head, phi, targets, tau - 1, inner, safeguard, model.kind)
        step = own_step(data.info, loss)
        if head_rate == "beta":
            step = tree.as_dtype(-rate("beta", beta), phi.dtype)
        elif head_rate == "safe":
            step = tf.maximum(step, tf.math.divide_no_nan(-tf.ones_like(step), heads.smoothness(phi, model.kind)))
        new_head = tree.add_scaled(head, step, heads.gradient(phi, errors))
        raised = was_raised(loss, heads.loss(new_head, phi, targets, model.kind))

        weight = data.info.alpha / arrival(data.info)
        if weighting == "sampled":
            weight = tf.cast(data.info.num_examples, phi.dtype)
        metrics = {"loss": loss, "restored": tf.cast(restored, phi.dtype), "raised": tf.cast(raised, phi.dtype)}
        output = ClientOutput((), weight, new_head, metrics)
        return output, heads.feature_gradient(head, errors)

    one_pass = OnePass(theta=lambda theta: theta, on_features=on_features, join=lambda gradient, _: gradient)

    def server_update(server, gradient):
        slots, theta = server_optimizer.step(server.slots, server.theta, tree.scale(scale, gradient))
        return Server(theta, slots)

    def personal_model(theta, head, data):
        return Weights(theta, head)

    return Algorithm(
        model=model,
        population=population,
        init_server=init_server,
        init_client=init_client,
        message=lambda server: server.theta,
        client_update=one_pass_update(model, one_pass, recompute=recompute, chunk=chunk),
        server_update=server_update,
        personal_model=personal_model,
        local_model=lambda theta, output: Weights(theta, output.state),
        aggregate="sum" if weighting == "alpha" else "mean",
        adapt=solver_epochs(model, inner)
        if inner in SOLVERS
        else adaptation(model, personal_model, inner, part="head"),
        shares="backbone",
        # recompute and chunk bound memory per client; batching a whole cohort would defeat that
        one_pass=None if recompute or chunk else one_pass,
        own_step=own_step,
    )


def solver_epochs(model, inner: str) -> Adaptation:
    """The adaptation of a new client's head by a step of Newton's method in every epoch, or by the exact solution."""

    def epoch(fit, data, n):
        theta, head, phi = fit
        targets = model.kind.targets(data.y, tf.shape(head.bias)[0], phi.dtype)
        if inner == "exact":
            return theta, heads.fit_exact(head, phi, targets, model.kind), phi
        return theta, heads.fit_newton(head, phi, targets, 1, model.kind), phi

    return Adaptation(
        start=lambda theta, head, data: (theta, head, model.features(theta, data.x)),
        epoch=epoch,
        model=lambda fit: Weights(*fit[:2]),
    )


LAST_STEP = {  # head_rate -> why its step is too long, and what to do
    "rho": "its rate, rho I / r, is too large for these features. head_rate='safe' (--head-rate safe) bounds it, and a "
    "smaller rho makes it smaller",
    "beta": "its rate, beta, is too large for these features. A smaller beta makes it smaller. head_rate='safe' "
    "(--head-rate safe) takes the rate rho I / r, and bounds it",
    "safe": "head_rate='safe' bounds its rate, so that no loss should rise. The features are probably very large or "
    "not finite: a network that normalizes them, or inputs of a smaller scale, can help",
}


def head_steps(history, hyperparameters) -> str | None:
    """What to say if a head's steps raised the losses of many clients in the last `LAST` rounds; else None.

    Args:
        history: the rows of the rounds. 'restored' is the share of the cohort's examples whose client took its inner
            steps back, since they had raised its loss; 'raised' is the share whose client had it raised by the last
            step.
        hyperparameters: those of the run; `head_rate` is the rate of the last step.
    """

    def share(what):
        shares = [row[what] for row in history[-LAST:] if row.get(what) is not None]
        return sum(shares) / len(shares) if len(shares) == LAST else 0.0

    found = []
    if (restored := share("restored")) > OFTEN:
        found.append(
            f"in the last {LAST} rounds the inner steps of a head raised the client's loss for {restored:.0%} of the "
            "examples, and were taken back (safeguard): such steps are too long for these features. Gradient "
            "steps are shorter with a smaller beta"
        )
    if (raised := share("raised")) > OFTEN:
        found.append(
            f"in the last {LAST} rounds the last step of a head raised the client's loss for {raised:.0%} of the "
            f"examples: {LAST_STEP[hyperparameters.get('head_rate', 'rho')]}"
        )
    return "; ".join(found) or None


PRESETS: dict[str, dict[str, Any]] = {
    "exact": {"rule": "exact", "weighting": "alpha", "server_opt": "sgd"},
    "paper": {"rule": "eq3", "weighting": "alpha", "server_opt": "adam"},
    "code": {
        "rule": "eq3",
        "weighting": "sampled",
        "server_opt": "adam",
        "head_init": "uniform01",
        "safeguard": False,
    },
}
pflego_exact = partial(pflego, **PRESETS["exact"])  # for theory: psi <- psi - rho * an unbiased gradient
pflego_paper = partial(pflego, **PRESETS["paper"])
pflego_code = partial(pflego, **PRESETS["code"])
PFLEGO = Method(
    name="pflego",
    title="PFLEGO",
    builder=pflego,
    head="personal",
    message="broadcast",
    state="head",
    down="b",
    up="b",
    reference="Nikoloutsopoulos, Koutsopoulos, Titsias: Personalized Federated Learning with Exact Stochastic "
    "Gradient Descent, arXiv 2202.09848",
    presets=PRESETS,
    preset_init={"code": "stax"},
    newer={"head_rate": "rho"},
    warning=head_steps,
    sends="gradient",
    no_server_opt="its server has an optimizer of its own: server_opt, with the rate rho",
    no_client_opt="its joint step is an exact gradient step. Use inner_opt for the head, server_opt for the backbone",
)
