"""Models given as (SplitModel, theta, head): what is wrong with them is said before anything is converted."""

import json
import os

import numpy as np
import pytest
from tensorflow import keras

from helpers.marks import slow_but
from tflite_export import ExportError, export, write_site
from tflite_export.convert.personal import personal_model
from tflite_export.device.runtime import write_manifest
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.models import SplitModel
from tfpfl.models.weights import Head

MODEL = SplitModel(keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, "relu")]))
X, Y = np.random.default_rng(0).random((20, 8), np.float32), np.arange(20) % 3
SOURCE = MODEL, MODEL.initial_theta, Head(np.full((6, 3), 0.1), np.zeros(3))  # of float64, as NumPy makes them


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"training": {"tau": 0}}, "training.tau must be an integer from 1 to 2147483647, found 0"),
        ({"training": {"beta": -1}}, "training.beta must be a number from 0"),
        ({"training": {"beta": np.float32("nan")}}, "training.beta must be a number from 0"),
        ({"training": {"head_rate": None}}, "training has head_rate None, and a round ends with a step on the head"),
        ({"preprocessing": {"scale": 1 / 255, "shift": 0.0}}, "preprocessing has scale, but not stored_dtype"),
        ({"preprocessing": {"mean": np.zeros(3)}}, "preprocessing cannot be written to the manifest"),
        ({"labels": ["a", "b", "a"]}, "two labels are 'a'"),
        ({"labels": "abc"}, "labels must be a list with one name for each class, .*; found a str"),
        ({"labels": {0: "a", 1: "b", 2: "c"}}, "labels must be a list with one name for each class, .*; found a dict"),
        ({"labels": {"a", "b", "c"}}, "labels must be a list with one name for each class, .*; found a set"),
        ({"labels": ["a", None, "c"]}, "labels has None as number 1, which is no name"),
        ({"training": [("tau", 5)]}, "training must be a dict; found list"),
        ({"preprocessing": "uint8"}, "preprocessing must be a dict; found 'uint8'"),
        ({"train": X}, r"train must be a pair \(x, y\), where y may be None; found a ndarray"),
        ({"train": (list(X[:2]) + [X[0, :5]], Y[:3])}, "train examples cannot be made an array: they have different"),
        *(({"browser": True, "room": n}, "room must be a whole number of classes") for n in (0, 2**17, 20.5, "20")),
        ({"client": 99}, "client=99 says which client of a run is meant"),
        ({"labels": ["a", "", "b"]}, "class 1 has an empty name, and a device knows classes by their names"),
        ({"train": (X[:, :5], Y)}, r"train: the examples must be numbers \['N', 8\], found float32 \[20, 5\]"),
        ({"test": (np.where(X > 0.9, np.nan, X), Y)}, "test: an example holds NaN"),
        ({"test": (X, Y[:3])}, "test: there are 20 examples and 3 labels"),
        ({"test": (X, Y[:, np.newaxis])}, r"test: the labels must be integers \[20\], found int64 \[20, 1\]"),
        ({"test": (X, np.array(["a"] * 20))}, r"test: the labels must be integers \[20\], found <U1"),
        ({"train": (X, Y + 1)}, r"train: label 3 is none of this head's, which are 0\.\.2"),
        ({"train": (X, Y - 0.5)}, r"train: label -0\.5 is none of this head's"),
    ],
)
def test_what_cannot_be_exported_is_refused_at_once(given, message, tmp_path):
    with pytest.raises(InvalidArgument, match=message):
        export(SOURCE, out=tmp_path / "b", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_site_is_made_of_a_path(tmp_path):
    with pytest.raises(InvalidArgument, match="source must be the path of a folder, of a run or of a bundle; fo"):
        write_site(SOURCE, tmp_path / "site")
    assert list(tmp_path.iterdir()) == []


def test_another_source_is_refused(tmp_path):
    for source, found in ((SOURCE[:2], "SplitModel, tuple"), ((MODEL.backbone, *SOURCE[1:]), ".*, tuple, Head")):
        with pytest.raises(ExportError, match=rf"must be \(SplitModel, theta, head\), .* found \({found}\)"):
            export(source, out=tmp_path / "b")


@pytest.mark.parametrize("head", [None, keras.layers.Dense(3), (np.zeros((6, 3)),), np.zeros(3), "head"])
def test_a_head_that_is_no_pair_of_arrays_is_refused(head):
    with pytest.raises(
        ExportError, match=r"the head a pair of arrays, kernel \[6, K\] and bias \[K\]|a head on 6 feat"
    ):
        personal_model((*SOURCE[:2], head), None)
    with pytest.raises(ExportError, match=r"a head on 6 features .* found \[6, 0\] and \[0\]"):
        personal_model((*SOURCE[:2], Head(np.zeros((6, 0)), np.zeros(0))), None)


@pytest.mark.parametrize(("wrong", "found"), [(9, "9"), (-1, "-1"), (0.5, "0.5")])
def test_tokens_that_the_model_does_not_know_are_refused(wrong, found):
    """TensorFlow's error came of test examples; of training examples, the file of full int8 was left out."""
    one, other = keras.Input((4,)), keras.Input((2,))
    words = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(one))
    alone = SplitModel(keras.Model(one, keras.layers.Dense(6)(words)))
    beside = SplitModel(keras.Model([one, other], keras.layers.Dense(6)(keras.layers.Concatenate()([words, other]))))
    for model in (alone, beside):
        tokens = np.full((3, 4), 8.0, np.float32)
        for given in (tokens, np.where(np.arange(4) == 2, np.float32(wrong), tokens)):
            x = given if model is alone else (given, np.zeros((3, 2), np.float32))
            source = model, model.initial_theta, SOURCE[2]
            if given is tokens:
                assert len(personal_model(source, None, train=(x, Y[:3])).train[0]) == 3
            else:
                why = rf"train: .*(knows 0\.\.8, found {found}|holds {found}, and .* 0\.\.8|no whole number)"
                with pytest.raises(ExportError, match=why):
                    personal_model(source, None, train=(x, Y[:3]))


def test_names_that_are_bytes_are_text():
    assert personal_model(SOURCE, None, labels=[b"a", "b", "c\n"]).labels == ["a", "b", "c\\n"]


def test_a_model_that_draws_has_no_rounds_and_says_so():
    model = SplitModel(keras.Sequential([keras.Input((8,)), keras.layers.Dense(6), keras.layers.Dropout(0.5)]))
    source = (model, model.initial_theta, SOURCE[2])
    with pytest.warns(TfpflWarning, match="exported without rounds on a device: its network has layers that draw"):
        assert personal_model(source, None).rounds is False
    assert personal_model(source, None, rounds=False, training={"head_rate": None}).rounds is False
    with pytest.raises(ExportError, match="cannot take part in rounds on a device: its network has layers that draw"):
        personal_model(source, None, rounds=True)


def test_numbers_of_numpy_and_lists_are_taken():
    training = {"tau": np.int64(5), "beta": np.float32(0.5), "safeguard": np.bool_(False)}
    preprocessing = {"scale": np.float32(0.5), "shift": 0, "stored_dtype": "uint8"}
    source = MODEL, [w.astype(np.float64) for w in MODEL.initial_theta], SOURCE[2]
    personal = personal_model(
        source, None, training=training, preprocessing=preprocessing, test=(X.tolist(), Y.tolist()), dataset="a\udce9"
    )
    assert json.loads(json.dumps(personal.training)).items() >= {"tau": 5, "beta": 0.5, "safeguard": False}.items()
    assert json.loads(json.dumps(personal.preprocessing)) == {"scale": 0.5, "shift": 0, "stored_dtype": "uint8"}
    assert personal.test[0].dtype == np.float32 and np.array_equal(personal.test[0], X)
    assert {w.dtype for w in (*personal.weights.theta, *personal.weights.head)} == {np.dtype(np.float32)}
    assert personal.about["dataset"].encode()


@pytest.mark.slow
def test_examples_without_labels_are_still_the_clients(tmp_path):
    quality = export(SOURCE, out=tmp_path / "b", test=(X, None)).manifest["quality"]["backbone.tflite"]
    assert (quality["examples"], quality["on"], quality["accuracy"]) == (20, "the client's test examples", None)


@pytest.mark.parametrize("n", slow_but([0, 1], 1))
def test_a_client_with_fewer_than_two_test_examples_is_measured_on_its_training_examples(n, tmp_path):
    """Minus its mean one example is 0, and the files of int8, calibrated on numbers like these, seemed to be wrong."""
    x = 1000 * X
    bundle = export(SOURCE, out=tmp_path / "b", train=(x, Y), test=(x[:n], Y[:n]))
    for quality in bundle.manifest["quality"].values():
        assert (quality["examples"], quality["on"]) == (20, "the client's training examples")
        assert quality["centred_cosine"] > 0.99 and quality["accuracy"] is None


def test_a_link_that_leads_nowhere_is_no_free_folder(tmp_path):
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ExportError, match="exists already"):
        export(SOURCE, out=tmp_path / "b")


def test_a_manifest_that_cannot_be_written_anew_stays_and_leaves_nothing(tmp_path, monkeypatch):
    write_manifest(tmp_path, {"round": 1})
    before = (tmp_path / "manifest.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_manifest(tmp_path, {"round": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    assert (tmp_path / "manifest.json").read_bytes() == before
