"""A table with a row for each example: its columns, checked, as the data of clients for `Federation.from_clients`.

A table is a CSV or Parquet file, a DataFrame of pandas or polars, or a dict of columns.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, check_listed, check_type, unknown, warn_user
from tfpfl.data.arrays import EXACT, as_text, coarse, cut, first_of, is_missing, rounded_whole, without_nul
from tfpfl.data.columns import (
    check_single,
    csv_columns,
    is_number,
    numbered,
    parquet_columns,
    present,
    table_columns,
)
from tfpfl.data.manifest import SPLITS
from tfpfl.data.source import LARGE, LARGEST
from tfpfl.data.targets import as_targets, check_sort

# What pandas and pyarrow call the column of the row numbers that pandas writes by default; in CSV it has no name.
ROW_NUMBERS = re.compile(r"\s*|Unnamed: [0-9]+|__index_level_[0-9]+__")
OF_RESET = re.compile(r"index|level_[0-9]+")  # what they are called after reset_index(), and other columns may be
WHOLE = re.compile(r"[+-]?[0-9]{1,1000}")  # how whole numbers are written
WITH_COMMAS = re.compile(r"[+-]?[0-9]+(,[0-9]+)+(\.[0-9]*)?([eE][+-]?[0-9]+)?")  # decimal commas, or those of thousands
# Kinds of columns that NumPy makes numbers of, which would then mean something else, and what to do about them.
NO_FEATURES = {
    "c": ("complex numbers", "give the real and the imaginary part as two columns"),
    "m": ("durations", "divide them by a unit first, for example column / np.timedelta64(1, 'D') for days"),
    "M": ("dates", "take the time since a day first, for example (column - column.min()) / np.timedelta64(1, 'D')"),
}
# How programs write a value that is missing, in lower case. "none" is not among them: it may be the name of a class.
MISSING_WORDS = ("na", "n/a", "#n/a", "nan", "<na>", "null", "nat", "?", "-", ".")
# A label that is written so is a number; others are names, such as 01, which is not 1.
LABEL_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def table_clients(
    table: Any,
    client: str,
    label: str | Sequence[str],
    features: Sequence[str] | None,
    split: str | None,
    targets: str | None = None,
) -> tuple[dict[str, dict[str, tuple[np.ndarray, np.ndarray]]], list[str]]:
    """The rows of a table as the data of clients.

    Args:
        table, client, label, features, split, targets: as in `Federation.from_table`.

    Returns:
        ({name of a client: {split: (x [N, M], y [N] or [N, D])}}, the names of the M features). Clients are sorted: by
        number if all are whole numbers, otherwise by name. With `split`, every client has a test part, which may be
        empty, and a validation part if the column has this value at all.

    Raises:
        InvalidArgument: see `Federation.from_table`.
        Unavailable: a Parquet file, and pyarrow is not installed.
    """
    is_csv = isinstance(table, str | os.PathLike) and Path(table).suffix.lower() == ".csv"
    check_sort(targets)
    check_type("client", client, str, "the name of a column")
    if split is not None:
        check_type("split", split, str, "the name of a column")
    if features is not None:
        check_listed("features", features, "['age', 'weight']")
    for what, given in (("features", features), ("label", label)):
        if isinstance(given, set | frozenset):
            raise InvalidArgument(
                f"{what} must be a list, such as {sorted(map(str, given))}, found a {type(given).__name__}: it has no "
                "order, and the numbers of an example have the order of their columns"
            )
    labels, whole = label_columns(label), [client] if split is None else [client, split]
    if not labels or (targets is None and len(labels) != 1):
        raise InvalidArgument(
            f"label must be a column of classes, found {', '.join(map(repr, labels)) or 'none'}. Several columns are "
            "targets: say which sort, with targets='real', 'count' or 'binary' (--targets at the command line)"
        )
    columns = table_columns(table, whole + labels if targets is None else whole)
    of = [(client, "client"), *((name, "label") for name in labels), (split, "split")]
    for name, what in of:
        if name is not None and name not in columns:
            raise InvalidArgument(f"{what}: {unknown('column', name, columns)}")
    special = [name for name, _ in of if name is not None]
    if len(set(special)) < len(special):
        raise InvalidArgument(f"client, label and split must be different columns, found {', '.join(special)}")
    chosen = [name for name in columns if name not in special] if features is None else list(features)
    numbering = next((name for name in chosen if features is None and _are_row_numbers(name, columns[name])), None)
    if numbering is not None and all(map(is_missing, columns[numbering])):
        raise InvalidArgument(
            f"column {numbering!r} has no values: remove it, such as the separators at the ends of lines, "
            "or name the features with features=[...] (--features at the command line)"
        )
    if numbering is not None:  # in a sorted table it tells the label
        raise InvalidArgument(
            f"column {numbering!r}: it looks like the numbers of the rows, which are no feature. Write the table "
            "with index=False, after reset_index(drop=True) if rows were removed; or name the features with "
            "features=[...] (--features at the command line)"
        )
    for name in chosen:
        if name not in columns:
            raise InvalidArgument(f"features: {unknown('column', name, columns)}")
        if name in special:
            raise InvalidArgument(f"features: column {name!r} is the client, the label or the split: leave it out")
    if not chosen or len(set(chosen)) < len(chosen):
        raise InvalidArgument(f"features must be different columns, at least one; found {', '.join(chosen) or 'none'}")
    if not len(columns[client]):
        raise InvalidArgument("the table has no rows")
    out = "leave it out with features=[...] (--features at the command line)" if features is None else "leave it out"
    mend = f"{out}, or turn it into numbers first, for example with pandas.get_dummies(table, dtype=int)"
    x = np.column_stack([_numbers(name, columns[name], mend) for name in chosen])
    _say_constant(x, chosen)
    if features is None:
        _say_counting(x, chosen)
    _say_large(x, chosen)
    with np.errstate(over="ignore"):  # such numbers are refused later
        stored = x.astype(np.float32)
    if x.dtype.kind in "bf" or (stored != x).any():
        x = stored  # what is rounded was said with the name of its column
    names = _client_names(client, present(client, columns[client]))
    _check_missing_words(client, names, "a client")
    if targets is None:
        y = _labels(labels[0], columns[labels[0]], is_csv)
        words = _texts(labels[0], y) if y.dtype.kind in "SO" else y.astype(str)
        _check_missing_words(labels[0], words, "a class")
        if (words == words[0]).all():
            warn_user(f"column {labels[0]!r} has only one class, {cut(y[0])}: there is nothing to learn")
    else:
        y = np.column_stack([_target(name, columns[name], targets) for name in labels])
    parts = _parts(split, columns[split]) if split is not None else np.full(len(y), "train")
    given = [part for part in SPLITS if part != "validation" or part in parts] if split is not None else ["train"]
    order = np.argsort(names, kind="stable")
    found, starts = np.unique(names[order], return_index=True)
    rows = dict(zip(found.tolist(), np.split(order, starts[1:]), strict=True))
    as_numbers = all(WHOLE.fullmatch(name) for name in rows)
    ordered = sorted(rows, key=(lambda name: (int(name), name)) if as_numbers else None)
    return {
        name: {part: (x[rows[name][own]], y[rows[name][own]]) for part in given for own in [parts[rows[name]] == part]}
        for name in ordered
    }, chosen


def _are_row_numbers(name: str, values: np.ndarray) -> bool:
    """Whether a column has the name of row numbers; after `reset_index()`, also whole numbers from 0 on, each once.

    They need not be all, or in order: rows may have been removed or mixed before.
    """
    if ROW_NUMBERS.fullmatch(name):
        return True
    are_whole = OF_RESET.fullmatch(name) and values.dtype.kind in "iu" and len(values)
    return bool(are_whole and values.min() >= 0 and len(np.unique(values)) == len(values))


def label_columns(label: str | Sequence[str]) -> list[str]:
    """The argument `label` as a list of columns.

    Raises:
        InvalidArgument: it is neither a text nor a list.
    """
    if not isinstance(label, Iterable):
        raise InvalidArgument(f"label is the name of a column, a text, or a list of names; found {label!r}")
    return [label] if isinstance(label, str) else list(label)


def _client_names(name: str, values: np.ndarray) -> np.ndarray:
    """The names of the clients of all rows, as text; of 1.0, which pandas makes of 1 beside a gap, it is '1'."""
    if values.dtype.kind == "f":
        large = np.abs(values) > 2 ** (np.finfo(values.dtype).nmant + 1)  # from there on, different ids are one float
        if large.any():
            row = int(large.argmax())
            raise InvalidArgument(
                f"column {name!r} has {values[row]} in row {row + 1}: as floats, such large numbers are not all "
                "different, so that two clients would become one. Give the clients as integers or as text"
            )
        if (values == np.rint(values)).all():
            values = values.astype(np.int64)
    elif values.dtype == object:  # two tables in one may have 1.0 beside '1'
        whole = [int(v) if isinstance(v, float) and v.is_integer() and abs(v) < 2**53 else v for v in values]
        return _texts(name, whole)
    return _texts(name, values)


def _texts(name: str, values: Iterable[Any]) -> np.ndarray:
    texts = (as_text(value, f"column {name!r}: row {i}") for i, value in enumerate(values, 1))
    return np.array(without_nul(texts, f"column {name!r}"))


def _check_missing_words(name: str, values: np.ndarray, what: str) -> None:
    """A text such as NA: beside numbers only it is a value that is missing; beside names a warning asks.

    Raises:
        InvalidArgument: a value is missing.
    """
    found = [value for value in np.unique(values) if value.strip().lower() in MISSING_WORDS]
    if not found:
        return
    marked = np.isin(values, found)
    told = f"column {name!r} has {first_of([repr(str(v)) for v in found])} in {marked.sum()} rows, the first in row "
    told += f"{int(marked.argmax()) + 1} (the first row of data is 1)"
    if not marked.all() and all(map(is_number, values[~marked])):
        raise InvalidArgument(f"{told}, and numbers in all others: these values are missing. Leave out their rows")
    warn_user(f"{told}: taken for the name of {what}. If these values are missing, leave out their rows")


def _target(name: str, values: np.ndarray, sort: str) -> np.ndarray:
    """A column of targets: float32 [N]."""
    numbers = _numbers(name, values, "a target is a number. Names of classes are labels: leave out targets=", "targets")
    found = as_targets(numbers, sort, f"column {name!r}:", row="row {}", first=1)[:, 0]
    if (found == found[0]).all():
        warn_user(f"column {name!r} has the same target in every row, {found[0]:g}: there is nothing to learn")
    return found


def table_examples(
    path: Path, features: Sequence[str] | None, number: int, left_out: Mapping[str, str] | None = None
) -> np.ndarray:
    """The rows of a table as examples [N, M], for a model that was trained on such rows.

    Args:
        path: a CSV file, with or without a first line that names the columns, or a Parquet file.
        features: the names of the M features in the order of an example, by which columns are found; None: they have
            no names, and the columns are taken in their order.
        number: M.
        left_out: {column: what it is}, columns that the table may have besides. A warning says that they are left out.

    Raises:
        InvalidArgument: the file cannot be read or has no rows; a column is missing or unknown, or their number is not
            M; a value is missing, infinite or no number.
        Unavailable: a Parquet file, and pyarrow is not installed.
    """
    left_out = left_out or {}
    if path.suffix.lower() == ".parquet":
        columns = parquet_columns(path)
    else:
        columns = csv_columns(path, list(left_out), lambda row: _is_heading(row, features))
    chosen = list(columns)
    by_name = features is not None and (set(features) <= set(columns) or chosen != numbered(len(chosen)))
    if features is not None and by_name:
        _check_columns(path, chosen, features, left_out)
        dropped = [f"{cut(name)} ({left_out[name]})" for name in chosen if name not in features]
        chosen = list(features)
        if dropped:
            warn_user(
                f"{path}: the columns {', '.join(dropped)} are no features and are left out. The model of one client "
                "predicts for all rows, also for those of other clients"
            )
    elif len(columns) != number:
        names = f": {_listed(features)}" if features else ""
        raise InvalidArgument(
            f"{path} has {len(columns)} columns, but an example of this run has {number} numbers{names}. Write one "
            "example in each row, and nothing else"
        )
    elif features is not None:
        warn_user(
            f"the first line of {path} does not name the columns: they are taken in the order {_listed(features)}"
        )
    if not len(columns[chosen[0]]):
        raise InvalidArgument(f"{path} has no examples: it has no row of numbers")
    try:
        x = np.column_stack([_numbers(name, columns[name], "write numbers with a decimal point") for name in chosen])
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None
    if features is None and number > 3 and chosen == numbered(number) and (x[0] == np.arange(number)).all():
        warn_user(
            f"the first row of {path} is 0, 1, 2, ...: it is taken for an example. If it numbers the columns, as "
            "pandas does, write the table without it: to_csv(header=False)"
        )
    return x


def _is_heading(row: Sequence[str], features: Sequence[str] | None) -> bool:
    """Whether the first row of a CSV file names the columns. Without known names, no cell may then be a number."""
    texts = [cell for cell in row if cell.strip() and not is_number(cell)]
    if features is not None:
        return bool(texts) or set(features) <= set(row)
    return bool(texts) and not any(map(is_number, row))


def _check_columns(path: Path, found: Sequence[str], features: Sequence[str], left_out: Mapping[str, str]) -> None:
    """Checks that a table has the columns of all features, and no other ones besides `left_out`."""
    missing = [name for name in features if name not in found]
    strange = [name for name in found if name not in features and name not in left_out]
    told = [f"{what} {_listed(names)}" for what, names in (("missing", missing), ("unknown", strange)) if names]
    if told:
        raise InvalidArgument(
            f"{path} does not have the columns of this run ({'; '.join(told)}). The features are {_listed(features)}: "
            "name their columns so, in any order, and remove columns that are unknown"
        )


def _listed(names: Sequence[str]) -> str:
    return first_of([cut(name) for name in names])


def _numbers(name: str, values: np.ndarray, mend: str, what: str = "features") -> np.ndarray:
    """The values of a feature or target as numbers; `mend` says what to do if they are none."""
    if values.dtype.kind in NO_FEATURES:
        found, todo = NO_FEATURES[values.dtype.kind]
        raise InvalidArgument(f"column {name!r} has {found}, and {what} are real numbers: {todo}")
    if values.dtype.kind not in "biuf":
        check_single(name, values)
        row = next((i for i, v in enumerate(values) if not is_missing(v) and not is_number(v)), None)
        if row is not None:
            if WITH_COMMAS.fullmatch(str(values[row]).strip()):
                mend = (
                    "write numbers with a decimal point and no other sign between digits. pandas.read_csv(file, "
                    "decimal=',') reads a comma as the decimal point, and thousands=',' leaves it out"
                )
            raise InvalidArgument(f"column {name!r} is not numeric, row {row + 1} has {cut(values[row])}: {mend}")
        present(name, values)
        values = np.array([float(v) for v in values])
    present(name, values)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise InvalidArgument(f"column {name!r} has {values[row]} in row {row + 1}: {what} must be finite")
    if what == "features" and values.dtype.kind in "iuf" and len(values):
        row = int(np.argmax(np.abs(values.astype(np.float64))))
        if abs(float(values[row])) > LARGEST:
            raise InvalidArgument(
                f"column {name!r} has {values[row]:g} in row {row + 1}: features are at most {LARGEST:g}, because "
                "float32 overflows. Take a larger unit, or leave the column out if it is an identifier"
            )
        _say_rounded(name, values)
    return values


def _say_rounded(name: str, values: np.ndarray) -> None:
    """Warns of a feature of which float32 makes one number of different ones."""
    if rounded_whole(values[:, None])[0]:
        largest = max(abs(float(values.min())), abs(float(values.max())))
        warn_user(
            f"column {name!r} has whole numbers up to {largest:,.0f}; as float32, whole numbers beyond {EXACT:,} are "
            "rounded. If it is an identifier, leave it out of the features; if it is a time, subtract its beginning"
        )
    elif coarse(values[:, None])[0]:
        warn_user(
            f"column {name!r} has numbers that lie near each other and far from 0, {values.min():.12g} to "
            f"{values.max():.12g}. They are stored as float32, which is too coarse for them: different ones may become "
            "one. Subtract one number from all of them, such as the mean of the training rows"
        )


def _labels(name: str, values: np.ndarray, from_text: bool) -> np.ndarray:
    """The labels: integers, or text. Whole numbers are integers, also 1.0; in a file 01 and 1_1 are text."""
    values = present(name, values)
    if from_text:
        are_numbers = all(LABEL_NUMBER.fullmatch(value.strip()) for value in values)
        for kind in (int, float) if are_numbers else ():
            try:
                numbers = np.array([kind(value) for value in values], np.dtype(kind))
                break
            except (ValueError, OverflowError):
                continue
        else:
            return _texts(name, values)
        if not np.isfinite(numbers).all():  # such as 1e999
            return _texts(name, values)
        values = numbers
    if values.dtype.kind == "f":
        whole = (values == np.rint(values)) & (np.abs(values) < 2**53)
        if not whole.all():
            row = int(whole.argmin())
            raise InvalidArgument(
                f"column {name!r} has the label {values[row]} in row {row + 1}: a label is a whole number or a name of "
                "a class. If the numbers themselves are to be predicted, say targets='real' (--targets real at the "
                "command line); otherwise turn them into names, for example 'low' and 'high'"
            )
        return values.astype(np.int64)
    return values


def _parts(name: str, values: np.ndarray) -> np.ndarray:
    """The split of every row, checked."""
    values = present(name, values)
    found = _texts(name, values)
    wrong = ~np.isin(found, SPLITS)
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidArgument(
            f"column {name!r} has {cut(str(found[row]))} in row {row + 1}: a split is one of {', '.join(SPLITS)}"
        )
    return found


def _say_constant(x: np.ndarray, names: Sequence[str]) -> None:
    same = (x == x[:1]).all(0)
    if same.any() and len(x) > 1:
        listed = ", ".join(repr(name) for name, constant in zip(names, same, strict=True) if constant)
        warn_user(f"the same value in every row: column {listed}. It tells nothing about the label: leave it out")


def _say_counting(x: np.ndarray, names: Sequence[str]) -> None:
    """A counter of the rows, whatever its name is; one that was chosen by name is meant."""
    rows = np.arange(len(x))
    found = [
        name
        for name, column in zip(names, x.T, strict=True)
        if len(x) > 2 and column[0] in (0, 1) and (column == rows + column[0]).all()
    ]
    if found:
        warn_user(
            f"columns that only count the rows: {_listed(found)}. In a sorted table such a "
            "number tells the label. Leave them out with features=[...] (--features at the command line), which also "
            "says that they are meant"
        )


def _say_large(x: np.ndarray, names: Sequence[str]) -> None:
    """A head's loss is curved as the features are squared: for large ones, the usual rates make steps too long."""
    with np.errstate(over="ignore"):  # such numbers are refused later
        size = [np.sqrt(np.square(column, dtype=np.float64).mean()) for column in x.T]  # one by one, to save memory
    found = [f"{cut(name)} ({value:.3g})" for name, value in zip(names, size, strict=True) if value > LARGE]
    if found:
        warn_user(
            f"columns of large numbers, with their root mean square: {first_of(found)}. Nothing is standardized, and "
            "the usual rates are too large for such columns: subtract the mean and divide by the standard deviation of "
            "the training rows first, or begin the backbone with a layer that does"
        )
