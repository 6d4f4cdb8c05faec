"""Examples of several arrays: stored one file for each, and read as the dict or the tuple that they were."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation, FederationError
from tfpfl.data.layout import Layout, packed, parts_of, shape_text
from tfpfl.data.manifest import manifest_hash

rng = np.random.default_rng(0)
SIZES = (14, 9, 11)
DTYPES = {"age": "float32", "image": "uint8", "tokens": "int32"}


def client(n):
    return {
        "tokens": rng.integers(0, 50, (n, 5)),
        "image": rng.integers(0, 256, (n, 3, 2)).astype(np.uint8),
        "age": rng.normal(size=n),
    }, np.arange(n) % 2


CLIENTS = {f"c{i}": client(n) for i, n in enumerate(SIZES)}
AS_TUPLES = {name: (tuple(x[k] for k in ("tokens", "image", "age")), y) for name, (x, y) in CLIENTS.items()}


def test_a_dict_of_arrays_comes_back_however_it_is_read(tmp_path):
    made = Federation.from_clients(CLIENTS, test_fraction=0, validation=0.2, out=tmp_path / "f")
    assert made.example_shape == {"age": (1,), "image": (3, 2), "tokens": (5,)} and made.layout.dtype == DTYPES
    assert made.manifest["format"] == 4 and not {"dtype", "example_shape", "preprocessing"} & set(made.manifest)
    assert sorted(p.name for p in made.path.glob("x*")) == ["x.0.raw", "x.1.raw", "x.2.raw"]
    assert made.describe()["example"] == "age: 1 float32; image: 3 x 2 uint8; tokens: 5 int32"
    for i, (x, _) in enumerate(CLIENTS.values()):
        place = {row.tobytes(): k for k, row in enumerate(x["image"])}
        for part in ("train", "validation", "test"):
            raw, y = made.raw(i, part)
            rows = [place[row.tobytes()] for row in raw["image"]]
            assert list(raw) == sorted(x) and (y == np.array(rows, int) % 2).all()
            np.testing.assert_array_equal(raw["tokens"], x["tokens"][rows])
            np.testing.assert_array_equal(raw["age"], x["age"][rows, None].astype(np.float32))
            arrays = made.arrays(i, part)[0]
            assert {k: v.dtype.name for k, v in arrays.items()} == DTYPES | {"image": "float32"}
            np.testing.assert_array_equal(arrays["tokens"], raw["tokens"])  # whole numbers stay as they are
            np.testing.assert_allclose(arrays["image"], x["image"][rows] / 255, rtol=1e-6)
            read = made.reader(part)(i)[0]
            for name in x:
                np.testing.assert_array_equal(read[name], arrays[name])
    x, _, sizes = made.cohort_reader("train", dtype=tf.float64)(tf.constant([2, 0]))
    assert {k: v.dtype.name for k, v in x.items()} == {"age": "float64", "image": "float64", "tokens": "int32"}
    np.testing.assert_array_equal(x["tokens"], np.concatenate([made.raw(i)[0]["tokens"] for i in (2, 0)]))
    assert Federation.load(made.path).hash == made.hash and sizes.numpy().sum() == len(x["age"])


def test_a_tuple_of_arrays_is_the_same_in_its_order(tmp_path):
    made = Federation.from_clients(AS_TUPLES, out=tmp_path / "f")
    of_dict = Federation.from_clients(CLIENTS, out=tmp_path / "g")
    assert made.example_shape == ((5,), (3, 2), (1,)) and made.layout.names == ["0", "1", "2"]
    for i in range(3):
        tokens, image, age = made.arrays(i)[0]
        wanted = of_dict.arrays(i)[0]
        for ours, name in ((tokens, "tokens"), (image, "image"), (age, "age")):
            np.testing.assert_array_equal(ours, wanted[name])
    with_scale = Federation.from_clients(AS_TUPLES, scale=1.0, shift=-3.0, out=tmp_path / "h")
    np.testing.assert_array_equal(with_scale.arrays(0)[0][1], with_scale.raw(0)[0][1] - np.float32(3))
    np.testing.assert_array_equal(with_scale.arrays(0)[0][2], made.arrays(0)[0][2])  # only pixels are scaled


def test_targets_and_parts_that_are_given(tmp_path):
    x, y = CLIENTS["c0"]
    none = {name: array[:0] for name, array in x.items()}
    parts = {"train": (x, y / 2), "test": ({k: v[:3] for k, v in x.items()}, y[:3] / 2), "validation": (none, y[:0])}
    made = Federation.from_clients({"a": parts, "b": (x, y / 2)}, targets="real", out=tmp_path / "f")
    assert made.num_examples("test").tolist() == [3, 3] and made.num_examples("validation").tolist() == [0, 1]
    assert made.arrays(0, "test")[1].tolist() == (y[:3, None] / 2).tolist()
    assert {p.name for p in made.path.glob("*.raw")} == {"x.0.raw", "x.1.raw", "x.2.raw", "targets.raw", "index.raw"}


def test_rows_of_a_tuple_are_one_array_as_before(tmp_path):
    x, y = tuple(np.arange(12.0).reshape(4, 3)), [0, 1, 0, 1]
    made = Federation.from_clients([(x, y)], test_fraction=0, validation=0, out=tmp_path / "f")
    assert made.example_shape == (3,) and made.manifest["format"] == 1


X, Y = CLIENTS["c1"]


@pytest.mark.parametrize(
    "x, message",
    [
        ({**X, "age": X["age"][:4]}, "client 'b': train examples: the arrays differ in number of rows: {'age': 4, 'im"),
        ({k: v for k, v in X.items() if k != "age"}, r"those of client 'a' are {'age': .* client 'b' {'image'"),
        ({**X, "tokens": X["tokens"][:, :4]}, r"'tokens': \(4,\)}. Sequences of different lengths are made equal"),
        ({**X, "age": {"in": X["age"]}}, "client 'b': train examples: 'age' is itself a dict. A dict or a tuple holds"),
        ({**X, "age": X["age"] * np.nan}, "client 'b': train, 'age': examples must be finite: 9 are not, first"),
        ({1: X["age"]}, "the arrays of a dict are named by texts, found 1"),
        ({}, "examples are a dict without arrays"),
        (X["age"], "all examples must have the same arrays"),
        ({**X, "image": X["image"] / 255}, r"array 'image' of the .* found uint8 \(train of client 'a'\) and float32"),
    ],
)  # fmt: skip
def test_what_several_arrays_cannot_be(tmp_path, x, message):
    with pytest.raises(InvalidArgument, match=message):
        Federation.from_clients({"a": CLIENTS["c0"], "b": (x, Y)}, out=tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_a_scale_needs_pixels(tmp_path):
    with pytest.raises(InvalidArgument, match="scale and shift are for uint8 arrays, .* and no array is uint8"):
        Federation.from_clients([({"age": X["age"]}, Y)], scale=2.0, out=tmp_path / "f")


@pytest.mark.parametrize(
    "way, to, message",
    [
        (("kind",), "list", r"inputs.kind is wrong: 'list' is not one of \['dict', 'tuple'\]"),
        (("arrays", 0, "name"), "zoo", r"inputs.arrays must be in the order of their names, found \['zoo', 'image'"),
        (("arrays", 1, "name"), "age", "inputs.arrays must be in the order of their names"),
        (("arrays", 0, "dtype"), "int64", r"inputs.arrays\[0\].dtype is wrong"),
        (("arrays", 2, "shape"), [6], r"files.x.2.raw.bytes is \d+, but num_examples 34"),
        (("arrays",), [], "inputs.arrays is wrong"),
    ],
)
def test_a_manifest_that_was_changed_and_hashed_again_is_refused(tmp_path, way, to, message):
    folder = Federation.from_clients(CLIENTS, out=tmp_path / "f").path
    manifest = json.loads((folder / "manifest.json").read_text())
    inner = manifest["inputs"]
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = to
    manifest["hash"] = manifest_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FederationError, match=message):
        Federation.load(folder)


def test_a_changed_array_is_found(tmp_path):
    folder = Federation.from_clients(CLIENTS, out=tmp_path / "f").path
    good = (folder / "x.1.raw").read_bytes()
    (folder / "x.1.raw").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(FederationError, match="x.1.raw was changed: its sha256"):
        Federation.load(folder)


class Clients:
    """A ClientData of TFF, as far as it is used here."""

    client_ids = ["a"]

    def create_tf_dataset_for_client(self, client):
        return tf.data.Dataset.from_tensor_slices((X, Y))


def test_the_datasets_of_a_client_data_may_have_several_arrays(tmp_path):
    made = Federation.from_clients(Clients(), test_fraction=0, validation=0, out=tmp_path / "f")
    np.testing.assert_array_equal(made.raw(0)[0]["tokens"], X["tokens"])


def test_shapes_and_their_parts():
    shape = {"b": (2,), "a": (3, 4)}
    assert packed(parts_of({"b": 1, "a": 2}, shape), shape) == {"a": 2, "b": 1}
    assert parts_of(7, (3,)) == [7] and packed([7], (3,)) == 7 and shape_text(((1,), (2,))) == "((1,), (2,))"
    only = {"preprocessing": {"scale": 1.0, "shift": 0.0}, "example_shape": [3], "dtype": "int32"}
    layout = Layout.of_manifest(only)
    assert layout.names == [""] and not layout.whole(layout.arrays[0])  # a single array is read as floats, as before


def tokens(n):
    return (rng.integers(0, 50, (n, 5)), np.arange(5) < rng.integers(1, 6, (n, 1))), np.arange(n) % 2


def test_a_tuple_of_as_many_arrays_as_examples_is_what_the_others_are(tmp_path):
    given = {"train": tokens(10), "test": tokens(2)}
    made = Federation.from_clients({"a": given, "b": tokens(2)}, validation=0, test_fraction=0, out=tmp_path / "f")
    assert made.example_shape == ((5,), (5,)) and made.num_examples("train").tolist() == [10, 2]
    for raw, wanted in zip(made.raw(0, "test")[0] + made.raw(1)[0], given["test"][0], strict=False):
        np.testing.assert_array_equal(raw, wanted)
    unequal = (np.ones((2, 5)), np.ones((2, 3))), [0, 1]  # no array has rows of two lengths
    only = Federation.from_clients([unequal], validation=0, test_fraction=0, out=tmp_path / "unequal")
    assert only.example_shape == ((5,), (3,))
    rows = tuple(np.arange(6.0).reshape(2, 3)), [0, 1]
    one = Federation.from_clients([(np.ones((4, 3)), [0, 1] * 2), rows], validation=0, out=tmp_path / "rows")
    assert one.example_shape == (3,)


def test_where_every_tuple_could_be_rows_or_arrays_a_dict_is_asked_for(tmp_path):
    with pytest.raises(InvalidArgument, match="a tuple of 2 arrays of 2 rows: .* Give several arrays as a dict"):
        Federation.from_clients([tokens(2), tokens(2)], validation=0, test_fraction=0, out=tmp_path / "f")
