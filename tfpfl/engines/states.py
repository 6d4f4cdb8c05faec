"""A round changes the numbers of a state, never its structure, its shapes or its dtypes: here this is checked.

Without the check, TFF and this process would differ: TFF refuses another dtype only when the next round begins, and a
state of another shape may be broadcast to the old one without a word.
"""

from typing import Any

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
    sizes = "unknown" if leaf.shape.rank is None else ", ".join("?" if n is None else str(n) for n in leaf.shape)
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
