"""Bundles from strangers: the reader in C accepts and refuses the same as the one in Python, in the same words."""

import json
import os
import re
import shutil
import subprocess
import sys
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given

from helpers.fuzzing import changed, pytest_generate_tests, quick, set_entry  # noqa: F401
from helpers.hand_made import described, manifest_of, write_files, write_manifest
from helpers.native import CORE, NativeError, build
from tflite_export.device import manifest as rules
from tflite_export.device.errors import BundleError
from tflite_export.device.runtime import Bundle


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "bundle"
    write_files(out)
    write_manifest(out, manifest_of(out))
    return out


def said_by_python(folder):
    try:
        return Bundle(folder) and None
    except BundleError as error:
        return str(error)


def said_by_c(native, folder):
    try:
        return native.check_bundle(folder) and None
    except NativeError as error:
        assert error.kind == "BundleError", error
        return str(error)


def assert_the_same(native, folder):
    """Both accept, or both refuse in the same words; but for why text is no JSON, and Python's escapes."""
    expected, found = said_by_python(folder), said_by_c(native, folder)
    assert (expected is None) == (found is None), (expected, found)
    if expected is None:
        return
    assert "\n" not in found
    cut = re.match(".*cannot be read", expected)
    if cut or not (expected.isascii() and expected.isprintable()) or re.search(r"\\[uUx]", expected):
        expected = cut[0] if cut else re.match("[ -~]*", expected)[0].rpartition("found ")[0]
        assert found.startswith(expected), (found, expected)
    else:
        assert found == expected[:1020] or len(expected) > 1020


def test_a_right_bundle(native, folder):
    model = native.check_bundle(folder)
    assert list(model.example_shape)[: model.dimensions] == [3] and model.example_numbers == 3
    assert (model.num_features, model.num_classes, model.num_backbone_weights, model.batch) == (2, 2, 6, 32)
    assert (model.tau, model.beta, model.head_rate, model.safeguard, model.rounds) == (5, 0.1, 0.1, 1, 1)
    assert said_by_python(folder) is None


NUMBERS = [0.1, -0.1, 1e-5, 1e-4, 123456.75, 1e15, 1e16, 1e17, 1e22, 1e23, 5e-324, 1.7976931348623157e308, 2.0**-44]
NUMBERS += [2.0**n for n in range(-1074, 1024, 7)] + [
    9007199254740993.0,
    float("nan"),
    float("inf"),
    -float("inf"),
    -0.0,
]


def test_numbers_have_pythons_digits(native, folder):
    """The hash of a manifest is that of its text as Python writes it: one other digit, and it would not agree."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2**64, 3000, dtype=np.uint64).view(np.float64)
    powers = [x for n in range(-1070, 1020) for x in (2.0**n, float(np.nextafter(2.0**n, 0)))]
    decimals = [round(float(x), i % 12) for i, x in enumerate(rng.uniform(-1e3, 1e3, 500))]
    more = [*NUMBERS, *powers, *decimals, *map(float, drawn[np.isfinite(drawn)]), 0, -5, 2**64, -(2**80), 10**400]
    write_manifest(folder, manifest_of(folder) | {"made_with": more})
    assert said_by_python(folder) is None and said_by_c(native, folder) is None


def test_texts_are_escaped_as_python_does(native, folder):
    texts = {chr(c): chr(c) * 2 for c in [*range(0, 0x300), 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]}
    texts |= {"\ud800": "a\udc00", "\udfff\ud800": "", "": "\\/\"'", "b": "\b\f\n\r\t"}
    for options in ({}, {"indent": 1}):
        write_manifest(folder, manifest_of(folder) | {"made_with": texts}, **options)
        assert said_by_python(folder) is None and said_by_c(native, folder) is None


def test_names_that_come_again_and_other_liberties(native, folder):
    text = (folder / "manifest.json").read_text()
    for changed_text in (
        text.replace('"tau": 5', '"tau": 0, "tau": 7, "tau": 5'),
        text.replace('"tau": 5', '"tau": 5, "tau": 6'),
        text.replace('"format": 1', '"format": 1.0'),
        text.replace('"format": 1', '"format": true'),
        text.replace('"format": 1', '"format": "2"'),
        text.replace('"tau": 5', '"tau": 5 , "t\\u0061u" :\n\t5'),
        text.replace('"tau": 5', '"tau": 05'),
        text.replace('"tau": 5', '"tau": +5'),
        text.replace('"tau": 5', '"tau": 5.'),
        text.replace('"tau": 5', '"tau": 5e'),
        text.replace("}", ",}"),
        text.replace("[", "[,"),
        text + " x",
        text + " \n",
        "\ufeff" + text,
        text.replace("uint8", "uint8\n"),
        text.replace("uint8", "\\x"),
        text.replace("uint8", "\\u12"),
        text.replace("true", "True"),
        text.replace('"hash"', '"hush"'),
        "",
        "{}",
        "[]",
        "null",
        '{"format": 1}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "1" * 5_000,
    ):
        (folder / "manifest.json").write_text(changed_text, encoding="utf-8")
        assert_the_same(native, folder)
    for data in (b"\xff", b'{"format": "\xed\xa0\x80"}', b'{"format": "\xc0\x80"}', b'{"format": "\xf4\x90\x80\x80"}'):
        (folder / "manifest.json").write_bytes(data)
        assert_the_same(native, folder)


def with_trunk_and_kind(folder):
    """A manifest with the entries that most bundles have not."""
    manifest = manifest_of(folder)
    manifest["model"] |= {"kind": "huber:0.5", "example_dtype": "float32"}
    arrays = [{"name": "a", "shape": [2], "dtype": "float32", "offset": 0}]
    arrays += [{"name": "b", "shape": [], "dtype": "int32", "offset": 2, "num_tokens": 5}]
    manifest["model"]["inputs"] = {"kind": "dict", "arrays": arrays}
    manifest["trunk"] = {"file": "labels.txt", "raw_shape": [2, 3], "sha256": "0" * 64}
    return manifest


def of_a_table(folder):
    """The same for a client whose data are a table."""
    manifest = with_trunk_and_kind(folder)
    manifest["preprocessing"] = {"scale": 1.0, "shift": 0.0, "stored_dtype": "float32", "columns": ["a", "b", "é"]}
    manifest["files"]["theta.bin"]["operations"] = {"FULLY_CONNECTED": 2}
    manifest["model"]["num_tokens"] = manifest["model"]["inputs"]["arrays"][0]["num_tokens"] = 9
    return manifest


def wrong_values(rule, value, way=()):
    """Every place in a manifest that a rule is about, each with what the rule refuses; None: it is missing."""
    rule = rule.of if isinstance(rule, rules.Optional) else rule
    if isinstance(rule, dict):
        yield way, 5
        for name, entry in rule.items():
            if not isinstance(entry, rules.Optional):
                yield (*way, name), None
            yield from wrong_values(entry, value[name], (*way, name))
    elif isinstance(rule, rules.Several):
        key, inner = next(iter(value.items())) if rule.named else (0, value[0])
        yield from ((way, wrong) for wrong in ([] if rule.least else "x", "x", {"": inner} if rule.named else {}))
        yield from wrong_values(rule.of, inner, (*way, key))
    elif isinstance(rule, rules.Number):
        below, above = rule.low - abs(rule.low) - 1, 2 * rule.high
        yield from ((way, wrong) for wrong in (below, above, "1", True, *([1.5] if rule.whole else [])))
    elif isinstance(rule, rules.Text):
        yield from ((way, wrong) for wrong in (1, "", "\n!") if wrong == 1 or not re.fullmatch(rule.pattern, wrong))
    else:
        yield way, 1


@pytest.mark.slow
def test_every_rule_of_the_reader_in_python_is_one_of_the_reader_in_c(native, tmp_path):
    write_files(tmp_path)
    right = of_a_table(tmp_path)
    write_manifest(tmp_path, right)
    assert said_by_python(tmp_path) is None and said_by_c(native, tmp_path) is None
    for way, value in wrong_values(rules.RULES, right):
        manifest = deepcopy(right)
        if way:
            set_entry(manifest, way, value)
            write_manifest(tmp_path, manifest)
            assert_the_same(native, tmp_path)
            assert said_by_c(native, tmp_path) is not None, (way, value)


def test_the_rules_in_c_are_about_the_same_entries(tmp_path):
    write_files(tmp_path)
    entries = {way[-1] for way, _ in wrong_values(rules.RULES, of_a_table(tmp_path)) if way}
    found = set(re.findall(r'\{"(\w+)", &', (CORE / "src" / "manifest.c").read_text()))
    assert {"columns", "tau"} <= found <= entries


@pytest.mark.parametrize("manifest_of", [manifest_of, with_trunk_and_kind, of_a_table])
def test_manifests_that_were_hashed_again(native, tmp_path, cases, manifest_of):
    write_files(tmp_path)
    text = json.dumps(manifest_of(tmp_path))

    @quick(cases)
    @given(changed(text))
    def one(case):
        write_manifest(tmp_path, case[0])
        assert_the_same(native, tmp_path)

    one()


HUGE = [-1, 0, 2**31, 2**62, 2**62 + 1, 2**63, 2**64, 10**20, 10**20 + 1, 10**30, 2.5, 3.5e38, "many", None, True]
WAYS = [
    ("model", "num_features"), ("model", "num_classes"), ("model", "num_backbone_weights"), ("model", "static_batch"),
    ("model", "example_shape", 0), ("model", "theta", 0, "offset"), ("model", "theta", 0, "shape", 0),
    ("training", "tau"), ("training", "beta"), ("training", "rho"), ("files", "theta.bin", "bytes"),
    ("files", "labels.txt", "bytes"), ("files", "head.bin", "sha256"), ("browser", "room"),
    ("labels", "class_ids", 0), ("labels", "names", 0),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_lies_about_sizes(native, folder, way):
    for value in HUGE:
        manifest = manifest_of(folder)
        set_entry(manifest, way, value if value is not None else [None])
        write_manifest(folder, manifest)
        assert_the_same(native, folder)


ARRAYS = {  # entries of examples of several arrays, of what `verify` compares, and the names of classes
    ("labels", "names"): [["a", "b"], ["a", ""], ["a", "a"], ["b'\""] * 2, ["é", "é"], ["x" * 99] * 2, [" ", "\n"]],
    ("check", "outputs"): [{"round.bias": 0.5}, {"round.bias": -1}, {"round-bias": 1}, {"": 1}, {"x" * 81: 1}, "x"],
    ("preprocessing", "columns"): [["a"], [], [1], "x", ["a", None], {}, ["a", "a"], ["", "\n"]],
    ("check", "files"): [{"a.tflite": 0}, {"../a": 1}, {"a.tflite": None}, "x"],
    ("model", "example_shape"): [[3], [4], [3, 1], [1, 3], [2**31 - 1] * 200],
    ("model", "inputs"): ["no", {}, {"kind": "list", "arrays": []}, {"kind": "tuple", "arrays": []}],
    ("model", "inputs", "kind"): ["dict", "tuple", "dicts", 1],
    ("model", "inputs", "arrays", 0, "name"): ["A", "b", "c", "é", "aa", "", 3],
    ("model", "inputs", "arrays", 1, "name"): ["é", "a", "aa", "", "\U0001f600"],
    ("model", "inputs", "arrays", 0, "shape"): [[2], [3], [], [2**31 - 1, 2**31 - 1], [0], 2],
    ("model", "inputs", "arrays", 0, "dtype"): ["int32", "int8"],
    ("model", "inputs", "arrays", 1, "offset"): [2, 0, 3, 2**31, -1, "2"],
    ("model", "inputs", "arrays", 1, "num_tokens"): [1, 0, "5"],
}


@pytest.mark.parametrize("way", ARRAYS, ids=str)
def test_lies_about_arrays_and_bounds(native, tmp_path, way):
    write_files(tmp_path)
    accepted = 0
    for value in ARRAYS[way]:
        manifest = with_trunk_and_kind(tmp_path)
        set_entry(manifest, way, value)
        write_manifest(tmp_path, manifest)
        assert_the_same(native, tmp_path)
        accepted += said_by_c(native, tmp_path) is None
    assert accepted < len(ARRAYS[way])


NAMES = ["../secret", "..", "", "a\\b", "C:x", "theta.bin\0", "a\nb", "é", "x" * 82, "a'b", "a'\"b", "-x", "x.y-z"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_files_that_lead_elsewhere(native, folder, name):
    manifest = manifest_of(folder)
    manifest["files"][name] = described(folder / "theta.bin")
    write_manifest(folder, manifest)
    assert_the_same(native, folder)


def test_files_that_are_not_what_the_manifest_says(native, folder):
    good = {path: path.read_bytes() for path in folder.iterdir()}

    def damage(path, content):
        path.write_bytes(content)
        assert_the_same(native, folder)
        assert said_by_c(native, folder) is not None
        path.write_bytes(good[path])

    for name in ("theta.bin", "labels.txt", "manifest.json"):
        path = folder / name
        damage(path, b"")
        damage(path, good[path][:-1] + bytes([good[path][-1] ^ 1]))
        path.unlink()
        assert_the_same(native, folder)
        path.symlink_to("/etc/passwd")
        assert "is a link" in said_by_c(native, folder)
        assert_the_same(native, folder)
        path.unlink()
        os.mkfifo(path)
        assert "is no ordinary file" in said_by_c(native, folder)
        assert_the_same(native, folder)
        path.unlink()
        path.mkdir()
        assert_the_same(native, folder)
        path.rmdir()
        path.write_bytes(b"x")
        with open(path, "r+b") as file:
            file.truncate(600 * 10**6)  # takes no space on the disk; is not read
        assert_the_same(native, folder)
        path.write_bytes(good[path])
    assert said_by_c(native, folder) is None
    for nothing in (folder / "theta.bin", folder / "none", folder.parent):
        found = said_by_c(native, nothing)
        assert found.startswith(f"{nothing} is not a bundle")


def test_a_manifest_that_would_take_too_much_memory(native, folder):
    """16 MB of the shortest values: refused with less memory than reading them would take."""
    write_manifest(folder, manifest_of(folder) | {"made_with": [0] * 600_000}, separators=(",", ":"))
    assert "more than 500,000 values" in said_by_c(native, folder)
    assert "nested too deeply" in (
        write_manifest(folder, manifest_of(folder) | {"made_with": json.loads("[" * 70 + "]" * 70)})
        or said_by_c(native, folder)
    )


def test_the_first_inputs_of_the_fuzzer(tmp_path):
    subprocess.run([sys.executable, CORE / "tests" / "seeds.py", tmp_path], check=True)
    heads = {path.read_bytes()[1:9] for path in (tmp_path / "corpus").iterdir() if path.read_bytes()[0] == 2}
    assert heads == {b"TFPFLH01", b"TFPFLH02", b"TFPFLH03"} and "columns" in (tmp_path / "words").read_text()


@pytest.mark.slow
def test_a_fuzzer_finds_no_crash(tmp_path):
    """`make native-fuzz SECONDS=600` is the same for longer."""
    if shutil.which("clang") is None:
        pytest.skip("there is no clang here")
    try:
        folder = build("-fuzzer", target="fuzzer", CC="clang")
    except AssertionError as error:
        if "libclang_rt" not in str(error):
            raise
        pytest.skip("this clang has no libFuzzer (libclang-rt-dev)")
    subprocess.run([sys.executable, CORE / "tests" / "seeds.py", tmp_path], check=True)
    command = [folder / "fuzz", "-dict=words", "-max_total_time=15", "-max_len=16384", "corpus"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Done [1-9]\d{2,} runs", done.stderr), done.stderr[-3000:]


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "int32\0", None])
@pytest.mark.parametrize("tokens", [5, 2**31 - 1, 2**31, 0, 2.0, None])
def test_examples_of_whole_numbers(native, folder, dtype, tokens):
    manifest = manifest_of(folder)
    manifest["model"] |= {"example_dtype": dtype, "num_tokens": tokens}
    write_manifest(folder, manifest)
    assert_the_same(native, folder)
    manifest["model"] = {name: value for name, value in manifest["model"].items() if value is not None}
    write_manifest(folder, manifest)
    assert_the_same(native, folder)
    fine = dtype in ("float32", "int32", None) and tokens in (5, 2**31 - 1, None)
    assert (said_by_c(native, folder) is None) == fine
    if fine:
        model, bundle = native.check_bundle(folder), Bundle(folder)
        assert model.whole_numbers == (bundle.example_dtype == np.int32)
        assert model.num_tokens == (bundle.num_tokens or 0)


KINDS = """multilabel regression poisson quantile:0.9 quantile:5e-05 quantile:1.5e-05 huber:2 huber:0.25 huber:1e+06
    classification Regression multilabel: quantile quantile: quantile:1 quantile:1.5 quantile:.5 quantile:0. quantile:0
    quantile:00.5 quantile:-0.5 quantile:1e+06 quantile:0.5e quantile:0.5e-1234 huber: huber:. huber:1. huber:1.2.3
    huber:1e6 huber:1e+ huber:1e-1234 huber:nan huber:-1 huber:1_0 huber:0x1 huber:\u0663""".split()


def test_kinds_of_heads(native, folder):
    accepted = []
    for kind in [*KINDS, "poisson\n", "poisson\0", "huber:" + "1" * 30, "huber:" + "1" * 31]:
        manifest = manifest_of(folder)
        manifest["model"]["kind"] = kind
        write_manifest(folder, manifest)
        assert_the_same(native, folder)
        if said_by_c(native, folder) is None:
            accepted.append(kind)
            assert native.check_bundle(folder).kind.decode() == kind and Bundle(folder).kind.text == kind
    assert accepted == KINDS[:9] + ["huber:" + "1" * 30]


TRUNKS = [
    {}, {"file": "none.tflite"}, {"file": "../x"}, {"file": 5}, {"file": "labels.txt\0"}, {"raw_shape": []},
    {"raw_shape": [0]}, {"raw_shape": [2.0]}, {"sha256": "0"}, {"sha256": None}, {"raw_shape": [2**31 - 1] * 2},
]  # fmt: skip


@pytest.mark.parametrize("changed", TRUNKS, ids=str)
def test_trunks(native, folder, changed):
    manifest = with_trunk_and_kind(folder)
    manifest["trunk"] |= changed
    write_manifest(folder, manifest)
    if changed == {"raw_shape": [2**31 - 1] * 2}:
        assert "sizes in model are too large" in said_by_c(native, folder)
        return
    assert_the_same(native, folder)
    assert (said_by_c(native, folder) is None) == (changed == {})
    if not changed:
        model = native.check_bundle(folder)
        assert model.trunk and list(model.raw_shape)[: model.raw_dimensions] == [2, 3] and model.raw_numbers == 6
    for wrong in ([], "labels.txt", None):
        manifest["trunk"] = wrong
        write_manifest(folder, manifest)
        assert_the_same(native, folder)
