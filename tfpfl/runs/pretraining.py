"""Backbones that are trained on some classes of a data set, for federations of the others: `tfpfl pretrain`.

While it trains, the folder OUT.training has what has been reached, so that nothing is lost if it is stopped. One call
at a time trains OUT: it has the lock OUT.training.lock.

record.json   the settings, and the finished epochs
epoch-N.keras the whole model with the optimizer's state after the last finished epoch
best.keras    the model of the epoch with the best validation accuracy so far
"""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfpfl.checks import InvalidArgument, one_line
from tfpfl.data.arrays import add_arrays
from tfpfl.data.people.catalog import PEOPLE
from tfpfl.data.randomness import ModelKey, Stream, check_model_seed, generator
from tfpfl.data.source import Source
from tfpfl.data.writing import cut_validation
from tfpfl.models.modules_beside import hash_of, modules_beside, with_beside
from tfpfl.models.network_file import check_new, load_network
from tfpfl.models.networks import NETWORKS, build_network
from tfpfl.runs.config import RunConfig
from tfpfl.runs.files import replaced, write_keras, write_whole
from tfpfl.runs.locks import InUse, Lock
from tfpfl.runs.own_networks import made_by, seeded
from tfpfl.runs.seen_classes import record_beside
from tfpfl.runs.versions import package_versions

RECORD = "record.json"
BACKBONE = 1  # its place among the layers of the whole model: input, backbone, head


@dataclass(frozen=True)
class Settings:
    """How a backbone is trained.

    Attributes:
        network: a name in `tfpfl.models.NETWORKS`; a file of Keras, whose weights are the first ones; or
            FILE.py:FUNCTION, a function that gives a Keras model, see `tfpfl.runs.own_networks`. It runs the file.
        epochs: passes over the training examples, >= 1; the backbone is that of the best one on validation examples.
        batch_size: examples in a step of Adam, >= 1.
        rate: Adam's rate, > 0.
        validation: the fraction of the training examples of each class that is set aside, in (0, 1).
        seed: of the initial weights, the validation examples and the order of examples, >= 0.

    Raises:
        InvalidArgument: a number is out of its range.
    """

    network: str = "omniglot_4conv"
    epochs: int = 10
    batch_size: int = 64
    rate: float = 1e-3
    validation: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise InvalidArgument(
                f"epochs and batch_size must be at least 1, found {self.epochs} and {self.batch_size}"
            )
        check_model_seed(self.seed)
        if not (0 < self.validation < 1 and 0 < self.rate < float("inf")):
            raise InvalidArgument(
                f"validation must lie in (0, 1) and rate must be positive, found {self.validation} and {self.rate}"
            )


def pretrain(source: Source, out: Path, settings: Settings, tell: Callable[[str], Any] = lambda line: None) -> dict:
    """Trains a backbone with one linear head for all classes of a source, and writes OUT.keras and OUT.json.

    A call with the same arguments goes on after the last finished epoch, and ends with the same weights as a call that
    was not interrupted.

    Args:
        source: the examples, see `load_source(name, only_classes=...)`.
        out: the file of the backbone; its name ends with .keras, and it does not exist.
        settings: see there.
        tell: is given a line for every epoch.

    Returns:
        The content of OUT.json: how the backbone was made, its classes, and its accuracy with the head, which is not
        kept.

    Raises:
        InvalidArgument: `out` or its .json exists, or what is begun beside it is damaged or has other settings;
            another call trains `out`; the source has numbers in place of classes; the network does not fit the
            examples, or gives no features [N, M]; or the loss is not finite.
    """
    out = Path(out)
    check_new(out)
    folder, about_it = _places(out)
    if about_it.exists() and not folder.exists():  # else it may be of the call that goes on
        raise InvalidArgument(f"{about_it} exists already, and nothing is overwritten. Take another name, or delete it")
    if source.targets is not None:
        raise InvalidArgument(f"a backbone is pretrained on classes, and {source.name} has numbers to predict")
    about = {
        "settings": asdict(settings),
        "source": _described(source),
        "before": _before(settings.network),
        "network file": _network_file(settings.network),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = Lock(folder)
    except InUse as error:
        raise InvalidArgument(f"{out} is being trained {error}: wait until that ends, or take another name") from error
    try:
        check_new(out)  # a call that had the lock until now may have written it
        return _trained(source, out, settings, about, tell)
    finally:
        with suppress(OSError):
            lock.path.unlink()  # while it is locked: whoever waits for this file notices
        lock.release()


def _trained(source: Source, out: Path, settings: Settings, about: dict, tell: Callable[[str], Any]) -> dict:
    folder, about_it = _places(out)
    record = _begun(folder, about)
    data = _Data(source, settings)
    first = not record["epochs"]
    if first or ".py:" in settings.network:  # a function's file also registers the layers of the user's own
        with seeded(settings.seed):
            model = _model(source, settings)
    if first:
        model.optimizer.build(model.trainable_variables)  # so that its state is in the file, which is 0
        folder.mkdir(exist_ok=True)
        _check_can_be_kept(model, folder, settings.network)
        write_whole(folder / RECORD, json.dumps(record))
    while len(record["epochs"]) < settings.epochs:
        epoch = len(record["epochs"])
        # Every epoch begins with the file of the last one and a seed of its own. So a call that goes on does what one
        # that was not interrupted does, with layers that draw (Dropout) too.
        with seeded(_seed_of(settings.seed, epoch)):
            model = _kept(folder, f"epoch-{epoch}.keras")
            loss = float(model.fit(data.epoch(epoch), shuffle=False, verbose=0).history["loss"][0])
        if not np.isfinite(loss):
            raise InvalidArgument(
                f"the loss of epoch {epoch + 1} is {loss}: the rate {settings.rate:g} is too large for this network. "
                f"Delete {folder}, and take a smaller rate"
            )
        accuracy = float(model.evaluate(data.validation(), verbose=0, return_dict=True)["accuracy"])
        best = max((e["validation_accuracy"] for e in record["epochs"]), default=-1.0)
        write_keras(folder / f"epoch-{epoch + 1}.keras", model)
        if accuracy > best:
            with replaced(folder / "best.keras") as temporary:
                shutil.copyfile(folder / f"epoch-{epoch + 1}.keras", temporary)
        record["epochs"].append({"loss": loss, "validation_accuracy": accuracy})
        write_whole(folder / RECORD, json.dumps(record))
        (folder / f"epoch-{epoch}.keras").unlink(missing_ok=True)
        tell(f"epoch {epoch + 1} of {settings.epochs}: loss {loss:.3f}, validation {100 * accuracy:.1f} %")
    model = _kept(folder, "best.keras")
    record |= {
        "test_accuracy": float(model.evaluate(data.test(), verbose=0, return_dict=True)["accuracy"]),
        "versions": package_versions(),
    }
    with replaced(out) as temporary:
        write_keras(temporary, model.layers[BACKBONE])
        record["sha256"] = hashlib.sha256(temporary.read_bytes()).hexdigest()
        # before the backbone appears: a call that is killed between the two goes on
        write_whole(about_it, json.dumps({"pretraining": record}, indent=2) + "\n")
    shutil.rmtree(folder)
    return record


def _places(out: Path) -> tuple[Path, Path]:
    """The folder of what has been reached, and the file .json."""
    return out.with_name(out.stem + ".training"), out.with_suffix(".json")


def _before(network: str) -> dict | None:
    """Where a pretrained backbone, whose training goes on here, had its weights from."""
    record = record_beside(network) if network.endswith(".keras") else None
    return record and {name: record.get(name) for name in ("source", "sha256", "before")}


def _network_file(network: str) -> str | None:
    """One sha256 of the network's file and the modules that it imports from beside it; None if it is one of tfpfl's."""
    if network in NETWORKS:
        return None
    file, function = _parts(network)
    content = _content(file)
    beside = hash_of(modules_beside(content, file.expanduser().resolve().parent)) if function else None
    return with_beside(hashlib.sha256(content).hexdigest(), beside)


def _parts(network: str) -> tuple[Path, str | None]:
    """(file, function) of a network that is none of tfpfl's; the function is None for a file of Keras.

    Raises:
        InvalidArgument: it is neither of the two.
    """
    config = RunConfig(network=network)
    if config.network_file is None:
        raise InvalidArgument(
            f"network {network!r} is neither a file of Keras, FILE.keras, nor a function, FILE.py:FUNCTION, nor one of "
            f"{', '.join(NETWORKS)}"
        )
    return config.network_file, config.network_function


def _seed_of(seed: int, epoch: int) -> int:
    return int(generator(seed, Stream.PRETRAINING_LAYERS, epoch).integers(2**31))


def _check_can_be_kept(model: keras.Model, folder: Path, network: str) -> None:
    """Writes epoch-0.keras, and checks that Keras can read it: an interruption must not lose what comes later."""
    try:
        write_keras(folder / "epoch-0.keras", model)
        keras.models.load_model(folder / "epoch-0.keras")
    except Exception as error:  # each layer raises errors of its own
        shutil.rmtree(folder)
        if isinstance(error, OSError):  # such as a full disk
            raise
        raise InvalidArgument(
            f"{network} has a layer that Keras cannot write to a file and read again: {one_line(error, 300)}. Register "
            "layers of your own with keras.saving.register_keras_serializable, and take no Lambda"
        ) from error


def _kept(folder: Path, name: str) -> keras.Model:
    try:
        return keras.models.load_model(folder / name)
    except (OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidArgument(
            f"{folder / name} is missing or damaged: {one_line(error, 200)}. Delete {folder} to begin anew"
        ) from error


class _Data:
    """The examples in batches, the training ones in an order of their own in every epoch."""

    def __init__(self, source: Source, settings: Settings):
        rows = [[np.arange(len(source.y_train)), np.empty(0, np.int64), np.empty(0, np.int64)]]
        cut_validation(rows, source.y_train, source.group_train, settings.validation, settings.seed, [source.name])
        self._train, self._validation, _ = rows[0]
        if not len(self._validation):
            raise InvalidArgument(
                f"validation={settings.validation} of {len(self._train)} examples is none: take a larger fraction"
            )
        self._source, self._settings = source, settings

    def epoch(self, number: int) -> tf.data.Dataset:
        """The training examples of an epoch."""
        rng = generator(self._settings.seed, Stream.PRETRAINING, number)
        return self._batches(self._source.x_train, self._source.y_train, rng.permutation(self._train))

    def validation(self) -> tf.data.Dataset:
        """The training examples that are set aside, to choose the best epoch."""
        return self._batches(self._source.x_train, self._source.y_train, self._validation)

    def test(self) -> tf.data.Dataset:
        """The test examples of the source, for the accuracy that the record names."""
        return self._batches(self._source.x_test, self._source.y_test, np.arange(len(self._source.y_test)))

    def _batches(self, x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> tf.data.Dataset:
        scale, shift = np.float32(self._source.scale), np.float32(self._source.shift)
        size = self._settings.batch_size

        def batches() -> Any:
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                yield x[part].astype(np.float32) * scale + shift, y[part]

        shapes = tf.TensorSpec((None, *x.shape[1:]), tf.float32), tf.TensorSpec((None,), tf.int32)
        found = tf.data.Dataset.from_generator(batches, output_signature=shapes)
        # Keras 3 warns of data whose number of batches it does not know
        return found.apply(tf.data.experimental.assert_cardinality(-(-len(rows) // size)))


def _model(source: Source, settings: Settings) -> keras.Model:
    shape = source.x_train.shape[1:]
    if settings.network in NETWORKS:
        backbone = build_network(settings.network, shape, seed=settings.seed)
    else:
        file, function = _parts(settings.network)
        content = _content(file)
        if function:
            backbone = made_by(file.expanduser().resolve(), content, function, shape, settings.seed)
        else:
            backbone = load_network(str(file), content)
    first = keras.initializers.GlorotUniform(seed=settings.seed * 16 + ModelKey.HEAD)
    inputs = keras.Input(shape)
    try:
        features = backbone(inputs)  # in a functional model, which has the backbone as one layer
    except ValueError as error:
        raise InvalidArgument(f"{settings.network} does not take examples {list(shape)}: {error}") from error
    if len(features.shape) != 2:
        raise InvalidArgument(
            f"{settings.network} must give a vector of features [N, M] for the head, found {list(features.shape)[1:]} "
            "for each example. End it with Flatten or pooling"
        )
    z = layers.Dense(len(source.class_names), kernel_initializer=first, name="head")(features)
    model = keras.Model(inputs, z)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(settings.rate), loss, metrics=["accuracy"])
    return model


def _content(file: Path) -> bytes:
    try:
        return file.expanduser().read_bytes()
    except OSError as error:
        raise InvalidArgument(f"the network's file {file} cannot be read: {error.strerror}") from error


def _described(source: Source) -> dict:
    return {
        "name": source.name,
        "version": source.version,
        "options": dict(source.options),
        "class_names": list(source.class_names),
        "examples": len(source.y_train),
        "scale": float(source.scale),
        "shift": float(source.shift),
        "sha256": _hash(source),
        "licence": PEOPLE[source.name].licence if source.name in PEOPLE else None,  # others: `tfpfl cite NAME`
    }


def _hash(source: Source) -> str:
    """One sha256 of all arrays that a training uses."""
    digest = hashlib.sha256()
    arrays = (source.x_train, source.y_train, source.x_test, source.y_test, source.group_train)
    add_arrays(digest, (array for array in arrays if array is not None))
    return digest.hexdigest()


def _begun(folder: Path, about: dict) -> dict:
    """The record of what has been begun in the folder, or a new one."""
    about = json.loads(json.dumps(about))
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return about | {"epochs": []}
    except ValueError as error:
        raise InvalidArgument(f"{folder / RECORD} is damaged: {error}. Delete {folder} to begin anew") from error
    if not isinstance(found, dict) or not {*about, "epochs"} <= {*found}:
        raise InvalidArgument(f"{folder / RECORD} is no record of a training. Delete {folder} to begin anew")
    if isinstance(found["source"], dict) and "sha256" not in found["source"]:
        raise InvalidArgument(
            f"{folder} was begun by an older version of tfpfl, which did not write down of which examples. They could "
            "be others now, so this training does not go on: delete the folder, or take another name"
        )
    changed = [name for name in about if found[name] != about[name]]
    # more epochs than before go on
    if changed == ["settings"] and found["settings"] | {"epochs": 0} == about["settings"] | {"epochs": 0}:
        if len(found["epochs"]) > about["settings"]["epochs"]:
            raise InvalidArgument(
                f"{folder} has {len(found['epochs'])} epochs already, more than {about['settings']['epochs']}. Ask for "
                "as many or more, or delete it to begin anew"
            )
        return found | {"settings": about["settings"]}
    if changed:
        other = " and ".join("data" if name == "source" else name for name in changed)
        raise InvalidArgument(
            f"{folder} was begun with other {other}. Give those again, take another name, or delete it"
        )
    return found
