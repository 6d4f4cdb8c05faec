"""`tfpfl pretrain` and sources with some of their classes."""

import hashlib
import json
import os
import sys
import warnings
from dataclasses import replace

import keras
import numpy as np
import pytest
from click.testing import CliRunner

from tfpfl.algorithms.beside import PREFIX
from tfpfl.checks import InvalidArgument, TfpflWarning
from tfpfl.cli import main
from tfpfl.data import Federation, load_source
from tfpfl.data.class_choice import BACKGROUND, with_classes
from tfpfl.data.randomness import Stream, generator
from tfpfl.data.source import Source
from tfpfl.models import build_network
from tfpfl.runs.command import command
from tfpfl.runs.config import RunConfig
from tfpfl.runs.pretraining import Settings, _seed_of, pretrain
from tfpfl.runs.run import Run
from tfpfl.runs.seen_classes import record_beside, warn_of_shared_classes

SETTINGS = Settings("mlp200", epochs=3, batch_size=32, rate=3e-3)


@pytest.fixture(scope="module")
def digits():
    """0 to 4, and 5 to 9."""
    return [load_source("digits", only_classes=half) for half in ("first_half", "second_half")]


@pytest.fixture(scope="module")
def made(digits, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "digits.keras"
    lines = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Keras's, of data and of optimizers
        return out, pretrain(digits[0], out, SETTINGS, lines.append), lines


def weights(path):
    return keras.models.load_model(path).get_weights()


def test_the_halves_share_no_class_and_leave_nothing_out(digits):
    whole = load_source("digits")
    assert [half.class_names for half in digits] == [list("01234"), list("56789")]
    for half, first in zip(digits, (0, 5), strict=True):
        for split in ("train", "test"):
            x, y = (getattr(half, f"{name}_{split}") for name in "xy")
            every = getattr(whole, f"y_{split}")
            rows = (every >= first) & (every < first + 5)
            assert np.array_equal(x, getattr(whole, f"x_{split}")[rows]) and np.array_equal(y, every[rows] - first)
    assert digits[0].options == {"only_classes": "first_half"} and whole.options == {}


def test_omniglots_sets_go_by_alphabet_and_keys_and_groups_follow():
    names = [f"{alphabet}_{n}" for alphabet in (BACKGROUND[16], "ULOG", BACKGROUND[3], "Tengwar") for n in range(2)]
    y = np.arange(8).repeat(3)
    source = Source.from_arrays(np.arange(24.0)[:, None], y, np.arange(8.0)[:, None], np.arange(8), name="omniglot",
                                class_names=names, key=y // 2, key_test=np.arange(8) // 2)  # fmt: skip
    source = source._replace(group_train=np.arange(24) // 3)
    background, evaluation = (with_classes(source, name) for name in ("background", "evaluation"))
    assert set(background.class_names).isdisjoint(evaluation.class_names)
    assert set(background.class_names) | set(evaluation.class_names) == set(names)
    assert (
        background.key_train.tolist() == [0] * 6 + [2] * 6
        and evaluation.group_train.tolist() == [2] * 3 + [3] * 3 + [6] * 3 + [7] * 3
    )
    assert evaluation.x_test.ravel().tolist() == [2, 3, 6, 7] and evaluation.key_test.tolist() == [1, 1, 3, 3]
    assert len(BACKGROUND) == 30


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("0,ten", "'ten'.*first_half, second_half"),
        ("3", "leaves 1 class of digits: take at least 2"),
        ("background", "is for omniglot; digits has first_half, second_half"),
    ],
)
def test_classes_that_are_not_there_are_refused(wanted, told):
    with pytest.raises(InvalidArgument, match=told):
        load_source("digits", only_classes=wanted)


@pytest.mark.slow
def test_a_backbone_has_learned_and_its_file_says_how(made, digits):
    out, record, lines = made
    assert record["test_accuracy"] > 0.9 and len(lines) == 3 and "epoch 3 of 3: loss" in lines[-1]
    kept = json.loads(out.with_suffix(".json").read_text())["pretraining"]
    assert kept == json.loads(json.dumps(record)) and kept["source"]["class_names"] == list("01234")
    assert [p.name for p in sorted(out.parent.iterdir())] == ["digits.json", "digits.keras"]
    # a linear head on its features of classes that it has not seen is better than on the first weights
    from sklearn.linear_model import RidgeClassifier

    def score(model):
        phi = [
            model.predict(x * np.float32(digits[1].scale), verbose=0)
            for x in (digits[1].x_train[:25], digits[1].x_test)
        ]
        return RidgeClassifier().fit(phi[0], digits[1].y_train[:25]).score(phi[1], digits[1].y_test)

    trained = keras.models.load_model(out)
    assert trained.output_shape == (None, 200) and score(trained) > 0.6


@pytest.mark.parametrize("seed", [2**31, 2**32, -1, 0.5])
def test_a_seed_that_weights_cannot_have_is_refused(digits, tmp_path, seed):
    with pytest.raises(InvalidArgument, match="seed must lie in 0..2147483647, found"):
        pretrain(digits[0], tmp_path / "b.keras", replace(SETTINGS, seed=seed))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_same_weights(made, digits, tmp_path):
    out, record, _ = made
    stopped = tmp_path / "digits.keras"

    def stop(line):
        if "epoch 2" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(digits[0], stopped, SETTINGS, stop)
    assert not stopped.exists() and (tmp_path / "digits.training" / "best.keras").exists()
    with pytest.raises(InvalidArgument, match="was begun with other settings"):
        pretrain(digits[0], stopped, Settings("mlp200", 3, 16), stop)
    with pytest.raises(InvalidArgument, match="was begun with other data"):
        pretrain(digits[1], stopped, SETTINGS, stop)
    again = pretrain(digits[0], stopped, SETTINGS)
    assert again["epochs"] == record["epochs"] and again["test_accuracy"] == record["test_accuracy"]
    for a, b in zip(weights(out), weights(stopped), strict=True):
        assert np.array_equal(a, b)
    other = pretrain(digits[0], tmp_path / "other.keras", Settings("mlp200", 1, 32, 3e-3, seed=1))
    assert other["epochs"][0] != record["epochs"][0]


@pytest.mark.slow
def test_other_data_of_the_same_name_and_size_do_not_go_on(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (80, 4)).astype(np.uint8), np.arange(80) % 4
    source, out = Source.from_arrays(x, y, name="mine"), tmp_path / "b.keras"

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(source, out, Settings("mlp200", 2), stop)
    for other in (Source.from_arrays(255 - x, y, name="mine"), source._replace(scale=1 / 16)):
        with pytest.raises(InvalidArgument, match="b.training was begun with other data. Give those again"):
            pretrain(other, out, Settings("mlp200", 2))
    record = tmp_path / "b.training" / "record.json"
    whole = record.read_text()
    old = json.loads(whole)
    del old["source"]["sha256"], old["source"]["scale"], old["source"]["shift"]
    record.write_text(json.dumps(old))
    with pytest.raises(InvalidArgument, match="begun by an older version of tfpfl, .* of which examples.*delete"):
        pretrain(source, out, Settings("mlp200", 2))
    record.write_text(whole)
    assert len(pretrain(Source.from_arrays(x.copy(), y, name="mine"), out, Settings("mlp200", 2))["epochs"]) == 2


@pytest.mark.slow
def test_one_call_at_a_time_trains_a_backbone(digits, tmp_path):
    out = tmp_path / "new" / "b.keras"
    refused = []

    def second(line):
        told = f"is being trained by this process {os.getpid()} since .*: wait"
        with pytest.raises(InvalidArgument, match=told):
            pretrain(digits[0], out, SETTINGS)
        refused.append(line)

    pretrain(digits[0], out, Settings("mlp200", 2, 32), second)
    assert len(refused) == 2 and sorted(p.name for p in out.parent.iterdir()) == ["b.json", "b.keras"]


@pytest.mark.slow
def test_first_weights_of_a_file(made, digits, tmp_path):
    """With a rate that moves nothing, the backbone is the one that was given."""
    build_network("mlp200", (8, 8, 1), seed=5).save(tmp_path / "given.keras")
    pretrain(digits[0], tmp_path / "out.keras", Settings(str(tmp_path / "given.keras"), 1, rate=1e-30))
    for a, b in zip(weights(tmp_path / "given.keras"), weights(tmp_path / "out.keras"), strict=True):
        assert np.abs(a - b).max() < 1e-20


def test_a_federation_with_the_backbones_classes_is_warned_of(made, digits, tmp_path, recwarn):
    out = made[0]
    for source, name in zip(digits, ("same", "others"), strict=True):
        federation = Federation.build(source, "round_robin", clients=5, K=2, seed=0, out=tmp_path / name)
        config = RunConfig(federation=str(federation.path), network=str(out), rounds=1, participation=1.0)
        recwarn.clear()
        Run.create(config, tmp_path / f"run of {name}", federation).close()
        told = [str(w.message) for w in recwarn if w.category is TfpflWarning]
        assert len(told) == (name == "same") and all("trained on 5 of this federation's classes" in t for t in told)


def a_network_that_draws(path, size=8):
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Dropout(0.5)(keras.layers.Dense(size, "relu")(keras.layers.Flatten()(inputs)))
    keras.Model(inputs, x).save(path)
    return str(path)


@pytest.mark.slow
def test_dropout_draws_as_the_seed_says_also_after_an_interruption(digits, tmp_path):
    settings = Settings(a_network_that_draws(tmp_path / "given.keras"), epochs=3, batch_size=64, rate=3e-3)

    def stop(line):
        if "epoch 1" in line:
            raise KeyboardInterrupt

    for name in ("first", "second"):
        pretrain(digits[0], tmp_path / f"{name}.keras", settings)
    with pytest.raises(KeyboardInterrupt):
        pretrain(digits[0], tmp_path / "stopped.keras", settings, stop)
    keras.utils.set_random_seed(99)  # whatever else has drawn
    pretrain(digits[0], tmp_path / "stopped.keras", settings)
    for name in ("second", "stopped"):
        for a, b in zip(weights(tmp_path / "first.keras"), weights(tmp_path / f"{name}.keras"), strict=True):
            assert np.array_equal(a, b)


def test_what_layers_draw_does_not_begin_as_the_order_of_examples_does():
    for epoch in range(3):
        assert _seed_of(0, epoch) != generator(0, Stream.PRETRAINING, epoch).integers(2**31)


OWN = """
import keras

@keras.saving.register_keras_serializable("mine")
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x

def net(input_shape):
    x = keras.Input(input_shape)
    return keras.Model(x, Twice()(keras.layers.Dense(7)(keras.layers.Flatten()(x))))
"""


@pytest.mark.slow
def test_layers_of_a_functions_file_are_there_when_another_process_goes_on(digits, tmp_path):
    (tmp_path / "net.py").write_text(OWN)

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(digits[0], tmp_path / "b.keras", Settings(f"{tmp_path}/net.py:net", 2), stop)
    del keras.saving.get_custom_objects()["mine>Twice"]
    for name in [name for name in sys.modules if name.startswith(PREFIX)]:
        del sys.modules[name]
    assert len(pretrain(digits[0], tmp_path / "b.keras", Settings(f"{tmp_path}/net.py:net", 2))["epochs"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("file", ["net.py", "size.py"])
def test_a_network_whose_code_changed_does_not_go_on(digits, tmp_path, monkeypatch, file):
    """Also if it is the code of a module that the file imports."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "size.py").write_text("UNITS = 7\n")
    (tmp_path / "net.py").write_text(
        "import keras\nfrom size import UNITS\n\ndef net(input_shape):\n    x = keras.Input(input_shape)\n"
        "    return keras.Model(x, keras.layers.Dense(UNITS)(keras.layers.Flatten()(x)))\n"
    )
    kept = (tmp_path / file).read_text()
    settings = Settings(f"{tmp_path}/net.py:net", 2)

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(digits[0], tmp_path / "b.keras", settings, stop)
    (tmp_path / file).write_text(kept + "# changed\n")
    with pytest.raises(InvalidArgument, match="b.training was begun with other network file"):
        pretrain(digits[0], tmp_path / "b.keras", settings)
    (tmp_path / file).write_text(kept)
    record = pretrain(digits[0], tmp_path / "b.keras", settings)
    assert len(record["epochs"]) == 2 and len(record["network file"]) == 64


def test_a_layer_that_no_file_can_keep_is_refused_before_training(digits, tmp_path):
    (tmp_path / "net.py").write_text(OWN.replace("Twice()", "keras.layers.Lambda(lambda x: 2 * x)"))
    with pytest.raises(InvalidArgument, match="net.py:net has a layer that Keras cannot write to a file and read"):
        pretrain(digits[0], tmp_path / "b.keras", Settings(f"{tmp_path}/net.py:net", 1))
    assert [path.name for path in tmp_path.iterdir()] == ["net.py"]


@pytest.mark.slow
def test_a_function_makes_the_network(digits, tmp_path):
    (tmp_path / "net.py").write_text(
        "import keras\n\ndef net(input_shape, seed):\n    x = keras.Input(input_shape)\n"
        "    return keras.Model(x, keras.layers.Dense(7)(keras.layers.Flatten()(x)))\n"
    )
    for name in ("a", "b"):
        pretrain(digits[0], tmp_path / f"{name}.keras", Settings(f"{tmp_path}/net.py:net", 1, seed=3))
    assert keras.models.load_model(tmp_path / "a.keras").output_shape == (None, 7)
    for a, b in zip(weights(tmp_path / "a.keras"), weights(tmp_path / "b.keras"), strict=True):
        assert np.array_equal(a, b)


def warned(network, federation):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_shared_classes(network, federation)
    return len(caught)


@pytest.mark.slow
def test_what_a_backbone_has_seen_follows_it(made, digits, tmp_path, monkeypatch):
    """Its .json counts for its own bytes only; and training that goes on from a backbone inherits its classes."""
    monkeypatch.setenv("HOME", str(made[0].parent))
    assert record_beside("~/digits.keras") == record_beside(made[0]) is not None
    federation = Federation.build(digits[0], "round_robin", clients=5, K=2, seed=0, out=tmp_path / "0 to 4")
    assert warned(made[0], federation)
    (tmp_path / "other.json").write_bytes(made[0].with_suffix(".json").read_bytes())
    build_network("mlp200", (8, 8, 1)).save(tmp_path / "other.keras")
    assert not warned(tmp_path / "other.keras", federation)
    for network, expected in ((tmp_path / "other.keras", 0), (made[0], 1)):
        out = tmp_path / f"on from {network.stem}.keras"
        pretrain(digits[1], out, Settings(str(network), 1))
        assert warned(out, federation) == expected


@pytest.mark.parametrize(("learned", "classes", "expected"), [
    (["Greek_1", "Greek_2"], ["Greek", "ULOG"], 1), (["Greek_1"], ["Greek_2", "ULOG_1"], 0),
    (["Greek", "Latin"], ["Greek_2", "ULOG_1"], 1), (["Greek", "Latin"], ["ULOG", "Tengwar"], 0),
])  # fmt: skip
def test_omniglot_and_its_drawers_have_the_same_characters(tmp_path, learned, classes, expected):
    x, y = np.zeros((16, 1)), np.arange(16) % 2
    source = Source.from_arrays(x, y, x, y, name="omniglot_drawers", class_names=classes)
    federation = Federation.build(source, "iid", clients=2, seed=0, out=tmp_path / "f")
    record = {"source": {"name": "omniglot", "class_names": learned}, "sha256": hashlib.sha256(b"x").hexdigest()}
    (tmp_path / "b.keras").write_bytes(b"x")
    (tmp_path / "b.json").write_text(json.dumps({"pretraining": record}))
    assert warned(tmp_path / "b.keras", federation) == expected


@pytest.mark.slow
def test_what_is_begun_and_damaged_is_said(digits, tmp_path):
    out, folder = tmp_path / "b.keras", tmp_path / "b.training"

    def stop(line):
        if "epoch 2" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(digits[0], out, SETTINGS, stop)
    with pytest.raises(InvalidArgument, match="has 2 epochs already, more than 1"):
        pretrain(digits[0], out, Settings("mlp200", 1, 32, 3e-3))
    whole = (folder / "epoch-2.keras").read_bytes()
    (folder / "epoch-2.keras").write_bytes(whole[:100])
    with pytest.raises(InvalidArgument, match="epoch-2.keras is missing or damaged.*Delete"):
        pretrain(digits[0], out, SETTINGS)
    (folder / "record.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="no record of a training"):
        pretrain(digits[0], out, SETTINGS)


def test_the_commands_take_the_classes_that_they_are_given(made, tmp_path, monkeypatch):
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    data = ["--dataset", "digits", "--only-classes", "second_half", "--clients", "5"]
    said = CliRunner().invoke(main, ["partition", *data, str(tmp_path / "f")])
    assert said.exit_code == 0 and Federation.load(tmp_path / "f").class_names == list("56789")
    run = ["run", *data, "--network", str(made[0]), "--create-only", "--out", str(tmp_path / "r")]
    assert CliRunner().invoke(main, run).exit_code == 0
    with Run.open(tmp_path / "r") as opened:
        assert opened.config.source == {"only_classes": "second_half"}
        assert opened.federation.class_names == list("56789")
        assert "--only-classes second_half" in command(opened.config, tmp_path / "r")


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("a.h5", {}, "must end with .keras"),
        ("a.keras", {"epochs": 0}, "at least 1, found 0 and 64"),
        ("a.keras", {"validation": 1.0}, "validation must lie in .0, 1."),
        ("a.keras", {"validation": 1e-4}, "is none: take a larger fraction"),
        ("a.keras", {"network": "mlp300"}, "neither a file of Keras"),
        ("a.keras", {"seed": -1}, "seed"),
        ("a.keras", {"network": "nowhere.keras"}, "nowhere.keras cannot be read: No such file"),
        ("a.keras", {"network": "omniglot_4conv"}, "needs larger images"),
    ],
)
def test_settings_that_cannot_be_are_refused(digits, tmp_path, name, changed, told):
    with pytest.raises(InvalidArgument, match=told):
        pretrain(digits[0], tmp_path / name, Settings(**{"network": "mlp200"} | changed))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("b.h5",), "must end with .keras"), (("b.keras", "--rate", "nan"), "rate must be positive, found 0.1 and nan")],
)
def test_the_command_refuses_before_it_reads_the_data(monkeypatch, arguments, told):
    monkeypatch.setattr("tfpfl.data.load_source", lambda *_, **__: pytest.fail("reading can take minutes"))
    said = CliRunner().invoke(main, ["pretrain", *arguments])
    assert said.exit_code == 1 and told in " ".join(said.output.split())


@pytest.mark.slow
def test_the_command(tmp_path):
    out = tmp_path / "b.keras"
    arguments = ["pretrain", str(out), "--dataset", "digits", "--network", "mlp200", "--epochs", "1"]
    said = CliRunner().invoke(main, arguments)
    assert said.exit_code == 0 and "5 classes of digits: " in said.output and out.exists()
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1 and "exists already" in again.output
