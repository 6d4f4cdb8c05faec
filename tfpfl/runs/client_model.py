"""The model with which one client of a run predicts: its weights, a plain Keras model, and files for others.

The Keras model needs nothing of tfpfl. It is Rescaling (if it takes raw examples), the backbone, the head as a Dense
layer, and Softmax (if it gives probabilities). With labels of other kinds than classes, the last layer makes the
prediction: a sigmoid for several labels, exp for counts, and none for numbers and quantiles.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np

from tfpfl.algorithms.contract import Algorithm, ClientData
from tfpfl.checks import InvalidArgument, check_choice, one_line
from tfpfl.data.client_names import find_client
from tfpfl.data.description import feature_columns
from tfpfl.data.layout import split
from tfpfl.data.population import ClientInfo
from tfpfl.data.randomness import client_key
from tfpfl.engines.graphs import any_number, relaxed
from tfpfl.engines.packed import any_examples, any_state_spec
from tfpfl.engines.rounds import Messages, for_new_clients
from tfpfl.engines.visit import Visit, federation_readers, outputs_of
from tfpfl.models import Head, Weights
from tfpfl.models.losses import logits
from tfpfl.runs.files import write_keras, write_whole
from tfpfl.runs.folders import check_heads_are_here

if TYPE_CHECKING:
    from tfpfl.runs.run import Run

_LINKS = {"multilabel": "sigmoid", "poisson": "exponential"}  # what makes a prediction of the outputs
INPUTS, OUTPUTS = ("raw", "decoded"), ("probabilities", "logits")


class _FreeNames:
    """Names of layers, which no other layer of the model may have, and of which Keras allows a few characters only.

    The arrays of an example may have any names.
    """

    def __init__(self, *taken: str) -> None:
        self._taken = set(taken)

    def __call__(self, wanted: str) -> str:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", wanted)
        name = name if re.match("[A-Za-z0-9.]", name) else f"array{name}"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


class ClientModel(NamedTuple):
    """One client's model as Keras has it, and what somebody who uses it must know."""

    model: keras.Model  # [N, ...] -> [N, K]
    about: dict[str, Any]  # values of JSON: client, client_name, classes, input, output, algorithm, round, ...

    @property
    def story(self) -> str:
        """One sentence that says since which round the client has taken part, or what else its model is."""
        about = self.about
        if about["new_client"]:
            return "the run does not train this client: the model is the one with which it would begin to adapt"
        if about["took_part"] is None:
            return "the run folder does not show whether this client took part"
        if about["took_part"]:
            return f"this client took part, first in round {about['first_round']}"
        return (
            'this client never took part: the model is the one that the method gives to such a client, see "Clients '
            'that have not taken part yet" in docs/protocols.md'
        )

    def save(self, path: str | os.PathLike) -> Path:
        """Writes the model to the new file `path`, which ends in .keras, and `about` to a file beside it, .json.

        Returns:
            The file of `about`.

        Raises:
            InvalidArgument: the name has another ending, the folder is missing, or one of the two files exists.
        """
        path = check_new_file(path)
        card = path.with_suffix(".json")
        # first, so that there is never a model of which nobody knows the classes
        write_whole(card, json.dumps(self.about, indent=2, ensure_ascii=False) + "\n")
        try:
            write_keras(path, self.model)
        except BaseException:
            card.unlink(missing_ok=True)
            raise
        return card


def check_new_file(path: str | os.PathLike) -> Path:
    """Checks that a model can be written to `path`; see `ClientModel.save` for the errors."""
    path = Path(path)
    if path.suffix != ".keras":
        raise InvalidArgument(f"a model is written to a file that ends in .keras, found {path}")
    if not path.parent.is_dir():
        raise InvalidArgument(f"{path} cannot be written: {path.parent} is not a folder")
    for file in (path, path.with_suffix(".json")):
        if file.exists():
            raise InvalidArgument(f"{file} exists already: take another name, or remove it")
    return path


class ClientModels:
    """Makes the models of a run's clients, as they are after its last round.

    Args:
        run: an open run with at least one round. It is only read.

    Raises:
        InvalidArgument: the run has no rounds yet.
    """

    def __init__(self, run: "Run"):
        if not hasattr(run, "store"):
            raise InvalidArgument(f"the run must be a tfpfl.Run, which Run.open(folder) opens; found {run!r}")
        if run.store.round_num == 0:
            raise InvalidArgument(
                f"{run.folder} has no rounds yet, so no client has a model: train it with `tfpfl resume {run.folder}`"
            )
        check_heads_are_here(run.folder)
        self._run, self._loop = run, _any(run.training())
        self._server = self._loop.server_state()
        algorithm = run.algorithm
        self._readers = federation_readers(algorithm, run.examples)
        self._message_for = self._new_message_for = Messages(algorithm)
        if algorithm.adapt is not None and algorithm.adapt.message is not None:
            self._new_message_for = Messages(for_new_clients(algorithm, algorithm.adapt))
        self._ids = {int(i) for i in run.population.client_ids}
        states, examples = any_state_spec(algorithm), any_examples
        self._own = _any(relaxed)(algorithm.personal_model, None, states, examples)
        self._new = _any(relaxed)(self._start, None, states, examples)
        self._predict = _any(relaxed)(self._predicted, None, states, examples, any_number)
        self._forward = _any(relaxed)(lambda theta, head, x: logits(head, self._features(theta, x)))

    @cached_property
    def _first_rounds(self) -> dict[int, int] | None:
        return self._run.took_part

    def weights(self, client: int | str) -> Weights:
        """The backbone's and the head's weights with which a client predicts after the last round, as arrays.

        It is the model that `Run.evaluate` scores. For a client of the population that no round has drawn yet, it is
        the one that the method gives to such a client. For a client outside of the population (`new_clients` of the
        configuration), it is the one with which it would begin to adapt, or, if the method fine-tunes, the fine-tuned
        one.

        Args:
            client: the id or the name, as in `find_client`.

        Raises:
            InvalidArgument: there is no such client, it has too many classes for a head that clients share, or it is
                outside of the population and the method has a model only for clients that took part; or the method
                predicts with more than weights.
        """
        client_id = find_client(self._run.federation, client)
        algorithm, t = self._run.algorithm, self._run.store.round_num
        self._check_weights_are_all()
        if client_id in self._ids:
            make: Callable = self._own
            (state,), (visit,) = self._loop.client_states([client_id]), self._loop.visits(t, [client_id])
        else:
            self._check_new(client_id)
            (visit,) = new_visits(algorithm, self._run.federation, [client_id], self._run.config.seed, t)
            state = algorithm.init_client(visit.info)
            method = self._run.recipe.row
            fine_tunes = method.evaluated(self._run.config.hyperparameters) == "fine-tuned"
            make = self._own if fine_tunes else self._new
        messages = self._new_message_for if make is self._new else self._message_for
        theta, head = make(*self._given(state, visit, messages))
        return Weights(tuple(map(np.asarray, theta)), Head(*map(np.asarray, head)))

    def outputs(self, client: int) -> Callable[[Any], np.ndarray]:
        """What a client of the population predicts with after the last round: (x) -> outputs [N, K], logits of classes.

        Unlike `weights`, it is there for every method, also for those that predict with a client's own examples. x are
        examples [N, ...], decoded, in the dtype of the model.

        Args:
            client: the id of a client that the run trains.
        """
        if self._run.algorithm.predictor is None:
            weights = self.weights(client)
            model = weights.theta, weights.head
            return lambda x: np.asarray(self._forward(*model, x))
        (state,), (visit,) = self._loop.client_states([client]), self._loop.visits(self._run.store.round_num, [client])
        given = self._given(state, visit, self._message_for)
        return lambda x: np.asarray(self._predict(*given, x))

    def _given(self, state: Any, visit: Visit, messages: Callable) -> tuple:
        """(message, state, ClientData) of a client after the last round."""
        message = _any(messages)(self._server, [visit])(0)
        x, y = self._readers.train(visit)
        return message, state, ClientData(x, y, visit.info, visit.key)

    def _features(self, theta: Any, x: Any) -> Any:
        return self._run.model.features_in_chunks(theta, x)

    def _predicted(self, message: Any, state: Any, data: ClientData, x: Any) -> Any:
        algorithm = self._run.algorithm
        theta = algorithm.personal_model(message, state, data).theta
        predict = outputs_of(algorithm, message, state, data)
        assert predict is not None  # `outputs` asks before
        return predict(self._features(theta, x))

    def _check_weights_are_all(self) -> None:
        if self._run.algorithm.predictor is not None:
            raise InvalidArgument(
                f"{self._run.config.algorithm} predicts with more than the weights of a backbone and a head "
                "(`predictor` in tfpfl/algorithms/contract.py), and a model's file has no place for the rest, such as "
                "the nearest examples or the gates of every example. `tfpfl evaluate` scores it. For a file or a "
                "device, take a method whose clients predict with weights alone, such as fedper or fedavg; to a bundle "
                "of fedavg, tflite_export.device.neighbours adds the nearest examples"
            )

    def _start(self, message: Any, state: Any, data: ClientData) -> Weights:
        adapt = self._run.algorithm.adapt
        assert adapt is not None  # `_check_new`
        return adapt.model(adapt.start(message, state, data))

    def _check_new(self, client_id: int) -> None:
        run, population = self._run, self._run.population
        name = run.federation.client_names[client_id]
        if run.algorithm.adapt is None:
            raise InvalidArgument(
                f"client {client_id} ({name}) is not one of the {population.num_clients} clients that the run trains, "
                f"and {run.config.algorithm} has a model only for those: a client becomes personal by taking part"
            )
        classes = int(run.federation.num_classes[client_id])
        if population.labels == "local" and population.num_labels is not None and classes > population.num_labels:
            raise InvalidArgument(
                f"client {client_id} ({name}) has {classes} classes, but the head that clients share has "
                f"{population.num_labels} outputs"
            )

    def keras_model(self, client: int | str, *, inputs: str = "raw", outputs: str = "probabilities") -> ClientModel:
        """One client's model as Keras has it; see `Run.keras_model` for arguments and errors."""
        check_choice(inputs=(inputs, INPUTS), outputs=(outputs, OUTPUTS))
        run, weights = self._run, self.weights(client)
        client_id = find_client(run.federation, client)
        fresh, _ = run.recipe.model_and_population(run.federation)  # a backbone of its own, whose weights may change
        backbone, dtype, first = fresh.backbone, str(fresh.dtype), self._first_rounds
        theta = fresh.backbone_weights(weights.theta)
        for variable, value in zip(fresh.variables, theta, strict=True):
            variable.assign(value)
        layout, taken, columns = run.federation.layout, fresh.inputs, feature_columns(run.federation)
        examples, decoded = [], []
        free = _FreeNames(backbone.name, *(() if fresh.trunk is None else (fresh.trunk.model.name,)))
        for array, name, spec in zip(layout.arrays, taken.names, split(fresh.example_spec()), strict=True):
            x = keras.Input(array.shape, dtype=spec.dtype.name, name=free(name or "examples"))
            examples.append(x)
            if inputs == "raw" and (array.scale, array.shift) != (1, 0):
                of = free(f"decode_{name}" if name else "decode")
                x = keras.layers.Rescaling(array.scale, offset=array.shift, dtype=dtype, name=of)(x)
            decoded.append(x)
        head = keras.layers.Dense(weights.head.bias.shape[0], dtype=dtype, name=free("head"))
        x = taken.for_keras(decoded)
        if fresh.trunk is not None:
            fresh.trunk.model.trainable = False
            x = fresh.trunk.model(x)
        y = head(backbone(x))
        head.set_weights(list(weights.head))
        kind = fresh.kind.label
        if outputs == "probabilities" and kind.is_classes:
            y = keras.layers.Softmax(dtype=dtype, name=free("probabilities"))(y)
        elif outputs == "probabilities" and kind.name in _LINKS:
            y = keras.layers.Activation(_LINKS[kind.name], dtype=dtype, name=free("predictions"))(y)
        about = {
            "client": client_id,
            "client_name": run.federation.client_names[client_id],
            "classes": class_names(run, client_id, weights.head.bias.shape[0]),
            "input": {
                "shape": list(fresh.input_shape),
                "examples": inputs,
                "stored_dtype": layout.dtype,
                "scale": layout.arrays[0].scale,
                "shift": layout.arrays[0].shift,
                **({} if columns is None else {"columns": columns}),
            }
            if not taken.several
            else {"arrays": run.federation.manifest["inputs"]["arrays"], "examples": inputs},
            "output": outputs if kind.is_classes or outputs == "logits" else "predictions",
            **({} if kind.is_classes else {"kind": kind.text}),
            "algorithm": run.config.algorithm,
            "round": run.store.round_num,
            "new_client": client_id not in self._ids,
            "took_part": None if first is None else client_id in first,
            "first_round": first and first.get(client_id),
            "dataset": one_line(run.config.dataset),
            "federation_hash": run.federation.hash,
            "run_id": run.config.run_id,
            "keras": keras.__version__,
        }
        return ClientModel(keras.Model(taken.for_keras(examples), y, name=f"client_{client_id}"), about)

    def save_all(self, folder: str | os.PathLike, **how: str) -> list[Path]:
        """Writes the model of every client that has one to the new folder, as client_ID.keras.

        Args:
            folder: it must not exist, or be empty.
            how: arguments of `keras_model`.

        Returns:
            The files of the models.

        Raises:
            InvalidArgument: the folder has files in it, or the method predicts with more than weights.
        """
        self._check_weights_are_all()
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidArgument(f"{folder} exists already and is not an empty folder: take another one")
        folder.mkdir(parents=True, exist_ok=True)
        new = self._run.algorithm.adapt is not None
        ids: Iterable[int] = range(self._run.federation.num_clients) if new else sorted(self._ids)
        files = {client_id: folder / f"client_{client_id}.keras" for client_id in ids}
        for client_id, path in files.items():
            self.keras_model(client_id, **how).save(path)
        return list(files.values())


def new_visits(algorithm: Algorithm, federation: Any, ids: Sequence[int], seed: int, round_num: int) -> list[Visit]:
    """What clients outside of the population are given; their share of the training examples, alpha, is 0."""
    local, dtype = algorithm.population.labels == "local", algorithm.model.dtype
    classes = federation.num_classes if local else np.full(federation.num_clients, federation.num_labels)
    examples, keys = federation.num_examples("train"), client_key(seed, round_num, ids)
    return [
        Visit(ClientInfo(np.int32(i), np.int32(examples[i]), np.int32(classes[i]), np.zeros([], dtype)), key)
        for i, key in zip(ids, keys, strict=True)
    ]


def class_names(run: "Run", client_id: int, outputs: int) -> list[str]:
    """The names of the classes for which the outputs of a client's head stand.

    A head that clients share can have more outputs than this client has classes, if labels are local. Such an output
    is called 'unused k'.
    """
    local = run.population.labels == "local"
    ids = run.federation.classes(client_id) if local else range(run.federation.num_labels)
    names = [run.federation.class_names[int(c)] for c in ids]
    return names + [f"unused {k}" for k in range(len(names), outputs)]


def _any(value: Any) -> Any:
    """The value, for calls of functions that have no types yet."""
    return value
