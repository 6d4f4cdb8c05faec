"""No framework: TensorFlow alone, one graph for a client's whole epoch, the clients one after the other."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from job import Turns, load_job


def logits(weights, x):
    """The network of `keras_cnn`."""
    conv1, bias1, conv2, bias2, dense, bias3, head, bias4 = weights
    x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, conv1, 1, "VALID"), bias1))
    x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, conv2, 1, "VALID"), bias2))
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    x = tf.reshape(x, [-1, dense.shape[0]])
    return tf.nn.relu(tf.matmul(x, dense) + bias3) @ head + bias4


def main():
    """Runs rounds when told."""
    job = load_job(sys.argv[1])

    @tf.function(autograph=False)
    def client(weights, total, x, y):
        """Adds N_i times the client's trained weights to the total."""
        new = weights
        x = tf.cast(x, tf.float32) * job.scale + job.shift
        for start in range(0, job.examples, job.batch_size):
            batch = slice(start, start + job.batch_size)
            with tf.GradientTape() as tape:
                tape.watch(new)
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y[batch], logits(new, x[batch]))
                loss = tf.reduce_mean(loss)
            new = [w - job.rate * g for w, g in zip(new, tape.gradient(loss, new), strict=True)]
        return [s + job.examples * w for s, w in zip(total, new, strict=True)]

    weights = [tf.constant(w) for w in job.weights]
    turns = Turns(lambda: weights)
    turns.ready({"tensorflow": tf.__version__})
    for t, ids in enumerate(job.cohorts, start=1):
        if not turns.begin():
            return
        total = [tf.zeros_like(w) for w in weights]
        for place in range(len(ids)):
            total = client(weights, total, *map(tf.constant, job.visit(t, place)))
        weights = [s / (len(ids) * job.examples) for s in total]
        weights[0].numpy()
        turns.end()
    turns.begin()


if __name__ == "__main__":
    main()
