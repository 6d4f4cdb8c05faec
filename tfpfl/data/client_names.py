"""Finds a client of a federation by its number or by its name, and says which client a number is."""

from difflib import get_close_matches

import numpy as np

from tfpfl.checks import InvalidArgument, one_line
from tfpfl.data.federation import Federation


def number_and_name(federation: Federation, client_id: int) -> str:
    """A client as messages and tables call it: '3 (hospital 4)', or '3' if its name is its number."""
    name = federation.client_names[client_id]
    return str(client_id) if name == str(client_id) else f"{client_id} ({name})"


def find_client(federation: Federation, client: int | str) -> int:
    """The id of a client.

    Args:
        federation: the clients' data.
        client: the id, an integer from 0; or a text: the client's name, or its id. With 'name:' or 'number:' in front,
            a text is only one of the two.

    Raises:
        InvalidArgument: there is no such client; or a text is the name of one client and the id of another one.

    Examples:
        >>> x, y = np.zeros((8, 2)), np.arange(8) % 2
        >>> federation = Federation.from_clients({"ann": (x, y), "bob": (x, y), "0": (x, y)}, out="three")
        >>> find_client(federation, "bob"), find_client(federation, 0), find_client(federation, "name:0")
        (1, 0, 2)
    """
    if isinstance(client, int | np.integer) and not isinstance(client, bool):
        found = _by_number(federation, str(client))
    else:
        kind, _, rest = str(client).partition(":")
        found = sorted({*_by_name(federation, str(client)), *_by_number(federation, str(client))})
        if not found and rest and kind in ("name", "number"):
            found = (_by_name if kind == "name" else _by_number)(federation, rest)
    if len(found) > 1:
        which = " or ".join(f"number {i}, named {federation.client_names[i]!r}" for i in found[:3])
        raise InvalidArgument(
            f"{one_line(client)!r} could be more than one client: {which}. Write number:{found[0]}, or name: and the "
            "name, to say which one is meant"
        )
    if not found:
        names = federation.client_names
        near = get_close_matches(str(client), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidArgument(
            f"there is no client {one_line(client)!r}.{hint} The federation has {len(names)} clients, with the numbers "
            f"0 to {len(names) - 1} and names such as {', '.join(map(repr, names[:3]))}"
        )
    return found[0]


def _by_name(federation: Federation, name: str) -> list[int]:
    given = federation.manifest["clients"].get("names") or federation.client_names
    both = zip(given, federation.client_names, strict=True)
    return [i for i, names in enumerate(both) if name in names]


def _by_number(federation: Federation, text: str) -> list[int]:
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    return [int(text)] if is_number and int(text) < federation.num_clients else []
