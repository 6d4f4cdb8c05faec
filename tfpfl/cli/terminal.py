"""Shows text on terminals that lack characters, as with `LC_ALL=C`: these are replaced, and never an error."""

import codecs
import sys
import unicodedata
from typing import TextIO, cast

_ERRORS = "tfpfl_terminal"
_PLAIN = {"±": "+-", "×": "x", "–": "-", "—": "-", "…": "...", "≥": ">=", "≤": "<=", "²": "2", "θ": "theta", "τ": "tau"}


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """The replacement for the first character that cannot be encoded, and where to go on."""
    error = cast(UnicodeEncodeError, error)
    character = error.object[error.start]
    if 0xDC80 <= ord(character) <= 0xDCFF:  # a byte of a file's name that is not UTF-8; it is written as it was read
        return bytes([ord(character) - 0xDC00]), error.start + 1
    plain = _PLAIN.get(character) or unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return plain or "?", error.start + 1


codecs.register_error(_ERRORS, _replace)


def show_what_it_can(*streams: TextIO) -> None:
    """Makes these streams replace what they cannot encode; default: standard output and standard error."""
    for stream in streams or (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not the streams of a notebook, which take every character
            stream.reconfigure(errors=_ERRORS)
