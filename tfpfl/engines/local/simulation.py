"""The local engine: the algorithm's functions in this process. Needs no TFF."""

from collections.abc import Callable, Sequence

from tfpfl.algorithms.contract import Algorithm
from tfpfl.checks import InvalidArgument, check_choice
from tfpfl.engines.graphs import check_threads
from tfpfl.engines.local.grouping import Fused, OneByOne, Stacked
from tfpfl.engines.packed import one_pass_of
from tfpfl.engines.rounds import Rounds
from tfpfl.engines.visit import ARRAYS, federation_readers

GROUPINGS = ("auto", "one_by_one", "fused", "stacked")


class Simulation(Rounds):
    """Runs an algorithm in process.

    Args:
        algorithm: what to run.
        federation: where clients' examples are read by id; None if the visits are `ClientData` that carry them.
        held_out: splits ('validation', 'test') on which every client of the cohort scores the model that it holds right
            after its local work.
        grouping: how the clients of a round are computed. 'one_by_one': each by itself. 'fused': many clients in one
            pass through the backbone, if the algorithm allows it. 'stacked': clients of equal size as one vectorized
            computation. 'auto': fused if the algorithm allows it, else one by one. All give the same result up to
            rounding; see `tfpfl.engines.local.grouping`.
        threads: clients at a time; default: as many as there are cores. It changes no bit of the result.

    Raises:
        ValueError: 'fused' or 'stacked' cannot be.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation=None,
        *,
        held_out: Sequence[str] = (),
        grouping: str = "auto",
        threads: int | None = None,
    ):
        super().__init__(algorithm, clients_of(algorithm, federation, held_out, grouping, threads))


def clients_of(
    algorithm: Algorithm, federation, held_out: Sequence[str] = (), grouping: str = "auto", threads: int | None = None
) -> Callable:
    """How clients are taken through a round in this process; arguments and errors as those of `Simulation`."""
    check_choice(grouping=(grouping, GROUPINGS))
    threads = check_threads(threads)
    fits = federation is not None and one_pass_of(algorithm) is not None
    if grouping == "fused" and not fits:
        raise InvalidArgument(
            "grouping='fused' is for clients that are read by id from a federation, and for algorithms whose client "
            "takes the backbone forward and backward once, at the message's weights, without recompute or chunk"
        )
    if grouping == "stacked" and federation is None:
        raise InvalidArgument("grouping='stacked' is for clients that are read by id from a federation")
    readers = ARRAYS if federation is None else federation_readers(algorithm, federation, held_out)
    if grouping == "fused" or (grouping == "auto" and fits):
        return Fused(algorithm, federation, held_out)
    alone = OneByOne(algorithm, readers, threads)
    return Stacked(algorithm, federation, alone) if grouping == "stacked" and not held_out else alone
