"""How a cohort is cut into shards, for engines that hand a round's work to several machines."""


def shards(clients: int, *, number: int | None = None, size: int | None = None) -> list[range]:
    """Places in the cohort, neighbours together: a function of the arguments alone, as the order of the sums must be.

    Args:
        clients: r, in the cohort.
        number: of shards, at most one a client; their sizes differ by one at most.
        size: of every shard but the last, which may be smaller. Exactly one of `number` and `size` is given.

    Examples:
        >>> shards(7, number=3), shards(7, size=3)
        ([range(0, 2), range(2, 4), range(4, 7)], [range(0, 3), range(3, 6), range(6, 7)])
    """
    if size is not None:
        return [range(start, min(start + size, clients)) for start in range(0, clients, size)]
    number = min(clients, number)
    ends = [clients * n // number for n in range(number + 1)]
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]
