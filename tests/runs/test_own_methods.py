"""Runs of a method of the user's own: they go on when its file has changed, and run no code that was not allowed."""

import json
import pickle
import shlex
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from helpers import small_runs as runs
from tflite_export.cli import main as export
from tfpfl import ALGORITHMS, Method, RunConfig, check_algorithm
from tfpfl.algorithms import fedavg, own
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.runs import allow_code, read_config
from tfpfl.runs.command import command
from tfpfl.runs.config import RunError
from tfpfl.runs.run import Run
from tfpfl.studies import comparison, plots
from tfpfl.studies.records import Record
from tfpfl.studies.report import render
from tfpfl.studies.run_groups import group_runs

MINE = Path(__file__).parents[1] / "helpers" / "own_methods"
FEDALA, FEDDWA = MINE / "fedala.py", MINE / "feddwa.py"

LOUD = '''
from pathlib import Path
from tfpfl.algorithms import fedavg

Path("{marker}").touch()  # what a stranger's file would do

def loud(model, population, *, eta: float = 0.1):
    """Loud: FedAvg in a file that says that it was run."""
    return fedavg(model, population, eta=eta, steps=2)
'''


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch, tmp_path):
    """A cache of its own; and what the test loads is forgotten at its end."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    path = list(sys.path)
    yield
    new_process()
    sys.path[:] = path


def new_process(*modules):
    """Forgets what was loaded, as a new process has; consent stays."""
    for loaded in own._loaded.values():
        if loaded.code.kind == "file" and str(Path(loaded.code.place).parent) in sys.path:
            sys.path.remove(str(Path(loaded.code.place).parent))
    own._loaded.clear()
    own.forget_used()
    for name in [name for name in sys.modules if name.startswith("tfpfl_own_method_") or name in modules]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def of_loud(six_clients, tmp_path_factory):
    """A run of one round, of a method that leaves a mark when its file is run; and the cache of who made it."""
    folder = tmp_path_factory.mktemp("loud")
    (folder / "loud.py").write_text(LOUD.format(marker=folder / "was_run"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TFPFL_CACHE", str(folder / "cache"))
        patched.setattr("tfpfl.runs.protocols.LAST_ROUNDS", runs.SHORT_END)
        good(*run_of(f"{folder / 'loud.py'}:loud", six_clients, folder / "run", "--rounds", 1, "--new-clients", 1))
    new_process()
    return folder


@pytest.fixture
def loud(of_loud, tmp_path, short_end):
    """(the method's file, the mark that it was run, the run folder), with the consent of who made it."""
    new_process()
    shutil.copytree(of_loud / "cache", tmp_path / "cache")
    marker = of_loud / "was_run"
    marker.unlink(missing_ok=True)
    yield of_loud / "loud.py", marker, shutil.copytree(of_loud / "run", tmp_path / "run")
    (of_loud / "loud.py").write_text(LOUD.format(marker=marker))


def _own_ones(hyperparameters):
    """Without those of the server's optimizer, which every method has."""
    return {name: value for name, value in hyperparameters.items() if not name.startswith("server_")}


def call(*words, program=main):
    return CliRunner().invoke(program, list(map(str, words)))


def good(*words, program=main):
    done = call(*words, program=program)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words, program=main):
    done = call(*words, program=program)
    assert done.exit_code == 1 and "Traceback" not in done.output, done.output
    return " ".join(done.output.split())


def run_of(name, federation, out, *more):
    return ["run", "--algorithm", name, "--federation", federation.path, "--rounds", 2, "--out", out, *more]


@pytest.mark.slow
def test_a_run_goes_on_when_the_file_has_changed(loud, tmp_path):
    file, _, out = loud
    config = json.loads((out / "config.json").read_text())
    assert config["algorithm"] == "loud.py:loud" and config["format"] == 7
    assert config["own_method"]["place"] == str(file) and config["own_method"]["title"] == "Loud"
    assert _own_ones(config["hyperparameters"]) == {"eta": 0.1}
    assert (out / "method.py").read_bytes() == file.read_bytes()
    file.write_text("raise AssertionError('the changed file is run')")
    good("resume", out, "--rounds", 2)
    page = tmp_path / "report.html"
    good("report", out, "--out", page)
    assert "Loud" in page.read_text()


@pytest.mark.slow
def test_fedala_is_resumed_evaluated_compared_and_reported(six_clients, tmp_path, short_end):
    """With the same bits as a run that was not interrupted."""
    options = ["--steps", 2, "--eta-mix", "0.5", "--labels", "local", "--new-clients", 1, "--participation", 0.5]
    for out, rounds in (("whole", 3), ("run", 2)):
        good(*run_of(f"{FEDALA}:fedala", six_clients, tmp_path / out, *options, "--rounds", rounds))
    good(*run_of("fedavg", six_clients, tmp_path / "fedavg", "--steps", 2, "--labels", "local", "--new-clients", 1))
    out = tmp_path / "run"
    assert _own_ones(read_config(out).hyperparameters) == {"eta": 0.05, "steps": 2, "eta_mix": 0.5, "first": 10}
    new_process()
    good("resume", out, "--rounds", 3)
    ours, whole = runs.saved(out), runs.saved(tmp_path / "whole")
    assert ours["server"] == whole["server"] and ours["client"] == whole["client"]
    new_process()
    good("evaluate", out)
    good("new-clients", out, "--epochs", 1)
    assert "FedALA" in good("compare", out, tmp_path / "fedavg")
    good("report", out, tmp_path / "fedavg", "--baseline", "fedavg", "--out", tmp_path / "report.html")
    assert "FedALA" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "tff"])
def test_a_method_with_messages_of_its_own_for_each_client(six_clients, tmp_path, short_end, engine, request):
    if engine == "tff":
        request.getfixturevalue("tff")
    out = tmp_path / "run"
    good(*run_of(f"{FEDDWA}:FEDDWA", six_clients, out, "--steps", 2, "--preset", "near", "--engine", engine))
    assert _own_ones(read_config(out).hyperparameters) == {"neighbours": 1, "eta": 0.05, "steps": 2}
    with Run.open(out, engine="local") as run:
        assert run.config.title == "FedDWA" and run.algorithm.message_per_client
        weights = run.matrices()["weights"]
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
        assert (np.count_nonzero(weights, axis=1) == 1).all()  # one neighbour


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), [(FEDALA, "fedala"), (FEDDWA, "FEDDWA")])
def test_the_battery_passes(file, name):
    method = own.own_method(f"{file}:{name}").method
    findings = check_algorithm(lambda model, population: method.builder(model, population, eta=0.2, steps=4))
    assert [str(f) for f in findings if f.status == "FAILED"] == []


@pytest.mark.slow
def test_fedala_without_learning_is_fedavg(six_clients, tmp_path):
    """Its weights stay 1 then, and a client takes the whole shared head; with learning, it does not."""
    servers = {}
    for algorithm, options in (("fedavg", {}), ("fedala", {"eta_mix": 0.0}), ("fedala", {"eta_mix": 2.0})):
        name = algorithm if algorithm == "fedavg" else f"{FEDALA}:fedala"
        given = {"algorithm": name, "labels": "global", "rounds": 3, "participation": 0.5, "evaluate_every": 0}
        config = RunConfig(**given, hyperparameters={"eta": 0.05, "steps": 3} | options)
        with Run.create(config, tmp_path / str(len(servers)), six_clients) as run:
            run.train()
            servers[algorithm, options.get("eta_mix")] = run.training().server_state()
    ours, without, learned = (tf.nest.flatten(server) for server in servers.values())
    for a, b in zip(ours, without, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(ours, learned, strict=True)) > 1e-3


@pytest.mark.slow
def test_no_code_of_a_stranger_runs(loud, tmp_path, monkeypatch):
    _, marker, out = loud
    good("evaluate", out)  # by the one who made it, without a word more
    assert marker.exists()

    sent = shutil.copytree(out, tmp_path / "sent")
    marker.unlink()
    new_process()
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "theirs"))
    for words in (["evaluate"], ["resume", "--rounds", 3], ["new-clients"]):
        said = refused(*words, sent)
        assert "the method loud.py:loud of the run" in said and "method.py" in said and "use --allow-code" in said
    words = ["export", "--client", 0, "--out", tmp_path / "bundle"]
    assert "--allow-code" in refused(*words, sent, program=export)
    good("report", sent, "--out", tmp_path / "report.html")  # reads the results only
    good("compare", sent)
    good("cite", "--run", sent)
    assert not marker.exists()

    good("evaluate", sent, "--allow-code")
    assert marker.exists()
    new_process()
    good("evaluate", sent)

    # another content was not allowed, also if config.json has its hash
    config = json.loads((sent / "config.json").read_text())
    changed = (sent / "method.py").read_bytes() + b"# changed\n"
    (sent / "method.py").write_bytes(changed)
    assert "method.py was changed: its sha256 is not the one in config.json" in refused("evaluate", sent)
    config["own_method"]["sha256"] = own.hashlib.sha256(changed).hexdigest()
    (sent / "config.json").write_text(json.dumps(config))
    marker.unlink()
    new_process()
    assert "use --allow-code" in refused("evaluate", sent) and not marker.exists()


@pytest.mark.slow
def test_a_hostile_configuration_runs_nothing(loud, monkeypatch, tmp_path):
    """It may name any file of this machine, and say that it is an entry point, which needs no consent."""
    file, marker, a_run = loud
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "theirs"))
    config = json.loads((a_run / "config.json").read_text())
    sha256 = own.hashlib.sha256(file.read_bytes()).hexdigest()
    entry = {"function": "loud", "package": None, "sha256": sha256, "title": "x", "place": str(file)}
    tries = [(f"{file}:loud", None), ("loud.py:loud", None)]
    for kind in ("file", "module", "entry point"):
        for name in (f"{file}:loud", "loud.py:loud"):
            tries.append((name, entry | {"kind": kind, "name": name}))
            tries.append((name, entry | {"kind": kind, "name": name, "place": "loud"}))
    for algorithm, own_method in tries:
        text = json.dumps(config | {"algorithm": algorithm, "own_method": own_method})
        (a_run / "config.json").write_text(text)
        for read in (Run.open, Record.read, read_config):
            try:
                found = read(a_run)
            except InvalidArgument:
                pass
            else:  # the configuration agrees with itself, and nothing was run
                assert isinstance(found, RunConfig | Record)
    assert not marker.exists()


@pytest.mark.slow
def test_modules_beside_a_file_are_those_of_the_one_who_allowed_it(six_clients, tmp_path):
    """Not those of a folder that a run folder names, whose file has the same content."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder, steps in ((mine, 1), (theirs, 2)):
        folder.mkdir()
        (folder / "beside_me_71.py").write_text(f"STEPS = {steps}\n")
    code = "import beside_me_71\nfrom tfpfl.algorithms import fedavg\n"
    code += "def f(model, population, *, eta: float = 0.1):\n"
    code += "    f.steps = beside_me_71.STEPS\n    return fedavg(model, population, eta=eta, steps=f.steps)\n"
    (mine / "f.py").write_text(code)
    out = tmp_path / "run"
    good(*run_of(f"{mine / 'f.py'}:f", six_clients, out))
    config = json.loads((out / "config.json").read_text())
    config["own_method"]["place"] = str(theirs / "f.py")
    (out / "config.json").write_text(json.dumps(config))
    new_process("beside_me_71")
    with Run.open(out) as run:
        assert run.config.method.builder.steps == 1
    shutil.rmtree(mine)
    new_process("beside_me_71")
    said = refused("evaluate", out)
    assert f"imports modules that lie beside {theirs / 'f.py'}, and they are code of whoever made the run" in said
    config["own_method"]["place"] = str(mine / "f.py")
    (out / "config.json").write_text(json.dumps(config))
    assert "f.py imports from beside it (a module that it imports from there is missing)" in refused("evaluate", out)


def test_a_method_with_a_changed_module_beside_it_is_another_method(six_clients, tmp_path):
    """Before, `compare` showed the results of the old one for it, and `resume` went on with the new rules."""
    helper, file, out = tmp_path / "beside_me_74.py", tmp_path / "f.py", tmp_path / "run"
    helper.write_text("STEPS = 1\n")
    file.write_text(
        "from beside_me_74 import STEPS\nfrom tfpfl.algorithms import fedavg\n"
        "def f(model, population):\n    f.steps = STEPS\n    return fedavg(model, population, steps=STEPS)\n"
    )

    def opened():
        new_process()
        with Run.open(out) as run:
            return run.config.method.builder.steps

    with Run.create(RunConfig(algorithm=f"{file}:f", federation=str(six_clients.path)), out) as run:
        config = run.config
    assert opened() == 1
    helper.write_text("STEPS = 2\n")
    changed = RunConfig(algorithm=f"{file}:f", federation=str(six_clients.path)).resolved(six_clients)
    assert changed.own_method["sha256"] == config.own_method["sha256"] and changed.run_id != config.run_id
    assert changed.method.builder is not config.method.builder
    assert len({comparison._folder(tmp_path, c) for c in (config, changed)}) == 2
    assert replace(config, seed=0).method.builder.steps == 1  # it is loaded: a notebook's run keeps its rules
    with pytest.raises(RunError, match=r"f.py imports from beside it \(beside_me_74.py\) was changed since the run"):
        opened()
    assert refused("resume", out).count("(beside_me_74.py) was changed") == 1

    raw = json.loads((out / "config.json").read_text())
    del raw["own_method"]["beside"]  # an older run, of which nobody can say what was there
    (out / "config.json").write_text(json.dumps(raw))
    of_the_file = replace(config, own_method=config.own_method | {"beside": ""}).run_id
    assert read_config(out).run_id == of_the_file != config.run_id
    with sqlite3.connect(out / "state.sqlite") as store:
        store.execute("UPDATE run SET run_id = ?", (of_the_file,))
    store.close()
    assert opened() == 2


def test_what_is_missing_is_named(six_clients, tmp_path, loud):
    file, _, out = loud
    (out / "method.py").unlink()
    said = refused("resume", out, "--rounds", 3)
    assert f"method.py is missing: without it the run's method (a copy of {file}) is unknown. Put the file back" in said
    with pytest.raises(
        InvalidArgument, match=r"the method loud.py:loud is not loaded: name it again, as /.*loud.py:loud"
    ):
        Run.create(replace(read_config(out), seed=1), tmp_path / "again", six_clients)
    assert not (tmp_path / "again").exists()


@pytest.mark.slow
def test_a_method_that_a_program_registered_is_said_to_be_so(six_clients, tmp_path, monkeypatch):
    row = Method("mine_72", "Mine", fedavg, "shared", "broadcast", "nothing", "d", "d", "here")
    monkeypatch.setitem(ALGORITHMS, "mine_72", row)
    runs.train(tmp_path / "run", six_clients, algorithm="mine_72", hyperparameters={"steps": 1}, rounds=1)
    assert Record.read(tmp_path / "run").title == "Mine"
    monkeypatch.delitem(ALGORITHMS, "mine_72")
    for words in (["evaluate"], ["resume"], ["report"]):
        said = refused(*words, tmp_path / "run")
        assert "config.json names a method that is not known here: unknown algorithm 'mine_72'" in said
        assert "a program added it to ALGORITHMS" in said and "FILE.py:function" in said and "damaged" not in said


def offer(folder, steps=1, version="1.2"):
    """Installs a package with a method and an entry point for it, in a folder of the path."""
    code = "from tfpfl.algorithms import fedavg\n"
    code += f"def mine(model, population, *, eta: float = 0.1):\n    return fedavg(model, population, steps={steps})\n"
    info = folder / "methods_73.dist-info"
    for path, text in (
        (folder / "methods_of_73.py", code),
        (info / "METADATA", f"Metadata-Version: 2.1\nName: methods-73\nVersion: {version}\n"),
        (info / "RECORD", "methods_of_73.py,,\n"),
        (info / "entry_points.txt", "[tfpfl.algorithms]\nmine_73 = methods_of_73:mine\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine_73", "methods_of_73:mine"])
def test_the_method_of_a_package(six_clients, tmp_path, monkeypatch, name):
    """It goes on in the version that it was begun with; an entry point needs no consent, a module does."""
    folder, out = tmp_path / "site", tmp_path / "run"
    offer(folder)
    monkeypatch.syspath_prepend(folder)
    good(*run_of(name, six_clients, out, "--rounds", 1))
    entry = read_config(out).own_method
    assert (entry["package"], entry["place"], entry["title"]) == ("methods-73 1.2", "methods_of_73", "mine")
    assert not (out / "method.py").exists()
    assert f"--algorithm {name}" in command(read_config(out), out)
    new_process("methods_of_73")
    good("resume", out, "--rounds", 2)

    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "theirs"))
    new_process("methods_of_73")
    if name == "mine_73":
        assert "mine_73" in good("algorithms") and good("evaluate", out)
    else:
        assert "in the module methods_of_73. A run folder from elsewhere" in refused("evaluate", out)
        assert "methods_of_73" not in sys.modules
        allow_code(out)
        good("evaluate", out)

    new_process("methods_of_73")
    offer(folder, steps=2, version="1.3")
    allow_code(out)
    said = refused("evaluate", out)
    assert (
        "It was in methods-73 1.2 when the run was created" in said
        and "its sha256 is another one, in methods-73 1.3" in said
    )
    shutil.rmtree(folder)
    said = refused("evaluate", out)
    assert ("unknown algorithm 'mine_73'" if name == "mine_73" else "there is no module 'methods_of_73'") in said
    assert "It was in methods-73 1.2" in said and "damaged" not in said


def test_another_process_builds_the_method_from_what_is_sent(six_clients, loud, tmp_path):
    """As Ray's nodes do, which have neither the file nor the run folder."""
    file, _, out = loud
    with Run.open(out) as run:
        sent = pickle.dumps(run.recipe)
    file.unlink()
    shutil.rmtree(out)
    new_process()
    recipe = pickle.loads(sent)
    algorithm = recipe(six_clients)
    assert recipe.row.title == "Loud"
    for a, b in zip(
        tf.nest.flatten(algorithm.init_server()), tf.nest.flatten(run.algorithm.init_server()), strict=True
    ):
        np.testing.assert_array_equal(a, b)


COUNTING = '''
from typing import Any, NamedTuple

import tensorflow as tf
from tfpfl.algorithms import fedavg


class Message(NamedTuple):
    w: Any


class Kept(NamedTuple):
    visits: Any


def counting(model, population, *, eta: float = 0.1):
    """Counting: FedAvg whose clients count their visits."""
    own = fedavg(model, population, eta=eta, steps=1)

    def client_update(message, kept, data):
        output = own.client_update(message.w, (), data)
        return output._replace(state=Kept(kept.visits + 1), metrics=output.metrics | {"visits": kept.visits})

    return own._replace(
        init_client=lambda info: Kept(tf.constant(0)),
        message=Message,
        client_update=client_update,
        personal_model=lambda message, kept, data: message.w,
        local_model=lambda message, output: own.local_model(message.w, output),
        adapt=None,
    )
'''


@pytest.mark.slow
def test_ray_computes_the_same_rounds(six_clients, tmp_path):
    """Its processes get the file's bytes; they have not named it, and do not know its classes before they have run it.

    That is so of messages and of states, which are of these classes.
    """
    pytest.importorskip("ray")
    (tmp_path / "counting.py").write_text(COUNTING)
    for engine in ("local", "ray"):
        words = run_of(f"{tmp_path / 'counting.py'}:counting", six_clients, tmp_path / engine, "--engine", engine)
        done = subprocess.run(
            [sys.executable, "-m", "tfpfl", *map(str, words), "--participation", "1"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    ours, theirs = (runs.saved(tmp_path / engine)["history"] for engine in ("local", "ray"))
    assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in ours], rel=1e-5)
    assert [row["visits"] for row in theirs] == [0, 1]


@pytest.mark.slow
def test_the_command_of_a_run_makes_the_same_run_again(tmp_path, loud):
    """Also after the file and its defaults have changed."""
    file, _, out = loud
    file.write_text(file.read_text().replace("eta: float = 0.1", "eta: float = 0.9"))
    words = shlex.split(command(read_config(out), out))
    assert words[:4] == ["tfpfl", "run", "--algorithm", f"{out / 'method.py'}:loud"]
    good(*words[1:-1], tmp_path / "again")
    assert read_config(tmp_path / "again").run_id == read_config(out).run_id
    assert runs.saved(tmp_path / "again")["history"] == runs.saved(out)["history"]


def test_the_command_of_a_method_with_modules_beside_it_names_the_original(six_clients, tmp_path):
    """Beside the copy in the run folder they are missing."""
    file, out = tmp_path / "mine" / "f.py", tmp_path / "run"
    file.parent.mkdir()
    (file.parent / "beside_me_72.py").write_text("STEPS = 1\n")
    code = "from beside_me_72 import STEPS\nfrom tfpfl.algorithms import fedavg\n"
    code += (
        "def f(model, population, *, eta: float = 0.1):\n    return fedavg(model, population, eta=eta, steps=STEPS)\n"
    )
    file.write_text(code)
    with Run.create(RunConfig(algorithm=f"{file}:f", federation=str(six_clients.path)), out) as run:
        words = shlex.split(command(run.config, out))
    assert words[:4] == ["tfpfl", "run", "--algorithm", f"{file}:f"]
    new_process("beside_me_72")
    assert RunConfig(algorithm=words[3]).own_method == read_config(out).own_method
    file.write_text(code + "# changed")
    copy = shlex.split(command(read_config(out), out))[3]
    assert copy == f"{out / 'method.py'}:f"
    new_process("beside_me_72")
    with pytest.raises(InvalidArgument, match="must be installed, on PYTHONPATH, or lie beside the original file"):
        RunConfig(algorithm=copy)


def test_the_identity_of_a_run_is_that_of_its_files_content(tmp_path, loud):
    file, _, a_run = loud
    here = RunConfig(algorithm=f"{file}:loud")
    copy = Path(shutil.copy(file, tmp_path / "elsewhere.py"))
    assert RunConfig(algorithm=f"{copy}:loud").run_id == here.run_id
    copy.write_text(copy.read_text() + "# another\n")
    assert RunConfig(algorithm=f"{copy}:loud").run_id != here.run_id
    assert replace(here, seed=1).own_method == here.own_method  # without reading the file again
    assert replace(here, algorithm="fedavg", hyperparameters={}).own_method is None
    with pytest.raises(InvalidArgument, match="unknown hyperparameter of loud 'etta'; did you mean 'eta'"):
        RunConfig(algorithm=f"{file}:loud", hyperparameters={"etta": 1})
    # a run of format 6 has no such entry, and keeps its identity
    path = a_run / "config.json"
    raw = json.loads(path.read_text())
    del raw["own_metrics"]  # which the first runs of format 7 do not have
    before = read_config(a_run).run_id
    path.write_text(json.dumps(raw))
    assert read_config(a_run).run_id == before
    raw = {k: v for k, v in raw.items() if k not in ("own_method", "metrics", "monitor")}
    raw |= {"format": 6, "algorithm": "fedavg"}
    path.write_text(json.dumps(raw))
    identity = {k: v for k, v in raw.items() if k not in ("rounds", "versions", "federation")}
    text = json.dumps(identity, sort_keys=True).encode()
    assert read_config(a_run).run_id == own.hashlib.sha256(text).hexdigest()


@pytest.mark.slow
def test_compare_trains_a_changed_method_anew(tmp_path, loud):
    """Beside fedavg; two contents with one title are told apart in the table and in the report."""
    file, _, _ = loud
    asked = ["compare", "--algorithms", f"fedavg,{file}:loud", "--set", "loud.eta=0.2", "--set", "fedavg.steps=2"]
    asked += ["--rounds", 2, "--out", tmp_path / "out", "--clients", 5, "--network", "mlp200"]
    assert "Loud" in good(*asked)
    file.write_text(file.read_text().replace("steps=2", "steps=1"))
    good(*asked)
    folders = sorted((tmp_path / "out").iterdir())
    assert [p.name for p in folders if p.name.startswith("fedavg")] == ["fedavg-s0"] and len(folders) == 3
    groups = group_runs([Record.read(folder) for folder in folders])
    labels = [group.label for group in groups]
    assert len(set(labels)) == 3 and labels[0] == "FedAvg"
    assert all(label.startswith("Loud, loud.py:loud, sha256 ") for label in labels[1:])
    good("report", *folders, "--baseline", f"{file}:loud", "--out", tmp_path / "report.html")
    refused_usage = call("report", folders[0], "--baseline", "other.py:mine", "--out", tmp_path / "no.html")
    assert refused_usage.exit_code == 2 and "none of the runs is of this method" in refused_usage.output


def test_hyperparameters_are_options(loud, tmp_path):
    file, _, _ = loud
    text = good("run", "--algorithm", f"{FEDALA}:fedala", "--help")
    assert "--eta-mix FLOAT" in text and "Learning rate of the weights W_i" in " ".join(text.split())
    said = good("algorithms", f"{file}:loud")
    assert "--eta" in said and said.startswith("Loud: FedAvg in a file that says") and said.count("Loud") == 1
    file.write_text("def f(model, population, *, client_opt: str = 'sgd'): ...")
    assert "'adagrad' or 'yogi'" in " ".join(good("run", "--algorithm", f"{file}:f", "--help").split())
    file.write_text("def f(model, population, *, rounds: int = 3): ...")
    said = refused("run", "--algorithm", f"{file}:f")
    assert "has hyperparameters that are named like options of the command, --rounds: give them other names" in said
    file.write_text("def f(model, population, *, eta: float = 3.0): ...")
    said = refused("run", "--algorithm", f"{file}:f", "--out", tmp_path / "no")
    assert "the builder of f returned NoneType, not an Algorithm" in said and not (tmp_path / "no").exists()


def test_a_wrong_option_of_an_own_method_is_named(loud, tmp_path):
    """Not the method itself, which is there."""
    file, _, _ = loud
    for words, expected in (
        (["run", "--etta", 3], "unknown option --etta; did you mean --eta?"),
        (["run", "--client-opt", "adam"], "unknown option --client-opt;"),
        (["sweep", "--settings", 2], "unknown option --settings;"),
    ):
        command_, *options = words
        done = call(command_, "--algorithm", f"{file}:loud", *options, "--out", tmp_path / "no")
        said = " ".join(done.output.split())
        assert done.exit_code == 2 and expected in said and "unknown algorithm" not in said, said
    done = call("compare", "--algorithms", f"fedavg,{file}:loud", "--set", "mine.eta=3", "--out", tmp_path / "no")
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and "ALGORITHM may be one of --algorithms, here fedavg, loud" in said, said


@pytest.mark.slow
def test_none_in_place_of_another_default_is_in_the_command(six_clients, tmp_path):
    file, out = tmp_path / "f.py", tmp_path / "run"
    code = "from tfpfl.algorithms import fedavg\n"
    code += "def f(model, population, *, eta: float = 0.1, most: int | None = 7, word: str | None = None,\n"
    code += "      yes: bool | None = None):\n    return fedavg(model, population, eta=eta, steps=most or 1)\n"
    file.write_text(code)
    name = f"{file}:f"
    good("run", "--algorithm", name, "--most", "none", "--federation", six_clients.path, "--rounds", 1, "--out", out)
    assert read_config(out).hyperparameters["most"] is None
    words = shlex.split(command(read_config(out), out))
    assert " ".join(words).count(" none") == 1 and words[words.index("--most") + 1] == "none"


@pytest.mark.slow
def test_sweep(tmp_path, loud):
    file, _, _ = loud
    out = tmp_path / "sweep"
    said = good(
        "sweep", "--algorithm", f"{file}:loud", "--grid", "eta=0.1,0.2", "--rounds", 2, "--out", out, "--clients", 5
    )
    assert "Loud: validation accuracy" in said
    assert len(list(out.glob("loud-*"))) == 2


def test_what_an_entry_says_is_all_that_readers_need():
    config = RunConfig(algorithm=f"{FEDALA}:fedala")
    assert asdict(config)["own_method"].keys() == set(own.ENTRY)
    assert (config.short_name, config.title, RunConfig().short_name) == ("fedala", "FedALA", "pflego")


@pytest.mark.slow
def test_two_methods_with_one_title_are_told_apart(loud, tmp_path):
    """In groups, which tables, plots and reports show, and by colour or line."""
    _, _, out = loud
    records = [Record.read(out)]
    for number, (name, sha256) in enumerate({"loud.py:loud": "1" * 64, "other.py:loud": "2" * 64}.items()):
        folder = shutil.copytree(out, tmp_path / str(number))
        config = json.loads((folder / "config.json").read_text())
        place = f"/elsewhere/{name.partition(':')[0]}"
        config |= {"algorithm": name, "own_method": config["own_method"] | {"name": name, "place": place}}
        config["own_method"]["sha256"] = sha256
        records.append(replace(records[0], folder=folder, config=RunConfig(**config)))
    groups = group_runs(records)
    first = records[0].config.own_method["sha256"][:8]
    expected = [f"Loud, loud.py:loud, sha256 {first}", "Loud, loud.py:loud, sha256 11111111", "Loud, other.py:loud"]
    assert [group.label for group in groups] == expected
    looks = [plots.style(g.algorithm, g.variant, own=g.is_own) for g in groups]
    assert len(set(looks)) == 3 and not set(looks) & {plots.style(name) for name in ALGORITHMS}
    plots.curves(records)
    render(records)


WRONG = """
import tensorflow as tf
from tfpfl.algorithms import fedavg

def wrong(model, population, *, eta: float = 0.1):
    steps = {{"many": 1}}
    made = fedavg(model, population, eta=eta, steps=steps[{key!r}])
    trap = tf.constant(1.0)

    def client_update(message, state, data):
        {broken}
        return made.client_update(message, state, data)

    return made._replace(client_update=client_update)
"""


@pytest.mark.slow
def test_an_error_of_a_method_names_its_place_and_leaves_no_folder(six_clients, tmp_path, short_end):
    """Of its builder or of a function; then the mended file runs in the same folder."""
    file, out = tmp_path / "wrong.py", tmp_path / "out" / "run"
    asked = run_of(f"{file}:wrong", six_clients, out, "--rounds", 1)
    for key, broken, said in (
        ("few", "pass", f"wrong ({file}, line 7): KeyError: 'few'"),
        ("many", "message.no_such", f"wrong.client_update ({file}, line 11): AttributeError: 'Weights' object has no"),
    ):
        file.write_text(WRONG.format(key=key, broken=broken))
        shown = refused(*asked)
        assert f"Error: your method raised an error in {said}" in shown and shown.endswith(
            "--trace shows the stack trace"
        )
        assert not out.exists()
    assert isinstance(call("--trace", *asked).exception, AttributeError)
    file.write_text(WRONG.format(key="many", broken="pass"))
    good(*asked)
    file.write_text(WRONG.format(key="few", broken="pass"))
    refused(*asked)
    assert read_config(out).rounds == 1 and (out / "summary.json").exists()  # finished rounds stay


def test_an_error_outside_of_a_methods_code_says_that_it_is_of_a_method(tmp_path):
    def told(error):
        try:
            raise error
        except Exception as caught:
            return own.told(caught)

    assert told(ValueError("other structure\nmore")) is None  # no method of the user's own was loaded
    (tmp_path / "wrong.py").write_text(WRONG.format(key="many", broken="pass"))
    own.own_method(f"{tmp_path / 'wrong.py'}:wrong")
    said = told(ValueError("other structure\nmore"))
    assert said.startswith("ValueError: other structure. It was raised while your method wrong.py:wrong was computed")
    assert "check_algorithm" in said and "more" not in said
    own.forget_used()
    assert told(ValueError("of a later command")) is None
    own.own_method(f"{tmp_path / 'wrong.py'}:wrong")  # which loads nothing again
    assert "wrong.py:wrong" in told(ValueError("of a command that uses it too"))


def test_a_command_blames_no_method_that_only_an_earlier_command_used(tmp_path, monkeypatch):
    (tmp_path / "wrong.py").write_text(WRONG.format(key="many", broken="pass"))
    own.own_method(f"{tmp_path / 'wrong.py'}:wrong")

    def broken(*_, **__):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(Run, "create", broken)
    assert isinstance(call("run", "--rounds", "1").exception, ZeroDivisionError)


@pytest.mark.slow
def test_tff_refuses_a_tensor_of_the_builder_with_the_words_of_the_battery(six_clients, tmp_path, tff):
    file, out = tmp_path / "wrong.py", tmp_path / "run"
    file.write_text(WRONG.format(key="many", broken="data = data._replace(x=data.x * trap)"))
    said = refused(*run_of(f"{file}:wrong", six_clients, out, "--engine", "tff"))
    assert "a function of your method wrong.py:wrong uses a tensor that TensorFlow made outside of it" in said
    assert own.NO_TENSORS in said and not out.exists()
