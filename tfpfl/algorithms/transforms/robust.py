"""Robust statistics instead of the mean of a cohort's updates: the coordinate-wise median and trimmed mean."""

from collections.abc import Callable

import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm, check_no_balance, kinds
from tfpfl.algorithms.exchanges import on_both
from tfpfl.algorithms.transforms.along import AlongWith
from tfpfl.algorithms.transforms.normalization import check_not_shared
from tfpfl.checks import InvalidArgument
from tfpfl.models import tree


def median(algorithm: Algorithm) -> Algorithm:
    """The algorithm with the coordinate-wise median of the cohort's updates instead of their weighted mean.

    All clients count alike, except that an update of weight 0 is left out. In place of a weighted sum, the server gets
    the sum of the weights times the median. In a round with two exchanges, this holds for both.

    Raises:
        InvalidArgument: the server needs every client's own update (aggregate 'rows'), or it keeps a sum of what the
            clients keep (`Algorithm.balance`).
    """
    return _with_statistic(algorithm, lambda rows: _trimmed(rows, 0.5))


def trimmed_mean(algorithm: Algorithm, *, trim: float = 0.1) -> Algorithm:
    """The algorithm with the coordinate-wise trimmed mean of the cohort's updates instead of their weighted mean.

    Args:
        algorithm: any `Algorithm` whose updates are added up.
        trim: the fraction of the smallest and of the largest values of each coordinate that is left out, in [0, 0.5).
            An update of weight 0 is left out, too.

    Raises:
        InvalidArgument: trim is outside [0, 0.5); the server needs every client's own update (aggregate 'rows'); or it
            keeps a sum of what the clients keep (`Algorithm.balance`).
    """
    if not 0 <= trim < 0.5:
        raise InvalidArgument(f"trim must lie in [0, 0.5), found {trim}")
    return _with_statistic(algorithm, lambda rows: _trimmed(rows, trim))


def _trimmed(rows, trim: float):
    """[r, ...] -> [...]: the trimmed mean of every coordinate. trim=0.5 leaves one or two values: the median."""
    number = tf.shape(rows)[0]  # 0.29 * 100 is 28.999999999999996
    cut = tf.minimum(tf.cast(tf.floor(trim * tf.cast(number, tf.float64) + 1e-9), tf.int32), (number - 1) // 2)
    return tf.reduce_mean(tf.sort(rows, axis=0)[cut : number - cut], axis=0)


def _with_statistic(algorithm: Algorithm, statistic: Callable) -> Algorithm:
    if algorithm.first is not None:
        return on_both(algorithm, lambda exchange: _with_statistic(exchange, statistic))
    sent = kinds(algorithm)
    if "rows" in sent:
        raise InvalidArgument(
            "median and trimmed_mean are for updates that are added up, but in this method the server sees every "
            "client's own. Against broken clients, take --on-broken reject (in Python the transform `screened`), which "
            "leaves out work that is not finite"
        )
    check_no_balance(algorithm, "a median or a trimmed mean")
    check_not_shared(algorithm, "a median or a trimmed mean")
    weighed = AlongWith(algorithm.aggregate, "weight")
    rows = "rows" if isinstance(algorithm.aggregate, str) else ("rows",) * len(sent)

    def client_update(message, state, data):
        output = algorithm.client_update(message, state, data)
        weight = tree.as_tensor(output.weight, algorithm.model.dtype)
        return output._replace(update=weighed.put_on(output.update, weight), weight=weight)

    def server_update(server, aggregated, total):
        counts = tf.where(aggregated.weight.values > 0)[:, 0]  # FedProx gives a straggler that it drops the weight 0

        def of_rows(rows):
            rows = tf.cast(rows, algorithm.model.dtype) if rows.dtype.is_integer else rows  # their mean may be none
            return statistic(tf.gather(rows, counts))

        def of(kind, part):
            value = tf.nest.map_structure(of_rows, part.values)
            return tree.scale(total, value) if kind == "sum" else value

        values = aggregated._make([*map(of, sent, aggregated[:-1]), total])
        return algorithm.step(server, weighed.take_off(values), total)

    def local_model(message, output):
        return algorithm.local_model(message, output._replace(update=weighed.take_off(output.update)))

    return algorithm._replace(
        client_update=client_update,
        server_update=server_update,
        local_model=local_model,
        aggregate=weighed.put_on(rows, "rows"),
        one_pass=None,
    )
