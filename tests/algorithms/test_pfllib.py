"""Seven methods against PFLlib's own code: on the same examples, first weights, cohorts and mini-batches, all the same.

tests/pfllib/README.md says how its numbers were made, and which faults of PFLlib were removed before.
"""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.pfllib import CASES, ROUNDING, Recorded, examples, rounds
from helpers.rounds import play
from helpers.toys import distance, initial_states
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.fedcp import Policy, Shared
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models.weights import Head, Weights

ROOT = Path(__file__).resolve().parents[2]
LOCAL = {"eta": 0.1, "epochs": 3}


@pytest.fixture(scope="module")
def data():
    return examples()


def build(name, data, **options):
    return build_algorithm(name, data.toy.model, data.toy.population, **options)


def right(logits, y):
    return int((np.argmax(logits, 1) == y).sum())


def same_predictions(recorded, data, round_num, client_id, logits):
    """PFLlib's logits on a client's test examples, and the number of right answers."""
    assert distance(logits, recorded["logits"][round_num, client_id]) < ROUNDING
    assert right(logits, data.test[client_id][1]) == recorded["right"][round_num, client_id]


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(["full", "batches", "layers"], "full", ci=["batches"]))
def test_fedala(data, case):
    """With s = 0.8 in 'batches', where its start phase takes up to 313 epochs; 'layers' mixes all layers."""
    options = {"full": {"s": 1.0}, "batches": {"s": 0.8, "max_epochs": 1000}, "layers": {"s": 1.0, "p": None}}[case]
    recorded, options = Recorded("fedala", case), options | CASES.get(case, {})
    algorithm = build("fedala", data, **LOCAL, **options)
    only_a = Simulation(build("fedala", data, **LOCAL | {"eta": 0.0}, **options))
    states = initial_states(algorithm, data.toy.population)
    states = {i: s._replace(top=Weights(s.top.theta, data.start.head)) for i, s in states.items()}
    for t, cohort, w, before, server, after in rounds(algorithm, data, data.start, states):
        assert distance(server, recorded.model("server/", t)) < ROUNDING
        visits = [data.toy.visit(i, t + 1) for i in cohort]
        mixed = only_a.next(w, [before[i] for i in cohort], visits).client_states  # PFLlib predicts after this step
        for i, state in zip(cohort, mixed, strict=True):
            assert distance(after[i].top.head, recorded.head("trained/", (t, i))) < ROUNDING
            same_predictions(recorded, data, t, i, data.logits(Weights(state.top.theta or w.theta, state.top.head), i))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_feddbe(data, case):
    """The agreement is PFLlib's training of all clients before the first round."""
    recorded = Recorded("feddbe", case)
    algorithm = build("feddbe", data, kappa=0.5, mu=0.1, **LOCAL, **CASES[case])
    start = algorithm.init_server()._replace(w=data.start)
    (agreed,), states = play(algorithm, data.toy, [data.toy.ids], start, first=0)
    assert distance(agreed.z, recorded["global_mean"]) < ROUNDING
    for t, _, message, before, server, after in rounds(algorithm, data, agreed, states):
        assert distance(server.w, recorded.model("server/", t)) < ROUNDING
        for i in data.toy.ids:
            assert distance(after[i], recorded["client/mean"][t, i]) < ROUNDING
            same_predictions(recorded, data, t, i, data.logits(algorithm.personal_model(message, before[i], None), i))


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(CASES, "full", ci=["batches"]))
def test_fedas(data, case):
    """Its alignment takes mini-batches of 16 examples in 'batches', all in 'full'."""
    recorded, align = Recorded("fedas", case), {"batch_size_align": None if case == "full" else 16}
    algorithm = build("fedas", data, **LOCAL, **CASES[case], **align)
    states = initial_states(algorithm, data.toy.population)
    states = {i: s._replace(head=data.start.head) for i, s in states.items()}
    for t, _, theta, before, server, after in rounds(algorithm, data, data.start.theta, states):
        assert distance(server, recorded.theta("server/", t)) < ROUNDING
        for i in data.toy.ids:
            assert distance(after[i][:2], recorded.model("client/", (t, i))) < ROUNDING
            if before[i].started:  # before its first visit, PFLlib's client predicts with the backbone of round 0
                same_predictions(recorded, data, t, i, data.logits(algorithm.personal_model(theta, before[i], None), i))


@pytest.mark.parametrize("case", slow_but(CASES, "full", ci=["batches"]))
def test_fedproto(data, case):
    """Its squared distances to the prototypes are our outputs, up to |phi|^2; it has infinity for unknown classes."""
    recorded = Recorded("fedproto", case)
    algorithm = build("fedproto", data, lam=1.0, **LOCAL, **CASES[case])
    for t, _, message, before, server, after in rounds(
        algorithm, data, algorithm.init_server(), dict.fromkeys(data.toy.ids, data.start)
    ):
        known = ~np.isnan(recorded["server/protos"][t])
        assert distance(np.where(known, server.values, np.nan)[known], recorded["server/protos"][t][known]) < ROUNDING
        for i in data.toy.ids:
            assert distance(after[i], recorded.model("client/", (t, i))) < ROUNDING
            if t:
                w = algorithm.personal_model(message, before[i], None)
                phi = data.features(w, i)
                outputs = ((phi**2).sum(1, keepdims=True) - data.logits(w, i)) / phi.shape[1]
                theirs, finite = recorded["logits"][t, i], np.isfinite(recorded["logits"][t, i])
                assert distance(outputs[finite], theirs[finite]) < ROUNDING
                assert right(-outputs, data.test[i][1]) == recorded["right"][t, i]


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(CASES, "full", ci=["batches"]))
def test_fedpac(data, case):
    recorded, rates = Recorded("fedpac", case), {"eta_g": 0.1, "eta_f": 0.1, "momentum": 0.0}
    algorithm = build("fedpac", data, lam=1.0, tau_f=3, **rates, **CASES[case])
    start = algorithm.init_server()
    start = start._replace(heads=Head(*(np.stack([w] * 5) for w in data.start.head)))
    for t, _, message, _, server, _ in rounds(algorithm, data, start, dict.fromkeys(data.toy.ids, ())):
        assert distance(server.theta, recorded.theta("server/", t)) < ROUNDING
        assert distance(server.heads, recorded.head("client/", t)) < ROUNDING
        for i in data.toy.ids:
            same_predictions(recorded, data, t, i, data.logits(algorithm.personal_model(message(i), (), None), i))


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but([*CASES, "trained"], "full", ci=["batches"]))
def test_gpfl(data, case):
    """'trained' is PFLlib as it stands, with everyone in every round: its conditions are of the old table."""
    recorded, options = Recorded("gpfl", case), {"conditions": "trained"} if case == "trained" else CASES[case]
    if case == "trained":
        data = data._replace(cohorts=4 * [data.toy.ids])
    algorithm = build("gpfl", data, lam=0.3, mu=0.05, **LOCAL, **options)

    def shared(where, at=()):
        """The table of embeddings, then the valve's layers, as our server has them."""
        layers = [f"{where}CoV.Conditional_{name}.{layer}" for name in ("gamma", "beta") for layer in (0, 2)]
        return [recorded[f"{where}GCE.embedding.weight"][at], *(w for x in layers for w in recorded.layer(x, at))]

    states = initial_states(algorithm, data.toy.population)
    states = {i: s._replace(head=data.start.head) for i, s in states.items()}
    start = tf.nest.pack_sequence_as(algorithm.init_server(), [*data.start.theta, *shared("start/server/")])
    for t, _, message, before, server, after in rounds(algorithm, data, start, states):
        assert distance(server, [*recorded.theta("server/", t), *shared("server/", t)]) < ROUNDING
        for i in data.toy.ids:
            assert distance(after[i].head, recorded.head("client/", (t, i))) < ROUNDING
            theta, head = algorithm.personal_model(message, before[i], data.toy.visit(i))
            x, times, plus = data.features(data.start._replace(theta=theta[:2]), i), *theta[2:]
            same_predictions(recorded, data, t, i, np.maximum(x * times + plus, 0) @ head.kernel + head.bias)


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(CASES, "full", ci=["batches"]))
def test_fedcp(data, case):
    """PFLlib's with the softmax of the paper, and the context of the first head."""
    recorded = Recorded("fedcp", case)
    algorithm = build("fedcp", data, lam=0.5, **LOCAL, **CASES[case])
    names = [f"cs.fc.{layer}.{part}" for layer in (0, 1) for part in ("weight", "bias")]

    def policy(where, at=()):
        return Policy(*(tf.constant(recorded[f"{where}{name}"][at]) for name in names))

    start = Shared(*data.start, policy("start/server/"))
    for t, _, message, before, server, after in rounds(
        algorithm, data, start, dict.fromkeys(data.toy.ids, data.start.head)
    ):
        assert distance(server, Shared(*recorded.model("server/", t), policy("server/", t))) < ROUNDING
        for i in data.toy.ids:
            assert distance(after[i], recorded.head("client/", (t, i))) < ROUNDING
            phi = tf.constant(data.features(Weights(message.theta, message.head), i))
            same_predictions(recorded, data, t, i, algorithm.predictor(message, before[i], None)(phi).numpy())


def test_the_list_of_differences_names_functions_that_exist():
    """The last column of the table in docs/protocols.md."""
    section = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8").split("## Coming from PFLlib")[1]
    cells = [line.split("|")[-2] for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(cells) > 15
    for cell in cells:
        for name in re.findall(r"`([\w./]+)`", cell):
            if name.endswith(".py"):
                tree = ast.parse((ROOT / "tfpfl" / "algorithms" / name).read_text(encoding="utf-8"))
                functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            else:
                assert name in functions
