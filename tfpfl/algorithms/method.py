"""`Method`, the entry of a method in the list `ALGORITHMS`. Every method's file ends with its entry."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from inspect import Parameter, signature
from operator import or_
from typing import Union, get_args, get_origin


@dataclass(frozen=True)
class Method:
    """The facts about a personalized federated method: name, builder, costs, reference and presets.

    `down` and `up` are the numbers that a client receives and sends in a round, in terms of b (weights of the
    backbone), h (weights of the head), d = b + h and I (clients). In float32 each number has 4 bytes.
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
    older: dict = field(default_factory=dict)  # format of config.json -> hyperparameters of runs of older formats

    @property
    def hyperparameters(self) -> dict:
        """The builder's keyword-only arguments: {name: inspect.Parameter}, with default and annotation.

        An argument without an annotation gets the type of its default; Optional[T], and T with the default None, are
        T | None.
        """
        parameters = signature(self.builder, eval_str=True).parameters
        return {name: _with_type(p) for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}

    def evaluated(self, hyperparameters: dict) -> str:
        """The kind of `personal_model` with these hyperparameters: 'personal', 'global' or 'fine-tuned'."""
        found = [label for (name, value), label in self.evaluates_if.items() if hyperparameters.get(name) == value]
        return found[0] if found else self.evaluates


def _with_type(p: Parameter) -> Parameter:
    kind = p.annotation
    if kind is p.empty and p.default is not p.empty:
        kind = type(p.default)
    if get_origin(kind) is Union:
        kind = reduce(or_, get_args(kind))
    if isinstance(kind, type) and p.default is None:
        kind = kind | None
    return p.replace(annotation=kind)
