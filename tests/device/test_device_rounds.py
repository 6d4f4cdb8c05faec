"""Rounds whose clients compute with the exported program against tfpfl's engines."""

import numpy as np
import pytest

from helpers.marks import slow_but
from tflite_export import ExportError, simulate_round
from tflite_export.rounds import Devices, _difference
from tfpfl.algorithms import build_algorithm
from tfpfl.models import SplitModel, build_network
from tfpfl.runs.config import RunConfig


@pytest.fixture(scope="module")
def asked(federation):
    """asked(**hyperparameters) -> (algorithm, config, federation); half of the clients a round."""
    model = SplitModel(build_network("mlp200", federation.example_shape))  # one for all: it is converted once

    def make(algorithm="pflego", **hyper):
        hyper = {"rho": 0.01, "beta": 0.05} | hyper if algorithm == "pflego" else {}
        config = RunConfig(algorithm=algorithm, hyperparameters=hyper, network="mlp200", participation=0.5)
        config = config.resolved(federation)
        population = federation.population(config.sampling_plan(), labels=config.labels)
        return build_algorithm(algorithm, model, population, **config.hyperparameters), config, federation

    return make


@pytest.mark.slow
def test_five_rounds_are_those_of_the_tff_engine(asked, tff):
    rows = simulate_round(asked(), 5, engine="tff", accuracy_every=5)
    assert [r.clients for r in rows] == [5] * 5
    assert max(max(r.theta, r.heads) for r in rows) < 1e-4
    assert rows[-1].device_score == rows[-1].engine_score > 0.6


EXACT = {"rule": "exact", "server_opt": "sgd", "rho": 0.1}
VARIANTS = {
    "exact": (EXACT, {}),
    "exact, chunks of 32": (EXACT, {"chunk": 32}),
    "exact, chunks of 5": (EXACT, {"chunk": 5}),
    "exact, in one piece": (EXACT, {"chunk": 1000}),
    "exact, static program": (EXACT, {"static": True}),
    "sampled weights, Adam": ({"weighting": "sampled"}, {}),
    "no safeguard, tau 1": ({"safeguard": False, "tau": 1}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(VARIANTS, "exact"))
def test_five_rounds_are_those_of_the_local_engine(asked, name):
    hyper, options = VARIANTS[name]
    rows = simulate_round(asked(**hyper), 5, accuracy_every=0, **options)
    bound = 2e-6 if hyper is EXACT else 1e-4  # Adam divides rounding by gradients that are nearly 0
    assert max(max(r.theta, r.heads) for r in rows) < bound


@pytest.mark.table
@pytest.mark.slow
def test_a_device_with_another_tau_is_noticed(asked):
    algorithm, config, federation = asked(**EXACT)
    config.hyperparameters["tau"] -= 1
    rows = simulate_round((algorithm, config, federation), 1, accuracy_every=0)
    assert rows[0].heads > 1e-4


@pytest.mark.slow
def test_int8_gradients_learn_as_well_as_float32(asked):
    done = asked(rho=0.002)
    rows = {kind: simulate_round(done, 50, payload=kind, accuracy_every=0)[-1] for kind in ("float32", "int8")}
    assert rows["float32"].device_score > 0.85
    assert rows["int8"].device_score == pytest.approx(rows["float32"].device_score, abs=0.03)
    assert rows["int8"].bytes_up < 0.26 * rows["float32"].bytes_up
    assert rows["int8"].theta > 0  # it is another run: the gradients were rounded


@pytest.mark.slow
def test_clients_that_were_not_drawn_keep_their_head(asked):
    algorithm, config, federation = asked()
    devices = Devices(algorithm, config, federation)
    try:
        before = {i: [a.copy() for a in devices.client(i).head] for i in range(10)}
        drawn = devices.next()
        assert 0 < len(drawn) < 10
        for i in range(10):
            same = all(np.array_equal(a, b) for a, b in zip(devices.client(i).head, before[i], strict=True))
            assert same == (i not in drawn)
    finally:
        devices.close()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["kernel of the first", "bias of the last"])
def test_a_weight_that_is_not_finite_is_a_difference(asked, monkeypatch, who):
    """Of all heads and both of a head's arrays; Python's max leaves a NaN out that is not the first of its values."""
    algorithm, config, federation = asked(**EXACT)
    first = algorithm.init_client(algorithm.population.info(0))
    kernel, bias = map(np.array, first)
    (kernel if who == "kernel of the first" else bias)[..., 0] = np.nan
    assert np.isnan(_difference(first, (kernel, bias)))
    broken = 0 if who == "kernel of the first" else 9
    monkeypatch.setattr("tflite_export.rounds._difference", lambda head, other: next(found))
    found = iter([float("nan") if i == broken else 0.0 for i in range(10)])
    (row,) = simulate_round((algorithm, config, federation), 1, accuracy_every=0)
    assert np.isnan(row.heads) and np.isnan(row.largest)


def test_what_devices_cannot_do_is_refused(asked):
    with pytest.raises(ExportError, match=r"\(static\) computes 32 examples at a time, and a chunk of 7 was asked for"):
        simulate_round(asked(), 1, static=True, chunk=7)
    with pytest.raises(ExportError, match="fedavg has no program"):
        simulate_round(asked("fedavg"), 1)
    with pytest.raises(ExportError, match="inner_opt is 'adam'"):
        simulate_round(asked(inner_opt="adam"), 1)
    with pytest.raises(ExportError, match="unknown engine"):
        simulate_round(asked(), 1, engine="flower")
