"""FedBN: FedAvg in which every client keeps its own batch normalization (Li, Jiang, Zhang, Kamp, Dou; ICLR 2021).

Objective: sum_i alpha_i l_i(w, n_i) with w shared by all clients, and the normalization layers n_i of each.

Messages: 4 (d - n) bytes down and up, where n is the number of scales and offsets. On the device: the scales and
offsets, and the moving means and variances. A new client starts from the initial scales and offsets and from the
statistics of its own examples, and adapts all of its model by SGD. The local model is (w_i, n_i).

This is `fedavg` on a model with batch_norm='local', which other methods can have, too.
"""

from typing import Any

from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.transforms.normalization import normalized
from tfpfl.checks import InvalidArgument


def fedbn(
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
    """FedBN: FedAvg in which the BatchNormalization layers, their weights and statistics, stay with each client.

    Update rule:

        client(w):  w_i <- w;  for every mini-batch D:  (w_i, n_i) <- (w_i, n_i) - eta grad l(w_i, n_i; D)
                    m_i <- momentum m_i + (1 - momentum) statistics of D          in every step
                    keep n_i and m_i, send w_i - w
        server:     w <- w + sum_{i in S} q_i (w_i - w),    q_i = N_i / sum_{j in S} N_j

    w is all of the model but the normalization layers; n_i are client i's scales and offsets, m_i its moving means and
    variances. The statistics of D normalize in training, m_i in evaluation. S is the cohort.

    Args:
        model, population: the `SplitModel`, whose backbone must have trainable BatchNormalization layers, and the
            `Population` that it is trained on.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.

    Returns:
        The `Algorithm`. A client keeps n_i and m_i and predicts with (w, n_i, m_i).

    Raises:
        InvalidArgument: the backbone has no trainable BatchNormalization, or the model has another `batch_norm` than
            'local'; and the errors of `fedavg`.

    Source:
        Li, Jiang, Zhang, Kamp, Dou, ICLR 2021, arXiv 2102.07623, algorithm 1.
    """
    if model.batch_norm is None:
        raise InvalidArgument(
            "FedBN keeps the BatchNormalization layers of each client, but this backbone has no trainable one: without "
            "them it is fedavg. Take a backbone that has some, for example --network conv_bn, or use fedavg"
        )
    if model.chosen_batch_norm not in (None, "local"):
        raise InvalidArgument(
            f"FedBN is FedAvg with batch_norm='local', found {model.chosen_batch_norm!r}. Leave batch_norm out, or use "
            "fedavg"
        )
    work: dict[str, Any] = {"steps": steps, "epochs": epochs, "batch_size": batch_size, "weighting": weighting}
    model = model.with_batch_norm("local")
    return normalized(
        fedavg(model, population, eta=eta, momentum=momentum, client_opt=client_opt, **work), name="fedbn"
    )


FEDBN = Method(
    name="fedbn",
    title="FedBN",
    builder=fedbn,
    head="shared",
    message="broadcast",
    state="normalization",
    down="d - n",
    up="d - n",
    reference="Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch "
    "Normalization, ICLR 2021",
    no_server_opt="its clients keep a part of the model. Use fedavg with batch_norm='local' and a server_opt",
    no_objective="its normalization never leaves the client, where no weight of its loss reaches it. Use fedavg",
    batch_norm="local",
)
