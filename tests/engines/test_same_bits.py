"""The result of a run has the same bits whatever surrounds the process: hash seed, threads, locale, zone, folder."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.marks import slow_but

TESTS = Path(__file__).parents[1]
ONE_CORE = "taskset"  # not a variable of the environment: the process may use one core only

SETTINGS = {  # to find which of them makes a difference, give `run` one alone
    "hash seed 0": {"PYTHONHASHSEED": "0"},
    "hash seed 12345": {"PYTHONHASHSEED": "12345"},
    "one thread": {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1"},
    "seven threads": {"TF_NUM_INTRAOP_THREADS": "7", "TF_NUM_INTEROP_THREADS": "3", "OMP_NUM_THREADS": "7"},
    "one core": {ONE_CORE: "1"},
    "locale C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "Turkish locale": {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"},
    "comma as decimal point": {"LC_ALL": "de_DE.UTF-8", "LC_NUMERIC": "de_DE.UTF-8"},
    "zone in the east": {"TZ": "Pacific/Kiritimati"},
    "zone in the west": {"TZ": "America/St_Johns"},
    "another folder": {"cwd": "hier, où c'est  çà"},
    "another home": {"HOME": "/nonexistent"},
}
ALL_AT_ONCE = {key: value for setting in SETTINGS.values() for key, value in setting.items()}


def run(engine, setting: dict, federation, folder, algorithm="pflego") -> dict:
    """The hashes of a run in a process of its own with these variables of the environment."""
    setting = dict(setting)
    cwd = folder / setting.pop("cwd", "here")
    cwd.mkdir(parents=True)
    changed = {"PYTHONHASHSEED": "random", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"} | setting
    one_core = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if changed.pop(ONE_CORE, None) else []
    asked = [engine, "run", os.path.relpath(federation.path, cwd), algorithm]
    command, env = [*one_core, sys.executable, "-m", "helpers.one_run", *asked], os.environ | changed
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_local_engine_in_a_process_where_everything_differs(six_clients, short_end, tmp_path):
    """This process against one with another hash seed, threads, locale, zone and folder."""
    from helpers import one_run

    one_run.main("local", str(tmp_path / "here"), str(six_clients.path))
    assert one_run.hashes(tmp_path / "here") == run("local", ALL_AT_ONCE, six_clients, tmp_path / "there")


ENGINES = {"local": None, "tff": "tensorflow_federated", "ray": "ray"}


# Besides PFLEGO: a control variate, messages and rows for single clients, drawn candidates, second derivatives.
CASES = [("local", name) for name in ("scaffold", "fedamp", "fedfomo", "per_fedavg")]
CASES += [("tff", "pflego"), ("tff", "fedamp"), ("ray", "pflego")]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "algorithm"), slow_but(CASES, ci=(("local", "fedfomo"), ("tff", "pflego"))))
def test_each_engine_in_a_process_where_everything_differs(engine, algorithm, six_clients, tmp_path):
    if ENGINES[engine] and importlib.util.find_spec(ENGINES[engine]) is None:
        pytest.skip(f"{ENGINES[engine]} is not installed")
    # Ray itself fails in a folder whose name the locale cannot write.
    setting = {k: v for k, v in ALL_AT_ONCE.items() if engine != "ray" or k != "cwd"}
    one = run(engine, {}, six_clients, tmp_path / "one", algorithm)
    assert run(engine, setting, six_clients, tmp_path / "other", algorithm) == one
