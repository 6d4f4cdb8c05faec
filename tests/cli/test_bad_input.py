"""What cannot work is refused early, in words that say what was found, and leaves nothing behind."""

import json
import re
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
from click.testing import CliRunner

from helpers import small_runs as runs
from helpers import toys
from tfpfl import Simulation, SplitModel, build_algorithm
from tfpfl.checks import InvalidArgument, Unavailable
from tfpfl.cli import main
from tfpfl.data import Federation, load_source
from tfpfl.data.manifest import FederationError
from tfpfl.data.source import Source
from tfpfl.engines import engine
from tfpfl.runs import training
from tfpfl.runs.config import RunConfig, RunError
from tfpfl.runs.federations import open_federation
from tfpfl.runs.folders import check_state_is_here
from tfpfl.runs.run import Run
from tfpfl.runs.store import StoreError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": "pflegoo"}, "unknown algorithm 'pflegoo'; did you mean 'pflego'.*fedavg"),
        ({"preset": "papre"}, "unknown preset of pflego 'papre'; did you mean 'paper'"),
        ({"algorithm": "fedavg", "preset": "exact"}, "unknown preset of fedavg 'exact'; there are none"),
        ({"hyperparameters": {"taw": 3}}, "unknown hyperparameter of pflego 'taw'; did you mean 'tau'.*beta"),
        ({"hyperparameters": {"tau": "3"}}, "tau must be int, found '3'"),
        ({"hyperparameters": {"tau": 2.5}}, "tau must be int, found 2.5"),
        ({"hyperparameters": [1]}, "hyperparameters must be dict"),
        ({"participation": 0}, r"participation must lie in \(0, 1\], found 0"),
        ({"participation": 1.01}, r"participation must lie in \(0, 1\], found 1.01"),
        ({"participation": float("nan")}, r"participation must lie in \(0, 1\], found nan"),
        ({"sampling": "fixt"}, "unknown sampling 'fixt'"),
        ({"sampling": "range"}, "needs sampling_range, the smallest and the largest cohort"),
        ({"sampling": "range", "sampling_range": (3, 2)}, "low=3, high=2"),
        ({"sampling_range": (1, 2)}, "sampling_range needs sampling='range', found sampling='fixed'"),
        ({"rounds": 0}, "rounds must lie in 1.*found 0"),
        ({"rounds": "many"}, "rounds must be int, found 'many'"),
        ({"rounds": True}, "rounds must be int, found True"),
        ({"seed": -1}, "seed must lie in 0.*found -1"),
        ({"seed": 2**31}, "seed must lie in 0"),
        ({"evaluate_every": -1}, "evaluate_every must lie in 0.*found -1"),
        ({"patience": 0}, "patience must lie in 1.*found 0"),
    ],
)
def test_a_configuration_that_can_be_seen_to_be_wrong(given, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hyperparameters": {"tau": 0}}, "tau must be at least 1.*found 0"),
        ({"hyperparameters": {"beta": float("nan")}}, "beta must be a finite number.*found nan"),
        ({"hyperparameters": {"rule": "eq4"}}, "rule must be one of exact, eq3; found 'eq4'"),
        ({"engine": "tf"}, "unknown engine 'tf'; did you mean 'tff'"),
        ({"network": "mlp20"}, "unknown network 'mlp20'; did you mean 'mlp200'"),
        ({"network": "cifar_2conv"}, "cifar_2conv is for images .height, width, channels."),
        ({"head_init": "zero"}, "unknown head_init 'zero'"),
        ({"labels": "both"}, "unknown label space 'both'"),
        ({"sampling": "range", "sampling_range": (2, 7)}, "goes up to 7 but there are 6 clients"),
    ],
)
def test_a_run_that_cannot_be_is_not_begun(given, message, federation, tmp_path):
    with pytest.raises(ValueError, match=message):
        Run.create(RunConfig(**given), tmp_path / "run", federation)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": "digitz"}, "unknown data set 'digitz'; did you mean digits"),
        ({"partition": "dirichlt"}, "unknown partitioner 'dirichlt'; did you mean 'dirichlet'"),
        ({"clients": 4}, r"4 clients x 2 classes cannot hold all 10 classes.*at least 5 clients"),
        ({"clients": 5000, "partition": "iid"}, "more clients than examples: 5000 clients, 1442 training"),
        ({"clients": 0}, "number of clients must be an integer >= 1, found 0"),
        ({"clients": 1000, "partition": "iid"}, r"client \d+ has 1 training examples left of 1.*take fewer clients"),
        ({"partition_args": {"K": 11}, "clients": 5}, "K must lie in 1..10.*found K=11"),
        ({"partition": "natural"}, "no natural key"),
        ({"clients": 5, "validation": 1.0}, r"validation must lie in \[0, 1\), found 1.0"),
    ],
)
def test_a_partition_that_cannot_be_is_not_made(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Run.create(RunConfig(**given), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "cache").glob("*/*"))


def test_data_that_may_not_be_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="'mnist' is not in .*--allow-download"):
        Run.create(RunConfig(dataset="mnist", clients=5), tmp_path / "run")
    assert not (tmp_path / "run").exists()


X, Y = np.zeros((8, 4), np.float32), np.arange(8) % 2
PIXELS = np.arange(32, dtype=np.uint8).reshape(8, 4)


def nan(x):
    x = x.copy()
    x[5, 2] = np.nan
    return x


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({}, "there are no clients"),
        ({"a": (X, Y), "b": (X[:0], Y[:0])}, "client 'b' has no training examples"),
        ({"a": (X, Y), "b": (X[:1], Y[:1])}, "client b has 1 training examples left of 1.*at least 2"),
        ({"a": (X, Y), "b": (nan(X), Y)}, "client 'b': train examples must be finite: 1 are not, first number 5"),
        ({"a": (X, Y), "b": (X, -Y)}, r"client 'b': train labels must be class ids >= 0, found -1\.\.0: number the cl"),
        ({"a": (X, Y), "b": (X, Y / 2)}, "client 'b': train labels must be integers, found float64"),
        ({"a": (X, Y), "b": (X, Y[:3])}, "client 'b': train examples and labels differ in number: 8 and 3"),
        ({"a": (PIXELS, Y), "b": (PIXELS / 255, Y)}, r"found uint8 \(train of client 'a'\) and float32 \(tra"),
        ({"a": (PIXELS.astype(int), Y), "b": (PIXELS, Y)}, r"everywhere or nowhere, found uint8 .*'b'\) and int32"),
        ({"a": {"train": (PIXELS, Y), "test": (X, Y)}}, r"uint8 \(train of client 'a'\) and float32 \(test of c"),
        ({"a": (X, Y), "b": (X[:, :3], Y)}, r"one shape, found \(4,\) of client 'a' and \(3,\) of client 'b'"),
        ({"a": (X, Y), "b": (X[:, :0], Y)}, r"client 'b': train examples have no features: .* shape \(8, 0\)"),
        ({"a": (X, Y), "b": (X[0, 0], Y)}, r"client 'b': train must be arrays .* found shapes \(\) and \(8,\)"),
        ({"a": (X, Y), "b": (X, Y[0])}, r"client 'b': train must be arrays .* found shapes \(8, 4\) and \(\)"),
        ({"a": (X, Y), "b": ([[1, 2], [3]], Y[:2])}, "client 'b': train examples cannot be made an array"),
        (
            {"a": ([np.ones((4, 3)), np.ones((4, 4)), np.ones((4, 3))], Y[:3])},
            r"they have different shapes, \[4, 3\] \(number 0\) and \[4, 4\] \(number 1\). Give all examples one shape",
        ),
        (
            {"a": (X, Y), "b": ([[1, 2, 3], [4, 5]], Y[:2])},
            r"shapes, \[3\] \(number 0\) and \[2\] .*pad lists of tokens",
        ),
        (
            {"a": (X, Y), "b": (X + np.float64(1e300), Y)},
            r"examples must be finite as float32, whose largest number is .*: 8 are not",
        ),
        ({b"a": (X, Y), "a": (X, Y)}, "the clients b'a' and 'a' would have one name, 'a': give them different ids"),
        ({"a": (X, Y), None: (X, Y)}, "the id of a client is None, so that it is missing"),
        ({"a": (X, Y), np.float64("nan"): (X, Y)}, "the id of a client is nan, so that it is missing"),
        ({1: (X, Y), "1": (X, Y)}, "the clients 1 and '1' would have one name, '1': give them different ids"),
        ({"a": (X, Y), "b": (X, Y + 2_000_000_000)}, "labels go up to 2000000001, which would make .* at most 1000000"),
    ],
)
def test_clients_that_cannot_train(clients, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Federation.from_clients(clients, out=tmp_path / "federation")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": 1e38}, r"at most 1e\+15, because float32 overflows; .* goes up to 2e\+38 with scale=1e"),
        ({"scale": 1e300}, "Take a smaller scale"),
        ({"shift": -1e300}, "Take a smaller scale"),
        ({"scale": float("inf")}, "scale and shift must be finite"),
    ],
)
def test_examples_that_overflow(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Federation.from_clients([(X + 2, Y)], out=tmp_path / "federation", **given)
    assert list(tmp_path.iterdir()) == []
    Federation.from_clients([(X + 2, Y)], out=tmp_path / "federation", scale=1e14)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X[:, :0], Y), "training examples have no features"),
        ((X[0, 0], Y), r"training examples must be an array of numbers \[N, ...\], found float32 of shape \(\)"),
        ((X, Y[0]), r"training labels must be a vector of class ids, found shape \(\)"),
        ((X, Y, X[0, 0], Y), r"test examples must be an array of numbers"),
        ((X, Y + 2_000_000_000), "labels go up to 2000000001"),
    ],
)
def test_sources_that_cannot_be(given, message):
    with pytest.raises(InvalidArgument, match=message):
        Source.from_arrays(*given)


def test_a_key_that_is_no_vector():
    with pytest.raises(InvalidArgument, match=r"key must have one entry per training example: shape \(\) for 8"):
        Source.from_arrays(X, Y, key=3)


def test_labels_outside_the_class_set(tmp_path):
    with pytest.raises(ValueError, match="labels go up to 1, but there are only 1 class names"):
        Federation.from_clients([(X, Y)], out=tmp_path / "federation", class_names=["cat"])


def test_nan_in_a_source_made_by_hand(tmp_path):
    checked = load_source("synthetic")
    source = Source(
        "mine", "1", nan(checked.x_train), checked.y_train, checked.x_test, checked.y_test, list("0123456789")
    )
    with pytest.raises(ValueError, match=r"examples must be finite: 1 are not, the first is of client \d"):
        Federation.build(source, "iid", clients=4, out=tmp_path / "federation")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [(4, 4, 1), (4, 4)])
def test_a_backbone_whose_output_is_not_a_matrix(shape, tmp_path):
    backbone = keras.Sequential([keras.Input(shape), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"features \[N, M\]; for 2 examples this one gives \(2, 4"):
        SplitModel(backbone)
    backbone.save(tmp_path / "deep.keras")
    federation = Federation.from_clients([(np.zeros((8, *shape), np.float32), Y)] * 3, out=tmp_path / "federation")
    with pytest.raises(ValueError, match=r"features \[N, M\]"):
        Run.create(RunConfig(network=str(tmp_path / "deep.keras")), tmp_path / "run", federation)
    assert not (tmp_path / "run").exists()


def test_a_network_file_that_is_none(federation, tmp_path):
    file = tmp_path / "net.keras"
    with pytest.raises(ValueError, match="net.keras cannot be read: No such file"):
        Run.create(RunConfig(network=file), tmp_path / "run", federation)
    file.write_bytes(b"not a model")
    with pytest.raises(ValueError, match="net.keras cannot be read as a Keras model"):
        Run.create(RunConfig(network=file), tmp_path / "run", federation)
    keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]).save(file)
    with pytest.raises(ValueError, match=r"the model takes examples of shape \(5,\), the federation's are \(4,\)"):
        Run.create(RunConfig(network=file), tmp_path / "run", federation)
    assert not (tmp_path / "run").exists()


def in_little_address_space(*arguments):
    """What a Python that may take 1 GB of addresses prints and returns."""
    limited = ["sh", "-c", 'ulimit -v 1048576 && exec "$@"', "sh"]  # after a fork, gRPC may write into its output
    done = subprocess.run([*limited, sys.executable, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_too_little_address_space_for_tensorflow(tmp_path):
    """TensorFlow would abort the process, without an error."""
    needed = "TensorFlow needs an address space of .* GB or more on this machine, .* 1 GB: .*ulimit -v unlimited"
    code, _, told = in_little_address_space("-m", "tfpfl", "run", "--out", str(tmp_path / "run"))
    assert code == 1 and re.fullmatch(f"Error: {needed}`\n", told) and not (tmp_path / "run").exists()
    code, _, told = in_little_address_space("-m", "tflite_export", "export", "run", "--client", "0")
    assert code == 1 and re.fullmatch(f"Error: {needed}`\n", told)
    code, _, told = in_little_address_space("-c", "import tfpfl; print(tfpfl.Federation); tfpfl.Run")
    assert code == 1 and re.search(f"Unavailable: {needed}", told)
    for words, shown in ((["--help"], "new-clients"), (["cite", "pflego"], "@")):  # these need no TensorFlow
        code, text, _ = in_little_address_space("-m", "tfpfl", *words)
        assert code == 0 and shown in text


def test_the_tff_engine_without_tff(federation, tmp_path, monkeypatch):
    def absent():
        raise Unavailable("the TFF engine needs tensorflow-federated")

    monkeypatch.setattr(engine, "require_tff", absent)
    with pytest.raises(RuntimeError, match="the TFF engine needs tensorflow-federated"):
        Run.create(RunConfig(engine="tff"), tmp_path / "run", federation)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_folder_that_exists(a_run, federation, tmp_path):
    before = runs.saved(a_run)
    with pytest.raises(
        RunError, match=r"exists and is not empty; continue it with `tfpfl resume .*run`.*another folder .--out"
    ):
        Run.create(runs.config(), a_run, federation)
    assert runs.saved(a_run) == before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").touch()
    for taken in (tmp_path / "thesis", tmp_path / "thesis" / "chapter1.tex"):
        with pytest.raises(RunError, match="exists and is not empty. For a new run use another folder"):
            Run.create(runs.config(), taken, federation)
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter1.tex"]


def test_what_a_kill_left_of_making_a_run_is_no_run(federation, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in (("state.sqlite.lock", "4194305 2020-01-01 00:00:00\n"), ("config.json.new", '{"algo')):
        (folder / name).write_text(text)
    (folder / "method.py").write_text("# a copy\n")
    with pytest.raises(InvalidArgument, match="resnet"):
        Run.create(runs.config(network="resnet"), folder, federation)  # also after a creation that was refused
    assert {p.name for p in folder.iterdir()} == {"state.sqlite.lock", "config.json.new", "method.py"}
    Run.create(runs.config(), folder, federation).close()
    Run.open(folder).close()


@pytest.mark.parametrize("name", ["method.py", "network.py", "network.keras", "metric_gap.py", "config.json.new"])
def test_a_file_of_the_users_own_is_not_overwritten(name, federation, tmp_path):
    """Only beside the lock of a creation are such names what it left."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text("# the only copy\n")
    with pytest.raises(RunError, match="exists and is not empty. For a new run use another folder"):
        Run.create(runs.config(), folder, federation)
    assert [p.name for p in folder.iterdir()] == [name] and (folder / name).read_text() == "# the only copy\n"


RAISES = "def gap(labels, logits):\n    raise KeyError(7)\n"


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_first_round_that_fails_takes_only_its_own_files(there, federation, tmp_path, monkeypatch):
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    source, out = tmp_path / "g" / "metric_gap.py", tmp_path / "out"
    source.parent.mkdir()
    source.write_text(RAISES)
    if there:
        out.mkdir()

    def run(out):
        words = ["run", "--federation", federation.path, "--metric", f"{source}:gap", "--rounds", 1, "--out", out]
        return CliRunner().invoke(main, [str(word) for word in words])

    done = run(source.parent)
    assert done.exit_code == 1 and "is not empty" in done.output and source.read_text() == RAISES
    trained = Run.train

    def train(self, callbacks):
        (self.folder / "notes.txt").write_text("of the user")
        return trained(self, callbacks)

    assert run(out).exit_code == 1 and out.exists() == there and not (there and any(out.iterdir()))
    monkeypatch.setattr(Run, "train", train)
    assert run(out).exit_code == 1 and [p.name for p in out.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"jitter": 0.5}, "jitter=0.5 says how client_seconds vary, and client_seconds is 0"),
        ({"client_seconds_spread": 1.0}, "client_seconds_spread=1.0 says how client_seconds vary"),
        ({"sampling": "range", "sampling_range": (1, 3), "participation": 0.5}, "participation=0.5 is not used with"),
        (
            {"aggregator": "trimmed_mean", "aggregator_args": ("trim=0.1", "trim=0.2")},
            "aggregator_args has trim 2 times",
        ),
        ({"leaves": ("10:0,2",), "joins": ("20:0",)}, "client 0 leaves in round 10 and joins in round 20, .* too: 1:0"),
    ],
)
def test_an_entry_that_would_be_ignored_is_refused_in_new_runs_alone(given, message, federation, tmp_path):
    with pytest.raises(InvalidArgument, match=message):
        Run.create(RunConfig(**given), tmp_path / "run", federation)
    assert not (tmp_path / "run").exists()
    Run.create(RunConfig(), tmp_path / "run", federation).close()  # an older run may have such entries
    path = tmp_path / "run" / "config.json"
    (tmp_path / "run" / "state.sqlite").unlink()
    path.write_text(json.dumps(json.loads(path.read_text()) | given))
    Run.open(tmp_path / "run").close()


def test_a_method_that_cannot_be_fused_is_refused_before_its_first_round(federation, tmp_path):
    for how in ({"algorithm": "fedavg"}, {"on_broken": "reject"}):
        with pytest.raises(InvalidArgument, match="grouping='fused' needs .* Use grouping='auto'"):
            Run.create(RunConfig(grouping="fused", **how), tmp_path / "run", federation)
    assert not (tmp_path / "run").exists()
    Run.create(RunConfig(grouping="fused"), tmp_path / "run", federation).close()


def test_a_client_that_joins_leaves_and_joins_again(federation, tmp_path):
    for i, joins in enumerate((("1:0", "20:0"), ("5:0", "20:0"))):
        Run.create(RunConfig(leaves=("10:0",), joins=joins), tmp_path / f"{i}", federation).close()


def change(**entries):
    return lambda text: json.dumps(json.loads(text) | entries)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "config.json is damaged, it is not valid JSON"),
        (lambda text: "", "config.json is damaged, it is not valid JSON"),
        (lambda text: "[" * 100_000, "config.json is damaged, it is not valid JSON"),
        (
            lambda text: text.replace('"seed": 0', f'"seed": {"1" * 5_000}'),
            "config.json is damaged, it is not valid JSON",
        ),
        (
            lambda text: text.replace('"source": {}', f'"source": {{"a": {"[" * 400}{"]" * 400}}}'),
            "config.json is damaged: it has more than 30 levels",
        ),
        (lambda text: text.replace('"clients": 6', '"clients": 3000000000'), r"clients must lie in 0..2\^31-1"),
        (lambda text: "[1]", "not the configuration of a run: it has no format number"),
        (change(format=99), "format 99, from a newer tfpfl; this one reads up to 7"),
        (change(color="red"), "config.json is damaged, it has unknown entries color"),
        (lambda text: json.dumps({"format": 3}), "config.json is damaged, it has no entries algorithm"),
        (lambda text: json.dumps({"format": 1}), "config.json has format 1, from an older tfpfl"),
        (change(rounds="2"), "config.json is damaged: rounds must be int, found '2'"),
        (change(algorithm="pfledgo"), "config.json names a method that is not known here: unknown algorithm 'pfledgo'"),
        (change(hyperparameters={"tau": None}), "config.json is damaged: tau must be int"),
        (change(participation=0.9), "config.json and state.sqlite in .* are not of one run"),
        (change(seed=7), "config.json and state.sqlite in .* are not of one run"),
        (change(federation_hash="0" * 64), "the run was started on federation 000000000000, but"),
    ],
)
def test_a_damaged_configuration(a_run, damage, message):
    before = runs.saved(a_run)
    path = a_run / "config.json"
    intact = path.read_text()
    path.write_text(damage(intact))
    with pytest.raises(RunError, match=message):
        Run.open(a_run)
    assert runs.saved(a_run) == before
    path.write_text(intact)
    Run.open(a_run).close()  # nothing was lost, and nothing is locked


def test_not_a_run_folder(tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(RunError, match="is not a run folder: it has no config.json"):
            Run.open(folder)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_a_state_of_another_run_or_a_lost_or_damaged_one(a_run, federation, tmp_path):
    other = runs.train(tmp_path / "other", federation, rounds=1, seed=1).folder
    state = a_run / "state.sqlite"
    intact = state.read_bytes()
    shutil.copy(other / "state.sqlite", state)
    with pytest.raises(RunError, match="config.json and state.sqlite in .* are not of one run"):
        Run.open(a_run)
    state.write_bytes(intact[: len(intact) // 2 + 7])
    with pytest.raises(StoreError, match="damaged or cut off"):
        Run.open(a_run)
    state.unlink()
    with pytest.raises(RunError, match="state.sqlite is missing: the run has a history.csv, but its state is lost"):
        Run.open(a_run)
    assert not state.exists()
    state.write_bytes(intact)
    with Run.open(a_run) as run:
        assert run.store.round_num == 7
        with pytest.raises(RunError, match="another run is being created or trained in .* by this process"):
            Run.open(a_run)


def test_a_run_whose_state_is_empty_does_not_begin_again(tmp_path):
    state, history = tmp_path / "state.sqlite", tmp_path / "history.csv"
    check_state_is_here(tmp_path)  # a new run
    state.touch()
    check_state_is_here(tmp_path)  # killed while it was made
    history.write_text("\r\n")
    check_state_is_here(tmp_path)  # interrupted in round 1
    history.write_text("round,clients\r\n1,3\r\n")
    with pytest.raises(RunError, match="state.sqlite is empty: the run has a history.csv, but its state is lost"):
        check_state_is_here(tmp_path)
    state.write_bytes(b"SQLite format 3")
    check_state_is_here(tmp_path)


@pytest.mark.slow
def test_a_federation_that_was_changed_or_is_gone(tmp_path):
    federation = runs.federation(tmp_path / "federation")
    folder = runs.train(tmp_path / "run", federation, rounds=1).folder
    x = tmp_path / "federation" / "x.raw"
    intact = x.read_bytes()
    x.write_bytes(intact[:-4] + b"\x00\x00\xc0\x7f")  # NaN
    with pytest.raises(FederationError, match="x.raw was changed: its sha256"):
        Run.open(folder)
    x.write_bytes(intact[:-4])
    with pytest.raises(FederationError, match=r"is incomplete: x.raw has \d+ bytes, expected \d+"):
        Run.open(folder)
    x.write_bytes(intact)
    (tmp_path / "federation").rename(tmp_path / "moved")
    with pytest.raises(RunError, match="federation .*/federation is missing. Its data, 'arrays', or their part"):
        Run.open(folder)
    (tmp_path / "moved").rename(tmp_path / "federation")
    Run.open(folder).close()


def test_a_damaged_federation_in_the_cache_says_what_to_do():
    config = RunConfig(clients=5)
    made = open_federation(config)
    (made.path / "index.raw").unlink()
    with pytest.raises(
        FederationError, match="is incomplete: index.raw is missing.*delete that folder, and it is built again"
    ):
        open_federation(config)
    shutil.rmtree(made.path)
    assert open_federation(config).hash == made.hash


@pytest.mark.slow
def test_a_diverged_run_can_be_looked_at(federation, tmp_path):
    folder = tmp_path / "run"
    hyper = {"rho": 1e30, "server_opt": "sgd"}
    with Run.create(runs.config(hyperparameters=hyper), folder, federation) as run:
        with pytest.raises(training.DivergedError, match=r"round \d+ diverged.*client \d"):
            run.train()
    done = len(runs.saved(folder)["history"])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == done < 14 and summary["stopped"].startswith(f"round {done + 1} diverged")
    with Run.open(folder, engine="local") as run:
        assert len(run.evaluate()) == 6 * 3
        assert run.stop_reason == summary["stopped"]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:4], [0, 1, 2, 0], r"client 2 has labels 0\.\.2, but its classes are 0\.\.1"),
        (X[:4], [0, 1, -1, 0], r"client 2 has labels -1\.\.1"),
        (nan(X)[4:], [0, 1, 1, 0], "client 2 has examples that are not finite"),
        (X[:3], [0, 1, 1, 0], "client 2 has 3 examples and 4 labels"),
        (X[:0], [], "client 2 has 0 examples and 0 labels"),
    ],
)
def test_arrays_given_to_a_simulation(x, y, message):
    data = toys.toy(dtype="float32")
    simulation = Simulation(build_algorithm("pflego", data.model, data.population, tau=2))
    bad = data.visit(2)._replace(x=x, y=np.array(y, np.int32))
    state = toys.initial_states(simulation.algorithm, data.population)[2]
    with pytest.raises(ValueError, match=message):
        simulation.next(simulation.initialize(), [state], [bad])


def test_names():
    from tfpfl.checks import unknown

    assert (
        unknown("colour", "bleu", ["red", "blue"]) == "unknown colour 'bleu'; did you mean 'blue'? there are red, blue"
    )
    assert unknown("colour", "xyz", []) == "unknown colour 'xyz'; there are none"
