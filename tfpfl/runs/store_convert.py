"""Gives a store of an older format the newest one: with all tables, and with checksums of whole rounds."""

from tfpfl.runs import store_content as content
from tfpfl.runs.store_file import StoreFile

_BLOBS = {  # table -> (its column of arrays, what its checksum covers besides)
    "server": ("state", ("round",)),
    "client": ("state", ("id", "round")),
    "matrix": ("value", ("round", "name")),
}


def convert(file: StoreFile, run_id: str) -> None:
    """Converts the file in one transaction; if that fails or is interrupted, the file is as it was.

    Args:
        file: of an older format, whose rows were checked.
        run_id: the run that it belongs to.

    Raises:
        StoreError: a state has a wrong checksum, or the file could not be written.
    """
    db, old = file.db, file.format
    with file.errors(f"it could not be converted from format {old}, and is as it was"), file.transaction():
        file.create(since=old)
        if old >= 3:  # it has the checksums already
            return
        for table, (column, keys) in _BLOBS.items():
            for (row,) in db.execute(f"SELECT rowid FROM {table}").fetchall():
                query = f"SELECT {column}, crc, {', '.join(keys)} FROM {table} WHERE rowid = ?"
                data, crc, *of = db.execute(query, (row,)).fetchone()
                named = ", ".join(f"{key} {value}" for key, value in zip(keys, of, strict=True))
                content.check(data, crc, (), f"{file.name}: the {table}'s {column} of {named}")
                db.execute(
                    f"UPDATE {table} SET crc = ? WHERE rowid = ?", (content.checksum(data, table, run_id, *of), row)
                )
        for t, history in db.execute("SELECT round, row FROM history ORDER BY round").fetchall():
            # Who took part in earlier rounds is not known; that a client's last round is known is enough.
            ids = [i for (i,) in db.execute("SELECT id FROM client WHERE round = ?", (t,))]
            order = "ORDER BY client, model, split"
            scores = db.execute(f"SELECT * FROM evaluation WHERE round = ? {order}", (t,)).fetchall()
            names = [name for (name,) in db.execute("SELECT name FROM matrix WHERE round = ?", (t,))]
            row = content.sums(run_id, t, ids, history, scores, names)
            db.execute("INSERT INTO checksum VALUES (?, ?, ?, ?, ?, ?)", row)
