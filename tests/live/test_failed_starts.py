"""A start of the server that is refused, or fails before it listens, leaves the run as it was."""

import socket
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from helpers.marks import slow_but
from tflite_export.device.live import wire
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.live import serve as serving
from tfpfl.live.async_book import AsyncBook
from tfpfl.live.async_rounds import AsyncRounds
from tfpfl.live.cohort import as_it_was
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Rules
from tfpfl.live.secure_book import SecureBook
from tfpfl.live.secure_rounds import SecureRounds
from tfpfl.live.serve import write_tokens
from tfpfl.runs.config import RunError
from tfpfl.runs.run import Run


@contextmanager
def busy_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield str(other.getsockname()[1])


def serve(folder, *options):
    """What `tfpfl serve` says when it fails."""
    found = CliRunner().invoke(main, ["serve", str(folder), *options])
    assert found.exit_code in (1, 2) and "Traceback" not in found.output, found.output
    return " ".join(found.output.split())


def with_devices(run, clients=(0, 1)):
    """A run that these devices have joined, and that has no round; the run is closed."""
    rounds = LiveRounds(run, Rules(wait_for=10), 0.0)
    tokens = write_tokens(run, rounds.book)
    rounds.refresh()
    for client in clients:
        info = run.population.info(client)
        about = {"protocol": 1, "examples": int(info.num_examples), "classes": int(info.num_classes)}
        rounds.join(tokens[client], about | {"key": wire.Signer().public}, 0.0)
    rounds.close()
    run.close()


def test_what_an_export_that_was_killed_has_left_is_removed(a_run, monkeypatch):
    root = a_run / serving.BUNDLES
    (root / "k2.0123abcd.new").mkdir(parents=True)
    (root / "k2.0123abcd.new" / "program.tflite").write_bytes(b"a part")
    monkeypatch.setattr(serving, "_export", lambda run, info, out, browser: out.mkdir())
    with Run.open(a_run) as run:
        made = serving.bundles_of(run)
    assert sorted(root.iterdir()) == sorted(made.values()) and root / "k2" in made.values()


@pytest.mark.parametrize(
    ("name", "said"), [("manifest.json", "it has no manifest.json"), ("program.tflite", "program.tflite is missing")]
)
def test_a_bundle_that_lost_a_file_is_told_at_the_start(make_run, tmp_path, name, said):
    """Such as by a copy of the run folder that broke off. Devices that join would refuse it, one after the other."""
    with make_run(tmp_path / "run", participation=1.0) as run:
        (run.folder / "bundles" / "k3" / name).unlink()
    told = serve(run.folder, "--port", "0")
    assert said in told and f"Delete {run.folder / 'bundles' / 'k3'}: the next start makes this bundle again" in told


@pytest.mark.parametrize(
    ("options", "why"),
    slow_but(
        [
            ("--async buffer=5", "asynchronous rounds have no cohorts"),
            ("--rounds 9 --secure --max-norm 1", "--secure-clip"),
            ("--wait-for 11", "wait_for is 11"),  # is told after the bundles are made
        ],
        ("--async buffer=5", "asynchronous rounds have no cohorts"),
    ),
)
def test_a_cohort_is_kept_only_by_a_server_that_listens(make_run, tmp_path, options, why):
    run = make_run(tmp_path / "run", participation=1.0)
    folder, run_id = run.folder, run.config.run_id
    with_devices(run)
    before = (folder / "config.json").read_bytes()
    assert why in serve(folder, "--cohort", "5", *options.split())
    assert (folder / "config.json").read_bytes() == before
    with Run.open(folder) as run:
        assert run.config.run_id == run_id
        rounds = LiveRounds(run, Rules(wait_for=10), 1.0)
        assert rounds.member(1).client == 1  # the devices stay
        rounds.close()


@pytest.mark.parametrize("options", slow_but(["--secure", "--async buffer=2", "--rounds 9 --wait-for 10"], "--secure"))
def test_a_busy_port_leaves_the_run_as_it_was(make_run, tmp_path, options):
    run = make_run(tmp_path / "run", participation=1.0)
    folder = run.folder
    with_devices(run)
    before = (folder / "config.json").read_bytes()
    with busy_port() as port:
        assert "cannot listen" in serve(folder, "--port", port, *options.split())
    assert (folder / "config.json").read_bytes() == before
    with Run.open(folder) as run:  # any kind of rounds may begin
        for kind, rules in ((LiveRounds, {}), (SecureRounds, {"secure": True}), (AsyncRounds, {"buffer": 3})):
            rounds = kind(run, Rules(wait_for=10, **rules), 1.0)
            assert rounds.member(1).client == 1
            rounds.close(has_begun=False)


@pytest.mark.slow
def test_a_start_that_fails_opens_no_round(make_run, tmp_path):
    """Enough devices are there for one; it would have the cohort of the start that failed."""
    run = make_run(tmp_path / "run", participation=1.0)
    folder = run.folder
    with_devices(run, range(6))
    with busy_port() as port:
        assert "cannot listen" in serve(folder, "--port", port, "--cohort", "4", "--wait-for", "6")
    with Run.open(folder) as run:
        assert run.config.participation == 1.0
        rounds = LiveRounds(run, Rules(wait_for=6), 1.0)
        assert rounds.book.open_now() is None and rounds.view.kind == wire.NOTHING
        rounds.tick(1.0)
        assert rounds.view.kind == wire.VISIT and rounds.view.waiting == set(range(6))
        rounds.close()


@pytest.mark.slow
def test_a_start_that_is_refused_leaves_alone_what_another_server_has_changed(make_run, tmp_path):
    run = make_run(tmp_path / "run", participation=1.0)
    path, content = run.folder / "config.json", (run.folder / "config.json").read_text()
    with pytest.raises(RunError, match="is being created or trained"):
        with as_it_was(run.folder):  # a second `tfpfl serve`, which began before the first one wrote --rounds 9
            path.write_text(content.replace('"rounds": 4', '"rounds": 9'))
            Run.open(run.folder)
    assert '"rounds": 9' in path.read_text()
    run.close()


def test_a_refused_kind_of_rounds_leaves_no_trace(make_run, tmp_path):
    """Otherwise a run would have both kinds, and each would be refused because of the other."""
    with make_run(tmp_path / "run", participation=1.0) as run:
        SecureRounds(run, Rules(secure=True, wait_for=10), 0.0).close()
        with pytest.raises(InvalidArgument, match="give --secure"):
            AsyncRounds(run, Rules(buffer=2), 0.0)
        SecureRounds(run, Rules(secure=True, wait_for=10), 0.0).close()
    with make_run(tmp_path / "other", participation=1.0) as run:
        AsyncRounds(run, Rules(buffer=2, wait_for=10), 0.0).close()
        with pytest.raises(InvalidArgument, match="give --async buffer=2"):
            SecureRounds(run, Rules(secure=True), 0.0)
        AsyncRounds(run, Rules(buffer=2, wait_for=10), 0.0).close()


def test_a_mode_is_taken_back_only_by_who_began_it(tmp_path):
    for number, (made, how) in enumerate(((SecureBook, {}), (AsyncBook, {"buffer": 2}))):
        path = tmp_path / f"{number}.sqlite"
        for has_begun in (False, True):
            book = made(path, "run", **how)
            if not has_begun:
                book.take_back()
                assert book.asynchronous is None and not book.is_secure
            book.close()
        book = made(path, "run", **how)
        book.take_back()
        assert book.asynchronous == 2 or book.is_secure
        book.close()


def test_tokens_that_were_there_stay(make_run, tmp_path):
    """Devices have them, also if the book is gone, as after a copy of the folder without it."""
    run = make_run(tmp_path / "run", participation=1.0)
    folder = run.folder
    with_devices(run)
    tokens = (folder / "tokens.json").read_bytes()
    (folder / "live.sqlite").unlink()
    with busy_port() as port:
        assert "cannot listen" in serve(folder, "--port", port)
    assert (folder / "tokens.json").read_bytes() == tokens
    assert not (folder / "live.sqlite").exists() and not (folder / "operator.token").exists()
