"""One client's visit in one round: what both engines run for a client, around the algorithm's own functions."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData, ClientOutput
from tfpfl.data.population import ClientInfo
from tfpfl.engines import aggregation
from tfpfl.models import tree
from tfpfl.models.losses import cross_entropy, logits
from tfpfl.models.weights import Head, Weights

GLOBAL = "global"  # what `Algorithm.global_model` is called in evaluations
EVALUATION_CHUNK = (
    512  # examples at a time: evaluation of a large client needs no more memory than training a small one
)


class Visit(NamedTuple):
    """What the coordinator hands to a client whose data the worker reads by id."""

    info: ClientInfo
    key: Any  # int32 [2], see ClientData.key


class RoundOutput(NamedTuple):
    """The result of one round, of either engine."""

    server: Any  # the server's new state
    client_states: list  # the cohort's new states, in the order given
    metrics: dict  # over the cohort: means weighted by N_i, bytes as sums
    client_metrics: list  # a dict of scalars per client, in the order given


class ClientResult(NamedTuple):
    """What a client's visit ends with, for the engines."""

    state: Any
    metrics: dict
    contribution: aggregation.Contribution
    metric_sums: dict


class Readers(NamedTuple):
    """Where a visit finds its examples: functions of the visit, from a file by id or from the visit itself."""

    train: Callable  # (visit) -> (x, y)
    held_out: dict  # split -> (visit) -> (x, y); evaluated where asked


def structure_of(function, *specs):
    """The shapes and dtypes that a function returns: a structure of TensorSpec."""
    outputs = tf.function(function, autograph=False).get_concrete_function(*specs).structured_outputs
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs)


def info_spec(dtype) -> ClientInfo:
    """The type of `ClientInfo`."""
    scalar = tf.TensorSpec([], tf.int32)
    return ClientInfo(scalar, scalar, scalar, tf.TensorSpec([], dtype))


def visit_spec(dtype) -> Visit:
    """The type of `Visit`."""
    return Visit(info_spec(dtype), tf.TensorSpec([2], tf.int32))


def client_state_spec(algorithm: Algorithm):
    """The type of a client's state; the width of heads is open, so that clients of several K_i share a round."""
    return _kept_structure_of(algorithm.init_client, info_spec(algorithm.model.dtype))


def server_state_spec(algorithm: Algorithm):
    """The type of the server's state."""
    return _kept_structure_of(algorithm.init_server)


_STRUCTURES = WeakKeyDictionary()  # function -> {types of its arguments: what `structure_of` found}


def _kept_structure_of(function, *specs):
    """`structure_of`, traced once for a function.

    What was found is kept as long as the function itself, which an algorithm holds, and so never longer than its model.
    """
    try:
        known = _STRUCTURES.setdefault(function, {})
    except TypeError:  # a callable that cannot be hashed, or not be referred to weakly
        return structure_of(function, *specs)
    if specs not in known:
        known[specs] = structure_of(function, *specs)
    return known[specs]


def evaluate(model, weights: Weights, x, y) -> OrderedDict:
    """Mean cross-entropy and accuracy on some examples; both 0 where there are none (see 'examples')."""
    return scores(weights.head, model.features_in_chunks(weights.theta, x, EVALUATION_CHUNK), y)


def scores(head: Head, phi, y) -> OrderedDict:
    """`evaluate`, from the examples' features."""
    z = logits(head, phi)
    examples = tf.shape(y)[0]
    correct = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(z, 1, tf.int32), y), tf.int32))
    loss = tf.cond(examples > 0, lambda: cross_entropy(z, y), lambda: tf.zeros([], z.dtype))
    return OrderedDict(correct=correct, examples=examples, loss=loss)


def by_split(results: dict, prefix: str = "") -> OrderedDict:
    """{split: {name: value}} as {'{prefix}{split}_{name}': value}."""
    return OrderedDict(
        (f"{prefix}{split}_{name}", value) for split, scores in results.items() for name, value in scores.items()
    )


def of_global(scores: dict) -> dict:
    """Of a client's scores those of the global model, with the names that a personal model's have; {} without one."""
    return {name.removeprefix(f"{GLOBAL}_"): v for name, v in scores.items() if name.startswith(f"{GLOBAL}_")}


def client_work(algorithm: Algorithm, readers: Readers) -> Callable:
    """(message, client state, visit) -> ClientOutput, with the metrics that the training loop needs: see `checked`."""

    def work(message, state, visit) -> ClientOutput:
        x, y = readers.train(visit)
        output = algorithm.client_update(message, state, ClientData(x, y, visit.info, visit.key))
        held_out = {}
        if readers.held_out:
            model = algorithm.local_model(message, output)
            held_out = {s: evaluate(algorithm.model, model, *read(visit)) for s, read in readers.held_out.items()}
        return checked(algorithm, message, output, held_out)

    return work


def checked(algorithm: Algorithm, message, output: ClientOutput, held_out: dict, update=None) -> ClientOutput:
    """A client's output with its state's shapes restored, and the metrics that the training loop needs.

    'finite' (0 or 1): no NaN or infinity in the update, the state and the loss; 'bytes_down', 'bytes_up': the message
    and the update (`update`, where `output.update` is a part of it); and the scores on held-out splits of the model
    that the client holds right after its work.
    """
    spec = client_state_spec(algorithm)
    state = tf.nest.map_structure(lambda t, s: tf.ensure_shape(t, s.shape), output.state, spec)
    finite = tree.all_finite((output.update, state, output.metrics, output.weight))
    metrics = {name: tf.convert_to_tensor(value) for name, value in output.metrics.items()}
    metrics |= {
        "finite": tf.cast(finite, tf.int32),
        "bytes_down": tree.num_bytes(message),
        "bytes_up": metrics.get("bytes_up", tree.num_bytes(output.update if update is None else update)),
    }
    metrics |= by_split(held_out)
    return output._replace(state=state, metrics=OrderedDict(sorted(metrics.items())))


def evaluation_work(algorithm: Algorithm, readers: Readers) -> Callable:
    """(message, client state, visit) -> scores on every held-out split.

    Of the client's personal model, '{split}_{name}', and of the global model, 'global_{split}_{name}', where there is
    one.
    """

    def work(message, state, visit) -> OrderedDict:
        x, y = readers.train(visit)
        models = {"": algorithm.personal_model(message, state, ClientData(x, y, visit.info, visit.key))}
        if algorithm.global_model is not None:
            models[f"{GLOBAL}_"] = algorithm.global_model(message)
        found = OrderedDict()
        for prefix, weights in models.items():
            scored = {s: evaluate(algorithm.model, weights, *read(visit)) for s, read in readers.held_out.items()}
            found |= by_split(scored, prefix)
        return found

    return work


def server_step(algorithm: Algorithm) -> Callable:
    """(server state, aggregate, total weight) -> server state; where nothing arrived (weight 0), the state stays."""

    def step(server, aggregated, total_weight):
        updated = algorithm.server_update(server, aggregated)
        return tree.where(total_weight > 0, updated, server)

    return step


def client_result(algorithm: Algorithm, output: ClientOutput, visit) -> ClientResult:
    """What becomes of a client's checked output."""
    sums = metric_contribution(output.metrics, visit.info.num_examples)
    return ClientResult(output.state, output.metrics, aggregation.contribution(algorithm, output), sums)


def metric_contribution(metrics: dict, num_examples) -> OrderedDict:
    """What a client adds to the cohort's metrics: means are weighted by N_i; bytes, 'finite', 'rejected' are counted.

    A rejected client (see `tfpfl.algorithms.transforms.screening`) is in no mean.
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
        elif not name.endswith(("_correct", "_examples", "_loss")):  # held-out scores are averaged by the evaluation
            summed[name] = weight * tf.cast(value, tf.float64)
    return summed


def finish_metrics(summed: dict) -> OrderedDict:
    """The cohort's metrics from the summed contributions."""
    examples = tf.cast(summed["examples"], tf.float64)
    return OrderedDict((name, v / examples if v.dtype.is_floating else v) for name, v in summed.items())


def federation_readers(algorithm: Algorithm, federation, held_out: Sequence[str] = ()) -> Readers:
    """Reads a visit's examples from the federation's files, by client id and inside the graph."""

    def read(split):
        reader = federation.reader(split, labels=algorithm.population.labels)

        def from_file(visit):
            x, y = reader(visit.info.client_id)
            return tf.cast(x, algorithm.model.dtype), y

        return from_file

    return Readers(read("train"), {split: read(split) for split in held_out})


ARRAYS = Readers(lambda data: (data.x, data.y), {})  # the visit is a ClientData, and carries its examples
