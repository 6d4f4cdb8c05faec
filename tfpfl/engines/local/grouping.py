"""Three ways in which the local engine computes the clients of a round: one by one, fused, or stacked.

All three call the algorithm's own functions and give the same result up to rounding. `OneByOne` is the reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm
from tfpfl.engines import aggregation
from tfpfl.engines.graphs import any_number, in_order, relaxed
from tfpfl.engines.packed import (
    Packed,
    any_examples,
    any_state_spec,
    fused_work,
    groups,
    one_each,
    side_by_side,
    tree_sum,
)
from tfpfl.engines.rounds import Part
from tfpfl.engines.visit import Readers, client_result, client_state_spec, client_work

STACK = 64  # the largest number of clients in one vectorized computation


class OneByOne:
    """Computes every client by itself, several at the same time on threads. The result does not depend on the threads.

    Args:
        algorithm: the algorithm to run.
        readers: the clients' examples.
        threads: number of clients computed at the same time.
    """

    def __init__(self, algorithm: Algorithm, readers: Readers, threads: int):
        work = client_work(algorithm, readers)

        def visit_client(message, state, visit):
            result = client_result(algorithm, work(message, state, visit), visit)
            rows = tf.nest.map_structure(lambda row: row[None], result.contribution.rows)
            return result._replace(contribution=result.contribution._replace(rows=rows))

        self._visit = relaxed(visit_client, None, any_state_spec(algorithm), any_examples)
        self._threads = threads

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every client, in the order of the visits."""

        def visit(i):
            state, metrics, contribution, sums = self._visit(message_for(i), states[i], visits[i])
            return Part([i], [state], [metrics], contribution, sums)

        return in_order(visit, range(len(visits)), self._threads)


class Fused:
    """Computes a group of clients in one forward and one backward pass; for algorithms that have `one_pass`.

    The examples of a group are one batch; `GROUP_BYTES` of activations limit the group. Between the two passes every
    client works on its own features. The whole group is one graph, traced once for any number of clients. Its clients
    run in parallel there, which is faster than Python threads.

    Args:
        algorithm: one for which `one_pass_of` is not None.
        federation: the clients' examples.
        held_out: as in `Simulation`.
    """

    def __init__(self, algorithm: Algorithm, federation, held_out: Sequence[str]):
        self._bytes, self._spec = algorithm.model.activation_bytes, client_state_spec(algorithm)
        self._work = relaxed(fused_work(algorithm, federation, held_out), None, Packed.type_of, any_number)

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every group, in the order of the visits."""
        message, sizes = message_for(0), [int(v.info.num_examples) for v in visits]
        for group in groups(sizes, self._bytes):
            packed = Packed.made([states[i] for i in group])
            some = side_by_side([visits[i] for i in group])
            new_states, metrics, contribution, sums = self._work(message, packed, some)
            yield Part(group, new_states.each(self._spec), one_each(metrics, group), contribution, sums)


class Stacked:
    """Computes clients with equal N_i and K_i as one vectorized computation; works for every algorithm.

    Worth it for small steps, such as mini-batches of a dense network. Slower for convolutions, whose kernels differ per
    client. Clients without a partner of equal N_i and K_i run one by one, and so does every round with held-out splits.

    Args:
        algorithm: the algorithm to run.
        federation: the clients' examples.
        alone: computes the clients that have no partner.
    """

    def __init__(self, algorithm: Algorithm, federation, alone: OneByOne):
        read = federation.cohort_reader("train", algorithm.population.labels, algorithm.model.dtype)
        self._alone, self._per_client = alone, algorithm.message_per_client

        def work(messages, states, visits):
            x, y, _ = read(visits.info.client_id)
            clients = tf.shape(visits.info.client_id)[0]

            def apart(t):
                return tf.reshape(t, tf.concat([[clients, -1], tf.shape(t)[1:]], 0))

            spec = algorithm.model.example_spec()  # one array after the other: the graph knows their shapes
            x, y = tf.nest.map_structure(apart, (x, y))
            x = tf.nest.map_structure(lambda t, s: tf.ensure_shape(t, [None, *s.shape]), x, spec)

            def one(arguments):
                own, state, visit, x, y = arguments
                message = own if self._per_client else messages
                work = client_work(algorithm, Readers(lambda visit: (x, y), {}))
                return client_result(algorithm, work(message, state, visit), visit)

            own = messages if self._per_client else ()
            states, metrics, parts, sums = tf.vectorized_map(one, (own, states, visits, x, y))
            added = aggregation.Contribution(tree_sum(parts.sums), tree_sum(parts.weight), parts.rows)
            return states, metrics, added, tree_sum(sums)

        spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), client_state_spec(algorithm))
        self._work = relaxed(work, any_number if self._per_client else None, lambda states: spec, any_number)

    def __call__(self, message_for: Callable, states: list, visits: list):
        """Yields a `Part` for every stack of clients, then one for every client without a partner."""
        alike: dict[Any, list] = {}
        rest = []
        for i, visit in enumerate(visits):
            alike.setdefault((int(visit.info.num_examples), int(visit.info.num_classes)), []).append(i)
        for members in alike.values():
            for start in range(0, len(members), STACK):
                stack = members[start : start + STACK]
                if len(stack) == 1:
                    rest += stack
                    continue
                messages = side_by_side([message_for(i) for i in stack]) if self._per_client else message_for(0)
                own = side_by_side([states[i] for i in stack]), side_by_side([visits[i] for i in stack])
                new_states, metrics, contribution, sums = self._work(messages, *own)
                yield Part(stack, one_each(new_states, stack), one_each(metrics, stack), contribution, sums)
        rest.sort()
        parts = self._alone(lambda i: message_for(rest[i]), [states[i] for i in rest], [visits[i] for i in rest])
        yield from (part._replace(positions=[rest[i] for i in part.positions]) for part in parts)
