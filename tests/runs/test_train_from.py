"""Runs with a frozen trunk, with adapters, and with a backbone that a function of the user's own makes."""

import hashlib
import json
import shutil
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path

import keras
import numpy as np
import pytest
from click.testing import CliRunner

from helpers import small_runs as runs
from helpers.toys import distance
from tflite_export.convert.personal import personal_model
from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.data import Federation
from tfpfl.models import trunk_features
from tfpfl.runs import RunConfig, allow_code, consent, read_config
from tfpfl.runs.client_model import ClientModels
from tfpfl.runs.command import command
from tfpfl.runs.config import RunError
from tfpfl.runs.own_networks import made_by
from tfpfl.runs.run import Run
from tfpfl.studies.advice import advise
from tfpfl.studies.new_clients import adapt_new_clients
from tfpfl.studies.records import Record

CNN = '''
import keras
from half import HALF

def net(input_shape, seed, width=6):
    """Two dense layers after one that halves."""
    x = keras.Input(input_shape)
    y = keras.layers.Dense(width, activation="tanh", name="low")(keras.layers.Rescaling(HALF)(x))
    return keras.Model(x, keras.layers.Dense(5, activation="tanh", name="top")(y))

def changing():
    """Other weights whenever it is called."""
    import os
    model = net((4,), 0)
    model.layers[-1].bias.assign([int.from_bytes(os.urandom(2), "big") for _ in range(5)])
    return model

def none():
    """No model."""

def needs(size):
    """An argument that nobody gives."""

def breaks():
    """An error."""
    return 1 / 0

def images():
    """No Input, and not for vectors."""
    return keras.Sequential([keras.layers.Conv2D(2, 3)])

def late():
    """No Input, and a layer that chooses how its weights begin when it is built."""
    class Product(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 5), initializer="glorot_uniform")

        def call(self, x):
            return x @ self.kernel

    return keras.Sequential([Product()])

def unnamed(input_shape):
    """Layers that Keras names."""
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(3), keras.layers.Dense(6)])

KEPT = keras.layers.Dense(3, name="dense")

def kept(input_shape):
    """A layer that the file keeps, and one more."""
    return keras.Sequential([keras.Input(input_shape), KEPT, keras.layers.Dense(6)])
'''


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    monkeypatch.setattr("tfpfl.runs.protocols.LAST_ROUNDS", 1)
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def network(tmp_path):
    """A function of the user's own, in a file that imports another one beside it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "half.py").write_text("HALF = 0.5\n")
    (tmp_path / "mine" / "cnn.py").write_text(CNN)
    return f"{tmp_path / 'mine' / 'cnn.py'}:net"


@pytest.fixture
def data(tmp_path):
    return runs.federation(tmp_path / "data")


def test_the_ids_of_runs_without_these_options_are_as_before():
    """They were written down before there were these options."""
    first = "a1f84e82be83ec19c67de60613dc86bfe2ca92bc4bf03368b4744a49f6f1d506"
    second = "391be810dc2ffdef7ecfe7d7662ac9672826124caf8faf08cebdef874698fac4"
    other = {"network": "mlp200", "hyperparameters": {"eta": 0.1}, "labels": "global", "seed": 3}
    assert RunConfig().run_id == first and RunConfig(algorithm="fedavg", **other).run_id == second
    assert len({RunConfig(**more).run_id for more in ({}, {"train_from": "top"}, {"adapters": "lora:2"})}) == 3
    assert len({RunConfig(adapters="lora:2", personal=part).run_id for part in (None, "A", "B")}) == 3


def test_a_config_of_an_older_version_is_read(data, tmp_path):
    config = asdict(runs.config().resolved(data))
    for name in ("network_weights", "train_from", "adapters", "personal"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert (found.network_weights, found.train_from, found.adapters) == (None, None, None)
    assert found.run_id == runs.config().resolved(data).run_id


@pytest.fixture
def through_the_trunk(monkeypatch):
    """The numbers of examples that went through the trunk, one for each call."""
    found, forward = [], trunk_features._forward

    def counted(*args):
        inner = forward(*args)
        return lambda raw: found.append(len(raw)) or inner(raw)

    monkeypatch.setattr(trunk_features, "_forward", counted)
    return found


ON_FEATURES = {"train_from": "top", "rounds": 2, "participation": 1.0, "new_clients": 1}


@pytest.mark.slow
def test_a_run_trains_on_features_that_are_computed_once(network, data, tmp_path, through_the_trunk):
    """When it is opened again, the trunk is run for probes only. A client's Keras model takes examples."""
    run = runs.train(tmp_path / "run", data, network=network, adapters="scale_shift", **(ON_FEATURES | {"rounds": 1}))
    assert through_the_trunk == [data.manifest["num_examples"], 8]
    assert (tmp_path / "data.trunks").is_dir() and run.model.input_shape == (6,)
    assert run.model.num_backbone_weights == 2 * 5
    with Run.open(tmp_path / "run") as again:
        gives_the_same_logits(again, data)
        exported = personal_model(again, 0, True)
        assert exported.trunk is again.whole.trunk and exported.model is again.model
        assert exported.train[0].shape[1:] == (6,) and exported.raw("train").shape[1:] == data.example_shape
    assert through_the_trunk[2:] == [8]


@pytest.mark.slow
def test_advice_on_a_run_above_a_trunk(network, data, tmp_path):
    """It took the raw examples for features of the trunk."""
    runs.train(tmp_path / "run", data, network=network, **(ON_FEATURES | {"new_clients": 0}))
    with Run.open(tmp_path / "run") as run:
        found = advise(run, "test")
        last = Record.read(tmp_path / "run").per_client("test", when="last")
    assert {c.client: c.own_score for c in found.clients} == pytest.approx(last, abs=1e-6)


def gives_the_same_logits(run, data):
    """The Keras model of a client, from raw examples, and the run's own model."""
    model, x = run.client_model(1, outputs="logits").model, np.array(data.raw(1, "test")[0])
    weights = ClientModels(run).weights(1)
    assert distance(weights.theta, run.whole.initial_theta) > 1e-5
    assert distance(model(x), run.whole.logits(weights, x)) < 1e-5


@pytest.mark.slow
def test_a_resumed_run_and_another_method_read_them_again(network, data, tmp_path, through_the_trunk):
    runs.train(tmp_path / "run", data, network=network, **ON_FEATURES)
    fedavg = {"algorithm": "fedavg", "hyperparameters": {"eta": 0.1}, "preset": None}
    runs.train(tmp_path / "other", data, network=network, **fedavg, **ON_FEATURES)
    with Run.open(tmp_path / "run", rounds=3) as again:
        again.train()
    straight = runs.train(tmp_path / "straight", data, network=network, **(ON_FEATURES | {"rounds": 3}))
    assert set(through_the_trunk[1:]) == {8}
    with Run.open(tmp_path / "run") as again:
        assert adapt_new_clients(again, epochs=1).accuracy.shape == (1, 2)
    for what in ("server", "client"):
        assert runs.saved(straight.folder)[what] == runs.saved(tmp_path / "run")[what]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"train_from": "top"}, {"adapters": "lora:2"}])
def test_a_clients_keras_model_is_the_whole_model(options, network, data, tmp_path):
    """With adapters, it has the merged weights."""
    runs.train(tmp_path / "run", data, network=network, rounds=2, participation=1.0, **options)
    with Run.open(tmp_path / "run") as opened:
        gives_the_same_logits(opened, data)


@pytest.mark.slow
def test_a_run_in_which_a_part_of_the_adapters_stays_with_the_client(network, data, tmp_path):
    """It is resumed with the clients' own parts, has no global model, and its models of clients are their own."""
    given = {"algorithm": "fedavg", "hyperparameters": {"eta": 0.1}, "preset": None, "labels": "global"}
    given |= {"network": network, "participation": 1.0, "adapters": "lora:2", "personal": "B"}
    runs.train(tmp_path / "run", data, rounds=1, **given)
    with Run.open(tmp_path / "run", rounds=2) as again:
        again.train()
    straight = runs.train(tmp_path / "straight", data, rounds=2, **given)
    for what in ("server", "client"):
        assert runs.saved(straight.folder)[what] == runs.saved(tmp_path / "run")[what]
    with Run.open(tmp_path / "run") as opened:
        assert opened.recipe.model_name == "personal"
        gives_the_same_logits(opened, data)
        first, second = (ClientModels(opened).weights(i).theta for i in (1, 2))
        assert all(np.array_equal(first[i], second[i]) for i in (0, 2)) and distance(first[1], second[1]) > 1e-5


@pytest.mark.slow
def test_a_bottleneck_cannot_be_written_into_a_keras_model(network, data, tmp_path):
    runs.train(tmp_path / "run", data, network=network, rounds=1, adapters="bottleneck:2")
    with (
        Run.open(tmp_path / "run") as run,
        pytest.raises(InvalidArgument, match="bottleneck adapters of layers 'low', 'top' cannot be written"),
    ):
        run.keras_model(0)


def created(folder, data, **changes):
    """A run without any rounds, closed again."""
    with Run.create(runs.config(**changes), folder, data) as run:
        return run


def test_a_function_makes_the_backbone(network, data, tmp_path):
    """The folder has a copy; a changed copy is refused. The user's own random numbers go on as if nothing was drawn."""
    np.random.seed(7)  # noqa: NPY002
    run = created(tmp_path / "run", data, network=network)
    assert np.random.rand() == np.random.RandomState(7).rand()  # noqa: NPY002
    assert (run.config.network, len(run.config.network_weights)) == ("network.py:net", 64)
    again = created(tmp_path / "again", data, network=network)
    assert again.config.run_id == run.config.run_id
    assert again.config.network_weights == run.config.network_weights
    other = created(tmp_path / "other", data, network=network, seed=1)
    assert other.config.network_weights != run.config.network_weights
    x, w = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32), run.whole.initial_theta
    assert distance(run.model.features(w, x), np.tanh(np.tanh(x / 2 @ w[0] + w[1]) @ w[2] + w[3])) < 1e-6
    assert f"--network {network} " in command(run.config, tmp_path / "run")  # beside the copy, half.py is missing
    (tmp_path / "mine" / "half.py").write_text("HALF = 0.25\n")
    assert f"--network {tmp_path / 'run' / 'network.py'}:net " in command(run.config, tmp_path / "run")
    (tmp_path / "run" / "network.py").write_text(CNN + "\n")
    with pytest.raises(RunError, match=r"network.py was changed: its sha256"):
        Run.open(tmp_path / "run")


def test_layers_that_keras_names_are_called_as_in_a_new_process(network, data, tmp_path):
    """The function is called again and again: dense_1 was unknown, and resume did not know what the error named."""
    before = keras.layers.Dense(2).name
    run = created(tmp_path / "run", data, network=network.replace(":net", ":unnamed"), train_from="dense_1")
    assert run.whole.trunk.shape == (3,) and run.model.num_backbone_weights == (3 + 1) * 6
    assert keras.layers.Dense(2).name != before  # Keras goes on counting for everybody else
    file = Path(network.removesuffix(":net"))
    assert len(made_by(file, file.read_bytes(), "kept", (4,), 0).layers) == 2  # both would be called dense


@pytest.mark.slow
def test_a_run_goes_on_when_the_original_file_has_changed(network, data, tmp_path):
    runs.train(tmp_path / "run", data, network=network, rounds=1)
    straight = runs.train(tmp_path / "straight", data, network=network, rounds=2)
    Path(network.rpartition(":")[0]).write_text("1 / 0")
    with Run.open(tmp_path / "run", rounds=2) as opened:
        opened.train()
    assert runs.saved(straight.folder)["server"] == runs.saved(tmp_path / "run")["server"]


def folder_with(folder, half):
    """A folder with the network's file, and another module beside it: the first weights are the same."""
    folder.mkdir()
    (folder / "cnn.py").write_text(CNN)
    (folder / "half.py").write_text(f"HALF = {half}\n")
    return f"{folder / 'cnn.py'}:net"


def scaled_by(folder):
    """The factor of the run's `Rescaling`."""
    with Run.open(folder) as run:
        (layer,) = (layer for layer in run.whole.backbone.layers if isinstance(layer, keras.layers.Rescaling))
        return layer.scale


def test_a_network_keeps_the_modules_of_its_own_folder(data, tmp_path):
    """Two files of one content, with other modules beside them; before, the last one that was named was taken."""
    a, b = folder_with(tmp_path / "pa", 0.5), folder_with(tmp_path / "pb", 0.25)
    first, second = (created(tmp_path / out, data, network=network).config for out, network in (("ra", a), ("rb", b)))
    assert first.network_hash == second.network_hash and first.network_weights == second.network_weights
    assert first.network_beside != second.network_beside and first.run_id != second.run_id
    assert (scaled_by(tmp_path / "ra"), scaled_by(tmp_path / "rb")) == (0.5, 0.25)
    (tmp_path / "pa").rename(tmp_path / "moved")
    with pytest.raises(InvalidArgument, match=r"cnn.py imports from beside it \(a module that it .* is missing"):
        Run.open(tmp_path / "ra")
    again = created(tmp_path / "again", data, network=folder_with(tmp_path / "pc", 0.5)).config
    assert again.run_id == first.run_id and scaled_by(tmp_path / "ra") == 0.5  # with the same modules, in pc
    (tmp_path / "pb" / "half.py").write_text("HALF = 0.75\n")
    assert RunConfig(**asdict(runs.config(network=b))).resolved(data).run_id != second.run_id
    with pytest.raises(InvalidArgument, match=r"beside it \(half.py\) was changed since the run was created. The run"):
        Run.open(tmp_path / "rb")


def test_a_run_from_before_the_entry_of_modules_goes_on(data, tmp_path):
    """Its config.json does not say where its network was, and its run_id is that of then."""
    config = created(tmp_path / "run", data, network=folder_with(tmp_path / "mine", 0.5)).config
    path = tmp_path / "run" / "config.json"
    raw = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("network_place", "network_beside")}
    path.write_text(json.dumps(raw))
    identity = {k: v for k, v in raw.items() if k not in ("rounds", "versions", "federation", "network_weights")}
    del identity["own_method"], identity["own_metrics"]
    newer = read_config(tmp_path / "run").method.newer
    identity["hyperparameters"] = {k: v for k, v in raw["hyperparameters"].items() if newer.get(k, ...) != v}
    run_id = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    assert read_config(tmp_path / "run").run_id == run_id != config.run_id
    with sqlite3.connect(tmp_path / "run" / "state.sqlite") as store:
        store.execute("UPDATE run SET run_id = ?", (run_id,))
    store.close()
    (consent,) = (tmp_path / "cache").glob("allowed*/*")
    consent.write_text(str(tmp_path / "mine"))  # as it was written then
    assert scaled_by(tmp_path / "run") == 0.5
    plain = tmp_path / "plain.py"  # imports nothing from beside it, so that a new run is the same one as of before
    plain.write_text(CNN.replace("from half import HALF", "HALF = 0.5"))
    config = created(tmp_path / "plain", data, network=f"{plain}:net").config
    assert config.network_beside == "" and replace(config, network_beside=None).run_id == config.run_id


def test_modules_of_a_folder_that_was_not_allowed_are_not_run(data, tmp_path, monkeypatch):
    """The file may have a content that this user has allowed, with other modules beside it."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "theirs"))
    created(tmp_path / "sent", data, network=folder_with(tmp_path / "evil", "print('run') or 0.25"))
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "mine"))
    created(tmp_path / "run", data, network=folder_with(tmp_path / "good", 0.5))
    shutil.copy(tmp_path / "evil" / "half.py", tmp_path / "sent")
    with pytest.raises(RunError, match=r"network.py imports modules that lie beside .*evil/cnn.py.*use --allow-code"):
        Run.open(tmp_path / "sent")
    path = tmp_path / "sent" / "config.json"
    whole = json.loads(path.read_text())
    config = RunConfig(**{k: v for k, v in whole.items() if k not in ("network_place", "network_beside")})
    content = (tmp_path / "sent" / "network.py").read_bytes()
    taken = consent.place_of(tmp_path / "sent" / "network.py", content, config.network_hash, None, None)
    assert taken.parent == tmp_path / "good"  # a configuration that does not say which gets those that were allowed
    allow_code(tmp_path / "sent")
    shutil.rmtree(tmp_path / "evil")
    assert scaled_by(tmp_path / "sent") == 0.25 and scaled_by(tmp_path / "run") == 0.5


TWO = """
import keras

def net(input_shape):
    inputs = {name: keras.Input(shape, name=name) for name, shape in input_shape.items()}
    flat = [keras.layers.Flatten()(inputs[name]) for name in sorted(inputs)]
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Concatenate()(flat)))
"""


def test_a_function_gets_the_shapes_of_several_arrays_by_name(tmp_path):
    (tmp_path / "net.py").write_text(TWO)
    x = {"age": np.zeros((20, 1), np.float32), "image": np.zeros((20, 4, 3), np.float32)}
    data = Federation.from_clients([(x, np.arange(20) % 2)] * 2, out=tmp_path / "data")
    run = created(tmp_path / "run", data, network=f"{tmp_path}/net.py:net")
    assert run.model.input_shape == {"age": (1,), "image": (4, 3)}
    assert [w.shape for w in run.model.initial_theta] == [(1 + 4 * 3, 4), (4,)]


def test_a_folder_from_elsewhere_runs_no_code(network, data, tmp_path, monkeypatch):
    created(tmp_path / "run", data, network=network)
    sent = shutil.copytree(tmp_path / "run", tmp_path / "sent")
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "theirs"))
    with pytest.raises(InvalidArgument, match="network network.py:net is code of whoever made the run.*--allow-code"):
        Run.open(sent)
    allow_code(sent)
    shutil.copy(tmp_path / "mine" / "half.py", sent)  # it stands beside
    with Run.open(sent) as run:
        assert run.store.round_num == 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("changing", "begins with other weights than when the run was created"),
        ("none", "none in .*cnn.py must give a Keras model of features, found NoneType"),
        ("needs", "needs size; a function that makes a backbone is called with input_shape and seed"),
        ("breaks", "breaks in .*cnn.py raised ZeroDivisionError: division by zero"),
        ("images", r"the model that images in .*cnn.py gives does not take examples of shape \(4,\): "),
        ("nett", "unknown function in .*cnn.py 'nett'; did you mean 'net'"),
    ],
)
def test_what_a_function_must_give(function, message, network, data, tmp_path):
    with pytest.raises(InvalidArgument, match=message):
        runs.train(tmp_path / "run", data, network=network.replace(":net", f":{function}"), rounds=1)
    assert not (tmp_path / "run").exists()


def test_weights_that_begin_when_a_model_is_built_are_functions_of_the_seed(network, tmp_path):
    """Keras 3 chose the seed of such weights after the function: no run could begin, as they differed at each call."""
    file = Path(network.removesuffix(":net"))
    first, again, other = (made_by(file, file.read_bytes(), "late", (4,), seed).get_weights()[0] for seed in (5, 5, 6))
    assert (first == again).all() and (first != other).any()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train-from", "tip"], "train_from: unknown layer 'tip'"),
        (["--adapters", "lora"], "adapters must be written lora:R"),
        (["--personal", "B"], "personal='B' names a part of adapters, but there are no adapters"),
        (["--adapters", "lora:1", "--personal", "down"], "the parts of lora adapters are A, B"),
        (["--algorithm", "ditto", "--adapters", "lora:1", "--personal", "B"], "ditto cannot leave a part of theta"),
        (["--network", "cnn.py"], "names no function: write cnn.py:FUNCTION"),
        (["--allow-code"], "--allow-code is for --network FILE.keras"),
    ],
)
def test_wrong_options_leave_no_folder(words, message, network, data, tmp_path):
    asked = ["run", "--federation", str(data.path), "--network", network, "--rounds", "1", *words]
    refused = CliRunner().invoke(main, [*asked, "--out", str(tmp_path / "no")])
    assert refused.exit_code == 1 and message in refused.output and not (tmp_path / "no").exists()


@pytest.mark.slow
def test_the_command_line(network, data, tmp_path):
    """All options of the model, and the command that repeats the run."""
    asked = ["run", "--federation", str(data.path), "--network", network, "--rounds", "1", "--tau", "2"]
    asked += ["--train-from", "top", "--adapters", "lora:1", "--personal", "B"]
    call = CliRunner()
    done = call.invoke(main, [*asked, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    config = read_config(tmp_path / "run")
    assert (config.train_from, config.adapters, config.personal) == ("top", "lora:1", "B")
    assert "--train-from top --adapters lora:1 --personal B" in command(config, tmp_path / "run")
    assert call.invoke(main, ["evaluate", str(tmp_path / "run")]).exit_code == 0


@pytest.mark.slow
def test_a_federation_that_cannot_be_written_beside(network, data, tmp_path, monkeypatch):
    monkeypatch.setattr("tfpfl.runs.federations.os.access", lambda *_: False)
    runs.train(tmp_path / "run", data, network=network, rounds=1, train_from="top")
    assert len(list((tmp_path / "cache" / "trunks").glob("*/x.raw"))) == 1
    assert not (tmp_path / "data.trunks").exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tff", "ray"])
def test_other_engines_read_the_same_features(engine, network, data, tmp_path):
    pytest.importorskip({"tff": "tensorflow_federated", "ray": "ray"}[engine])
    given = {"network": network, "train_from": "top", "adapters": "lora:2", "rounds": 2}
    local, other = (runs.train(tmp_path / e, data, engine=e, **given) for e in ("local", engine))
    with Run.open(local.folder) as a, Run.open(other.folder, engine="local") as b:
        states = [run.training().server_state() for run in (a, b)]
    assert distance(*states) < 1e-6
    assert len([p for p in (tmp_path / "data.trunks").iterdir() if p.name[0] != "."]) == 1


@pytest.mark.slow
def test_a_keras_file_of_images_is_cut(tmp_path):
    """uint8 pictures, a convolution in the trunk, and a Keras file: the features are those of the decoded pictures."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 6, 6, 1)).astype(np.uint8), np.arange(40) % 2
    federation = Federation.from_clients([(x, y)] * 4, out=tmp_path / "f")
    stack = [keras.layers.Conv2D(3, 3, name="conv"), keras.layers.Flatten(), keras.layers.Dense(4, name="top")]
    model = keras.Sequential([keras.Input((6, 6, 1)), *stack])
    model.save(tmp_path / "n.keras")
    run = runs.train(tmp_path / "run", federation, rounds=1, network=str(tmp_path / "n.keras"), train_from="top")
    decoded, _ = federation.arrays(2)
    expected = np.asarray(model.layers[0](decoded)).reshape(len(decoded), -1)
    assert distance(run.examples.arrays(2)[0], expected) < 1e-5
