"""A backbone with a valve after it: its features are scaled, shifted and rectified, and the scales are a part of theta.

A method that conditions features on what it knows of a client (GPFL) predicts with such a model. The valve is a layer
of Keras's own, so that a client's model can be written to a file as any other.
"""

import keras
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.models.split import SplitModel


class ValvedModel(SplitModel):
    """A `SplitModel` with features max(0, scale * phi + shift); its theta is (*theta, scale [M], shift [M]).

    Args:
        model: the `SplitModel` with the features phi.

    Attributes:
        inner: this model, without the valve.

    Raises:
        InvalidArgument: the model has a trunk, adapters, or a `batch_norm` that moves statistics.
    """

    inner: SplitModel

    def __init__(self, model: SplitModel) -> None:
        if model.trunk is not None or model.adapters is not None or model.batch_statistics:
            raise InvalidArgument(
                "this method has a layer of its own after the backbone, and trains all of it: it cannot have "
                "train_from, adapters, or batch_norm 'local' or 'shared'. Leave these out"
            )
        m, specs = model.num_features, tf.nest.flatten(model.example_spec())
        examples = model.inputs.for_keras([keras.Input(s.shape[1:], dtype=s.dtype.name) for s in specs])
        valve = keras.layers.EinsumDense(
            "bm,m->bm", m, bias_axes="m", activation="relu", kernel_initializer="ones", dtype=str(model.dtype.name)
        )
        backbone = keras.Model(examples, valve(model.backbone(examples)))
        super().__init__(
            backbone,
            seed=model.seed,
            head_init=model.head_init,
            input_shape=model.input_shape,
            kind=model.kind,
            batch_norm=model.chosen_batch_norm,
        )
        self.inner = model


def with_valve(model: SplitModel) -> ValvedModel:
    """The model with a valve; a model that has one is returned as it is.

    Raises:
        InvalidArgument: as `ValvedModel`.
    """
    return model if isinstance(model, ValvedModel) else ValvedModel(model)
