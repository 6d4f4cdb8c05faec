"""Options that change a client's graph, such as mini-batches, stragglers and splits, under TFF and in process.

The battery over `ALGORITHMS` does so for full batches, and tests more.
"""

import pytest

from helpers.marks import slow_but
from helpers.rounds import after_rounds
from helpers.toys import backbone, distance, on_disk, visits_by_id
from tfpfl.algorithms import build_algorithm
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.scoring import Scorer
from tfpfl.models import SplitModel

BATCHES = {"epochs": 2, "batch_size": 4, "momentum": 0.5}
OPTIONS = {
    "fedprox": BATCHES | {"mu": 0.5, "straggler": 0.5, "straggler_policy": "drop"},
    "fedavg_ft": BATCHES | {"part": "head"},
    "fedrep": {"tau_h": 2, "tau_b": 1, "unit": "epochs", "batch_size": 4},
    "fedrecon": {"tau": 3, "reset_head": True, "query_fraction": 0.4, "k_theta": 2},
    "ditto": BATCHES | {"lam": 20.0, "init": "first_broadcast", "anchor": "local", "implicit_prox": True},
    "layerwise": BATCHES | {"scheme": "pm_a", "penalty_kind": "gated", "straggler": 0.5, "momentum": 0.0},
    "scaffold": {"epochs": 2, "batch_size": 4, "option": "I", "eval_model": "local"},
    "fedper": BATCHES | {"keep_momentum": True},
    "feddyn": BATCHES | {"dyn": 1.0, "implicit_prox": True, "keep_momentum": True},
    "pgfedmo": BATCHES | {"keep_momentum": True, "init": "newest"},
    "lg_fedavg": BATCHES | {"pretrain_rounds": 1, "new_body": "average"},
    "fedrod": BATCHES | {"init": "zeros", "eta_p": 0.02},
    "pfedme": {"epochs": 1, "batch_size": 4, "implicit_prox": True, "weight_decay": 0.1},
    "apfl": BATCHES | {"eta_a": 0.5, "init": "first_broadcast"},
    "feddbe": BATCHES | {"mu": 0.3, "kappa": 5.0, "agreement_rounds": 2},
    "fedas": BATCHES | {"batch_size_align": 3, "fisher": "examples", "init": "first_broadcast"},
    "fedcp": BATCHES | {"lam": 0.3, "weighting": "uniform"},
    "gpfl": BATCHES | {"lam": 0.3, "conditions": "trained", "head_init": "zeros"},
    "fedala": BATCHES | {"p": 2, "s": 0.5, "max_epochs": 12},
    "per_fedavg": {"epochs": 2, "batch_size": 2, "variant": "hf", "adapt_batch_size": 3},
}
COHORTS = [[0, 2, 3], [1, 2], [0, 1, 2, 3, 4]]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("options") / "federation")


@pytest.mark.parametrize("name", slow_but(OPTIONS, "fedprox"))
def test_both_engines_agree(tff, federation, name):
    from tfpfl.engines.tff.evaluation import federated_evaluation
    from tfpfl.engines.tff.process import federate

    algorithm = build_algorithm(
        name, SplitModel(backbone("float32")), federation.population(shared_slots=True), **OPTIONS[name]
    )
    server, states = after_rounds(Simulation(algorithm, federation), algorithm, COHORTS)
    assert distance(after_rounds(federate(algorithm, federation), algorithm, COHORTS), (server, states)) < 1e-5
    ids = COHORTS[-1]
    visits, heads = visits_by_id(algorithm.population, ids, 9), [states[i] for i in ids]
    expected = Scorer(algorithm, federation, ["test"])(server, heads, visits)
    for found, wanted in zip(
        federated_evaluation(algorithm, federation, ["test"])(server, heads, visits), expected, strict=True
    ):
        assert distance(dict(found), dict(wanted)) < 1e-5
