"""Differential privacy of a run, accounted for by dp-accounting."""

from typing import NamedTuple

from tfpfl.checks import Unavailable


class Privacy(NamedTuple):
    """(epsilon, delta) of what the server released, for whole clients: with or without one of them."""

    epsilon: float
    delta: float
    text: str  # how it was counted


def require_accounting():
    """dp-accounting, or what to do without it.

    Raises:
        RuntimeError: it is not installed here.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise Unavailable("epsilon is counted by dp-accounting: pip install 'tfpfl[dp]'") from error
    return dp_accounting


def privacy(noise: float, population, rounds: int, *, delta: float | None = None, adaptive: bool = False) -> Privacy:
    """The (epsilon, delta) of a run's backbone, or whatever its clients send, by dp-accounting's RDP accountant.

    Args:
        noise: the noise multiplier.
        population: with the sampling. 'binomial' is counted as Poisson sampling, with the neighbour that lacks one
            client; 'fixed' as sampling without replacement, with the neighbour in which one client is another, so
            that the sum may change by twice the norm; 'range' without amplification, as if everyone always came.
        rounds: that were made.
        delta: default: 1 / I^1.1.
        adaptive: of dp_adaptive, whose noisy count of clipped updates is a part of the same multiplier.

    Personal heads and the losses that clients report are not covered: heads stay on the device; losses are in this
    simulation's logs.

    Raises:
        RuntimeError: dp-accounting is not installed.
    """
    dp_accounting = require_accounting()
    from dp_accounting.rdp import RdpAccountant

    people, sampling = population.num_clients, population.sampling
    delta = people**-1.1 if delta is None else delta
    event = dp_accounting.GaussianDpEvent(noise)
    relation, text = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, "every client in every round"
    if sampling.kind == "binomial":
        event = dp_accounting.PoissonSampledDpEvent(sampling.rate, event)
        text = f"Poisson sampling at {sampling.rate:g}"
    elif sampling.kind == "fixed" and sampling.expected(people) < people:
        size = int(sampling.expected(people))
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        half = dp_accounting.GaussianDpEvent(noise / 2)  # of the sum's sensitivity, which is 2 clip here
        event = dp_accounting.SampledWithoutReplacementDpEvent(people, size, half)
        text = f"{size} of {people} clients without replacement"
    accountant = RdpAccountant(neighboring_relation=relation)
    accountant.compose(event, rounds)
    more = "; the clipping norm's estimate included" if adaptive else ""
    return Privacy(
        float(accountant.get_epsilon(delta)), delta, f"{rounds} rounds, noise multiplier {noise:g}, {text}{more}"
    )
