"""The engines by name."""

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.engines.local.simulation import COHORTS
from tfpfl.engines.ray.engine import require_ray
from tfpfl.engines.tff.worker import require_tff

ENGINES = ("local", "tff", "ray")


def check_engine(engine: str) -> None:
    """Whether rounds can run in it here.

    Raises:
        ValueError: an unknown name.
        RuntimeError: TFF, or Ray, is not installed.
    """
    if engine not in ENGINES:
        raise InvalidArgument(unknown("engine", engine, ENGINES))
    if engine == "tff":
        require_tff()
    if engine == "ray":
        require_ray()


def check_grouping(cohort: str, engine: str) -> None:
    """Whether the engine knows this way through a round.

    Raises:
        ValueError: an unknown name, or one that only the local engine knows.
    """
    if cohort not in COHORTS:
        raise InvalidArgument(unknown("cohort", cohort, COHORTS))
    if engine == "tff" and cohort != "auto":
        raise InvalidArgument(
            f"cohort={cohort!r} is for the local engine; TFF runs one client after the other on every core"
        )
