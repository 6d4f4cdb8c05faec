"""From a trained run to a device: a bundle that personalizes and takes part in PFLEGO rounds, without TensorFlow.

`export` makes a bundle (this needs TensorFlow); `DeviceClient` uses one, and `verify` checks one (these need an
interpreter and NumPy only, and are imported without TensorFlow).
"""

from importlib import import_module

_HOME = {
    "export": "bundle",
    "ExportError": "bundle",
    "UnsupportedLayerError": "gradients",
    "convert_program": "program",
    "convert_backbone": "backbone",
    "convert_predict": "backbone",
    "simulate_round": "device_rounds",
    "write_site": "web",
    "Bundle": "runtime",
    "BundleError": "runtime",
    "Runtime": "runtime",
    "DeviceClient": "device",
    "Update": "device",
    "verify": "verification",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'tflite_export' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(import_module(f"tflite_export.{_HOME[name]}"), name)
    globals()[name] = value  # once
    return value


def __dir__():
    return sorted({*globals(), *_HOME})
