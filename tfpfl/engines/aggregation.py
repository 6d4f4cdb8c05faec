"""Combines the updates of a round's clients: a weighted mean, a weighted sum, or all updates as rows of one array."""

from typing import Any, NamedTuple

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, ClientOutput, Rows, kinds
from tfpfl.models import tree


class Contribution(NamedTuple):
    """What one client adds to the aggregate. `sums` and `weight` are summed over clients; `rows` are stacked."""

    sums: tuple  # weight * part, for every part of the update whose kind is 'mean' or 'sum'
    weight: Any  # float []
    rows: tuple  # the parts whose kind is 'rows', not multiplied by the weight


def contribution(algorithm: Algorithm, output: ClientOutput) -> Contribution:
    """Splits one client's update into weighted parts to add and rows to stack."""
    whole = isinstance(algorithm.aggregate, str)
    parts = list(zip(kinds(algorithm), [output.update] if whole else output.update, strict=True))
    times = weighted if algorithm.sent is None else tree.scale  # what `sent` makes stays of integers; its weight is 1
    return Contribution(
        sums=tuple(times(output.weight, part) for kind, part in parts if kind != "rows"),
        weight=output.weight,
        rows=tuple(part for kind, part in parts if kind == "rows"),
    )


def weighted(weight: Any, part: Any) -> Any:
    """A part of an update times the weight. Integers get the weight's dtype: in theirs, a weight of 0.5 would be 0."""

    def real(x: Any) -> Any:
        return tf.cast(x, weight.dtype) if x.dtype.is_integer and weight.dtype.is_floating else x

    return tree.scale(weight, tf.nest.map_structure(real, part))


def finish(algorithm: Algorithm, total: Contribution, client_ids: Any) -> Any:
    """Makes the aggregate that `server_update` receives: divides means by the total weight and sorts rows by client.

    Args:
        algorithm: its `aggregate` says which parts are means, sums or rows.
        total: the summed contributions; `rows` are stacked on a first axis [r], in the order of `client_ids`.
        client_ids: int32 [r], the clients of the rows; ignored if there are no rows.

    Returns:
        One part if `algorithm.aggregate` is a string, otherwise a NamedTuple of parts. A mean with total weight 0 is 0.
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
