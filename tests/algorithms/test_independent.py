"""tfpfl's methods against NumPy versions that somebody wrote from the papers, without reading tfpfl's files.

tests/independent has the versions. Each is compared in every weight, for every client, after every round, in float64,
in both engines. Some clients miss rounds, one comes late, and one never comes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import Toy, initial_states
from independent import (
    adapters,
    fed3r,
    fedala,
    fedas,
    fedcp,
    feddane,
    feddbe,
    fedpac,
    fedproto,
    gpfl,
    knn_per,
    older,
    pfedhn,
)
from independent.network import Round
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.parts.simplex import simplex_minimum
from tfpfl.data.population import Population, Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel

D, M, K = 4, 5, 3
CLASSES = ((0, 1, 2), (0, 1), (1, 2), (0, 2), (2,))  # client 4 never comes, and class 2 is all that it has
EXAMPLES = (6, 9, 4, 7, 5)
COHORTS = [(0, 2, 3), (1, 2), (0, 1, 3), (2,), (0, 3)]
ALLOWED = 1e-9
NEW = np.random.default_rng(7).standard_normal((8, D))  # examples that no client has


class Setting(NamedTuple):
    """A federation, and the first weights as the versions take them."""

    data: Toy
    clients: list  # [(x, y)]
    start: tuple  # (theta, head): the weights of round 0 of a method whose clients share a head
    heads: dict  # {client: its own first head}
    frozen: tuple  # the backbone's own weights, below adapters


class Case(NamedTuple):
    """A comparison: how the version is called, and what of both sides must be equal.

    version: (Setting, the algorithm) -> the rounds of the independent version.
    server: (the server's state) -> the arrays that are compared with the version's `Round.server`, in its order.
    model: (the version's model of a client) -> (theta, head), to be compared with `personal_model`.
    """

    method: str
    hyperparameters: dict
    version: Callable
    server: Callable = lambda server: server
    model: Callable = lambda model: model
    cohorts: list = COHORTS
    model_args: dict = {}
    agrees: Callable | None = None  # more that must be equal: (Setting, algorithm, message, state, client, model)


def examples(seed=3):
    rng = np.random.default_rng(seed)
    means, data = rng.standard_normal((K, D)), []
    for n, classes in zip(EXAMPLES, CLASSES, strict=True):
        y = rng.permutation(np.resize(classes, n)).astype(np.int32)
        data.append((means[y] + 0.7 * rng.standard_normal((n, D)), y))
    return data


def setting(**model_args) -> Setting:
    hidden = keras.layers.Dense(M, activation="relu", dtype="float64")
    backbone = keras.Sequential([keras.Input((D,), dtype="float64"), hidden])
    rng = np.random.default_rng(4)
    hidden.set_weights([0.8 * rng.standard_normal((D, M)), 0.5 + 0.3 * rng.standard_normal(M)])
    model = SplitModel(backbone, **model_args)
    population = Population(EXAMPLES, [K] * len(EXAMPLES), K, labels="global", sampling=Sampling("fixed", 0.4))
    data = Toy(model, population, examples())
    heads = {i: arrays(model.head(population.info(i, "float64"))) for i in data.ids}
    start = arrays(model.theta()), arrays(model.shared_head(K))
    return Setting(data, data.data, start, heads, tuple(hidden.get_weights()))


def arrays(weights):
    """Nested tuples of arrays, as the versions have them."""
    return tuple(arrays(w) for w in weights) if isinstance(weights, tuple) else np.asarray(weights)


def leaves(weights) -> list:
    """All arrays, in order; a part that is None or () has none."""
    return [np.asarray(w) for w in tf.nest.flatten(weights)]


def difference(found, expected) -> float:
    """The largest difference of two structures with the same arrays in the same order."""
    pairs = list(zip(leaves(found), leaves(expected), strict=True))
    assert [a.shape for a, _ in pairs] == [b.shape for _, b in pairs]
    return max(float(np.max(np.abs(a - b), initial=0)) for a, b in pairs)


def local_engine(algorithm):
    return Simulation(algorithm)


def tff_engine(algorithm):
    pytest.importorskip("tensorflow_federated")
    from tfpfl.engines.tff.process import federate

    return federate(algorithm, (tf.TensorSpec([None, D], tf.float64), tf.TensorSpec([None], tf.int32)))


ENGINES = {"local": local_engine, "tff": tff_engine}


def message_of(algorithm, server, client):
    server = tf.nest.map_structure(tf.constant, server)
    return algorithm.message(server, *([tf.constant(client)] if algorithm.message_per_client else []))


def compare(case: Case, engine: str) -> dict:
    """The largest differences of the server's weights and of the clients' models, over all rounds."""
    given = setting(**case.model_args)
    algorithm = build_algorithm(case.method, given.data.model, given.data.population, **case.hyperparameters)
    process = ENGINES[engine](algorithm)
    server, states = process.initialize(), dict(initial_states(algorithm, given.data.population))
    largest, first = {"server": 0.0, "models": 0.0}, None
    for t, (cohort, expected) in enumerate(zip(case.cohorts, case.version(given, algorithm), strict=True), 1):
        output = process.next(server, [states[i] for i in cohort], [given.data.visit(i, t) for i in cohort])
        server, states = output.server, states | dict(zip(cohort, output.client_states, strict=True))
        largest["server"] = max(largest["server"], difference(case.server(server), expected.server))
        for i in given.data.ids:
            message, state = message_of(algorithm, server, i), tf.nest.map_structure(tf.constant, states[i])
            found = algorithm.personal_model(message, state, given.data.visit(i, t))
            model = case.model(expected.models[i])
            largest["models"] = max(largest["models"], difference(found, model))
            if case.agrees is not None:
                largest["models"] = max(
                    largest["models"], case.agrees(given, algorithm, message, state, i, expected.models[i])
                )
            if i == 0:
                first = first or leaves(model)
                moved = difference(first, model)
    assert moved > 1e-3, "client 0's model did not move: nothing was compared"
    return largest


CASES: dict[str, Any] = {}


def case(name, *args, **more):
    CASES[name] = Case(*args, **more)


case(
    "fedrep",
    "fedrep",
    {"tau_h": 4, "tau_b": 3, "eta_h": 0.3, "eta_b": 0.2},
    lambda s, _: older.fedrep(s.clients, s.start, COHORTS, eta_h=0.3, tau_h=4, eta_b=0.2, tau_b=3, heads=s.heads),
)
case(
    "ditto",
    "ditto",
    {"lam": 0.4, "eta": 0.3, "steps": 4},
    lambda s, _: older.ditto(s.clients, s.start, COHORTS, eta=0.3, steps=4, lam=0.4),
)
case(
    "scaffold",
    "scaffold",
    {"eta": 0.2, "steps": 4},
    lambda s, _: older.scaffold(s.clients, s.start, COHORTS, eta=0.2, steps=4),
)
for layers, top in ((1, "head"), (None, "all")):
    case(
        f"fedala, p = {layers}",
        "fedala",
        {"p": layers, "s": 1.0, "eta_w": 0.6, "threshold": 0.02, "max_epochs": 15, "eta": 0.3, "steps": 3},
        lambda s, _, top=top: fedala.fedala(
            s.clients, s.start, COHORTS, eta=0.3, steps=3, eta_w=0.6, threshold=0.02, most=15, top=top
        ),
    )


def with_vector(model):
    """A head on features plus a vector, as a head on features."""
    (theta, (kernel, bias)), vector = model
    return theta, (kernel, bias + vector @ kernel)


for mu, rounds in ((1.0, 1), (0.6, 2)):
    case(
        f"feddbe, mu = {mu}, {rounds}",
        "feddbe",
        {"kappa": 5.0, "mu": mu, "agreement_rounds": rounds, "eta": 0.2, "steps": 4},
        lambda s, _, mu=mu, rounds=rounds: feddbe.feddbe(
            s.clients, s.start, COHORTS, eta=0.2, steps=4, kappa=5.0, mu=mu, agreement=rounds
        ),
        server=lambda server: (server.w, server.z),
        model=with_vector,
    )


for fisher, first in (("batches", "w0"), ("examples", "first_broadcast")):
    case(
        f"fedas, {fisher}, {first}",
        "fedas",
        {"eta_align": 0.3, "epochs_align": 2, "batch_size_align": None, "fisher": fisher, "init": first}
        | {"eta": 0.2, "steps": 4},
        lambda s, _, fisher=fisher, first=first: fedas.fedas(
            s.clients,
            s.start,
            COHORTS,
            eta=0.2,
            steps=4,
            eta_a=0.3,
            steps_a=2,
            heads=s.heads,
            fisher={"batches": "batch"}.get(fisher, fisher),
            first={"first_broadcast": "received"}.get(first, first),
            model="own",
        ),
    )
for weighting, mu in (("examples", 0.3), ("uniform", 0.0)):
    case(
        f"feddane, {weighting}",
        "feddane",
        {"mu": mu, "eta": 0.2, "steps": 4, "weighting": weighting},
        lambda s, _, mu=mu, weighting=weighting: feddane.feddane(
            s.clients, s.start, COHORTS, eta=0.2, steps=4, mu=mu, weighting=weighting
        ),
    )
case(
    "adapters",
    "adapters",
    {"eta": 0.3, "steps": 4},
    lambda s, _: adapters.adapters(
        s.clients, s.frozen, *s.start[0], s.start[1], COHORTS, eta=0.3, steps=4, scale=3 / 2
    ),
    server=lambda server: (server.theta[0], server.head),
    model=lambda model: (model[:2], model[2]),
    model_args={"adapters": "lora:2:3", "personal": "B"},
)
LATE = [(1,), (1, 3), (0, 1), (2, 3)]  # at first nobody has class 2; 1 comes again and again
for normalize, more in ((True, {}), (False, {"local_labels": True, "part": "full"})):
    case(
        f"fed3r, {normalize}",
        "fed3r",
        {"lam": 0.3, "normalize": normalize, "temperature": 0.5, "eta_ft": 0.2, "steps_ft": 4} | more,
        lambda s, _, normalize=normalize, more=more: fed3r.fed3r(
            s.clients, s.start[0], K, LATE, lam=0.3, normalize=normalize, temperature=0.5, eta=0.2, steps=4, **more
        ),
        server=lambda server: (*server.sums, server.head),
        cohorts=LATE,
    )


def first_heads(s, algorithm) -> dict:
    """{client: the head in its first state}."""
    return {i: arrays(state.head) for i, state in initial_states(algorithm, s.data.population).items()}


def whether(amounts):
    """1 where there is an amount, else 0."""
    return tf.cast(amounts > 0, tf.float64)


def rows(table) -> dict:
    """{client: its row} of a table of the server, in which every array has one row for each client."""
    table = arrays(table)
    return {i: tuple(a[i] for a in table) for i in range(len(EXAMPLES))}


for lam, least in ((2.0, 0.0), (0.5, 0.2)):
    case(
        f"fedpac, {lam}, {least}",
        "fedpac",
        {"lam": lam, "eta_g": 0.4, "tau_g": 3, "eta_f": 0.2, "tau_f": 4, "unit": "steps", "momentum": 0.0}
        | {"least_weight": least},
        lambda s, algorithm, lam=lam, least=least: fedpac.fedpac(
            s.clients,
            s.start,
            COHORTS,
            eta_g=0.4,
            steps_g=3,
            eta_f=0.2,
            steps_f=4,
            lam=lam,
            heads=rows(algorithm.init_server().heads),
            missing="own",
            threshold=least,
        ),
        server=lambda server: (server.theta, server.centroids, whether(server.shares)),
    )
for momentum, decay, clip in ((0.0, 0.0, None), (0.6, 0.05, 0.4)):
    case(
        f"pfedhn, {momentum}",
        "pfedhn",
        {"embed_dim": 2, "hidden_dim": 6, "n_hidden": 2, "alpha": 0.2, "embed_alpha": 0.3, "clip": clip, "wd": decay}
        | {"hyper_momentum": momentum, "eta": 0.2, "steps": 3, "momentum": 0.0},
        lambda s, algorithm, momentum=momentum, decay=decay, clip=clip: pfedhn.pfedhn(
            s.clients,
            s.start,
            *arrays(algorithm.init_server().hyper),
            COHORTS,
            eta=0.2,
            steps=3,
            alpha=0.2,
            alpha_v=0.3,
            embedding="whole",
            clip=clip,
            momentum=momentum,
            decay=decay,
        ),
        server=lambda server: server.hyper,
    )


def valved(model):
    """GPFL's personal model: theta with 1 + gamma and beta of the client, and its head."""
    theta, _, valve, head, p_i = model
    gamma, beta = gpfl.affine(valve, p_i)[0]
    return (*theta, 1 + gamma, beta), head


for conditions, theirs in (("received", "received"), ("trained", "before")):
    case(
        f"gpfl, {conditions}",
        "gpfl",
        {"lam": 0.2, "mu": 0.1, "conditions": conditions, "eta": 0.05, "steps": 4},
        lambda s, algorithm, theirs=theirs: gpfl.gpfl(
            s.clients,
            s.start,
            *arrays(algorithm.init_server()[1:]),
            COHORTS,
            eta=0.05,
            steps=4,
            lam=0.2,
            mu=0.1,
            heads=first_heads(s, algorithm),
            conditions=theirs,
        ),
        model=valved,
        agrees=lambda s, algorithm, message, state, client, model: difference(
            algorithm.model.logits(algorithm.personal_model(message, state, s.data.visit(client)), tf.constant(NEW)),
            gpfl.predicted(model, NEW),
        ),
    )
PREDICTS = {  # (the client's model, the server's prototypes, its labels) -> its head
    "prototypes": lambda model, server, y: fedproto.nearest(server),
    "own_prototypes": lambda model, server, y: fedproto.nearest(server, y),
    "head": lambda model, server, y: model[1],
}


def by_prototypes(s, predict, **args):
    """FedProto's rounds, with the models that clients predict with."""
    rounds = fedproto.fedproto(s.clients, s.start, COHORTS, eta=0.3, steps=4, lam=0.7, **args)
    for server, models in rounds:
        made = {i: (m[0], PREDICTS[predict](m, server, s.clients[i][1])) for i, m in models.items()}
        yield Round((server[0], 1.0 * server[1]), made)


for predict, penalty, weighting in (
    ("prototypes", "examples", "uniform"),
    ("own_prototypes", "prototypes", "examples"),
    ("head", "examples", "examples"),
):
    case(
        f"fedproto, {predict}",
        "fedproto",
        {"lam": 0.7, "eta": 0.3, "steps": 4, "penalty": penalty, "predict": predict, "weighting": weighting},
        lambda s, _, predict=predict, penalty=penalty, weighting=weighting: by_prototypes(
            s, predict, distance={"examples": "code"}.get(penalty, penalty), weighting=weighting
        ),
        server=lambda server: (server.values, whether(server.counts)),
    )


def outputs(algorithm, message, state, visit, x):
    """The outputs z of `Algorithm.predictor` for examples x."""
    features = algorithm.model.features(algorithm.personal_model(message, state, visit).theta, tf.constant(x))
    return algorithm.predictor(message, state, visit)(features).numpy()


def near(kernel, lam):
    """A comparison of kNN-Per's predictions, with three neighbours."""
    distance = {"paper": "euclid"}.get(kernel, kernel)

    def agrees(given, algorithm, message, state, client, model):
        memory, given_x = given.clients[client], {"k": 3, "scale": 0.7, "distance": distance}
        found = outputs(algorithm, message, state, given.data.visit(client), NEW)
        share = knn_per.chosen(model, memory, **given_x) if lam is None else lam
        expected = knn_per.predicted(model, memory, NEW, lam=share, **given_x)
        return np.max(np.abs(found - np.log(np.maximum(expected, 1e-12))))

    return agrees


for kernel, lam in (("paper", None), ("code", None), ("paper", 0.4)):
    case(
        f"knn_per, {kernel}, {lam}",
        "knn_per",
        {"k": 3, "lam": lam, "scale": 0.7, "kernel": kernel, "eta": 0.3, "steps": 4},
        lambda s, _: knn_per.knn_per(s.clients, s.start, COHORTS, eta=0.3, steps=4),
        agrees=near(kernel, lam),
    )


def both_heads(model):
    """FedCP's personal model: what its two heads say together if every gate is 1/2."""
    theta, top, _, own = model
    return theta, ((own[0] + top[0]) / 2, own[1] + top[1])


def separated(given, algorithm, message, state, client, model):
    """The client's own head, and the outputs of both with the gates of new examples."""
    found = outputs(algorithm, message, state, given.data.visit(client), NEW)
    return max(np.max(np.abs(found - fedcp.predicted(model, NEW))), difference(state, model[3]))


for lam in (0.0, 3.0):
    case(
        f"fedcp, lam = {lam}",
        "fedcp",
        {"lam": lam, "eta": 0.2, "steps": 4},
        lambda s, algorithm, lam=lam: fedcp.fedcp(
            s.clients, s.start, arrays(algorithm.init_server().policy), COHORTS, eta=0.2, steps=4, lam=lam
        ),
        model=both_heads,
        agrees=separated,
    )


FAST = ("fedrep", "fedala, p = 1", "feddane, examples")
PAIRS = [(name, engine) for engine in ENGINES for name in CASES]
QUICK = [(name, "local") for name in FAST]
BY_DAY = [pair for pair in PAIRS if pair[1] == "local" or pair[0] in FAST]


@pytest.mark.parametrize(("name", "engine"), slow_but(PAIRS, *QUICK, ci=BY_DAY))
def test_every_weight_is_that_of_the_independent_version(name, engine):
    found = compare(CASES[name], engine)
    print(name, engine, found)
    assert max(found.values()) < ALLOWED, found


@pytest.mark.slow
@pytest.mark.parametrize("name", [next(iter(CASES))])
def test_the_comparison_sees_a_small_difference(name):
    """Every rate counts: a millionth more on one side is seen."""
    rates = [n for n, value in CASES[name].hyperparameters.items() if isinstance(value, float)]
    assert rates
    for rate in rates:
        more = CASES[name].hyperparameters | {rate: CASES[name].hyperparameters[rate] * (1 + 1e-6)}
        found = compare(CASES[name]._replace(hyperparameters=more), "local")
        assert max(found.values()) > 100 * ALLOWED, (rate, found)


def test_fedpacs_smallest_point_is_that_of_all_supports():
    """On matrices as the server makes them, of which some have their smallest point where clients count nothing."""
    rng, outside = np.random.default_rng(8), 0
    for size in (1, 2, 3, 5, 6):
        for _ in range(6):
            gaps = rng.standard_normal((size, 4))
            matrix = np.diag(0.05 + 0.3 * rng.random(size)) + gaps @ gaps.T
            expected = fedpac.smallest_on_simplex(matrix)
            np.testing.assert_allclose(simplex_minimum(matrix), expected, atol=ALLOWED)
            outside += (expected == 0).any()
    assert outside >= 6
