"""A network's file from elsewhere: it is loaded as it was saved, or refused in one line; it never runs code."""

import io
import json
import os
import pickle
import stat
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from helpers.marks import slow_but
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation
from tfpfl.models.network_file import load_network
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run

layers = keras.layers
KERAS_2 = keras.__version__.startswith("2")


def saved(model, kind=".keras") -> bytes:
    """What `model.save` writes."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{kind}"
        model.save(path)
        return path.read_bytes()


def small(*more):
    return keras.Sequential([keras.Input((4,)), layers.Dense(7, activation="tanh"), *more, layers.Dense(3)])


def leave_a_mark(x):
    """Code that a hostile file brings with it."""
    import os
    import pathlib

    pathlib.Path(os.environ["TFPFL_MARK"]).touch()
    return x


def functional():
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(3)(x))


def with_code():
    lambdas = layers.Lambda(
        lambda x: (__import__("pathlib").Path(__import__("os").environ["TFPFL_MARK"]).touch(), x)[1], output_shape=(7,)
    )
    return small(lambdas)


def members(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(parts, method=zipfile.ZIP_STORED) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method) as archive:
        for name, content in parts:
            archive.writestr(name, content)
    return written.getvalue()


def changed(change, model=None) -> bytes:
    """A .keras file whose configuration is changed; change(configuration, its Dense layer)."""
    parts = members(saved(model or small()))
    config = json.loads(parts["config.json"])
    change(config, next(c for c in config["config"]["layers"] if c["class_name"] == "Dense"))
    return packed((parts | {"config.json": json.dumps(config)}).items())


def changed_hdf5(change) -> bytes:
    """The same for HDF5."""
    written = io.BytesIO(saved(small(), ".h5"))
    with h5py.File(written, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        change(config, next(c for c in config["config"]["layers"] if c["class_name"] == "Dense"))
        file.attrs["model_config"] = json.dumps(config)
    return written.getvalue()


def dense(**entries):
    """Changes entries of the configuration of a Dense layer."""
    return lambda _, layer: layer["config"].update(entries)


def layer(**entries):
    """Changes a Dense layer into another one."""
    return lambda _, layer: layer.update(entries)


def an(name, module="evil", config=None) -> dict:
    return {"module": module, "class_name": name, "config": config or {}, "registered_name": name}


def function(name, module) -> dict:
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


def in_hdf5(change) -> bytes:
    parts = members(saved(small()))
    written = io.BytesIO(parts["model.weights.h5"])
    with h5py.File(written, "r+") as file:
        change(file)
    return packed((parts | {"model.weights.h5": written.getvalue()}).items())


def operation(name, **config) -> dict:
    return {"module": "keras.layers", "class_name": "TFOpLambda", "config": {"name": "op", "function": name, **config}}


def constant(value) -> dict:
    """An initializer whose value is an object."""
    entries = {"module": "keras.initializers", "class_name": "Constant", "registered_name": None}
    return entries | {"config": {"value": value}}


def the_code_of_lambda() -> dict:
    """How Keras writes a Python lambda as a value."""
    config = json.loads(members(saved(with_code()))["config.json"])
    found = next(c for c in config["config"]["layers"] if c["class_name"] == "Lambda")["config"]["function"]
    return found if isinstance(found, dict) else {"class_name": "__lambda__", "config": {"value": found}}


def two_configurations() -> bytes:
    parts = members(saved(small()))
    return packed([*parts.items(), ("config.json", members(saved(with_code()))["config.json"])])


def a_link() -> bytes:
    info = zipfile.ZipInfo("assets")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return packed([*members(saved(small())).items(), (info, "/etc")])


def pickled_weights() -> bytes:
    parts = members(saved(small()))

    class Evil:
        def __reduce__(self):
            return (os.system, ('touch "$TFPFL_MARK"',))

    written = io.BytesIO()
    np.savez(written, __root__=np.array([Evil()], object))
    del parts["model.weights.h5"]
    assert pickle  # what NumPy uses for arrays of objects
    return packed([*parts.items(), ("model.weights.npz", written.getvalue())])


def first_array(file):
    found = []
    file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    return found[0]


def replaced(make):
    """Changes the first array of the weights into something else, made by make(group, name, array)."""

    def change(file):
        name = first_array(file)
        array = file[name][()]
        del file[name]
        make(file, name, array)

    return in_hdf5(change)


HOSTILE = {
    "a lambda": lambda: saved(with_code()),
    "a lambda in HDF5": lambda: saved(with_code(), ".h5"),
    "a lambda in a model in a model": lambda: saved(keras.Sequential([keras.Input((4,)), with_code()])),
    "a lambda in a wrapper": lambda: changed(
        layer(class_name="TimeDistributed", config={"layer": an("Lambda", "keras.layers", the_code_of_lambda())})
    ),
    "a lambda by the place of its class": lambda: changed(layer(**an("Lambda", "keras.src.layers.core.lambda_layer"))),
    "a lambda as an activation": lambda: changed(dense(activation=the_code_of_lambda())),
    "a function of any module": lambda: changed(dense(activation=function("run", "evil"))),
    "a function of any module in HDF5": lambda: changed_hdf5(dense(activation=function("run", "evil"))),
    "a function of Python": lambda: changed(dense(activation=function("eval", "builtins"))),
    "a function that downloads": lambda: changed(dense(activation=function("get_file", "keras.utils"))),
    "a class of any module": lambda: changed(layer(**an("Dense"))),
    "a class of any module in HDF5": lambda: changed_hdf5(layer(**an("Dense"))),
    "a model of any module": lambda: changed(lambda config, _: config.update(an("Model"))),
    "a layer of any module in a graph": lambda: changed(layer(**an("Thing")), functional()),
    "a layer of any module in a wrapper": lambda: changed(
        layer(class_name="TimeDistributed", config={"layer": an("Thing")}), functional()
    ),
    "a class inside Keras that is another module's": lambda: changed(layer(**an("os", "keras.src.utils.io_utils"))),
    "an initializer of any module": lambda: changed(dense(kernel_initializer=an("Zeros"))),
    "a regularizer of any module": lambda: changed(dense(kernel_regularizer=an("L2"))),
    "a constraint of any module": lambda: changed(dense(bias_constraint=an("NonNeg"))),
    "a dtype of any module": lambda: changed(dense(dtype=an("DTypePolicy"))),
    "a cell of any module": lambda: changed(layer(**an("RNN", "keras.layers", {"cell": an("Cell")}))),
    "a type of any module": lambda: changed(dense(units=an("__typespec__") | {"spec_name": "Spec"})),
    "a value of any module": lambda: changed(lambda config, _: config.update(an("TensorShape"))),
    "a tuple of any module": lambda: changed(dense(kernel_initializer=constant(an("__tuple__")))),
    "a slice of any module": lambda: changed(dense(kernel_initializer=constant(an("__slice__")))),
    "a slice of any module in HDF5": lambda: changed_hdf5(dense(kernel_initializer=constant(an("__slice__")))),
    "arithmetic of any module": lambda: changed(layer(**operation("math.add") | {"module": "evil"})),
    "a class by another name": lambda: changed(
        dense(kernel_initializer=constant(an("Dense", "keras.src.models") | {"registered_name": "Thing"}))
    ),
    "a class that its module does not have": lambda: changed(layer(**an("Dense", "keras.src.utils.io_utils"))),
    "an activation by another name": lambda: changed(
        dense(activation=function("relu", "builtins") | {"registered_name": "run"})
    ),
    "an operation that writes": lambda: changed(layer(**operation("io.write_file"))),
    "an operation that deletes": lambda: changed(layer(**operation("io.gfile.rmtree"))),
    "an operation that downloads": lambda: changed_hdf5(layer(**operation("keras.utils.get_file"))),
    "a graph of another folder": lambda: changed(layer(**an("TFSMLayer", "keras.layers", {"filepath": "/evil"}))),
    "a layer that reads a file": lambda: changed(
        layer(**an("StringLookup", "keras.layers", {"vocabulary": "/etc/passwd"}))
    ),
    "two configurations": two_configurations,
    "a link in the archive": a_link,
    "a member with another path": lambda: packed([*members(saved(small())).items(), ("../evil.py", "")]),
    "pickled weights": pickled_weights,
    "a link to another file": lambda: replaced(
        lambda file, name, _: file.__setitem__(name, h5py.ExternalLink("/etc/evil.h5", "/a"))
    ),
    "weights in another file": lambda: replaced(
        lambda file, name, a: file.create_dataset(name, a.shape, a.dtype, external=[("/etc/passwd", 0, a.nbytes)])
    ),
}
WRONG = {
    "no model": (lambda: b"not a model", "neither a .keras archive nor HDF5"),
    "an archive of something else": (lambda: packed([("a", "b")]), "member 'a', which is no part of a model"),
    "a bomb": (
        lambda: packed((members(saved(small())) | {"metadata.json": b" " * 10**8}).items(), zipfile.ZIP_DEFLATED),
        "unpacks to .* over 100 times its size",
    ),
    "a model without a name": (
        lambda: changed(lambda config, _: config["config"].update(name=[None])),
        r"name of the model is \[None\], not a text|Argument `name` must be a string",  # Keras 3 has the second
    ),
    "no JSON": (
        lambda: packed((members(saved(small())) | {"config.json": "{"}).items()),
        "its config.json is not valid JSON",
    ),
    "very deep": (
        lambda: packed((members(saved(small())) | {"config.json": "[" * 100_000}).items()),
        "its config.json is not valid JSON",
    ),
    "a configuration of nothing": (
        lambda: packed((members(saved(small())) | {"config.json": "[]"}).items()),
        "it has no class_name and config",
    ),
    "units": (lambda: changed(dense(units="many")), r"model.config.layers\[1\].config.units"),
    "activation": (lambda: changed(dense(activation="evil")), r"model.config.layers\[1\].config.activation"),
    "more weights than the file has": (
        lambda: changed(dense(units=2**31 - 1)),
        r"up to weight .*kernel.* of shape .*2147483647.*, its configuration has \d+ numbers, its file has 59",
    ),
    "a longer number": (lambda: changed(dense(units=2**40)), r"layers\[1\].config.units is larger than 2147483647"),
    "fewer numbers than the shape": (
        lambda: replaced(lambda file, name, a: file.create_dataset(name, (10**6, 10**6), a.dtype, chunks=(10, 10))),
        r"has shape \(1000000, 1000000\), but fewer numbers are stored",
    ),
    "texts": (
        lambda: replaced(lambda file, name, _: file.create_dataset(name, data=b"evil")),
        "is not an array of numbers",
    ),
    "a circle": (lambda: in_hdf5(lambda file: file.__setitem__("again", file["/"])), "is there twice"),
    "a huge output within a model within the model": (
        lambda: saved(
            keras.Sequential(
                [
                    keras.Input((4,)),
                    keras.Sequential([keras.Input((4,)), layers.RepeatVector(2**30), layers.GlobalMaxPooling1D()]),
                    layers.Dense(3),
                ]
            )
        ),
        "gives 4294967296 numbers for an example",
    ),
    "packed numbers": (
        lambda: replaced(lambda file, name, a: file.create_dataset(name, data=a, compression="gzip")),
        "is packed, or lies in another file",
    ),
}


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that code of a hostile file would write; its module `evil` writes it when it is imported."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("TFPFL_MARK", str(mark))
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "evil.py").write_text(
        "import os, pathlib, keras\npathlib.Path(os.environ['TFPFL_MARK']).touch()\n"
        "def run(x): return x\nDense = Zeros = L2 = NonNeg = Model = Thing = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield mark
    __import__("sys").modules.pop("evil", None)


def test_the_mark_is_left_by_code(mark):
    from evil import run

    assert run(1) == 1 and mark.exists()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    x, y = np.zeros((8, 4), np.float32), np.arange(8) % 2
    return Federation.from_clients([(x, y)] * 3, out=tmp_path_factory.mktemp("network_file") / "federation")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_runs_no_code(name, mark, federation, tmp_path):
    file = tmp_path / "net.keras"
    file.write_bytes(HOSTILE[name]())
    mark.unlink(missing_ok=True)  # Keras calls a lambda when it is made
    said = ""
    try:
        Run.create(RunConfig(network=str(file), rounds=1), tmp_path / "run", federation)
    except InvalidArgument as error:
        said = str(error)
    assert not mark.exists(), "code of the file ran"
    assert "net.keras cannot be read as a Keras model: " in said and not (tmp_path / "run").exists()
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_one_line(name, federation, tmp_path):
    make, said = WRONG[name]
    with pytest.raises(InvalidArgument, match=f"net.keras cannot be read as a Keras model: .*{said}") as refused:
        load_network("net.keras", make())
    assert len(str(refused.value).splitlines()) == 1


def convolutions():
    x = keras.Input((8, 8, 1))
    y = layers.Conv2D(4, 3, activation="relu", kernel_regularizer="l2")(x)
    y = layers.BatchNormalization(trainable=False)(y * 2.0 + 1.0)
    y = layers.Concatenate()([y, layers.Activation("swish")(y)])
    return keras.Model(x, layers.Dense(3, kernel_constraint="max_norm")(layers.Flatten()(y[:, ::2])))


def compiled():
    model = small()
    model.compile(loss=lambda y, p: keras.losses.mse(y, p), optimizer="sgd")
    return model


GOOD = {
    "sequential": small,
    "nested": lambda: keras.Sequential([keras.Input((4,)), small(), layers.Dense(2)]),
    "functional": convolutions,
    "recurrent": lambda: keras.Sequential(
        [keras.Input((5, 2)), layers.Bidirectional(layers.LSTM(3)), layers.Dense(2, activation=keras.activations.relu)]
    ),
    "compiled with a function of the user": compiled,
    "MobileNet": lambda: keras.applications.MobileNetV3Small(
        input_shape=(32, 32, 3), weights=None, include_top=False, pooling="avg"
    ),
}


@pytest.mark.parametrize("name", slow_but(GOOD, *(set(GOOD) - {"MobileNet"})))
@pytest.mark.parametrize("kind", [".keras", ".h5"])
def test_a_good_file_is_loaded_as_it_was_saved(name, kind):
    if kind == ".h5" and name in ("functional", "MobileNet") and not KERAS_2:
        pytest.skip("Keras 3 cannot read arithmetic between layers in HDF5")
    model = GOOD[name]()
    loaded = load_network("net.keras", saved(model, kind))
    x = np.random.default_rng(0).normal(size=(2, *model.input_shape[1:])).astype("float32")
    np.testing.assert_array_equal(loaded(x), model(x))


def test_a_class_that_the_user_registered_is_loaded():
    @keras.saving.register_keras_serializable("test_network_file")
    class Twice(layers.Layer):
        def call(self, x):
            return 2 * x

    x = np.ones((2, 4), np.float32)
    model = small(Twice())
    content = saved(model)
    np.testing.assert_array_equal(load_network("net.keras", content)(x), model(x))
    objects = keras.saving.get_custom_objects()
    objects.pop(keras.saving.get_registered_name(Twice))
    with pytest.raises(InvalidArgument, match=r"layers\[2\].class_name is 'Twice'.*Keras.*if you made it, use --allow"):
        load_network("net.keras", content)
