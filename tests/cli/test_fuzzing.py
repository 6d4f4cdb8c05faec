"""Damaged files and strange values: an error of ours, or it works; never a stack trace, and nothing is written.

`pytest tests/cli/test_fuzzing.py --fuzz 10000` takes another number of cases. `helpers.fuzzing` damages the files;
tests/device/test_fuzzed_bundles.py does the same with bundles.
"""

import io
import json
import shutil
import sqlite3
import traceback
import zipfile

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import small_runs
from helpers.fuzzing import changed, damaged, pytest_generate_tests, quick, refused_or_fine, scalars, values  # noqa: F401
from tfpfl.cli import main, runs
from tfpfl.data import Federation
from tfpfl.data.manifest import manifest_hash
from tfpfl.models.network_file import load_network
from tfpfl.runs import store_content, store_convert
from tfpfl.runs.config import RunError, read_config
from tfpfl.runs.run import Run


@pytest.fixture
def folder(federation, tmp_path):
    """A copy of the federation, to damage."""
    return shutil.copytree(federation.path, tmp_path / "federation")


@pytest.mark.slow
def test_manifests(federation, folder, cases):
    text = (folder / "manifest.json").read_text()

    @quick(cases * 2 // 5)
    @given(damaged(text))
    @example(json.dumps(federation.manifest | {"seed": 1}).encode())  # which only the hash shows
    def one(manifest):
        (folder / "manifest.json").write_bytes(manifest)

        def read():
            found = Federation.load(folder)
            for i in range(found.num_clients):
                for split in ("train", "validation", "test"):
                    x, y = found.arrays(i, split)
                    assert len(x) == len(y) == found.num_examples(split)[i] and np.isfinite(x).all()

        if refused_or_fine(read, folder):  # then only white space or the order of entries was changed
            found = Federation.load(folder)
            assert manifest_hash(found.manifest) == found.hash == federation.hash

    one()
    (folder / "manifest.json").write_text(json.dumps(federation.manifest, indent=1, sort_keys=True))
    assert Federation.load(folder).hash == federation.hash


def use(found):
    """Everything that is done with a federation before a round."""
    found.describe()
    found.class_counts()
    found.population()
    read = found.cohort_reader()
    for i in range(found.num_clients):
        for split in ("train", "validation", "test"):
            x, y = found.arrays(i, split)
            assert len(x) == len(y) == found.num_examples(split)[i]
        np.testing.assert_array_equal(read([i])[1], found.arrays(i)[1])


def test_manifests_that_were_hashed_again(folder, cases):
    text = (folder / "manifest.json").read_text()

    @quick(cases * 2 // 5)
    @given(changed(text))
    def one(case):
        manifest, ways = case
        try:
            manifest["hash"] = manifest_hash(manifest)
        except ValueError:  # NaN
            pass
        (folder / "manifest.json").write_text(json.dumps(manifest))
        ways = [*ways, ("JSON",)]
        refused_or_fine(lambda: use(Federation.load(folder)), folder, ways, "manifest")

    one()


@pytest.mark.slow
def test_configurations(federation, tmp_path, cases):
    folder = tmp_path / "run"
    with Run.create(small_runs.config(rounds=2), folder, federation) as run:
        run.train()
    text = (folder / "config.json").read_text()

    @quick(cases * 3 // 10)
    @given(damaged(text))
    def one(config):
        (folder / "config.json").write_bytes(config)

        def read():
            with Run.open(folder, engine="local") as run:
                assert run.store.round_num == 2

        refused_or_fine(read, folder.parent)

    one()


def give_to(run_id, db):
    """Makes the content of a store that of another run, with the checksums that it then has."""
    db.execute("UPDATE run SET run_id = ?", (run_id,))
    for table, (column, keys) in store_convert._BLOBS.items():
        where = " AND ".join(f"{key} = ?" for key in keys)
        for data, *of in db.execute(f"SELECT {column}, {', '.join(keys)} FROM {table}").fetchall():
            crc = store_content.checksum(data, table, run_id, *of)
            db.execute(f"UPDATE {table} SET crc = ? WHERE {where}", (crc, *of))
    for t, clients, row in db.execute("SELECT round, clients, row FROM checksum JOIN history USING (round)").fetchall():
        order = "ORDER BY client, model, split"
        scores = db.execute(f"SELECT * FROM evaluation WHERE round = ? {order}", (t,)).fetchall()
        names = [name for (name,) in db.execute("SELECT name FROM matrix WHERE round = ?", (t,))]
        sums = store_content.sums(run_id, t, json.loads(clients), row, scores, names)
        db.execute("REPLACE INTO checksum VALUES (?, ?, ?, ?, ?, ?)", sums)


@pytest.mark.slow
def test_configurations_of_a_store_with_their_hash(federation, tmp_path, cases):
    """Whoever sends a run folder can also write the new `run_id` into its store, and compute all checksums again."""
    folder = tmp_path / "run"
    small_runs.train(folder, federation, rounds=2)
    text = (folder / "config.json").read_text()

    @quick(cases // 5)
    @given(changed(text))
    def one(case):
        config, ways = case
        (folder / "config.json").write_text(json.dumps(config))
        try:
            run_id = read_config(folder).run_id
        except RunError:
            run_id = ""
        db = sqlite3.connect(folder / "state.sqlite", isolation_level=None)
        with db:
            db.execute("BEGIN")
            give_to(run_id, db)
        db.close()

        def read():
            with Run.open(folder, engine="local") as run:
                run.training().server_state()
                run.changed_versions, run.results()

        refused_or_fine(read, folder.parent, ways, "configuration")

    one()


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that is written if a module `evil` is imported."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nrun = Dense = print\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return tmp_path / "mark"


def named(module, name, config):
    return {"module": module, "class_name": name, "config": config, "registered_name": name}


HOSTILE = st.sampled_from(
    [
        named("evil", "Dense", {}),
        named("evil", "function", "run"),
        named("builtins", "function", "eval"),
        named("keras.layers", "Lambda", {"function": "print"}),
        named("keras.layers", "TFOpLambda", {"function": "io.write_file"}),
        named("keras.layers", "TFSMLayer", {"filepath": "evil"}),
        {"class_name": "__lambda__", "config": {"value": "4wAAAA=="}},
    ]
)


def test_network_files(tmp_path, cases, mark):
    model = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            keras.layers.Conv2D(3, 2, activation="relu", kernel_regularizer="l2"),
            keras.layers.Flatten(),
            keras.layers.Dense(5, kernel_constraint="max_norm"),
        ]
    )
    model.save(tmp_path / "net.keras")
    with zipfile.ZipFile(tmp_path / "net.keras") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}

    @quick(cases * 2 // 5)
    @given(changed(parts["config.json"], st.one_of(HOSTILE, values)), st.integers(0, 4), st.data())
    def one(case, how, data):
        config, ways = case
        ways = [*ways, ("model",)]
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name, part in (parts | {"config.json": json.dumps(config)}).items():
                archive.writestr(name, part)
        content = bytearray(content.getvalue())
        if how == 0:  # bytes of the file, and not values of its configuration
            for _ in range(data.draw(st.integers(1, 3))):
                content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))

        def load():
            load_network("net.keras", bytes(content))(np.zeros((1, 4, 4, 1), np.float32))

        refused_or_fine(load, tmp_path, ways, "network")
        assert not mark.exists()

    one()


numbers = st.one_of(
    st.integers(-3, 30).map(str),
    st.floats().map(str),
    st.sampled_from(["1e400", "2147483648", "-0", "", "x", "0x10", "٣"]),
)
OPTIONS = {
    **dict.fromkeys(
        ["--rounds", "--seed", "--data-seed", "--clients", "--evaluate-every", "--patience", "--new-clients", "--tau"],
        numbers,
    ),
    **dict.fromkeys(
        ["--participation", "--validation", "--beta", "--rho", "--dropout", "--jitter", "--client-seconds"], numbers
    ),
    **dict.fromkeys(["--round-deadline", "--max-norm", "--clip-norm", "--classes-per-client"], numbers),
    "--algorithm": st.sampled_from(["pflego", "fedavg", "pflegoo", "", "local", "fedamp"]),
    "--preset": st.sampled_from(["exact", "code", "fast", ""]),
    "--partition": st.sampled_from(["dirichlet", "iid", "natural", "robin", "pathological", "quantity_skew"]),
    "--dataset": st.sampled_from(["digits", "digit", "mnistt", "/", "omniglot?"]),
    "--network": st.sampled_from(["mlp200", "mlp", "x.keras", "cifar_2conv", ""]),
    "--sampling": st.sampled_from(["fixed", "binomial", "range", "poisson"]),
    "--labels": st.sampled_from(["local", "global", "own"]),
    "--joins": st.sampled_from(["3:1", "3", "x:1", "0:1", "2:99", "1:1,2,"]),
    "--leaves": st.sampled_from(["3:1", "-1:2", "9:0"]),
    "--on-broken": st.sampled_from(["stop", "reject", "ignore"]),
    "--aggregator": st.sampled_from(["median", "clip", "mean", "trimmed_mean"]),
    "--aggregator-args": st.sampled_from(["trim=0.1", "trim=9", "trim", "=", "norm=nan"]),
    "--grouping": st.sampled_from(["one_by_one", "fused", "stacked", "all"]),
    "--engine": st.sampled_from(["local", "local", "jax"]),
    "--head-init": st.sampled_from(["glorot", "zeros", "ones"]),
    "--unknown": st.just("1"),
}


def test_command_lines(tmp_path, cases, monkeypatch):
    """Everything of `tfpfl run` but the training itself."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setattr(runs, "_train_and_print", lambda run, trackers: None)
    call, out = CliRunner(), tmp_path / "out"
    several = st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=4, unique=True)

    @quick(cases * 3 // 10)
    @given(several.flatmap(lambda names: st.tuples(*(st.tuples(st.just(n), OPTIONS[n]) for n in names))))
    def one(options):
        words = [word for pair in options for word in pair]
        found = call.invoke(main, ["run", "--clients", "5", *words, "--out", str(out)])
        if found.exit_code == 0:
            assert (out / "config.json").exists()
        else:
            wrong = found.exception is not None and not isinstance(found.exception, SystemExit)
            assert not wrong, "".join(traceback.format_exception(found.exception)) + str(words)
            assert found.output.splitlines()[-1].startswith("Error: ") and not out.exists()
        shutil.rmtree(out, ignore_errors=True)

    one()
