"""The manifest of a federation: one that was changed and hashed again is refused by the name of the entry."""

import hashlib
import json

import numpy as np
import pytest

from helpers.fuzzing import set_entry
from tfpfl.data import Federation, FederationError, Source
from tfpfl.data.manifest import manifest_hash


@pytest.fixture
def copy(tmp_path):
    """The folder of a federation of four clients, with 400 examples of shape [3] and five classes."""
    n = np.arange(400)
    x = np.stack([n % 256, n // 256, n % 5], 1).astype(np.uint8)
    return Federation.build(Source.from_arrays(x, n % 5), clients=4, out=tmp_path / "f").path


def hashed_again(folder, *way, to):
    """Changes an entry of a manifest, and writes the hash that it has then."""
    manifest = json.loads((folder / "manifest.json").read_text())
    set_entry(manifest, way, to)
    manifest["hash"] = manifest_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


WRONG_ENTRIES = [
    (("example_shape",), [0, 4], r"example_shape\[0\] is wrong: 0 is less than the minimum of 1"),
    (("example_shape",), [4.0], r"example_shape\[0\] is wrong: 4.0 is not of type 'integer'"),
    (("example_shape",), [5], r"files.x.raw.bytes is 1200, but num_examples 400, example_shape \[5\], .* take 2000"),
    (("example_shape",), [2**31 - 1] * 16, r"files.x.raw.bytes is 1200, but"),
    (("example_shape",), None, "'example_shape' is a required property"),
    (
        ("dtype",),
        "object",
        r"dtype is wrong: 'object' is not one of \['uint8', 'int32', 'float16', 'float32', 'float64'\]",
    ),
    (("num_examples",), True, "num_examples is wrong: True is not of type 'integer'"),
    (("num_examples",), 2**40, "num_examples is wrong: 1099511627776 is greater than the maximum"),
    (("class_names",), 3, "class_names is wrong: 3 is not of type 'array'"),
    (("class_names",), ["a"], r"clients.classes\[0\] must be .* ascending, from 0 to 0 as in class_names, found"),
    (("preprocessing",), {"scale": "1", "shift": 0}, "preprocessing.scale is wrong: '1' is not of type 'number'"),
    (("preprocessing", "scale"), None, "preprocessing is wrong: 'scale' is a required property"),
    (("source",), [], r"source is wrong: \[\] is not of type 'object'"),
    (("partitioner", "arguments"), {"a": json.loads("[" * 400 + "]" * 400)}, "it has more than 30 levels"),
    (("partitioner", "name"), None, "partitioner is wrong: 'name' is a required property"),
    (("seed",), -1, "seed is wrong: -1 is less than the minimum of 0"),
    (("validation",), 1.0, "validation is wrong: 1.0 is greater than or equal to the maximum of 1"),
    (("files",), {}, "files is wrong: 'x.raw' is a required property"),
    (("files", "x.raw", "sha256"), "../x", r"files\['x.raw'\].sha256 is wrong: '../x' does not match"),
    (("files", "index.raw", "bytes"), 40, "files.index.raw.bytes is 40, but .* the 4 items of clients.train take 160"),
    (("clients", "train"), [], "clients.train is wrong: there are no clients"),
    (("clients", "train", 0), "2", r"clients.train\[0\] must be a count from 1 on, found '2'"),
    (("clients", "test"), [1], "clients.test has 1 items, clients.train 4"),
    (("clients", "validation", 1), 10**400, r"clients.validation\[1\] must be a count from 0 on, found"),
    (("clients", "train", 1), 1, "num_examples is 400, but clients.train, .validation and .test add up to"),
    (("clients", "names"), ["a", "b", "c", 4], r"clients.names\[3\] must be a text, found 4"),
    (("clients", "classes", 2), [3, 1], r"clients.classes\[2\] must be a list of class ids, ascending, from 0 to 4"),
]


@pytest.mark.parametrize("way, to, said", WRONG_ENTRIES, ids=lambda value: str(value)[:30])
def test_a_manifest_that_was_changed_and_hashed_again_is_refused_by_the_name_of_the_entry(copy, way, to, said):
    hashed_again(copy, *way, to=to)
    with pytest.raises(FederationError, match=said) as refused:
        Federation.load(copy)
    assert len(str(refused.value)) < 600 and "\n" not in str(refused.value)


@pytest.fixture
def several(tmp_path):
    """The folder of a federation whose examples are two arrays, of which the first has tokens."""
    x = {"mask": np.ones((8, 2), np.float32), "a": np.arange(16).reshape(8, 2)}
    return Federation.from_clients([(x, np.arange(8) % 2)] * 2, out=tmp_path / "f").path


@pytest.mark.parametrize("entry, value", [("scale", 0.5), ("shift", 1.0)])
def test_tokens_that_a_manifest_scales_are_refused(several, entry, value):
    """They are whole numbers for a model: TensorFlow had failed when it read them."""
    hashed_again(several, "inputs", "arrays", 0, entry, to=value)
    with pytest.raises(FederationError, match=r"inputs.arrays\[0\] is int32, .*: scale must be 1 and shift 0, found"):
        Federation.load(several)


def test_columns_of_examples_that_are_no_table_are_not_described(several):
    hashed_again(several, "source", "options", to={"features": ["a", "b", "c", "d"]})
    assert "features" not in Federation.load(several).describe()


@pytest.mark.parametrize(
    "name, said",
    [
        ("index.raw", "f/index.raw was changed: client 0 has .*, by clients in manifest.json"),
        ("labels.raw", "labels.raw was changed: the label of example 0 is no class of its client"),
        ("labels_local.raw", "labels_local.raw was changed: the label of example 0 is no class of its client"),
    ],
)
def test_files_that_were_changed_and_hashed_again_are_refused(copy, name, said):
    content = bytearray((copy / name).read_bytes())
    content[1] ^= 1  # adds 256 to the first number
    (copy / name).write_bytes(content)
    hashed_again(copy, "files", name, "sha256", to=hashlib.sha256(content).hexdigest())
    with pytest.raises(FederationError, match=said):
        Federation.load(copy)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' + "1" * 5000 + "}"])
def test_a_manifest_that_python_cannot_read_is_refused(copy, text):
    (copy / "manifest.json").write_text(text)
    with pytest.raises(FederationError, match="its manifest.json cannot be read"):
        Federation.load(copy)


def test_examples_without_numbers_are_refused(tmp_path):
    """TensorFlow ends the process if it maps a file of no bytes."""
    with pytest.raises(ValueError, match=r"examples have no features: the array has shape \(8, 0\)"):
        Federation.from_clients([(np.zeros((8, 0), np.float32), np.arange(8) % 2)] * 2, out=tmp_path / "f")
