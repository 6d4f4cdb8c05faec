"""A federation on disk: what was put in comes out, by every way of reading; what is broken is refused."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import time
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.data import Federation, FederationError, Partition, Source, blobs, load_source, writing
from tfpfl.data.manifest import SPLITS
from tfpfl.data.population import Sampling
from tfpfl.engines.tff.worker import use_local_worker
from tfpfl.studies import plots


def numbered(num_examples=400, num_classes=5, dtype=np.uint8):
    """A source whose examples tell who they are: number n is the bytes of n, and one more feature of the class."""
    n = np.arange(num_examples)
    x = np.stack([n % 256, n // 256, n % num_classes], 1).astype(dtype)
    return Source.from_arrays(x, n % num_classes, scale=0.5, shift=-1.0)


def who(x):
    """The numbers of decoded or raw examples of `numbered`, given as raw values."""
    return (x[:, 0].astype(int) + 256 * x[:, 1].astype(int)).tolist()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return Federation.build(numbered(), clients=8, K=2, seed=3, out=tmp_path_factory.mktemp("data") / "fed")


def test_every_example_is_held_once_with_its_label(federation):
    source = numbered()
    seen = {}
    for i in range(8):
        for split in SPLITS:
            x, y = federation.raw(i, split, "global")
            seen |= {n: (split, label) for n, label in zip(who(x), y.tolist(), strict=True)}
    assert len(seen) == 400 and all(label == n % 5 for n, (_, label) in seen.items())
    assert {n for n, (split, _) in seen.items() if split == "test"} == set(who(source.x_test))
    validation = sum(split == "validation" for split, _ in seen.values())
    assert validation == federation.num_examples("validation").sum() > 0


def test_counts_classes_and_shapes(federation):
    assert (federation.num_clients, federation.num_labels, federation.example_shape) == (8, 5, (3,))
    np.testing.assert_array_equal(federation.num_classes, np.full(8, 2))
    train, validation = federation.num_examples("train"), federation.num_examples("validation")
    np.testing.assert_array_equal(validation, (train + validation) // 10)
    for i in range(8):
        held = np.concatenate([federation.raw(i, s, "global")[1] for s in SPLITS])
        np.testing.assert_array_equal(federation.classes(i), np.unique(held))
        assert federation.class_counts("train")[i].sum() == train[i]


def test_local_labels_are_places_in_the_sorted_class_set_for_all_parts(federation):
    for i in range(8):
        for split in SPLITS:
            local, everywhere = federation.raw(i, split, "local")[1], federation.raw(i, split, "global")[1]
            assert len(local)
            np.testing.assert_array_equal(federation.classes(i)[local], everywhere)


def test_arrays_decode_raw_times_scale_plus_shift(federation):
    raw, _ = federation.raw(2)
    x, y = federation.arrays(2)
    assert x.dtype == np.float32 and y.dtype == np.int32
    np.testing.assert_array_equal(x, raw * 0.5 - 1.0)
    np.testing.assert_array_equal(federation.decode(tf.constant(raw)), x)
    assert federation.decode(tf.constant(raw), tf.float64).dtype == tf.float64


def test_local_labels_where_test_has_a_class_that_train_lacks(tmp_path):
    x = np.arange(12.0).reshape(6, 2)
    clients = [{"train": (x, [7, 7, 3, 3, 3, 7]), "validation": (x[:1], [9]), "test": (x[:2], [3, 5])}]
    fed = Federation.from_clients(clients, out=tmp_path / "f")
    assert fed.classes(0).tolist() == [3, 5, 7, 9] and fed.num_labels == 10
    assert fed.arrays(0)[1].tolist() == [2, 2, 0, 0, 0, 2]
    assert fed.arrays(0, "validation")[1].tolist() == [3]
    assert fed.arrays(0, "test")[1].tolist() == [0, 1]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("labels", ["local", "global"])
def test_reader_equals_arrays_eagerly_and_in_a_graph(federation, split, labels):
    read = federation.reader(split, labels)
    graph = tf.function(read, input_signature=[tf.TensorSpec([], tf.int32)])
    assert graph.get_concrete_function().structured_outputs[0].shape.as_list() == [None, 3]
    for i in range(8):
        x, y = federation.arrays(i, split, labels)
        for got_x, got_y in (read(i), graph(i)):
            assert got_x.dtype == tf.float32 and got_y.dtype == tf.int32
            np.testing.assert_array_equal(got_x, x)
            np.testing.assert_array_equal(got_y, y)


def test_reader_gives_empty_tensors_for_an_empty_split_and_refuses_other_ids(tmp_path):
    x = np.arange(24.0).reshape(6, 2, 2)
    fed = Federation.from_clients([(x, [0, 1, 0, 1, 0, 1])] * 2, out=tmp_path / "f", validation=0, test_fraction=0)
    for split in ("validation", "test"):
        got_x, got_y = fed.reader(split)(1)  # at the end of the file
        assert got_x.shape == (0, 2, 2) and got_y.shape == (0,)
        assert fed.arrays(1, split)[0].shape == (0, 2, 2)
    for bad in (-1, 2):
        with pytest.raises(tf.errors.InvalidArgumentError):
            fed.reader()(bad)
        with pytest.raises(InvalidArgument, match=f"client {bad} does not exist: ids are 0..1"):
            fed.arrays(bad)
        with pytest.raises(InvalidArgument, match=f"client {bad} is not among the 2 clients of the population"):
            fed.population().info(bad)
    for bad in (1.0, None):
        with pytest.raises(InvalidArgument, match="a client's number must be a whole number, an int; found"):
            fed.raw(bad)
    assert fed.raw(np.int64(1))[0].shape == (6, 2, 2)
    assert fed.class_counts("test").tolist() == [[0, 0]] * 2 and fed.class_counts(client_ids=[]).shape == (0, 2)


def test_reading_never_writes_to_the_files(tmp_path):
    # float32 data with scale 1 need no decoding: arithmetic on them must not run in place on the mapped file.
    fed = Federation.build(Source.from_arrays(*blobs(4_000, shape=(16,))), "iid", clients=4, out=tmp_path / "f")
    read = fed.reader()
    twice = tf.function(lambda i: tf.nn.relu(-(read(i)[0] * 2.0 + 1.0)))
    for i in tf.range(4):
        np.testing.assert_allclose(twice(i), np.maximum(-(fed.arrays(i)[0] * 2 + 1), 0), rtol=1e-6)
    fed.verify()


def test_reader_sees_a_folder_that_was_built_anew(tmp_path):
    import shutil

    for seed in (0, 1):
        fed = Federation.build(numbered(), "iid", clients=4, seed=seed, out=tmp_path / "f")
        np.testing.assert_array_equal(fed.reader()(0)[0], fed.arrays(0)[0])
        shutil.rmtree(tmp_path / "f")


def test_reader_inside_tff(tff, federation):
    use_local_worker()
    read = federation.reader("train", "global")

    def summary(body, i):
        x, y = body(i)
        weights = tf.cast(tf.range(1, tf.shape(x)[0] + 1), tf.float32)  # so that the order counts
        return tf.linalg.matvec(x, weights, transpose_a=True), tf.reduce_sum(y)

    for body in (read, tf.function(read)):
        of_client = tff.tensorflow.computation(partial(summary, body), np.int32)
        everyone = tff.federated_computation(
            partial(tff.federated_map, of_client), tff.FederatedType(np.int32, tff.CLIENTS)
        )
        ids = [5, 0, 7, 2]
        for i, (total, label_sum) in zip(ids, everyone(ids), strict=True):
            x, y = federation.arrays(i, "train", "global")
            np.testing.assert_allclose(total, x.T @ np.arange(1, len(x) + 1), rtol=1e-5)
            assert label_sum == y.sum()


def test_hash_is_the_content(tmp_path, federation):
    again = Federation.build(numbered(), clients=8, K=2, seed=3, out=tmp_path / "again")
    assert again.hash == federation.hash
    spelled = Federation.build(numbered(), clients=8, seed=3, coverage="repair", out=tmp_path / "spelled")
    assert spelled.hash == federation.hash  # K=2 is the default
    for k, change in enumerate(({"seed": 4}, {"validation": 0.2}, {"K": 3}, {"clients": 9})):
        args = {"clients": 8, "K": 2, "seed": 3} | change
        assert Federation.build(numbered(), **args, out=tmp_path / str(k)).hash != federation.hash
    content = json.loads((federation.path / "manifest.json").read_text())
    del content["hash"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == federation.hash


def test_validation_is_cut_from_train_by_client_and_spread_over_classes(tmp_path):
    parts = {
        fraction: Federation.build(numbered(), clients=6, K=3, validation=fraction, out=tmp_path / f"{fraction}")
        for fraction in (0.0, 0.2)
    }
    for i in range(6):
        whole, kept, cut = (who(f.raw(i, s)[0]) for f, s in
                            ((parts[0.0], "train"), (parts[0.2], "train"), (parts[0.2], "validation")))  # fmt: skip
        assert sorted(kept + cut) == sorted(whole) and len(cut) == len(whole) // 5
        assert who(parts[0.0].raw(i, "test")[0]) == who(parts[0.2].raw(i, "test")[0])
        classes, counts = np.unique(np.array(whole) % 5, return_counts=True)
        for c, n in zip(classes, counts, strict=True):
            assert abs(np.sum(np.array(cut) % 5 == c) - n / 5) <= 1


def test_fractions_of_float32_are_the_numbers_that_were_written(tmp_path):
    """As a float64, np.float32(0.7) is below 0.7, so that of ten examples six would be cut, and seven with NumPy 2."""
    x, y = np.arange(20.0)[:, None], np.zeros(20, np.int32)
    source = Source.from_arrays(x, y, x[:2], y[:2])

    def hashes(number):
        clients = Federation.from_clients([(x, y)], test_fraction=number(0.7), validation=number(0.3), out=folder())
        built = Federation.build(source, "iid", clients=2, validation=number(0.7), out=folder())
        drawn = {"alpha": number(10.3), "test_fraction": number(0.7), "min_samples": 10}
        dealt = Federation.build(source, "dirichlet", clients=2, validation=0, **drawn, out=folder())
        return clients.hash, built.hash, dealt.hash

    folder = partial(next, (tmp_path / str(i) for i in range(9)))
    assert hashes(np.float32) == hashes(float)


def test_a_partitioner_of_the_user_makes_as_many_clients_as_are_asked_for(tmp_path):
    two = lambda labels, n, seed: Partition([np.arange(60), np.arange(60, 300)], [np.arange(50), np.arange(50, 100)])  # noqa: E731
    with pytest.raises(InvalidArgument, match="makes 2 clients, and 3 were asked for.*leave clients out"):
        Federation.build(numbered(), two, clients=3, out=tmp_path / "f")
    for clients in (None, 2):
        assert Federation.build(numbered(), two, clients=clients, out=tmp_path / f"f{clients}").num_clients == 2


def test_arguments_that_a_partitioner_of_the_user_does_not_take(tmp_path):
    def halves(labels, clients, seed, *, gamma=1.0):
        return Partition([np.arange(300)], [np.arange(100)])

    with pytest.raises(InvalidArgument, match="the partitioner halves is called with.*unexpected keyword.*'gama'"):
        Federation.build(numbered(), halves, gama=3, out=tmp_path / "f")
    assert Federation.build(numbered(), halves, gamma=3, out=tmp_path / "g").num_clients == 1


def test_validation_keeps_groups_together(tmp_path):
    source = numbered()
    source = source._replace(group_train=np.arange(len(source.y_train)) // 4, y_train=np.arange(300) // 60)
    fed = Federation.build(source, lambda labels, n, seed: Partition([np.arange(300)], [np.arange(100)]),
                           validation=0.25, out=tmp_path / "f")  # fmt: skip
    place = {n: k for k, n in enumerate(who(source.x_train))}
    groups = [{place[n] // 4 for n in who(fed.raw(0, split)[0])} for split in ("train", "validation")]
    assert not groups[0] & groups[1] and len(groups[1]) == 75 // 4 and len(groups[0]) + len(groups[1]) == 75


def test_population_for_both_label_spaces(federation):
    local = federation.population(Sampling(rate=0.5))
    np.testing.assert_array_equal(local.num_examples, federation.num_examples("train"))
    assert local.num_classes.tolist() == [2] * 8 and local.clients_per_round == 4
    shared = federation.population(labels="global")
    assert shared.num_classes.tolist() == [5] * 8 and shared.num_labels == 5


def test_one_head_for_clients_with_other_classes_is_asked_for_on_purpose(federation):
    """All have two classes, and label 0 is another one for each: a shared head would learn from mixed labels."""
    with pytest.raises(InvalidArgument, match=r"clients have different classes.*labels='global'.*shared_slots=True"):
        federation.population().shared_labels()
    assert federation.population(shared_slots=True).shared_labels() == 2
    assert federation.population(labels="global").shared_labels() == 5
    classes = [set(federation.raw(i, labels="global")[1]) for i in range(8)]
    alike = [i for i in range(8) if classes[i] == classes[0]]
    assert 1 < len(alike) < 8 and federation.population(client_ids=alike).shared_labels() == 2


def test_one_training_example_of_another_class_is_enough_to_tell_clients_apart(tmp_path):
    """Label 1 of the second client is class 2, and only its last training example shows it."""
    x = np.zeros((4, 3), np.float32)
    ys = {"ann": [0, 0, 0, 1], "bob": [0, 0, 0, 2], "eve": [0, 1, 1, 1]}
    parts = {name: {"train": (x, np.array(y)), "test": (x[:1], np.array([0]))} for name, y in ys.items()}
    federation = Federation.from_clients(parts, out=tmp_path / "federation", validation=0.0)
    assert federation.population(client_ids=[0, 2]).same_classes
    assert not federation.population(client_ids=[0, 1]).same_classes
    assert not federation.population().same_classes


def test_from_clients_keeps_parts_and_cuts_the_missing(tmp_path):
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    fed = Federation.from_clients(
        {"ann": (x, y), "bob": {"train": (x + 1, y), "test": (x[:3], y[:3])}}, out=tmp_path / "f", validation=0.1
    )
    assert fed.client_names == ["ann", "bob"]
    assert [fed.num_examples(s).tolist() for s in SPLITS] == [[14, 18], [1, 2], [5, 3]]
    np.testing.assert_array_equal(fed.arrays(1, "test")[0], x[:3])
    held = np.concatenate([fed.arrays(0, s)[0] for s in SPLITS])
    np.testing.assert_array_equal(held[held[:, 0].argsort()], x)


def test_tff_client_data(tff, tmp_path):
    arrays = {f"c{k}": {"pixels": np.full((10, 4), k, np.float32), "label": np.arange(10) % 3} for k in range(3)}
    data = tff.simulation.datasets.TestClientData(arrays)
    fed = Federation.from_clients(data, data, out=tmp_path / "f", validation=0.2)
    assert fed.client_names == ["c0", "c1", "c2"] and fed.num_examples("test").tolist() == [10] * 3
    assert set(fed.arrays(2, "train")[0].ravel()) == {2.0} and fed.num_examples("validation").tolist() == [2] * 3


def two(x, y, **parts):
    return {"good": (np.zeros((8, 2)), np.arange(8) % 2), "bad": {"train": (x, y)} | parts}


@pytest.mark.parametrize("path", [None, 3, b"f", ["f"]])
def test_what_is_no_path_is_no_folder_of_a_federation(path):
    with pytest.raises(InvalidArgument, match="the folder of a federation must be a path; found"):
        Federation.load(path)


def test_dataframes_whose_columns_have_another_order_are_refused(tmp_path):
    """Only numbers are read, so one client's age would be another one's weight."""

    class Frame:
        def __init__(self, *columns):
            self.columns, self.x = columns, np.arange(40.0).reshape(20, 2)

        def __array__(self, dtype=None, copy=None):
            return np.array(self.x, dtype)

        to_numpy = __array__

    y = np.arange(20) % 2
    ann, bob = Frame("age", "weight"), Frame("weight", "age")
    told = "number 1 is 'age' in train of client 'ann', and 'weight' in test of client 'bob'. The numbers of a Data"
    for test in (bob, Frame("weight")):
        clients = {"ann": (ann, y), "bob": {"train": (ann, y), "test": (test, y)}}
        with pytest.raises(InvalidArgument, match=told):
            Federation.from_clients(clients, out=tmp_path / "f")
    with pytest.raises(InvalidArgument, match="is 'age' in the training examples, and 'weight' in the test examples"):
        Source.from_arrays(ann, y, bob, y)
    for of, told in ((lambda x: {"a": x, "b": ann}, "'a' of train"), (lambda x: (ann, x), "'1' of train")):
        with pytest.raises(
            InvalidArgument, match=f"is 'age' in {told} of client 0, and 'weight' in {told} of client 1"
        ):
            Federation.from_clients([(of(ann), y), (of(bob), y)], out=tmp_path / "f")
    with pytest.raises(InvalidArgument, match="in the targets of train of client 0, and 'weight' in the targets of tr"):
        Federation.from_clients([(np.ones((20, 3)), ann), (np.ones((20, 3)), bob)], targets="real", out=tmp_path / "f")
    frames = Federation.from_clients({"ann": (ann, y), "bob": (ann, y)}, out=tmp_path / "f")
    arrays = Federation.from_clients({"ann": (ann.x, y), "bob": (ann.x, y)}, out=tmp_path / "g")
    assert frames.hash == arrays.hash


@pytest.mark.parametrize(
    "clients,message",
    [
        ([], "no clients"),
        (two(np.zeros((0, 2)), []), "client 'bad' has no training examples"),
        (two(np.zeros((1, 2)), [0]), "client bad has 1 training examples left of 1"),
        (two(np.full((8, 2), np.nan), np.zeros(8, int)), "client 'bad': train examples must be finite"),
        (two(np.zeros((8, 2)), np.zeros(7, int)), "client 'bad': train examples and labels differ in number: 8 and 7"),
        (two(np.zeros((8, 2)), np.zeros(8)), "client 'bad': train labels must be integers"),
        (two(np.zeros((8, 2)), np.full(8, -1)), "class ids >= 0"),
        (two(np.zeros((8, 3)), np.zeros(8, int)), "must have one shape"),
        (two(np.zeros((8, 2)), np.full(8, 4)), "labels go up to 4, but there are only 2"),
        (two(np.zeros((8, 2)), np.zeros(8, int), dev=1), "has parts"),
    ],
)
def test_bad_clients_are_refused_by_name_and_leave_nothing(tmp_path, clients, message):
    with pytest.raises(ValueError, match=message):
        Federation.from_clients(clients, class_names=["a", "b"], out=tmp_path / "deep" / "f")
    assert not list(tmp_path.iterdir())


def overlapping(labels, num_clients, seed):
    return Partition([np.arange(10), np.arange(5, 15)], [np.arange(5)] * 2)


def leaking(labels, num_clients, seed):
    return Partition([np.arange(10), np.arange(10, 20)], [np.arange(20, 25), np.arange(5)], pooled=True)


@pytest.mark.parametrize(
    "args,message",
    [
        ({"partitioner": "dirichlt"}, "unknown partitioner 'dirichlt'"),
        ({"K": 9}, "must lie in 1..5"),
        ({"K": 2.5}, "K of partitioner round_robin must be a whole number, found 2.5"),
        ({"K": True}, "K of partitioner round_robin must be a whole number, found True"),
        ({"partitioner": "dirichlet", "alpha": "1"}, "alpha of partitioner dirichlet must be a number, found '1'"),
        ({"partitioner": "natural", "pooled": 0.5}, "pooled of partitioner natural must be True or False, found 0.5"),
        (
            {"partitioner": "quantity_skew", "min_samples": 1.5},
            "min_samples of partitioner quantity_skew must be a whole",
        ),
        ({"partitioner": "iid", "K": 2}, "unknown argument of partitioner iid 'K'; there are none"),
        ({"clients": 150, "K": 1}, "1 training examples left of 3: 1 were set aside for validation"),
        ({"validation": 1.0}, "validation must lie in"),
        ({"partitioner": "dirichlet", "pooled": False, "test_fraction": 0.9}, "test_fraction of .* is for pooled=True"),
        ({"partitioner": "natural", "test_fraction": 0.5}, "test_fraction of partitioner natural is for pooled=True"),
        ({"partitioner": overlapping, "clients": 2}, "example 5 out for training 2 times"),
        ({"partitioner": leaking, "clients": 2}, "example 0 out for training and for test"),
    ],
)
def test_bad_requests_leave_nothing(tmp_path, args, message):
    args = {"clients": 3, "validation": 0.5} | args
    with pytest.raises(ValueError, match=message):
        Federation.build(numbered(), **args, out=tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_cannot_sync_a_folder_holds_a_federation(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(file)

    monkeypatch.setattr("os.fsync", fsync)
    made = Federation.build(numbered(), clients=3, out=tmp_path / "f")
    assert Federation.load(made.path).num_clients == 3


def test_a_file_system_without_locks_ends_a_building_with_its_error(tmp_path, monkeypatch):
    """It had made one folder after the other, without an end."""
    with writing._partial_folder(tmp_path / "f") as left:
        pass
    tries = []

    def flock(file, how):
        tries.append(file)
        assert len(tries) < 9
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="No locks available"):
        Federation.build(numbered(), clients=3, out=tmp_path / "f")
    assert list(tmp_path.iterdir()) == [left]  # it may be in use


def test_a_crash_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        Federation.build(numbered(), clients=4, out=tmp_path / "f")
    assert not list(tmp_path.iterdir())


WAIT = """
import sys
import numpy as np
from tfpfl.data import Federation, writing
write = writing._write_blocks
def wait(path, blocks):
    print("building", flush=True)
    sys.stdin.readline()
    return write(path, blocks)
writing._write_blocks = wait
Federation.from_clients([(np.ones((8, 3)), np.arange(8) % 2)], out=sys.argv[1])
"""


def test_what_killed_buildings_left_is_removed_by_the_next_one_and_what_is_being_built_is_not(tmp_path):
    def start(name):
        command = [sys.executable, "-c", WAIT, str(tmp_path / name)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    killed = [start("one"), start("two")]
    for process in killed:
        assert process.stdout.readline() == "building\n"
    for process in killed:
        process.kill()
        process.communicate()
    assert len(list(tmp_path.glob(".*.partial"))) == 2  # nobody can tidy up after kill -9 ...
    (tmp_path / ".mine.partial").mkdir()  # not one of ours, because it has no number
    alive = start("three")
    assert alive.stdout.readline() == "building\n"  # ... but the next building does
    clients = [(np.ones((8, 3)), np.arange(8) % 2)]
    Federation.from_clients(clients, out=tmp_path / "four")
    left = sorted(p.name.split(".")[1] for p in tmp_path.glob(".*.partial"))
    assert left == ["mine", "three"] and len(list(tmp_path.iterdir())) == 3
    alive.communicate("\n" * 4)
    assert alive.returncode == 0 and Federation.load(tmp_path / "three").num_clients == 1
    assert {p.name for p in tmp_path.iterdir()} == {".mine.partial", "three", "four"}


def test_what_another_machine_is_building_in_a_shared_folder_stays(tmp_path, monkeypatch):
    """On NFS, folders are locked for the machine's own processes only: what another one builds seems to be free."""
    with writing._partial_folder(tmp_path / "one") as killed_here:
        pass
    with monkeypatch.context() as patched:
        patched.setattr("socket.gethostname", lambda: "another")
        with writing._partial_folder(tmp_path / "two") as built_there:
            pass
    Federation.build(numbered(), clients=3, out=tmp_path / "three")
    assert built_there.exists() and not killed_here.exists()


def test_an_existing_folder_is_kept(tmp_path, federation):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "mine").write_text("precious")
    with pytest.raises(FederationError, match="exists already"):
        Federation.build(numbered(), clients=4, out=tmp_path / "f")
    assert (tmp_path / "f" / "mine").read_text() == "precious"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("precious")
    for out, message in (
        ("link", "link exists already"),
        ("file/deep/g", "g cannot be made: .*file is no folder. Bui"),
    ):
        with pytest.raises(FederationError, match=message):
            Federation.build("no data set is read before that", clients=4, out=tmp_path / out)


@pytest.fixture
def copy(tmp_path):
    return Federation.build(numbered(), clients=4, out=tmp_path / "f").path


@pytest.mark.parametrize("name", ["x.raw", "labels.raw", "labels_local.raw", "index.raw"])
def test_missing_short_and_changed_files_are_found(copy, name):
    good = (copy / name).read_bytes()
    (copy / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(FederationError, match=f"{name} was changed"):
        Federation.load(copy)
    (copy / name).write_bytes(good[:-1])
    with pytest.raises(FederationError, match=f"incomplete: {name} has {len(good) - 1} bytes, expected {len(good)}"):
        Federation.load(copy, verify=False)
    (copy / name).unlink()
    with pytest.raises(FederationError, match=f"incomplete: {name} is missing"):
        Federation.load(copy)
    (copy / name).write_bytes(good)
    assert Federation.load(copy).num_clients == 4


def test_changed_newer_and_foreign_manifests_are_refused(copy, tmp_path):
    manifest = json.loads((copy / "manifest.json").read_text())
    for content, message in (
        (manifest | {"seed": 99}, "manifest.json was changed"),
        (manifest | {"format": 5}, "has federation format 5; this version of tfpfl reads formats 1 to 4"),
        ({"name": "something else"}, "names no format and hash"),
        ([1, 2], "names no format and hash"),
    ):
        (copy / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(FederationError, match=message):
            Federation.load(copy)
    (copy / "manifest.json").write_text('{"format": 1, "ha')
    with pytest.raises(FederationError, match="cannot be read"):
        Federation.load(copy)
    with pytest.raises(InvalidArgument, match="out must be the path of the folder to make; found None"):
        Federation.from_clients([(np.ones((8, 2)), np.zeros(8, int))], out=None)
    with pytest.raises(FederationError, match="is not a federation: it has no manifest.json"):
        Federation.load(tmp_path)


def test_ids_of_a_population_are_whole_numbers(federation):
    assert federation.population(client_ids=np.array([0.0, 2.0])).client_ids.tolist() == [0, 2]
    with pytest.raises(InvalidArgument, match="client_ids must be whole numbers, found float64 such as .0.5, 1.7"):
        federation.population(client_ids=[0.5, 1.7])


def test_unknown_splits_and_label_spaces_are_refused(federation):
    for call in (federation.num_examples, lambda s: federation.arrays(0, s), federation.reader):
        with pytest.raises(ValueError, match="unknown split 'dev': one of train, validation, test"):
            call("dev")
    with pytest.raises(ValueError, match="unknown label space 'mine'"):
        federation.reader(labels="mine")


@pytest.mark.slow
def test_a_hundred_thousand_clients(tmp_path):
    start = time.process_time()
    source = Source.from_arrays(*blobs(650_000, shape=(4,)))
    built = Federation.build(source, "iid", clients=100_000, out=tmp_path / "f")
    middle = time.process_time()
    fed = Federation.load(tmp_path / "f")
    end = time.process_time()
    assert fed.hash == built.hash and fed.num_clients == 100_000 == fed.population().num_clients
    assert fed.num_examples("train").sum() == 487_500 and fed.num_classes.max() <= 10
    x, y = fed.reader()(99_999)
    np.testing.assert_array_equal(x, fed.arrays(99_999)[0])
    assert (fed.path / "manifest.json").stat().st_size < 5e6
    assert middle - start < 60 and end - middle < 10  # of processor time; about 3 s and 0.2 s


def test_digits_by_name_and_its_description(tmp_path):
    fed = Federation.build(clients=20, out=tmp_path / "f")
    described = fed.describe()
    assert described["source"] == "digits 1" and described["clients"] == 20 and described["hash"] == fed.hash
    assert described["partitioner"] == "round_robin(K=2, coverage=repair)" and described["classes per client"] == "2"
    assert sum(fed.num_examples(s).sum() for s in SPLITS) == 1797
    x = np.concatenate([fed.arrays(i, s)[0] for i in range(20) for s in SPLITS])
    source = load_source("digits")
    assert x.mean() == pytest.approx(np.concatenate([source.x_train, source.x_test]).mean() / 16, rel=1e-5)


@pytest.mark.parametrize("clients", [20, 300, 600])
def test_plot_is_a_picture(tmp_path, clients):
    from matplotlib.image import imread

    fed = Federation.build(Source.from_arrays(*blobs(40_000)), clients=clients, out=tmp_path / "f")
    plots.classes(fed).savefig(tmp_path / "classes.png")
    picture = imread(tmp_path / "classes.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 300 and picture.std() > 0.05


def apart():
    """A source of 80 training and 20 test examples."""
    x, y = np.arange(100.0)[:, None], np.arange(100) % 2
    return Source.from_arrays(x[:80], y[:80], x[80:], y[80:])


def test_parts_of_a_source_that_were_changed_by_hand_fit_together(tmp_path):
    """Test examples had been cast to the type of the training examples, and their only column copied."""
    source = load_source("synthetic")
    for x_train, x_test in (
        ((source.x_train * 9).astype(np.uint8), source.x_test),
        (source.x_train, (source.x_test * 9).astype(np.uint8)),
        (source.x_train, source.x_test[:, :1]),
    ):
        with pytest.raises(InvalidArgument, match="must be alike in dtype and shape, found .* changed in both"):
            Federation.build(source._replace(x_train=x_train, x_test=x_test), "iid", clients=2, out=tmp_path / "f")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [">f4", ">i4"])
def test_numbers_in_the_byte_order_of_another_machine_stay_the_same(tmp_path, dtype):
    source = apart()._replace(
        x_train=np.arange(80, dtype=dtype)[:, None], x_test=np.arange(80, 100, dtype=dtype)[:, None]
    )
    made = Federation.build(source, "iid", clients=2, validation=0, out=tmp_path / "f")
    read = np.concatenate([made.arrays(i, part)[0].ravel() for i in range(2) for part in ("train", "test")])
    assert np.array_equal(np.sort(read), np.arange(100))


def returning(train, test, pooled=False, names=None):
    def mine(labels, num_clients, seed, *, option=None):
        return Partition(train, test, pooled, names)

    return mine


QUARTERS = [np.array_split(np.arange(n), 4) for n in (80, 20)]
NOBODY = [np.zeros(0, int)] * 4


@pytest.mark.parametrize(
    "part, message",
    [
        ((np.array_split(np.arange(100), 4), NOBODY), "client 3 the train example 99, but .* 0..79. .* pooled=True"),
        (([np.arange(79)], [np.array([-1, 3])]), "client 0 the test example -1, but the test set has .* 0..19"),
        (([np.arange(79)], [np.array([3, 20])]), "client 0 the test example 20, but the test set has"),
        (([np.arange(-1, 79)], [np.arange(3)]), "client 0 the train example -1"),
        (([np.arange(80)], [np.arange(80, 101)], True), "test example 100, but both sets together have .* 0..99"),
        ((QUARTERS[0], [np.repeat(own, 3) for own in QUARTERS[1]]), "client 0 the test example 0 3 times"),
        (([np.arange(40), np.arange(40, 80)], [np.arange(5), np.array([7, 8, 7])]), "client 1 the test example 7 2"),
        ((QUARTERS[0], QUARTERS[1][:3]), "training examples of 4 clients and test examples of 3"),
        (([], []), "training examples of 0 clients"),
        (([np.arange(80) < 40], [np.arange(3)]), "no list of train examples but bool of shape"),
        ((*QUARTERS, False, [1, 2, 3, 4]), "1 is no text"),
        ((*QUARTERS, False, ["a", None, "b", "c"]), "None is no text"),
        ((*QUARTERS, False, ["a"]), "1 names for 4 clients"),
        ((*QUARTERS, False, ["a", "a", "b", "c"]), "4 names, of which only 3 differ"),
    ],
)  # fmt: skip
def test_what_a_partitioner_of_the_user_returns_is_checked_before_the_sets_are_joined(tmp_path, part, message):
    with pytest.raises(InvalidArgument, match=message):
        Federation.build(apart(), returning(*part), out=tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_a_good_partition_of_the_user_keeps_test_and_training_apart(tmp_path):
    for pooled, shift in ((False, 0), (True, 80)):
        part = returning(QUARTERS[0], [own + shift for own in QUARTERS[1]], pooled, np.array(list("dcba")))
        made = Federation.build(apart(), part, validation=0, out=tmp_path / str(pooled))
        assert made.client_names == list("dcba") and made.raw(1, "test")[0].ravel().tolist() == [85, 86, 87, 88, 89]
        assert made.raw(1, "train")[0].ravel().tolist() == list(range(20, 40))
    both = returning(QUARTERS[0], [np.arange(3)] * 4)  # two clients may have the same test example
    assert Federation.build(apart(), both, out=tmp_path / "both").num_examples("test").tolist() == [3] * 4


@pytest.mark.parametrize("value", [len, {1}, float("nan"), [1, float("inf")]], ids=str)
def test_arguments_that_a_manifest_cannot_keep_are_refused_before_anything_is_written(tmp_path, monkeypatch, value):
    monkeypatch.setattr("tfpfl.data.writing._write_blocks", None)
    with pytest.raises(InvalidArgument, match="the argument option of the partitioner is .* the manifest cannot keep"):
        Federation.build(apart(), returning(*QUARTERS), option=value, out=tmp_path / "f")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given, message",
    [
        ({"version": 2}, "version must be a text; found 2"),
        ({"name": None}, "name must be a text; found None"),
        ({"seed": 2**63}, "could not be opened again: seed is wrong: 9223372036854775808 is greater than the maximum"),
    ],
)
def test_no_folder_is_left_that_nothing_can_open(tmp_path, given, message):
    with pytest.raises(InvalidArgument, match=message):
        Federation.from_clients([(np.ones((8, 3)), np.arange(8) % 2)], out=tmp_path / "f", **given)
    assert not list(tmp_path.iterdir())


def client_data(*names, empty=None):
    def dataset(name):
        rows = 0 if name == empty else 8
        return tf.data.Dataset.from_tensor_slices((np.ones((rows, 2), np.float32), np.arange(rows) % 2))

    return SimpleNamespace(client_ids=list(names), create_tf_dataset_for_client=dataset)


def test_clients_that_only_the_test_data_have_are_not_dropped(tmp_path):
    with pytest.raises(InvalidArgument, match="2 clients have test data and no training data, the first is 'c'"):
        Federation.from_clients(client_data("a", "b"), client_data("d", "b", "a", "c"), out=tmp_path / "f")


def test_test_data_that_are_empty_or_no_client_data_are_told_as_such(tmp_path):
    for test, why in (
        (client_data("a", "b", empty="b"), "client 'b' has no test examples: give it some"),
        (
            {"a": (np.ones((8, 2)), np.arange(8) % 2)},
            "test= must be a ClientData, as the training examples are, found d",
        ),
    ):
        with pytest.raises(InvalidArgument, match=why):
            Federation.from_clients(client_data("a", "b"), test, out=tmp_path / "f")


def test_what_a_masked_array_hides_is_not_stored(tmp_path):
    x, y = np.arange(16.0).reshape(8, 2), np.arange(8) % 2
    for given in (np.ma.masked_greater(x, 10), list(np.ma.masked_greater(x, 10))):
        with pytest.raises(InvalidArgument, match="client 0: train examples: 5 values of a masked array|1 values"):
            Federation.from_clients([(given, y)], out=tmp_path / "f")
    with pytest.raises(InvalidArgument, match="client 0: train labels: 4 values of a masked array are masked"):
        Federation.from_clients([(x, np.ma.masked_equal(y, 1))], out=tmp_path / "f")
    assert Federation.from_clients([(np.ma.array(x), y)], out=tmp_path / "f").num_examples("test").tolist() == [2]


def test_whole_numbers_that_float32_rounds_are_said(tmp_path):
    """Also of a type that keeps them: a model computes with float32."""
    y = np.arange(20) % 2
    rounded = [2**31 + np.arange(20), 2**24 + np.arange(20), 1.7e9 + 3600 * np.arange(20.0), -(2.0**24) - np.arange(20)]
    for place, x in enumerate(rounded):
        with pytest.warns(TfpflWarning, match="whole numbers beyond 2.24, which are rounded, .* leave them out"):
            made = Federation.from_clients([(x, y)], out=tmp_path / f"f{place}")
        read = np.concatenate([made.arrays(0, part)[0] for part in ("train", "test", "validation")])
        assert not np.isin(x, read.astype(np.float64)).all()  # what is said is true
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for place, x in enumerate([2**31 + 2**10 * np.arange(20), 2**24 - np.arange(20.0), 1e9 / 7 * np.arange(20.0)]):
            Federation.from_clients([(x, y)], scale=1, out=tmp_path / f"g{place}")


def test_numbers_near_each_other_and_far_from_0_are_said(tmp_path):
    """A minute in times since 1970 becomes one number. What is constant but for rounding in float64 is not meant."""
    y, steps = np.arange(20) % 2, np.linspace(0, 60, 20)
    times = np.stack([steps, 1.7e9 + steps], 1)
    for place, x in enumerate([times, 1 + 1e-6 * times[:, :1] / 60, {"at": times, "is": np.ones((20, 2))}]):
        with pytest.warns(TfpflWarning, match="near each other and far from 0, .* Subtract one number from all"):
            Federation.from_clients([(x, y)], out=tmp_path / f"f{place}")
    noise = np.cumsum(np.full(20, 0.1)) - 0.1 * np.arange(20)
    assert np.ptp(noise) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for place, x in enumerate([times - [0, 1.7e9], noise + 1, 1.7e9 + 1e9 * steps / 7, times.astype(np.float32)]):
            Federation.from_clients([(x, y)], scale=1, out=tmp_path / f"g{place}")


def test_large_examples_are_said_as_large_columns_of_a_table_are(tmp_path):
    """Pixels from 0 to 255 as floats, as Keras reads pictures, are not scaled. Tokens, and what is meant, are fine."""
    rng, y = np.random.default_rng(0), np.arange(20) % 2
    pixels = rng.integers(0, 256, (20, 4, 4))
    with pytest.warns(TfpflWarning, match="are divided by 255; but none is above 1.*give scale=1"):
        Federation.from_clients([((pixels > 99).astype(np.uint8), y)], out=tmp_path / "mask")
    for place, x in enumerate([pixels.astype(np.float32), pixels, 1e3 + rng.normal(size=(20, 3))]):
        with pytest.warns(TfpflWarning, match="examples are large numbers, .* 0 to 255 as uint8, .* scale=1"):
            Federation.from_clients([(x, y)], out=tmp_path / f"f{place}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = 900 + pixels[:, 0]
        for place, x in enumerate([pixels.astype(np.uint8), pixels / 255, tokens, {"tokens": tokens}]):
            Federation.from_clients([(x, y)], out=tmp_path / f"g{place}")
        Federation.from_clients([(pixels, y)], scale=1, out=tmp_path / "meant")
        Federation.from_clients([((pixels > 99).astype(np.uint8), y)], scale=1, out=tmp_path / "meant mask")


@pytest.mark.parametrize("batches", [3, 4, 8])
@pytest.mark.parametrize("targets", [None, "real"])
def test_a_client_data_in_batches_is_refused(tmp_path, batches, targets):
    """With targets, each batch had become one example, without a word."""
    data = client_data("a", "b")
    plain = data.create_tf_dataset_for_client
    data.create_tf_dataset_for_client = lambda name: plain(name).batch(batches)
    with pytest.raises(InvalidArgument, match=r"client 'a': every element .* these are batches .* dataset.unbatch\(\)"):
        Federation.from_clients(data, out=tmp_path / "f", targets=targets)
    data.create_tf_dataset_for_client = lambda name: plain(name).batch(batches).unbatch()
    if targets is None:
        assert Federation.from_clients(data, out=tmp_path / "f").num_clients == 2


def test_batches_of_equal_size_are_told_from_labels_that_are_vectors(tmp_path):
    data = client_data("a", "b")
    plain = data.create_tf_dataset_for_client
    data.create_tf_dataset_for_client = lambda name: plain(name).batch(2, drop_remainder=True)
    with pytest.raises(InvalidArgument, match=r"has 2 labels. If it is a batch .*unbatch...\. If a label is one-hot"):
        Federation.from_clients(data, out=tmp_path / "f")
    with pytest.warns(TfpflWarning, match=r"is taken for one example \(2, .*with 2 targets. If it is a batch"):
        Federation.from_clients(data, out=tmp_path / "g", targets="real")
    data.create_tf_dataset_for_client = lambda name: tf.data.Dataset.from_generator(
        lambda: iter([(np.ones(3), np.ones(2))] * 8),
        output_signature=(tf.TensorSpec([3], tf.float32), tf.TensorSpec([None], tf.float32)),
    )
    made = Federation.from_clients(data, out=tmp_path / "h", targets="real")  # the generator does not say how many
    assert made.targets.width == 2 and made.example_shape == (3,)


def test_test_examples_that_are_the_training_examples_are_said(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(2, 8, 3)), np.arange(8) % 2
    same = {"a": {"train": (x[0], y), "test": (x[0], y)}, "b": {"train": (x[0], y), "test": (x[1], y)}}
    with pytest.warns(TfpflWarning, match="the test examples of 1 clients, such as .a., are equal to their train"):
        Federation.from_clients(same, out=tmp_path / "f")
    del same["a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", TfpflWarning)
        Federation.from_clients(same, out=tmp_path / "g")
