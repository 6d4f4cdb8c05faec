"""The commands of live rounds, as processes: a server, and devices on LiteRT without TensorFlow where that is here."""

import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from tfpfl.cli import main
from tfpfl.live.serve import write_data
from tfpfl.runs.config import RunError
from tfpfl.runs.run import Run


def said(*arguments):
    """(exit code, output) of a command."""
    found = CliRunner().invoke(main, list(map(str, arguments)))
    return found.exit_code, found.output


def test_bad_input_is_told_in_one_line(run, tmp_path):
    folder = run.folder
    run.close()
    examples = tmp_path / "data"
    examples.mkdir()
    cases = {
        ("serve", tmp_path / "nothing"): "nothing",
        ("serve", folder, "--host", "0.0.0.0"): "give --tls CERT KEY",
        ("serve", folder, "--quorum", "1.5"): "1.5",
        ("serve", folder, "--quorum", "nan"): "nan is no number",
        ("serve", folder, "--wait-for", "11"): "wait_for is 11, but the run has 10 clients",
        ("serve", folder, "--web", examples): "holds no page",
        ("serve", folder, "--revoke", "12"): "has no client 12",
        ("serve", folder, "--revoke", "1", "--new-token", "1"): "client 1: give --revoke or --new-token, not both",
        ("device", "ftp://x", "--data", examples, "--state", tmp_path / "s"): "has no train.npz",
        ("device", "ftp://x", "--data", examples, "--state", tmp_path / "s", "--runtime", "tf"): "has no train.npz",
        ("serve", folder, "--cohort", "20-10"): "the smaller number first",
        ("serve", folder, "--most-examples", "500"): "--most-examples is for runs on places",
        ("watch", "http://127.0.0.1:1", "--run", folder, "--token", "x"): "give --run or --token, not both",
    }
    for arguments, told in cases.items():
        code, output = said(*arguments)
        assert code in (1, 2) and told in output and "Traceback" not in output, (arguments, output)


def test_data_of_another_run_do_not_stay_with_a_device(run, tmp_path):
    """A client without validation examples would go on scoring those of an earlier run."""
    (tmp_path / "7").mkdir()
    np.savez(tmp_path / "7" / "validation.npz", x=np.zeros((1, 8, 8, 1), np.float32), y=np.zeros(1, np.int32))
    (tmp_path / "7" / "notes.txt").write_text("mine")
    assert not int(run.federation.num_examples("validation")[7])
    write_data(run.federation, run.population, 7, tmp_path / "7")
    assert {path.name for path in (tmp_path / "7").iterdir()} == {"train.npz", "test.npz", "about.json", "notes.txt"}


def test_the_heads_of_a_live_run_are_not_looked_for_in_its_folder(run):
    folder = run.folder
    (folder / "live.sqlite").touch()
    run.close()
    code, output = said("resume", folder)
    assert code == 1 and "the heads are on the devices" in output, output
    with Run.open(folder) as again, pytest.raises(RunError, match="the heads are on the devices"):
        again.evaluate()


@pytest.mark.slow
def test_the_demo_of_live_rounds(tmp_path):
    command = [sys.executable, "-m", "tfpfl", "demo-live", "--rounds", "3", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "All rounds took" in done.stdout and "personal" in done.stdout
    away = float(done.stdout.rpartition("theta differs by ")[2].split()[0])
    assert away < 1e-4
