"""`ALGORITHMS`, the list of all methods for the command line, the tests and the README; and functions on it."""

from collections.abc import Iterable
from typing import Any, get_args

import numpy as np

from tfpfl.algorithms.adapters import ADAPTERS
from tfpfl.algorithms.apfl import APFL
from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.ditto import DITTO
from tfpfl.algorithms.fed3r import FED3R
from tfpfl.algorithms.fedala import FEDALA
from tfpfl.algorithms.fedamp import FEDAMP, HEURFEDAMP
from tfpfl.algorithms.fedas import FEDAS
from tfpfl.algorithms.fedavg import FEDAVG
from tfpfl.algorithms.fedbabu import FEDBABU
from tfpfl.algorithms.fedbn import FEDBN
from tfpfl.algorithms.fedcp import FEDCP
from tfpfl.algorithms.feddane import FEDDANE
from tfpfl.algorithms.feddbe import FEDDBE
from tfpfl.algorithms.feddyn import FEDDYN
from tfpfl.algorithms.fedfomo import FEDFOMO
from tfpfl.algorithms.fedpac import FEDPAC
from tfpfl.algorithms.fedper import FEDPER
from tfpfl.algorithms.fedproto import FEDPROTO
from tfpfl.algorithms.fedprox import FEDPROX
from tfpfl.algorithms.fedrecon import FEDRECON
from tfpfl.algorithms.fedrep import FEDREP
from tfpfl.algorithms.fedrod import FEDROD
from tfpfl.algorithms.fedsgd import FEDSGD
from tfpfl.algorithms.finetune import FEDAVG_FT, FEDPROX_FT
from tfpfl.algorithms.gpfl import GPFL
from tfpfl.algorithms.knn_per import KNN_PER
from tfpfl.algorithms.layerwise import LAYERWISE
from tfpfl.algorithms.lg_fedavg import LG_FEDAVG
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.per_fedavg import PER_FEDAVG
from tfpfl.algorithms.pfedhn import PFEDHN
from tfpfl.algorithms.pfedme import PFEDME
from tfpfl.algorithms.pflego import PFLEGO
from tfpfl.algorithms.pgfed import PGFED, PGFEDMO
from tfpfl.algorithms.scaffold import SCAFFOLD
from tfpfl.algorithms.separate import LOCAL
from tfpfl.checks import InvalidArgument, check_type, unknown
from tfpfl.data.population import Population
from tfpfl.models.split import SplitModel

# Tables and plots show the methods in this order.
_METHODS = (
    PFLEGO,
    FEDAVG,
    LOCAL,
    FEDSGD,
    FEDPROX,
    SCAFFOLD,
    FEDDYN,
    FEDAVG_FT,
    FEDPROX_FT,
    FEDPER,
    FEDREP,
    FEDBABU,
    FEDRECON,
    LG_FEDAVG,
    FEDROD,
    DITTO,
    PFEDME,
    APFL,
    PER_FEDAVG,
    LAYERWISE,
    FEDFOMO,
    FEDAMP,
    HEURFEDAMP,
    PGFED,
    PGFEDMO,
    FEDBN,
    FEDDANE,
    FEDPAC,
    KNN_PER,
    FED3R,
    FEDPROTO,
    PFEDHN,
    FEDALA,
    FEDDBE,
    FEDAS,
    FEDCP,
    GPFL,
    ADAPTERS,
)
ALGORITHMS = {method.name: method for method in _METHODS}


def build_algorithm(
    name: str | Method, model: SplitModel, population: Population, *, preset: str | None = None, **hyperparameters: Any
) -> Algorithm:
    """Builds an algorithm by its name in `ALGORITHMS`.

    Args:
        name: the name, such as 'pflego'; or a `Method`.
        model: the `SplitModel`.
        population: the `Population` that is trained on.
        preset: the name of a set of hyperparameters in `Method.presets`; None for the defaults.
        hyperparameters: override the defaults and the preset; the builder's docstring describes them. In addition
            those of the server's optimizer (`transforms.server_optimized`), and the options of the clients' one
            (`parts.client_optimizer`); `Method.hyperparameters` lists all.

    Returns:
        The `Algorithm`.

    Raises:
        InvalidArgument: the name, the preset or a hyperparameter is unknown, a value is out of range or of another
            type, model or population is something else, or the builder returned no `Algorithm`.

    Examples:
        >>> from tfpfl import Population, SplitModel
        >>> from tfpfl.models import build_network
        >>> model, population = SplitModel(build_network("mlp200", (8, 8, 1))), Population([30] * 10, [2] * 10)
        >>> build_algorithm("pflego", model, population, preset="exact", tau=20).aggregate
        'sum'
        >>> build_algorithm("pflego", model, population, tua=20)
        Traceback (most recent call last):
        tfpfl.checks.InvalidArgument: unknown hyperparameter of pflego 'tua'; did you mean 'tau'? there are ...
    """
    check_names(name, preset, hyperparameters)
    method = get_method(name)
    if not isinstance(model, SplitModel):
        raise InvalidArgument(f"the model must be a tfpfl.SplitModel, found {type(model).__name__}")
    if not isinstance(population, Population):
        hint = ": give federation.population()" if hasattr(population, "population") else ""
        raise InvalidArgument(f"the population must be a tfpfl.Population, found {type(population).__name__}{hint}")
    _check_numbers(method, hyperparameters)
    made = method.build(model, population, **{**method.presets.get(preset, {}), **hyperparameters})
    if not isinstance(made, Algorithm):
        raise InvalidArgument(f"the builder of {method.name} returned {type(made).__name__}, not an Algorithm")
    return made


def _check_numbers(method: Method, hyperparameters: dict) -> None:
    """Refuses a text or None where a number is wanted, and a number with a point where a whole number is wanted."""
    known = method.hyperparameters
    for name, value in hyperparameters.items():
        annotation = known[name].annotation
        kinds = get_args(annotation) or (annotation,)
        number = not {int, float}.isdisjoint(kinds)
        nothing = value is None and type(None) not in kinds
        if (number and (nothing or (isinstance(value, str) and str not in kinds))) or (
            int in kinds and isinstance(value, float | np.floating) and float not in kinds
        ):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise InvalidArgument(f"{name} must be {wanted}, found {value!r}")


def check_names(name: str | Method, preset: str | None, hyperparameters: Iterable[str]) -> None:
    """Checks the name of an algorithm, of a preset (None: no preset) and of hyperparameters, but not their values.

    Raises:
        InvalidArgument: a name is unknown. The message lists the valid ones.
    """
    method = get_method(name)
    if preset is not None:
        check_type("preset", preset, str, "the name of one, or None")
    if preset is not None and preset not in method.presets:
        raise InvalidArgument(unknown(f"preset of {method.name}", preset, method.presets))
    known = method.hyperparameters
    for h in hyperparameters:
        if h not in known:
            if why := method.why_not(h):
                raise InvalidArgument(f"{method.name} has no hyperparameter {h}: {why}")
            raise InvalidArgument(unknown(f"hyperparameter of {method.name}", h, known))


def get_method(name: str | Method) -> Method:
    """The `Method` of this name in `ALGORITHMS`. A `Method` is returned as it is.

    Raises:
        InvalidArgument: the name is unknown. The message lists the valid ones.
    """
    if isinstance(name, Method):
        return name
    check_type("the algorithm", name, str, "the name of one, such as 'pflego', or a tfpfl.Method")
    if name not in ALGORITHMS:
        raise InvalidArgument(unknown("algorithm", name, ALGORITHMS))
    return ALGORITHMS[name]
