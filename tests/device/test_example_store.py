"""The store of examples on a device: what it keeps, what it forgets, and that a killed process loses nothing."""

import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import numpy as np
import pytest
from scipy import stats

from tflite_export.device.example_store import POLICIES, ExampleStore, ExampleStoreError

RNG = np.random.default_rng(0)


def numbered(start, stop):
    """Examples that are their own number."""
    return np.arange(start, stop, dtype=np.float32).reshape(-1, 1)


def kept(store, labels=("a", "b", "c")):
    return store.arrays(labels)[0][:, 0].astype(int).tolist()


def test_what_was_added_comes_back_in_its_order(tmp_path):
    x = RNG.normal(size=(5, 2, 3)).astype("f")
    with ExampleStore(tmp_path / "s", (2, 3), capacity=9) as store:
        assert store.add(x, list("abacb")) == 5
    with ExampleStore(tmp_path / "s", (2, 3), capacity=9) as store:
        found, y = store.arrays(["c", "b", "a"])
        assert np.array_equal(found, x) and y.tolist() == [2, 1, 2, 0, 1] and y.dtype == np.int32
        assert store.counts() == {"a": 2, "b": 2, "c": 1}


def test_newest(tmp_path):
    with ExampleStore(tmp_path / "s", (1,), capacity=4, policy="newest") as store:
        store.add(numbered(0, 11), ["a"] * 11)
        assert kept(store) == [7, 8, 9, 10]


def test_a_reservoir_keeps_each_example_with_the_same_probability(tmp_path):
    came = Counter()
    for seed in range(120):
        with ExampleStore(tmp_path / f"s{seed}", (1,), capacity=5, policy="reservoir", seed=seed) as store:
            store._db.execute("PRAGMA synchronous = OFF")  # what is tested is what it keeps
            store.add(numbered(0, 20), ["a"] * 20)
            came.update(kept(store))
    assert sum(came.values()) == 600
    assert stats.chisquare([came[i] for i in range(20)]).pvalue > 1e-3


def test_each_class_has_the_same_number_as_far_as_possible(tmp_path):
    labels = ["a"] * 50 + ["b"] * 3 + ["c"] * 40
    with ExampleStore(tmp_path / "s", (1,), capacity=15, policy="per_class") as store:
        store.add(numbered(0, 93), labels)
        assert store.counts() == {"a": 6, "b": 3, "c": 6}
        of_a, of_b = [i for i in kept(store) if i < 50], [i for i in kept(store) if 50 <= i < 53]
        assert of_b == [50, 51, 52] and max(of_a) > 15, "not only those of the beginning"
        store.add(numbered(93, 150), ["a"] * 57)
        assert store.counts() == {"a": 6, "b": 3, "c": 6}


IN_TURN = [i % 3 for i in range(60)]
IN_BLOCKS = [0] * 25 + [1] * 6 + [2] * 25 + [0] * 4


@pytest.mark.parametrize("classes", [IN_TURN, IN_BLOCKS], ids=["in turn", "in blocks"])
def test_of_a_class_each_example_is_kept_with_the_same_probability(classes, tmp_path):
    came = Counter()
    for seed in range(100):
        with ExampleStore(tmp_path / f"s{seed}", (1,), capacity=10, policy="per_class", seed=seed) as store:
            store._db.execute("PRAGMA synchronous = OFF")  # what is tested is what it keeps
            store.add(numbered(0, 60), ["abc"[c] for c in classes])
            assert sorted(store.counts().values()) == [3, 3, 4]
            came.update(kept(store))
    for c in range(3):
        times = [came[i] for i in range(60) if classes[i] == c]
        assert 300 <= sum(times) <= 400 and stats.chisquare(times).pvalue > 1e-3


def test_a_class_of_which_old_examples_were_forgotten_grows_again(tmp_path):
    with ExampleStore(tmp_path / "s", (1,), capacity=10, policy="per_class") as store:
        store.add(numbered(0, 400), ["ab"[i % 2] for i in range(400)], at=1.0)
        store.add(numbered(400, 440), ["c"] * 40, at=2.0)
        assert sorted(store.counts().values()) == [3, 3, 4]
        assert store.forget("a", before=2.0) in (3, 4)
        store.add(numbered(440, 450), ["b"] * 10, at=3.0)  # fills the room
        assert "a" not in store.counts()
        store.add(numbered(450, 470), ["a"] * 20, at=4.0)
        assert min(store.counts().values()) == 3 and max(store.counts().values()) == 4


@pytest.mark.parametrize("what", [{"before": 1.5}, {"label": "a"}], ids=str)
def test_a_reservoir_is_fair_to_what_comes_after_some_was_forgotten(what, tmp_path):
    came = Counter()
    for seed in range(120):
        with ExampleStore(tmp_path / f"s{seed}", (1,), capacity=6, policy="reservoir", seed=seed) as store:
            store._db.execute("PRAGMA synchronous = OFF")  # what is tested is what it keeps
            store.add(numbered(0, 60), ["a", "b"] * 30, at=1.0)
            store.forget(**what)
            store.add(numbered(60, 80), ["a", "c"] * 10, at=2.0)
            came.update(kept(store))
    assert sum(came.values()) == 720
    assert stats.chisquare([came[i] for i in range(60, 80)]).pvalue > 1e-3


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_a_function_of_the_seed_and_of_what_came(policy, tmp_path):
    def run(name, seed, pieces):
        with ExampleStore(tmp_path / name, (1,), capacity=6, policy=policy, seed=seed) as store:
            for part in np.array_split(np.arange(60), pieces):
                store.add(part.astype("f").reshape(-1, 1), ["abc"[i % 3] for i in part])
            return kept(store)

    assert run("one", 1, 1) == run("many", 1, 7)
    assert (run("other", 2, 1) == run("third", 1, 1)) == (policy == "newest")


@pytest.mark.parametrize("before", [5, 5.0, np.float64(5), np.int64(5), np.float32(5), np.int32(5), -np.inf], ids=repr)
def test_any_number_is_a_time(before, tmp_path):
    """SQLite takes the bytes of a NumPy number, and any text, for later than every time: all examples were deleted."""
    with ExampleStore(tmp_path / "s", (1,), capacity=9) as store:
        store.add(numbered(0, 4), ["a"] * 4, at=10.0)
        assert store.forget(before=before) == 0 and len(store) == 4
        assert store.forget(before=before + 6) == (0 if np.isinf(before) else 4)


@pytest.mark.parametrize("before", [np.nan, "yesterday", "5", datetime(2020, 1, 1), b"5", [5.0]], ids=repr)
def test_what_is_no_time_forgets_nothing(before, tmp_path):
    with ExampleStore(tmp_path / "s", (1,), capacity=9) as store:
        store.add(numbered(0, 4), ["a"] * 4, at=10.0)
        with pytest.raises(ExampleStoreError, match="nothing was deleted"):
            store.forget(before=before)
        assert len(store) == 4


@pytest.mark.parametrize("which", [{"label": "a"}, {"before": 50.0}])
def test_everything_and_some_is_refused(which, tmp_path):
    with ExampleStore(tmp_path / "s", (2,)) as store:
        store.add(np.ones((2, 2), np.float32), ["a", "b"], at=100.0)
        with pytest.raises(ExampleStoreError, match="everything=True forgets all examples, and label and before say"):
            store.forget(everything=True, **which)
        assert len(store) == 2 and store.forget(everything=True) == 2 and len(store) == 0


def test_a_name_that_no_file_can_hold_is_refused_and_changes_nothing(tmp_path):
    with ExampleStore(tmp_path / "s", (1,), capacity=9) as store:
        store.add(numbered(0, 4), ["a"] * 4, at=10.0)
        for refused in (
            lambda: store.forget("\ud800"),
            lambda: store.rename("\ud800", "a"),
            lambda: store.rename("a", "\ud800"),
            lambda: store.rename("a", 7),
        ):
            with pytest.raises(ExampleStoreError, match="must be a text in Unicode"):
                refused()
        assert store.counts() == {"a": 4}


def test_forgetting_leaves_nothing_in_the_file(tmp_path):
    x = np.frombuffer(b"my own face " * 4, "<f4")[np.newaxis]
    with ExampleStore(tmp_path / "s", x.shape[1:], capacity=50) as store:
        store.add(np.zeros_like(x), ["b"], at=5.0)
        store.add(np.repeat(x, 20, 0), ["a"] * 20, at=1.0)
        assert b"my own face" in (tmp_path / "s").read_bytes()
        assert store.forget("a", before=1.0) == 0
        assert store.forget("a") == 20 and store.counts() == {"b": 1}
        assert b"my own face" not in (tmp_path / "s").read_bytes()
        assert store.forget(before=10.0) == 1 and len(store) == 0
        store.add(x, ["a"])
        assert store.forget(everything=True) == 1 and kept_nothing(store)
        with pytest.raises(ExampleStoreError, match="say what to forget"):
            store.forget()


def kept_nothing(store):
    x, y = store.arrays(["a"])
    return x.shape == (0, *store.shape) and len(y) == 0


def test_two_classes_become_one(tmp_path):
    with ExampleStore(tmp_path / "s", (1,), capacity=50) as store:
        store.add(numbered(0, 6), list("aabbbc"))
        assert store.rename("a", "b") == 2 and store.counts() == {"b": 5, "c": 1}
        assert store.rename("b", "b") == 5 and store._db.execute("SELECT SUM(examples) FROM seen").fetchone() == (6,)
        with pytest.raises(ExampleStoreError, match="has examples of c, which the head does not know"):
            store.arrays(["a", "b"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"capacity": 0}, "capacity must be a whole number from 1 to 1000000, found 0"),
        ({"capacity": 2.7}, "capacity must be a whole number from 1 to 1000000, found 2.7"),
        ({"capacity": "5"}, "capacity must be a whole number from 1 to 1000000, found '5'"),
        ({"seed": 1.5}, "seed must be a whole number from 0 to .*, found 1.5"),
        ({"capacity": 7}, "has capacity '50', and '7'"),
        ({"made_by": "ab"}, "has made_by '', and 'ab'"),
        ({"shape": (3,)}, "has shape '2', and '3'"),
    ],
)
def test_another_store(given, said, tmp_path):
    how = {"shape": (2,), "capacity": 50}
    ExampleStore(tmp_path / "s", **how).close()
    with pytest.raises(ExampleStoreError, match=said):
        ExampleStore(tmp_path / "s", **how | given)


def test_an_empty_file_becomes_a_store(tmp_path):
    """Such a file is left where a process was killed before the tables were written."""
    (tmp_path / "s").touch()
    with ExampleStore(tmp_path / "s", (1,)) as store:
        assert store.add(numbered(0, 2), ["a", "b"]) == 2
    with ExampleStore(tmp_path / "s", (1,)) as store:
        assert kept(store) == [0, 1]
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE notes (text)")
    with pytest.raises(ExampleStoreError, match="is not a store of examples: no such table: about"):
        ExampleStore(tmp_path / "other", (1,))


@pytest.mark.slow
def test_a_file_that_another_process_holds(tmp_path):
    with ExampleStore(tmp_path / "s", (1,)) as store, sqlite3.connect(tmp_path / "s", isolation_level=None) as other:
        store._db.execute("PRAGMA busy_timeout = 10")  # milliseconds
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ExampleStoreError, match="s cannot be written, and nothing was changed: database is locked"):
            store.add(numbered(0, 1), ["a"])
        other.execute("ROLLBACK")
        assert store.add(numbered(0, 1), ["a"]) == 1
        other.execute("BEGIN EXCLUSIVE")
        for read in (lambda: len(store), store.counts, lambda: store.arrays(["a"])):
            with pytest.raises(ExampleStoreError, match="s cannot be read: database is locked. If another process"):
                read()
        other.execute("ROLLBACK")
        assert len(store) == 1 and store.counts() == {"a": 1} and kept(store) == [0]
    with sqlite3.connect(tmp_path / "s", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ExampleStoreError, match="s cannot be opened, since another process writes to it"):
            ExampleStore(tmp_path / "s", (1,))  # it had said that this is no store, which may be deleted
    with pytest.raises(ExampleStoreError, match="nowhere/s cannot be opened: unable to open database file"):
        ExampleStore(tmp_path / "nowhere" / "s", (1,))


def test_a_file_whose_examples_are_damaged(tmp_path):
    """As a card that is worn out returns it: the first pages are whole, so the file opens."""
    with ExampleStore(tmp_path / "s", (1000,)) as store:
        store.add(np.zeros((20, 1000), "f"), ["a"] * 20)
    size = (tmp_path / "s").stat().st_size
    with open(tmp_path / "s", "r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 2))
    with ExampleStore(tmp_path / "s", (1000,)) as store:
        with pytest.raises(ExampleStoreError, match="s cannot be read: database disk image is malformed"):
            store.arrays(["a"])
        with pytest.raises(ExampleStoreError, match="s cannot be written, and nothing was changed: database disk"):
            store.forget("a")


def test_bad_examples_and_files(tmp_path):
    (tmp_path / "text").write_text("this is a diary, and long enough for a header" * 40)
    with pytest.raises(ExampleStoreError, match="is not a store of examples"):
        ExampleStore(tmp_path / "text", (2,))
    with ExampleStore(tmp_path / "s", (2,)) as store:
        for x, labels, said in (
            (np.zeros((1, 3), "f"), ["a"], "must be float32"),
            (np.zeros((1, 2)), ["a"], "must be float32"),
            (np.full((1, 2), np.nan, "f"), ["a"], "NaN"),
            (np.ma.masked_array(np.zeros((1, 2), "f"), [[0, 1]]), ["a"], "1 values of a masked array are masked"),
            ([[0.0], [0.0, 1.0]], ["a", "b"], "examples must be one array, found lists or arrays of different shapes"),
            (np.zeros((2, 2), "f"), ["a"], "as many names"),
            (np.zeros((3, 2), "f"), "cat", "labels must be a list of the names of classes, found 'cat'"),
            (np.zeros((3, 2), "f"), None, "labels must be a list of the names of classes, found None"),
            (np.zeros((1, 2), "f"), [""], "names of classes are texts, found ''"),
            (np.zeros((2, 2), "f"), np.zeros((2, 2)), "names of classes are texts, found array"),
            (np.zeros((2, 2), "f"), ["a", "a\udce9"], r"must be a text in Unicode, found 'a\\udce9'"),
        ):
            with pytest.raises(ExampleStoreError, match=said):
                store.add(x, labels)
        with pytest.raises(ExampleStoreError, match="its time, holds NaN"):
            store.add(np.zeros((1, 2), "f"), ["a"], at=float("nan"))
        with pytest.raises(ExampleStoreError, match="at must be seconds since 1970, found 'yesterday': nothing was"):
            store.add(np.zeros((1, 2), "f"), ["a"], at="yesterday")
        assert len(store) == 0
    with pytest.raises(ExampleStoreError, match="seed must be a whole number from 0 to 2"):
        ExampleStore(tmp_path / "other", (2,), seed=-1)
    for shape in (2, (2.5,), (-2,), "2"):
        with pytest.raises(ExampleStoreError, match="the shape of an example must be a tuple of whole numbers"):
            ExampleStore(tmp_path / "other", shape)
    with pytest.raises(ExampleStoreError, match="made_by must be a text, found None: leave it out"):
        ExampleStore(tmp_path / "other", (2,), made_by=None)
    assert not (tmp_path / "other").exists()


def test_a_store_that_is_closed_or_another_threads(tmp_path):
    store = ExampleStore(tmp_path / "s", (1,))
    why = "the store is closed, or another thread opened it. Open it in the thread"
    with ThreadPoolExecutor(1) as pool, pytest.raises(ExampleStoreError, match=f"nothing was changed: {why}"):
        pool.submit(store.add, numbered(0, 1), ["a"]).result()
    store.close()
    with pytest.raises(ExampleStoreError, match=f"cannot be read: {why}"):
        len(store)


KILLED = """
import sys, numpy as np
from tflite_export.device.example_store import ExampleStore
store = ExampleStore(sys.argv[1], (50,), capacity=40, policy="newest")
for i in range(10**6):
    store.add(np.full((3, 50), i, np.float32), ["a"] * 3)
    print(i, flush=True)
"""


def test_a_killed_process_loses_nothing_that_was_added(tmp_path):
    """Eight times: the last change is there whole or not at all."""
    path = tmp_path / "s"
    for turn in range(8):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
            told = -1
            for _ in range(3 + 3 * turn):
                told = int(process.stdout.readline())
            process.kill()
            told = max([told, *map(int, process.stdout.read().split())])
        assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        with ExampleStore(path, (50,), capacity=40, policy="newest") as store:
            x, _ = store.arrays(["a"])
            assert (x == x[:, :1]).all() and x[-1, 0] in (told, told + 1)
            assert len(x) == min(40, 3 * (int(x[-1, 0]) + 1)) and len(x) % 3 in (0, 40 % 3)
            store.forget(everything=True)
