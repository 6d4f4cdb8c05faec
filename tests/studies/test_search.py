"""Searching: what is tried, with how many rounds, and that validation alone decides."""

import io
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from helpers import small_runs as runs
from tfpfl.checks import InvalidArgument
from tfpfl.data.kinds import label_kind
from tfpfl.runs.callbacks import Callback
from tfpfl.runs.config import RunConfig, RunError
from tfpfl.runs.run import Run
from tfpfl.studies import search
from tfpfl.studies.records import Record
from tfpfl.studies.search import VALIDATION
from tfpfl.studies.tables import rungs


@pytest.fixture
def config(tmp_path):
    """Four rounds of PFLEGO on six small clients."""
    federation = runs.federation(tmp_path / "federation")
    return runs.config(rounds=4, federation=str(federation.path))


def test_a_grid_is_every_combination():
    found = search.grid({"beta": [0.1, 0.2], "tau": [1, 2, 3]})
    assert {(s["beta"], s["tau"]) for s in found} == {(b, t) for b in (0.1, 0.2) for t in (1, 2, 3)}
    assert search.grid({"tau": (number for number in (1, 2))}) == [{"tau": 1}, {"tau": 2}]


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: search.grid([0.1]), "the values must be a dict, such as .*; found list"),
        (lambda: search.grid({"beta": 0.1}), r"the values of beta must be a list, such as \[0.003, 0.01\]; found 0.1"),
        (lambda: search.grid({"beta": []}), "beta: there is no value to try"),
        (lambda: search.draws([0.1], 2, 0), "the ranges must be a dict"),
        (lambda: search.draws({"server_opt": "adam"}, 2, 0), "the values of server_opt must be a list.*found 'adam'"),
        (lambda: search.draws({"tau": []}, 2, 0), "tau: there is no value to try"),
        (lambda: search.draws({"beta": (0.1, 0.2, 0.3)}, 2, 0), r"beta: a range is a pair .*found \(0.1, 0.2, 0.3\)"),
        (lambda: search.draws({"beta": ("a", 1)}, 2, 0), "beta: a bound of its range must be a number, found 'a'"),
        (lambda: search.draws({"beta": (0.1, 1)}, 0, 0), "n must be at least 1, found 0"),
        (lambda: search.draws({"beta": (0.1, 1)}, 2, -1), "seed must be at least 0, found -1"),
        (lambda: search.rungs(0, 7, 3), "candidates must be at least 1, found 0"),
        (lambda: search.rungs(4, 100, 2.5), "factor must be a whole number >= 1, found 2.5"),
    ],
)
def test_what_cannot_be_searched_is_told(call, said):
    with pytest.raises(InvalidArgument, match=said):
        call()


def test_draws_lie_in_their_range_evenly_on_the_log_scale_and_follow_the_seed():
    ranges = {"beta": (1e-4, 1e-1), "tau": [1, 5]}
    found = search.draws(ranges, 400, seed=3)
    assert found == search.draws(ranges, 400, seed=3) != search.draws(ranges, 400, seed=4)
    logs = np.log10([s["beta"] for s in found])
    assert -4 <= logs.min() and logs.max() <= -1
    counts = np.histogram(logs, bins=[-4, -3, -2, -1])[0]
    assert (np.abs(counts - 400 / 3) < 4 * math.sqrt(400 * 2 / 9)).all()  # four standard deviations of a count
    assert all(type(s["beta"]) is float and type(s["tau"]) is int for s in found)
    with pytest.raises(ValueError, match="beta: a range needs 0 < low < high, found 0 and 1"):
        search.draws({"beta": (0, 1)}, 2, seed=0)


def test_rungs_of_successive_halving():
    assert search.rungs(9, 90, 3) == [(9, 10), (3, 30), (1, 90)]
    assert search.rungs(4, 100, 2) == [(4, 25), (2, 50), (1, 100)]
    assert search.rungs(5, 7, 1) == [(5, 7)]
    assert search.rungs(1, 7, 3) == [(1, 7)]
    assert [n for n, _ in search.rungs(10, 81, 3)] == [10, 4, 2, 1]
    with pytest.raises(ValueError, match="found 0"):
        search.rungs(3, 3, 0)


@pytest.mark.slow
def test_settings_are_ranked_by_validation_and_halving_only_adds_rounds(config, tmp_path):
    settings = search.grid({"beta": [1e-6, 0.05, 0.02, 0.01]})
    found = search.search_hyperparameters(config, settings, tmp_path / "out", factor=2)
    assert [(len(rung), rung[0].rounds) for rung in found] == [(4, 1), (2, 2), (1, 4)]
    for rung in found[:-1]:
        assert [c.accuracy for c in rung] == sorted((c.accuracy for c in rung), reverse=True)
    for rung, after in zip(found, found[1:], strict=False):
        best = [c.hyperparameters for c in rung[: len(after)]]
        assert all(c.hyperparameters in best for c in after)
    (winner,) = found[-1]
    assert Record.read(winner.folder).rounds == 4
    assert winner.accuracy == Record.read(winner.folder).result(VALIDATION).accuracy
    again = search.search_hyperparameters(config, settings, tmp_path / "out", factor=2)  # nothing is left to run
    assert again == found  # each stage is scored as it was, although its runs have been continued
    more = search.search_hyperparameters(replace(config, rounds=8), settings, tmp_path / "out", factor=2)
    assert [rung[0].rounds for rung in more] == [2, 4, 8]
    for candidate in more[0]:  # two of them had gone on to 4 rounds before
        assert candidate.accuracy == Record.read(candidate.folder).until(2).result(VALIDATION).accuracy


@pytest.mark.slow
def test_a_search_with_fewer_rounds_compares_all_settings_over_the_same_rounds(config, tmp_path, short_end):
    """A run evaluates its own last rounds, here two; one that was begun for more lacks those of a short search."""
    config = replace(config, algorithm="local", hyperparameters={"steps": 1})

    def searched(rounds, etas, out, callbacks=()):
        settings, its = search.grid({"eta": etas}), replace(config, rounds=rounds)
        (found,) = search.search_hyperparameters(its, settings, tmp_path / out, callbacks=lambda label: callbacks)
        return found

    longer = searched(4, [0.1], "out")
    shorter, fresh = searched(3, [0.1, 0.3], "out"), searched(3, [0.1, 0.3], "fresh")
    assert [c._replace(folder=None) for c in shorter] == [c._replace(folder=None) for c in fresh]
    for found in shorter:
        assert Record.read(found.folder).until(3).result(VALIDATION).rounds == [2, 3]
    assert searched(4, [0.1], "out") == longer and longer[0].folder not in [c.folder for c in shorter]
    with pytest.raises(KeyboardInterrupt):
        searched(4, [0.2], "out", [runs.Interrupt(1)])  # without an evaluation
    assert searched(1, [0.2], "out")[0].score == searched(1, [0.2], "fresh")[0].score


@pytest.mark.slow
def test_a_setting_that_a_callback_stopped_is_not_called_diverged(config, tmp_path, short_end):
    class Stop(Callback):
        def round(self, training, row):
            training.stop_reason = "enough"

    config = replace(config, algorithm="local", hyperparameters={"steps": 1})
    with pytest.raises(RunError, match="has no score after 4 rounds: .* and of these it evaluated none"):
        search.search_hyperparameters(config, [{"eta": 0.1}], tmp_path / "out", callbacks=lambda label: [Stop()])


def test_a_setting_is_there_twice_if_the_method_takes_it_as_the_same_number(config, tmp_path):
    with pytest.raises(InvalidArgument, match="a setting is there twice"):
        search.search_hyperparameters(config, [{"beta": 1}, {"beta": 1.0}], tmp_path / "out")


def test_a_search_for_a_run_with_patience_looks_at_the_score(config):
    """`monitor` says what patience looks at, and a search has none."""
    found = search.of_search(replace(config, patience=2, monitor="loss"), 4)
    assert (found.patience, found.monitor) == (None, "accuracy")


def test_a_stage_has_the_schedule_of_the_last_one(config):
    """Otherwise the rates of a stage of two rounds of eight would end at 0 in round 2."""
    assert search.of_search(replace(config, rounds=2, schedule="cosine:0.1"), 8).schedule == "cosine:0.1:8"
    assert search.of_search(replace(config, rounds=2, schedule="cosine:0.1:5"), 8).schedule == "cosine:0.1:5"


@pytest.mark.parametrize(("rounds", "name"), [(20, "base"), (19, "base-r19"), (11, "base-r11"), (21, "base")])
def test_a_run_that_was_begun_for_20_rounds_scores_its_last_ten_alone(config, rounds, name, tmp_path):
    """Rounds 11 to 20; of 19 rounds, the score would also be of round 10."""
    with Run.create(replace(config, rounds=20, evaluate_every=0), tmp_path / "base"):
        pass
    assert search.run_folder(tmp_path / "base", rounds).name == name


@pytest.mark.slow
def test_a_schedule_ends_with_the_last_stage_and_patience_is_for_other_runs(config, tmp_path):
    config = replace(config, schedule="cosine", patience=1)
    found = search.search_hyperparameters(config, search.grid({"beta": [0.05, 0.02]}), tmp_path / "out", factor=2)
    record = Record.read(found[-1][0].folder)
    assert record.config.schedule == "cosine:0.0:4" and record.rounds == 4 and record.config.patience is None
    assert found[-1][0].accuracy != next(c.accuracy for c in found[0] if c.folder == record.folder)
    longer = search.search_hyperparameters(replace(config, rounds=6), [{"beta": 0.05}], tmp_path / "out")
    assert longer[0][0].folder != record.folder  # another schedule is another run


@pytest.mark.slow
def test_a_changed_network_is_searched_anew(config, tmp_path):
    network = tmp_path / "net.py"
    scores = []
    for units in (3, 64):
        network.write_text(
            "import keras\n\n\ndef make(input_shape):\n    return keras.Sequential([keras.Input(input_shape), "
            f'keras.layers.Flatten(), keras.layers.Dense({units}, "relu")])\n'
        )
        its = replace(config, rounds=1, network=f"{network}:make")
        ((found,),) = search.search_hyperparameters(its, [{"beta": 0.05}], tmp_path / "out")
        scores.append((found.folder, Record.read(found.folder).config.network_hash))
    assert scores[0][0] != scores[1][0] and scores[0][1] != scores[1][1]


@pytest.mark.table
@pytest.mark.slow
def test_settings_may_be_texts_and_both_kinds_of_clients_are_scored(config, tmp_path, short_end):
    """The label of a run has what is searched, not all hyperparameters."""
    config = replace(config, algorithm="fedavg", rounds=1, hyperparameters={"steps": 1, "server_eta": 0.01})
    labels = []
    settings = search.grid({"server_opt": ["adam", "sgd"]})
    ((first, second),) = search.search_hyperparameters(
        config, settings, tmp_path, callbacks=lambda s: labels.append(s) or ()
    )
    assert labels == ["server_opt=adam", "server_opt=sgd"]
    record = Record.read(first.folder)
    assert first.counts == record.seen_counts() == (3, 3)
    validation = [e for e in record.evaluations if e.split == "validation" and e.model == "global"]
    for found, side in ((first.seen, True), (first.never_seen, False)):
        mine = [e.accuracy for e in validation if (e.client_id in record.took_part) == side]
        assert len(mine) == 3 and found == pytest.approx(np.mean(mine))
    assert first.accuracy == pytest.approx((first.seen + first.never_seen) / 2)
    shown = rungs([[first, second]], config)
    assert shown.headings == ["rounds", "server_opt", "accuracy, %", "seen", "never seen"]
    assert shown.cells("seen")[0] == f"{100 * first.seen:.2f} (3)"
    assert "Seen: the server had used the client's work" in shown.caption
    everybody = first._replace(never_seen=math.nan, counts=(6, 0))
    assert rungs([[everybody]], config).headings[-1] == "accuracy, %"
    assert rungs([[everybody]], config).caption == "All clients had taken part."


@pytest.mark.table
@pytest.mark.slow
def test_one_that_diverges_is_last_and_goes_no_further(config, tmp_path):
    found = search.search_hyperparameters(config, [{"rho": 1e30}, {"rho": 0.001}], tmp_path / "out", factor=2)
    assert math.isnan(found[0][1].accuracy) and found[0][1].hyperparameters == {"rho": 1e30}
    assert found[-1][0].hyperparameters == {"rho": 0.001}


def test_one_that_diverges_in_a_later_stage_makes_room_for_the_next_best():
    def tried(eta, rounds, score):
        return search.Candidate({"eta": eta}, rounds, score, None)

    first = [tried(3, 1, 0.9), tried(2, 1, 0.8), tried(1, 1, 0.7), tried(4, 1, math.nan)]
    second = [tried(2, 2, 0.6), tried(3, 2, math.nan)]
    assert search.ranked([first, second]) == [second[0], first[2]]
    assert search.ranked([first, second, [tried(2, 4, math.nan)]]) == [first[2]]
    assert search.ranked([first]) == first[:3] and search.ranked([first[3:]]) == []
    told = search.about_the_diverged((c.hyperparameters, c.rounds, c.score) for c in first + second)
    assert told == ["eta=3 was among the best with fewer rounds, but diverged with 2"]


def test_searches_that_cannot_be(config, tmp_path):
    with pytest.raises(ValueError, match="nothing to search"):
        search.search_hyperparameters(config, [], tmp_path / "out")
    with pytest.raises(ValueError, match="a setting is there twice"):
        search.search_hyperparameters(config, [{"beta": 0.1}, {"beta": 0.1}], tmp_path / "out")
    with pytest.raises(ValueError, match="did you mean 'beta'"):
        search.search_hyperparameters(config, [{"bet": 0.1}], tmp_path / "out")
    without = runs.federation(tmp_path / "without", validation=0.0)
    with pytest.raises(ValueError, match="the federation has none: make it anew with tfpfl partition --validation"):
        search.search_hyperparameters(RunConfig(federation=str(without.path)), [{"beta": 0.1}], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_setting_with_which_a_client_diverged_is_not_chosen(config, tmp_path, monkeypatch):
    """Its RMSE is infinite: it is one that diverged, as that of a run that could not go on."""
    scores = {0.1: math.inf, 0.2: 2.0, 0.3: math.nan, 0.4: 1.0}
    monkeypatch.setattr(
        search, "_scores", lambda folder, its, *_: (scores[its.hyperparameters["beta"]], math.nan, math.nan, None)
    )
    monkeypatch.setattr(search, "kind_of", lambda *_: label_kind("regression"))
    first, second, _ = search.search_hyperparameters(config, [{"beta": b} for b in scores], tmp_path / "out", factor=2)
    assert [c.hyperparameters["beta"] for c in first] == [0.4, 0.2, 0.1, 0.3]
    assert [c.hyperparameters["beta"] for c in second] == [0.4, 0.2]
    told = io.StringIO()
    Console(file=told, width=200).print(rungs([first], config))
    assert told.getvalue().count("diverged") == 2


@pytest.mark.parametrize(("loss", "expected"), [(1.5, 0.8), (math.inf, math.nan), (math.nan, math.nan)])
def test_a_setting_whose_models_diverged_has_no_score(loss, expected, monkeypatch, tmp_path):
    """Outputs that are not finite have an accuracy, too: that of one class. It was ranked first."""
    found = SimpleNamespace(rounds=[1, 2], score=0.8, loss=loss)
    record = SimpleNamespace(until=lambda rounds: SimpleNamespace(result=lambda protocol: found))
    monkeypatch.setattr(search.Record, "read", lambda folder: record)
    assert search.score_after(tmp_path, 2) == pytest.approx(expected, nan_ok=True)
