"""Gives a store's file the format of an older version, so that tests can open what that version wrote."""

import sqlite3
import zlib
from contextlib import closing


def as_format(path, number: int) -> None:
    """Rewrites a store, which must be closed, as one of format 1 (no matrices), 2 (no checksums of rounds) or 3.

    Format 3 has no metrics besides loss and accuracy: the store must not have any.
    Until format 2 a checksum was that of the arrays alone.
    """
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE metric")
        db.execute(f"PRAGMA user_version = {number}")
        if number == 3:
            db.commit()
            return
        for table, column in (("server", "state"), ("client", "state"), ("matrix", "value")):
            rows = db.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
            db.executemany(f"UPDATE {table} SET crc = ? WHERE rowid = ?", [(zlib.crc32(x), i) for i, x in rows])
        db.execute("DROP TABLE checksum")
        if number < 2:
            db.execute("DROP TABLE matrix")
        db.commit()
