"""Passes are counted while a visit runs, operations by TensorFlow; here against pseudo-code and closed forms."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.toys import backbone
from tfpfl.algorithms import build_algorithm
from tfpfl.algorithms.contract import ClientData
from tfpfl.algorithms.parts import linear_head
from tfpfl.data.federation import Federation
from tfpfl.data.population import Population
from tfpfl.data.randomness import client_key
from tfpfl.models import SplitModel, build_network
from tfpfl.models.heads import head_kind
from tfpfl.models.valve import with_valve
from tfpfl.models.weights import Head
from tfpfl.runs.config import RunConfig
from tfpfl.runs.cost import Flops, Passes, Work, backbone_flops, count_work, head_flops, solution_flops, visit_flops
from tfpfl.runs.operations import count_operations
from tfpfl.runs.run import Run

N = 24


@pytest.fixture(scope="module")
def model():
    return SplitModel(backbone("float32"))


def work(model, name, **hyperparameters) -> Work:
    population = Population([N, N], [3, 3])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, *model.input_shape)).astype(np.float32)
    data = ClientData(x, rng.integers(0, 3, N).astype(np.int32), population.info(0), client_key(0, 1, [0])[0])
    return count_work(lambda m: build_algorithm(name, m, population, **hyperparameters), model, data)


def passes(model, name, **hyperparameters) -> Passes:
    return work(model, name, **hyperparameters).passes


def more(*case):
    """A second case, which `make test` leaves out."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("tau", [1, 5, 50])
def test_pflego_takes_one_pass_each_way_for_any_tau(model, tau):
    assert passes(model, "pflego", tau=tau) == Passes(1, 1)


@pytest.mark.slow
def test_pflego_as_the_paper_counts_it(model):
    assert passes(model, "pflego", tau=50, recompute=True) == Passes(2, 1)
    assert passes(model, "pflego", tau=50, chunk=7) == Passes(2, 1)  # chunks do not change the sum


@pytest.mark.parametrize("name", ["fedavg", "local", "fedper", "fedprox"])
def test_full_batch_methods_take_a_pass_each_way_a_step(model, name):
    assert passes(model, name, steps=6) == Passes(6, 6)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("scaffold", {}, 6),  # the control variate is what the steps have seen
        more("scaffold", {"option": "I"}, 7),
        more("feddyn", {}, 6),
        more("lg_fedavg", {}, 6),
        more("fedrod", {}, 6),  # both heads in one pass
        ("pfedme", {"inner_steps": 4}, 24),
        ("apfl", {}, 12),  # at w and at the mixture
        more("per_fedavg", {"variant": "fo"}, 12),
        more("per_fedavg", {"variant": "hf"}, 24),
        ("per_fedavg", {"variant": "hf", "batch_size": 6}, 6),  # four gradients on 6 of 24 examples
    ],
)
def test_passes_of_six_steps(model, name, options, expected):
    assert passes(model, name, steps=6, **options) == Passes(expected, expected)


@pytest.mark.slow
def test_a_valve_after_the_backbone_hides_no_passes(model):
    """A run gives GPFL a model that has the valve already; the method's own passes are through the model below it."""
    assert passes(with_valve(model), "gpfl", steps=6) == passes(model, "gpfl", steps=6) == Passes(6, 6)


def test_minibatches_count_by_their_examples(model):
    assert passes(model, "fedavg", epochs=3, batch_size=5) == Passes(3, 3)
    assert passes(model, "fedavg", steps=2, batch_size=6) == Passes(0.5, 0.5)


def test_fedrep_caches_features_for_its_head_steps(model):
    assert passes(model, "fedrep", tau_h=9, tau_b=4).backward == 4
    assert passes(model, "fedrep", tau_h=9, tau_b=4).forward <= 5


def test_fedrecon_takes_one_pass_each_way(model):
    assert passes(model, "fedrecon", tau=9) == Passes(1, 1)


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("pflego", {"tau": 50}, 49),
        ("pflego", {"tau": 1}, 0),
        ("pflego", {"tau": 50, "inner_opt": "adam", "safeguard": False, "chunk": 7}, 49),
        more("fedrecon", {"tau": 9}, 9),
        ("fedrep", {"tau_h": 9, "tau_b": 4}, 9),
        more("fedrep", {"tau_h": 3, "tau_b": 1, "unit": "epochs", "batch_size": 5}, 3),
        more("fedrep", {"tau_h": 3, "tau_b": 1, "unit": "steps", "batch_size": 6}, 0.75),
        ("fedrod", {"steps": 6, "batch_size": 8}, 2),  # of the private head, on features of the generic step
        ("fedavg", {"steps": 6}, 0),  # its steps go through the backbone, and are passes
        more("fedsgd", {}, 0),
    ],
)
def test_steps_on_the_head_alone(model, name, options, steps):
    assert work(model, name, **options).head_steps == pytest.approx(steps)


@pytest.mark.slow
def test_a_newton_step_is_counted_by_its_products(model):
    """Logits and gradient; the probabilities; the Hessian for each conjugate gradient; one loss or more."""
    found = work(model, "pflego", tau=2, inner_opt="newton").head_steps
    least = 1 + 0.5 + linear_head.CONJUGATE_GRADIENT_STEPS + 0.5
    assert least <= found <= least + 5 and found % 0.5 == 0


def test_an_exact_solution_is_counted_with_its_products():
    """TensorFlow's profiler has all of it but the Cholesky factor, n^3 / 3, and two solutions with it, 2 n^2 K each.

    With as many examples as columns, A^T A and A A^T take the same.
    """
    m, k = 40, 3
    head = Head(tf.zeros([m, k]), tf.zeros([k]))
    specs = tf.TensorSpec([m + 1, m]), tf.TensorSpec([m + 1, k])
    products = count_operations(lambda phi, y: linear_head.fit_exact(head, phi, y, head_kind("regression")), *specs)
    found = solution_flops(m + 1, m, k) + (m + 1) * 2 * head_flops(m, k).forward
    assert found == pytest.approx(products + (m + 1) ** 3 / 3 + 4 * (m + 1) ** 2 * k, rel=0.02)
    assert solution_flops(1000, m, k) - solution_flops(m + 1, m, k) == pytest.approx(2 * (1000 - 41) * 41**2)
    assert solution_flops(5, m, k) == pytest.approx(2 * 5 * 5 * 41 + 5**3 / 3 + 6 * 5**2 * k)

    model = SplitModel(backbone("float32"), kind="regression")
    data = np.zeros([N, *model.input_shape], np.float32), np.zeros([N, 1], np.float32)
    population = Population([N, N], [1, 1], labels="global")
    given = ClientData(*data, population.info(0), client_key(0, 1, [0])[0])
    found = count_work(lambda m: build_algorithm("pflego", m, population, inner_opt="exact"), model, given)
    assert found == Work(Passes(1, 1), 1, solutions=1)
    more = visit_flops(found, model, 100, 1) - visit_flops(found._replace(solutions=0), model, 100, 1)
    assert more == solution_flops(100, 5, 1) == 2 * 100 * 6**2 + 6**3 / 3 + 6 * 6**2


def test_the_estimate_of_a_safe_rate_is_counted_by_its_products(model):
    """The profiler counts what the result needs: five and four products from each of two starts."""
    found = work(model, "pflego", tau=5, head_rate="safe")
    assert found == Work(Passes(1, 1), 4, vectors=18)
    products = count_operations(linear_head.smoothness, tf.TensorSpec([100, 300]))
    assert found.vectors * 100 * head_flops(300, 1).forward == pytest.approx(products, rel=0.01)
    more = visit_flops(found, model, N, 3) - visit_flops(found._replace(vectors=0), model, N, 3)
    assert more == N * 18 * (2 * 5 + 1)


def test_who_does_not_count_has_no_counter_in_the_graph(model):
    phi = np.ones((3, 5), np.float32)
    assert linear_head.counted(phi) is phi


def test_operations_of_a_dense_backbone():
    """mlp200: a product with 784 x 200 and a bias; back, the outer product of the input and the gradient."""
    assert backbone_flops(SplitModel(build_network("mlp200", (28, 28, 1)))) == Flops(2 * 784 * 200 + 200, 2 * 784 * 200)


def test_a_deeper_layer_also_passes_the_gradient_on(model):
    """4 - 6 - 5: the gradients of both kernels, and the first hidden layer's."""
    found = backbone_flops(model)
    assert found.forward == 2 * (4 * 6 + 6 * 5) + 6 + 5
    products = 2 * (4 * 6 + 6 * 5) + 2 * 5 * 6
    assert products <= found.backward <= products + 4 * (6 + 5)  # the slopes of tanh, which not all versions count


def test_operations_of_convolutions():
    """6 x 6 x 2, three filters of 3 x 3, pooled by 2, then two filters of 3 x 3 on 3 x 3 x 3; padded, without ReLU."""
    layers = [
        keras.layers.Conv2D(3, 3, padding="same"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Conv2D(2, 3, padding="same"),
        keras.layers.Flatten(),
    ]
    found = backbone_flops(SplitModel(keras.Sequential([keras.Input((6, 6, 2)), *layers])))
    first, second = 2 * 36 * 3 * (9 * 2), 2 * 9 * 2 * (9 * 3)  # multiplications and additions
    biases, pooling = 36 * 3 + 9 * 2, 4 * 9 * 3
    assert found.forward == first + second + biases + pooling
    # The gradients of the filters and of what goes into the second; a sum of n numbers takes n - 1 additions. To undo
    # the pooling, TensorFlow pools again, and moves one number an output.
    sums = (36 - 1) * 3 + (9 - 1) * 2
    assert found.backward == first + 2 * second + sums + pooling + 9 * 3


def flops_of(shape, *layers) -> Flops:
    return backbone_flops(SplitModel(keras.Sequential([keras.Input(shape), *layers])))


@pytest.mark.parametrize(
    "layer", slow_but([keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN], keras.layers.SimpleRNN)
)
def test_operations_of_a_loop_are_those_of_its_steps(layer):
    """Written out, step by step, it is the same network; a loop also counts its steps, and adds up its gradients."""
    written = flops_of((10, 8), layer(16, unroll=True))
    loop, long = (flops_of((n, 8), layer(16)) for n in (10, 20))
    assert written.forward > 10 * 2 * (8 + 16) * 16
    assert loop.forward == pytest.approx(written.forward, rel=5e-3) and long.forward == 2 * loop.forward
    assert written.backward < loop.backward < 1.3 * written.backward
    assert long.backward == pytest.approx(2 * loop.backward, rel=1e-2)


def test_operations_that_the_profiler_does_not_count():
    product, bias = 2 * 5 * 6 * 7, 5 * 7  # 5 places, 6 numbers to 7
    dense = keras.layers.EinsumDense("abc,cd->abd", output_shape=(5, 7), bias_axes="bd")
    found = flops_of((5, 6), dense, keras.layers.Flatten())
    assert found.forward == product + bias and product <= found.backward <= 1.25 * product  # Keras 3 also adds up

    places, biases = 6 * 6, 6 * 6 * 4
    depthwise = flops_of((8, 8, 4), keras.layers.DepthwiseConv2D(3), keras.layers.Flatten())
    once = 2 * places * 4 * 9
    assert (depthwise.forward, depthwise.backward) == (once + biases, once + biases - 4)

    cube = flops_of((6, 6, 6, 2), keras.layers.Conv3D(3, 3), keras.layers.Flatten())
    once, biases = 2 * 4**3 * 3 * (27 * 2), 4**3 * 3
    assert (cube.forward, cube.backward) == (once + biases, once + biases - 3)

    whole, halves = (flops_of((8, 8, 4), keras.layers.Conv2D(6, 3, groups=n), keras.layers.Flatten()) for n in (1, 2))
    assert halves.forward - 36 * 6 == (whole.forward - 36 * 6) / 2 == 2 * places * 6 * 9 * 2


def test_operations_of_a_layer_that_checks_something():
    """What is checked is an operation without an output, on which others depend."""

    def checked(x):
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(x < 9), [x])]):
            return tf.identity(x)

    plain = flops_of((4,), keras.layers.Dense(3))
    assert flops_of((4,), keras.layers.Dense(3), keras.layers.Lambda(checked)).backward == plain.backward


def test_operations_of_attention():
    """Queries, keys and values; the products of queries and keys, and of weights and values; what comes out."""
    inputs = keras.Input((10, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, use_bias=False)(inputs, inputs)
    found = backbone_flops(SplitModel(keras.Model(inputs, keras.layers.Flatten()(attention))))
    products = 2 * 10 * 8 * 8 * 4 + 2 * 2 * 10 * 10 * 8
    assert products <= found.forward < 1.2 * products and found.backward > 1.5 * products


@pytest.mark.slow
def test_operations_of_a_visit(model):
    head, backbone = head_flops(5, 3), backbone_flops(model)
    assert head == Flops(2 * 5 * 3 + 3, 4 * 5 * 3 + 3)
    joint = sum(backbone) + sum(head)
    steps = 49 * (4 * 5 * 3 + 2 * 3)
    assert visit_flops(work(model, "pflego", tau=1), model, N, 3) == N * joint
    assert visit_flops(work(model, "pflego", tau=50), model, N, 3) == N * (joint + steps)
    assert visit_flops(work(model, "fedavg", steps=6), model, N, 3) == 6 * N * joint
    assert visit_flops(work(model, "fedavg", steps=2, batch_size=6), model, N, 3) == 0.5 * N * joint


@pytest.mark.parametrize(("pixels", "classes", "times"), [(28, 2, 1.125), (28, 10, 1.615), (8, 2, 2.461)])
def test_pflegos_head_steps_are_no_small_part_on_a_small_backbone(pixels, classes, times):
    """Written out: a pass is 4 pixels 200 numbers there and as many back, and 49 steps are two products each."""
    model = SplitModel(build_network("mlp200", (pixels, pixels, 1)))
    alone, whole = (visit_flops(Work(Passes(1, 1), steps), model, N, classes) for steps in (0, 49))
    assert whole - alone == N * 49 * 2 * (2 * 200 * classes + classes)
    assert whole / alone == pytest.approx(times, abs=1e-3)


@pytest.mark.slow
def test_a_run_counts_the_steps_of_its_heads(a_run):
    """PFLEGO with tau=4, as `RunConfig` of the run says."""
    with Run.open(a_run) as run:
        examples, classes = np.mean(run.population.num_examples), np.mean(run.population.num_classes)
        expected = examples * (sum(backbone_flops(run.model)) + sum(head_flops(200, classes)))
        expected += examples * 3 * 2 * (2 * 200 * classes + classes)
        assert run.flops == pytest.approx(expected, rel=1e-12)
        summary = run.write_summary()
    assert (summary["flops"], summary["head_steps"]) == (pytest.approx(expected), 3)


@pytest.mark.slow
def test_steps_on_batches_count_for_a_client_of_usual_size(tmp_path):
    """In the smallest client a batch is all of its examples: that part of a visit is not the others'."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 6)).astype(np.float32), np.arange(n) % 2) for n in (10, 200, 200, 200, 200)]
    federation = Federation.from_clients(clients, out=tmp_path / "f", validation=0.0, test_fraction=0.0)
    given = {"steps": 20, "batch_size": 8}
    config = RunConfig(algorithm="fedavg", network="mlp200", participation=1.0, hyperparameters=given)
    with Run.create(config, tmp_path / "run", federation) as run:
        backbone, head = backbone_flops(run.model), head_flops(run.model.num_features, 2)
        one = 20 * 8 * (sum(backbone) + sum(head))
        assert run.flops == pytest.approx(one)
        assert run.passes == Passes(10, 10)  # of the smallest client: 8 and 2 of 10 examples in turn


@pytest.mark.slow
def test_whether_a_client_straggles_in_round_1_says_nothing_of_the_others(six_clients, tmp_path):
    """Its part of the work was taken for that of a visit: passes, clock and deadlines then followed from the seed."""
    for seed in range(3):
        given = {"epochs": 20, "straggler": 0.9}
        config = RunConfig(algorithm="fedprox", network="mlp200", seed=seed, hyperparameters=given)
        with Run.create(config, tmp_path / str(seed), six_clients) as run:
            assert run.passes == Passes(20, 20)


@pytest.mark.slow
def test_a_visit_of_a_network_of_float64_is_counted(six_clients, tmp_path):
    """alpha_i was a float32 there; PFLEGO's run then ended with a TypeError, after its last round."""
    inputs = keras.Input(six_clients.example_shape, dtype="float64")
    flat = keras.layers.Flatten(dtype="float64")(inputs)
    keras.Model(inputs, keras.layers.Dense(4, "tanh", dtype="float64")(flat)).save(tmp_path / "network.keras")
    config = RunConfig(algorithm="pflego", network=str(tmp_path / "network.keras"), hyperparameters={"tau": 5})
    with Run.create(config, tmp_path / "run", six_clients) as run:
        assert run.model.dtype == np.float64
        assert run.work == Work(Passes(1, 1), 4)
