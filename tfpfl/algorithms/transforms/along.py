"""A field that travels with an update, for transforms that need one."""

from collections import namedtuple


class AlongWith:
    """A field that is sent along with an update, whole or with fields of its own; for what wraps an algorithm.

    Args:
        own: the algorithm's `aggregate`, or any other structure with the update's top-level fields.
        name: of the field, which comes last.
    """

    def __init__(self, own, name: str):
        self._whole, self._own = isinstance(own, str), own
        fields = ("update",) if self._whole else type(own)._fields
        self._type = namedtuple("AlongWith", (*fields, name))

    def put_on(self, update, value):
        """The update with the field."""
        return self._type(*((update,) if self._whole else update), value)

    def take_off(self, sent):
        """The update."""
        parts = sent[:-1]
        return parts[0] if self._whole else type(self._own)(*parts)
