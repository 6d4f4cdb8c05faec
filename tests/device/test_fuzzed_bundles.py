"""Bundles whose manifest was changed and hashed again: an error that names the entry, or it works.

`pytest tests/device/test_fuzzed_bundles.py --fuzz 10000` takes another number of cases.
"""

import hashlib
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from helpers.fuzzing import changed, pytest_generate_tests, quick, refused_or_fine, set_entry  # noqa: F401
from tflite_export import Bundle, BundleError, DeviceClient, verify
from tflite_export.device.bench import wire
from tflite_export.device.runtime import manifest_hash


@pytest.fixture
def copy(bundle, tmp_path):
    return shutil.copytree(bundle.folder, tmp_path / "bundle")


def hashed_again(folder, manifest):
    manifest["hash"] = manifest_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.slow
def test_manifests_that_were_hashed_again(copy, cases):
    text = (copy / "manifest.json").read_text()

    @quick(cases * 3 // 10)
    @given(changed(text))
    def one(case):
        manifest, ways = case
        hashed_again(copy, manifest)

        def use():
            opened = Bundle(copy)
            wire(opened)
            client = DeviceClient(opened, interpreter=tf.lite.Interpreter)
            client.settings["tau"] + client.settings["beta"]
            verify(opened, interpreter=tf.lite.Interpreter)

        refused_or_fine(use, copy, [*ways, ("JSON",)], "bundle")

    one()


WRONG_ENTRIES = [
    (("model", "example_shape"), [0, 8, 1], r"model.example_shape\[0\] must be an integer from 1 to \d+, found 0"),
    (("model", "num_features"), "200", "model.num_features must be an integer from 1 to .*, found '200'"),
    (("model", "num_classes"), 4, "files.head.bin.bytes is .*, but the sizes in model take"),
    (("model", "num_backbone_weights"), 5, "files.theta.bin.bytes is 52000, but the sizes in model take 20"),
    (("model", "theta", 1, "offset"), 5, r"model.theta\[1\].offset is 5, but the weights before take 12800 numbers"),
    (("model",), None, "model is missing"),
    (("training", "tau"), 0, "training.tau must be an integer from 1 to .*, found 0"),
    (("training", "safeguard"), 1, "training.safeguard must be true or false, found 1"),
    (("labels", "names"), ["a"], "labels has 1 names and 3 class_ids for 3 classes"),
    (("labels", "names"), ["a", "", "b"], r"labels.names\[1\] must be a text of one or more characters, found ''"),
    (("labels", "names"), ["a", "b", "b"], "labels.names must differ, found 'b' twice"),
    (("signatures",), {"f": {"inputs": {"x": "object"}, "outputs": {}}}, "signatures.f.inputs.x must be a dtype and a"),
    (("files", "../x"), {"bytes": 1, "sha256": "0" * 64}, "a name in files must be a plain name, found '../x'"),
    (("files", "check.npz", "bytes"), -1, "files.check.npz.bytes must be an integer from 0 to"),
    (("check", "l2_relative"), True, "check.l2_relative must be a number from 0 to .*, found True"),
]


@pytest.mark.parametrize("way, to, said", WRONG_ENTRIES, ids=lambda value: str(value)[:30])
def test_an_entry_that_was_changed_and_hashed_again_is_named(copy, way, to, said):
    manifest = json.loads((copy / "manifest.json").read_text())
    set_entry(manifest, way, to)
    hashed_again(copy, manifest)
    with pytest.raises(BundleError, match=f"manifest.json was changed: {said}"):
        Bundle(copy)


WRONG_ARRAYS = [
    ({"x": np.zeros((2, 8, 8, 1), np.float32)}, r"check.npz: x must be float32 \[12, 8, 8, 1\], found float32 \[2, 8"),
    ({"labels": np.full(12, 3, np.int32)}, "check.npz: labels must be 1 to 32 class ids below 3"),
    ({"labels": np.int32(1)}, r"check.npz: x must be float32 \[1, 8, 8, 1\], found float32 \[12, 8, 8, 1\]"),
    ({"steps": np.array(["5"])}, r"check.npz: steps must be int32 \[\], found <U1 \[1\]"),
    ({"predict.probabilities": np.array(["a"])}, "check.npz: predict.probabilities must be numbers"),
    ({"x": np.array([len], object)}, r"check.npz cannot be read: 'x.npy' promises object \[1\]"),
]


@pytest.mark.parametrize("arrays, said", WRONG_ARRAYS, ids=lambda value: str(value)[:30])
def test_numbers_to_compare_with_that_were_changed_and_hashed_again(copy, arrays, said):
    path = copy / "check.npz"
    with np.load(path) as file:
        np.savez(path, **dict(file) | arrays)
    manifest = json.loads((copy / "manifest.json").read_text())
    content = path.read_bytes()
    manifest["files"]["check.npz"] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    hashed_again(copy, manifest)
    with pytest.raises(BundleError, match=said):
        verify(copy, interpreter=tf.lite.Interpreter)


def test_numbers_of_another_shape_do_not_agree(copy):
    path = copy / "check.npz"
    with np.load(path) as file:
        values = dict(file) | {"predict.probabilities": np.zeros((2, 2, 2), np.float32), "round.loss": np.zeros(0)}
    np.savez(path, **values)
    found = verify(Bundle(copy, check=False), interpreter=tf.lite.Interpreter)
    differ = {f"{c.signature}.{c.output}" for c in found.comparisons if not c.ok}
    assert differ == {"predict.probabilities", "round.loss"}
