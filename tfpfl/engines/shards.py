"""Divides the clients of a round into shards, for the engines that distribute a round over several machines."""


def shards(clients: int, *, number: int | None = None, size: int | None = None) -> list[range]:
    """Divides the positions 0..clients-1 of a cohort into consecutive ranges.

    The result depends on the arguments alone, so that sums are always added in the same order.

    Args:
        clients: r, the number of clients in the cohort.
        number: number of shards, at most one per client; their sizes differ by at most one.
        size: clients per shard; the last shard may be smaller. Give exactly one of `number` and `size`.

    Returns:
        One range of positions per shard.

    Examples:
        >>> shards(7, number=3), shards(7, size=3)
        ([range(0, 2), range(2, 4), range(4, 7)], [range(0, 3), range(3, 6), range(6, 7)])
    """
    if size is not None:
        return [range(start, min(start + size, clients)) for start in range(0, clients, size)]
    number = min(clients, number)
    ends = [clients * n // number for n in range(number + 1)]
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]
