"""What a device with TensorFlow is told of a run, and how messages and updates become numbers in a row.

The device builds the run's own method from this, for a population of its own client. So it computes what the engines
compute. It gets no code: the method and the network are of tfpfl.
"""

import json
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from tflite_export.convert.personal import device_training
from tfpfl.algorithms import ALGORITHMS
from tfpfl.algorithms.contract import Algorithm, ClientData, ClientOutput, kinds
from tfpfl.algorithms.transforms.schedule import Scheduled, at_round, counted_part
from tfpfl.checks import InvalidArgument, check_choice
from tfpfl.data.kinds import CLASSIFICATION
from tfpfl.data.layout import is_several
from tfpfl.data.places import is_places
from tfpfl.data.population import ClientInfo, Population
from tfpfl.data.randomness import client_key
from tfpfl.engines import aggregation
from tfpfl.engines.graphs import relaxed
from tfpfl.engines.rounds import Sum
from tfpfl.engines.visit import info_spec, structure_of
from tfpfl.models import passes
from tfpfl.models.networks import NETWORKS
from tfpfl.runs.config import RunConfig, entries
from tfpfl.runs.recipe import Recipe

PLAN = "visit.json"  # the name of the plan's file in the bundle of such a run
FORMAT = 1
_ENTRIES = (  # of the configuration: what decides a visit
    *("algorithm", "hyperparameters", "network", "init", "head_init", "kind", "labels", "schedule", "schedule_of"),
    *("seed", "adapters", "personal", "batch_norm"),
)


def flat(structure: Any) -> np.ndarray:
    """The numbers of a structure of float32 and bool, which is 0 or 1: float32 [size]."""
    return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in tf.nest.flatten(structure)])


class Flat:
    """A structure of float32 and bool tensors as one vector, and back.

    Args:
        spec: the structure, of TensorSpec.
        what: what it is, for the error.

    Raises:
        InvalidArgument: there is nothing in it, or something else than float32 and bool of known shapes.
    """

    def __init__(self, spec: Any, what: str):
        self._spec, leaves = spec, tf.nest.flatten(spec)
        numbers = (tf.float32, tf.bool)
        bad = [leaf for leaf in leaves if leaf.dtype not in numbers or not leaf.shape.is_fully_defined()]
        if bad or not leaves:
            raise InvalidArgument(f"{what} {f'has {bad[0].dtype.name} {bad[0].shape}' if bad else 'is empty'}")
        self._leaves = leaves
        self._ends = np.cumsum([int(np.prod(leaf.shape)) for leaf in leaves])
        self.size = int(self._ends[-1])

    def structure(self, vector: np.ndarray) -> Any:
        """The structure of these numbers, of tensors."""
        parts = np.split(vector, self._ends[:-1])
        leaves = [
            tf.cast(part.reshape(tuple(leaf.shape)), leaf.dtype) for part, leaf in zip(parts, self._leaves, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._spec, leaves)


class Vectors:
    """A method's messages and updates as vectors; the same on the server and on the device.

    Args:
        algorithm: the method.
        seed: the run's.

    Raises:
        InvalidArgument: its messages or updates are no vectors of float32.
    """

    def __init__(self, algorithm: Algorithm, seed: int):
        self._algorithm, self._seed = algorithm, seed

        def of_message():
            return algorithm.message(algorithm.init_server())

        spec = structure_of(of_message)
        self._scheduled = isinstance(spec, Scheduled)
        self._message = Flat(counted_part(spec), "what the server sends")
        self._weight = relaxed(lambda info, value, key: self._trial(info, value, key).weight)
        self.message_size = self._message.size

    @cached_property
    def _update(self) -> Flat:
        spec = structure_of(lambda info: self._trial(info).update, info_spec(self._algorithm.model.dtype))
        return Flat(spec, "what a client sends")

    @property
    def update_size(self) -> int:
        """How many numbers an update has. It is found by tracing a visit, which takes a second."""
        return self._update.size

    def _trial(self, info: ClientInfo, value: Any = 0, key: Any = (0, 0)) -> ClientOutput:
        """A visit on one example that is this value throughout; nobody computes more of it than shapes and weight."""
        algorithm = self._algorithm
        x, y = algorithm.model.blank_examples(1, info.num_classes)
        x = tf.nest.map_structure(lambda part: part + tf.cast(value, part.dtype), x)
        key = tf.convert_to_tensor(key, tf.int32)
        message, state = algorithm.message(algorithm.init_server()), algorithm.init_client(info)
        with passes.drawing(key):
            return algorithm.client_update(message, state, ClientData(x, y, info, key))

    def message(self, message: Any) -> np.ndarray:
        """A message, without the number of the round: float32 [message_size]."""
        return flat(counted_part(message))

    def read_message(self, vector: np.ndarray, round_num: int) -> Any:
        """The message of these numbers in a round."""
        found = self._message.structure(vector)
        return Scheduled(found, tf.constant(round_num)) if self._scheduled else found

    def weight(self, client: int, round_num: int) -> float:
        """The weight of a client in the aggregate of a round.

        It follows from the client's sizes and the round's random numbers (a straggler of FedProx may have 0), and not
        from what the client computed.
        """
        return self._weight_on(client, round_num, 0)

    def check_weight(self) -> None:
        """Checks that a weight follows from the client's sizes, by visits on two different examples.

        Raises:
            InvalidArgument: it does not, as that of FedAS, a trace of Fisher's information.
        """
        client = int(self._algorithm.population.client_ids[0])
        if self._weight_on(client, 1, 0) != self._weight_on(client, 1, 1):
            raise InvalidArgument(
                "a client's weight in the sum depends on its examples, and a server that devices join computes the "
                "weights itself, so that no device can give itself a large one. Take weighting='examples', if the "
                "method has it"
            )

    def _weight_on(self, client: int, round_num: int, value: int) -> float:
        (key,) = client_key(self._seed, round_num, [client])
        info = self._algorithm.population.info(client, self._algorithm.model.dtype)
        return float(
            self._weight(tf.nest.map_structure(tf.convert_to_tensor, info), tf.constant(value), tf.constant(key))
        )

    def step(self, server_step: Any, server: Any, updates: dict[int, np.ndarray], round_num: int) -> Any:
        """The server's state after a step with these updates, which are added as the engines add them.

        Args:
            server_step: from `tfpfl.engines.visit.server_step`.
            server: the state, of arrays.
            updates: {client: float32 [update_size]}, ascending.
            round_num: the number of the round.
        """
        server = at_round(tf.nest.map_structure(tf.convert_to_tensor, server), round_num)
        if not updates:
            return server
        added = Sum()
        for client, vector in updates.items():
            weight = tf.constant(self.weight(client, round_num), self._algorithm.model.dtype)
            output = ClientOutput(self._update.structure(vector), weight, (), {})
            added.add(aggregation.contribution(self._algorithm, output))
        found = added.total()
        return server_step(server, aggregation.finish(self._algorithm, found, list(updates)), found.weight)


def exported_training(run) -> dict | str:
    """The settings of visits by the exported program, of a run's first client; or why devices cannot run it."""
    return device_training(run.config, run.population, int(run.population.client_ids[0]), run.model)


def visit_settings(run, population: Population, client: int, often: float) -> dict:
    """tau and the rates of a visit by the exported program. Who comes rarely takes longer steps, as in the engines.

    Args:
        run: an open `tfpfl.runs.run.Run` whose devices run the exported program.
        population: the clients that count now.
        client: its number.
        often: how often it arrives in a step of the server: of a cohort, the probability that it does.
    """
    settings = device_training(run.config, population, client, run.model)
    assert isinstance(settings, dict)  # the rounds have checked it
    if run.config.hyperparameters["head_rate"] == "rho":  # as theta's, the head's step is divided by it
        settings = {**settings, "head_rate": settings["head_rate"] / often}
    return settings


def refusal(run) -> str | None:
    """Why the clients of a run cannot be devices with TensorFlow; None: they can.

    Args:
        run: an open `tfpfl.runs.run.Run`.
    """
    config, algorithm = run.config, run.algorithm
    if config.algorithm == "pflego":
        return str(exported_training(run))
    if config.own_method is not None or config.network not in NETWORKS:
        what = "method" if config.own_method is not None else "network"
        return f"its {what} is your own, and a device runs no code that a server sends it"
    if algorithm.first is not None:
        return (
            f"a round of {config.algorithm} has two exchanges, and a device that polls a server makes one visit in a "
            "round"
        )
    for name, usual in {"objective": "mean", "on_broken": "stop", "aggregator": None, "secure": False}.items():
        if (found := getattr(config, name)) != usual:
            return f"its {name} is {found!r}, which only a simulation has (here it must be {usual!r})"
    if algorithm.message_per_client or "rows" in kinds(algorithm):
        return (
            f"{config.algorithm} sends each client a message of its own, made of what the server keeps of the others: "
            "the server would have the clients' models"
        )
    if config.train_from is not None:
        return "it has a frozen trunk (train_from), whose features a device with TensorFlow does not compute yet"
    if is_several(run.federation.example_shape):
        return "its examples are several arrays, and a device with TensorFlow reads one"
    try:
        sizes = Vectors(algorithm, config.seed)
        if not (sizes.message_size and sizes.update_size):
            return "nothing is sent"
        sizes.check_weight()
        return None
    except InvalidArgument as error:
        return f"in {config.algorithm}, {error}"


def check_exported(run, what: str) -> None:
    """Checks that devices run the exported program in a run, and that its clients are known.

    Args:
        run: an open `tfpfl.runs.run.Run`.
        what: what needs it, for the error.

    Raises:
        InvalidArgument: devices cannot take part in this run, or only with TensorFlow; or its clients are known when
            they join.
    """
    if isinstance(why := exported_training(run), str):
        raise InvalidArgument(f"{run.folder}: devices cannot take part: {what} need the exported program: {why}")
    if is_places(run.federation):
        raise InvalidArgument(f"{run.folder}: {what} need clients whose sizes are known before they join, not places")


def plan_of(run) -> bytes:
    """The plan of a run's visits: the content of visit.json."""
    config, population = entries(run.config), run.population
    about = {
        "format": FORMAT,
        "config": {name: config[name] for name in _ENTRIES if name in config},
        "example_shape": list(run.federation.example_shape),
        "outputs": population.num_labels,
    }
    return (json.dumps(about, indent=2) + "\n").encode()


class Plan:
    """A plan, as the device reads it.

    Args:
        content: of visit.json.
        client: the device's client.
        num_examples: N_i.
        num_classes: K_i.

    Raises:
        InvalidArgument: it cannot be read, is of a newer version, or asks for a method or a network that is not of
            tfpfl.
    """

    def __init__(self, content: bytes, client: int, num_examples: int, num_classes: int):
        try:
            about = json.loads(content)
            if about["format"] != FORMAT:
                raise InvalidArgument(f"{PLAN} has format {about['format']}, not {FORMAT}: update the older of the two")
            given, outputs = dict(about["config"]), about["outputs"]
            self._shape = tuple(int(n) for n in about["example_shape"])
            if unknown := sorted(set(given) - set(_ENTRIES)):
                raise InvalidArgument(f"{PLAN} has unknown entries {', '.join(unknown)}: update the older of the two")
            # before the configuration is made, since this would load the code of another method
            check_choice(algorithm=(given["algorithm"], ALGORITHMS), network=(given["network"], NETWORKS))
            self.config = RunConfig(**given)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"{PLAN} is damaged: {type(error).__name__} {error}") from error
        how: dict[str, Any] = {"num_labels": outputs, "labels": self.config.labels or "local"}
        self.population = Population([num_examples], [num_classes], client_ids=[client], **how)
        self.info = self.population.info(client)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The run's method, for a population of this client alone: no visit needs to know of others."""
        recipe = Recipe(self.config)
        return recipe.algorithm(recipe.model(self._shape, self.config.kind or CLASSIFICATION), self.population)
