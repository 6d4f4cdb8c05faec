"""The contract: a personalized federated algorithm is a small set of pure TensorFlow functions.

Read this file first. A builder such as `pflego(model, population, tau=50)` makes an `Algorithm` for one model and one
population. Its functions run as a TFF federated computation (`tfpfl.federate`) or in this process
(`tfpfl.Simulation`). Evaluation and export use the algorithm's `personal_model`; they do not depend on its name.

In a round a device sends `ClientOutput.update`, `.weight` and `.metrics`, and nothing else.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, NamedTuple

from tfpfl.checks import InvalidArgument, check_type
from tfpfl.data.population import ClientInfo, Population, Tensor

Tree = Any  # a nested structure of tensors: tuples, NamedTuples, dicts


class ClientData(NamedTuple):
    """The input of a client's work in one round: its training examples, its `ClientInfo`, and the key of this visit."""

    x: Tensor  # float [N_i, ...]
    y: Tensor  # int32 [N_i], in [0, K_i)
    info: ClientInfo
    key: Tensor  # int32 [2]: a stateless seed, a function of (seed, round, client) only


class ClientOutput(NamedTuple):
    """The result of a client's work in one round. `state` stays on the device; the server gets the rest."""

    update: Tree  # sent to the server, which combines the cohort's updates as `Algorithm.aggregate` says
    weight: Tensor  # float []: this client's weight in 'mean' and 'sum'
    state: Tree  # kept by the client for its next visit; same structure, shapes and dtypes as from `init_client`
    metrics: dict  # scalars for logs, at least 'loss': before the last local step, on the examples of this step
    made: Tree | None = None  # the method's own update, if a transform made another one to send; see `as_made`


def as_made(output: ClientOutput) -> ClientOutput:
    """The output with the update that the client's work made, not with what a transform shortened or weighed."""
    return output if output.made is None else output._replace(update=output.made, made=None)


class Rows(NamedTuple):
    """The result of the aggregate 'rows': the updates of all clients of the cohort, sorted by client id."""

    client_ids: Tensor  # int32 [r]
    values: Tree  # every leaf [r, ...]


class OnePass(NamedTuple):
    """A client's work with only one forward and one backward pass of the backbone, at the weights in the message.

    If all clients of a cohort get the same weights, an engine can run the backbone for the whole cohort at once,
    because sum_i w_i pull_back_i(dphi_i) is one pull-back of all w_i dphi_i. `algorithms.parts.one_pass_update` makes
    the `client_update` from this form; the algorithm has both, as `client_update` and as `one_pass`.
    """

    theta: Callable  # (message) -> the backbone's weights
    on_features: (
        Callable  # (message, client state, phi [N_i, M], ClientData without x) -> (ClientOutput, dphi [N_i, M])
    )
    join: Callable  # (gradient of theta, `update` of that ClientOutput) -> the whole update


class Between(NamedTuple):
    """What a client has between the two exchanges of a round; `Algorithm.client_update` gets it as the client state."""

    state: Tree  # the client's state from before the round; it is still its state if the client leaves now
    kept: Tree  # what the first exchange left on the device; it is forgotten at the end of the round


class Exchange(NamedTuple):
    """A first exchange of messages, before the one that every round has: same round, same clients, two messages down.

        message -> client_update -> aggregate -> server_update        the first exchange, with the functions here
        message -> client_update -> aggregate -> server_update        the second, with those of the `Algorithm`

    The second message is made of the server's state that this `server_update` returns. A client that leaves between the
    two has contributed to the first aggregate only, and keeps its state. An update of weight 0 counts as in a round.
    """

    message: Callable  # (server state[, client id]) -> the first message, in the form of `Algorithm.message`
    client_update: Callable  # (first message, client state, ClientData) -> ClientOutput; its state: `Between.kept`
    server_update: Callable  # (server state, aggregate[, total weight]) -> server state, of the same structure
    keeps: Callable  # (ClientInfo) -> any values in the structure, shapes and dtypes of `Between.kept`
    aggregate: Any = "mean"  # as `Algorithm.aggregate`, for the updates of this exchange


class Adaptation(NamedTuple):
    """How a client that never took part in training adapts its model, on its own examples, before it predicts.

    An epoch is one pass over the client's training examples in the algorithm's mini-batches; with full batches it is
    one step. Nothing is sent. `tfpfl.algorithms.parts.adaptation.adaptation` makes the usual adaptations.
    """

    start: Callable  # (message, client state from `init_client`, ClientData) -> carry
    epoch: Callable  # (carry, ClientData, n) -> carry: epoch n = 0, 1, ...
    model: Callable  # (carry) -> Weights with which the client would predict now
    predictor: Callable | None = None  # (carry, ClientData) -> its `Algorithm.predictor`; None: the head predicts
    message: Callable | None = None  # (server state) -> what `start` takes in place of the message; None: the message


class Algorithm(NamedTuple):
    """A personalized federated algorithm as pure functions of tensors.

    `message` is a function of (server state) if all clients of the cohort get the same message, or of (server state,
    client id) if each client gets its own. `server_update` is a function of (server state, aggregate), or of (server
    state, aggregate, total weight) if it needs the sum of the weights of the clients whose updates arrived; with
    weights 1 this is their number r. Code that runs or wraps an algorithm calls `step`, which knows both forms.

    `aggregate` is 'mean' (weighted), 'sum' (weighted) or 'rows' (all updates, as `Rows`); or a NamedTuple of these,
    with the top-level fields of the update. `matrices` gives matrices between clients, such as attention weights, which
    a run saves at every evaluation. Their rows and columns are in the order of `population.client_ids`.

    `global_model` is the one whole model that some methods keep for everyone besides the personal models. It is None if
    there is no such model, or if `personal_model` is this model. `adapt` starts from the model with which a new client
    would predict: `personal_model` of its initial state, or from the `global_model` (PGFed). If that model is itself
    fine-tuned, `adapt` starts from the model before fine-tuning. `adapt` is None if a client can become personal only
    by taking part; the method's file says why.

    `begins` is the model with which a client's local steps on what it sends begin, where a part of that model is the
    client's own, so that it is no `global_model`. None: it is the `global_model`, or else the `personal_model`.

    `shares` says which part of `personal_model` is the same for every client: the whole 'model', its 'backbone' or its
    'head'; None if no part is. The shared part depends on the message only, never on the client's state, data or id. If
    the backbone is shared, a `global_model` has the same backbone. With a shared backbone, engines evaluate many
    clients in one forward pass, and a new client can start from this backbone.

    `predictor` is for methods whose clients predict with more than a linear head, such as kNN-Per with its neighbours.
    It is a function of the arguments of `personal_model`, and returns a function (features phi [n, M] of new examples)
    -> outputs z [n, K], from which the model's kind computes loss and score as from a head's. The features are those of
    `personal_model`'s backbone, and the head of `personal_model` is then only a part of the prediction: `shares` is at
    most 'backbone'. What can store weights only, such as a Keras file or a bundle for a device, refuses such a method.
    None: z = phi @ kernel + bias.

    `one_pass` does the work of `client_update` in another form, which an engine can run for a whole cohort at once.
    Both must give the same result: code that replaces `client_update` must replace `one_pass` too, or set it to None.

    `balance` is for methods whose server keeps a sum or a mean of what the clients keep, such as SCAFFOLD, where c is
    the mean of all c_i. It gives the client state that goes with an update, if another update is sent than the one that
    `client_update` made: a client whose update is clipped then keeps what it has really sent. What changes updates at
    the server alone, such as a median or noise, is refused for such methods, see `check_no_balance`. None: the server
    keeps no such sum.

    `sent` is the last part of a client's work, after its `local_model` was scored: what leaves the client instead of
    the update. `aggregate`, `server_update` and `balance` then belong to what is sent; `local_model` and
    `client_update` do not know of it. `transforms.secured` makes integers in it. None: the update itself is sent.

    `own_step` is for methods whose clients send a gradient of theta, at which they take no step themselves. It says
    which step a part of theta takes that stays with the client (`transforms.own_part`). None: the method has no such
    step, or it sends differences, which are steps already.

    `first` is for methods with two messages down and two updates up in a round. The fields above then describe the
    second exchange; `client_update` gets a `Between` in place of the client's state, and returns a state as ever. The
    key of the first exchange is another one than `ClientData.key` of the second. A method with a `first` has no
    `one_pass` and no `balance`. None: a round has one exchange.

    The battery (`tfpfl.studies.battery`) checks `shares`, `one_pass`, `balance`, `predictor` and `first`.
    """

    model: Any  # the `SplitModel`
    population: "Population"  # the population for which the algorithm was built
    init_server: Callable  # () -> server state
    init_client: Callable  # (ClientInfo) -> client state before the client's first visit
    message: Callable  # (server state[, client id]) -> the message to the clients
    client_update: Callable  # (message, client state, ClientData) -> ClientOutput
    server_update: Callable  # (server state, aggregate[, total weight]) -> server state
    personal_model: Callable  # (message, client state, ClientData) -> Weights with which this client predicts
    local_model: Callable  # (message, ClientOutput) -> Weights of the client after its work, before aggregation
    aggregate: Any = "mean"
    matrices: Callable | None = None  # (server state) -> dict of [I, I], or None if the server keeps none
    global_model: Callable | None = None  # (message) -> Weights, the same for every client's message
    begins: Callable | None = None  # (message, client state, ClientData) -> Weights before the local steps
    adapt: Adaptation | None = None
    shares: str | None = None  # 'model', 'backbone', 'head' or None: the common part of all personal models
    one_pass: OnePass | None = None  # the same work as `client_update`, for a whole cohort at once
    balance: Callable | None = None  # (client state before the visit, ClientOutput as it is sent) -> client state
    sent: Callable | None = None  # (client state before the visit, ClientOutput, visit: info and key) -> ClientOutput
    own_step: Callable | None = None  # (ClientInfo, loss) -> minus the rate: times the gradient, it is the step
    first: Exchange | None = None  # what comes before `message` in a round with two exchanges
    predictor: Callable | None = None  # (message, client state, ClientData) -> function (phi [n, M]) -> z [n, K]

    @property
    def shares_backbone(self) -> bool:
        """Whether the personal models of all clients have the same backbone."""
        return self.shares in ("model", "backbone")

    @property
    def message_per_client(self) -> bool:
        """Whether `message` takes a client id, so that every client gets its own message."""
        return _num_required(self.message) == 2

    def beginning(self, message: Tree, state: Tree, data: ClientData) -> Tree:
        """The weights with which a client's local steps on what it sends begin, see `begins`."""
        if self.begins is not None:
            return self.begins(message, state, data)
        return self.personal_model(message, state, data) if self.global_model is None else self.global_model(message)

    def step(self, server: Tree, aggregate: Tree, total_weight: Tensor) -> Tree:
        """Calls `server_update`, with the total weight if it takes that: the server's new state.

        Args:
            server: the server's state.
            aggregate: what the updates were combined to, as `Algorithm.aggregate` says.
            total_weight: float [], the sum of the weights of the clients whose updates arrived.
        """
        more = (total_weight,) if _num_required(self.server_update) == 3 else ()
        return self.server_update(server, aggregate, *more)


def check_is_algorithm(algorithm: Any) -> None:
    """Checks that something is an `Algorithm`, for functions that take one.

    Raises:
        InvalidArgument: it is something else.
    """
    what = "a tfpfl.Algorithm, the first argument: tfpfl.build_algorithm(name, model, population) makes one"
    check_type("the algorithm", algorithm, Algorithm, what)


def _num_required(function: Callable) -> int:
    """The number of positional arguments that a function cannot do without."""
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in positional for p in signature(function).parameters.values())


KINDS = ("mean", "sum", "rows")
SHARED = ("model", "backbone", "head", None)


def kinds(algorithm: Algorithm) -> list:
    """The kinds of aggregate in `algorithm.aggregate`: a list of one, or of one for each top-level field of the update.

    Raises:
        InvalidArgument: a kind is not 'mean', 'sum' or 'rows', or several are not in a NamedTuple; or `shares`, which
            is checked here with it, is another word.
    """
    spec = algorithm.aggregate
    if not isinstance(spec, str) and not hasattr(spec, "_fields"):
        raise InvalidArgument(
            "aggregate must be mean, sum or rows, or a NamedTuple of these with the fields of the update: the server's "
            f"aggregate has this type; found {type(spec).__name__} {spec!r}"
        )
    if algorithm.shares not in SHARED:
        raise InvalidArgument(f"shares is 'model', 'backbone', 'head' or None; found {algorithm.shares!r}")
    found = [spec] if isinstance(spec, str) else list(spec)
    for kind in found:
        if kind not in KINDS:
            raise InvalidArgument(f"unknown aggregate {kind!r}: one of {', '.join(KINDS)}")
    return found


def check_no_balance(algorithm: Algorithm, what: str) -> None:
    """Checks that updates may be changed at the server, where the clients do not know of it.

    Args:
        algorithm: the algorithm whose updates are changed.
        what: what changes them, for the message.

    Raises:
        InvalidArgument: the algorithm has a `balance`.
    """
    if algorithm.balance is not None:
        raise InvalidArgument(
            f"{what} changes what the server adds up, but the clients of this method have already kept what they sent: "
            "the server's sum would drift away from what the clients keep, and nothing corrects it (`balance` in "
            "tfpfl/algorithms/contract.py). Use --on-broken reject with --clip-norm or --max-norm, which a client "
            "applies to its own update, or another method"
        )


def check_head_predicts(algorithm: Algorithm, what: str) -> None:
    """Checks that clients predict with the head of their personal model alone.

    Args:
        algorithm: the algorithm whose prediction is changed.
        what: what changes it, for the message.

    Raises:
        InvalidArgument: the algorithm has a `predictor`.
    """
    if algorithm.predictor is not None:
        raise InvalidArgument(
            f"{what} works with the head of the personal model alone, but the clients of this method predict with more "
            "than this head (`predictor` in tfpfl/algorithms/contract.py), and the rest would be lost. Use a method "
            "whose head predicts, such as fedavg or fedper"
        )


def check_one_exchange(algorithm: Algorithm, what: str) -> None:
    """Checks that a round of an algorithm has one exchange.

    Args:
        algorithm: the algorithm.
        what: what needs it, for the message.

    Raises:
        InvalidArgument: the algorithm has a first exchange, `Algorithm.first`.
    """
    if algorithm.first is not None:
        raise InvalidArgument(
            f"{what} cannot be used with a method of two exchanges a round: its clients send two updates of different "
            "meaning, and the second depends on the mean of the first (`first` in tfpfl/algorithms/contract.py). Use a "
            "method with one exchange, such as fedprox or fedavg"
        )
