"""What there is to know about a method before it is run; every method's file ends with its own entry."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature


@dataclass(frozen=True)
class Method:
    """What there is to know about a personalized federated method before it is run.

    `bytes_down`, `bytes_up`: scalars a client receives and sends in a round, in terms of b (backbone), h (head) and
    d = b + h; times 4 in float32.
    """

    name: str  # as `--algorithm` takes it
    title: str  # as the paper writes it
    builder: Callable  # (model, population, *, hyperparameters) -> Algorithm
    head: str  # 'personal': of width K_i, on the device; 'shared': one for all
    message: str  # 'broadcast' or 'per client'
    state: str  # what a client keeps
    down: str
    up: str
    reference: str
    evaluates: str = "personal"  # what `personal_model` is: 'personal', 'global', 'fine-tuned'
    evaluates_if: dict = field(default_factory=dict)  # (hyperparameter, its value) -> what it is then
    presets: dict = field(default_factory=dict)

    @property
    def hyperparameters(self) -> dict:
        """name -> inspect.Parameter, with its default and annotation."""
        parameters = signature(self.builder).parameters
        return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}

    def evaluated(self, hyperparameters: dict) -> str:
        """What `personal_model` is with these hyperparameters: 'personal', 'global' or 'fine-tuned'."""
        found = [label for (name, value), label in self.evaluates_if.items() if hyperparameters.get(name) == value]
        return found[0] if found else self.evaluates
