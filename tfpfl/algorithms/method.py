"""`Method`, the entry of a method in the list `ALGORITHMS`. Every method's file ends with its entry."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from inspect import Parameter, signature
from operator import or_
from typing import Any, Union, get_args, get_origin

from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.parts.objectives import parsed_objective
from tfpfl.algorithms.parts.optimizers import Optimizer, client_optimizer
from tfpfl.algorithms.transforms.normalization import normalized
from tfpfl.algorithms.transforms.server_optimizer import server_optimized
from tfpfl.checks import InvalidArgument
from tfpfl.models.heads import check_classes

_SEVERAL = "a client computes features of several models, or at several points, whose statistics would be mixed"
_INSTEAD = "Use 'frozen', or a method with one model on the client, such as fedavg, fedprox, fedper or pflego"
SEVERAL_MODELS = dict.fromkeys(("local", "shared"), f"{_SEVERAL}. {_INSTEAD}")  # of `Method.no_batch_norm`


@dataclass(frozen=True)
class Method:
    """The facts about a personalized federated method: name, builder, costs, reference and presets.

    `down` and `up` are the numbers that a client receives and sends in a round, in terms of b (weights of the
    backbone), h (weights of the head), d = b + h, n (weights of theta that stay with the client), M (features), C
    (classes) and I (clients). In float32 each number has 4 bytes.

    A method has more hyperparameters than its builder has arguments. If the builder takes a `client_opt`, the options
    of this optimizer (`client_optimizer`); and the server's optimizer (`server_optimized`), unless `no_server_opt`
    gives the reason why not or the builder has arguments of these names. `build` passes each to its place.
    """

    name: str  # the value of `--algorithm`
    title: str  # the name in the paper
    builder: Callable  # (model, population, *, hyperparameters) -> Algorithm
    head: str  # 'personal': K_i outputs, kept on the device; 'shared': one head for all
    message: str  # 'broadcast' (the same for all clients) or 'per client'
    state: str  # what a client keeps between its visits
    down: str
    up: str
    reference: str
    evaluates: str = "personal"  # what `personal_model` is: 'personal', 'global', 'fine-tuned'
    evaluates_if: dict = field(default_factory=dict)  # (hyperparameter, value) -> what it is with this value
    presets: dict = field(default_factory=dict)
    preset_init: dict = field(default_factory=dict)  # preset -> `init` of the networks that have a name
    older: dict = field(default_factory=dict)  # format of config.json -> hyperparameters of runs of older formats
    newer: dict = field(default_factory=dict)  # hyperparameter that came without a new format -> its value before
    no_server_opt: str = ""  # why the server takes no optimizer of `server_optimized`, and what to use instead
    no_client_opt: str = ""  # why the builder has no `client_opt`, and what to use instead
    only_classes: str = ""  # why the head's kind must be 'classification', and what to use instead
    sends: str = "update"  # what a client sends: the 'gradient' of its loss, or an 'update'; see `with_objective`
    no_objective: str = ""  # why there is no other objective than the mean, and what to use instead
    no_head_init: str = ""  # why `head_init` of a run changes nothing
    no_median: str = ""  # why a median or trimmed mean of the updates means nothing, and what to use instead
    no_compress: str = ""  # why 8 bits a number are too few for what clients send, and what to use instead
    no_batch_norm: dict = field(default_factory=dict)  # 'local' or 'shared' -> why the method cannot have it
    warning: Callable | None = None  # (history rows, hyperparameters) -> what a user should know of these, or None
    model: Callable | None = None  # (SplitModel) -> the one of the algorithm, if that has layers of the method's own
    personal: str | None = None  # the part of adapters that the method is about; its builder calls `own_part` itself
    batch_norm: str | None = None  # the one that the method is about; its builder calls `transforms.normalized` itself

    @property
    def takers(self) -> tuple[Callable, ...]:
        """The functions whose keyword-only arguments are the hyperparameters; the first is the builder."""
        own = _keywords(self.builder).keys()
        client = (client_optimizer,) if "client_opt" in own and not own & _keywords(client_optimizer).keys() else ()
        server = () if self.no_server_opt or own & _keywords(server_optimized).keys() else (server_optimized,)
        return (self.builder, *client, *server)

    @property
    def hyperparameters(self) -> dict:
        """{name: inspect.Parameter} with default and annotation.

        In a configuration, an optimizer is a name. An argument without an annotation gets the type of its default;
        Optional[T], and T with the default None, are T | None.
        """
        return {name: _by_name(p) for taker in self.takers for name, p in _keywords(taker).items()}

    def build(self, model: Any, population: Any, **hyperparameters: Any) -> Algorithm:
        """Builds the algorithm.

        Args:
            model, population: the arguments of the builder.
            hyperparameters: some of `hyperparameters`; the others have their defaults.

        Raises:
            InvalidArgument: a value is out of range, or does not fit to the others; the method is for classes only,
                and the model's kind is another; or it cannot have the model's `batch_norm` or `personal`.
        """
        if self.only_classes:
            check_classes(model.kind, self.title, self.only_classes)
        if model.initial_head is not None:
            self._check_initial_head(model.initial_head.bias.shape[0], population)
        builder, *others = self.takers
        parts = {
            taker: {n: hyperparameters.pop(n) for n in _keywords(taker) if n in hyperparameters} for taker in others
        }
        if parts.get(client_optimizer):
            opt = hyperparameters.get("client_opt", _keywords(builder)["client_opt"].default)
            hyperparameters["client_opt"] = client_optimizer(opt, **parts[client_optimizer])
        if why := self.no_batch_norm.get(model.batch_norm):
            raise InvalidArgument(f"{self.name} cannot have batch_norm={model.batch_norm!r}: {why}")
        if any(model.own) and "local" in self.no_batch_norm:
            raise InvalidArgument(
                f"{self.name} cannot leave a part of theta with the client: a client computes several models, or at "
                "several points. Use a method with one model on the client, such as pflego, fedavg or fedper, or leave "
                "personal out"
            )
        algorithm = made = builder(model, population, **hyperparameters)
        if parts.get(server_optimized):
            made = server_optimized(algorithm, **parts[server_optimized])
        if self.batch_norm or self.personal or not isinstance(made, Algorithm):  # a wrong result is told of elsewhere
            return made
        return normalized(made, before=algorithm, name=self.name)

    def _check_initial_head(self, outputs: int, population: Any) -> None:
        """Checks that the model's `initial_head` fits to the clients' numbers of outputs."""
        widths = {population.shared_labels()} if self.head == "shared" else set(map(int, population.num_classes))
        if other := widths - {outputs}:
            raise InvalidArgument(
                f"the model's initial head has {outputs} outputs, and heads of {self.name} have "
                f"{', '.join(map(str, sorted(other)))} for this population. It fits only where all clients have the "
                "same outputs: take a population with labels='global'"
            )

    def why_not(self, hyperparameter: str) -> str:
        """Why this method does not have a hyperparameter of a server's or a client's optimizer; '' for any other."""
        of_client = {"client_opt", *_keywords(client_optimizer)}
        return (self.no_server_opt if hyperparameter in _keywords(server_optimized) else "") or (
            self.no_client_opt if hyperparameter in of_client else ""
        )

    def check_objective(self, objective: str) -> None:
        """Checks the text of an objective, and that the method can have it; see `transforms.with_objective`.

        Raises:
            InvalidArgument: the text is wrong, or this method has no other objective than the mean.
        """
        if parsed_objective(objective)[0] != "mean" and self.no_objective:
            raise InvalidArgument(f"{self.name} has no objective {objective}: {self.no_objective}")

    def evaluated(self, hyperparameters: dict) -> str:
        """The kind of `personal_model` with these hyperparameters: 'personal', 'global' or 'fine-tuned'."""
        found = [label for (name, value), label in self.evaluates_if.items() if hyperparameters.get(name) == value]
        return found[0] if found else self.evaluates


def _keywords(function: Callable) -> dict[str, Parameter]:
    parameters = signature(function, eval_str=True).parameters
    return {name: _with_type(p) for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _with_type(p: Parameter) -> Parameter:
    kind = p.annotation
    if kind is p.empty and p.default is not p.empty:
        kind = type(p.default)
    if get_origin(kind) is Union:
        kind = reduce(or_, get_args(kind))
    if isinstance(kind, type) and p.default is None:
        kind = kind | None
    return p.replace(annotation=kind)


def _by_name(parameter: Parameter) -> Parameter:
    return parameter.replace(annotation=str) if Optimizer in get_args(parameter.annotation) else parameter
