"""Which operation has which gradient, and the context in which a graph takes them."""

import tensorflow as tf

from tflite_export.convert.gradients import arrays, elementwise, images, sums

PREFIX = "TfpflBuiltin"

# Operations whose gradient in TensorFlow already consists of builtin operations, for any number of examples. That of
# IdentityN is what the layer itself says (tf.custom_gradient), as in swish.
PLAIN = {"Reshape", "Identity", "IdentityN", "Squeeze", "ExpandDims", "Neg", "EnsureShape"}
# Operations through which no gradient goes.
STOPS = {"StopGradient", "OnesLike", "ZerosLike"}

GRADIENTS = {
    "Relu": elementwise.relu,
    "Relu6": elementwise.relu6,
    "LeakyRelu": elementwise.leaky_relu,
    "Elu": elementwise.elu,
    "Selu": elementwise.selu,
    "Softplus": elementwise.softplus,
    "Tanh": elementwise.tanh,
    "Sigmoid": elementwise.sigmoid,
    "Exp": elementwise.exp,
    "Log": elementwise.log,
    "Sqrt": elementwise.sqrt,
    "Rsqrt": elementwise.rsqrt,
    "Square": elementwise.square,
    "Abs": elementwise.absolute,
    "Pow": elementwise.power,
    "BiasAdd": elementwise.bias_add,
    "Add": elementwise.add,
    "AddV2": elementwise.add,
    "Sub": elementwise.sub,
    "Mul": elementwise.mul,
    "RealDiv": elementwise.divide,
    "SquaredDifference": elementwise.squared_difference,
    "Maximum": elementwise.maximum,
    "Minimum": elementwise.maximum,
    "Select": elementwise.select,
    "SelectV2": elementwise.select,
    "ConcatV2": arrays.concat,
    "Split": arrays.split,
    "SplitV": arrays.split_sizes,
    "Unpack": arrays.unpack,
    "Pack": arrays.pack,
    "Pad": arrays.pad,
    "Transpose": arrays.transpose,
    "ReverseV2": arrays.reverse,
    "StridedSlice": arrays.strided_slice,
    "Tile": arrays.tile,
    "ResizeNearestNeighbor": arrays.nearest,
    "GatherV2": arrays.gather,
    "SpaceToBatchND": arrays.space_to_batch,
    "BatchToSpaceND": arrays.space_to_batch,
    "Mean": sums.mean,
    "Sum": sums.total,
    "Max": sums.largest,
    "Softmax": sums.softmax,
    "MatMul": sums.matmul,
    "BatchMatMulV2": sums.batch_matmul,
    "FusedBatchNormV3": sums.frozen_batch_norm,
    "MaxPool": images.max_pool,
    "AvgPool": images.avg_pool,
    "Conv2D": images.conv2d,
    "DepthwiseConv2dNative": images.depthwise,
}
for _name, _function in GRADIENTS.items():
    tf.RegisterGradient(PREFIX + _name)(_function)


def builtin_gradients():
    """A context in which operations that are added to the current graph get the gradients of this package."""
    graph = tf.compat.v1.get_default_graph()
    return graph.gradient_override_map({name: PREFIX + name for name in GRADIENTS})
