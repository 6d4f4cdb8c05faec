"""Collects what is exported: one client's model, from a run folder or from given arrays."""

import json
import os
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from tflite_export.convert.program import flatten
from tflite_export.convert.several import Packed, of_one_array, packed_examples
from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import repeated
from tflite_export.device.manifest import check_entry
from tfpfl.checks import InvalidArgument, check_type, one_line, warn_user
from tfpfl.data import find_client
from tfpfl.data.arrays import as_array
from tfpfl.data.description import feature_columns
from tfpfl.data.layout import is_several
from tfpfl.data.source import listed_names
from tfpfl.models.trunk import Trunk
from tfpfl.models.weights import Head, Weights
from tfpfl.runs.client_model import ClientModels, class_names


class ExportError(InvalidArgument):
    """The model cannot be exported. The message says why."""


class Personal(NamedTuple):
    """One client's model and what the bundle says about it."""

    model: Any  # SplitModel; of several arrays, one of packed examples (several.py)
    weights: Weights
    rounds: bool  # whether the client can take part in rounds on the device
    training: dict  # tau, beta, rho, head_rate, safeguard
    about: dict  # for the manifest and the model card
    preprocessing: dict
    antialias: bool  # whether the data set's images were made smaller by averaging
    labels: list  # names of the K classes
    class_ids: list  # their ids in the data set
    train: tuple | None  # (x, y) for calibration; x is what the model takes
    test: tuple | None  # (x, y) for quality
    trunk: Trunk | None = None  # the frozen layers below the model
    raws: dict | None = None  # with a trunk, {'train', 'test': the trunk's examples}

    @property
    def measured_on(self) -> str | None:
        """The split on which files are measured: the test examples if there are two or more, else the training ones."""
        splits = {"test": self.test, "train": self.train}
        return next((name for name, given in splits.items() if given is not None and len(given[0]) > 1), None)

    def examples(self, split: str) -> tuple:
        """The examples (x, y) of a split that there is."""
        found = self.train if split == "train" else self.test
        assert found is not None  # who calls has seen that there are some
        return found

    def raw(self, split: str) -> np.ndarray:
        """What the trunk takes of a split's examples; without a trunk, what the model takes."""
        return self.raws[split] if self.raws else self.examples(split)[0]


_CHUNK = 256  # examples that go through the trunk at a time
_DRAWS = (
    "its network has layers that draw random numbers in training (Dropout, noise), and the device's program draws "
    "none, so that its rounds would be others than the simulated ones"
)
TRAINING = {"tau": 50, "beta": 0.007, "rho": 0.001, "head_rate": 0.001, "safeguard": True}


def personal_model(source, client: int | str | None, rounds: bool | None = None, **given) -> Personal:
    """One client's model, ready for export.

    Args:
        source: a run folder, an open `tfpfl.runs.run.Run`, or (SplitModel, theta, head).
        client: its number or its name, as in `tfpfl.data.find_client`; for a run.
        rounds: whether the bundle shall take part in rounds; None: if a device can, with a warning where PFLEGO cannot.
        **given: for (SplitModel, theta, head): `training`, `labels`, `train`, `test`, `preprocessing`, `dataset`.

    Raises:
        ExportError: an unknown client, a run without rounds, or one that cannot do what is asked.
    """
    if not isinstance(rounds, bool | None):
        raise ExportError(f"rounds must be True, False or None, found {rounds!r}")
    if isinstance(source, tuple):
        if len(source) != 3 or not hasattr(source[0], "initial_theta"):
            found = ", ".join(type(part).__name__ for part in source)
            raise ExportError(
                "the source must be (SplitModel, theta, head), where SplitModel(network) is made of a Keras model; "
                f"found ({found})"
            )
        if client is not None:
            raise ExportError(
                f"client={client!r} says which client of a run is meant, and this is no run: leave it out"
            )
        return _given(*source, rounds=rounds, **given)
    if given:
        raise ExportError(f"{', '.join(given)}: a run has its own; leave them out")
    if isinstance(source, (str, os.PathLike)):
        from tfpfl.runs.run import Run

        with Run.open(source, engine="local") as run:
            return _of_run(run, client, rounds)
    if not hasattr(source, "population"):
        raise ExportError(
            f"the source must be a run folder, an open tfpfl.Run or (SplitModel, theta, head); found {source!r}"
        )
    return _of_run(source, client, rounds)


def _of_run(run, client, rounds) -> Personal:
    population, trunk = run.population, run.whole.trunk
    _check_theta(run.model)
    model = of_one_array(run.model)
    ids = [int(i) for i in population.client_ids]
    if client is None:
        raise ExportError(f"say which of the {len(ids)} clients of {run.folder} is exported: client=0, or its name")
    try:
        client = find_client(run.federation, client)
    except InvalidArgument as error:
        raise ExportError(str(error)) from None
    if client not in ids:
        raise ExportError(
            f"client {client} ({run.federation.client_names[client]}) is not one of the {len(ids)} clients that the "
            "run trains. `tfpfl model` writes its model as a Keras file"
        )
    if run.store.round_num == 0:
        raise ExportError(f"{run.folder} has no rounds yet: there is nothing to export")
    training = device_training(run.config, population, client, run.model)
    if rounds and isinstance(training, str):
        raise ExportError(f"{run.folder} cannot go on with rounds on a device: {training}")
    if rounds is None:
        rounds = not isinstance(training, str)
        if not rounds and run.config.algorithm == "pflego":
            warn_user(f"this client is exported without rounds on a device: {training}")

    weights = ClientModels(run).weights(client)
    if not all(np.isfinite(w).all() for w in (*weights.theta, *weights.head)):
        raise ExportError(
            f"the model with which client {client} ({run.federation.client_names[client]}) predicts holds NaN or "
            f"infinity: what {run.config.algorithm} computes for a prediction, such as a fine-tuning, has diverged. "
            "A smaller rate for it may help"
        )
    train, test = (run.examples.arrays(client, split, population.labels) for split in ("train", "test"))
    raws = None
    if trunk is not None:
        raws = {split: run.federation.arrays(client, split, population.labels)[0] for split in ("train", "test")}
    local, first = population.labels == "local", run.took_part
    class_ids = [int(c) for c in (run.federation.classes(client) if local else range(run.federation.num_labels))]
    return Personal(
        model=model,
        weights=weights,
        rounds=rounds,
        training=_without_rounds(run.config) if isinstance(training, str) else training,
        about={
            "algorithm": run.config.algorithm,
            "client": client,
            "client_name": run.federation.client_names[client],
            "took_part": None if first is None else client in first,
            "first_round": first and first.get(client),
            "shared": run.recipe.row.evaluated(run.config.hyperparameters) == "global",
            "round": run.store.round_num,
            "network": run.config.network,
            "dataset": one_line(run.config.dataset),
            "federation_hash": run.federation.hash,
            "run_id": run.config.run_id,
            "num_examples": len(train[1]),
        },
        preprocessing=preprocessing_of(run.federation),
        antialias=bool(run.federation.manifest["source"].get("options", {}).get("antialias", False)),
        labels=_told_apart(class_names(run, client, weights.head.bias.shape[0])),
        class_ids=class_ids,
        train=packed_examples(model, train),
        test=packed_examples(model, test),
        trunk=trunk,
        raws=raws,
    )


def preprocessing_of(federation) -> dict:
    """How stored examples become what the model takes; of several arrays, for each under its name.

    Of a table, `columns` are the names of its columns in the order of an example's numbers.
    """
    layout, manifest = federation.layout, federation.manifest
    if not is_several(layout.shape):
        columns = feature_columns(federation)
        of_table = {} if columns is None else {"columns": columns}
        return {**manifest["preprocessing"], "stored_dtype": manifest["dtype"], **of_table}
    each = [{"scale": a.scale, "shift": a.shift, "stored_dtype": a.dtype} for a in layout.arrays]
    return {"arrays": dict(zip(layout.names, each, strict=True))}


def _check_theta(model) -> None:
    """Checks that something trains of a `SplitModel`, and that a device has all that does."""
    if not model.initial_theta:
        raise ExportError(
            "no weight of the backbone trains, and a bundle's programs take the backbone's weights as an input. Make a "
            "layer trainable, or take `tfpfl model`, which writes the client's model as a Keras file"
        )
    if any(model.own) and model.batch_norm == "local":
        raise ExportError(
            "the model has batch_norm='local': its normalization layers stay with the client, and a device keeps a "
            "head only. Train with batch_norm='frozen', or take `tfpfl model`, which writes the client's model as a "
            "Keras file"
        )
    if any(model.own):
        raise ExportError(
            "some of the backbone's weights stay with the client (personal=), and a device keeps a head only: train "
            "without personal, or take `tfpfl model`, which writes the client's model as a Keras file"
        )


def device_training(config, population, client: int, model) -> dict | str:
    """The settings of PFLEGO's rounds on the device; or a text that says why the device cannot take part.

    Args:
        config: the run's `RunConfig`.
        population: the run's clients.
        client: the client's number.
        model: the run's `SplitModel`.
    """
    if config.algorithm != "pflego":
        return (
            f"{config.algorithm} has no program for the device, which computes PFLEGO's rounds; export without rounds"
        )
    hyper = config.hyperparameters
    if hyper["inner_opt"] != "gd":
        return f"its inner_opt is {hyper['inner_opt']!r}; the device's steps on the head are gradient descent (gd)"
    if hyper["head_rate"] == "safe":
        return "its head_rate is 'safe', which a client's features decide in every visit; a device's rate is fixed"
    if config.personal is not None:
        return f"the part {config.personal} of its adapters stays with the client, and a device keeps a head only"
    if model.draws:
        return _DRAWS
    if config.batch_norm in ("local", "shared"):
        return f"its batch_norm is {config.batch_norm!r}; the device's statistics are constants (batch_norm='frozen')"
    if config.objective != "mean":
        return (
            f"its objective is {config.objective}, which weights a step by the client's loss; the device has no weight"
        )
    if config.schedule is not None:
        return f"its rates follow the schedule {config.schedule}; a device's rates are fixed"
    if config.clip_norm is not None:
        return "what its clients send is clipped (clip_norm), which the device's program does not do"
    if config.max_norm is not None:
        return "its server rejects what is longer than max_norm, and a rejected device would have to take its head back"
    if config.secure:
        return (
            "its clients send the integers of secure aggregation (--secure), which only a simulation does in this way: "
            "create it without, and give --secure to `tfpfl serve`"
        )
    if config.aggregator is not None:
        return f"its server's aggregator is {config.aggregator}; rounds on devices are summed as PFLEGO sums them"
    c = float(population.info(client).alpha) if hyper["rule"] == "exact" else 1.0
    if not (arrival := population.arrival_of(client)):
        return "its work never arrives in time (see client_seconds and round_deadline), so that it takes no step"
    c /= arrival  # as in the engines: who comes rarely takes larger steps
    scale = population.num_clients / population.clients_per_round
    training = {name: hyper[name] for name in ("tau", "beta", "rho", "safeguard")}
    return {**training, "head_rate": hyper["beta"] if hyper["head_rate"] == "beta" else hyper["rho"] * scale * c}


def _without_rounds(config) -> dict:
    """The settings with which a device fits its head that takes part in no rounds: those of PFLEGO are its own."""
    if config.algorithm != "pflego":
        return TRAINING
    found = {name: config.hyperparameters[name] for name in ("tau", "beta", "rho", "safeguard")}
    if config.hyperparameters["inner_opt"] != "gd":  # then beta is the rate of another optimizer than the device's
        found["beta"] = TRAINING["beta"]
    return {**found, "head_rate": None}


def _given(
    model,
    theta,
    head,
    *,
    rounds=None,
    training=None,
    labels=None,
    train=None,
    test=None,
    preprocessing=None,
    dataset=None,
) -> Personal:
    trunk, model = model.trunk, model.above or model
    _check_theta(model)
    if model.draws and rounds:
        raise ExportError(f"this model cannot take part in rounds on a device: {_DRAWS}")
    if model.draws and rounds is None:
        warn_user(f"this model is exported without rounds on a device: {_DRAWS}")
    model = of_one_array(model)
    for what, entries in (("training", training), ("preprocessing", preprocessing)):
        check_type(what, entries, (Mapping, NoneType), "a dict")
    try:
        theta, head = tuple(np.asarray(w, np.float32) for w in theta), Head(*(np.asarray(w, np.float32) for w in head))
    except (TypeError, ValueError) as error:
        raise ExportError(
            "theta must be a list of arrays, one for each weight of the backbone, and the head a pair of arrays, "
            f"kernel [{model.num_features}, K] and bias [K]: {error}"
        ) from None
    shapes = [w.shape for w in model.initial_theta]
    if [w.shape for w in theta] != shapes:
        raise ExportError(f"theta must have the shapes {shapes}, found {[w.shape for w in theta]}")
    shape = head.kernel.shape
    if shape[:1] != (model.num_features,) or head.bias.shape != shape[1:] or not head.bias.size:
        raise ExportError(
            f"a head on {model.num_features} features has a kernel [{model.num_features}, K] and a bias [K], found "
            f"{list(head.kernel.shape)} and {list(head.bias.shape)}"
        )
    if not all(np.isfinite(a).all() for a in (flatten(theta), *head)):
        raise ExportError("theta or the head holds NaN or infinity")
    unknown = set(training or {}) - set(TRAINING)
    if unknown:
        raise ExportError(f"unknown in training: {', '.join(sorted(unknown))}; there are {', '.join(TRAINING)}")
    training, preprocessing = _entries({**TRAINING, **(training or {})}, preprocessing or {})
    rounds = not model.draws if rounds is None else rounds
    if rounds and training["head_rate"] is None:  # every round would seem to diverge
        raise ExportError(
            "training has head_rate None, and a round ends with a step on the head at this rate: give it, or export "
            "with rounds=False"
        )
    k = head.bias.shape[0]
    names = listed_names(labels, "labels")
    labels = [str(i) for i in range(k)] if names is None else list(map(one_line, names))
    if len(labels) != k:
        raise ExportError(f"the head has {k} outputs, but there are {len(labels)} labels")
    of_classes = k if model.kind.label.is_classes else None
    train, test = (_examples(n, given, trunk or model, of_classes) for n, given in (("train", train), ("test", test)))
    return Personal(
        model=model,
        weights=Weights(theta, head),
        rounds=rounds,
        training=training,
        about={"algorithm": None, "client": None} | ({} if dataset is None else {"dataset": one_line(dataset)}),
        preprocessing=preprocessing,
        antialias=False,
        labels=_told_apart(labels),
        class_ids=list(range(k)),
        train=packed_examples(model, _of_trunk(trunk, train)),
        test=packed_examples(model, _of_trunk(trunk, test)),
        trunk=trunk,
        raws=None if trunk is None else {n: s and s[0] for n, s in (("train", train), ("test", test))},
    )


def _told_apart(labels: list[str]) -> list[str]:
    """The names of a head's classes, by which a device tells them apart."""
    if "" in labels:
        raise ExportError(
            f"class {labels.index('')} has an empty name, and a device knows classes by their names: give it one"
        )
    if (twice := repeated(labels)) is not None:
        raise ExportError(f"two labels are {twice!r}, and a device knows classes by their names: name them apart")
    return labels


def _entries(training: dict, preprocessing: dict) -> list[dict]:
    """The settings that were given, as the manifest has them: NumPy's numbers become Python's.

    Raises:
        ExportError: one is missing, has a wrong type, or is out of range.
    """
    found = []
    for name, given in (("training", training), ("preprocessing", preprocessing)):
        plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in given.items()}
        try:
            check_entry(name, {"rounds": True, **plain})
            json.dumps(plain)
        except (InvalidInput, TypeError, ValueError) as error:
            raise ExportError(f"{name} cannot be written to the manifest: {error}") from None
        found.append(plain)
    if "scale" in preprocessing and (missing := {"shift", "stored_dtype"} - set(preprocessing)):
        raise ExportError(
            f"preprocessing has scale, but not {' and '.join(sorted(missing))}: x = raw * scale + shift, where raw is "
            "of stored_dtype, such as 'uint8'"
        )
    return found


def _examples(name, examples, model, classes):
    """Examples (x, y) that were given, as arrays of what the model or its trunk takes. `classes`: None: y are targets.

    Raises:
        ExportError: a shape or dtype is wrong, a number is not finite, there is another number of labels, or a label is
            out of range.
    """
    if examples is None or is_several(model.input_shape):
        return examples
    if not (isinstance(examples, tuple | list) and len(examples) == 2):
        raise ExportError(f"{name} must be a pair (x, y), where y may be None; found a {type(examples).__name__}")
    x, y = examples
    if isinstance(model, Packed):
        x = model.arrays.packed(x)
    x, shape = as_array(x, f"{name} examples"), tuple(model.input_shape)
    if x.shape[1:] != shape or x.ndim != len(shape) + 1 or x.dtype.kind not in "fiub":
        raise ExportError(f"{name}: the examples must be numbers {['N', *shape]}, found {x.dtype} {list(x.shape)}")
    with np.errstate(over="ignore"):
        if not np.isfinite(x.astype(np.float32, copy=False)).all():
            raise ExportError(f"{name}: an example holds NaN or infinity, or what float32 does not have")
    _check_tokens(name, model, x)
    x = x.astype(np.int32 if model.reads == "whole" else np.float32, copy=False)
    if y is not None and len(y) != len(x):
        raise ExportError(f"{name}: there are {len(x)} examples and {len(y)} labels")
    y = None if y is None else np.asarray(y)
    if y is not None and classes is not None:
        if y.ndim != 1 or y.dtype.kind not in "fiub":  # a column would be compared with each row of the predictions
            raise ExportError(f"{name}: the labels must be integers [{len(x)}], found {y.dtype} {list(y.shape)}")
        wrong = ~((y >= 0) & (y < classes) & (y == np.floor(y)))
        if wrong.any():
            raise ExportError(f"{name}: label {y[wrong.argmax()]} is none of this head's, which are 0..{classes - 1}")
    return x, y


def _check_tokens(name, model, x) -> None:
    """Checks that what a model takes as whole numbers are such, and none that it does not know."""
    if isinstance(model, Packed) and len(x):
        try:
            model.arrays.check(x)
        except InvalidInput as error:
            raise ExportError(f"{name}: {error}") from None
    if model.reads != "whole" or not len(x):
        return
    low, high = (x.min(), x.max()) if model.vocabulary is None else (0, model.vocabulary - 1)
    wrong = (x != np.floor(x)) | (x < low) | (x > high)
    if wrong.any():
        raise ExportError(
            f"{name}: the model takes whole numbers such as tokens"
            f"{'' if model.vocabulary is None else f' and knows 0..{high}'}, found {x[wrong][0]}"
        )


def _of_trunk(trunk, examples):
    """Examples (x, y) with the trunk's features in place of x."""
    if trunk is None or examples is None:
        return examples
    parts = np.array_split(np.asarray(examples[0]), range(_CHUNK, len(examples[0]), _CHUNK))
    return np.concatenate([np.asarray(trunk(part)) for part in parts]), examples[1]
