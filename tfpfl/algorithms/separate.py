"""Local ("Separate"): every client trains its own model, and nothing is sent. Other methods must do better than this.

Objective: l_i(w_i) for each client alone.

Messages: none. On the device: the whole model. All clients, new ones too, start from the same backbone, each with its
own initial head. A client trains only in rounds for which it is sampled, as in PGFed's code, so that the work equals
that of other methods. FedAMP's paper trains all clients in every round; use full participation for this.
"""

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import local_solver
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.models.losses import client_loss
from tfpfl.models.weights import Weights


def local(
    model,
    population,
    *,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
) -> Algorithm:
    """Local: every client trains a model of its own, and nothing is sent. Other methods must do better than this.

    Update rule:

        client:  for every mini-batch D:  w_i <- w_i - eta grad l(w_i; D)
                 keep w_i, send nothing

    w_i is client i's whole model, l(w; D) the mean cross-entropy on a mini-batch D.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        eta, steps, epochs, batch_size, momentum, client_opt: rate, amount, mini-batches, momentum and optimizer of the
            local steps, as in `fedavg`.

    Returns:
        The `Algorithm`. A client keeps w_i and predicts with it.

    Raises:
        InvalidArgument: eta or momentum is negative or not finite; steps, epochs or batch_size is below 1, or steps and
            epochs are both given.

    Source:
        The baseline 'Separate' in Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, AAAI 2021, and 'Local' in Luo et al., ICCV
        2023.
    """
    rates = {"eta": eta, "momentum": momentum, "client_opt": client_opt}
    solve = local_solver(**rates, steps=steps, epochs=epochs, batch_size=batch_size)
    objective = client_loss(model)

    def client_update(message, w, data):
        w, loss = solve(objective, w, data)
        return ClientOutput((), tf.ones([], model.dtype), w, {"loss": loss})

    return Algorithm(
        model=model,
        population=population,
        init_server=lambda: (),
        init_client=lambda info: Weights(model.theta(), model.head(info)),
        message=lambda server: (),
        client_update=client_update,
        server_update=lambda server, nothing: server,
        personal_model=lambda message, w, data: w,
        local_model=lambda message, output: output.state,
        adapt=adaptation(
            model, lambda message, w, data: w, as_optimizer(client_opt, eta, momentum=momentum), batch_size=batch_size
        ),
        shares=None,
    )


LOCAL = Method(
    name="local",
    title="Local",
    builder=local,
    head="personal",
    message="broadcast",
    state="whole model",
    down="0",
    up="0",
    reference="the baseline without communication; 'Separate' in FedAMP",
    no_objective="nothing is sent, so no client counts more than another. Use fedavg or pflego",
    no_server_opt="nothing is sent, so its server has no step. Use client_opt",
    no_batch_norm={"shared": "nothing is sent, so no statistics can be averaged. Use 'local'"},
)
