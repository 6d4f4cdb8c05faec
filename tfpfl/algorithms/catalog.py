"""`ALGORITHMS`, the one list that the command line, the tests and the README read."""

from tfpfl.algorithms.apfl import APFL
from tfpfl.algorithms.ditto import DITTO
from tfpfl.algorithms.fedamp import FEDAMP, HEURFEDAMP
from tfpfl.algorithms.fedavg import FEDAVG
from tfpfl.algorithms.fedbabu import FEDBABU
from tfpfl.algorithms.feddyn import FEDDYN
from tfpfl.algorithms.fedfomo import FEDFOMO
from tfpfl.algorithms.fedper import FEDPER
from tfpfl.algorithms.fedprox import FEDPROX
from tfpfl.algorithms.fedrecon import FEDRECON
from tfpfl.algorithms.fedrep import FEDREP
from tfpfl.algorithms.fedrod import FEDROD
from tfpfl.algorithms.fedsgd import FEDSGD
from tfpfl.algorithms.finetune import FEDAVG_FT, FEDPROX_FT
from tfpfl.algorithms.layerwise import LAYERWISE
from tfpfl.algorithms.lg_fedavg import LG_FEDAVG
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.per_fedavg import PER_FEDAVG
from tfpfl.algorithms.pfedme import PFEDME
from tfpfl.algorithms.pflego import PFLEGO
from tfpfl.algorithms.pgfed import PGFED, PGFEDMO
from tfpfl.algorithms.scaffold import SCAFFOLD
from tfpfl.algorithms.separate import LOCAL
from tfpfl.checks import InvalidArgument, unknown

# The order is that of tables and plots.
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
)
ALGORITHMS = {method.name: method for method in _METHODS}


def build_algorithm(name: str, model, population, *, preset: str | None = None, **hyperparameters):
    """An algorithm by its name in `ALGORITHMS`.

    Raises:
        ValueError: an unknown name, preset or hyperparameter (with the valid ones), or one out of range.

    Examples:
        >>> from tfpfl import Population, SplitModel
        >>> from tfpfl.models import build_network
        >>> model, population = SplitModel(build_network("mlp200", (8, 8, 1))), Population([30] * 10, [2] * 10)
        >>> build_algorithm("pflego", model, population, preset="exact", tau=20).aggregate
        'sum'
        >>> build_algorithm("pflego", model, population, tua=20)
        Traceback (most recent call last):
        ValueError: unknown hyperparameter of pflego 'tua'; did you mean 'tau'? there are ...
    """
    check_names(name, preset, hyperparameters)
    method = get_method(name)
    return method.builder(model, population, **{**method.presets.get(preset, {}), **hyperparameters})


def check_names(name: str, preset: str | None, hyperparameters) -> None:
    """Whether there is such an algorithm, with such a preset and such hyperparameters.

    Raises:
        ValueError: an unknown name, with the nearest one and all.
    """
    method = get_method(name)
    if preset is not None and preset not in method.presets:
        raise InvalidArgument(unknown(f"preset of {name}", preset, method.presets))
    for h in hyperparameters:
        if h not in method.hyperparameters:
            raise InvalidArgument(unknown(f"hyperparameter of {name}", h, method.hyperparameters))


def get_method(name: str) -> Method:
    """The entry of a method in `ALGORITHMS`.

    Raises:
        ValueError: an unknown name, with the nearest one.
    """
    if name not in ALGORITHMS:
        raise InvalidArgument(unknown("algorithm", name, ALGORITHMS))
    return ALGORITHMS[name]
