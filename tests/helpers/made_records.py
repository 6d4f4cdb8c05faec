"""Makes records of runs with random numbers, without running them, so that tests can compute the expected results."""

from pathlib import Path

import numpy as np

from tfpfl.algorithms import ALGORITHMS
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import LOCAL_COPY, Score, summarize
from tfpfl.runs.store import RunStore
from tfpfl.studies.records import Record

ROUNDS, CLIENTS, COHORT = 12, 8, 3
EVERYBODY = dict.fromkeys(range(CLIENTS), 1)
PASSES = {"forward": 2.5, "backward": 1.5}


def made(
    algorithm="pflego", seed=0, *, good=0.5, silent=False, rounds=ROUNDS, folder=None, took_part=EVERYBODY, **config
) -> Record:
    """Makes the record of a run whose rounds are all evaluated but the first. Its folder does not exist.

    Args:
        good: the accuracy at the beginning.
        silent: whether 0 bytes are sent.
        took_part: {client id: the first round in which it took part}; None: unknown.
        config: other entries of the configuration.
    """
    rng = np.random.default_rng([seed, list(ALGORITHMS).index(algorithm), int(100 * good)])
    row = ALGORITHMS[algorithm]
    asked = {
        "algorithm": algorithm,
        "seed": seed,
        "data_seed": 0,
        "rounds": rounds,
        "clients": CLIENTS,
        "partition_args": {"K": 2},
        "federation": "federations/digits-0123456789abcdef",
        "federation_hash": "f" * 64,
        "network": "mlp200",
        "labels": "local" if row.head == "personal" else "global",
        "hyperparameters": {name: p.default for name, p in row.hyperparameters.items()},
        "versions": {"python": "3.11.9", "tfpfl": "0.1.0", "tensorflow": "2.14.1"},
    } | config
    asked["hyperparameters"] = {n: p.default for n, p in row.hyperparameters.items()} | asked["hyperparameters"]
    settings = RunConfig(**asked)
    model = row.evaluated(settings.hyperparameters)
    history, evaluations = [], []
    for t in range(1, rounds + 1):
        line = {"round": t, "clients": COHORT, "loss": float(2 / t + 0.1 * rng.random())}
        sent = 0 if silent else 1000 * t
        line |= {"bytes_down": 2 * sent, "bytes_up": sent, "seconds": float(0.1 + 0.1 * rng.random())}
        if t > 1:
            scores = [_score(t, i, model, good, rng) for i in range(CLIENTS)]
            scores += [_score(t, i, LOCAL_COPY, good, rng) for i in range(COHORT)]
            rows = [e._replace(split=split) for split in ("test", "validation") for e in scores]
            for (name, split), means in summarize(rows).items():
                line |= {f"{name} {split} {what}": value for what, value in means.items()}
            evaluations += rows
        history.append(line)
    summary = {"passes": PASSES, "stopped": None, "rounds": rounds}
    folder = Path(folder or f"runs/{algorithm}-{seed}")
    record = Record(folder, settings, history, evaluations, summary)
    record.__dict__["matrix_rounds"] = []  # otherwise the record would look for them in its folder
    record.__dict__["took_part"] = took_part  # otherwise it would draw the cohorts, which these runs do not have
    return record


def _score(t, i, model, good, rng) -> Score:
    accuracy = round(20 * min(1, good + 0.03 * t + 0.04 * i * rng.random())) / 20
    return Score(t, i, model, "test", 20, float(1.5 - accuracy), accuracy)


def stored(record: Record, folder: Path, matrices=None) -> Record:
    """The same record with a folder and a store; the store has these matrices after the last round."""
    folder.mkdir(parents=True)
    with RunStore(folder / "state.sqlite", record.config.run_id) as store:
        last = len(record.history)
        for row in record.history:
            t = row["round"]
            scores = [e for e in record.evaluations if e.round_num == t]
            store.commit_round(t, {}, {}, row, scores, matrices if t == last else None)
    kept = Record(folder, record.config, record.history, record.evaluations, record.summary)
    kept.__dict__["took_part"] = record.took_part
    return kept
