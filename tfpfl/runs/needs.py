"""What a run needs besides its data: packages, and metrics that are known."""

from tfpfl.engines.engine import check_engine
from tfpfl.runs.aggregators import PRIVATE
from tfpfl.runs.config import RunConfig
from tfpfl.runs.metrics import as_metric
from tfpfl.runs.privacy import require_accounting


def check_needs(config: RunConfig) -> None:
    """Checks what a run needs besides its data, before any work is done: packages, and metrics that are known.

    Raises:
        Unavailable: the engine, a private aggregator or noise needs a package that is not installed.
        InvalidArgument: this process knows no metric of one of the names.
    """
    check_engine(config.engine)
    for name in config.metrics:
        as_metric(name, config.kind)
    if config.aggregator in PRIVATE or config.secure_noise is not None:
        require_accounting()  # the summary needs it, perhaps hours later
