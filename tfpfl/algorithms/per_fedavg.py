"""Per-FedAvg: one model that becomes personal by one gradient step (Fallah, Mokhtari, Ozdaglar; NeurIPS 2020).

Objective: (1 / I) sum_i l_i(w - alpha grad l_i(w)), the mean loss of the clients after one gradient step of each.

Messages: 4d bytes down, 4d up. On the device: nothing. A new client gets w and adapts it. The local model is w_i before
adaptation. alpha is the argument `eta_inner`; it is not alpha_i = N_i / N.

A step uses 2 batch_size examples, as in PGFed's code: half of them for D and half for D', which gets one more if the
number is odd. A last batch of one example is skipped; a client with a single example has it in D and in D'. Without
batch_size, D and D' are both all examples of the client. The paper has a third batch D'', which may be D'; here it is.
With `adapt_batch_size` a client adapts on random batches instead of all examples. eta_inner = 0 is FedAvg with rate
beta on the batches D'.
"""

from typing import Any

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.finetune import finetuned
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.local_training import batch_loop, value_and_gradient
from tfpfl.algorithms.parts.schedules import rate
from tfpfl.checks import InvalidArgument, check_choice, check_rates
from tfpfl.models import tree
from tfpfl.models.losses import client_loss


def per_fedavg(
    model,
    population,
    *,
    variant: str = "fo",
    eta_inner: float = 0.005,
    beta: float = 0.005,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    delta: float = 0.001,
    adapt_steps: int = 1,
    adapt_batch_size: int | None = None,
) -> Algorithm:
    """Per-FedAvg: one model w that becomes personal by a gradient step on the client's own examples.

    Update rule:

        client(w):  w_i = w;  for every batch, halved into D and D':
                        g = grad l(w_i - alpha grad l(w_i; D); D')
                        FO:  w_i <- w_i - beta g                                             the Hessian left out
                        HF:  w_i <- w_i - beta (g - alpha H g),  H g from a difference of gradients:
                             (grad l(w_i + delta g; D') - grad l(w_i - delta g; D')) / (2 delta)
                    send w_i - w
        server:     w <- w + (1 / r) sum_{i in S} (w_i - w)
        personal model of i:  v = w, then v <- v - alpha grad l_i(v), adapt_steps times, on all training examples

    w and w_i are whole models, l(w; D) is the mean cross-entropy on D, l_i that on all of client i's examples; alpha is
    `eta_inner`. S is the cohort of r clients.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        variant: 'fo' (first order) or 'hf' (Hessian-free: two more gradients a step).
        eta_inner: alpha, the rate of the step that makes w personal, in training and in use, >= 0.
        beta: rate of the steps on w_i, >= 0.
        steps, epochs: local work, as in `fedavg`.
        batch_size: examples in D and in D', >= 1; None for all in both.
        delta: the length, in g, of the difference of gradients in 'hf', > 0.
        adapt_steps: how many steps make w personal, >= 0; 0 for none.
        adapt_batch_size: random examples in each of them, >= 1; None for all.

    Returns:
        The `Algorithm`. A client keeps nothing and predicts with v.

    Raises:
        InvalidArgument: eta_inner or beta is negative or not finite; delta is not positive or not finite; steps, epochs
            or batch_size is below 1, or steps and epochs are both given; adapt_steps is negative; adapt_batch_size is
            below 1; variant is neither 'fo' nor 'hf'; clients have different numbers of classes (this method shares one
            head) and the population has no `num_labels`.

    Source:
        Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, algorithm 1.
    """
    check_choice(variant=(variant, ("fo", "hf")))
    check_rates(eta_inner=eta_inner, beta=beta, delta=delta)
    if delta == 0:
        raise InvalidArgument("delta must be positive, found 0: the difference of gradients is divided by it")
    for name, value, low in (("adapt_steps", adapt_steps, 0), ("adapt_batch_size", adapt_batch_size, 1)):
        if value is not None and value < low:
            raise InvalidArgument(f"{name} must be at least {low}, found {value}")
    base = fedavg(model, population, eta=beta, steps=steps, epochs=epochs, batch_size=batch_size, weighting="uniform")
    loop = batch_loop(steps=steps, epochs=epochs, batch_size=None if batch_size is None else 2 * batch_size)
    objective = client_loss(model)

    def meta_step(w, d, d_prime):
        """One step from w on two batches (x, y): (the new w, the loss after adaptation)."""

        def slope(at, batch):
            return value_and_gradient(lambda u: objective(u, *batch), at)

        adapted = tree.add_scaled(w, -eta_inner, slope(w, d)[1])
        loss, g = slope(adapted, d_prime)
        if variant == "hf":
            ahead, behind = (slope(tree.add_scaled(w, s * delta, g), d_prime)[1] for s in (1, -1))
            g = tree.add_scaled(g, -eta_inner / (2 * delta), tree.subtract(ahead, behind))
        return tree.add_scaled(w, -rate("beta", beta), g), loss

    def client_update(w, state, data):
        def step(carry, x, y):
            if batch_size is None:
                return meta_step(carry[0], (x, y), (x, y))
            half = tree.num_rows(x) // 2
            first = tf.maximum(half, tf.where(tf.equal(data.info.num_examples, 1), 1, 0))
            halves = (tree.rows(x, None, first), y[:first]), (tree.rows(x, half, None), y[half:])
            return tf.cond(first > 0, lambda: meta_step(carry[0], *halves), lambda: carry)

        w_i, loss = loop(step, (w, tf.zeros([], model.dtype)), data)
        return ClientOutput(tree.subtract(w_i, w), tf.ones([], model.dtype), state, {"loss": loss})

    trained = base._replace(client_update=client_update)
    work: dict[str, Any] = {"eta_ft": eta_inner, "steps_ft": adapt_steps, "batch_size": adapt_batch_size}
    return finetuned(trained, global_model=lambda w: w, **work)


PER_FEDAVG = Method(
    name="per_fedavg",
    title="Per-FedAvg",
    builder=per_fedavg,
    head="shared",
    message="broadcast",
    state="nothing",
    evaluates="fine-tuned",
    down="d",
    up="d",
    reference="Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A "
    "Model-Agnostic Meta-Learning Approach, NeurIPS 2020",
    presets={"fo": {"variant": "fo"}, "hf": {"variant": "hf"}},
    no_objective="what a client minimizes is its loss after a step of its own. Use fedavg_ft",
    no_client_opt="its steps are plain gradient steps through a plain gradient step. Use fedavg_ft, or server_opt",
    no_batch_norm=SEVERAL_MODELS,
)
