"""How the updates of a cohort become one: a weighted mean, a weighted sum, or the rows themselves."""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput, Rows, kinds
from tfpfl.models import tree


class Contribution(NamedTuple):
    """What one client adds. Contributions are added field by field, except rows, which are put side by side."""

    sums: tuple  # weight * part, for every part of kind 'mean' or 'sum'
    weight: Any  # float []
    rows: tuple  # the parts of kind 'rows', unweighted


def contribution(algorithm: Algorithm, output: ClientOutput) -> Contribution:
    """One client's part of the aggregate."""
    whole = isinstance(algorithm.aggregate, str)
    parts = list(zip(kinds(algorithm), [output.update] if whole else output.update, strict=True))
    return Contribution(
        sums=tuple(tree.scale(output.weight, part) for kind, part in parts if kind != "rows"),
        weight=output.weight,
        rows=tuple(part for kind, part in parts if kind == "rows"),
    )


def finish(algorithm: Algorithm, total: Contribution, client_ids):
    """The aggregate that `server_update` receives.

    Args:
        total: summed contributions; its rows stacked on a first axis [r], in the order of `client_ids`.
        client_ids: int32 [r]; used only where there are rows, which are then sorted by it.
    """
    sums, rows, values = iter(total.sums), iter(total.rows), []
    for kind in kinds(algorithm):
        if kind == "rows":
            order = tf.argsort(client_ids)
            part = tf.nest.map_structure(lambda leaf: tf.gather(leaf, order), next(rows))  # noqa: B023
            values.append(Rows(tf.gather(client_ids, order), part))
        elif kind == "sum":
            values.append(next(sums))
        else:
            mean = tf.nest.map_structure(lambda x: tf.math.divide_no_nan(x, tf.cast(total.weight, x.dtype)), next(sums))
            values.append(mean)
    return values[0] if isinstance(algorithm.aggregate, str) else type(algorithm.aggregate)(*values)
