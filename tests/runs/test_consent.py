"""Code in a network's file runs only after this user allowed this very file on this machine."""

import hashlib
import json
import os
import shutil

import keras
import numpy as np
import pytest
from click.testing import CliRunner

from helpers import small_runs as runs
from tflite_export.cli import main as export
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.models.modules_beside import hash_of, modules_beside
from tfpfl.runs import allow_code, consent
from tfpfl.runs.config import RunError
from tfpfl.runs.run import Run


def twice(file):
    """A backbone with code: a Lambda that doubles."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(7, activation="tanh")])
    model.add(keras.layers.Lambda(lambda x: 2 * x, output_shape=(7,)))
    model.save(file)
    return model


@pytest.mark.slow
def test_code_runs_only_where_it_was_allowed(six_clients, tmp_path, monkeypatch):
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "mine"))
    file, folder = tmp_path / "mine.keras", tmp_path / "run"
    model = twice(file)
    asked = ["run", "--network", str(file), "--federation", str(six_clients.path), "--rounds", "1", "--tau", "1"]
    asked += ["--new-clients", "1", "--out", str(folder)]
    call = CliRunner()
    refused = call.invoke(main, asked)
    assert refused.exit_code == 1 and not folder.exists()
    assert "layers[2].class_name is 'Lambda'" in refused.output and "--allow-code" in refused.output
    assert call.invoke(main, [*asked, "--allow-code"]).exit_code == 0
    with Run.open(folder) as run:  # remembered
        x = np.ones((2, 4), np.float32)
        np.testing.assert_allclose(run.model.features(run.model.initial_theta, x), model(x), rtol=1e-6)
    assert call.invoke(main, ["evaluate", str(folder)]).exit_code == 0

    # whoever gets the run folder, with all that is in it, has allowed nothing
    sent = shutil.copytree(folder, tmp_path / "sent")
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "theirs"))
    for words in (["evaluate"], ["resume", "--rounds", "2"], ["new-clients"]):
        refused = call.invoke(main, [*words, str(sent)])
        assert refused.exit_code == 1 and "--allow-code" in refused.output
    refused = call.invoke(export, ["export", str(sent), "--client", "0", "--out", str(tmp_path / "bundle")])
    assert refused.exit_code == 1 and "--allow-code" in refused.output
    assert call.invoke(main, ["evaluate", str(sent), "--allow-code"]).exit_code == 0
    assert call.invoke(main, ["evaluate", str(sent)]).exit_code == 0

    # a file that is changed afterwards was not allowed, also if config.json has its hash
    twice(file)
    shutil.copy(file, sent / "network.keras")
    config = json.loads((sent / "config.json").read_text())
    config["network_hash"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (sent / "config.json").write_text(json.dumps(config))
    refused = call.invoke(main, ["evaluate", str(sent)])
    assert refused.exit_code == 1 and "'Lambda'" in refused.output


def test_what_others_can_write_allows_nothing(tmp_path, monkeypatch):
    """Several users can share a cache: one of them must not allow code for another."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a.keras"
    file.write_bytes(b"code")
    allow_code(file)
    (folder,) = (tmp_path / "cache").iterdir()
    (entry,) = folder.iterdir()
    assert consent.is_allowed(entry.name) and folder.stat().st_mode & 0o777 == 0o700
    for path, mode in ((folder, 0o770), (folder, 0o707), (entry, 0o660)):
        before = path.stat().st_mode & 0o777
        path.chmod(mode)
        assert not consent.is_allowed(entry.name)
        path.chmod(before)
    folder.chmod(0o777)
    with pytest.raises(InvalidArgument, match="others can write it: remove it, or run chmod 700"):
        allow_code(file)
    folder.chmod(0o700)
    other = os.getuid() + 1
    folder.rename(folder.with_name(f"allowed_code_of_user_{other}"))  # made by this user, for another one
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert not consent.is_allowed(entry.name)


def test_the_folders_of_one_content_are_all_remembered(tmp_path, monkeypatch):
    """Of two files with one content, each may import the modules of its own folder, and of no other."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    code = b"import helper"
    sha256, copy = hashlib.sha256(code).hexdigest(), tmp_path / "run" / "method.py"
    folders = [tmp_path / name for name in ("a", "b", "c", "run")]
    for i, folder in enumerate(folders):
        folder.mkdir()
        (folder / "helper.py").write_text(f"VALUE = {i}")
    a, b, c, run = (hash_of(modules_beside(code, folder)) for folder in folders)

    def place(named, beside):
        return consent.place_of(copy, code, sha256, named and str(tmp_path / named / "m.py"), beside)

    consent.remember(sha256)
    assert consent.folders_of(sha256) == []
    for named, beside in (("a", a), ("run", run), (None, None), ("a", None)):
        with pytest.raises(RunError, match="imports modules that lie beside"):
            place(named, beside)
    (consent._folder() / sha256).write_text(str(tmp_path / "a"))  # as it was written when there was one
    for name in ("b", "b", "a", "b"):
        consent.remember(sha256, tmp_path / name)
    assert consent.folders_of(sha256) == [tmp_path / "b", tmp_path / "a"]
    assert (place("a", a), place("b", b)) == (tmp_path / "a" / "m.py", tmp_path / "b" / "m.py")
    assert place("c", a) == place("run", a) == tmp_path / "a" / "m.py"  # the same modules
    assert place("a", c).parent == tmp_path / "a"  # whoever loads it says that they were changed
    assert place("a", None).parent == tmp_path / "a" and place(None, None).parent == tmp_path / "b"
    for named, beside in (("c", c), ("run", run)):
        with pytest.raises(RunError, match="imports modules that lie beside"):
            place(named, beside)
    (tmp_path / "b" / "helper.py").unlink()
    assert place(None, None).parent == tmp_path / "a"  # of an older run: the one that has modules
    assert place("c", "") == tmp_path / "b" / "m.py"


@pytest.mark.slow
def test_allowing_code_where_there_is_none(a_run, tmp_path, monkeypatch):
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InvalidArgument, match="has no network.keras, so that there is no code to allow"):
        allow_code(a_run)
    with pytest.raises(InvalidArgument, match="no.keras cannot be read: No such file"):
        allow_code(tmp_path / "no.keras")
    refused = CliRunner().invoke(main, ["run", "--allow-code", "--out", str(tmp_path / "run")])
    assert refused.exit_code == 1 and "--allow-code is for --network FILE.keras" in refused.output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_hash_of_a_configuration_is_no_path(a_run, tmp_path, monkeypatch):
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    twice(a_run / "network.keras")
    config = json.loads((a_run / "config.json").read_text())
    (a_run / "config.json").write_text(json.dumps(config | {"network": "network.keras", "network_hash": "/etc/passwd"}))
    with pytest.raises(InvalidArgument, match=r"network.keras was changed"):
        Run.open(a_run)


@pytest.mark.slow
def test_small_runs_need_no_consent(six_clients, tmp_path):
    """A network without code is loaded as before."""
    file = tmp_path / "plain.keras"
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(7)]).save(file)
    runs.train(tmp_path / "run", six_clients, network=str(file), rounds=1)
    Run.open(tmp_path / "run").close()
