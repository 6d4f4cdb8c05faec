"""Results against numbers worked out by hand."""

import math

import numpy as np
import pytest

from tfpfl.data.kinds import KINDS
from tfpfl.runs import statistics
from tfpfl.runs.metrics import shown_score
from tfpfl.runs.protocols import (
    EV_ALL,
    EV_LOCAL,
    LOCAL_COPY,
    PROTOCOLS,
    Protocol,
    Score,
    as_protocol,
    curve,
    evaluation_rows,
    find,
    per_client,
    predicts,
    protocol,
    result,
    results,
    rounds_to,
    rows_of,
    summarize,
    worst,
)

NAN = math.nan
T_1 = math.tan(math.pi * 0.475)  # the 97.5 % quantile of Student's t with one degree of freedom: 12.7


def rows(round_num, model, split, accuracies, examples, losses=None):
    losses = accuracies if losses is None else losses
    return [
        Score(round_num, i, model, split, n, loss, a)
        for i, (a, n, loss) in enumerate(zip(accuracies, examples, losses, strict=True))
    ]


def first(found, **fields):
    """The first result that has these fields."""
    return next(r for r in found if all(getattr(r, name) == value for name, value in fields.items()))


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
        for when, splits in (
            ("last", ("validation", "test")),
            ("last10", ("validation", "test")),
            ("best_validation", ("validation", "test")),
            ("best_test", ("test",)),
        )
        for split in splits
    }

    def test(**wanted):
        return first(found, split="test", **wanted)

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
    # Half the interval over the two clients tested: t(1) times half the distance of their means over the rounds.
    assert test(mean="clients", when="last").accuracy_ci95 == pytest.approx(T_1 * 0.2)
    means = [np.mean(client) for client in ((0.5, 0.8), (0.7, 0.4))]
    assert test(mean="clients", when="last10").accuracy_ci95 == pytest.approx(T_1 * abs(np.diff(means)[0]) / 2)
    assert test(mean="clients", when="last10").worst_decile == pytest.approx((0.5 + 0.4) / 2)
    assert test(mean="clients", when="last").num_clients == 2
    assert first(found, split="validation", when="last", mean="clients").num_clients == 3


def test_no_round_is_chosen_for_its_training_examples():
    table = [row for t in (1, 2) for s in ("train", "validation", "test")
             for row in rows(t, "personal", s, (0.5, 0.1 * t), (5, 5))]  # fmt: skip
    found = {(r.split, r.when) for r in results(table)}
    assert {when for split, when in found if split == "train"} == {"last", "last10"}
    assert {split for split, when in found if when == "best_test"} == {"test"}
    assert result(table, EV_ALL._replace(split="train", when="best_validation")) is None


def test_one_client_has_no_interval():
    """With a cohort of one client there is none, not 0. Cohorts of one client each are as many as there are rounds."""
    alone, pair = rows(1, LOCAL_COPY, "test", (0.5,), (10,)), rows(2, LOCAL_COPY, "test", (0.5, 0.7), (10, 10))
    both, one = (first(results(table), when="last10", mean="clients") for table in ((*alone, *pair), alone))
    assert both.rounds == [1, 2] and both.accuracy == pytest.approx((0.5 + 0.6) / 2)
    # Without client 0, round 2 alone is left, with 0.7; without client 1 both rounds have 0.5.
    assert both.accuracy_ci95 == pytest.approx(T_1 * 0.1) and math.isnan(one.accuracy_ci95)
    assert shown_score(one.named, one.score, one.score_ci95) == "50.00"
    values = (0.5, 0.7, 0.9)
    table = [rows(t, LOCAL_COPY, "test", (v,), (10,))[0]._replace(client_id=t) for t, v in enumerate(values, 1)]
    found = first(results(table), when="last10", mean="clients")
    assert found.accuracy_ci95 == pytest.approx(statistics.ci95(values))


def test_an_interval_over_rounds_is_that_of_its_clients_however_many_rounds_have_them():
    """The same clients in ten rounds are no more of a sample than in one; other clients are."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0.2, 0.9, (10, 12))
    table = [e for t, row in enumerate(values, 1) for e in rows(t, "personal", "test", row, (10,) * 12)]
    for mean in ("clients", "examples"):
        assert result(table, Protocol("personal", "all", mean)).score_ci95 == pytest.approx(
            statistics.ci95(values.mean(0)), rel=1e-12
        )
    others = [e._replace(client_id=e.client_id + 12 * e.round_num) for e in table]
    half = result(others, Protocol("personal", "all")).score_ci95
    assert half == pytest.approx(statistics.ci95(values.ravel()), rel=0.1)


def test_an_interval_over_rounds_of_cohorts_has_the_true_mean_in_it():
    """100 clients, 20 of them in each of ten rounds: the mean of the rounds' intervals would be twice as wide."""
    rng, inside, ratio = np.random.default_rng(0), [], []
    for _ in range(400):
        own = rng.normal(0.8, 0.1, 100)
        rounds = []
        for _ in range(10):
            ids = rng.permutation(100)[:20]
            rounds.append((ids, own[ids] + rng.normal(0, 0.03, 20), np.full(20, 10)))
        half = statistics.rounds_ci95(rounds)
        inside.append(abs(np.mean([x.mean() for _, x, _ in rounds]) - 0.8) <= half)
        ratio.append(np.mean([statistics.ci95(x) for _, x, _ in rounds]) / half)
    assert 0.92 < np.mean(inside) < 0.98 and 1.7 < np.mean(ratio) < 2.4


def test_an_interval_is_that_of_the_mean_beside_which_it_stands():
    """One client has nearly all examples: the nine others say nearly nothing of the mean over examples."""
    table = rows(1, "personal", "test", (0.5, *[1.0] * 9), (10_000, *[10] * 9))
    pooled, plain = (
        result(table, Protocol("personal", "all", mean, "last", "test")) for mean in ("examples", "clients")
    )
    assert pooled.score == pytest.approx(5090 / 10090) and plain.score == 0.95
    t_9 = 2.2621571628
    without = [1.0, *[(5000 + 80) / 10_080] * 9]  # the mean without one of the clients
    jackknife = math.sqrt(9 / 10 * np.sum((np.array(without) - np.mean(without)) ** 2))
    assert pooled.score_ci95 == pytest.approx(t_9 * jackknife) and jackknife > 0.4
    assert plain.score_ci95 == pytest.approx(t_9 * np.std([0.5, *[1.0] * 9], ddof=1) / math.sqrt(10))


def test_the_interval_of_a_pooled_rmse_is_that_of_the_mean_square_times_the_slope_of_the_root():
    errors, examples = (1.0, 1.1, 0.9, 1.05), (5, 20, 10, 7)
    table = rows(1, "personal", "test", errors, examples)
    found = result(table, Protocol("personal", "all", "examples", "last", "test"), named=KINDS["regression"].score)
    squares = statistics.rounds_ci95([(range(4), np.square(errors), examples)])
    assert found.score_ci95 == pytest.approx(squares / (2 * found.score), rel=0.05)


def test_last10_is_the_mean_of_the_last_ten_evaluated_rounds():
    rounds = [5, 10, *range(11, 21)]
    table = [e for t in rounds for e in rows(t, "personal", "test", (t / 100, t / 50), (1, 1))]
    last10 = first(results(table), when="last10", mean="clients")
    assert last10.rounds == list(range(11, 21))
    assert last10.accuracy == pytest.approx(np.mean([1.5 * t / 100 for t in range(11, 21)]))
    assert first(results(table), when="last", mean="clients").rounds == [20]


def test_best_validation_takes_the_first_of_equals_and_needs_validation():
    table = [
        e
        for t, v in ((1, 0.2), (2, 0.8), (3, 0.8))
        for e in rows(t, "personal", "validation", (v,), (4,)) + rows(t, "personal", "test", (t / 10,), (4,))
    ]
    best = first(results(table), split="test", when="best_validation", mean="clients")
    assert (best.rounds, best.accuracy) == ([2], pytest.approx(0.2))
    without = results([e for e in table if e.split == "test"])
    assert {r.when for r in without} == {"last", "last10", "best_test"}
    assert {r.when for r in results(rows(1, "personal", "train", (0.5,), (4,)))} == {"last", "last10"}


def test_models_are_kept_apart():
    """Each has its own best round, and the local copy is that of the round's clients."""
    table = []
    for t, (copy, personal) in enumerate([(0.9, 0.1), (0.2, 0.3)], 1):
        for model, value in ((LOCAL_COPY, copy), ("personal", personal)):
            for split in ("validation", "test"):
                table += rows(t, model, split, (value,), (3,))
    found = results(table)
    assert first(found, model=LOCAL_COPY, when="best_validation", split="test").rounds == [1]
    assert first(found, model="personal", when="best_validation", split="test").rounds == [2]
    assert {r.clients for r in found if r.model == LOCAL_COPY} == {"sampled"}
    assert {r.clients for r in found if r.model == "personal"} == {"all"}


def test_a_round_whose_clients_have_no_test_examples_counts_as_not_evaluated():
    table = [
        *rows(1, LOCAL_COPY, "test", (0.4, 0.6), (5, 5)),
        *rows(2, LOCAL_COPY, "test", (NAN,), (0,)),
        *rows(3, LOCAL_COPY, "test", (0.8, NAN), (5, 0)),
    ]
    last10 = first(results(table), when="last10", mean="clients")
    assert (last10.accuracy, last10.rounds) == (pytest.approx((0.5 + 0.8) / 2), [1, 3])
    nobody = results(rows(1, LOCAL_COPY, "test", (NAN, NAN), (0, 0)))
    assert nobody and all(math.isnan(r.accuracy) and r.num_clients == 0 for r in nobody)


def test_a_nan_of_a_client_with_examples_stays_visible_in_the_pooled_mean():
    table = rows(1, "personal", "test", (0.5, NAN), (4, 4))
    assert math.isnan(first(results(table), mean="examples", when="last").accuracy)


def test_nothing_evaluated_gives_no_results():
    assert results([]) == [] and find([], EV_ALL) is None


def test_rows_from_counts():
    scores = [
        {"test_correct": 3, "test_examples": 4, "test_loss": 0.5, "train_correct": 1, "train_examples": 2,
         "train_loss": 0.7, "loss": 9.0},
        {"test_correct": 0, "test_examples": 0, "test_loss": 0.0, "train_correct": 2, "train_examples": 2,
         "train_loss": 0.1, "loss": 9.0},
    ]  # fmt: skip
    found = evaluation_rows(scores, [7, 9], 3, "personal")
    assert found[:3] == [
        Score(3, 7, "personal", "train", 2, 0.7, 0.5),
        Score(3, 7, "personal", "test", 4, 0.5, 0.75),
        Score(3, 9, "personal", "train", 2, 0.1, 1.0),
    ]
    assert found[3][:5] == (3, 9, "personal", "test", 0)
    assert math.isnan(found[3].loss) and math.isnan(found[3].accuracy)
    assert summarize(found) == {
        ("personal", "test"): {"accuracy": 0.75, "loss": 0.5},
        ("personal", "train"): {"accuracy": 0.75, "loss": pytest.approx(0.4)},
    }


def toy():
    """Two clients with 1 and 3 test examples, three rounds; what every preset gives can be worked out by hand."""
    personal = {1: (0.0, 0.8), 2: (1.0, 0.4), 3: (0.9, 0.5)}
    validation = {1: (0.9, 0.9), 2: (0.1, 0.1), 3: (0.5, 0.5)}
    shared = {1: (0.1, 0.1), 2: (0.2, 0.2), 3: (0.3, 0.5)}
    copies = {1: (1.0, None), 2: (0.5, 0.6), 3: (None, 0.2)}  # who was not in the round has none
    table = []
    for t in (1, 2, 3):
        table += rows(t, "personal", "test", personal[t], (1, 3))
        table += rows(t, "personal", "validation", validation[t], (2, 2))
        table += rows(t, "global", "test", shared[t], (1, 3))
        table += [e for e in rows(t, LOCAL_COPY, "test", copies[t], (1, 3)) if e.accuracy is not None]
    return table


TOOK_PART = {0: 1, 1: 3}  # client 0 since round 1, client 1 since round 3


@pytest.mark.parametrize(
    "name, accuracy, rounds",
    [
        ("EV-all", (0.4 + 0.7 + 0.7) / 3, [1, 2, 3]),
        ("EV-seen", (0.0 + 1.0 + 0.7) / 3, [1, 2, 3]),
        ("EV-unseen", (0.8 + 0.4) / 2, [1, 2]),  # in round 3 both clients had taken part
        ("EV-local", (1.0 + 0.55 + 0.2) / 3, [1, 2, 3]),
        ("global", (0.1 + 0.2 + 0.4) / 3, [1, 2, 3]),
        ("validated", 0.4, [1]),
        ("pflego", (1.0 + (0.5 + 3 * 0.6) / 4 + 0.2) / 3, [1, 2, 3]),
        ("pgfed", 0.7, [2]),  # rounds 2 and 3 are equal; the first counts
        ("final", 0.7, [3]),
        ("fedamp", 0.7, [2]),
        ("pfllib", 0.6, [1]),  # pooled: 2.4 / 4, against 2.2 / 4 and 2.4 / 4
    ],
)
def test_presets_by_hand(name, accuracy, rounds):
    found = find(results(toy(), TOOK_PART), protocol(name))
    assert (found.accuracy, found.rounds) == (pytest.approx(accuracy), rounds)
    assert found.protocol.selects_on_test == (name in ("pgfed", "fedamp", "pfllib"))


def test_every_preset_is_tested_above_and_says_what_it_is():
    (mark,) = test_presets_by_hand.pytestmark
    assert {case[0] for case in mark.args[1]} == set(PROTOCOLS)
    assert str(protocol("pfllib")) == (
        "the model that a client predicts with after the server's step; all clients; pooled over examples; "
        "best round on test, selected on test; test examples"
    )
    assert len({str(p.check()) for p in PROTOCOLS.values()}) == len(set(PROTOCOLS.values()))
    with pytest.raises(ValueError, match="did you mean 'EV-all'"):
        protocol("EV-al")
    with pytest.raises(ValueError, match="unknown when of a protocol 'last1'; did you mean 'last10'"):
        Protocol(when="last1").check()


def test_each_round_has_its_own_clients_that_had_taken_part():
    wanted = EV_ALL._replace(clients="seen")
    unseen = EV_ALL._replace(clients="unseen")
    assert curve(toy(), wanted, took_part=TOOK_PART) == pytest.approx({1: 0.0, 2: 1.0, 3: 0.7})
    assert curve(toy(), unseen, took_part=TOOK_PART) == pytest.approx({1: 0.8, 2: 0.4})
    assert per_client(toy(), wanted, TOOK_PART) == pytest.approx({0: 1.9 / 3, 1: 0.5})
    assert per_client(toy(), unseen, TOOK_PART) == pytest.approx({1: 0.6})
    assert worst(toy(), 0.1, wanted, TOOK_PART) == pytest.approx((0.0 + 1.0 + 0.5) / 3)
    last = find(results(toy(), TOOK_PART), unseen._replace(model="personal"))
    assert last.num_clients == 1 and math.isnan(last.accuracy_ci95)  # one client says nothing of others
    # The number is that of the last round: in the first, one client had taken part and one had not.
    seen = find(results(toy(), TOOK_PART), wanted._replace(model="personal"))
    assert seen.rounds == [1, 2, 3] and seen.num_clients == 2
    # The best round is chosen by all clients, so that both sides are of one round.
    best = [result(toy(), EV_ALL._replace(clients=c, when="best_test"), TOOK_PART) for c in ("all", "seen", "unseen")]
    assert [r.rounds for r in best] == [[2]] * 3 and [r.accuracy for r in best] == pytest.approx([0.7, 1.0, 0.4])


def test_where_all_have_taken_part_or_it_is_unknown_nothing_is_added():
    everybody = {0: 1, 1: 1}
    assert results(toy(), everybody) == results(toy(), None) == results(toy())
    assert {r.clients for r in results(toy(), TOOK_PART)} == {"all", "seen", "unseen", "sampled"}
    assert not [r for r in results(toy(), TOOK_PART) if r.when == "last" and r.clients == "unseen"]  # round 3
    seen = result(toy(), EV_ALL._replace(clients="seen"), everybody)
    assert seen.accuracy == result(toy(), EV_ALL).accuracy
    assert result(toy(), EV_ALL._replace(clients="unseen"), everybody) is None
    assert result(toy(), EV_ALL._replace(clients="seen"), None) is None


def test_the_worst_tenth_is_one_number_in_results_and_tables():
    found = find(results(toy()), EV_ALL)
    assert worst(toy(), 0.1) == found.worst_decile == pytest.approx((0.0 + 0.4 + 0.5) / 3)


def test_what_clients_predict_with():
    table = toy()
    assert predicts(table) == "personal"
    assert predicts([e for e in table if e.model != "personal"]) == "global"
    assert predicts([e for e in table if e.model == LOCAL_COPY]) is None


@pytest.mark.parametrize(
    "wrong", [{"mean": "client"}, {"when": "last_10"}, {"split": "tst"}, {"clients": "every"}, {"model": "predict"}]
)
def test_an_unknown_entry_of_a_protocol_is_refused_wherever_it_is_used(wrong):
    wanted = EV_ALL._replace(**wrong)
    calls = [lambda f=f: f(toy(), wanted) for f in (result, curve, per_client, rows_of)]
    calls += [lambda: worst(toy(), 0.1, wanted), lambda: as_protocol(wanted), lambda: find(results(toy()), wanted)]
    for call in calls:
        with pytest.raises(ValueError, match=f"unknown {next(iter(wrong))} of a protocol"):
            call()


def test_values_of_every_client():
    assert per_client(toy()) == pytest.approx({0: 1.9 / 3, 1: 1.7 / 3})
    assert per_client(toy(), EV_LOCAL) == pytest.approx({0: 0.75, 1: 0.4})  # of the rounds that each was in
    assert per_client(toy(), EV_ALL._replace(when="best_validation")) == {0: 0.0, 1: 0.8}
    assert per_client([]) == {}


@pytest.mark.parametrize("wanted", [("predicts", "sampled"), ("personal", "new"), ("local copy", "all")])
def test_clients_that_no_run_scores_have_no_numbers(wanted):
    """They had those of all clients, or of the round's, under a caption that named others."""
    wanted = Protocol(*wanted)
    assert per_client(toy(), wanted) == curve(toy(), wanted) == rows_of(toy(), wanted) == {}
    assert result(toy(), wanted) is None and find(results(toy()), wanted) is None


def test_curves_and_rounds_to_a_target():
    assert curve(toy()) == pytest.approx({1: 0.4, 2: 0.7, 3: 0.7})
    assert curve(toy(), EV_LOCAL) == pytest.approx({1: 1.0, 2: 0.55, 3: 0.2})
    assert rounds_to(toy(), 0.7) == 2
    assert rounds_to(toy(), 0.71) is None
    assert rounds_to(toy(), 0.2, protocol("global")) == 2
