"""Seven methods against PFLlib's own code: on the same examples, first weights, cohorts and mini-batches, all the same.

tests/pfllib/README.md says how its numbers were made, and which faults of PFLlib were removed before.
"""

import numpy as np
import pytest

from helpers.marks import slow_but
from helpers.pfllib import CASES, ROUNDING, Recorded, examples, rounds
from helpers.rounds import play
from helpers.toys import distance, initial_states
from tfpfl.algorithms import fedala, fedas, feddbe
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models.weights import Weights

LOCAL = {"eta": 0.1, "epochs": 3}


@pytest.fixture(scope="module")
def data():
    return examples()


def right(logits, y):
    return int((np.argmax(logits, 1) == y).sum())


def same_predictions(recorded, data, round_num, client_id, logits):
    """PFLlib's logits on a client's test examples, and the number of right answers."""
    assert distance(logits, recorded["logits"][round_num, client_id]) < ROUNDING
    assert right(logits, data.test[client_id][1]) == recorded["right"][round_num, client_id]


@pytest.mark.parametrize("case", slow_but(["full", "batches", "layers"], "full"))
def test_fedala(data, case):
    """With s = 0.8 in 'batches', where its start phase takes up to 313 epochs; 'layers' mixes all layers."""
    options = {"full": {"s": 1.0}, "batches": {"s": 0.8, "max_epochs": 1000}, "layers": {"s": 1.0, "p": None}}[case]
    recorded, options = Recorded("fedala", case), options | CASES.get(case, {})
    algorithm = fedala(data.toy.model, data.toy.population, **LOCAL, **options)
    only_a = Simulation(fedala(data.toy.model, data.toy.population, **LOCAL | {"eta": 0.0}, **options))
    states = initial_states(algorithm, data.toy.population)
    states = {i: s._replace(top=Weights(s.top.theta, data.start.head)) for i, s in states.items()}
    for t, cohort, w, before, server, after in rounds(algorithm, data, data.start, states):
        assert distance(server, recorded.model("server/", t)) < ROUNDING
        visits = [data.toy.visit(i, t + 1) for i in cohort]
        mixed = only_a.next(w, [before[i] for i in cohort], visits).client_states  # PFLlib predicts after this step
        for i, state in zip(cohort, mixed, strict=True):
            assert distance(after[i].top.head, recorded.head("trained/", (t, i))) < ROUNDING
            same_predictions(recorded, data, t, i, data.logits(Weights(state.top.theta or w.theta, state.top.head), i))


@pytest.mark.parametrize("case", CASES)
def test_feddbe(data, case):
    """The agreement is PFLlib's training of all clients before the first round."""
    recorded = Recorded("feddbe", case)
    algorithm = feddbe(data.toy.model, data.toy.population, kappa=0.5, mu=0.1, **LOCAL, **CASES[case])
    start = algorithm.init_server()._replace(w=data.start)
    (agreed,), states = play(algorithm, data.toy, [data.toy.ids], start, first=0)
    assert distance(agreed.z, recorded["global_mean"]) < ROUNDING
    for t, _, message, before, server, after in rounds(algorithm, data, agreed, states):
        assert distance(server.w, recorded.model("server/", t)) < ROUNDING
        for i in data.toy.ids:
            assert distance(after[i], recorded["client/mean"][t, i]) < ROUNDING
            same_predictions(recorded, data, t, i, data.logits(algorithm.personal_model(message, before[i], None), i))


@pytest.mark.parametrize("case", CASES)
def test_fedas(data, case):
    """Its alignment takes mini-batches of 16 examples in 'batches', all in 'full'."""
    recorded, align = Recorded("fedas", case), {"batch_size_align": None if case == "full" else 16}
    algorithm = fedas(data.toy.model, data.toy.population, **LOCAL, **CASES[case], **align)
    states = initial_states(algorithm, data.toy.population)
    states = {i: s._replace(head=data.start.head) for i, s in states.items()}
    for t, _, theta, before, server, after in rounds(algorithm, data, data.start.theta, states):
        assert distance(server, recorded.theta("server/", t)) < ROUNDING
        for i in data.toy.ids:
            assert distance(after[i][:2], recorded.model("client/", (t, i))) < ROUNDING
            if before[i].started:  # before its first visit, PFLlib's client predicts with the backbone of round 0
                same_predictions(recorded, data, t, i, data.logits(algorithm.personal_model(theta, before[i], None), i))
