"""The cost of a visit for a client: passes through the backbone, and floating point operations (FLOPs).

Passes are counted while a visit runs, and so is what a head computes from features that are there already. The FLOPs
of a pass through the backbone are counted in its graph, see operations.py. Those of the head, a product of matrices,
are computed. A multiplication and an addition are two FLOPs.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.algorithms.exchanges import before_work
from tfpfl.algorithms.parts import linear_head
from tfpfl.checks import traced_by_design
from tfpfl.data.randomness import client_key
from tfpfl.runs.operations import count_operations

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
    vectors: float = 0.0  # products of all features with a vector, as head_rate='safe' takes them
    solutions: float = 0.0  # exact solutions for a head, without the step that each also takes


class Flops(NamedTuple):
    """Floating point operations for one example, in the forward pass and in the backward pass."""

    forward: int
    backward: int


class Counter:
    """Counts the examples that go forward and backward through a model's backbone, and steps on the head alone.

    Use the attribute `model`, a copy of the given model that counts in `forward` and `backward`. Steps on the head are
    added to `head_steps` in graphs that are traced in `with linear_head.counting(counter.add_of_head)`.
    """

    def __init__(self, model):
        self.forward = self.backward = 0
        self.head_steps = self.vectors = self.solutions = 0.0
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

    def add_of_head(self, examples: int, steps: float, vectors: int, solutions: int) -> None:
        """Adds what a head computed from the features of so many examples, see `linear_head.counted`."""
        self.head_steps += examples * steps
        self.vectors += examples * vectors
        self.solutions += examples * solutions

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

    with linear_head.counting(counter.add_of_head):
        traced_by_design(tf.function(work, autograph=False))(server, state, data)
    examples = int(data.info.num_examples)
    found = (counter.forward, counter.backward, counter.head_steps, counter.vectors, counter.solutions)
    forward, backward, *of_head = (number / examples for number in found)
    return Work(Passes(forward, backward), *of_head)


def first_visit(run: "Run", place: int) -> Work:
    """The work of a client's first visit in a run; `place` is the client's among those that train.

    It is the whole work: whether this client is a straggler in round 1 says nothing of the others.
    """
    client_id = int(run.population.client_ids[place])
    x, y = run.federation.arrays(client_id, "train", labels=run.population.labels)
    key = client_key(run.config.seed, 1, [client_id])[0]
    data = ClientData(x, y, run.population.info(client_id, run.whole.dtype), key)
    whole = {"straggler": 0.0} if "straggler" in run.config.method.hyperparameters else {}
    return count_work(lambda model: run.recipe.method(model, run.population, **whole), run.whole, data)


def backbone_flops(model) -> Flops:
    """Floating point operations of one example's pass through the backbone; backward: the gradient of theta only.

    Products, convolutions, biases and pooling count, as TensorFlow's profiler has them, and sums and products of
    numbers; activation functions and reshapes do not. For convolutions without padding it overestimates the cost of the
    gradient, and that of a transposed convolution. The steps of a recurrent layer count, also in a loop.

    Raises:
        Unavailable: this TensorFlow has no such profiler, or it is not known how many steps a loop takes.
    """
    theta = tuple(tf.TensorSpec(w.shape, w.dtype) for w in model.initial_theta)
    x, dphi = model.example_spec(1), tf.TensorSpec([1, model.num_features], model.dtype)

    def there_and_back(theta, x, dphi):
        with tf.GradientTape() as tape:
            tape.watch(theta)
            phi = model._apply(theta, x)
        return phi, tape.gradient(phi, theta, dphi, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    forward = count_operations(model._apply, theta, x)
    return Flops(forward, count_operations(there_and_back, theta, x, dphi) - forward)


def head_flops(num_features: int, num_classes: int) -> Flops:
    """Floating point operations of the head for one example, without softmax.

    Forward: the logits. Backward: the gradients of kernel, bias and features.
    """
    products = 2 * num_features * num_classes
    return Flops(products + num_classes, 2 * products + num_classes)


def solution_flops(num_examples: float, num_features: int, num_classes: float) -> float:
    """Floating point operations of an exact solution for a head, without those of one step (`linear_head.fit_exact`).

    With A = [Phi, 1] and n the smaller of its sides: the smaller of A^T A and A A^T, its Cholesky factor, two solutions
    with the factor, and a product between them.
    """
    side = num_features + 1
    n = min(num_examples, side)
    return 2 * num_examples * n * side + n**3 / 3 + 6 * n**2 * num_classes


def visit_flops(work: Work, model, num_examples: float, num_classes: float) -> float:
    """Floating point operations of a client's visit.

    Every pass goes through the backbone and the head. A step on the head alone counts the logits and the gradient of
    the head; an exact solution counts its products and its factorization, too. What is computed only for a log or a
    comparison, such as the loss before PFLEGO's steps, is not counted. Nor is what a method computes beside its passes:
    Fed3R's products of features (on `mlp200` several times its pass), FedCP's policy and kernels, GPFL's embeddings;
    and what it does in later visits only, as FedALA with p > 1. Where a head stays as it is in a pass, as in FedBABU
    and in the second phase of FedRep and FedPAC, its gradient counts all the same: on `mlp200` for digits 7 % of
    FedBABU's visit with 10 classes.

    Args:
        work: counted by `count_work`.
        model: the SplitModel.
        num_examples, num_classes: N_i and K_i.

    Raises:
        Unavailable: this TensorFlow has no profiler that counts operations.
    """
    backbone, head = backbone_flops(model), head_flops(model.num_features, num_classes)
    forward, backward = (work.passes[k] * (backbone[k] + head[k]) for k in (0, 1))
    vectors = work.vectors * head_flops(model.num_features, 1).forward
    solutions = work.solutions * solution_flops(num_examples, model.num_features, num_classes)
    return num_examples * (forward + backward + work.head_steps * 2 * head.forward + vectors) + solutions
