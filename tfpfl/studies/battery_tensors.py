"""Finds eager tensors that a function of an algorithm takes from outside, such as a `tf.constant` in the builder.

tf.function takes such a tensor into its graph, so the local engine and Ray compute the function. TFF traces a function
in a plain graph, which cannot, whatever the tensor's size: it says "Attempting to capture an EagerTensor without
building a function".
"""

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, Between
from tfpfl.algorithms.exchanges import first_of
from tfpfl.engines.aggregation import contribution, finish
from tfpfl.studies.battery_subject import Subject

_OURS = str(Path(__file__).parents[1])  # the package tfpfl


def tensors_from_outside(subject: Subject, client: int) -> list[str]:
    """Which functions of the algorithm take a tensor from outside, in words.

    Args:
        subject: the algorithm, and a training whose states the functions are called with.
        client: the client whose message, state and data they are called with.
    """
    algorithm, server = subject.algorithm, subject.trained.server
    message, state, data, output = subject.visit(client)

    def step_of(algorithm: Algorithm) -> Callable:
        def server_update(server: Any, output: Any, ids: Any) -> Any:
            total = contribution(algorithm, output)
            total = total._replace(rows=tf.nest.map_structure(lambda row: row[None], total.rows))
            return algorithm.step(server, finish(algorithm, total, ids), total.weight)

        server_update.__wrapped__ = algorithm.server_update  # type: ignore[attr-defined]
        return server_update

    more, ids = [np.int32(client)], np.array([client], np.int32)

    def outputs(message: Any, state: Any, data: Any) -> Any:
        theta = algorithm.personal_model(message, state, data).theta
        return algorithm.predictor(message, state, data)(algorithm.model.features(theta, data.x))  # type: ignore

    outputs.__wrapped__ = algorithm.predictor  # type: ignore[attr-defined]
    calls: dict[str, tuple] = {
        "init_server": (algorithm.init_server,),
        "init_client": (algorithm.init_client, data.info),
        "message": (algorithm.message, server, *(more if algorithm.message_per_client else [])),
        "client_update": (algorithm.client_update, message, state, data),
        "server_update": (step_of(algorithm), server, output, ids),
        "personal_model": (algorithm.personal_model, message, state, data),
        "local_model": (algorithm.local_model, message, output),
        "predictor": (algorithm.predictor and outputs, message, state, data),
        "global_model": (algorithm.global_model, message),
        "matrices": (algorithm.matrices, server),
    }
    if algorithm.first is not None:
        first, alone = algorithm.first, first_of(algorithm)
        sent, before, _, began = subject.first_visit(client)
        calls["client_update"] = (algorithm.client_update, message, Between(before, began.state), data)
        calls |= {
            "first.message": (first.message, server, *(more if alone.message_per_client else [])),
            "first.client_update": (first.client_update, sent, before, data),
            "first.server_update": (step_of(alone), server, began, ids),
            "first.keeps": (first.keeps, data.info),
        }
    found = {name: from_outside(*call) for name, call in calls.items() if call[0] is not None}
    return [f"{name} uses {what}" for name, what in found.items() if what]


def from_outside(function: Callable, *arguments: Any) -> str | None:
    """What a function takes from outside, in words; None if it takes no tensor.

    Args:
        function: it is traced in a plain graph, as TFF does.
        arguments: structures of tensors like those that it is called with.
    """

    def called() -> Any:
        return function(*tf.nest.map_structure(_placeholder, arguments))

    with tf.Graph().as_default():
        try:
            called()
        except Exception as error:
            if not _is_traced(called):
                return None  # it fails everywhere: other checks find what is wrong
            names = ", ".join(f"`{name}`" for name in _names(function, set())) or "a tensor"
            place = _place(error)
            return f"{names}, which TensorFlow made outside of it{f' ({place})' if place else ''}"
    return None


def _is_traced(function: Callable) -> bool:
    """Whether tf.function can trace it; unlike a plain graph, it may take tensors from outside."""
    try:
        with tf.init_scope():
            tf.function(function, autograph=False).get_concrete_function()
    except Exception:
        return False
    return True


def _placeholder(value: Any) -> Any:
    array = np.asarray(value)
    return tf.compat.v1.placeholder(array.dtype, array.shape)


def _place(error: Exception) -> str:
    """Where the tensor is used: the last line that is of neither TensorFlow nor tfpfl."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<")) and "site-packages" not in frame.filename
    ]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _names(function: Any, seen: set[int]) -> list[str]:
    """The names of the variables that hold eager tensors, in a function and in the functions that it uses."""
    found: list[str] = []
    if id(function) not in seen:
        seen.add(id(function))
        for name, value in _variables(function).items():
            values = list(_leaves(value))
            if any(isinstance(each, tf.Tensor) for each in values):
                found.append(name)
            for each in values:
                if isinstance(each, FunctionType | partial):
                    found += _names(each, seen)
    return list(dict.fromkeys(found))


def _leaves(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    for each in inner:
        yield from _leaves(each)
    if not isinstance(value, tuple | list | dict):
        yield value


def _variables(function: Any) -> dict[str, Any]:
    """{name: value} of what a function uses from outside: variables of the builder, and globals of its file."""
    if isinstance(function, partial):
        return {"": function.func, "an argument of partial": [*function.args, *function.keywords.values()]}
    found = {"": getattr(function, "__wrapped__", None)}
    if not isinstance(function, FunctionType) or function.__module__.startswith(("tensorflow", "keras")):
        return found
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return found | {n: function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__}
