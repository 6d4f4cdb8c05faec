"""`own_part`: a part of theta stays with the client, for every method that trains one backbone.

The client's own weights take the place of the server's in the message, the method does its work, and what it did to
them is kept by the client instead of sent. So a method that sends all of theta becomes one that shares a part of it:
FedBN keeps the scales and offsets of normalization layers, and an adapter may stay with its client.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, check_one_exchange, kinds
from tfpfl.algorithms.transforms.server_optimizer import adds_mean
from tfpfl.checks import InvalidArgument
from tfpfl.models import tree


class OwnPart(NamedTuple):
    """A client's state where a part of theta is its own: the method's state, and the weights of that part."""

    own: tuple  # its own weights of theta, in theta's order
    state: Any  # the method's client state


def own_part(
    algorithm: Algorithm,
    own: Sequence[bool] | None = None,
    *,
    before: Algorithm | None = None,
    name: str = "this method",
) -> Algorithm:
    """The algorithm in which some weights of theta belong to the client: they are trained, kept, and never sent.

    A client begins with the model's initial weights. If the method sends differences, the client's own weights move by
    their difference; if it sends gradients, they take the step `Algorithm.own_step`, which is that of the head.

    Args:
        algorithm: an algorithm whose message and update have theta once, as a whole; or in which theta is never sent.
        own: for each weight of theta whether it belongs to the client; None: `algorithm.model.own`.
        before: the algorithm without the server's optimizer, if it has one; None: it has none.
        name: the method's name, for messages.

    Returns:
        The algorithm. Its message and update have () in place of the weights that are not sent. Models of clients no
        longer have the backbone in common, so `shares` is 'head' or None and there is no `global_model`.

    Raises:
        InvalidArgument: the algorithm is of another kind. The message says why.
    """
    model = algorithm.model
    own = model.own if own is None else tuple(own)
    shapes = [tuple(w.shape) for w in model.initial_theta]
    if len(own) != len(shapes):
        raise InvalidArgument(f"own must say yes or no for each of theta's {len(shapes)} weights, found {len(own)}")
    places = [i for i, its_own in enumerate(own) if its_own]
    found = len(_thetas(_message_of(algorithm), shapes)) if places else 0
    if not found:
        return algorithm  # nothing to leave out: theta stays with the client anyway
    _check(algorithm, before or algorithm, found, name)
    gaps = [None if its_own else shape for its_own, shape in zip(own, shapes, strict=True)]

    def shared(structure):
        return _on_thetas(structure, shapes, lambda theta: tuple(() if o else w for o, w in zip(own, theta)))  # noqa: B905

    def whole(structure, values):
        def filled(theta):
            left = iter(tf.nest.map_structure(tf.convert_to_tensor, tuple(values)))  # states may be arrays
            return tuple(next(left) if o else w for o, w in zip(own, theta, strict=True))

        return _on_thetas(structure, gaps, filled)

    def no_change():
        return tuple(tf.zeros(shapes[i], model.initial_theta[i].dtype) for i in places)

    def client_update(message, state, data):
        output = algorithm.client_update(whole(message, state.own), state.state, data)
        (theta,) = _thetas(output.update, shapes)
        moves = tuple(theta[i] for i in places)
        if algorithm.own_step is not None:
            moves = tree.scale(algorithm.own_step(data.info, output.metrics["loss"]), moves)
        return output._replace(update=shared(output.update), state=OwnPart(tree.add(state.own, moves), output.state))

    def local_model(message, output):
        inner = output._replace(update=whole(output.update, no_change()), state=output.state.state)
        return algorithm.local_model(whole(message, output.state.own), inner)

    adapt, predictor = algorithm.adapt, algorithm.predictor
    return algorithm._replace(
        init_client=lambda info: OwnPart(tuple(model.theta()[i] for i in places), algorithm.init_client(info)),
        message=lambda server: shared(algorithm.message(server)),
        client_update=client_update,
        server_update=lambda server, aggregate, total: algorithm.step(server, whole(aggregate, no_change()), total),
        personal_model=lambda message, state, data: algorithm.personal_model(
            whole(message, state.own), state.state, data
        ),
        predictor=predictor and (lambda message, state, data: predictor(whole(message, state.own), state.state, data)),
        local_model=local_model,
        global_model=None,
        begins=lambda message, state, data: algorithm.beginning(whole(message, state.own), state.state, data),
        adapt=adapt
        and adapt._replace(
            start=lambda message, state, data: adapt.start(whole(message, state.own), state.state, data)
        ),
        shares="head" if algorithm.shares in ("model", "head") else None,
        one_pass=None,
        own_step=None,
    )


def _check(algorithm: Algorithm, before: Algorithm, found: int, name: str) -> None:
    check_one_exchange(algorithm, "a part of theta that stays with the client (personal, or batch_norm='local')")
    if algorithm.message_per_client or "rows" in kinds(algorithm):
        why = "its server makes a message of its own for each client, or needs each client's own update"
    elif found > 1:
        why = "its message has theta's shape more than once, such as a model and a control variate"
    elif algorithm.own_step is None and not adds_mean(before):
        why = "its clients do not send the difference that their steps made, which the server adds"
    else:
        return
    raise InvalidArgument(
        f"{name} cannot leave a part of theta with the client: {why}. Use pflego, fedsgd, fedavg, fedprox, fedper, "
        "fedrep, fedbabu, fedrod or a fine-tuned one; batch_norm='frozen', and adapters without personal, fit every "
        "method"
    )


def _message_of(algorithm: Algorithm) -> Any:
    """A message, as tensors of a graph that is never run."""

    def first() -> Any:
        client = [tf.constant(algorithm.population.client_ids[0])] if algorithm.message_per_client else []
        return algorithm.message(algorithm.init_server(), *client)

    return tf.function(first, autograph=False).get_concrete_function().structured_outputs


def _is_theta(part: Any, shapes: list) -> bool:
    """Whether a structure is a theta: a plain tuple of tensors of these shapes; None: () in place of a tensor."""
    if not isinstance(part, tuple | list) or hasattr(part, "_fields") or len(part) != len(shapes):
        return False
    pairs = list(zip(part, shapes, strict=True))
    return all(
        (isinstance(leaf, tuple | list) and not leaf) if shape is None else tuple(getattr(leaf, "shape", [-1])) == shape
        for leaf, shape in pairs
    )


def _on_thetas(structure: Any, shapes: list, function: Callable) -> Any:
    """The structure with function(theta) in place of every theta in it."""
    if _is_theta(structure, shapes):
        return function(structure)
    if isinstance(structure, dict):
        return type(structure)((k, _on_thetas(v, shapes, function)) for k, v in structure.items())
    if isinstance(structure, tuple | list):
        parts = [_on_thetas(part, shapes, function) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    return structure


def _thetas(structure: Any, shapes: list) -> list:
    """All thetas in a structure."""
    found: list = []

    def keep(theta: tuple) -> tuple:
        found.append(theta)
        return theta

    _on_thetas(structure, shapes, keep)
    return found
