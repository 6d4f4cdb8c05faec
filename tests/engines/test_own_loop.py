"""A loop of one's own over `next`: the same as `Training`, in both engines; and what a wrong argument is told."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.one_broken import build
from helpers.toys import distance, identical, initial_states, on_disk, toy, toy_of
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.contract import ClientData
from tfpfl.checks import InvalidArgument
from tfpfl.data import client_key, cohort
from tfpfl.engines import Scorer, Simulation, Visit, federate, federated_evaluation, visits
from tfpfl.runs.training import Training

MAKE = {"local": Simulation, "tff": federate}
ENGINES = slow_but(["local", "tff"], "local", "tff")
SPECS = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32))


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("own_loop") / "federation")


@pytest.fixture(scope="module")
def algorithm(federation):
    return build("pflego", federation)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, federation, algorithm):
    if request.param == "tff":
        request.getfixturevalue("tff")
    return MAKE[request.param](algorithm, federation)


def test_the_loop_is_trainings(engine, algorithm, federation):
    """In the same engine, to the bit."""
    server, states = engine.initialize(), {}
    for t in range(1, 4):
        ids = cohort(5, t, algorithm.population)
        held = [states.get(i, algorithm.init_client(algorithm.population.info(i))) for i in ids]
        output = engine.next(server, held, visits(algorithm, t, ids, seed=5))
        server = output.server
        states |= dict(zip(ids, output.client_states, strict=True))
    name = "local" if isinstance(engine, Simulation) else "tff"
    training = Training(algorithm, federation, seed=5, engine=name, splits=())
    training.run(3)
    assert identical(server, training.server_state())
    assert identical(list(states.values()), training.client_states(list(states)))


def test_visits_are_of_a_list_of_ids(algorithm):
    for strange in (iter([0, 1]), {0, 1}, 1, [True], [0.0], ["0"], [[0]]):
        with pytest.raises(InvalidArgument, match=r"client_ids must be a list of ids, such as \[0, 3\]"):
            visits(algorithm, 1, strange)


def test_labels_in_a_list_of_python_are_refused_as_examples_are(algorithm):
    (visit,) = visits(algorithm, 1, [0])
    x = np.ones((int(visit.info.num_examples), 4), np.float32)
    engine = Simulation(algorithm)
    for wrong in ([0] * len(x), (0,) * len(x)):
        with pytest.raises(InvalidArgument, match="client 0: examples must be an array .* Use np.asarray"):
            data = ClientData(x, wrong, visit.info, visit.key)
            engine.next(engine.initialize(), [algorithm.init_client(visit.info)], [data])


def test_visits_are_scalars_and_keys(algorithm):
    made = visits(algorithm, 7, [3, 1], seed=2)
    assert all(isinstance(visit, Visit) for visit in made)
    assert [int(visit.info.client_id) for visit in made] == [3, 1]
    np.testing.assert_array_equal([visit.key for visit in made], client_key(2, 7, [3, 1]))


def test_visits_are_of_clients_of_the_population(algorithm):
    ids = algorithm.population.client_ids
    with pytest.raises(InvalidArgument, match=rf"no client 99, 100. It has {len(ids)} clients, from {ids[0]} to "):
        visits(algorithm, 1, [100, 1, 99])


def wrong_visits(algorithm, federation):
    """(what was given instead of two visits, what the message says of it)."""
    x, y = federation.arrays(0)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return [
        ([0, 1], "visit 0 must be a tfpfl.Visit.*found int '0'"),
        (np.arange(2), "visits must be a list with one for every client.*found ndarray"),
        ([x, x], "visit 0 must be .* found ndarray"),
        ([(x, y), (x, y)], "visit 0 must be .* found tuple"),
        ([data, data], "visit 0 must be .* found _TensorSliceDataset"),
        (visits(algorithm, 1, [0])[0], "visits must be a list.*found Visit"),
        ({0: 1, 1: 2}, "visits must be a list.*found dict"),
    ]


def test_a_wrong_argument_says_what_a_visit_is(engine, algorithm, federation):
    server, states = engine.initialize(), initial_states(algorithm, algorithm.population)
    for given, why in wrong_visits(algorithm, federation):
        with pytest.raises(ValueError, match=f"{why}.*A visit is what a client is given.*tfpfl.engines.visits"):
            engine.next(server, [states[0], states[1]], given)
    made = visits(algorithm, 1, [0, 1])
    with pytest.raises(ValueError, match="found 1 states and 2 visits"):
        engine.next(server, [states[0]], made)
    with pytest.raises(ValueError, match="found 0 states and 0 visits"):
        engine.next(server, [], [])
    with pytest.raises(ValueError, match="client 1 is in the round 2 times.*Give each client one visit"):
        engine.next(server, [states[0], states[1], states[1]], visits(algorithm, 1, [0, 1, 1]))
    with pytest.raises(ValueError, match="client_states must be a list.*next\\(server, client_states, visits\\)"):
        engine.next(server, states[0], made)
    with pytest.raises(ValueError, match="visits must be a list.*found NoneType. The call is next\\(server, client_st"):
        engine.next(server, made)


def test_a_state_is_that_of_its_client(engine, algorithm, federation):
    """The head of a client with three classes was trained for one with two, and scored, without a word."""
    calls = [engine.next, Scorer(algorithm, federation, ["test"])]
    if not isinstance(engine, Simulation):
        calls[1] = federated_evaluation(algorithm, federation, ["test"])
        calls.append(federate(algorithm, federation, pack=2).next)
    server, states = engine.initialize(), initial_states(algorithm, algorithm.population)
    made, head = visits(algorithm, 1, [2, 1]), states[2]
    kernel = np.asarray(head.kernel)
    assert kernel.shape == (5, 2) and states[1].kernel.shape == (5, 3)
    for wrong, why in (
        (states[1], r"has kernel as float32 \[5, 3\], but init_client gives float32 \[5, 2\]"),
        (head._replace(kernel=kernel[:4]), r"has kernel as float32 \[4, 2\], but init_client gives float32 \[5, 2\]"),
        (head._replace(kernel=kernel.astype("float64")), r"has kernel as float64 \[5, 2\], but"),
        ((), r"has another structure than init_client gives: a tuple of 0, and not Head\(kernel, bias\)"),
    ):
        for call in calls:
            with pytest.raises(InvalidArgument, match=rf"client_states\[0\], of client 2, {why}.*the state of its own"):
                call(server, [wrong, states[1]], made)


def test_without_a_federation_a_visit_carries_its_examples(tff, algorithm):
    data = toy(dtype="float32")
    start = algorithm.init_server()
    for engine in (Simulation(algorithm), federate(algorithm, SPECS)):
        with pytest.raises(ValueError, match="must be a tfpfl.ClientData.*ClientData\\(x, y, visit.info, visit.key\\)"):
            engine.next(start, [algorithm.init_client(data.population.info(0))], visits(algorithm, 1, [0]))


def test_with_a_federation_no_visit_carries_examples(engine, algorithm, federation):
    """They would be left out without a word: the federation's are read."""
    server, state = engine.initialize(), initial_states(algorithm, algorithm.population)[0]
    visit = visits(algorithm, 1, [0])[0]
    carried = [ClientData(*federation.arrays(0), visit.info, visit.key)]
    told = "visit 0 must be a tfpfl.Visit, found ClientData.*The examples are read from the Federation"
    with pytest.raises(InvalidArgument, match=told):
        engine.next(server, [state], carried)
    with pytest.raises(InvalidArgument, match=told):
        Scorer(algorithm, federation, ["test"])(server, [state], carried)


@pytest.mark.parametrize("name", slow_but(["pflego", "feddane"], "pflego"))
@pytest.mark.parametrize("make", slow_but(["local", "tff"], "local"))
def test_examples_that_a_visit_carries_are_checked(request, name, make):
    if make == "tff":
        request.getfixturevalue("tff")
    data = toy(dtype="float32", classes=(3,) * 5)
    algorithm = build_algorithm(name, data.model, data.population)
    engine = Simulation(algorithm) if make == "local" else federate(algorithm, SPECS)
    server, state = engine.initialize(), algorithm.init_client(data.population.info(0))
    info, key = visits(algorithm, 1, [0])[0]
    x, y = data.data[0]
    for wrong, why in (
        ((x[:0], y[:0]), "client 0 has 0 examples"),
        ((x, y + 7), "client 0 has labels 7..9, but its classes are 0..2"),
        ((x, y - 1), "client 0 has labels -1..1"),
        ((x + np.float32("nan"), y), "client 0 has examples that are not finite"),
        ((x, y[:2]), "client 0 has 6 examples and 2 labels"),
        ((x[:4], y[:4]), "client 0 has 4 examples, but 6 in the population.*Give tfpfl.Population the numbers"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            engine.next(server, [state], [ClientData(*wrong, info, key)])


@pytest.mark.slow
def test_the_round_is_still_a_computation_of_tff(tff, algorithm, federation):
    """It can be put into another process, and called in another computation."""
    process = federate(algorithm, federation)
    again = tff.templates.IterativeProcess(process.initialize, process.next)
    assert again.next.type_signature == process.next.type_signature

    @tff.federated_computation(process.next.type_signature.parameter)
    def losses(arguments):
        return process.next(*arguments).metrics

    states = initial_states(algorithm, algorithm.population)
    given = process.initialize(), [states[0], states[2]], visits(algorithm, 1, [0, 2])
    assert distance(dict(losses(given)), dict(process.next(*given).metrics)) == 0


@pytest.mark.slow
def test_arrays_as_visits(tff, algorithm):
    """The visit of a client that is not in a federation: made from `visits`, with its examples."""
    data = toy(dtype="float32")
    given = [ClientData(*data.data[i], v.info, v.key) for i, v in enumerate(visits(algorithm, 1, [0, 1, 2, 3, 4]))]
    states = list(initial_states(algorithm, data.population).values())
    found = [e.next(e.initialize(), states, given) for e in (Simulation(algorithm), federate(algorithm, SPECS))]
    assert distance(found[0].server, found[1].server) < 1e-5


def test_labels_and_shapes_that_a_visit_carries_are_checked():
    """They ended in errors of TensorFlow or Keras; labels that are floats were told of columns of targets."""
    data = toy(dtype="float32", classes=(3,) * 5)
    algorithm = build_algorithm("pflego", data.model, data.population)
    engine, (visit,) = Simulation(algorithm), visits(algorithm, 1, [0])
    x, y = map(np.asarray, data.data[0])
    for wrong_x, wrong_y, why in (
        (x, np.eye(3)[y], r"labels of shape \(\d+, 3\) and type float64: they must be integers .* labels.argmax\(1\)"),
        (x, np.eye(3, dtype="int32")[y], r"labels of shape \(\d+, 3\) and type int32"),
        (x, y.astype("float32"), r"labels of shape \(\d+,\) and type float32: they must be integers"),
        (x[:, :2], y, r"examples of shape \(2,\), but the model takes \(4,\)"),
        (x.tolist(), y, "examples must be an array .* found list"),
    ):
        with pytest.raises(InvalidArgument, match=f"client 0.*{why}"):
            engine.next(
                algorithm.init_server(),
                [algorithm.init_client(visit.info)],
                [ClientData(wrong_x, wrong_y, visit.info, visit.key)],
            )


def test_targets_that_a_visit_carries_may_be_integers():
    """Counts are integers. They were taken for ids of classes: refused, or as a vector [N] taken for one output."""
    data = toy_of("poisson")
    simulation = Simulation(build_algorithm("fedavg", data.model, data.population, steps=2))
    server, visit = simulation.initialize(), data.visit(0)
    y = np.asarray(visit.y)
    assert y.max() > 1
    found = [simulation.next(server, [()], [visit._replace(y=y.astype(dtype))]).server for dtype in ("int64", y.dtype)]
    assert identical(*found)
    for wrong in (y[:, 0].astype("int64"), np.zeros(len(y), "int64")):
        with pytest.raises(InvalidArgument, match=r"client 0 has targets of shape \(6,\): they must be .* \[N, 2\]"):
            simulation.next(server, [()], [visit._replace(y=wrong)])


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        ("multilabel", -1, "must be 0 or 1: 1 is not, the first is number 2 with -1"),
        ("multilabel", np.nan, "must be 0 or 1: .* with nan"),
        ("poisson", -2, "must be finite and not below 0: .* with -2"),
        ("huber:0.2", np.inf, "must be finite: .* with inf. What to do: fill them in"),
    ],
)
def test_targets_that_a_visit_carries_are_of_their_kind(kind, wrong, says):
    """A label that is missing, such as -1, was trained as a target."""
    data = toy_of(kind)
    simulation = Simulation(build_algorithm("fedavg", data.model, data.population, steps=2))
    visit = data.visit(0)
    y = np.array(visit.y)
    y[2, 1] = wrong
    with pytest.raises(InvalidArgument, match=f"client 0: {data.model.kind.label.name} targets {says}"):
        simulation.next(simulation.initialize(), [()], [visit._replace(y=y)])


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
@pytest.mark.parametrize("make", slow_but(["local", "tff"], "local"))
def test_labels_may_be_any_integers(request, make, dtype):
    """As uint8, in which many files have them, they ended in an error of TensorFlow that named no client."""
    if make == "tff":
        request.getfixturevalue("tff")
    data = toy(dtype="float32")
    algorithm = build_algorithm("fedavg", data.model, data.population, steps=3)
    made, states = visits(algorithm, 1, data.ids), list(initial_states(algorithm, data.population).values())

    def after(labels):
        specs = (SPECS[0], tf.TensorSpec([None], labels))
        engine = Simulation(algorithm) if make == "local" else federate(algorithm, specs)
        given = [
            ClientData(data.data[v.info.client_id][0], data.data[v.info.client_id][1].astype(labels), *v) for v in made
        ]
        return engine.next(engine.initialize(), states, given).server

    assert distance(after(dtype), after("int32")) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda out: out, r"RoundOutput\(server, .* Give what initialize\(\) returned or, after a round, the entry"),
        (lambda out: None, "the server's state has another structure than init_server gives: None, and not"),
        (lambda out: tf.nest.map_structure(lambda w: w[..., None], out.server), "but init_server gives float32"),
        pytest.param(
            lambda out: tf.nest.map_structure(lambda w: tf.cast(w, "float64"), out.server),
            "as float64",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_server_state_that_is_none_is_refused(algorithm, federation, wrong, said):
    """The commonest slip in a loop of one's own: all that `next` returned, in place of its entry `server`."""
    simulation, given = Simulation(algorithm, federation), visits(algorithm, 1, [0, 1])
    states = [algorithm.init_client(visit.info) for visit in given]
    out = simulation.next(simulation.initialize(), states, given)
    with pytest.raises(InvalidArgument, match=said):
        simulation.next(wrong(out), states, given)
    with pytest.raises(InvalidArgument, match=said):
        Scorer(algorithm, federation)(wrong(out), states, given)


def test_a_state_is_not_none(algorithm, federation):
    """Whoever writes a method without client states may return None, and is told what to return."""

    def nothing(info):
        return None

    told = r"returned None, or None is a part.*init_client=lambda info: \(\)"
    for make in (Simulation, Training):
        with pytest.raises(InvalidArgument, match=told):
            make(algorithm._replace(init_client=nothing), federation)
    wrong = Simulation(algorithm._replace(init_server=lambda: (1.0, None)), federation)
    with pytest.raises(InvalidArgument, match=told):
        wrong.next((1.0, None), [algorithm.init_client(visit.info) for visit in visits(algorithm, 1, [0])], [])


def test_things_of_other_types_are_refused_by_name(algorithm, federation):
    for wrong in (None, str(federation.path)):
        with pytest.raises(InvalidArgument, match="federation must be a tfpfl.Federation: .*found"):
            Training(algorithm, wrong)
    with pytest.raises(InvalidArgument, match="sampling must be a tfpfl.Sampling.*found 0.5"):
        federation.population(0.5)
    with pytest.raises(InvalidArgument, match="client is given by its number, found 'ann': tfpfl.data.find_client"):
        federation.arrays("ann")
    model, population = algorithm.model, algorithm.population
    with pytest.raises(InvalidArgument, match=r"a tfpfl.Population, found Federation: give federation.population\(\)"):
        build_algorithm("pflego", model, federation)
    with pytest.raises(InvalidArgument, match="model must be a tfpfl.SplitModel, found Population"):
        build_algorithm("pflego", population, model)
    for name, value, wanted in (("tau", 5.0, "int"), ("tau", "5", "int"), ("beta", "0.1", "float")):
        with pytest.raises(InvalidArgument, match=f"{name} must be {wanted}, found {value!r}"):
            build_algorithm("pflego", model, population, **{name: value})
    assert build_algorithm("fedavg", model, population, steps=np.int64(2), eta=np.float32(0.1), client_opt="adam")
