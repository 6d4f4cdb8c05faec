"""Fused and stacked cohorts against the plain one, client after client."""

import importlib.util
from functools import cache, partial

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import arrays_of_states, backbone, distance, identical, on_disk, visits
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.algorithms.transforms import faults
from tfpfl.algorithms.transforms.compression import compressed
from tfpfl.algorithms.transforms.robust import median, trimmed_mean
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation, Source
from tfpfl.data.population import Sampling
from tfpfl.engines import packed
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.packed import Packed, groups, initial_states, one_pass_of, side_by_side
from tfpfl.engines.scoring import Scorer, shared_theta
from tfpfl.engines.tff.process import federate
from tfpfl.engines.visit import client_state_spec
from tfpfl.models import SplitModel, build_network
from tfpfl.models.losses import client_loss
from tfpfl.runs.cost import Counter

# Two clients like each other, twice, and one like no other.
EXAMPLES, CLASSES = (6, 9, 6, 7, 9), (2, 3, 2, 4, 3)
COHORTS = ([0, 1, 2, 4], [3, 1, 0], [4, 2, 0, 1, 3])
ONE_PASS = {"pflego": {"tau": 7, "beta": 0.1}, "fedsgd": {}, "fedrecon": {"tau": 7, "beta": 0.1}}
SMALL_STEPS = {"epochs": 2, "batch_size": 4, "eta": 0.1, "momentum": 0.5}
FUSED = [("pflego", "float64"), ("fedsgd", "float64")]  # the fast ones
OTHERS = {"fedavg": SMALL_STEPS, "fedper": SMALL_STEPS, "ditto": {"steps": 2, "steps_p": 2}, "fedamp": {"steps": 2}}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("cohort") / "federation", EXAMPLES, CLASSES)


def make(name, federation, dtype="float64", model=None, **hyperparameters):
    population = federation.population(Sampling("fixed", 0.8), shared_slots=True)
    hyperparameters = {**ONE_PASS, **OTHERS}.get(name, {}) | hyperparameters
    known = ALGORITHMS[name].hyperparameters
    model = model or SplitModel(backbone(dtype))
    return build_algorithm(name, model, population, **{k: v for k, v in hyperparameters.items() if k in known})


def rounds(algorithm, federation, **how):
    """(server, states, the cohort's metrics and the clients' of every round) of a `Simulation`."""
    simulation, states, metrics = Simulation(algorithm, federation, **how), arrays_of_states(algorithm), []
    server = simulation.initialize()
    for t, ids in enumerate(COHORTS, 1):
        output = simulation.next(server, [states[i] for i in ids], visits(algorithm, ids, t))
        server, states = output.server, states | dict(zip(ids, output.client_states, strict=True))
        metrics.append((dict(output.metrics), [dict(m) for m in output.client_metrics]))
    return server, states, metrics


@pytest.fixture(scope="module")
def plain(federation):
    """plain(name, dtype) -> what `rounds` gives client after client; computed once."""
    return cache(lambda name, dtype: rounds(make(name, federation, dtype), federation, grouping="one_by_one"))


def one_in_float32(names, single):
    """(name, dtype): float64 for all, float32 for one."""
    return [(name, "float64") for name in names] + [(single, "float32")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), slow_but(one_in_float32(ONE_PASS, "pflego"), *FUSED))
def test_fused_is_plain(federation, name, dtype):
    algorithm = make(name, federation, dtype)
    assert one_pass_of(algorithm) is not None
    plain = rounds(algorithm, federation, grouping="one_by_one", held_out=["test"])
    fused = rounds(algorithm, federation, grouping="fused", held_out=["test"])
    assert distance(fused, plain) < {"float32": 1e-5, "float64": 1e-9}[dtype]
    assert {kind.__name__ for kind in map(type, [Simulation(algorithm, federation)._clients])} == {"Fused"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(one_in_float32([*ONE_PASS, *OTHERS], "fedavg"), ci=(("fedavg", "float64"), ("fedamp", "float64"))),
)
def test_stacked_is_plain(federation, plain, name, dtype):
    stacked = rounds(make(name, federation, dtype), federation, grouping="stacked")
    assert distance(stacked, plain(name, dtype)) < {"float32": 1e-5, "float64": 1e-9}[dtype]


@pytest.mark.slow
def test_newtons_heads_in_float32_are_the_same_stacked(federation):
    """Rounding alone decided the direction after some steps of conjugate gradients; heads then differed by 1."""
    algorithm = make("pflego", federation, "float32", inner_opt="newton", tau=2)
    plain, stacked = (rounds(algorithm, federation, grouping=way)[:2] for way in ("one_by_one", "stacked"))
    assert distance(stacked, plain) < 1e-3


IN_CHUNKS = ["pflego", "fed3r", "fedproto", "feddbe", "fedas", "fedcp", "fedala"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(IN_CHUNKS, *IN_CHUNKS[:2]))
def test_features_in_chunks_can_be_stacked(federation, name):
    """Some clients are alike; a chunk may be all examples of a client, or a few."""
    algorithm, ids = make(name, federation, chunk=4), [0, 1, 2, 4]
    found = []
    for grouping in ("one_by_one", "stacked"):
        engine, states = Simulation(algorithm, federation, grouping=grouping), arrays_of_states(algorithm)
        output = engine.next(engine.initialize(), [states[i] for i in ids], visits(algorithm, ids, 1))
        found.append((output.server, output.client_states))
    assert distance(*found) < 1e-9


@pytest.fixture(scope="module")
def pixels(tmp_path_factory):
    """Clients whose examples are stored as bytes; 1 / 255 is exact in no dtype, so it shows where they are decoded."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 256, (80, 4), np.uint8), np.arange(80) % 4
    source = Source.from_arrays(x, y, scale=1 / 255)
    return Federation.build(source, clients=5, K=2, seed=0, out=tmp_path_factory.mktemp("pixels") / "federation")


@pytest.mark.slow
def test_every_way_of_computing_reads_examples_in_the_models_dtype(pixels):
    """A client's loss at the initial weights, from examples that are decoded here, in float64."""
    algorithm = make("pflego", pixels, tau=1)
    server, states = algorithm.init_server(), arrays_of_states(algorithm)
    ids, losses = [0, 1, 3], {}
    own, its_visits = [states[i] for i in ids], visits(algorithm, ids, 1)

    def truth(client, split):
        raw, y = pixels.raw(client, split)
        weights = algorithm.personal_model(server.theta, states[client], None)
        return client_loss(algorithm.model)(weights, raw.astype(np.float64) * (1 / 255), y)

    for grouping in ("one_by_one", "stacked", "fused"):
        output = Simulation(algorithm, pixels, grouping=grouping).next(server, own, its_visits)
        losses[grouping] = [m["loss"] for m in output.client_metrics], [truth(i, "train") for i in ids]
    if importlib.util.find_spec("tensorflow_federated"):
        output = federate(algorithm, pixels).next(server, own, its_visits)
        losses["tff"] = [m["loss"] for m in output.client_metrics], [truth(i, "train") for i in ids]
    for grouping in ("one_by_one", "auto"):
        scores = Scorer(algorithm, pixels, ["test"], grouping=grouping)(server, own, its_visits)
        losses[f"evaluation, {grouping}"] = [s["test_loss"] for s in scores], [truth(i, "test") for i in ids]
    assert {way: float(np.abs(np.subtract(*pair)).max()) for way, pair in losses.items()} == pytest.approx(
        dict.fromkeys(losses, 0.0), abs=1e-14
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["pflego", "fedavg", "fedamp"], "pflego"))
def test_threads_change_no_bit(federation, name):
    algorithm = make(name, federation, "float32")
    alone = rounds(algorithm, federation, grouping="one_by_one", threads=1)
    assert identical(rounds(algorithm, federation, grouping="one_by_one", threads=4), alone)


@pytest.mark.slow
def test_a_group_is_as_large_as_its_memory(federation, plain, monkeypatch):
    assert groups([3, 4, 2, 9, 1], 2**27) == [[0], [1], [2], [3], [4]]  # two examples fill a group
    assert groups([1, 1, 2, 3, 1], 2**27) == [[0, 1], [2], [3], [4]]
    assert groups([1, 1, 1], 1) == [[0, 1, 2]] and groups([], 1) == []
    algorithm = make("pflego", federation)
    monkeypatch.setattr(packed, "GROUP_BYTES", 16 * algorithm.model.activation_bytes)
    assert len(groups(EXAMPLES, algorithm.model.activation_bytes)) == 3
    assert distance(rounds(algorithm, federation, grouping="fused"), plain("pflego", "float64")) < 1e-9


def test_a_fused_cohort_takes_one_pass_each_way(federation, monkeypatch):
    counter = Counter(SplitModel(backbone("float32")))
    algorithm = make("pflego", federation, model=counter.model)
    simulation, states, ids = (
        Simulation(algorithm, federation, grouping="fused"),
        arrays_of_states(algorithm),
        [0, 1, 3],
    )
    calls = []
    monkeypatch.setattr(counter, "_add_forward", lambda n: calls.append(int(n)) or np.int32(0))
    simulation.next(simulation.initialize(), [states[i] for i in ids], visits(algorithm, ids, 1))
    assert calls == [6 + 9 + 7] and counter.backward == 6 + 9 + 7


WAYS = [("pflego", "fused"), ("fedavg", "one_by_one"), ("fedavg", "stacked")]


@pytest.mark.parametrize(("name", "way"), slow_but(WAYS, *WAYS[:2]))
def test_nothing_is_traced_again_for_other_clients(tmp_path, name, way):
    examples = (5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10)
    federation = on_disk(tmp_path / "federation", examples, [2, 2, 3, 3, 4, 4] * 2)
    algorithm = make(name, federation, "float32")
    simulation, states = Simulation(algorithm, federation, grouping=way), arrays_of_states(algorithm)
    server = simulation.initialize()
    graph = simulation._clients._visit if way == "one_by_one" else simulation._clients._work

    def traces(ids):
        simulation.next(server, [states[i] for i in ids], visits(algorithm, ids, 1))
        return graph.experimental_get_tracing_count()

    before = [traces(ids) for ids in ([0, 1, 2], [2, 3, 4, 5], [0, 1])][-1]
    assert traces([4, 5, 6, 7, 8]) == traces([9, 10, 11]) == traces([6, 7]) == traces(range(12)) == before


SHARE = {"pflego": True, "fedper": True, "fedavg": True, "fedsgd": True, "local": False, "ditto": False,
         "fedavg_ft": False, "fedamp": False, "layerwise": False, "fedrod": True, "pgfed": False}  # fmt: skip


def copied(algorithm):
    """The same method, in which every weight of the personal models and of what clients send is a copy."""

    def personal_model(message, state, data):
        return tf.nest.map_structure(tf.identity, algorithm.personal_model(message, state, data))

    def client_update(message, state, data):
        return tf.nest.map_structure(tf.identity, algorithm.client_update(message, state, data))

    return algorithm._replace(personal_model=personal_model, client_update=client_update)


@pytest.mark.slow
def test_a_copy_of_the_weights_changes_nothing(federation):
    algorithm = make("pflego", federation, "float32")
    wrapped, ids = copied(algorithm), [4, 0, 1, 3, 2]
    states = [arrays_of_states(algorithm)[i] for i in ids]
    evaluations = [Scorer(a, federation, ["test"]) for a in (algorithm, wrapped)]
    scores = [each(algorithm.init_server(), states, visits(algorithm, ids, 1)) for each in evaluations]
    assert identical(*scores)
    assert [type(part).__name__ for part in evaluations[1]._parts] == ["FusedEvaluation"]
    assert type(Simulation(wrapped, federation)._clients).__name__ == "Fused"
    assert identical(rounds(wrapped, federation), rounds(algorithm, federation))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(SHARE, *list(SHARE)[:2]))
def test_who_shares_a_backbone_is_evaluated_together(federation, name):
    algorithm = make(name, federation, **({"steps": 2, "epochs": None} if name != "pflego" else {}))
    server, states = algorithm.init_server(), arrays_of_states(algorithm)
    ids = [4, 0, 1, 3, 2]
    own, cohort_visits = [states[i] for i in ids], visits(algorithm, ids, 1)
    assert (shared_theta(algorithm) is not None) == SHARE[name]
    together = Scorer(algorithm, federation, ["test", "train"])
    found = together(server, own, cohort_visits)
    plain = Scorer(algorithm, federation, ["test", "train"], grouping="one_by_one")(server, own, cohort_visits)
    assert distance(found, plain) < 1e-9
    # A global model goes through the backbone with the personal ones where it has theirs, else by itself.
    assert len(together._parts) == 1 + (algorithm.global_model is not None and not SHARE[name])
    assert (type(together._parts[0]).__name__ == "FusedEvaluation") == SHARE[name]


def test_a_fine_tuned_head_has_the_shared_backbone(federation):
    algorithm = make("fedavg_ft", federation, part="head", steps=2)
    found = shared_theta(algorithm)
    assert identical(found(algorithm.init_server()), algorithm.init_server().theta)


@pytest.mark.parametrize("wrap", [
    screened, partial(faults.broken_work, which=faults.drawn(huge=0.5)),
    partial(faults.broken_data, which=faults.drawn(no_examples=0.5)), compressed, median,
    trimmed_mean,
])  # fmt: skip
def test_who_changes_a_clients_work_is_not_fused(federation, wrap):
    """What the personal models have in common stays."""
    algorithm = make("pflego", federation)
    wrapped = wrap(algorithm)
    assert algorithm.one_pass is not None and wrapped.one_pass is None
    assert wrapped.shares == algorithm.shares == "backbone"


def sends_nothing(algorithm):
    """The algorithm with a `sent` of one's own, by which a client's update is zeros."""

    def sent(state, output, visit):
        return output._replace(update=tf.nest.map_structure(tf.zeros_like, output.update))

    return algorithm._replace(sent=sent)


WAYS_OF_SENDING = ["auto", "one_by_one", "stacked", "tff"]


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_but(WAYS_OF_SENDING, *WAYS_OF_SENDING[:3]))
def test_what_a_client_sends_is_what_arrives(request, federation, way):
    algorithm = sends_nothing(make("pflego", federation, "float32"))
    if way == "tff":
        request.getfixturevalue("tff")
        process = federate(algorithm, federation, pack=2)
    else:
        process = Simulation(algorithm, federation, grouping=way)
    server, states, ids = process.initialize(), arrays_of_states(algorithm), [0, 2, 4]
    output = process.next(server, [states[i] for i in ids], visits(algorithm, ids, 1))
    assert identical(output.server.theta, server.theta)


def test_packed_states_are_the_states(federation):
    spec = (tf.TensorSpec([3, None]), {"b": tf.TensorSpec([None]), "a": tf.TensorSpec([], tf.int32)})
    states = [(np.arange(3.0 * k, dtype="float32").reshape(3, k), {"b": np.ones(k, "float32"), "a": np.int32(k)})
              for k in (2, 5, 1)]  # fmt: skip
    packed = Packed.made(states)
    assert identical(packed.each(spec), states)
    assert Packed.made([(), (), ()]).each(()) == [(), (), ()]


def test_packed_states_may_have_more_numbers_than_int32_counts(federation, monkeypatch):
    """The places of clients after the 2^31st number were negative; whole models of many clients have so many."""
    monkeypatch.setattr(np, "concatenate", lambda arrays: arrays[0])  # the memory is never touched
    large = Packed.made([np.empty(2**30, np.int8)] * 3)
    np.testing.assert_array_equal(large.ends, [[0, 2**30, 2**31, 3 * 2**30]])
    monkeypatch.undo()
    algorithm = make("pflego", federation)
    infos = side_by_side([algorithm.population.info(i, np.float64) for i in (1, 2)])
    first = initial_states(algorithm)(infos)
    assert large.ends.dtype == first.ends.dtype == first.type_of().ends.dtype == np.int64
    assert identical(first.each(client_state_spec(algorithm)), [arrays_of_states(algorithm)[i] for i in (1, 2)])


def test_activations_are_counted():
    """28 x 28 inputs flattened, then a product, a sum and a ReLU of 200."""
    model = SplitModel(build_network("mlp200", (28, 28, 1)))
    assert 4 * (784 + 3 * 200) <= model.activation_bytes <= 4 * (2 * 784 + 4 * 200)


@pytest.mark.parametrize(
    ("name", "options", "how", "message"),
    [
        ("fedavg", {}, {"grouping": "fused"}, "grouping='fused' needs a federation"),
        ("pflego", {"recompute": True}, {"grouping": "fused"}, "without recompute or chunk"),
        ("pflego", {"chunk": 4}, {"grouping": "fused"}, "without recompute or chunk"),
        (
            "pflego",
            {},
            {"grouping": "fuzed"},
            "grouping must be one of auto, one_by_one, fused, stacked; found 'fuzed'",
        ),
        ("pflego", {}, {"threads": 0}, "threads must be at least 1, found 0"),
    ],
)
def test_what_cannot_be_is_refused(federation, name, options, how, message):
    with pytest.raises(ValueError, match=message):
        Simulation(make(name, federation, **options), federation, **how)


def test_a_scorer_refuses_what_it_would_not_do(federation):
    """Any text but 'one_by_one' was 'auto'."""
    algorithm = make("pflego", federation)
    with pytest.raises(InvalidArgument, match="grouping must be one of auto, one_by_one; found 'stacked'"):
        Scorer(algorithm, federation, grouping="stacked")
    with pytest.raises(InvalidArgument, match="at least one split is needed to score models, found none"):
        Scorer(algorithm, federation, [])


def test_without_a_federation_nothing_is_held_out(federation):
    """The splits were left out without a word."""
    algorithm = make("pflego", federation)
    with pytest.raises(InvalidArgument, match="held-out splits test can be read only from a Federation.*no held_out"):
        Simulation(algorithm, held_out=["test"])


@pytest.mark.parametrize("way", ["fused", "stacked"])
def test_clients_that_bring_their_arrays_are_run_plainly(federation, way):
    algorithm = make("pflego", federation)
    with pytest.raises(ValueError, match=f"grouping='{way}' needs a federation"):
        Simulation(algorithm, grouping=way)
    assert type(Simulation(algorithm)._clients).__name__ == "OneByOne"


def test_a_client_that_diverges_in_a_fused_cohort_is_named(federation):
    algorithm = make("pflego", federation, "float32")
    simulation, states = Simulation(algorithm, federation, grouping="fused"), arrays_of_states(algorithm)
    states[1] = tf.nest.map_structure(lambda leaf: leaf * np.float32("nan"), states[1])
    output = simulation.next(simulation.initialize(), [states[i] for i in (0, 1, 3)], visits(algorithm, [0, 1, 3], 1))
    assert [int(m["finite"]) for m in output.client_metrics] == [1, 0, 1]
