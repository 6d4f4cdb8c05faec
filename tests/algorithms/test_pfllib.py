"""Seven methods against PFLlib's own code: on the same examples, first weights, cohorts and mini-batches, all the same.

tests/pfllib/README.md says how its numbers were made, and which faults of PFLlib were removed before.
"""

import numpy as np
import pytest

from helpers.marks import slow_but
from helpers.pfllib import CASES, ROUNDING, Recorded, examples, rounds
from helpers.rounds import play
from helpers.toys import distance, initial_states
from tfpfl.algorithms import fedala, feddbe
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
    still = Simulation(fedala(data.toy.model, data.toy.population, **LOCAL | {"eta": 0.0}, **options))  # learns A_i only
    states = initial_states(algorithm, data.toy.population)
    states = {i: s._replace(top=Weights(s.top.theta, data.start.head)) for i, s in states.items()}
    for t, cohort, w, before, server, after in rounds(algorithm, data, data.start, states):
        assert distance(server, recorded.model("server/", t)) < ROUNDING
        visits = [data.toy.visit(i, t + 1) for i in cohort]
        mixed = still.next(w, [before[i] for i in cohort], visits).client_states  # PFLlib predicts after this step
        for i, state in zip(cohort, mixed, strict=True):
            assert distance(after[i].top.head, recorded.head("trained/", (t, i))) < ROUNDING
            same_predictions(recorded, data, t, i, data.logits(Weights(state.top.theta or w.theta, state.top.head), i))


@pytest.mark.parametrize("case", CASES)
def test_feddbe(data, case):
    """The agreement is PFLlib's training of all clients before the first round."""
    recorded = Recorded("feddbe", case)
    algorithm = feddbe(data.toy.model, data.toy.population, kappa=0.5, mu=0.1, **LOCAL, **CASES[case])
    server = algorithm.init_server()._replace(w=data.start)
    (server,), states = play(algorithm, data.toy, [data.toy.ids], server, first=0)
    assert distance(server.z, recorded["global_mean"]) < ROUNDING
    for t, _, message, before, server, after in rounds(algorithm, data, server, states):
        assert distance(server.w, recorded.model("server/", t)) < ROUNDING
        for i in data.toy.ids:
            assert distance(after[i], recorded["client/mean"][t, i]) < ROUNDING
            same_predictions(recorded, data, t, i, data.logits(algorithm.personal_model(message, before[i], None), i))
