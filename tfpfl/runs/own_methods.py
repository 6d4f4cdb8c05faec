"""Loads the user's own method of a run again: from the copy in the run folder, or from its module.

That runs code. Nothing is run before the user has allowed it: by naming the method in `tfpfl run` or in a `RunConfig`
on this machine, or with --allow-code. An entry point needs no consent, because its package was installed.
"""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from tfpfl.algorithms.own import OwnMethod, is_loaded, load_file, load_installed
from tfpfl.checks import InvalidArgument
from tfpfl.runs.config import METHOD, RunConfig, RunError
from tfpfl.runs.consent import folder_of, is_allowed, remember
from tfpfl.runs.folders import read_kept


class Code(NamedTuple):
    """The code of the user's own method, as it can be sent to another process."""

    entry: dict  # `RunConfig.own_method`
    content: bytes  # of the source file
    path: Path  # the original file, or the copy; modules beside it can be imported


def load(config: RunConfig, folder: Path) -> RunConfig:
    """Loads the user's own method of the run in `folder`, if it has one.

    Returns:
        The configuration, whose hyperparameters have been compared with the method.

    Raises:
        RunError: the method is missing or was changed, or this user has not allowed its code on this machine.
    """
    own = config.own_method
    if own is None:
        return config
    path, content = folder / METHOD, b""
    what = f"the method {config.algorithm} of the run {folder}"
    if own["kind"] == "file":
        content = read_kept(path, own["sha256"], f"method (a copy of {own['place']})")
        beside = folder_of(own["sha256"])
        path = beside / Path(own["place"]).name if beside else path
    if own["kind"] != "entry point" and not (_found(own) or is_allowed(own["sha256"])):
        where = path if own["kind"] == "file" else f"the module {own['place']}"
        raise RunError(
            f"{what} is code of whoever made the run, in {where}. A run folder from elsewhere runs no code here; if "
            "you made it, or have read the code and trust it, use --allow-code"
        )
    try:
        again(Code(own, content, path))
        return RunConfig(**asdict(config))
    except InvalidArgument as error:
        raise RunError(f"{what} cannot be used: {error}") from error


def again(code: Code) -> OwnMethod:
    """Loads a method whose code is allowed, in any process.

    Raises:
        InvalidArgument: it is missing here, was changed, or cannot be imported.
    """
    own = code.entry
    if found := _found(own):
        return found
    if own["kind"] == "file":
        return load_file(code.content, own["function"], code.path)
    try:
        return load_installed(own["kind"], own["name"], own["sha256"])
    except InvalidArgument as error:
        was = f"It was in {own['package']} when the run was created: " if own["package"] else ""
        raise InvalidArgument(f"{was}{error}") from error


def code_of(config: RunConfig) -> Code | None:
    """The code of the user's own method, which this process has loaded; None if the method is one of tfpfl's.

    Raises:
        InvalidArgument: it is not loaded.
    """
    if config.own_method is None:
        return None
    assert config.method  # raises where it is not loaded
    found = _found(config.own_method)
    assert found is not None
    return Code(config.own_method, found.content, Path(found.place))


def keep(code: Code, folder: Path) -> None:
    """Writes a copy of the method into the folder of a new run, and remembers that this user has allowed its code."""
    own = code.entry
    if own["kind"] == "file":
        (folder / METHOD).write_bytes(code.content)
    if own["kind"] != "entry point":
        with suppress(OSError, InvalidArgument):  # then `resume` asks for --allow-code
            remember(own["sha256"], code.path.parent if own["kind"] == "file" else None)


def _found(own: dict) -> OwnMethod | None:
    return is_loaded(own["kind"], own["place"], own["function"], own["sha256"])
