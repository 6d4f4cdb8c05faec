"""Since which round each client has taken part: a client is *seen* once the server has used its work in some round.

A client that is sampled but drops out, comes too late, is rejected or is a straggler that FedProx drops is not seen by
that. Nothing is stored for this. The clients of every round are drawn again from the seed, and compared with what the
run has saved: how many clients a round had, and which of them were scored. So it is also known for runs of older
versions. Only rounds on devices say who came, in the entry `came` of their history.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tfpfl.data.population import Population
from tfpfl.data.randomness import client_key
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import LOCAL_COPY, Score

SIDES_TOLD = (  # for the captions of tables and plots
    "Seen: the server had used the client's work in some round so far; never seen: it had not. A mean covers several "
    "rounds: a client that was first seen in one of them counts as never seen in the rounds before."
)
_REJECTED = re.compile(r"(?:^|; )(\d+): ")  # how `Training` writes the clients whose work it rejected


def took_part(
    config: RunConfig,
    history: Sequence[Mapping[str, Any]],
    evaluations: Iterable[Score],
    work: np.ndarray | None = None,
) -> dict[int, int] | None:
    """{client id: the first round in which the server used its work}, without clients that never took part.

    Arguments and result are those of `visits`.
    """
    found = visits(config, history, evaluations, work)
    return None if found is None else {i: history[some[0]]["round"] for i, some in found.items()}


def visits(
    config: RunConfig,
    history: Sequence[Mapping[str, Any]],
    evaluations: Iterable[Score],
    work: np.ndarray | None = None,
) -> dict[int, list[int]] | None:
    """{client id: the places in `history` of the rounds in which the server used its work}, ascending.

    Args:
        config: the resolved configuration of the run.
        history: one row for each round.
        evaluations: the scores of the run.
        work: float [I], every training client's number of examples times its passes through the backbone. It is needed
            only if the run has a virtual clock.

    Returns:
        None if it cannot be known: the run has a virtual clock, `work` is not given and some round was not evaluated;
        or what is drawn is not what was saved, as in a loop of one's own with other cohorts.
    """
    ids = config.training_ids(config.clients or 0, config.data_seed or 0)
    reported: dict[int, set[int]] = {}
    for e in evaluations:
        if e.model == LOCAL_COPY:
            reported.setdefault(e.round_num, set()).add(e.client_id)
    try:
        population = Population(np.ones(len(ids)), np.ones(len(ids)), sampling=config.sampling_plan(), client_ids=ids)
    except ValueError:  # a configuration that no run can have
        return None
    found: dict[int, list[int]] = {}
    for place, row in enumerate(history):
        t = row["round"]
        rejected = {int(i) for i in _REJECTED.findall(str(row.get("rejected_clients") or ""))}
        told = row.get("came")  # a device that came may have sent no scores, such as one without test examples
        came = _came(config, population, t, work) if told is None else set(map(int, told.split()))
        if row.get("too_few") is not None:  # under secure aggregation: nothing could be used
            came = set()
        if came is None:
            came = reported[t] | rejected if t in reported else None if row["clients"] else set()
        if came is None or len(came) != row["clients"]:
            return None
        if told is None and t in reported and reported[t] != came - rejected:
            return None
        for i in came - rejected - _dropped_stragglers(config, came, t):
            found.setdefault(i, []).append(place)
    return found


def _came(config: RunConfig, population: Population, t: int, work: np.ndarray | None) -> set[int] | None:
    """The clients whose work came back in round t; None if the virtual clock decides and `work` is unknown."""
    availability = config.availability()
    if work is None:
        if availability.seconds:
            return None
        work = population.num_examples  # without a clock it says nothing
    return set(availability.of_round(config.seed, t, population, work).came.tolist())


def _dropped_stragglers(config: RunConfig, came: set[int], t: int) -> frozenset[int]:
    """Those of the clients of round t whose work counts nothing, by FedProx's straggler_policy='drop'."""
    probability = config.hyperparameters.get("straggler")
    if config.hyperparameters.get("straggler_policy") != "drop" or not probability or not came:
        return frozenset()
    return _stragglers(config.seed, t, tuple(sorted(came)), float(probability))


@lru_cache(100_000)
def _stragglers(seed: int, t: int, ids: tuple[int, ...], probability: float) -> frozenset[int]:
    from tfpfl.algorithms.parts.local_training import which_straggle  # with TensorFlow: only where it is needed

    late = which_straggle(client_key(seed, t, ids), probability).numpy()
    return frozenset(np.array(ids)[late].tolist())


def counts(first: Mapping[int, int] | None, num_clients: int, round_num: int) -> tuple[int, int] | None:
    """(number of clients that had taken part after a round, number of those that had not); None if unknown.

    Args:
        first: from `took_part`.
        num_clients: number of clients that train.
        round_num: the round.
    """
    if first is None:
        return None
    seen = sum(t <= round_num for t in first.values())
    return seen, num_clients - seen
