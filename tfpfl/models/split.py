"""A model in two parts: a Keras backbone, and a linear head that may have another width for every client."""

import copy
from collections.abc import Callable
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument, check_choice, one_line, warn_user
from tfpfl.data.kinds import LabelKind
from tfpfl.data.layout import packed
from tfpfl.data.population import ClientInfo, Tensor
from tfpfl.data.randomness import ModelKey, check_model_seed
from tfpfl.models import passes, tree
from tfpfl.models.adapters import Adapters, check_adapters
from tfpfl.models.cuts import cut
from tfpfl.models.functional import functional
from tfpfl.models.heads import HeadKind, head_kind
from tfpfl.models.inputs import Inputs
from tfpfl.models.layers import flatten, penalty
from tfpfl.models.loops import training_loop
from tfpfl.models.normalization import Normalized
from tfpfl.models.precision import cast_output, dtype_of
from tfpfl.models.reading import trace, vocabulary
from tfpfl.models.trunk import Trunk
from tfpfl.models.weights import Head, Weights

HEAD_INITS = ("glorot", "uniform01", "zeros")
CHUNK = 512  # examples of a forward pass, if only features and no gradient are needed
BLOCK_BYTES = 2**24  # see `SplitModel.block`; by `activation_bytes`, of which a pass has about a third at a time
_ADDED = 4  # bytes of activations for each byte of theta: adding its gradient is then little beside the two passes
_SMALLEST_BLOCK = 8  # examples; with fewer, the kernels of convolutions have too little to do
_SHARED_HEAD = 2**31 - 1  # a shared head is drawn with this number in place of a client id


class SplitModel(Normalized):
    """A model in two parts: a Keras backbone with features phi(x; theta) in R^M, and a linear head.

    The outputs z are phi @ kernel + bias: logits for classes. Client i's head has a kernel [M, K_i] and a bias [K_i].

    Args:
        backbone: a Keras model from [N, ...], or from a dict or a list of such arrays, to [N, M]. Its current trainable
            weights are the initial theta. Its frozen weights never change. Its dtype, float32 or float64, is used for
            all computations; in mixed precision (`keras.mixed_precision`) it is float32, and the backbone computes in
            half precision inside.
        seed: the seed of the initial heads, which are a function of (seed, client id); from 0 to 2^31 - 1.
        head_init: 'glorot' (uniform kernel, zero bias), 'uniform01' (kernel and bias uniform in [0, 1), as in the
            PFLEGO authors' code) or 'zeros'.
        input_shape: the shape of one example, or a dict, list or tuple of shapes; needed only for a subclassed model,
            which does not know it.
        kind: what the head predicts, and its loss: 'classification' (softmax), 'multilabel' (a logistic loss for each
            output), 'regression' (squared error), 'poisson' (counts), 'quantile:Q' or 'huber:DELTA'; see
            `tfpfl.data.kinds.label_kind`.
        train_from: the name of the first layer that trains. What lies below it is the trunk: it never changes, runs as
            for inference, and is no part of theta. `trunk_federation` computes its features once. A name that begins
            those of several layers, such as 'block_12', means the first of them. None: the whole backbone trains.
        adapters: 'lora:R', 'scale_shift' or 'bottleneck:R': theta is the weights of such adapters, and the backbone's
            own weights never change; see `tfpfl.models.adapters`. With `train_from`, only layers above the cut have
            adapters. None: no adapters.
        personal: the part of the adapters that stays with the client and is never sent: 'A' or 'B' of lora (FedSA-LoRA
            is 'B'), 'scale' or 'shift' of scale_shift, 'down' or 'up' of a bottleneck. `build_algorithm` leaves it
            out of messages; a builder that is called by itself, such as `fedavg`, does not. None: all are shared.
        batch_norm: what trainable BatchNormalization layers do, see `tfpfl.models.normalization`: 'frozen' (the stored
            statistics normalize), 'local' (statistics, scale and offset belong to the client) or 'shared' (statistics
            are averaged by the server). None: 'frozen'.

    Attributes:
        kind: the `HeadKind`.
        trunk: with `train_from`, the `Trunk`; else None. `backbone` is then what lies above it.
        above: with `train_from`, the `SplitModel` whose examples are the trunk's features; else None.
        adapters: with `adapters`, the `Adapters`; else None.
        initial_head: the head that `with_initial_head` was given, as arrays; else None.
        reads: what the backbone takes: 'numbers'; 'whole' if the whole input is cast to integers, as before an
            Embedding; 'mixed' if only a part of it is. Integers are given to a backbone that takes whole numbers.
        vocabulary: the rows of the Embedding in which the backbone looks whole numbers up as they are, the fewest if
            there are several; else None.
        ends_linear: whether the backbone's last operation is a product with a matrix, such as a Dense layer without an
            activation.

    If an example is several arrays, input_shape, reads and vocabulary are dicts or tuples with a value for each.

    A backbone that ends in a softmax or a sigmoid gives a warning: its features would be probabilities. So does
    one with regularizers, constraints or `add_loss`, which are ignored.

    Raises:
        InvalidArgument: head_init, kind or batch_norm is unknown; batch_norm is 'local' or 'shared' and the backbone
            has no plain trainable BatchNormalization, or has adapters; the input shape is not fixed; the backbone's
            output is not [N, M]; a layer draws random numbers in a way that cannot be brought; the backbone cannot be
            cut at `train_from`; the adapters are unknown, or no layer takes them; `personal` is no part of them; the
            seed is outside of its range.

    Examples:
        >>> from tfpfl.models import build_network
        >>> model = SplitModel(build_network("mlp200", (8, 8, 1)))
        >>> model.num_features, model.num_backbone_weights, model.num_weights(num_labels=2)
        (200, 13000, 13402)
    """

    trunk: Trunk | None = None
    above: "SplitModel | None" = None
    adapters: Adapters | None = None
    initial_head: Head | None = None

    def __init__(
        self,
        backbone: keras.Model,
        *,
        seed: int = 0,
        head_init: str = "glorot",
        input_shape: Any = None,
        kind: str | LabelKind | HeadKind = "classification",
        train_from: str | None = None,
        adapters: str | None = None,
        personal: str | None = None,
        batch_norm: str | None = None,
    ) -> None:
        if head_init not in HEAD_INITS:
            raise InvalidArgument(f"unknown head_init {head_init!r}: one of {', '.join(HEAD_INITS)}")
        if not isinstance(backbone, keras.layers.Layer):
            raise InvalidArgument(
                f"the backbone is a Keras model, found {one_line(repr(backbone))}. A network of tfpfl is made by "
                "tfpfl.models.build_network('mlp200', federation.example_shape), and one in a file is read by "
                "keras.models.load_model"
            )
        check_model_seed(seed)
        check_adapters(adapters, personal)
        if train_from is not None:
            given = {"seed": seed, "head_init": head_init, "kind": kind, "batch_norm": batch_norm}
            self._cut(backbone, train_from, input_shape, adapters=adapters, personal=personal, **given)
            return
        self.backbone, self.seed, self.head_init, self.kind = backbone, int(seed), head_init, head_kind(kind)
        self.inputs = Inputs(backbone, input_shape)
        self.input_shape = self.inputs.shape
        output = self.inputs.called(backbone, 2)  # also builds a model that is not built yet
        if not tf.is_tensor(output) or output.shape.rank != 2 or output.shape[0] != 2:
            found = output.shape if tf.is_tensor(output) else type(output).__name__
            raise InvalidArgument(
                f"a backbone must map [N, ...] to features [N, M]; for 2 examples this one gives {found}"
            )
        self.dtype = dtype_of(backbone, output)
        if (ignored := penalty(backbone, weights_rest=adapters is not None)) is not None:
            warn_user(
                f"{ignored}, and penalties of layers are no part of the objective: training ignores them. Leave them "
                "out of the layers; an optimizer with weight decay, or an objective of your own, can have a penalty"
            )
        self.num_features = int(output.shape[1])
        self.initial_theta, pure = functional(backbone)
        self._set_batch_norm(pure, batch_norm)
        apply: Callable = pure if output.dtype == self.dtype else cast_output(pure, self.dtype)
        if adapters is not None:
            self.adapters = apply = Adapters(adapters, backbone, self.initial_theta, apply, self.seed)
            self.initial_theta = self.adapters.initial
            self._only_adapters_train(self.adapters.personal(personal))
        traced = trace(apply, self.initial_theta, self.inputs, self.dtype, backbone.weights)
        self._activation_bytes, self._convolves = traced.activation_bytes, traced.convolves
        self.reads = packed(traced.reads, self.input_shape)
        self.vocabulary = packed(vocabulary(flatten(backbone), traced), self.input_shape)
        self._dtypes = [self.dtype]
        if self.inputs.several:
            self._dtypes = [tf.int32 if reads == "whole" else self.dtype for reads in traced.reads]
            self._cast, self._apply = self.inputs.taken(apply, self._dtypes)
        else:
            taken = tf.int32 if self.reads == "whole" else self.dtype
            self._cast = lambda x: tf.cast(x, taken)
            self._apply = apply if self.reads != "whole" else lambda theta, x: apply(theta, tf.cast(x, tf.int32))
        self.ends_linear = traced.linear
        if traced.ending is not None:
            warn_user(
                f"the backbone ends in a {traced.ending}: its {self.num_features} features are then probabilities, and "
                "the heads that tfpfl adds learn slowly from them. Leave the last layer out; tfpfl adds one for every "
                "client"
            )

    def _cut(self, backbone: keras.Model, train_from: str, input_shape: Any, **given: Any) -> None:
        """Makes the model above the cut, becomes like it, and puts the trunk before it."""
        lower, upper = cut(backbone, train_from)
        above = SplitModel(upper, **given)
        if not above.initial_theta:
            raise InvalidArgument(
                f"train_from={train_from!r}: no layer from there on has weights that train. Name an earlier layer"
            )
        trunk = Trunk(lower, input_shape, above.dtype)
        vars(self).update(vars(above))
        self.above, self.trunk, self.inputs, self.input_shape = above, trunk, trunk.inputs, trunk.inputs.shape
        self.reads, self.vocabulary = trunk.reads, trunk.vocabulary

    @property
    def num_backbone_weights(self) -> int:
        """The number of scalars in theta, b."""
        return sum(int(w.size) for w in self.initial_theta)

    def num_weights(self, num_labels: int) -> int:
        """The number of scalars in the whole model, d, with a head for `num_labels` classes."""
        return self.num_backbone_weights + (self.num_features + 1) * num_labels

    @property
    def activation_bytes(self) -> int:
        """An upper bound on the bytes per example that a forward pass keeps for its gradient.

        It is the size of all floating-point numbers that the forward pass computes.
        """
        return self._activation_bytes

    @property
    def block(self) -> int | None:
        """How many examples a gradient over many of them is computed for at a time.

        The activations of a block stay in the processor's cache between the forward and the backward pass. They are at
        most `BLOCK_BYTES`, and more for a large theta, since the gradients of the blocks must be added up. None: for
        all at once, as without convolutions, where activations are small beside the weights, and where the examples of
        a step belong together: they draw masks, or their statistics normalize.
        """
        if self.alone or not self._convolves:
            return None
        added = _ADDED * sum(int(w.nbytes) for w in self.initial_theta)
        return max(_SMALLEST_BLOCK, (BLOCK_BYTES + added) // self._activation_bytes)

    def with_personal(self, part: str) -> "SplitModel":
        """The same model, of whose adapters another part stays with the client.

        Args:
            part: the name of the part, such as 'B' of lora.

        Raises:
            InvalidArgument: the model has no adapters with such a part.
        """
        own = () if self.adapters is None else self.adapters.personal(part)
        if not any(own):
            raise InvalidArgument(f"the model has no adapters with a part {part!r}, such as 'B' of adapters='lora:4'")
        other = copy.copy(self)
        other.own = own
        other.above = None if self.above is None else self.above.with_personal(part)
        return other

    def backbone_weights(self, theta: tuple) -> tuple:
        """The weights of `backbone`, in the order of its trainable weights, that give the features of theta.

        Raises:
            InvalidArgument: there are none: adapters add more than its layers can hold.
        """
        return theta if self.adapters is None else self.adapters.merged(theta)

    def theta(self) -> tuple:
        """The backbone's initial weights, theta of round 0: a tuple of tensors."""
        return tuple(tf.constant(w) for w in self.initial_theta)

    def head(self, info: ClientInfo, init: str | None = None) -> Head:
        """The initial head of a client, a function of (seed, client id): kernel [M, K_i], bias [K_i].

        Args:
            info: the client's `ClientInfo`.
            init: one of 'glorot', 'uniform01' and 'zeros'; None for the model's `initial_head`, or its `head_init`.

        Raises:
            InvalidArgument: init is none of them.
        """
        if init is None and self.initial_head is not None:
            return self._given_head()
        return self._draw_head(info.client_id, info.num_classes, init or self.head_init)

    def shared_head(self, num_labels: int, init: str | None = None) -> Head:
        """The initial head of a method in which all clients share one head: kernel [M, C], bias [C].

        Args:
            num_labels: C.
            init: one of 'glorot', 'uniform01' and 'zeros'; None for the model's `initial_head`, or its `head_init`.
        """
        if init is None and self.initial_head is not None:
            return self._given_head()
        return self._draw_head(_SHARED_HEAD, num_labels, init or self.head_init)

    def with_initial_head(self, head: Head) -> "SplitModel":
        """The same model, in which every client's first head, and that which clients share, is the given one.

        For example the head of Fed3R for PFLEGO. A method's `head_init` still comes first. All clients must have the
        head's number of outputs; `build_algorithm` checks it.

        Args:
            head: kernel [M, K] and bias [K].

        Raises:
            InvalidArgument: the shapes are others, or a number is not finite.
        """
        kernel, bias = (np.asarray(w, np.dtype(self.dtype)) for w in head)
        if kernel.ndim != 2 or kernel.shape[0] != self.num_features or bias.shape != kernel.shape[1:]:
            raise InvalidArgument(
                f"a head on {self.num_features} features has a kernel [{self.num_features}, K] and a bias [K], found "
                f"{list(kernel.shape)} and {list(bias.shape)}"
            )
        if not (np.isfinite(kernel).all() and np.isfinite(bias).all()):
            raise InvalidArgument("the initial head holds NaN or infinity")
        made = copy.copy(self)
        made.initial_head = Head(kernel, bias)
        made.above = None if self.above is None else self.above.with_initial_head(head)
        return made

    def _given_head(self) -> Head:
        kernel, bias = (tf.constant(w) for w in cast(Head, self.initial_head))
        return Head(tf.ensure_shape(kernel, [self.num_features, None]), tf.ensure_shape(bias, [None]))

    def _draw_head(self, client_id: Tensor, num_classes: Tensor, init: str) -> Head:
        check_choice(init=(init, HEAD_INITS))
        m, k = self.num_features, num_classes
        if init == "zeros":
            kernel, bias = tf.zeros([m, k], self.dtype), tf.zeros([k], self.dtype)
        else:
            seed = tf.random.experimental.stateless_fold_in(
                tf.constant([self.seed, ModelKey.HEAD], tf.int32), client_id
            )
            drawn = tf.random.stateless_uniform([m + 1, k], seed, dtype=self.dtype, alg="philox")
            if init == "uniform01":
                kernel, bias = drawn[:m], drawn[m]
            else:
                limit = tf.sqrt(6.0 / tf.cast(m + k, self.dtype))
                kernel, bias = (2 * drawn[:m] - 1) * limit, tf.zeros([k], self.dtype)
        return Head(tf.ensure_shape(kernel, [m, None]), tf.ensure_shape(bias, [None]))

    def features(self, theta: tuple, x: Tensor) -> Tensor:
        """The features phi(x; theta) of examples x [N, ...]: float [N, M].

        In a pass of training (`tfpfl.models.passes`) random layers draw masks, and with batch_norm='local' or 'shared'
        the statistics of these examples normalize. Otherwise theta may be followed by the moving statistics.
        """
        self._check_pass(theta)
        x = x if self.trunk is None else self.trunk(x)
        return tf.ensure_shape(self._apply(theta, self._cast(x)), [None, self.num_features])

    def record(
        self, theta: tuple, x: Tensor, *, recompute: bool = False, chunk: int | None = None
    ) -> tuple[Tensor, Callable[[Tensor], tuple]]:
        """Runs one forward pass; its gradient can be computed later.

        Args:
            theta: the backbone's weights.
            x: examples [N, ...].
            recompute: run the forward pass again for the gradient instead of keeping its activations: less memory,
                more time.
            chunk: as `recompute`, but for this many examples at a time, so that the memory does not grow with N. None
                for all examples at once.

        Returns:
            (phi [N, M], pull_back): `pull_back(dphi [N, M])` is the gradient of sum(phi * dphi) with respect to theta.
        """
        if chunk is None and not recompute:
            with tf.GradientTape() as tape:
                tape.watch(theta)
                phi = self.features(theta, x)
            return phi, lambda dphi: _gradient(tape, phi, theta, dphi)
        size = tree.num_rows(x) if chunk is None else tf.minimum(chunk, tree.num_rows(x))
        now = passes.current()

        def pull_back(dphi: Tensor) -> tuple:
            def body(start: Tensor, total: tuple) -> tuple:
                with tf.GradientTape() as tape, passes.part(now, start):
                    tape.watch(theta)
                    phi = self.features(theta, tree.rows(x, start, start + size))
                part = _gradient(tape, phi, theta, dphi[start : start + size])
                return start + size, tree.add(total, part)

            start = (0, tree.zeros_like(theta))
            return training_loop(lambda start, _: start < tree.num_rows(x), body, start)[1]

        return self.features_in_chunks(theta, x, size), pull_back

    def features_in_chunks(self, theta: tuple, x: Tensor, chunk: Tensor | None = CHUNK) -> Tensor:
        """The same as `features`, but for `chunk` examples at a time, to bound the memory; None: all at once."""
        if chunk is None or (tf.executing_eagerly() and not int(tree.num_rows(x))):  # eagerly, `concat` needs a part
            return self.features(theta, x)
        num_examples, now = tree.num_rows(x), passes.current()
        # `vectorized_map` knows no array that grows, and concatenates only parts of one size.
        step, size = tf.maximum(chunk, 1), tf.minimum(chunk, num_examples)
        number = (num_examples + step - 1) // step
        parts = tf.TensorArray(self.dtype, number, infer_shape=False, element_shape=[None, self.num_features])

        def body(i: Tensor, parts: tf.TensorArray) -> tuple:
            with passes.part(now, i * chunk):
                phi = self.features(theta, tree.rows(x, i * chunk, (i + 1) * chunk))
            return i + 1, parts.write(i, tf.pad(phi, [[0, size - tf.shape(phi)[0]], [0, 0]]))

        _, parts = tf.while_loop(lambda i, _: i * chunk < num_examples, body, (0, parts), parallel_iterations=1)
        return tf.ensure_shape(parts.concat()[:num_examples], [None, self.num_features])

    def example_spec(self, rows: int | None = None) -> Any:
        """The type of examples, as readers give them: a TensorSpec [rows, ...], or a dict or a tuple of such."""
        return self.inputs.spec(rows, self._dtypes)

    def blank_examples(self, number: int, outputs: Tensor) -> tuple[Any, Tensor]:
        """(x, y) of zeros for a client with so many outputs: for shapes and types, or to add numbers to."""
        x = tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), self.example_spec(number))
        classes = self.kind.label.is_classes
        return x, tf.zeros([number], tf.int32) if classes else tf.zeros([number, outputs], self.dtype)

    def logits(self, weights: Weights, x: Tensor) -> Tensor:
        """The outputs z of examples x [N, ...] under `weights`, the logits of classes: float [N, K]."""
        return tf.matmul(self.features(weights.theta, x), weights.head.kernel) + weights.head.bias


def _gradient(tape: tf.GradientTape, phi: Tensor, theta: tuple, dphi: Tensor) -> tuple:
    zero = tf.UnconnectedGradients.ZERO
    return tree.shaped(tree.dense(tape.gradient(phi, theta, output_gradients=dphi, unconnected_gradients=zero)), theta)
