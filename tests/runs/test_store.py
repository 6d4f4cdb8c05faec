"""The store: what comes back is what was put in, and a round is there whole or not at all."""

import math
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import time
from collections import namedtuple

import numpy as np
import pytest
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.models.weights import Head
from tfpfl.runs.protocols import Score
from tfpfl.runs.store import FORMAT_VERSION, RunStore, StoreError

Server = namedtuple("Server", ["theta", "momentum", "steps"])
NUM_CLIENTS = 20

# Processes to be killed come from a server that has imported TensorFlow once.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tfpfl.runs.store"])


def head(value, classes=2):
    return Head(np.full((5, classes), value, np.float32), np.full(classes, value, np.float32))


def no_default(client_id):
    raise AssertionError(f"client {client_id} should have been stored")


def commit(store, round_num, width=1000):
    """A round in which every array, row and evaluation says its round."""
    store.commit_round(
        round_num,
        np.full(width, round_num),
        {i: (np.full(width, round_num),) for i in range(NUM_CLIENTS)},
        {"round": round_num},
        [Score(round_num, i, "personal", "test", 7, float(round_num), 0.5) for i in range(NUM_CLIENTS)],
    )


def whole_rounds(store, width=1000):
    """The last round, after a check that everything in the store belongs to it and that all before it are there."""
    done = store.round_num
    assert store.history() == [{"round": t} for t in range(1, done + 1)]
    assert [e.round_num for e in store.evaluations()] == [t for t in range(1, done + 1) for _ in range(NUM_CLIENTS)]
    if done:
        np.testing.assert_array_equal(store.server_state(np.zeros(width, int)), np.full(width, done))
        for (state,) in store.client_states(range(NUM_CLIENTS), no_default, like=(np.zeros(width, int),)):
            np.testing.assert_array_equal(state, np.full(width, done))
    return done


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a run" / "state.sqlite"


@pytest.fixture(autouse=True)
def folder(path):
    path.parent.mkdir()


def test_everything_comes_back_from_the_file_as_it_was_put_in(path):
    server = Server((np.arange(6.0).reshape(2, 3).T, np.zeros((0, 4), np.int8)), {"b": np.float64(0.1), "a": True}, 7)
    states = {3: head(1 / 3, 2), 10**6: head(np.nan, 7)}
    with RunStore(path, "this run") as store:
        store.commit_round(1, server, states, {})
    with RunStore(path, "this run") as store:
        assert store.round_num == 1 and store.client_ids().tolist() == [3, 10**6]
        found = store.server_state(server)
        three, new, million = store.client_states([3, 4, 10**6], lambda i: ("new", i), like=head(0))
    assert isinstance(found, Server) and isinstance(found.theta, tuple) and list(found.momentum) == ["b", "a"]
    leaves = [*found.theta, found.momentum["b"], found.momentum["a"], found.steps]
    for leaf, true in zip(leaves, [*server.theta, server.momentum["b"], True, 7], strict=True):
        true = np.asarray(true)
        assert (leaf.dtype, leaf.shape) == (true.dtype, true.shape)
        assert leaf.tobytes() == true.tobytes()
    assert new == ("new", 4)
    for state, true in ((three, states[3]), (million, states[10**6])):
        assert isinstance(state, Head)
        for leaf, wanted in zip(state, true, strict=True):
            assert leaf.dtype == np.float32 and leaf.shape == wanted.shape and leaf.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_dtypes_and_shapes(dtype, shape):
    true = np.random.default_rng(0).integers(0, 2, shape).astype(dtype) if shape else np.ones((), dtype)
    with RunStore() as store:
        store.commit_round(1, (true,), {}, {})
        (found,) = store.server_state((np.zeros_like(true),))
    assert (found.dtype, found.shape) == (true.dtype, true.shape)
    np.testing.assert_array_equal(found, true)


def test_a_committed_round_is_on_disk_when_commit_returns(path):
    """SQLite waits for the disk at every commit (2 is FULL), with a new file and with one that was there."""
    for _ in range(2):
        with RunStore(path, "this run") as store:
            assert store._db.execute("PRAGMA synchronous").fetchall() == [(2,)]


def test_only_the_clients_of_a_round_change():
    with RunStore() as store:
        store.commit_round(1, (), {1: head(1), 2: head(1)}, {})
        store.commit_round(2, (), {2: head(2), 3: head(2)}, {})
        values = [float(state.bias[0]) for state in store.client_states([3, 1, 2], no_default, like=head(0))]
    assert values == [2, 1, 2]


def test_a_client_without_state_stores_nothing():
    with RunStore() as store:
        store.commit_round(1, np.zeros(3), {i: () for i in range(5)}, {})
        assert len(store.client_ids()) == 0
        assert store.client_states([0, 9], lambda i: ()) == [(), ()]


def test_before_the_first_round_the_initial_state_holds():
    initial = object()
    with RunStore() as store:
        assert (store.round_num, store.history(), store.evaluations()) == (0, [], [])
        assert store.server_state(initial) is initial


def test_numbers_of_history_and_evaluations_are_exact(path):
    row = {"loss": 1 / 3, "tiny": 5e-324, "zero": -0.0, "nan": math.nan, "inf": -math.inf, "é": [1, 0.1]}
    given = row | {"single": np.float32(0.1), "array": np.arange(3), "count": np.int64(7)}
    rows = [
        Score(1, np.int64(4), "personal", "test", np.int32(9), np.float32(0.1), 1 / 3),
        Score(1, 5, "personal", "test", 0, math.nan, np.nan),
        Score(1, 6, "global", "test", 1, math.inf, 0.0),
    ]
    with RunStore(path) as store:
        store.commit_round(1, (), {}, given, rows)
        store.commit_round(2, (), {}, {}, [])
    with RunStore(path) as store:
        (found, _), evaluations = store.history(), store.evaluations(1)
        assert repr(store.evaluations()) == repr(evaluations) and store.evaluations(2) == []
    expected = row | {"single": float(np.float32(0.1)), "array": [0, 1, 2], "count": 7}
    assert repr(found) == repr(expected)  # repr tells -0.0 from 0.0, and NaN is itself
    assert repr(evaluations) == repr(
        [
            Score(1, 4, "personal", "test", 9, float(np.float32(0.1)), 1 / 3),
            Score(1, 5, "personal", "test", 0, math.nan, math.nan),
            Score(1, 6, "global", "test", 1, math.inf, 0.0),
        ]
    )


@pytest.mark.parametrize(
    ("like", "found"),
    [
        ((np.zeros((5, 2), np.float32),), "2 arrays.* have 1"),
        (Head(np.zeros((5, 2)), np.zeros(2)), "array 0: float32, [rs].*; .* float64, (rank 2|shape .5, 2.)"),
        (
            Head(np.zeros((5, 2), np.float32), np.zeros((1, 2), np.float32)),
            "array 1: float32, [rs].*; .* (rank 2|shape .1, 2.)",
        ),
    ],
)
def test_a_state_of_another_structure_is_refused(like, found):
    with RunStore() as store:
        store.commit_round(1, head(1), {8: head(1)}, {})
        with pytest.raises(StoreError, match=f"server state has .*{found}"):
            store.server_state(like)
        with pytest.raises(StoreError, match=f"client 8 has .*{found}"):
            store.client_states([8], no_default, like=like)


def test_rounds_come_in_order_and_once():
    with RunStore() as store:
        for wrong in (0, 2):
            with pytest.raises(StoreError, match=f"the next is 1, not {wrong}"):
                commit(store, wrong)
        commit(store, 1)
        with pytest.raises(StoreError, match="rounds up to 1: the next is 2, not 1"):
            commit(store, 1)
        assert whole_rounds(store) == 1


def test_what_cannot_be_saved_leaves_the_round_out():
    with RunStore() as store:
        commit(store, 1)
        with pytest.raises(TypeError, match="found set"):
            store.commit_round(2, np.zeros(1000, int), {}, {"x": {1}})
        with pytest.raises(ValueError, match="all evaluations must be of round"):
            store.commit_round(2, np.zeros(1000, int), {}, {}, [Score(1, 0, "personal", "test", 1, 0.0, 0.0)])
        twice = [Score(2, 0, "personal", "test", 1, 0.0, 0.0)] * 2
        with pytest.raises(StoreError, match="round 2 was not saved, round 1 is the last whole one.*UNIQUE"):
            store.commit_round(2, np.zeros(1000, int), {0: (np.zeros(1000, int),)}, {}, twice)
        for dtype in (tf.bfloat16, tf.string, tf.complex128):  # the first could be saved, and not be read again
            with pytest.raises(InvalidArgument, match=f"{tf.zeros(1, dtype).numpy().dtype} cannot be saved: convert"):
                store.commit_round(2, np.zeros(1000, int), {0: tf.zeros(1, dtype)}, {})
        assert whole_rounds(store) == 1
        commit(store, 2)
        assert whole_rounds(store) == 2


# Files that are not what they should be. Whatever was in them has to be there afterwards.


def test_scores_are_added_to_a_round_that_is_saved(path):
    with RunStore(path) as store:
        for t in (1, 2, 3):
            commit(store, t)
        new = [Score(2, i, "personal", "test", 7, 0.25, 1.0, {"f1": 0.5}) for i in (4, 2)]
        for _ in range(2):  # a second time changes nothing
            store.add_scores(2, {"personal test accuracy": 1.0}, new)
        for t, rows in ((4, []), (0, []), (1, new)):
            with pytest.raises(StoreError, match="no round"):
                store.add_scores(t, {}, rows)
    with RunStore(path) as store:  # which checks all checksums
        assert store.history() == [{"round": 1}, {"round": 2, "personal test accuracy": 1.0}, {"round": 3}]
        assert store.evaluations(2) == new[::-1]
        assert len(store.evaluations(1)) == len(store.evaluations(3)) == NUM_CLIENTS and store.round_num == 3


def refused(path, match, run_id=None):
    before = path.read_bytes()
    with pytest.raises(StoreError, match=match) as error:
        RunStore(path, run_id)
    assert str(path) in str(error.value)
    assert path.read_bytes() == before


def saved(path, rounds=3):
    with RunStore(path, "first run") as store:
        for t in range(1, rounds + 1):
            commit(store, t)


def test_another_run_is_refused(path):
    saved(path)
    refused(path, "belongs to run 'first run', not to 'second run'", run_id="second run")
    with RunStore(path) as store:
        assert (store.run_id, whole_rounds(store)) == ("first run", 3)


def test_a_newer_format_is_refused(path):
    saved(path)
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
    db.close()
    refused(path, f"format {FORMAT_VERSION + 1}, from a newer tfpfl; this one reads up to {FORMAT_VERSION}")


def test_a_file_that_is_not_sqlite_is_refused(path):
    path.write_bytes(b"round,loss\n1,0.5\n" * 1000)
    refused(path, "not an SQLite file")


def test_an_sqlite_file_of_somebody_else_is_refused(path):
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE precious (x)")
    db.close()
    refused(path, "not one that tfpfl wrote")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.999])
def test_a_file_cut_off_is_refused(path, part):
    saved(path)
    os.truncate(path, int(path.stat().st_size * part))
    refused(path, "damaged or cut off")


def test_a_changed_byte_in_a_state_is_found(path):
    with RunStore(path) as store:
        store.commit_round(1, np.arange(1000.0), {5: np.full(3000, 1.25)}, {})
    data = bytearray(path.read_bytes())
    where = data.index(np.full(10, 1.25).tobytes())
    data[where + 1] ^= 1
    path.write_bytes(data)
    with RunStore(path) as store:
        np.testing.assert_array_equal(store.server_state(np.zeros(1000)), np.arange(1000.0))
        with pytest.raises(StoreError, match="client 5 is damaged: its checksum is wrong"):
            store.client_states([5], no_default, like=np.zeros(1))


def test_a_folder_that_is_not_there_is_named(path):
    with pytest.raises(StoreError, match="nowhere.*No such file"):
        RunStore(path.parent / "nowhere" / "state.sqlite")


def test_a_file_that_cannot_be_opened_is_named_and_not_kept_locked(path):
    path.mkdir()
    for _ in range(2):
        with pytest.raises(StoreError, match="state.sqlite: unable to open"):
            RunStore(path)
    path.rmdir()
    RunStore(path).close()


def test_what_a_reader_reads_in_a_block_is_of_one_moment(path):
    with RunStore(path) as store:
        commit(store, 1)
        with RunStore(path, read_only=True) as reader:
            with reader.reading():
                assert whole_rounds(reader) == 1
                commit(store, 2)
                assert len(reader.history()) == 1
            assert whole_rounds(reader) == 2
        assert whole_rounds(store) == 2


def test_a_second_writer_is_refused_until_the_first_closes(path):
    with RunStore(path) as store:
        with pytest.raises(StoreError, match="being written by another process"):
            RunStore(path)
        commit(store, 1)
    with RunStore(path) as store:
        assert whole_rounds(store) == 1


def test_a_reader_from_outside_that_locks_the_file_is_named_and_nothing_is_lost(path):
    with RunStore(path) as store:
        store._db.execute("PRAGMA busy_timeout = 50")
        commit(store, 1)
        other = sqlite3.connect(path)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="round 2 was not saved, round 1 is the last .*: database is locked"):
            commit(store, 2)
        other.close()
        commit(store, 2)
        assert whole_rounds(store) == 2


def test_a_full_file_keeps_the_rounds_before_and_takes_the_round_later(path):
    with RunStore(path) as store:
        commit(store, 1)
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match="round 2 was not saved, round 1 is the last whole one: .*full"):
            commit(store, 2)
        assert whole_rounds(store) == 1
        store._db.execute("PRAGMA max_page_count = 1000000")
        commit(store, 2)
    with RunStore(path) as store:
        assert whole_rounds(store) == 2


def write_until_refused(path, pipe):
    """In a process that may not write files of more than 2 MB: the kernel refuses, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
    with RunStore(path) as store:
        for round_num in range(1, 1000):
            try:
                commit(store, round_num)
            except StoreError as error:
                pipe.send((round_num, whole_rounds(store), str(error)))
                return


@pytest.mark.slow
def test_a_kernel_that_refuses_to_write_loses_no_whole_round(path):
    receive, send = processes.Pipe(duplex=False)
    child = processes.Process(target=write_until_refused, args=(path, send))
    child.start()
    assert receive.poll(60)
    refused_round, last_whole, message = receive.recv()
    child.join()
    assert last_whole == refused_round - 1 > 0
    assert f"round {refused_round} was not saved, round {last_whole} is the last whole one" in message
    with RunStore(path) as store:
        assert whole_rounds(store) == last_whole


# kill -9.


def commit_and_die(path, statement):
    """Commit one more round, and be killed just before its n-th SQL statement."""
    left = [statement]

    def die(_):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    store = RunStore(path)
    round_num = store.round_num + 1
    store._db.execute("PRAGMA cache_size = 5")  # pages reach the file before the commit, as in a large round
    store._db.set_trace_callback(die)
    commit(store, round_num)


def run_and_join(target, *args):
    child = processes.Process(target=target, args=args)
    child.start()
    child.join(60)
    return child.exitcode


@pytest.mark.slow
def test_killed_before_any_statement_of_a_round(path):
    with RunStore(path) as store:
        commit(store, 1)
        traced = []
        store._db.set_trace_callback(traced.append)
        commit(store, 2)
    last = next(i for i, statement in enumerate(traced) if statement == "COMMIT")
    assert last > 2 * NUM_CLIENTS
    for statement in [1, 2, 3, 4, 10, last - NUM_CLIENTS, last - 1, last]:
        assert run_and_join(commit_and_die, path, statement) == -signal.SIGKILL
        with RunStore(path) as store:
            assert whole_rounds(store) == 2
    assert run_and_join(commit_and_die, path, last + 1) == 0
    with RunStore(path) as store:
        assert whole_rounds(store) == 3


def commit_for_ever(path, pipe):
    with RunStore(path) as store:
        while True:
            round_num = store.round_num + 1
            commit(store, round_num, width=20_000)
            pipe.send(round_num)


@pytest.mark.slow
def test_killed_at_any_moment(path):
    """What the writer was told to be saved is there, and at most the round it was just saving besides, whole."""
    moments = random.Random(0)
    done = 0
    for _ in range(8):
        receive, send = processes.Pipe(duplex=False)
        child = processes.Process(target=commit_for_ever, args=(path, send))
        child.start()
        send.close()
        assert receive.poll(60)
        time.sleep(moments.uniform(0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        told = done
        while True:
            try:
                told = receive.recv()
            except EOFError:
                break
        with RunStore(path) as store:
            found = whole_rounds(store, width=20_000)
        assert told > done and found in (told, told + 1)
        done = found
