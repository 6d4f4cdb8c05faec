"""The local engine: calls the algorithm's functions in this process. It does not need TensorFlow Federated."""

from collections.abc import Callable, Sequence

from tfpfl.algorithms.contract import Algorithm, ClientData, check_is_algorithm
from tfpfl.algorithms.exchanges import first_of, second_of
from tfpfl.checks import InvalidArgument, check_choice, check_listed
from tfpfl.engines.graphs import check_threads
from tfpfl.engines.local.grouping import Fused, OneByOne, Stacked
from tfpfl.engines.packed import one_pass_of
from tfpfl.engines.rounds import Rounds
from tfpfl.engines.visit import ARRAYS, Visit, federation_readers

GROUPINGS = ("auto", "one_by_one", "fused", "stacked")


class Simulation(Rounds):
    """Executes the rounds of an algorithm in this process.

    Args:
        algorithm: the algorithm to run.
        federation: the clients' examples, read by client id; every visit is then a `Visit`. None: every visit is a
            `ClientData` with its examples.
        held_out: splits ('validation', 'test') on which every client of a round scores the model that it holds right
            after its local work; needs a Federation. Default: none.
        grouping: how the clients of a round are computed. 'one_by_one': each by itself. 'fused': one pass through the
            backbone for many clients, if the algorithm allows it. 'stacked': clients of equal size as one vectorized
            computation. 'auto' (default): fused if possible, else one by one. All give the same result up to
            rounding; see `tfpfl.engines.local.grouping`.
        threads: number of clients computed at the same time with 'one_by_one'; default: the number of cores. The
            result does not depend on it.

    Raises:
        InvalidArgument: `grouping` has no such value; it is 'fused' or 'stacked', or there are held-out splits, without
            a federation; it is 'fused' and the algorithm has no single pass that clients can share; or `threads` is
            less than 1.
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
        check_is_algorithm(algorithm)
        check_listed("held_out", held_out, "['test']")
        kinds = (ClientData,) if federation is None else (Visit,)
        if algorithm.first is None:
            super().__init__(algorithm, clients_of(algorithm, federation, held_out, grouping, threads), kinds)
            return
        first = Simulation(first_of(algorithm), federation, grouping=grouping, threads=threads)
        clients = clients_of(second_of(algorithm), federation, held_out, grouping, threads)
        super().__init__(algorithm, clients, kinds, first)


def check_fused(algorithm: Algorithm, federation, grouping: str) -> None:
    """Checks that the clients of a round can be fused, if that is asked for; see `Simulation` for the arguments.

    Raises:
        InvalidArgument: they cannot.
    """
    if grouping == "fused" and (federation is None or one_pass_of(algorithm) is None):
        raise InvalidArgument(
            "grouping='fused' needs a federation, and an algorithm whose client goes forward and backward through the "
            "backbone exactly once, with the weights of the message, without recompute or chunk, and sends its update "
            "as it is. Use grouping='auto'"
        )


def clients_of(
    algorithm: Algorithm, federation, held_out: Sequence[str] = (), grouping: str = "auto", threads: int | None = None
) -> Callable:
    """Makes the way in which the clients of a round are computed; see `Simulation` for arguments and errors.

    Returns:
        `OneByOne`, `Fused` or `Stacked` of `tfpfl.engines.local.grouping`.
    """
    check_choice(grouping=(grouping, GROUPINGS))
    threads = check_threads(threads)
    check_fused(algorithm, federation, grouping)
    if grouping == "stacked" and federation is None:
        raise InvalidArgument(
            "grouping='stacked' needs a federation, from which examples are read. Use grouping='one_by_one'"
        )
    if federation is None and held_out:
        raise InvalidArgument(
            f"held-out splits {', '.join(map(str, held_out))} can be read only from a Federation, and here visits "
            "carry their examples. Give a Federation, or no held_out"
        )
    readers = ARRAYS if federation is None else federation_readers(algorithm, federation, held_out)
    fits = federation is not None and one_pass_of(algorithm) is not None
    if grouping == "fused" or (grouping == "auto" and fits):
        return Fused(algorithm, federation, held_out)
    alone = OneByOne(algorithm, readers, threads)
    return Stacked(algorithm, federation, alone) if grouping == "stacked" and not held_out else alone
