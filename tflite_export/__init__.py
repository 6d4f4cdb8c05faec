"""Brings a client's model from a trained run to a device, which fits its head and takes part in PFLEGO rounds.

`export` writes a bundle, a folder of files; this needs TensorFlow. `DeviceClient` uses a bundle, `verify` checks one;
these need only NumPy and an interpreter of .tflite files, and importing them does not import TensorFlow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tflite_export.convert.backbone import convert_backbone as convert_backbone
    from tflite_export.convert.backbone import convert_predict as convert_predict
    from tflite_export.convert.bundle import export as export
    from tflite_export.convert.gradients import UnsupportedLayerError as UnsupportedLayerError
    from tflite_export.convert.personal import ExportError as ExportError
    from tflite_export.convert.program import convert_program as convert_program
    from tflite_export.device.bench import any_interpreter as any_interpreter
    from tflite_export.device.client import DeviceClient as DeviceClient
    from tflite_export.device.client import Update as Update
    from tflite_export.device.example_store import ExampleStore as ExampleStore
    from tflite_export.device.example_store import ExampleStoreError as ExampleStoreError
    from tflite_export.device.head_file import SavedHead as SavedHead
    from tflite_export.device.head_file import theta_sha256 as theta_sha256
    from tflite_export.device.live.kept_theta import open_state as open_state
    from tflite_export.device.neighbours import Neighbours as Neighbours
    from tflite_export.device.runtime import Bundle as Bundle
    from tflite_export.device.runtime import BundleError as BundleError
    from tflite_export.device.runtime import Runtime as Runtime
    from tflite_export.device.verification import verify as verify
    from tflite_export.rounds import simulate_round as simulate_round
    from tflite_export.web import write_site as write_site

# name -> the module that defines it; a test holds this against the imports above
_HOME = {
    "export": "convert.bundle",
    "ExportError": "convert.personal",
    "UnsupportedLayerError": "convert.gradients",
    "convert_program": "convert.program",
    "convert_backbone": "convert.backbone",
    "convert_predict": "convert.backbone",
    "simulate_round": "rounds",
    "write_site": "web",
    "Bundle": "device.runtime",
    "BundleError": "device.runtime",
    "Runtime": "device.runtime",
    "DeviceClient": "device.client",
    "Update": "device.client",
    "ExampleStore": "device.example_store",
    "ExampleStoreError": "device.example_store",
    "Neighbours": "device.neighbours",
    "open_state": "device.live.kept_theta",
    "SavedHead": "device.head_file",
    "theta_sha256": "device.head_file",
    "any_interpreter": "device.bench",
    "verify": "device.verification",
}
__all__ = list(_HOME)


if not TYPE_CHECKING:  # to a type checker every name would exist, a typo too

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'tflite_export' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
        if not _HOME[name].startswith("device."):
            try:
                import_module("tfpfl")  # before TensorFlow, whose messages it keeps away
            except ModuleNotFoundError as error:
                raise ImportError(
                    f"tflite_export.{name} needs tfpfl and TensorFlow, and this is the part for devices: use it where "
                    "tfpfl is installed"
                ) from error
        value = getattr(import_module(f"tflite_export.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
