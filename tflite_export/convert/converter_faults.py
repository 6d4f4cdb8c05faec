"""What TensorFlow's converter to TensorFlow Lite does wrong without a word, and what keeps it from that.

A product with a matrix that is an input loses the ReLU behind it (TensorFlow 2.14 to 2.21): the converter puts the ReLU
into a FULLY_CONNECTED, and then replaces that by a BATCH_MATMUL, which has no place for it. It does not do so where
something that is not constant is added to the product, as the bias of a layer is.
"""

import tensorflow as tf

_NOTHING = {"Identity", "EnsureShape", "Squeeze", "Reshape", "ExpandDims"}  # what the converter may remove
_ADDS = {"BiasAdd", "Add", "AddV2"}


def keep_activations(theta, graph, known) -> None:
    """Adds 0, as a number that only the device computes, to every product whose ReLU would be lost.

    Args:
        theta: the flat input, float32 [P], of which the matrices are parts.
        graph: the graph of the forward pass.
        known: the operations that were in the graph before it.
    """
    for op in [op for op in graph.get_operations() if op not in known and op.type == "MatMul"]:
        product = op.outputs[0]
        if tf.get_static_value(op.inputs[1]) is not None or _is_added_to(product, 4):
            continue
        consumers = [(c, i) for c in product.consumers() for i, t in enumerate(c.inputs) if t is product]
        kept = product + 0.0 * theta[: int(product.shape[-1])]
        for consumer, i in consumers:
            consumer._update_input(i, kept)  # TensorFlow has no public way to change a graph in place


def _is_added_to(product, depth) -> bool:
    """Whether all that follows a product directly adds something that is not constant."""
    consumers = product.consumers()
    if not consumers or not depth:
        return False
    for op in consumers:
        if op.type in _NOTHING:
            if not _is_added_to(op.outputs[0], depth - 1):
                return False
        elif op.type not in _ADDS or any(tf.get_static_value(t) is not None for t in op.inputs if t is not product):
            return False
    return True
