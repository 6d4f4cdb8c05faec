"""Labels as users have them: names, numbers from 1 on, numbers with gaps; and test classes that training lacks."""

import re
import warnings

import numpy as np
import pytest

from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.data import Federation, Source

X = np.arange(24, dtype=np.float32).reshape(12, 2)
NAMES = np.array(["mild", "none", "severe", "none"] * 3)


def two(y, **more):
    return {"ann": (X, y), "bob": (X + 100, y)} | more


def test_the_sorted_names_of_the_labels_are_the_names_of_the_classes(tmp_path):
    federation = Federation.from_clients(two(NAMES), out=tmp_path / "f", validation=0)
    assert federation.class_names == ["mild", "none", "severe"]
    x, y = federation.arrays(0, "train", "global")
    wanted = {tuple(row): name for row, name in zip(X.tolist(), NAMES, strict=True)}
    assert len(y) == 9 and [federation.class_names[k] for k in y] == [wanted[tuple(row)] for row in x.tolist()]


@pytest.mark.parametrize("y", [NAMES.tolist(), NAMES.astype(object), NAMES.astype("S")], ids=["list", "objects", "S"])
def test_names_in_every_form_make_one_federation(tmp_path, y):
    forms = [Federation.from_clients(two(v), out=tmp_path / f"{i}") for i, v in enumerate([NAMES, y])]
    assert forms[0].hash == forms[1].hash


def test_names_get_their_numbers_from_class_names_if_these_are_given(tmp_path):
    order = ["none", "mild", "severe", "deadly"]
    federation = Federation.from_clients(two(NAMES), class_names=order, out=tmp_path / "f")
    assert federation.class_names == order and federation.classes(0).tolist() == [0, 1, 2]
    with pytest.raises(InvalidArgument, match="unknown class of a label 'severe'; there are none, mild"):
        Federation.from_clients(two(NAMES), class_names=order[:2], out=tmp_path / "g")


def test_a_source_with_names_and_a_test_set_that_has_fewer(tmp_path):
    source = Source.from_arrays(X, NAMES, X[:2], np.array(["severe", "none"]))
    assert source.class_names == ["mild", "none", "severe"] and source.y_test.tolist() == [2, 1]
    flags = Source.from_arrays(X, np.arange(12) % 2 == 1)
    assert flags.class_names == ["False", "True"] and np.bincount(flags.y_train).tolist() == [5, 5]


def test_two_classes_of_one_name_are_refused(tmp_path):
    for labels in (NAMES, np.arange(12) % 3):
        with pytest.raises(InvalidArgument, match="class_names has one name twice"):
            Federation.from_clients(two(labels), class_names=["none", "mild", "severe", "mild"], out=tmp_path / "f")


@pytest.mark.parametrize(
    "clients, message",
    [
        ({"a": (X, NAMES), "b": (X, np.arange(12))}, "labels must be all integers or all names of classes, found both"),
        ({"a": (X, ["no", None] * 6)}, "must be integers, or all names .text., found NoneType None as number 1"),
        ({"a": (X, ["no", float("nan")] * 6)}, "found float nan as number 1"),
        ({"a": (X, np.arange(12) / 2)}, "client 'a': train labels must be integers, found float64; or names of cl"),
    ],
)
def test_labels_that_are_neither(tmp_path, clients, message):
    for client in clients.values():  # a list of a text and None is an array of objects, of a text and NaN one of texts
        assert len(client[1]) == 12
    with pytest.raises(InvalidArgument, match=message):
        Federation.from_clients({k: (x, np.array(y, object) if isinstance(y, list) else y)
                                 for k, (x, y) in clients.items()}, out=tmp_path / "f")  # fmt: skip
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    "y", [np.eye(3, dtype=int)[np.arange(12) % 3], np.arange(12)[:, None] % 3], ids=["rows", "column"]
)
def test_labels_in_rows_are_told_what_to_give(tmp_path, y):
    said = r"client 'ann': train labels must be .* one-hot rows give labels.argmax\(1\), .* column .* targets='real'"
    with pytest.raises(InvalidArgument, match=said):
        Federation.from_clients(two(y), out=tmp_path / "f")


def test_labels_from_1_on_are_said_and_can_be_numbered_anew(tmp_path):
    y = np.arange(12) % 3 + 1
    with pytest.warns(TfpflWarning, match=r"labels go up to 3, but no example has the label 0: 1 of 4 classes are emp"):
        said = Federation.from_clients(two(y), out=tmp_path / "said")
    assert said.num_labels == 4 and said.classes(0).tolist() == [1, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compact = Federation.from_clients(two(y), compact_labels=True, out=tmp_path / "compact")
        named = Federation.from_clients(two(y), class_names=["rest", "a", "b", "c"], out=tmp_path / "named")
    assert compact.class_names == ["1", "2", "3"] and named.num_labels == 4
    assert np.array_equal(compact.arrays(1, "train", "global")[1] + 1, said.arrays(1, "train", "global")[1])


def test_gaps_are_said_and_can_be_closed():
    y = np.tile([10, 40, 70], 4)
    with pytest.warns(
        TfpflWarning, match=r"no example has the label 0, 1, 2, 3, 4, \.\.\.: 68 of 71 classes are empty"
    ):
        Source.from_arrays(X, y)
    source = Source.from_arrays(X, y, compact_labels=True)
    assert source.class_names == ["10", "40", "70"] and set(source.y_train) == {0, 1, 2}
    assert Source.from_arrays(X, y, compact_labels=True, class_names=list("abc")).class_names == ["a", "b", "c"]
    with pytest.raises(InvalidArgument, match="numbers the 3 classes that occur, and class_names has 2 names"):
        Source.from_arrays(X, y, compact_labels=True, class_names=["a", "b"])


@pytest.mark.parametrize("names", [{0: "well", 1: "ill"}, {"well", "ill"}, {"well": 0, "ill": 1}.keys(), "ab", 2])
def test_names_of_classes_have_an_order(tmp_path, names):
    """Of a dict, the names would have been its keys, 0 and 1; a set has another order in each process."""
    for given in ({}, {"targets": "binary"}):
        y = np.arange(12) % 2 if not given else np.eye(2)[np.arange(12) % 2]
        with pytest.raises(
            InvalidArgument, match="class_names must be a list with one name for each class, in the ord"
        ):
            Federation.from_clients(two(y), class_names=names, out=tmp_path / "f", **given)


def test_names_of_classes_that_are_bytes_are_text_as_labels_are():
    """They had been called "b'ill'", and labels of bytes had not been among them."""
    y = np.array([b"well", "krank ä".encode()])[np.arange(12) % 2]
    source = Source.from_arrays(X, y, class_names=np.unique(y))
    assert source.class_names == ["krank ä", "well"] and source.y_train[:2].tolist() == [1, 0]
    assert Source.from_arrays(X, np.arange(12) % 2, class_names=[b"well", "ill"]).class_names == ["well", "ill"]


@pytest.mark.parametrize("missing", [None, float("nan"), np.float32("nan")])
@pytest.mark.parametrize("targets", [None, "binary"])
def test_a_name_of_a_class_that_is_missing_is_no_name(tmp_path, missing, targets):
    """The class had been called 'None' or 'nan'."""
    y = np.arange(12) % 2 if targets is None else np.eye(2)[np.arange(12) % 2]
    with pytest.raises(
        InvalidArgument, match=f"class_names has {missing} as number 1, which is no name: give every one"
    ):
        Federation.from_clients(two(y), class_names=["well", missing], targets=targets, out=tmp_path / "f")


def test_names_that_differ_only_in_spaces_are_said(tmp_path):
    """A class or a client of a typing error would be one of its own."""
    y = np.array(["cat", "dog", "cat "] * 4)
    with pytest.warns(TfpflWarning, match="the classes 'cat' and 'cat ' differ only in spaces"):
        Source.from_arrays(X, y)
    with pytest.warns(TfpflWarning, match="the clients 'ann' and ' ann' differ only in spaces"):
        Federation.from_clients({name: (X, np.arange(12) % 2) for name in ("ann", " ann")}, out=tmp_path / "f")


def test_names_that_differ_only_in_capitals_are_said(tmp_path):
    """But for single letters: handwriting has classes 'a' and 'A'."""
    with pytest.warns(
        TfpflWarning, match="the classes 'Yes' and 'yes' differ only in capitals: they are taken for two"
    ):
        Source.from_arrays(X, np.array(["yes", "no", "Yes"] * 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Source.from_arrays(X, np.array(["a", "A", "b"] * 4))
        Source.from_arrays(X, np.array(["Weiss", "Weiß", "b"] * 4))  # two names


def test_a_test_class_that_the_client_lacks_in_training_is_said(tmp_path):
    ann = {"train": (X, np.zeros(12, int)), "test": (X[:5], np.array([0, 1, 1, 2, 0]))}
    bob = {"train": (X, np.arange(12) % 2), "test": (X[:2], np.array([0, 1]))}
    with pytest.warns(TfpflWarning) as said:
        Federation.from_clients({"ann": ann, "bob": bob}, class_names=["x", "y", "z"], out=tmp_path / "f", validation=0)
    (message,) = [str(w.message) for w in said]
    assert message.startswith("3 of 7 test examples are of a class that their client lacks in training (client ann: cl")
    assert "client ann: class y, 2 examples; client ann: class z, 1 example." in message and "bob" not in message
    assert "No client at all has training examples of class z)" in message


def test_nothing_is_said_of_data_that_are_as_they_should_be(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Federation.from_clients(two(np.arange(12) % 2), out=tmp_path / "f", test_fraction=0.1)
        Federation.build("digits", clients=20, K=2, out=tmp_path / "digits")


NAN = float("nan")


@pytest.mark.parametrize(
    "y, found",
    [
        (["yes", "no", NAN] * 4, "float nan as number 2"),
        (["yes", 1, 2] * 4, "int 1 as number 1"),
        ([b"yes", 1, 2] * 4, "bytes b'yes' as number 0"),
        (["yes", True] * 6, "bool True as number 1"),
    ],
)
def test_what_is_no_text_in_a_list_of_texts_is_no_class(tmp_path, y, found):
    """NumPy makes the texts 'nan', '1' and 'True' of them."""
    with pytest.raises(InvalidArgument, match=f"client 'ann': train labels must be integers, or .* found {found}"):
        Federation.from_clients(two(y), out=tmp_path / "f")


def test_integers_that_are_objects_are_integers(tmp_path):
    """As those of pandas' Int64, which can have a value that is missing."""
    y = np.array([np.int64(0), 2, 1, 2] * 5, object)
    federation = Federation.from_clients([(np.zeros((20, 3)), y)], validation=0, test_fraction=0, out=tmp_path / "f")
    assert federation.raw(0, "train", "global")[1].tolist() == y.tolist()
    names = np.array(["", "a"] * 10, object)
    assert Federation.from_clients([(np.zeros((20, 3)), names)], out=tmp_path / "e").class_names == ["", "a"]
    for bad, told in ((None, "or all names (text), found NoneType None as number 1"), (2**70, f"found 0..{2**70}")):
        with pytest.raises(InvalidArgument, match=re.escape(told)):
            Federation.from_clients([(np.zeros((20, 3)), np.array([0, bad] * 10, object))], out=tmp_path / "g")


def test_bytes_that_are_no_utf8_are_refused_and_not_merged(tmp_path):
    names = [name.encode("latin-1") for name in ("none", "café", "cafè")] * 4
    for given in (names, np.array(names), np.array(names, object)):
        with pytest.raises(
            InvalidArgument, match=r"client 'ann': train labels: number 1 is b'caf.xe9', which is no te"
        ):
            Federation.from_clients(two(given), out=tmp_path / "f")
    utf8 = [name.encode() for name in ("none", "café", "cafè")] * 4
    assert Federation.from_clients(two(utf8), out=tmp_path / "f").class_names == ["cafè", "café", "none"]


@pytest.mark.parametrize("given", [list, lambda y: np.array(y, object), lambda y: [name.encode() for name in y]])
def test_names_that_differ_in_a_nul_are_refused_and_not_merged(tmp_path, given):
    assert np.array(["a", "a\0"])[0] == np.array(["a", "a\0"])[1]  # what NumPy makes of them
    with pytest.raises(InvalidArgument, match=r"train labels: the text b?'a.x00' has the character NUL .* remove it"):
        Federation.from_clients(two(given(["a", "a\0"] * 6)), out=tmp_path / "f")
