"""Rounds on three Ray nodes of this machine against the local engine; nodes and processes that go."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from helpers import small_runs as runs
from helpers import toys
from tfpfl import SplitModel, Training, build_algorithm
from tfpfl.checks import Unavailable
from tfpfl.cli import main
from tfpfl.data.manifest import FILES, FederationError
from tfpfl.engines import engine as engines
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.machines import Machines, MachinesError
from tfpfl.engines.ray.engine import RayEngine, Tasks, connect, federation_on_node, shard_size
from tfpfl.engines.rounds import Rounds
from tfpfl.engines.shards import shards
from tfpfl.runs.run import Run

EXAMPLES, CLASSES = (12, 9, 8, 7, 10, 6, 11, 9), (2, 3, 2, 4, 3, 2, 3, 2)
ORDER = [5, 2, 7, 0, 3, 6, 1]


class Nodes:
    """Three nodes of one core each, beside the coordinator's, which does no client work.

    Their folder for temporary files is `temporary`: what they unpack has the same name wherever these tests run.
    """

    def __init__(self, temporary: Path):
        from ray.cluster_utils import Cluster

        self.temporary = temporary
        self.how = {"include_dashboard": False, "env_vars": {"TMPDIR": str(temporary)}}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0} | self.how)
        self.machines = Machines(self.cluster.address, deadline=120)
        connect(self.machines)  # while the coordinator's node is the only one: it must not be one that goes
        self.nodes = []
        for _ in range(3):
            self.add()

    def add(self):
        self.nodes.append(self.cluster.add_node(num_cpus=1, **self.how))

    def remove(self, node):
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray, an extra, is not installed")
    import ray

    for module in (sys.modules[__name__], toys):  # the nodes cannot import them
        ray.cloudpickle.register_pickle_by_value(module)
    found = Nodes(tmp_path_factory.mktemp("of_nodes"))
    yield found
    ray.shutdown()
    found.cluster.shutdown()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return toys.on_disk(tmp_path_factory.mktemp("ray") / "federation", EXAMPLES, CLASSES)


def build(federation, name="pflego", **hyperparameters):
    """An algorithm in float64, where engines differ by less than anything that is asked here."""
    population = federation.population(shared_slots=True)
    return build_algorithm(name, SplitModel(toys.backbone()), population, **hyperparameters)


def some_rounds(engine, rounds=3, ids=ORDER):
    """(server, states, metrics, clients' metrics) after rounds of these clients, as arrays."""
    algorithm, server, states = engine.algorithm, engine.initialize(), toys.arrays_of_states(engine.algorithm)
    for t in range(1, rounds + 1):
        out = engine.next(server, [states[i] for i in ids], toys.visits(algorithm, ids, t))
        server, states = out.server, states | dict(zip(ids, out.client_states, strict=True))
    found = server, states, dict(out.metrics), [dict(m) for m in out.client_metrics]
    return tf.nest.map_structure(np.asarray, found)


def on_ray(nodes, federation, recipe, **how):
    return RayEngine(recipe(federation), federation, recipe, machines=nodes.machines, **how)


class Announced:
    """A recipe that says which process of which node is building it, in the middle of its first shard."""

    def __init__(self, folder, **hyperparameters):
        self.folder, self.hyperparameters = str(folder), hyperparameters

    def __call__(self, federation):
        if "RAY_RAYLET_PID" in os.environ:
            import ray

            made = Path(self.folder) / f"{os.getpid()}.new"
            made.write_text(ray.get_runtime_context().get_node_id())
            made.rename(made.with_suffix(".pid"))
        return build(federation, **self.hyperparameters)

    def processes(self) -> dict:
        """Their nodes, by process."""
        return {int(path.stem): path.read_text() for path in Path(self.folder).glob("*.pid")}


def stop_the_first(recipe, stop) -> threading.Thread:
    """Calls stop(process, node) with the first process that announces itself."""

    def wait():
        while not recipe.processes():
            time.sleep(0.01)
        stop(*next(iter(recipe.processes().items())))

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


OWN = """
import sys
from tfpfl.engines.machines import Machines
from tfpfl.engines.ray.engine import connect
ray = connect(Machines())
print(ray.get(ray.remote(lambda: "works").remote()), ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.mark.table
@pytest.mark.slow
def test_a_ray_of_our_own_lets_nobody_in_without_its_secret():
    """As another user of the machine would ask, who reaches 127.0.0.1, too."""
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    messages = pytest.importorskip("ray.core.generated.gcs_service_pb2", reason="Ray is not installed")
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", OWN], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            said, address = process.stdout.readline().split()
            assert said == "works"
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
                NodeInfoGcsServiceStub(channel).GetClusterId(messages.GetClusterIdRequest(), timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            process.stdin.close()


@pytest.mark.parametrize(
    "name, hyperparameters, more",
    [
        pytest.param(
            "pflego",
            {"tau": 5, "beta": 0.1},
            {"dropout": 0.2, "on_broken": "reject"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ditto", {"steps": 2, "steps_p": 2, "batch_size": 4}, {}, marks=[pytest.mark.slow, pytest.mark.table]
        ),
        pytest.param(
            "fedavg",
            {"steps": 2, "client_opt": "momentum", "server_opt": "yogi", "server_eta": 0.02, "server_epsilon": 0.1},
            {},
            marks=[pytest.mark.slow, pytest.mark.table],
        ),
    ],
)
def test_three_nodes_give_what_one_process_gives(nodes, tmp_path, name, hyperparameters, more):
    """20 rounds of a run: everything that it saved; floats up to the rounding of other sums, float32."""
    federation = runs.federation(tmp_path / "federation")
    asked = {"algorithm": name, "hyperparameters": hyperparameters, "rounds": 20} | more
    found = []
    for engine in ("local", "ray"):
        with Run.create(runs.config(engine=engine, **asked), tmp_path / engine, federation) as run:
            if engine == "ray":
                run.machines = nodes.machines
            run.train()
            loop = run.training()
            states = loop.server_state(), loop.client_states(range(6))
            found.append((states, run.store.history(), run.store.evaluations()))
    assert toys.distance(found[0][0], found[1][0]) < 1e-6
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert list(a) == list(b)
        assert a == pytest.approx(b | {"seconds": a["seconds"]}, abs=1e-6)
    for a, b in zip(found[0][2], found[1][2], strict=True):
        assert (a.client_id, a.model, a.split, a.accuracy) == (b.client_id, b.model, b.split, b.accuracy)
        assert a.loss == pytest.approx(b.loss, abs=1e-6)
    with Run.open(tmp_path / "ray", engine="local") as run:
        assert run.evaluate() and run.config.engine == "ray"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, hyperparameters", [("fedamp", {"steps": 2}), ("pgfed", {"batch_size": 4}), ("fedfomo", {"batch_size": 4})]
)
def test_messages_of_their_own_and_rows(nodes, federation, name, hyperparameters):
    recipe = partial(build, name=name, **hyperparameters)
    algorithm = recipe(federation)
    assert algorithm.message_per_client
    expected = some_rounds(Simulation(algorithm, federation))
    assert toys.distance(some_rounds(on_ray(nodes, federation, recipe)), expected) < 1e-6


@pytest.mark.slow
def test_two_exchanges_a_round(nodes, federation):
    recipe = partial(build, name="feddane", eta=0.1, steps=3)
    algorithm, ids = recipe(federation), [3, 0, 2]
    ours, expected = on_ray(nodes, federation, recipe), Simulation(algorithm, federation)
    assert toys.distance(some_rounds(ours), some_rounds(expected)) < 1e-6
    given = [algorithm.init_client(None) for _ in ids], toys.visits(algorithm, ids, 1)
    found = [e.next(e.initialize(), *given, gone=[0]) for e in (ours, expected)]  # leaves between the exchanges
    assert toys.distance(found[0].server, found[1].server) < 1e-6


@pytest.mark.slow
def test_everyone_has_its_own_head_back(nodes, federation):
    """Heads that say whose they are, and rates that are too small to move them."""
    recipe = partial(build, tau=1, rho=1e-30)
    algorithm = recipe(federation)
    start = toys.arrays_of_states(algorithm)
    own = {i: tf.nest.map_structure(lambda w: np.full_like(w, 100 + i), s) for i, s in start.items()}  # noqa: B023
    for grouping in ("fused", "one_by_one"):
        engine = on_ray(nodes, federation, recipe, grouping=grouping)
        for ids in (ORDER, ORDER[::-1], [3]):
            out = engine.next(engine.initialize(), [own[i] for i in ids], toys.visits(algorithm, ids, 1))
            assert toys.identical(out.client_states, [own[i] for i in ids])
            assert [int(m["bytes_up"]) > 0 for m in out.client_metrics] == [True] * len(ids)


@pytest.mark.slow
def test_a_node_without_the_federation_gets_its_files(nodes, federation, tmp_path, monkeypatch):
    """At the path that the node is told there is another federation; what it unpacks is checked by its hash."""
    other = toys.on_disk(tmp_path / "other", EXAMPLES, CLASSES, seed=5)
    monkeypatch.setattr(tempfile, "tempdir", str(nodes.temporary))  # this process looks where the nodes look
    unpacked = nodes.temporary / f"tfpfl-{os.getuid()}" / "federations" / federation.hash
    recipe = partial(build, tau=3, beta=0.1)
    algorithm = recipe(federation)
    expected = some_rounds(on_ray(nodes, federation, recipe), rounds=1)
    job = replace(on_ray(nodes, federation, recipe).job, key="elsewhere", path=str(other.path))
    tasks = Tasks(job, federation, algorithm.message_per_client, nodes.machines)
    assert toys.identical(some_rounds(Rounds(algorithm, tasks), rounds=1), expected)
    assert sorted(path.name for path in unpacked.iterdir()) == sorted(("manifest.json", *FILES))
    (unpacked / "x.raw").write_bytes(bytes(federation.manifest["files"]["x.raw"]["bytes"]))
    assert federation_on_node(str(other.path), federation.hash) is None  # damaged
    files = {name: np.fromfile(federation.path / name, np.uint8) for name in ("manifest.json", *FILES)}
    mended = federation_on_node(str(tmp_path / "nowhere"), federation.hash, files)
    assert (mended.path, mended.hash) == (unpacked, federation.hash)
    shutil.rmtree(unpacked)
    files = {name: np.fromfile(other.path / name, np.uint8) for name in ("manifest.json", *FILES)}
    with pytest.raises(FederationError, match=f"are of federation {other.hash[:12]}, not {federation.hash[:12]}"):
        federation_on_node(str(tmp_path / "nowhere"), federation.hash, files)
    assert not unpacked.exists()


def test_a_folder_that_others_can_write_is_not_used_on_a_node(federation, tmp_path, monkeypatch):
    """The folder's name is known: another user may make it first, and replace what has been checked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = {name: np.fromfile(federation.path / name, np.uint8) for name in ("manifest.json", *FILES)}
    root = tmp_path / f"tfpfl-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="is not a folder that only you can write: delete it"):
        federation_on_node(str(tmp_path / "nowhere"), federation.hash, files)
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is not a folder that only you can write"):
        federation_on_node(str(tmp_path / "nowhere"), federation.hash, files)
    assert federation_on_node(str(federation.path), federation.hash).hash == federation.hash  # not needed there
    root.unlink()
    assert federation_on_node(str(tmp_path / "nowhere"), federation.hash, files).hash == federation.hash
    assert root.stat().st_mode & 0o777 == 0o700


def fails_on_nodes(federation):
    if "RAY_RAYLET_PID" in os.environ:
        raise ValueError("no such network")
    return build(federation)


@pytest.mark.slow
def test_what_fails_on_a_node_is_said(nodes, federation):
    engine = on_ray(nodes, federation, fails_on_nodes)
    with pytest.raises(MachinesError, match=r"client \d failed on a node of the Ray cluster: no such network"):
        some_rounds(engine)
    tasks = Tasks(replace(engine.job, key="old", versions={"tensorflow": "1.15"}), federation, False, nodes.machines)
    with pytest.raises(MachinesError, match=r"has \{'tfpfl': .*the coordinator \{'tensorflow': '1.15'\}"):
        some_rounds(Rounds(engine.algorithm, tasks))


def test_the_examples_in_the_documentation_are_yaml():
    yaml = pytest.importorskip("yaml")
    text = (Path(__file__).parents[2] / "docs" / "several_machines.md").read_text()
    ray_up, job = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    assert ray_up["provider"]["type"] == "local" and len(ray_up["provider"]["worker_ips"]) == ray_up["max_workers"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    command = job["spec"]["entrypoint"]
    assert "\n" not in command and subprocess.run(["bash", "-n", "-c", command]).returncode == 0
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0"}


def test_shards_are_the_cohort_in_order():
    for clients in (1, 5, 16, 17, 20, 100, 128, 129, 1000):
        cut = shards(clients, size=shard_size(clients))
        assert [i for shard in cut for i in shard] == list(range(clients))
        assert max(map(len, cut)) <= 8 and len(cut) <= max(16, clients / 8 + 1)


@pytest.mark.slow
def test_bad_input(nodes, federation):
    algorithm = build(federation)
    with pytest.raises(ValueError, match="engine 'ray' needs a recipe"):
        Training(algorithm, federation, engine="ray")
    with pytest.raises(ValueError, match="grouping='fused' needs a federation"):
        on_ray(nodes, federation, partial(build, name="fedavg"), grouping="fused")
    with pytest.raises(ValueError, match=r"connected to Ray at .* already, not to 10\.0\.0\.1:6379"):
        connect(Machines("10.0.0.1:6379"))


def test_bad_options(tmp_path, monkeypatch):
    def error(*arguments):
        result = CliRunner().invoke(main, ["run", *arguments, "--out", str(tmp_path / "run")])
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
        return result.output

    assert "--address is for --engine ray, found --engine local" in error("--address", "auto")
    assert "--deadline goes with --workers, or with --engine ray" in error("--deadline", "5")

    def absent():
        raise Unavailable("Ray is not here")

    monkeypatch.setattr(engines, "require_ray", absent)
    assert "Error: Ray is not here" in error("--engine", "ray")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_cluster_that_does_not_answer(nodes, monkeypatch):
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    with socket.socket() as taken, pytest.raises(MachinesError, match="no Ray cluster answers at 127.0.0.1:.*refused"):
        taken.bind(("127.0.0.1", 0))  # and not listening
        connect(Machines(f"127.0.0.1:{taken.getsockname()[1]}"))


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_round_changes_no_bit(nodes, federation, tmp_path):
    recipe = Announced(tmp_path, name="fedavg", steps=3, batch_size=4)
    expected = some_rounds(on_ray(nodes, federation, partial(build, **recipe.hyperparameters)))
    thread = stop_the_first(recipe, lambda process, node: os.kill(process, signal.SIGKILL))
    found = some_rounds(on_ray(nodes, federation, recipe))
    thread.join()
    assert toys.identical(found, expected)
    assert sum(os.path.exists(f"/proc/{process}") for process in recipe.processes()) == len(recipe.processes()) - 1
    expected = some_rounds(Simulation(build(federation, **recipe.hyperparameters), federation))
    assert toys.distance(found, expected) < 1e-6


@pytest.mark.table
@pytest.mark.slow
def test_a_node_that_goes_in_a_round_changes_no_bit_and_neither_does_their_number(nodes, federation, tmp_path):
    hyperparameters = {"tau": 5, "beta": 0.1, "server_opt": "sgd"}
    three = some_rounds(on_ray(nodes, federation, partial(build, **hyperparameters)))
    recipe = Announced(tmp_path, **hyperparameters)

    def remove(process, node_id):
        nodes.remove(next(node for node in nodes.nodes if node.node_id == node_id))

    thread = stop_the_first(recipe, remove)
    fewer = some_rounds(on_ray(nodes, federation, recipe))
    thread.join()
    assert len(nodes.nodes) == 2
    assert toys.identical(fewer, three)
    nodes.remove(nodes.nodes[0])
    one = some_rounds(on_ray(nodes, federation, partial(build, **hyperparameters)))
    assert toys.identical(one, three)


@pytest.mark.table
@pytest.mark.slow
def test_all_nodes_gone_is_an_error_in_time_and_the_run_is_resumed(nodes, tmp_path, monkeypatch):
    ray, waits = sys.modules["ray"], []

    def wait(*arguments, timeout, wait=ray.wait):
        waits.append(timeout)
        return wait(*arguments, timeout=timeout)

    federation, folder = runs.federation(tmp_path / "federation"), tmp_path / "run"
    with Run.create(runs.config(engine="ray", rounds=2), folder, federation) as run:
        run.machines = nodes.machines
        run.train()
    for node in list(nodes.nodes):
        nodes.remove(node)
    with Run.open(folder, rounds=4) as run:
        run.machines = Machines(nodes.cluster.address, deadline=3)
        monkeypatch.setattr(ray, "wait", wait)
        lost = r"for 3 s: the work of clients \d, \d, \d is lost, \d of \d nodes are alive.*`tfpfl resume`"
        with pytest.raises(MachinesError, match=lost):
            run.train()
        monkeypatch.undo()
        assert 0 < sum(waits) <= 3  # seconds that it lets Ray wait; all else depends on how busy the machine is
        assert run.store.round_num == 2
    nodes.add()
    with Run.open(folder) as run:
        run.machines = nodes.machines
        run.train()
        assert run.store.round_num == 4
        loop = run.training()
        resumed = loop.server_state(), loop.client_states(range(6))
    with Run.create(runs.config(rounds=4), tmp_path / "local", federation) as run:
        run.train()
        loop = run.training()
        assert toys.distance(resumed, (loop.server_state(), loop.client_states(range(6)))) < 1e-6
