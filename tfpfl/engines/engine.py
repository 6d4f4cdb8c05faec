"""Makes an engine from its name: 'local', 'tff' or 'ray'. This is the only file that knows all three."""

from collections.abc import Callable, Sequence
from typing import Any

from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.exchanges import first_of, second_of
from tfpfl.checks import InvalidArgument, unknown
from tfpfl.engines.exchanges import TwoExchanges
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
    aggregator: Any = None,
    recipe: Callable | None = None,
):
    """Makes the engine that executes an algorithm's rounds: an object with `initialize` and `next`, like `Simulation`.

    Args:
        name: 'local', 'tff' or 'ray'.
        algorithm, federation, held_out: see `Simulation`.
        grouping: see `Simulation`; for 'local' and 'ray'.
        threads: see `Simulation`; for 'local'.
        machines: the TFF workers, or the Ray cluster, that do the clients' work.
        aggregator: a TFF aggregator factory, or a function () -> one, for 'tff' on one worker.
        recipe: (federation) -> the same algorithm, for 'ray'. It must be picklable, because an algorithm is not.

    Raises:
        InvalidArgument: no engine or `grouping` has this name, or the engine does not support an argument.
        Unavailable: TFF (for 'tff') or Ray (for 'ray') is not installed, or the worker must be isolated and cannot be.
        MachinesError: the TFF workers or the Ray cluster do not answer.
    """
    check_engine(name, machines)
    check_grouping(grouping, name)
    if name == "tff" and machines.workers:
        from tfpfl.engines.tff.workers import ShardedProcess

        return ShardedProcess(algorithm, federation, machines, held_out=held_out)
    if name == "tff":
        from tfpfl.engines.tff.process import federate

        use_local_worker(isolate=machines.isolate)
        if algorithm.first is not None and aggregator is None:  # two processes: clients may leave between them
            first = federate(first_of(algorithm), federation)
            second = federate(second_of(algorithm), federation, held_out=held_out)
            return TwoExchanges(algorithm, first.next, second.next, second.initialize)
        process = federate(algorithm, federation, held_out=held_out, aggregator=aggregator)
        return process if aggregator is None else WithState(process)
    if name == "ray":
        return RayEngine(algorithm, federation, recipe, held_out=held_out, grouping=grouping, machines=machines)
    return Simulation(algorithm, federation, held_out=held_out, grouping=grouping, threads=threads)


def check_engine(engine: str, machines: Machines | None = None) -> None:
    """Checks that an engine exists, that the package it needs is installed here, and that the machines are its own.

    Raises:
        InvalidArgument: no engine has this name, or the TFF workers or the Ray cluster are another engine's.
        Unavailable: TFF (for 'tff') or Ray (for 'ray') is not installed.
    """
    if engine not in ENGINES:
        raise InvalidArgument(unknown("engine", engine, ENGINES))
    for whose, what in (("tff", "workers"), ("ray", "address")):
        if engine != whose and (given := getattr(machines, what, None)):
            raise InvalidArgument(
                f"Machines({what}={given!r}) is for engine={whose!r}, found engine={engine!r}: leave it out, or take "
                "the other engine"
            )
    if engine == "tff":
        require_tff()
    if engine == "ray":
        require_ray()


def check_grouping(grouping: str, engine: str) -> None:
    """Checks that an engine supports this value of `grouping`, the way to compute the clients of a round.

    Raises:
        InvalidArgument: `grouping` is none of `GROUPINGS`, or the engine is 'tff' and `grouping` is not 'auto'.
    """
    if grouping not in GROUPINGS:
        raise InvalidArgument(unknown("grouping", grouping, GROUPINGS))
    if engine == "tff" and grouping != "auto":
        raise InvalidArgument(
            f"grouping={grouping!r} does not work with the TFF engine, which runs one client after the other on every "
            "core. Leave grouping at 'auto', or use the local engine"
        )
