"""A run's schedule: resumed it is the same, rounds without clients count, and without one the run id is as before."""

import json
import warnings

import pytest

from helpers import small_runs as runs
from helpers.toys import identical
from tfpfl.algorithms.transforms.schedule import Scheduled
from tfpfl.checks import TfpflWarning
from tfpfl.runs.command import command
from tfpfl.runs.config import RunConfig, RunError, read_config
from tfpfl.runs.run import Run

SOME = {"algorithm": "fedavg", "sampling": "binomial", "participation": 0.2, "evaluate_every": 0}
SOME |= {"hyperparameters": {"steps": 2}}


def server_of(folder):
    with Run.open(folder) as run:
        return run.training().server_state(), [row["clients"] for row in run.store.history()]


@pytest.mark.slow
def test_interrupted_and_resumed_is_uninterrupted(federation, short_end, tmp_path):
    """With rounds in which nobody takes part; they count."""
    asked = SOME | {"rounds": 6, "schedule": "cosine:0.1"}
    whole = runs.train(tmp_path / "whole", federation, **asked)
    assert whole.config.schedule == "cosine:0.1:6"
    with pytest.raises(KeyboardInterrupt):
        runs.train(tmp_path / "halves", federation, [runs.Interrupt(3)], **asked)
    with Run.open(tmp_path / "halves") as run:
        run.train()
    assert runs.saved(tmp_path / "halves") == runs.saved(tmp_path / "whole")
    server, clients = server_of(tmp_path / "whole")
    assert 0 in clients and isinstance(server, Scheduled)
    assert int(server.round_num) == (7 if clients[-1] else 6)
    assert read_config(tmp_path / "whole").run_id == read_config(tmp_path / "halves").run_id


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["step:2:0", "cosine"])
def test_rounds_without_clients_count_and_more_rounds_keep_the_schedule(schedule, federation, short_end, tmp_path):
    """Rates are 0 after round 2, whoever came; and after the last round of a cosine, also if rounds are added."""
    folder = tmp_path / "run"
    runs.train(folder, federation, **SOME | {"rounds": 2, "schedule": schedule})
    before, _ = server_of(folder)
    with Run.open(folder, rounds=5) as run:
        run.train()
    after, clients = server_of(folder)
    assert sum(clients[2:]) > 0 and identical(before.own, after.own)


def test_who_extends_a_cosine_that_has_fallen_to_0_is_told(federation, tmp_path):
    """The rates stay 0, so that the new rounds train nothing. Nothing is said while there are rates."""

    def told(folder, rounds):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            Run.open(folder, rounds=rounds).close()
        return [str(warning.message) for warning in found if issubclass(warning.category, TfpflWarning)]

    for schedule in ("cosine", "cosine:0.1", "step:1:0", "constant"):
        Run.create(RunConfig(**SOME | {"rounds": 2, "schedule": schedule}), tmp_path / schedule, federation).close()
    (sentence,) = told(tmp_path / "cosine", 5)
    assert sentence.startswith("the rates of schedule 'cosine:0.0:2' are 0 from round 2 on: rounds up to 5 train")
    assert told(tmp_path / "cosine", None) == []  # said once, when the rounds are added
    assert told(tmp_path / "cosine:0.1", 5) == told(tmp_path / "step:1:0", 5) == told(tmp_path / "constant", 5) == []


def test_without_a_schedule_the_run_id_is_what_it_was(federation, tmp_path):
    """The id of this configuration, from the version before there were schedules."""
    plain = RunConfig(algorithm="fedavg", hyperparameters={"eta": 0.1})
    assert plain.run_id == "05002c3a4263da7d946916e4d367c18b36f94fe21f2560d9dc6eaee804dbf0f6"
    assert RunConfig(algorithm="fedavg", hyperparameters={"eta": 0.1}, schedule="inverse").run_id != plain.run_id
    named = {"schedule": "inverse", "schedule_of": ["eta"]}
    with Run.create(runs.config(**SOME | named), tmp_path / "run", federation) as run:
        assert run.config.schedule_of == ("eta",) and "--schedule-of eta" in command(run.config, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    older = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("schedule")}
    path.write_text(json.dumps(older))
    assert read_config(tmp_path / "run").schedule is None
    path.write_text(json.dumps(older | {"schedule": "cosin"}))
    with pytest.raises(RunError, match="did you mean 'cosine'"):
        read_config(tmp_path / "run")


@pytest.mark.slow
def test_constant_is_no_schedule(federation, tmp_path):
    asked = SOME | {"rounds": 2}
    plain = runs.train(tmp_path / "plain", federation, **asked)
    constant = runs.train(tmp_path / "constant", federation, **asked, schedule="constant")
    assert constant.config.run_id == plain.config.run_id
    assert runs.saved(tmp_path / "constant") == runs.saved(tmp_path / "plain")


def test_a_rate_that_the_method_does_not_have_is_refused_before_the_folder_is_made(federation, tmp_path):
    with pytest.raises(ValueError, match="unknown learning rate in schedule_of 'rho'"):
        runs.config(**SOME | {"schedule": "cosine", "schedule_of": ["rho"]})
    with pytest.raises(ValueError, match="'steps'; there are eta"):
        Run.create(runs.config(**SOME | {"schedule": "cosine", "schedule_of": ["steps"]}), tmp_path / "run", federation)
    assert not (tmp_path / "run" / "config.json").exists()
