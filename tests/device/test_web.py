"""What a bundle has for a browser, and the site that is made of it. The page itself is tested in web/tests."""

import gzip
import hashlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from safetensors.numpy import load_file

from helpers.truth import relative
from tflite_export import Bundle, BundleError, DeviceClient, ExportError, Runtime, export, verify, write_site
from tflite_export.cli import main
from tflite_export.convert.members import members_of
from tflite_export.demo_web import recipe
from tflite_export.device.drawing import drawing_settings, example_of_drawing
from tflite_export.device.payload import decode
from tflite_export.device.wide_head import CLOSED, widened
from tflite_export.serving import SiteServer
from tfpfl.checks import Unavailable
from tfpfl.runs.run import Run

INTERPRETER = tf.lite.Interpreter


@pytest.fixture(scope="module")
def browser_bundle(run_folder, tmp_path_factory):
    return export(run_folder, 4, tmp_path_factory.mktemp("b") / "client4", inference=False, browser=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What `make web` makes, in small."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "assets").mkdir()
    (folder / "index.html").write_text("<p>page</p>")
    (folder / "assets" / "index-1.js").write_text("1")
    for kind in ("", "_compat", "_threaded"):
        (folder / f"litert_wasm{kind}_internal.wasm").write_bytes(bytes(1000))
    return folder


@pytest.mark.slow
def test_the_program_for_browsers_computes_the_same(browser_bundle, tmp_path):
    found = verify(browser_bundle, interpreter=INTERPRETER)
    assert found.ok
    ours = [c for c in found.comparisons if c.file == "program_browser.tflite"]
    assert {c.signature for c in ours} == {*browser_bundle.manifest["signatures"], "features_one"}
    copy = Bundle(shutil.copytree(browser_bundle.folder, tmp_path / "copy"))
    copy.manifest["browser"]["room"] += 1  # a head wider than the program: the runtime refuses it
    with pytest.raises(BundleError, match="personalize|head_step|predict"):
        verify(copy, interpreter=INTERPRETER)


@pytest.mark.slow
def test_its_shapes_are_fixed_and_it_has_room(browser_bundle):
    runtime = Runtime(browser_bundle.path("program_browser.tflite"), INTERPRETER)
    rng = np.random.default_rng(0)
    x = rng.random((32, *browser_bundle.example_shape), np.float32)
    theta = browser_bundle.theta()
    phi = runtime("features", theta=theta, x=x)["phi"]
    one = runtime("features_one", theta=theta, x=x[5:6])["phi"]
    assert phi.shape == (32, 200) and np.abs(one - phi[5]).max() < 1e-6
    assert browser_bundle.manifest["browser"]["room"] == 16


@pytest.mark.slow
def test_closed_columns_stay_closed_whatever_the_rate(browser_bundle):
    rng, room = np.random.default_rng(0), browser_bundle.manifest["browser"]["room"]
    phi = rng.random((128, 200), np.float32)
    labels, weights = rng.integers(0, 3, 128).astype(np.int32), np.full(128, 1 / 128, np.float32)
    kernel, bias = rng.standard_normal((200, 3)).astype(np.float32), np.zeros(3, np.float32)
    wide = dict(zip(("kernel", "bias"), widened(kernel, bias, room), strict=True))
    inputs = {"phi": phi, "labels": labels, "weights": weights, "steps": np.int32(20), "beta": np.float32(0.01)}
    found = Runtime(browser_bundle.path("program_browser.tflite"), INTERPRETER)("personalize", **inputs, **wide)
    assert np.array_equal(found["kernel"][:, 3:], np.zeros((200, room - 3)))
    assert (found["bias"][3:] == CLOSED).all()
    open_ = Runtime(browser_bundle.path("program.tflite"), INTERPRETER)(
        "personalize", **inputs, kernel=kernel, bias=bias
    )
    assert relative(found["kernel"][:, :3], open_["kernel"]) < 1e-5
    assert not np.array_equal(open_["kernel"], kernel)


@pytest.mark.slow
def test_the_clients_file_has_its_examples_and_what_a_round_gives(browser_bundle, federation):
    stored = load_file(browser_bundle.path("client.safetensors"))
    raw, labels = federation.raw(4, "train")
    about = browser_bundle.manifest["browser"]["client"]
    assert about == {"examples": len(labels), "of": len(labels), "rounds": [32, len(labels)]}
    key = lambda x, y: sorted(zip(y.tolist(), (a.tobytes() for a in np.ascontiguousarray(x)), strict=True))  # noqa: E731
    assert key(stored["x"], stored["labels"]) == key(raw, labels)
    assert len(set(stored["labels"][:3])) == 3  # of every class in turn
    x = stored["x"].astype(np.float32) / 16
    for n in about["rounds"]:
        client = DeviceClient(browser_bundle, interpreter=INTERPRETER)
        update = client.round(client.theta, x[:n], stored["labels"][:n])
        assert relative(decode(update.payload), stored[f"round_{n}.dtheta"]) < 1e-5
        assert relative(update.head.kernel, stored[f"round_{n}.kernel"]) < 1e-5
        assert relative(update.head.bias, stored[f"round_{n}.bias"]) < 1e-4
        assert update.loss == pytest.approx(stored[f"round_{n}.losses"][-1], rel=1e-5)
        assert (np.diff(stored[f"round_{n}.losses"]) < 0).all() and len(stored[f"round_{n}.losses"]) == 50


@pytest.mark.slow
def test_other_algorithms_can_learn_in_a_browser_but_have_no_rounds(make_run, tmp_path, page):
    bundle = export(make_run("fedavg", rounds=1), 4, tmp_path / "b", inference=False, browser=True)
    assert verify(bundle, interpreter=INTERPRETER).ok
    assert bundle.manifest["browser"]["client"]["rounds"] == []
    assert set(load_file(bundle.path("client.safetensors"))) == {"x", "labels"}
    write_site(bundle.folder, tmp_path / "site", page=page)


def test_a_drawing_becomes_what_omniglot_was_made_of():
    """The same as tfpfl's reading of the data set: inverted, resized by TensorFlow, rounded."""
    preprocessing = {"scale": 1 / 255, "shift": 0.0, "stored_dtype": "uint8"}
    settings = drawing_settings("omniglot", (28, 28, 1), preprocessing)
    assert settings == {"size": 105, "pen": 3, "resample": "bilinear", "levels": 255}
    grey = np.random.default_rng(0).integers(0, 256, (105, 105)).astype(np.uint8)
    expected = tf.image.resize(255.0 - grey[..., np.newaxis].astype(np.float32), [28, 28], antialias=False)
    expected = tf.cast(tf.round(expected), tf.uint8).numpy()
    assert np.array_equal(example_of_drawing(grey, settings, (28, 28, 1)), expected)


@pytest.mark.parametrize("scale, shift", [(-1 / 255, 1.0), (1 / 510, 0.0), (0.0, 0.5)])
def test_where_no_level_is_full_ink_nothing_can_be_drawn(scale, shift):
    """Every drawing was white paper, half as dark as its ink, or ended the export with a division by zero."""
    preprocessing = {"scale": scale, "shift": shift, "stored_dtype": "uint8"}
    assert drawing_settings(None, (28, 28), preprocessing) is None
    assert drawing_settings(None, (28, 28), preprocessing | {"scale": 2 / 255, "shift": -1.0})["levels"] == 255
    assert drawing_settings(None, (28, 28), {"stored_dtype": "uint8"})["levels"] == 1  # x is what is stored


def test_a_drawing_in_blocks_and_levels():
    settings = drawing_settings("digits", (8, 8, 1), {"scale": 1 / 16, "shift": 0.0, "stored_dtype": "uint8"})
    assert (settings["size"], settings["levels"], settings["resample"]) == (280, 16, "area")
    signed = drawing_settings("mnist", (28, 28, 1), {"scale": 2 / 255, "shift": -1.0, "stored_dtype": "uint8"})
    assert signed["levels"] == 255
    grey = np.full((280, 280), 255, np.uint8)
    grey[:35, :35] = 0
    grey[:35, 35:70] = 128
    raw = example_of_drawing(grey, settings, (8, 8, 1))
    assert raw[0, 0, 0] == 16 and raw[0, 1, 0] == round(127 / 255 * 16) and raw[1:].sum() == 0
    for shape, stored in (((32, 32, 3), "uint8"), ((28, 20, 1), "uint8"), ((28, 28, 1), "float32"), ((64,), "uint8")):
        assert drawing_settings("own", shape, {"scale": 1.0, "shift": 0.0, "stored_dtype": stored}) is None
    assert drawing_settings("own", (28, 28, 1), {}) is None
    with pytest.raises(ValueError, match="must be uint8"):
        example_of_drawing(grey[1:], settings, (8, 8, 1))


@pytest.mark.slow
def test_the_site_names_every_file_by_its_hash(browser_bundle, page, tmp_path):
    site = write_site(browser_bundle.folder, tmp_path / "site", page=page)
    listed = json.loads((tmp_path / "site" / "site.json").read_text())["files"]
    there = {p.relative_to(site.folder).as_posix(): p for p in site.folder.rglob("*") if p.is_file()}
    copies = {f"{name}.gz" for name, row in listed.items() if "gzip" in row}
    assert set(there) == {*listed, *copies, "site.json"} and site.files == len(there)
    assert {"bundle/manifest.json.gz", "litert_wasm_internal.wasm.gz"} <= copies and "index.html.gz" not in copies
    assert {n for n in listed if n.startswith("bundle/")} == {
        f"bundle/{n}"
        for n in ("manifest.json", "program_browser.tflite", "theta.bin", "head.bin", "client.safetensors")
    }
    for name, row in listed.items():
        content = there[name].read_bytes()
        assert row | {"gzip": 0} == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "gzip": 0}
        if "gzip" in row:
            copy = there[f"{name}.gz"].read_bytes()
            assert gzip.decompress(copy) == content and row["gzip"] == len(copy) < len(content)
    assert site.bytes == sum(path.stat().st_size for name, path in there.items() if name != "site.json")
    # One WebAssembly of three, and of what has a copy, the copy.
    others = ("litert_wasm_compat_internal.wasm", "litert_wasm_threaded_internal.wasm")
    assert site.visit == sum(row.get("gzip", row["bytes"]) for name, row in listed.items() if name not in others)


@pytest.mark.slow
def test_a_site_is_renewed_and_nothing_else_is_touched(browser_bundle, page, tmp_path):
    site = tmp_path / "site"
    write_site(browser_bundle.folder, site, page=page)
    (site / "bundle" / "old").write_text("")
    write_site(browser_bundle.folder, site, page=page)
    assert not (site / "bundle" / "old").exists() and [p.name for p in tmp_path.iterdir()] == ["site"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "site.json").write_text('{"made_by": "someone"}')
    (other / "mine").write_text("1")
    for taken in (other, other / "mine"):
        with pytest.raises(BundleError, match="is not a site that tfpfl wrote"):
            write_site(browser_bundle.folder, taken, page=page)
    assert (other / "mine").read_text() == "1"
    with pytest.raises(BundleError, match="is not a folder"):
        write_site(browser_bundle.folder, tmp_path / "no" / "site", page=page)


@pytest.fixture
def no_bundle(monkeypatch, tmp_path):
    """The folder of a bundle of which nothing is read."""
    bundle = SimpleNamespace(folder=tmp_path / "bundle", manifest={"files": {"program_browser.tflite": {}}})
    bundle.folder.mkdir()
    for name in ("manifest.json", "program_browser.tflite", "theta.bin", "head.bin"):
        (bundle.folder / name).write_bytes(b"1")
    monkeypatch.setattr("tflite_export.web._bundle", lambda *_: (bundle, {}))
    return bundle.folder


def test_a_site_that_cannot_be_renewed_stays(monkeypatch, no_bundle, page, tmp_path):
    """The old one had another name by then, and the site was gone."""
    site, rename = tmp_path / "site", os.rename
    write_site(no_bundle, site, page=page)

    def full(old, new):
        if old.name.endswith(".new"):
            raise OSError(28, "No space left on device")
        rename(old, new)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        write_site(no_bundle, site, page=page)
    assert (site / "site.json").is_file() and sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "site"]


def test_what_lies_beside_the_files_of_a_site_stays_when_it_is_renewed(no_bundle, page, tmp_path):
    """Such as the repository from which a host takes the site."""
    site, newer = tmp_path / "site", shutil.copytree(page, tmp_path / "newer")
    (newer / "assets" / "index-1.js").rename(newer / "assets" / "index-2.js")
    write_site(no_bundle, site, page=page)
    (site / ".git" / "objects").mkdir(parents=True)
    (site / ".git" / "objects" / "1").write_text("all that was committed")
    (site / "CNAME").write_text("example.org")
    (site / "latest").symlink_to("nowhere")
    for _ in range(2):
        write_site(no_bundle, site, page=newer)
        assert (site / ".git" / "objects" / "1").read_text() == "all that was committed"
        assert (site / "CNAME").read_text() == "example.org" and os.readlink(site / "latest") == "nowhere"
        assert [p.name for p in (site / "assets").iterdir()] == ["index-2.js"]
        assert not {".git", "CNAME", "latest"} & set(json.loads((site / "site.json").read_text())["files"])


def test_a_site_behind_a_link_is_renewed_where_it_is(no_bundle, page, tmp_path):
    (tmp_path / "host").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "host" / "site")
    for content in (b"1", b"2"):
        (no_bundle / "theta.bin").write_bytes(content)
        write_site(no_bundle, tmp_path / "link", page=page)
        assert (tmp_path / "host" / "site" / "bundle" / "theta.bin").read_bytes() == content
    assert (tmp_path / "link").is_symlink() and [p.name for p in (tmp_path / "host").iterdir()] == ["site"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "host", "link"]


@pytest.mark.slow
def test_a_broken_bundle_leaves_the_old_site(browser_bundle, page, tmp_path):
    site = tmp_path / "site"
    write_site(browser_bundle.folder, site, page=page)
    before = (site / "site.json").read_bytes()
    copy = shutil.copytree(browser_bundle.folder, tmp_path / "copy")
    (copy / "theta.bin").write_bytes(b"")
    with pytest.raises(BundleError, match="theta.bin is damaged"):
        write_site(copy, site, page=page)
    assert (site / "site.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "site"]


@pytest.mark.slow
def test_what_cannot_be_shown_is_refused(bundle, browser_bundle, run_folder, page, tmp_path):
    with pytest.raises(BundleError, match="without a program for browsers.*--browser"):
        write_site(bundle.folder, tmp_path / "site", page=page)
    with pytest.raises(BundleError, match="no built page: `make web`"):
        write_site(browser_bundle.folder, tmp_path / "site", page=tmp_path)
    with pytest.raises(BundleError, match=r"a bundle of client 4 \(phone 4\); only a run has others"):
        write_site(browser_bundle.folder, tmp_path / "site", client=5, page=page)
    with pytest.raises(ExportError, match="no client '77'"):
        write_site(run_folder, tmp_path / "site", client=77, page=page)
    assert not list(tmp_path.iterdir())
    assert write_site(browser_bundle.folder, tmp_path / "site", client="phone 4", page=page).folder.is_dir()


@pytest.mark.slow
def test_the_command_makes_a_site_of_a_run_or_a_bundle(run_folder, page, tmp_path):
    def call(*arguments):
        return CliRunner().invoke(main, [str(a) for a in arguments])

    done = call("web", run_folder, "--client", 2, "--page", page, "--out", tmp_path / "site")
    assert done.exit_code == 0 and "a visitor loads" in done.output
    assert json.loads((tmp_path / "site" / "bundle" / "manifest.json").read_text())["client"] == 2
    done = call("export", run_folder, "--client", 3, "--no-inference", "--browser", "--out", tmp_path / "b")
    assert done.exit_code == 0
    done = call("web", tmp_path / "b", "--page", page, "--out", tmp_path / "site")
    assert done.exit_code == 0
    assert json.loads((tmp_path / "site" / "bundle" / "manifest.json").read_text())["client"] == 3
    done = call("web", tmp_path, "--page", page, "--out", tmp_path / "site2")
    assert done.exit_code == 1 and "is not a run folder" in done.output and "Traceback" not in done.output


def unpacked(stored, shape):
    """The members' examples of the two arrays that the file has of them: bits and numbers, one by one."""
    mask, ink, numbers = stored["mask"], iter(stored["ink"].tolist()), []
    for i in range(int(np.prod(shape))):
        numbers.append(next(ink) if mask[i // 8] & (128 >> i % 8) else 0)
    assert not list(ink) and len(mask) == -(-len(numbers) // 8)
    return np.array(numbers, np.uint8).reshape(shape)


@pytest.mark.slow
def test_members_have_their_examples_first_heads_and_theta(run_folder, federation, page, tmp_path):
    site = write_site(run_folder, tmp_path / "site", page=page, members=8)
    listed = json.loads((site.folder / "site.json").read_text())["files"]
    for name in ("bundle/members.json", "bundle/members.safetensors"):
        content = (site.folder / name).read_bytes()
        known = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert listed[name].items() >= known.items()  # and the size of the compressed copy
    about = json.loads((site.folder / "bundle" / "members.json").read_text())
    stored = load_file(site.folder / "bundle" / "members.safetensors")
    examples = sum(m["train"] + m["test"] for m in about["members"])
    x = unpacked(stored, (examples, *federation.example_shape))
    assert [m["name"] for m in about["members"]] == [f"phone {i}" for i in range(8)]
    assert about["server"] == {"name": "adam", "rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}
    assert about["training"]["tau"] == 50 and about["training"]["beta"] == 0.05
    key = lambda x, y: {(a.tobytes(), int(label)) for a, label in zip(np.ascontiguousarray(x), y, strict=True)}  # noqa: E731
    at = 0
    with Run.open(run_folder, engine="local") as run:
        for i, member in enumerate(about["members"]):
            assert member["class_ids"] == federation.classes(i).tolist()
            for split in ("train", "test"):
                raw, labels = federation.raw(i, split)
                n = member[split]
                assert n == min(32, len(labels))
                assert key(x[at : at + n], stored["labels"][at : at + n]) <= key(raw, labels)
                at += n
            kernel, bias = run.algorithm.init_client(run.population.info(i))
            assert np.array_equal(stored[f"kernel_{i}"], kernel) and np.array_equal(stored[f"bias_{i}"], bias)
        theta = np.concatenate([np.ravel(w) for w in run.model.initial_theta])
    assert at == examples == len(stored["labels"]) and stored["labels"].dtype == np.uint8
    assert stored["mask"].size + stored["ink"].size < 0.75 * x.size  # of digits, about a half is paper
    assert np.array_equal(stored["theta"], theta)
    assert stored["kernel"].shape == (200, len(about["classes"]))
    union = sorted({c for i in range(8) for c in federation.classes(i).tolist()})
    assert about["class_ids"] == union and about["classes"] == [str(c) for c in union]
    manifest = json.loads((site.folder / "bundle" / "manifest.json").read_text())
    assert manifest["browser"]["room"] >= len(union) + 2


@pytest.mark.slow
def test_members_of_a_trained_theta_and_of_fewer_classes(run_folder, page, tmp_path):
    site = write_site(run_folder, tmp_path / "site", page=page, members=3, member_classes=2, start="trained")
    about = json.loads((site.folder / "bundle" / "members.json").read_text())
    stored = load_file(site.folder / "bundle" / "members.safetensors")
    assert about["start"] == "trained" and "theta" not in stored
    assert all(len(m["classes"]) == 2 for m in about["members"]) and set(stored["labels"]) == {0, 1}
    assert stored["kernel_2"].shape == (200, 2)


@pytest.mark.slow
def test_who_cannot_be_members_is_refused(make_run, run_folder, browser_bundle, page, tmp_path):
    def refused(source, match, **how):
        with pytest.raises((BundleError, ExportError), match=match):
            write_site(source, tmp_path / "site", page=page, **{"members": 8, **how})

    refused(run_folder, "has 10 clients, and 11 members were asked for: give --members 10", members=11)
    refused(run_folder, "at least 2 members", members=1)
    refused(run_folder, "at least 2 classes", member_classes=1)
    refused(run_folder, "one of initial, trained, found 'first'", start="first")
    refused(make_run("fedavg", rounds=1), "cannot play rounds of .*fedavg has no program")
    refused(
        make_run(rounds=1, server_opt="yogi"), "server_opt is 'yogi', and the page's server knows sgd, momentum, adam"
    )
    refused(browser_bundle.folder, "examples of one client only; members need the run's folder")
    assert not (tmp_path / "site").exists()


@pytest.mark.slow
def test_members_with_too_many_classes_are_told_what_to_do(run_folder, monkeypatch):
    monkeypatch.setattr("tflite_export.convert.members.ROOM", 3)
    with Run.open(run_folder, engine="local") as run:
        with pytest.raises(ExportError, match="up to 4 classes and together .* --member-classes 5"):
            members_of(run, 8)
        assert members_of(run, 8, classes=3).room >= 3


@contextmanager
def serving(*arguments):
    """(address, what the command printed) of a command that serves, as a process which is ended by Ctrl-C."""
    command = [sys.executable, "-m", "tflite_export", *map(str, arguments), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ})
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("Serving "):
                break
        else:
            raise AssertionError(f"it ended: {''.join(printed)}")
        yield printed[-1].split()[1], printed
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.slow
def test_web_serve_serves_the_site_until_ctrl_c(browser_bundle, page, tmp_path):
    (page / "a.wasm").write_bytes(b"\0asm")
    with serving("web", browser_bundle.folder, "--serve", "--page", page, "--out", tmp_path / "site") as (address, _):
        kinds = {
            "": "text/html",
            "site.json": "application/json",
            "a.wasm": "application/wasm",
            "assets/index-1.js": "text/javascript",
        }
        for name, kind in kinds.items():
            with urllib.request.urlopen(address + name, timeout=30) as answer:
                assert answer.headers["Content-Type"].split(";")[0] == kind
                assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
                assert answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
                assert answer.read() == (tmp_path / "site" / (name or "index.html")).read_bytes()
        for name, host, code in (
            ("assets/", None, 404),
            ("no", None, 404),
            ("../../x", None, 404),
            ("", "other.example", 403),
        ):
            request = urllib.request.Request(address + name, headers={"Host": host} if host else {})
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request, timeout=30)
            assert error.value.code == code
    assert (tmp_path / "site" / "site.json").is_file()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=5)


@pytest.mark.slow
def test_web_serve_without_a_folder_leaves_none(browser_bundle, page):
    with serving("web", browser_bundle.folder, "--serve", "--page", page) as (_, printed):
        folder = printed[0].removeprefix("Written to ").split(": ")[0]
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)


@pytest.mark.slow
def test_demo_web_trains_serves_members_and_goes_on_with_its_run(page, tmp_path):
    how = ("--dataset", "digits", "--out", tmp_path, "--page", page)
    for rounds in (2, 3):
        with serving("demo-web", *how, "--rounds", rounds) as (address, _):
            with urllib.request.urlopen(address + "bundle/members.json", timeout=30) as answer:
                about = json.load(answer)
            assert len(about["members"]) == 8 and about["start"] == "initial"
            with urllib.request.urlopen(address + "bundle/manifest.json", timeout=30) as answer:
                assert json.load(answer)["round"] == rounds
    with Run.open(tmp_path / "digits", engine="local") as run:
        assert run.store.round_num == 3


def test_the_demo_takes_omniglot_where_it_is_prepared(monkeypatch):
    for present, start in ((("digits", "omniglot"), "trained"), (("digits",), "initial")):
        rows = [{"name": name, "present": name in present} for name in ("digits", "omniglot", "mnist")]
        monkeypatch.setattr("tflite_export.demo_web.list_datasets", lambda rows=rows: rows)
        found = recipe()
        assert found.config.dataset == present[-1] and found.site["start"] == start and found.site["members"] == 8


def test_a_demo_without_a_page_does_not_train(tmp_path):
    done = CliRunner().invoke(main, ["demo-web", "--page", str(tmp_path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and "no built page" in done.output and not (tmp_path / "out").exists()


def test_a_port_that_is_taken_is_told(tmp_path):
    with SiteServer(tmp_path) as server, pytest.raises(Unavailable, match="cannot be used .* --port 0"):
        SiteServer(tmp_path, int(server.url.rsplit(":", 1)[1].strip("/")))


def test_a_site_on_port_80_is_found_by_its_name_alone(tmp_path):
    (tmp_path / "index.html").write_text("here")
    with SiteServer(tmp_path) as server:
        for host, code in (("127.0.0.1", 200), ("localhost", 200), ("localhost:80", 200), ("other", 403), ("", 403)):
            connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=30)
            connection.request("GET", "/", headers={"Host": host})
            assert connection.getresponse().status == code
            connection.close()


def test_options_that_need_another_one(tmp_path):
    for option, other in (
        ("--start=trained", "--members"),
        ("--member-classes=2", "--members"),
        ("--port=1", "--serve"),
    ):
        done = CliRunner().invoke(main, ["web", str(tmp_path), option])
        assert done.exit_code == 2 and f"give {other} too" in done.output
