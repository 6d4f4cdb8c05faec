"""First-order optimizers as pure functions of tensors, for steps of the server, of a client and of a head.

Optimizers of Keras own variables, and optimizers of TFF need TFF. These need only TensorFlow.
`converted_optimizers` makes these from optimizers of Keras and of TFF.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.checks import InvalidArgument, check_fractions, check_rates, unknown
from tfpfl.models import tree


class Optimizer(NamedTuple):
    """An optimizer as two functions: `init(weights) -> slots`, `step(slots, weights, gradient) -> (slots, weights)`.

    The slots are the optimizer's state.
    """

    init: Callable
    step: Callable
    proportional: bool = False  # a gradient half as long gives steps half as long, as with SGD


class AdamSlots(NamedTuple):
    """The state of Adam between two steps."""

    step: tf.Tensor  # int32 []: steps done
    first: tuple  # moving mean of the gradient
    second: tuple  # moving mean of its square


def sgd(rate: float, momentum: float = 0.0, *, nesterov: bool = False) -> Optimizer:
    """SGD with momentum: v <- momentum v + g; w <- w - rate v, with v = 0 at first.

    With `nesterov` the step is w <- w - rate (g + momentum v), with the new v.
    """
    if not momentum:
        return Optimizer(lambda weights: (), lambda slots, weights, g: ((), tree.add_scaled(weights, -rate, g)), True)

    def step(velocity, weights, gradient):
        velocity = tree.add_scaled(gradient, momentum, velocity)
        move = tree.add_scaled(gradient, momentum, velocity) if nesterov else velocity
        return velocity, tree.add_scaled(weights, -rate, move)

    return Optimizer(tree.zeros_like, step, True)


def adam(
    rate: float, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8, *, epsilon_hat: bool = False
) -> Optimizer:
    """Adam with both bias corrections (Kingma and Ba, 2015, algorithm 1).

    With `epsilon_hat`, epsilon is added to the root of the second moment before its bias is corrected. Keras and TFF do
    this; the paper calls this epsilon "epsilon hat".
    """

    def init(weights):
        return AdamSlots(tf.constant(0), tree.zeros_like(weights), tree.zeros_like(weights))

    def step(slots, weights, gradient):
        t = slots.step + 1
        first = tree.add_scaled(tree.scale(beta_1, slots.first), 1 - beta_1, gradient)
        second = tree.add_scaled(
            tree.scale(beta_2, slots.second), 1 - beta_2, tf.nest.map_structure(tf.square, gradient)
        )

        def move(w, m, v):
            power = tf.cast(t, w.dtype)
            m_hat = m / (1 - tree.as_dtype(beta_1, w.dtype) ** power)
            unbiased = 1 - tree.as_dtype(beta_2, w.dtype) ** power
            v_hat = v / unbiased
            return w - rate * m_hat / (tf.sqrt(v_hat) + (epsilon / tf.sqrt(unbiased) if epsilon_hat else epsilon))

        return AdamSlots(t, first, second), tf.nest.map_structure(move, weights, first, second)

    return Optimizer(init, step)


class SecondMoment(NamedTuple):
    """The state of `adagrad`, `yogi` and `adaptive` between two steps."""

    step: tf.Tensor  # int32 []: steps done
    first: Any  # moving mean of the gradient; () without one
    second: Any  # what the gradient is divided by the root of


def adagrad(rate: float, epsilon: float = 1e-7, *, initial: float = 0.1) -> Optimizer:
    """Adagrad: v <- v + g^2; w <- w - rate g / sqrt(v + epsilon), with v = `initial` at first, as in Keras and TFF."""

    def step(slots, weights, gradient):
        second = tf.nest.map_structure(lambda v, g: v + g * g, slots.second, gradient)
        weights = tf.nest.map_structure(lambda w, v, g: w - rate * g / tf.sqrt(v + epsilon), weights, second, gradient)
        return SecondMoment(slots.step + 1, (), second), weights

    return Optimizer(lambda weights: SecondMoment(tf.constant(0), (), _filled(weights, initial)), step)


def yogi(
    rate: float, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-3, *, initial: float = 1e-6
) -> Optimizer:
    """Yogi (Zaheer et al., NeurIPS 2018), with Adam's bias corrections and Keras's epsilon, as in TFF."""

    def step(slots, weights, gradient):
        t = slots.step + 1
        first = tree.add_scaled(tree.scale(beta_1, slots.first), 1 - beta_1, gradient)
        second = tf.nest.map_structure(partial(_yogi_moment, beta_2), slots.second, gradient)

        def move(w, m, v):
            b_1, b_2 = (1 - tree.as_dtype(b, w.dtype) ** tf.cast(t, w.dtype) for b in (beta_1, beta_2))
            return w - rate * tf.sqrt(b_2) / b_1 * m / (tf.sqrt(v) + epsilon)

        return SecondMoment(t, first, second), tf.nest.map_structure(move, weights, first, second)

    def init(weights):
        return SecondMoment(tf.constant(0), tree.zeros_like(weights), _filled(weights, initial))

    return Optimizer(init, step)


def _yogi_moment(beta_2, v, g):
    return v - (1 - beta_2) * tf.sign(v - g * g) * g * g


def _filled(weights, value):
    return tf.nest.map_structure(lambda w: tf.zeros_like(w) + tree.as_dtype(value, w.dtype), weights)


SECOND_MOMENTS: dict[str, Callable] = {  # of `adaptive`: name -> (beta_2, v, g) -> the new v
    "adagrad": lambda beta_2, v, g: v + g * g,
    "adam": lambda beta_2, v, g: beta_2 * v + (1 - beta_2) * g * g,
    "yogi": _yogi_moment,
}


def adaptive(name: str, rate: float, beta_1: float = 0.9, beta_2: float = 0.99, epsilon: float = 1e-3) -> Optimizer:
    """The server's step of FedAdagrad, FedAdam or FedYogi (Reddi et al., ICLR 2021, algorithm 2), on a gradient g.

    m <- beta_1 m + (1 - beta_1) g;  v <- (see below);  w <- w - rate m / (sqrt(v) + epsilon)

    adagrad: v + g^2;  adam: beta_2 v + (1 - beta_2) g^2;  yogi: v - (1 - beta_2) g^2 sign(v - g^2). Biases are not
    corrected. At first m is 0 and v is epsilon^2.

    Args:
        name: 'adagrad', 'adam' or 'yogi'.
        rate: the paper's eta.
        beta_1, beta_2: decay of m and of v, in [0, 1).
        epsilon: the paper's tau, > 0.
    """
    moment = partial(SECOND_MOMENTS[name], beta_2)

    def step(slots, weights, gradient):
        first = tree.add_scaled(tree.scale(beta_1, slots.first), 1 - beta_1, gradient)
        second = tf.nest.map_structure(moment, slots.second, gradient)
        moved = tf.nest.map_structure(lambda w, m, v: w - rate * m / (tf.sqrt(v) + epsilon), weights, first, second)
        return SecondMoment(slots.step + 1, first, second), moved

    def init(weights):
        return SecondMoment(tf.constant(0), tree.zeros_like(weights), _filled(weights, epsilon**2))

    return Optimizer(init, step)


def decayed(optimizer: Optimizer, rate: float, weight_decay: float) -> Optimizer:
    """The optimizer with decoupled weight decay: before every step, w <- w - rate weight_decay w.

    This is AdamW's decay (Loshchilov and Hutter, ICLR 2019), as in Keras. The gradient is taken before it.
    """

    def step(slots, weights, gradient):
        return optimizer.step(slots, tree.add_scaled(weights, -rate * weight_decay, weights), gradient)

    return optimizer._replace(step=step)


def adamw(rate: float, weight_decay: float = 0.004, **options: Any) -> Optimizer:
    """Adam with decoupled weight decay; the options are those of `adam`."""
    return decayed(adam(rate, **options), rate, weight_decay)


OPTIMIZERS = {
    "sgd": sgd,
    "momentum": lambda rate: sgd(rate, momentum=0.9),
    "adam": adam,
    "adamw": adamw,
    "adagrad": adagrad,
    "yogi": yogi,
}


class OptimizerChoice(NamedTuple):
    """An optimizer of `OPTIMIZERS` with options. The learning rate, and the momentum of 'sgd', are the method's.

    None is the optimizer's own value: 0.9 and 0.999 for the betas of 'adam', 'adamw' and 'yogi'; epsilon 1e-8 (1e-7 for
    'adagrad', 1e-3 for 'yogi'); no weight decay (0.004 for 'adamw'). All can have a weight decay, see `decayed`.
    """

    name: str = "sgd"
    beta_1: float | None = None
    beta_2: float | None = None
    epsilon: float | None = None
    weight_decay: float | None = None

    @property
    def is_sgd(self) -> bool:
        """Whether this is plain SGD, with or without momentum."""
        return self.name in ("sgd", "momentum") and not self.weight_decay

    def checked(self) -> "OptimizerChoice":
        """Returns this choice, if it can be made.

        Raises:
            InvalidArgument: the name is unknown, an option does not belong to this optimizer, or a value is out of
                range.
        """
        if self.name not in OPTIMIZERS:
            raise InvalidArgument(unknown("client_opt", self.name, OPTIMIZERS))
        betas = ("beta_1", "beta_2", "epsilon")
        takes = {"sgd": (), "momentum": (), "adagrad": ("epsilon",)}.get(self.name, betas)
        check_options("client_opt", self.name, {f"client_{o}": getattr(self, o) for o in betas}, takes)
        if self.weight_decay is not None:
            check_rates(client_weight_decay=self.weight_decay)
        return self

    def at(self, rate: float, momentum: float = 0.0) -> Optimizer:
        """The `Optimizer` with this learning rate; the momentum is for 'sgd'."""
        if self.name == "sgd":
            made = sgd(rate, momentum)
        else:
            given = {o: value for o in ("beta_1", "beta_2", "epsilon") if (value := getattr(self, o)) is not None}
            made = OPTIMIZERS["adam" if self.name == "adamw" else self.name](rate, **given)
        decay = self.weight_decay
        if decay is None:
            decay = 0.004 if self.name == "adamw" else 0.0
        return decayed(made, rate, decay) if decay else made


def client_optimizer(
    client_opt: Any,
    *,
    client_beta_1: float | None = None,
    client_beta_2: float | None = None,
    client_epsilon: float | None = None,
    client_weight_decay: float | None = None,
) -> Any:
    """What a builder gets as `client_opt`: the name, with the options that belong to it.

    Args:
        client_opt: what takes the local steps: 'sgd', 'momentum' (0.9), 'adam', 'adamw', 'adagrad' or 'yogi'; in Python
            also an optimizer.
        client_beta_1: decay of the mean of gradients with client_opt 'adam', 'adamw' and 'yogi', in [0, 1); None for
            0.9.
        client_beta_2: decay of the mean of their squares, in [0, 1); None for 0.999.
        client_epsilon: added to the divisor with client_opt 'adam', 'adamw', 'yogi' and 'adagrad', > 0; None for 1e-8
            (1e-3 for 'yogi', 1e-7 for 'adagrad').
        client_weight_decay: before every local step, weights shrink by the learning rate times this, >= 0; None for
            0.004 with client_opt 'adamw', otherwise 0.

    Raises:
        InvalidArgument: an option is out of range, has no effect with this optimizer, or is given with an optimizer
            that is not a name.
    """
    options = (client_beta_1, client_beta_2, client_epsilon, client_weight_decay)
    if options == (None,) * 4:
        return client_opt
    if not isinstance(client_opt, str):
        raise InvalidArgument(
            f"client_beta_1, client_beta_2, client_epsilon and client_weight_decay go with a client_opt by name; found "
            f"{client_opt!r}, which has its own"
        )
    return OptimizerChoice(client_opt, *options).checked()


def check_options(what: str, name: str, options: dict[str, float | None], takes: tuple[str, ...]) -> None:
    """Checks betas and epsilons of an optimizer; None was not given.

    Args:
        what: the argument that names the optimizer, for the message.
        name: the optimizer's name.
        options: {name of the argument, which ends in beta_1, beta_2 or epsilon: value}.
        takes: those endings that this optimizer has.

    Raises:
        InvalidArgument: an option is given that the optimizer does not have, a beta is outside [0, 1), or an epsilon is
            not positive.
    """
    for argument, value in options.items():
        if value is None:
            continue
        if not argument.endswith(takes):
            raise InvalidArgument(
                f"{argument}={value} has no effect with {what}={name!r}: leave it out, or take another optimizer"
            )
        if argument.endswith("epsilon"):
            check_rates(**{argument: value})
            if value == 0:
                raise InvalidArgument(f"{argument} must be positive, found 0: the step divides by it")
        else:
            check_fractions(**{argument: value})
            if value == 1:
                raise InvalidArgument(f"{argument} must be below 1, found 1: the step would never follow the gradient")


def optimizer(name: str, rate: float) -> Optimizer:
    """An `Optimizer` by its name in `OPTIMIZERS`, such as 'sgd', 'momentum' (SGD with momentum 0.9) or 'adam'.

    Raises:
        InvalidArgument: the name is unknown, or the rate is negative.
    """
    if name not in OPTIMIZERS:
        raise InvalidArgument(f"unknown optimizer {name!r}: one of {', '.join(OPTIMIZERS)}")
    if rate < 0:
        raise InvalidArgument(f"a learning rate must not be negative, found {rate}")
    return OPTIMIZERS[name](rate)
