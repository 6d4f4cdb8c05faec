"""Backbones that a function of the user's own makes, named FILE.py:function.

A run folder has a copy of the file, and the sha256 of the weights that the function gave. Naming the file in
`tfpfl run` or in a `RunConfig` allows its code on this machine. A run folder from elsewhere runs no code, see
`tfpfl.runs.consent`.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import Parameter, isclass, signature
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfpfl.algorithms.own import code_of_file
from tfpfl.checks import InvalidArgument, one_line
from tfpfl.data import Federation
from tfpfl.data.layout import is_several
from tfpfl.models.networks import names_from_the_first
from tfpfl.runs.config import RunConfig
from tfpfl.runs.consent import is_allowed, place_of, remember
from tfpfl.runs.folders import read_kept
from tfpfl.runs.seen_classes import warn_of_shared_classes


def described(config: RunConfig, file: Path | None, federation: Federation) -> RunConfig:
    """A new run's configuration with the sha256 of the weights that the user's function gives; and allows its code.

    Warns if the file is a pretrained backbone that has seen classes of the federation.

    Args:
        config: the configuration, see `RunConfig.resolved`.
        file: the original file of the network; None if the network is one of tfpfl's.
        federation: the data.

    Raises:
        InvalidArgument: the file cannot be imported, or the function gives no Keras model.
    """
    if file is not None:
        warn_of_shared_classes(file, federation)
    function = config.network_function
    if file is None or function is None:
        return config
    file, sha256 = file.expanduser().resolve(), str(config.network_hash)
    content = read_kept(file, sha256, "backbone")
    model = made_by(file, content, function, federation.example_shape, config.seed, config.network_beside)
    with suppress(OSError, InvalidArgument):  # then `resume` asks for --allow-code
        remember(sha256, file.parent)
    return replace(config, network_weights=_hash(model))


def kept(config: RunConfig, file: Path | None) -> tuple[tuple[Path, bytes] | None, bool]:
    """The file of a run's backbone as (path, content), None if it is one of tfpfl's; and whether its code is allowed.

    Args:
        config: the configuration, see `RunConfig.resolved`.
        file: the copy in the run folder, or in a new run the original. The path that is returned is the one from which
            its code is loaded.

    Raises:
        RunError: the copy is missing or was changed; or the modules beside it were not allowed, see `place_of`.
    """
    if file is None:
        return None, False
    sha256 = str(config.network_hash)
    content, allowed = read_kept(file, sha256, "backbone"), is_allowed(sha256)
    if allowed and config.network_function:
        file = place_of(file, content, sha256, config.network_place, config.network_beside)
    return (file, content), allowed


def build(config: RunConfig, file: Path, content: bytes, shape: Any, *, run_code: bool) -> keras.Model:
    """The backbone of a run.

    Args:
        config: the configuration of a run folder.
        file: the network's file, see `kept`.
        content: its content.
        shape: the shape of an example, or a dict or a tuple of shapes.
        run_code: whether the code is allowed.

    Raises:
        InvalidArgument: the code is not allowed; it cannot be imported; or the function gives other weights than when
            the run was created.
    """
    function = config.network_function
    assert function is not None
    if not run_code:
        raise InvalidArgument(
            f"the network {config.network} is code of whoever made the run, in {file}. A run folder from elsewhere "
            "runs no code here; if you made it, or have read the code and trust it, use --allow-code"
        )
    model = made_by(file, content, function, shape, config.seed, config.network_beside)
    if config.network_weights is not None and _hash(model) != config.network_weights:
        raise InvalidArgument(
            f"the network {config.network} begins with other weights than when the run was created. Its function must "
            "give the same ones whenever it is called: draw them with Keras's initializers, or read them from one file "
            "that does not change"
        )
    return model


def made_by(file: Path, content: bytes, function: str, shape: Any, seed: int, beside: str | None = None) -> keras.Model:
    """Calls the function with those of the arguments `input_shape` and `seed` that it takes.

    Args:
        file: the function's file, whose folder the code may import from.
        content: the content of the file.
        function: the name of the function.
        shape: the shape of an example, or a dict or a tuple of shapes.
        seed: Keras's initializers draw from it.
        beside: the `hash_of` the modules beside the file that is expected; None: any.

    Raises:
        InvalidArgument: the file cannot be imported, or the function gives no Keras model.
    """
    call = code_of_file(content, function, file, beside).found
    where = f"{function} in {file}"
    if not callable(call) or isclass(call):
        raise InvalidArgument(f"{where} is {type(call).__name__}, not a function that gives a Keras model")
    several = is_several(shape)
    known = {"input_shape": shape if several else tuple(shape), "seed": seed}
    wanted = signature(call).parameters
    missing = [n for n, p in wanted.items() if n not in known and p.default is p.empty and p.kind not in (
        Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]  # fmt: skip
    if missing:
        raise InvalidArgument(
            f"{where} needs {', '.join(missing)}; a function that makes a backbone is called with input_shape and "
            "seed, if it takes them. Give the others defaults"
        )
    given = {name: value for name, value in known.items() if name in wanted}
    with seeded(seed):
        try:
            model = _with_names_from_the_first(lambda: call(**given), seed)
        except Exception as error:  # of the user's own code
            raise InvalidArgument(f"{where} raised {type(error).__name__}: {one_line(error, 400)}") from error
        if not isinstance(model, keras.Model):
            raise InvalidArgument(f"{where} must give a Keras model of features, found {type(model).__name__}")
        if not model.built and not several:  # a model of several arrays that names no inputs is refused later, in words
            try:
                model.build((None, *shape))
            except Exception as error:  # each layer raises errors of its own
                raise InvalidArgument(
                    f"the model that {where} gives does not take examples of shape {tuple(shape)}: "
                    f"{one_line(error, 400)}"
                ) from error
    return model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Lets Keras draw initial weights as functions of the seed; Python's and NumPy's generators go on as before."""
    state: Any = random.getstate(), np.random.get_state()  # noqa: NPY002 - these are what Keras and users draw from
    try:
        keras.utils.set_random_seed(seed)
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002


def _with_names_from_the_first(make: Callable[[], Any], seed: int) -> Any:
    """What the function gives, with layers that Keras names numbered as in a new process: dense, dense_1, ...

    `train_from` means a layer by its name, and a function is called again, also in another process.
    """
    try:
        with names_from_the_first():
            return make()
    except ValueError:
        # Perhaps the file keeps layers from before, whose names would come twice. Any other error is raised again.
        keras.utils.set_random_seed(seed)
    return make()


def _hash(model: keras.Model) -> str:
    digest = hashlib.sha256()
    for array in map(np.asarray, (*model.trainable_weights, *model.non_trainable_weights)):
        digest.update(f"{array.dtype.str} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
