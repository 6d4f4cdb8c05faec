"""For transforms that put something beside an update, or beside the method's own server state or message."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

from tfpfl.algorithms.contract import Algorithm
from tfpfl.checks import InvalidArgument


class AlongWith:
    """Adds one field to a method's update and removes it again.

    Transforms such as `screened` use it to send, for example, a flag beside the update. The update may be one structure
    of tensors or a NamedTuple.

    Args:
        own: the algorithm's `aggregate`, or another structure with the update's top-level fields.
        name: the name of the new field, which is the last one.
    """

    def __init__(self, own, name: str):
        self._whole, self._own = isinstance(own, str), own
        fields = ("update",) if self._whole else type(own)._fields
        if name in fields:
            raise InvalidArgument(
                f"the updates have {name!r} beside them already: a transform that sends it was applied before. "
                "build_algorithm applies those that the model needs itself"
            )
        self._type: Any = namedtuple("AlongWith", (*fields, name))
        self._type.beside = (*getattr(type(own), "beside", ()), name)

    def put_on(self, update, value):
        """The update with `value` in the new field."""
        return self._type(*((update,) if self._whole else update), value)

    def take_off(self, sent):
        """The update without the new field."""
        parts = sent[:-1]
        return parts[0] if self._whole else type(self._own)(*parts)


def of_method(update: Any) -> Any:
    """The parts of an update that are the method's own, without what transforms have put beside them."""
    beside = getattr(type(update), "beside", ())
    return [part for name, part in zip(update._fields, update, strict=True) if name not in beside] if beside else update


def of_own(function: Callable | None) -> Any:
    """`function` takes the method's server state or message; what is returned takes a whole one, with the field `own`.

    None stays None: the method has no such function.
    """
    return function and (lambda whole, *rest: function(whole.own, *rest))


def in_own(function: Callable | None) -> Any:
    """As `of_own`, and returns the whole server state or message, with what `function` returns as its `own`."""
    return function and (lambda whole, *rest: whole._replace(own=function(whole.own, *rest)))


def as_message(algorithm: Algorithm, function: Callable) -> Callable:
    """`function` with as many arguments as the algorithm's `message` has: engines count them (`message_per_client`)."""
    if algorithm.message_per_client:
        return lambda server, client_id: function(server, client_id)
    return lambda server: function(server)
