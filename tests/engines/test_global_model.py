"""The model that methods keep for everyone, beside the one that a client predicts with: what is scored, and where."""

import csv
from functools import cache

import numpy as np
import pytest

from helpers import small_runs as runs
from helpers import toys
from helpers.marks import slow_but
from tfpfl import Sampling, SplitModel, Training, build_algorithm
from tfpfl.runs.run import Run

WORK = {"eta": 0.2, "steps": 3}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return runs.federation(tmp_path_factory.mktemp("data") / "federation")


def evaluations(name, federation, model_name, rounds=3, **how):
    """What a run has stored, and the run."""
    population = federation.population(Sampling("fixed", 0.5), "global")
    options = how.pop("options", {})
    algorithm = build_algorithm(name, SplitModel(toys.backbone("float32")), population, **{**WORK, **options})
    loop = Training(algorithm, federation, evaluate_every=2, model_name=model_name, **how)
    loop.run(rounds)
    return loop.store.evaluations(), loop


def of(rows, model):
    return [e for e in rows if e.model == model]


@pytest.fixture(scope="module")
def fedavg(federation):
    return of(evaluations("fedavg", federation, "global")[0], "global")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model_name", "options"),
    [
        pytest.param("fedavg_ft", "fine-tuned", {"steps_ft": 4}, marks=pytest.mark.slow),
        pytest.param("fedavg_ft", "fine-tuned", {"steps_ft": 4, "part": "head"}, marks=pytest.mark.slow),
        ("ditto", "personal", {"lam": 0.5}),
        pytest.param("apfl", "personal", {}, marks=pytest.mark.slow),
        pytest.param("pgfed", "personal", {"mu": 0.0}, marks=pytest.mark.slow),
    ],
)
def test_it_is_fedavgs(federation, fedavg, name, model_name, options):
    """Of methods whose global model is FedAvg's: every client's score on every split in every evaluated round."""
    rows, _ = evaluations(name, federation, model_name, options=options)
    found = of(rows, "global")
    assert len(found) == len(fedavg) == 3 * 6 * 2
    for mine, its in zip(found, fedavg, strict=True):
        assert mine[:5] == its[:5]
        np.testing.assert_allclose(mine[5:7], its[5:7], atol=1e-5)
    own = of(rows, model_name)
    assert len(own) == len(found) and [e.loss for e in own] != [e.loss for e in found]


def test_the_algorithms_own_rows_come_first(federation):
    rows, loop = evaluations("ditto", federation, "personal")
    again = loop.evaluate(loop.server_state())
    assert [e.model for e in again] == 12 * ["personal"] + 12 * ["global"]
    assert sorted(again) == sorted(e for e in rows if e.round_num == 3 and e.model != "local copy")
    history = loop.store.history()[-1]
    for model in ("personal", "global"):
        scores = [e.accuracy for e in again if (e.model, e.split) == (model, "test")]
        assert history[f"{model} test accuracy"] == pytest.approx(np.mean(scores))


@pytest.fixture(scope="module")
def of_tff(tff, federation):
    """of_tff(name) -> what is stored of a run through TFF, which is not repeated."""
    return cache(lambda name: evaluations(name, federation, "personal", engine="tff")[0])


@pytest.mark.slow
@pytest.mark.parametrize("grouping", slow_but(["one_by_one", "auto"], "auto"))
@pytest.mark.parametrize("name", slow_but(["ditto", "fedrod", "pgfed"], "ditto"))
def test_both_engines_score_it(of_tff, federation, name, grouping):
    local, _ = evaluations(name, federation, "personal", grouping=grouping)
    for mine, its in zip(local, of_tff(name), strict=True):
        assert mine[:5] == its[:5]
        np.testing.assert_allclose(mine[5:7], its[5:7], atol=1e-4)


@pytest.mark.slow
def test_who_predicts_with_it_scores_it_once(federation, fedavg):
    assert {e.model for e in evaluations("fedavg", federation, "global")[0]} == {"global", "local copy"}
    assert {e.model for e in evaluations("scaffold", federation, "global")[0]} == {"global", "local copy"}
    rows, _ = evaluations("scaffold", federation, "personal", options={"eval_model": "local"})
    assert {e.model for e in rows} == {"global", "personal", "local copy"}
    with pytest.raises(ValueError, match="model_name='global' is the name of the algorithm's global model"):
        evaluations("ditto", federation, "global")


@pytest.mark.slow
def test_the_table_of_clients_shows_what_they_predict_with(federation, tmp_path):
    asked = {"algorithm": "ditto", "rounds": 2, "hyperparameters": {"steps": 3, "eta": 0.2, "lam": 0.1}}
    folder = runs.train(tmp_path / "run", federation, **asked).folder
    with Run.open(folder) as run:
        rows = {e.client_id: e for e in run.store.evaluations(2) if (e.model, e.split) == ("personal", "test")}
    with open(folder / "clients.csv", newline="") as file:
        for row in csv.DictReader(file):
            assert float(row["test_loss"]) == pytest.approx(rows[int(row["client"])].loss)
    assert "global test accuracy" in (folder / "history.csv").read_text().splitlines()[0]
