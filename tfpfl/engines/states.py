"""A round changes the numbers of a state, never its structure, its shapes or its dtypes: here this is checked.

Without the check of what a round returns, TFF and this process would differ: TFF refuses another dtype only when the
next round begins, and a state of another shape may be broadcast to the old one without a word. Without the check of
what it is given, the head of a client with another K_i would be trained for a client that has no such head.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.models import tree

_RULE = "A state keeps its structure, shapes and dtypes from round to round"


def kept(state: Any, like: Any, function: str, initial: str) -> Any:
    """The state as tensors, after the check that it has the form of `like`.

    Args:
        state: what `function` returned; its leaves may be numbers of Python.
        like: the state before the round as tensors, or its TensorSpecs; a size may be open.
        function, initial: the names of the functions that gave `state` and, before round 1, a state like `like`.

    Raises:
        InvalidArgument: the structures differ, or a leaf has another shape or dtype.
    """
    try:
        tf.nest.assert_same_structure(like, state)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"{function} returned a state of another structure than {initial}: {_difference(state, like)}. {_RULE}: "
            "return all of its parts, in the same order and types"
        ) from None
    named = zip(tree.names(like, "the state"), tf.nest.flatten(state), tf.nest.flatten(like), strict=True)
    return tf.nest.pack_sequence_as(like, [_leaf(*each, function, initial) for each in named])


def check_given(state: Any, spec: Any, shapes: Sequence, whose: str) -> None:
    """Checks the state that a round is given for a client.

    Args:
        state: the client's state; its leaves may be arrays, tensors or numbers of Python.
        spec: the TensorSpecs of a state; a size may be open.
        shapes: the shape of every leaf for this client.
        whose: which state it is, at the beginning of the error.

    Raises:
        InvalidArgument: it has not the leaves of `spec`, or a leaf has another shape or dtype.
    """
    advice = (
        "Give every visit the state of its own client: what the last round returned for it or, before its first visit, "
        "algorithm.init_client(visit.info)"
    )
    _check_leaves(state, spec, shapes, whose, "init_client", advice)


def check_given_server(server: Any, spec: Any) -> None:
    """The same for the server's state, of whose leaves `spec` has the shapes.

    Raises:
        InvalidArgument: as `check_given`; such as for a whole `RoundOutput`.
    """
    advice = (
        "Give what initialize() returned or, after a round, the entry `server` of what it returned: "
        "server = engine.next(server, client_states, visits).server"
    )
    shapes = [of.shape for of in tf.nest.flatten(spec)]
    _check_leaves(server, spec, shapes, "the server's state", "init_server", advice)


def _check_leaves(state: Any, spec: Any, shapes: Sequence, whose: str, initial: str, advice: str) -> None:
    leaves, specs = tf.nest.flatten(state), tf.nest.flatten(spec)
    if len(leaves) != len(specs):
        raise InvalidArgument(
            f"{whose} has another structure than {initial} gives: {_difference(state, spec)}. {advice}"
        )
    for place, (leaf, of, shape) in enumerate(zip(leaves, specs, shapes, strict=True)):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            leaf = np.asarray(leaf) if leaf is None else tf.convert_to_tensor(leaf, dtype_hint=of.dtype)
        wanted = tf.TensorSpec(shape, of.dtype)
        if leaf.dtype != of.dtype or not wanted.shape.is_compatible_with(leaf.shape):
            name = tree.names(spec, "the only array")[place]
            raise InvalidArgument(
                f"{whose} has {name} as {_kind(leaf)}, but {initial} gives {_kind(wanted)}. {advice}"
            )


def _leaf(name: str, now: Any, before: Any, function: str, initial: str) -> Any:
    if not isinstance(before, tf.TensorSpec):  # the server's state, as it came
        before = tf.convert_to_tensor(before)
    if now is not None:
        now = tf.convert_to_tensor(now, dtype_hint=before.dtype)
    if now is None or now.dtype != before.dtype or not now.shape.is_compatible_with(before.shape):
        found = "None" if now is None else _kind(now)
        raise InvalidArgument(
            f"{function} returned {name} as {found}, and {initial} gave {_kind(before)}. {_RULE}: convert it, for "
            "example with tf.cast or tf.reshape, or begin with what rounds make of it"
        )
    return now if now.shape.is_fully_defined() else tf.ensure_shape(now, before.shape)


def _kind(leaf: Any) -> str:
    shape = tf.TensorShape(leaf.shape)
    sizes = "unknown" if shape.rank is None else ", ".join("?" if n is None else str(n) for n in shape)
    return f"{leaf.dtype.name} [{sizes}]"


def _difference(state: Any, like: Any) -> str:
    if _form(state) != _form(like):
        return f"{_form(state)}, and not {_form(like)}"
    found, wanted = tree.names(state, "the state"), tree.names(like, "the state")
    more, less = [name for name in found if name not in wanted], [name for name in wanted if name not in found]
    parts = [f"it has {', '.join(more)}" if more else "", f"it lacks {', '.join(less)}" if less else ""]
    return " and ".join(filter(None, parts)) or "a list, tuple or dict in it has become one of another type"


def _form(state: Any) -> str:
    """The structure of a state in words, such as 'Head(kernel, bias)' or 'a dict of a, b'."""
    if isinstance(state, dict):
        return f"a dict of {', '.join(map(str, state)) or 'nothing'}"
    if hasattr(state, "_fields"):
        return f"{type(state).__name__}({', '.join(state._fields)})"
    if isinstance(state, tuple | list):
        return f"a {type(state).__name__} of {len(state)}"
    return "None" if state is None else "one tensor"
