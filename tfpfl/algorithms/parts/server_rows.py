"""What a server keeps for every client: a row each. It costs I times the row, at the server and in every saved round.

Algorithms whose clients are sent messages of their own keep whole models this way: fine for the hundreds of
organizations of cross-silo learning, impossible for millions of phones. `check_table` says so before anything is run.
"""

import os
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Population

COPIES = 3  # of every table at a time: before a round, after it, and as it is saved


def check_table(population: Population, row_scalars: int, dtype, *, tables: int = 1) -> int:
    """Whether tables of a row for every client fit into this machine's memory.

    Args:
        row_scalars: numbers in a row, for example d.
        tables: of that size in the server's state.

    Returns:
        Bytes of all tables.

    Raises:
        ValueError: with the size and the limit.
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
    """Bytes that this process can still get: what the machine has left, or its control group."""
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
    """The rows of these clients, in the order of `population.client_ids`: (int32 rows, bool: is there one).

    A client from outside the population has none; its number is then that of some row, for a gather to be possible.
    """
    known = tf.constant(population.client_ids.astype(np.int32))
    rows = tf.minimum(tf.searchsorted(known, tf.reshape(client_ids, [-1])), len(population.client_ids) - 1)
    rows = tf.reshape(rows, tf.shape(client_ids))
    return rows, tf.equal(tf.gather(known, rows), client_ids)


def _text(size: int) -> str:
    return f"{size / 1e9:,.3g} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"
