"""FedSA-LoRA: low-rank adapters of a frozen backbone, whose A is shared and whose B stays with the client (Guo, Zeng,
Wang, Fan, Wang, Qu; ICLR 2025).

Objective: sum_i alpha_i l_i(A, B_i, W) with A and the head W shared by all clients, and the B_i of each. A layer with
the frozen kernel K_0 has the kernel K_0 + (ALPHA / R) A B_i.

Messages: 4 (d - n) bytes down and up, where n is the number of weights of B. On the device: B_i. A new client has
B_i = 0, with which the model is the frozen backbone under the newest W, and adapts A, B_i and W by SGD. The local model
is (A_i, B_i, W_i).

This is `fedavg` on a model with personal='B', which other methods can have, too: `fedper` with adapters='lora:4' and
personal='B' also has a head of each client's own, and `pflego` takes exact gradient steps on A. A starts at random and
B at 0, as in LoRA. The weights of the average are N_i (weighting='uniform': all the same).
"""

from typing import Any

from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.algorithms.transforms.own_part import own_part
from tfpfl.checks import InvalidArgument


def adapters(
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
    """FedSA-LoRA: FedAvg of low-rank adapters of which the A and the head are shared, and the B stays with each client.

    Update rule:

        client(A, W):  (A_i, W_i) <- (A, W);  for every mini-batch D:
                           (A_i, B_i, W_i) <- (A_i, B_i, W_i) - eta grad l(A_i, B_i, W_i; D)
                       keep B_i, send A_i - A and W_i - W
        server:        (A, W) <- (A, W) + sum_{i in S} q_i (A_i - A, W_i - W),    q_i = N_i / sum_{j in S} N_j

    A and B_i are those of all layers: a layer's kernel is K_0 + (ALPHA / R) A B_i with the frozen K_0. W is the head,
    l(A, B, W; D) the mean cross-entropy on a mini-batch D. B_i is 0 at first. S is the cohort.

    Args:
        model, population: the `SplitModel`, which must have adapters 'lora:R', and the `Population` that it is trained
            on.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of the average, as in `fedavg`.

    Returns:
        The `Algorithm`. A client keeps B_i and predicts with (A, B_i, W).

    Raises:
        InvalidArgument: the model has no adapters 'lora:R', or another `personal` part than 'B'; and the errors of
            `fedavg`.

    Source:
        Guo, Zeng, Wang, Fan, Wang, Qu, ICLR 2025, arXiv 2410.01463.
    """
    if model.adapters is None or model.adapters.spec.kind != "lora":
        found = "none" if model.adapters is None else repr(model.adapters.spec.kind)
        raise InvalidArgument(
            f"FedSA-LoRA shares the A of low-rank adapters: the model must have adapters 'lora:R', found {found}. Give "
            "--adapters lora:4, or SplitModel(backbone, adapters='lora:4')"
        )
    own = model.adapters.personal("B")
    if any(model.own) and model.own != own:
        raise InvalidArgument("FedSA-LoRA is FedAvg with personal='B', found another part. Leave personal out")
    work: dict[str, Any] = {"steps": steps, "epochs": epochs, "batch_size": batch_size, "weighting": weighting}
    model = model.with_personal("B")
    base = fedavg(model, population, eta=eta, momentum=momentum, client_opt=client_opt, **work)
    return own_part(base, name="adapters")


ADAPTERS = Method(
    name="adapters",
    title="FedSA-LoRA",
    builder=adapters,
    head="shared",
    message="broadcast",
    state="B of the adapters",
    down="d - n",
    up="d - n",
    reference="Guo, Zeng, Wang, Fan, Wang, Qu: Selective Aggregation for Low-Rank Adaptation in Federated Learning, "
    "ICLR 2025",
    no_server_opt="its clients keep a part of the model. Use fedavg with adapters, personal='B' and a server_opt",
    no_objective="its B never leaves the client, where no weight of its loss reaches it. Use fedavg",
    personal="B",
)
