"""What any test may ask for, the order in which files run, and what is said of those that were skipped."""

import gc
import importlib.util
import json
import os
import random
import resource
import shutil
import sys
import zlib
from collections import Counter
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before anything imports TensorFlow
if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":  # as many processes as cores: more threads only wait
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

import pytest

from helpers import parts

# TensorFlow's modules and graphs are millions of objects that live on: Python looks through them less often.
gc.set_threshold(100_000, 50, 1000)

DURATIONS = Path(__file__).parent / "durations.json"


# Folders that whoever runs the tests may give to them; without one, the tests that need it are skipped.
GIVEN = {
    "TFDS_DATA_DIR": "data sets that tfds.load has prepared",
    "TFPFL_PEOPLE": "data of real people, see docs/people_data.md",
    "TFPFL_TRUTH": "what another's code computed",
}


def pytest_configure():
    """Refuses a folder that was given and is not there: all tests that need it would be skipped, and no test fail."""
    for name, what in GIVEN.items():
        if (where := os.environ.get(name)) and not Path(where).expanduser().is_dir():
            raise pytest.UsageError(
                f"{name} must name the folder with {what}, but {where!r} is no folder (looked for from {Path.cwd()}). "
                "All tests that need it would be skipped, and none would fail. Correct the path; or unset "
                f"{name}, if they shall be skipped"
            )


@pytest.fixture(autouse=True)
def same_draws_in_every_run_of_a_test(request):
    """What a test draws without a seed, such as the initial weights of a Keras layer, depends on its name alone."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "keras" in sys.modules:  # else there is nothing yet that draws, and some tests do without TensorFlow
        sys.modules["keras"].utils.set_random_seed(seed)


@pytest.fixture(scope="session")
def tfds_data():
    """`tfds_data("mnist")`: TFDS_DATA_DIR, which holds this TFDS data set; skips the test where it is not prepared."""

    def folder(name: str) -> Path:
        root = os.environ.get("TFDS_DATA_DIR")
        if not root:
            pytest.skip("data sets are not here (set TFDS_DATA_DIR)")
        place = Path(root).expanduser()
        if not (place / name).is_dir():
            pytest.skip(f"{name} is not in TFDS_DATA_DIR")
        return place

    return folder


@pytest.fixture(scope="session")
def tff():
    """The module tensorflow_federated; skips the test where it is not installed, fails where it does not import."""
    if importlib.util.find_spec("tensorflow_federated") is None:
        pytest.skip("TensorFlow Federated is not installed (requirements.lock has it)")
    import tensorflow_federated

    return tensorflow_federated


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Nothing is written outside the test's own folder."""
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def six_clients(tmp_path_factory):
    """The federation of `small_runs`, for tests that do not change it."""
    from helpers import small_runs

    return small_runs.federation(tmp_path_factory.mktemp("six_clients") / "federation")


@pytest.fixture
def short_end(monkeypatch):
    """Runs evaluate each of their last two rounds, not of their last ten: few rounds then show what happens before."""
    from helpers import small_runs

    monkeypatch.setattr("tfpfl.runs.protocols.LAST_ROUNDS", small_runs.SHORT_END)


@pytest.fixture(scope="session")
def shared_run(six_clients, tmp_path_factory):
    """A finished run of PFLEGO, seven rounds with a `short_end`; evaluated in 3, 6 and 7. `a_run` is a copy."""
    from helpers import small_runs

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tfpfl.runs.protocols.LAST_ROUNDS", small_runs.SHORT_END)
        return small_runs.train(tmp_path_factory.mktemp("shared") / "run", six_clients, rounds=7).folder


@pytest.fixture
def a_run(shared_run, short_end, tmp_path):
    """The folder of such a run, for the test to change."""
    return shutil.copytree(shared_run, tmp_path / "a_run")


def pytest_addoption(parser):
    """How hard test_fuzzing.py tries, which part of the tests to run, and whether to keep how long files took."""
    parser.addoption("--fuzz", type=int, help="Cases of damaged files and strange values (50, and 1,000 as slow).")
    parser.addoption("--part", metavar="K/N", type=parts.asked, help="Of the slow tests, those of part K of N; K < N.")
    parser.addoption("--table-part", metavar="K/N", type=parts.asked, help="Of further cases, those of part K of N.")
    parser.addoption("--fast-part", metavar="K/N", type=parts.asked, help="Of the fast tests, those of part K of N.")
    parser.addoption("--docs-part", metavar="K/N", type=parts.asked, help="Of the tests of docs, those of part K of N.")
    parser.addoption("--store-durations", action="store_true", help=f"Write CPU seconds into {DURATIONS.name}.")


# ---- files that take long start first, so that no process is left with one of them at the end


def marked(item) -> str:
    """ "docs", "table" or "slow", which `make test` leaves out; "" for a fast test, which it runs."""
    return next((name for name in ("docs", "table", "slow") if item.get_closest_marker(name)), "")


def key_of(item) -> str:
    """What durations.json has seconds for: a file's fast tests by its name; its slow ones, tables and docs apart."""
    return ", ".join(filter(None, (item.path.name, marked(item))))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session, config, items):
    """Before any test is deselected: which files have only tests that `make test` leaves out. Then the parts."""
    session.left_out = {}
    for item in items:
        session.left_out[item.path] = session.left_out.get(item.path, True) and bool(marked(item))
    others = set()
    for mark, option in (("slow", "--part"), ("", "--fast-part"), ("docs", "--docs-part")):
        others |= {*of_other_parts(items, mark, config.getoption(option))}
    if asked := config.getoption("--table-part"):  # case by case: nearly all are of a few files
        tables = [item for item in items if marked(item) == "table"]
        others |= {item for item in tables if parts.of_name(item.nodeid, asked[1]) != asked[0]}
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = [item for item in items if item not in others]


def measured() -> dict[str, int]:
    """`key_of` a test -> CPU seconds of all that have the key."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def of_other_parts(items, mark: str, asked: tuple[int, int] | None) -> list:
    """The tests with this mark whose files are of another part than the one asked for, if one is."""
    if asked is None:
        return []
    part, number = asked
    concerned = [item for item in items if marked(item) == mark]
    seconds = {key: value for key, value in measured().items() if key.partition(", ")[2] == mark}
    known = parts.by_seconds(seconds, number)
    return [item for item in concerned if parts.of_key(key_of(item), number, known) != part]


@pytest.fixture(scope="session")
def left_out(request):
    """path -> whether `make test` leaves all of its tests out; of the files of this session."""
    return request.session.left_out


@pytest.hookimpl(tryfirst=True)  # before xdist tells of the order
def pytest_collection_finish(session):
    """Files by falling CPU seconds of what will run of them; tests of a file stay together, and in their order."""
    known, seconds = measured(), Counter()
    for path, key in {(item.path, key_of(item)) for item in session.items}:
        seconds[path] += known.get(key, 10.0)
    session.items.sort(key=lambda item: (-seconds[item.path], str(item.path)))


def cpu_seconds() -> float:
    """Of this process and those that it started and that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


class Spent:
    """CPU seconds, by test at first; a fixture's count for the test that first asks for it."""

    last = 0.0
    by_key = Counter()


def pytest_runtest_logstart():
    Spent.last = Spent.last or cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report, now = (yield), cpu_seconds()
    report.key, report.cpu_seconds = key_of(item), now - Spent.last
    Spent.last = now
    return report


def pytest_runtest_logreport(report):
    if hasattr(report, "key"):  # what xdist says of a process that crashed has none
        Spent.by_key[report.key] += report.cpu_seconds


# ---- at the end


def pytest_terminal_summary(terminalreporter, config):
    """One line for what was skipped, by reason; and the seconds, where they were asked for."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        told = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"{sum(reasons.values())} skipped: {told}")
    if config.getoption("--store-durations"):
        known = measured() | {key: round(seconds) for key, seconds in Spent.by_key.items()}
        DURATIONS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        terminalreporter.write_line(f"{sum(Spent.by_key.values()):.0f} CPU seconds, kept by file in {DURATIONS.name}")
