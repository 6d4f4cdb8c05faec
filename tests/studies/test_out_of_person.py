"""Models on other people's data, calibration and conformal sets: against Keras, and against counting."""

import numpy as np
import pytest

from helpers import small_runs as runs
from tfpfl.runs.metric_functions import ece, nll
from tfpfl.runs.run import Run
from tfpfl.studies.out_of_person import Exchange, _Outputs, calibration, exchange, nonconformity, threshold


def test_the_threshold_is_the_order_statistic_of_split_conformal_prediction():
    scores = np.array([0.5, 0.1, 0.4, 0.2, 0.3, 0.6, 0.7, 0.8, 0.9])  # n = 9
    assert [threshold(scores, a) for a in (0.1, 0.2, 0.5, 0.85)] == [0.9, 0.8, 0.5, 0.2]
    assert threshold(scores, 0.05) == np.inf == threshold(np.zeros(0), 0.5)
    diverged = np.append(scores, np.nan)  # the largest of ten
    assert [threshold(diverged, a) for a in (0.2, 0.1)] == [0.9, np.inf]


def test_coverage_of_exchangeable_scores_is_exact():
    """Of n + 1 different numbers, each may be the new one; m of them are at most the m-th smallest of the others."""
    for n, alpha in ((9, 0.2), (6, 0.35)):
        m = int(np.ceil((n + 1) * (1 - alpha) - 1e-9))
        numbers = np.arange(n + 1.0)
        inside = [numbers[last] <= threshold(np.delete(numbers, last), alpha) for last in range(n + 1)]
        assert np.mean(inside) == m / (n + 1) >= 1 - alpha


def test_nonconformity_is_1_minus_the_probability():
    z = np.log(np.array([[0.2, 0.3, 0.5], [0.9, 0.05, 0.05]])) + 700
    np.testing.assert_allclose(nonconformity(None, z), [[0.8, 0.7, 0.5], [0.1, 0.95, 0.95]], atol=1e-12)
    np.testing.assert_allclose(nonconformity(np.array([1, 0]), z), [0.7, 0.1], atol=1e-12)
    assert nonconformity(np.zeros(0, int), np.zeros((0, 3))).shape == (0,)


def test_others_are_the_clients_that_have_examples():
    score = np.array([[0.9, 0.1, np.nan], [0.3, 0.8, np.nan], [0.5, 0.7, np.nan]])
    found = Exchange(np.arange(3), score, None)
    np.testing.assert_allclose(found.own, [0.9, 0.8, np.nan])
    np.testing.assert_allclose(found.others, [0.1, 0.3, 0.6])


@pytest.mark.slow
def test_a_client_whose_model_diverged_spoils_nobody_elses_sets(a_run, monkeypatch):
    with Run.open(a_run) as run:
        before, own = calibration(run, alpha=0.2), _Outputs.own
        pooled = calibration(run, alpha=0.4, pooled=True)

        def diverged(self, client, split):
            labels, z = own(self, client, split)
            return labels, np.full_like(z, np.nan) if client == before.client_ids[0] else z

        monkeypatch.setattr(_Outputs, "own", diverged)
        after, together = calibration(run, alpha=0.2), calibration(run, alpha=0.4, pooled=True)
    for name in ("ece", "nll", "coverage", "set_size"):
        np.testing.assert_array_equal(getattr(after, name)[1:], getattr(before, name)[1:], err_msg=name)
    assert (after.ece[0], after.nll[0], after.coverage[0]) == (np.inf, np.inf, 1)  # all classes are in the set
    assert together.coverage[0] == together.set_size[0] == 0  # the common threshold is finite
    assert (together.coverage[1:] >= pooled.coverage[1:]).all() and together.set_size[1:].min() > 0


@pytest.mark.slow
def test_it_is_what_the_clients_models_in_keras_say(a_run):
    with Run.open(a_run) as run:
        found, federation = exchange(run), run.federation
        for i in (0, 3):
            model, classes = run.keras_model(i, inputs="decoded", outputs="logits"), federation.classes(i)
            z = {j: np.asarray(model(federation.arrays(j, "test")[0])) for j in range(6)}
            for j in range(6):
                right = classes[z[j].argmax(1)] == federation.raw(j, "test", "global")[1]
                assert abs(found.score[i, j] - right.mean()) < 1e-9
            assert abs(found.others[i] - np.delete(found.score[i], i).mean()) < 1e-12
            held = federation.arrays(i, "validation")
            limit = threshold(nonconformity(held[1], np.asarray(model(held[0]))), 0.5)
            y, sets = federation.arrays(i, "test")[1], nonconformity(None, z[i]) <= limit
            one = calibration(run, alpha=0.5)
            assert np.isfinite(limit) and one.aim == 0.5
            numbers = [ece(y, z[i]), nll(y, z[i]), sets[np.arange(len(y)), y].mean(), sets.sum(1).mean()]
            np.testing.assert_allclose([each[i] for each in one[1:5]], numbers, atol=1e-5)
        assert found.score.shape == (6, 6)
        together = calibration(run, alpha=0.2, pooled=True)
        assert 0.5 <= np.nanmean(together.coverage) <= 1
        with pytest.raises(ValueError, match="alpha must lie in .0, 1., found 1"):
            calibration(run, alpha=1)


def test_without_validation_examples_there_is_no_calibration(tmp_path):
    with runs.train(tmp_path / "run", runs.federation(tmp_path / "f", validation=0.0), rounds=1) as run:
        for pooled in (True, False):
            with pytest.raises(ValueError, match="this run's federation has none: make it with a larger validation"):
                calibration(run, pooled=pooled)


@pytest.mark.slow
def test_own_scores_of_a_method_without_a_head_are_those_of_its_evaluation(tmp_path):
    """kNN-Per predicts with its examples beside the head, and so it does on other people's data."""
    data = runs.federation(tmp_path / "data")
    settings = {"algorithm": "knn_per", "rounds": 2, "hyperparameters": {"eta": 0.1, "steps": 3}}
    runs.train(tmp_path / "run", data, labels="global", **settings)
    with Run.open(tmp_path / "run") as run:
        last = {e.client_id: e.score for e in run.store.evaluations() if e.round_num == 2 and e.split == "test"}
        found = exchange(run)
        np.testing.assert_allclose(found.own, [last[int(i)] for i in found.client_ids], atol=1e-6)
        assert np.isfinite(found.others).all() and np.isfinite(calibration(run, pooled=True).nll).all()
        with pytest.raises(ValueError, match="knn_per predicts with more than the weights"):
            run.keras_model(0)
