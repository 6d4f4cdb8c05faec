"""Secure aggregation in the simulation: the same integers as the NumPy codec, exact sums, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from helpers.marks import slow_but
from helpers.normalized import model_for
from helpers.one_broken import only
from helpers.quick import quick
from helpers.toys import backbone, distance, identical, initial_states, on_disk, toy, visits_by_id
from tflite_export.device.live.secure.codec import Codec, CodecError
from tflite_export.device.live.secure.exchange import LEAST
from tfpfl.algorithms import ALGORITHMS, build_algorithm, fedprox
from tfpfl.algorithms.transforms import faults
from tfpfl.algorithms.transforms.discrete_gaussian import discrete_gaussian
from tfpfl.algorithms.transforms.fixed_point import fixed_point, wrapped
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.algorithms.transforms.secure import Sent, codec_of, quorum, secured, weights_of
from tfpfl.algorithms.transforms.server_optimizer import server_optimized
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.data.population import Sampling
from tfpfl.data.randomness import Fold
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.tff.process import federate
from tfpfl.engines.visit import client_work, federation_readers
from tfpfl.live.secure_graph import threshold_of
from tfpfl.models import SplitModel, tree
from tfpfl.studies.battery_subject import CLASSES, EXAMPLES

COHORT = [0, 1, 2, 4, 5]
EVERYONE = Sampling("fixed", rate=1.0)
NEEDS_ALL = "sum of the updates and nothing else"
REFUSED = dict.fromkeys(("fedfomo", "fedamp", "heurfedamp", "pgfed", "pgfedmo", "fedpac", "pfedhn"), NEEDS_ALL)
REFUSED |= {"feddane": "two exchanges a round", "fedas": "weight depends on its examples", "local": "send nothing"}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("secure") / "federation", EXAMPLES, CLASSES)


def method(name, federation, sampling=EVERYONE, **changes):
    population = federation.population(sampling, shared_slots=True)
    return build_algorithm(name, model_for(name), population, **quick(name) | changes)


def one_round(process, algorithm, ids=COHORT):
    """The output of a round in which these clients take part, and the server's state before it."""
    states, start = initial_states(algorithm, algorithm.population), process.initialize()
    return start, process.next(start, [states[i] for i in ids], visits_by_id(algorithm.population, ids, 1))


# ---- the codec


def random_case(draw):
    """A codec of NumPy and one of TensorFlow with the same numbers, and what one client encodes; None: none fits."""
    size, clients = int(draw.choice([1, 7, 300])), int(draw.choice([3, 20, 100, 10_000]))
    clip, weight = 10 ** draw.uniform(-3, 3, 2)
    numbers = draw.normal(0, 1, size) * 10 ** draw.uniform(-6, 3) * 10 ** draw.uniform(-4, 0, size)
    numbers = numbers.astype(np.float32)
    kind = draw.integers(12)
    if kind == 0:
        numbers[:] = 0
    elif kind == 1:
        numbers[draw.integers(size)] = 1e-40
    elif kind == 2:
        numbers = np.exp2(draw.integers(-30, 3, size)).astype(np.float32)  # the largest one is a power of two
    try:
        theirs = Codec(size, clients, clip, weight, 500)
    except CodecError:
        return None
    ours = fixed_point(size, clients, clip, weight, 500)
    random = draw.integers(0, 2**32, size + 3, dtype=np.uint32)
    given = numbers, float(np.float32(weight * draw.uniform(0.01, 1))), int(draw.integers(1, 501))
    return theirs, ours, (*given, float(np.float32(draw.normal() * 40)), random)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [pytest.param(200), pytest.param(10_000, marks=[pytest.mark.slow])])
def test_tensorflow_makes_the_integers_of_numpy(cases):
    draw, found = np.random.default_rng(27), 0
    while found < cases:
        if (case := random_case(draw)) is None:
            continue
        theirs, ours, (numbers, weight, examples, loss, random) = case
        assert (ours.exponent, ours.loss_exponent, ours.most) == (theirs.exponent, theirs.loss_exponent, theirs.most)
        expected = theirs.encode(numbers, weight, examples, loss, random)
        words, clipped = ours.encode(
            tf.constant(numbers), tf.constant(weight, tf.float64), tf.constant(examples), tf.constant(loss), random
        )
        np.testing.assert_array_equal(words.numpy() % 2**32, expected.words)
        assert bool(clipped) == expected.is_clipped
        assert np.linalg.norm(words.numpy()[: ours.size].astype(float)) <= ours.sensitivity
        found += 1


def test_tensorflow_makes_the_integers_of_the_test_vectors():
    """Those that clients in C and in browsers check, too."""
    cases = json.loads((Path(__file__).parents[1] / "device" / "secure_vectors.json").read_text())["codec_cases"]
    for case in cases:
        ours = fixed_point(*(case[k] for k in ("size", "clients", "clip", "max_weight", "max_examples")))
        assert (ours.exponent, ours.loss_exponent) == (case["exponent"], case["loss_exponent"])
        numbers, random = (np.array(case[k], np.uint32) for k in ("gradient", "random"))
        weight, facts = tf.constant(case["weight"], tf.float64), (case["examples"], case["loss"])
        words, _ = ours.encode(tf.constant(numbers.view(np.float32)), weight, *map(tf.constant, facts), random)
        np.testing.assert_array_equal(words.numpy() % 2**32, case["words"])
    assert len(cases) > 2


def test_a_sum_of_words_is_the_one_modulo_2_32():
    words = np.random.default_rng(0).integers(0, 2**32, (50, 1000), dtype=np.uint32)
    signed = words.view(np.int32).astype(np.int64)
    with np.errstate(over="ignore"):
        expected = words.sum(0, dtype=np.uint32).view(np.int32)
    np.testing.assert_array_equal(wrapped(tf.constant(signed.sum(0))).numpy(), expected)


def expected_server(algorithm, federation, clip=100.0):
    """The server's state after a round of the cohort, computed with NumPy's codec from the clients' own updates."""
    work = client_work(algorithm, federation_readers(algorithm, federation))
    population = algorithm.population
    server, states = algorithm.init_server(), initial_states(algorithm, population)
    message = algorithm.message(server)
    visits = visits_by_id(population, COHORT, 1)
    outputs = [work(message, states[i], visit) for i, visit in zip(COHORT, visits, strict=True)]
    vectors = [tree.to_vector(out.update).numpy().astype(np.float32) for out in outputs]
    largest = max(weights_of(algorithm))
    codec = Codec(len(vectors[0]), population.num_clients, clip, largest, int(population.num_examples.max()))
    total = np.zeros(codec.words, np.uint32)
    for visit, out, vector in zip(visits, outputs, vectors, strict=True):
        seed = tf.random.experimental.stateless_fold_in(visit.key, int(Fold.ROUNDING))
        random = tf.random.stateless_uniform([codec.words], seed, None, None, tf.uint32, alg="philox").numpy()
        facts = float(out.weight), int(visit.info.num_examples), float(out.metrics["loss"])
        total += codec.encode(vector, *facts, random).words
    sums = tree.from_vector(tf.constant(codec.decode(total).gradient), outputs[0].update)
    weight = tf.add_n([out.weight for out in outputs])
    sums = tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), sums)
    means = tree.scale(1 / weight, sums)
    if not isinstance(algorithm.aggregate, str):
        pairs = zip(algorithm.aggregate, means, sums, strict=True)
        found = type(algorithm.aggregate)(*(m if kind == "mean" else s for kind, m, s in pairs))
    else:
        found = means if algorithm.aggregate == "mean" else sums
    return algorithm.step(server, found, weight)


@pytest.mark.slow
@pytest.mark.parametrize("engine", slow_but(["local", "tff"], "local", ci=("tff",)))
@pytest.mark.parametrize("name", slow_but(["pflego", "fedavg", "scaffold"], "pflego", ci=("fedavg",)))
@pytest.mark.parametrize("clip", [100.0, 0.05])
def test_a_round_adds_the_integers_of_the_live_codec(name, engine, clip, federation, request):
    if engine == "tff":
        request.getfixturevalue("tff")
    algorithm = method(name, federation)
    made = secured(algorithm, clip=clip)
    process = {"local": Simulation, "tff": federate}[engine](made, federation)
    start, out = one_round(process, made)
    assert distance(out.server, expected_server(algorithm, federation, clip)) < 2e-7  # of float32
    assert distance(out.server, start) > 1e-4
    assert (float(out.metrics["clipped"]) > 0.5) == (clip < 1)


@pytest.mark.slow
@pytest.mark.parametrize("grouping", ["auto", "stacked"])
def test_groupings_and_threads_give_the_same_bits(grouping, federation):
    made = secured(method("fedavg", federation), clip=1.0, noise=0.5)
    expected = one_round(Simulation(made, federation, grouping="one_by_one", threads=1), made)[1].server
    found = one_round(Simulation(made, federation, grouping=grouping, threads=3), made)[1].server
    assert distance(found, expected) < (1e-6 if grouping == "stacked" else 1e-30)  # stacked visits round differently


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(sorted(set(ALGORITHMS) - set(REFUSED)), "fedper"))
def test_every_method_that_needs_a_sum_ends_a_round_as_without(name, federation):
    algorithm = method(name, federation)
    plain = one_round(Simulation(algorithm, federation), algorithm)[1]
    made = secured(algorithm)
    found = one_round(Simulation(made, federation), made)[1]
    assert distance(found.server, plain.server) < 1e-5
    assert distance(found.client_states, plain.client_states) < 1e-5


@pytest.mark.parametrize("name", slow_but(REFUSED, "fedamp", "local", ci=("fedas",)))
def test_methods_that_a_sum_of_updates_does_not_serve_are_refused(name, federation):
    """FedAS weighs a client by the Fisher information of its model, and the server is told the sum of the weights."""
    with pytest.raises(InvalidArgument, match=REFUSED[name]):
        secured(method(name, federation))


@pytest.mark.slow
def test_fedas_with_weights_that_follow_from_the_number_of_examples(federation):
    algorithm = method("fedas", federation, weighting="examples")
    plain, made = one_round(Simulation(algorithm, federation), algorithm)[1], secured(algorithm)
    assert distance(one_round(Simulation(made, federation), made)[1].server, plain.server) < 1e-5


def test_two_clients_in_a_round_are_refused(federation):
    with pytest.raises(InvalidArgument, match="at least 3 clients in a round, found 2"):
        secured(method("fedavg", federation, Sampling("fixed", rate=0.3)))


@pytest.mark.slow
def test_a_weight_that_is_larger_than_it_was_said_stops_the_round(federation):
    algorithm = method("fedavg", federation)

    def by_loss(message, state, data):
        output = algorithm.client_update(message, state, data)
        return output._replace(weight=output.weight * (1 + 100 * tf.reduce_sum(tf.abs(data.x))))

    made = secured(algorithm._replace(client_update=by_loss), weights=weights_of(algorithm))
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not follow from N_i"):
        one_round(Simulation(made, federation), made)


def test_the_quorum_is_what_the_shares_need():
    """Each client that stays must find t of its neighbours there, so t + 1 must stay; any two such sets overlap."""
    for members in range(3, 200):
        t = threshold_of(members - 1, 0.5)
        assert quorum(members) == max(LEAST, t + 1) <= members < 2 * quorum(members)
        assert quorum(members, 0.9) >= quorum(members)


# ---- balance


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["scaffold", "feddyn"], "scaffold"))
@pytest.mark.parametrize("arguments", [{"clip": 0.1}, {"clip": 0.1, "noise": 1.0}])
def test_the_servers_sum_stays_that_of_what_clients_keep(name, arguments, federation):
    """SCAFFOLD's c is the mean of all c_i, and FedDyn's h that of all g_i."""
    algorithm = method(name, federation)
    made = secured(algorithm, **arguments)
    process, population = Simulation(made, federation), made.population
    server, states = process.initialize(), dict(initial_states(made, population))
    for t, ids in enumerate((COHORT, [3, 4, 6], [0, 1, 6], COHORT), 1):
        out = process.next(server, [states[i] for i in ids], visits_by_id(population, ids, t))
        server = out.server
        states |= dict(zip(ids, out.client_states, strict=True))
        assert float(out.metrics["clipped"]) > 0
    held, each = (server.c, [s.c for s in states.values()]) if name == "scaffold" else (server.h, list(states.values()))
    kept = tree.scale(1 / 7, tf.nest.map_structure(lambda *leaves: tf.add_n([*map(tf.constant, leaves)]), *each))
    size = float(tf.linalg.global_norm(tf.nest.flatten(held)))
    assert distance(held, kept) < 1e-5 * size and size > 1e-3


@pytest.mark.slow
def test_a_client_whose_work_was_rejected_sends_zeros_and_keeps_its_state(federation):
    algorithm = method("scaffold", federation)
    broken = screened(faults.broken_work(algorithm, only("not finite")))
    made = secured(broken, weights=weights_of(algorithm))
    expected = one_round(Simulation(broken, federation), broken)[1]
    found = one_round(Simulation(made, federation), made)[1]
    assert int(found.metrics["rejected"]) == int(expected.metrics["rejected"]) > 0
    assert distance(found.server, expected.server) < 1e-5
    assert distance(found.client_states, expected.client_states) < 1e-5


# ---- noise


def masses(sigma):
    """(integers, their probabilities under N_Z(0, sigma^2)), to 12 standard deviations."""
    x = np.arange(-int(12 * sigma) - 2, int(12 * sigma) + 3)
    p = np.exp(-(x**2) / (2 * sigma**2))
    return x, p / p.sum()


@pytest.mark.parametrize("sigma", [1.0, 1.7, 6.0, 40.25])
def test_noise_is_discrete_gaussian(sigma):
    """Pearson's chi-square against the exact probabilities; the tails are joined to cells of 20 expected numbers."""
    number = 200_000
    drawn = discrete_gaussian(sigma, number, tf.constant([27, 1])).numpy()
    x, p = masses(sigma)
    inner = number * p >= 20
    counted = np.bincount(drawn - x[0], minlength=len(x)).astype(float)
    found, expected = counted[inner], number * p[inner]
    found, expected = np.append(found, number - found.sum()), np.append(expected, number - expected.sum())
    chi = ((found - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 1].sum()
    assert 1e-4 < stats.chi2.sf(chi, int((expected > 1).sum()) - 1) < 1 - 1e-4


def test_noise_follows_from_its_seed_and_only_from_it():
    a, b, c = (discrete_gaussian(9.0, 500, tf.constant(seed)).numpy() for seed in ([1, 2], [1, 2], [1, 3]))
    np.testing.assert_array_equal(a, b)
    assert abs(np.corrcoef(a, c)[0, 1]) < 0.2


def test_of_rounds_that_are_mostly_too_small_the_noise_is_that_of_three_clients(federation):
    few, three = (method("fedavg", federation, Sampling("binomial", rate)) for rate in (0.05, 0.4))
    assert codec_of(few, 1.0, 1.0)[1].clients == codec_of(three, 1.0, 1.0)[1].clients == LEAST


def noise_sent(algorithm, federation, clip, noise, rounds):
    """(what clients send, less the words of the codec alone: integers [rounds, clients, P]; the codec; the shares)."""
    codec, shares = codec_of(algorithm, clip, noise)
    made, readers = secured(algorithm, clip=clip, noise=noise), federation_readers(algorithm, federation)
    noisy, plain = (tf.function(client_work(a, readers)) for a in (made, algorithm))
    message, states = algorithm.message(algorithm.init_server()), initial_states(algorithm, algorithm.population)
    found = []
    for t in range(1, rounds + 1):
        for i, visit in enumerate(visits_by_id(algorithm.population, range(len(states)), t)):
            out = plain(message, states[i], visit)
            seed = tf.random.experimental.stateless_fold_in(visit.key, int(Fold.ROUNDING))
            random = tf.random.stateless_uniform([codec.words], seed, None, None, tf.uint32, alg="philox")
            facts = tf.cast(out.weight, tf.float64), visit.info.num_examples, out.metrics["loss"]
            vector = tf.cast(tree.to_vector(out.update), tf.float32)
            without = codec.encode(vector, *facts, random)[0]
            words = noisy(message, states[i], visit).update.words
            found.append((words - without)[: codec.size].numpy())
    return np.reshape(found, (rounds, len(states), codec.size)), codec, shares


@pytest.mark.slow
def test_what_clients_send_has_the_noise_that_was_asked_for(federation):
    """r clients' words, less what they are without noise, have the standard deviation z W C 2^s together."""
    model = SplitModel(backbone("float32", width=500))
    algorithm = build_algorithm("fedavg", model, federation.population(EVERYONE, shared_slots=True), **quick("fedavg"))
    noise, codec, shares = noise_sent(algorithm, federation, clip=1.0, noise=2.0, rounds=3)
    total = noise.sum(1).ravel()
    assert total.size > 20_000  # so that 2.5 % is five standard deviations of the estimate
    promised = 2.0 * codec.max_weight * 2.0**codec.exponent
    assert np.std(total) == pytest.approx(promised, rel=0.025)
    assert abs(np.mean(total)) < 5 * promised / np.sqrt(total.size)
    # Each client draws new noise in each round: noise that is known from another round could be taken away.
    between = np.corrcoef(noise.reshape(-1, codec.size)) - np.eye(3 * 7)
    assert np.abs(between).max() < 6 / np.sqrt(codec.size)
    assert codec.max_weight * 2.0**codec.exponent + 12 * shares.sigma < codec.most  # nothing is cut off


def test_an_update_says_nothing_but_its_words_and_its_weight(federation):
    made = secured(method("pflego", federation), clip=1.0, noise=1.0)
    work = client_work(made, federation_readers(made, federation))
    (visit,) = visits_by_id(made.population, [0], 1)
    sent = work(made.message(made.init_server()), initial_states(made, made.population)[0], visit)
    assert isinstance(sent.update, Sent) and sent.update.words.dtype == tf.int64
    np.testing.assert_array_equal(sent.update.words[-2:], [0, 0])  # the loss, which would have no noise
    assert int(sent.update.words[-3]) == int(visit.info.num_examples)


def dropping(data, straggler, **more):
    return fedprox(data.model, data.population, steps=1, straggler=straggler, straggler_policy="drop", **more)


def test_the_weights_are_those_of_visits_that_count():
    """In most visits of such a FedProx a client is late and has the weight 0."""
    data = toy(dtype="float32")
    algorithm = dropping(data, 0.9)
    assert weights_of(algorithm).tolist() == data.population.num_examples.tolist()
    assert codec_of(algorithm)[0].max_weight == max(data.population.num_examples)


def rarely_in_time(data, arrival):
    """PFLEGO, whose weights are alpha_i / arrival_i, if the last of five clients is in time with this probability."""
    some = replace(data.population, num_examples=np.full(5, 8), arrival=[1, 1, 1, 1, arrival], sampling=EVERYONE)
    return build_algorithm("pflego", data.model, some, **quick("pflego"))


def test_who_is_never_in_time_leaves_the_others_their_resolution():
    data = toy(dtype="float32")
    usual = codec_of(rarely_in_time(data, 1.0))[0]
    assert codec_of(rarely_in_time(data, 0.0))[0] == usual
    assert codec_of(rarely_in_time(data, 0.25))[0].exponent == usual.exponent - 2


def test_a_weight_that_leaves_the_others_little_resolution_is_told_with_its_client():
    data = toy(dtype="float32")
    with pytest.warns(TfpflWarning, match=r"4 has 1e\+03 times the median weight, because it comes back in 0.001 of"):
        codec_of(rarely_in_time(data, 1e-3))
    with pytest.raises(InvalidArgument, match="it comes back in 1e-07 of its rounds only: take a larger --round-dead"):
        codec_of(rarely_in_time(data, 1e-7))
    with pytest.warns(TfpflWarning, match="client 3 has 200 times the median weight. Take a smaller --secure-clip"):
        secured(dropping(data, 0.0), weights=np.array([1.0, 1, 1, 200, 1]))


@pytest.mark.slow
def test_weights_of_0_alone_are_refused():
    with pytest.raises(InvalidArgument, match="all weights are 0: no client's work would ever count"):
        secured(dropping(toy(dtype="float32"), 1.0))


@pytest.mark.parametrize("rejected", [False, True])
def test_a_client_of_weight_0_sends_its_share_of_the_noise(rejected):
    """Epsilon counts a share for each client that came and was not rejected. A client that was rejected sends none."""
    data = toy(dtype="float32")
    algorithm = dropping(data, 1.0)  # all are late, so all words are noise
    if rejected:
        algorithm = screened(faults.broken_work(algorithm, lambda data: tf.constant(1)))
    made = secured(algorithm, clip=1.0, noise=1.0, weights=np.ones(5))
    visit = data.visit(0)
    output = algorithm.client_update(algorithm.init_server(), (), visit)
    sent = made.sent((), output, visit)
    assert float(sent.weight) == (0 if rejected else 1) and float(sent.update.weight) == 0
    assert int(tf.reduce_max(tf.abs(sent.update.words))) > 0


def test_a_round_of_stragglers_alone_is_no_step_of_the_servers_optimizer():
    """They send their shares of the noise, so something came; theta went on by the momentum."""
    data = toy(dtype="float32")
    algorithm = server_optimized(dropping(data, 1.0), server_opt="momentum")
    made = secured(algorithm, clip=1.0, noise=1.0, weights=np.ones(5))
    server = made.init_server()
    server = tree.arrays(server._replace(slots=tf.nest.map_structure(tf.ones_like, server.slots)))
    out = Simulation(made).next(server, [()] * 3, [data.visit(i) for i in (0, 1, 2)])
    assert identical(out.server, server)
