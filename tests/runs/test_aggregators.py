"""TFF's aggregators and ours, against closed forms, against no aggregator, and against dp-accounting called by hand."""

import importlib
import warnings
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from helpers import small_runs
from helpers.marks import slow_but
from helpers.one_broken import build, only
from helpers.toys import backbone, distance, identical, initial_states, on_disk, visits_by_id
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.parts.local_training import straggles
from tfpfl.algorithms.transforms import faults
from tfpfl.algorithms.transforms.robust import _trimmed, median, trimmed_mean
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.data.cohorts import cohort
from tfpfl.data.population import Population, Sampling
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.tff.aggregators import OF_TFF, Aggregated, WithState, _quantized, check_mean
from tfpfl.engines.tff.process import federate
from tfpfl.models import SplitModel, tree
from tfpfl.runs import aggregators
from tfpfl.runs.aggregators import check_method_can_have_it, factory
from tfpfl.runs.config import RunConfig
from tfpfl.runs.needs import check_needs, warn_of_small_rounds
from tfpfl.runs.privacy import chance_of_no_clients, privacy
from tfpfl.runs.run import Run
from tfpfl.runs.training import Training
from tfpfl.studies.battery_subject import CLASSES, EXAMPLES
from tfpfl.studies.records import Record

COHORT = [0, 1, 2, 4, 5]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("aggregators") / "federation", EXAMPLES, CLASSES)


def one_round(process, algorithm, ids=COHORT, server=None):
    """(the server's state before, after)."""
    start = process.initialize() if server is None else server
    states = initial_states(algorithm, algorithm.population)
    out = process.next(start, [states[i] for i in ids], visits_by_id(algorithm.population, ids, 1))
    own = getattr(out.server, "own", out.server)
    return getattr(start, "own", start), own


def aggregated(name, algorithm, federation, **arguments):
    return federate(algorithm, federation, aggregator=factory(name, arguments, algorithm))


def updates(algorithm, federation):
    """What each client of the cohort would move an averaging server by, if it came alone."""
    engine = Simulation(algorithm, federation)
    moves = (one_round(engine, algorithm, [i]) for i in COHORT)
    return [tree.to_vector(tree.subtract(after, before)).numpy() for before, after in moves]


# ---- TFF's


@pytest.mark.parametrize("name", slow_but(["pflego", "fedavg", "scaffold"], ci=("scaffold",)))
def test_an_aggregator_that_changes_nothing_changes_nothing(name, federation, tff):
    algorithm = build(name, federation)._replace(balance=None)  # SCAFFOLD's: it has two parts, and none is clipped here
    expected = one_round(Simulation(algorithm, federation), algorithm)[1]
    found = one_round(aggregated("clip", algorithm, federation, norm=1e9), algorithm)[1]
    assert distance(found, expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("ids", [[0], COHORT], ids=len)
def test_an_unweighted_mean_gives_the_sum_of_whoever_came(ids, federation, tff):
    """Three clients are expected; fewer or more come. PFLEGO adds its updates, FedAvg averages them."""
    for name, how in (("pflego", {"server_opt": "sgd"}), ("fedavg", {"weighting": "uniform"})):
        algorithm = build(name, federation, **how)
        process = federate(algorithm, federation, aggregator=tff.aggregators.UnweightedMeanFactory())
        expected = one_round(Simulation(algorithm, federation), algorithm, ids)[1]
        assert distance(one_round(process, algorithm, ids)[1], expected) < 1e-6


@pytest.mark.slow
def test_a_rejected_client_is_not_counted_in_an_unweighted_mean(federation, tff):
    for name, how in (("pflego", {"server_opt": "sgd"}), ("fedavg", {"weighting": "uniform"})):
        algorithm = screened(faults.broken_work(build(name, federation, **how), only("not finite")))
        process = federate(algorithm, federation, aggregator=tff.aggregators.UnweightedMeanFactory())
        expected = one_round(Simulation(algorithm, federation), algorithm)[1]
        assert distance(one_round(process, algorithm)[1], expected) < 1e-6
        before, after = one_round(process, algorithm, [2])  # nobody is left
        assert identical(before, after)


@pytest.mark.slow
def test_clipping_is_that_of_screening(federation, tff):
    """Two implementations: TFF's at the sum, and ours in the client's work."""
    algorithm = build("fedavg", federation)
    norms = [np.linalg.norm(u) for u in updates(algorithm, federation)]
    limit = float(np.median(norms))
    expected = one_round(Simulation(screened(algorithm, clip_norm=limit), federation), algorithm)[1]
    found = one_round(aggregated("clip", algorithm, federation, norm=limit), algorithm)[1]
    free = one_round(Simulation(algorithm, federation), algorithm)[1]
    assert distance(found, expected) < 1e-6 and distance(found, free) > 1e-4


@pytest.mark.slow
def test_zeroing_leaves_out_who_has_a_large_number(federation, tff):
    algorithm = build("fedavg", federation, weighting="uniform")
    moves = updates(algorithm, federation)
    largest = np.array([np.abs(u).max() for u in moves])
    limit = float(np.sort(largest)[-2:].mean())
    before, after = one_round(aggregated("zero", algorithm, federation, norm=limit), algorithm)
    expected = np.mean([u if m <= limit else 0 * u for u, m in zip(moves, largest, strict=True)], 0)
    assert distance(tree.to_vector(tree.subtract(after, before)), expected) < 1e-6


@pytest.mark.slow
def test_compression_errs_by_less_than_a_step_and_counts_its_bytes(federation, tff):
    algorithm = build("fedavg", federation, weighting="uniform")
    threshold = 20
    counted = aggregators.with_aggregator("compress", {"threshold": threshold}, algorithm)
    process = aggregated("compress", counted, federation, threshold=threshold)
    free = one_round(Simulation(algorithm, federation), algorithm)[1]
    found = one_round(process, algorithm)[1]
    spread = max(np.ptp(u) for u in updates(algorithm, federation))
    assert 0 < distance(found, free) < spread / 255 * 4  # a rotation by Hadamard's matrix spreads what is rounded
    states = initial_states(algorithm, algorithm.population)
    out = process.next(process.initialize(), [states[0]], visits_by_id(algorithm.population, [0], 1))
    sizes = [int(tf.size(w)) for w in tf.nest.flatten(algorithm.init_server())]
    assert int(out.metrics["bytes_up"]) == sum(n + 8 if n > threshold else 4 * n for n in sizes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_rounded_is_right_on_average_and_the_same_again(dtype):
    draw = np.random.default_rng(0)
    x = draw.normal(0, 1, (500, 40)).astype(dtype)
    found = _quantized(tf.constant(x), 4).numpy()
    step = np.ptp(x) / 15
    steps = (found - x.min()) / step
    assert found.dtype == dtype and np.abs(steps - np.round(steps)).max() < 1e-4
    assert np.abs(found - x).max() < step * 1.001 and found.min() == x.min()
    # the mean of 20,000 errors of at most a step; five standard deviations, so a bias of a fiftieth of a step is seen
    assert np.abs((found - x).mean()) < 5 * step / np.sqrt(4 * x.size)
    parts = x.min() + step * np.arange(15)[:, None]
    assert len(np.unique(found)) == 16 and (np.abs(found[None] - parts[:1]) >= 0).all()
    np.testing.assert_array_equal(_quantized(tf.constant(x), 4), found)
    other = _quantized(tf.constant(x[::-1].copy()), 4).numpy()[::-1]
    assert 0.1 < (other != found).mean() < 0.6  # other random numbers for another order
    np.testing.assert_array_equal(_quantized(tf.fill([7], tf.constant(3, x.dtype)), 8), np.full(7, 3, dtype))


@pytest.mark.slow
def test_a_run_with_compression_can_be_repeated(federation, tff):
    algorithm = build("fedavg", federation)
    process = aggregated("compress", algorithm, federation, threshold=20)
    first, again = (one_round(process, algorithm)[1] for _ in range(2))
    assert identical(first, again)
    assert not identical(first, one_round(Simulation(algorithm, federation), algorithm)[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip", "robust"])
def test_limits_follow_those_whose_work_was_used(name, federation, tff):
    """A client that is rejected sent zeros, which would make the limit of the others smaller."""
    algorithm = screened(faults.broken_work(build("fedavg", federation), only("not finite")))
    process = federate(algorithm, federation, aggregator=factory(name, {}, algorithm))
    states = initial_states(algorithm, algorithm.population)

    def after(ids):
        server = process.initialize()
        for t in range(1, 4):
            visits = visits_by_id(algorithm.population, ids, t)
            server = process.next(server, [states[i] for i in ids], visits).server
        return server

    with_broken, without = after(COHORT), after([i for i in COHORT if i != 2])
    assert distance(with_broken.own, without.own) < 1e-6
    found, expected = (
        [np.asarray(x) for x in tf.nest.flatten(s.aggregator) if np.asarray(x).dtype == np.float32]
        for s in (with_broken, without)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_robust_is_tffs_where_nobody_is_rejected(federation, tff):
    algorithm = build("fedavg", federation)
    theirs = federate(algorithm, federation, aggregator=tff.learning.robust_aggregator())
    ours = aggregated("robust", algorithm, federation)
    servers = [theirs.initialize(), ours.initialize()]
    states = initial_states(algorithm, algorithm.population)
    for t in range(1, 5):
        visits = visits_by_id(algorithm.population, COHORT, t)
        servers = [
            process.next(server, [states[i] for i in COHORT], visits).server
            for process, server in zip((theirs, ours), servers, strict=True)
        ]
        assert distance(*(server.own for server in servers)) < 1e-6


def test_who_sends_nothing_sends_no_compressed_bytes(federation):
    algorithm = aggregators.with_aggregator("compress", {"bits": 4}, build("local", federation))
    states = initial_states(algorithm, algorithm.population)
    engine = Simulation(algorithm, federation)
    out = engine.next(engine.initialize(), [states[0]], visits_by_id(algorithm.population, [0], 1))
    assert int(out.metrics["bytes_up"]) == 0


# ---- ours


@pytest.mark.slow
@pytest.mark.parametrize("engine", slow_but(["local", "tff"], "local"))
def test_the_median_and_the_trimmed_mean_are_numpys(engine, federation, tff):
    algorithm = build("fedavg", federation)
    moves = np.array(updates(algorithm, federation))
    make = {"local": Simulation, "tff": federate}[engine]
    for changed, expected in (
        (median(algorithm), np.median(moves, 0)),
        (trimmed_mean(algorithm, trim=0.2), np.sort(moves, 0)[1:-1].mean(0)),
        (trimmed_mean(algorithm, trim=0.0), moves.mean(0)),
    ):
        before, after = one_round(make(changed, federation), algorithm)
        assert distance(tree.to_vector(tree.subtract(after, before)), expected) < 1e-6


def test_a_trim_cuts_as_many_as_it_says():
    """In floating point 0.29 * 100 is slightly less than 29."""
    rows = tf.constant([[1e6]] * 29 + [[0.0]] * 71, tf.float64)
    assert float(_trimmed(rows, 0.29)[0]) == 0


@pytest.mark.parametrize("robust", [median, lambda a: trimmed_mean(a, trim=0.1)], ids=["median", "trimmed_mean"])
def test_whole_numbers_of_an_update_have_a_median_with_a_fraction(robust, federation):
    """A method of one's own may send counts. The median of 6 and 9 was 7."""
    plain = build("fedavg", federation)

    def client_update(w, state, data):
        return plain.client_update(w, state, data)._replace(update=data.info.num_examples)

    counting = plain._replace(
        init_server=lambda: tf.zeros([]),
        message=lambda server: plain.init_server(),
        client_update=client_update,
        server_update=lambda server, found: found,
    )
    sizes = plain.population.num_examples
    ids = [0, int(np.argmax((sizes - sizes[0]) % 2))]
    found = one_round(Simulation(robust(counting), federation), counting, ids)[1]
    assert sizes[ids].sum() % 2 and float(found) == sizes[ids].mean()


@pytest.mark.slow
def test_pflegos_sum_is_the_weights_times_the_median(federation):
    algorithm = build("pflego", federation, server_opt="sgd")
    population = algorithm.population
    moves = np.array([tree.to_vector(u.theta).numpy() for u in _moves(algorithm, federation)])
    alpha = np.array([population.info(i).alpha for i in COHORT])
    before, after = one_round(Simulation(median(algorithm), federation), algorithm)
    expected = alpha.sum() * np.median(moves / alpha[:, None], 0)
    assert distance(tree.to_vector(tree.subtract(after.theta, before.theta)), expected) < 1e-6


def _moves(algorithm, federation):
    engine = Simulation(algorithm, federation)
    return [tree.subtract(after, before) for before, after in (one_round(engine, algorithm, [i]) for i in COHORT)]


@pytest.mark.slow
def test_one_huge_update_moves_the_mean_and_not_the_median(federation):
    algorithm = build("fedavg", federation)
    broken = faults.broken_work(algorithm, only("huge"))

    def moved(change):
        sound, hurt = (one_round(Simulation(change(a), federation), algorithm)[1] for a in (algorithm, broken))
        return distance(sound, hurt)

    assert moved(lambda a: a) > 100 and moved(median) < 1


@pytest.mark.slow
def test_a_screened_median_forgets_the_rejected(federation):
    algorithm = build("fedavg", federation)
    broken = screened(median(faults.broken_work(algorithm, only("not finite"))))
    found = one_round(Simulation(broken, federation), algorithm)[1]
    without = one_round(Simulation(median(algorithm), federation), algorithm, [i for i in COHORT if i != 2])[1]
    assert distance(found, without) < 1e-6


# ---- privacy


@pytest.mark.slow
def test_private_sums_without_noise_to_speak_of_are_the_mean(federation, tff):
    algorithm = build("fedavg", federation, weighting="uniform")
    process = aggregated("dp", algorithm, federation, noise=1e-9, clip=1e3)
    before, after = one_round(process, algorithm)
    r = algorithm.population.clients_per_round  # three are expected, whoever comes
    expected = np.sum(updates(algorithm, federation), 0) / r
    assert distance(tree.to_vector(tree.subtract(after, before)), expected) < 1e-5


@pytest.mark.slow
def test_private_means_do_without_weights_that_are_whole_numbers(federation, tff):
    """A method of one's own may weigh with N_i as it comes, an int32; the divisor is no int32."""
    plain = build("fedavg", federation)

    def client_update(w, state, data):
        return plain.client_update(w, state, data)._replace(weight=data.info.num_examples)

    found = [
        one_round(aggregated("dp", algorithm, federation, noise=1e-9, clip=1e3), algorithm)[1]
        for algorithm in (plain, plain._replace(client_update=client_update))
    ]
    assert distance(*found) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "pflego"])
def test_private_means_are_of_those_who_come(name, federation, tff):
    """Half of the clients drop out: of a mean, the sum is divided by half as many; a sum of gradients stays one."""
    sound = build(name, federation, **({"weighting": "uniform"} if name == "fedavg" else {"server_opt": "sgd"}))
    people = replace(sound.population, arrival=np.full(sound.population.num_clients, 0.5))
    algorithm = sound._replace(population=people)
    process = aggregated("dp", algorithm, federation, noise=1e-9, clip=1e3)

    def moved(process, ids):
        before, after = (getattr(server, "theta", server) for server in one_round(process, algorithm, ids))
        return tree.to_vector(tree.subtract(after, before)).numpy()

    alone = [moved(Simulation(algorithm, federation), [i]) for i in COHORT[:2]]
    r = people.clients_per_round
    assert people.clients_that_arrive == r / 2
    assert distance(moved(process, COHORT[:2]), np.sum(alone, 0) / (r / 2 if name == "fedavg" else 1)) < 1e-5


@pytest.mark.slow
def test_a_private_run_of_another_divisor_is_not_gone_on_with(federation, tff):
    """As one with dropouts of an older version: the state has the divisor, and the step is multiplied by it."""
    algorithm = build("pflego", federation, server_opt="sgd")
    half = replace(algorithm.population, arrival=np.full(algorithm.population.num_clients, 0.5))
    older, newer = (
        WithState(aggregated("dp", algorithm._replace(population=people), federation, noise=1e-9, clip=1e3))
        for people in (algorithm.population, half)
    )
    states = initial_states(algorithm, algorithm.population)

    def after(process, server, t):
        visits = visits_by_id(algorithm.population, COHORT, t)
        return process.next(server, [states[i] for i in COHORT], visits).server

    server = after(older, Aggregated(algorithm.init_server(), b""), 1)
    after(older, server, 2)
    with pytest.raises(ValueError, match="divides by 3 clients, and 1.5 are expected to come back"):
        after(newer, server, 2)


def test_private_aggregators_are_for_float32(federation):
    model = SplitModel(backbone(dtype="float64"))
    algorithm = build_algorithm("fedavg", model, build("fedavg", federation).population)
    with pytest.raises(ValueError, match="aggregator 'dp' adds noise in float32; the model has float64"):
        factory("dp", {"noise": 1.0, "clip": 1.0}, algorithm)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), slow_but([("fedavg", 1 / 3), ("fedsgd", 0.2 / 3)], ("fedavg", 1 / 3)))
def test_the_noise_has_its_size(name, scale, federation, tff):
    """Of every number that the server moves by: noise * clip / r, times FedSGD's rate."""
    algorithm = build(name, federation, weighting="uniform", eta=0.2 if name == "fedsgd" else 1e-9)
    process = aggregated("dp", algorithm, federation, noise=2.0, clip=50.0)
    moves = [one_round(process, algorithm) for _ in range(8)]
    moves = np.concatenate([tree.to_vector(tree.subtract(after, before)).numpy() for before, after in moves])
    assert moves.std() == pytest.approx(2.0 * 50.0 * scale, rel=5 / np.sqrt(2 * len(moves)))


@pytest.fixture
def accounting():
    """dp-accounting, which the extra 'dp' brings."""
    return pytest.importorskip("dp_accounting")


def population(sampling, people=100):
    return Population(np.full(people, 10), np.full(people, 2), sampling=sampling)


@pytest.mark.slow
def test_epsilon_is_dp_accountings(accounting):
    from dp_accounting.rdp import RdpAccountant

    poisson = privacy(1.1, population(Sampling("binomial", 0.1), 800), 50, delta=1e-5)
    accountant = RdpAccountant()
    accountant.compose(accounting.PoissonSampledDpEvent(0.1, accounting.GaussianDpEvent(1.1)), 50)
    assert poisson.epsilon == accountant.get_epsilon(1e-5)

    fixed = privacy(1.1, population(Sampling("fixed", 0.1)), 50, delta=1e-5)
    accountant = RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    event = accounting.SampledWithoutReplacementDpEvent(100, 10, accounting.GaussianDpEvent(0.55))
    accountant.compose(event, 50)
    assert fixed.epsilon == accountant.get_epsilon(1e-5) > poisson.epsilon

    some = privacy(1.1, population(Sampling("fixed", 0.1)), 50, delta=1e-5, present=[100] * 20 + [42] * 29 + [0])
    accountant = RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(event, 20)
    accountant.compose(accounting.SampledWithoutReplacementDpEvent(42, 5, accounting.GaussianDpEvent(0.55)), 29)
    assert some.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)  # 4.2 of 42, which may become 5

    everyone = privacy(3.0, population(Sampling()), 1, delta=1e-5)
    classic = np.sqrt(2 * np.log(1.25e5)) / 3  # Dwork and Roth, theorem A.1, which needs more noise than is needed
    assert 0.5 * classic < everyone.epsilon < classic * 1.3
    assert privacy(1.1, population(Sampling("binomial", 0.1)), 50).delta == pytest.approx(100**-1.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fixed", "binomial"])
def test_without_rounds_epsilon_is_0(kind, accounting):
    population = Population([5] * 10, [2] * 10, sampling=Sampling(kind, 0.2))
    assert privacy(1.0, population, 0).epsilon == 0
    if kind == "fixed":
        assert privacy(1.0, population, 2, present=[0, 0]).epsilon == 0  # nobody was there


def test_one_client_has_no_others_among_which_it_could_hide(tff):
    algorithm = build_algorithm("fedavg", SplitModel(backbone("float32")), Population([5], [2]))
    with pytest.raises(ValueError, match="aggregator 'dp' hides who of several clients took part, and there is one"):
        factory("dp", {"noise": 1.0, "clip": 1.0}, algorithm)


def test_a_range_of_cohort_sizes_counts_as_everyone_in_every_round(accounting):
    """Which sizes it had is not accounted for, so epsilon must not be smaller than that of one of the sizes.

    A client takes the place of another, as in cohorts of a fixed size: the sum may change by twice the norm.
    """
    some = privacy(1.1, population(Sampling("range", low=5, high=20)), 50)
    assert some.epsilon == pytest.approx(privacy(0.55, population(Sampling()), 50).epsilon)
    assert privacy(1.1, population(Sampling("range", low=20, high=20)), 50).epsilon == some.epsilon
    for size in (5, 10, 20):
        assert some.epsilon > privacy(1.1, population(Sampling("fixed", size / 100)), 50).epsilon
    nearly_all = privacy(1.1, population(Sampling("fixed", 0.99)), 50)  # the bound for samples is above it
    assert nearly_all.epsilon == some.epsilon
    everyone = privacy(1.1, population(Sampling("range", low=100, high=100)), 50)
    assert everyone == privacy(1.1, population(Sampling()), 50)


@pytest.mark.parametrize("robust", [median, lambda a: trimmed_mean(a, trim=0.2)])
def test_stragglers_that_are_dropped_are_not_among_the_updates(robust, federation):
    """FedProx drops a straggler by the weight 0; the median is that of the others."""
    algorithm = build("fedprox", federation, straggler=0.3, straggler_policy="drop")
    engine, ids = Simulation(robust(algorithm), federation), algorithm.population.client_ids.tolist()
    late = [int(v.info.client_id) for v in visits_by_id(algorithm.population, ids, 1) if straggles(v.key, 0.3)]
    on_time = [i for i in ids if i not in late]
    assert len(late) > 1 and len(on_time) > 2
    assert distance(one_round(engine, algorithm, ids)[1], one_round(engine, algorithm, on_time)[1]) < 1e-7
    assert identical(*one_round(engine, algorithm, late))


# ---- in a run


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"algorithm": "fedavg", "objective": "fair:1"}, "would change nothing with aggregator='median'"),
        ({"algorithm": "fedavg", "objective": "cvar:0.5"}, "every client also sends its loss"),
        ({"algorithm": "pflego", "objective": "cvar:0.5"}, "every client also sends its loss"),
    ],
)
def test_an_objective_that_an_aggregator_would_undo_is_refused(small, tmp_path, asked, why):
    """`fair` of a method that sends updates is in their weights, and a median has none."""
    with pytest.raises(ValueError, match=why):
        Run.create(small_runs.config(**asked, aggregator="median"), tmp_path / "run", small)
    fair = small_runs.config(algorithm="pflego", objective="fair:1", aggregator="median")  # it sends f(l_i) g_i
    Run.create(fair, tmp_path / "fair", small).close()


def test_8_bits_are_refused_where_the_server_solves_with_sums():
    """In a run on digits, the head that is solved from sums in 8 bits had 27 % right, that of exact ones 97 %."""
    asked = small_runs.config(algorithm="fed3r", labels="global", engine="tff", aggregator="compress")
    with pytest.raises(ValueError, match="fed3r cannot have aggregator='compress': its server solves"):
        check_method_can_have_it(asked)
    check_method_can_have_it(replace(asked, algorithm="fedproto"))


@pytest.mark.parametrize("name", ["fed3r", "fedproto", "fedrod"])
def test_a_median_of_zeros_is_refused(name, small, tmp_path):
    """Where most clients send zeros for a class, or after their first visit, the median of what is sent is 0."""
    how = {"algorithm": name, "labels": "global"}
    with pytest.raises(ValueError, match=f"{name} cannot have aggregator='median': a client sends .*zeros"):
        Run.create(small_runs.config(**how, aggregator="median"), tmp_path / "run", small)
    if name == "fedproto":  # three of six clients have class 2, and one has class 3
        algorithm = Run.planned(small_runs.config(**how), tmp_path / "plain", small).algorithm
        engine = Simulation(median(algorithm), small)
        after = one_round(engine, algorithm, algorithm.population.client_ids.tolist())[1]
        assert after.counts.numpy().tolist() == [6, 6, 3, 0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_runs.federation(tmp_path_factory.mktemp("aggregators") / "federation")


@pytest.mark.slow
def test_a_run_with_an_adaptive_aggregator_is_resumed_exactly(small, tmp_path, tff):
    how = {"engine": "tff", "aggregator": "robust", "rounds": 4}
    whole = small_runs.train(tmp_path / "whole", small, **how)
    with pytest.raises(KeyboardInterrupt):
        small_runs.train(tmp_path / "half", small, [small_runs.Interrupt(2)], **how)
    with Run.open(tmp_path / "half") as half:
        half.train()
    assert small_runs.saved(tmp_path / "half") == small_runs.saved(whole.folder)
    with Run.open(whole.folder, engine="local") as run:  # reading it needs no TFF
        training = run.training()
        assert training.server_state().theta[0].shape == run.model.theta()[0].shape
        with pytest.raises(ValueError, match="a TFF aggregator needs engine 'tff' with one worker"):
            training.run(5)


def test_rounds_without_clients_are_a_part_of_delta(accounting):
    """They add no noise, and everyone sees that nobody came."""
    from dp_accounting.rdp import RdpAccountant

    some = privacy(1.1, population(Sampling("binomial", 0.1)), 50)
    accountant = RdpAccountant()
    accountant.compose(accounting.PoissonSampledDpEvent(0.1, accounting.GaussianDpEvent(1.1)), 50)
    assert some.epsilon == accountant.get_epsilon(100**-1.1 - 50 * 0.9**99) > accountant.get_epsilon(100**-1.1)
    few = privacy(20.0, population(Sampling("binomial", 0.1), 6), 60)
    assert few.epsilon == np.inf and "no epsilon is promised: a round without clients adds no noise" in few.text
    away = privacy(1.1, population(Sampling("binomial", 0.1)), 50, present=[100] * 49 + [30])
    assert away.epsilon == np.inf  # 0.9^29 is above delta
    assert privacy(1.1, population(Sampling("fixed", 0.1), 6), 60).epsilon < np.inf
    never = population(Sampling("binomial", 0.2), 300)
    never = Population(never.num_examples, never.num_classes, sampling=never.sampling, arrival=[0.0] + [0.9] * 299)
    assert chance_of_no_clients(never, [300, 0, 300]) == pytest.approx(2 * (1 - 0.2 * 0.9) ** 298, rel=1e-9)


@pytest.mark.parametrize("sampling", [Sampling("fixed", 1.0), Sampling("range", low=4, high=4)])
def test_all_are_asked_and_nobody_may_come(sampling, accounting):
    """The same mechanism as Poisson sampling at the rate 1: dropouts alone decide who comes."""

    def of(sampling, arrival, clients=4, noise=1.0):
        if sampling.kind == "range":
            sampling = Sampling("range", low=clients, high=clients)
        facts = np.full(clients, 9), np.full(clients, 2)
        return privacy(noise, Population(*facts, sampling=sampling, arrival=arrival and [arrival] * clients), 50)

    poisson = Sampling("binomial", 1.0)
    found = of(sampling, 0.5)
    assert found.epsilon == np.inf and "fixed sampling of a part of them" in found.text
    assert of(sampling, 0.5).epsilon == of(poisson, 0.5).epsilon
    for arrival, clients in ((0.5, 40), (None, 4)):
        finite = of(poisson, arrival, clients).epsilon
        assert finite < np.inf and of(sampling, arrival, clients).epsilon == pytest.approx(finite, rel=1e-9)
    assert of(sampling, 0.7, 6).epsilon > of(sampling, None, 6).epsilon


def test_a_run_whose_rounds_may_have_nobody_is_warned_before_it_begins():
    config = RunConfig(engine="tff", aggregator="dp", aggregator_args=("noise=1", "clip=1"), sampling="binomial")
    with pytest.warns(UserWarning, match="the run will have no epsilon: a round without clients adds no noise"):
        warn_of_small_rounds(config, population(Sampling("binomial", 0.1), 6))
    all_asked = population(Sampling("fixed", 1.0), 6)
    few = Population(all_asked.num_examples, all_asked.num_classes, sampling=all_asked.sampling, arrival=[0.5] * 6)
    with pytest.warns(UserWarning, match="Take more clients, or fixed sampling of a part of them"):
        warn_of_small_rounds(replace(config, sampling="fixed", participation=1.0), few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_small_rounds(config, population(Sampling("binomial", 0.2), 200))
        alone = replace(config, algorithm="local")  # nothing is sent
        warn_of_small_rounds(alone, population(Sampling("binomial", 0.1), 6))


@pytest.mark.parametrize(
    "asked",
    [{"aggregator": "median"}, {"on_broken": "reject", "max_norm": 2.0}, {"on_broken": "reject", "clip_norm": 2.0}],
    ids=lambda asked: list(asked)[-1],
)
def test_a_method_that_sends_nothing_says_that_nothing_is_done_to_it(asked):
    name, value = list(asked.items())[-1]
    with pytest.warns(UserWarning, match=f"Local does not use {name}={value}: its clients send nothing"):
        check_needs(small_runs.config(algorithm="local", **asked))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_needs(small_runs.config(algorithm="fedavg", **asked))
        check_needs(small_runs.config(algorithm="local", on_broken="reject"))


@pytest.mark.slow
def test_a_private_run_says_its_epsilon(small, tmp_path, tff, accounting):
    arguments = ("noise=1.5", "clip=0.5")
    run = small_runs.train(
        tmp_path / "run", small, engine="tff", aggregator="dp", aggregator_args=arguments, sampling="binomial", rounds=4
    )
    found = Record.read(run.folder).summary["privacy"]
    expected = privacy(1.5, run.population, 4)
    assert (found["epsilon"], found["delta"]) == (expected.epsilon, expected.delta)
    assert found["text"] == "4 rounds, noise multiplier 1.5, Poisson sampling at 0.5"


@pytest.mark.slow
def test_a_median_on_the_local_engine(six_clients, a_run, tmp_path):
    run = small_runs.train(tmp_path / "run", six_clients, aggregator="median", rounds=7)
    with Run.open(run.folder) as a, Run.open(a_run) as b:
        assert a.config.run_id != b.config.run_id
        assert not identical(a.training().server_state(), b.training().server_state())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"aggregator": "clipp", "engine": "tff"}, "unknown aggregator 'clipp'; did you mean 'clip'"),
        ({"aggregator": "clip"}, "aggregator 'clip' needs --engine tff, found engine 'local'"),
        ({"aggregator": "dp", "engine": "tff"}, "aggregator dp needs noise, clip: --aggregator-args noise=VALUE"),
        ({"aggregator_args": ("norm=1",)}, "aggregator_args need an aggregator, found norm but no aggregator"),
        ({"aggregator": "median", "aggregator_args": ("trim=0.1",)}, "unknown argument of aggregator median 'trim'"),
        ({"aggregator": "trimmed_mean", "aggregator_args": ("trim",)}, "written NAME=NUMBER, such as noise=1.0; found"),
        ({"aggregator": "trimmed_mean", "aggregator_args": ("trim=-1",)}, "trim of aggregator trimmed_mean must be"),
        ({"aggregator": "clip", "engine": "tff", "aggregator_args": ("norm=0",)}, "norm of aggregator clip must be"),
        ({"aggregator": "clip", "engine": "tff", "aggregator_args": ("norm=nan",)}, "must be a positive number"),
        (
            {"aggregator": "compress", "engine": "tff", "aggregator_args": ("bits=2.5",)},
            "whole number from 1 to 16, fou",
        ),
        *(
            (
                {"aggregator": "dp", "engine": "tff", "aggregator_args": ("clip=1", f"noise={z}")},
                "between 1e-06 and 10000, found",
            )
            for z in ("1e-160", "1e5")
        ),
        ({"aggregator": "compress", "engine": "tff", "aggregator_args": ("bits=17",)}, "number from 1 to 16, found 17"),
        ({"aggregator": "compress", "engine": "tff", "aggregator_args": ("threshold=0.5",)}, "threshold of .* a whole"),
    ],
)
def test_bad_input(change, reason):
    with pytest.raises(ValueError, match=reason):
        small_runs.config(**change)


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_a_sum_of_what_clients_keep_is_not_changed_at_the_server_alone(name, federation, six_clients, tmp_path, tff):
    algorithm, reason = build(name, federation), "would drift away from what the clients keep"
    for changed in (median, trimmed_mean):
        with pytest.raises(ValueError, match=f"a median or a trimmed mean changes what the server adds up.*{reason}"):
            changed(algorithm)
    for aggregator, arguments in (("zero", {}), ("robust", {}), ("dp", {"noise": 1.0, "clip": 1.0}), ("compress", {})):
        with pytest.raises(ValueError, match=f"aggregator '{aggregator}' changes.*{reason}"):
            factory(aggregator, arguments, algorithm)
    with pytest.raises(ValueError, match=f"an aggregator of TFF changes.*{reason}"):
        federate(algorithm, federation, aggregator=tff.aggregators.MeanFactory())
    for how in ({"aggregator": "median"}, {"aggregator": "clip", "engine": "tff"}):
        with pytest.raises(ValueError, match=f"aggregator '{how['aggregator']}' changes.*{reason}"):
            Run.create(small_runs.config(algorithm=name, labels="global", **how), tmp_path / "run", six_clients)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_aggregator_whose_result_is_a_sum_is_refused(federation, tff):
    """For every kind of aggregate: the server's step would be as many times too long as clients come."""
    make = tff.aggregators
    noisy_sum = make.DifferentiallyPrivateFactory(tensorflow_privacy().GaussianSumQuery(1.0, 0.5))
    for name in ("pflego", "fedavg"):
        with pytest.raises(ValueError, match="SumFactory is the sum.*with . clients it would move.*MeanFactory"):
            federate(build(name, federation), federation, aggregator=make.SumFactory())
    for aggregator in (make.clipping_factory(1.0, make.SumFactory()), noisy_sum):
        with pytest.raises(ValueError, match="is the sum"):
            check_mean(aggregator, 3.0)
    with pytest.raises(ValueError, match="SecureSumFactory cannot be executed here.*secure"):
        check_mean(make.SecureSumFactory(8.0), 3.0)


@pytest.mark.slow
def test_means_are_no_sums(tff):
    """Weighted or not, clipped below the test's numbers, quantized, with noise, divided by the expected number."""
    make = tff.aggregators
    means = [
        make.MeanFactory(),
        make.UnweightedMeanFactory(),
        make.clipping_factory(1e-9, make.MeanFactory()),
        make.DifferentiallyPrivateFactory.gaussian_fixed(5.0, 3.5, 0.1),
        *(OF_TFF[name]() for name in ("clip", "zero", "robust", "compress")),
        OF_TFF["dp"](noise=1.0, clip=1.0, clients=3.5),
        OF_TFF["dp"](noise=1e-9, clip=1.0, clients=3.5),
        OF_TFF["dp_adaptive"](noise=1.0, clients=3.5),
    ]
    divisors = [check_mean(aggregator, 3.0) for aggregator in means]
    noisy = make.zeroing_factory(9.0, make.DifferentiallyPrivateFactory.gaussian_fixed(1.0, 3.5, 0.1))
    assert check_mean(noisy, 3.0) == 3.5  # also inside of another one
    assert check_mean(make.DifferentiallyPrivateFactory.gaussian_fixed(0.0, 3.5, 1e-9), 3.0) == 3.5
    is_private = [type(aggregator).__name__.startswith("Differentially") for aggregator in means]
    assert divisors == [3.5 if private else None for private in is_private]
    without_noise = make.DifferentiallyPrivateFactory.gaussian_fixed(0.0, 3.5, 0.1)
    assert check_mean(make.zeroing_factory(9.0, without_noise), 3.0) == 3.5


def tensorflow_privacy():
    return importlib.import_module("tensorflow_privacy")


@pytest.mark.slow
def test_a_factory_and_a_function_that_makes_one_are_the_same(federation, tff):
    """For `federate` and for `Training`."""
    algorithm = build("fedavg", federation)
    make = tff.aggregators.UnweightedMeanFactory
    training = Training(algorithm, federation, engine="tff", aggregator=make(), splits=())
    training.run(1)
    ids = cohort(0, 1, algorithm.population).tolist()
    by_function = one_round(federate(algorithm, federation, aggregator=lambda: make()), algorithm, ids)[1]
    assert identical(by_function, training.server_state())
    for wrong in (0.5, lambda: 0.5, make):
        with pytest.raises(ValueError, match="aggregator must be a factory of tff.aggregators"):
            federate(algorithm, federation, aggregator=wrong)


@pytest.mark.slow
def test_a_run_that_an_older_version_began_is_read_and_continued(six_clients, tmp_path, short_end, monkeypatch):
    """Such a run combines SCAFFOLD with a median, which is refused today."""
    how = {"algorithm": "scaffold", "aggregator": "median", "labels": "global", "hyperparameters": {"steps": 2}}
    with monkeypatch.context() as before:
        before.setattr("tfpfl.runs.run.check_method", lambda name, algorithm: None)
        small_runs.train(tmp_path / "run", six_clients, rounds=2, **how)
    with Run.open(tmp_path / "run", rounds=3) as run:
        run.train()
        assert run.store.round_num == 3


def test_rows_are_not_aggregated(federation, tff):
    algorithm = build("fedamp", federation)
    with pytest.raises(ValueError, match="receives every client's own update"):
        factory("clip", {}, algorithm)
    with pytest.raises(ValueError, match="sees every client's own. Against broken clients, take --on-broken reject"):
        median(algorithm)
    with pytest.raises(ValueError, match="trim must lie in"):
        trimmed_mean(build("fedavg", federation), trim=0.5)
    with pytest.raises(ValueError, match="pack=2 adds several before it"):
        pflego = build("pflego", federation)
        federate(pflego, federation, pack=2, aggregator=factory("clip", {}, pflego))
