"""The advice whether clients need heads of their own: on planted populations, whose truth is known, and on runs."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from click.testing import CliRunner

from tfpfl.checks import InvalidArgument
from tfpfl.cli import main
from tfpfl.data import Federation
from tfpfl.data.kinds import ACCURACY, KINDS
from tfpfl.data.synthetic import synthetic_targets
from tfpfl.models.heads import head_kind
from tfpfl.models.weights import Head
from tfpfl.runs.config import RunConfig
from tfpfl.runs.run import Run
from tfpfl.runs.statistics import signed_rank_p
from tfpfl.studies.advice import LEVEL, HeldOut, advise, benjamini_hochberg, decide
from tfpfl.studies.records import Record
from tfpfl.studies.shared_head import Examples, fit_shared, measured

FEATURES, OUTPUTS, HELD_OUT = 6, 3, 30


def drawn(kind, features, head, rng):
    z = features @ head.kernel + head.bias
    if kind == "regression":
        return z + rng.normal(size=z.shape)
    if kind == "poisson":
        return rng.poisson(np.exp(np.clip(z / 3, -4, 3))).astype(float)
    return (z + rng.gumbel(size=z.shape)).argmax(1)


def one_head(rng, spread=1.0):
    return Head(spread * rng.normal(size=(FEATURES, OUTPUTS)), spread * rng.normal(size=OUTPUTS))


def adapted(kind, head, examples, steps=40, rate=0.3):
    """A client's own head, as methods make it: some steps of gradient descent on its training examples."""
    kernel, bias = head
    targets = examples.labels if kind != "classification" else np.eye(OUTPUTS)[examples.labels]
    for _ in range(steps):
        z = examples.features @ kernel + bias
        if kind == "regression":
            mean = z
        else:
            p = np.exp(z - z.max(1, keepdims=True))
            mean = p / p.sum(1, keepdims=True)
        error = (mean - targets) / len(z)
        kernel, bias = kernel - rate * examples.features.T @ error, bias - rate * error.sum(0)
    return Head(kernel, bias)


def population(kind, personal, seed, clients=20, train=40):
    """The held-out results of clients whose true heads are W + personal * N(0, 1)."""
    rng = np.random.default_rng([seed, int(100 * personal)])
    common, of_kind = one_head(rng), head_kind(kind)
    train = np.broadcast_to(train, clients)
    made = []
    for n in train:
        away = one_head(rng, personal)
        true = Head(common.kernel + away.kernel, common.bias + away.bias)
        x = rng.normal(size=(n + HELD_OUT, FEATURES))
        y = drawn(kind, x, true, rng)
        made.append((Examples(x[:n], y[:n]), Examples(x[n:], y[n:]), true))
    shared = fit_shared(of_kind, [its for its, *_ in made], OUTPUTS)
    found = []
    for i, (its, held_out, _) in enumerate(made):
        own = adapted(kind, shared, its)
        (own_losses, own_score), (losses, score) = (measured(of_kind, h, held_out, False) for h in (own, shared))
        found.append(HeldOut(i, f"client {i}", own_losses, losses, own_score, score))
    return decide(found, KINDS[kind].score)


def rates(kind, seeds):
    """The shares of right advice: where all have one head, and where each has its own."""
    common = [population(kind, 0.0, seed).verdict in ("none", "hurt") for seed in seeds]
    own = [population(kind, 0.7, seed).verdict == "help" for seed in seeds]
    return float(np.mean(common)), float(np.mean(own))


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_advice_is_right_in_planted_populations(kind):
    assert rates(kind, range(2)) == (1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_advice_is_right_in_95_percent_of_planted_populations(kind):
    common, own = rates(kind, range(100, 140))
    print(f"{kind}: right in {common:.1%} with one head for all, {own:.1%} with own heads")
    assert common >= 0.95 and own >= 0.95


def test_chance_is_called_help_seldom():
    """Both heads equally good, and nothing between them but noise: at most 5 % are told apart, half of them 'help'."""
    rng = np.random.default_rng(7)
    verdicts = []
    for _ in range(150):
        losses = rng.gamma(2.0, size=(20, 2, 15))
        found = [HeldOut(i, str(i), a, b, float(np.mean(a)), float(np.mean(b))) for i, (a, b) in enumerate(losses)]
        verdicts.append(decide(found, KINDS["regression"].score).verdict)
    assert 0 < 150 - verdicts.count("none") <= 0.05 * 150 and verdicts.count("help") <= 0.04 * 150


def test_clients_that_should_use_the_shared_head_are_found():
    """Five of 30 clients are planted to lose with their own head; of those named, few are others."""
    rng = np.random.default_rng(3)
    named, wrong, missed = 0, 0, 0
    for _ in range(40):
        gain = np.where(np.arange(30) < 5, -0.4, 0.25) * (np.arange(30) < 25)  # of the last five neither is better
        found = []
        for i in range(30):
            shared = rng.gamma(2.0, 0.5, size=60)
            own = shared - gain[i] + 0.6 * rng.standard_t(4, size=60)
            found.append(HeldOut(i, f"c{i}", own, shared, float(own.mean()), float(shared.mean())))
        advice = decide(found, KINDS["huber"].score)
        which = {c.client for c in advice.to_shared}
        named, wrong, missed = (
            named + len(which),
            wrong + len(which - set(range(5))),
            missed + 5 - len(which & set(range(5))),
        )
    assert wrong / named <= 0.05 and missed <= 20


def test_the_direction_of_the_score_decides():
    rng = np.random.default_rng(0)
    better, worse = rng.random(12) / 10, 0.5 + rng.random(12) / 10
    for score, own, shared in ((ACCURACY, worse, better), (KINDS["regression"].score, better, worse)):
        losses = np.ones(4)
        found = [HeldOut(i, f"c{i}", losses, losses, a, b) for i, (a, b) in enumerate(zip(own, shared, strict=True))]
        advice = decide(found, score)
        assert advice.verdict == "help" and advice.gain == pytest.approx(np.mean(worse - better))
        assert [c.better for c in advice.clients] == [""] * 12 and advice.loss_p_value == 1
    assert "personal heads help: RMSE -0.492 [-0.521, -0.464]" in advice.sentence
    assert decide(found[:5], score).verdict == "few"
    with pytest.raises(InvalidArgument, match="nothing to compare"):
        decide([], score)


def test_one_client_whose_own_model_diverged_does_not_decide():
    """Own heads are better, but that of client 3 overflows: it has the lowest rank, and no test of its own."""
    rng = np.random.default_rng(8)
    kind, x, diverged = (
        head_kind("poisson"),
        rng.normal(size=(20, 10, FEATURES)),
        Head(np.full((FEATURES, 1), 1e4), [0]),
    )
    found, ranks = [], []
    for i in range(20):
        its = Examples(x[i], rng.poisson(1.0, size=(10, 1)).astype(float))
        zero, worse = Head(np.zeros((FEATURES, 1)), [0.0]), Head(np.zeros((FEATURES, 1)), [1 + 0.01 * i])
        (own_losses, own), (losses, shared) = (
            measured(kind, head, its, False) for head in (diverged if i == 3 else zero, worse)
        )
        found.append(HeldOut(i, f"c{i}", own_losses, losses, own, shared))
        ranks.append(-1e9 if i == 3 else shared - own)
    assert found[3].own_score == np.inf and not np.isnan([c.own_losses for c in found]).any()
    advice = decide(found, KINDS["poisson"].score)
    assert advice.p_value == pytest.approx(scipy.stats.wilcoxon(ranks).pvalue)
    assert (advice.verdict, advice.gain, advice.half) == ("none", -np.inf, np.inf) and "mean deviance +inf, p=" in (
        advice.sentence
    )
    assert np.isnan(advice.clients[3].p_value) and advice.clients[3].better == ""
    assert advice.entries()["gain"] is None and advice.entries()["p_value"] == advice.p_value
    both = [c._replace(own_losses=found[3].own_losses, shared_losses=found[3].own_losses) for c in found[:8]]
    same = [c._replace(own_score=np.inf, shared_score=np.inf) for c in both]
    assert decide(same, KINDS["poisson"].score)[:3] == ("none", KINDS["poisson"].score, 0.0)


@pytest.mark.parametrize("loss", [1e3, 1e14])
def test_a_client_whose_own_head_exploded_names_no_other_client(loss):
    """Twelve clients whose own head is far better, and one with a loss of its own that is out of all bounds."""
    rng = np.random.default_rng(0)
    losses = [(rng.uniform(0.1, 0.2, 20), rng.uniform(0.4, 0.5, 20)) for _ in range(12)]
    losses.append((np.full(20, loss) * rng.uniform(1, 1.1, 20), rng.uniform(0.4, 0.5, 20)))
    found = [HeldOut(i, f"c{i}", *each, 0.9, 0.8) for i, each in enumerate(losses)]
    advice = decide(found, ACCURACY)
    assert [c.better for c in advice.clients] == ["own"] * 12 + ["shared"]
    assert [c.loss_gain > 0 for c in advice.clients] == [True] * 12 + [False]


def test_a_single_client_has_no_interval():
    only = HeldOut(0, "c0", np.ones(3), np.ones(3), 0.75, 0.5)
    assert "+25.0 points, p=1" in decide([only], ACCURACY).sentence


def test_benjamini_and_hochberg_step_up():
    rng = np.random.default_rng(5)
    for _ in range(20):
        p = np.append(rng.random(15) ** 3, np.nan)
        ranked = np.sort(p[:-1])
        below = np.flatnonzero(ranked <= 0.1 * np.arange(1, 16) / 15)
        rejected = p[:-1] <= (ranked[below[-1]] if len(below) else -1)
        assert ((benjamini_hochberg(p)[:-1] <= 0.1) == rejected).all() and np.isnan(benjamini_hochberg(p)[-1])


def test_the_shared_head_is_the_minimum():
    rng = np.random.default_rng(1)
    head = one_head(rng)
    sizes = (50, 200, 90)
    features = [rng.normal(size=(n, FEATURES)) * np.geomspace(0.1, 10, FEATURES) + 3 for n in sizes]
    for name in ("regression", "classification", "poisson", "huber:0.5", "multilabel"):
        kind, labels = head_kind(name), []
        for x in features:
            scaled = (x - 3) / np.geomspace(0.1, 10, FEATURES)
            y = drawn(name if name in ("poisson", "classification") else "regression", scaled, head, rng)
            labels.append((y > 0).astype(float) if name == "multilabel" else y)
        found = fit_shared(kind, [Examples(x, y) for x, y in zip(features, labels, strict=True)], OUTPUTS)
        x, y = np.concatenate(features), np.concatenate(labels)
        if name == "regression":
            exact = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
            predicted = [x @ exact[:-1] + exact[-1], x @ found.kernel + found.bias]
            assert np.abs(predicted[0] - predicted[1]).max() < 0.02 * predicted[0].std()
            continue
        kernel, bias = map(tf.Variable, found)
        with tf.GradientTape() as tape:
            loss = kind.loss(tf.constant(x) @ kernel + bias, tf.constant(y))
        gradients = tape.gradient(loss, [kernel, bias])
        assert np.abs(gradients[1]).max() < 1e-4  # the bias is not held back
        others = [
            kind.loss(tf.constant(x @ (found.kernel + 0.02 * d.kernel) + found.bias + 0.02 * d.bias), tf.constant(y))
            for d in (one_head(rng) for _ in range(5))
        ]
        assert float(loss) < min(map(float, others))


@pytest.mark.parametrize("name", ["regression", "quantile:0.3", "huber"])
def test_the_shared_head_does_not_depend_on_the_unit_of_the_targets(name):
    """A current in A or in uA, a price in euros or in millions: the same head, in the other unit."""
    rng = np.random.default_rng(4)
    head, x = one_head(rng), rng.normal(size=(300, FEATURES))
    y = drawn("regression", x, head, rng)
    found = {}
    for unit in (1e-9, 1.0, 1e6):
        kind = head_kind(f"huber:{0.5 * unit!r}" if name == "huber" else name)
        found[unit] = fit_shared(kind, [Examples(x, unit * y)], OUTPUTS)
    for unit, its in found.items():
        np.testing.assert_allclose(its.kernel / unit, found[1.0].kernel, atol=1e-6)
        np.testing.assert_allclose(its.bias / unit, found[1.0].bias, atol=1e-6)
    assert np.abs(found[1.0].kernel - head.kernel).max() < 0.3  # and it is the planted one, but for the noise


def test_the_test_of_a_clients_losses_does_not_depend_on_their_unit():
    rng = np.random.default_rng(6)
    losses = rng.gamma(2.0, size=(8, 2, 20))

    def adjusted(unit):
        found = [
            HeldOut(i, "", unit * a, unit * b, unit * a.mean(), unit * b.mean()) for i, (a, b) in enumerate(losses)
        ]
        return [(c.p_value, c.adjusted, c.better) for c in decide(found, KINDS["regression"].score).clients]

    assert adjusted(2.0**-60) == adjusted(1.0) == adjusted(2.0**40)
    assert [p for p, *_ in adjusted(1.0)] == [scipy.stats.ttest_rel(a, b).pvalue for a, b in losses]


def test_the_shared_head_chooses_among_a_clients_classes():
    """Otherwise a head with two outputs would beat it by knowing which two classes the client has."""
    rng = np.random.default_rng(2)
    head, kind, clients = one_head(rng), head_kind("classification"), []
    for classes in ((0, 1), (0, 2), (1, 2)) * 4:
        x = rng.normal(size=(80, FEATURES))
        z = (x @ head.kernel + head.bias)[:, classes]
        clients.append(Examples(x, np.array(classes)[(z + rng.gumbel(size=z.shape)).argmax(1)], np.array(classes)))
    shared = fit_shared(kind, clients, OUTPUTS)
    for c in clients:
        two = Head(head.kernel[:, c.classes], head.bias[c.classes])
        (true_losses, _), (losses, score) = measured(kind, two, c, True), measured(kind, shared, c, False)
        assert losses.mean() < true_losses.mean() + 0.15 and score > 0.6
        z = (c.features @ shared.kernel + shared.bias)[:, c.classes]
        assert score == np.mean(c.classes[z.argmax(1)] == c.labels)


def federation(folder, personal, sort="real"):
    clients = synthetic_targets(sort, 8, 60, personal=personal, inputs=4, noise=0.3).clients
    return Federation.from_clients(clients, targets=sort, out=folder, validation=0.3)


@pytest.mark.slow
def test_advice_on_a_run_has_the_scores_of_its_evaluation(tmp_path):
    data = federation(tmp_path / "f", 1.0)
    config = RunConfig(rounds=3, participation=0.75, hyperparameters={"rho": 0.01, "beta": 0.1, "inner_opt": "gd"})
    with Run.create(config, tmp_path / "run", data) as run:
        run.train()
        found = advise(run)
        seen = {i for i, first in run.took_part.items() if first}
    assert {c.client for c in found.clients} == seen and found.left_out == 8 - len(seen)
    last = Record.read(tmp_path / "run").per_client("validation", when="last")
    assert {c.client: c.own_score for c in found.clients} == pytest.approx({i: last[i] for i in seen}, rel=1e-4)
    done = CliRunner().invoke(main, ["advise", str(tmp_path / "run"), "--json"])
    told = json.loads(done.output)
    assert (told["score"], told["verdict"], told["split"]) == ("rmse", found.verdict, "validation")
    assert [c["own_score"] for c in told["clients"]] == pytest.approx([c.own_score for c in found.clients])
    shown = CliRunner().invoke(main, ["advise", str(tmp_path / "run"), "--split", "test"])
    assert shown.exit_code == 0 and "own RMSE" in shown.output and "p=" in shown.output


@pytest.mark.slow
@pytest.mark.parametrize(("personal", "verdicts"), [(1.5, ("help",)), (0.0, ("none", "hurt"))])
def test_advice_on_runs_of_planted_federations(personal, verdicts, tmp_path):
    data = federation(tmp_path / "f", personal)
    config = RunConfig(
        rounds=30, participation=1.0, evaluate_every=0, hyperparameters={"rho": 0.005, "beta": 0.05, "tau": 50}
    )
    with Run.create(config, tmp_path / "run", data) as run:
        run.train()
        assert advise(run).verdict in verdicts


@pytest.mark.slow
def test_methods_with_a_global_backbone_and_those_that_cannot(tmp_path, six_clients):
    for algorithm, refused in (
        ("ditto", None),
        ("fedavg_ft", None),
        ("fedavg", "one model for all"),
        ("local", "no backb"),
    ):
        config = RunConfig(algorithm=algorithm, rounds=2, participation=1.0, evaluate_every=0)
        with Run.create(config, tmp_path / algorithm, six_clients) as run:
            run.train()
            if refused:
                with pytest.raises(InvalidArgument, match=refused):
                    advise(run, "test")
            else:
                found = advise(run, "test")
                last = Record.read(tmp_path / algorithm).per_client("test", when="last")
                assert {c.client: c.own_score for c in found.clients} == pytest.approx(last, abs=1e-6)


def test_without_test_examples_it_does_not_ask_for_validation_examples():
    recipe = SimpleNamespace(row=SimpleNamespace(evaluated=lambda hyperparameters: "personal"))
    run = SimpleNamespace(
        algorithm=SimpleNamespace(shares_backbone=True),
        federation=SimpleNamespace(num_examples=lambda split: np.zeros(3, int)),
        model=SimpleNamespace(kind=None),
        config=SimpleNamespace(algorithm="pflego", hyperparameters={}),
        recipe=recipe,
    )
    for split, other in (("test", "validation"), ("validation", "test")):
        with pytest.raises(InvalidArgument, match=f"no client has {split} examples: take --split {other}, or"):
            advise(run, split)


@pytest.mark.parametrize(
    ("parts", "without"),
    [({"batch_norm": "local"}, "batch_norm='local'"), ({"adapters": "lora:2", "personal": "B"}, "personal")],
)
def test_what_keeps_a_part_of_the_backbone_is_named(parts, without, tmp_path, six_clients):
    """PFLEGO shares its backbone, so that the advice to take PFLEGO would not help."""
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    keras.Sequential(layers).save(tmp_path / "net.keras")
    config = RunConfig(participation=1.0, network=str(tmp_path / "net.keras"), **parts)
    with Run.create(config, tmp_path / "run", six_clients) as run:
        with pytest.raises(InvalidArgument, match=f"such as pflego, fedper or fedavg_ft, without {without}, and ask"):
            advise(run, "test")


def test_equal_gains_have_equal_ranks_whatever_rounding_does():
    """0.9 - 0.7 and 0.4 - 0.2 differ in the last bit. The truth is the test of tenths, which are whole numbers."""
    own, shared = [10, 10, 10, 4, 10, 10, 2, 3, 9, 0, 7], [9, 7, 9, 2, 8, 10, 0, 4, 7, 1, 5]
    differences = np.subtract(own, shared)
    truth = signed_rank_p(differences[differences != 0], "two-sided")
    same = np.ones(3)
    by_score = decide(
        [HeldOut(i, "", same, same, a / 10, b / 10) for i, (a, b) in enumerate(zip(own, shared, strict=True))], ACCURACY
    )
    assert by_score.p_value == truth < LEVEL / 2 and by_score.verdict == "help"
    by_loss = decide(
        [
            HeldOut(i, "", np.full(1, b / 10), np.full(1, a / 10), 0.5, 0.5)
            for i, (a, b) in enumerate(zip(shared, own, strict=True))
        ],
        ACCURACY,
    )
    assert by_loss.loss_p_value == truth and by_loss.verdict == "hurt"
