"""`tfpfl run --secure`: what it refuses, rounds with too few clients, its epsilon, and that it changes nothing else."""

import math
import shlex

import numpy as np
import pytest

from helpers import small_runs
from helpers.marks import slow_but
from helpers.toys import distance
from tfpfl.algorithms.transforms.secure import quorum
from tfpfl.data.cohorts import cohort
from tfpfl.models import tree
from tfpfl.runs import accounting
from tfpfl.runs.command import command
from tfpfl.runs.config import RunConfig, entries
from tfpfl.runs.protocols import EV_ALL, find
from tfpfl.runs.results import warnings_of
from tfpfl.runs.run import Run
from tfpfl.studies.records import Record

NOISY = {"secure": True, "secure_clip": 0.5, "secure_noise": 1.5}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"secure_clip": 1.0}, "secure_clip is for secure aggregation: give --secure"),
        ({"secure_threshold": 0.6}, "secure_threshold is for secure aggregation"),
        ({"secure": True, "secure_clip": 0.0}, "secure_clip must be a positive number, found 0"),
        ({"secure": True, "secure_clip": float("nan")}, "secure_clip must be a positive number"),
        ({"secure": True, "secure_noise": 1.0}, "secure_noise is in units of the clip: give --secure-clip"),
        ({"secure": True, "secure_threshold": 0.4}, r"secure_threshold must lie in \[0.5, 1\).*one half for one mask"),
        ({"secure": True, "aggregator": "median"}, "aggregator='median' cannot be used with --secure"),
        ({"secure": True, "max_norm": 1.0, "on_broken": "reject"}, "max_norm=1.0 cannot.*sees no update that it could"),
        ({"secure": True, "clip_norm": 1.0, "on_broken": "reject"}, "clip_norm=1.0 cannot.*use secure_clip"),
        ({"secure": True, "objective": "fair:1"}, "objective='fair:1' cannot.*say what the losses are"),
    ],
)
def test_bad_input(change, reason):
    with pytest.raises(ValueError, match=reason):
        small_runs.config(**change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"participation": 0.4}, "at least 3 clients in a round, found 2"),
        ({"algorithm": "fedamp", "labels": "global"}, "needs every client's own update"),
        ({"secure_clip": 1e-29}, "too small or too large for --secure: check the clip"),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_written(change, reason, six_clients, tmp_path):
    with pytest.raises(ValueError, match=reason):
        Run.create(small_runs.config(**{"secure": True} | change), tmp_path / "run", six_clients)
    assert not (tmp_path / "run").exists()


def test_the_entries_are_new_ones():
    """A run without them has the configuration that it had; with them the command has their options."""
    plain, secure = small_runs.config(), small_runs.config(**NOISY)
    assert not [name for name in entries(plain) if name.startswith("secure")]
    assert plain.run_id != secure.run_id and RunConfig(**entries(secure)) == secure


def test_updates_that_the_default_clip_has_shortened_are_told_of():
    """Fed3R's sums of all examples are longer than 100: clipped, they are no longer those of one regression."""
    rows = [{"round": 1, "clipped": 1.0}, {"round": 2, "clipped": 0.0}, {"round": 3, "clipped": 0.4}, {"round": 4}]
    config = small_runs.config(secure=True)
    assert [text[:58] for text in warnings_of(config, rows)] == [
        "in 2 of 4 rounds updates were longer than 100, the default"
    ]
    assert not warnings_of(config, rows[1:2])
    assert not warnings_of(small_runs.config(secure=True, secure_clip=100.0), rows)
    assert not warnings_of(small_runs.config(), rows), "a method may have a metric of this name"


def test_a_run_in_which_nobodys_work_was_used_says_so():
    rows = [{"round": 1, "clients": 0, "too_few": 2}, {"round": 2, "clients": 0, "dropped": 3}]
    (said,) = warnings_of(small_runs.config(), rows, {})
    assert said.startswith("the server used nobody's work in 2 rounds, so that nothing was learned")
    assert not warnings_of(small_runs.config(), rows, {3: 1}) and not warnings_of(small_runs.config(), [], {})
    assert not warnings_of(small_runs.config(), rows), "it cannot be known"


@pytest.mark.slow
def test_a_round_with_too_few_clients_changes_nothing(six_clients, tmp_path):
    how = {"participation": 1.0, "dropout": 0.45, "rounds": 6, "secure": True}
    run = small_runs.train(tmp_path / "run", six_clients, **how)
    with Run.open(run.folder) as run:
        history, first = run.store.history(), run.took_part
        for row in history:
            came = 6 - row["dropped"]
            assert (row["clients"], row.get("too_few")) == ((0, came) if came < quorum(6) else (came, None))
        assert {row.get("too_few") is None for row in history} == {True, False}
        lost = [row["round"] for row in history if row.get("too_few") is not None]
        scores = {row["round"]: row.get("personal test loss") for row in history}
        assert all(scores[t] == scores[t - 1] for t in lost if t > 1 and scores.get(t - 1) is not None)
        assert set(first.values()) <= {row["round"] for row in history if row["clients"]}
        words = shlex.split(command(run.config, run.folder))
        assert "--secure" in words and "True" not in words


@pytest.mark.slow
@pytest.mark.parametrize("engine", slow_but(["local", "tff", "ray"], "local", ci=("tff",)))
@pytest.mark.parametrize("name", slow_but(["pflego", "fedavg"], "pflego", "fedavg"))
def test_a_run_ends_as_without(name, engine, six_clients, tmp_path, request):
    if engine == "tff":
        request.getfixturevalue("tff")
    elif engine == "ray":
        pytest.importorskip("ray", reason="Ray, an extra, is not installed")
    how = {"algorithm": name, "labels": "global", "engine": engine, "rounds": 5}
    plain = small_runs.train(tmp_path / "plain", six_clients, **how)
    secure = small_runs.train(tmp_path / "secure", six_clients, secure=True, **how)
    with Run.open(plain.folder) as a, Run.open(secure.folder) as b:
        assert distance(a.training().server_state(), b.training().server_state()) < 1e-5
        scores = [find(run.results(), EV_ALL).score for run in (a, b)]
        assert scores[0] == pytest.approx(scores[1], abs=0.002)
        up = [run.store.history()[-1]["bytes_up"] for run in (a, b)]
        assert up[0] < up[1] <= 1.1 * up[0]
        assert a.privacy is b.privacy is None


@pytest.mark.slow
def test_a_noisy_run_is_resumed_exactly(six_clients, tmp_path):
    how = {"rounds": 4, "on_broken": "reject"} | NOISY
    whole = small_runs.train(tmp_path / "whole", six_clients, **how)
    with pytest.raises(KeyboardInterrupt):
        small_runs.train(tmp_path / "half", six_clients, [small_runs.Interrupt(2)], **how)
    with Run.open(tmp_path / "half") as half:
        half.train()
    assert small_runs.saved(tmp_path / "half") == small_runs.saved(whole.folder)


@pytest.mark.slow
def test_a_noisy_run_is_the_one_with_the_same_clip_and_noise_of_the_size_it_says(six_clients, short_end, tmp_path):
    """After one round of FedAvg, theta has noise of the standard deviation z C / r in every number."""
    how = {"algorithm": "fedavg", "hyperparameters": {"weighting": "uniform", "steps": 2}, "labels": "global"}
    how |= {"rounds": 1, "participation": 1.0}
    noisy = small_runs.train(tmp_path / "noisy", six_clients, **how, **NOISY)
    clipped = small_runs.train(tmp_path / "clipped", six_clients, **how, secure=True, secure_clip=0.5)
    with Run.open(noisy.folder) as a, Run.open(clipped.folder) as b:
        assert a.store.history()[0]["clients"] == 6
        states = [tree.to_vector(run.training().server_state()).numpy() for run in (a, b)]
    noise = states[0] - states[1]
    assert noise.size > 1000
    assert noise.std() == pytest.approx(1.5 * 0.5 / 6, rel=5 / np.sqrt(2 * noise.size))


@pytest.mark.slow
def test_a_noisy_run_says_its_epsilon(six_clients, tmp_path):
    """From the clients of every round, drawn here once more, and from the numbers of the codec, written down here."""
    pytest.importorskip("dp_accounting")
    how = {"algorithm": "fedavg", "hyperparameters": {"weighting": "uniform"}, "labels": "global", "rounds": 8}
    run = small_runs.train(tmp_path / "run", six_clients, participation=0.95, sampling="binomial", **how, **NOISY)
    found = Record.read(run.folder).summary["privacy"]
    came = [cohort(0, t, run.population) for t in range(1, 9)]
    shares = [len(ids) if len(ids) >= quorum(len(ids)) else 0 for ids in came]
    visits = {i: [t for t in range(8) if shares[t] and i in came[t]] for i in range(6)}
    size = sum(int(np.size(w)) for part in run.algorithm.init_server() for w in part)
    room = (2**31 - 1) // 6 - 1
    exponent = int(np.floor(np.log2(room / (0.5 * (1 + 12 * 1.5 / np.sqrt(6))))))
    sensitivity = 0.5 * 2.0**exponent + np.sqrt(size)
    noise = accounting.Noise(np.ceil(1.5 * sensitivity / np.sqrt(6)), sensitivity, size)
    expected = max(accounting.of_member(noise, [shares[t] for t in some], 6**-1.1) for some in visits.values())
    assert found["epsilon"] == pytest.approx(expected, rel=1e-9) and found["delta"] == pytest.approx(6**-1.1)
    few = 8 * sum(math.comb(5, m) * 0.95**m * 0.05 ** (5 - m) for m in range(3))  # two others, or less, beside a client
    assert found["released"] == pytest.approx(accounting.released(noise, 0.95, shares, 6**-1.1 - few), rel=1e-9)
