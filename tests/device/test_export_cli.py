"""The command line of the export."""

import json
import re
import shutil
import sys
import sysconfig

import pytest
from click.testing import CliRunner

from tflite_export import Bundle, BundleError, ExportError, verify
from tflite_export.cli import main
from tflite_export.device import bench
from tflite_export.device.head_file import HeadError
from tflite_export.device.other_python import run_with
from tflite_export.device.payload import PayloadError
from tflite_export.device.runtime import write_manifest
from tflite_export.rounds import RoundComparison, rounding
from tfpfl.checks import InvalidArgument
from tfpfl.runs.config import file_hash
from tfpfl.runs.consent import is_allowed
from tfpfl.runs.run import Run


def call(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.slow
def test_export_then_verify_and_inspect(run_folder, tmp_path):
    out = tmp_path / "bundle"
    said = call("export", run_folder, "--client", "phone 2", "--out", out, "--no-inference")
    assert "Model of client 2 (phone 2)" in said and Bundle(out).manifest["client"] == 2
    text = call("verify", out)
    assert "round.dtheta" in text and "the same as TensorFlow" in text
    assert call("verify", out, "--python", sys.executable) == text
    text = call("inspect", out)
    assert "head_step(" in text and "dtheta float32[13000]" in text and "WHILE" in text
    content = bytearray((out / "program.tflite").read_bytes())
    content[100] ^= 1
    (out / "program.tflite").write_bytes(content)
    for python in ((), ("--python", sys.executable)):
        assert "program.tflite is damaged" in call("verify", out, *python, code=1)
    assert "no-python cannot be started" in call("verify", out, "--python", tmp_path / "no-python", code=1)
    empty = tmp_path / "empty-python"  # a Python without the packages
    empty.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'numpy'\" >&2\nexit 1\n")
    empty.chmod(0o755)
    said = call("verify", out, "--python", empty, code=1)
    assert "could not verify the bundle (exit code 1): ModuleNotFoundError: No module named 'numpy'" in said


@pytest.mark.slow
def test_inspect_names_the_client(bundle, tmp_path):
    """By number and name; by the number alone where the client has no other name."""
    assert "client: 4 (phone 4)\n" in call("inspect", bundle.folder)
    copy = shutil.copytree(bundle.folder, tmp_path / "copy")
    for name in ("hospital 5", "4"):
        write_manifest(copy, {**bundle.manifest, "client_name": name})
        assert f"client: 4{' (hospital 5)' if name == 'hospital 5' else ''}\n" in call("inspect", copy)


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--client", "99"], "no client '99'"),
        (["--client", "x"], "no client 'x'"),
        ([], "Missing option '--client'"),
    ],
)
def test_bad_export_is_one_line(run_folder, tmp_path, arguments, reason):
    code = 1 if arguments else 2
    text = call("export", run_folder, "--out", tmp_path / "b", *arguments, code=code)
    assert reason in text and "Traceback" not in text


def test_a_bug_is_not_taken_for_an_error_of_ours(tmp_path, monkeypatch):
    """Whichever package of ours it is in."""

    def raises(error):
        def broken(*_, **__):
            raise error

        return broken

    for place in ("tflite_export.device.runtime.Bundle.__init__", "tfpfl.runs.run.Run.open"):
        arguments = ["inspect", "b"] if "Bundle" in place else ["simulate-round", "r"]
        for kind in (ValueError, RuntimeError, TypeError):
            monkeypatch.setattr(place, raises(bug := kind("shapes differ")))
            result = CliRunner().invoke(main, arguments)
            assert result.exception is bug and "Error: " not in result.output
        for kind in (BundleError, PayloadError, HeadError, ExportError, InvalidArgument, FileNotFoundError):
            monkeypatch.setattr(place, raises(kind("this is wrong")))
            assert call(*arguments, code=1) == "Error: this is wrong\n"


def test_not_a_run_and_not_a_bundle(tmp_path):
    assert "is not a run folder" in call("export", tmp_path, "--client", 1, "--out", tmp_path / "b", code=1)
    for command in ("verify", "inspect", "bench"):
        assert "is not a bundle" in call(command, tmp_path, code=1)


@pytest.mark.parametrize("command", [("export", "--client", "0"), ("simulate-round",), ("demo",), ("web",)])
def test_what_is_no_run_folder_is_refused_before_its_code_is_allowed(command, tmp_path):
    file = tmp_path / "net.keras"
    file.write_bytes(b"somebody's code")
    assert "is not a run folder" in call(*command, file, "--allow-code", code=1)
    assert not is_allowed(file_hash(file))


@pytest.mark.slow
def test_bench_measures_and_records(bundle, tmp_path):
    import shutil

    copy = shutil.copytree(bundle.folder, tmp_path / "copy")
    text = call("bench", copy, "--examples", "40", "--threads", "1", "--repeat", 3, "--record")
    for row in ("| features | 40 | 1 |", "| round | 40 | 1 |", "| FedAvg, float32 | 54,412 | 54,412 |"):
        assert row in text
    recorded = Bundle(copy).manifest["memory"]
    assert [r["work"] for r in recorded] == ["features", "personalize", "round"]
    assert verify(copy, interpreter=bench.any_interpreter()).ok
    for sizes in (("--examples", "a"), ("--examples", "0"), ("--threads", "1,0"), ("--threads", "")):
        assert "is not a list of numbers" in call("bench", copy, *sizes, code=2)
    for number in ("--repeat", "--chunk"):
        assert "0 is not in the range x>=1" in call("bench", copy, number, 0, code=2)


@pytest.fixture
def bare_python(tmp_path, monkeypatch):
    """A Python with packages, but without this one: without `site` nothing that is installed as editable is found."""
    python = tmp_path / "python"
    packages = sysconfig.get_paths()["purelib"]
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH="{packages}" "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # else it is found there
    return str(python)


@pytest.mark.parametrize("module", ["bench", "verification"])
def test_another_python_finds_the_modules_for_devices(bare_python, module, tmp_path):
    done = run_with(bare_python, module, str(tmp_path))
    assert done.returncode == 2 and "is not a bundle" in done.stdout + done.stderr


@pytest.mark.slow
def test_bench_in_another_python(bundle, bare_python, monkeypatch):
    monkeypatch.setattr(bench, "WORK", ("features",))
    (row,) = bench.bench(bundle, examples=(8,), threads=(1,), repeat=1, python=bare_python)["rows"]
    assert row["work"] == "features" and row["calls"] >= 1 and row["milliseconds"] > 0


@pytest.mark.slow
def test_bench_in_a_python_that_fails(bundle, tmp_path):
    with pytest.raises(BundleError, match="nowhere cannot be started: No such file"):
        bench.bench(bundle, python=str(tmp_path / "nowhere"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(BundleError, match="measuring features failed: broken$"):
        bench.bench(bundle, python=str(broken))


@pytest.mark.slow
def test_bytes_on_the_wire_are_those_of_the_payload(bundle):
    found = bench.wire(bundle)
    b, head = 64 * 200 + 200, 201 * 3
    assert found["PFLEGO, float32"] == {"down": 4 * b, "up": 4 * b + 16}
    assert found["PFLEGO, int8 up"]["up"] == b + 4 * 13 + 16
    assert found["FedAvg, float32"] == {"down": 4 * (b + head), "up": 4 * (b + head)}


@pytest.mark.slow
def test_simulate_round(run_folder):
    text = call("simulate-round", run_folder, "--rounds", 2)
    rows = [line.split() for line in text.splitlines()[1:3]]
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(float(row[2]) < 1e-4 and float(row[3]) < 1e-4 and row[4] == row[5] for row in rows)
    agree, moved = text.splitlines()[-1].split("; theta moved by ")
    assert agree == "devices and engine agree: no weight differs by more than 0.0001"  # Adam, rho 0.01
    assert 0.01 < float(moved) <= 0.02 * 1.001  # two steps of Adam, each of up to rho


def row(theta, heads, round_num=1, moved=0.1):
    return RoundComparison(round_num, 5, theta, heads, 0.9, 0.9, 1000, moved)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([row(1e-7, 1e-7), row(1e-7, 3e-3, 2)], (), "in round 2 a weight differs by 3.0e-03, and 0.0001 counts"),
        ([row(float("nan"), 0.0)], (), "in round 1 a weight differs"),
        ([row(0.0, float("nan"))], (), "in round 1 a weight differs by nan"),
        ([row(9e-5, 0.0)], (), None),  # a hundredth of rho: Adam
        ([row(2e-4, 0.0)], (), "and 0.0001 counts"),
        ([row(9e-5, 0.0)], ("--tolerance", "1e-5"), "and 1e-05 counts"),
        ([row(3e-3, 0.0)], ("--payload", "int8"), None),
        ([row(0.0, 0.0, moved=9e-5)], (), "nothing can be said of theta: it moved by 9.0e-05 at most, and 0.0001"),
        ([row(0.0, 0.0, moved=9e-5)], ("--tolerance", "1e-5"), None),
    ],
)
def test_the_verdict_of_simulate_round(monkeypatch, run_folder, rows, options, said):
    monkeypatch.setattr("tflite_export.rounds.simulate_round", lambda *_, **__: rows)
    text = call("simulate-round", run_folder, *options, code=0 if said is None else 1)
    assert ("agree" in text) == (said is None and "int8" not in options) and (said or "") in text


def test_help_names_the_optimizers_that_have_a_larger_tolerance():
    (told,) = [option.help for option in main.commands["simulate-round"].params if option.name == "tolerance"]
    for name in ("sgd", "momentum", "adam", "adamw", "adagrad", "yogi"):
        larger = rounding({"server_opt": name, "rho": 1.0}) > 1e-5
        assert bool(re.search(rf"\b{name}\b", told, re.IGNORECASE)) == larger, name


def test_a_tolerance_without_a_verdict_is_refused(tmp_path):
    said = call("simulate-round", tmp_path, "--payload", "int8", "--tolerance", 0.01, code=2)
    assert "--tolerance is for --payload float32" in said


def test_the_package_of_the_runs_own_engine_need_not_be_here(monkeypatch, run_folder):
    """The rounds are computed by the engine that is asked for: a run by TFF is compared where there is no TFF."""
    opened, as_it_is = [], Run.open
    monkeypatch.setattr(Run, "open", lambda folder, **how: opened.append(how) or as_it_is(folder, **how))
    monkeypatch.setattr("tflite_export.rounds.simulate_round", lambda *_, **__: [row(0.0, 0.0)])
    call("simulate-round", run_folder)
    assert opened == [{"engine": "local"}]


@pytest.mark.table
@pytest.mark.slow
def test_demo(run_folder, tmp_path):
    text = call("demo", run_folder, "--client", "phone 3", "--out", tmp_path / "b")
    assert "Client 3 exported" in text and "computes what TensorFlow does" in text
    before, after = (float(text.split(word)[1].split("%")[0]) for word in ("with a new head", "steps on the device"))
    assert after > before
    assert json.loads((tmp_path / "b" / "manifest.json").read_text())["client"] == 3
