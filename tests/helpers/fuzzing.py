"""Damages files in every way that comes to mind, and tells whether what reads them works or says what is wrong.

`pytest FILE --fuzz 10000` takes another number of cases. A test module that imports `pytest_generate_tests` gets it as
the argument `cases`.
"""

import json
import traceback
from collections import Counter
from copy import deepcopy
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import tflite_export
import tfpfl
from helpers.marks import slow_but
from tflite_export.device.errors import InvalidInput
from tfpfl.checks import TfpflError, one_line

OURS = tuple(str(Path(package.__file__).parent) for package in (tfpfl, tflite_export))


def quick(cases):
    """Settings for tests that keep their fixtures over all cases."""
    return settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([2**31, -(2**63), 2**70, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "..", "/", "nan", "0", "pflego", "digits", "\x00", "é" * 300]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def places(document, here=()):
    """Every path in a JSON document."""
    found = [here]
    children = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, child in children:
        found += places(child, (*here, key))
    return found


def parent_of(document, way):
    """The list or dict in which the last key of the path `way` stands."""
    for key in way[:-1]:
        document = document[key]
    return document


def set_entry(document, way, to):
    """Changes the value at the path `way`; with None, removes it."""
    parent = parent_of(document, way)
    if to is None:
        del parent[way[-1]]
    else:
        parent[way[-1]] = to


@st.composite
def changed(draw, text, other=values):
    """A JSON document of which one or two values are others, missing or new; and the places of these values."""
    document, ways = json.loads(text), []
    for _ in range(draw(st.integers(1, 2))):
        if not document:
            break
        *way, last = draw(st.sampled_from([p for p in places(document) if p]))
        parent = parent_of(document, (*way, last))
        what = draw(st.sampled_from(["other", "other", "missing", "new"]))
        if what == "new" and isinstance(parent, dict):
            last = draw(st.text(min_size=1, max_size=5))
        ways.append((*way, last))
        if what == "missing":
            del parent[last]
        else:
            parent[last] = deepcopy(draw(other))  # the second change may be within it
    return document, ways


@st.composite
def damaged(draw, text):
    """A JSON file of which one or two values are others, missing or new; or some of whose bytes are."""
    if draw(st.integers(0, 4)) == 0:
        data = bytearray(text.encode())
        for _ in range(draw(st.integers(1, 3))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return bytes(data[: draw(st.sampled_from([len(data), len(data) // 2, len(data) - 2]))])
    return json.dumps(draw(changed(text))[0]).encode()


def contents(folder) -> dict:
    return {p.relative_to(folder): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def is_ours(error: BaseException) -> bool:
    """Raised in this package, and a kind of error that the command line says in one line."""
    of_a_file = isinstance(error, OSError) and type(error).__module__ == "builtins"
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return (isinstance(error, (TfpflError, InvalidInput)) or of_a_file) and last.startswith(OURS) and str(error)


FOUND = Counter()  # (kind, what happened) -> number of cases


def refused_or_fine(function, folder, ways=(), kind=""):
    """Whether it worked. An error must be ours, in one line that names an entry of `ways`; nothing may be written."""
    before = contents(folder)
    try:
        function()
        FOUND[kind, "worked"] += 1
        return True
    except Exception as error:
        assert is_ours(error), "".join(traceback.format_exception(error))
        if ways:
            keys = [str(key) for way in ways for key in way]
            # A control character is told by its code, and one of several hyperparameters as 'hyperparameter'.
            singular = [key.removesuffix("s") for key in keys if len(key) > 4]
            names = {*keys, *singular, *map(one_line, keys), *(repr(key)[1:-1] for key in keys)}
            assert any(name in str(error) for name in names), f"{ways}: {error}"
            assert "\n" not in str(error), error
        FOUND[kind, "refused"] += 1
        return False
    finally:
        assert contents(folder) == before


def pytest_generate_tests(metafunc):
    """50 cases, and 1,000 for those who have the time; or what --fuzz says."""
    if "cases" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--fuzz")
        metafunc.parametrize("cases", [asked] if asked else slow_but([50, 1000], 50))
