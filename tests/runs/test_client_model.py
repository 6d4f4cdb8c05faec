"""A client's model as Keras has it: it predicts what the run's evaluation scores, and needs nothing of tfpfl."""

import csv
import json
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from helpers import small_runs as runs
from helpers.quick import quick
from tflite_export import export
from tfpfl.algorithms import ALGORITHMS
from tfpfl.algorithms.contract import ClientData
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.cli import main
from tfpfl.data import Federation, find_client
from tfpfl.models.losses import cross_entropy
from tfpfl.runs import ClientModels, Run, RunConfig, client_model
from tfpfl.runs.inputs import check_tokens, label_outputs, read_examples
from tfpfl.studies.new_clients import adapt_new_clients

NAMES = ["ann", "bob", "2", "1", "hospital 4", "eve"]


@pytest.fixture(scope="module")
def pixels(tmp_path_factory):
    """Six named clients whose examples are stored as bytes and decoded to [-1, 1]; clients of 2 to 4 of the classes."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("pixels")
    clients = {}
    for name, n, k in zip(NAMES, runs.EXAMPLES, runs.CLASSES, strict=True):
        y = np.arange(n + 3 * k) % k
        x = np.clip(40 * y[:, None, None] + rng.integers(0, 60, (len(y), 4, 3)), 0, 255).astype(np.uint8)
        clients[name] = {"train": (x[:n], y[:n]), "test": (x[n:], y[n:])}
    classes = ["none", "mild", "severe", "other"]
    return Federation.from_clients(clients, out=folder / "data", scale=2 / 255, shift=-1.0, class_names=classes)


@pytest.fixture(scope="module")
def a_network(tmp_path_factory):
    """A network file of the user's own, with a residual connection and a layer that is not trained."""
    inputs = keras.Input((4, 3))
    flat = keras.layers.Flatten()(inputs)
    x = keras.layers.Dense(12, activation="tanh", trainable=False)(flat)
    x = keras.layers.Add()([x, flat])
    path = tmp_path_factory.mktemp("network") / "mine.keras"
    keras.Model(inputs, keras.layers.Dense(5, activation="relu")(keras.layers.LayerNormalization()(x))).save(path)
    return path


@pytest.fixture(scope="module")
def a_run_of_pixels(pixels, a_network, tmp_path_factory):
    """A run of PFLEGO with the user's own network that has kept two clients out; two rounds of half of the others."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tfpfl.runs.protocols.LAST_ROUNDS", 1)
        return runs.train(folder, pixels, rounds=2, network=str(a_network), new_clients=2).folder


@pytest.mark.slow
def test_it_predicts_what_the_evaluation_scored(a_run_of_pixels, pixels):
    """Raw examples into the one, decoded ones into the other; every client of the population."""
    with Run.open(a_run_of_pixels) as run:
        scores = {e.client_id: e for e in run.evaluate() if (e.model, e.split) == ("personal", "test")}
        assert len(scores) == 4 and not np.isin(list(scores), run.store.client_ids()).all()  # some never took part
        models = ClientModels(run)
        for i, score in scores.items():
            raw, y = pixels.raw(i, "test", run.population.labels)
            decoded, _ = pixels.arrays(i, "test")
            probabilities = models.keras_model(i).model(raw.astype(np.float32)).numpy()
            logits = models.keras_model(i, inputs="decoded", outputs="logits").model(decoded).numpy()
            assert (probabilities.argmax(1) == y).mean() == (logits.argmax(1) == y).mean() == score.accuracy
            assert float(cross_entropy(logits, y)) == pytest.approx(score.loss, abs=1e-6)
            np.testing.assert_allclose(probabilities, tf.nn.softmax(logits), atol=1e-6)


def by_the_contract(run, client):
    """The logits of a client's test examples, by the algorithm's own functions, step by step and without a graph."""
    loop, algorithm = run.training(), run.algorithm
    server = tf.nest.map_structure(tf.convert_to_tensor, loop.server_state())
    (visit,) = loop.visits(run.store.round_num, [client])
    message = algorithm.message(server, client) if algorithm.message_per_client else algorithm.message(server)
    labels = run.population.labels
    x, y = map(tf.constant, run.federation.arrays(client, "train", labels))
    state = tf.nest.map_structure(tf.convert_to_tensor, loop.client_states([client])[0])
    weights = algorithm.personal_model(message, state, ClientData(x, y, visit.info, visit.key))
    return run.model.logits(weights, run.federation.arrays(client, "test", labels)[0])


@pytest.fixture(scope="module")
def a_normed_network(tmp_path_factory):
    """A network file with BatchNormalization."""
    stack = [keras.layers.Flatten(), keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    path = tmp_path_factory.mktemp("network") / "normed.keras"
    keras.Sequential([keras.Input((4, 3)), *stack]).save(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_gives_the_model_that_its_clients_predict_with(
    name, pixels, a_normed_network, tmp_path, monkeypatch
):
    """Also to a client that no round has drawn, and to one outside of the population."""
    monkeypatch.setattr("tfpfl.runs.protocols.LAST_ROUNDS", 1)
    network = str(a_normed_network) if ALGORITHMS[name].batch_norm else None
    run = runs.train(
        tmp_path / "run", pixels, algorithm=name, rounds=2, new_clients=1, participation=0.4,
        hyperparameters=quick(name), labels="global", network=network,
        adapters="lora:2" if ALGORITHMS[name].personal else None,
    )  # fmt: skip
    with Run.open(run.folder) as run:
        models, ids = ClientModels(run), [int(i) for i in run.population.client_ids]
        if run.algorithm.predictor is not None:
            for refused in (lambda: models.keras_model(0), lambda: models.save_all(tmp_path / "models")):
                with pytest.raises(InvalidArgument, match="predicts with more than the weights.*no place for the rest"):
                    refused()
            assert not (tmp_path / "models").exists()
            return
        for i in ids:
            made = models.keras_model(i, inputs="decoded", outputs="logits")
            found = made.model(pixels.arrays(i, "test")[0])
            np.testing.assert_allclose(found, by_the_contract(run, i), atol=1e-6, rtol=1e-6)
            assert made.about["classes"][:4] == pixels.class_names and not made.about["new_client"]
        (new,) = set(range(6)) - set(ids)
        if run.algorithm.adapt is None:
            with pytest.raises(InvalidArgument, match="becomes personal by taking part"):
                models.keras_model(new)
            return
        y = pixels.raw(new, "test", "global")[1]
        logits = models.keras_model(new, inputs="decoded", outputs="logits").model(pixels.arrays(new, "test")[0])
        assert np.isfinite(logits).all()
        if ALGORITHMS[name].evaluates != "fine-tuned":
            before = adapt_new_clients(run, epochs=0)
            assert (logits.numpy().argmax(1) == y).mean() == before.accuracy[0, 0]
            assert float(cross_entropy(logits, y)) == pytest.approx(before.loss[0, 0], abs=1e-6)


@pytest.mark.slow
def test_the_file_names_nothing_but_keras(a_run_of_pixels, tmp_path):
    """So that Keras alone can load it; and it goes on to predict the same."""
    with Run.open(a_run_of_pixels) as run:
        client = int(run.population.client_ids[0])
        made = run.client_model(client)
        before = run.model.backbone.get_weights()
        card = made.save(tmp_path / "one.keras")
        for mine, its in zip(before, run.model.backbone.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, its)  # the run's own backbone was not changed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "one.keras"] and card.name == "one.json"
    about = json.loads(card.read_text())
    assert about["client"] == client and about["client_name"] == NAMES[client]
    assert about["input"] == {"shape": [4, 3], "examples": "raw", "stored_dtype": "uint8", "scale": 2 / 255,
                              "shift": -1.0}  # fmt: skip
    with zipfile.ZipFile(tmp_path / "one.keras") as archive:
        config = archive.read("config.json").decode()
    assert "tfpfl" not in config and '"registered_name": null' in config
    raw = np.random.default_rng(0).integers(0, 255, (5, 4, 3)).astype(np.float32)
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "one.keras")(raw), made.model(raw))
    with pytest.raises(InvalidArgument, match="exists already"):
        made.save(tmp_path / "one.keras")


@pytest.mark.slow
def test_a_model_whose_writing_was_interrupted_leaves_nothing_and_can_be_written_again(
    a_run_of_pixels, tmp_path, monkeypatch
):
    with Run.open(a_run_of_pixels) as run:
        made = run.client_model(int(run.population.client_ids[0]))
    for name in ("write_whole", "write_keras"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(client_model, name, Mock(side_effect=KeyboardInterrupt))
            made.save(tmp_path / "one.keras")
        assert not list(tmp_path.iterdir())
    made.save(tmp_path / "one.keras")


@pytest.mark.slow
def test_it_is_said_since_when_a_client_has_taken_part(a_run_of_pixels, tmp_path):
    with Run.open(a_run_of_pixels) as run:
        first, ids = run.took_part, [int(i) for i in run.population.client_ids]
        never, new = next(i for i in ids if i not in first), next(i for i in range(6) if i not in ids)
        seen = max(first, key=first.get)
        about = {i: ClientModels(run).keras_model(i).about for i in (seen, never, new)}
    told = {i: (a["new_client"], a["took_part"], a["first_round"]) for i, a in about.items()}
    assert told == {seen: (False, True, first[seen]), never: (False, False, None), new: (True, False, None)}
    np.save(tmp_path / "x.npy", np.zeros((1, 4, 3)))
    for i, said in {seen: None, never: "this client never took part", new: "the run does not train this"}.items():
        output = command("predict", a_run_of_pixels, "--client", f"number:{i}", "--input", tmp_path / "x.npy").output
        assert output.count("this client") == (said is not None) and (said or "") in output
    said = command("model", a_run_of_pixels, "--client", f"number:{seen}", "--out", tmp_path / "m.keras").output
    assert f"this client took part, first in round {first[seen]}" in said


@pytest.mark.slow
def test_another_process_loads_it_without_tfpfl(a_run_of_pixels, tmp_path):
    with Run.open(a_run_of_pixels) as run:
        made = run.client_model(int(run.population.client_ids[0]))
    made.save(tmp_path / "one.keras")
    raw = np.random.default_rng(0).integers(0, 255, (5, 4, 3)).astype(np.float32)
    np.save(tmp_path / "raw.npy", raw)
    program = """
import sys, keras, numpy as np
found = keras.models.load_model("one.keras").predict(np.load("raw.npy"), verbose=0)
assert "tfpfl" not in sys.modules
np.save("found.npy", found)
"""
    subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), made.model(raw), atol=1e-6)


def test_a_client_is_found_by_its_number_or_its_name(pixels):
    assert [find_client(pixels, client) for client in (3, "ann", "hospital 4", "5", "number:1", "name:1")] == [
        *(3, 0, 4, 5, 1, 3)
    ]
    with pytest.raises(InvalidArgument, match="number 1, named 'bob' or number 3, named '1'. Write number:1, or name:"):
        find_client(pixels, "1")
    assert find_client(pixels, "2") == 2  # name and number of the same client
    for unknown in (6, -1, "6", "hospital", "name:5", True):
        with pytest.raises(InvalidArgument, match="there is no client .* 6 clients"):
            find_client(pixels, unknown)


def command(*words):
    return CliRunner().invoke(main, list(map(str, words)))


def refused(run, said, *words):
    done = command("model", run, *words)
    return done.exit_code != 0 and said in done.output.replace("\n", " ")


@pytest.mark.slow
def test_the_command_writes_one_model(a_run_of_pixels, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("model", a_run_of_pixels, "--client", "ann", "--out", "a.keras", "--logits")
    assert done.exit_code == 0, done.output
    assert "client 0 (ann)" in done.output and "logits of 2 classes: none, mild" in done.output
    assert "this client took part, first in round 1" in done.output
    logits = keras.models.load_model("a.keras")(np.full((1, 4, 3), 100, np.float32))
    with Run.open(a_run_of_pixels) as run:
        np.testing.assert_allclose(
            logits, run.keras_model("ann", outputs="logits")(np.full((1, 4, 3), 100.0)), atol=1e-6
        )
    assert refused(a_run_of_pixels, "a.keras exists already", "--client", "ann", "--out", "a.keras")
    assert refused(a_run_of_pixels, "ends in .keras", "--client", "ann", "--out", "a.h5")
    assert refused(a_run_of_pixels, "either --client")
    assert refused(a_run_of_pixels, "either --client", "--client", "ann", "--all", "b")


@pytest.mark.slow
def test_the_command_writes_the_models_of_all(a_run_of_pixels, pixels, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("model", a_run_of_pixels, "--all", "models")
    assert done.exit_code == 0 and "6 models, 3 of them of clients that never took part" in done.output
    with Run.open(a_run_of_pixels) as run:
        for i in range(6):
            raw = pixels.raw(i, "test")[0].astype(np.float32)
            found = keras.models.load_model(f"models/client_{i}.keras")(raw)
            np.testing.assert_allclose(found, run.keras_model(i)(raw), atol=1e-6)
    assert refused(a_run_of_pixels, "models exists already", "--all", "models")
    assert refused(a_run_of_pixels, "no client 'zoe'", "--client", "zoe")
    assert refused(a_run_of_pixels, "could be more than one client", "--client", "1")


@pytest.mark.slow
def test_the_command_predicts(a_run_of_pixels, pixels, tmp_path, monkeypatch):
    """The classes with their probabilities, and the accuracy of the evaluation."""
    monkeypatch.chdir(tmp_path)
    with Run.open(a_run_of_pixels) as run:
        client = int(run.population.client_ids[-1])
        raw, y = pixels.raw(client, "test", "global")
        made = run.client_model(client)
        expected, classes = made.model.predict(raw.astype(np.float32), verbose=0), made.about["classes"]
    with open(a_run_of_pixels / "clients.csv", encoding="utf-8") as file:
        (row,) = [row for row in csv.DictReader(file) if row["client"] == str(client)]
    np.savez("xy.npz", x=raw, y=y)
    done = command("predict", a_run_of_pixels, "--client", NAMES[client], "--input", "xy.npz", "--out", "found.csv")
    assert done.exit_code == 0 and f"{float(row['test_accuracy']):.2%} of the {len(raw)} labels" in done.output
    with open("found.csv", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    np.testing.assert_allclose([[float(row[f"p({name})"]) for name in classes] for row in found], expected, atol=1e-6)
    assert [row["class"] for row in found] == [classes[k] for k in expected.argmax(1)]
    np.save("decoded.npy", pixels.arrays(client, "test")[0])
    done = command("predict", a_run_of_pixels, "--client", NAMES[client], "--input", "decoded.npy", "--decoded")
    first = done.output.splitlines()[1].split(",")
    assert first[:2] == ["0", classes[expected[0].argmax()]] and float(first[2]) == round(float(expected[0].max()), 4)


def test_examples_are_read_from_every_kind_of_file(pixels, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw, y = pixels.raw(0, "test", "global")
    np.save("x.npy", raw)
    np.save("one.npy", raw[0])
    np.savez("xy.npz", x=raw, y=y)
    np.savez("alone.npz", raw[..., None])
    flat, names = raw.reshape(len(raw), -1), [f"pixel{i}" for i in range(12)]
    np.savetxt("x.csv", flat, delimiter=",", header=",".join(names), comments="", fmt="%d")
    np.savetxt("plain.csv", flat, delimiter=";", fmt="%.1f")
    (tmp_path / "one.png").write_bytes(tf.io.encode_png(raw[0][..., None]).numpy())
    for name in ("x.npy", "xy.npz", "alone.npz", "x.csv", "plain.csv"):
        found = read_examples(name, pixels)
        np.testing.assert_array_equal(found.x, raw)
        assert (found.y is not None) == (name == "xy.npz")
    for name in ("one.npy", "one.png"):
        np.testing.assert_array_equal(read_examples(name, pixels).x, raw[:1])
    for labels in (y, np.array(pixels.class_names)[y]):
        found = label_outputs(labels, ["mild", "none"], pixels.class_names, "xy.npz")
        np.testing.assert_array_equal(found, 1 - y)


def test_integers_are_names_of_classes_or_their_numbers_and_never_both():
    """With compact_labels, or from a table, the classes 1 to 3 have the ids 0 to 2 and the names '1' to '3'."""
    of_ints, of_text = np.array([1, 2, 3]), np.array(["1", "2", "3"])
    for y in (of_ints, of_text):
        np.testing.assert_array_equal(label_outputs(y, ["1", "2", "3"], ["1", "2", "3"], "xy.npz"), [0, 1, 2])
    np.testing.assert_array_equal(label_outputs(of_ints, ["3", "1", "2"], ["1", "2", "3", "-7"], "xy.npz"), [1, 2, 0])
    with pytest.raises(InvalidArgument, match="does not know: 0. It knows 1, 2, 3"):
        label_outputs(np.array([0, 1]), ["1", "2", "3"], ["1", "2", "3"], "xy.npz")
    with pytest.raises(InvalidArgument, match="does not know: id 7. It knows cat, 7"):
        label_outputs(np.array([0, 7]), ["cat", "7"], ["cat", "7"], "xy.npz")  # 7 is a name, 0 can only be an id
    np.testing.assert_array_equal(label_outputs(np.array([0, 1]), ["01", "1"], ["01", "1"], "xy.npz"), [0, 1])


BAD = {
    "wrong.npy": (np.zeros((3, 5, 3)), "an array of 3 x 5 x 3, but an example of this run is 4 x 3"),
    "none.npy": (np.zeros((0, 4, 3)), "has no examples"),
    "nan.npy": (np.full((2, 4, 3), np.nan), "2 of 2 examples have NaN or infinity"),
    "text.npy": (np.array(["a", "b"]), "must have numbers"),
    "objects.npy": (np.array([None, {}], object), "cannot be read as .npy: Object arrays cannot be loaded"),
    "short.csv": ("1,2,3\n", "short.csv has 3 columns, but an example of this run has 12 numbers"),
    "uneven.csv": ("1,2,3,4,5,6,7,8,9,10,11,12\n1,2\n", "row 2 has 2 cells, the first line has 12"),
    "word.csv": (
        "1,2,3,4,5,6,7,8,9,10,11,12\n1,2,3,4,5,6,x,8,9,10,11,12\n",
        "word.csv: column '7' is not numeric, row 2 has 'x': write numbers with",
    ),
    "gap.csv": ("1,2,3,4,5,6,NA,8,9,10,11,12\n", "column '7' is not numeric, row 1 has 'NA'"),
    "empty.csv": ("a,b,c,d,e,f,g,h,i,j,k,l\n", "no row of numbers"),
    "broken.png": ("\x89PNG", "cannot be read as .png"),
    "large.png": (np.zeros((9, 7, 1), np.uint8), "7 x 9 pixels, but examples of this run are 3 x 4"),
    "empty.npy": ("", "empty.npy cannot be read as .npy"),
    "number.npy": (np.float64(3), "has a single number, but an example of this run is 4 x 3"),
    "data.xlsx": ("", r"files \*.npy"),
    "missing.npy": (None, "there is no file .*missing.npy$"),
    "missing.csv": (None, "there is no file .*missing.csv$"),
    "missing.png": (None, "there is no file .*missing.png$"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_examples_are_refused(name, pixels, tmp_path):
    content, said = BAD[name]
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None and name.endswith(".png"):
        path.write_bytes(tf.io.encode_png(content).numpy())
    elif content is not None:
        np.save(path, content)
    with pytest.raises(InvalidArgument, match=said):
        read_examples(path, pixels)


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """A federation that was made of a table whose columns have names."""
    rows = {"ward": ["a", "b"] * 8, "age": range(16), "mass": np.arange(16) / 4 + 50, "state": ["ill", "well"] * 8}
    rows["state"][4:8] = ["well", "ill"] * 2
    folder = tmp_path_factory.mktemp("patients")
    return Federation.from_table(rows, client="ward", label="state", validation=0, out=folder / "data")


def test_a_column_of_numbers_is_not_one_example(patients, tmp_path):
    """[2, 1] are two examples of one number, and an example of this run has two numbers."""
    path = tmp_path / "x.npy"
    for fine in (np.zeros(2), np.zeros((1, 2)), np.zeros((3, 2, 1))):
        np.save(path, fine)
        assert read_examples(path, patients).x.shape == (3 if fine.ndim == 3 else 1, 2)
    np.save(path, np.zeros((2, 1)))
    with pytest.raises(InvalidArgument, match="an array of 2 x 1, but an example of this run is 2: give an array of N"):
        read_examples(path, patients)


def test_the_columns_of_a_table_are_found_by_their_names(patients, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text, said=None, name="t.csv"):
        Path(name).write_text(text, encoding="utf-8")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = read_examples(name, patients)
        assert (len(warned) == 0) if said is None else said in str(warned[0].message), [str(w.message) for w in warned]
        assert found.y is None
        return found.x.tolist()

    wanted = [[31, 70.5], [32, 0]]
    assert read("age,mass\n31,70.5\n32,0\n") == wanted
    assert read("mass,age\n70.5,31\n0,32\n") == wanted
    assert read("\n\nmass;age\n\n70.5;31\n0;32\n\n") == wanted
    assert read("\ufeffmass;age\r\n70.5;31\r\n0;32\r\n") == wanted
    text = "ward,state,mass,age\na,ill,70.5,31\nb,,0,32\n"
    assert read(text, "t.csv: the columns 'ward' (client), 'state' (label) are no features") == wanted
    assert read("31,70.5\n32,0\n", "does not name the columns: they are taken in the order 'age', 'mass'") == wanted


@pytest.mark.slow
def test_a_model_of_a_table_says_its_columns_and_their_order(patients, tmp_path):
    """In the file beside the Keras model, in a bundle's manifest and on its card."""
    config = RunConfig(algorithm="pflego", participation=1, rounds=1, hyperparameters={"tau": 2}, network="mlp200")
    with Run.create(config, tmp_path / "run", patients) as run:
        run.train()
        about = ClientModels(run).keras_model("a").about
        bundle = export(run, "b", tmp_path / "bundle")
    assert about["input"]["columns"] == ["age", "mass"] == bundle.manifest["preprocessing"]["columns"]
    assert ": float32 2, the columns age, mass, in this order, x = raw" in (bundle.folder / "MODEL_CARD.md").read_text()


def test_a_backbone_that_is_a_whole_classifier_is_said(patients, tmp_path):
    """Its logits would be the features of a second linear layer."""
    for last, said in (((2, None), True), ((3, None), False), ((2, "relu"), False)):
        path = tmp_path / "net.keras"
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(*last)]).save(path)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            Run.create(RunConfig(algorithm="local", network=str(path)), tmp_path / str(last), patients).close()
        told = [str(w.message) for w in warned if "If it is the last layer of a classifier" in str(w.message)]
        assert bool(told) == said and (not said or "with 2 outputs, as many as there are classes" in told[0])


def test_a_method_that_shares_only_a_backbone_of_which_nothing_trains_says_so(patients, tmp_path):
    """A method with a shared head still learns together, and local training never does."""
    path = tmp_path / "net.keras"
    for name, trains, said in (("pflego", False, True), ("pflego", True, False), ("fedavg", False, False),
                               ("local", False, False)):  # fmt: skip
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, "relu", trainable=trains)]).save(path)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            config = RunConfig(algorithm=name, network=str(path), participation=1)
            Run.create(config, tmp_path / f"{name} {trains}", patients).close()
        told = [str(w.message) for w in warned]
        assert any("PFLEGO shares only the backbone, and no weight of this one" in t for t in told) == said, told


@pytest.mark.parametrize(
    "text, said",
    [
        ("age,mas\n1,2\n", r"this run \(missing 'mass'; unknown 'mas'\). The features are 'age', 'mass'"),
        ("age,mass,notes\n1,2,3\n", r"this run \(unknown 'notes'\)"),
        ("age\n1\n", r"this run \(missing 'mass'\)"),
        ("age,mass,mass\n1,2,3\n", "two columns 'mass'"),
        ("1,2,3\n", "t.csv has 3 columns, but an example of this run has 2 numbers: 'age', 'mass'"),
        ("age;mass\n31;70,5\n", "t.csv: column 'mass' is not numeric, row 1 has '70,5': write numbers with a decimal"),
        ("age,mass\n31,70\n,71\n", "t.csv: column 'age' has 1 missing values, the first in row 2"),
        ("age,mass\n", "no row of numbers"),
    ],
)
def test_a_table_with_other_columns_is_refused(patients, tmp_path, text, said):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InvalidArgument, match=said):
        read_examples(tmp_path / "t.csv", patients)


@pytest.mark.slow
def test_the_command_says_that_a_model_for_numbers_gives_predictions(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    data = Federation.from_clients([(x, x)] * 2, out=tmp_path / "data", targets="real", class_names=["dose", "pulse"])
    config = RunConfig(algorithm="local", rounds=1, participation=1.0, evaluate_every=0)
    with Run.create(config, tmp_path / "run", data) as run:
        run.train()
    done = command("model", tmp_path / "run", "--client", 0, "--out", tmp_path / "a.keras")
    assert "raw examples [2] -> predictions of 2 outputs: dose, pulse" in done.output
    np.savez(tmp_path / "xy.npz", x=x, y=x)
    done = command("predict", tmp_path / "run", "--client", 0, "--input", tmp_path / "xy.npz")
    assert done.exit_code == 0 and "xy.npz are not compared: this run predicts numbers" in done.output, done.output


def test_columns_that_are_called_by_numbers(tmp_path):
    """As pandas calls them. Where the names are known they are the heading, and otherwise a warning says so."""
    rows = {"c": ["a", "b"] * 8, "y": [0, 1] * 8} | {str(i): np.arange(16) + i for i in range(4)}
    rows["y"][4:8] = [1, 0] * 2
    named = Federation.from_table(rows, client="c", label="y", validation=0, out=tmp_path / "named")
    x, y = np.arange(32.0).reshape(8, 4), np.arange(8) % 2
    unnamed = Federation.from_clients([(x, y), (x, y)], out=tmp_path / "unnamed")
    (tmp_path / "t.csv").write_text("1,0,2,3\n8,7,6,5\n")
    assert read_examples(tmp_path / "t.csv", named).x.tolist() == [[7, 8, 6, 5]]
    (tmp_path / "t.csv").write_text("0,1,2,3\n8,7,6,5\n")
    with pytest.warns(TfpflWarning, match="is taken for an example. If it numbers the columns"):
        assert len(read_examples(tmp_path / "t.csv", unnamed).x) == 2


def test_a_parquet_file_is_read_as_the_csv_file_is(patients, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"mass": [70.5, 0], "age": [31, 32]}), tmp_path / "t.parquet")
    assert read_examples(tmp_path / "t.parquet", patients).x.tolist() == [[31, 70.5], [32, 0]]
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(InvalidArgument, match="bad.parquet cannot be read as Parquet"):
        read_examples(tmp_path / "bad.parquet", patients)


def test_tokens_that_the_embedding_does_not_have_are_refused():
    """TensorFlow would stop in the middle of the prediction, or cut 1.5 down to 1."""
    model = SimpleNamespace(reads="whole", vocabulary=9)
    x = np.array([[0, 8], [3, 4]], np.float32)
    check_tokens(x, model, "t.npy")
    for wrong in (1.5, -1, 9):
        bad = x.copy()
        bad[1, 1] = wrong
        with pytest.raises(InvalidArgument, match=rf"t.npy: example 1 has {wrong}, but .* whole numbers from 0 to 8"):
            check_tokens(bad, model, "t.npy")
        check_tokens(bad, SimpleNamespace(reads="numbers"), "t.npy")
    model.vocabulary = None  # such as a layer that hashes: any whole number that float32 has
    check_tokens(x * -1000, model, "t.npy")
    with pytest.raises(InvalidArgument, match="example 0 has 33554432"):
        check_tokens(x + np.float32(2**25), model, "t.npy")


@pytest.mark.slow
def test_the_command_refuses_tokens_that_the_embedding_does_not_have(tmp_path):
    inputs = keras.Input((3,))
    layers = [keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(4, activation="relu")]
    features = inputs
    for layer in layers:
        features = layer(features)
    keras.Model(inputs, features).save(tmp_path / "net.keras")
    x, y = np.arange(30).reshape(10, 3) % 9, np.arange(10) % 2
    tokens = Federation.from_clients([(x, y), (x, y)], out=tmp_path / "tokens")
    run = runs.train(tmp_path / "run", tokens, rounds=1, participation=1.0, network=str(tmp_path / "net.keras"))
    np.save(tmp_path / "x.npy", x)
    assert command("predict", run.folder, "--client", 0, "--input", tmp_path / "x.npy").exit_code == 0
    np.save(tmp_path / "x.npy", x + 1)
    done = command("predict", run.folder, "--client", 0, "--input", tmp_path / "x.npy")
    assert done.exit_code == 1 and "x.npy: example 2 has 9, but the backbone takes whole" in done.output


def test_predictions_overwrite_nothing(a_run_of_pixels, tmp_path):
    """And a place that cannot be written is refused before anything is computed."""
    table, empty = tmp_path / "t.csv", tmp_path / "empty.csv"
    table.write_text("1\n")
    for out, said in (
        (table, "t.csv exists already: take another name"),
        (tmp_path / "no" / "t.csv", "no is not a folder. Give the name of a file"),
        (tmp_path, "is a folder. Give the name of a file"),
        (tmp_path / "p.xlsx", "p.xlsx: what is written is text, and no .xlsx file"),
    ):
        done = command("predict", tmp_path / "no run", "--client", "ann", "--input", table, "--out", out)
        assert done.exit_code == 1 and said in done.output and table.read_text() == "1\n"
    np.save(tmp_path / "x.npy", np.zeros((1, 4, 3)))
    empty.touch()
    command("predict", a_run_of_pixels, "--client", "ann", "--input", tmp_path / "x.npy", "--out", empty)
    assert empty.read_text().startswith("example,class,")


def test_a_client_that_the_run_does_not_train_is_not_exported(a_run_of_pixels):
    from tflite_export.convert.personal import personal_model

    with Run.open(a_run_of_pixels) as run:
        new = next(i for i in range(6) if i not in run.population.client_ids)
        with pytest.raises(InvalidArgument, match=rf"client {new} \({NAMES[new]}\) is not one of the 4 clients"):
            personal_model(run, f"name:{NAMES[new]}")
        found = personal_model(run, NAMES[int(max(run.took_part))]).about
        assert found["first_round"] == run.took_part[found["client"]] and found["took_part"] and not found["shared"]


@pytest.mark.slow
def test_labels_that_the_client_does_not_have_are_refused(a_run_of_pixels, pixels, tmp_path):
    np.savez(tmp_path / "xy.npz", x=pixels.raw(0, "test")[0][:2], y=[0, 3])
    done = command("predict", a_run_of_pixels, "--client", "ann", "--input", tmp_path / "xy.npz")
    assert done.exit_code == 1 and "does not know: other. It knows none, mild." in done.output
    with pytest.raises(InvalidArgument, match="y must be whole numbers or names of classes, found float64"):
        label_outputs(np.zeros(2), ["a"], ["a"], "xy.npz")
    np.save(tmp_path / "unit.npy", np.full((1, 4, 3), 0.5))
    done = command("predict", a_run_of_pixels, "--client", "ann", "--input", tmp_path / "unit.npy")
    assert done.exit_code == 0 and "add --decoded" in done.output


def test_a_picture_is_never_decoded_already(tmp_path):
    """Its pixels, up to 255, would be taken for numbers up to 1."""
    done = command("predict", tmp_path, "--client", "0", "--input", "digit.PNG", "--decoded")
    assert done.exit_code == 2 and "digit.PNG is a picture, whose pixels are raw" in done.output


def test_pictures_of_a_data_set_whose_pixels_end_at_16(tmp_path):
    """Scikit-learn's digits: a picture's white is the data set's."""
    x, y = np.tile(np.arange(17, dtype=np.uint8)[:16].reshape(1, 4, 4, 1), (8, 1, 1, 1)), np.arange(8) % 2
    digits = Federation.from_clients([(x, y), (x, y)], out=tmp_path / "data", scale=1 / 16)
    picture = np.round(np.arange(16) * 255 / 16).astype(np.uint8).reshape(4, 4, 1)
    (tmp_path / "digit.png").write_bytes(tf.io.encode_png(picture).numpy())
    np.testing.assert_array_equal(read_examples(tmp_path / "digit.png", digits).x, x[:1])
    coloured = np.repeat(picture, 3, 2)
    (tmp_path / "coloured.png").write_bytes(tf.io.encode_png(coloured).numpy())
    np.testing.assert_array_equal(read_examples(tmp_path / "coloured.png", digits).x, x[:1])


def test_a_run_without_rounds_has_no_models(pixels, tmp_path):
    with Run.create(runs.config(), tmp_path / "run", pixels) as run, pytest.raises(InvalidArgument, match="no rounds"):
        run.keras_model(0)
