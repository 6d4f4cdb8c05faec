"""One battery for every entry of `ALGORITHMS`: what the contract promises, whatever the method.

A new algorithm is tested by being in the list. If its hyperparameters have names of their own, a quick value goes into
`QUICK`; a value that only one algorithm needs, into `SPECIAL`.
"""

import re

import numpy as np
import pytest
import tensorflow as tf
from toys import backbone, distance, identical, initial_states, on_disk, visits_by_id

from tfpfl.algorithm import Algorithm, ClientData, Population, Sampling, Weights
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.client_store import ClientStore
from tfpfl.local import client_loss
from tfpfl.models import SplitModel
from tfpfl.sampling import cohort
from tfpfl.simulate import Evaluation, Simulation

QUICK = {"tau": 4, "steps": 4, "beta": 0.3, "eta": 0.2, "rho": 0.02, "tau_h": 3, "tau_b": 2, "steps_ft": 3}
SPECIAL = {  # algorithm -> hyperparameters
    "per_fedavg": {"eta_inner": 0.1},
    "pfedme": {"lam": 5.0, "eta_p": 0.15, "beta": 1.0},
    "fedfomo": {"candidates": 2},
    "fedamp": {"alpha": 0.5, "sigma": 4.0},
    "heurfedamp": {"alpha": 0.5},
}

# Those that have one model for everyone, with which nobody predicts.
BESIDE_A_GLOBAL_MODEL = {
    "fedavg_ft", "fedprox_ft", "per_fedavg", "fedbabu", "fedrod", "ditto", "pfedme", "apfl", "layerwise", "pgfed",
    "pgfedmo",
}  # fmt: skip
NO_NEW_CLIENTS = {"fedamp", "heurfedamp"}

EXAMPLES = (9, 14, 6, 12, 8, 11, 10)
CLASSES = (2, 3, 2, 4, 3, 8, 2)  # 8 is no width of the backbone: a tensor with an axis of 8 is a head
EVERYONE = list(range(len(EXAMPLES)))
ROUNDS = 10


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("battery") / "federation", EXAMPLES, CLASSES)


@pytest.fixture(scope="module", params=ALGORITHMS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def algorithm(name, federation) -> Algorithm:
    """Small steps, three of seven clients a round."""
    known = ALGORITHMS[name].hyperparameters
    quick = {k: v for k, v in QUICK.items() if k in known} | SPECIAL.get(name, {})
    population = federation.population(Sampling("fixed", 0.5), shared_slots=True)
    return build_algorithm(name, SplitModel(backbone("float32")), population, **quick)


@pytest.fixture(scope="module")
def engine(algorithm, federation) -> Simulation:
    return Simulation(algorithm, federation, held_out=["test"])


class Trained:
    """A run of some engine, kept in a store; client states live in it and nowhere else, as in training."""

    def __init__(self, algorithm, engine, store=None, seed=0):
        self.algorithm, self.engine, self.seed = algorithm, engine, seed
        self.population, self.store = algorithm.population, store or ClientStore()
        self.initial = initial_states(algorithm, self.population)
        self.server = self.store.server_state(engine.initialize())
        self.outputs = []

    def states(self, ids):
        return self.store.client_states(ids, self.initial.get)

    def rounds(self, last, cohorts=None):
        """Runs up to round `last`; `cohorts` is a function of the round, default the population's sampling."""
        for t in range(self.store.round_num + 1, last + 1):
            ids = [int(i) for i in (cohorts(t) if cohorts else cohort(self.seed, t, self.population))]
            output = self.engine.next(self.server, self.states(ids), visits_by_id(self.population, ids, t, self.seed))
            self.server = output.server
            self.store.commit_round(t, output.server, dict(zip(ids, output.client_states, strict=True)), {})
            self.outputs.append(output)
        return self


@pytest.fixture(scope="module")
def trained(algorithm, engine) -> Trained:
    return Trained(algorithm, engine).rounds(ROUNDS)


def kinds(structure):
    """The structure with a (dtype, shape) for every leaf."""
    return tf.nest.map_structure(lambda x: (np.asarray(x).dtype.name, np.shape(x)), structure)


def test_both_engines_agree(tff, algorithm, federation, trained):
    from tfpfl.federated import federate, federated_evaluation

    process = federate(algorithm, federation, held_out=["test"])
    other = Trained(algorithm, process).rounds(ROUNDS)
    assert distance(other.server, trained.server) < 1e-5
    for i in EVERYONE:
        assert distance(other.states([i]), trained.states([i])) < 1e-5
    for ours, theirs in zip(trained.outputs, other.outputs, strict=True):
        assert set(ours.metrics) == set(theirs.metrics) and len(ours.client_metrics) == len(theirs.client_metrics)
        for name in ours.metrics:
            assert distance(ours.metrics[name], theirs.metrics[name]) < 1e-5, name
        for mine, its in zip(ours.client_metrics, theirs.client_metrics, strict=True):
            assert set(mine) == set(its)
            assert all(distance(mine[name], its[name]) < 1e-5 for name in mine)

    visits = visits_by_id(algorithm.population, EVERYONE, 99)
    scores = federated_evaluation(algorithm, federation, ["test"])(trained.server, trained.states(EVERYONE), visits)
    expected = Evaluation(algorithm, federation, ["test"])(trained.server, trained.states(EVERYONE), visits)
    names = {"test_correct", "test_examples", "test_loss"}
    if algorithm.global_model is not None:
        names |= {f"global_{name}" for name in names}
    for theirs, ours in zip(scores, expected, strict=True):
        assert set(theirs) == set(ours) == names
        assert all(distance(theirs[name], ours[name]) < 1e-5 for name in ours)


def test_ten_rounds_change_something(algorithm, trained):
    new = Trained(algorithm, trained.engine)
    assert distance((trained.server, trained.states(EVERYONE)), (new.server, new.states(EVERYONE))) > 1e-3


def test_the_order_of_clients_is_irrelevant(algorithm, engine, trained):
    visits, states = visits_by_id(algorithm.population, EVERYONE, 5), trained.states(EVERYONE)
    forward = engine.next(trained.server, states, visits)
    back = engine.next(trained.server, states[::-1], visits[::-1])
    assert distance(forward.server, back.server) < 1e-6
    assert identical(forward.client_states, back.client_states[::-1])
    assert identical(forward.client_metrics, back.client_metrics[::-1])


def test_structure_shapes_and_dtypes_stay(algorithm, engine, trained):
    assert kinds(trained.server) == kinds(engine.initialize())
    tf.nest.assert_same_structure(engine.initialize(), trained.outputs[-1].server)
    for i in EVERYONE:
        assert kinds(trained.states([i])[0]) == kinds(trained.initial[i])
    for new in trained.outputs[-1].client_states:
        tf.nest.assert_same_structure(trained.initial[0], new)


def test_saved_loaded_and_continued_is_continued(algorithm, engine, trained, tmp_path):
    """Bit for bit; `trained` went on without a break."""
    with ClientStore(tmp_path / "state.sqlite", "run") as store:
        Trained(algorithm, engine, store).rounds(4)
    with ClientStore(tmp_path / "state.sqlite", "run") as store:
        resumed = Trained(algorithm, engine, store).rounds(ROUNDS)
        assert len(resumed.outputs) == ROUNDS - 4
        assert identical(resumed.server, trained.server)
        assert identical(resumed.states(EVERYONE), trained.states(EVERYONE))


def test_absent_clients_keep_their_state(algorithm, engine):
    run = Trained(algorithm, engine).rounds(3, cohorts=lambda t: [1, 4])
    before = run.states(EVERYONE)
    assert all(identical(before[i], run.initial[i]) for i in (0, 2, 3, 5, 6))
    run.rounds(6, cohorts=lambda t: [0, 5])
    after = run.states(EVERYONE)
    assert all(identical(after[i], before[i]) for i in (1, 2, 3, 4, 6))


def test_a_round_is_a_function_of_what_it_is_given(algorithm, engine, trained):
    ids = [1, 5]
    visits, states = visits_by_id(algorithm.population, ids, 7), trained.states(ids)
    assert identical(engine.next(trained.server, states, visits), engine.next(trained.server, states, visits))


def test_the_loss_falls(algorithm, federation, engine):
    """On classes that are far apart; the model that every client predicts with, on its training examples."""
    score = Evaluation(algorithm, federation, ["train"])

    def loss(run):
        visits = visits_by_id(algorithm.population, EVERYONE, 99)
        return np.mean([s["train_loss"] for s in score(run.server, run.states(EVERYONE), visits)])

    run = Trained(algorithm, engine)
    first = loss(run)
    assert loss(run.rounds(25, cohorts=lambda t: EVERYONE)) < 0.8 * first


def test_no_graph_is_traced_again_for_other_clients(algorithm, federation):
    engine = Simulation(algorithm, federation, held_out=["test"])
    work = getattr(engine._clients, "_work", None) or engine._clients._visit
    run = Trained(algorithm, engine).rounds(2, cohorts=lambda t: [[0, 1, 2], [2, 4]][t - 1])
    functions = (work, engine._messages._message, engine._finish, engine._initialize)
    traces = [f.experimental_get_tracing_count() for f in functions]
    assert traces[0] <= 2  # the second is for any number of classes
    run.rounds(5, cohorts=lambda t: [[3, 4, 5], [5, 6, 0, 2], [1, 3, 6]][t - 3])
    assert [f.experimental_get_tracing_count() for f in functions] == traces


def scalars(formula: str, b: int, h: int, **known) -> int:
    """'2d + h' in numbers."""
    python = re.sub(r"(\d)\s*([bhdI])", r"\1*\2", formula)
    return eval(python, {"__builtins__": {}}, {"b": b, "h": h, "d": b + h, **known})


def test_bytes_are_those_of_the_list(name, algorithm, trained):
    """Single numbers in a message (a count, a norm) are not in the formula."""
    row, model, population = ALGORITHMS[name], algorithm.model, algorithm.population
    for t, output in enumerate(trained.outputs, 1):
        for i, metrics in zip(cohort(0, t, population), output.client_metrics, strict=True):
            width = int(population.num_classes[i]) if row.head == "personal" else population.shared_labels()
            h = (model.num_features + 1) * width
            for formula, found in ((row.down, metrics["bytes_down"]), (row.up, metrics["bytes_up"])):
                known = SPECIAL.get(name, {}) | {"I": population.num_clients}
                extra = int(found) - 4 * scalars(formula, model.num_backbone_weights, h, **known)
                assert 0 <= extra <= 8, f"client {i}: {found} bytes, the list says {formula}"


def visit_of(client, algorithm, federation, trained):
    """(message, state, data, output) of one more visit."""
    x, y = federation.reader("train")(client)
    [visit], [state] = visits_by_id(algorithm.population, [client], 11), trained.states([client])
    message = algorithm.message(trained.server, *([tf.constant(client)] if algorithm.message_per_client else []))
    data = ClientData(x, y, visit.info, tf.constant(visit.key))
    return message, state, data, algorithm.client_update(message, tf.nest.map_structure(tf.constant, state), data)


def test_what_leaves_a_client_holds_no_personal_weights(name, algorithm, federation, trained):
    """No part of the update has the shape of a head that stays on the device, or equals a part of the state."""
    row, client = ALGORITHMS[name], 5
    _, state, _, output = visit_of(client, algorithm, federation, trained)
    assert all(np.ndim(value) == 0 for value in [output.weight, *output.metrics.values()]) and "loss" in output.metrics
    sent = [np.asarray(u) for u in tf.nest.flatten(output.update)]
    if row.message == "per client":  # by its nature: the server has what every client has, and sends to each its own
        return
    if row.head == "personal" and not re.search("[hd]", row.up):
        assert not [u.shape for u in sent if CLASSES[client] in u.shape]
    kept = [np.asarray(s) for s in tf.nest.flatten((state, output.state)) if np.size(s) > 1 and np.any(s)]
    for u in sent:
        assert not any(u.shape == s.shape and np.allclose(u, s) for s in kept)


def test_the_models_that_a_client_predicts_with(name, algorithm, federation, trained):
    """`personal_model` and `local_model` are whole models of the client's width."""
    for client in (0, 5):
        message, _, data, output = visit_of(client, algorithm, federation, trained)
        width = CLASSES[client] if ALGORITHMS[name].head == "personal" else max(CLASSES)
        for weights in (algorithm.personal_model(message, output.state, data), algorithm.local_model(message, output)):
            assert isinstance(weights, Weights)
            assert algorithm.model.logits(weights, data.x).shape == (EXAMPLES[client], width)


def test_the_global_model_is_everyones(name, algorithm, federation, trained):
    """It is a whole model, is in every message, and whoever received it plays no part."""
    assert (algorithm.global_model is not None) == (name in BESIDE_A_GLOBAL_MODEL)
    if algorithm.global_model is None:
        return
    models = [algorithm.global_model(visit_of(client, algorithm, federation, trained)[0]) for client in (0, 5)]
    assert isinstance(models[0], Weights) and identical(*models)
    x = federation.reader("train")(5)[0]
    assert algorithm.model.logits(models[0], x).shape == (EXAMPLES[5], max(CLASSES))
    assert [w.shape for w in models[0].theta] == [w.shape for w in algorithm.model.theta()]


def test_a_new_client_adapts(name, algorithm, federation, trained):
    """From what it would predict with at once, or for a personal model that is a fit, from what that is a fit of."""
    if algorithm.adapt is None:
        assert name in NO_NEW_CLIENTS
        return
    message, _, data, _ = visit_of(5, algorithm, federation, trained)
    state = algorithm.init_client(data.info)
    start, epoch, model = algorithm.adapt

    carry, losses = start(message, state, data), []
    for n in range(9):
        losses.append(float(client_loss(algorithm.model)(model(carry), data.x, data.y)))
        carry = epoch(carry, data, tf.constant(n))
    weights = model(carry)
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 1e-3
    row, first = ALGORITHMS[name], model(start(message, state, data))
    is_a_fit = row.evaluates == "fine-tuned"
    predicts = algorithm.global_model(message) if is_a_fit else algorithm.personal_model(message, state, data)
    assert distance(first, predicts) < 1e-6
    assert kinds(weights) == kinds(first)
    if row.head == "personal" and row.down != "0":
        assert identical(weights.theta, first.theta)  # what all share is not the new client's to move


def test_the_defaults_build(name, algorithm):
    """The builder without hyperparameters, and with every preset."""
    for preset in (None, *ALGORITHMS[name].presets):
        build_algorithm(name, algorithm.model, algorithm.population, preset=preset)


def test_clients_of_different_width_share_a_head_only_where_that_is_said(name):
    """Output k of a shared head would be another class for every client."""
    model, people = SplitModel(backbone("float32")), {"num_examples": [5, 6, 7], "num_classes": [3, 2, 4]}
    if ALGORITHMS[name].head == "shared":
        with pytest.raises(ValueError, match="client 1 has 2, client 2 has 4.*num_labels"):
            build_algorithm(name, model, Population(**people))
        build_algorithm(name, model, Population(**people, num_labels=4))
    else:
        build_algorithm(name, model, Population(**people))
