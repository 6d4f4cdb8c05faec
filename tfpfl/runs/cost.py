"""The cost of a visit for a client: passes through the backbone, and floating point operations (FLOPs).

Passes are counted while a visit runs, and so are the steps of a head on features that are computed already. The FLOPs
of a pass through the backbone are counted by TensorFlow's profiler, in the graph. Those of the head, a product of
matrices, are computed. A multiplication and an addition are two FLOPs.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.algorithms.exchanges import before_work
from tfpfl.algorithms.parts import linear_head
from tfpfl.checks import Unavailable, traced_by_design, verbose
from tfpfl.data.randomness import client_key

if TYPE_CHECKING:
    from tfpfl.runs.run import Run


class Passes(NamedTuple):
    """How often a client's training set goes through the backbone in one visit; a batch of N_i / 10 counts 0.1."""

    forward: float
    backward: float


class Work(NamedTuple):
    """What a client computes in one visit."""

    passes: Passes
    head_steps: float  # steps on the head alone, such as PFLEGO's tau - 1; a step on N_i / 10 examples counts 0.1


class Flops(NamedTuple):
    """Floating point operations for one example, in the forward pass and in the backward pass."""

    forward: int
    backward: int


class Counter:
    """Counts the examples that go forward and backward through a model's backbone, and steps on the head alone.

    Use the attribute `model`, a copy of the given model that counts in `forward` and `backward`. Steps on the head are
    added to `head_steps` in graphs that are traced in `with linear_head.counting(counter.add_head_steps)`.
    """

    def __init__(self, model):
        self.forward = self.backward = 0
        self.head_steps = 0.0
        self.model = self._counting(model)

    def _counting(self, model):
        found, apply = copy.copy(model), model._apply

        def counted_apply(weights, x):
            return self._counted(apply(weights, x))

        found._apply = counted_apply
        if hasattr(model, "inner"):  # a `ValvedModel`: a method also uses the model below the valve
            found.inner = self._counting(model.inner)
        return found

    def _counted(self, phi):
        @tf.custom_gradient
        def identity(phi):
            with tf.control_dependencies([tf.numpy_function(self._add_forward, [tf.shape(phi)[0]], tf.int32)]):
                out = tf.identity(phi)

            def gradient(dphi):
                with tf.control_dependencies([tf.numpy_function(self._add_backward, [tf.shape(phi)[0]], tf.int32)]):
                    return tf.identity(dphi)

            return out, gradient

        return identity(phi)

    def add_head_steps(self, examples: int, steps: float) -> None:
        """Adds steps on so many examples."""
        self.head_steps += examples * steps

    def _add_forward(self, examples):
        self.forward += int(examples)
        return np.int32(0)

    def _add_backward(self, examples):
        self.backward += int(examples)
        return np.int32(0)


def count_work(build: Callable[..., Algorithm], model, data: ClientData) -> Work:
    """Runs the first visit of a client, and counts its passes through the backbone and its steps on the head alone.

    If a round has two exchanges, a visit is the work of both.

    Args:
        build: (model) -> the algorithm.
        model: the SplitModel.
        data: the client's examples.
    """
    counter = Counter(model)
    algorithm = build(counter.model)
    server = algorithm.init_server()
    state = algorithm.init_client(data.info)

    def work(server, state, data):
        return algorithm.client_update(*before_work(algorithm, server, state, data), data)

    with linear_head.counting(counter.add_head_steps):
        traced_by_design(tf.function(work, autograph=False))(server, state, data)
    examples = int(data.info.num_examples)
    return Work(Passes(counter.forward / examples, counter.backward / examples), counter.head_steps / examples)


def first_visit(run: "Run", place: int) -> Work:
    """The work of a client's first visit in a run; `place` is the client's among those that train."""
    client_id = int(run.population.client_ids[place])
    x, y = run.federation.arrays(client_id, "train", labels=run.population.labels)
    key = client_key(run.config.seed, 1, [client_id])[0]
    data = ClientData(x, y, run.population.info(client_id), key)
    return count_work(lambda model: run.recipe.method(model, run.population), run.whole, data)


def backbone_flops(model) -> Flops:
    """Floating point operations of one example's pass through the backbone; backward: the gradient of theta only.

    TensorFlow's profiler counts products, convolutions, biases and pooling, but no activation functions or reshapes.
    For strided convolutions without padding it slightly overestimates the cost of the gradient.

    Raises:
        Unavailable: this TensorFlow has no such profiler.
    """
    theta = tuple(tf.TensorSpec(w.shape, w.dtype) for w in model.initial_theta)
    x, dphi = model.example_spec(1), tf.TensorSpec([1, model.num_features], model.dtype)

    def there_and_back(theta, x, dphi):
        with tf.GradientTape() as tape:
            tape.watch(theta)
            phi = model._apply(theta, x)
        return phi, tape.gradient(phi, theta, dphi, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    forward = _profiled(model._apply, theta, x)
    return Flops(forward, _profiled(there_and_back, theta, x, dphi) - forward)


def head_flops(num_features: int, num_classes: int) -> Flops:
    """Floating point operations of the head for one example, without softmax.

    Forward: the logits. Backward: the gradients of kernel, bias and features.
    """
    products = 2 * num_features * num_classes
    return Flops(products + num_classes, 2 * products + num_classes)


def visit_flops(work: Work, model, num_examples: float, num_classes: float) -> float:
    """Floating point operations of a client's visit.

    Every pass goes through the backbone and the head. A step on the head alone counts the logits and the gradient of
    the head. What is computed only for a log or a comparison, such as the loss before PFLEGO's steps, is not counted.
    Nor is what a method computes beside its passes: Fed3R's products of features (on `mlp200` several times its pass),
    FedCP's policy and kernels, GPFL's embeddings.

    Args:
        work: counted by `count_work`.
        model: the SplitModel.
        num_examples, num_classes: N_i and K_i.

    Raises:
        Unavailable: this TensorFlow has no profiler that counts operations.
    """
    backbone, head = backbone_flops(model), head_flops(model.num_features, num_classes)
    forward, backward = (work.passes[k] * (backbone[k] + head[k]) for k in (0, 1))
    return num_examples * (forward + backward + work.head_steps * 2 * head.forward)


def _profiled(function, *specs) -> int:
    """Counts the operations in the graph of a function. What its outputs do not need is removed before."""
    profiler = getattr(tf.compat.v1, "profiler", None)
    if profiler is None:
        raise Unavailable(f"operations cannot be counted: TensorFlow {tf.__version__} has no tf.compat.v1.profiler")
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    needed, left = set(), [output.op for output in traced.outputs]
    while left:
        op = left.pop()
        if op.name not in needed:
            needed.add(op.name)
            left += [*(i.op for i in op.inputs), *op.control_inputs]
    whole = traced.graph.as_graph_def()
    with tf.Graph().as_default() as graph:
        pruned = type(whole)(node=[n for n in whole.node if n.name in needed], library=whole.library)
        tf.graph_util.import_graph_def(pruned, name="")
        options = {**profiler.ProfileOptionBuilder.float_operation(), "output": "none"}
        with _unwarned():
            return int(profiler.profile(graph, cmd="op", options=options).total_float_ops)


@contextmanager
def _unwarned() -> Iterator[None]:
    """Drops the warning of TensorFlow's profiler that it calls a deprecated function: only TensorFlow can mend this.

    Nothing is dropped with TFPFL_VERBOSE=1.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return verbose() or "flops_registry" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
