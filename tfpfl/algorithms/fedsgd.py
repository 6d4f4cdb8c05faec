"""FedSGD: one model for all, with one gradient per client and round (McMahan et al., AISTATS 2017, section 2).

Objective: sum_i alpha_i l_i(w) with w = (theta, W) shared by all clients.

Messages: 4d bytes down, 4d up. On the device: nothing. A new client gets w and adapts all of it by gradient descent.
The local model is the w that the client received, because there is no local training.

The paper writes n_k / n for q_i. If only some clients take part, n is here the total of the cohort.
"""

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput, OnePass
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.local_training import example_weight, one_pass_update
from tfpfl.algorithms.parts.objectives import emphasis
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.algorithms.parts.schedules import rate
from tfpfl.checks import check_rates
from tfpfl.models import tree
from tfpfl.models.weights import Weights


def fedsgd(model, population, *, eta: float = 0.1, weighting: str = "examples") -> Algorithm:
    """FedSGD: one model for all clients, and one gradient per client and round. With everyone in the cohort it is
    gradient descent.

    Update rule:

        client(w):  send g_i = grad l_i(w), on all of the client's examples
        server:     w <- w - eta sum_{i in S} q_i g_i,    q_i = N_i / sum_{j in S} N_j

    w = (theta, W) is a whole model, theta the backbone and W the head; l_i is client i's mean cross-entropy on its N_i
    training examples. S is the cohort of the round.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta: the server's learning rate, >= 0.
        weighting: a client's weight in the mean: 'examples' (q_i) or 'uniform' (1 / r, r clients in the cohort).

    Returns:
        The `Algorithm`. A client keeps nothing and predicts with w.

    Raises:
        InvalidArgument: eta is negative or not finite; weighting is neither 'examples' nor 'uniform'; clients have
            different numbers of classes (this method shares one head) and the population has no `num_labels`.

    Source:
        McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017, section 2.
    """
    check_rates(eta=eta)
    num_labels = population.shared_labels()
    weight = example_weight(model, weighting)

    def on_features(w, state, phi, data):
        targets = model.kind.targets(data.y, num_labels, phi.dtype)
        loss, errors = heads.loss_and_errors(w.head, phi, targets, model.kind)
        output = ClientOutput(heads.gradient(phi, errors), weight(data), state, {"loss": loss})
        return output, heads.feature_gradient(w.head, errors)

    def own_step(info, loss):
        times = emphasis(loss)  # of another objective than the mean: the same as for what is sent
        return -rate("eta", eta) * (tf.ones_like(loss) if times is None else times)

    one_pass = OnePass(theta=lambda w: w.theta, on_features=on_features, join=Weights)
    return Algorithm(
        model=model,
        population=population,
        init_server=lambda: Weights(model.theta(), model.shared_head(num_labels)),
        init_client=lambda info: (),
        message=lambda w: w,
        client_update=one_pass_update(model, one_pass),
        server_update=lambda w, gradient: tree.add_scaled(w, -rate("eta", eta), gradient),
        personal_model=lambda w, state, data: w,
        local_model=lambda w, output: w,
        aggregate="mean",
        adapt=adaptation(model, lambda w, state, data: w, sgd(eta)),
        shares="model",
        one_pass=one_pass,
        own_step=own_step,
    )


FEDSGD = Method(
    name="fedsgd",
    title="FedSGD",
    builder=fedsgd,
    head="shared",
    message="broadcast",
    state="nothing",
    evaluates="global",
    down="d",
    up="d",
    reference="McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks "
    "from Decentralized Data, AISTATS 2017",
    sends="gradient",
    no_server_opt="its server takes the step w - eta g itself. Use fedavg with steps=1 and eta=1: its update is -g",
    no_client_opt="its clients take no steps. Use server_opt with fedavg, steps=1 and eta=1: its update is -g",
)
