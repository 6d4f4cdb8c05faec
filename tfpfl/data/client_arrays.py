"""Data that are divided among clients already: reads and checks them for `Federation.from_clients`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, check_listed, check_numbers, warn_user
from tfpfl.data.arrays import as_array, as_text, as_written, check_same_columns, is_missing, plain, say_alike
from tfpfl.data.layout import (
    checked_examples,
    entry,
    joined,
    names_of_arrays,
    num_rows,
    same_arrays,
    split,
    which_are_several,
)
from tfpfl.data.manifest import SPLITS
from tfpfl.data.partitioners import check_seed
from tfpfl.data.randomness import Stream, generator
from tfpfl.data.source import ONE_SHAPE, Source, as_examples, as_labels, check_same_length
from tfpfl.data.targets import Targets, as_targets, check_sort, check_widths, say_large, strata
from tfpfl.data.writing import absent, cut_validation, describe_source, write_federation


def write_clients(
    clients: Any,
    test: Any = None,
    *,
    out: str | os.PathLike,
    made_by: str,
    validation: float,
    test_fraction: float,
    seed: int,
    targets: str | None = None,
    **source: Any,
) -> Path:
    """Writes the data of clients as a federation; see `Federation.from_clients`.

    Args:
        clients, test, out, validation, test_fraction, seed, targets: as in `Federation.from_clients`.
        made_by: the name of the method, which the manifest has in place of a partitioner.
        **source: arguments of `Source.from_arrays`.

    Returns:
        The folder.
    """
    folder = absent(out)
    check_seed(seed)
    check_sort(targets)
    validation, test_fraction = as_written(validation), as_written(test_fraction)
    for fraction, what in ((validation, "validation"), (test_fraction, "test_fraction")):
        check_numbers(**{what: fraction})
        if not 0 <= fraction < 1:
            raise InvalidArgument(f"{what} must lie in [0, 1), found {fraction}")
    data = client_arrays(clients, test, targets)
    if made_by != "from_table":  # each row has one part, so that rows are equal by chance alone
        _say_same_parts(data)
    names = names_of(data)
    xs, ys, rows = rows_of_clients(data)
    y, wanted = np.concatenate(ys), None
    if targets is not None:
        if source.pop("compact_labels", False):
            raise InvalidArgument("compact_labels numbers classes, and targets are none: leave out one of the two")
        wanted = Targets.named(targets, y.shape[1], source["class_names"])
        say_large(y, wanted)
        source["class_names"] = wanted.names
    arrays = [np.concatenate(parts) for parts in zip(*map(split, xs), strict=True)]
    several = isinstance(xs[0], Mapping | tuple)
    if several:
        _check_scale(arrays, source)
    made, *others = [
        Source.from_arrays(
            x,
            np.zeros(len(y), np.int32) if place or wanted is not None else y,
            x_test=np.empty((0, *x.shape[1:]), x.dtype),
            y_test=np.empty(0, np.int32),
            **(source | {"class_names": ["0"], "compact_labels": False} if place else source)
            | ({"scale": 1.0, "shift": 0.0} if several and x.dtype != np.uint8 else {}),
        )
        for place, x in enumerate(arrays)
    ]
    given = ["test" in parts for parts in data.values()]
    cut_test(rows, given, test_fraction, seed)
    without = not any(len(test) for *_, test in rows)
    if without and all(given):
        warn_user(
            "the test parts of all clients are empty: there are no test examples, and nothing will be measured on "
            "them. Give some (in a table, rows whose split is test), or leave the parts out, and a part of the "
            "training examples is set aside for test"
        )
    elif without and test_fraction:
        warn_user(
            f"no client has so many examples that {test_fraction:g} of them, rounded down, is one: there are no test "
            "examples, and nothing will be measured on them. Take a larger test_fraction (--test-fraction), or give a "
            "test part"
        )
    kinds = made.y_train if wanted is None else strata(y, wanted.sort)
    cut_validation(rows, kinds, None, validation, seed, names, ["validation" in p for p in data.values()])
    manifest = describe_source(made) | {
        "partitioner": {"name": made_by, "arguments": {"test_fraction": float(test_fraction)}},
        "seed": int(seed),
        "validation": float(validation),
    }
    if wanted is None:
        y = made.y_train
    else:
        del manifest["class_names"]
        manifest["targets"] = wanted.entry()
    sources = [made, *others]
    if several:
        for single in ("preprocessing", "example_shape", "dtype"):
            del manifest[single]
        kind = "dict" if isinstance(xs[0], Mapping) else "tuple"
        manifest["inputs"] = entry(kind, names_of_arrays(xs[0]), sources)
    return write_federation(folder, [(s.x_train, s.x_test) for s in sources], y, rows, manifest, names)


def _check_scale(arrays: Sequence[np.ndarray], source: Mapping[str, Any]) -> None:
    """Checks that scale and shift, if they are given for several arrays, are for one that has pixels."""
    given = source.get("scale") is not None or source.get("shift")
    if given and not any(x.dtype == np.uint8 for x in arrays):
        raise InvalidArgument(
            "scale and shift are for uint8 arrays, which are taken for pixels, and no array is uint8: leave them out, "
            "and scale the other arrays before"
        )


def client_arrays(
    clients: Any, test: Any = None, targets: str | None = None
) -> dict[Any, dict[str, tuple[Any, np.ndarray]]]:
    """The data of every client, checked: {id: {split: (x, y)}}.

    A ClientData of TFF is recognized by its methods, so that this package need not import TFF.

    Args:
        clients, test, targets: as in `Federation.from_clients`.

    Raises:
        InvalidArgument: a client has no training data, an unknown part, arrays that do not fit together, or, where
            `test` is given, no test data.
    """
    if _is_client_data(clients):
        if test is not None and not _is_client_data(test):
            raise InvalidArgument(
                f"test= must be a ClientData, as the training examples are, found {type(test).__name__}: make one of "
                "it, or give all examples as arrays, {'train': (x, y), 'test': (x, y)} for each client"
            )
        absent = [] if test is None else sorted(set(clients.client_ids) - set(test.client_ids))
        if absent:
            raise InvalidArgument(f"{len(absent)} clients have no test data, the first is {absent[0]!r}")
        strangers = [] if test is None else sorted(set(test.client_ids) - set(clients.client_ids))
        if strangers:
            raise InvalidArgument(
                f"{len(strangers)} clients have test data and no training data, the first is {strangers[0]!r}: leave "
                "them out of test="
            )
        found = {}
        for client in clients.client_ids:
            datasets = {"train": clients} | ({} if test is None else {"test": test})
            found[client] = {
                part: _dataset_arrays(data.create_tf_dataset_for_client(client), client, part, targets)
                for part, data in datasets.items()
            }
        return found
    if test is not None:
        raise InvalidArgument(
            "test= is only for a ClientData. For arrays give {'train': (x, y), 'test': (x, y)} for each client"
        )
    check_listed("clients", clients, "[(x, y), (x, y)], or a dict {'ann': (x, y), 'bob': (x, y)}")
    given: list[tuple[Any, str, Any, np.ndarray]] = []
    places: dict[tuple, list[tuple[str, Any]]] = {}  # what all clients gave as one array of the examples, or as targets
    for client, data in clients.items() if isinstance(clients, Mapping) else enumerate(clients):
        parts = dict(data) if isinstance(data, Mapping) else {"train": data}
        unknown = set(parts) - {"train", "validation", "test"}
        if unknown or "train" not in parts:
            raise InvalidArgument(
                f"client {client!r} has parts {sorted(parts)}; train is needed, validation and test may be given"
            )
        for part, pair in parts.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InvalidArgument(f"client {client!r}: {part} must be a pair (x, y), found {type(pair).__name__}")
            named = "labels" if targets is None else "targets"
            given.append((client, part, pair[0], as_array(pair[1], f"client {client!r}: {part} {named}")))
            for which, what, array in _each_array(*pair):
                places.setdefault(which, []).append((f"{what}{part} of client {client!r}", array))
    for arrays in places.values():
        check_same_columns(arrays)
    all_several = which_are_several([(x, len(y) if y.ndim else 0) for _, _, x, y in given])
    found = {}
    for (client, part, x, y), several in zip(given, all_several, strict=True):
        found.setdefault(client, {})[part] = _checked_part(client, part, x, y, several, targets)
    return found


def _each_array(x: Any, y: Any) -> Iterator[tuple[tuple, str, Any]]:
    """(which it is, how a message names it, the array) for each array of the examples that a user gave, and for y."""
    if isinstance(x, Mapping):
        yield from ((("x", name), f"{name!r} of ", array) for name, array in x.items())
    elif isinstance(x, tuple):
        yield from ((("x", place), f"'{place}' of ", array) for place, array in enumerate(x))
    else:
        yield ("x",), "", x
    yield ("y",), "the targets of ", y


def _is_client_data(value: Any) -> bool:
    return hasattr(value, "client_ids") and hasattr(value, "create_tf_dataset_for_client")


def _say_same_parts(data: Mapping[Any, Mapping[str, tuple[Any, np.ndarray]]]) -> None:
    """Warns of clients that are scored on the very examples on which they train."""

    def equal(one: tuple[Any, np.ndarray], other: tuple[Any, np.ndarray]) -> bool:
        arrays = [[*split(x), y] for x, y in (one, other)]
        return bool(len(one[1])) and all(np.array_equal(a, b) for a, b in zip(*arrays, strict=True))

    for part in ("validation", "test"):
        same = [client for client, parts in data.items() if part in parts and equal(parts["train"], parts[part])]
        if same:
            warn_user(
                f"the {part} examples of {len(same)} clients, such as {same[0]!r}, are equal to their training "
                "examples: their scores say nothing about new data. Give other examples, or leave this part out and it "
                "is set aside (validation, test_fraction)"
            )


def _checked_part(
    client: Any, part: str, x: Any, y: np.ndarray, several: bool, targets: str | None
) -> tuple[Any, np.ndarray]:
    """The examples and labels of a part of a client's data, checked; `several`: they are several arrays."""
    what = f"client {client!r}: {part}"
    x = checked_examples(x, what, as_examples) if several else as_array(x, f"{what} examples", ONE_SHAPE)
    if not ((several or x.ndim) and y.ndim):
        shown = "several arrays" if several else x.shape
        raise InvalidArgument(f"{what} must be arrays with one row per example, found shapes {shown} and {y.shape}")
    if part == "train" and not num_rows(x):
        raise InvalidArgument(f"client {client!r} has no training examples")
    check_same_length(split(x)[0], y, what)
    if num_rows(x):
        x, y = x if several else as_examples(x, what), _checked_y(y, targets, what)
    return x, y


def _checked_y(y: Any, targets: str | None, what: str) -> np.ndarray:
    return as_labels(y, what) if targets is None else as_targets(y, targets, what)


def _dataset_arrays(dataset: Any, client: Any, part: str, targets: str | None) -> tuple[Any, np.ndarray]:
    """The arrays (x, y) of a client's tf.data.Dataset of pairs (x, y), or of dicts of a label and one other feature."""
    xs, ys = [], []
    for element in dataset.as_numpy_iterator():
        if isinstance(element, Mapping):
            label = [k for k in ("label", "labels", "y") if k in element]
            others = [k for k in element if k not in label]
            if len(label) != 1 or len(others) != 1:
                raise InvalidArgument(
                    f"client {client!r} has features {sorted(element)}: a label and one other are needed. "
                    "Map the ClientData to pairs (x, y) with its method preprocess()"
                )
            element = element[others[0]], element[label[0]]
        if not isinstance(element, tuple | list) or len(element) != 2:  # a vector has first and second numbers, too
            found = f"{len(element)} parts" if isinstance(element, tuple | list) else f"one {type(element).__name__}"
            raise InvalidArgument(
                f"client {client!r}: every element of its dataset must be a pair (x, y), an example and its label; "
                f"found {found}. Map the ClientData to pairs with its method preprocess()"
            )
        xs.append(element[0])
        ys.append(element[1])
    if not xs:
        named = "training" if part == "train" else part
        raise InvalidArgument(f"client {client!r} has no {named} examples: give it some, or leave this client out")
    _check_single(client, dataset.element_spec, xs[0], ys[0], targets)
    what = f"client {client!r}:"
    y = _checked_y(np.stack(ys), targets, what)
    if not isinstance(xs[0], Mapping | tuple):
        return as_examples(np.stack(xs), what), y
    stacked = joined([np.stack(parts) for parts in zip(*map(split, xs), strict=True)], xs[0])
    return checked_examples(stacked, what, as_examples), y


def _check_single(client: Any, spec: Any, x: Any, y: Any, targets: str | None) -> None:
    """Checks that the elements of a dataset are single examples, and no batches.

    Raises:
        InvalidArgument: a label is a vector of unknown length, as examples are arrays of one; or one of as many numbers
            as the first axis of an example has, and a label is a class.
    """
    names = ("label", "labels", "y")
    label = spec[1] if isinstance(spec, tuple) else next((spec[k] for k in names if k in spec), None)
    example = spec[0] if isinstance(spec, tuple) else next(part for k, part in spec.items() if k not in names)
    shapes = [part.shape for part in (*split(example), label) if getattr(part, "shape", None) is not None]
    if label is None or not all(shape.rank for shape in shapes):  # a label is one number or text
        return
    undo = "leave out batch(), or undo it with preprocess(lambda dataset: dataset.unbatch())"
    if all(shape[0] is None for shape in shapes):
        raise InvalidArgument(
            f"client {client!r}: every element of its dataset must be one example and its label, and these are batches "
            f"of examples: {undo}"
        )
    if any(len(part) != len(y) for part in split(x)):
        return
    if targets is None:
        raise InvalidArgument(
            f"client {client!r}: every element of its dataset has {len(y)} labels. If it is a batch of examples, "
            f"{undo}. If a label is one-hot, give its place: map it by tf.argmax(y). If an example has several labels, "
            "say targets='binary'"
        )
    if len(shapes) == 2 and shapes[0].rank > 1:
        warn_user(
            f"client {client!r}: every element of its dataset is taken for one example {shapes[0]} with {len(y)} "
            f"targets. If it is a batch of examples, {undo}"
        )


def names_of(data: dict) -> list[str]:
    """The names of the clients: their ids as text; bytes are text in UTF-8.

    Args:
        data: from `client_arrays`.

    Raises:
        InvalidArgument: an id is missing, such as None or NaN; two ids have the same text, such as 1 and '1'; or bytes
            are no text in UTF-8.
    """
    ids: dict[str, Any] = {}
    for client in data:
        if not isinstance(client, str | bytes) and is_missing(client):
            raise InvalidArgument(
                f"the id of a client is {plain(client)!r}, so that it is missing: its examples may be of many people. "
                "Give this client an id, or leave it out"
            )
        name = as_text(client, f"the id of client {client!r}")
        if name in ids:
            raise InvalidArgument(
                f"the clients {ids[name]!r} and {client!r} would have one name, {name!r}: give them different ids"
            )
        ids[name] = client
    say_alike("clients", ids)
    return list(ids)


def rows_of_clients(data: dict) -> tuple[list[Any], list[np.ndarray], list[list[np.ndarray]]]:
    """Lists the arrays of all clients one after the other.

    Args:
        data: from `client_arrays`.

    Returns:
        (examples, labels or targets, rows): two lists of arrays to concatenate, and for every client the indices of its
        train, validation and test examples in the result, int [n] each.

    Raises:
        InvalidArgument: there is no client, one has no training examples, examples or targets differ in shape, some
            examples are uint8 and others are not, or some labels are integers and some are names.
    """
    if not data:
        raise InvalidArgument("there are no clients")
    xs, ys, whose, where, rows, start = [], [], [], [], [], 0
    for client, parts in data.items():
        row = []
        for part in SPLITS:
            x, y = parts.get(part, (None, None))
            count = 0 if x is None else num_rows(x)
            row.append(np.arange(start, start + count))
            start += count
            if count:
                xs.append(x)
                ys.append(y)
                whose.append(f"client {client!r}")
                where.append(f"{part} of client {client!r}")
        if not len(row[0]):
            raise InvalidArgument(f"client {client!r} has no training examples")
        rows.append(row)
    if len({y.dtype.kind == "U" for y in ys}) > 1:
        raise InvalidArgument("labels must be all integers or all names of classes, found both")
    if ys[0].ndim == 2:
        check_widths(ys, whose)
    if any(isinstance(x, Mapping | tuple) for x in xs):
        same_arrays(xs, whose)
    elif len({x.shape[1:] for x in xs}) > 1:
        other = next(i for i, x in enumerate(xs) if x.shape[1:] != xs[0].shape[1:])
        found = f"{xs[0].shape[1:]} of {whose[0]} and {xs[other].shape[1:]} of {whose[other]}"
        raise InvalidArgument(f"examples must have one shape, found {found}")
    _check_pixels(xs, where)
    return xs, ys, rows


def _check_pixels(xs: Sequence[Any], where: Sequence[str]) -> None:
    """Checks that an array is uint8 in all parts or in none: only uint8 is taken for pixels, and scaled."""
    for place, parts in enumerate(zip(*map(split, xs), strict=True)):
        found = {x.dtype == np.uint8: f"{x.dtype} ({part})" for x, part in zip(parts, where, strict=True)}
        if len(found) > 1:
            what = "examples" if len(split(xs[0])) == 1 else f"array {names_of_arrays(xs[0])[place]!r} of the examples"
            raise InvalidArgument(
                f"the {what} must be uint8 everywhere or nowhere, found {found[True]} and {found[False]}: uint8 is "
                "taken for pixels and divided by 255, other numbers are not. Give all of them in the same type"
            )


def cut_test(rows: list[list[np.ndarray]], has_test: Sequence[bool], fraction: float, seed: int) -> None:
    """Moves floor(fraction * N_i) random training examples to the test part of every client that has none.

    Args:
        rows: per client a list [train, validation, test] of indices, int [n] each; changed in place.
        has_test: per client, whether it has a test part.
        fraction: the fraction of training examples to move, in [0, 1).
        seed: the seed of the cut, >= 0.
    """
    for i, (row, given) in enumerate(zip(rows, has_test, strict=True)):
        if not given:
            mixed = generator(seed, Stream.CLIENT_TEST, i).permutation(row[0])
            cut = int(fraction * len(mixed) + 1e-9)
            row[2], row[0] = mixed[:cut], np.sort(mixed[cut:])
