"""The suite: its study is valid and fair, its verdicts are those of planted gains, its page says what was found."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tfpfl
from helpers.made_records import made
from helpers.processes import alive, descendants
from tfpfl.data.people.catalog import PEOPLE
from tfpfl.runs import statistics
from tfpfl.studies.plots.forest import forest
from tfpfl.studies.study.file import Study
from tfpfl.studies.suite import SUITE, _about, networks, run_suite
from tfpfl.studies.suite.measures import FILE
from tfpfl.studies.suite.page import DataResult, markdown, page
from tfpfl.studies.suite.verdicts import Gain, chosen, gain, matrix

SEEDS = (0, 1, 2)
SHAPES = {name: people.shape for name, people in PEOPLE.items()} | {"omniglot_drawers": (28, 28, 1)}


def of_method(name, good):
    return [made(name, seed, good=good) for seed in SEEDS]


def no_measures(records):
    return {name: [{part: {"why": "not measured"} for part in ("shots", "people", "trust")}] * 3 for name in records}


def found_on(records, measures=None, **titles):
    titled = {name: of[0].title for name, of in records.items()} | titles
    return DataResult("people", records, measures or no_measures(records), titled)


def test_every_method_of_the_suite_is_searched_with_the_same_budget():
    study = Study.read(SUITE)
    assert len(study.data) == 4 and len(study.methods) == 8 and len(study.seeds) == 3
    assert {np.prod([len(values) for values in method.space.values()]) for method in study.methods} == {4}
    assert all(data.entries["new_clients"] >= 2 for data in study.data)


@pytest.mark.parametrize("data", ["fsdd", "watch", "vowels", "omniglot_drawers"])
def test_the_networks_of_the_suite_fit_their_data_and_depend_on_the_seed_only(data):
    (entries,) = [d.entries for d in Study.read(SUITE).data if d.entries["dataset"] == data]
    kernels = []
    for seed in (0, 0, 1):
        network = getattr(networks, entries["network"].rpartition(":")[2])(SHAPES[data], seed)
        assert network.output_shape == (None, 64)
        kernels.append(np.concatenate([w.ravel() for w in network.get_weights()]))
    assert np.array_equal(kernels[0], kernels[1]) and not np.array_equal(kernels[0], kernels[2])


def test_a_gain_is_that_of_the_same_client_and_seed_with_both_as_samples():
    mine, theirs = of_method("pflego", 0.5), of_method("fedavg", 0.3)
    differences = 100 * np.array(
        [
            [record.per_client()[i] - other.per_client()[i] for i in range(8)]
            for record, other in zip(mine, theirs, strict=True)
        ]
    )
    found = gain(mine, theirs)
    assert found == pytest.approx(statistics.crossed(differences))
    assert found.mean == pytest.approx(matrix(mine).mean() - matrix(theirs).mean())
    assert gain(mine[:1], theirs[:1]).half == math.inf  # one seed says nothing about seeds
    for records, client in ((mine, 0), (theirs, 7)):  # whom one of them has not scored is compared with nobody
        for record in records:
            record.evaluations[:] = [e for e in record.evaluations if e.client_id != client]
    assert gain(mine, theirs) == pytest.approx(statistics.crossed(differences[:, 1:7]))


def test_who_diverged_with_both_has_gained_nothing_and_is_not_left_out():
    mine, theirs = ([made(name, seed, kind="regression") for seed in SEEDS] for name in ("pflego", "fedavg"))
    expected = matrix(mine) - matrix(theirs)
    expected[0, 3] = 0
    for record in (mine[0], theirs[0]):
        record.evaluations[:] = [e._replace(score=math.inf) if e.client_id == 3 else e for e in record.evaluations]
    assert gain(mine, theirs) == pytest.approx(statistics.crossed(expected))


def test_planted_gains_get_the_right_verdict_and_no_gain_is_seldom_called_one():
    """Clients differ by 10 points, seeds by 1: a gain of 8 points helps; none is called 'helps' or 'hurts' in 5 %."""
    rng, wrong, right = np.random.default_rng(0), 0, 0
    for _ in range(400):
        of_client, of_seed = rng.normal(0, 10, (1, 12)), rng.normal(0, 1, (3, 1))
        noise = rng.normal(0, 2, (3, 12))
        wrong += Gain(*statistics.crossed(of_client + of_seed + noise)).verdict() in ("helps", "hurts")
        right += Gain(*statistics.crossed(12 + of_client + of_seed + noise)).verdict() == "helps"
    assert wrong <= 32 and right >= 340  # 8 % and 85 %; expected 5 % and 97 %


def test_verdicts():
    assert [Gain(m, h).verdict() for m, h in ((5, 2), (-5, 2), (0.1, 0.5), (2, 3), (2, math.inf))] == [
        "helps",
        "hurts",
        "no difference",
        "unclear",
        "unclear",
    ]
    assert Gain(0.9, 0.05).verdict() == "no difference"  # beyond doubt above 0, but less than a point
    assert chosen({"a": 0.4, "b": 0.5}) == "b" and chosen({"a": 0.4, "b": 0.5}, larger_is_better=False) == "a"


def test_the_page_says_which_method_validation_chose_and_whether_it_helps():
    records = {"local": of_method("local", 0.4), "fedavg": of_method("fedavg", 0.1), "pflego": of_method("pflego", 0.6)}
    records["ditto"] = of_method("ditto", 0.5)
    result = found_on(records)
    assert result.best == "pflego" and set(result.personal) == {"pflego", "ditto"}
    (sentence,) = result.sentences()
    assert sentence.startswith("people: the personal method that validation chooses is PFLEGO; over one model for all")
    found = result.gain("pflego", "fedavg")
    assert f"it helps ({found.mean:+.1f} ± {found.half:.1f} points)" in sentence
    html = page("Title", [result], {"seeds": "0, 1, 2"})
    text = markdown("Title", [result], {"seeds": "0, 1, 2"}, "made")
    assert sentence in text and f"helps ({found.mean:+.1f} ± {found.half:.1f})" in html
    for words in ("not measured", f"{found.mean:+.1f} ± {found.half:.1f}"):
        assert words in html and words in text
    assert html.count("<svg") == 2  # gains over each baseline


def test_the_names_of_a_study_make_no_cell_of_their_own():
    records = {name: of_method(name, good) for name, good in (("local", 0.4), ("fedavg", 0.1), ("pflego", 0.6))}
    text = markdown("<b>", [found_on(records, pflego="ours | [new](x)")], {}, "made")
    lines = [line for line in text.splitlines() if line.startswith("| ours ")]
    assert len(lines) == 4 and all(line.startswith(r"| ours \| \[new\](x) | ") for line in lines)
    assert text.startswith("# &lt;b&gt;\n")


def test_no_method_is_chosen_where_nothing_chooses():
    records = {"fedavg": of_method("fedavg", 0.1), "pflego": of_method("pflego", 0.6), "ditto": of_method("ditto", 0.5)}
    for record in records["pflego"]:
        record.evaluations[:] = [e for e in record.evaluations if e.split != "validation"]
    assert found_on(records).best == "ditto"
    (sentence,) = found_on({name: records[name] for name in ("fedavg", "pflego")}).sentences()
    assert (
        sentence == "people: no personal method is chosen, because there are no validation examples to choose one by."
    )
    (sentence,) = found_on({"fedavg": records["fedavg"]}).sentences()
    assert sentence == "people: no personal method is chosen, because none was run."
    assert "none" in page("Title", [found_on({"fedavg": records["fedavg"]})], {})


def test_the_cost_is_that_of_the_first_evaluated_round_at_the_target():
    records = {"local": of_method("local", 0.5), "pflego": of_method("pflego", 0.5)}
    result = found_on(records)
    text = markdown("Title", [result], {}, "")
    target = 0.95 * np.mean([record.result().score for record in records["local"]])
    reached = [next(r for r, v in sorted(record.curve().items()) if v >= target) for record in records["pflego"]]
    row = next(line for line in text.splitlines() if line.startswith("| PFLEGO") and "kB" in line)
    assert row.split("|")[2].strip() == f"{np.mean(reached):.0f}"


def test_a_study_may_name_its_methods_as_it_likes():
    """The baselines are FedAvg and Local whatever they are called, and one algorithm may stand there twice."""
    records = {"alone": of_method("local", 0.4), "one": of_method("fedavg", 0.3), "other": of_method("fedavg", 0.6)}
    records |= {"slow": of_method("pflego", 0.5), "fast": of_method("pflego", 0.7)}
    result = found_on(records, alone="Alone", one="One", other="Another", slow="PFLEGO, slow", fast="PFLEGO, fast")
    assert result.personal == ["slow", "fast"] and result.best == "fast" and result.gain("one", "fedavg") is None
    assert result.gain("other", "fedavg") == gain(records["other"], records["one"])
    assert result.gain("fast", "local") == gain(records["fast"], records["alone"])
    text, html = markdown("Title", [result], {}, ""), page("Title", [result], {})
    assert "chooses is PFLEGO, fast;" in text
    for words in ("PFLEGO, fast", "gain over Alone ±", "gain over One ±", "PFLEGO, slow", "Another"):
        assert words in text and words in html


@pytest.mark.parametrize(
    ("search", "told"),
    [
        ({}, "of FedAvg: 2 settings, all rounds"),
        ({"kind": "random", "settings": 5, "rounds": 3}, "2 settings, 3 rounds"),  # the list has no more
        ({"kind": "optuna", "settings": 5}, "5 settings, "),
        (None, "none"),
    ],
)
def test_a_study_may_leave_out_what_has_a_default(search, told):
    methods = {"local": {}, "fedavg": {} if search is None else {"search": {"eta": [0.1, 0.3]}}}
    content = {"run": {"rounds": 7}, "data": {"digits": {}}, "methods": methods, "search": search or {}}
    about = _about(Study.of(content))
    assert told in about["search"] and "20% of the people in each" in str(about)


def test_the_page_tells_of_budgets_that_differ():
    """A changed copy of the suite may say so: its page said that all methods have the largest."""
    methods = {name: {"search": {"eta": etas}} for name, etas in (("local", [0.1]), ("fedavg", [0.1, 0.3]))}
    content = {"data": {"digits": {}}, "methods": methods, "search": {"same_budget": False}}
    assert _about(Study.of(content))["search"].startswith("of every method: 1 to 2 settings, ")


def test_the_page_tells_the_participation_of_every_method():
    methods = {"local": {}, "fedavg": {"participation": 0.5}, "fedper": {"participation": 0.5}}
    about = _about(Study.of({"run": {"rounds": 7}, "data": {"digits": {}}, "methods": methods}))
    told = [f"7 rounds with {share} of the people in each" for share in ("20%", "50%")]
    assert f"{told[0]} (Local); {told[1]} (FedAvg, FedPer), 0 people kept out" in about["data"]


def test_errors_are_better_where_they_are_smaller_and_count_in_percent_of_the_baselines():
    """RMSE of 0.4 to 0.8: no gain is as large as a point, and 1 % is."""
    records = {
        name: [made(name, seed, good=good, kind="regression") for seed in SEEDS]
        for name, good in (("local", 0.4), ("fedavg", 0.4), ("pflego", 0.1))
    }
    measures = {
        name: [
            {
                "shots": {"why": "no"},
                "people": {"own": [0.25, 0.5], "others": [1.0, 0.5]},
                "trust": {"why": "no classes"},
            }
        ]
        * 3
        for name in records
    }
    result = found_on(records, measures)
    assert result.named.name == "rmse" and result.bound("local") == pytest.approx(
        -matrix(records["local"]).mean() / 100
    )
    (sentence,) = result.sentences()
    found = result.gain("pflego", "local")
    assert 0.1 < found.mean < 0.5 and f"over training alone (Local) it helps ({found.mean:+.3g} ± " in sentence
    assert " less RMSE)" in sentence
    text = markdown("Title", [result], {}, "")
    assert "0.375 ± " in text and "none: no classes" in text and "not reached" not in text
    assert page("Title", [result], {}).count("<svg") == 2


def test_the_forest_plot_has_a_row_for_each_gain():
    figure = forest({"one": [("PFLEGO", "pflego", 3.0, 1.0), ("Local", "local", -1.0, math.inf)]}, "points", 1.0)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["PFLEGO", "Local"]
    forest({"one": [("Mine", "mine.py:mine", 3.0, 1.0)]}, "points")  # a method of the user's own
    rows = [("PFLEGO", "pflego", 20.0, math.inf), ("Local", "local", -7.0, math.inf)]
    low, high = forest({"one": rows}, "points").axes[0].get_xlim()
    assert low < -7 and high > 20  # without intervals, the means are in view
    with pytest.raises(ValueError, match="there is no gain to draw"):
        forest({"one": []}, "points")


@pytest.mark.slow
def test_a_small_suite_runs_measures_and_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = tmp_path / "small.toml"
    study.write_text(
        'title = "Small"\nseeds = [0, 1]\n'
        '[run]\nrounds = 2\nparticipation = 1.0\n[search]\nkind = "grid"\nrounds = 1\n'
        '[data.digits]\ntitle = "digits"\ndataset = "digits"\nclients = 6\npartition_args = {K = 3}\n'
        "new_clients = 2\nvalidation = 0.2\n"
        "[methods.fedavg]\nhyperparameters = {steps = 2}\nsearch = {eta = [0.05, 0.1]}\n"
        "[methods.pflego]\nhyperparameters = {tau = 5}\nsearch = {beta = [0.05, 0.1]}\n"
        "[methods.local]\nhyperparameters = {steps = 5}\nsearch = {eta = [1e30, 1e31]}\n"
    )
    told = []
    (result,), html = run_suite(tmp_path / "out", study=study, tell=told.append)
    assert "PFLEGO" in html.read_text() and result.best == "pflego"
    text = (tmp_path / "out" / "suite.md").read_text(encoding="utf-8")
    assert "* left out: digits, Local: diverged" in text and f"--study {study} --processes 1`, seeds 0, 1." in text
    shots = result.measures["pflego"][0]["shots"]
    assert set(shots) == {"0", "1", "2", "5", "10", "20"} and len(shots["5"]) == 2
    assert len(result.measures["pflego"][1]["people"]["others"]) == 4
    assert sum("measured" in line for line in told) == 4
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob(FILE)}
    told.clear()
    run_suite(tmp_path / "out", study=study, tell=told.append)
    assert not told and before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob(FILE)}
    # What is damaged, or was measured of another number of rounds or in another way, is measured anew.
    damaged, other, older = sorted(before)[:3]
    contents = [path.read_text() for path in (damaged, other, older)]
    damaged.write_text("{")
    other.write_text(contents[1].replace('"rounds": 2', '"rounds": 1'))
    older.write_text(contents[2].replace('"epochs": 20', '"epochs": 5'))
    run_suite(tmp_path / "out", study=study, tell=told.append)
    assert sum("measured" in line for line in told) == 3
    assert [path.read_text() for path in (damaged, other, older)] == contents


MEASURING = """
import json, sys, time
from pathlib import Path
from tfpfl.studies.suite import measures

def slow(folder):
    (folder / "begun").touch()
    time.sleep(float(sys.argv[2]))
    (folder / measures.FILE).write_text(json.dumps({"of": measures._of(folder)}))

measures.measure = slow
if __name__ == "__main__":
    measures.measured([Path(folder) for folder in json.loads(sys.argv[1])], processes=1, tell=print)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_measuring_that_is_ended_ends_and_leaves_no_process_and_goes_on_later(tmp_path, how):
    """Ctrl-C, which a terminal sends to all processes, and kill -9 of the one that the user has started."""
    folders = [tmp_path / str(i) for i in range(4)]
    for folder in folders:
        folder.mkdir()
        (folder / "summary.json").write_text('{"run_id": "a", "rounds": 1}')
    script = tmp_path / "measuring.py"
    script.write_text(MEASURING)
    command = [sys.executable, str(script), json.dumps([str(folder) for folder in folders])]  # and seconds for each
    environment = os.environ | {"PYTHONPATH": str(Path(tfpfl.__file__).parents[1])}
    begun = lambda: [folder for folder in folders if (folder / "begun").exists()]  # noqa: E731
    process = subprocess.Popen([*command, "20"], env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    while not begun():
        assert process.poll() is None
        time.sleep(0.01)
    workers = descendants(process.pid)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.kill()
    assert process.wait(120) != 0
    until = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < until:
        time.sleep(0.1)
    assert workers and not any(map(alive, workers))
    assert len(begun()) < len(folders)
    subprocess.run([*command, "0"], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert all((folder / FILE).exists() for folder in folders)
