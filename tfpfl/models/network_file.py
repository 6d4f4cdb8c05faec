"""Loads a backbone from a file of Keras, so that a file from elsewhere runs no code.

A file is the zip archive FILE.keras, or HDF5 as older versions of Keras wrote it. Either has the configuration of the
layers as JSON, and the weights. All of it is read and checked before Keras builds anything. Keras then gets a file that
has only what was checked: it might otherwise read something else in the same bytes, such as a second configuration.
"""

import io
import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import keras
import tensorflow as tf

import tfpfl.models.speech_embedding  # noqa: F401 - registers its layers, so that its file is read like every other
from tfpfl.checks import InvalidArgument
from tfpfl.models.network_config import NotAccepted, checked_config

CONFIG, METADATA, WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
MOST_TIMES_LARGER = 100  # what an archive may unpack to, in multiples of its size; Keras does not compress at all
MOST_PER_EXAMPLE = 2**27  # numbers in the output of a layer for one example: 0.5 GB
_STATES = 10_000  # numbers that a model may have beside its weights, such as the states of random generators


def load_network(path: str | os.PathLike, content: bytes, *, run_code: bool = False) -> keras.Model:
    """Loads a Keras model from the content of its file.

    Args:
        path: the file, for messages.
        content: its bytes.
        run_code: load whatever Keras can load, also layers that run Python code from the file. Default: only layers of
            Keras, and classes that this process has registered with `keras.saving.register_keras_serializable`.

    Raises:
        InvalidArgument: the file is not a Keras model; or it has layers that might run code, and `run_code` is false.
    """
    try:
        kind = _kind(content)
        if run_code:
            return _a_model(_load(content, kind, safe_mode=False))
        if kind == ".keras":
            config, weights, clean = _checked_archive(content)
        else:
            config, weights, clean = _checked_hdf5(content)
        try:
            with _at_most(weights + _STATES):
                model = _a_model(_load(clean, kind, safe_mode=True))
        except Exception as error:  # each layer raises errors of its own
            raise InvalidArgument(f"{_to_blame(config, weights)}: {_first_line(error)}") from error
        _check_outputs(model)
        return model
    except Exception as error:  # zip, JSON, HDF5 and the named layers each raise errors of their own
        raise InvalidArgument(f"{path} cannot be read as a Keras model: {_first_line(error)}") from error


def check_new(path: Path) -> None:
    """Checks that a model may be written to this file.

    Raises:
        InvalidArgument: its name does not end with .keras, or it exists.
    """
    if path.suffix != ".keras":
        raise InvalidArgument(f"{path} must end with .keras, which is the format that is written")
    if path.exists():
        raise InvalidArgument(f"{path} exists already, and nothing is overwritten. Take another name, or delete it")


def _kind(content: bytes) -> str:
    if content.startswith(b"PK\x03\x04"):
        return ".keras"
    if content.startswith(b"\x89HDF\r\n\x1a\n"):
        return ".h5"
    raise InvalidArgument("it is neither a .keras archive nor HDF5. Save the model with model.save('FILE.keras')")


def _load(content: bytes, kind: str, safe_mode: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"network{kind}"
        copy.write_bytes(content)
        return keras.models.load_model(copy, compile=False, safe_mode=safe_mode)


def _a_model(loaded: Any) -> keras.Model:
    if not isinstance(loaded, keras.Model):
        raise InvalidArgument(f"class_name is that of a {type(loaded).__name__}, which is not a model")
    if not isinstance(loaded.name, str):  # Keras says so only when the model is called
        raise InvalidArgument(f"name of the model is {loaded.name!r}, not a text")
    return loaded


def _checked_archive(content: bytes) -> tuple[dict, int, bytes]:
    """The configuration, the number of stored weights, and a new archive of the members that were checked."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        for member in members:
            if stat.S_ISLNK(member.external_attr >> 16) or member.filename not in (CONFIG, METADATA, WEIGHTS):
                raise NotAccepted(f"the archive has a member {member.filename[:60]!r}, which is no part of a model")
        for name, least in ((CONFIG, 1), (WEIGHTS, 1), (METADATA, 0)):
            if not least <= names.count(name) <= 1:
                raise InvalidArgument(f"the archive must have one member {name}, found {names.count(name)}")
        unpacked = sum(member.file_size for member in members)
        if unpacked > MOST_TIMES_LARGER * len(content):
            raise InvalidArgument(f"the archive unpacks to {unpacked} bytes, over {MOST_TIMES_LARGER} times its size")
        # `open` reads no more than the announced size, and checks the checksum
        config, weights = (archive.read(name) for name in (CONFIG, WEIGHTS))
        metadata = archive.read(METADATA) if METADATA in names else b"{}"
    checked, stored = checked_config(_json(config, CONFIG)), _check_weights(weights)
    clean = io.BytesIO()
    with zipfile.ZipFile(clean, "w") as archive:
        archive.writestr(METADATA, json.dumps(_json(metadata, METADATA)))
        archive.writestr(CONFIG, json.dumps(checked))
        archive.writestr(WEIGHTS, weights)
    return checked, stored, clean.getvalue()


def _checked_hdf5(content: bytes) -> tuple[dict, int, bytes]:
    """The same as `_checked_archive` for HDF5, where the configuration is an attribute of the file."""
    stored, clean = _check_weights(content), io.BytesIO(content)
    with h5py.File(clean, "r+") as file:
        if "model_config" not in file.attrs:
            raise InvalidArgument("it has no model_config: it has weights only. Save the model with model.save")
        checked = checked_config(_json(file.attrs["model_config"], "model_config"))
        file.attrs["model_config"] = json.dumps(checked)
        if "training_config" in file.attrs:
            del file.attrs["training_config"]
    return checked, stored, clean.getvalue()


def _json(text: str | bytes, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"its {name} is not valid JSON: {error}") from error


def _check_weights(content: bytes) -> int:
    """Checks that an HDF5 file has plain arrays of numbers only, and nothing outside of it. Returns how many numbers.

    Raises:
        InvalidArgument: a link to another file or place, a reference, or an array larger than what is stored of it.
    """
    total, seen = 0, set()
    with h5py.File(io.BytesIO(content), "r") as file:
        groups = [file]
        while groups:
            group = groups.pop()
            _check_attributes(group)
            for name in group:
                place = f"{group.name.rstrip('/')}/{name}"[:100]
                if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                    raise InvalidArgument(f"{place} in its weights is a link, not an array")
                item = group[name]
                address = h5py.h5o.get_info(item.id).addr
                if address in seen:
                    raise InvalidArgument(f"{place} in its weights is there twice")
                seen.add(address)
                if isinstance(item, h5py.Group):
                    groups.append(item)
                else:
                    total += _check_array(item, place)
    return total


def _check_array(item: Any, place: str) -> int:
    _check_attributes(item)
    if not isinstance(item, h5py.Dataset) or item.dtype.kind not in "fiub":
        raise InvalidArgument(f"{place} in its weights is not an array of numbers")
    if item.external or item.is_virtual or item.id.get_create_plist().get_nfilters():
        raise InvalidArgument(f"{place} in its weights is packed, or lies in another file")
    if item.nbytes > item.id.get_storage_size():
        raise InvalidArgument(f"{place} in its weights has shape {item.shape}, but fewer numbers are stored")
    return item.size


def _check_attributes(item: Any) -> None:
    for name in item.attrs:
        dtype = item.attrs.get_id(name).dtype
        if dtype.kind not in "fiubSU" and h5py.check_string_dtype(dtype) is None:
            raise InvalidArgument(f"attribute {name[:60]} of {item.name[:60]} is not a number or a text")


@contextmanager
def _at_most(numbers: int) -> Iterator[None]:
    """Stops a model that wants more weights than its file has, before they take memory."""
    wanted = 0

    def check(next_creator: Any, **made: Any) -> Any:
        nonlocal wanted
        shape, initial = made.get("shape"), made.get("initial_value")
        if shape is None and callable(initial):
            with tf.Graph().as_default():  # only the shape: nothing is computed here
                shape = initial().shape
        if shape is not None:
            wanted += math.prod(tf.TensorShape(shape).as_list())
        if wanted > numbers:
            raise InvalidArgument(
                f"up to weight {made.get('name')} of shape {shape}, its configuration has {wanted} numbers, its file "
                f"has {numbers - _STATES}"
            )
        return next_creator(**made)

    with tf.variable_creator_scope(check):
        yield


def _to_blame(config: dict, weights: int) -> str:
    """The entry of a configuration without which its layer can be built; or the layer, or the model, if none is."""

    def works(entry: dict) -> bool:
        try:
            with _at_most(weights + _STATES):
                keras.layers.deserialize(entry)
            return True
        except Exception:  # each layer raises errors of its own
            return False

    layers = config["config"].get("layers")
    for i, layer in enumerate(layers if isinstance(layers, list) else []):
        place = f"model.config.layers[{i}]"
        if not isinstance(layer, dict) or not isinstance(layer.get("config"), dict):
            return place
        if works(layer):
            continue
        for key in layer["config"]:
            others = {k: v for k, v in layer["config"].items() if k != key}
            if any(works(layer | {"config": tried}) for tried in (others, others | {key: 1})):  # 1: some must be there
                return f"{place}.config.{key}"
        return place
    return "model"


def _check_outputs(model: keras.Model) -> None:
    """Checks the sizes of what all layers give wherever they are used, those of models within the model, too."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            _check_outputs(layer)
        for node in getattr(layer, "_inbound_nodes", ()):
            for output in tf.nest.flatten(getattr(node, "outputs", None)):
                size = math.prod(n for n in getattr(output, "shape", None) or () if n)
                if size > MOST_PER_EXAMPLE:
                    raise InvalidArgument(
                        f"layer {layer.name} gives {size} numbers for an example, over {MOST_PER_EXAMPLE}"
                    )


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 400 else f"{lines[0][:400]}..."
