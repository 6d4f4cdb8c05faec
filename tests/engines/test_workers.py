"""Several TFF workers: the round is that of one process, whoever does what, comes and goes."""

import ctypes
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from threading import Timer

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from helpers import small_runs as runs
from helpers.marks import slow_but
from helpers.network import addresses, reached
from helpers.processes import alive, descendants
from helpers.rounds import rounds_of
from helpers.toys import distance, identical, initial_states, visits_by_id
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.transforms import faults
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.checks import InvalidArgument, Unavailable
from tfpfl.cli import main
from tfpfl.data import Federation
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.machines import Machines, MachinesError
from tfpfl.engines.shards import shards
from tfpfl.engines.tff import isolated
from tfpfl.engines.tff import worker as worker_module
from tfpfl.engines.tff import workers as runtime
from tfpfl.engines.tff.worker import Worker, answers, context_on
from tfpfl.engines.tff.workers import OtherFederation, Remote, ShardedProcess, number_of_shards
from tfpfl.models import SplitModel
from tfpfl.runs.callbacks import Callback
from tfpfl.runs.run import Run

NO_TFF = "TensorFlow Federated is not installed (requirements.lock has it)"
portpicker = pytest.importorskip("portpicker", reason=NO_TFF)  # which TFF brings
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel ties a worker to its parent on Linux")

CLIENTS, PEOPLE = list(range(18)), 18


def command(*arguments) -> subprocess.Popen:
    """`python -m tfpfl ...`"""
    return subprocess.Popen(
        [sys.executable, "-m", "tfpfl", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(condition, seconds=300.0):
    """Waits until it holds; the bound is against waiting for ever, on a machine however busy."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


class Started:
    """`tfpfl worker` on a port: the command and TFF's binary, its child."""

    def __init__(self, port: int, *options):
        self.port, self.name = port, f"localhost:{port}"
        self.command = command("worker", "--port", port, "--concurrency", 2, *options)

    def wait(self):
        """Until it is ready."""
        until(lambda: answers(self.name) or self.command.poll() is not None)
        assert self.command.poll() is None, self.command.stdout.read()
        return self

    @property
    def binary(self) -> int:
        return next(pid for pid in descendants(self.command.pid) if "worker_binary" in arguments(pid)[0])

    def kill(self):
        os.kill(self.binary, signal.SIGKILL)

    def end(self):
        self.command.kill()
        self.command.communicate()


def arguments(pid: int) -> list:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().split("\0")
    except OSError:
        return [""]


@pytest.fixture(scope="module")
def started(tff):
    """Three workers; a test that ends one starts it again."""
    found = [Started(portpicker.pick_unused_port()) for _ in range(3)]
    yield [worker.wait() for worker in found]
    for worker in found:
        worker.end()


def again(started, i):
    """The worker on the same port, anew."""
    started[i].end()
    started[i].command = Started(started[i].port).command
    started[i].wait()


@pytest.fixture(scope="module")
def machines(started):
    return Machines(workers=tuple(worker.name for worker in started), deadline=200)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers") / "federation"
    return Federation.build("digits", "round_robin", clients=PEOPLE, K=2, out=folder)


def algorithm_of(name, federation, **hyperparameters):
    """On a smooth network: at the kinks of a ReLU, rounding may grow from round to round, in any two engines."""
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(20, activation="tanh")]
    backbone, rng = keras.Sequential(layers), np.random.default_rng(0)
    backbone.set_weights([0.2 * rng.standard_normal(w.shape) for w in backbone.get_weights()])
    return build_algorithm(name, SplitModel(backbone), federation.population(shared_slots=True), **hyperparameters)


def some(t):
    """A cohort of 15, in another order every round."""
    return np.random.default_rng(t).permutation(CLIENTS)[:15].tolist()


def train(process, algorithm, rounds, cohort=some):
    """All that rounds give: (server, states by client, [(metrics, client metrics)])."""
    found = list(rounds_of(process, algorithm, [cohort(t) for t in range(1, rounds + 1)]))
    metrics = [(dict(out.metrics), [dict(m) for m in out.client_metrics]) for out, _ in found]
    return found[-1][0].server, found[-1][1], metrics


ROUNDS = {
    "pflego": (20, {"tau": 5, "beta": 0.05, "rho": 0.001}),
    "ditto": (20, {"eta": 0.02}),
    "fedfomo": (2, {}),  # a message for each client, and rows
    "fedamp": (2, {}),
    "feddane": (3, {"eta": 0.05, "steps": 3}),  # two exchanges a round
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(ROUNDS, "pflego", ci=("fedfomo",)))
def test_three_workers_are_one_process(name, federation, machines):
    rounds, hyperparameters = ROUNDS[name]
    algorithm = algorithm_of(name, federation, **hyperparameters)
    ours = ShardedProcess(algorithm, federation, machines, held_out=["test"])
    one = Simulation(algorithm, federation, held_out=["test"])
    ours, one = train(ours, algorithm, rounds), train(one, algorithm, rounds)
    assert distance(ours, one) < 1e-6
    server, states = algorithm.init_server(), initial_states(algorithm, algorithm.population)
    assert distance(one[0], server) > 1e-3 or distance(one[1], states) > 1e-3  # something was learnt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pflego", "fedamp"])
def test_broken_clients_are_left_out_on_several_workers(name, federation, machines):
    def which(data):
        return tf.where(tf.equal(data.info.client_id % 5, 2), faults.KINDS.index("not finite"), 0)

    algorithm = screened(faults.broken_work(algorithm_of(name, federation), which))
    ours = train(ShardedProcess(algorithm, federation, machines), algorithm, 2)
    one = train(Simulation(algorithm, federation, grouping="one_by_one"), algorithm, 2)
    assert distance(ours, one) < 1e-6
    assert int(ours[2][0][0]["rejected"]) > 0


@pytest.mark.slow
def test_heads_come_back_to_their_owner(federation, machines):
    """At rates of 0 nothing changes them, so that each still says whose it is."""
    algorithm = algorithm_of("pflego", federation, tau=2, beta=0.0, rho=0.0)
    process, ids = ShardedProcess(algorithm, federation, machines), some(3)
    mine = [
        tf.nest.map_structure(lambda leaf, i=i: np.full(leaf.shape, i, np.float32), s)
        for i, s in initial_states(algorithm, algorithm.population).items()
    ]
    for t in range(1, 6):
        out = process.next(process.initialize(), [mine[i] for i in ids], visits_by_id(algorithm.population, ids, t))
        assert identical(out.client_states, [mine[i] for i in ids])


@pytest.mark.parametrize("clients, parts", [(1, 1), (5, 5), (6, 6), (18, 6), (30, 7), (47, 11), (100, 12), (1000, 12)])
def test_shards_are_a_function_of_the_cohort(clients, parts):
    found = shards(clients, number=number_of_shards(clients))
    sizes = [len(s) for s in found]
    assert [i for s in found for i in s] == list(range(clients))
    assert len(found) == parts and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def run_folder(folder, federation, machines, callbacks=(), **changes):
    with Run.create(runs.config(engine="tff", rounds=4, participation=1.0, **changes), folder, federation) as run:
        run.machines = machines
        run.train(callbacks)
    return runs.saved(folder)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory, federation, machines):
    """A run of four rounds, with evaluations."""
    return run_folder(tmp_path_factory.mktemp("run") / "three", federation, machines)


@pytest.mark.table
@pytest.mark.slow
def test_the_number_of_workers_changes_no_bit(on_three, federation, machines, tmp_path):
    one = Machines(workers=machines.workers[1:2], deadline=200)
    assert run_folder(tmp_path / "one", federation, one) == on_three
    assert len(on_three["client"]) == PEOPLE and len(on_three["history"]) == 4


@pytest.fixture
def given(monkeypatch):
    """The names of the workers that parts of rounds were given to."""
    names, run = [], Remote.run
    monkeypatch.setattr(Remote, "run", lambda self, *arguments: (names.append(self.name), run(self, *arguments))[1])
    return names


def left_out(caplog, worker) -> tuple:
    """Why a worker was lost for the first time, and when (as in time.time()). The deadline would be another reason."""
    start = f"worker {worker.name} is left out: "
    first = next(r for r in caplog.records if r.getMessage().startswith(start))
    return first.getMessage().removeprefix(start), first.created


SLOW = {"tau": 6000, "beta": 0.001, "rho": 0.001}  # a round of seconds


@pytest.mark.slow
def test_a_worker_killed_in_a_round(federation, machines, started, given, caplog):
    """Its clients go to the others, at once and not at the deadline; started again, it works again."""
    algorithm = algorithm_of("pflego", federation, **SLOW)
    process = ShardedProcess(algorithm, federation, machines)
    expected = train(process, algorithm, 2)
    killed, victim = [], started[1]

    def kill():
        until(lambda: victim.name in given)  # it has something to lose
        victim.kill()
        killed.append(time.time())

    given.clear()
    timer = Timer(0.0, kill)
    timer.start()
    with caplog.at_level(logging.WARNING, "tfpfl.engines.tff.workers"):
        found = train(process, algorithm, 1)
        timer.join()
        why, when = left_out(caplog, victim)
        assert why.startswith("the connection broke") and when - killed[0] < machines.deadline / 2
        again(started, 1)
        given.clear()
        process.workers.require(federation)
        found = train(process, algorithm, 2)
    assert victim.name in given and f"worker {victim.name} is there" in caplog.text
    assert distance(found, expected) < 1e-6


@pytest.mark.table
@pytest.mark.slow
def test_a_worker_that_hangs(federation, machines, started, given, monkeypatch, caplog):
    """It keeps its connections, and says nothing more: lost too, and used again when it is awake."""
    monkeypatch.setattr(runtime, "SILENCE", 2.0)
    monkeypatch.setattr(runtime, "TICK", 0.3)
    algorithm = algorithm_of("pflego", federation, **SLOW)
    process = ShardedProcess(algorithm, federation, machines)
    expected = train(process, algorithm, 1)
    given.clear()
    stopped, sleeper = [], started[2]

    def stop():
        until(lambda: sleeper.name in given)
        os.kill(sleeper.binary, signal.SIGSTOP)
        stopped.append(time.time())

    timer = Timer(0.0, stop)
    timer.start()
    try:
        with caplog.at_level(logging.WARNING, "tfpfl.engines.tff.workers"):
            found = train(process, algorithm, 1)
        timer.join()
    finally:
        os.kill(sleeper.binary, signal.SIGCONT)
    why, when = left_out(caplog, sleeper)
    assert why == "does not answer for 2 s" and when - stopped[0] < machines.deadline / 2
    assert distance(found, expected) < 1e-6
    remote = next(r for r in process.workers.remotes if r.name == sleeper.name)
    assert not remote.is_in
    until(lambda: (train(process, algorithm, 1), remote.is_in)[1])


@pytest.mark.table
@pytest.mark.slow
def test_a_part_that_needs_more_than_the_deadline(federation, machines):
    algorithm = algorithm_of("pflego", federation, **(SLOW | {"tau": 60_000}))
    patient = Machines(workers=machines.workers, deadline=50)  # of waiting for workers that are left out
    process = ShardedProcess(algorithm, federation, machines)
    process.workers = runtime.workers_of(patient)
    long, short = 60.0, 0.4
    for deadline in (long, short):  # of a part; to come in, which compares federations, there is time
        for remote in process.workers.remotes:
            remote.deadline = deadline
        process.workers.require(federation)
    began = time.monotonic()
    with pytest.raises(MachinesError, match=r"lost 4 times.*took longer than the deadline.*use a larger --deadline"):
        train(process, algorithm, 1)
    assert 4 * short <= time.monotonic() - began < 4 * long


class After(Callback):
    """Does something after a round."""

    def __init__(self, round_num, action):
        self.round_num, self.action = round_num, action

    def round(self, training, row):
        if row["round"] == self.round_num:
            self.action()


@pytest.mark.table
@pytest.mark.slow
def test_all_workers_gone_and_resume(on_three, federation, machines, started, tmp_path):
    few = Machines(workers=machines.workers[:2], deadline=20)
    gone = []

    def kill():
        for worker in started[:2]:
            worker.kill()
        gone.append(time.monotonic())

    names = f"{started[0].name}: .*{started[1].name}: "
    with pytest.raises(MachinesError, match=f"no worker was left for 20 s .{names}.*earlier rounds are saved.*resume"):
        run_folder(tmp_path / "run", federation, few, [After(2, kill)])
    assert few.deadline < time.monotonic() - gone[0] < 10 * few.deadline
    assert len(runs.saved(tmp_path / "run")["history"]) == 2
    with pytest.raises(MachinesError, match=f"no worker answers .{names}"):
        ShardedProcess(algorithm_of("fedavg", federation), federation, few)
    again(started, 0)
    with Run.open(tmp_path / "run") as run:
        run.machines = few
        run.train()
    assert runs.saved(tmp_path / "run") == on_three
    again(started, 1)


@pytest.mark.slow
def test_a_worker_with_other_files_is_refused(federation, machines, tmp_path):
    """The folder is a link, which leads elsewhere once this process has opened it."""
    link, changed, other = tmp_path / "federation", tmp_path / "changed", tmp_path / "other"
    link.symlink_to(federation.path)
    shutil.copytree(federation.path, changed)
    data = bytearray((changed / "x.raw").read_bytes())
    data[1234] ^= 1
    (changed / "x.raw").write_bytes(data)
    other_hash = runs.federation(other).hash
    ours = Federation.load(link)
    algorithm = algorithm_of("fedavg", ours)

    deadlines = iter(range(100, 110))

    def anew():
        """The workers as another run meets them: what was compared once is not compared again."""
        return Machines(workers=machines.workers, deadline=next(deadlines))

    ShardedProcess(algorithm, ours, anew())
    name = machines.workers[0]
    for where, message in (
        (changed, f"worker {name} has another x.raw at {link}"),
        (other, f"worker {name} has {other_hash} at {link}, this process has {ours.hash}"),
        (tmp_path / "nowhere", f"worker {name} cannot read {link}/manifest.json .*copy the folder to the same path"),
    ):
        link.unlink()
        link.symlink_to(where)
        with pytest.raises(OtherFederation, match=message):
            ShardedProcess(algorithm, ours, anew())
    link.unlink()
    link.symlink_to(federation.path)
    ShardedProcess(algorithm, ours, anew())


@pytest.mark.slow
def test_the_command_refuses_before_it_makes_a_folder(federation, started, tmp_path):
    def error(*arguments):
        result = CliRunner().invoke(main, ["run", "--federation", str(federation.path), *map(str, arguments)])
        assert result.exit_code == 1 and not (tmp_path / "run").exists()
        return result.output.splitlines()[-1]

    nobody = f"localhost:{portpicker.pick_unused_port()}"
    out = ("--out", tmp_path / "run")
    assert f"no worker answers ({nobody}: does not answer)" in error("--engine", "tff", "--workers", nobody, *out)
    assert "--workers is for --engine tff, found --engine local" in error("--workers", nobody, *out)
    assert "--deadline goes with --workers" in error("--engine", "tff", "--deadline", 5, *out)
    assert "HOST:PORT, found 'here'" in error("--engine", "tff", "--workers", "here", *out)
    assert "isolation is for the TFF worker" in error("--engine", "tff", "--workers", nobody, "--isolate", *out)


@pytest.mark.slow
def test_the_worker_command(tff):
    worker = Started(portpicker.pick_unused_port()).wait()
    binary = worker.binary
    for line in worker.command.stdout:
        if line.startswith("Ready on port"):
            break
        assert "no password and no encryption" in line or "Private network only" in line
    second = command("worker", "--port", worker.port)
    said = second.communicate()[0].splitlines()
    assert second.returncode == 1 and len(said) == 1
    assert f"Error: port {worker.port} cannot be used (Address already in use)" in said[0]
    assert alive(binary)
    worker.command.kill()  # SIGKILL: nothing of the command's own can end the binary
    worker.command.communicate()
    until(lambda: not alive(binary))
    third = Started(worker.port).wait()
    binary = third.binary
    third.command.terminate()
    assert third.command.communicate()[0].endswith("Ended.\n") and third.command.returncode == 143
    assert not alive(binary)


@pytest.fixture
def isolable():
    """Skips where this system does not let this user make a network namespace."""
    if why := worker_module.why_not_isolated():
        pytest.skip(why)


def test_a_system_without_network_namespaces_is_told_by_an_exit_code(monkeypatch, capsys):
    class Kernel:
        @staticmethod
        def unshare(flags):
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(isolated, "_libc", Kernel)
    with pytest.raises(SystemExit) as ended:
        isolated.enter_namespace()
    assert ended.value.code == os.EX_NOPERM
    assert "make a network namespace (Operation not permitted; see sysctl" in capsys.readouterr().err


def test_workers_are_named_with_or_without_a_space():
    """--workers 'a:1, b:2' is cut at commas; a host ' b' never answers, and the run went on without it."""
    assert Machines(workers="a:1, b:2".split(",")) == Machines(workers=("a:1", "b:2"))
    with pytest.raises(InvalidArgument, match="a worker is named twice"):
        Machines(workers=("a:1", " a:1"))


def test_a_deadline_that_never_comes_is_refused():
    """For gRPC, it has passed already: no worker could ever answer in time. Ray ended with an error of Python."""
    assert Machines(deadline=1e9).deadline == 1e9
    for seconds in (float("inf"), 1e10, 0, float("nan")):
        with pytest.raises(InvalidArgument, match=f"positive number of seconds, at most 1e.09, found {seconds}"):
            Machines(deadline=seconds)


@pytest.mark.parametrize(
    ("code", "message"), [(os.EX_NOPERM, "^it may not$"), (1, r"did not start but ended by itself \(1\); see its log")]
)
def test_a_worker_that_ends_at_once(tff, code, message, monkeypatch):
    """Only the code says why; whatever the last line of its log is."""

    def start(port, log, *_, **__):
        return subprocess.Popen([sys.executable, "-c", f"print('it may not'); raise SystemExit({code})"], stdout=log)

    monkeypatch.setattr(worker_module, "start_worker", start)
    monkeypatch.setattr(worker_module, "why_not_isolated", lambda: None)
    with pytest.raises(Unavailable, match=message):
        Worker(2, isolate=True)


@pytest.mark.slow
def test_an_isolated_worker_is_reached_by_its_user_alone(tff, federation, isolable):
    from tensorflow_federated.python.core.impl.context_stack import context_stack_impl

    from tfpfl.engines.tff.process import federate

    plain, isolated = Worker(2, isolate=False), Worker(2, isolate=True)
    try:
        assert "127.0.0.1" in reached(plain.port) and len(reached(plain.port)) == len(addresses())
        assert reached(isolated.port) == []
        folder = os.path.dirname(isolated.address.removeprefix("unix:"))
        assert os.stat(folder).st_mode & 0o777 == 0o700
        algorithm = algorithm_of("pflego", federation, tau=3)
        process, one = federate(algorithm, federation), Simulation(algorithm, federation)
        with context_stack_impl.context_stack.install(context_on(lambda: isolated.stub)):
            assert distance(train(process, algorithm, 1), train(one, algorithm, 1)) < 1e-5
        assert reached(isolated.port) == []
        children = descendants(isolated.process.pid)
        assert children and all(map(alive, children))
        isolated.process.kill()
        until(lambda: not any(map(alive, children)))
    finally:
        plain.close()
        isolated.close()


@pytest.mark.slow
def test_an_isolated_worker_for_tunnels(tff, federation, isolable, tmp_path):
    worker = Started(portpicker.pick_unused_port(), "--isolate").wait()
    try:
        binary = worker.binary
        assert reached(worker.port) == ["127.0.0.1"]
        folder = tmp_path / "run"
        run_folder(folder, federation, Machines(workers=(f"127.0.0.1:{worker.port}",), deadline=60), algorithm="fedavg")
        assert len(runs.saved(folder)["history"]) == 4
        worker.command.kill()
        until(lambda: not alive(binary))
    finally:
        worker.end()
