"""Parts of the tests, for conftest.py.

`--part`, `--fast-part`, `--docs-part`: a file's slow tests, its fast ones, or those marked docs, are of one part of N.
Keys are those of durations.json.
`--table-part`: every further case (`table`) is of one part of N by itself.
"""

import zlib
from collections.abc import Mapping


def asked(text: str) -> tuple[int, int]:
    """ "K/N" as K and N. Raises ValueError if that is not 0 <= K < N: no test would be of such a part."""
    part, parts = map(int, text.split("/"))
    if not 0 <= part < parts:
        raise ValueError(text)
    return part, parts


def by_seconds(seconds: Mapping[str, float], parts: int) -> dict[str, int]:
    """key -> its part: keys by falling seconds, each into the part that has the fewest so far.

    So no part has more than the mean and the longest key's seconds.
    """
    sums, found = [0.0] * parts, {}
    for key in sorted(seconds, key=lambda key: (-seconds[key], key)):
        found[key] = sums.index(min(sums))
        sums[found[key]] += seconds[key]
    return found


def of_key(key: str, parts: int, known: Mapping[str, int]) -> int:
    """The part of a file's tests; what was never measured has a part by its name."""
    return known[key] if key in known else of_name(key, parts)


def of_name(name: str, parts: int) -> int:
    """A part that depends on the name alone."""
    return zlib.crc32(name.encode()) % parts
