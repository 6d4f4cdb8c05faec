"""FedDANE: a federated Newton-type method (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith; Asilomar 2019).

Objective: sum_i alpha_i l_i(w), one model for all. Every client moves along the gradient of all, corrected by how its
own gradient changes on the way: DANE (Shamir, Srebro, Zhang, ICML 2014) with few clients and inexact local work.

A round has two exchanges (`Exchange` in contract.py). Messages: 4d bytes down and 4d up in the first, 8d down and 4d up
in the second. On the device: nothing; its gradient only between the two exchanges, so it is computed once. A new client
gets w and adapts it as in FedAvg, without the correction. The local model is w_i.

Differences. The paper draws a second cohort for the second exchange; here both have the cohort of the round, because a
round of tfpfl has one. This is the paper's method with full participation. With fewer clients, the corrections
g - grad l_i(w) of a round add up to 0 here, and do not in the paper. The paper draws clients in proportion to N_i and
averages uniformly; here the draw is uniform and both averages have the weights q_i, as in FedAvg (`weighting`).
weighting='uniform' are the paper's averages. The local solver is the authors': SGD on the subproblem.

A client that leaves between the exchanges is in g, and not in the mean of the changes.

In the limit of one full-batch step it is FedSGD with the rate eta: every client takes the same step -eta g. Without the
correction it is FedProx. The authors found that it learns slower than FedAvg and FedProx where few clients take part.
"""

from typing import Any, NamedTuple

from tfpfl.algorithms.contract import Algorithm, Between, ClientOutput, Exchange
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.method import SEVERAL_MODELS, Method
from tfpfl.algorithms.parts.local_training import example_weight, local_solver, whole_gradient
from tfpfl.algorithms.parts.optimizers import Optimizer
from tfpfl.checks import check_penalty
from tfpfl.models import tree
from tfpfl.models.losses import client_loss


class Model(NamedTuple):
    """The server's state, and the second message."""

    w: Any  # the model that all share
    g: Any  # the mean of the cohort's gradients at w; 0 before the first round, and out of date between rounds


def feddane(
    model,
    population,
    *,
    mu: float = 0.001,
    eta: float = 0.007,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    client_opt: str | Optimizer = "sgd",
    weighting: str = "examples",
) -> Algorithm:
    """FedDANE: the cohort first averages its gradients, and then every client minimizes its own loss with its gradient
    replaced by this mean.

    Update rule:

        client(w):     g_i <- grad l_i(w), on all examples;  send g_i
        server:        g <- sum_{i in S} q_i g_i,    q_i = N_i / sum_{j in S} N_j
        client(w, g):  w_i <- w;  for every mini-batch D:
                           w_i <- w_i - eta (grad l(w_i; D) + g - g_i + mu (w_i - w))
                       send w_i - w
        server:        w <- w + sum_{i in S} q_i (w_i - w)

    w = (theta, W) is a whole model, theta the backbone and W the head; l_i is client i's mean cross-entropy on its N_i
    training examples, l(w; D) that on a mini-batch D. S is the cohort of the round, of r clients.

    Args:
        model, population: the `SplitModel`, and the `Population` that it is trained on.
        mu: the pull towards the received model, >= 0; 0 for none.
        eta, steps, epochs, batch_size, momentum, client_opt, weighting: rate, amount, mini-batches, momentum and
            optimizer of the local steps, and the weights of both averages, as in `fedavg`. The optimizer gets the
            corrected gradient.

    Returns:
        The `Algorithm`, whose rounds have two exchanges. A client keeps nothing and predicts with w.

    Raises:
        InvalidArgument: mu, eta or momentum is negative or not finite; steps, epochs or batch_size is below 1, or steps
            and epochs are both given; weighting is neither 'examples' nor 'uniform'; clients have different numbers of
            classes (this method shares one head) and the population has no `num_labels`. Warns if eta mu >= 2: such
            steps diverge.

    Source:
        Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Asilomar 2019, and the optimizer in the authors' code.
    """
    work: dict[str, Any] = dict(eta=eta, steps=steps, epochs=epochs, batch_size=batch_size, momentum=momentum)
    work |= {"client_opt": client_opt}
    solve = local_solver(**work, prox=mu)
    check_penalty(eta, False, mu=mu)
    base, weight, objective = fedavg(model, population, **work), example_weight(model, weighting), client_loss(model)
    adapt: Any = base.adapt

    def gradient(w, state, data):
        loss, g_i = whole_gradient(objective, w, data)
        return ClientOutput(g_i, weight(data), g_i, {"loss": loss})

    def client_update(message, between: Between, data):
        w, correction = message.w, tree.subtract(message.g, between.kept)
        w_i, loss = solve(objective, w, data, anchor=w, penalty=lambda v: tree.dot(correction, v))
        return ClientOutput(tree.subtract(w_i, w), weight(data), between.state, {"loss": loss})

    return base._replace(
        init_server=lambda: Model(base.init_server(), tree.zeros_like(base.init_server())),
        message=lambda server: server,
        client_update=client_update,
        server_update=lambda server, change: server._replace(w=tree.add(server.w, change)),
        personal_model=lambda message, state, data: message.w,
        local_model=lambda message, output: tree.add(message.w, output.update),
        adapt=adapt and adapt._replace(start=lambda message, state, data: adapt.start(message.w, state, data)),
        first=Exchange(
            message=lambda server: server.w,
            client_update=gradient,
            server_update=lambda server, g: server._replace(g=g),
            keeps=lambda info: tree.zeros_like(base.init_server()),
        ),
    )


FEDDANE = Method(
    name="feddane",
    title="FedDANE",
    builder=feddane,
    head="shared",
    message="broadcast",
    state="nothing",
    evaluates="global",
    down="3d",
    up="2d",
    reference="Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: FedDANE: A Federated Newton-Type Method, Asilomar 2019",
    no_server_opt="the server's state is a model and a gradient, and not what a step of an optimizer moves. Use "
    "client_opt, or fedprox",
    no_objective="a client sends two updates, a gradient and a change, and both means would have to change. Use "
    "fedprox or fedavg",
    no_batch_norm=SEVERAL_MODELS,
)
