"""Whether the configuration of a Keras model is made of Keras's own layers only, so that building it runs no code.

Keras finds classes and functions by the names in the configuration, and imports any module for it. So the names are
checked before Keras sees them: what is not in the list below is refused, and not only what is known to be dangerous.
"""

import re
import sys
from functools import cache
from typing import Any

import keras

from tfpfl.checks import InvalidArgument

# Layers of Keras that run code from the file, run another program, or read other files.
REFUSED = {
    *("Lambda", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer", "DenseFeatures"),
    *("TextVectorization", "StringLookup", "IntegerLookup"),
}
# Values that are no objects of Keras, and how the two versions of Keras write them.
VALUES = {"__tensor__", "__keras_tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__", "__tuple__"}
VALUES |= {"TensorShape"}
# Keras 3 writes arithmetic between layers as operations of these modules.
OPERATIONS = ("keras.src.ops.numpy", "keras.src.ops.nn", "keras.src.ops.math", "keras.src.ops.linalg")
# Keras 2 writes it as a layer TFOpLambda or SlicingOpLambda of these modules.
OF_FUNCTIONS = (None, "keras.layers", "keras.src.layers.core.tf_op_layer")
# Such a layer names a function of TensorFlow, also one that writes or deletes files. These only compute.
FUNCTIONS = {
    *(f"__operators__.{name}" for name in ("add", "getitem")),
    *(f"math.{name}" for name in ("abs", "add", "cos", "divide", "exp", "log", "maximum", "minimum", "multiply")),
    *(f"math.{name}" for name in ("negative", "pow", "reduce_max", "reduce_mean", "reduce_min", "reduce_sum")),
    *(f"math.{name}" for name in ("rsqrt", "sigmoid", "sin", "softplus", "sqrt", "square", "subtract", "tanh")),
    *(f"math.{name}" for name in ("truediv", "l2_normalize")),
    *(f"nn.{name}" for name in ("elu", "gelu", "leaky_relu", "relu", "relu6", "selu", "silu", "softmax")),
    *("cast", "clip_by_value", "concat", "expand_dims", "reshape", "squeeze", "stack", "strided_slice", "transpose"),
    *("linalg.matmul", "nn.bias_add", "image.resize", "compat.v1.nn.conv2d", "nn.convolution"),
}
# What a configuration holds beside the model itself, which is not needed here and may name any function.
_NOT_NEEDED = ("compile_config",)
LARGEST = 2**31 - 1
DEEPEST = 60  # levels of a configuration; those of a model of Keras have about ten


class NotAccepted(InvalidArgument):
    """A file might run code of its own. Its owner can allow that; see `tfpfl.runs.allow_code`."""

    def __init__(self, message: str):
        super().__init__(f"{message}. A file from elsewhere runs no code here; if you made it, use --allow-code")


def checked_config(config: Any) -> dict:
    """The configuration of a model without what is not needed, if building it runs no code from the file.

    Classes that this process has registered with `keras.saving.register_keras_serializable` are accepted.

    Args:
        config: the parsed JSON of a model.

    Raises:
        NotAccepted: a class or a function is not Keras's own. The message names the entry.
        InvalidArgument: a value is wrong, or too large.
    """
    if not isinstance(config, dict) or config.get("class_name") is None or not isinstance(config.get("config"), dict):
        raise InvalidArgument("its configuration is not that of a model: it has no class_name and config")
    return _checked(config, "model", 0)


def _checked(value: Any, place: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise InvalidArgument(f"{place} is more than {DEEPEST} levels deep")
    if isinstance(value, dict):
        left_out: tuple[str, ...] = _NOT_NEEDED
        if "class_name" in value:
            _check_class(value, place)
            left_out += ("module", "registered_name") if value["class_name"] in VALUES else ()
        return {k: _checked(v, f"{place}.{k}", depth + 1) for k, v in value.items() if k not in left_out}
    if isinstance(value, list):
        return [_checked(v, f"{place}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, int) and abs(value) > LARGEST and not place.endswith(".shared_object_id"):
        raise InvalidArgument(f"{place} is larger than {LARGEST}: {_shown(value)}")
    return value


def _check_class(entry: dict, place: str) -> None:
    """Checks one dictionary with a class_name; dictionaries in it are checked by the caller."""
    name, module = entry["class_name"], entry.get("module")
    registered = entry.get("registered_name", name)
    for key, found in (("class_name", name), ("module", module), ("registered_name", registered)):
        if found is not None and not isinstance(found, str):
            raise InvalidArgument(f"{place}.{key} must be a text, found {_shown(found)}")
    own = registered and keras.saving.get_registered_object(registered)
    if own and name in (registered, getattr(own, "__name__", None)):
        return  # registered in this process, and so not code from the file
    if name in VALUES:
        return
    if name == "function":
        _check_function(entry, place)
        return
    if name in ("TFOpLambda", "SlicingOpLambda") and module in OF_FUNCTIONS:
        config = entry.get("config")
        function = config.get("function") if isinstance(config, dict) else None
        if not isinstance(function, str) or function not in FUNCTIONS:
            raise NotAccepted(f"{place}.config.function is not plain arithmetic: {_shown(function)}")
    elif _class_of(entry) is None:
        whose = f" of module {_shown(module)}" if module else ""
        raise NotAccepted(f"{place}.class_name is {_shown(name)}{whose}, which is {_why(name, module)}")
    if registered not in (None, name):  # Keras looks for this name in the module, too
        raise NotAccepted(f"{place}.registered_name is {_shown(registered)}, but its class_name is {_shown(name)}")


def _check_function(entry: dict, place: str) -> None:
    """Accepts the activations of Keras; Keras itself would take any function of any module."""
    name, module = entry.get("config"), entry.get("module")
    known = isinstance(name, str) and name in _activations()
    known &= entry.get("registered_name") in (None, "function", name)
    if not known or module not in (None, "builtins", "keras.activations"):
        raise NotAccepted(f"{place} is the function {_shown(name)} of module {_shown(module)}, not one of Keras")


def _why(name: object, module: object) -> str:
    if name in REFUSED:
        return "a layer that runs code or reads other files"
    if name == "__lambda__":
        return "code"
    return "not a class that Keras builds models of"


def _class_of(entry: dict) -> type | None:
    """The class of Keras that an entry names; None if it is not an accepted one."""
    name, module = entry["class_name"], entry.get("module")
    if not isinstance(name, str) or module is not None and not re.fullmatch(r"keras(\.\w+)*", str(module)):
        return None
    if module in OPERATIONS:
        found = getattr(sys.modules.get(module), name, None)
        is_operation = isinstance(found, type) and issubclass(found, keras.Operation) and found.__module__ == module
        return found if is_operation else None
    accepted = _classes().get(name)
    if module is not None and getattr(_imported(module), name, None) is not accepted:  # what Keras would find
        return None
    return accepted


def _imported(module: str) -> object:
    """The module of Keras of this name, such as keras.layers, as far as it is imported; otherwise None."""
    found: object = sys.modules.get(module)
    if found is None:  # some of Keras's public modules have other names in sys.modules
        found = keras
        for part in module.split(".")[1:]:
            found = getattr(found, part, None)
    return found


@cache
def _classes() -> dict[str, type]:
    """{name: class} of the accepted classes."""
    bases = {
        keras.layers: keras.layers.Layer,
        keras.initializers: keras.initializers.Initializer,
        keras.regularizers: keras.regularizers.Regularizer,
        keras.constraints: keras.constraints.Constraint,
    }
    found = {
        name: value
        for module, base in bases.items()
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and name not in REFUSED
    }
    found |= {"Sequential": keras.Sequential, "Model": keras.Model}
    found |= {c.__name__: c for c in keras.Model.__subclasses__() if c.__name__ == "Functional"}
    policies = [getattr(keras, "DTypePolicy", None), keras.mixed_precision.Policy]
    return found | {policy.__name__: policy for policy in policies if policy is not None}


@cache
def _activations() -> set[str]:
    not_functions = {"get", "serialize", "deserialize"}
    return {n for n, f in vars(keras.activations).items() if callable(f) and n[0] != "_"} - not_functions


def _shown(value: object) -> str:
    """The value, cut off where it is long."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a longer number"
    return text if len(text) <= 60 else f"{text[:60]}..."
