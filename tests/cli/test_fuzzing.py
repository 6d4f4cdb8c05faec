"""Damaged files and strange values: an error of ours, or it works; never a stack trace, and nothing is written.

`pytest tests/cli/test_fuzzing.py --fuzz 10000` takes another number of cases.
"""

import json
import shutil
import traceback
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfpfl
from helpers import small_runs
from helpers.marks import slow_but
from tfpfl.checks import TfpflError
from tfpfl.cli import main, runs
from tfpfl.data import Federation
from tfpfl.runs.run import Run

OURS = str(Path(tfpfl.__file__).parent)


def quick(cases):
    """Settings for tests that keep their fixtures over all cases."""
    return settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([2**31, -(2**63), 2**70, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "..", "/", "nan", "0", "pflego", "digits", "\x00", "é" * 300]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def places(document, here=()):
    """Every path in a JSON document."""
    found = [here]
    children = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, child in children:
        found += places(child, (*here, key))
    return found


@st.composite
def damaged(draw, text):
    """A JSON file of which one or two values are others, missing or new; or some of whose bytes are."""
    if draw(st.integers(0, 4)) == 0:
        data = bytearray(text.encode())
        for _ in range(draw(st.integers(1, 3))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return bytes(data[: draw(st.sampled_from([len(data), len(data) // 2, len(data) - 2]))])
    document = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from([p for p in places(document) if p]))
        parent = document
        for key in way:
            parent = parent[key]
        what = draw(st.sampled_from(["other", "other", "missing", "new"]))
        if what == "missing":
            del parent[last]
        elif what == "new" and isinstance(parent, dict):
            parent[draw(st.text(min_size=1, max_size=5))] = draw(values)
        else:
            parent[last] = draw(values)
        if not document:
            break
    return json.dumps(document).encode()


def contents(folder) -> dict:
    return {p.relative_to(folder): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def is_ours(error: BaseException) -> bool:
    """Raised in this package, and a kind of error that the command line says in one line."""
    of_a_file = isinstance(error, OSError) and type(error).__module__ == "builtins"
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return (isinstance(error, TfpflError) or of_a_file) and last.startswith(OURS) and str(error)


def refused_or_fine(function, folder):
    """Whether it worked; an error must be ours, and nothing may be written."""
    before = contents(folder)
    try:
        function()
        return True
    except Exception as error:
        assert is_ours(error), "".join(traceback.format_exception(error))
        return False
    finally:
        assert contents(folder) == before


def pytest_generate_tests(metafunc):
    """100 cases, and 1,000 for those who have the time; or what --fuzz says."""
    if "cases" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--fuzz")
        metafunc.parametrize("cases", [asked] if asked else slow_but([100, 1000], 100))


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return small_runs.federation(tmp_path_factory.mktemp("fuzzing") / "federation")


def test_manifests(federation, tmp_path, cases):
    folder = tmp_path / "federation"
    shutil.copytree(federation.path, folder)
    text = (folder / "manifest.json").read_text()

    @quick(cases * 2 // 5)
    @given(damaged(text))
    def one(manifest):
        (folder / "manifest.json").write_bytes(manifest)

        def read():
            found = Federation.load(folder)
            for i in range(found.num_clients):
                for split in ("train", "validation", "test"):
                    x, y = found.arrays(i, split)
                    assert len(x) == len(y) == found.num_examples(split)[i] and np.isfinite(x).all()

        if refused_or_fine(read, folder):
            assert Federation.load(folder).hash == federation.hash or manifest != text.encode()

    one()


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
    monkeypatch.setattr(runs, "_train_and_print", lambda run: None)
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
