"""A device that computes its visits with TensorFlow: for methods whose work has no exported program.

It runs the method's own function of a visit, as the engines do, on its own examples. What the method keeps with a
client, such as FedRep's head or Ditto's personal model, is a file of the device:

state.safetensors   the client's state; like a head, it becomes current exactly if the server has counted the update
update.safetensors  the update of a round and the state that belongs to it, until the server has said whether it counts
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tflite_export.device import payload as payloads
from tflite_export.device.errors import InvalidInput
from tflite_export.device.files import write_whole, written
from tflite_export.device.live import wire
from tflite_export.device.live.answers import payload_of, round_and_theta, splits_of
from tflite_export.device.live.client import LiveDevice
from tflite_export.device.live.state import State
from tfpfl.algorithms.contract import ClientData
from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import client_key
from tfpfl.engines.graphs import relaxed
from tfpfl.engines.inputs import check_whole
from tfpfl.engines.packed import any_examples
from tfpfl.engines.rounds import check_class_ids, check_examples
from tfpfl.engines.visit import ARRAYS, GLOBAL, client_work, evaluate, outputs_of
from tfpfl.live.plan import PLAN, Plan, Vectors, flat
from tfpfl.models import tree
from tfpfl.runs.store import StoreError
from tfpfl.runs.store_content import pack, unpack

STATE, UPDATE = "state.safetensors", "update.safetensors"


class Pending(NamedTuple):
    """An update whose answer has not come yet."""

    round_num: int
    body: bytes
    state: bytes  # the client's state after the round, as `pack` makes it


class TfState(State):
    """The folder of such a device; see the module."""

    update = UPDATE

    def keep_sent(self, pending: Pending) -> None:
        """Keeps an update before it is sent."""
        parts = {"body": np.frombuffer(pending.body, np.uint8), "state": np.frombuffer(pending.state, np.uint8)}
        write_whole(self.folder / UPDATE, save(parts | {"round": np.array([pending.round_num], np.int64)}))

    def sent(self) -> Pending | None:
        """The update that is on its way, if there is one. One that cannot be read was never sent, and is dropped."""
        path = self.folder / UPDATE
        if not path.exists():
            return None
        try:
            found = load(path.read_bytes())
            return Pending(int(found["round"][0]), found["body"].tobytes(), found["state"].tobytes())
        except (SafetensorError, KeyError, IndexError, ValueError):
            self.drop()
            return None

    def current(self, first: Any) -> Any:
        """The client's state.

        Args:
            first: the state before the first visit, of arrays.

        Raises:
            InvalidInput: the file is damaged, or of another method or network.
        """
        path = self.folder / STATE
        if not path.exists():
            return first
        try:
            return unpack(path.read_bytes(), first, str(path), same_shapes=True)
        except StoreError as error:
            raise InvalidInput(f"{error}: without this file, the device begins anew") from error


class TfDevice(LiveDevice):
    """One device. Its arguments and errors are those of `LiveDevice`; `interpreter` is not used.

    Raises:
        InvalidArgument: the server's plan cannot be used, or the examples do not fit the network.
    """

    runtime = "tf"
    can_mask = False
    _state = TfState
    _whole = PLAN

    def _program(self) -> str:
        return hashlib.sha256((self.state.bundle / PLAN).read_bytes()).hexdigest()

    def _check_bundle(self, folder) -> None:
        if not (folder / PLAN).exists():
            raise InvalidInput(f"{self.url} has no {PLAN}: its run is for devices without --runtime tf")

    def _begin(self, examples: dict, interpreter) -> None:
        sizes = self._about["examples"], self._about["classes"]
        plan = Plan((self.state.bundle / PLAN).read_bytes(), self.client_id, *sizes)
        self.info, self._seed = plan.info, plan.config.seed
        self.algorithm = algorithm = plan.algorithm
        self._vectors = Vectors(algorithm, self._seed)
        self.examples = {s: self._data(*examples[s]) for s in wire.SPLITS if s in examples and len(examples[s][1])}
        first = tree.arrays(algorithm.init_client(tf.nest.map_structure(tf.convert_to_tensor, self.info)))
        self.current = self.state.current(first)
        self._work = relaxed(client_work(algorithm, ARRAYS), None, None, any_examples)

        def score(weights, data, outputs=None):
            return evaluate(algorithm.model, weights, data.x, data.y, outputs=outputs)

        def scores(models):
            """Makes (message, state or output, training data, data) -> [scores] of what `models` gives."""
            return relaxed(
                lambda message, own, train, data: [score(m, data, z) for m, z in models(message, own, train)],
                *(None, None, any_examples, any_examples),
            )

        def personal(message, state, train):
            outputs = outputs_of(algorithm, message, state, train)
            found = [(algorithm.personal_model(message, state, train), outputs)]
            return found if algorithm.global_model is None else [*found, (algorithm.global_model(message), None)]

        self._of_copy = scores(lambda message, output, train: [(algorithm.local_model(message, output), None)])
        self._of_all = scores(personal)

    def _data(self, x, y) -> ClientData:
        """A split's examples, checked."""
        model = self.algorithm.model
        classes = model.kind.label.is_classes
        x, y = np.asarray(x), np.asarray(y)
        spec = model.example_spec()
        if x.dtype.kind not in "biuf" or x.shape[1:] != tuple(spec.shape[1:]):
            raise InvalidArgument(f"examples of this run are {list(spec.shape[1:])}, found {x.dtype} {list(x.shape)}")
        data = ClientData(x.astype(spec.dtype.as_numpy_dtype), y, self.info, np.zeros(2, np.int32))
        check_class_ids(model, data)
        check_examples(data, model.kind.label)
        check_whole(model, data.x, self.client_id)
        return data._replace(y=y.astype(np.int32 if classes else np.float32))

    def _in(self, round_num: int) -> ClientData:
        """The training examples, with the key of a round."""
        return self.examples["train"]._replace(key=client_key(self._seed, round_num, [self.client_id])[0])

    def _message(self, work: dict) -> Any:
        number, name = round_and_theta(work)
        vector = self._theta(name)
        if vector is None:
            return None
        if len(vector) != (size := self._vectors.message_size):
            raise InvalidInput(f"the server sent {len(vector)} numbers, and messages of this method have {size}")
        return self._vectors.read_message(vector, number)

    def _visit(self, work: dict) -> None:
        message = self._message(work)
        if message is None:
            return
        train = self._in(int(work["round"]))
        output = self._work(message, self.current, train)
        if not int(output.metrics["finite"]):
            raise InvalidInput(f"round {work['round']}: the visit gave NaN or infinity; the device stops")
        about = {"theta": work["theta"], "examples": int(self.info.num_examples)}
        about |= {"loss": float(output.metrics["loss"]), "weight": float(output.weight)}
        about["scores"] = self._rows(splits_of(work), self._of_copy, message, output, train)
        body = wire.pack(about, payloads.encode(flat(output.update), payload_of(work)))
        self.state.keep_sent(Pending(int(work["round"]), body, pack(tree.arrays(output.state))))
        self._settle()

    def _pending(self) -> Pending | None:
        return self.state.sent()

    def _counted(self, pending: Pending) -> None:
        new = unpack(pending.state, self.current, UPDATE, same_shapes=True)
        with written(self.state.folder / STATE, pending.state):
            self.current = new

    def _score(self, work: dict) -> None:
        message = self._message(work)
        if message is not None:
            rows = self._rows(splits_of(work), self._of_all, message, self.current, self._in(int(work["round"])))
            self._send_scores(work, rows)

    def _rows(self, splits, score, message, own, train) -> list[dict]:
        rows = []
        for split in (s for s in splits if s in self.examples):
            for model, found in zip((None, GLOBAL), score(message, own, train, self.examples[split]), strict=False):
                n, loss = int(found["examples"]), float(found["loss"])
                value = float(found["score"]) if "score" in found else int(found["correct"]) / n
                row = {"split": split, "examples": n, "loss": loss, "score": value}
                if np.isfinite([loss, value]).all():
                    rows.append(row if model is None else row | {"model": model})
        return rows
