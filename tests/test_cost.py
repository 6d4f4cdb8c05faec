"""Passes are counted while a visit runs; here against what the papers' pseudo-code says."""

import numpy as np
import pytest
from toys import backbone

from tfpfl.algorithm import ClientData, Population
from tfpfl.algorithms import build_algorithm
from tfpfl.cost import Passes, count_passes
from tfpfl.models import SplitModel
from tfpfl.sampling import client_key

N = 24


@pytest.fixture(scope="module")
def model():
    return SplitModel(backbone("float32"))


def passes(model, name, **hyperparameters) -> Passes:
    population = Population([N, N], [3, 3])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, *model.input_shape)).astype(np.float32)
    data = ClientData(x, rng.integers(0, 3, N).astype(np.int32), population.info(0), client_key(0, 1, [0])[0])
    return count_passes(lambda m: build_algorithm(name, m, population, **hyperparameters), model, data)


@pytest.mark.parametrize("tau", [1, 5, 50])
def test_pflego_takes_one_pass_each_way_for_any_tau(model, tau):
    assert passes(model, "pflego", tau=tau) == Passes(1, 1)


def test_pflego_as_the_paper_counts_it(model):
    assert passes(model, "pflego", tau=50, recompute=True) == Passes(2, 1)
    assert passes(model, "pflego", tau=50, chunk=7) == Passes(2, 1)  # chunks do not change the sum


@pytest.mark.parametrize("name", ["fedavg", "local", "fedper", "fedprox"])
def test_full_batch_methods_take_a_pass_each_way_a_step(model, name):
    assert passes(model, name, steps=6) == Passes(6, 6)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("scaffold", {}, 6),  # the control variate is what the steps have seen
        ("scaffold", {"option": "I"}, 7),
        ("feddyn", {}, 6),
        ("lg_fedavg", {}, 6),
        ("fedrod", {}, 6),  # both heads in one pass
        ("pfedme", {"inner_steps": 4}, 24),
        ("apfl", {}, 12),  # at w and at the mixture
        ("per_fedavg", {"variant": "fo"}, 12),
        ("per_fedavg", {"variant": "hf"}, 24),
        ("per_fedavg", {"variant": "hf", "batch_size": 6}, 6),  # four gradients on 6 of 24 examples
    ],
)
def test_passes_of_six_steps(model, name, options, expected):
    assert passes(model, name, steps=6, **options) == Passes(expected, expected)


def test_minibatches_count_by_their_examples(model):
    assert passes(model, "fedavg", epochs=3, batch_size=5) == Passes(3, 3)
    assert passes(model, "fedavg", steps=2, batch_size=6) == Passes(0.5, 0.5)


def test_fedrep_caches_features_for_its_head_steps(model):
    assert passes(model, "fedrep", tau_h=9, tau_b=4).backward == 4
    assert passes(model, "fedrep", tau_h=9, tau_b=4).forward <= 5


def test_fedrecon_takes_one_pass_each_way(model):
    assert passes(model, "fedrecon", tau=9) == Passes(1, 1)
