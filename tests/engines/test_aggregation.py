"""Messages per client, and means, sums and rows, through both engines; against the same in NumPy."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import backbone, distance, identical
from tfpfl.algorithms.contract import Algorithm, ClientData, ClientOutput, Rows, kinds
from tfpfl.algorithms.transforms import median, screened, screening
from tfpfl.algorithms.transforms.screening import REASONS
from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Population
from tfpfl.data.randomness import client_key
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel
from tfpfl.models.weights import Weights

IDS = [1, 3, 4, 7]  # with gaps
SPECS = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32))


class Server(NamedTuple):
    """Row i of the table belongs to client i; the rest shows what arrived."""

    table: tf.Tensor  # [8, 2]
    total: tf.Tensor  # [2]
    average: dict
    seen: tf.Tensor  # the ids of the last cohort, as bits
    rounds: tf.Tensor


class Update(NamedTuple):
    """A part of every kind; the rows are nested."""

    mine: dict
    total: tf.Tensor
    average: dict


def toy_amp(**changes):
    """As in FedAMP, the server keeps something for every client and sends it to this client alone.

    A client is weighed by the sum of its x, so that tests choose weights.
    """

    def init_server():
        return Server(tf.zeros([8, 2]), tf.zeros([2]), {"y": tf.zeros([])}, tf.constant(0), tf.constant(0))

    def client_update(row, visits, data):
        y = tf.cast(tf.reduce_sum(data.y), tf.float32)
        update = Update({"row": row + y, "id": data.info.client_id}, row + y, {"y": y})
        return ClientOutput(update, tf.reduce_sum(data.x), visits + 1, {"loss": y})

    def server_update(server, update):
        ids = update.mine.client_ids
        table = tf.tensor_scatter_nd_update(server.table, ids[:, None], update.mine.values["row"])
        seen = tf.reduce_sum(tf.bitwise.left_shift(1, update.mine.values["id"]))
        return Server(table, server.total + update.total, update.average, seen, server.rounds + 1)

    model = SplitModel(backbone("float32"))
    parts = {
        "model": model,
        "population": Population([1] * 4, [1000] * 4, client_ids=IDS),
        "init_server": init_server,
        "init_client": lambda info: tf.constant(0),
        "message": lambda server, client_id: server.table[client_id],
        "client_update": client_update,
        "server_update": server_update,
        "personal_model": lambda row, state, data: Weights(model.theta(), model.head(data.info)),
        "local_model": lambda row, output: None,
        "aggregate": Update("rows", "sum", "mean"),
    }
    return Algorithm(**parts | changes)


def visit(algorithm, client_id, weight, y) -> ClientData:
    x = tf.constant([[weight, 0, 0, 0]], tf.float32)
    return ClientData(x, tf.constant([y]), algorithm.population.info(client_id), client_key(0, 1, [client_id])[0])


@pytest.fixture(params=["local", "tff"])
def start_engine(request):
    """algorithm -> a new engine of each kind."""
    if request.param == "local":
        return Simulation
    request.getfixturevalue("tff")
    from tfpfl.engines.tff.process import federate

    return lambda algorithm: federate(algorithm, SPECS)


def test_everyone_gets_its_own_row_and_sends_it_back(start_engine):
    """Cohorts of several sizes in any order; rows of absent clients stay."""
    algorithm = toy_amp()
    engine = start_engine(algorithm)
    server, states = engine.initialize(), dict.fromkeys(IDS, tf.constant(0))
    table, total = np.zeros((8, 2)), np.zeros(2)
    rounds = [([7, 1], [2.0, 1.0], [3, 5]), ([4, 7, 3], [1.0, 0.5, 0.0], [1, 2, 9]), (IDS, [1.0] * 4, [1, 2, 3, 4])]
    for ids, weights, ys in rounds:
        visits = [visit(algorithm, *v) for v in zip(ids, weights, ys, strict=True)]
        output = engine.next(server, [states[i] for i in ids], visits)
        server, states = output.server, states | dict(zip(ids, output.client_states, strict=True))

        sent = {i: table[i] + y for i, y in zip(ids, ys, strict=True)}
        table[ids] = [sent[i] for i in ids]
        total = total + sum(w * sent[i] for i, w in zip(ids, weights, strict=True))
        assert distance(server.table, table) < 1e-5 and distance(server.total, total) < 1e-5
        assert abs(float(server.average["y"]) - np.average(ys, weights=weights)) < 1e-5
        assert int(server.seen) == sum(2**i for i in ids)
    assert [int(states[i]) for i in IDS] == [2, 2, 2, 3] and int(server.rounds) == 3


def test_rows_come_sorted_by_client_and_unweighted(start_engine):
    """The server's step sees client ids ascending, each beside its own values, whatever the order of the cohort."""

    def server_update(server, rows):
        assert isinstance(rows, Rows)
        place = 10.0 ** tf.cast(tf.range(tf.size(rows.client_ids)), tf.float32)
        digits = tf.cast(rows.client_ids, tf.float32), rows.values
        return server._replace(total=tf.stack([tf.reduce_sum(place * d) for d in digits]))

    def client_update(row, state, data):
        y = tf.cast(tf.reduce_sum(data.y), tf.float32)
        return ClientOutput(y, tf.reduce_sum(data.x), state, {"loss": y})

    algorithm = toy_amp(server_update=server_update, client_update=client_update, aggregate="rows")
    cohort = [(4, 0.5, 8), (7, 2.0, 9), (1, 3.0, 2)]
    engine = start_engine(algorithm)
    output = engine.next(engine.initialize(), [tf.constant(0)] * 3, [visit(algorithm, *v) for v in cohort])
    np.testing.assert_array_equal(output.server.total, [741, 982])


EACH = Update("rows", "sum", "mean")


@pytest.mark.parametrize("kind", slow_but(["rows", "sum", "mean", EACH], EACH), ids=str)
def test_where_all_weights_are_0_the_server_stays(start_engine, kind):
    algorithm = toy_amp(
        aggregate=kind, server_update=lambda server, anything: server._replace(rounds=server.rounds + 1)
    )
    engine = start_engine(algorithm)
    server, states = engine.initialize(), [tf.constant(0)] * 2
    nothing = engine.next(server, states, [visit(algorithm, 1, 0.0, 4), visit(algorithm, 4, 0.0, 6)])
    assert identical(nothing.server, server)
    assert [int(s) for s in nothing.client_states] == [1, 1]  # clients worked all the same
    some = engine.next(server, states, [visit(algorithm, 1, 0.0, 4), visit(algorithm, 4, 0.1, 6)])
    assert int(some.server.rounds) == 1


def test_metrics_of_the_cohort_are_means_by_examples_and_sums_of_bytes(start_engine):
    algorithm = toy_amp(population=Population([2, 6, 1, 1], [1000] * 4, client_ids=IDS))
    engine = start_engine(algorithm)
    of_one = [visit(algorithm, 1, 1.0, 4), visit(algorithm, 3, 1.0, 8)]
    more = [int(v.info.num_examples) - 1 for v in of_one]  # examples of zeros
    visits = [
        v._replace(x=tf.pad(v.x, [[0, n], [0, 0]]), y=tf.pad(v.y, [[0, n]])) for v, n in zip(of_one, more, strict=True)
    ]
    metrics = engine.next(engine.initialize(), [tf.constant(0)] * 2, visits).metrics
    assert float(metrics["loss"]) == (2 * 4 + 6 * 8) / 8
    assert (int(metrics["clients"]), int(metrics["examples"]), int(metrics["finite"])) == (2, 8, 2)
    assert int(metrics["bytes_down"]) == 2 * 8 and int(metrics["bytes_up"]) == 2 * (8 + 4 + 8 + 4)


def test_a_client_that_is_not_finite_is_counted(start_engine):
    algorithm = toy_amp()

    def client_update(row, visits, data):
        return algorithm.client_update(row, visits, data)._replace(weight=tf.math.log(tf.reduce_sum(data.x)))

    engine = start_engine(algorithm._replace(client_update=client_update))
    visits = [visit(algorithm, 1, 1.0, 4), visit(algorithm, 4, -1.0, 8)]
    output = engine.next(engine.initialize(), [tf.constant(0)] * 2, visits)
    assert int(output.metrics["finite"]) == 1
    assert [int(m["finite"]) for m in output.client_metrics] == [1, 0]


def test_metrics_have_any_name_that_a_round_does_not_use():
    """'head_loss' was left out of the round's metrics, and by one called 'examples' all means were divided."""
    plain = toy_amp()

    def named(name, transform=lambda algorithm: algorithm):
        def client_update(row, visits, data):
            output = plain.client_update(row, visits, data)
            return output._replace(metrics=output.metrics | {name: 3 * output.metrics["loss"]})

        engine = Simulation(transform(plain._replace(client_update=client_update)))
        return engine.next(engine.initialize(), [tf.constant(0)], [visit(plain, 1, 1.0, 4)]).metrics

    for name in ("head_loss", "my_examples"):
        assert float(named(name)[name]) == 12
    for name in ("examples", "clients", "round", "test_loss", "came", "too_few", "rejected_clients", "rejected"):
        with pytest.raises(InvalidArgument, match=f"cannot be called {name!r}: a round has something else"):
            named(name)
    for name in screening.METRICS:
        with pytest.raises(InvalidArgument, match=f"cannot be called {name!r}: where broken clients are rejected"):
            named(name, screening.screened)


@pytest.mark.parametrize("weight", slow_but([0.1, np.float64(0.3), 2], 0.1), ids=["float", "NumPy", "int"])
def test_a_weight_and_metrics_may_be_numbers_of_python(start_engine, weight):
    """They ended in an error of Python, in a median also later. In a float64 model, a weight keeps its digits."""
    model = SplitModel(backbone("float64"))

    def client_update(row, visits, data):
        y = tf.cast(tf.reduce_sum(data.y), tf.float64)
        return ClientOutput(y, weight, visits, {"loss": y, "half": 0.5})

    def server_update(server, total, weights):
        return tf.stack([total, tf.cast(weights, tf.float64)])

    algorithm = toy_amp(
        model=model,
        init_server=lambda: tf.zeros([2], tf.float64),
        message=lambda server: server,
        client_update=client_update,
        server_update=server_update,
        aggregate="sum",
    )
    for made in (algorithm, screened(algorithm), median(algorithm)):
        engine = start_engine(made)
        info = [algorithm.population.info(i, np.float64) for i in (1, 4)]
        visits = [
            visit(algorithm, i, 1.0, y)._replace(info=its) for i, its, y in zip((1, 4), info, (4, 6), strict=True)
        ]
        output = engine.next(engine.initialize(), [tf.constant(0)] * 2, visits)
        np.testing.assert_allclose(output.server, [10 * weight, 2 * weight], rtol=1e-12)
        assert float(output.metrics["half"]) == 0.5 and int(output.metrics["finite"]) == 2


@pytest.mark.parametrize("kind", slow_but(["sum", "mean"], "sum"))
def test_integers_of_an_update_are_weighed_like_other_numbers(start_engine, kind):
    """A weight below 1 was cut down to 0 for them, so that the server got 0."""

    def client_update(row, visits, data):
        return ClientOutput(tf.reduce_sum(data.y), tf.reduce_sum(data.x), visits, {"loss": tf.zeros([])})

    def server_update(server, found):
        return server._replace(average={"y": tf.cast(found, tf.float32)})

    engine = start_engine(toy_amp(client_update=client_update, server_update=server_update, aggregate=kind))
    cohort = [(1, 0.5, 4), (4, 0.25, 7)]
    output = engine.next(engine.initialize(), [tf.constant(0)] * 2, [visit(toy_amp(), *v) for v in cohort])
    wanted = 0.5 * 4 + 0.25 * 7
    assert abs(float(output.server.average["y"]) - (wanted if kind == "sum" else wanted / 0.75)) < 1e-6


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda good: tuple(good), r"what client_update returns must be a tfpfl.ClientOutput.*found tuple"),
        (lambda good: None, "what client_update returns must be a tfpfl.ClientOutput.*found None"),
        (lambda good: good._replace(weight=tf.ones([3])), r"its weight one number; found float32 \(3,\)"),
        (lambda good: good._replace(weight=None), "its weight one number; found None"),
        (lambda good: good._replace(metrics={"norms": tf.ones([2])}), r"its metric 'norms' one number; found .*\(2,\)"),
        (lambda good: good._replace(metrics={"name": "a"}), "its metric 'name' one number; found string"),
        (lambda good: good._replace(metrics={"other": 1.0}), "its metrics have 'loss'.*found other"),
        (
            lambda good: good._replace(state=None),
            r"the state as None, and init_client gave int32 \[\]",
        ),
        (
            lambda good: good._replace(state=1.0),
            r"the state as float32 \[\], and init_client gave int32",
        ),
        (lambda good: good._replace(metrics=[1.0]), "the metrics of client_update must be a dict.*found list"),
    ],
)
def test_what_client_update_returns_is_checked(start_engine, wrong, said):
    algorithm = toy_amp()
    own = algorithm._replace(client_update=lambda *given: wrong(algorithm.client_update(*given)))
    with pytest.raises(InvalidArgument, match=said):
        engine = start_engine(own)
        engine.next(engine.initialize(), [tf.constant(0)], [visit(own, 1, 0.5, 4)])


def test_a_negative_weight_is_broken_work(start_engine):
    """The server would step the other way, or not at all if the sum of all weights is negative."""
    algorithm, cohort = toy_amp(), [(1, -0.5, 4), (4, 0.25, 7)]
    visits, states = [visit(algorithm, *v) for v in cohort], [tf.constant(0)] * 2
    engine = start_engine(algorithm)
    output = engine.next(engine.initialize(), states, visits)
    assert [int(m["finite"]) for m in output.client_metrics] == [0, 1]
    engine = start_engine(screened(algorithm))
    output = engine.next(engine.initialize(), states, visits)
    assert [REASONS[int(m["rejected"])] for m in output.client_metrics] == ["its work is not finite", ""]
    assert [int(state) for state in output.client_states] == [0, 1]
    np.testing.assert_allclose(output.server.total, [0.25 * 7, 0.25 * 7])


def test_unknown_kinds_and_kinds_that_do_not_fit_the_update():
    with pytest.raises(ValueError, match="shares is 'model', 'backbone', 'head' or None; found 'whole'"):
        kinds(toy_amp(shares="whole"))
    with pytest.raises(ValueError, match="unknown aggregate 'median': one of mean, sum, rows"):
        kinds(toy_amp(aggregate="median"))
    with pytest.raises(ValueError, match="unknown aggregate 'median'"):
        kinds(toy_amp(aggregate=Update("rows", "median", "mean")))
    for several in (("rows", "sum", "mean"), {"mine": "rows", "total": "sum", "average": "mean"}):
        with pytest.raises(ValueError, match="aggregate must be mean, sum or rows, or a NamedTuple of these.*found"):
            kinds(toy_amp(aggregate=several))


def test_a_round_needs_a_state_for_every_visit():
    algorithm = toy_amp()
    engine = Simulation(algorithm)
    with pytest.raises(ValueError, match="found 0 states and 0 visits"):
        engine.next(engine.initialize(), [], [])
    with pytest.raises(ValueError, match="found 1 states and 2 visits"):
        engine.next(engine.initialize(), [0], [visit(algorithm, 1, 1.0, 4)] * 2)


def after_the_client(change):
    """The toy whose client returns another state."""
    update = toy_amp().client_update
    return toy_amp(
        client_update=lambda message, state, data: update(message, state, data)._replace(state=change(state))
    )


def after_the_server(change):
    """The toy whose server returns another state."""
    update = toy_amp().server_update
    return toy_amp(server_update=lambda server, aggregate: change(update(server, aggregate)))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (after_the_client(lambda s: tf.cast(s, tf.float32)), "the state as float32 [], and init_client gave int32 []"),
        (after_the_client(lambda s: tf.stack([s, s])), "the state as int32 [2], and init_client gave int32 []"),
        (after_the_client(lambda s: None), "the state as None, and init_client gave int32 []"),
        (after_the_client(lambda s: (s,)), "structure than init_client: a tuple of 1, and not one tensor"),
        (after_the_server(lambda s: s._replace(rounds=0.5)), "rounds as float32 [], and init_server gave int32 []"),
        (after_the_server(lambda s: s._replace(total=s.total[None])), "total as float32 [1, 2], and init_server gave"),
        # It would be broadcast: both numbers of the total would be their sum.
        (after_the_server(lambda s: s._replace(total=tf.reduce_sum(s.total))), "returned total as float32 [], and"),
        (after_the_server(lambda s: s._replace(average={})), "than init_server: it lacks average['y']. A state keeps"),
        (
            after_the_server(lambda s: s._replace(average={"y": s.average["y"], "n": [s.total]})),
            "than init_server: it has average['n'][0]. A state keeps",
        ),
        (after_the_server(lambda s: s._replace(average=tuple(s.average.values()))), "average[0] and it lacks average["),
    ],
)
def test_a_state_keeps_its_form(start_engine, algorithm, said):
    """TFF refused another dtype of a client's state only in the next round; this process went on with it."""
    visits = [visit(algorithm, client, 1.0, 2) for client in (1, 3)]
    with pytest.raises(InvalidArgument) as error:
        engine = start_engine(algorithm)
        engine.next(engine.initialize(), [tf.constant(0)] * 2, visits)
    assert said in str(error.value)


def test_numbers_of_python_in_a_state_are_tensors_of_its_dtype(start_engine):
    algorithm = after_the_client(lambda state: 3)._replace(
        server_update=lambda server, aggregate: server._replace(rounds=5, total=[1, 2])
    )
    with pytest.raises(InvalidArgument, match=r"it has total\[0\], total\[1\] and it lacks total\."):
        engine = start_engine(algorithm)
        engine.next(engine.initialize(), [tf.constant(0)], [visit(algorithm, 1, 1.0, 2)])
    algorithm = algorithm._replace(server_update=lambda server, aggregate: server._replace(rounds=5, seen=np.int32(2)))
    engine = start_engine(algorithm)
    output = engine.next(engine.initialize(), [tf.constant(0)], [visit(algorithm, 1, 1.0, 2)])
    assert (int(output.server.rounds), int(output.server.seen), int(output.client_states[0])) == (5, 2, 3)
    assert all(np.asarray(n).dtype == np.int32 for n in (output.server.rounds, output.client_states[0]))
