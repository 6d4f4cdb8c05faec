"""A bounded store of a client's own examples on its device, in one SQLite file.

SQLite writes each change as a whole or not at all: after `kill -9` or a power cut the file holds what was added before,
or that and the last change. Labels are kept as names, so that a head may gain, lose and merge classes.
"""

import os
import sqlite3
import time
from contextlib import contextmanager
from numbers import Real
from pathlib import Path

import numpy as np

from tflite_export.device.arrays import as_array
from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import is_unicode

POLICIES = ("newest", "reservoir", "per_class")
MOST = 1_000_000  # examples
_FORMAT = 1
_SCHEMA = """
CREATE TABLE examples (id INTEGER PRIMARY KEY AUTOINCREMENT, label TEXT NOT NULL, time REAL NOT NULL, x BLOB NOT NULL);
CREATE INDEX by_label ON examples (label);
CREATE TABLE seen (label TEXT PRIMARY KEY, examples INTEGER NOT NULL);
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class ExampleStoreError(InvalidInput):
    """The file is not a store of examples, or holds others, or an example does not fit."""


class ExampleStore:
    """A client's own examples, of which at most `capacity` are kept.

    Args:
        path: the file; it is made if it does not exist or is empty.
        shape: the shape of an example, float32; of a bundle with a trunk, that of the trunk's output.
        capacity: the number of examples that are kept, 1 to 1,000,000.
        policy: which ones. 'newest': the last ones. 'reservoir': each one that ever came with the same probability
            (Vitter's algorithm R, 1985). 'per_class': of each class the same number as far as possible, and of one
            class each with the same probability (class-balancing reservoir sampling: Chrysakis and Moens, ICML 2020,
            algorithm 1). Where `forget` has made room, all that comes is kept until the store is full again.
        seed: what is left out is a function of the seed and of how many examples have come.
        made_by: what computed the examples, such as the `sha256` of the bundle's trunk; another one is refused.

    Raises:
        ExampleStoreError: the file is no store, cannot be opened or written, or was made for other examples, another
            capacity or policy; or an argument is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        shape: tuple[int, ...],
        *,
        capacity: int = 500,
        policy: str = "per_class",
        seed: int = 0,
        made_by: str = "",
    ):
        if policy not in POLICIES:
            raise ExampleStoreError(f"unknown policy {policy!r}: one of {', '.join(POLICIES)}")
        if not (isinstance(capacity, int | np.integer) and 1 <= capacity <= MOST):
            raise ExampleStoreError(f"capacity must be a whole number from 1 to {MOST}, found {capacity!r}")
        if not (isinstance(seed, int | np.integer) and 0 <= seed < 2**64):
            raise ExampleStoreError(f"the seed must be a whole number from 0 to 2^64 - 1, found {seed!r}")
        if not (isinstance(shape, tuple | list) and all(isinstance(n, int | np.integer) and n >= 1 for n in shape)):
            raise ExampleStoreError(
                f"the shape of an example must be a tuple of whole numbers >= 1, such as (28, 28); found {shape!r}"
            )
        if not isinstance(made_by, str):
            raise ExampleStoreError(f"made_by must be a text, found {made_by!r}: leave it out if nothing made them")
        self.path, self.shape = Path(path), tuple(map(int, shape))
        self.capacity, self.policy, self.seed = int(capacity), policy, int(seed)
        about = {
            "format": str(_FORMAT),
            "shape": " ".join(map(str, self.shape)),
            "capacity": str(self.capacity),
            "policy": policy,
            "seed": str(self.seed),
            "made_by": made_by,
        }
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None)  # transactions are begun by hand
        except sqlite3.Error as error:
            raise ExampleStoreError(f"{self.path} cannot be opened: {error}. Is there such a folder?") from None
        try:
            self._db.execute("PRAGMA secure_delete = ON")  # what is forgotten is overwritten in the file
            self._db.execute("PRAGMA synchronous = FULL")
            if self._has_no_tables():  # the file is new, or a process was killed before it wrote them
                with self._change():
                    if self._has_no_tables():  # else another process was faster
                        for statement in _SCHEMA.split(";"):
                            self._db.execute(statement)
                        self._db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            found = dict(self._db.execute("SELECT name, value FROM about"))
        except ExampleStoreError:
            self._db.close()
            raise
        except sqlite3.DatabaseError as error:
            self._db.close()
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the lowest byte; the others say more of the same code
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):  # it may be a store, which nobody should delete
                why = "another process writes to it: try again when it is done"
                raise ExampleStoreError(f"{self.path} cannot be opened, since {why} ({error})") from None
            raise ExampleStoreError(f"{self.path} is not a store of examples: {error}") from None
        if wrong := [name for name, value in about.items() if found.get(name) != value]:
            self._db.close()
            name = wrong[0]
            raise ExampleStoreError(
                f"{self.path} has {name} {found.get(name)!r}, and {about[name]!r} was asked for: take another file, or "
                "delete this one"
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Closes the file; everything that was added is in it already."""
        self._db.close()

    def __len__(self) -> int:
        ((number,),) = self._read("SELECT COUNT(*) FROM examples")
        return number

    def counts(self) -> dict[str, int]:
        """{label: the number of its examples that are kept}."""
        return dict(self._read("SELECT label, COUNT(*) FROM examples GROUP BY label ORDER BY label"))

    def add(self, x: np.ndarray, labels: list[str], at: float | None = None) -> int:
        """Adds examples, all or none, and leaves others out where there are too many.

        Args:
            x: float32 [N, *shape], finite.
            labels: the names of their classes, N texts.
            at: the time, in seconds since 1970; default: now.

        Returns:
            How many examples are kept.

        Raises:
            ExampleStoreError: a shape or dtype is wrong, a number is not finite, or the numbers differ; or the file
                cannot be written, as in `rename` and `forget`.
        """
        try:
            x = as_array(x, "examples")
        except InvalidInput as error:
            raise ExampleStoreError(str(error)) from None
        if x.shape[1:] != self.shape or x.ndim != len(self.shape) + 1 or x.dtype != np.float32:
            raise ExampleStoreError(f"examples must be float32 {['N', *self.shape]}, found {x.dtype} {list(x.shape)}")
        # Each letter of a text would be a class, and a dict or a set has no order of the examples.
        if isinstance(labels, str | bytes | dict | set) or not hasattr(labels, "__len__"):
            raise ExampleStoreError(f"labels must be a list of the names of classes, found {labels!r}")
        if len(labels) != len(x):
            raise ExampleStoreError(f"{len(x)} examples need as many names of classes, found {len(labels)}")
        if strange := [label for label in labels if not (isinstance(label, str) and label)]:
            raise ExampleStoreError(f"the names of classes are texts, found {strange[0]!r}")
        if not isinstance(at, Real | None):
            raise ExampleStoreError(f"at must be seconds since 1970, found {at!r}: nothing was added")
        at = time.time() if at is None else float(at)
        if not (np.isfinite(x).all() and np.isfinite(at)):
            raise ExampleStoreError("an example, or its time, holds NaN or infinity: nothing was added")
        for label in labels:
            _check_name(label)
        with self._change():
            for example, label in zip(x, labels, strict=True):
                self._add(np.ascontiguousarray(example, "<f4").tobytes(), label, at)
            return len(self)

    def arrays(self, labels: list[str] | tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """All examples, oldest first: (x float32 [N, *shape], y int32 [N], positions in `labels`).

        Raises:
            ExampleStoreError: an example has a label that is not in `labels`; or the file cannot be read, as in
                `counts` and `len`.
        """
        place = {name: i for i, name in enumerate(labels)}
        rows = self._read("SELECT label, x FROM examples ORDER BY id")
        if unknown := sorted({label for label, _ in rows} - set(place)):
            raise ExampleStoreError(
                f"{self.path} has examples of {', '.join(unknown)}, which the head does not know: add the class, "
                "rename the examples, or forget them"
            )
        x = np.frombuffer(b"".join(blob for _, blob in rows), "<f4").reshape(-1, *self.shape).astype(np.float32)
        return x, np.array([place[label] for label, _ in rows], np.int32)

    def rename(self, label: str, into: str) -> int:
        """Gives the examples of a class another label, as when two classes become one. Returns their number."""
        _check_name(label)
        _check_name(into)
        if label == into:
            return self.counts().get(label, 0)
        with self._change():
            number = self._db.execute("UPDATE examples SET label = ? WHERE label = ?", (into, label)).rowcount
            (seen,) = self._db.execute("SELECT TOTAL(examples) FROM seen WHERE label = ?", (label,)).fetchone()
            self._count(into, int(seen))
            self._db.execute("DELETE FROM seen WHERE label = ?", (label,))
        return number

    def forget(self, label: str | None = None, *, before: float | None = None, everything: bool = False) -> int:
        """Deletes examples, and overwrites them in the file. (Flash storage may keep old blocks for a while.)

        Args:
            label: those of this class.
            before: those that came before this time, in seconds since 1970; with `label`, both must hold.
            everything: all examples, whatever their class and time; without the other two.

        Returns:
            How many were deleted.

        Raises:
            ExampleStoreError: nothing says which ones, or `everything` and the others do; `before` is no time, or
                `label` is no name.
        """
        some = label is not None or before is not None
        if not some and not everything:
            raise ExampleStoreError("say what to forget: label, before, or everything=True")
        if some and everything:
            raise ExampleStoreError(
                "everything=True forgets all examples, and label and before say which: give one or the other. Nothing "
                "was deleted"
            )
        if label is not None:
            _check_name(label)
        if before is not None:  # SQLite takes any text, and NumPy's numbers, for later than all times
            if not isinstance(before, Real) or np.isnan(before):
                raise ExampleStoreError(f"before must be seconds since 1970, found {before!r}: nothing was deleted")
            before = float(before)
        chosen = "FROM examples WHERE (? IS NULL OR label = ?) AND (? IS NULL OR time < ?)"
        which = (label, label, before, before)
        with self._change():
            shrunk = self._db.execute(f"SELECT DISTINCT label {chosen}", which).fetchall()
            number = self._db.execute(f"DELETE {chosen}", which).rowcount
            if before is None:
                self._db.execute("DELETE FROM seen WHERE ? IS NULL OR label = ?", (label, label))
            # What is left stands for itself alone: else what comes later would be kept with a smaller probability.
            if self.policy == "reservoir" and number:  # all classes share the room
                shrunk = self._db.execute("SELECT label FROM seen").fetchall()
            counts = self.counts()  # of `per_class`, those classes are not full any more, see `_make_room`
            left = [(counts.get(name, 0), name) for (name,) in shrunk]
            self._db.executemany("UPDATE seen SET examples = ? WHERE label = ?", left)
        return number

    def _has_no_tables(self) -> bool:
        return self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (0,)

    def _read(self, query: str) -> list[tuple]:
        try:
            return self._db.execute(query).fetchall()
        except sqlite3.DatabaseError as error:
            raise ExampleStoreError(
                f"{self.path} cannot be read: {_why(error, 'If another process writes to it')}"
            ) from None

    @contextmanager
    def _change(self):
        """All of it is written, or nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.DatabaseError as error:
            why = _why(error, "If another process uses the file")
            raise ExampleStoreError(f"{self.path} cannot be written, and nothing was changed: {why}") from None

    def _add(self, x, label, at):
        self._count(label, 1)
        if len(self) >= self.capacity and not self._make_room(label):
            return
        self._db.execute("INSERT INTO examples (label, time, x) VALUES (?, ?, ?)", (label, at, x))

    def _count(self, label, more):
        self._db.execute(
            "INSERT INTO seen VALUES (?, ?) ON CONFLICT (label) DO UPDATE SET examples = examples + excluded.examples",
            (label, more),
        )

    def _make_room(self, label) -> bool:
        """Deletes one example; or says that the new one is the one to leave out."""
        if self.policy == "newest":
            self._db.execute("DELETE FROM examples WHERE id = (SELECT MIN(id) FROM examples)")
            return True
        (come,) = self._db.execute("SELECT SUM(examples) FROM seen").fetchone()
        rng = np.random.Generator(np.random.Philox(key=np.array([self.seed, come], np.uint64)))
        if self.policy == "reservoir":
            if rng.random() * come >= self.capacity:
                return False
            return self._delete_any(rng, None)
        counts = self.counts()
        kept, most = counts.get(label, 0), max(counts.values())
        (come,) = self._db.execute("SELECT examples FROM seen WHERE label = ?", (label,)).fetchone()
        # The paper calls a class full from the time on when it was one of the largest. Only the largest lose examples,
        # and a full store's largest number never grows: so a class is full if it is one of the largest or has lost one.
        if kept < most and kept == come - 1:
            largest = sorted(name for name, number in counts.items() if number == most)
            return self._delete_any(rng, largest[rng.integers(len(largest))])
        return rng.random() * come < kept and self._delete_any(rng, label)

    def _delete_any(self, rng, label) -> bool:
        rows = self._db.execute("SELECT id FROM examples WHERE ? IS NULL OR label = ? ORDER BY id", (label, label))
        ids = [number for (number,) in rows]
        self._db.execute("DELETE FROM examples WHERE id = ?", (ids[rng.integers(len(ids))],))
        return True


def _why(error: sqlite3.DatabaseError, where: str) -> str:
    """What is wrong, and what to do: SQLite has one class of errors for what the caller does wrong."""
    if isinstance(error, sqlite3.ProgrammingError):
        return "the store is closed, or another thread opened it. Open it in the thread that uses it"
    return f"{error}. {where}, try again when it is done"


def _check_name(label: str) -> None:
    """Checks the name of a class: one or more characters, without halves of surrogate pairs, which no file can hold."""
    if not (isinstance(label, str) and label and is_unicode(label)):
        raise ExampleStoreError(f"the name of a class must be a text in Unicode, found {label!r}: nothing was changed")
