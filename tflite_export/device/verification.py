"""Checks that a runtime computes what TensorFlow computed: runs all signatures and compares them with check.npz.

Needs NumPy and an interpreter: `python -m tflite_export.device.verification BUNDLE` runs where there is no TensorFlow.
Where ai-edge-litert is not installed, it takes TensorFlow's.
"""

import argparse
import json
import sys
from typing import NamedTuple

import numpy as np

from tflite_export.device.bundle_files import stored_arrays
from tflite_export.device.chunks import filled_up, with_zeros
from tflite_export.device.errors import InvalidInput
from tflite_export.device.layout import (
    BACKBONE,
    BROWSER_PROGRAM,
    CHECK,
    INEXACT,
    PREDICT,
    PROGRAM,
    STATIC_PROGRAM,
    TRUNK,
    TRUNK_FLOAT16,
    TRUNK_INT8,
    TRUNK_STATIC,
)
from tflite_export.device.ops import check_builtin
from tflite_export.device.other_python import run_with
from tflite_export.device.runtime import Bundle, BundleError, Runtime
from tflite_export.device.wide_head import widened

PROGRAMS = (TRUNK, TRUNK_STATIC, PROGRAM, STATIC_PROGRAM, BROWSER_PROGRAM, BACKBONE, PREDICT, *INEXACT)
_SMALL = 1e-6  # smallest denominator of a relative error: errors of smaller outputs are divided by this
_OF_ONE_CLASS = 1.0  # and where the head has one class: its probability is 1 and its gradients 0, but for rounding
_ONE = "features_one"  # `features` of a single example, in the program for browsers


class Comparison(NamedTuple):
    """How much one output of one signature differs from TensorFlow's."""

    file: str
    signature: str
    output: str
    max_relative: float  # largest error, in units of the largest number expected
    l2_relative: float  # L2 norm of the error, in units of the L2 norm expected
    ok: bool


class Verification(NamedTuple):
    """The result of `verify`: the runtime, and one `Comparison` for each output."""

    runtime: str  # name and version, such as 'ai-edge-litert 2.3.0'
    comparisons: list

    @property
    def ok(self) -> bool:
        """Whether every output is as exact as the manifest asks."""
        return bool(self.comparisons) and all(c.ok for c in self.comparisons)

    def worst(self) -> dict:
        """{'signature.output': (largest max_relative, largest l2_relative)} over all files of float32.

        Files of another precision follow, by their names.
        """
        table: dict[str, tuple[float, float]] = {}
        for c in self.comparisons:
            name = c.file if c.file in INEXACT else f"{c.signature}.{c.output}"
            old = table.get(name, (0.0, 0.0))
            table[name] = (max(old[0], c.max_relative), max(old[1], c.l2_relative))
        return table

    def told(self) -> dict:
        """What is printed: ok, runtime and worst."""
        return {"ok": self.ok, "runtime": self.runtime, "worst": self.worst()}


def verify(bundle, *, interpreter=None, num_threads: int = 1) -> Verification:
    """Checks a bundle: the hashes of its files, that all operations are builtin, and the numbers of all signatures.

    Args:
        bundle: the folder, or an open `Bundle`.
        interpreter: class of the interpreter, see `Runtime`.
        num_threads: number of threads of the interpreter.

    Raises:
        BundleError: a file is damaged or needs an operation that is not builtin, or the runtime cannot run it. Numbers
            that differ raise no error: `Verification.ok` is false then.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    for name in bundle.manifest["files"]:
        if name.endswith(".tflite"):
            try:
                check_builtin(bundle.path(name))
            except InvalidInput as error:
                raise BundleError(f"{bundle.folder}/{name}: {error}") from error
    values = _values(bundle)
    bounds, comparisons = bundle.manifest["check"], []
    for name in (n for n in PROGRAMS if n in bundle.manifest["files"]):
        if name not in bounds.get("files", {}) and (name in INEXACT or name == PREDICT and "trunk" in bundle.manifest):
            continue  # of an older export, which did not measure how exact they are
        runtime = Runtime(bundle.path(name), interpreter, num_threads)
        for signature in (*bundle.manifest["signatures"], _ONE):
            if not runtime.can(signature):
                continue
            out = runtime(signature, **_inputs(bundle, values, signature, name))
            for output in sorted(out):
                of = f"{'features' if signature == _ONE else signature}.{output}"
                if of in values:
                    expected = values[of][:1] if signature == _ONE else values[of]
                    found = out[output]
                    if found.ndim == expected.ndim:  # a program of fixed shapes has more rows and columns
                        found = found[tuple(slice(n) for n in expected.shape)]
                    of_head = signature not in ("trunk", "features", _ONE, "predict")
                    least = smallest(bundle.kind.is_classes, bundle.num_classes) if of_head else _SMALL
                    comparisons.append(_compare(name, signature, output, found, expected, bounds, least))
    if not comparisons:
        raise BundleError(f"{bundle.folder} has no program whose numbers could be checked: export it again")
    return Verification(f"{runtime.name} {runtime.version}", comparisons)


def smallest(is_classes: bool, outputs: int) -> float:
    """The smallest denominator of a relative error of what is computed with a head of so many outputs."""
    return _OF_ONE_CLASS if is_classes and outputs == 1 else _SMALL


def _values(bundle) -> dict:
    """The arrays of check.npz, if the inputs among them are those of this model."""
    path = bundle.path(CHECK)
    values = stored_arrays(path)
    y, (m, k) = bundle.kind.input, (bundle.num_features, bundle.num_classes)
    n = len(np.atleast_1d(values.get(y, ())))
    inputs = {"x": (n, *bundle.example_shape), "kernel": (m, k), "bias": (k,), "features.phi": (n, m)}
    inputs[y] = (n,) if bundle.kind.is_classes else (n, k)
    inputs |= dict.fromkeys(("steps", "beta", "rate"), ())
    if (trunk := bundle.manifest.get("trunk")) is not None:
        inputs["raw"] = (n, *trunk["raw_shape"])
    for name, shape in inputs.items():
        dtype = np.dtype(np.int32 if name in ("labels", "steps") else np.float32)
        dtype = bundle.example_dtype if name == "x" else dtype
        found = values.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            why = " (see model.example_shape)" if name == "x" else ""
            raise BundleError(f"{path}: {name} must be {dtype} {list(shape)}, found {what}{why}")
    if texts := [name for name, value in values.items() if value.dtype.kind not in "fiu"]:
        raise BundleError(f"{path}: {', '.join(texts)} must be numbers")
    batch = bundle.manifest["model"]["static_batch"]
    if not 0 < n <= batch or (bundle.kind.is_classes and ((values[y] < 0) | (values[y] >= k)).any()):
        raise BundleError(f"{path}: {y} must be 1 to {batch} {f'class ids below {k}' if y == 'labels' else 'rows'}")
    return values


def _inputs(bundle, values, signature, program):
    """The inputs of a signature. For fixed shapes they are filled up with examples of weight 0 and closed classes."""
    if signature == _ONE:
        return {"theta": bundle.theta(), "x": values["x"][:1]}
    n = len(values["x"])
    table = {**values, "theta": bundle.theta(), "phi": values["features.phi"]}
    table["weights"] = np.full(n, 1 / n, np.float32)
    names = bundle.manifest["signatures"][signature]["inputs"]
    if missing := sorted(set(names) - set(table)):
        raise BundleError(f"{bundle.folder}: signatures.{signature}.inputs has unknown names {', '.join(missing)}")
    wanted = {name: table[name] for name in names}
    if program == PREDICT or program in (BACKBONE, *INEXACT) and signature == "features":
        wanted = {"x": table["raw"] if program == PREDICT and "trunk" in bundle.manifest else table["x"]}
    batch = None
    if program in (STATIC_PROGRAM, TRUNK_STATIC, TRUNK_FLOAT16, TRUNK_INT8):
        batch = bundle.manifest["model"]["static_batch"]
    elif program == BROWSER_PROGRAM:
        about = bundle.manifest.get("browser")
        if about is None:
            raise BundleError(f"{bundle.folder}: the manifest has no browser, which {program} needs")
        batch = about["head_batch" if signature in ("personalize", "head_step") else "batch"]
        if "kernel" in wanted:
            wanted["kernel"], wanted["bias"] = widened(wanted["kernel"], wanted["bias"], about["room"])
    if batch is not None:
        if n > batch:
            raise BundleError(f"{bundle.path(CHECK)} has {n} examples, but {program} takes {batch} at most")
        for name in {"x", "raw", "phi", "labels", "targets", "weights"} & set(wanted):
            wanted[name] = (filled_up if name in ("x", "raw", "phi") else with_zeros)(wanted[name], batch)
    return wanted


def _compare(file, signature, output, found, expected, bounds, least):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape or not found.size or not np.isfinite(found).all():
        return Comparison(file, signature, output, np.inf, np.inf, False)
    difference = found - expected
    largest = max(float(np.abs(expected).max()), least)
    relative = float(np.abs(difference).max()) / largest
    l2 = float(np.linalg.norm(difference)) / max(float(np.linalg.norm(expected)), least)
    if file in bounds.get("files", {}):
        return Comparison(file, signature, output, relative, l2, l2 <= bounds["files"][file])
    # The gradient of theta is less exact if pooling windows overlap, and what rounding decides more of (see check.py).
    own = bounds.get("outputs", {}).get(f"{signature}.{output}", 0.0)
    bound = max(1e-5, own) if output != "dtheta" else bounds["max_relative"]
    ok = (bound is None or relative <= bound) and l2 <= max(bounds["l2_relative"], own)
    return Comparison(file, signature, output, relative, l2, ok)


def verify_with(python: str, folder) -> dict:
    """`Verification.told` of a bundle that another Python has verified.

    Args:
        python: path of the Python, which has ai-edge-litert and NumPy.
        folder: the bundle's folder.

    Raises:
        BundleError: the Python cannot be started, lacks a package, or finds that the bundle is unusable.
    """
    done = run_with(python, "verification", str(folder))
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
        if "error" not in found:
            return {name: found[name] for name in ("ok", "runtime", "worst")}
    except (IndexError, KeyError, TypeError, ValueError) as error:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        why = f"{python} could not verify the bundle (exit code {done.returncode}): {last[0]}"
        raise BundleError(why) from error
    raise BundleError(found["error"])


def main(arguments=None) -> int:
    """Verifies a bundle and prints JSON. Returns 0 if all is well, 1 if numbers differ, 2 if the bundle is unusable."""
    parser = argparse.ArgumentParser(prog="python -m tflite_export.device.verification")
    parser.add_argument("bundle")
    folder = parser.parse_args(arguments).bundle
    from tflite_export.device.bench import any_interpreter

    try:
        bundle = Bundle(folder)  # before TensorFlow is imported, which takes seconds, and may print
        found = verify(bundle, interpreter=any_interpreter())
    except BundleError as error:
        print(json.dumps({"ok": False, "error": str(error)}))
        return 2
    print(json.dumps(found.told()))
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
