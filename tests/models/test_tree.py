"""Arithmetic on structures, against NumPy in double precision."""

import numpy as np
import tensorflow as tf

from tfpfl.models import tree

A = {"w": tf.constant([1.0, -2.0], tf.float64), "b": (tf.constant(3.0, tf.float64),)}
B = {"w": tf.constant([0.5, 4.0], tf.float64), "b": (tf.constant(-1.0, tf.float64),)}


def test_factors_keep_double_precision():
    """0.1 is not a float32: through one, the error would be 1e-9."""
    assert float(tree.scale(0.1, A)["b"][0]) == 0.1 * 3.0
    assert float(tree.add_scaled(A, 0.1, B)["b"][0]) == 3.0 + 0.1 * -1.0
    assert float(tree.scale(tf.constant(2, tf.int32), A)["b"][0]) == 6.0


def test_arithmetic():
    np.testing.assert_array_equal(tree.add(A, B)["w"], [1.5, 2.0])
    np.testing.assert_array_equal(tree.subtract(A, B)["w"], [0.5, -6.0])
    assert float(tree.dot(A, B)) == 0.5 - 8.0 - 3.0
    np.testing.assert_array_equal(tree.zeros_like(A)["w"], [0.0, 0.0])
    assert float(tree.where(tf.constant(False), A, B)["b"][0]) == -1.0


def test_bytes_and_finiteness():
    assert int(tree.num_bytes(A)) == 24 and int(tree.num_bytes(())) == 0
    assert int(tree.num_bytes({"x": tf.zeros([3], tf.float32), "n": tf.constant(1)})) == 16
    assert bool(tree.all_finite(A)) and bool(tree.all_finite(()))
    for bad in (np.nan, np.inf, -np.inf):
        assert not bool(tree.all_finite((A, tf.constant(bad))))


def test_a_structure_as_a_vector_and_back():
    nested = {"w": tf.reshape(tf.range(6.0), [2, 3]), "b": (tf.constant(9.0), tf.zeros([0]))}
    vector = tree.to_vector(nested)
    np.testing.assert_array_equal(vector, [9.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    back = tf.function(lambda v: tree.from_vector(2 * v, nested))(vector)
    tf.nest.assert_same_structure(back, nested)
    np.testing.assert_array_equal(back["w"], 2 * nested["w"])
    assert float(back["b"][0]) == 18.0 and back["b"][1].shape == [0] and back["w"].shape == [2, 3]
