"""The differential privacy (epsilon, delta) of a run, computed by the package dp-accounting."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpfl.checks import Unavailable, extra
from tfpfl.data.population import Population


class Privacy(NamedTuple):
    """The (epsilon, delta) of client-level differential privacy: neighbours differ in one client's whole data."""

    epsilon: float
    delta: float
    text: str  # the assumptions in words: rounds, noise multiplier, sampling
    released: float | None = None  # under secure aggregation: epsilon against those who do not know who took part


def privacy(
    noise: float,
    population: Population,
    rounds: int,
    *,
    delta: float | None = None,
    adaptive: bool = False,
    present: Sequence[int] | None = None,
) -> Privacy:
    """Computes the (epsilon, delta) of the updates that a run's clients sent, with dp-accounting's RDP accountant.

    It does not cover personal heads, which stay on the device, or the losses that clients report to this simulation.

    Args:
        noise: the noise multiplier: standard deviation of the noise / clipping norm.
        population: the I clients and their sampling. 'binomial' is Poisson sampling; neighbours differ by one client
            more or less. 'fixed' is sampling without replacement; in a neighbour one client is replaced, so that the
            sum changes by up to twice the norm. 'range' counts as if the client that is replaced took part in every
            round, unless everyone does; so does a fixed cohort of nearly everyone, for which this bound is smaller.
        rounds: the number of rounds so far.
        delta: default: 1 / I^1.1.
        adaptive: whether the aggregator is dp_adaptive. Its noisy count of clipped updates is included in `noise`.
        present: int [rounds], how many clients could be sampled in each round; default: all I in every round. With
            'fixed' sampling, a cohort that is rounded up or down counts as rounded up.

    Returns:
        The `Privacy`. With 'binomial' sampling a round may have no clients, and if all are asked, nobody may come. Such
        a round adds no noise, and everyone sees that nobody came. The chance of that, see `chance_of_no_clients`, is a
        part of delta: epsilon is that of what is left, and infinite if nothing is.

    Raises:
        Unavailable: dp-accounting is not installed.
    """
    dp_accounting = require_accounting()
    people, sampling = population.num_clients, population.sampling
    delta = default_delta(people) if delta is None else delta
    event = dp_accounting.GaussianDpEvent(noise)
    half = dp_accounting.GaussianDpEvent(noise / 2)  # if the sum's sensitivity is 2 clip, as where one is replaced
    bounds = [{event: rounds}]  # each {event: number of rounds}; the smallest epsilon holds
    relation, text = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, "every client in every round"
    if sampling.kind == "binomial":
        bounds = [{dp_accounting.PoissonSampledDpEvent(sampling.rate, event): rounds}]
        text = f"Poisson sampling at {sampling.rate:g}"
    elif sampling.kind == "fixed" and sampling.expected(people) < people:
        size = int(sampling.expected(people))
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        there = Counter([people] * rounds if present is None else present)
        sampled = {
            dp_accounting.SampledWithoutReplacementDpEvent(n, -(-size * n // people), half): times
            for n, times in there.items()
            if n  # a round without clients reveals nothing
        }
        bounds = [sampled, {half: sum(sampled.values())}]
        text = f"{size} of {people} clients without replacement"
        text += "" if set(there) == {people} else ", and as large a part while clients are away"
    elif sampling.kind == "range" and sampling.low < people:
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE  # one client more would take the place of another
        bounds = [{half: rounds}]
        text = f"{sampling.low} to {sampling.high} of {people} clients, as if each took part in every round"

    text += "; the clipping norm's estimate included" if adaptive else ""
    chance = chance_of_no_clients(population, [people] * rounds if present is None else present)
    found = math.inf
    if chance < delta:
        found = min(epsilon(bound.items(), delta - chance, neighboring_relation=relation) for bound in bounds)
    text += f"; no epsilon is promised{no_clients(population, chance)}" if found == math.inf else ""
    return Privacy(found, delta, f"{rounds} rounds, noise multiplier {noise:g}, {text}")


def epsilon(events: Iterable[tuple[Any, int]], delta: float, **how: Any) -> float:
    """Epsilon of events, [(event, how often)], by dp-accounting's RDP accountant, whose arguments are `how`."""
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(**how)
    for event, times in events:
        if times:
            accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))


def default_delta(people: int) -> float:
    """The delta of a run with so many clients, 1 / I^1.1: smaller than 1 / I, with which one client could be shown."""
    return people**-1.1


def chance_of_no_clients(population: Population, present: Sequence[int]) -> float:
    """A bound on the probability that some round has no clients, also with one client less.

    By so much delta grows. Take the rounds that have clients: with and without one more client, each is the same
    mixture of cohorts, and for every cohort the two are a pair of the sampled Gaussian mechanism. What is outside has
    at most this probability: all rounds of nobody, and those in which the one client came alone.

    It is 0 where a cohort is a part of the clients that is not drawn one by one. Neighbours then differ in whose data a
    client has, and not in who comes. If all are asked, they differ in one client more or less, as with Poisson
    sampling, and the rate is 1: only dropouts can leave a round without clients.

    Args:
        population: the clients, their sampling, and how often they arrive.
        present: int [rounds], how many clients could be sampled in each round. That is no secret: rounds for which it
            is 0 count for nothing.
    """
    rate = 1.0 if _asks_all(population) else population.sampling.rate
    if population.sampling.kind != "binomial" and not _asks_all(population):
        return 0.0
    arrival = np.ones(population.num_clients) if population.arrival is None else np.sort(population.arrival)
    absent = np.concatenate([[1.0], np.cumprod(1 - rate * arrival)])  # of those who come least
    return min(1.0, math.fsum(absent[n - 1] for n in present if n))


def _asks_all(population: Population) -> bool:
    """Whether every cohort is of all clients that are there."""
    people, sampling = population.num_clients, population.sampling
    if sampling.kind == "range":
        return sampling.low >= people
    return sampling.kind == "fixed" and sampling.expected(people) >= people


def no_clients(population: Population, chance: float) -> str:
    """What is said where `chance_of_no_clients` is not small."""
    all_asked = _asks_all(population) or population.sampling.rate == 1
    other = "fixed sampling of a part of them" if all_asked else "a larger participation, or fixed sampling"
    return (
        f": a round without clients adds no noise, which everyone sees, and the chance of one is up to {chance:.2g}. "
        f"Take more clients, or {other}"
    )


def require_accounting() -> Any:
    """Imports the package dp-accounting and returns the module.

    Raises:
        Unavailable: dp-accounting is not installed here; the message says how to install it.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise Unavailable(
            f"epsilon is computed by dp-accounting, which is not installed: {extra('dp')}; the import said: {error}"
        ) from error
    return dp_accounting
