"""The rounds of the local engine, of Ray and of several TFF workers: send messages, add up updates, step the server.

`Rounds` has the methods `initialize` and `next` of a `tff.templates.IterativeProcess`, so the training loop can use
either. What differs between the engines is how the clients of a round are computed; they pass that to `Rounds`.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientData
from tfpfl.checks import InvalidArgument, traced_by_design
from tfpfl.data.kinds import LabelKind
from tfpfl.data.layout import is_several
from tfpfl.data.population import ClientInfo
from tfpfl.data.targets import check_values
from tfpfl.engines import aggregation
from tfpfl.engines.exchanges import TwoExchanges
from tfpfl.engines.graphs import any_number, relaxed, total
from tfpfl.engines.inputs import check_whole
from tfpfl.engines.packed import open_shapes
from tfpfl.engines.states import check_given, check_given_server
from tfpfl.engines.visit import RoundOutput, Visit, client_state_spec, finish_metrics, server_state_spec, server_step


class Part(NamedTuple):
    """The results of g of the round's clients."""

    positions: list  # where these clients stand in the cohort, 0..r-1
    states: list  # their new states, in the order of `positions`
    metrics: list  # a dict of scalars for each, in the order of `positions`
    contribution: aggregation.Contribution  # summed over these clients; rows [g, ...] in the order of `positions`
    metric_sums: dict  # summed over these clients


class Rounds:
    """Executes the rounds of an algorithm with a given way to compute the clients.

    Args:
        algorithm: the algorithm to run.
        clients: (message_for, client states, visits) -> iterable of `Part`, which together hold every client once.
            `message_for(position in the cohort)` is a client's message. See `tfpfl.engines.local.grouping`.
        kinds: what a visit is: `Visit`, or `ClientData` where examples cannot be read by client id.
        first: if the algorithm has two exchanges in a round, the rounds of `exchanges.first_of` it; `clients` are then
            those of `exchanges.second_of` it.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Callable,
        kinds: tuple[type, ...] = (Visit,),
        first: "Rounds | None" = None,
    ):
        self.algorithm, self._clients, self._check, self.first = algorithm, clients, RoundCheck(algorithm, kinds), first
        self._two = first and TwoExchanges(algorithm, first._exchange, self._exchange, self.initialize)
        step = server_step(algorithm)

        def finish(server, total, client_ids):
            return step(server, aggregation.finish(algorithm, total, client_ids), total.weight)

        self._messages = Messages(algorithm)
        self._finish = relaxed(finish, None, lambda total: total._replace(rows=any_number(total.rows)), any_number)
        self._initialize = traced_by_design(tf.function(algorithm.init_server, autograph=False))

    def initialize(self):
        """The server's state before round 1."""
        return self._initialize()

    def next(
        self,
        server,
        client_states: list,
        visits: list = None,  # type: ignore[assignment]
        gone: Collection[int] = (),
    ) -> RoundOutput:
        """Executes one round.

        Args:
            server: the server's state.
            client_states: the state of every client of the round.
            visits: one `Visit` for every client, in the same order; without a federation one `ClientData`.
            gone: ids of clients that leave between the two exchanges of a round, see `TwoExchanges.next`.

        Raises:
            InvalidArgument: there are no visits; the lists differ in length; something else was given as a visit, such
                as a `ClientData`, whose examples nobody would read, where there is a federation; a `ClientData` has
                no examples, examples that are not finite, or labels outside 0..K_i-1; or a state is not one that a
                client of this K_i can have.
        """
        self._check.server(server)
        self._check(client_states, visits)
        _check_arrays(visits)
        if self._two is not None:
            return self._two.next(server, client_states, visits, gone)
        if len(gone):
            raise InvalidArgument(f"clients {list(gone)} cannot leave between two exchanges: a round has one")
        return self._exchange(server, client_states, visits)

    def _exchange(self, server, client_states: list, visits: list) -> RoundOutput:
        done = joined(self._clients(self._messages(server, visits), client_states, visits))
        states, metrics = [None] * len(visits), [None] * len(visits)
        for i, state, its_metrics in zip(done.positions, done.states, done.metrics, strict=True):
            states[i], metrics[i] = state, its_metrics
        order = tf.stack([visits[i].info.client_id for i in done.positions])
        server = self._finish(server, done.contribution, order)
        return RoundOutput(server, states, finish_metrics(done.metric_sums), metrics)


def _check_arrays(visits: list) -> None:
    for visit in visits:
        if isinstance(visit, ClientData) and isinstance(visit.x, tf.data.Dataset):
            raise InvalidArgument(
                f"the visit of client {int(visit.info.client_id)} carries a tf.data.Dataset, which only tfpfl.federate "
                "takes. Here give arrays: x, y = next(dataset.unbatch().batch(2**30).as_numpy_iterator()), then "
                "ClientData(x, y, visit.info, visit.key)"
            )


def joined(parts: Iterable[Part]) -> Part:
    """Joins several parts of a round into one: lists are concatenated, sums are added in the order of the parts."""
    positions, states, metrics, rows = [], [], [], []
    sums, metric_sums = Sum(), Sum()
    for part in parts:
        positions += part.positions
        states += part.states
        metrics += part.metrics
        sums.add((part.contribution.sums, part.contribution.weight))
        rows.append(part.contribution.rows)
        metric_sums.add(part.metric_sums)
    rows = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *rows)
    added, weight = sums.total()
    return Part(positions, states, metrics, aggregation.Contribution(added, weight, rows), metric_sums.total())


class Messages:
    """Makes the server's messages: one for all clients, computed once a round, or one for each client."""

    def __init__(self, algorithm: Algorithm):
        self._message = traced_by_design(tf.function(algorithm.message, autograph=False))
        self._per_client = algorithm.message_per_client

    def __call__(self, server, visits: list):
        """Makes (position in the cohort) -> that client's message."""
        if self._per_client:
            return lambda i: self._message(server, visits[i].info.client_id)
        message = self._message(server)
        return lambda i: message


def for_new_clients(algorithm: Algorithm, adapt: Adaptation) -> Algorithm:
    """The algorithm whose messages are those from which `adapt` starts."""
    message = adapt.message
    return algorithm if message is None else algorithm._replace(message=lambda server: message(server))


class Sum:
    """Adds structures of tensors in a fixed order, and holds at most `HELD` of them in memory."""

    HELD = 16

    def __init__(self):
        self._held = []

    def add(self, structure) -> None:
        """Adds one structure; all must have the same shapes."""
        self._held.append(structure)
        if len(self._held) == self.HELD:
            self._held = [total(self._held)]

    def total(self):
        """Returns the sum of the structures added so far."""
        return total(self._held)


class RoundCheck:
    """Checks what a round or an evaluation is given: the visits, the examples that they carry, and the clients' states.

    Args:
        algorithm: the algorithm.
        kinds: what a visit may be.
    """

    def __init__(self, algorithm: Algorithm, kinds: tuple[type, ...] = (Visit,)):
        self._algorithm, self._kinds = algorithm, kinds
        self._spec, self._open_shapes = client_state_spec(algorithm), open_shapes(algorithm)
        self._shapes: dict[tuple, list] = {}  # numbers of a client -> the shape of every leaf of its state

    def __call__(self, client_states: Any, visits: Any) -> None:
        """Checks the arguments of one call.

        Raises:
            InvalidArgument: see `check_visits` and `check_carried`; or a state has not the structure, the shapes and
                the dtypes of what `init_client` gives for its client.
        """
        check_visits(client_states, visits, self._kinds)
        check_carried(self._algorithm.model, visits)
        numbers = [tuple(map(int, visit.info[:3])) for visit in visits]
        self._learn([of_one for of_one in numbers if of_one not in self._shapes])
        for place, (state, of_one) in enumerate(zip(client_states, numbers, strict=True)):
            check_given(state, self._spec, self._shapes[of_one], f"client_states[{place}], of client {of_one[0]},")

    def server(self, server: Any) -> None:
        """Checks the server's state.

        Raises:
            InvalidArgument: it has not the structure, the shapes and the dtypes of what `init_server` gives.
        """
        check_given_server(server, server_state_spec(self._algorithm))

    def _learn(self, numbers: list) -> None:
        """Keeps the shapes of the states of clients with these numbers (client id, N_i, K_i)."""
        if not numbers:
            return
        shapes = [[spec.shape] * len(numbers) for spec in tf.nest.flatten(self._spec)]
        if self._open_shapes is not None:
            ids, examples, classes = np.array(numbers, np.int32).T
            infos = ClientInfo(ids, examples, classes, np.zeros(len(numbers), self._algorithm.model.dtype))
            found = iter(self._open_shapes(infos))
            shapes = [of if of[0].is_fully_defined() else next(found).numpy() for of in shapes]
        self._shapes |= {of_one: [of[i] for of in shapes] for i, of_one in enumerate(numbers)}


A_VISIT = (
    "A visit is what a client is given in one round, its scalars and a random key: `tfpfl.engines.visits(algorithm, "
    "round_num, client_ids)` makes the visits of a round. {examples} (docs/own_loop.md)"
)
EXAMPLES_OF: dict[tuple[type, ...], str] = {  # what a visit may be -> where the examples are
    (Visit,): "The examples are read from the Federation, by client id",
    (ClientData,): "Here it must also carry the client's examples: ClientData(x, y, visit.info, visit.key)",
}


def check_visits(client_states: Any, visits: Any, kinds: tuple[type, ...] = (Visit,)) -> None:
    """Checks that a round has at least one client, none twice, one state for every visit, and visits that are visits.

    The training loop skips a round for which binomial sampling drew no client.

    Args:
        client_states: one state for every visit.
        visits: the visits.
        kinds: what a visit may be.

    Raises:
        InvalidArgument: there are no visits, more or fewer states than visits, or two visits of one client; or
            something else was given. The message says what a visit is and how to make one.
    """
    told = A_VISIT.format(examples=EXAMPLES_OF[kinds])
    for what, given in (("client_states", client_states), ("visits", visits)):
        if not isinstance(given, list | tuple) or hasattr(given, "_fields"):  # a NamedTuple: one state, or one visit
            raise InvalidArgument(
                f"{what} must be a list with one for every client of the round, in the same order; found "
                f"{type(given).__name__}. The call is next(server, client_states, visits). {told}"
            )
    for place, visit in enumerate(visits):
        if not isinstance(visit, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidArgument(
                f"visit {place} must be a tfpfl.{wanted}, found {type(visit).__name__} {str(visit)[:60]!r}. {told}"
            )
    if not visits or len(client_states) != len(visits):
        raise InvalidArgument(
            f"a round needs at least one client, with one state and one visit each; found {len(client_states)} states "
            f"and {len(visits)} visits"
        )
    ids, times = np.unique([int(visit.info.client_id) for visit in visits], return_counts=True)
    if len(ids) < len(visits):
        raise InvalidArgument(
            f"client {ids[times.argmax()]} is in the round {times.max()} times: its update would count more than once, "
            "and it would have several new states. Give each client one visit"
        )


def check_carried(model: Any, visits: list) -> None:
    """Checks the examples that visits carry as arrays. Those of a Federation were checked when it was built.

    A `tf.data.Dataset` is not checked: it would have to be read for that.

    Args:
        model: the algorithm's SplitModel.
        visits: `Visit`s or `ClientData`.

    Raises:
        InvalidArgument: see `check_class_ids`, `check_examples`, `check_num_examples`, `check_shape` and `check_whole`.
    """
    for visit in visits:
        if isinstance(visit, ClientData) and not isinstance(visit.x, tf.data.Dataset):
            check_class_ids(model, visit)
            check_examples(visit, model.kind.label)
            check_num_examples(visit)
            check_shape(model, visit)
            check_whole(model, visit.x, int(visit.info.client_id))


def check_class_ids(model: Any, data: ClientData) -> None:
    """Checks that labels of a model for classes are integers [N].

    Raises:
        InvalidArgument: they are others, such as one-hot rows. The message names the client.
    """
    y = np.asarray(data.y)
    if model.kind.label.is_classes and len(np.atleast_1d(y)) and (y.ndim != 1 or y.dtype.kind not in "iub"):
        raise InvalidArgument(
            f"client {int(data.info.client_id)} has labels of shape {y.shape} and type {y.dtype}: they must be "
            "integers [N], one class for each example. For one-hot rows give labels.argmax(1)"
        )


def check_num_examples(data: ClientData) -> None:
    """Checks that a client was given as many examples as it has in the population.

    Raises:
        InvalidArgument: it was given more or fewer: its weight in means is made of the other number.
    """
    client, found, wanted = int(data.info.client_id), len(data.y), int(data.info.num_examples)
    if found != wanted:
        raise InvalidArgument(
            f"client {client} has {found} examples, but {wanted} in the population, and is weighed by these. Give "
            "tfpfl.Population the numbers of examples that the visits carry"
        )


def check_shape(model: Any, data: ClientData) -> None:
    """Checks that the examples that a client was given, if they are one array, have the shape that the model takes.

    Raises:
        InvalidArgument: they have another. The message names the client.
    """
    if is_several(model.input_shape) or is_several(data.x):
        return
    found, wanted = np.shape(data.x)[1:], tuple(model.input_shape)
    if found != wanted:
        raise InvalidArgument(
            f"client {int(data.info.client_id)} has examples of shape {found}, but the model takes {wanted}"
        )


def check_examples(data: ClientData, kind: LabelKind) -> None:
    """Checks the examples that a client was given.

    Args:
        data: the client's `ClientData`.
        kind: what the labels are.

    Raises:
        InvalidArgument: there are no examples, more or fewer labels than examples, labels outside 0..K_i-1, targets
            that are not numbers [N, K_i] of a sort that the kind learns from, such as 0 or 1, or examples with NaN or
            infinity. The message names the client.
    """
    client, outputs = int(data.info.client_id), int(data.info.num_classes)
    xs, y = [np.asarray(part) for part in tf.nest.flatten(data.x)], np.asarray(data.y)
    if not y.ndim or not all(x.ndim for x in xs) or isinstance(data.y, list | tuple):
        raise InvalidArgument(
            f"client {client}: examples must be an array [N, ...], or a dict or tuple of such arrays, and labels an "
            f"array [N]; found {type(data.x).__name__} and {type(data.y).__name__}. Use np.asarray"
        )
    if not len(y) or any(len(x) != len(y) for x in xs):
        raise InvalidArgument(
            f"client {client} has {len(xs[0])} examples and {len(y)} labels; it needs at least one example, and one "
            "label for each"
        )
    if not kind.is_classes:
        if y.ndim != 2 or y.shape[1] != outputs or y.dtype.kind not in "biuf":
            raise InvalidArgument(
                f"client {client} has targets of shape {y.shape}: they must be numbers [N, {outputs}], one column for "
                f"each output; found {y.dtype}"
            )
        check_values(y, kind.sorts[0], f"client {client}: {kind.name}")  # the first sort has the others in it
    elif y.min() < 0 or y.max() >= outputs:
        raise InvalidArgument(f"client {client} has labels {y.min()}..{y.max()}, but its classes are 0..{outputs - 1}")
    if not all(np.isfinite(x).all() for x in xs):
        raise InvalidArgument(f"client {client} has examples that are not finite: replace NaN and infinity")
