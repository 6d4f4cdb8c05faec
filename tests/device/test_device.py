"""The reference client: exact chunks, a head that only gets better, and nothing lost whatever comes in."""

import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from helpers.truth import true_gradient, true_steps
from tflite_export import Bundle, BundleError, DeviceClient, Runtime
from tflite_export.convert.program import unflatten
from tflite_export.device import payload as payloads
from tflite_export.device.drawing import drawing_settings
from tflite_export.device.head_file import HeadError, SavedHead, load_head, save_head, theta_sha256
from tflite_export.device.payload import PayloadError, decode, encode
from tfpfl.models.weights import Head
from tfpfl.runs.run import Run

INTERPRETER = tf.lite.Interpreter


@pytest.fixture(scope="module")
def split_model(run_folder):
    with Run.open(run_folder, engine="local") as run:
        return run.model


@pytest.fixture(scope="module")
def data(federation):
    return federation.arrays(4, "train")


def device(bundle, state=None, **options):
    return DeviceClient(bundle, state, interpreter=INTERPRETER, **options)


VARIANTS = [{"chunk": 1000}, {"chunk": 7}, {"chunk": 32}, {"chunk": 1}, {"static": True}]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_round_is_the_gradient_of_the_whole_objective_whatever_the_chunks(bundle, split_model, data, options):
    client, (x, y) = device(bundle, **options), data
    settings, start = client.settings, Head(*client.head)
    theta = unflatten(client.theta, split_model)
    fitted = true_steps(split_model.features(theta, x).numpy(), y, start, settings["tau"] - 1, settings["beta"])
    loss, dtheta, dkernel, dbias = true_gradient(split_model, theta, fitted, x, y)
    update = client.round(client.theta, x, y)
    assert (update.num_examples, update.loss) == (len(x), pytest.approx(loss, rel=1e-5))
    assert np.abs(decode(update.payload) - dtheta).max() < 1e-5 * np.abs(dtheta).max()
    assert np.array_equal(client.head[0], start.kernel), "a server that never gets the update has not counted the visit"
    client.commit(update)
    kernel, bias = client.head
    assert np.abs(kernel - (fitted.kernel - settings["head_rate"] * dkernel)).max() < 1e-5
    assert np.abs(bias - (fitted.bias - settings["head_rate"] * dbias)).max() < 1e-5
    assert np.abs(kernel - start.kernel).max() > 1e-3


def test_a_round_with_few_examples_on_the_static_program_is_one_call(bundle, data):
    calls, client = [], device(bundle, static=True)
    run = client.runtime.__class__.__call__

    class Spy(Runtime):
        def __call__(self, signature, **inputs):
            calls.append(signature)
            return run(self, signature, **inputs)

    client.runtime = Spy(client.runtime.path, INTERPRETER)
    x, y = data[0][:20], data[1][:20]
    update = client.round(client.theta, x, y)
    assert calls == ["round"]
    other = device(bundle)
    assert np.allclose(decode(update.payload), decode(other.round(other.theta, x, y).payload), atol=1e-7)


def test_features_of_the_exported_theta_come_from_constant_weights(bundle, split_model, data):
    """They take a part of the time; every other theta is the program's, also one that differs in one weight."""
    client, static, (x, _) = device(bundle), device(bundle, static=True), data
    called = []
    run = client.runtime.__class__.__call__

    class Spy(Runtime):
        def __call__(self, signature, **inputs):
            called.append(signature)
            return run(self, signature, **inputs)

    client.runtime = Spy(client.runtime.path, INTERPRETER)
    constant = client.features(x)
    assert called == []
    np.testing.assert_allclose(constant, static.features(x), atol=1e-5)
    theta = client.theta.copy()
    theta[-1] += 1  # a bias of the last layer
    client.receive(theta)
    moved = split_model.features(unflatten(theta, split_model), x).numpy()
    np.testing.assert_allclose(client.features(x), moved, atol=1e-5)
    assert set(called) == {"features"} and np.abs(moved - constant).max() > 0.1
    client.receive(bundle.theta())
    assert np.array_equal(client.features(x), constant)


def test_what_leaves_is_the_gradient_and_the_number_of_examples(bundle, data):
    client = device(bundle)
    update = client.round(client.theta, *data)
    assert update._fields == ("payload", "num_examples", "loss", "head", "class_changes")
    assert len(update.payload) == payloads.num_bytes(client.bundle.num_backbone_weights)


def test_a_lost_update_leaves_the_device_as_it_was(bundle, data, tmp_path):
    """The next round starts where the server believes that the client is; only a commit moves the head."""
    client = device(bundle, tmp_path / "head.bin")
    lost = client.round(client.theta, *data)
    assert not (tmp_path / "head.bin").exists()
    again = client.round(client.theta, *data)
    assert again.payload == lost.payload and np.array_equal(again.head.kernel, lost.head.kernel)
    client.commit(again)
    later = client.round(client.theta, *data)
    assert later.payload != lost.payload
    restarted = device(bundle, tmp_path / "head.bin")
    assert restarted.round(client.theta, *data).payload == later.payload
    with pytest.raises(HeadError, match="this client's head is"):
        client.commit(again._replace(head=again.head._replace(kernel=np.zeros((3, 3), np.float32))))


def test_sums_of_chunks_are_in_float64_and_in_place(bundle, data):
    """Against the chunks' gradients, each from a call of its own, added in float64."""
    client = device(bundle, chunk=7)
    (x, y), (kernel, bias) = data, client.head
    parts = []
    for start in range(0, len(x), 7):
        part = slice(start, start + 7)
        given = {"x": x[part], "labels": y[part], "weights": np.full(len(y[part]), 1 / len(x), np.float32)}
        parts.append(client.runtime("joint_gradient", theta=client.theta, kernel=kernel, bias=bias, **given))
    for found, name in zip(client.joint_gradient(x, y, kernel, bias), ("dtheta", "dkernel", "dbias"), strict=False):
        expected = sum(part[name].astype(np.float64) for part in parts).astype(np.float32)
        assert found.tobytes() == expected.tobytes()


def test_personalization_keeps_a_better_head_and_no_other(bundle, split_model, data, federation, tmp_path):
    client = device(bundle, tmp_path / "head.bin")
    rng = np.random.default_rng(0)
    fresh = SavedHead(
        0.1 * rng.standard_normal((200, 3)).astype(np.float32), np.zeros(3, np.float32), theta_sha256(client.theta)
    )
    client.start_from(fresh)
    held_out = federation.arrays(4, "test")
    done = client.personalize(*data, steps=20, beta=0.1, held_out=held_out)
    assert done.kept and done.loss < done.loss_before and done.after.loss < done.before.loss
    theta = unflatten(client.theta, split_model)
    expected = true_steps(split_model.features(theta, data[0]).numpy(), data[1], Head(*fresh[:2]), 20, 0.1)
    assert np.abs(client.head[0] - expected.kernel).max() < 1e-5
    better = client.head[0].copy()

    wrong = (data[1] + 1) % 3  # labels that make the head worse on what is held out
    done = client.personalize(data[0], wrong, steps=50, beta=0.1, held_out=held_out)
    assert not done.kept and done.loss < done.loss_before  # it did fit what it was given
    assert np.array_equal(client.head[0], better)
    assert np.array_equal(device(bundle, tmp_path / "head.bin").head[0], better)


def test_held_out_examples_are_set_aside_from_every_class(data):
    from tflite_export.device.scores import cut

    (x, y), (x_out, y_out) = cut(*data, 0.25)
    assert len(x) + len(x_out) == len(data[0]) and set(y) == set(y_out) == {0, 1, 2}
    assert len(x_out) == pytest.approx(len(data[0]) / 4, abs=1)
    together = {a.tobytes() for a in x} | {a.tobytes() for a in x_out}
    assert together == {a.tobytes() for a in data[0]}
    for part, n, said in (
        (1.5, 10, "must lie in"),
        (0.25, 3, "3 examples are too few"),
        (0.1, 8, "a held-out part of 0.1 of 8 examples is not one whole example"),
    ):
        with pytest.raises(BundleError, match=said):
            cut(data[0][:n], data[1][:n], part)


@pytest.mark.parametrize("part", [0.1, 0.25, 1 / 3, 0.4, 0.5, 0.75, 0.9])
def test_the_part_that_is_held_out_is_the_one_that_was_asked_for(part):
    from tflite_export.device.scores import cut

    y = np.repeat(np.arange(4, dtype=np.int32), [10, 40, 30, 20])[np.random.default_rng(0).permutation(100)]
    (x, labels), (x_out, labels_out) = cut(np.arange(100), y, part)
    assert len(x_out) == int(100 * part) and sorted([*x, *x_out]) == list(range(100))
    for c, n in enumerate([10, 40, 30, 20]):
        assert abs((labels_out == c).sum() - part * n) <= 1 and (labels == c).sum() + (labels_out == c).sum() == n
    targets = np.random.default_rng(1).normal(size=(100, 2))
    _, (_, held_out) = cut(np.arange(100), targets, part)
    assert len(held_out) == int(100 * part)
    low = (held_out[:, 0] < np.median(targets[:, 0])).sum()
    assert abs(low - part * 50) <= 1  # small and large ones


def test_too_few_examples_for_the_part_are_refused_by_personalize(bundle, data):
    client = device(bundle)
    with pytest.raises(BundleError, match="0.1 of 8 examples is not one whole example"):
        client.personalize(data[0][:8], data[1][:8], held_out=0.1)


def test_numbers_of_numpy_and_numbers_of_steps_that_are_none(bundle, data):
    client = device(bundle)
    found = client.personalize(*data, steps=np.int64(3), beta=np.float32(0), held_out=np.float32(0.25))
    assert not found.kept and found.loss == found.loss_before
    for steps in (2**31, 2.5, float("nan"), float("inf")):
        with pytest.raises(BundleError, match="steps must be a whole number of at most 2147483647, found"):
            client.personalize(*data, steps=steps)


def test_the_head_survives_a_restart_and_says_when_theta_moved_on(bundle, data, tmp_path):
    path = tmp_path / "head.bin"
    client = device(bundle, path)
    assert not client.head_is_stale
    client.commit(client.round(client.theta + np.float32(0.01), *data))
    again = device(bundle, path)  # starts with the bundle's theta, not with the round's
    assert all(np.array_equal(a, b) for a, b in zip(again.head, client.head, strict=True))
    assert again.head_is_stale and not client.head_is_stale
    again.receive(client.theta)
    assert not again.head_is_stale
    assert np.array_equal(again.predict(data[0]), client.predict(data[0]))


def test_theta_and_head_are_the_clients_own(bundle, data):
    """The array that came may be used again for something else, and what the client shows is not for writing."""
    client, x = device(bundle), data[0]
    theta, kernel = client.theta + np.float32(0.1), client.head[0] + np.float32(0.1)
    client.receive(theta)
    client.start_from(SavedHead(kernel, client.head[1], client.theta_sha256))
    before, sent = client.predict(x), theta.copy()
    theta -= 5
    kernel -= 5
    assert np.array_equal(client.predict(x), before) and np.array_equal(client.theta, sent)
    assert client.theta_sha256 == theta_sha256(client.theta)
    with pytest.raises(ValueError, match="read-only"):
        client.theta[0] = 0


def test_a_head_that_float32_does_not_have_is_not_saved(bundle, tmp_path):
    client = device(bundle, tmp_path / "head.bin")
    kernel, bias = client.head
    with pytest.raises(HeadError, match="NaN or infinity"):
        client.start_from(SavedHead(kernel + 1e39, bias, client.theta_sha256))
    assert list(tmp_path.iterdir()) == []
    client.start_from(SavedHead(kernel + 1 / 3, bias, client.theta_sha256))  # as it is after a restart
    assert np.array_equal(client.head[0], device(bundle, tmp_path / "head.bin").head[0])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"labels": (3, 5, 8)}, "must be a text, found 3"),
        ({"labels": ("a", "b", "")}, "must be a text, found ''"),
        ({"labels": ("a", "b", "\ud83d")}, "must be a text in Unicode"),
        ({"labels": ("a", "b", "a")}, "'a' is there twice"),
        ({"labels": ()}, "the head has no names for its 3 classes"),
        ({"labels": "abc"}, "the head has no names for its 3 classes"),
        ({"labels": ("a", "b")}, "the head has no names for its 3 classes"),
        ({"theta_sha256": "no hash"}, "theta_sha256 must be 64 hexadecimal digits"),
        ({"theta_sha256": None}, "theta_sha256 must be 64 hexadecimal digits"),
    ],
    ids=str,
)
def test_a_head_that_could_not_be_opened_again_does_not_replace_a_good_one(bundle, tmp_path, wrong, said):
    state = tmp_path / "head.bin"
    client = device(bundle, state)
    good = SavedHead(*client.head, "00" * 32)
    client.start_from(good)
    with pytest.raises(HeadError, match=said):
        client.start_from(good._replace(**wrong))
    with pytest.raises(HeadError, match=r"must be a SavedHead\(kernel, bias, theta_sha256\), found a tuple"):
        client.start_from(client.head)
    with pytest.raises(HeadError, match="the name of a class is a line"):
        client.add_class("\ud83d")
    again = device(bundle, state)
    assert np.array_equal(again.head[0], client.head[0]) and again.labels == client.labels


def test_a_folder_of_the_state_that_is_not_there_is_told_before_anything_is_computed(bundle, tmp_path):
    with pytest.raises(HeadError, match=r"head.bin cannot keep the head: there is no folder .*nowhere\. Make"):
        device(bundle, tmp_path / "nowhere" / "head.bin")
    with pytest.raises(HeadError, match="cannot keep the head: it is a folder. Give the path of a file"):
        device(bundle, tmp_path)


def bad_inputs():
    def nan_x(x, y, theta):
        x[3, 2, 2] = np.nan
        return x, y, theta

    def infinite_theta(x, y, theta):
        theta[5] = np.inf
        return x, y, theta

    return {
        "NaN in an example": (nan_x, "example 3 holds NaN"),
        "label too large": (lambda x, y, t: (x, np.where(np.arange(len(y)) == 2, 3, y), t), "label 3 is out of range"),
        "label negative": (lambda x, y, t: (x, y - 1, t), "label -1 is out of range"),
        "labels of another length": (lambda x, y, t: (x, y[1:], t), "labels must be integers"),
        "labels not integers": (lambda x, y, t: (x, y.astype(np.float32), t), "labels must be integers"),
        "another shape": (lambda x, y, t: (x[:, 1:], y, t), "examples must be float32"),
        "another dtype": (lambda x, y, t: (x.astype(np.float64), y, t), "examples must be float32"),
        "examples of two shapes": (
            lambda x, y, t: ([x[0], *x[1:, 1:]], y, t),
            "examples must be one array, found lists",
        ),
        "labels in lists": (lambda x, y, t: (x, [[0], [0, 1]], t), "labels must be one array, found lists or arrays"),
        "masked examples": (
            lambda x, y, t: (np.ma.masked_array(x, np.arange(x.size).reshape(x.shape) < 2), y, t),
            "examples: 2 values of a masked array are masked",
        ),
        "masked labels": (
            lambda x, y, t: (x, np.ma.masked_array(y, np.arange(len(y)) == 1), t),
            "labels: 1 values of a masked array are masked",
        ),
        "no labels": (lambda x, y, t: (x, None, t), r"labels must be integers .*, found object \[\]"),
        "nothing": (lambda x, y, t: (x[:0], y[:0], t), "no examples"),
        "theta too short": (lambda x, y, t: (x, y, t[1:]), r"theta must be float32 \[13000\]"),
        "theta in parts": (lambda x, y, t: (x, y, [t[:8], t[8:]]), "theta must be one array, found lists or arrays"),
        "infinite theta": (infinite_theta, "theta holds NaN or infinity"),
        "a theta whose features overflow": (lambda x, y, t: (x, y, t * np.float32(1e38)), "the round diverged"),
    }


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_is_refused_and_the_saved_head_untouched(bundle, data, tmp_path, name):
    change, reason = bad_inputs()[name]
    client = device(bundle, tmp_path / "head.bin")
    client.personalize(*data, steps=3, held_out=None)
    saved = (tmp_path / "head.bin").read_bytes()
    x, y, theta = change(data[0].copy(), data[1].copy(), client.theta.copy())
    with pytest.raises(BundleError, match=reason), np.errstate(over="ignore"):
        client.round(theta, x, y)
    if "theta" not in name:
        with pytest.raises(BundleError, match=reason):
            client.personalize(x, y)
    assert (tmp_path / "head.bin").read_bytes() == saved
    assert not [p for p in tmp_path.iterdir() if p.name != "head.bin"]


def test_held_out_examples_without_labels_are_told_as_such(bundle, data):
    with pytest.raises(BundleError, match=r"labels must be integers \[2\], found object \[\]"):
        device(bundle).personalize(*data, held_out=(data[0][:2], None))


class Frame:
    """What both pandas and polars have."""

    def __init__(self, columns, x):
        self.columns, self.x = columns, x

    def __array__(self, dtype=None, copy=None):
        return np.array(self.x, dtype)

    to_numpy = __array__


def test_a_dataframe_whose_columns_have_another_order_is_refused(bundle, data):
    """Only its numbers are read, so age would be weight; and of targets, one output would be the other."""
    of_table, (x, y) = Bundle(bundle.folder), data
    of_table.columns = ("age", "weight")
    client = device(of_table)
    for columns, said in ((["weight", "age"], "1 of the DataFrame is 'weight'"), (["age", "w"], "2 of the Data.* 'w'")):
        with pytest.raises(BundleError, match=f"examples: column {said}.*Give the columns in this order: age, weight"):
            client.predict(Frame(columns, x))
    for columns in (["age", "weight"], range(2), ["a", "b"]):  # the last have names of their own
        assert np.array_equal(client.predict(Frame(columns, x)), client.predict(x))
    with pytest.raises(BundleError, match="labels: column 1 of the DataFrame is"):
        client.score(x, Frame(client.labels[::-1], y))


def test_a_runtime_that_is_too_old_is_named(bundle, data):
    class WithoutWhile(tf.lite.Interpreter):
        """A runtime that reports an operation that it does not know, as the real ones do."""

        def get_signature_runner(self, name):
            if name in ("round", "personalize"):
                raise ValueError("Didn't find op for builtin opcode 'WHILE' version '2'")
            return super().get_signature_runner(name)

    with pytest.raises(BundleError, match="cannot run signature 'round' of program.tflite; it may be too old.*WHILE"):
        client = DeviceClient(bundle, interpreter=WithoutWhile, chunk=1000)
        client.round(client.theta, *data)


def test_a_bundle_that_was_moved_is_not_the_runtimes_fault(bundle, data, tmp_path):
    """Its backbone is opened when it is needed first."""
    moved = Bundle(shutil.copytree(bundle.folder, tmp_path / "b"))
    client = device(moved)
    moved.folder.rename(tmp_path / "c")
    with pytest.raises(BundleError, match=r"there is no file .*backbone\.tflite\. If its folder was moved"):
        client.predict(data[0])


@pytest.mark.parametrize("threads", [0, -3, 1.5, 257])
def test_a_number_of_threads_that_is_none_is_not_the_runtimes_fault(bundle, threads):
    with pytest.raises(BundleError, match=f"num_threads must be a whole number from 1 to 256; found {threads}"):
        device(bundle, num_threads=threads)


def test_a_runtime_known_to_crash_in_while_takes_the_other_signatures(bundle, data, monkeypatch):
    monkeypatch.setattr("tflite_export.device.runtime.runtime_version", lambda _: ("ai-edge-litert", "1.0.1"))
    client = device(bundle, chunk=1000)
    monkeypatch.undo()
    with pytest.raises(BundleError, match="1.0.1 is too old for signature 'round'.*head_step"):
        client.runtime("round")
    found, expected = client.round(client.theta, *data), device(bundle)
    expected = expected.round(expected.theta, *data)
    assert np.allclose(decode(found.payload), decode(expected.payload), atol=1e-6)


def test_a_signature_or_input_that_is_not_there(bundle):
    runtime = Runtime(bundle.path("program.tflite"), INTERPRETER)
    with pytest.raises(BundleError, match="no signature 'train'; it has features, head_step"):
        runtime("train")
    good = {"theta": bundle.theta(), "x": np.zeros((3, *bundle.example_shape), np.float32)}
    assert runtime("features", **good)["phi"].shape[0] == 3
    for change, reason in (
        ({"y": np.zeros(3, np.float32)}, "'features' of program.tflite takes theta, x; found theta, x, y"),
        ({"x": good["x"].astype(np.float64)}, r"x must be float32 \[-1, .*; found float64 \[3, "),
        ({"x": good["x"][0]}, r"x must be float32 \[-1, "),
        ({"x": good["x"][:, 1:]}, r"x must be float32 \[-1, "),
        ({"theta": good["theta"][1:]}, r"theta must be float32 \[13000\].*found float32 \[12999\]"),
    ):
        with pytest.raises(BundleError, match=reason):
            runtime("features", **good | change)
    with pytest.raises(BundleError, match="takes theta, x; found none"):
        runtime("features")


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_an_error_of_the_runtime_is_not_taken_for_the_callers(bundle, kind):
    """Whatever its words are: LiteRT says for example "Unsupported data type in ..." or "node 7 failed to prepare"."""

    class Broken(tf.lite.Interpreter):
        def get_signature_runner(self, name):
            runner = super().get_signature_runner(name)

            class Failing:
                get_input_details = staticmethod(runner.get_input_details)

                def __call__(self, **inputs):
                    raise kind("Unsupported data type in a kernel")

            return Failing()

    runtime = Runtime(bundle.path("program.tflite"), Broken)
    x = np.zeros((3, *bundle.example_shape), np.float32)
    with pytest.raises(BundleError, match="cannot run signature 'features'.*input is out of range: Unsupported"):
        runtime("features", theta=bundle.theta(), x=x)


def test_a_damaged_head_file_is_refused(bundle, tmp_path):
    path = tmp_path / "head.bin"
    save_head(path, load_head(bundle.path("head.bin"), 200, 3))
    content = path.read_bytes()
    for wrong, reason in (
        (content[:-1], "damaged"),
        (content[:-1] + bytes([content[-1] ^ 1]), "damaged"),
        (content[:20], "not a head"),
        (b"", "not a head"),
        (b"x" * len(content), "not a head"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(HeadError, match=reason):
            device(bundle, path)
        assert path.read_bytes() == wrong


SAVE_FOREVER = """
import sys
import numpy as np
from tflite_export.device.head_file import SavedHead, save_head
value = 0
while True:
    value += 1
    kernel, bias = np.full((500, 300), value, np.float32), np.full(300, value, np.float32)
    save_head(sys.argv[1], SavedHead(kernel, bias, "00" * 32))
    print(value, flush=True)
"""


def test_kill_9_while_saving_leaves_the_old_or_the_new_head(tmp_path):
    path = tmp_path / "head.bin"
    rng, last = np.random.default_rng(0), 0
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(path)], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()  # it has begun
        time.sleep(float(rng.uniform(0, 0.05)))
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait()
        head = load_head(path, 500, 300)
        value = head.kernel[0, 0]
        assert (head.kernel == value).all() and (head.bias == value).all()
        assert value >= int(said[-1] if said else 1)  # what it said was saved, is
        last = max(last, value)
    assert last > 1


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("size", [1, 1023, 1024, 5000])
def test_a_payload_comes_back(kind, size):
    rng = np.random.default_rng(size)
    gradient = (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 2, size)).astype(np.float32)
    payload = encode(gradient, kind)
    assert len(payload) == payloads.num_bytes(size, kind)
    found = decode(payload, size)
    if kind == "float32":
        assert np.array_equal(found, gradient)
    else:  # half a step of the block's scale
        for start in range(0, size, 1024):
            block = slice(start, start + 1024)
            assert np.abs(found[block] - gradient[block]).max() <= 0.5001 * np.abs(gradient[block]).max() / 127


def test_a_payload_of_zeros_or_of_tiny_numbers_is_finite():
    for value in (0.0, 1e-44, 1e-38):
        assert np.allclose(decode(encode(np.full(2000, value, np.float32), "int8")), value, atol=1e-40)


def test_bad_payloads_are_refused():
    good = encode(np.arange(3000, dtype=np.float32), "int8")
    for wrong in (b"", good[:-1], good + b"0", b"x" + good[1:], good[:-1] + bytes([good[-1] ^ 1])):
        with pytest.raises(PayloadError):
            decode(wrong)
    with pytest.raises(PayloadError, match="3000 numbers came, but theta has 2999"):
        decode(good, 2999)
    for gradient in (np.array([np.nan], np.float32), np.zeros((2, 2), np.float32)):
        with pytest.raises(PayloadError):
            encode(gradient)
    with pytest.raises(PayloadError, match="unknown payload"):
        encode(np.zeros(3, np.float32), "int4")


def test_arguments_of_personalize_that_are_none_are_refused(bundle, data):
    client = DeviceClient(bundle, interpreter=tf.lite.Interpreter)
    x, y = data
    for held_out in (x, (x, y, x), "half"):
        with pytest.raises(BundleError, match=r"held_out must be a part of the examples in \(0, 1\), a pair"):
            client.personalize(x, y, held_out=held_out)
    with pytest.raises(BundleError, match="steps and beta must be numbers, found steps='3', beta=0.5"):
        client.personalize(x, y, steps="3", beta=0.5)
    with pytest.raises(BundleError, match=r"beta from 0 to 3.4e\+38, found steps=4, beta=1e\+39"):
        client.personalize(x, y, steps=4, beta=1e39)


def test_a_scale_of_nearly_0_has_no_drawings():
    assert drawing_settings("digits", (8, 8), {"stored_dtype": "uint8", "scale": 1e-320}) is None
    assert drawing_settings("digits", (8, 8), {"stored_dtype": "uint8", "scale": 1 / 16})["levels"] == 16
