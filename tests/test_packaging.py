"""The wheels and the Dockerfile: what is in them, and that they work where nothing else of the project is.

The slow tests build both wheels with `make wheels` and install them into fresh environments, from the package index.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from markdown_it import MarkdownIt

import tflite_export

ROOT = Path(__file__).parents[1]
METADATA = runpy.run_path(str(ROOT / "packaging" / "metadata.py"))
URL = "https://example.org/tfpfl"
READMES = [ROOT / "README.md", ROOT / "packaging" / "device" / "README.md"]


def tracked():
    """The paths of all files that git has."""
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def targets(text):
    """Where the links and pictures of a Markdown text lead."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        for part in [token, *(token.children or ())]:
            yield from (part.attrs[name] for name in ("href", "src") if name in part.attrs)
            if part.type in ("html_block", "html_inline"):
                yield from re.findall(r'(?:href|src)="([^"]*)"', part.content)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_readme_elsewhere_has_no_relative_links(readme):
    """With the address of the repository they lead there; without it they become text. Nothing else changes."""
    text = readme.read_text(encoding="utf-8")
    relative = [target for target in targets(text) if "://" not in target]
    with_address, without = (METADATA["long_description"](readme, url) for url in (URL, ""))
    places = [(f"{URL}/blob/main/{t}", f"{URL}/raw/main/{t}") for t in relative]
    made = [target for target in targets(with_address) if target.startswith(URL)]
    assert len(made) == len(places)
    assert [m for m, place in zip(made, places, strict=True) if m not in place] == []
    assert [target for target in targets(without) if "://" not in target] == []
    plain = [" ".join(t.split()) for t in re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)]
    assert [block for block in plain if block not in " ".join(without.split())] == []
    if readme == READMES[0]:
        assert len(relative) > 30 and f'<img src="{URL}/raw/main/docs/round.svg"' in with_address
        assert "[getting started]" in text and "getting started" in without
        assert f"[![Part of a report: eight algorithms on digits, three seeds each]({URL}/raw/main/docs" in with_address


def test_addresses_come_from_one_place():
    assert METADATA["project_urls"]("") == {}
    assert {url.startswith(URL) for url in METADATA["project_urls"](URL).values()} == {True}
    for setup in (ROOT / "setup.py", ROOT / "packaging" / "device" / "setup.py"):
        text = setup.read_text(encoding="utf-8")
        assert "://" not in text and METADATA["VERSION"] not in text


def test_the_part_for_devices_says_what_needs_more(monkeypatch):
    monkeypatch.setitem(sys.modules, "tfpfl", None)  # as if it were not installed
    monkeypatch.delitem(vars(tflite_export), "export", raising=False)
    with pytest.raises(ImportError, match="tflite_export.export needs tfpfl and TensorFlow"):
        _ = tflite_export.export
    assert tflite_export.DeviceClient


def test_the_dockerfile_does_what_make_demo_does():
    """It was not built here: its commands are targets of the Makefile, and what it copies leaves nothing private in."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    assert re.fullmatch(r"python:3\.11-\S+", steps[0][1]) and steps[0][0] == "FROM"
    made = re.findall(r"^([\w.$()/-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    (default,) = [json.loads(value) for word, value in steps if word == "CMD"]
    assert default == ["make", "demo"] and "demo" in made
    stamp = re.search(r"^INSTALLED := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    (install,) = [value for word, value in steps if word == "RUN" and value.startswith("make")]
    assert stamp in install.split() and "$(INSTALLED)" in made
    assert [value for word, value in steps if word == "USER"] == ["tfpfl"]  # and not root
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv", "build", "dist", "runs"} <= set(ignored)
    assert not [path for path in tracked() if path.split("/")[0] in ignored]


def run(*command, cwd, **environment):
    """What a command prints, in an environment that knows nothing of this checkout and in a plain shell."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder that is deleted after the tests: the environments are large."""
    folder = tmp_path_factory.mktemp("packaging")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def environment(place):
    """environment(name, *requirements) -> the Python of a fresh environment in which these are installed."""

    def make(name, *requirements):
        run(sys.executable, "-m", "venv", place / name, cwd=place)
        python = place / name / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements, cwd=place)
        return python

    return make


@pytest.fixture(scope="module")
def checkout(place):
    """A copy of what git has."""
    for path in tracked():
        target = place / "checkout" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target, follow_symlinks=False)
    return place / "checkout"


@pytest.fixture(scope="module")
def wheels(checkout):
    """{name: path} of the wheels that `make wheels` builds."""
    run("make", "wheels", f"URL={URL}", f"PYTHON={sys.executable}", cwd=checkout)
    return {path.name.partition("-")[0]: path for path in (checkout / "dist").glob("*.whl")}


@pytest.mark.slow
def test_the_source_distribution_has_what_its_readme_links_to(checkout, place):
    pytest.importorskip("setuptools")
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", place / "sdist", cwd=checkout)
    (path,) = (place / "sdist").glob("tfpfl-*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    links = {target.partition("#")[0] for target in targets(READMES[0].read_text(encoding="utf-8"))}
    wanted = {link.rstrip("/") for link in links if "://" not in link}
    assert len(wanted) > 30 and wanted - set(names) == set()
    assert [name for name in names if name.split("/")[0] == "tests" or name.endswith(".pyc")] == []


@pytest.mark.slow
def test_the_wheels_are_ready_for_an_index(wheels, environment, place):
    assert set(wheels) == {"tfpfl", "tfpfl_device"}
    for name, path in wheels.items():
        with ZipFile(path) as archive:
            (metadata,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
            found = message_from_bytes(archive.read(metadata))
            everything = {n for n in archive.namelist() if ".dist-info" not in n}
            files = {n.split("/")[0] for n in everything}
            modules = {n for n in archive.namelist() if n.endswith(".py")}
            assert archive.read(metadata.replace("METADATA", "licenses/LICENSE")) == (ROOT / "LICENSE").read_bytes()
        assert found["Version"] == METADATA["VERSION"] and found["Description-Content-Type"] == "text/markdown"
        assert len(found.get_all("Project-URL")) == len(METADATA["project_urls"](URL))
        if name == "tfpfl":
            assert files == {"tfpfl", "tflite_export"}
            assert set(found.get_all("Provides-Extra")) >= {"ray", "dp", "test", "notebooks", "docs", "lint"}
            assert everything == {path for path in tracked() if path.split("/")[0] in files}
        else:
            assert files == {"tflite_export"}
            assert modules == {"tflite_export/__init__.py"} | {
                str(p.relative_to(ROOT)) for p in (ROOT / "tflite_export" / "device").rglob("*.py")
            }
    python = environment("twine", "twine")
    assert run(python, "-m", "twine", "check", "--strict", *wheels.values(), cwd=place).stdout.count("PASSED") == 2


@pytest.mark.slow
def test_the_wheel_runs_without_a_checkout(wheels, environment, place):
    """The newest TensorFlow that pip finds, and no TFF. In a plain shell, nothing of TensorFlow's is on the screen."""
    python = environment("plain", wheels["tfpfl"])
    tfpfl = python.with_name("tfpfl")
    assert "Train and evaluate:" in run(tfpfl, "--help", cwd=place).stdout
    words = ["run", "--clients", "5", "--participation", "0.4", "--rounds", "2", "--tau", "3", "--out", "first"]
    done = run(tfpfl, *words, cwd=place)
    assert "Written to first" in done.stdout and done.stderr == ""
    summary = json.loads((place / "first" / "summary.json").read_text())
    config = json.loads((place / "first" / "config.json").read_text())
    assert summary and config["versions"]["tfpfl"] == METADATA["VERSION"]
    assert "tensorflow-federated" not in {k for k, v in config["versions"].items() if v}


ON_DEVICE = """
import importlib.util, json, sys
import numpy as np
from tflite_export import DeviceClient, verify

bundle, data, head = sys.argv[1:]
with np.load(data) as arrays:
    x, y = arrays["x"], arrays["y"]
client = DeviceClient(bundle, head)
done = client.personalize(x, y, steps=20, beta=0.01, held_out=(x, y))
kernel, bias = client.head
print(json.dumps({
    "ok": verify(bundle).ok, "loss": [done.loss_before, done.loss], "kernel": kernel.tolist(),
    "tensorflow": importlib.util.find_spec("tensorflow") is not None,
    "tfpfl": importlib.util.find_spec("tfpfl") is not None,
    "file": sys.modules["tflite_export"].__file__,
}))
"""


@pytest.mark.slow
def test_the_wheel_for_devices_works_without_tensorflow(wheels, environment, place, shared_run, six_clients):
    """It opens, checks and personalizes a bundle that was made here; the head is that of TensorFlow's interpreter."""
    import numpy as np
    import tensorflow as tf

    from tflite_export import DeviceClient, export

    bundle = export(shared_run, 0, place / "bundle")
    x, y = six_clients.arrays(0, "train")
    np.savez(place / "data.npz", x=x, y=y)
    python = environment("device", wheels["tfpfl_device"])
    done = run(python, "-c", ON_DEVICE, bundle.folder, place / "data.npz", place / "head.bin", cwd=place)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"] and found["loss"][1] < found["loss"][0]
    assert not found["tensorflow"] and not found["tfpfl"] and Path(found["file"]).is_relative_to(place / "device")
    here = DeviceClient(bundle, None, interpreter=tf.lite.Interpreter)
    here.personalize(x, y, steps=20, beta=0.01, held_out=(x, y))
    assert np.abs(np.asarray(found["kernel"]) - here.head[0]).max() < 1e-5
