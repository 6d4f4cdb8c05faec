"""What a user sees of TensorFlow and TFF: nothing, except what the user asked for and what is an error."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.processes import alive
from tfpfl.checks import quiet_tensorflow, traced_by_design
from tfpfl.cli.group import quiet_warnings

ROOT = Path(__file__).parents[1]
# As the example of the README, in less time, and several times: TensorFlow warns of tracing after five trainings.
PROGRAM = """
import sys
import tfpfl
from tfpfl import build_network

engine, trainings = sys.argv[1], int(sys.argv[2])
federation = tfpfl.Federation.build("digits", "round_robin", clients=20, K=2, seed=0, out="digits")
population = federation.population(tfpfl.Sampling("fixed", rate=0.2))
for seed in range(trainings):
    model = tfpfl.SplitModel(build_network("mlp200", federation.example_shape))
    algorithm = tfpfl.build_algorithm("pflego", model, population, tau=2)
    training = tfpfl.Training(algorithm, federation, seed=seed, engine=engine)
    training.run(rounds=1)
config = tfpfl.RunConfig(algorithm="pflego", network="mlp200", rounds=1, engine=engine)
with tfpfl.Run.create(config, "run", federation) as run:
    run.train()
    run.keras_model(0)
print("ours", training.store.history()[-1]["round"])
"""
PROCESS = """
import tfpfl
from tfpfl import build_network

federation = tfpfl.Federation.build("digits", "round_robin", clients=20, K=2, seed=0, out="digits")
population = federation.population(tfpfl.Sampling("fixed", rate=0.2))
model = tfpfl.SplitModel(build_network("mlp200", federation.example_shape))
process = tfpfl.federate(tfpfl.build_algorithm("pflego", model, population, tau=2), federation)
process.initialize()
print("ours", 1)
"""


def in_a_plain_shell(folder, *arguments, **environment):
    """(standard output, standard error) of a Python program."""
    plain = {k: v for k, v in os.environ.items() if k not in ("TF_CPP_MIN_LOG_LEVEL", "TFPFL_VERBOSE")}
    plain |= {"PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", *map(str, arguments)], cwd=folder, env=plain, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("trainings", slow_but([1, 6], 1))
def test_a_script_prints_what_is_ours_alone(tmp_path, trainings):
    """On this machine, whatever TensorFlow says of its processor, and without a warning of the sixth training."""
    assert in_a_plain_shell(tmp_path, PROGRAM, "local", trainings) == ("ours 1\n", "")


def test_the_news_that_no_setting_hides_are_dropped_and_nothing_else_is(tmp_path):
    """TensorFlow since 2.17 writes them while it is loaded; here a package with its name does."""
    (tmp_path / "tensorflow.py").write_text(
        "import os\n"
        "os.write(2, b'WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n')\n"
        "os.write(2, b'I0000 00:00:1795358072.8 31473 cudart_stub.cc:31] Could not find cuda drivers\\n')\n"
        "os.write(2, b'E0000 an error\\n')\n"
    )
    code = """
import importlib.util, os, sys
import tfpfl
assert importlib.util.find_spec("tensorflow")
import tensorflow
print([type(finder).__module__ for finder in sys.meta_path].count("tfpfl.checks"))
os.write(2, b"I0000 written later\\n")
"""
    both = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    assert in_a_plain_shell(tmp_path, code, **both) == ("0\n", "E0000 an error\nI0000 written later\n")
    for asked in ({"TFPFL_VERBOSE": "1"}, {"TF_CPP_MIN_LOG_LEVEL": "0"}):
        assert in_a_plain_shell(tmp_path, code, **both, **asked)[1].count("\n") == 4
    (tmp_path / "tensorflow.py").write_text("import os\nos.write(2, b'F0000 a crash\\n')\nos.abort()\n")
    done = subprocess.run(
        [sys.executable, "-c", "import tfpfl, tensorflow"],
        env={k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"} | both,
        capture_output=True,
        text=True,
    )
    assert done.returncode < 0 and "F0000 a crash" in done.stderr


@pytest.mark.slow
def test_everything_is_shown_to_those_who_ask(tmp_path):
    _, said = in_a_plain_shell(tmp_path, PROGRAM, "local", 6, TFPFL_VERBOSE="1")
    assert "triggered tf.function retracing" in said and "cpu_feature_guard" in said


@pytest.mark.slow
def test_a_script_through_tff_prints_what_is_ours_alone(tmp_path, tff):
    """TFF's worker, too; and nothing at the end of the process, when TFF's own context is deleted."""
    said, errors = in_a_plain_shell(tmp_path, PROGRAM, "tff", 1)
    assert said == "ours 1\n" and without_open_worker(errors) == ""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import tensorflow_federated as tff; tff.federated_computation(lambda: 1)();"])
def test_a_loop_of_ones_own_prints_what_is_ours_alone(tmp_path, tff, before):
    said, errors = in_a_plain_shell(tmp_path, "import tfpfl\n" + before + PROCESS)
    assert said == "ours 1\n" and without_open_worker(errors) == ""


OWN = """
import os
from pathlib import Path

import tfpfl
import tensorflow_federated as tff
from helpers.processes import descendants
from tfpfl.engines.tff.worker import require_tff

require_tff()
tff.federated_computation(lambda: tff.federated_value(1, tff.SERVER))()  # on a worker that TFF starts
commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(os.getpid())}
print(*(pid for pid, path in commands.items() if path.exists() and b"worker_binary" in path.read_bytes()))
"""


@pytest.mark.slow
def test_a_worker_that_tff_started_ends_with_the_process(tmp_path, tff):
    said, errors = in_a_plain_shell(tmp_path, OWN, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    workers = [int(pid) for pid in said.split()]
    assert workers and [pid for pid in workers if alive(pid)] == [] and errors == ""


def without_open_worker(errors):
    """Without our own warning, on systems where TFF's worker cannot be isolated."""
    return "".join(line for line in errors.splitlines(True) if "TFF's worker listens on port" not in line)


@pytest.mark.parametrize(
    ("environment", "imported", "level"),
    [
        ({}, False, "3"),
        ({"TF_CPP_MIN_LOG_LEVEL": "0"}, False, "0"),
        ({"TFPFL_VERBOSE": "1"}, False, None),
        ({"TFPFL_VERBOSE": "0"}, False, "3"),
        ({}, True, None),
    ],
)
def test_settings_of_the_user_stay(monkeypatch, environment, imported, level):
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TFPFL_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not imported:
        monkeypatch.delitem(sys.modules, "tensorflow")
    quiet_tensorflow()
    assert os.environ.get("TF_CPP_MIN_LOG_LEVEL") == level


@pytest.mark.parametrize(
    ("given", "verbose", "level"),
    [
        (logging.NOTSET, "", logging.ERROR),
        (logging.INFO, "", logging.INFO),
        (logging.NOTSET, "1", logging.NOTSET),
    ],
)
def test_a_command_keeps_the_level_of_the_logger(monkeypatch, given, verbose, level):
    monkeypatch.setenv("TFPFL_VERBOSE", verbose)
    logger = logging.getLogger("tensorflow")
    monkeypatch.setattr(logger, "level", given)
    quiet_warnings()
    assert logger.level == level


def warned(caplog, number, mark) -> bool:
    """Whether TensorFlow warns of six graphs that are made from the same code, which returns x + number."""
    caplog.clear()
    code = eval(f"lambda x: x + {number}")
    for _ in range(6):
        mark(tf.function(code, autograph=False))(tf.constant(1.0))
    return "triggered tf.function retracing" in caplog.text


def test_graphs_that_are_made_anew_by_design_cause_no_warning_and_others_do(caplog, monkeypatch):
    monkeypatch.delenv("TFPFL_VERBOSE", raising=False)
    logger = logging.getLogger("tensorflow")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(logger, "propagate", True)
    assert not warned(caplog, 31.5, traced_by_design)
    assert warned(caplog, 32.5, lambda graph: graph)
    monkeypatch.setenv("TFPFL_VERBOSE", "1")
    assert warned(caplog, 33.5, traced_by_design)
