"""FedAvg: one model for all, the average of locally trained copies (McMahan et al., AISTATS 2017).

Objective: sum_i alpha_i l_i(w) with w = (theta, W) shared by all clients.

Messages: 4d bytes down, 4d up. Clients send the difference w_i - w: the average is the same as for w_i, and clipping or
noise can act on the difference. On the device: nothing. A new client gets w and adapts all of it by SGD. The local
model is w_i; the PFLEGO authors' code evaluates it.
"""

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import local_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import InvalidArgument
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


def fedavg(
    model,
    population,
    *,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
) -> Algorithm:
    """FedAvg: one model for all clients, the weighted average of copies that each of them trains on its own examples.

    Update rule:

        client(w):  w_i <- w;  for every mini-batch D:  w_i <- w_i - eta grad l(w_i; D)
                    send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j

    w = (theta, W) is a whole model, theta the backbone and W the head; l_i is client i's mean cross-entropy on its N_i
    training examples, l(w; D) that on a mini-batch D. S is the cohort of the round, of r clients.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta: learning rate of the local SGD, >= 0.
        steps, epochs: local work in every round, in mini-batches or in passes over the client's examples; one of the
            two, >= 1. Default: 50 steps (tau in the PFLEGO study).
        batch_size: examples in a mini-batch, >= 1; None for all that the client has (the PFLEGO study).
        momentum: the momentum of the local SGD, >= 0; default 0, none. It starts at 0 in every visit.
        client_opt: what takes the local steps: 'sgd' (the rule above), 'momentum' (0.9), 'adam', 'adamw', 'adagrad' or
            'yogi', at the rate eta. Its state starts anew in every visit. In Python also an optimizer of Keras, TFF or
            tfpfl, which has a rate of its own.
        weighting: a client's weight in the average: 'examples' (q_i) or 'uniform' (1 / r).

    Returns:
        The `Algorithm`. A client keeps nothing and predicts with w.

    Raises:
        InvalidArgument: eta or momentum is negative or not finite; steps, epochs or batch_size is below 1, or steps and
            epochs are both given; client_opt is none of these, or another one than 'sgd' although there is a momentum;
            weighting is neither 'examples' nor 'uniform'; clients have different numbers of classes (this method shares
            one head) and the population has no `num_labels`.

    Source:
        McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017, algorithm 1.
    """
    rates = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    solve = local_solver(**rates, steps=steps, epochs=epochs, batch_size=batch_size)
    if weighting not in ("examples", "uniform"):
        raise InvalidArgument(f"weighting must be 'examples' or 'uniform', found {weighting!r}")
    objective, num_labels = client_loss(model), population.shared_labels()

    def client_update(w, state, data):
        w_i, loss = solve(objective, w, data)
        weight = tf.cast(data.info.num_examples, model.dtype) if weighting == "examples" else tf.ones([], model.dtype)
        return ClientOutput(tree.subtract(w_i, w), weight, state, {"loss": loss})

    return Algorithm(
        model=model,
        population=population,
        init_server=lambda: Weights(model.theta(), model.shared_head(num_labels)),
        init_client=lambda info: (),
        message=lambda w: w,
        client_update=client_update,
        server_update=tree.add,
        personal_model=lambda w, state, data: w,
        local_model=lambda w, output: tree.add(w, output.update),
        aggregate="mean",
        adapt=adaptation(
            model, lambda w, state, data: w, as_optimizer(client_opt, eta, momentum=momentum), batch_size=batch_size
        ),
        shares="model",
    )


FEDAVG = Method(
    name="fedavg",
    title="FedAvg",
    builder=fedavg,
    head="shared",
    message="broadcast",
    state="nothing",
    evaluates="global",
    down="d",
    up="d",
    reference="McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks "
    "from Decentralized Data, AISTATS 2017",
)
