"""Federations whose examples have targets instead of classes: every way of making, reading and checking them."""

import hashlib
import json
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from helpers.marks import slow_but
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.cli import main
from tfpfl.data import Federation, FederationError, Source, Targets, synthetic_targets
from tfpfl.data.manifest import manifest_hash
from tfpfl.studies import plots

SORTS = ("real", "count", "binary")
X = np.arange(24, dtype=np.float32).reshape(12, 2)


def made(tmp_path, sort="real", **how):
    return Federation.from_clients(synthetic_targets(sort).clients, targets=sort, out=tmp_path / sort, **how)


@pytest.mark.parametrize("sort", slow_but(SORTS, "binary"))
def test_every_example_keeps_its_targets_however_it_is_read(tmp_path, sort):
    clients = synthetic_targets(sort, 4, [30, 20, 41, 9]).clients
    federation = Federation.from_clients(clients, targets=sort, out=tmp_path / "f")
    for i, (x, y) in enumerate(clients.values()):
        of = {row.tobytes(): target for row, target in zip(x, y, strict=True)}
        assert sum(federation.num_examples(split)[i] for split in ("train", "validation", "test")) == len(x)
        for split in ("train", "validation", "test"):
            for labels in ("local", "global"):
                found, targets = federation.arrays(i, split, labels)
                assert targets.dtype == np.float32 and targets.shape == (len(found), 2)
                assert all(np.array_equal(of[row.tobytes()], t) for row, t in zip(found, targets, strict=True))
                np.testing.assert_array_equal(federation.raw(i, split, labels)[1], targets)
                np.testing.assert_array_equal(federation.reader(split, labels)(i)[1], targets)
    _, y, sizes = federation.cohort_reader("train", dtype=tf.float64)(tf.constant([2, 0]))
    assert y.dtype == tf.float64 and sizes.numpy().tolist() == federation.num_examples()[[2, 0]].tolist()
    np.testing.assert_array_equal(y, np.concatenate([federation.raw(i)[1] for i in (2, 0)]).astype(np.float64))


def test_what_a_federation_with_targets_says_of_itself(tmp_path):
    federation = made(tmp_path)
    assert federation.targets == Targets("real", 2, ("y0", "y1")) and federation.manifest["format"] == 3
    assert federation.manifest["targets"] == {"sort": "real", "width": 2, "names": None}
    assert "class_names" not in federation.manifest and sorted(federation.manifest["files"])[-1] == "x.raw"
    assert {path.name for path in federation.path.iterdir()} == {"manifest.json", "x.raw", "targets.raw", "index.raw"}
    assert federation.num_labels == 2 and federation.class_names == ["y0", "y1"]
    assert federation.num_classes.tolist() == [2] * 6 and federation.classes(3).tolist() == [0, 1]
    told = federation.describe()
    assert told["targets"] == "real, 2 wide" and not any("classes" in name for name in told)
    for labels in ("local", "global"):
        population = federation.population(labels=labels)
        assert population.num_classes.tolist() == [2] * 6 and population.shared_labels() == 2
    again = Federation.load(federation.path)
    assert again.hash == federation.hash and again.targets == federation.targets
    named = made(tmp_path, "count", class_names=["visits", "falls"])
    assert named.class_names == ["visits", "falls"] and named.describe()["targets"] == "count, 2 wide: visits, falls"
    with pytest.raises(InvalidArgument, match=r"targets have 2 outputs, but class_names has 1 names"):
        made(tmp_path, "binary", class_names=["only"])
    with pytest.raises(InvalidArgument, match="class_names has one name twice"):
        made(tmp_path, "binary", class_names=["a", "a"])
    with pytest.raises(InvalidArgument, match="compact_labels numbers classes, and targets are none"):
        made(tmp_path, "binary", compact_labels=True)


def test_a_class_federation_stays_as_it_was(tmp_path):
    """The hash is the one that the version before targets gave."""
    federation = Federation.from_clients([(X, np.arange(12) % 2), (X + 1, np.arange(12) % 3)], out=tmp_path / "f")
    assert federation.targets is None and federation.manifest["format"] == 1
    assert list(federation.manifest["files"]) == ["x.raw", "labels.raw", "labels_local.raw", "index.raw"]
    assert federation.hash == "20d267e5ff4aa0c797b2b4a7a9a7034056cc0eac3bac66d129c74c3840f54766"


def test_a_vector_of_targets_is_one_output(tmp_path):
    y = np.linspace(-1, 1, 12)
    federation = Federation.from_clients([(X, y), (X, y.tolist())], targets="real", out=tmp_path / "f")
    assert federation.targets == ("real", 1, ("y0",)) and federation.raw(0)[1].shape[1:] == (1,)


def test_the_cut_for_validation_gives_every_pattern_of_binary_targets_its_share(tmp_path):
    x = np.arange(200, dtype=np.float32)[:, None]
    y = np.zeros((200, 3))
    y[:100, 0] = y[50:150, 1] = 1
    federation = Federation.from_clients(
        [(x, y)], targets="binary", test_fraction=0, validation=0.2, out=tmp_path / "f"
    )
    held = federation.arrays(0, "validation")[0][:, 0]
    assert len(held) == 40 and np.histogram(held, [0, 50, 100, 150, 200])[0].tolist() == [10, 10, 10, 10]


def test_ones_are_counted_and_numbers_have_no_classes(tmp_path):
    binary = made(tmp_path, "binary")
    counts = binary.class_counts()
    assert counts.shape == (6, 2) and counts.dtype == np.int64
    assert counts.tolist() == [binary.raw(i)[1].sum(0).astype(int).tolist() for i in range(6)]
    assert plots.classes(binary).axes[0].get_ylabel() == "output"
    for sort in ("real", "count"):
        with pytest.raises(InvalidArgument, match=f"there are no classes to count: .* are {sort}, 2 wide"):
            made(tmp_path, sort).class_counts()


@pytest.mark.parametrize(
    "sort, wrong, message",
    [
        ("real", np.nan, r"client 'bob': train targets must be finite: 1 is not, the first is number 7 with nan. What"),
        ("real", 1e39, r"client 'bob': train targets are at most 1e\+15, because float32 overflows; found 1e\+39"),
        ("count", -1, r"client 'bob': train targets must be finite and not below 0: 1 is not, .* number 7 with -1\."),
        ("count", np.inf, "must be finite and not below 0: 1 is not, the first is number 7 with inf"),
        ("binary", 2, r"client 'bob': train targets must be 0 or 1: 1 is not, the first is number 7 with 2\. What to"),
        ("binary", np.nan, "must be 0 or 1: 1 is not, the first is number 7 with nan"),
    ],
)
def test_a_target_that_is_none_is_refused_with_client_and_example(tmp_path, sort, wrong, message):
    y = np.ones((12, 2))
    bad = y.copy()
    bad[7, 1] = wrong
    with pytest.raises(InvalidArgument, match=message):
        Federation.from_clients({"ann": (X, y), "bob": (X, bad)}, targets=sort, out=tmp_path / "f")


def test_the_smallest_integer_is_too_large_a_target(tmp_path):
    """It is what pandas makes of a missing date as int64, and has no absolute value as an int64."""
    with pytest.raises(InvalidArgument, match=r"targets are at most 1e\+15, .* found 9\.22e\+18"):
        Federation.from_clients([(X, np.full(12, -(2**63)))], targets="real", out=tmp_path / "f")
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("sort, wrong", [("real", np.nan), ("real", 1e39), ("count", -1), ("binary", 2)])
def test_a_target_of_a_source_made_by_hand_is_checked_too(tmp_path, sort, wrong):
    y = np.ones((12, 2))
    y[7, 1] = wrong
    source = Source("mine", "1", X, y, X[:4], y[:4], ["a", "b"], targets=sort)
    with pytest.raises(InvalidArgument, match=r"client \d: targets must be .*: 1 is not, the first is number \d"):
        Federation.build(source, "iid", clients=2, out=tmp_path / "f")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "y, message",
    [
        (np.ones((12, 3)), "targets must have one width: those of client 'ann' are 2 wide, those of client 'bob' 3"),
        (np.ones((12, 0)), r"'bob': train targets must be numbers \[N\] or \[N, D\], found float64 of shape \(12, 0\)"),
        (np.ones((12, 2, 2)), r"found float64 of shape \(12, 2, 2\)"),
        (np.array(["a", "b"] * 6), r"found <U1 of shape \(12,\). Names of classes are labels: give them without"),
        (np.ones((11, 2)), "client 'bob': train examples and labels differ in number: 12 and 11"),
    ],
)
def test_targets_of_another_shape_are_refused(tmp_path, y, message):
    with pytest.raises(InvalidArgument, match=message):
        Federation.from_clients({"ann": (X, np.ones((12, 2))), "bob": (X, y)}, targets="real", out=tmp_path / "f")


def test_an_unknown_sort_and_float_labels_without_targets(tmp_path):
    with pytest.raises(InvalidArgument, match="targets must be one of real, count, binary; found 'counts'"):
        Federation.from_clients([(X, np.ones(12))], targets="counts", out=tmp_path / "f")
    with pytest.raises(InvalidArgument, match="train labels must be integers, found float64; or names of classes"):
        Federation.from_clients([(X, np.ones(12))], out=tmp_path / "f")


def changed(folder, file=None, content=b"", **entries):
    """Changes a file or entries of targets in the manifest, and writes the hashes that they have then."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["targets"] |= entries
    if file:
        (folder / file).write_bytes(content)
        manifest["files"][file] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["hash"] = manifest_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"width": 3}, r"files.targets.raw.bytes is \d+, but num_examples 240"),
        ({"width": 0}, "targets.width is wrong: 0 is less than the minimum of 1"),
        ({"sort": "ordinal"}, r"targets.sort is wrong: 'ordinal' is not one of \['real', 'count', 'binary'\]"),
        ({"names": ["a"]}, "targets.names has 1 names, targets.width is 2"),
        ({"names": [1, 2]}, r"targets.names is wrong"),
    ],
)
def test_a_manifest_that_was_changed_and_hashed_again_is_refused(tmp_path, entries, message):
    folder = made(tmp_path).path
    changed(folder, **entries)
    with pytest.raises(FederationError, match=message):
        Federation.load(folder)


def test_files_that_were_changed_are_refused(tmp_path):
    federation = made(tmp_path, "count")
    values = np.fromfile(federation.path / "targets.raw", "<f4")
    values[5] = -1
    good = (federation.path / "targets.raw").read_bytes()
    (federation.path / "targets.raw").write_bytes(values.tobytes())
    with pytest.raises(FederationError, match="targets.raw was changed: its sha256"):
        Federation.load(federation.path)
    changed(federation.path, "targets.raw", values.tobytes())
    with pytest.raises(
        FederationError, match="targets.raw was changed: the targets of example 2 are not finite and not"
    ):
        Federation.load(federation.path)
    changed(federation.path, "targets.raw", good)
    index = np.fromfile(federation.path / "index.raw", "<i8")
    index[4] = 1
    changed(federation.path, "index.raw", index.tobytes())
    with pytest.raises(FederationError, match="index.raw was changed: client 0 has"):
        Federation.load(federation.path)
    (federation.path / "targets.raw").unlink()
    with pytest.raises(FederationError, match="is incomplete: targets.raw is missing"):
        Federation.load(federation.path)


def table(n=24):
    rng = np.random.default_rng(0)
    return {
        "who": ["ann", "bob", "cem"] * (n // 3),
        "dose": rng.normal(size=n).round(3),
        "age": rng.integers(20, 90, n),
        "falls": rng.poisson(2.0, n),
        "visits": rng.poisson(1.0, n),
    }


def test_a_table_with_several_columns_of_targets(tmp_path):
    rows = table()
    labels = ["falls", "visits"]
    federation = Federation.from_table(rows, client="who", label=labels, targets="count", out=tmp_path / "f")
    x = np.column_stack([rows["dose"], rows["age"]])
    y = np.column_stack([rows["falls"], rows["visits"]])
    arrays = {name: (x[i::3], y[i::3]) for i, name in enumerate(["ann", "bob", "cem"])}
    same = Federation.from_clients(arrays, targets="count", class_names=labels, out=tmp_path / "g")
    assert federation.class_names == labels and federation.manifest["source"]["options"]["label"] == labels
    for i in range(3):
        for ours, theirs in zip(federation.arrays(i), same.arrays(i), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    one = Federation.from_table(rows, client="who", label="dose", targets="real", out=tmp_path / "h")
    assert one.targets == ("real", 1, ("dose",)) and one.example_shape == (3,)


@pytest.mark.parametrize(
    "change, how, message",
    [
        ({}, {"label": ["falls", "visits"]}, "label must be a column of classes, found 'falls', 'visits'. Several"),
        ({}, {"label": [], "targets": "real"}, "label must be a column of classes, found none"),
        ({"falls": [-1] + [1] * 23}, {"label": "falls", "targets": "count"}, "'falls': targets .* is row 1 with -1"),
        ({"falls": [0.5] * 24}, {"label": "falls", "targets": "binary"}, "0 or 1: 24 are not, .* row 1 with 0.5"),
        ({"falls": ["a"] * 24}, {"label": "falls", "targets": "real"}, "'falls' is not numeric, row 1 has 'a': a targ"),
        ({"falls": [np.nan] * 24}, {"label": "falls", "targets": "real"}, "column 'falls' has 24 missing values"),
        ({"falls": [np.inf] * 24}, {"label": "falls", "targets": "real"}, "has inf in row 1: targets must be finite"),
        ({}, {"label": ["falls", "fals"], "targets": "real"}, "label: unknown column 'fals'; did you mean 'falls'"),
        ({}, {"label": ["falls", "who"], "targets": "real"}, "client, label and split must be different columns"),
    ],
)  # fmt: skip
def test_what_a_table_of_targets_cannot_be(tmp_path, change, how, message):
    with pytest.raises(InvalidArgument, match=message):
        Federation.from_table(table() | change, client="who", out=tmp_path / "f", **how)


def test_a_column_with_one_target_in_every_row_is_said(tmp_path):
    with pytest.warns(TfpflWarning, match="column 'falls' has the same target in every row, 1: there is nothing"):
        Federation.from_table(
            table() | {"falls": [1] * 24}, client="who", label="falls", targets="count", out=tmp_path / "f"
        )


def test_targets_that_float32_rounds_to_few_numbers_are_said(tmp_path):
    """Times in seconds since 1970 became multiples of 128. Large targets that lie far apart lose little."""
    hours = np.linspace(0, 3600, 12)
    said = "targets near 2e.09 are stored as float32, .* rounded to multiples of 128: .*Subtract one number"
    for place, y in enumerate([1.7e9 + hours, (1.7e9 + hours).astype(np.int64), np.stack([hours, 1.7e9 + hours], 1)]):
        with pytest.warns(TfpflWarning, match=said):
            Federation.from_clients([(X, y)], targets="real", out=tmp_path / f"clients {place}")
    with pytest.warns(TfpflWarning) as told:
        at = table() | {"at": 200 * np.arange(24) + 1_700_000_000}
        Federation.from_table(at, client="who", label="at", targets="real", features=["falls"], out=tmp_path / "table")
    assert len(told) == 2 and re.search(said, str(told[0].message)) and "targets are large" in str(told[1].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "targets are large numbers", TfpflWarning)
        for place, y in enumerate([hours * 1e9 + 0.3, np.full(12, 0.1), hours - 2000]):
            Federation.from_clients([(X, y)], targets="real", out=tmp_path / f"fine {place}")


def test_large_targets_are_said(tmp_path):
    """A house's price in dollars sends the backbone's first step far away. A logarithm is linked to counts."""
    y = np.stack([np.linspace(2e5, 4e5, 12), np.linspace(-99, 99, 12)], 1)
    told = r"targets are large numbers, with their root mean square: price \(3.06e\+05\). The gradient"
    with pytest.warns(TfpflWarning, match=told):
        Federation.from_clients([(X, y)], targets="real", class_names=["price", "age"], out=tmp_path / "f")
    for place, even in enumerate([2e6 + 5 * np.arange(12), np.full(12, 5000)]):
        with pytest.warns(TfpflWarning, match="targets are large numbers"):
            Federation.from_clients([(X, even)], targets="real", out=tmp_path / f"even {place}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Federation.from_clients([(X, y[:, :1])], targets="count", out=tmp_path / "counts")


def test_targets_at_the_command_line(tmp_path):
    rows, file = table(), tmp_path / "t.csv"
    file.write_text("\n".join([",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]))
    args = ["partition", "--from", file, "--client", "who", "--label", "falls", "--label", "visits"]
    args = list(map(str, [*args, tmp_path / "f"]))
    done = CliRunner().invoke(main, [*args, "--targets", "count"], catch_exceptions=False)
    assert done.exit_code == 0 and "targets: count, 2 wide: falls, visits" in done.output, done.output
    assert not (tmp_path / "f-classes.png").exists() and f"Written to {tmp_path / 'f'}\n" in done.output
    same = Federation.from_table(
        rows, client="who", label=["falls", "visits"], targets="count", name="t", out=tmp_path / "g"
    )
    assert Federation.load(tmp_path / "f").hash == same.hash
    refused = CliRunner().invoke(main, ["partition", "--targets", "real", str(tmp_path / "h")])
    assert refused.exit_code == 2 and "--targets says what a column of a table is: give the table" in refused.output


def test_the_planted_truth_of_synthetic_targets():
    for sort in SORTS:
        planted, again = (synthetic_targets(sort, 3, 4000, seed=5) for _ in range(2))
        assert all(
            np.array_equal(a, b) for a, b in zip(planted.clients["client 1"], again.clients["client 1"], strict=True)
        )
        assert not np.array_equal(planted.heads[0][0], planted.heads[1][0])
        for (x, y), z, (kernel, bias) in zip(planted.clients.values(), planted.outputs, planted.heads, strict=True):
            assert x.shape == (4000, 8) and y.shape == (4000, 2) and x.dtype == y.dtype == np.float32
            np.testing.assert_allclose(np.tanh(x.astype(float) @ planted.features) @ kernel + bias, z, rtol=1e-12)
            mean = {"real": z, "count": np.exp(z), "binary": 1 / (1 + np.exp(-z))}[sort]
            spread = {"real": 0.01 + 0 * z, "count": mean, "binary": mean * (1 - mean)}[sort]
            error = (y - mean).mean(0) / np.sqrt(spread.mean(0) / len(y))
            assert (np.abs(error) < 4).all() and np.allclose(((y - mean) ** 2).mean(0), spread.mean(0), rtol=0.2)
    with pytest.raises(InvalidArgument, match="num_examples has 2 numbers for 3 clients"):
        synthetic_targets("real", 3, [4, 5])


def test_nothing_is_said_of_targets_as_they_should_be(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sort in SORTS:
            made(tmp_path, sort)
    assert Source.from_arrays(X, np.arange(12) % 2).y_train.dtype == np.int32
