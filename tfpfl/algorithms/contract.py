"""The contract: a personalized federated algorithm is a handful of pure TensorFlow functions.

Read this file first. An algorithm is built once for a model and a population, `pflego(model, population, tau=50)`, and
returned as an `Algorithm`. The same functions then run as a TFF federated computation (`tfpfl.federate`) or in process
(`tfpfl.Simulation`); evaluation and export ask the algorithm for its `personal_model` and never for its name.

What leaves a device in a round is `ClientOutput.update`, `.weight` and `.metrics`: nothing else.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, NamedTuple

from tfpfl.checks import InvalidArgument
from tfpfl.data.population import ClientInfo, Population, Tensor

Tree = Any  # a nested structure of tensors: tuples, NamedTuples, dicts


class ClientData(NamedTuple):
    """What a client's work reads in one round: its training examples, and the randomness of this visit."""

    x: Tensor  # float [N_i, ...]
    y: Tensor  # int32 [N_i], in [0, K_i)
    info: ClientInfo
    key: Tensor  # int32 [2]: a stateless seed, a function of (seed, round, client) and never of the algorithm


class ClientOutput(NamedTuple):
    """What a client's work ends with. `state` stays on the device; the rest is what the server may see."""

    update: Tree  # sent to the server, combined there as `Algorithm.aggregate` says
    weight: Tensor  # float []: this client's weight in 'mean' and 'sum'
    state: Tree  # kept by the client for its next visit: same structure, shapes and dtypes as `init_client` gives
    metrics: dict  # scalars, for logs: at least 'loss', the training loss that the client saw


class Rows(NamedTuple):
    """The 'rows' aggregate: the updates of the cohort side by side, sorted by client id."""

    client_ids: Tensor  # int32 [r]
    values: Tree  # every leaf [r, ...]


class OnePass(NamedTuple):
    """A client's work that takes the backbone forward and backward once, at the weights that came with the message.

    Where a whole cohort has the same weights, an engine may take it through the backbone together, for
    sum_i w_i pull_back_i(dphi_i) is one pull-back of all w_i dphi_i. `algorithms.parts.one_pass_update`
    makes the `client_update` of it; the algorithm has both, as `client_update` and as `one_pass`.
    """

    theta: Callable  # (message) -> the backbone's weights
    on_features: (
        Callable  # (message, client state, phi [N_i, M], ClientData without x) -> (ClientOutput, dphi [N_i, M])
    )
    join: Callable  # (gradient of theta, `update` of that ClientOutput) -> the whole update


class Adaptation(NamedTuple):
    """What a client that never took part in training does by itself, before it predicts: epoch after epoch on its own.

    An epoch is one pass over its training examples, in the algorithm's mini-batches; where these are all examples, it
    is a step. Nothing is sent. `tfpfl.algorithms.parts.adaptation.adaptation` makes one for the usual cases.
    """

    start: Callable  # (message, client state as `init_client` gives it, ClientData) -> carry
    epoch: Callable  # (carry, ClientData, n) -> carry: epoch n = 0, 1, ...
    model: Callable  # (carry) -> Weights that the client would now predict with


class Algorithm(NamedTuple):
    """A personalized federated algorithm as pure functions of tensors.

    `message` takes (server state), and every client of the cohort gets the same; or (server state, client id), and each
    gets its own. `aggregate` is 'mean' (weighted), 'sum' (weighted) or 'rows' (the updates unreduced, as `Rows`), or a
    structure of those with the top-level fields of the update. `matrices` are what a run saves at every evaluation,
    besides scores: who listens to whom, rows and columns in the order of `population.client_ids`.

    `global_model` is for methods that keep one whole model for everyone beside the one that a client predicts with; it
    is None where there is none, and where `personal_model` is that model already. `adapt` starts from what a new client
    would predict with (`personal_model` of its initial state); where that is itself a fit, as in fine-tuning, from what
    it is a fit of. It is None where a client cannot become personal without taking part; the algorithm's file says why.

    `shares` says which part of `personal_model` is the same for every client: the whole 'model', its 'backbone' or its
    'head'; None if no part is. The shared part depends on the message only, never on the client's state, data or id. A
    `global_model` beside a shared backbone has this backbone. With a shared backbone, engines evaluate many clients in
    one forward pass, and a new client can start from the backbone that all have.

    `one_pass` is the work of `client_update` in another form, which an engine can do for a whole cohort at once. The
    two must do the same: whoever replaces `client_update` replaces `one_pass` too, or sets it to None. The battery
    (`tfpfl.studies.battery`) checks both fields.
    """

    model: Any  # the SplitModel, and
    population: "Population"  # the population that it was built for
    init_server: Callable  # () -> server state
    init_client: Callable  # (ClientInfo) -> client state, when a client first takes part
    message: Callable  # (server state[, client id]) -> what is sent to the clients
    client_update: Callable  # (message, client state, ClientData) -> ClientOutput
    server_update: Callable  # (server state, aggregate) -> server state
    personal_model: Callable  # (message, client state, ClientData) -> Weights this client predicts with
    local_model: Callable  # (message, ClientOutput) -> Weights it holds after its work, before aggregation
    aggregate: Any = "mean"
    matrices: Callable | None = None  # (server state) -> dict of [I, I], where the server keeps such
    global_model: Callable | None = None  # (message) -> Weights, the same whoever received the message
    adapt: Adaptation | None = None
    shares: str | None = None  # 'model', 'backbone', 'head' or None: what all personal models have in common
    one_pass: OnePass | None = None  # the same work as `client_update`, for a whole cohort at once

    @property
    def shares_backbone(self) -> bool:
        """Whether the personal models of all clients have the same backbone."""
        return self.shares in ("model", "backbone")

    @property
    def message_per_client(self) -> bool:
        """Whether `message` wants a client id, so that every client gets a message of its own."""
        required = [
            p
            for p in signature(self.message).parameters.values()
            if p.default is Parameter.empty and p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        ]
        return len(required) == 2


KINDS = ("mean", "sum", "rows")


def kinds(algorithm: Algorithm) -> list:
    """The kind of every part of the update: one, or one a top-level field.

    Raises:
        ValueError: an unknown kind.
    """
    spec = algorithm.aggregate
    found = [spec] if isinstance(spec, str) else list(spec)
    for kind in found:
        if kind not in KINDS:
            raise InvalidArgument(f"unknown aggregate {kind!r}: one of {', '.join(KINDS)}")
    return found
