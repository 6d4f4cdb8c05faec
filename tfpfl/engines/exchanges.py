"""A round with two exchanges, for every engine: a round of each exchange, for the same clients; see `Exchange`.

What the clients keep between the two is made here and forgotten here, so no engine and no store knows of it.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from tfpfl.algorithms.contract import Algorithm, Between
from tfpfl.algorithms.exchanges import first_key, merged_metrics
from tfpfl.checks import InvalidArgument, check_listed
from tfpfl.engines.graphs import relaxed, total
from tfpfl.engines.packed import initial_states, side_by_side
from tfpfl.engines.visit import RoundOutput, client_state_spec, finish_metrics, metric_contribution


def begin(algorithm: Algorithm) -> Callable:
    """Makes (client state, visit) -> (`Between` with nothing kept yet, the visit of the first exchange)."""
    assert algorithm.first is not None
    keeps = algorithm.first.keeps
    return lambda state, visit: (Between(state, keeps(visit.info)), visit._replace(key=first_key(visit.key)))


def end(first: dict, second: dict, visit: Any) -> tuple[dict, dict]:
    """A client's metrics of the whole round, and what it adds to the round's metrics."""
    metrics = OrderedDict(sorted(merged_metrics(first, second).items()))
    return metrics, metric_contribution(metrics, visit.info.num_examples)


class TwoExchanges:
    """Executes rounds with two exchanges.

    Args:
        algorithm: one with a `first`.
        first, second: (server, client states, visits) -> RoundOutput, a round of `first_of` and of `second_of` it.
        initialize: () -> the server's state before round 1.
    """

    def __init__(self, algorithm: Algorithm, first: Callable, second: Callable, initialize: Callable):
        assert algorithm.first is not None
        keeping = algorithm._replace(init_client=algorithm.first.keeps)
        self._first, self._second, self.initialize = first, second, initialize
        self._kept, self._spec = initial_states(keeping), client_state_spec(keeping)
        self._end = relaxed(end)
        self._key = relaxed(first_key)

    def next(self, server: Any, client_states: list, visits: list, gone: Collection[int] = ()) -> RoundOutput:
        """Executes one round.

        Args:
            server, client_states, visits: see `Rounds.next`.
            gone: ids of clients that leave between the exchanges. The first aggregate has their update. Their states
                do not change, and their metrics are those of the first exchange and not in the round's.

        Returns:
            As `Rounds.next`. If all are gone, the server's state is that after the first exchange, and the round's
            metrics are {}. If the work of some clients is not finite in the first exchange, 'finite' is 0 for these
            alone: the others' second exchange began from the sum that they broke.

        Raises:
            InvalidArgument: `gone` is no list, or names a client that is not in the round.
        """
        check_listed("gone", gone, "[3, 7]")
        ids = [int(visit.info.client_id) for visit in visits]
        if strange := sorted({*map(int, gone)} - {*ids}):
            raise InvalidArgument(
                f"clients {strange} cannot leave between the exchanges: the round has the clients {ids}"
            )
        kept = self._kept(side_by_side([visit.info for visit in visits])).each(self._spec)
        states = [Between(*both) for both in zip(client_states, kept, strict=True)]
        keys = [np.asarray(self._key(visit.key)) for visit in visits]  # arrays, which Ray can send
        at_first = [visit._replace(key=key) for visit, key in zip(visits, keys, strict=True)]
        begun = self._first(server, states, at_first)
        stay = [i for i, visit in enumerate(visits) if int(visit.info.client_id) not in gone]
        if not stay:
            return begun._replace(client_states=client_states, metrics=OrderedDict())
        ended = self._second(begun.server, [begun.client_states[i] for i in stay], [visits[i] for i in stay])
        new_states, metrics, added = list(client_states), list(begun.client_metrics), []
        for place, i in enumerate(stay):
            new_states[i] = ended.client_states[place].state
            metrics[i], sums = self._end(begun.client_metrics[i], ended.client_metrics[place], visits[i])
            added.append(sums)
        at_fault = [int(m["finite"]) for m in begun.client_metrics]
        if not all(at_fault):  # what the others did in the second exchange began from a state that these broke
            metrics = [m | {"finite": np.int32(first)} for m, first in zip(metrics, at_fault, strict=True)]
        return RoundOutput(ended.server, new_states, finish_metrics(total(added)), metrics)
