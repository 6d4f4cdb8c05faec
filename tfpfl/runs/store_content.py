"""What a store holds, as bytes and numbers: arrays, checksums, and which values are possible.

A checksum is the CRC-32 of the content and of what the content belongs to: the run, the round, the client. So a state
that is copied to another client or another round is found like a flipped bit. It protects against damage and mistakes,
not against somebody who computes the checksums again; therefore possible values are checked too.
"""

import json
import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save
from tensorflow import nest

from tfpfl.checks import InvalidArgument
from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.data.manifest import SPLITS
from tfpfl.runs.protocols import Score
from tfpfl.runs.store_file import StoreError


def checksum(content: bytes, *of: Any) -> int:
    """The CRC-32 of a content that belongs to `of`, such as ("client", run_id, 3, 17); of it alone without `of`."""
    crc = zlib.crc32(content)
    return zlib.crc32(as_text(of), crc) if of else crc


def as_text(rows: Any) -> bytes:
    """Rows of a table as bytes, for their checksum: equal bytes for equal rows."""
    return json.dumps(rows, default=repr).encode()


def pack(state: Any) -> bytes:
    """The leaves of a structure as safetensors, in the order of `nest.flatten`.

    Raises:
        InvalidArgument: a leaf has a dtype that could not be read again: text, or numbers such as bfloat16.
    """
    leaves = [np.asarray(leaf, order="C") for leaf in nest.flatten(state)]
    for leaf in leaves:
        if leaf.dtype.kind not in "biufc" or leaf.dtype.itemsize > 8:
            raise InvalidArgument(
                f"a state or matrix with an array of {leaf.dtype} cannot be saved: convert it to bool, integers, or "
                "float16, float32 or float64, for example with tf.cast"
            )
    return save({str(i): leaf for i, leaf in enumerate(leaves)})


def scores_text(scores: Sequence[tuple], metrics: Sequence[tuple]) -> bytes:
    """The scores and metrics of one round as bytes, for their checksum; without metrics as up to format 3."""
    return as_text([*scores, [*metrics]] if metrics else scores)


def sums(
    run_id: str,
    t: int,
    client_ids: Iterable[int],
    history: str,
    scores: Sequence[tuple],
    names: Iterable[str],
    metrics: Sequence[tuple] = (),
) -> tuple:
    """The row of the table `checksum` for round t.

    Args:
        run_id: the run.
        t: the round.
        client_ids: the clients whose states were saved in it.
        history: its row of the history, as JSON.
        scores: its rows of the table of scores, ordered by client, model and split.
        names: the names of its matrices.
        metrics: its rows of the table of metrics, ordered by client, model, split and name.
    """
    clients = json.dumps(sorted(client_ids))
    content = {
        "clients": clients.encode(),
        "history": history.encode(),
        "evaluation": scores_text(scores, metrics),
        "matrices": as_text(sorted(names)),
    }
    return (t, clients, *(checksum(data, kind, run_id, t) for kind, data in content.items()))


def check(content: Any, crc: Any, of: Sequence, what: str, kind: type = bytes) -> None:
    """Raises StoreError unless `content` is of this kind and has the checksum `crc`; `what` names it."""
    data = content.encode() if isinstance(content, str) else content
    if not isinstance(content, kind) or checksum(data, *of) != crc:
        raise StoreError(f"{what} is damaged: its checksum is wrong")


def arrays(data: bytes, what: str) -> list[np.ndarray]:
    """The arrays that `pack` made bytes of; `what` names them in errors."""
    try:
        stored = load(data)
        return [stored[str(i)] for i in range(len(stored))]
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise StoreError(f"{what} cannot be read: {error}") from error


def unpack(data: bytes, like: Any, what: str, *, same_shapes: bool = False) -> Any:
    """The arrays in the structure of `like`, after a check of their number, dtypes and ranks, or shapes.

    An empty array in `like` stands for one of any size, such as the state of an aggregator of TFF.
    """
    leaves = arrays(data, what)
    wanted = [np.asarray(leaf) for leaf in nest.flatten(like)]
    if len(leaves) != len(wanted):
        raise StoreError(f"{what} has {len(leaves)} arrays, but this algorithm and model have {len(wanted)}")
    for i, (leaf, expected) in enumerate(zip(leaves, wanted, strict=True)):
        exact = same_shapes and expected.size
        kinds = [f"{a.dtype}, {f'shape {list(a.shape)}' if exact else f'rank {a.ndim}'}" for a in (leaf, expected)]
        if kinds[0] != kinds[1]:
            raise StoreError(f"{what} has in array {i}: {kinds[0]}; this algorithm and model have {kinds[1]}")
    return nest.pack_sequence_as(like, leaves)


def json_value(value: Any) -> Any:
    """Converts NumPy's numbers and arrays, and tensors, to JSON's types."""
    if not hasattr(value, "__array__"):
        raise TypeError(f"a history row holds numbers, text, lists and dicts; found {type(value).__name__}")
    return np.asarray(value).tolist()


def history_row(text: str, round_num: int, what: str) -> dict:
    """A row of the history, which is stored as JSON; one that names a round names its own."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{what} is damaged: it is not valid JSON ({error})") from error
    if not isinstance(row, dict) or row.get("round", round_num) != round_num:
        raise StoreError(f"{what} is damaged: it must be a JSON object of round {round_num}, found {text[:80]}")
    return row


def score_row(score: Score, named: ScoreName = ACCURACY) -> tuple:
    """The row of the table for a score, as SQLite gives it back: NumPy's numbers as Python's, NaN as None.

    Raises:
        InvalidArgument: a value is impossible; see `scores`.
    """
    loss, found = (None if math.isnan(x := float(value)) else x + 0.0 for value in (score.loss, score.score))
    # SQLite would keep NumPy's whole numbers as bytes.
    of = (int(score.round_num), int(score.client_id), score.model, score.split)
    row = (*of, int(score.num_examples), loss, found)
    if wrong := _wrong(row, named):
        raise InvalidArgument(f"a score of round {score.round_num} {wrong}")
    return row


def metric_rows(score: Score) -> list[tuple]:
    """The rows of the table of metrics for a score, sorted by name, as SQLite gives them back.

    Raises:
        InvalidArgument: a value is no number.
    """
    of, rows = (int(score.round_num), int(score.client_id), score.model, score.split), []
    for name, value in sorted(score.metrics.items()):
        number = float(value)
        rows.append((*of, str(name), None if math.isnan(number) else number + 0.0))
    return rows


def scores(
    rows: Sequence[tuple], what: str, metrics: Iterable[tuple] = (), named: ScoreName = ACCURACY, is_known: bool = True
) -> list[Score]:
    """The scores of rows of the table, and of rows of the table of metrics.

    Args:
        rows, metrics: of the two tables.
        what: their name in errors.
        named: the score.
        is_known: whether the score is known to be this one; otherwise it may be any number.

    Raises:
        StoreError: a client id or a number of examples is negative, an accuracy is outside [0, 1], a split is unknown,
            a value has a wrong type, or a metric has no score.
    """
    others: dict[tuple, dict[str, float]] = {}
    for *of, name, value in metrics:
        if type(name) is not str or not (value is None or type(value) is float):
            raise StoreError(f"{what} are damaged: one has the metric {name!r} with the value {value!r}")
        others.setdefault(tuple(of), {})[name] = math.nan if value is None else value
    if strange := others.keys() - {row[:4] for row in rows}:
        raise StoreError(f"{what} are damaged: there are metrics without a score: {min(strange, key=str)}")
    for row in rows:
        if wrong := _wrong(row, named if is_known else named._replace(unit="")):
            raise StoreError(f"{what} are damaged: one {wrong}")
    # Runs of before have no number where a client with examples diverged; NaN would say that it has no examples.
    broken = (math.inf, math.nan if named.is_fraction else math.inf)
    found = []
    for *of, loss, score in rows:
        instead = broken if of[4] else (math.nan, math.nan)
        found.append(Score(*of, *(b if x is None else x for x, b in zip((loss, score), instead, strict=True))))
    return [score._replace(metrics=others[score[:4]]) if score[:4] in others else score for score in found]


def _wrong(row: tuple, named: ScoreName) -> str | None:
    _, client, model, split, num_examples, loss, score = row
    if type(client) is not int or client < 0:
        return f"is of client {client!r}, and ids are whole numbers from 0"
    if type(model) is not str or split not in SPLITS:
        return f"is of model {model!r} and split {split!r}; a split is one of {', '.join(SPLITS)}"
    if type(num_examples) is not int or num_examples < 0:
        return f"is of {num_examples!r} examples"
    if not (loss is None or type(loss) is float):
        return f"has the loss {loss!r}, which is no number"
    if not (score is None or (type(score) is float and (0 <= score <= 1 or not named.is_fraction))):
        return f"has the {named.name} {score!r}, which is {'outside [0, 1]' if named.is_fraction else 'no number'}"
    return None


def check_clients(name: str, stored: Mapping[int, int], saved: Iterable[tuple[int, str]]) -> None:
    """Checks that exactly those clients have a state that were saved in some round, each the one of its last round.

    Args:
        name: the store's name in errors.
        stored: {client id: round of its state}.
        saved: (round, ids of the clients that were saved in it, as JSON), ascending.

    Raises:
        StoreError: a state is missing, is too many, or is of another round.
    """
    last: dict[int, int] = {}
    for t, ids in saved:
        wrong = f"{name} is damaged: the list of the clients of round {t} cannot be read"
        try:
            of_round = json.loads(ids)
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreError(wrong) from error
        if not isinstance(of_round, list) or any(type(i) is not int for i in of_round):
            raise StoreError(wrong)
        last |= dict.fromkeys(of_round, t)
    for i in sorted(last.keys() | stored.keys()):
        if last.get(i) != stored.get(i):
            found = "has no state" if i not in stored else f"has a state of round {stored[i]}"
            wanted = f"its last round was {last[i]}" if i in last else "it was in no round"
            raise StoreError(f"{name} is damaged: client {i} {found}, but {wanted}")


_NUMBERS = ("bytes_down", "bytes_up", "virtual_seconds", "dropped", "late", "loss")


def check_of_run(
    name: str,
    history: Sequence[dict],
    evaluations: Iterable[Score],
    stored: Iterable[int],
    ids: Collection[int],
    named: ScoreName = ACCURACY,
) -> None:
    """Checks that a history and scores can be those of a run: what tables, reports and a resumed run read of them.

    Args:
        name: the store's name in errors.
        history: the rows of all rounds.
        evaluations: the scores of all rounds.
        stored: the ids of the clients that have a state.
        ids: the ids of the run's clients.
        named: the run's score; its means are numbers, in [0, 1] if it is a fraction.

    Raises:
        StoreError: a row lacks an entry, an entry is no number or impossible, or a state or score is of another client.
    """
    for t, row in enumerate(history, 1):
        number = {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        needed = {"round", "clients", "seconds", *(row.keys() & set(_NUMBERS))}
        rates = {k for k in row if k.endswith(f" {named.name}")}
        wrong = sorted((needed | rates) - number.keys())
        if wrong:
            raise StoreError(f"{name}: the history of round {t} has no number for {', '.join(wrong)}: it is damaged")
        most = 1 + 1e-9 if named.is_fraction else math.inf
        least = -1e-9 if named.is_fraction else -math.inf
        wrong = sorted(k for k in rates if not (number[k] != number[k] or least <= number[k] <= most))
        wrong += ["clients"] if number["clients"] not in range(len(ids) + 1) else []
        wrong += ["seconds"] if not 0 <= number["seconds"] < math.inf else []
        if wrong:
            raise StoreError(f"{name}: the history of round {t} has {wrong[0]} = {row[wrong[0]]}: it is damaged")
    for what, found in (("a state", {int(i) for i in stored}), ("scores", {e.client_id for e in evaluations})):
        if strange := sorted(i for i in found if i not in ids):
            raise StoreError(
                f"{name} has {what} of client {strange[0]}, which is not a client of this run: it is damaged"
            )
