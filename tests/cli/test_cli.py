"""The command line, as a user meets it."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

from helpers import small_runs as runs
from tfpfl.algorithms import ALGORITHMS
from tfpfl.checks import InvalidArgument, Unavailable
from tfpfl.cli import main
from tfpfl.data import PARTITIONERS, Federation
from tfpfl.engines.machines import MachinesError
from tfpfl.runs import Run, training
from tfpfl.runs.command import command
from tfpfl.runs.config import RunError, file_hash
from tfpfl.runs.consent import is_allowed
from tfpfl.runs.folders import remove_demo
from tfpfl.runs.store import StoreError
from tfpfl.studies import Record

pytestmark = pytest.mark.usefixtures("elsewhere")


def tfpfl(*arguments, code=0):
    """Runs a command and gives what it printed; errors must be ours."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def error(*arguments, code=1) -> str:
    """The one line in which the command says what is wrong."""
    output = tfpfl(*arguments, code=code)
    lines = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and "Traceback" not in output
    if code == 1:
        assert output.splitlines()[-1] == lines[0]
    return lines[0]


SMALL = ("--rounds", 3, "--participation", 0.5, "--tau", 3, "--beta", 0.05)


@pytest.mark.slow
def test_a_run_that_patience_ended_is_not_told_to_take_more_rounds(federation):
    still = ("--algorithm", "local", "--eta", 1e-9, "--steps", 1, "--patience", 1, "--evaluate-every", 1)
    tfpfl("run", "--federation", federation.path, *still, "--participation", 1, "--rounds", 9, "--out", "run")
    before = runs.saved("run")
    output = tfpfl("resume", "run", "--rounds", 12)
    assert " of 12: validation" in output and "Nothing was left" not in output
    assert 0 < len(before["history"]) < 9 and runs.saved("run") == before


def test_create_only_refuses_what_the_folder_does_not_keep(federation):
    """It was ignored, and a later `tfpfl resume` knew nothing of it."""
    logs = {"--log": ["mlflow"]}
    for options in (
        logs,
        logs | {"--log-tables": []},
        {"--engine": ["ray"], "--address": ["auto"], "--deadline": [9]},
        {"--engine": ["tff"], "--workers": ["a:1"]},
        {"--engine": ["tff"], "--no-isolation": []},
    ):
        given = [text for name, values in options.items() for text in (name, *values)]
        said = error("run", "--federation", federation.path, *given, "--create-only", "--out", "run", code=2)
        assert all(name in said for name in options.keys() - {"--engine"}) and "tfpfl resume" in said
        assert not os.path.exists("run")


def test_a_refused_resume_changes_nothing(federation, tmp_path):
    tfpfl("run", "--federation", federation.path, *SMALL, "--create-only", "--out", "run")
    before = (tmp_path / "run/config.json").read_text()
    refused = error("resume", "run", "--rounds", 7, "--workers", "localhost:1")
    assert "--workers is for --engine tff, found --engine local" in refused
    assert (tmp_path / "run/config.json").read_text() == before


def test_patience_without_validation_examples_is_refused(tmp_path):
    """It could never stop the run."""
    some = ("--dataset", "digits", "--clients", 5, "--patience", 12, "--rounds", 12, "--create-only")
    refused = error("run", *some, "--validation", 0, "--out", "run")
    assert "patience=12 looks at validation examples, and the federation has none" in refused
    assert "raise --validation, or leave patience out" in refused
    tfpfl("partition", "--dataset", "digits", "--clients", 5, "--validation", 0, "none")
    refused = error("run", "--federation", "none", "--patience", 12, "--out", "run")
    assert "make it anew with tfpfl partition --validation 0.2" in refused
    said = tfpfl("run", *some, "--validation", 0.2, "--evaluate-every", 5, "--out", "run")
    assert "Warning: patience=12 cannot stop this run: of its 12 rounds 2 count for it." in said


def test_run_resume_evaluate(federation, tmp_path):
    output = tfpfl("run", "--federation", federation.path, *SMALL, "--out", "a/run")
    assert "3/3 rounds" in output and "personal" in output and output.endswith("Written to a/run\n")
    config = json.loads((tmp_path / "a/run/config.json").read_text())
    assert (config["hyperparameters"]["tau"], config["hyperparameters"]["beta"]) == (3, 0.05)
    before = runs.saved("a/run")
    assert "Nothing was left to do: the run ended with round 3. --rounds extends it." in tfpfl("resume", "a/run")
    assert runs.saved("a/run") == before
    output = tfpfl("resume", "a/run", "--rounds", 4)
    assert "4/4 rounds" in output and "Nothing was left" not in output
    assert len(runs.saved("a/run")["history"]) == 4
    output = tfpfl("evaluate", "a/run")
    assert "all clients after round 4" in output and "train" in output
    summary = json.loads((tmp_path / "a/run/summary.json").read_text())
    last = next(
        r
        for r in summary["results"]
        if (r["model"], r["when"], r["split"], r["mean"]) == ("personal", "last", "test", "clients")
    )
    assert f"{100 * last['accuracy']:.2f} ± {100 * last['accuracy_ci95']:.2f}" in output
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.slow
def test_the_default_folder_says_what_the_run_is(federation, tmp_path):
    tfpfl("run", "--federation", federation.path, "--rounds", 1, "--algorithm", "fedavg", "--steps", 2, "--seed", 3)
    assert (tmp_path / "runs/fedavg-federation-s3/summary.json").exists()


@pytest.mark.slow
def test_interrupted_by_the_keyboard(federation, monkeypatch):
    work = training.Training._round

    def interrupted(self, t, *arguments):
        if t == 3:
            raise KeyboardInterrupt
        return work(self, t, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(training.Training, "_round", interrupted)
        output = tfpfl("run", "--federation", federation.path, *SMALL, "--out", "run", code=130)
    assert "Interrupted; 2 rounds are saved. Continue with: tfpfl resume run" in output
    tfpfl("resume", "run")
    whole = runs.train("whole", federation, rounds=3, evaluate_every=10, hyperparameters={"tau": 3}).folder
    assert runs.saved("run") == runs.saved(whole)


@pytest.mark.table
@pytest.mark.slow
def test_a_run_with_an_optimizer_at_both_ends(federation):
    """Its command can be repeated, and `compare` and `sweep` know the options as hyperparameters."""
    asked = ("--server-opt", "adam", "--server-eta", 0.02, "--client-opt", "adamw", "--client-weight-decay", 0.1)
    tfpfl("run", "--federation", federation.path, "--algorithm", "fedavg", *asked, "--rounds", 1, "--out", "run")
    with Run.open("run") as run:
        hyper = run.config.hyperparameters
        assert (hyper["server_opt"], hyper["server_eta"], hyper["client_weight_decay"]) == ("adam", 0.02, 0.1)
        words = command(run.config, "run")
        assert " ".join(map(str, asked[:4])) in words and "--client-opt adamw --client-weight-decay 0.1" in words
        assert type(run.training().server_state()).__name__ == "Optimized"
    tfpfl("evaluate", "run")


def test_the_first_models_of_a_method_and_of_its_network(federation):
    """Ditto's `init` and the network's are two options, and the command that repeats the run has both."""
    asked = ("--init", "first_broadcast", "--network-init", "stax")
    tfpfl("run", "--federation", federation.path, "--algorithm", "ditto", *asked, "--create-only", "--out", "run")
    with Run.open("run") as run:
        assert (run.config.hyperparameters["init"], run.config.init) == ("first_broadcast", "stax")
        words = shlex.split(command(run.config, "again"))
    assert {*asked} < {*words}
    tfpfl(*words[1:], "--create-only")
    with Run.open("run") as run, Run.open("again") as again:
        assert again.config == run.config


@pytest.mark.table
@pytest.mark.slow
def test_a_run_that_diverges(federation):
    hyper = ("--rho", 1e30, "--server-opt", "sgd")
    found = error("run", "--federation", federation.path, "--rounds", 9, *hyper, "--participation", 0.5, "--out", "run")
    assert "diverged" in found and "client" in found
    assert found[len("Error: ") :] in tfpfl("evaluate", "run")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("rum",), 2, "unknown command 'rum'; did you mean 'run'?"),
        (("run", "--tua", 3), 2, "unknown option --tua; did you mean --tau? options of pflego.*--beta.*--classes-per"),
        (("partition", "--out", "x"), 2, "--out is not an option of this command: write OUT alone, without --out"),
        (("run", "--algorithm", "fedavg", "--tau", 3), 2, "unknown option --tau;.*options of fedavg.*--eta, --steps"),
        (
            ("run", "--partition", "dirichlet", "--classes-per-client", 3),
            2,
            "unknown option --classes-per-client.*alpha",
        ),
        (
            ("run", "--algorithm", "scaffold", "--client-opt", "adam"),
            2,
            "scaffold has no option --client-opt: its control variates .* Use fedavg",
        ),
        (
            ("run", "--algorithm", "pflego", "--server-eta", 3),
            2,
            "--server-eta: its server has an optimizer of its own",
        ),
        (("run", "--algorithm", "fedavg", "--server-opt", "lion"), 1, "unknown server_opt 'lion'; .*momentum, adagrad"),
        (("partition", "x", "--tau", 3), 2, "unknown option --tau;.*options of partition round_robin: --classes-per"),
        (("run", "--tau", "three"), 2, "'three' is not a valid integer"),
        # Of an option that is there twice the last counts, also for which other options there are.
        (("run", "--algorithm", "pflego", "--algorithm", "fedavg", "--tau", 3), 2, "unknown option --tau;.*of fedavg"),
        (("reproduce", "--plot", "q.png"), 2, "--plot: say of which experiment, as in tfpfl reproduce NAME"),
        (("reproduce", "pflego-table1", "--over", "bytes"), 2, "--over says what --plot draws over: give --plot FILE"),
        (("reproduce", "--write", "no/q.md"), 1, "no/q.md cannot be written: there is no folder no"),
        (("run", "--algorithm", "pflgo"), 1, "unknown algorithm 'pflgo'; did you mean 'pflego'?"),
        (("run", "--algorithm=pflgo"), 1, "unknown algorithm 'pflgo'; did you mean 'pflego'?"),
        (("run", "--partition", "idd"), 1, "unknown partition 'idd'; did you mean 'iid'?"),
        (("run", "--dataset", "digitz"), 1, "unknown data set 'digitz'; did you mean digits"),
        (("run", "--dataset", "mnist"), 1, "--allow-download"),
        (("run", "--preset", "papper"), 1, "unknown preset of pflego 'papper'; did you mean 'paper'?"),
        (("run", "--tau", 0), 1, "tau must be at least 1 .*found 0"),
        (("run", "--participation", 0), 1, r"participation must lie in \(0, 1\], found 0"),
        (("run", "--clients", 3), 1, "cannot hold all 10 classes"),
        (("run", "--federation", __file__), 1, "is a file or in one, and .*tfpfl partition --from FILE"),
        (("run", "--network", "net.h5"), 1, "unknown network 'net.h5'.* A network of your own is a FILE.keras"),
        (("run", "--sampling", "range"), 1, "sampling='range' needs sampling_range, the smallest and the la"),
        (("run", "--federation", "nowhere"), 1, "nowhere is not a federation: it has no manifest.json"),
        (("run", "--federation", "f", "--clients", 9, "--alpha", 1), 2, "unknown option --alpha"),
        (
            ("run", "--federation", "f", "--clients", 9, "--classes-per-client", 3),
            2,
            "leave out --clients, --classes-per",
        ),
        (("resume", "nowhere"), 1, "nowhere is not a run folder: it has no config.json"),
        (("evaluate", "nowhere"), 1, "nowhere is not a run folder"),
        (("partition", "x", "--seed", -1), 1, "the seed must be an integer >= 0, found -1"),
        (("partition", "x", "--dataset", "synthetic", "--data-seed", -1), 1, "seed must be an integer >= 0, found -1"),
        (("run", "--sampling", "range", "--sampling-range", 3, 2), 1, "low=3, high=2"),
        (("partition", "x", "--test-fraction", 0.5, "--compact-labels"), 2, "--test-fraction and --compact-labels are"),
        (
            ("partition", "x", "--from", "t", "--client", "c", "--label", "l", "--split", "s", "--test-fraction", 0.5),
            2,
            "--test-fraction is for a table without --split",
        ),
        (("run", "--augment", "none"), 1, "augment='none' is only for omniglot, found digits: leave it out"),
        (("partition", "x", "--dataset", "synthetic", "--pixels", "signed"), 1, "is for images, and synthetic has"),
        (("run", "--jitter", 0.3), 1, "client_seconds is 0, so that there is no clock: give client_seconds"),
        (("new-clients", "r", "--plot", "curves.docx"), 2, r"written as .*\.png"),
        (("algorithms", "fedavgg"), 1, "unknown algorithm 'fedavgg'; did you mean 'fedavg'?"),
    ],
)
def test_mistakes(arguments, code, message, tmp_path):
    assert re.search(message.replace("?", r"\?"), error(*arguments, code=code))
    assert not (tmp_path / "runs").exists() and not (tmp_path / "x").exists()


def test_a_folder_where_nothing_can_be_written(federation, tmp_path):
    (tmp_path / "file").touch()
    found = error("run", "--federation", federation.path, "--rounds", 1, "--out", "file/run")
    assert "file" in found and "Not a directory" in found


@pytest.mark.slow
def test_a_run_that_exists(federation, a_run):
    before = runs.saved(a_run)
    found = error("run", "--federation", federation.path, "--rounds", 1, "--tau", 1, "--out", "a_run")
    assert "continue it with `tfpfl resume a_run`" in found and runs.saved(a_run) == before


def test_trace_shows_where_an_error_comes_from():
    for arguments in (("--trace", "resume", "nowhere"), ("resume", "nowhere", "--trace")):
        result = CliRunner().invoke(main, arguments)
        assert type(result.exception).__name__ == "RunError"


def planted(error):
    def broken(*_, **__):
        raise error

    return broken


@pytest.mark.parametrize("bug", [ValueError("operands do not match"), RuntimeError("no graph"), KeyError("theta")])
def test_a_bug_is_not_taken_for_an_error_of_ours(bug, federation, monkeypatch):
    monkeypatch.setattr(training.Training, "run", planted(bug))
    result = CliRunner().invoke(main, ["run", "--federation", str(federation.path), "--out", "run"])
    assert result.exception is bug and "Error: " not in result.output


@pytest.mark.parametrize("kind", [InvalidArgument, Unavailable, StoreError, MachinesError, FileNotFoundError])
def test_an_error_of_ours_is_one_line(kind, federation, monkeypatch):
    monkeypatch.setattr(training.Training, "run", planted(kind("this is wrong")))
    assert error("run", "--federation", federation.path, "--out", "run") == "Error: this is wrong"


@pytest.mark.parametrize("command", ["evaluate", "resume", "new-clients"])
def test_what_is_no_run_folder_is_refused_before_its_code_is_allowed(command, tmp_path):
    file = tmp_path / "net.keras"
    file.write_bytes(b"somebody's code")
    assert "is not a run folder" in error(command, file, "--allow-code")
    assert not is_allowed(file_hash(file))


@pytest.mark.slow
def test_a_bug_shows_its_stack_trace(tmp_path):
    """In a process of its own, as a user sees it."""
    program = (
        "import numpy as np, tfpfl.runs.run; from tfpfl.cli import main;"
        "tfpfl.runs.run.read_config = lambda folder: np.zeros(3) + np.zeros(4); main(['evaluate', 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1 and "\nTraceback" in "\n" + done.stderr
    assert done.stderr.splitlines()[-1].startswith("ValueError: operands could not be broadcast together")


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))


@pytest.mark.slow
def test_a_disk_that_is_full(federation):
    """The kernel refuses to let a file grow: one line, and what was saved is there."""
    command = [
        sys.executable,
        "-m",
        "tfpfl",
        "run",
        "--federation",
        str(federation.path),
        "--rounds",
        "300",
        "--tau",
        "1",
    ]
    process = subprocess.run(
        [*command, "--out", "run"], capture_output=True, text=True, preexec_fn=limit_files, timeout=1800, env=os.environ
    )
    assert process.returncode == 1 and "Traceback" not in process.stderr
    found = process.stderr.strip().splitlines()[-1]
    assert found.startswith("Error: ") and "was not saved" in found
    done = len(runs.saved("run")["history"])
    assert f"round {done} is the last whole one" in found and 0 < done < 300
    assert f"all clients after round {done}" in tfpfl("evaluate", "run")


@pytest.mark.slow
def test_partition(tmp_path):
    output = tfpfl("partition", "shared/digits", "--clients", 6, "--partition", "dirichlet", "--partition-alpha", 0.5)
    federation = Federation.load("shared/digits")
    assert federation.num_clients == 6 and federation.hash in output and "dirichlet(alpha=0.5" in output
    assert (tmp_path / "shared/digits-classes.png").read_bytes().startswith(b"\x89PNG")
    assert "exists already" in error("partition", "shared/digits", "--clients", 6)
    # The same arguments make the same federation for a run.
    asked = ("--clients", 6, "--partition", "dirichlet", "--partition-alpha", 0.5)
    tfpfl("run", *asked, "--rounds", 1, "--tau", 1, "--out", "run")
    assert json.loads((tmp_path / "run/config.json").read_text())["federation_hash"] == federation.hash


def test_datasets():
    output = tfpfl("datasets")
    assert all(name in output for name in ("digits", "synthetic", "fashion_mnist", "omniglot", "TFDS_DATA_DIR"))


def test_algorithms():
    output = tfpfl("algorithms")
    for name, row in ALGORITHMS.items():
        assert name in output
        told = tfpfl("algorithms", name)
        assert row.title in told and all("--" + h.replace("_", "-") in told for h in row.hyperparameters)


@pytest.mark.parametrize("command", sorted(main.commands))
def test_help(command):
    output = tfpfl(command, "--help")
    assert output.startswith(f"Usage: main {command}")
    if command == "run":
        assert "--tau INTEGER" not in output and "--classes-per-client INTEGER" in output
        for algorithm, row in ALGORITHMS.items():
            told = tfpfl("run", "--algorithm", algorithm, "--help")
            assert all("--" + h.replace("_", "-") in told for h in row.hyperparameters)
        for partition in PARTITIONERS:
            tfpfl("run", "--partition", partition, "--help")


def test_every_command_is_in_the_help():
    output = tfpfl("--help")
    assert {"run", "resume", "evaluate", "partition", "datasets", "algorithms", "demo"} <= set(main.commands)
    assert all(f"\n  {command} " in output for command in main.commands) and "--trace" in output


def test_the_lists_of_commands_are_whole_sentences():
    from tflite_export.cli import main as export

    for group in (main, export):
        listed = CliRunner().invoke(group, ["--help"], terminal_width=80).output.partition("Show this message")[2]
        rows = [line for line in listed.splitlines() if line.startswith("  ")]
        assert len(rows) == len(group.commands) and "..." not in listed


@pytest.mark.table
@pytest.mark.slow
def test_demo(tmp_path):
    """Both of its tables, when which of them holds, and a later demo that replaces an earlier one."""
    output = tfpfl("demo", "--engine", "local", "--rounds", 2, "--out", "demo")
    tables, _, story = " ".join(output.split()).partition("Sharing pays when a client has few examples")
    assert "EV-local" in tables and "the second table" in story and "Written to demo" in story
    for title in ("80 clients of 5 digits", "20 clients of 2 digits", "PFLEGO", "FedAvg", "Local", "EV-all", "worst"):
        assert title in output
    folders = sorted((tmp_path / "demo").glob("*/*"))
    assert [str(f.relative_to(tmp_path / "demo")) for f in folders] == [
        f"{data}/{algorithm}" for data in ("few", "many") for algorithm in ("fedavg", "local", "pflego")
    ]
    assert {len(runs.saved(folder)["history"]) for folder in folders} == {2}
    remove_demo(tmp_path)  # the folder demo in it is not the file
    remove_demo(tmp_path / "demo")
    assert all(folder.exists() for folder in folders)
    with Run.open(folders[0]), pytest.raises(RunError, match="another run is being created or trained"):
        remove_demo(folders[0])
    (tmp_path / "demo/few/pflego/demo").unlink()  # nothing else is replaced
    assert "pflego exists and is not empty" in error("demo", "--engine", "local", "--rounds", 1, "--out", "demo")


@pytest.mark.slow
def test_the_demo_shows_when_sharing_pays(tmp_path):
    """With few examples both methods that share are ahead of Local, with many examples of two digits it is not behind.

    By more than half of the interval of Local over the clients, with half of the demo's rounds.
    """
    tfpfl("demo", "--engine", "local", "--rounds", 30, "--out", "demo")
    few, many = (
        {name: Record.read(tmp_path / "demo" / data / name).result() for name in ("pflego", "fedavg", "local")}
        for data in ("few", "many")
    )
    assert few["fedavg"].accuracy > few["local"].accuracy + few["local"].accuracy_ci95
    assert few["pflego"].accuracy > few["local"].accuracy
    assert many["local"].accuracy > many["fedavg"].accuracy + many["fedavg"].accuracy_ci95
    assert many["local"].accuracy > many["pflego"].accuracy - many["local"].accuracy_ci95
