"""Loads the user's own method and metrics of a run again: from the copy in the run folder, or from their module.

That runs code. Nothing is run before the user has allowed it: by naming the method in `tfpfl run` or in a `RunConfig`
on this machine, or with --allow-code. An entry point needs no consent, because its package was installed. Metrics are
loaded only where something is measured, so that a run can be read and exported without them.
"""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from tfpfl.algorithms.own import OwnMethod, code_of_file, code_of_module, is_loaded, load_file, load_installed
from tfpfl.checks import InvalidArgument
from tfpfl.runs.config import METHOD, METRIC, RunConfig, RunError
from tfpfl.runs.consent import is_allowed, place_of, remember
from tfpfl.runs.folders import read_kept
from tfpfl.runs.metrics import METRICS, as_metric, is_own, register_metric
from tfpfl.runs.own_metrics import REGISTERED, OwnMetric, loaded_metric, metric_of


class Code(NamedTuple):
    """The code of the user's own method or metric, as it can be sent to another process."""

    entry: dict  # `RunConfig.own_method`, or one of `RunConfig.own_metrics`
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
    what = f"the method {config.algorithm} of the run {folder}"
    free = is_loaded(own) is not None or own["kind"] == "entry point"
    code = _allowed_code(own, folder / METHOD, "method", what, free)
    try:
        again(code)
        return RunConfig(**asdict(config))
    except InvalidArgument as error:
        raise RunError(f"{what} cannot be used: {error}") from error


def _allowed_code(own: dict, copy: Path, noun: str, what: str, free: bool = False) -> Code:
    """The code of a method or a metric of a run folder, if it needs no consent (`free`) or its user has allowed it.

    Raises:
        RunError: the copy is missing or was changed, or this user has not allowed the code on this machine.
    """
    is_file = own["kind"] == "file"
    content = read_kept(copy, own["sha256"], f"{noun} (a copy of {own['place']})") if is_file else b""
    if free:
        return Code(own, content, copy)
    if not is_allowed(own["sha256"]):
        where = copy if is_file else f"the module {own['place']}"
        raise RunError(
            f"{what} is code of whoever made the run, in {where}. A run folder from elsewhere runs no code here; if "
            "you made it, or have read the code and trust it, use --allow-code"
        )
    path = place_of(copy, content, own["sha256"], own["place"], own.get("beside")) if is_file else copy
    return Code(own, content, path)


def again(code: Code) -> OwnMethod:
    """Loads a method whose code is allowed, in any process.

    Raises:
        InvalidArgument: it is missing here, was changed, or cannot be imported.
    """
    own = code.entry
    if found := is_loaded(own):
        return found
    if own["kind"] == "file":
        return load_file(code.content, own["function"], code.path, own)
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
    found = is_loaded(config.own_method)
    assert found is not None
    return Code(config.own_method, found.code.content, Path(found.code.place))


def metrics_of(config: RunConfig) -> dict[str, Code]:
    """{name: code} of the user's own metrics from files and modules, which this process has loaded.

    Raises:
        InvalidArgument: one of them is not loaded.
    """
    found = {}
    for name, own in config.own_metrics.items():
        if own["kind"] == REGISTERED:
            continue
        if (loaded := loaded_metric(own)) is None:
            raise InvalidArgument(
                f"the metric {name} is not loaded: name it again, as {own['place']}:{own['function']}"
            )
        found[name] = Code(own, loaded.code.content, Path(loaded.code.place))
    return found


def load_metrics(config: RunConfig, folder: Path) -> None:
    """Lets this process know all metrics of the run in `folder`, before something is measured.

    Raises:
        RunError: a metric of the user's own is missing or was changed, or this user has not allowed its code here.
        InvalidArgument: this process knows no metric of one of the names.
    """
    for name, own in config.own_metrics.items():
        if own["kind"] == REGISTERED:
            continue
        copy, what = folder / METRIC.format(name=name), f"the metric {name} ({own['name']}) of the run {folder}"
        code = Code(own, b"", copy) if loaded_metric(own) else _allowed_code(own, copy, f"metric {name}", what)
        try:
            metric_again(code)
        except InvalidArgument as error:
            raise RunError(f"{what} cannot be used: {error}") from error
    for name in config.metrics:  # known only where it was registered, which a resumed run may have forgotten
        if name in config.own_metrics and name in METRICS and not is_own(name):
            raise InvalidArgument(
                f"the metric {name} of the run {folder} is not tfpfl's metric of this name, but one that a program had "
                "registered. Make it known in this process before: tfpfl.runs.register_metric(function)"
            )
        as_metric(name, config.kind)


def metric_again(code: Code) -> OwnMetric:
    """Loads a metric whose code is allowed, in any process.

    Raises:
        InvalidArgument: it is missing here, was changed, or cannot be imported.
    """
    own = code.entry
    if found := loaded_metric(own):
        register_metric(found.metric)  # another one of this name may have come after it
        return found
    if own["kind"] == "file":
        return metric_of(code_of_file(code.content, own["function"], code.path, own.get("beside")), own)
    return metric_of(code_of_module(own["name"], own["sha256"]), own)


def keep(config: RunConfig, folder: Path) -> None:
    """Writes copies of the method and the metrics into the folder of a new run.

    It also remembers that this user has allowed their code.
    """
    method = code_of(config)
    for copy, code in [(METHOD, method), *((METRIC.format(name=n), c) for n, c in metrics_of(config).items())]:
        if code is None:
            continue
        own = code.entry
        if own["kind"] == "file":
            (folder / copy).write_bytes(code.content)
        if own["kind"] != "entry point":
            with suppress(OSError, InvalidArgument):  # then `resume` asks for --allow-code
                remember(own["sha256"], code.path.parent if own["kind"] == "file" else None)
