"""The size of a cohort from the command line, and how theta is sent."""

import errno
import gzip
import hashlib
import sqlite3
from contextlib import closing, nullcontext
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import test_utils
from click.testing import CliRunner

from helpers.live import EXACT, Talker, device, in_threads, live_theta, serving, simulated
from tflite_export.convert.program import flatten
from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.data.cohorts import cohort
from tfpfl.live import cohort as module
from tfpfl.live.cohort import with_cohort
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused, Rules
from tfpfl.live.thetas import Thetas
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run

ROUNDS = 4


def new_run(federation, folder, **settings):
    given = {"hyperparameters": EXACT, "network": "mlp200", "rounds": ROUNDS} | settings
    config = RunConfig(federation=str(federation.path), **given)
    return Run.create(config, folder, federation)


def joined(run, clients, wait_for=None):
    """The rounds of a run that these clients have joined; the first one opens when `wait_for` are there, or all."""
    rounds = LiveRounds(run, Rules(awake=1e6, wait_for=wait_for or len(clients)), 0.0)
    rounds.book.set_tokens({i: f"token {i}" for i in run.population.client_ids.tolist()})
    rounds.refresh()
    for i in clients:
        info = run.population.info(i)
        about = {"protocol": 1, "examples": int(info.num_examples), "classes": int(info.num_classes)}
        rounds.join(f"token {i}", about | {"key": wire.Signer().public}, 0.0)
    return rounds


def test_a_cohort_before_round_1_makes_the_run_that_has_this_participation(federation, tmp_path):
    made = new_run(federation, tmp_path / "run", participation=0.5)
    with with_cohort(made, "3") as run:
        assert run.config.run_id == replace(made.config, participation=0.3).run_id
        assert [len(cohort(0, t, run.population)) for t in range(1, 6)] == [3] * 5
        assert with_cohort(run, "3") is run
        rounds = joined(run, range(4))
        expected = cohort(0, 1, run.population, np.arange(4)).tolist()  # four of ten are there: 1.2 on average
        assert (rounds.view.kind, rounds.view.round_num) == (wire.VISIT, 1)
        assert sorted(rounds.view.waiting) == expected and len(expected) in (1, 2)
        rounds.close()
        again = with_cohort(run, "3-3")  # one number, written as a range
        assert again is run
    with Run.open(tmp_path / "run") as run, pytest.raises(InvalidArgument, match="3 of 10 clients in a round, and has"):
        with_cohort(run, "4")


@pytest.mark.parametrize("ends", ["with an error", "by a kill"])
def test_a_change_of_the_cohort_that_breaks_off_leaves_the_run_as_it_was(federation, tmp_path, monkeypatch, ends):
    """Such as on a full disk, or in a power cut: devices have joined, and live.sqlite has the id of the run."""
    made = new_run(federation, tmp_path / "run", participation=0.5)
    joined(made, range(4), wait_for=10).close()

    def breaks_off(path, content):
        if ends == "by a kill":  # live.sqlite is of the other run by then
            with closing(sqlite3.connect(tmp_path / "run" / "live.sqlite")) as book, book:
                book.execute("UPDATE about SET run_id = 'another'")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_whole", breaks_off)
    if ends == "by a kill":
        monkeypatch.setattr(module, "_book_of", lambda *_: nullcontext())
    with pytest.raises(OSError, match="No space left"):
        with nullcontext() if ends == "by a kill" else module.as_it_was(tmp_path / "run"):
            with_cohort(made, "3")
    monkeypatch.undo()
    with module.as_it_was(tmp_path / "run"), Run.open(tmp_path / "run") as run:
        assert run.config.run_id == made.config.run_id
        rounds = LiveRounds(run, Rules(wait_for=10), 1.0)
        assert rounds.member(3).client == 3
        rounds.close()
    with with_cohort(Run.open(tmp_path / "run"), "3") as run:
        LiveRounds(run, Rules(wait_for=10), 2.0).close()


def test_a_range_is_drawn_as_in_a_simulation(federation, tmp_path):
    with with_cohort(new_run(federation, tmp_path / "run", participation=0.5), "2-6") as run:
        asked = RunConfig(**RunConfig(sampling="range", sampling_range=(2, 6)).__dict__).sampling_plan()
        assert run.population.sampling == asked and run.population.clients_per_round == 4
        rounds = joined(run, range(10))
        drawn = cohort(0, 1, replace(run.population, sampling=asked)).tolist()
        assert sorted(rounds.view.waiting) == drawn and 2 <= len(drawn) <= 6
        expected = 0.01 * 10 / 4 * float(run.population.info(drawn[0]).alpha)  # rho times I / E[r] times alpha_i
        assert rounds.view.settings[drawn[0]]["head_rate"] == pytest.approx(expected, rel=1e-5)
        rounds.close()


def test_the_joined_devices_stay_where_the_run_has_not_begun(federation, tmp_path):
    run = new_run(federation, tmp_path / "run", sampling="binomial", participation=0.5)
    rounds = LiveRounds(run, Rules(wait_for=3), 0.0)
    rounds.book.set_tokens({i: f"token {i}" for i in range(10)})
    rounds.refresh()
    info = run.population.info(0)
    about = {"protocol": 1, "examples": int(info.num_examples), "classes": int(info.num_classes)}
    rounds.join("token 0", about | {"key": wire.Signer().public}, 0.0)
    rounds.close()
    with with_cohort(run, "2") as other:
        assert (other.config.sampling, other.config.participation) == ("binomial", 0.2)
        again = LiveRounds(other, Rules(wait_for=3), 1.0)
        assert again.member(0).client == 0
        again.close()


def test_cohorts_that_cannot_be(federation, tmp_path):
    wrong = {
        "0": "at least 1 client",
        "6-2": "the smaller number first",
        "11": "more than the 10 clients",
        "many": "such as 20, or a range",
        "-3": "such as 20, or a range",
        "3-": "such as 20, or a range",
        "9" * 20: "such as 20, or a range",
    }
    with new_run(federation, tmp_path / "run", participation=0.5) as run:
        for text, why in wrong.items():
            with pytest.raises(InvalidArgument, match=why):
                with_cohort(run, text)
        joined(run, range(10)).close()  # it is still open, and begins now
    found = CliRunner().invoke(main, ["serve", str(tmp_path / "run"), "--cohort", "3"])
    assert found.exit_code == 1 and "draws 5 of 10 clients in a round, and has begun" in found.output
    assert "Traceback" not in found.output


def test_theta_in_half_precision(federation, tmp_path):
    fedper = {"algorithm": "fedper", "hyperparameters": {"steps": 1}}  # its bundles are made in no time
    with (
        new_run(federation, tmp_path / "run", **fedper) as run,
        serving(run, Rules(wait_for=1)) as (address, rounds, tokens),
    ):
        talker = Talker(address)
        assert talker.join(run, 0, tokens[0], runtime="tf")[0] == 200
        (name, whole), *_ = rounds.thetas.items()
        status, content = talker.send("GET", f"/v1/theta/{name}?half=1")
        assert status == 200 and content == np.frombuffer(whole, "<f4").astype("<f2").tobytes()
        assert talker.send("GET", f"/v1/theta/{name}?half=0") == (200, whole)
        status, said = talker.send("GET", f"/v1/theta/{name}?half=yes")
        assert status == 400 and said["error"] == "half must be 0 or 1"
        large = np.float32([1.0, 70000.0]).tobytes()
        rounds.thetas[hashlib.sha256(large).hexdigest()] = large
        status, said = talker.send("GET", f"/v1/theta/{hashlib.sha256(large).hexdigest()}?half=1")
        assert status == 400 and "too large for half precision" in said["error"]


def test_work_comes_with_its_theta_where_the_device_has_another(federation, tmp_path):
    """One request instead of two; and only for a device that says which theta it has."""
    fedper = {"algorithm": "fedper", "hyperparameters": {"steps": 1}}
    with (
        new_run(federation, tmp_path / "run", **fedper) as run,
        serving(run, Rules(wait_for=run.population.num_clients)) as (address, rounds, tokens),
    ):
        talkers = [Talker(address) for _ in tokens]
        for client, talker in zip(tokens, talkers, strict=True):
            assert talker.join(run, client, tokens[client], runtime="tf")[0] == 200
        (name, whole), *_ = rounds.thetas.items()
        invited = next(t for t in talkers if t.client in rounds.view.waiting)
        plain = {"kind": "visit", "round": 1, "theta": name}

        def work(query):
            status, found = invited.send("GET", f"/v1/work?wait=0{query}")
            return status, *(wire.unpack(found) if isinstance(found, bytes) else (found, None))

        # too large for half precision: the device asks for it by itself, and is told
        rounds.thetas[name] = np.float32([1.0, 70000.0]).tobytes()
        assert work("&have=none&half=1")[2] is None
        rounds.thetas[name] = whole
        for query, theta in {
            "": None,
            f"&have={name}": None,
            "&have=none": whole,
            f"&have={'0' * 64}": whole,
            "&have=none&half=1": np.frombuffer(whole, "<f4").astype("<f2").tobytes(),
        }.items():
            status, about, content = work(query)
            assert status == 200 and about.items() >= plain.items() and content == theta, query
        assert work("&have=none&half=maybe")[0] == 400
        idle = next((t for t in talkers if t.client not in rounds.view.waiting), None)
        assert idle is None or idle.send("GET", "/v1/work?wait=0&have=none") == (200, {"kind": "none"})


@pytest.mark.parametrize("half", [False, True])
def test_theta_is_compressed_once(half):
    theta = np.tile(np.float32([0.5, -1.0, 2.0]), 1000).tobytes()
    name = hashlib.sha256(theta).hexdigest()
    held = {name: theta}
    thetas = Thetas(lambda: held)
    zipped = test_utils.make_mocked_request("GET", "/", headers={"Accept-Encoding": "gzip, deflate, br"})
    first, second = (thetas.response(zipped, name, half) for _ in range(2))
    whole = thetas.response(test_utils.make_mocked_request("GET", "/"), name, half)
    ((zipped_once,), (again,), (content,)) = (answer.body._value for answer in (first, second, whole))
    assert zipped_once is again and first.headers["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in whole.headers and gzip.decompress(zipped_once) == content
    assert len(zipped_once) < len(content) / 10
    assert content == (np.frombuffer(theta, "<f4").astype("<f2").tobytes() if half else theta)
    held.clear()
    with pytest.raises(Refused, match="not needed any more"):
        thetas.response(zipped, name, half)


@pytest.mark.slow
def test_a_run_in_half_precision_is_near_the_simulated_one(run, tmp_path):
    """Each weight that a device gets is rounded to 11 bits. The gradients are those of the rounded theta."""
    theta, heads, _ = simulated(run, ROUNDS)
    ids, devices = run.population.client_ids.tolist(), {}
    with serving(run, Rules(wait_for=len(ids))) as (address, _, tokens):

        def work(client):
            devices[client] = device(run, address, tmp_path, client, tokens[client], half=True)
            devices[client].run()

        in_threads([lambda i=i: work(i) for i in ids])
    away = np.abs(live_theta(run) - theta).max()
    pairs = [pair for i in ids for pair in zip(devices[i].client.head, heads[i], strict=True)]
    of_heads = max(np.abs(a - np.asarray(b)).max() for a, b in pairs)
    moved = np.abs(theta - flatten(run.model.initial_theta)).max()
    print(f"theta {away:.1e}, heads {of_heads:.1e}; theta moved {moved:.1e}")
    assert 1e-8 < away < 1e-4 and of_heads < 1e-3
