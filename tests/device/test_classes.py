"""Classes that a device adds, leaves out and merges: the head, its file, and the next round."""

import json
import re
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf

from helpers.hand_made import renamed
from helpers.truth import true_gradient, true_steps
from tflite_export import DeviceClient, SavedHead
from tflite_export.convert.program import unflatten
from tflite_export.device.classes import with_class, with_merged, without_class
from tflite_export.device.head_file import HeadError, head_bytes, load_head
from tflite_export.device.payload import decode
from tfpfl.models.weights import Head
from tfpfl.runs.run import Run

RNG = np.random.default_rng(0)
THETA = "0" * 64
HEAD = SavedHead(RNG.normal(size=(6, 3)).astype("f"), RNG.normal(size=3).astype("f"), THETA, ("cat", "dog", "cow"))
PHI = RNG.normal(size=(40, 6)).astype("f")


def probabilities(head):
    z = np.exp((PHI @ head.kernel + head.bias).astype(np.float64))
    return z / z.sum(1, keepdims=True)


def test_a_new_class_is_the_same_whatever_is_added_to_all_columns():
    shifted = HEAD._replace(kernel=HEAD.kernel + RNG.normal(size=(6, 1)).astype("f"), bias=HEAD.bias + np.float32(3))
    grown, other = with_class(HEAD, "hen"), with_class(shifted, "hen")
    assert grown.labels == ("cat", "dog", "cow", "hen")
    np.testing.assert_allclose(probabilities(grown), probabilities(other), atol=1e-5)
    before, after = probabilities(HEAD), probabilities(grown)
    np.testing.assert_allclose(after[:, :3] / after[:, :1], before / before[:, :1], rtol=1e-4)
    assert (after[:, 3] <= after[:, :3].max(1)).all()


def test_a_class_that_is_left_out():
    less = without_class(HEAD, "dog")
    before, after = probabilities(HEAD), probabilities(less)
    assert less.labels == ("cat", "cow")
    np.testing.assert_allclose(after, before[:, [0, 2]] / before[:, [0, 2]].sum(1, keepdims=True), atol=1e-6)
    back = without_class(with_class(HEAD, "hen"), "hen")
    assert np.array_equal(back.kernel, HEAD.kernel) and back.labels == HEAD.labels


def test_two_classes_become_one():
    merged, before = with_merged(HEAD, "cat", into="cow"), probabilities(HEAD)
    assert merged.labels == ("dog", "cow")
    after = probabilities(merged)
    assert (after[:, 1] <= before[:, 0] + before[:, 2] + 1e-6).all()
    twins = HEAD._replace(kernel=HEAD.kernel[:, [0, 1, 0]], bias=HEAD.bias[[0, 1, 0]])
    before, after = probabilities(twins), probabilities(with_merged(twins, "cat", into="cow"))
    np.testing.assert_allclose(after[:, 1], before[:, 0] + before[:, 2], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: with_class(HEAD, "dog"), "there is a class 'dog' already"),
        (lambda: with_class(HEAD, "two\nlines"), "a line of 1 to 200 characters"),
        (lambda: with_class(HEAD, 3), "the name of a class is a text, found 3"),
        (lambda: with_merged(HEAD, "dog", 3), "there is no class '3'"),
        (lambda: with_class(HEAD, ""), "a line of 1 to 200 characters"),
        (lambda: without_class(HEAD, "hen"), "there is no class 'hen'; there are cat, dog, cow"),
        (lambda: with_merged(HEAD, "cat", into="cat"), "cannot be merged with itself"),
        (lambda: without_class(without_class(HEAD, "cat"), "dog"), "at least 2 classes"),
    ],
)
def test_what_makes_no_sense(change, said):
    with pytest.raises(HeadError, match=said):
        change()


def test_the_file_of_a_head_with_names_of_its_own(tmp_path):
    path = tmp_path / "head.bin"
    grown = with_class(HEAD, "Kuh – ünlü")
    path.write_bytes(head_bytes(grown))
    found = load_head(path, 6, 3)
    assert np.array_equal(found.kernel, grown.kernel) and found[2:] == grown[2:]
    assert path.read_bytes()[:8] == b"TFPFLH02" and head_bytes(HEAD._replace(labels=None))[:8] == b"TFPFLH01"
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"x", content[:60] + b"\xff" + content[61:]):
        path.write_bytes(damaged)
        with pytest.raises(HeadError, match="damaged"):
            load_head(path, 6, 3)
    for names in (["a"] * 3, ["a", "b", "c", 4], "abcd", [[[]]] * 4):  # whole, by the checksum
        text = json.dumps(names).encode()
        body = content[52 : 52 + 4 * 7 * 4] + struct.pack("<I", len(text)) + text
        path.write_bytes(content[:48] + struct.pack("<I", zlib.crc32(body)) + body)
        with pytest.raises(HeadError, match="no names for its 4 classes"):
            load_head(path, 6, 3)


def test_a_head_is_kept_with_the_names_of_its_bundle_and_refused_where_they_are_others(tmp_path):
    path, head = tmp_path / "head.bin", HEAD._replace(labels=None)
    names = ("cat", "Kuh \u2013 \xfcnl\xfc", '\ud800"')  # of a manifest, which may name half of a surrogate pair
    path.write_bytes(head_bytes(head, names))
    found = load_head(path, 6, 3, names)
    assert np.array_equal(found.kernel, head.kernel) and found[2:] == head[2:] == load_head(path, 6, 3)[2:]
    said = f"{path} is the head of a bundle whose output 1 is '{names[1]}'; in this one it is 'dog', and its "
    with pytest.raises(HeadError, match=re.escape(said)):
        load_head(path, 6, 3, ("cat", "dog", "cow"))
    with pytest.raises(HeadError, match="is a head for 3 classes on 6 features; this client has 4 classes on 6"):
        load_head(path, 6, 4, (*names, "hen"))
    for others in ((), ("cat", "dog", "cow")):  # of an older client, or of classes of its own
        path.write_bytes(head_bytes(head._replace(labels=others or None)))
        assert load_head(path, 6, 3, names).labels == (others or None)


@pytest.mark.slow
def test_a_client_does_not_go_on_with_the_head_of_another_bundle(bundle, federation, tmp_path):
    other, state = renamed(bundle, tmp_path / "other", bundle.labels[::-1]), tmp_path / "head.bin"
    client = DeviceClient(bundle, state, interpreter=tf.lite.Interpreter)
    client.commit(client.round(client.theta, *federation.arrays(4, "train")))
    with pytest.raises(HeadError, match="whose output 0 is .*; in this one it is .*delete it to begin with this one's"):
        DeviceClient(other, state, interpreter=tf.lite.Interpreter)
    assert DeviceClient(bundle, state, interpreter=tf.lite.Interpreter).labels == bundle.labels
    client.add_class("hen")  # its own names from now on, which are right whatever the bundle says
    assert DeviceClient(other, state, interpreter=tf.lite.Interpreter).labels == (*bundle.labels, "hen")


@pytest.mark.slow
def test_a_round_after_a_class_was_added_is_that_of_a_wider_head(bundle, run_folder, federation, tmp_path):
    state, (x, y) = tmp_path / "head.bin", federation.arrays(4, "train")
    client = DeviceClient(bundle, state, interpreter=tf.lite.Interpreter)
    stale = client.round(client.theta, x, y)
    client.add_class("new")
    assert client.labels == (*bundle.manifest["labels"]["names"], "new")
    with pytest.raises(HeadError, match="the classes have changed since the round"):
        client.commit(stale)

    y = np.where(np.arange(len(y)) % 5 == 0, 3, y)  # some of them are of the new class
    start, settings = Head(*client.head), client.settings
    with Run.open(run_folder, engine="local") as run:
        model = run.model
    theta = unflatten(client.theta, model)
    fitted = true_steps(model.features(theta, x).numpy(), y, start, settings["tau"] - 1, settings["beta"])
    loss, dtheta, dkernel, dbias = true_gradient(model, theta, fitted, x, y)
    update = client.round(client.theta, x, y)
    assert update.loss == pytest.approx(loss, rel=1e-5)
    assert np.abs(decode(update.payload) - dtheta).max() < 1e-5 * np.abs(dtheta).max()
    client.commit(update)
    assert np.abs(client.head[0] - (fitted.kernel - settings["head_rate"] * dkernel)).max() < 1e-5
    assert np.abs(client.head[1] - (fitted.bias - settings["head_rate"] * dbias)).max() < 1e-5

    again = DeviceClient(bundle, state, interpreter=tf.lite.Interpreter)
    assert again.labels == client.labels and np.array_equal(again.head[0], client.head[0])
    again.merge_classes("new", into=again.labels[0])
    again.remove_class(again.labels[1])
    assert again.predict(x).shape == (len(x), 2) and again.score(x[:4], np.array([0, 1, 0, 1])).loss > 0


@pytest.mark.slow
def test_a_round_from_before_two_changes_that_leave_the_same_names(bundle, federation, tmp_path):
    """The column of a class that is gone would come back under the name of a new one."""
    client, (x, y) = DeviceClient(bundle, interpreter=tf.lite.Interpreter), federation.arrays(4, "train")
    client.add_class("new")
    stale, before = client.round(client.theta, x, y), client.labels
    client.remove_class("new")
    client.add_class("new")
    assert client.labels == before
    with pytest.raises(HeadError, match="the classes have changed since the round"):
        client.commit(stale)
    client.commit(client.round(client.theta, x, y))
    client.commit(stale._replace(class_changes=None))  # from a file: the names are all that is known


@pytest.mark.slow
def test_the_static_program_has_a_fixed_number_of_classes(bundle, tmp_path):
    state = tmp_path / "head.bin"
    client = DeviceClient(bundle, state, interpreter=tf.lite.Interpreter, static=True)
    with pytest.raises(HeadError, match="fixed number of classes"):
        client.add_class("new")
    DeviceClient(bundle, state, interpreter=tf.lite.Interpreter).add_class("new")
    with pytest.raises(HeadError, match="has 4 classes, and program_static.tflite is for a fixed number"):
        DeviceClient(bundle, state, interpreter=tf.lite.Interpreter, static=True)
