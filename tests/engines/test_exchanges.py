"""Rounds with two exchanges: every engine computes what NumPy computes, with transforms, and when clients leave."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import backbone, distance, identical, on_disk, toy, visits
from tfpfl.algorithms import build_algorithm, feddane
from tfpfl.algorithms.contract import Algorithm, Between, ClientData, ClientOutput, Exchange
from tfpfl.algorithms.exchanges import first_key
from tfpfl.algorithms.transforms import compressed, median, screened, server_optimized, trimmed_mean, with_objective
from tfpfl.algorithms.transforms.faults import broken_data, broken_work, drawn
from tfpfl.algorithms.transforms.own_part import own_part
from tfpfl.algorithms.transforms.schedule import at_round, scheduled
from tfpfl.checks import InvalidArgument
from tfpfl.data.cohorts import cohort
from tfpfl.data.population import Population, Sampling
from tfpfl.data.randomness import client_key
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel
from tfpfl.models.weights import Weights
from tfpfl.runs.aggregators import check_method
from tfpfl.runs.availability import Availability
from tfpfl.runs.cost import count_work
from tfpfl.runs.training import DivergedError, Training

IDS, WIDTHS = [1, 3, 4, 7], [2, 5, 2, 3]  # ids with gaps, and clients of different K_i
SPECS = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32))


class Server(NamedTuple):
    table: tf.Tensor  # [8, 2]: row i belongs to client i; written by the first exchange
    total: tf.Tensor  # [2]: the sum of the first exchange
    average: tf.Tensor  # [2]: the sum of the second exchange's means
    rounds: tf.Tensor


class First(NamedTuple):
    mine: tf.Tensor
    total: tf.Tensor


class Kept(NamedTuple):
    y: tf.Tensor
    wide: tf.Tensor  # [K_i]
    key: tf.Tensor


def two_exchanges(**changes):
    """A client is weighed by the sum of its x, and what it sends is made of its y, so that tests choose both."""

    def first_update(row, visits, data):
        y = tf.cast(tf.reduce_sum(data.y), tf.float32)
        kept = Kept(y, tf.fill([data.info.num_classes], y), data.key)
        return ClientOutput(First(row + y, row + 2 * y), tf.reduce_sum(data.x), kept, {"seen": y})

    def first_step(server, update, weight):
        table = tf.tensor_scatter_nd_update(server.table, update.mine.client_ids[:, None], update.mine.values)
        return server._replace(table=table, total=update.total + weight)

    def client_update(total, between, data):
        (visits, heads), kept = between
        same = tf.cast(tf.reduce_all(tf.equal(kept.key, data.key)), tf.float32)
        metrics = {"loss": kept.y, "same_key": same}
        update = total * kept.y + tf.reduce_mean(kept.wide)
        return ClientOutput(update, 2 * tf.reduce_sum(data.x), (visits + 1, heads + kept.wide), metrics)

    model = SplitModel(backbone("float32"))
    parts = {
        "model": model,
        "population": Population([1] * 4, WIDTHS, client_ids=IDS),
        "init_server": lambda: Server(tf.zeros([8, 2]), tf.zeros([2]), tf.zeros([2]), tf.constant(0)),
        "init_client": lambda info: (tf.constant(0), tf.zeros([info.num_classes])),
        "message": lambda server: server.total,
        "client_update": client_update,
        "server_update": lambda server, mean: server._replace(average=server.average + mean, rounds=server.rounds + 1),
        "personal_model": lambda total, state, data: Weights(model.theta(), model.head(data.info)),
        "local_model": lambda total, output: Weights(model.theta(), model.head(None)),
        "first": Exchange(
            message=lambda server, client_id: server.table[client_id],
            client_update=first_update,
            server_update=first_step,
            keeps=lambda info: Kept(tf.zeros([]), tf.zeros([info.num_classes]), tf.zeros([2], tf.int32)),
            aggregate=First("rows", "sum"),
        ),
    }
    return Algorithm(**parts | changes)


def visit(algorithm, client_id, weight, y, round_num=1) -> ClientData:
    x = tf.constant([[weight, 0, 0, 0]], tf.float32)
    key = client_key(0, round_num, [client_id])[0]
    return ClientData(x, tf.constant([y]), algorithm.population.info(client_id), key)


def engine_of(kind, request):
    if kind == "local":
        return Simulation
    request.getfixturevalue("tff")
    from tfpfl.engines.tff.process import federate

    return lambda algorithm: federate(algorithm, SPECS)


ROUNDS = [([7, 1], [2.0, 1.0], [2, 1]), ([4, 7, 3], [1.0, 0.5, 0.25], [1, 2, 4]), (IDS, [1.0] * 4, [1, 2, 1, 2])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "tff"])
def test_rounds_are_those_of_numpy(kind, request):
    """Rows, sums and means; a message per client and one for all; states of different sizes; absent clients."""
    algorithm = two_exchanges()
    engine = engine_of(kind, request)(algorithm)
    server = engine.initialize()
    states = {i: algorithm.init_client(algorithm.population.info(i)) for i in IDS}
    heads, count = {i: np.zeros(k) for i, k in zip(IDS, WIDTHS, strict=True)}, dict.fromkeys(IDS, 0)
    table, average = np.zeros((8, 2)), np.zeros(2)
    for t, (ids, weights, ys) in enumerate(ROUNDS, 1):
        given = [visit(algorithm, *v, t) for v in zip(ids, weights, ys, strict=True)]
        output = engine.next(server, [states[i] for i in ids], given)
        server, states = output.server, states | dict(zip(ids, output.client_states, strict=True))
        total = sum(w * (table[i] + 2 * y) for i, w, y in zip(ids, weights, ys, strict=True)) + sum(weights)
        for i, y in zip(ids, ys, strict=True):
            table[i] += y
            heads[i] += y
            count[i] += 1
        average += np.average([total * y + y for y in ys], axis=0, weights=weights)
        expected = Server(table, total, average, t)
        assert distance(server, expected) < 1e-4 * (1 + np.abs(average).max())
        for i in IDS:
            assert distance(states[i], (count[i], heads[i])) < 1e-6
        assert [float(m["same_key"]) for m in output.client_metrics] == [0.0] * len(ids)  # a key for each exchange
        assert [float(m["seen"]) for m in output.client_metrics] == ys  # a metric of the first exchange alone
        assert {int(m["bytes_down"]) for m in output.client_metrics} == {8 + 8}
        assert {int(m["bytes_up"]) for m in output.client_metrics} == {16 + 8}
        assert int(output.metrics["bytes_up"]) == 24 * len(ids) and int(output.metrics["finite"]) == len(ids)


def test_a_client_that_leaves_is_in_the_first_aggregate_alone():
    algorithm = two_exchanges()
    engine = Simulation(algorithm)
    server, states = engine.initialize(), [algorithm.init_client(algorithm.population.info(i)) for i in IDS]
    given = [visit(algorithm, i, w, y) for i, w, y in zip(IDS, [1.0, 2.0, 1.0, 4.0], [1, 2, 1, 2], strict=True)]
    output = engine.next(server, states, given, gone=[3])
    total = 1 * 2 + 2 * 4 + 1 * 2 + 4 * 4 + 8.0
    assert distance(output.server.table[3], np.full(2, 2.0)) == 0
    assert distance(output.server.total, np.full(2, total)) < 1e-5
    mean = np.average([(total + 1) * y for y in (1, 1, 2)], weights=[1, 1, 4])
    assert distance(output.server.average, np.full(2, mean)) < 1e-3
    assert identical(output.client_states[1], states[1]) and int(output.client_states[0][0]) == 1
    assert "loss" not in output.client_metrics[1] and int(output.client_metrics[1]["bytes_up"]) == 16
    assert [float(m["seen"]) for m in output.client_metrics] == [1, 2, 1, 2]  # each its own of the first exchange
    assert int(output.metrics["clients"]) == 3 and int(output.metrics["bytes_up"]) == 3 * 24
    alone = engine.next(server, states, given, gone=IDS)
    assert int(alone.server.rounds) == 0 and distance(alone.server.total, np.full(2, total)) < 1e-5
    assert identical(alone.client_states, states) and alone.metrics == {}
    with pytest.raises(InvalidArgument, match=r"clients \[0\] cannot leave between .*: the round has the clients"):
        engine.next(server, states, given, gone=[3, 0])


def test_without_a_second_exchange_nobody_leaves_between_them():
    data = toy()
    engine = Simulation(build_algorithm("fedavg", data.model, data.population))
    with pytest.raises(InvalidArgument, match="cannot leave between two exchanges"):
        engine.next(engine.initialize(), [()], [data.visit(0)], gone=[0])


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("exchanges") / "federation")


@pytest.fixture(scope="module")
def dane(federation):
    """FedDANE in float64 on files."""
    population = federation.population(Sampling("fixed", 0.6), labels="global")
    return feddane(SplitModel(backbone()), population, mu=0.2, eta=0.1, steps=3)


def two_rounds(engine, algorithm, gone=()):
    """The last `RoundOutput`, as arrays; `gone` leave between the exchanges of both rounds."""
    server, ids = engine.initialize(), [0, 2, 3, 4]
    for t in (1, 2):
        states = [algorithm.init_client(algorithm.population.info(i)) for i in ids]
        how = {"gone": gone} if gone else {}
        output = engine.next(server, states, visits(algorithm, ids, t), **how)
        server = output.server
    return tf.nest.map_structure(np.asarray, output)


@pytest.mark.slow
def test_groupings_agree(dane, federation):
    expected = two_rounds(Simulation(dane, federation, grouping="one_by_one"), dane, gone=[3])
    for grouping in ("auto", "stacked"):
        found = two_rounds(Simulation(dane, federation, grouping=grouping), dane, gone=[3])
        assert distance(found.server, expected.server) < 1e-13
    with pytest.raises(InvalidArgument, match="grouping='fused' needs"):
        Simulation(dane, federation, grouping="fused")


@pytest.mark.slow
def test_tff_agrees_packed_and_when_clients_leave(dane, federation, tff):
    from tfpfl.engines.engine import make_engine
    from tfpfl.engines.tff.process import federate

    plain = Simulation(dane, federation, held_out=["test"], grouping="one_by_one")
    expected = two_rounds(plain, dane)
    whole, packed = (federate(dane, federation, held_out=["test"], pack=n) for n in (1, 3))
    assert isinstance(whole, tff.templates.IterativeProcess)
    for engine in (whole, packed):
        found = two_rounds(engine, dane)
        assert distance(found.server, expected.server) < 1e-12
        for ours, theirs in zip(expected.client_metrics, found.client_metrics, strict=True):
            assert set(ours) == set(theirs) and all(abs(ours[k] - theirs[k]) < 1e-12 for k in ours)
        assert distance(dict(found.metrics), dict(expected.metrics)) < 1e-12
    apart = make_engine("tff", dane, federation)
    assert distance(two_rounds(apart, dane, gone=[2]).server, two_rounds(plain, dane, gone=[2]).server) < 1e-12
    with pytest.raises(InvalidArgument, match="aggregator of TFF cannot be used with a method of two exchanges"):
        federate(dane, federation, aggregator=tff.aggregators.MeanFactory())


@pytest.mark.slow
def test_a_visit_may_carry_a_dataset(tff):
    from tfpfl.engines.tff.process import federate

    data = toy(dtype="float32")
    algorithm = feddane(data.model, data.population, eta=0.1, steps=2)
    ids = [0, 2, 3]
    arrays = [data.visit(i) for i in ids]
    datasets = [v._replace(x=tf.data.Dataset.from_tensor_slices((v.x, v.y)), y=()) for v in arrays]
    process = federate(algorithm, tf.data.DatasetSpec(datasets[0].x.element_spec))
    found = process.next(process.initialize(), [()] * 3, datasets)
    engine = Simulation(algorithm)
    assert distance(found.server, engine.next(engine.initialize(), [()] * 3, arrays).server) < 1e-6


def toy_round(algorithm, data, ids=(0, 1, 2, 3, 4), t=1):
    engine = Simulation(algorithm)
    states = [algorithm.init_client(data.population.info(i)) for i in ids]
    return engine.next(engine.initialize(), states, [data.visit(i, t) for i in ids])


@pytest.fixture(scope="module")
def small():
    data = toy()
    return data, feddane(data.model, data.population, mu=0.1, eta=0.1, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", slow_but((1, 2), 1))
def test_who_is_rejected_in_one_exchange_is_in_no_later_one(small, exchange):
    """A client that breaks in the first exchange is left out of both; in the second, of the second alone."""
    data, algorithm = small
    calls = iter([1, 2])  # the two exchanges are traced one after the other

    def which(visit):
        now = next(calls)
        return tf.where(tf.equal(visit.info.client_id, 2) & (now == exchange), 1, 0)

    found = toy_round(screened(broken_work(algorithm, which)), data)
    if exchange == 1:
        expected = toy_round(algorithm, data, (0, 1, 3, 4))
    else:
        engine = Simulation(algorithm)
        given = [()] * 5, [data.visit(i) for i in data.ids]
        expected = engine.next(engine.initialize(), *given, gone=[2])
    assert distance(found.server, expected.server) < 1e-13
    assert [int(m["rejected"]) for m in found.client_metrics] == [0, 0, 4, 0, 0]
    assert int(found.metrics["rejected"]) == 1
    assert abs(float(found.metrics["loss"]) - float(expected.metrics["loss"])) < 1e-13


@pytest.mark.slow
def test_broken_data_and_rejected_rows():
    """With rows, a rejected client has none, in either exchange; with data that are broken it is in no aggregate."""
    algorithm = screened(two_exchanges())
    engine = Simulation(algorithm)
    ids = [1, 3, 4]
    given = [visit(algorithm, i, w, y) for i, w, y in zip(ids, [1.0, 1.0, 2.0], [1, 2, 1], strict=True)]
    given[1] = given[1]._replace(y=tf.constant([9]))  # a label outside its 5 classes
    states = [algorithm.init_client(algorithm.population.info(i)) for i in ids]
    server = engine.initialize()
    output = engine._two.next(server, states, given)  # `next` itself refuses such a visit
    assert output.server.table.numpy()[[1, 3, 4]].tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert identical(output.client_states[1], states[1])
    assert [int(m["rejected"]) for m in output.client_metrics] == [0, 3, 0]
    plain = Simulation(two_exchanges())
    others = plain.next(server, [states[0], states[2]], [given[0], given[2]])
    assert distance(output.server, others.server) < 1e-6
    with pytest.raises(InvalidArgument, match="clip_norm is for updates that are added up"):
        screened(two_exchanges(), clip_norm=1.0)


@pytest.mark.slow
def test_norms_are_limited_in_each_exchange(small):
    data, algorithm = small
    first = algorithm.first.client_update(algorithm.init_server().w, (), data.visit(1))
    limit = float(tf.linalg.global_norm(tf.nest.flatten(first.update))) / 2
    clipped = screened(algorithm, clip_norm=limit)
    output = clipped.first.client_update(clipped.first.message(clipped.init_server()), (), data.visit(1))
    assert abs(float(tf.linalg.global_norm(tf.nest.flatten(output.update))) - limit) < 1e-12
    second = clipped.client_update(algorithm.init_server(), Between((), output.state), data.visit(1))
    assert float(tf.linalg.global_norm(tf.nest.flatten(second.update))) < limit + 1e-12
    found = toy_round(screened(algorithm, max_norm=1e-9), data)
    assert distance(found.server, algorithm.init_server()) == 0
    assert [int(m["rejected"]) for m in found.client_metrics] == [5] * 5


@pytest.mark.slow
def test_a_median_of_both_exchanges(small):
    data, algorithm = small
    found = toy_round(median(algorithm), data)
    sent = [algorithm.first.client_update(algorithm.init_server().w, (), data.visit(i)) for i in data.ids]
    g = tf.nest.map_structure(lambda *leaves: np.median(leaves, axis=0), *[out.update for out in sent])
    assert distance(found.server.g, g) < 1e-14
    message = algorithm.init_server()._replace(g=tf.nest.map_structure(tf.constant, g))
    moves = [
        algorithm.client_update(message, Between((), out.state), data.visit(i)).update
        for i, out in zip(data.ids, sent, strict=True)
    ]
    move = tf.nest.map_structure(lambda *leaves: np.median(leaves, axis=0), *moves)
    assert distance(found.server.w, tf.nest.map_structure(np.add, algorithm.init_server().w, move)) < 1e-13
    assert distance(toy_round(trimmed_mean(algorithm, trim=0.4), data).server, found.server) < 1e-13


@pytest.mark.slow
def test_compressed_bytes_of_both_exchanges(small):
    data, algorithm = small
    plain, packed = toy_round(algorithm, data), toy_round(compressed(algorithm, bits=8, threshold=0), data)
    leaves = tf.nest.flatten(algorithm.init_server().w)
    expected = 2 * sum(int(np.size(leaf)) + 8 for leaf in leaves)
    assert {int(m["bytes_up"]) for m in packed.client_metrics} == {expected}
    assert distance(plain.server, packed.server) == 0


@pytest.mark.slow
def test_faults_are_drawn_for_each_exchange(small):
    data, algorithm = small
    found, which = [], drawn(no_examples=0.5)
    engine = Simulation(broken_data(screened(algorithm), which))
    for t in range(1, 9):
        output = engine.next(engine.initialize(), [()] * 5, [data.visit(i, t) for i in data.ids])
        for i, metrics in zip(data.ids, output.client_metrics, strict=True):
            key = data.visit(i, t).key
            faults = [int(which(data.visit(i, t)._replace(key=k))) > 0 for k in (first_key(key), key)]
            assert int(metrics["rejected"]) == any(faults)
            found.append(tuple(faults))
    assert len(set(found)) == 4  # in none, in one or in both exchanges


@pytest.mark.slow
def test_a_schedule_holds_for_both_exchanges(small):
    """The rates of round 3 are a third of those of round 1; and the number of the round grows once a round."""
    data, algorithm = small
    third = feddane(data.model, data.population, mu=0.1, eta=0.1 / 3, steps=3)
    engine = Simulation(scheduled(algorithm, "inverse:1"))
    given = [()] * 5, [data.visit(i) for i in data.ids]
    server = at_round(engine.initialize(), 3)
    output = engine.next(server, *given)
    plain = Simulation(third)
    assert distance(output.server.own, plain.next(plain.initialize(), *given).server) < 1e-13
    assert int(output.server.round_num) == 4


def test_what_cannot_have_two_exchanges_says_why(small):
    data, algorithm = small
    for make in (
        lambda: with_objective(algorithm, "fair:1"),
        lambda: own_part(algorithm, [True, False, False, False]),
    ):
        with pytest.raises(InvalidArgument, match="cannot be used with a method of two exchanges a round"):
            make()
    for name in ("dp", "clip", "compress"):
        with pytest.raises(InvalidArgument, match=f"aggregator '{name}' cannot be used with a method of two exchanges"):
            check_method(name, algorithm)
    check_method("median", algorithm)
    adding = algorithm._replace(server_update=build_algorithm("fedavg", data.model, data.population).server_update)
    with pytest.raises(InvalidArgument, match="two exchanges"):
        server_optimized(adding, server_opt="adam")


def test_a_visit_costs_both_exchanges():
    """FedDANE: one pass for the gradient and one for each step."""
    data = toy()
    found = count_work(lambda model: feddane(model, data.population, steps=3), data.model, data.visit(1)).passes
    assert found == (4.0, 4.0)


@pytest.mark.slow
def test_training_with_clients_that_leave_is_resumed_and_repeated(dane, federation):
    """Who drops out leaves before or between the exchanges, by the seed; its bytes are not counted."""
    availability = Availability(dropout=0.5)

    def trained(*rounds):
        training = Training(dane, federation, seed=3, availability=availability, splits=())
        for n in rounds:
            training.run(n)
        return training

    once, twice = trained(6), trained(2, 6)
    assert identical(once.server_state(), twice.server_state())
    found = [availability.round(3, t, dane.population.client_ids, np.ones(5)) for t in range(1, 40)]
    between, dropped = (sum(len(getattr(f, name)) for f in found) for name in ("between", "dropped"))
    assert 0.3 < between / dropped < 0.7 and all(set(f.between) <= set(f.dropped) for f in found)

    class Without(Availability):
        def round(self, *given):
            arrivals = super().round(*given)
            return type(arrivals)(*[getattr(arrivals, n) for n in ("came", "dropped", "late", "seconds")], np.array([]))

    other = Training(dane, federation, seed=3, availability=Without(dropout=0.5), splits=())
    other.run(6)
    assert distance(once.server_state(), other.server_state()) > 1e-6  # they were in the first aggregates


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
def test_who_breaks_the_first_exchange_is_named_and_nobody_else(dane, federation, leaves):
    """Also if the client has left before the second, which begins from a sum that is not finite."""
    availability = Availability(dropout=0.5 if leaves else 0.0)
    all_clients = dane.population.client_ids

    def arrived(seed):
        ids = cohort(seed, 1, dane.population)
        return availability.round(seed, 1, ids, np.ones(len(ids))) if leaves else None

    seed = next(s for s in range(99) if not leaves or (len(arrived(s).between) and len(arrived(s).came)))
    broken = int(arrived(seed).between[0] if leaves else cohort(seed, 1, dane.population)[1])

    def client_update(message, state, data):
        output = dane.first.client_update(message, state, data)
        factor = tf.where(tf.equal(data.info.client_id, broken), np.nan, 1.0)
        return output._replace(update=tf.nest.map_structure(lambda x: x * tf.cast(factor, x.dtype), output.update))

    hurt = dane._replace(first=dane.first._replace(client_update=client_update))
    how = {"availability": availability} if leaves else {}
    with pytest.raises(DivergedError) as told:
        Training(hurt, federation, seed=seed, splits=(), **how).run(1)
    named = [i for i in all_clients if re.search(rf"client {i}\b", str(told.value))]
    assert named == [broken] and "the work of client" in str(told.value)


@pytest.mark.slow
def test_the_first_exchange_counts_if_everybody_leaves_after_it(federation):
    """As in the engine, see `TwoExchanges.next`; with one client a round and many that drop out."""
    availability = Availability(dropout=0.8)
    population = federation.population(Sampling(rate=1 / federation.num_clients), labels="global")
    dane = feddane(SplitModel(backbone("float32")), population, steps=2)
    cohorts = ((t, cohort(0, t, dane.population)) for t in range(1, 50))
    arrived = ((t, ids, availability.round(0, t, ids, np.ones(len(ids)))) for t, ids in cohorts)
    last, ids = next((t, ids) for t, ids, found in arrived if len(found.between) and not len(found.came))
    before, whole = (Training(dane, federation, splits=(), availability=availability) for _ in range(2))
    before.run(last - 1)
    whole.run(last)
    visits = before.visits(last, ids)
    out = Simulation(dane, federation).next(before.server_state(), before.client_states(ids), visits, gone=ids)
    assert distance(whole.server_state(), out.server) == 0 < 1e-3 < distance(out.server, before.server_state())
    assert whole.store.history()[-1]["clients"] == 0


def test_a_quorum_that_is_missed_leaves_nothing_of_the_first_exchange(dane, federation):
    """Of those who came, or of those who left between the two."""
    availability = Availability(dropout=0.5)
    how = {"splits": (), "availability": availability, "quorum": lambda began: began + 1}
    training = Training(dane, federation, **how)
    start = training.server_state()
    training.run(3)
    assert identical(training.server_state(), start) and any("too_few" in row for row in training.store.history())


def test_late_clients_may_have_finished_the_first_exchange():
    availability = Availability(seconds=1.0, deadline=10.0)
    found = availability.round(0, 1, [0, 1, 2], np.array([9.0, 15.0, 25.0]))
    assert found.came.tolist() == [0] and found.late.tolist() == [1, 2] and found.between.tolist() == [1]


@pytest.mark.slow
def test_the_example_of_the_documentation():
    """docs/extending.md: no change is longer than the mean of the cohort's; what was kept is in no state."""
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    code = re.search(r'```python title="mean_length.py"\n(.*?)```', page, re.DOTALL)[1]
    found = {"__name__": "mean_length"}
    exec(code, found)
    data = toy()
    output = toy_round(found["mean_length"](data.model, data.population, eta=0.2, steps=4), data)
    average = build_algorithm("fedavg", data.model, data.population, eta=0.2, steps=4)
    w, n = average.init_server(), data.population.num_examples
    changes = [average.client_update(w, (), data.visit(i)).update for i in data.ids]
    lengths = np.array([np.sqrt(sum(np.sum(np.square(leaf)) for leaf in tf.nest.flatten(c))) for c in changes])
    length = np.average(lengths, weights=n)
    parts = n / n.sum() * np.minimum(1, length / lengths)
    expected = tf.nest.map_structure(lambda x, *c: x + np.tensordot(parts, c, 1), w, *changes)
    assert distance(output.server.w, expected) < 1e-13 and abs(float(output.server.length) - length) < 1e-13
    assert set(output.client_states) == {()} and (lengths > length).any()
