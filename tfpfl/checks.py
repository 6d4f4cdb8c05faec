"""The errors that this package raises, checks of arguments, and which of TensorFlow's messages are shown.

Any other exception is a bug of this package, or comes from the system or from the user's own code.
"""

import os
import resource
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from numbers import Integral, Number
from types import ModuleType
from typing import Any

__all__ = [
    "InvalidArgument",
    "TfpflError",
    "TfpflWarning",
    "Unavailable",
    "check_address_space",
    "check_choice",
    "check_fractions",
    "check_listed",
    "check_numbers",
    "check_penalty",
    "check_rates",
    "check_type",
    "check_whole_number",
]


class TfpflError(Exception):
    """The base class of this package's errors.

    The command line shows the message in one line, without a stack trace.
    """


class InvalidArgument(TfpflError, ValueError):
    """An argument, an option or a file cannot be used. The message says what was found and what to do."""


class Unavailable(TfpflError, RuntimeError):
    """TFF, Ray, a worker or an optional package is missing, or did not start."""


class TfpflWarning(UserWarning):
    """Something can be done as asked, but is probably not what the user wants. The message says what to do.

    The command line shows the message in one line.
    """


def warn_user(message: str) -> None:
    """Gives a `TfpflWarning` with this message, at the line that called our caller."""
    warnings.warn(message, TfpflWarning, stacklevel=3)


def extra(name: str) -> str:
    """How to install what an extra of setup.py brings. tfpfl is on no package index, so it is installed from a copy."""
    return f"pip install '.[{name}]' in a copy of tfpfl"


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The error message for an unknown name: with the closest known name, if one is close, and the list of all.

    Args:
        what: the kind of thing that has the name, for example 'network'.
        name: the name that was found.
        known: all valid names.

    Examples:
        >>> unknown("network", "mlp20", ["mlp200", "cifar_2conv"])
        "unknown network 'mlp20'; did you mean 'mlp200'? there are mlp200, cifar_2conv"
    """
    known = list(known)
    near = get_close_matches(str(name), known, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r};{hint} there are {', '.join(known) or 'none'}"


# These marks turn the direction of what is written after them, so that a reader sees another text than is there.
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_NO_TEXT = frozenset("\ufeff\ufffe\uffff")  # a mark of byte order, and what XML does not allow


def one_line(text: object, most: int | None = None, *, keep: str = "") -> str:
    r"""A text that may come from a stranger, such as the name of a client, so that it can be shown in one line.

    Control characters (line breaks, NUL, the escape that colours a terminal), marks that turn the direction of reading
    and halves of surrogate pairs are written as their code, such as \x1b or \u202e. Letters of all scripts stay.

    Args:
        text: the text, or anything else, which `str` converts.
        most: the largest number of characters of the result; the rest is replaced by '…'. Default: any number.
        keep: characters that stay as they are, such as a line break.

    Examples:
        >>> one_line("cat\n\x1b[31m שלום")
        'cat\\n\\x1b[31m שלום'
        >>> one_line("a long name", most=7)
        'a long…'
    """
    shown = str(text)
    if not shown.isprintable():  # most names are: a federation can have 100,000
        shown = "".join(c if c in keep or not _is_hidden(c) else _code(c) for c in shown)
    return shown if most is None or len(shown) <= most else shown[: most - 1] + "…"


def _is_hidden(c: str) -> bool:
    return c in _TURNING or c in _NO_TEXT or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")


def _code(c: str) -> str:
    return c.encode("unicode_escape").decode("ascii")


ADDRESS_SPACE = 2 * 2**30  # bytes that TensorFlow and a small run reserve; they use a part of them
ADDRESS_SPACE_OF_THREAD = 136 * 2**20  # what Linux's C library reserves for a thread: 128 MB of heap, 8 MB of stack


def check_address_space() -> None:
    """Checks that TensorFlow can start. In too small an address space it aborts the process, without an error.

    Raises:
        Unavailable: the address space of this process is limited (`ulimit -v`) to less than TensorFlow needs.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = ADDRESS_SPACE + (os.cpu_count() or 1) * ADDRESS_SPACE_OF_THREAD  # TensorFlow starts a thread for each core
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise Unavailable(
            f"TensorFlow needs an address space of {needed / 2**30:.3g} GB or more on this machine, and this process "
            f"may take {limit / 2**30:.3g} GB: it would be aborted. Raise the limit, for example with "
            "`ulimit -v unlimited`"
        )


def verbose() -> bool:
    """Whether the environment has TFPFL_VERBOSE=1: TensorFlow and TFF then say all that they say by default."""
    return os.environ.get("TFPFL_VERBOSE", "") not in ("", "0")


def quiet_tensorflow() -> None:
    """Makes TensorFlow's C++ code, in this process and in TFF's worker, write fatal errors only.

    Otherwise it writes errors at every start that are none, such as "Unable to register cuDNN factory" and a missing
    GPU. Errors of computations are exceptions of Python, and stay. Nothing is changed with TFPFL_VERBOSE=1, if
    TF_CPP_MIN_LOG_LEVEL is set, or if TensorFlow is imported already.
    """
    if not verbose() and "tensorflow" not in sys.modules:
        if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", _FATAL_ONLY) == _FATAL_ONLY:
            sys.meta_path.insert(0, _QuietStart())


_FATAL_ONLY = "3"
# Since 2.17, TensorFlow writes some of its news before it reads TF_CPP_MIN_LOG_LEVEL: they are dropped line by line.
_DROP_NEWS = """
import re, sys
for line in sys.stdin.buffer:
    if not re.match(rb"I0000 |WARNING: All log messages before absl::InitializeLog", line):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
"""


class _QuietStart:
    """A finder of modules, which finds tensorflow as Python does, and has it loaded `_without_news`."""

    looking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "tensorflow" or self.looking:
            return None
        self.looking = True
        try:
            spec = find_spec(name)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def quietly(module: ModuleType) -> None:
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
                with _without_news():
                    load(module)

            spec.loader.exec_module = quietly  # type: ignore[method-assign]
        return spec


@contextmanager
def _without_news() -> Iterator[None]:
    """Sends standard error through a process that drops news. A process, so that a crash still says what it is."""
    import subprocess  # here, because importing tfpfl costs nothing

    try:
        stderr = os.dup(2)
        reader = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DROP_NEWS], stdin=subprocess.PIPE, start_new_session=True
        )
    except OSError:  # there is no standard error, or no further process: then the news are shown
        yield
        return
    with reader:
        assert reader.stdin is not None
        os.dup2(reader.stdin.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def traced_by_design(graph: Any) -> Any:
    """Returns a `tf.function` of ours, for which TensorFlow no longer warns that it is traced often.

    Every training makes its own graphs, from the same code. TensorFlow counts the tracings of a piece of code, and so
    warns after five trainings in a process. Other functions still cause the warning, and all do with TFPFL_VERBOSE=1.
    """
    graph._omit_frequent_tracing_warning = not verbose()  # TensorFlow has no public name for it
    return graph


DEEPEST = 30  # levels of a JSON file of ours


def levels(value: object) -> int:
    """How deep lists and dicts lie in one another; 0 for anything else. Files from elsewhere can be nested too deeply.

    Examples:
        >>> levels({"a": [1, {}]}), levels(3)
        (3, 0)
    """
    found, inner = 0, [value]
    while inner := [item for item in inner if isinstance(item, list | tuple | dict)]:
        found += 1
        inner = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
    return found


def check_choice(**choices: tuple[Any, Iterable[str]]) -> None:
    """Checks arguments that have a fixed set of values.

    Args:
        choices: argument=(value, allowed values).

    Raises:
        InvalidArgument: a value is not among the allowed ones.
    """
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}; found {value!r}")


def check_numbers(**numbers: float) -> None:
    """Checks that arguments, given as name=value, are numbers or tensors, and no text, None, or list.

    Raises:
        InvalidArgument: a value is something that cannot be compared with a number.
    """
    for name, value in numbers.items():
        try:
            value < 0  # noqa: B015 -- what can be compared may be of many types
        except TypeError:
            raise InvalidArgument(f"{name} must be a number, found {value!r}") from None


def check_whole_number(least: int, **numbers: Any) -> None:
    """Checks whole numbers, given as name=value.

    Raises:
        InvalidArgument: a value is less than `least`, or no int.
    """
    for name, value in numbers.items():
        if not isinstance(value, Integral):
            raise InvalidArgument(f"{name} must be a whole number >= {least}, found {value!r}: write it as an int")
        if value < least:
            raise InvalidArgument(f"{name} must be at least {least}, found {value}")


def check_type(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Checks that an argument is of a type.

    Args:
        name: what it is called.
        value: what was given.
        kind: the type, or several.
        what: what is needed, in words, and how one gets it.

    Raises:
        InvalidArgument: `value` is of another type.
    """
    if not isinstance(value, kind):
        plain = value is None or isinstance(value, str | bytes | Number)
        raise InvalidArgument(f"{name} must be {what}; found {repr(value) if plain else type(value).__name__}")


def check_listed(name: str, values: object, example: str) -> None:
    """Checks that several values are given as a list or another collection, and not as one text.

    Args:
        name: what the argument is called.
        values: what was given.
        example: a list, as one writes it in Python.

    Raises:
        InvalidArgument: `values` is a text, or cannot be gone through.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidArgument(f"{name} must be a list, such as {example}; found {values!r}")


def check_fractions(**fractions: float) -> None:
    """Checks probabilities and fractions, given as name=value.

    Raises:
        InvalidArgument: a value is outside [0, 1], NaN, or no number.
    """
    check_numbers(**fractions)
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise InvalidArgument(f"{name} must lie in [0, 1], found {value}")


def check_penalty(eta: float, implicit_prox: bool = False, **coefficients: float) -> None:
    """Checks coefficients c of a penalty (c / 2) |w - anchor|^2, given as name=value.

    Explicit gradient steps on the penalty converge only if eta c < 2. Otherwise there is a warning and no error,
    because the loss may keep the iteration stable for a while.

    Args:
        eta: the learning rate of the steps.
        implicit_prox: whether the steps on the penalty are implicit; these are stable for every c.
        coefficients: name=c.

    Raises:
        InvalidArgument: a coefficient is negative or not finite.
    """
    check_rates(**coefficients)
    for name, value in coefficients.items():
        if eta * value >= 2 and not implicit_prox:
            warn_user(
                f"{name}={value} with a rate of {eta} is too large: explicit steps on the penalty diverge where rate * "
                f"{name} >= 2, here {eta * value:g}. Use implicit_prox=True (--implicit-prox), or a smaller rate"
            )


def check_rates(**rates: float) -> None:
    """Checks rates, momenta and coefficients, given as name=value.

    Raises:
        InvalidArgument: a value is negative, infinite, NaN, or no number.
    """
    check_numbers(**rates)
    for name, value in rates.items():
        if not 0 <= value < float("inf"):
            raise InvalidArgument(f"{name} must be a finite number >= 0, found {value}")
