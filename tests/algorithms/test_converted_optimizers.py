"""Optimizers of Keras and of TFF, converted to pure functions, against the real ones step by step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfpfl.algorithms.parts import OPTIMIZERS, Optimizer, OptimizerChoice, adam, as_optimizer, sgd
from tfpfl.algorithms.parts.optimizers import client_optimizer

RATE = 2**-3  # float32 holds it exactly: Keras keeps its rates in float32
KERAS = {
    "sgd": lambda: keras.optimizers.SGD(RATE),
    "momentum": lambda: keras.optimizers.SGD(RATE, momentum=0.75),
    "nesterov": lambda: keras.optimizers.SGD(RATE, momentum=0.75, nesterov=True),
    "sgd with decay": lambda: keras.optimizers.SGD(RATE, weight_decay=0.25),
    "adam": lambda: keras.optimizers.Adam(RATE, beta_1=0.75, beta_2=0.875, epsilon=2**-6),
    "adam with decay": lambda: keras.optimizers.Adam(RATE, 0.75, 0.875, 2**-20, weight_decay=0.125),
    "adamw": lambda: keras.optimizers.AdamW(RATE, 0.0625, 0.75, 0.875, 2**-20),
    "adagrad": lambda: keras.optimizers.Adagrad(RATE, initial_accumulator_value=0.25, epsilon=2**-6),
}
START = ([0.5, -1.0, 2.0], [[1.5]])


def gradients(weights):
    """Of something curved, so that a wrong step shows in the next one."""
    return tuple(tf.sin(3 * w) + w for w in weights)


def path(optimizer: Optimizer, dtype, steps=9) -> list:
    """The weights after every step."""
    weights = tuple(tf.constant(w, dtype) for w in START)
    slots, found = optimizer.init(weights), []
    for _ in range(steps):
        slots, weights = optimizer.step(slots, weights, gradients(weights))
        found.append(np.concatenate([np.ravel(w) for w in weights]))
    return found


def path_of_keras(optimizer, dtype, steps=9) -> list:
    variables, found = [tf.Variable(w, dtype=dtype) for w in START], []
    for _ in range(steps):
        pairs = zip(gradients([tf.convert_to_tensor(v) for v in variables]), variables, strict=True)
        optimizer.apply_gradients(pairs)
        found.append(np.concatenate([np.ravel(v.numpy()) for v in variables]))
    return found


@pytest.mark.parametrize("name", KERAS)
def test_every_step_is_that_of_keras(name):
    ours = as_optimizer(KERAS[name](), rate=99.0)  # the rate is the optimizer's own
    assert ours.proportional == (type(KERAS[name]()).__name__ == "SGD")
    for dtype, most in ((tf.float32, 1e-6), (tf.float64, 2e-7)):  # Keras has some numbers in float32 in both
        np.testing.assert_allclose(path(ours, dtype), path_of_keras(KERAS[name](), dtype), rtol=0, atol=most)


def of_tff(tff) -> dict:
    build = tff.learning.optimizers
    return {
        "sgdm": build.build_sgdm(RATE),
        "momentum": build.build_sgdm(RATE, momentum=0.75),
        "adam": build.build_adam(RATE, beta_1=0.75, beta_2=0.875, epsilon=2**-6),
        "adamw": build.build_adamw(RATE, weight_decay=0.125),
        "adagrad": build.build_adagrad(RATE, initial_preconditioner_value=0.25, epsilon=2**-6),
        "rmsprop": build.build_rmsprop(RATE),
        "yogi": build.build_yogi(RATE),
    }


def test_every_step_is_that_of_tff(tff):
    for name, theirs in of_tff(tff).items():
        weights = tuple(tf.constant(w) for w in START)
        state = theirs.initialize(tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights))
        assert as_optimizer(theirs, rate=99.0).proportional == (name in ("sgdm", "momentum"))
        found = path(as_optimizer(theirs, rate=99.0), tf.float32)
        for expected in found:
            state, weights = theirs.next(state, weights, gradients(weights))
            now = np.concatenate([np.ravel(w) for w in weights])
            np.testing.assert_allclose(expected, now, rtol=0, atol=1e-6, err_msg=name)


def test_our_named_ones_are_tffs(tff):
    build = tff.learning.optimizers
    betas = {"beta_1": 0.75, "beta_2": 0.875}  # TFF's powers of 0.999 have the rounding of float32
    for name, options, theirs in (
        ("sgd", {}, build.build_sgdm(0.25)),
        ("momentum", {}, build.build_sgdm(0.25, momentum=0.9)),
        ("adagrad", {}, build.build_adagrad(0.25)),
        ("yogi", betas, build.build_yogi(0.25, **betas)),
    ):
        ours = path(OPTIMIZERS[name](0.25, **options), tf.float32)
        np.testing.assert_allclose(ours, path(as_optimizer(theirs, 0.0), tf.float32), rtol=0, atol=1e-6, err_msg=name)


def test_adamw_is_adam_with_decoupled_decay():
    """Adam's own step does not see the decay: the weights shrink by rate times decay times the weights."""
    rate, decay, w = 0.25, 0.5, np.array([0.5, -1.0, 2.0])
    weights, plain = (tf.constant(w),), adam(rate)
    _, without = plain.step(plain.init(weights), weights, gradients(weights))
    ours = OptimizerChoice("adamw", weight_decay=decay).at(rate)
    _, moved = ours.step(ours.init(weights), weights, gradients(weights))
    np.testing.assert_allclose(moved[0], without[0] - rate * decay * w, atol=1e-12)


@pytest.mark.slow
def test_widths_that_the_graph_does_not_know(tff):
    """A head's K_i is open in a graph of several clients."""
    theirs = as_optimizer(tff.learning.optimizers.build_adam(RATE), rate=0.0)

    @tf.function(input_signature=[tf.TensorSpec([2, None])])
    def two_steps(w):
        slots = theirs.init((w,))
        loop = tf.while_loop(
            lambda i, *_: i < 2, lambda i, s, w: (i + 1, *theirs.step(s, w, (2 * w[0],))), (0, slots, (w,))
        )
        return loop[2][0]

    w, slots = (tf.ones([2, 3]),), theirs.init((tf.ones([2, 3]),))
    for _ in range(2):
        slots, w = theirs.step(slots, w, (2 * w[0],))
    np.testing.assert_allclose(two_steps(tf.ones([2, 3])), w[0], atol=1e-6)


def test_a_function_of_the_rate_gets_the_methods_rate():
    expected = path(adam(0.25, epsilon=2**-6), tf.float64)
    np.testing.assert_array_equal(
        path(as_optimizer(lambda rate: adam(rate, epsilon=2**-6), 0.25), tf.float64), expected
    )
    by_class = path(as_optimizer(keras.optimizers.SGD, 0.25), tf.float64)
    np.testing.assert_allclose(by_class, path(sgd(0.25), tf.float64), atol=1e-12)
    assert as_optimizer(made := sgd(0.25), 0.0) is made


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)), "schedule.*CosineDecay"),
        (lambda: keras.optimizers.Adam(0.1, amsgrad=True), "amsgrad=True"),
        (lambda: keras.optimizers.SGD(0.1, clipnorm=1.0), "clipnorm=1.0"),
        (lambda: keras.optimizers.SGD(0.1, clipvalue=0.5), "clipvalue=0.5"),
        (lambda: keras.optimizers.SGD(0.1, global_clipnorm=2.0), "global_clipnorm=2.0"),
        (lambda: keras.optimizers.Adam(0.1, use_ema=True), "use_ema=True"),
        (lambda: keras.optimizers.RMSprop(0.1), "RMSprop.*SGD, Adam, AdamW, Adagrad"),
        (lambda: "lion", "unknown client_opt 'lion'"),
        (lambda: 0.1, "found 0.1"),
        (lambda: lambda rate: rate, "returned 0.3"),
        (lambda: lambda: sgd(0.1), "Calling it with the learning rate failed"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(given, why):
    with pytest.raises(ValueError, match=why):
        as_optimizer(given(), 0.3)


def test_variables_that_do_not_decay_are_refused():
    optimizer = keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    with pytest.raises(ValueError, match="excludes variables from weight decay"):
        as_optimizer(optimizer, 0.3)


def test_momentum_is_for_sgd_alone():
    assert path(as_optimizer("sgd", 0.25, momentum=0.5), tf.float32)
    for other in ("adam", "momentum", keras.optimizers.SGD(0.1), sgd(0.1)):
        with pytest.raises(ValueError, match="set momentum to 0"):
            as_optimizer(other, 0.25, momentum=0.5)


def test_options_that_do_not_belong_together():
    assert client_optimizer("adam") == "adam"
    assert client_optimizer("sgd", client_weight_decay=0.1) == OptimizerChoice("sgd", weight_decay=0.1)
    for name, options, why in (
        ("sgd", {"client_beta_1": 0.5}, "client_beta_1=0.5 has no effect with client_opt='sgd'"),
        ("adagrad", {"client_beta_2": 0.5}, "client_beta_2=0.5 has no effect"),
        ("adam", {"client_beta_1": 1.0}, "client_beta_1 must be below 1"),
        ("adam", {"client_epsilon": 0.0}, "client_epsilon must be positive"),
        ("adam", {"client_weight_decay": -1.0}, "client_weight_decay must be a finite number"),
        (sgd(0.1), {"client_weight_decay": 0.1}, "which has its own"),
    ):
        with pytest.raises(ValueError, match=why):
            client_optimizer(name, **options)
