"""Makes a short run and prints hashes of all that it saved. Tests compare them between settings of the process.

Use: `python -m helpers.one_run ENGINE FOLDER FEDERATION [ALGORITHM]`; see `small_runs` for the run. FOLDER and
FEDERATION may be relative. The last line has one hash for each table, as JSON; seconds are left out.
"""

import hashlib
import json
import sys

from helpers import small_runs
from helpers.quick import quick
from tfpfl.data import Federation


def hashes(folder) -> dict:
    """{table of the store: sha256 of its rows}, and that of clients.csv."""
    found = {name: repr(rows).encode() for name, rows in small_runs.saved(folder).items()}
    with open(f"{folder}/clients.csv", "rb") as file:
        found["clients.csv"] = file.read()
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in found.items()}


def main(engine: str, folder: str, federation: str, algorithm: str = "pflego") -> None:
    """Trains for four rounds, the last two of them evaluated."""
    small_runs.train(folder, Federation.load(federation), engine=engine, algorithm=algorithm, rounds=4,
                     hyperparameters=quick(algorithm))  # fmt: skip
    print(json.dumps(hashes(folder)))


if __name__ == "__main__":
    from unittest import mock

    with mock.patch("tfpfl.runs.protocols.LAST_ROUNDS", small_runs.SHORT_END):
        main(*sys.argv[1:])
