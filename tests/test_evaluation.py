"""Results against numbers worked out by hand."""

import math

import numpy as np
import pytest

from tfpfl.client_store import Evaluation
from tfpfl.evaluation import LOCAL_COPY, evaluation_rows, find, results, summarize

NAN = math.nan


def rows(round_num, model, split, accuracies, examples, losses=None):
    losses = accuracies if losses is None else losses
    return [
        Evaluation(round_num, i, model, split, n, loss, a)
        for i, (a, n, loss) in enumerate(zip(accuracies, examples, losses, strict=True))
    ]


def test_the_four_parts_of_a_protocol():
    examples = (10, 30, 0)  # the third client has no test examples
    table = [
        *rows(1, "personal", "validation", (0.9, 0.9, 0.9), (5, 5, 5)),
        *rows(1, "personal", "test", (0.5, 0.7, NAN), examples, (2.0, 1.0, NAN)),
        *rows(2, "personal", "validation", (0.6, 0.6, 0.9), (5, 5, 5)),
        *rows(2, "personal", "test", (0.8, 0.4, NAN), examples, (1.0, 3.0, NAN)),
    ]
    found = results(table)
    assert {(r.model, r.clients, r.mean, r.when, r.split) for r in found} == {
        ("personal", "all", mean, when, split)
        for mean in ("clients", "examples")
        for when in ("last", "last10", "best_validation")
        for split in ("validation", "test")
    }

    def test(**wanted):
        return find(found, split="test", **wanted)

    assert test(mean="clients", when="last").accuracy == pytest.approx((0.8 + 0.4) / 2)
    assert test(mean="examples", when="last").accuracy == pytest.approx((10 * 0.8 + 30 * 0.4) / 40)
    assert test(mean="clients", when="last").loss == pytest.approx(2.0)
    assert test(mean="examples", when="last").loss == pytest.approx((10 * 1.0 + 30 * 3.0) / 40)
    assert test(mean="clients", when="last10").accuracy == pytest.approx((0.6 + 0.6) / 2)
    assert test(mean="examples", when="last10").accuracy == pytest.approx((0.65 + 0.5) / 2)
    # Round 1 is the best on validation (0.9 against 0.7): its test accuracy counts, whatever that is.
    assert test(mean="clients", when="best_validation").accuracy == pytest.approx(0.6)
    assert test(mean="clients", when="best_validation").rounds == [1]
    assert test(mean="examples", when="best_validation").accuracy == pytest.approx(0.65)
    # Half the interval over the two clients tested: 1.96 std / sqrt(2), std 0.1 in round 1 and 0.2 in round 2.
    assert test(mean="clients", when="last").accuracy_ci95 == pytest.approx(1.96 * 0.2 / math.sqrt(2))
    assert test(mean="clients", when="last10").accuracy_ci95 == pytest.approx(1.96 * 0.15 / math.sqrt(2))
    assert test(mean="clients", when="last10").worst_decile == pytest.approx((0.5 + 0.4) / 2)
    assert test(mean="clients", when="last").num_clients == 2
    assert find(found, split="validation", when="last", mean="clients").num_clients == 3


def test_last10_is_the_mean_of_the_last_ten_evaluated_rounds():
    rounds = [5, 10, *range(11, 21)]
    table = [e for t in rounds for e in rows(t, "personal", "test", (t / 100, t / 50), (1, 1))]
    last10 = find(results(table), when="last10", mean="clients")
    assert last10.rounds == list(range(11, 21))
    assert last10.accuracy == pytest.approx(np.mean([1.5 * t / 100 for t in range(11, 21)]))
    assert find(results(table), when="last", mean="clients").rounds == [20]


def test_best_validation_takes_the_first_of_equals_and_needs_validation():
    table = [
        e
        for t, v in ((1, 0.2), (2, 0.8), (3, 0.8))
        for e in rows(t, "personal", "validation", (v,), (4,)) + rows(t, "personal", "test", (t / 10,), (4,))
    ]
    best = find(results(table), split="test", when="best_validation", mean="clients")
    assert (best.rounds, best.accuracy) == ([2], pytest.approx(0.2))
    without = results([e for e in table if e.split == "test"])
    assert {r.when for r in without} == {"last", "last10"}
    assert {r.when for r in results(rows(1, "personal", "train", (0.5,), (4,)))} == {"last", "last10"}


def test_models_are_kept_apart():
    """Each has its own best round, and the local copy is that of the round's clients."""
    table = []
    for t, (copy, personal) in enumerate([(0.9, 0.1), (0.2, 0.3)], 1):
        for model, value in ((LOCAL_COPY, copy), ("personal", personal)):
            for split in ("validation", "test"):
                table += rows(t, model, split, (value,), (3,))
    found = results(table)
    assert find(found, model=LOCAL_COPY, when="best_validation", split="test").rounds == [1]
    assert find(found, model="personal", when="best_validation", split="test").rounds == [2]
    assert {r.clients for r in found if r.model == LOCAL_COPY} == {"sampled"}
    assert {r.clients for r in found if r.model == "personal"} == {"all"}


def test_a_round_whose_clients_have_no_test_examples_counts_as_not_evaluated():
    table = [
        *rows(1, LOCAL_COPY, "test", (0.4, 0.6), (5, 5)),
        *rows(2, LOCAL_COPY, "test", (NAN,), (0,)),
        *rows(3, LOCAL_COPY, "test", (0.8, NAN), (5, 0)),
    ]
    last10 = find(results(table), when="last10", mean="clients")
    assert (last10.accuracy, last10.rounds) == (pytest.approx((0.5 + 0.8) / 2), [1, 3])
    nobody = results(rows(1, LOCAL_COPY, "test", (NAN, NAN), (0, 0)))
    assert nobody and all(math.isnan(r.accuracy) and r.num_clients == 0 for r in nobody)


def test_a_nan_of_a_client_with_examples_stays_visible_in_the_pooled_mean():
    table = rows(1, "personal", "test", (0.5, NAN), (4, 4))
    assert math.isnan(find(results(table), mean="examples", when="last").accuracy)


def test_nothing_evaluated_gives_no_results():
    assert results([]) == [] and find([], model="personal") is None


def test_rows_from_counts():
    scores = [
        {"test_correct": 3, "test_examples": 4, "test_loss": 0.5, "train_correct": 1, "train_examples": 2,
         "train_loss": 0.7, "loss": 9.0},
        {"test_correct": 0, "test_examples": 0, "test_loss": 0.0, "train_correct": 2, "train_examples": 2,
         "train_loss": 0.1, "loss": 9.0},
    ]  # fmt: skip
    found = evaluation_rows(scores, [7, 9], 3, "personal")
    assert found[:3] == [
        Evaluation(3, 7, "personal", "train", 2, 0.7, 0.5),
        Evaluation(3, 7, "personal", "test", 4, 0.5, 0.75),
        Evaluation(3, 9, "personal", "train", 2, 0.1, 1.0),
    ]
    assert found[3][:5] == (3, 9, "personal", "test", 0)
    assert math.isnan(found[3].loss) and math.isnan(found[3].accuracy)
    assert summarize(found) == {
        ("personal", "test"): {"accuracy": 0.75, "loss": 0.5},
        ("personal", "train"): {"accuracy": 0.75, "loss": pytest.approx(0.4)},
    }
