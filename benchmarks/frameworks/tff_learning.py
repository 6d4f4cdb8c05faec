"""tff.learning: `build_weighted_fed_avg` as its tutorials use it, a tf.data.Dataset per client, the default context."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_cnn
import tensorflow as tf
import tensorflow_federated as tff
from job import Turns, load_job


def main():
    """Runs rounds when told."""
    job = load_job(sys.argv[1])

    def dataset(round_num, place):
        """A client's mini-batches, for one epoch."""
        batches = tf.data.Dataset.from_tensor_slices(job.visit(round_num, place)).batch(job.batch_size)
        return batches.map(lambda x, y: (tf.cast(x, tf.float32) * job.scale + job.shift, y))

    def model():
        return tff.learning.models.from_keras_model(
            keras_cnn.whole(),
            input_spec=dataset(1, 0).element_spec,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    process = tff.learning.algorithms.build_weighted_fed_avg(
        model, client_optimizer_fn=tff.learning.optimizers.build_sgdm(job.rate)
    )
    state = process.set_model_weights(process.initialize(), tff.learning.models.ModelWeights(job.weights, []))
    turns = Turns(lambda: process.get_model_weights(state).trainable)
    turns.ready({"tensorflow_federated": tff.__version__, "tensorflow": tf.__version__, "keras": keras.__version__})
    for t, ids in enumerate(job.cohorts, start=1):
        if not turns.begin():
            return
        state = process.next(state, [dataset(t, place) for place in range(len(ids))]).state
        turns.end()
    turns.begin()


if __name__ == "__main__":
    main()
