"""Sources: what is loaded equals what its maker publishes, and bad data are refused early."""

import numpy as np
import pytest

from helpers.marks import slow_but
from tfpfl.checks import InvalidArgument
from tfpfl.data.catalog import list_datasets, load_source
from tfpfl.data.client_arrays import client_arrays
from tfpfl.data.omniglot import AUGMENT, _rotated, _rotations
from tfpfl.data.source import Source
from tfpfl.data.synthetic import blobs


def test_digits_are_scikit_learns_split_by_class():
    from sklearn.datasets import load_digits

    theirs, ours = load_digits(), load_source("digits")
    assert ours.x_train.shape[1:] == (8, 8, 1) and ours.x_train.dtype == np.uint8
    both = np.concatenate([ours.x_train, ours.x_test]).reshape(-1, 64)
    order = np.lexsort(both.T)
    assert np.array_equal(both[order], theirs.data[np.lexsort(theirs.data.T)])
    np.testing.assert_array_equal(np.bincount(ours.y_test), np.bincount(theirs.target) // 5)
    assert (both * ours.scale).max() == 1.0 and ours.shift == 0
    assert np.array_equal(load_source("digits").x_test, ours.x_test)


def test_signed_pixels_are_minus_one_to_one():
    source = load_source("digits", pixels="signed")
    values = source.x_train.astype(float) * source.scale + source.shift
    assert values.min() == -1 and values.max() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["mnist", "fashion_mnist", "cifar10"], "mnist"))
def test_tfds_images_equal_what_tfds_loads(name, tfds_data):
    where = tfds_data(name)
    import tensorflow_datasets as tfds

    source = load_source(name)
    assert len(source.x_train) == (50_000 if name == "cifar10" else 60_000) and len(source.x_test) == 10_000
    assert len(source.class_names) == 10 and source.scale == 1 / 255
    # TFDS reads TFDS_DATA_DIR when it is imported, and another test may have had another folder then.
    theirs = tfds.load(name, split="test[:50]", data_dir=str(where), download=False)
    for k, example in enumerate(theirs.as_numpy_iterator()):
        assert example["label"] == source.y_test[k] and np.array_equal(example["image"], source.x_test[k])
    assert k == 49


@pytest.fixture(scope="module", params=slow_but(AUGMENT, ci=("before_split",)))
def omniglot(request, tfds_data):
    tfds_data("omniglot")
    return request.param, load_source("omniglot", augment=request.param)


def test_omniglot_counts_labels_and_alphabets(omniglot):
    augment, source = omniglot
    train, test = {"before_split": (60, 20), "train_only": (60, 5), "after_split": (60, 20), "none": (15, 5)}[augment]
    assert source.x_train.shape == (1623 * train, 28, 28, 1) and source.x_test.shape == (1623 * test, 28, 28, 1)
    assert set(np.bincount(source.y_train)) == {train} and set(np.bincount(source.y_test)) == {test}
    # A character belongs to one alphabet, and the sizes of alphabets are 14 to 55.
    pairs = set(zip(source.y_train.tolist(), source.key_train.tolist(), strict=True))
    _, sizes = np.unique([alphabet for _, alphabet in pairs], return_counts=True)
    assert len(pairs) == 1623 and len(sizes) == 50 and (sizes.min(), sizes.max()) == (14, 55)
    # The rank of a character among its alphabet's, which becomes the local label, is its number in the data set.
    for alphabet in np.unique(source.key_train):
        names = [source.class_names[c] for c in sorted(c for c, a in pairs if a == alphabet)]
        assert names == [f"{alphabet}_{k}" for k in range(len(names))]
    # White strokes on black: after the inversion most of a drawing is 0.
    assert np.median(source.x_train[:2000]) == 0 and source.x_train[:2000].max() == 255


def test_omniglot_rotations_leak_before_the_split_only(omniglot):
    augment, source = omniglot

    def as_drawn(x):  # the same bytes for all rotations of a drawing
        return {min(np.rot90(image, r).tobytes() for r in range(4)) for image in x}

    # A few drawings of one character may be alike by chance; before_split has most test images also in train.
    some = source.y_test < 50
    test, train = as_drawn(source.x_test[some]), as_drawn(source.x_train[source.y_train < 50])
    leaked = len(test & train) / len(test)
    assert leaked > 0.9 if augment == "before_split" else leaked < 0.05


def test_rotations_turn_images_by_quarters():
    x = np.arange(2 * 9).reshape(2, 3, 3, 1).astype(np.uint8)
    images = _rotated(x, _rotations(np.array([[0], [1]])).ravel())
    for d in range(2):
        for r in range(4):
            assert np.array_equal(images[4 * d + r], np.rot90(x[d], r))


def test_absent_data_set_says_where_it_looked_and_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="'cifar100' is not in .*allow_download=True") as error:
        load_source("cifar100", data_dir=tmp_path)
    assert str(tmp_path) in str(error.value)


def test_unknown_names_suggest_near_ones(tmp_path):
    with pytest.raises(ValueError, match="unknown data set 'fashion_mnits'; did you mean .*fashion_mnist") as error:
        load_source("fashion_mnits", data_dir=tmp_path)
    near = str(error.value).partition("did you mean ")[2].rstrip("?").split(", ")
    assert len(near) == len(set(near)) > 1
    with pytest.raises(ValueError, match="not the name"):
        load_source("../secret", data_dir=tmp_path)


def test_list_tells_what_is_present(tmp_path):
    rows = {row["name"]: row for row in list_datasets(tmp_path)}
    assert rows["digits"]["present"] and not rows["mnist"]["present"]
    assert rows["emnist/byclass"]["classes"] == 62 and rows["omniglot"]["shape"] == (28, 28, 1)
    (tmp_path / "mnist" / "3.0.1").mkdir(parents=True)
    (tmp_path / "mnist" / "3.0.1" / "dataset_info.json").write_text("{}")
    assert {row["name"]: row["present"] for row in list_datasets(tmp_path)}["mnist"]


def test_arrays_without_a_test_set_give_a_quarter_of_each_class():
    x, y = blobs(400, num_classes=4)
    source = Source.from_arrays(x, y)
    assert set(np.bincount(source.y_test)) == {25} and set(np.bincount(source.y_train)) == {75}
    rows = {row.tobytes() for row in x}
    assert {row.tobytes() for row in np.concatenate([source.x_train, source.x_test])} == rows


GOOD_X, GOOD_Y = np.zeros((4, 2)), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    "x,y,args,message",
    [
        (np.array([[0.0, 1], [np.nan, 0], [0, 0], [0, np.inf]]), GOOD_Y, {}, "finite: 2 are not, first number 1"),
        (GOOD_X, GOOD_Y - 1, {}, "class ids >= 0, found -1"),
        (GOOD_X, GOOD_Y + 0.5, {}, "must be integers, found float64"),
        (GOOD_X, GOOD_Y[:3], {}, "differ in number: 4 and 3"),
        (GOOD_X[:0], GOOD_Y[:0], {}, "no training examples"),
        (GOOD_X, np.eye(4, dtype=int), {}, "vector of class ids"),
        (np.array(["a", "b", "c", "d"]), GOOD_Y, {}, "array of numbers"),
        (GOOD_X, GOOD_Y, {"class_names": ["a"]}, "labels go up to 1, but there are only 1"),
        (GOOD_X, GOOD_Y, {"x_test": GOOD_X}, "come together"),
        (GOOD_X, GOOD_Y, {"x_test": np.zeros((4, 3)), "y_test": GOOD_Y}, "must be alike"),
        (GOOD_X, GOOD_Y, {"key": [1, 2]}, "one entry per training example"),
        (GOOD_X, GOOD_Y, {"scale": float("inf")}, "must be finite"),
    ],
)
def test_bad_arrays_are_refused(x, y, args, message):
    with pytest.raises(ValueError, match=message):
        Source.from_arrays(x, y, **args)


class FakeClientData:
    """The two methods of a TFF ClientData that are read."""

    def __init__(self, data):
        self.data, self.client_ids = data, list(data)

    def create_tf_dataset_for_client(self, client):
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(self.data[client])


def test_client_data_of_pairs_and_of_dicts():
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    pairs = client_arrays(FakeClientData({"a": (x, y), "b": (x + 1, y)}), FakeClientData({"b": (x, y), "a": (x, y)}))
    assert list(pairs) == ["a", "b"] and np.array_equal(pairs["b"]["train"][0], x + 1)
    assert np.array_equal(pairs["a"]["test"][1], y)
    dicts = client_arrays(FakeClientData({"a": {"label": y, "pixels": x}}))
    assert np.array_equal(dicts["a"]["train"][0], x) and np.array_equal(dicts["a"]["train"][1], y)
    with pytest.raises(ValueError, match="client 'a' has features .* a label and one other"):
        client_arrays(FakeClientData({"a": {"label": y, "pixels": x, "author": y}}))
    with pytest.raises(ValueError, match="client 'a' has no training examples"):
        client_arrays(FakeClientData({"a": (x[:0], y[:0])}))
    with pytest.raises(ValueError, match="1 clients have no test data, the first is 'b'"):
        client_arrays(FakeClientData({"a": (x, y), "b": (x, y)}), FakeClientData({"a": (x, y)}))


@pytest.mark.parametrize("found", ["one ndarray", "3 parts"])
def test_client_data_of_other_elements_than_pairs_are_refused(found):
    """The first two numbers of a vector are no example and its label, and nothing drops the weight after them."""
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    elements = {"one ndarray": x, "3 parts": (x, y, y)}[found]
    with pytest.raises(InvalidArgument, match=rf"client 'a': .* must be a pair \(x, y\), .* found {found}\. Map"):
        client_arrays(FakeClientData({"a": elements}))


def test_blobs_are_separable_and_seeded():
    x, y = blobs(1_000, num_classes=5, shape=(3, 2), spread=1e-3, seed=4)
    means = np.stack([x[y == c].mean(0) for c in range(5)])
    nearest = ((x[:, None] - means) ** 2).sum((2, 3)).argmin(1)
    assert np.array_equal(nearest, y) and set(np.bincount(y)) == {200}
    assert np.array_equal(blobs(1_000, 5, (3, 2), 1e-3, 4)[0], x) and not np.array_equal(blobs(1_000, seed=5)[1], y)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("digits", {"augment": "none"}, "augment='none' is only for omniglot, found digits: leave it out"),
        ("digits", {"antialias": True}, "antialias=True is only for omniglot and omniglot_drawers, found digits"),
        ("digits", {"step": 5}, "step=5 is only for watch and shakespeare, found digits"),
        ("digits", {"features": "wave"}, "features='wave' is only for fsdd, found digits"),
        ("omniglot", {"label": "character"}, "label='character' is only for omniglot_drawers, found omniglot"),
        ("vowels", {"step": 5}, "step=5 is only for watch and shakespeare, found vowels"),
        ("synthetic", {"pixels": "signed"}, "pixels='signed' is for images, and synthetic has none"),
    ],
)
def test_an_option_of_another_data_set_is_refused(name, option, message):
    with pytest.raises(InvalidArgument, match=message):
        load_source(name, **option)
    with pytest.raises(InvalidArgument, match=message):
        load_source(name, only_classes="first_half", **option)
