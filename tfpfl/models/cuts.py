"""Cuts a Keras model in two at one layer: the part below gives one tensor, from which the part above gives the rest.

A cut is possible where this tensor alone determines the output. So no connection may lead past it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpfl.checks import InvalidArgument, check_type, unknown


class Node(NamedTuple):
    """One call of a layer in the graph of a functional model. Tensors are known by their Python ids."""

    name: str  # of the layer, or in Keras 3 of the operation
    inputs: tuple[Any, ...]  # symbolic tensors
    outputs: tuple[Any, ...]
    is_input: bool


def cut(model: keras.Model, name: str) -> tuple[keras.Model, keras.Model]:
    """Cuts a model below the layer `name`, which becomes the first layer of the upper part.

    The parts share the layers and the weights of the model.

    Args:
        model: a functional or Sequential model with one input, an array, and one output.
        name: the name of a layer; or what begins the names of several, as 'block_12' begins those of 'block_12_expand',
            'block_12_project', ...: then the first of them.

    Returns:
        (lower, upper): two models with upper(lower(x)) = model(x).

    Raises:
        InvalidArgument: the model is subclassed, has several inputs or outputs, or takes a dict or a tuple; there is no
            such layer; or the model cannot be cut there. The message names the nearest layers where it can be.
    """
    check_type("train_from", name, str, "the name of a layer")
    graph, nodes = _graph(model)
    position, output = _position(model, nodes, name), graph.outputs[0]
    reason = _why_not(nodes, position, output)
    if reason is not None:
        raise InvalidArgument(
            f"train_from={name!r}: the model cannot be cut below layer {nodes[position].name!r}: {reason}. "
            f"{_nearest(nodes, position, output)}"
        )
    tensor = nodes[position].inputs[0]
    try:
        lower, upper = keras.Model(graph.input, tensor), keras.Model(tensor, graph.output)
    except ValueError as error:
        raise InvalidArgument(f"train_from={name!r}: Keras cannot cut the model there: {error}") from error
    both = {id(w) for w in lower.weights} & {id(w) for w in upper.weights}
    if both:
        shared = ", ".join(getattr(w, "path", w.name) for w in upper.weights if id(w) in both)
        raise InvalidArgument(
            f"train_from={name!r}: weights {shared} are used both below and above layer {nodes[position].name!r}, so "
            "that they would be frozen and trained. Name a layer below or above all layers that share them"
        )
    return lower, upper


def _graph(model: keras.Model) -> tuple[keras.Model, list[Node]]:
    """The model as a functional one, and its nodes, each after those that it reads."""
    of_keras = [c for c in keras.Model.__subclasses__() if c.__name__ == "Functional"]
    if isinstance(model, keras.Sequential) and model.built and type(model).call is keras.Sequential.call:
        model = keras.Model(model.inputs[0], model.outputs[0])
    elif not any(isinstance(model, c) and type(model).call is c.call for c in of_keras):
        raise InvalidArgument(
            f"train_from needs a functional or a Sequential Keras model that knows its input: {type(model).__name__} "
            "computes in Python code, and which of its layers lie below another one cannot be read off. Build it of "
            "layers with keras.Model(inputs, outputs), or leave train_from out"
        )
    for what, tensors in (("inputs", model.inputs), ("outputs", model.outputs)):
        if len(tensors) != 1:
            raise InvalidArgument(
                f"train_from needs a model with one input and one output, found {len(tensors)} {what}"
            )
    if isinstance(model.input, Mapping | tuple):
        raise InvalidArgument(
            f"train_from needs a model that takes an array, and this one takes a {type(model.input).__name__} of one "
            "array: build it with keras.Model(x, outputs), where x is its keras.Input, and give the examples as "
            "arrays, too; or leave train_from out"
        )
    by_depth: dict[int, list[Any]] = model._nodes_by_depth
    nodes = [_node(node) for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return model, nodes


def _node(node: Any) -> Node:
    owner = getattr(node, "operation", None) or node.layer
    outputs = node.output_tensors if hasattr(node, "output_tensors") else node.outputs
    # In Keras 2, `input_tensors` are those of the first argument only.
    inputs = node.keras_inputs if hasattr(node, "keras_inputs") else node.input_tensors
    return Node(
        owner.name,
        () if node.is_input else tuple(tf.nest.flatten(inputs)),
        tuple(tf.nest.flatten(outputs)),
        bool(node.is_input),
    )


def _position(model: keras.Model, nodes: list[Node], name: str) -> int:
    names = [node.name for node in nodes]
    for fits in (name.__eq__, lambda found: found.startswith(f"{name}_")):
        places = [i for i, found in enumerate(names) if fits(found)]
        if places:
            return places[0]
    inside = [layer.name for layer in model.layers if isinstance(layer, keras.Model) and _has(layer, name)]
    if inside:
        raise InvalidArgument(
            f"train_from={name!r} is a layer inside of the model {inside[0]!r}, which is one layer here. Name a layer "
            f"of the outer model, or apply the layers of {inside[0]!r} one by one (in Keras, build with "
            "input_tensor=...)"
        )
    raise InvalidArgument(f"train_from: {unknown('layer', name, [n.name for n in nodes if not n.is_input])}")


def _has(model: keras.Model, name: str) -> bool:
    return any(layer.name == name or layer.name.startswith(f"{name}_") for layer in model.layers)


def _why_not(nodes: list[Node], position: int, output: Any) -> str | None:
    """Why the model cannot be cut below the node at `position`; None if it can."""
    node = nodes[position]
    if node.is_input:
        return "it is the input, and nothing lies below"
    if sum(other.name == node.name for other in nodes) > 1:
        return "the model applies it more than once"
    if any(getattr(t, "_keras_mask", None) is not None for t in node.inputs):  # Keras 3 has the mask among the inputs
        return (
            "it reads padded sequences with a mask, which Masking or Embedding(mask_zero=True) makes and "
            "which features do not keep. Cut above the layer that ends the mask, or build the model without one"
        )
    if len({id(t) for t in node.inputs}) != 1:
        return f"it reads {len(node.inputs)} tensors, and a trunk gives one"
    tensor = node.inputs[0]
    made_by = {id(t): other for other in nodes for t in other.outputs}
    if made_by[id(tensor)].is_input:
        return "it reads the examples, so that nothing lies below that could be frozen: leave train_from out"
    if not tf.as_dtype(tensor.dtype).is_floating or len(tensor.shape) < 2:
        return (
            f"it reads {tf.as_dtype(tensor.dtype).name} numbers of shape {tuple(tensor.shape)}, which are no features"
        )
    below = _before(made_by, [tensor])
    lower = {made_by[tensor].name for tensor in below}
    seen, left = {id(output)}, [output]
    while left:  # from the output down, not past the cut
        reached = left.pop()
        if id(reached) == id(tensor):
            continue
        maker = made_by[id(reached)]
        if maker.name in lower:
            return f"layer {maker.name!r} is used both below and above it"
        for read in maker.inputs:
            if id(read) != id(tensor) and id(read) in below:
                return f"layer {maker.name!r} above it also reads {made_by[id(read)].name!r} below it"
            if id(read) not in seen:
                seen.add(id(read))
                left.append(read)
    return None


def _before(made_by: dict[int, Node], tensors: Iterable[Any]) -> set[int]:
    """The ids of all tensors from which these are computed, and their own."""
    found: set[int] = set()
    left = list(tensors)
    while left:
        tensor = left.pop()
        if id(tensor) not in found:
            found.add(id(tensor))
            left += made_by[id(tensor)].inputs
    return found


def _nearest(nodes: list[Node], position: int, output: Any) -> str:
    def first(places: Iterable[int]) -> int | None:
        return next((i for i in places if _why_not(nodes, i, output) is None), None)

    found = {"below": first(range(position - 1, -1, -1)), "above": first(range(position + 1, len(nodes)))}
    named = [f"{nodes[i].name!r} {where} it" for where, i in found.items() if i is not None]
    if not named:
        return "It cannot be cut below any layer"
    return f"The nearest where it can be cut: {' and '.join(named)}"
