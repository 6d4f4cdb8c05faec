"""This method with that knob is that method: in float64, after three rounds, in the local engine.

A row: (method, knobs), (method, knobs), who takes part, and what of every client's personal model is the same.
"""

import pytest

from helpers.marks import slow_but
from helpers.toys import distance, run, toy
from tfpfl.algorithms import build_algorithm
from tfpfl.models.weights import Weights

EVERYONE, SOME = None, [0, 2, 3]
BATCHES = {"epochs": 2, "batch_size": 4, "momentum": 0.5}
SGD = {"server_opt": "sgd", "rho": 0.3}
UNIFORM = {"weighting": "uniform"}

LIMITS = [
    # FedAvg and its relatives
    (("fedavg", {"eta": 0.3, "epochs": 3}), ("fedavg", {"eta": 0.3, "steps": 3}), SOME, "all"),
    (("fedavg", {"eta": 0.3, "epochs": 3, "batch_size": 100}), ("fedavg", {"eta": 0.3, "steps": 3}), SOME, "all"),
    (("fedsgd", {"eta": 0.3}), ("fedavg", {"eta": 0.3, "steps": 1}), SOME, "all"),
    (("fedprox", {"mu": 0.0, "eta": 0.3, **BATCHES}), ("fedavg", {"eta": 0.3, **BATCHES}), SOME, "all"),
    (("fedprox", {"mu": 5.0, "eta": 0.3, "steps": 1}), ("fedavg", {"eta": 0.3, "steps": 1}), SOME, "all"),
    (("fedavg_ft", {"steps_ft": 0, "eta": 0.3, **BATCHES}), ("fedavg", {"eta": 0.3, **BATCHES}), SOME, "all"),
    (("fedprox_ft", {"mu": 0.0, "eta": 0.3, **BATCHES}), ("fedavg_ft", {"eta": 0.3, **BATCHES}), SOME, "all"),
    (
        ("fedavg_ft", {"eta": 0.0, "eta_ft": 0.3, "steps_ft": 4}),
        ("local", {"eta": 0.3, "steps": 4}),
        "one round",
        "all",
    ),
    (("fedavg", {"eta": 0.3, **BATCHES}), ("local", {"eta": 0.3, **BATCHES}), "one client", "all"),
    (("ditto", {"lam": 0.0, "eta": 0.3, **BATCHES}), ("local", {"eta": 0.3, **BATCHES}), SOME, "all"),
    (("scaffold", {"eta": 0.3, "steps": 5}), ("fedavg", {"eta": 0.3, "steps": 5, **UNIFORM}), "one round", "all"),
    (("scaffold", {"eta": 0.3, "steps": 5}), ("fedavg", {"eta": 0.3, "steps": 5}), "one client", "all"),
    (("apfl", {"mixing": 0.0, "eta": 0.3, **BATCHES}), ("fedavg", {"eta": 0.3, **BATCHES}), SOME, "all"),
    (("apfl", {"mixing": 1.0, "eta": 0.3, **BATCHES}), ("local", {"eta": 0.3, **BATCHES}), SOME, "all"),
    (
        ("per_fedavg", {"eta_inner": 0.0, "beta": 0.3, "steps": 4}),
        ("fedavg", {"eta": 0.3, "steps": 4, **UNIFORM}),
        SOME,
        "all",
    ),
    (
        ("per_fedavg", {"variant": "hf", "eta_inner": 0.0, "beta": 0.3, "steps": 4}),
        ("per_fedavg", {"eta_inner": 0.0, "beta": 0.3, "steps": 4}),
        SOME,
        "all",
    ),
    (("fedala", {"eta_w": 0.0, "eta": 0.3, **BATCHES}), ("fedavg", {"eta": 0.3, **BATCHES}), SOME, "all"),
    (("lg_fedavg", {"pretrain_rounds": 9, "eta": 0.3, **BATCHES}), ("fedavg", {"eta": 0.3, **BATCHES}), SOME, "all"),
    # private bodies and a shared head
    (("lg_fedavg", {"eta": 0.3, **BATCHES}), ("local", {"eta": 0.3, **BATCHES}), "one client", "all"),
    # a shared body and private heads
    (("pflego", {"beta": 0.0, "tau": 9, "rho": 0.01}), ("pflego", {"tau": 1, "rho": 0.01}), SOME, "all"),
    (("pflego", {"weighting": "sampled", "rho": 0.01}), ("pflego", {"rho": 0.01}), EVERYONE, "all"),
    (("pflego", {"tau": 1, "rule": "eq3", **SGD}), ("fedper", {"steps": 1, "eta": 0.3}), EVERYONE, "all"),
    (("pflego", {"tau": 6, "beta": 0.4, **SGD}), ("fedrecon", {"tau": 5, "beta": 0.4, **SGD}), "one round", "theta"),
    (
        ("pflego", {"tau": 6, "beta": 0.4, **SGD}),
        ("fedrep", {"tau_h": 5, "tau_b": 1, "eta_h": 0.4, "eta_b": 0.3}),
        "one round",
        "theta",
    ),
    (
        ("fedrecon", {"tau": 5, "beta": 0.4, **SGD}),
        ("fedrep", {"tau_h": 5, "tau_b": 1, "eta_h": 0.4, "eta_b": 0.3}),
        SOME,
        "all",
    ),
    (("fedper", {"eta": 0.3, **BATCHES}), ("local", {"eta": 0.3, **BATCHES}), "one client", "all"),
    (("pflego", {"tau": 1, "rule": "eq3", **SGD}), ("local", {"eta": 0.3, "steps": 1}), "one client", "all"),
]


def personal_models(method, data, cohort, rounds):
    """The newest (theta, head) of every client."""
    name, knobs = method
    algorithm = build_algorithm(name, data.model, data.population, **knobs)
    server, states = run(algorithm, data, rounds=rounds, cohort=cohort)
    message = algorithm.message(server)
    return [algorithm.personal_model(message, states[i], data.visit(i)) for i in data.ids]


NAMES = [f"{a[0]}-{b[0]}" for a, b, *_ in LIMITS]
PFLEGO = [limit for limit in LIMITS if limit[0][0] == "pflego"]  # the others are written out in files of their own too


@pytest.mark.parametrize(("method", "other", "cohort", "same"), slow_but(LIMITS, *PFLEGO), ids=NAMES)
def test_limit(method, other, cohort, same):
    """Heads start at 0, so that shared and private ones start alike; three classes for all, for the same reason."""
    only = cohort == "one client"
    data = toy(*(((9,), (3,)) if only else ((6, 9, 4, 7, 5), (3,) * 5)), head_init="zeros")
    rounds = 1 if cohort == "one round" else 3
    cohort = None if isinstance(cohort, str) else cohort
    ours, theirs = (personal_models(m, data, cohort, rounds) for m in (method, other))
    if same == "theta":
        ours, theirs = [w.theta for w in ours], [w.theta for w in theirs]
    assert distance(ours, theirs) < 1e-9
    assert (
        distance(ours[0], data.model.theta() if same == "theta" else start(data)) > 1e-3
    )  # somewhere else than at first


def start(data):
    """Before round 1."""
    return Weights(data.model.theta(), data.model.head(data.population.info(0)))
