"""A visit is one client's work in one round. Every engine runs it, around the algorithm's own functions.

`client_work` trains, `evaluation_work` scores, `server_step` updates the server; the rest are their types and parts.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, Between, ClientData, ClientOutput
from tfpfl.algorithms.transforms import screening
from tfpfl.algorithms.transforms.schedule import counted_part
from tfpfl.checks import InvalidArgument, check_type
from tfpfl.data.population import ClientInfo
from tfpfl.data.randomness import client_key
from tfpfl.engines import aggregation
from tfpfl.engines.inputs import check_fits
from tfpfl.engines.states import kept
from tfpfl.models import passes, tree
from tfpfl.models.heads import HeadKind
from tfpfl.models.losses import logits
from tfpfl.models.weights import Head, Weights

GLOBAL = "global"  # what `Algorithm.global_model` is called in evaluations
HELD_OUT = re.compile("(train|validation|test)_(correct|examples|loss|score|logits|outputs)")  # scores of a client
_OF_CLOCK = ("seconds", "dropped", "late", "virtual_seconds")
OF_THE_ROUND = ("clients", "examples", "finite", "round", *_OF_CLOCK, "came", "too_few", "rejected_clients")


class Visit(NamedTuple):
    """What a client is given in a round, if its examples are read from the federation's files by client id."""

    info: ClientInfo
    key: Any  # int32 [2], the random key of this client and round; see ClientData.key


def visits(algorithm: Algorithm, round_num: int, client_ids: Sequence[int], *, seed: int = 0) -> list[Visit]:
    """Makes what these clients are given in a round: their scalars and the random keys of the round.

    Args:
        algorithm: gives the population and the dtype.
        round_num: the number of the round, >= 0; training starts with round 1.
        client_ids: the ids of the clients, in any order; the visits have the same order.
        seed: the seed of the run, >= 0.

    Raises:
        ValueError: the seed or the round is negative.
        InvalidArgument: a client is not in the algorithm's population.
    """
    ids, asked = algorithm.population.client_ids, np.asarray(client_ids)
    if asked.ndim != 1 or (len(asked) and asked.dtype.kind not in "iu"):
        raise InvalidArgument(f"client_ids must be a list of ids, such as [0, 3]; found {client_ids!r}")
    if len(strange := np.setdiff1d(asked, ids)):
        raise InvalidArgument(
            f"client_ids: the population has no client {', '.join(map(str, strange))}. It has {len(ids)} clients, from "
            f"{ids[0]} to {ids[-1]}; `algorithm.population.client_ids` lists them"
        )
    info, dtype = algorithm.population.info, algorithm.model.dtype
    keys = client_key(seed, round_num, client_ids)
    return [Visit(info(i, dtype), key) for i, key in zip(client_ids, keys, strict=True)]


class RoundOutput(NamedTuple):
    """The result of one round; the same for every engine."""

    server: Any  # the server's new state
    client_states: list  # the new state of every client, in the order of the visits
    metrics: dict  # over the round's clients: means weighted by N_i; bytes are sums
    client_metrics: list  # a dict of scalars for every client, in the order of the visits


class ClientResult(NamedTuple):
    """The result of one client's visit, as the engines pass it on."""

    state: Any  # the client's new state
    metrics: dict  # scalars
    contribution: aggregation.Contribution  # to the aggregate
    metric_sums: dict  # what the client adds to the round's metrics


class WithLogits(tuple):
    """Names of splits, for the argument `held_out` of an engine or `splits` of a `Scorer`: scores with their logits.

    The scores of a client then also have '{split}_logits', padded with zeros to one shape for all clients, and
    '{split}_outputs', how many outputs its head has. The names alone, as any other sequence, give neither.
    """


class Readers(NamedTuple):
    """Functions that read the examples of a visit, from the federation's files or from the visit itself."""

    train: Callable  # (visit) -> (x, y)
    held_out: dict  # {split: (visit) -> (x, y)}, for the splits that are scored
    room: dict = {}  # {split: (rows, columns)} of the padded logits, for the splits whose logits are wanted


def client_work(algorithm: Algorithm, readers: Readers) -> Callable:
    """Makes (message, client state, visit) -> ClientOutput: `client_update`, held-out scores, `checked`, `as_sent`."""

    def work(message, state, visit) -> ClientOutput:
        x, y = readers.train(visit)
        with passes.drawing(visit.key):
            output = algorithm.client_update(message, state, ClientData(x, y, visit.info, visit.key))
        output = check_output(algorithm, output)
        held_out = {}
        if readers.held_out:
            model = algorithm.local_model(message, output)
            held_out = scores_by_split(algorithm.model, model, readers, visit)
        return as_sent(algorithm, state, checked(algorithm, message, output, held_out), visit)

    return work


def checked(algorithm: Algorithm, message, output: ClientOutput, held_out: dict, update=None) -> ClientOutput:
    """Adds the metrics that the training loop needs.

    These are 'finite' (1 if update, state, weight and metrics have no NaN or infinity and the weight is not negative,
    otherwise 0); 'bytes_down', the size of the message; 'bytes_up', the size of the update; and the held-out scores.

    Args:
        algorithm, message: of this visit.
        output: what `check_output` returned.
        held_out: {split: scores} of the model that the client holds right after its local work; {} for none.
        update: the whole update, if `output.update` is only a part of it.
    """
    check_names(output.metrics)
    weight = tree.as_tensor(output.weight, algorithm.model.dtype)
    finite = tree.all_finite((output.update, output.state, output.metrics, weight)) & (weight >= 0)
    metrics = {name: tf.convert_to_tensor(value) for name, value in output.metrics.items()}
    metrics |= {
        "finite": tf.cast(finite, tf.int32),
        "bytes_down": tree.num_bytes(counted_part(message)),
        "bytes_up": metrics.get("bytes_up", tree.num_bytes(output.update if update is None else update)),
    }
    metrics |= by_split(held_out)
    return output._replace(weight=weight, metrics=OrderedDict(sorted(metrics.items())))


def check_output(algorithm: Algorithm, output: Any) -> ClientOutput:
    """Checks what `client_update` returned, and returns it with the client's state as tensors.

    Raises:
        InvalidArgument: it is no `ClientOutput`, its weight or a metric is not one number, no metric is called 'loss',
            or its state has another structure, shape or dtype than `init_client` gives.
    """
    what = "client_update must return a tfpfl.ClientOutput(update, weight, state, metrics)"
    check_type("what client_update returns", output, ClientOutput, "a tfpfl.ClientOutput(update, weight, state, ...)")
    check_type("the metrics of client_update", output.metrics, Mapping, "a dict {name: number}")
    for name, value in {"weight": output.weight, **{f"metric {n!r}": v for n, v in output.metrics.items()}}.items():
        try:
            found = tf.convert_to_tensor(value)
        except (ValueError, TypeError):
            raise InvalidArgument(f"{what}, and its {name} one number; found {value!r}") from None
        if found.shape.rank not in (0, None) or not (found.dtype.is_floating or found.dtype.is_integer):
            raise InvalidArgument(f"{what}, and its {name} one number; found {found.dtype.name} {found.shape}")
    if "loss" not in output.metrics and not isinstance(output.state, Between):  # of two exchanges, one may have it
        found = ", ".join(output.metrics) or "none"
        raise InvalidArgument(f"{what}, and its metrics have 'loss', the loss on the client's examples; found {found}")
    return output._replace(state=kept(output.state, client_state_spec(algorithm), "client_update", "init_client"))


def check_names(metrics: dict) -> None:
    """Checks that a client's metrics have names of their own.

    Raises:
        InvalidArgument: a name is that of something that the engine or the training says of a round. The metric would
            take its place, and means are divided by the round's 'examples'.
    """
    of_screening = [name for name in screening.METRICS if name in metrics]
    own = of_screening if len(of_screening) == 1 else []  # screening adds both (a method that has both is not noticed)
    for name in metrics:
        if name in (*OF_THE_ROUND, *own) or HELD_OUT.fullmatch(name):
            known = ", ".join((*OF_THE_ROUND, *screening.METRICS))
            raise InvalidArgument(
                f"a metric of client_update cannot be called {name!r}: a round has something else of this name. Choose "
                f"another one; taken are {known} and the held-out scores, such as test_loss"
            )


def as_sent(algorithm: Algorithm, state, output: ClientOutput, visit) -> ClientOutput:
    """The output as it leaves the client, see `Algorithm.sent`; `state` is that before the visit."""
    return output if algorithm.sent is None else algorithm.sent(state, output, visit)


def client_result(algorithm: Algorithm, output: ClientOutput, visit) -> ClientResult:
    """Makes the `ClientResult` of a visit from the client's output, which `checked` has completed."""
    sums = metric_contribution(output.metrics, visit.info.num_examples)
    return ClientResult(output.state, output.metrics, aggregation.contribution(algorithm, output), sums)


def metric_contribution(metrics: dict, num_examples) -> OrderedDict:
    """What one client adds to the round's metrics.

    Bytes, 'finite' and 'rejected' are sums over clients; all other metrics are means over clients, weighted by N_i.
    A rejected client (see `tfpfl.algorithms.transforms.screening`) has weight 0 in every mean.
    """
    if "rejected" in metrics:
        num_examples = tf.where(tf.equal(metrics["rejected"], 0), num_examples, 0)
    weight = tf.cast(num_examples, tf.float64)
    summed = OrderedDict(clients=tf.constant(1, tf.int64), examples=tf.cast(num_examples, tf.int64))
    for name, value in metrics.items():
        if name == "rejected":
            value = value > 0
        if name.startswith("bytes_") or name in ("finite", "rejected"):
            summed[name] = tf.cast(value, tf.int64)
        elif not HELD_OUT.fullmatch(name):  # those are averaged by the evaluation
            summed[name] = weight * tf.cast(value, tf.float64)
    return summed


def finish_metrics(summed: dict) -> OrderedDict:
    """Makes the round's metrics from the sum of all clients' `metric_contribution`: divides the means by sum N_i.

    A mean over no client, as in a round of which all were rejected, is NaN. `Training` leaves it out of the history.
    """
    examples = tf.cast(summed["examples"], tf.float64)
    return OrderedDict((name, v / examples if v.dtype.is_floating else v) for name, v in summed.items())


def server_step(algorithm: Algorithm) -> Callable:
    """Makes (server state, aggregate, total weight) -> new server state. With total weight 0 the state does not change.

    The weight is 0 when no update arrived, for example because all were rejected.
    """

    def step(server, aggregated, total_weight):
        updated = kept(algorithm.step(server, aggregated, total_weight), server, "server_update", "init_server")
        return tree.where(total_weight > 0, updated, server)

    return step


def evaluation_work(algorithm: Algorithm, readers: Readers) -> Callable:
    """Makes (message, client state, visit) -> scores on every held-out split, as a dict of scalars.

    '{split}_{name}' are the scores of the client's personal model; 'global_{split}_{name}' are those of the global
    model, if the algorithm has one.
    """

    def work(message, state, visit) -> OrderedDict:
        x, y = readers.train(visit)
        data = ClientData(x, y, visit.info, visit.key)
        models = {"": (algorithm.personal_model(message, state, data), outputs_of(algorithm, message, state, data))}
        if algorithm.global_model is not None:
            models[f"{GLOBAL}_"] = algorithm.global_model(message), None
        found: OrderedDict = OrderedDict()
        for prefix, (weights, outputs) in models.items():
            found |= by_split(scores_by_split(algorithm.model, weights, readers, visit, outputs), prefix)
        return found

    return work


def outputs_of(algorithm: Algorithm, message, state, data: ClientData) -> Callable | None:
    """The function (phi [n, M]) -> outputs z [n, K] with which a client predicts; None: its head does it alone."""
    return None if algorithm.predictor is None else algorithm.predictor(message, state, data)


def scores_by_split(model, weights: Weights, readers: Readers, visit, outputs: Callable | None = None) -> dict:
    """{split: scores} of a model on a client's held-out examples; see `evaluate`."""
    found = {}
    for split, read in readers.held_out.items():
        x, y = read(visit)
        found[split] = evaluate(model, weights, x, y, readers.room.get(split), outputs)
    return found


def evaluate(model, weights: Weights, x, y, room: tuple | None = None, outputs: Callable | None = None) -> OrderedDict:
    """Scores a model: {'loss': mean loss, 'correct': int32, 'examples': int32}; all 0 without examples.

    A kind whose score is no fraction of right examples, such as regression, has 'score': float [], not 'correct'.

    Args:
        model: the SplitModel.
        weights: its backbone's and head's weights.
        x: [n, ...], the examples.
        y: int32 [n], the labels; or numbers [n, K].
        room: (rows, columns); then there are also 'logits' [rows, columns], those of the n examples and K outputs
            padded with zeros, and 'outputs': int32, K. None: not.
        outputs: what predicts from the features in place of the head; see `Algorithm.predictor`.
    """
    phi = model.features_in_chunks(weights.theta, x)
    return scores(model.kind, weights.head, phi, y, room, outputs)


def scores(
    kind: HeadKind, head: Head, phi, y, room: tuple | None = None, predict: Callable | None = None
) -> OrderedDict:
    """Scores a head of a kind, or `predict`, as `evaluate` does, but on the features phi [n, M] of the examples."""
    z = logits(head, phi) if predict is None else predict(phi)
    examples = tf.shape(y)[0]

    def if_any(value):
        return tf.cond(examples > 0, value, lambda: tf.zeros([], z.dtype))

    loss = if_any(lambda: kind.loss(z, y))
    if kind.counts:
        correct = tf.reduce_sum(tf.cast(kind.correct(z, y), tf.int32))
        found = OrderedDict(correct=correct, examples=examples, loss=loss)
    else:
        found = OrderedDict(examples=examples, loss=loss, score=if_any(lambda: kind.score(z, y)))
    if room is not None:
        outputs = tf.shape(z)[1]
        found["logits"] = tf.ensure_shape(tf.pad(z, [[0, room[0] - examples], [0, room[1] - outputs]]), room)
        found["outputs"] = outputs
    return found


def by_split(results: dict, prefix: str = "") -> OrderedDict:
    """Flattens {split: {name: value}} to {'{prefix}{split}_{name}': value}."""
    return OrderedDict(
        (f"{prefix}{split}_{name}", value) for split, scores in results.items() for name, value in scores.items()
    )


def of_global(scores: dict) -> dict:
    """The global model's scores among a client's scores, without the prefix 'global_'; {} if there are none."""
    return {name.removeprefix(f"{GLOBAL}_"): v for name, v in scores.items() if name.startswith(f"{GLOBAL}_")}


def federation_readers(algorithm: Algorithm, federation, held_out: Sequence[str] = ()) -> Readers:
    """Makes `Readers` that read a visit's examples from the federation's files, by client id, inside the graph.

    The examples are decoded in the dtype of the algorithm's model. Decoded in float32 and then cast, they would keep
    float32's rounding of raw * scale, which a float64 model would then learn from.

    Raises:
        InvalidArgument: the algorithm was built for other clients or examples; see `check_fits`.
    """
    check_fits(algorithm, federation)

    def read(split):
        reader = federation.reader(split, algorithm.population.labels, algorithm.model.dtype)
        return lambda visit: reader(visit.info.client_id)

    return Readers(read("train"), {split: read(split) for split in held_out}, room_of(algorithm, federation, held_out))


def room_of(algorithm: Algorithm, federation, held_out: Sequence[str]) -> dict:
    """{split: (most examples of a client, most outputs of a head)} for `WithLogits`; {} for other sequences."""
    if not isinstance(held_out, WithLogits):
        return {}
    population = algorithm.population
    columns = max(int(population.num_classes.max()), population.num_labels or 0)
    return {s: (int(federation.num_examples(s)[population.client_ids].max()), columns) for s in held_out}


def _carried(data: ClientData) -> tuple:
    """The examples that a visit carries. Classes are int32 then, whatever integers they came as, such as uint8."""
    return data.x, tf.cast(data.y, tf.int32) if data.y.shape.rank == 1 else data.y


ARRAYS = Readers(_carried, {})  # for visits that are `ClientData` and carry their examples


def structure_of(function, *specs):
    """Traces a function and gives the shapes and dtypes that it returns, as a structure of TensorSpec.

    Raises:
        InvalidArgument: it returns None, or None is a part of what it returns.
    """
    outputs = tf.function(function, autograph=False).get_concrete_function(*specs).structured_outputs
    if any(leaf is None for leaf in tf.nest.flatten(outputs)):
        name = getattr(function, "__qualname__", repr(function))
        raise InvalidArgument(
            f"a function of the algorithm, {name}, returned None, or None is a part of what it returned: a state and a "
            "message have tensors only. A client without a state has an empty tuple: init_client=lambda info: ()"
        )
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs)


def info_spec(dtype) -> ClientInfo:
    """The shapes and dtypes of a `ClientInfo`, as TensorSpec; `dtype` is that of the model."""
    scalar = tf.TensorSpec([], tf.int32)
    return ClientInfo(scalar, scalar, scalar, tf.TensorSpec([], dtype))


def visit_spec(dtype) -> Visit:
    """The shapes and dtypes of a `Visit`, as TensorSpec; `dtype` is that of the model."""
    return Visit(info_spec(dtype), tf.TensorSpec([2], tf.int32))


def client_state_spec(algorithm: Algorithm):
    """The shapes and dtypes of a client's state. A head's width is open, so that clients may differ in K_i."""
    return _kept_structure_of(algorithm.init_client, info_spec(algorithm.model.dtype))


def server_state_spec(algorithm: Algorithm):
    """The shapes and dtypes of the server's state, as a structure of TensorSpec."""
    return _kept_structure_of(algorithm.init_server)


_STRUCTURES: WeakKeyDictionary = WeakKeyDictionary()  # function -> {types of its arguments: result of `structure_of`}


def _kept_structure_of(function, *specs):
    """`structure_of`, but a function is traced only once.

    The result is kept as long as the function lives. The algorithm holds the function, so it never outlives its model.
    """
    try:
        known = _STRUCTURES.setdefault(function, {})
    except TypeError:  # the callable cannot be hashed, or does not allow weak references
        return structure_of(function, *specs)
    if specs not in known:
        known[specs] = structure_of(function, *specs)
    return known[specs]
