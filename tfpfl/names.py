"""What to say about a name that nobody knows."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, name, known: Iterable[str]) -> str:
    """The message.

    Examples:
        >>> unknown("network", "mlp20", ["mlp200", "cifar_2conv"])
        "unknown network 'mlp20'; did you mean 'mlp200'? there are mlp200, cifar_2conv"
    """
    known = list(known)
    near = get_close_matches(str(name), known, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r};{hint} there are {', '.join(known) or 'none'}"
