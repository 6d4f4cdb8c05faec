"""A broken client counts as if it had not come: every algorithm, every fault, both engines."""

from functools import cache

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.one_broken import BROKEN, build, only
from helpers.quick import QUICK, quick
from helpers.rounds import rounds_of
from helpers.toys import backbone, distance, identical, initial_states, on_disk, toy, visits_by_id
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.algorithms.contract import ClientData
from tfpfl.algorithms.exchanges import before_work
from tfpfl.algorithms.transforms import faults, with_objective
from tfpfl.algorithms.transforms.compression import compressed
from tfpfl.algorithms.transforms.robust import median
from tfpfl.algorithms.transforms.screening import REASONS, screened
from tfpfl.data.population import Population
from tfpfl.data.randomness import client_key
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.tff.process import federate
from tfpfl.engines.visit import visits
from tfpfl.models import SplitModel
from tfpfl.studies.battery_subject import CLASSES, EXAMPLES

COHORT = [0, 2, 5]
# One pass, local steps, two sums, rows, messages of their own and sums, nothing that is sent.
OF_EACH_KIND = ("pflego", "fedavg", "scaffold", "fedamp", "pgfed", "local")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("screening") / "federation", EXAMPLES, CLASSES)


def with_fault(algorithm, kind, **limits):
    return faults.broken_data(screened(faults.broken_work(algorithm, only(kind)), **limits), only(kind))


def after(process, algorithm, cohort, rounds=2):
    """(server, all clients' states, the last round's output): round 1 without client 2, then rounds of this cohort."""
    out, states = list(rounds_of(process, algorithm, [[1, 5, 6]] + [cohort] * (rounds - 1)))[-1]
    return out.server, states, out


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(ALGORITHMS, "pflego", "fedavg", ci=("ditto", "scaffold", "fedfomo")))
def test_a_client_whose_work_is_not_finite_counts_as_absent(name, federation):
    algorithm = build(name, federation)
    expected = after(Simulation(algorithm, federation), algorithm, [i for i in COHORT if i != BROKEN], 3)
    server, states, out = after(Simulation(with_fault(algorithm, "not finite"), federation), algorithm, COHORT, 3)
    assert distance(server, expected[0]) < 1e-5
    assert distance(states, expected[1]) < 1e-5
    assert identical(states[BROKEN], expected[1][BROKEN])  # its last good value
    reasons = [int(m["rejected"]) for m in out.client_metrics]
    assert [REASONS[r] for r in reasons] == ["", "its work is not finite", ""]
    assert int(out.metrics["rejected"]) == 1 and int(out.metrics["finite"]) == 3
    assert float(out.metrics["loss"]) == pytest.approx(float(expected[2].metrics["loss"]), rel=1e-5)


@pytest.fixture(scope="module")
def without_it(federation):
    """without_it(name, **hyperparameters) -> (the algorithm, what two rounds give without client 2); computed once."""

    @cache
    def rounds(name, **more):
        algorithm = build(name, federation, **more)
        return algorithm, after(Simulation(algorithm, federation), algorithm, [i for i in COHORT if i != BROKEN])

    return rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("pflego", {}),
        pytest.param("fedavg", {}, marks=pytest.mark.slow),
        pytest.param("fedavg", {"batch_size": 4}, marks=pytest.mark.slow),
        pytest.param("fedamp", {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("huge", "its update is too large"),
        ("no examples", "it has no examples"),
        ("examples not finite", "its examples are not finite"),
        ("label outside", "it has a label outside its classes"),
    ],
)
def test_every_fault_is_named(name, more, kind, reason, federation, without_it):
    algorithm, expected = without_it(name, **more)
    faulty = with_fault(algorithm, kind, max_norm=1e3)
    server, states, out = after(Simulation(faulty, federation), algorithm, COHORT)
    assert distance((server, states), expected[:2]) < 1e-5
    assert [REASONS[int(m["rejected"])] for m in out.client_metrics] == ["", reason, ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("pflego", "not finite", marks=pytest.mark.slow),
        ("pgfed", "label outside"),
        pytest.param("fedamp", "not finite", marks=pytest.mark.slow),
    ],
)
def test_tff_does_the_same(name, kind, federation, tff):
    algorithm = build(name, federation)
    faulty = with_fault(algorithm, kind)
    here = after(Simulation(faulty, federation), algorithm, COHORT)
    there = after(federate(faulty, federation), algorithm, COHORT)
    assert distance(here[:2], there[:2]) < 1e-5
    assert [int(m["rejected"]) for m in there[2].client_metrics] == [int(m["rejected"]) for m in here[2].client_metrics]
    assert int(there[2].metrics["rejected"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("grouping", slow_but(["one_by_one", "stacked"], "stacked"))
@pytest.mark.parametrize(
    "name", slow_but(["pflego", "fedavg", "fedamp", "pgfed", "local", "fedpac"], "pflego", "fedamp")
)
def test_where_everybody_is_broken_nothing_changes(name, grouping, federation):
    algorithm = build(name, federation)
    everybody = lambda data: tf.ones([], tf.int32)  # noqa: E731
    faulty = screened(faults.broken_work(algorithm, everybody))
    process = Simulation(faulty, federation, grouping=grouping)
    server, states, out = after(process, algorithm, COHORT)
    assert identical(server, algorithm.init_server())
    assert identical(states, initial_states(algorithm, algorithm.population))
    assert int(out.metrics["rejected"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["pflego", "fedavg", "fedamp"], "pflego"))
def test_without_a_fault_screening_changes_no_bit_of_a_clients_work(name, federation):
    algorithm = build(name, federation)
    plain = after(Simulation(algorithm, federation, grouping="one_by_one"), algorithm, COHORT)
    checked = after(Simulation(screened(algorithm, max_norm=1e3), federation), algorithm, COHORT)
    assert identical(plain[:2], checked[:2])


@pytest.mark.slow
def test_clipping_scales_the_update_to_the_norm(federation):
    algorithm = build("pflego", federation, server_opt="sgd")
    clip, broken = 1.0, with_fault(algorithm, "huge", clip_norm=1.0)
    start = algorithm.init_server()
    visits = visits_by_id(algorithm.population, [BROKEN], 1)
    state = initial_states(algorithm, algorithm.population)[BROKEN]
    free = Simulation(algorithm, federation).next(start, [state], visits).server.theta
    clipped = Simulation(broken, federation).next(start, [state], visits)
    moved, step = (tf.nest.map_structure(lambda a, b: a - b, t, start.theta) for t in (clipped.server.theta, free))
    factor = clip / float(clipped.client_metrics[0]["update_norm"]) * faults.HUGE
    assert distance(moved, tf.nest.map_structure(lambda x: factor * x, step)) < 1e-6
    alpha = algorithm.population.info(BROKEN).alpha
    scale = algorithm.population.num_clients / algorithm.population.clients_per_round
    rho = QUICK["rho"]
    assert float(tf.linalg.global_norm(moved)) == pytest.approx(rho * scale * alpha * clip, rel=1e-4)


@pytest.mark.parametrize("name", slow_but(["fedavg", "apfl", "lg_fedavg", "scaffold"], "fedavg"))
def test_the_model_of_a_clipped_client_is_that_of_its_whole_work(name):
    """Its score right after its work (EV-local) is that of the model that it holds then, not of what it sends."""
    data = toy()
    algorithm, visit = build_algorithm(name, data.model, data.population, **quick(name)), data.visit(0)
    models, norms = [], []
    for made in (algorithm, screened(algorithm, clip_norm=1e-3)):
        message, state = before_work(made, made.init_server(), made.init_client(visit.info), visit)
        output = made.client_update(message, state, visit)
        models.append(made.local_model(message, output))
        norms.append(float(tf.linalg.global_norm(tf.nest.flatten(output.update))))
    assert distance(*models) < 1e-12
    assert norms[1] < 1.001e-3 < 1e-2 < norms[0]


@pytest.mark.parametrize("dtype", slow_but([np.int32, np.uint8, bool], np.int32))
def test_targets_that_are_whole_numbers_are_no_classes(dtype):
    """In a loop of one's own. They were labels outside the classes of all clients, or TensorFlow's error came."""
    population = Population([4] * 3, [1] * 3)
    model = SplitModel(backbone("float64"), kind="multilabel" if dtype is bool else "regression")
    plain = build_algorithm("fedavg", model, population, steps=1)
    x, y = np.linspace(-1, 1, 48).reshape(3, 4, 4), np.arange(12).reshape(3, 4, 1) % (2 if dtype is bool else 12)
    servers = []
    for algorithm, its in ((plain, np.float64), (screened(plain), dtype)):
        given = [ClientData(x[i], y[i].astype(its), v.info, v.key) for i, v in enumerate(visits(plain, 1, [0, 1, 2]))]
        out = Simulation(algorithm).next(algorithm.init_server(), [()] * 3, given)
        servers.append(out.server)
    assert int(out.metrics["rejected"]) == 0 and distance(*servers) < 1e-12


SUMS = {  # method -> (what the server keeps, what a client keeps, of which it is the mean over all clients)
    "scaffold": (lambda server: server.c, lambda state: state.c),
    "feddyn": (lambda server: server.h, lambda state: state),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(SUMS, "scaffold"))
def test_a_clipped_client_keeps_what_it_has_sent(name, federation):
    """Else the mean that the server keeps would drift away from the clients, a little in every round."""
    algorithm, (kept, of_client) = build(name, federation), SUMS[name]
    unlimited = after(Simulation(screened(algorithm), federation), algorithm, COHORT, 4)
    norms = [float(m["update_norm"]) for m in unlimited[2].client_metrics]
    limited = screened(algorithm, clip_norm=0.5 * min(norms))
    server, states, out = after(Simulation(limited, federation), algorithm, COHORT, 4)
    assert min(float(m["update_norm"]) for m in out.client_metrics) > 0.5 * min(norms)
    mean = tf.nest.map_structure(lambda *leaves: sum(leaves) / len(states), *map(of_client, states.values()))
    assert distance(kept(server), mean) < 1e-6 < 1e-3 < distance(kept(server), kept(algorithm.init_server()))
    unclipped = screened(algorithm, clip_norm=1e3)
    assert identical(after(Simulation(unclipped, federation), algorithm, COHORT, 4)[:2], unlimited[:2])


@pytest.mark.parametrize("transform", slow_but([median, lambda a: with_objective(a, "cvar:0.5")], 1))
def test_what_is_sent_beside_an_update_is_not_measured(transform, federation):
    """With a median that is the client's weight N_i, with the objective cvar also its loss: larger than the update."""
    algorithm = build("fedavg", federation)
    plain = after(Simulation(screened(algorithm), federation), algorithm, COHORT, 1)[2]
    norms = [float(m["update_norm"]) for m in plain.client_metrics]
    limited = screened(transform(algorithm), max_norm=0.5 * (min(norms) + max(norms)))
    metrics = after(Simulation(limited, federation), limited, COHORT, 1)[2].client_metrics
    assert [float(m["update_norm"]) for m in metrics] == pytest.approx(norms, rel=1e-6)
    assert [int(m["rejected"]) == 5 for m in metrics] == [norm > 0.5 * (min(norms) + max(norms)) for norm in norms]


@pytest.mark.parametrize("transform", slow_but([median, lambda a: with_objective(a, "cvar:0.5")], 1))
def test_a_round_of_which_all_are_rejected_changes_nothing(transform, federation):
    limited = screened(transform(build("fedavg", federation)), max_norm=1e-9)
    engine = Simulation(limited, federation)
    server, _, out = after(engine, limited, COHORT, 2)
    assert int(out.metrics["rejected"]) == len(COHORT) and identical(server, engine.initialize())


def test_bytes_of_a_client_that_is_rejected_count(federation):
    """With `compressed` the client itself says how many it sends."""
    limited = screened(compressed(build("fedavg", federation), bits=8), max_norm=1e-9)
    metrics = after(Simulation(limited, federation), limited, COHORT, 1)[2].client_metrics
    assert all(int(m["rejected"]) == 5 and int(m["bytes_up"]) > 0 for m in metrics)


def test_a_fused_cohort_cannot_be_screened(federation):
    with pytest.raises(ValueError, match="grouping='fused' needs a federation"):
        Simulation(screened(build("pflego", federation)), federation, grouping="fused")


@pytest.mark.slow
def test_faults_are_drawn_by_seed_round_and_client():
    which = faults.drawn(not_finite=0.2, huge=0.3)

    draw = tf.function(lambda key: which(_Visit(key)))

    def kinds(t):
        keys = client_key(0, t, np.arange(4000))
        return np.array([int(draw(tf.constant(key))) for key in keys[:800]])

    first = kinds(1)
    assert (first == kinds(1)).all() and (first != kinds(2)).any()
    shares = np.bincount(first, minlength=6) / len(first)
    assert shares[:3] == pytest.approx([0.5, 0.2, 0.3], abs=0.06) and shares[3:].sum() == 0


class _Visit:
    def __init__(self, key):
        self.key = key


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_norm": 0.0}, "max_norm must be positive and finite, found 0.0"),
        ({"clip_norm": float("inf")}, "clip_norm must be positive and finite, found inf; leave it out for no limit"),
        ({"clip_norm": -1.0}, "clip_norm must be positive"),
        ({"max_norm": float("nan")}, "max_norm must be positive and finite, found nan"),
        ({"max_norm": 1.0, "clip_norm": 2.0}, "clip_norm=2.0 clips nothing"),
    ],
)
def test_bad_limits(limits, reason, federation):
    with pytest.raises(ValueError, match=reason):
        screened(build("pflego", federation), **limits)


def test_bad_faults_and_clipped_rows(federation):
    with pytest.raises(ValueError, match="the server sees every client's own"):
        screened(build("fedamp", federation), clip_norm=1.0)
    with pytest.raises(ValueError, match="as with the aggregators median and trimmed_mean"):
        screened(median(build("fedavg", federation)), clip_norm=1.0)
    with pytest.raises(ValueError, match="unknown fault 'nan'"):
        faults.drawn(nan=0.1)
    with pytest.raises(ValueError, match="add up to at most 1"):
        faults.drawn(huge=0.6, not_finite=0.6)
