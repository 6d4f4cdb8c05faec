"""The (epsilon, delta) of a run: of its private aggregator, or of the discrete Gaussian noise under secure aggregation.

Under secure aggregation every client adds a share of the noise, N_Z(0, sigma^2), to its integers. The sum of n shares
is nearly N_Z(0, n sigma^2):

    tau = 10 sum_{k=1}^{n-1} exp(-2 pi^2 sigma^2 k / (k + 1))
    the sum has Renyi differential privacy of any order a:  a / 2 (Delta / (sqrt(n) sigma) + tau sqrt(P))^2

of P numbers with the sensitivity Delta. This is the curve of Gaussian noise with the multiplier 1 / (Delta / (sqrt(n)
sigma) + tau sqrt(P)), so dp-accounting composes the rounds. With more than 10 units of noise, tau is below 1e-400.

Source:
    Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation,
    ICML 2021: theorem 9 (tau) and proposition 14 (the third bound).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import stats

from tfpfl.algorithms.contract import Algorithm, kinds
from tfpfl.algorithms.transforms.secure import CLIP, codec_of, quorum, weights_of
from tfpfl.data.population import Population, Sampling
from tfpfl.runs import participation
from tfpfl.runs.aggregators import PRIVATE
from tfpfl.runs.privacy import Privacy, default_delta, epsilon, privacy, require_accounting

if TYPE_CHECKING:
    from tfpfl.runs.run import Run

ORDERS = (*range(2, 129), 160, 192, 256, 512, 1024)  # integers, see `released`


class Noise(NamedTuple):
    """The noise of a run in integers."""

    sigma: float  # of every client's share
    sensitivity: float  # Delta, the largest L2 norm of one client's integers
    size: int  # P

    def multiplier(self, shares: int) -> float:
        """The noise multiplier of Gaussian noise that is at most as private as the sum of so many shares."""
        gap = gap_of(self.sigma, shares)
        return 1 / (self.sensitivity / (math.sqrt(shares) * self.sigma) + gap * math.sqrt(self.size))


def gap_of(sigma: float, shares: int) -> float:
    """tau: how far the sum of so many shares N_Z(0, sigma^2) is from one discrete Gaussian (theorem 9)."""
    return 10 * math.fsum(math.exp(-2 * (math.pi * sigma) ** 2 * k / (k + 1)) for k in range(1, shares))


def of_member(noise: Noise, shares: Sequence[int], delta: float) -> float:
    """Epsilon for a client that took part in rounds with so many shares of noise. That it did is no secret.

    Neighbours differ in whether this client's update is what it computed, or 0.
    """
    event = require_accounting().GaussianDpEvent
    events = [(event(noise.multiplier(n)), times) for n, times in Counter(shares).items()]
    return epsilon(events, delta) if events else 0.0


def released(noise: Noise, rate: float, shares: Sequence[int], delta: float) -> float:
    """Epsilon against those who see theta after every round, but not who took part; with Poisson sampling.

    The sampled discrete Gaussian has, at integer orders, the same Renyi divergence as the sampled Gaussian (Mironov,
    Talwar, Zhang 2019): the moments E_Q[(P / Q)^k] of integer orders k are equal, exp(k (k - 1) |d|^2 / (2 sigma^2)),
    because the shift k d is an integer. So only integer orders are used. The distance tau of P and Q from a discrete
    Gaussian adds at most 3 P tau in a round. The number of shares is taken as if it did not depend on the client. That
    a sum was opened is taken so, too: `chance_of_deciding` is what has to be taken from delta for it. And theta must
    not tell who took part, see `tells_who_came`.

    Args:
        noise: the noise.
        rate: the probability with which a client takes part in a round.
        shares: how many shares of noise the sum of each round had; 0 for a round without a sum.
        delta: the delta.
    """
    dp_accounting = require_accounting()
    events, more = [], 0.0
    for n, times in Counter(n for n in shares if n).items():
        event = dp_accounting.GaussianDpEvent(noise.multiplier(n))
        events.append((dp_accounting.PoissonSampledDpEvent(rate, event), times))
        more += 3 * noise.size * gap_of(noise.sigma, n) * times
    return epsilon(events, delta, orders=ORDERS) + more


def chance_of_deciding(population: Population, present: Sequence[int], threshold: float) -> float:
    """A bound on the probability that in some round it depended on one client whether the sum was opened.

    It depends on a client if the others are too few: their m members of a cohort drawn one by one, of which too few
    arrive for the `quorum` of m + 1. (Where even with the client they are too few, there is no sum in any case; such
    rounds count, too, so that this is a bound.) In an opened round of so few, a client took part with a larger
    probability than the rate: of three of ten clients that were drawn at 0.1, each is one with probability 0.3.

    Args:
        population: the clients, their sampling, and how often they arrive. All count as if they arrived as seldom as
            the one that does most seldom.
        present: int [rounds], how many clients could be sampled in each round.
        threshold: F, see `quorum`.
    """
    arrival = 1.0 if population.arrival is None else float(np.min(population.arrival))

    def of_round(people: int) -> float:
        others = np.arange(people)
        needed = np.array([quorum(m + 1, threshold) for m in others.tolist()])
        drawn = stats.binom.pmf(others, people - 1, population.sampling.rate)
        return float(drawn @ stats.binom.cdf(needed - 1, others, arrival))

    return min(1.0, math.fsum(times * of_round(n) for n, times in Counter(present).items() if n))


def tells_who_came(method: Algorithm) -> bool:
    """Whether theta tells who took part in a round, with the weights of an algorithm, before `secured`.

    A mean is the noisy sum, divided by the sum of the weights. All know the noise's size and, as N_i is no secret, the
    weights. So the size of the noise in a step tells this divisor, and if weights differ, it tells whose they are.
    """
    if "mean" not in kinds(method):
        return False
    weights = weights_of(method)
    return bool(np.ptp(weights) > 1e-6 * np.max(weights))


def of_rounds(
    noise: Noise,
    shares: Sequence[int],
    visits: Mapping[int, Sequence[int]] | None,
    sampling: Sampling,
    delta: float,
    deciding: float = 0.0,
    tells: bool = False,
) -> Privacy:
    """The privacy of rounds with these shares of noise.

    Args:
        noise: the noise.
        shares: how many shares the sum of each round had.
        visits: {client: the places in `shares` of the rounds in which it took part}; None: unknown, so that a client
            counts as if it had taken part in all.
        sampling: how cohorts were drawn.
        delta: the delta.
        deciding: `chance_of_deciding`, a part of delta. If it is all of it, nothing is said of those who do not know
            who took part.
        tells: `tells_who_came`. If it does, all know who took part.
    """
    spent = {i: math.fsum(noise.multiplier(shares[t]) ** -2 for t in some) for i, some in (visits or {}).items()}
    if visits is None:
        own = [n for n in shares if n]
    else:
        own = [shares[t] for t in visits[max(spent, key=lambda i: (spent[i], -i))]] if spent else []
    text = f"against the server and all others, for the client that took part most often, in {len(own)} rounds"
    more = None
    if sampling.kind == "binomial" and tells:
        text += (
            "; nothing smaller is promised against those who do not know who took part, because they see it: the "
            "server divides by the sum of the clients' weights, which differ. Give --weighting uniform, if the method "
            "has it"
        )
    elif sampling.kind == "binomial" and deciding < delta:
        more = released(noise, sampling.rate, shares, delta - deciding)
        text += f"; epsilon = {more:.3g} against those who know neither who took part in which round nor how many did"
    elif sampling.kind == "binomial":
        text += (
            "; nothing smaller is promised against those who do not know who took part, because rounds may be so small "
            f"that it depends on one client whether there is a sum: the chance is up to {deciding:.2g}"
        )
    return Privacy(of_member(noise, own, delta), delta, text, more)


def privacy_of(run: "Run") -> Privacy | None:
    """The (epsilon, delta) of a run's rounds so far.

    None before round 1, without a private aggregator or noise, and of a method whose clients send nothing.
    """
    config, population, rounds = run.config, run.population, run.store.round_num

    def present() -> list[int]:
        return [len(run.availability.present(t, population.client_ids)) for t in range(1, rounds + 1)]

    if not rounds or config.method.up == "0":
        return None
    if config.secure_noise is not None:
        method = run.recipe.method(run.model, population)
        codec, drawn = codec_of(method, config.secure_clip or CLIP, config.secure_noise)
        assert drawn is not None
        history = run.store.history()
        shares = [int(row["clients"]) - int(row.get("rejected") or 0) for row in history]
        visits = participation.visits(config, history, run.store.evaluations(), run.work_of_clients)
        noise, delta = Noise(drawn.sigma, codec.sensitivity, codec.size), default_delta(population.num_clients)
        drawn_alone = population.sampling.kind == "binomial"
        deciding = chance_of_deciding(population, present(), config.secure_threshold) if drawn_alone else 0.0
        tells = drawn_alone and tells_who_came(method)
        return of_rounds(noise, shares, visits, population.sampling, delta, deciding, tells)
    if config.aggregator not in PRIVATE:
        return None
    multiplier, adaptive = config.aggregator_arguments()["noise"], config.aggregator == "dp_adaptive"
    return privacy(multiplier, population, rounds, adaptive=adaptive, present=present())
