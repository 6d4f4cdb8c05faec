"""Tables on the server, with one row for every client.

Methods with a message per client keep whole models in such tables, in memory and in every saved round. This is possible
for hundreds of organizations (cross-silo learning), but not for millions of phones. `check_table` tests the size before
a run starts.
"""

import os
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Population

COPIES = 3  # copies of a table in memory at once: before a round, after it, and for saving


def check_table(population: Population, row_scalars: int, dtype, *, tables: int = 1) -> int:
    """Checks that the server's tables fit into the memory of this machine.

    Args:
        population: the clients; every table has a row for each.
        row_scalars: the number of numbers in a row, for example d.
        dtype: the dtype of the numbers.
        tables: the number of such tables in the server's state.

    Returns:
        The bytes of all tables.

    Raises:
        InvalidArgument: `COPIES` times the tables is more than the available memory.
    """
    size = population.num_clients * int(row_scalars) * np.dtype(dtype).itemsize * tables
    limit = available_memory()
    if COPIES * size > limit:
        raise InvalidArgument(
            f"the server keeps {tables} row{'s' if tables > 1 else ''} of {row_scalars:,} numbers for each of "
            f"{population.num_clients:,} clients: {_text(size)}, and {_text(COPIES * size)} during a round (before it, "
            f"after it, and as it is saved), but {_text(limit)} of memory are available. Take fewer clients, a smaller "
            "network, or an algorithm that sends one message to all"
        )
    return size


def available_memory() -> int:
    """The memory in bytes that is available to this process: free on the machine, but at most its control group's
    limit.
    """
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        sizes = dict(line.split(":") for line in meminfo.read_text().splitlines())
        found.append(1024 * int(sizes["MemAvailable"].split()[0]))
    group = Path("/sys/fs/cgroup/memory.max")
    if group.exists() and (limit := group.read_text().strip()) != "max":
        found.append(int(limit))
    return min(found)


def row_of(population: Population, client_ids):
    """The rows of clients in tables whose rows are in the order of `population.client_ids`.

    Args:
        population: the clients of the table.
        client_ids: int32, of any shape.

    Returns:
        (rows int32, known bool), both in the shape of `client_ids`. A client from outside the population has known =
        False and the number of some other row, so that gathering rows works.
    """
    known = tf.constant(population.client_ids.astype(np.int32))
    rows = tf.minimum(tf.searchsorted(known, tf.reshape(client_ids, [-1])), len(population.client_ids) - 1)
    rows = tf.reshape(rows, tf.shape(client_ids))
    return rows, tf.equal(tf.gather(known, rows), client_ids)


def _text(size: int) -> str:
    return f"{size / 1e9:,.3g} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"
