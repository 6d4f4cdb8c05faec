"""The engines by name: the one place that knows all three."""

from collections.abc import Callable, Sequence

from tfpfl.algorithms.contract import Algorithm
from tfpfl.checks import InvalidArgument, unknown
from tfpfl.engines.local.simulation import GROUPINGS, Simulation
from tfpfl.engines.machines import Machines
from tfpfl.engines.ray.engine import RayEngine, require_ray
from tfpfl.engines.tff.aggregators import WithState
from tfpfl.engines.tff.worker import require_tff, use_local_worker

ENGINES = ("local", "tff", "ray")


def make_engine(
    name: str,
    algorithm: Algorithm,
    federation,
    *,
    held_out: Sequence[str] = (),
    grouping: str = "auto",
    threads: int | None = None,
    machines: Machines = Machines(),  # noqa: B008 - frozen
    aggregator: Callable | None = None,
    recipe: Callable | None = None,
):
    """What takes an algorithm's clients through rounds: an object with `initialize` and `next`, as `Simulation` has.

    Args:
        name: 'local', 'tff' or 'ray'.
        algorithm, federation, held_out: as in `Simulation`.
        grouping, threads: of the local engine; 'ray' takes `grouping` too.
        machines: where the work is done: TFF's workers, or the Ray cluster.
        aggregator: () -> a factory of TFF's aggregators, for 'tff' on one worker.
        recipe: (federation) -> the same algorithm, for 'ray'; it must pickle, which an algorithm does not.

    Raises:
        ValueError: an unknown engine, or an argument that it does not take.
        RuntimeError: TFF, or Ray, is not installed.
        MachinesError: the machines do not answer.
    """
    check_engine(name)
    check_grouping(grouping, name)
    if name == "tff" and machines.workers:
        from tfpfl.engines.tff.workers import ShardedProcess

        return ShardedProcess(algorithm, federation, machines, held_out=held_out)
    if name == "tff":
        from tfpfl.engines.tff.process import federate

        use_local_worker(isolate=machines.isolate or None)
        factory = aggregator and aggregator()
        process = federate(algorithm, federation, held_out=held_out, aggregator=factory)
        return WithState(process) if factory else process
    if name == "ray":
        return RayEngine(algorithm, federation, recipe, held_out=held_out, grouping=grouping, machines=machines)
    return Simulation(algorithm, federation, held_out=held_out, grouping=grouping, threads=threads)


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


def check_grouping(grouping: str, engine: str) -> None:
    """Whether the engine knows this way through a round.

    Raises:
        ValueError: an unknown name, or one that only the local engine knows.
    """
    if grouping not in GROUPINGS:
        raise InvalidArgument(unknown("grouping", grouping, GROUPINGS))
    if engine == "tff" and grouping != "auto":
        raise InvalidArgument(
            f"grouping={grouping!r} is for the local engine; TFF runs one client after the other on every core"
        )
