"""The result files of a run: writes history.csv and clients.csv, and has what summary.json says."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.client_names import number_and_name
from tfpfl.data.federation import Federation
from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.data.population import Population
from tfpfl.runs import protocols
from tfpfl.runs.files import write_csv
from tfpfl.runs.secure import clipped_unasked
from tfpfl.runs.store import RunStore


def write_history(path: Path, history: Sequence[Mapping[str, Any]], federation: Federation) -> None:
    """Writes history.csv: one row for every round.

    Args:
        path: the file.
        history: the rounds, as `RunStore.history` gives them. A column that a round does not have is left empty.
        federation: the clients' data; rejected clients are written with their names.
    """

    def named(rejected: str) -> str:  # the store has numbers only, because a name may look like anything
        return re.sub(r"(^|; )(\d+)(?=: )", lambda m: m[1] + number_and_name(federation, int(m[2])), rejected)

    rows = [
        row | {"rejected_clients": named(row["rejected_clients"])} if row.get("rejected_clients") else row
        for row in map(dict, history)
    ]
    write_csv(path, list(dict.fromkeys(name for row in rows for name in row)), rows)


def write_clients(
    path: Path,
    federation: Federation,
    population: Population,
    scores: Sequence[protocols.Score],
    took_part: Mapping[int, int] | None,
    named: ScoreName = ACCURACY,
) -> None:
    """Writes clients.csv: every client's number, name, N_i and K_i, and the scores of the model that it predicts with.

    The column `used_from_round` has the first round in which the server used the client's work; it is empty if there is
    none.

    Args:
        path: the file.
        federation: the clients' data.
        population: the clients of the run.
        scores: those of `Run.evaluate`.
        took_part: from `tfpfl.runs.participation.took_part`; None: unknown, the file then has no such column.
        named: how the score is called, in the columns 'train_accuracy' and so on.
    """
    own, with_classes = protocols.predicts(scores), getattr(federation, "targets", None) is None
    rows: dict[int, dict[str, Any]] = {
        int(i): {
            "client": int(i),
            "name": federation.client_names[i],
            "num_examples": int(n),
            **({"num_classes": len(federation.classes(int(i)))} if with_classes else {}),
            **({} if took_part is None else {"used_from_round": took_part.get(int(i), "")}),
        }
        for i, n in zip(population.client_ids, population.num_examples, strict=True)
    }
    for e in scores:
        if e.model != own:
            continue
        row = rows[e.client_id]
        row |= {f"{e.split}_examples": e.num_examples, f"{e.split}_loss": e.loss, f"{e.split}_{named.name}": e.score}
        row |= {f"{e.split}_{name}": value for name, value in sorted(e.metrics.items())}
    write_csv(path, list(next(iter(rows.values()))), rows.values())


def seconds_per_round(history: Sequence[Mapping[str, Any]]) -> float | None:
    """The median seconds of the rounds that had clients; None if there are none. All tables and plots use it.

    The first round, the first evaluated one and the first after a resume also build graphs, which may take a hundred
    times as long as the work of a round. The median is not moved by them.

    Args:
        history: as in `write_history`.
    """
    seconds = [row["seconds"] for row in history if row["clients"]]
    return float(np.median(seconds)) if seconds else None


def visits_of(row: Mapping[str, Any]) -> int:
    """How many visits a round had. In an asynchronous one, a client may have come more than once: it has the updates.

    Args:
        row: of the history.
    """
    return row["updates"] if row.get("came") and "updates" in row else row["clients"]


def totals(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The seconds of a round (median, of the rounds that had clients), and the sums of bytes and visits.

    Args:
        history: as in `write_history`.
    """
    return {
        "seconds_per_round_median": seconds_per_round(history),
        "bytes_down": sum(row.get("bytes_down", 0) for row in history),
        "bytes_up": sum(row.get("bytes_up", 0) for row in history),
        "client_visits": sum(map(visits_of, history)),
    }


def warnings_of(config: Any, history: Sequence[Mapping[str, Any]], took_part: Mapping | None = None) -> list[str]:
    """What a user should know of these rounds: no work was used, what the method says, updates clipped by default.

    Args:
        config: the run's `RunConfig`.
        history: as in `write_history`.
        took_part: whose work was used, as in `Run.took_part`; None if that cannot be known.
    """
    warning = config.method.warning
    nobody = (
        f"the server used nobody's work in {len(history)} rounds, so that nothing was learned. The columns clients, "
        "dropped, late, too_few and rejected_clients of history.csv say why: take more clients a round, or lose fewer"
    )
    return [
        text
        for text in (
            nobody if history and took_part == {} else None,
            warning and warning(history, config.hyperparameters),
            clipped_unasked(config, history),
        )
        if text
    ]


def summary_after(folder: Path, rounds: int) -> dict[str, Any]:
    """The summary.json that a run folder has, if it was written after so many rounds; {} if not."""
    with suppress(OSError, ValueError, AttributeError):
        before = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        if before.get("rounds") == rounds:
            return before
    return {}


def json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without NaN and infinity, which JSON does not have: None stands in their place.

    An entry `metrics` without metrics is left out.
    """
    inner = {k: json_row(v) if isinstance(v, Mapping) else v for k, v in row.items() if k != "metrics" or v}
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in inner.items()}


def matrices_after(store: RunStore, rounds: Sequence[int], round_num: int | None) -> dict[str, np.ndarray]:
    """The matrices after one of the rounds that have some: {name: [I, I]}; {} if none has.

    Args:
        store: the run's store.
        rounds: the rounds, ascending, as `RunStore.matrix_rounds` gives them.
        round_num: one of them; None: the last one.

    Raises:
        InvalidArgument: it is none of them.
    """
    if round_num is not None and rounds and round_num not in rounds:
        raise InvalidArgument(f"matrices are saved in evaluated rounds: {', '.join(map(str, rounds))}; not {round_num}")
    return store.matrices(rounds[-1] if round_num is None else round_num) if rounds else {}
