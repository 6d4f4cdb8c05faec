"""The federated computation: what is placed where, how clients' data arrive, and the worker it runs on."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.processes import alive, children_of
from helpers.toys import CLASSES, EXAMPLES, backbone, distance, initial_states, on_disk, run, toy, toy_of, visits_by_id
from tfpfl.algorithms import build_algorithm, fedavg, local, pflego
from tfpfl.algorithms.contract import ClientData
from tfpfl.checks import InvalidArgument
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.machines import Machines, MachinesError
from tfpfl.engines.scoring import Scorer
from tfpfl.engines.tff import worker as worker_module
from tfpfl.engines.tff.evaluation import federated_evaluation
from tfpfl.engines.tff.process import federate
from tfpfl.models import SplitModel
from tfpfl.runs.training import Training

IDS = list(range(len(CLASSES)))


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("federate") / "federation")


@pytest.fixture(scope="module")
def algorithm(federation):
    return pflego(SplitModel(backbone("float32")), federation.population(), tau=4, beta=0.3, rho=0.02)


def placements(type_signature):
    """(what is at the server, what is at the clients) of a tuple type, as text."""
    parts = [str(t) for t in type_signature]
    return [p for p in parts if p.endswith("@SERVER")], [p for p in parts if p.endswith("@CLIENTS")]


def test_heads_are_at_the_clients_and_nowhere_else(tff, algorithm, federation):
    process = federate(algorithm, federation)
    signature = process.next.type_signature
    at_server, at_clients = placements(signature.parameter)
    assert len(at_server) == 1 and len(at_clients) == 2
    head = "kernel=float32[5,?],bias=float32[?]"
    assert at_clients[0] == "{<" + head + ">}@CLIENTS"
    new_at_server, new_at_clients = placements(signature.result)
    assert new_at_server[0] == at_server[0] == str(process.initialize.type_signature.result)
    assert new_at_clients[0] == at_clients[0]
    for placed in (*at_server, *new_at_server):  # the state's shapes are those of theta and of Adam's slots
        assert "kernel" not in placed and "bias" not in placed and "?" not in placed
    names = str(new_at_server[1])
    assert {"loss", "raised", "restored", "bytes_up", "bytes_down", "clients", "examples", "finite"} == {
        part.split("=")[0].lstrip("<") for part in names.removesuffix("@SERVER").strip("<>").split(",")
    }


def test_only_sums_leave_the_clients(tff, algorithm, federation):
    """The whole computation holds federated sums, no collection of single clients' values; with rows there is one."""
    text = federate(algorithm, federation).next.to_building_block().compact_representation()
    assert "federated_sum" in text
    assert "federated_aggregate" not in text and "federated_collect" not in text
    assert "federated_broadcast" in text


def data_of_clients(federation):
    return [federation.arrays(i) for i in IDS]


def client_data(algorithm, x, y, client_id, round_num):
    visit = visits_by_id(algorithm.population, [client_id], round_num)[0]
    return ClientData(x, y, visit.info, visit.key)


def three_rounds(process, algorithm, visits_of_round):
    server, states = process.initialize(), list(initial_states(algorithm, algorithm.population).values())
    for t in (1, 2, 3):
        output = process.next(server, states, visits_of_round(t))
        server, states = output.server, output.client_states
    return server, states, output.metrics


@pytest.fixture(scope="module")
def read_by_id(tff, algorithm, federation):
    """The result of three rounds."""
    process = federate(algorithm, federation)
    return three_rounds(process, algorithm, lambda t: visits_by_id(algorithm.population, IDS, t))


@pytest.mark.slow
def test_arrays_give_what_the_federation_gives(algorithm, federation, read_by_id):
    specs = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32))

    def visits(t):
        return [client_data(algorithm, x, y, i, t) for i, (x, y) in enumerate(data_of_clients(federation))]

    assert distance(three_rounds(federate(algorithm, specs), algorithm, visits), read_by_id) < 1e-6
    assert distance(three_rounds(Simulation(algorithm), algorithm, visits), read_by_id) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        lambda data: data,
        pytest.param(lambda data: data.batch(4), marks=pytest.mark.slow),
        pytest.param(lambda data: data.map(lambda x, y: {"x": x, "y": y}), marks=pytest.mark.slow),
        lambda data: data.map(lambda x, y: {"x": tf.cast(x, tf.float64), "y": tf.cast(y, tf.int64)[None]}).batch(3),
    ],
    ids=["examples", "batches", "dicts", "batches of dicts of other dtypes"],
)
def test_datasets_give_what_the_federation_gives(algorithm, federation, read_by_id, shape):
    datasets = [shape(tf.data.Dataset.from_tensor_slices(arrays)) for arrays in data_of_clients(federation)]
    process = federate(algorithm, tf.data.DatasetSpec(datasets[0].element_spec))

    def visits(t):
        return [client_data(algorithm, data, (), i, t) for i, data in enumerate(datasets)]

    assert distance(three_rounds(process, algorithm, visits), read_by_id) < 1e-6


@pytest.mark.slow
def test_a_client_with_one_example_and_one_class(tff):
    data = toy(examples=(1, 5), classes=(1, 3), dtype="float32")
    specs = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32))
    algorithm = pflego(data.model, data.population, tau=3, beta=0.3, rho=0.02)
    server, states, _ = three_rounds(
        federate(algorithm, specs), algorithm, lambda t: [data.visit(i, t) for i in (0, 1)]
    )
    ours = run(algorithm, data, rounds=3)
    assert distance((server, states), (ours[0], list(ours[1].values()))) < 1e-5


@pytest.mark.slow
def test_double_precision_goes_through_tff(tff):
    """The engines differ by the order of sums alone."""
    data = toy()
    specs = (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None], tf.int32))
    for build in (pflego, fedavg, local):
        algorithm = build(data.model, data.population)
        server, states, _ = three_rounds(
            federate(algorithm, specs), algorithm, lambda t: [data.visit(i, t) for i in IDS]
        )
        ours = run(algorithm, data, rounds=3)
        assert distance((server, states), (ours[0], list(ours[1].values()))) < 1e-11


@pytest.mark.slow
def test_evaluation_in_both_engines(tff, algorithm, federation, read_by_id):
    server, states, _ = read_by_id
    visits = visits_by_id(algorithm.population, IDS, 9)
    splits = ("train", "validation", "test")
    scores = federated_evaluation(algorithm, federation, splits)(server, states, visits)
    for i, (theirs, ours) in enumerate(
        zip(scores, Scorer(algorithm, federation, splits)(server, states, visits), strict=True)
    ):
        assert all(distance(theirs[name], ours[name]) < 1e-5 for name in ours)
        x, y = federation.arrays(i, "test")
        logits = numpy_logits(server.theta, states[i], x)
        assert int(theirs["test_correct"]) == int((np.argmax(logits, 1) == y).sum())
        assert int(theirs["test_examples"]) == len(y) and int(theirs["validation_examples"]) == 0
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        assert float(theirs["test_loss"]) == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean(), abs=1e-5)


def numpy_logits(theta, head, x):
    w_1, b_1, w_2, b_2 = (np.asarray(w) for w in theta)
    return np.tanh(np.tanh(x @ w_1 + b_1) @ w_2 + b_2) @ np.asarray(head.kernel) + np.asarray(head.bias)


def test_data_that_clients_cannot_be_given(tff, algorithm, federation):
    specs = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32))
    with pytest.raises(ValueError, match="data must be a Federation, a pair of tf.TensorSpec.*found ndarray"):
        federate(algorithm, np.zeros(3))
    with pytest.raises(ValueError, match="held-out splits .* can be read only from a Federation"):
        federate(algorithm, specs, held_out=["test"])
    element = {"pixels": specs[0], "label": specs[1]}
    with pytest.raises(ValueError, match=r"found the keys \['label', 'pixels'\]"):
        federate(algorithm, tf.data.DatasetSpec(element))
    with pytest.raises(ValueError, match=r"labels .* must be integers.*found float32, which would be cut down"):
        federate(algorithm, tf.data.DatasetSpec((specs[0], tf.TensorSpec([None], tf.float32))))


ELEMENT = (tf.TensorSpec([4], tf.float32), tf.TensorSpec([], tf.int32))


@pytest.mark.parametrize(
    ("element", "said"),
    [
        ((ELEMENT[0],) * 3, "must have elements (x, y) or {'x', 'y'}; found (float32 [4], float32 [4], float32 [4])"),
        (ELEMENT[0], "must have elements (x, y) or {'x', 'y'}; found float32 [4]. Map it to pairs"),
        ((tf.TensorSpec([2, 2]), ELEMENT[1]), "takes examples float32 [N, 4], or one of them at a time; a client's"),
        ((tf.TensorSpec([None, 2, 2]), ELEMENT[1]), "a client's dataset has float32 [N, 2, 2]. Map it to this shape"),
        (({"a": ELEMENT[0]}, ELEMENT[1]), "takes examples float32 [N, 4], a client's dataset has {'a': float32 [4]}"),
        ((ELEMENT[0], tf.TensorSpec([3], tf.int32)), "one class for each example; found int32 [3] beside examples"),
        ((tf.TensorSpec([None, 4]), tf.TensorSpec([None, 3], tf.int32)), "found int32 [N, 3] beside examples float32"),
        ((tf.TensorSpec([None, 4]), tf.TensorSpec([], tf.int32)), "found int32 [] beside examples float32 [N, 4]"),
    ],
)
def test_datasets_whose_elements_do_not_fit(tff, algorithm, element, said):
    """One-hot rows of integers became twice as many labels, and the rest was an error of TFF's worker."""
    with pytest.raises(InvalidArgument) as error:
        federate(algorithm, tf.data.DatasetSpec(element))
    assert said in str(error.value)


def test_targets_of_datasets_are_as_many_as_outputs(tff):
    """One number beside two outputs was the target of both."""
    data = toy_of("regression")
    algorithm = fedavg(data.model, data.population, steps=2)
    x = tf.TensorSpec([None, 4], tf.float64)
    for of_one, y, found in (
        (tf.TensorSpec([4]), [], "[]"),
        (x, [None], "[N]"),
        (x, [None, 1], "[N, 1]"),
        (x, [None, 3], "[N, 3]"),
    ):
        with pytest.raises(InvalidArgument) as error:
            federate(algorithm, tf.data.DatasetSpec((of_one, tf.TensorSpec(y))))
        assert f"must be a number for each of the 2 outputs; found float32 {found} beside examples" in str(error.value)
    federate(algorithm, tf.data.DatasetSpec((x, tf.TensorSpec([None, 2]))))


def test_a_dataset_is_for_tff_alone(algorithm, federation):
    x, y = federation.arrays(0)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    engine = Simulation(algorithm)
    visit = client_data(algorithm, dataset, (), 0, 1)
    with pytest.raises(InvalidArgument, match="client 0 carries a tf.data.Dataset, which only tfpfl.federate takes"):
        engine.next(engine.initialize(), [algorithm.init_client(visit.info)], [visit])


def test_a_federation_for_which_the_algorithm_was_not_built(tff, algorithm, tmp_path):
    """Its clients would be weighed by the numbers of examples of others."""
    other = on_disk(tmp_path / "other", examples=[2 * n for n in EXAMPLES])
    for make in (federate, federated_evaluation, Simulation, Scorer):
        with pytest.raises(InvalidArgument, match="training examples in the federation .* in the population"):
            make(algorithm, other)


def test_arguments_by_name_are_checked_as_those_by_place(tff, algorithm, federation):
    """A client that is twice in a round is refused; and the names are those of the other engines."""
    (visit,) = visits_by_id(algorithm.population, [0], 1)
    state = algorithm.init_client(visit.info)
    evaluation = federated_evaluation(algorithm, federation, ["test"])
    for compute in (federate(algorithm, federation).next, evaluation):
        server = algorithm.init_server()
        with pytest.raises(InvalidArgument, match="client 0 is in the round 2 times"):
            compute(server, client_states=[state] * 2, visits=[visit] * 2)
        with pytest.raises(InvalidArgument, match="found 1 states and 2 visits"):
            compute(server=server, client_states=[state], visits=[visit] * 2)
        compute(server=server, client_states=[state], visits=[visit])
    for found in ((ELEMENT[0], ["test"]), (federation, [])):
        with pytest.raises(InvalidArgument, match="in a tfpfl.Federation, and at least one split is needed"):
            federated_evaluation(algorithm, *found)


def test_machines_of_another_engine(algorithm, federation):
    """They were not used, without a word; and a list ended in an error about hashes."""
    machines = Machines(workers=["here:1"])
    assert machines == Machines(workers="here:1") and machines.workers == ("here:1",)
    with pytest.raises(
        InvalidArgument, match=r"Machines\(workers=\('here:1',\)\) is for engine='tff', found engine='local'"
    ):
        Training(algorithm, federation, machines=machines)
    with pytest.raises(InvalidArgument, match=r"Machines\(address='auto'\) is for engine='ray'"):
        Training(algorithm, federation, machines=Machines("auto"))


def test_without_tff_the_error_says_what_to_do(monkeypatch, algorithm, federation):
    monkeypatch.setitem(sys.modules, "tensorflow_federated", None)  # an import now fails
    for make in (federate, federated_evaluation):
        with pytest.raises(RuntimeError, match="requirements.lock.*local engine.*Found Python 3"):
            make(algorithm, federation)


CHILD = """
import subprocess, sys, time
import tfpfl.engines.tff.worker as runtime
runtime.use_local_worker()
import tensorflow as tf, tensorflow_federated as tff
print(int(tff.tensorflow.computation(lambda: tf.constant(41) + 1)()), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ties a worker to its parent on Linux")
def test_the_worker_dies_with_its_parent_and_does_not_hold_its_output(tff):
    parent = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert parent.stdout.readline() == b"42\n"
        workers = children_of(parent.pid)
        assert workers and all(alive(w) for w in workers)
        for worker in workers:
            assert os.readlink(f"/proc/{worker}/fd/1") != os.readlink(f"/proc/{parent.pid}/fd/1")
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.communicate(timeout=1800)[0] == b""  # the pipe closes: nobody else has it
        deadline = time.monotonic() + 20
        while any(alive(w) for w in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(alive(w) for w in workers)
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.slow
def test_a_computation_that_ends_every_worker_is_given_up(tff, caplog):
    """As one that needs more memory than there is: TFF itself starts it again for ever. Others go on afterwards."""
    from tensorflow_federated.python.core.impl.context_stack import context_stack_impl

    def ends():
        with tf.control_dependencies([tf.raw_ops.Abort(error_msg="as the kernel does")]):
            return tf.constant(41)

    ending, working = (tff.tensorflow.computation(of) for of in (ends, lambda: tf.constant(41) + 1))
    with context_stack_impl.context_stack.install(worker_module.execution_context(1)):
        assert int(working()) == 42
        with pytest.raises(
            MachinesError, match="worker ended by itself 4 times.*see the log.*`tfpfl resume`"
        ) as given_up:
            ending()
        assert caplog.text.count("ended by itself; a new one computes its work again") == 3
        assert int(working()) == 42
    shutil.rmtree(re.search(r"the last one, (\S+)/log\.", str(given_up.value))[1])


AFTER_TFF_STARTED_ITS_OWN = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background jobs; TFF ends its worker by SIGINT
import numpy as np, tensorflow_federated as tff
add = tff.tensorflow.computation(lambda x: x + 1, np.int32)
assert add(1) == 2
from tfpfl.engines.tff.worker import use_local_worker
use_local_worker()
assert add(2) == 3
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_worker_that_tff_started_before_does_not_stop_us(tff):
    process = subprocess.Popen(
        [sys.executable, "-c", AFTER_TFF_STARTED_ITS_OWN],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        os.set_blocking(process.stdout.fileno(), False)
        deadline, found = time.monotonic() + 90, b""
        while b"done" not in found and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
            found += process.stdout.read() or b""
        assert b"done" in found
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # TFF's worker with it, which would outlive it


@pytest.mark.parametrize("name", slow_but(["pflego", "fedavg", "scaffold"], ci=("pflego",)))
@pytest.mark.parametrize("pack", slow_but([2, 5], ci=(2,)))
def test_packed_clients_are_the_same_clients(tff, federation, name, pack):
    """Five clients as 2 + 2 + 1, and as one; for algorithms that are fused, looped, and have sums of two kinds."""
    population = federation.population(shared_slots=True)
    algorithm = build_algorithm(name, SplitModel(backbone("float32")), population)
    ours, packed = Simulation(algorithm, federation, held_out=["test"], grouping="one_by_one"), federate(
        algorithm, federation, held_out=["test"], pack=pack
    )  # fmt: skip
    results = []
    for process in (ours, packed):
        server, states = process.initialize(), list(initial_states(algorithm, population).values())
        for t in (1, 2):
            output = process.next(server, states, visits_by_id(population, IDS, t))
            server, states = output.server, output.client_states
        results.append((server, states, dict(output.metrics), [dict(m) for m in output.client_metrics]))
    assert distance(results[0], results[1]) < 1e-5


def test_what_cannot_be_packed(tff, algorithm, federation):
    for wrong in (0, 2.0, "2"):
        with pytest.raises(ValueError, match=f"pack must be at least 1 client, found {wrong!r}"):
            federate(algorithm, federation, pack=wrong)
    arrays = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int32))
    with pytest.raises(ValueError, match="needs a Federation"):
        federate(algorithm, arrays, pack=2)
    fomo = build_algorithm("fedfomo", SplitModel(backbone("float32")), federation.population(shared_slots=True))
    with pytest.raises(ValueError, match="messages or rows for single clients"):
        federate(fomo, federation, pack=2)
