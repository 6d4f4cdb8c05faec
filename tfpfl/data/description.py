"""A summary of a federation, for people."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tfpfl.checks import one_line
from tfpfl.data import targets
from tfpfl.data.arrays import first_of
from tfpfl.data.layout import is_several
from tfpfl.data.manifest import SPLITS

if TYPE_CHECKING:
    from tfpfl.data.federation import Federation


def describe(federation: "Federation") -> dict[str, Any]:
    """A summary of a federation: {name: printable value}, in the order in which tables show it."""
    source, partitioner = federation.manifest["source"], federation.manifest["partitioner"]
    used = dict(partitioner["arguments"])
    if partitioner["name"] == "from_table" and source["options"].get("split") is not None:
        used.pop("test_fraction", None)  # a column says which rows are for test: nothing was cut
    arguments = ", ".join(f"{k}={v}" for k, v in used.items())
    rows = {
        "source": one_line(f"{source['name']} {source['version']}".strip()),
        "partitioner": one_line(f"{partitioner['name']}({arguments})"),
        "seed": federation.manifest["seed"],
        "clients": federation.num_clients,
    }
    if federation.targets is None:
        rows |= {"classes": federation.num_labels, "classes per client": _range(federation.num_classes)}
        names = federation.class_names
        if names != [str(i) for i in range(len(names))]:
            rows["class names"] = first_of([one_line(name, 30) for name in names])
    else:
        rows["targets"] = targets.describe(federation.targets)
    if features := feature_columns(federation):
        rows["features"] = first_of([one_line(name, 30) for name in features])
    rows["example"] = one_line(federation.layout.described())
    for split in SPLITS:
        counts = federation.num_examples(split)
        rows[f"{split} examples"] = f"{counts.sum()} ({_range(counts)} per client)"
    return rows | {"hash": federation.hash}


def feature_columns(federation: "Federation") -> list[str] | None:
    """The columns of the table of which an example's numbers are, in their order; None: it was not made of a table."""
    named = federation.manifest["source"]["options"].get("features")
    shape = federation.example_shape
    size = int(np.prod(shape)) if isinstance(named, list) and not is_several(shape) else 0
    return list(named) if size and len(named) == size and all(isinstance(name, str) for name in named) else None


def _range(values: np.ndarray) -> str:
    low, high = values.min(), values.max()
    return str(low) if low == high else f"{low} to {high}"
