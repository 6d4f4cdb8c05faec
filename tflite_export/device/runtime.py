"""Opens a bundle, checks its files, and runs the signatures of its programs. Needs no TensorFlow.

The interpreter is ai-edge-litert's, or any class with its interface, such as `tf.lite.Interpreter`.
"""

import hashlib
import json
import os
import re
import warnings
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tflite_export.device.arrays import Arrays
from tflite_export.device.bundle_files import check_file, read_json
from tflite_export.device.errors import BundleError as BundleError
from tflite_export.device.errors import InvalidInput
from tflite_export.device.files import write_whole
from tflite_export.device.kinds import Kind
from tflite_export.device.layout import MANIFEST, THETA
from tflite_export.device.manifest import check_manifest

FORMAT = 1
WHILE_SINCE = "1.1"  # ai-edge-litert before this version ends the process in any WHILE operation
USE_WHILE = ("personalize", "round")
MOST_THREADS = 256  # far more than any device's; an interpreter that cannot start them ends the process


def manifest_hash(manifest: dict) -> str:
    """The sha256 of a manifest without its entry 'hash', written as JSON with sorted keys and no spaces."""
    content = {k: v for k, v in manifest.items() if k != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(folder: Path, manifest: dict) -> None:
    """Writes manifest.json into `folder`, with its hash as an entry."""
    manifest = {**manifest, "hash": manifest_hash(manifest)}
    write_whole(folder / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())


class Bundle:
    """An open bundle: its folder, its manifest and its files.

    Args:
        folder: a folder that `tflite_export.export` wrote.
        check: whether to compare the hashes of all files with the manifest.

    Raises:
        BundleError: the folder is not a bundle, a file is missing or was changed, or the format is another one.
    """

    def __init__(self, folder: str | os.PathLike, check: bool = True):
        if not isinstance(folder, str | os.PathLike):
            raise BundleError(f"a bundle is given as the path of its folder, or open; found {folder!r}")
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        try:
            self.manifest = read_json(self.folder, MANIFEST)
            found_format, found_hash = self.manifest["format"], self.manifest["hash"]
        except FileNotFoundError:
            raise BundleError(f"{self.folder} is not a bundle: it has no {MANIFEST}") from None
        except BundleError:
            raise
        except (NotADirectoryError, ValueError, RecursionError, KeyError, TypeError) as error:  # ValueError: no JSON
            raise BundleError(f"{self.folder} is not a bundle: its {MANIFEST} cannot be read ({error!r})") from None
        if found_format is True or found_format != FORMAT:
            found_format = str(found_format)[:80]
            raise BundleError(f"{self.folder} has bundle format {found_format}; this version reads format {FORMAT}")
        if manifest_hash(self.manifest) != found_hash:
            raise BundleError(f"{path} was changed: its content does not have the hash that it names")
        try:
            check_manifest(self.manifest)
        except InvalidInput as error:
            raise BundleError(f"{path} was changed: {error}") from None
        if check:
            for name in self.manifest["files"]:
                self.check(name)
        model = self.manifest["model"]
        self.example_shape = tuple(model["example_shape"])
        self.example_dtype = np.dtype(model.get("example_dtype", "float32"))
        self.num_tokens = model.get("num_tokens")  # of whole numbers: how many there are, from 0 on; None: not known
        self.num_features, self.num_classes = model["num_features"], model["num_classes"]
        self.num_backbone_weights = model["num_backbone_weights"]
        self.arrays = None if "inputs" not in model else Arrays(model["inputs"])  # of an example; None: there is one
        self.kind = Kind(model.get("kind", "classification"))
        self.labels = tuple(self.manifest["labels"]["names"])  # of the classes, or of the outputs
        self.columns = tuple(self.manifest["preprocessing"].get("columns", ()))  # of a table, in an example's order

    def check(self, name: str) -> None:
        """Raises `BundleError` if the file `name` is missing or was changed."""
        check_file(self.folder, name, self.manifest["files"][name])

    def path(self, name: str) -> Path:
        """The path of the bundle's file `name`.

        Raises:
            BundleError: the bundle has no such file.
        """
        if name not in self.manifest["files"]:
            raise BundleError(f"{self.folder} has no {name}; it has {', '.join(sorted(self.manifest['files']))}")
        return self.folder / name

    def theta(self) -> np.ndarray:
        """The backbone's weights at export, flat: float32 [P]."""
        return np.fromfile(self.path(THETA), "<f4").astype(np.float32)


@contextmanager
def no_news_of_the_interpreter():
    """A context without TensorFlow's warning that its interpreter is deprecated: no other may be installed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*Warning: tf\.lite\.Interpreter is deprecated")
        yield


class Runtime:
    """Runs the signatures of one .tflite file.

    Args:
        path: the file.
        interpreter: a class with the interface of ai-edge-litert's `Interpreter`, which is the default.
        num_threads: number of threads of the interpreter.

    Raises:
        BundleError: there is no such file; ai-edge-litert is not installed and no interpreter is given, or it cannot
            read the file; or num_threads is not from 1 to 256.
    """

    def __init__(self, path: Path, interpreter=None, num_threads: int = 1):
        self.path = Path(path)
        if not self.path.is_file():
            raise BundleError(
                f"there is no file {self.path}. If its folder was moved, or the process works in another one since the "
                "bundle was opened, open the bundle again"
            )
        if interpreter is not None and not (callable(interpreter) and hasattr(interpreter, "__module__")):
            raise BundleError(
                f"the interpreter must be a class with the interface of ai-edge-litert's Interpreter, such as "
                f"tf.lite.Interpreter; found {interpreter!r}"
            )
        if not isinstance(num_threads, int | np.integer) or not 1 <= num_threads <= MOST_THREADS:
            raise BundleError(f"num_threads must be a whole number from 1 to {MOST_THREADS}; found {num_threads!r}")
        self.interpreter_class = interpreter or default_interpreter()
        self.name, self.version = runtime_version(self.interpreter_class)
        try:
            with no_news_of_the_interpreter():
                self._interpreter = self.interpreter_class(model_path=str(path), num_threads=num_threads)
        except (ValueError, RuntimeError) as error:
            raise self._too_old(f"open {self.path.name}", error) from error
        self.signatures = self._interpreter.get_signature_list()
        self._runners: dict[str, Any] = {}

    def can(self, signature: str) -> bool:
        """Whether the file has a signature, and the runtime is new enough not to crash in it."""
        return signature in self.signatures and not (signature in USE_WHILE and self._crashes_in_while())

    def has_fixed_rows(self, signature: str, name: str) -> bool:
        """Whether the first dimension of an input is fixed. False if there is no such input.

        Raises:
            BundleError: the runtime cannot run the signature.
        """
        if not self.can(signature):
            return False
        _, wanted = self._runner(signature)
        return name in wanted and int([*wanted[name]["shape_signature"], -1][0]) != -1

    def __call__(self, signature: str, **inputs) -> dict:
        """Runs a signature: inputs by name -> {output: array}. Scalars are arrays of shape [].

        Raises:
            BundleError: the file has no such signature, an input is missing, unknown or of another shape or dtype, or
                the runtime cannot run it.
        """
        if signature not in self.signatures:
            found = ", ".join(self.signatures)
            raise BundleError(f"{self.path.name} has no signature {signature!r}; it has {found}")
        if not self.can(signature):
            raise BundleError(
                f"{self.name} {self.version} is too old for signature {signature!r}: before {WHILE_SINCE} it ends the "
                "process in a WHILE operation. Update it, or take head_step and joint_gradient"
            )
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        runner, wanted = self._runner(signature)
        self._check_inputs(signature, arrays, wanted)  # errors after this are the runtime's, or of tokens it lacks
        try:
            return runner(**arrays)
        except (ValueError, RuntimeError) as error:
            what = f"run signature {signature!r} of {self.path.name}"
            raise self._too_old(what, error, ", or an input is out of range") from error

    def _runner(self, signature):
        """What runs a signature, and the details of its inputs."""
        try:
            if signature not in self._runners:
                self._runners[signature] = self._interpreter.get_signature_runner(signature)
            runner = self._runners[signature]
            return runner, runner.get_input_details()
        except (ValueError, RuntimeError) as error:
            raise self._too_old(f"run signature {signature!r} of {self.path.name}", error) from error

    def _check_inputs(self, signature, arrays, wanted):
        where = f"signature {signature!r} of {self.path.name}"
        if set(arrays) != set(wanted):
            raise BundleError(f"{where} takes {', '.join(sorted(wanted))}; found {', '.join(sorted(arrays)) or 'none'}")
        for name, array in arrays.items():
            dtype, shape = np.dtype(wanted[name]["dtype"]), [int(n) for n in wanted[name]["shape_signature"]]
            fits = len(shape) == array.ndim and all(n in (-1, m) for n, m in zip(shape, array.shape, strict=True))
            if array.dtype != dtype or not fits:
                raise BundleError(
                    f"{where}: {name} must be {dtype} {shape}, where -1 is any number; found {array.dtype} "
                    f"{list(array.shape)}"
                )

    def _crashes_in_while(self) -> bool:
        found = _numbers(self.version)
        return self.name == "ai-edge-litert" and bool(found) and found < _numbers(WHILE_SINCE)

    def _too_old(self, what, error, or_else="") -> BundleError:
        return BundleError(f"{self.name} {self.version} cannot {what}; it may be too old for it{or_else}: {error}")


def default_interpreter():
    """The class `Interpreter` of ai-edge-litert.

    Raises:
        BundleError: it is not installed.
    """
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise BundleError(
            "ai-edge-litert is not installed here; install it (pip install ai-edge-litert), or give an interpreter, "
            "such as tf.lite.Interpreter"
        ) from error
    return Interpreter


def runtime_version(interpreter_class) -> tuple[str, str]:
    """The package that an interpreter comes from, and its version, such as ('ai-edge-litert', '2.3.0')."""
    package = interpreter_class.__module__.partition(".")[0].replace("_", "-")
    try:
        return package, version(package)
    except PackageNotFoundError:
        return package, "of unknown version"


def _numbers(text: str) -> tuple:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])
