"""Pictures: what is drawn, read back from the figures, against the records that it was drawn from."""

import io
import subprocess
import sys
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from rich.console import Console

from helpers.made_records import CLIENTS, COHORT, PASSES, ROUNDS, made
from tfpfl.algorithms import ALGORITHMS
from tfpfl.runs import statistics
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL, LOCAL_COPY
from tfpfl.runs.results import totals
from tfpfl.studies import plots, tables
from tfpfl.studies.plots.style import PALETTE
from tfpfl.studies.run_groups import clients, group_runs, paired


@pytest.fixture(scope="module")
def records():
    """Three algorithms, two of them with three seeds."""
    several = [made(name, seed, good=good) for name, good in (("pflego", 0.6), ("fedavg", 0.3)) for seed in range(3)]
    return [*several, made("local", 0, good=0.5, silent=True)]


def line(figure, label):
    """x and y of the line with this label."""
    found = [each for axes in figure.axes for each in axes.lines if each.get_label() == label]
    assert len(found) == 1, label
    return np.asarray(found[0].get_xdata(), float), np.asarray(found[0].get_ydata(), float)


def column(record, name):
    """{round: value} of the history."""
    return {row["round"]: row[name] for row in record.history if name in row}


def text(figure) -> str:
    """All that is written in a figure."""
    return "\n".join(each.get_text() for each in figure.findobj(matplotlib.text.Text))


@pytest.mark.parametrize("y, name, factor", [("accuracy", "test accuracy", 100), ("loss", "test loss", 1)])
def test_curves_are_the_history_over_seeds(records, y, name, factor):
    figure = plots.curves(records, "rounds", y)
    for s in group_runs(records):
        rounds, drawn = line(figure, s.label)
        assert rounds.tolist() == list(range(2, ROUNDS + 1))
        tables = [column(r, f"{r.predicts} {name}") for r in s.records]
        expected = [statistics.over_seeds([table[t] for table in tables])[0] for t in rounds]
        np.testing.assert_allclose(drawn, factor * np.array(expected), rtol=1e-12)


def test_bands_are_the_interval_over_seeds(records):
    figure = plots.curves(records)
    bands = figure.axes[0].collections
    with_seeds = [s for s in group_runs(records) if len(s.records) > 1]
    assert len(bands) == len(with_seeds) == 2  # a single seed has none
    for band, s in zip(bands, with_seeds, strict=True):
        corners = band.get_paths()[0].vertices
        for t in range(2, ROUNDS + 1):
            values = [column(r, f"{r.predicts} test accuracy")[t] for r in s.records]
            mean, half = statistics.over_seeds(values)
            at = corners[corners[:, 0] == t, 1]
            ends = np.clip([100 * (mean - half), 100 * (mean + half)], 0, 100)  # no accuracy is beyond
            assert [at.min(), at.max()] == pytest.approx(ends)


def test_bands_of_losses_below_0_are_around_their_line(records):
    """Such as the loss of counts, which has no least value; the band was cut off at 0, above the line."""
    lower = [replace(r, evaluations=[e._replace(loss=e.loss - 9) for e in r.evaluations]) for r in records]
    here, there = (plots.curves(each, y="loss").axes[0].collections for each in (records, lower))
    assert len(here) == len(there) == 2
    for band, moved in zip(here, there, strict=True):
        corners, low = band.get_paths()[0].vertices, moved.get_paths()[0].vertices
        assert corners[:, 1].min() > 0  # nothing is cut off in the first figure
        np.testing.assert_allclose(low[:, 1], corners[:, 1] - 9)


def test_curves_of_another_protocol_and_of_training(records):
    _, local = line(plots.curves(records, protocol=EV_LOCAL), "Local")
    expected = list(column(records[-1], f"{LOCAL_COPY} test accuracy").values())
    np.testing.assert_allclose(local, 100 * np.array(expected))
    figure = plots.curves(records, y="training loss")
    rounds, loss = line(figure, "Local")
    said = " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))
    assert "Loss of the last local step by rounds" in said and "before the step, on its examples" in said
    assert rounds.tolist() == list(range(1, ROUNDS + 1))
    np.testing.assert_allclose(loss, [row["loss"] for row in records[-1].history])


@pytest.mark.parametrize(
    "x, amount, divisor",
    [
        ("bytes", lambda row: row["bytes_down"] + row["bytes_up"], 1000),  # up to 234 kB
        ("passes", lambda row: COHORT * sum(PASSES.values()), 1),
    ],
)
def test_costs_are_added_up_over_all_rounds(records, x, amount, divisor):
    figure = plots.curves(records, x)
    group = group_runs(records)[0].records
    added = np.mean([np.cumsum([amount(row) for row in r.history]) for r in group], axis=0)
    drawn, _ = line(figure, "PFLEGO")
    np.testing.assert_allclose(drawn, added[1:] / divisor, rtol=1e-12)  # round 1 is not evaluated, but it cost
    assert ("(kB)" in figure.axes[0].get_xlabel()) == (x == "bytes")


def test_seconds_are_those_of_the_tables_without_the_building_of_graphs(records):
    """A round that builds graphs takes a hundred times as long; a plot by seconds and a table show the same rate."""
    record = made("pflego")
    drawn, _ = line(plots.curves([record], "seconds"), "PFLEGO")
    record.history[0]["seconds"] = record.history[4]["seconds"] = 100.0
    slow, _ = line(plots.curves([record], "seconds"), "PFLEGO")
    a_round = totals(record.history)["seconds_per_round_median"]
    np.testing.assert_allclose(slow, a_round * np.arange(2, ROUNDS + 1))
    assert slow[-1] < 1.5 * drawn[-1]
    table = plain_text(tables.comparison([(record.summary | SUMMARY | totals(record.history), record.results)], ""))
    assert f"{a_round:.3f}" in table


SUMMARY = {"algorithm": "pflego", "clients_seen": CLIENTS, "clients_never_seen": 0}


def plain_text(table, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_clients_that_never_took_part_are_drawn_apart():
    """In curves two more panels, in the other plots a row for each side, with how many there are."""
    first = {0: 1, 1: 1, 2: 7, 3: 1}  # of eight
    runs = [made(a, took_part=first) for a in ("pflego", "local")]
    figure = plots.curves(runs)
    assert [axes.get_title("left") for axes in figure.axes[1:]] == ["4 seen", "4 never seen"]
    for axes, side in zip(figure.axes, ("all", "seen", "unseen"), strict=True):
        drawn = next(each for each in axes.lines if each.get_label() == "PFLEGO")
        scores = [e for e in runs[0].evaluations if e.model == runs[0].predicts and e.split == "test"]
        for t, y in zip(drawn.get_xdata(), drawn.get_ydata(), strict=True):
            of_round = [e for e in scores if e.round_num == t]
            chosen = [e for e in of_round if side == "all" or (first.get(e.client_id, 99) <= t) == (side == "seen")]
            assert y == pytest.approx(100 * np.mean([e.accuracy for e in chosen]))
    rows = ["PFLEGO, 4 seen", "PFLEGO, 4 never seen", "Local, 4 seen", "Local, 4 never seen"]
    assert [label.get_text() for label in plots.distribution(runs).axes[0].get_yticklabels()] == rows
    dots = plots.distribution(runs).axes[0].collections[0].get_offsets()[:, 0]
    assert sorted(dots) == pytest.approx(sorted(100 * clients(runs[0], EV_ALL._replace(clients="seen"))))
    assert len(dots) == 4
    assert {line.get_label() for line in plots.fairness(runs).axes[0].lines} == set(rows)
    titles = [axes.get_title("left") for axes in plots.gains(runs, runs[1]).axes]
    assert [title.split(":")[0] for title in titles] == rows[:2]
    for figure in (plots.curves(runs), plots.fairness(runs), plots.gains(runs, runs[1]), plots.distribution(runs)):
        assert "4 clients had taken part, and 4 never" in " ".join(text(figure).split())
    assert "All clients had taken part by round 1" in " ".join(text(plots.curves([made()])).split())
    assert "It is not known" in " ".join(text(plots.curves([made(took_part=None)])).split())


def test_who_sends_nothing_is_a_level_line(records):
    figure = plots.curves(records, "bytes")
    x, y = line(figure, "Local")
    last = 100 * records[-1].history[-1]["personal test accuracy"]
    assert x.tolist() == [0] and y.tolist() == pytest.approx([last])
    _, level = line(figure, "_level")
    assert level.tolist() == pytest.approx([last, last])
    assert len(line(plots.curves(records, "rounds"), "Local")[0]) == ROUNDS - 1


def test_only_rounds_that_all_seeds_have(records):
    shorter = made("pflego", 7, rounds=ROUNDS - 3)
    shorter.config.rounds = ROUNDS  # it is still running
    rounds, _ = line(plots.curves([records[0], shorter]), "PFLEGO")
    assert rounds.max() == ROUNDS - 3


def test_boxes_and_dots_are_the_clients(records):
    figure = plots.distribution(records)
    axes = figure.axes[0]
    for i, s in enumerate(group_runs(records)):
        values = 100 * np.concatenate([clients(r) for r in s.records])
        assert len(values) == CLIENTS * len(s.records)
        dots, median = axes.collections[2 * i : 2 * i + 2]
        np.testing.assert_allclose(dots.get_offsets()[:, 0], values)
        assert np.abs(dots.get_offsets()[:, 1] - i).max() < 0.5  # in its own row
        assert median.get_segments()[0][0, 0] == pytest.approx(np.median(values))
        box = axes.patches[i]
        low, high = np.quantile(values, [0.25, 0.75])
        assert (box.get_x(), box.get_width()) == pytest.approx((low, high - low))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["PFLEGO", "FedAvg", "Local"]


def test_distribution_as_shares(records):
    x, share = line(plots.distribution(records, kind="ecdf"), "Local")
    values = 100 * clients(records[-1])
    for value in values:
        assert share[x == value].max() == pytest.approx((values <= value).mean())


def test_the_indices_of_a_diverged_seed_are_not_drawn_as_those_of_the_others():
    """The table beside the picture has none."""
    both = [made("fedper", seed) for seed in (0, 1)]
    scores = [e._replace(score=np.inf) if e.client_id == 2 else e for e in both[1].evaluations]
    both[1] = replace(both[1], evaluations=scores)
    both[1].__dict__["took_part"] = both[0].took_part
    axes = {each.get_xlabel(): each for each in plots.fairness(both).axes}
    drawn = [float(axes[name].lines[0].get_xdata()[0]) for name in ("Jain's index", "Gini coefficient")]
    assert np.isnan(drawn).all()


def test_fairness(records):
    figure = plots.fairness(records, [records[-1]])
    axes = {each.get_label(): each for each in figure.axes}
    worst, worse = axes["worst"], axes["worse"]
    group = group_runs(records)[0].records
    _, drawn = line(figure, "PFLEGO")
    expected = np.mean([statistics.deciles(clients(r)) for r in group], axis=0)
    np.testing.assert_allclose(drawn, 100 * expected)
    points = {round(each.get_xdata()[0], 9): each.get_marker() for each in worst.lines if each.get_ydata()[0] == 0}
    for fraction, marker in ((0.05, "^"), (0.1, "o"), (0.25, "s")):
        value = 100 * np.mean([r.worst(fraction) for r in group])
        assert any(abs(x - value) < 1e-9 for x in points), (fraction, value)
        assert marker in {each.get_marker() for each in worst.lines}
    fedavg = group_runs(records)[1].records
    for of in (statistics.jain, statistics.gini):
        drawn = [each.get_xdata()[0] for each in axes[of.__name__].lines if each.get_ydata()[0] == 1]
        assert drawn == pytest.approx([np.mean([of(clients(r)) for r in fedavg])])
    shares = {int(each.get_ydata()[0]): each.get_xdata()[0] for each in worse.lines}
    assert set(shares) == {0, 1}  # Local is not compared with itself
    for i, s in enumerate(group_runs(records)[:2]):
        assert shares[i] == pytest.approx(100 * statistics.share_worse(*paired(s.records, [records[-1]])))
    assert len(plots.fairness(records).axes) == len(axes) - 1  # without a baseline


def test_gains(records):
    figure = plots.gains(records, records[-1])
    assert len(figure.axes) == 2
    for axes, s in zip(figure.axes, group_runs(records[:-1]), strict=True):
        own, base = (100 * values for values in paired(s.records, [records[-1]]))
        gained = np.round(own - base, 9)
        bars = [(round(b.get_x(), 9), round(b.get_x() + b.get_width(), 9), b.get_height()) for b in axes.patches]
        assert sum(height for *_, height in bars) == CLIENTS
        for low, high, height in bars:
            assert height == np.sum((gained >= low) & (gained < high))
        assert any(low < 0 < high and low == pytest.approx(-high) for low, high, _ in bars)  # centred on no gain
        assert f"{s.label}: {100 * np.mean(gained < 0):.0f} % worse" == axes.get_title("left")


def without(record, client):
    """The same run, its scores in another order, and none of this client."""
    scores = [e for e in reversed(record.evaluations) if e.client_id != client]
    return type(record)(record.folder, record.config, record.history, scores, record.summary)


def test_pairs_are_clients_by_id():
    a, b = made("pflego", 0, good=0.6), made("local", 0)
    own, base = paired([without(a, 4)], [without(b, 2)])
    assert len(own) == len(base) == CLIENTS
    assert np.flatnonzero(np.isnan(own)).tolist() == [4] and np.flatnonzero(np.isnan(base)).tolist() == [2]
    assert base[5] == pytest.approx(b.per_client()[5]) and own[5] == pytest.approx(a.per_client()[5])


def test_a_client_is_compared_with_itself_in_the_same_seeds():
    """Who takes part may differ between methods; a client would otherwise be compared over other seeds."""

    def took(record, *clients):
        scores = [score for score in record.evaluations if score.client_id in clients]
        return type(record)(record.folder, record.config, record.history, scores, record.summary)

    first, second = made("pflego", 0, good=0.2), made("pflego", 1, good=0.9)
    own, base = paired([first, second], [took(first, 0), second])
    np.testing.assert_array_equal(own, base)
    own, base = paired([took(first, 0), took(second, 1)], [took(second, 0), took(first, 1)])
    assert np.isnan(own[0]) and np.isnan(base[0])  # in no seed on both sides
    own, base = paired([first], [second])  # no seed in common: as they are
    np.testing.assert_allclose(own, [*first.per_client().values()])
    np.testing.assert_allclose(base, [*second.per_client().values()])


def test_clients_of_different_federations_are_not_paired():
    other = made("local", 0, federation_hash="e" * 64)
    with pytest.raises(ValueError, match="cannot be compared client by client.*ffffffffffff and eeeeeeeeeeee"):
        plots.gains([made()], other)
    # With a split for every seed, a client is compared with itself on the same split.
    runs = {a: [made(a, s, federation_hash=str(s) * 64) for s in (1, 2, 3)] for a in ("pflego", "local")}
    own, base = paired(runs["pflego"][:2], runs["local"][1:])
    np.testing.assert_allclose(own, list(runs["pflego"][1].per_client().values()))
    np.testing.assert_allclose(base, list(runs["local"][1].per_client().values()))
    assert len(paired(runs["pflego"], runs["local"])[0]) == 3 * CLIENTS


def test_heatmap(records):
    matrix = np.arange(16.0).reshape(4, 4)
    figure = plots.heatmap(matrix, title="attention", label="weight")
    image = figure.axes[0].images[0]
    shown = np.ma.filled(image.get_array(), np.nan)
    off = ~np.eye(4, dtype=bool)
    np.testing.assert_array_equal(shown[off], matrix[off])
    assert np.isnan(shown.diagonal()).all()
    np.testing.assert_array_equal(plots.heatmap(matrix, own=True).axes[0].images[0].get_array(), matrix)
    assert "weight" in text(figure) and "attention" in text(figure)
    named = plots.heatmap(matrix, names=["ann", "bob", "$c$", "d\nd"]).axes[0]
    for axis in (named.get_xticklabels(), named.get_yticklabels()):
        assert [label.get_text() for label in axis] == ["0: ann", "1: bob", r"2: \$c\$", r"3: d\nd"]
    signed = plots.heatmap(matrix - 8).axes[0].images[0]
    assert signed.norm.vmin == -signed.norm.vmax  # zero in the middle of the colours


def test_same_algorithm_same_look_whatever_else_is_drawn(records):
    alone, together = plots.curves(records[3:4]), plots.curves(records)
    for figure in (alone, together):
        drawn = next(each for each in figure.axes[0].lines if each.get_label() == "FedAvg")
        look = plots.style("fedavg")
        assert (drawn.get_color(), drawn.get_marker()) == (look.color, look.marker)


def test_every_algorithm_has_a_look_of_its_own():
    looks = [plots.style(name) for name in ALGORITHMS]
    assert len({(look.color, look.linestyle) for look in looks}) == len(ALGORITHMS)
    assert len({(look.color, look.marker) for look in looks}) == len(ALGORITHMS)


# How colours look to those who see no red or no green (Machado, Oliveira, Fernandes 2009, severity 1), in linear RGB.
NO_RED = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
NO_GREEN = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]


def linear(color):
    channels = np.array(matplotlib.colors.to_rgb(color))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b*."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    f = [v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in xyz / [0.9505, 1, 1.089]]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", [np.eye(3), NO_RED, NO_GREEN], ids=["usual", "no red", "no green"])
def test_colours_differ_for_every_sight_and_stand_out_from_white(sight):
    seen = [lab(np.asarray(sight) @ linear(color)) for color in PALETTE]
    for i, a in enumerate(seen):
        for j in range(i):
            assert np.linalg.norm(a - seen[j]) > 30, (PALETTE[i], PALETTE[j])
    for color in PALETTE:
        luminance = np.array([0.2126, 0.7152, 0.0722]) @ linear(color)
        assert 1.05 / (luminance + 0.05) >= 3, color  # what WCAG asks of graphical objects


def test_settings_of_one_algorithm_are_told_apart():
    slow, fast = made(hyperparameters={"tau": 5}), made(hyperparameters={"tau": 50})
    labels = [s.label for s in group_runs([slow, fast])]
    assert len(set(labels)) == 2 and all("tau" in label and "PFLEGO" in label for label in labels)
    markers = {each.get_marker() for each in plots.curves([slow, fast]).axes[0].lines}
    assert len(markers) == 2


def test_runs_on_different_data_are_not_seeds_of_each_other():
    here, there = made("pflego", 0), made("pflego", 1, dataset="mnist")
    assert [len(s.records) for s in group_runs([here, there])] == [1, 1]
    same_recipe = made("pflego", 0, federation_hash="e" * 64)
    assert [len(s.records) for s in group_runs([here, same_recipe])] == [1, 1]
    other_seed = made("pflego", 1, federation_hash="e" * 64, data_seed=1)  # made alike, with the split of its seed
    assert [len(s.records) for s in group_runs([here, other_seed])] == [2]


@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: plots.curves([]), "no runs"),
        (lambda: plots.curves([made()], x="epochs"), "x axis.*bytes"),
        (lambda: plots.curves([made()], y="accurcy"), "y axis.*accuracy"),
        (lambda: plots.curves([made()], protocol=EV_ALL._replace(split="tset")), "split of a protocol.*test"),
        (lambda: plots.curves([made()], protocol=EV_ALL._replace(split="train")), "nothing to draw: no round.*train"),
        (lambda: plots.distribution([made()], kind="violin"), "kind of picture.*box"),
        (lambda: plots.fairness([made()], protocol=EV_ALL._replace(split="train")), "no client was scored"),
        (lambda: plots.gains([made()], made()), "nothing to compare PFLEGO with"),
        (lambda: plots.gains([made()], [made("local"), made("fedavg")]), "one algorithm; found Local, FedAvg"),
        (lambda: plots.curves([made(), made(folder="copy")]), "runs/pflego-0 and copy are the same run"),
        (lambda: plots.curves(2 * [made()]), "runs/pflego-0 and runs/pflego-0 are the same run.*Give each run once"),
        (lambda: plots.curves(made()), r"what is compared must be a list of records.*found Record"),
        (lambda: plots.distribution(["runs/a"]), "must be a list of records.*found 'runs/a' in it"),
        (lambda: plots.curves([made()], protocol="EV-al"), "unknown protocol 'EV-al'; did you mean 'EV-all'"),
        (
            lambda: plots.gains([made()], made("local"), protocol=3),
            "the protocol must be a Protocol, or the name of one",
        ),
        (lambda: plots.heatmap(np.zeros((2, 3))), r"square matrix.*\(2, 3\)"),
        (lambda: plots.heatmap(np.eye(3), names=["a"]), "one name for each of the 3 clients, found 1"),
        (lambda: plots.style("pflge"), "algorithm.*pflego"),
    ],
)
def test_mistakes(draw, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        draw()


def test_passes_of_a_run_that_has_not_ended():
    running = made()
    running = type(running)(running.folder, running.config, running.history, running.evaluations, {})
    with pytest.raises(ValueError, match="runs/pflego-0 has no summary.json"):
        plots.curves([running], "passes")
    assert plots.curves([running], "seconds").axes


def test_the_protocol_is_written_in_every_picture(records):
    for figure in (plots.distribution(records), plots.fairness(records), plots.gains(records, records[-1])):
        assert str(EV_ALL) in " ".join(text(figure).split())
    curve = " ".join(text(plots.curves(records)).split())
    assert "all clients; mean over clients; every evaluated round; test examples" in curve
    assert "last 10" not in curve
    assert "test examples" not in text(plots.curves(records, caption=False))


def test_dollars_are_no_formulas(records):
    title = r"$\frac$ a $5 and $6"
    figure = plots.heatmap(np.eye(3), title=title)
    for kind in ("png", "svg", "pdf"):
        file = io.BytesIO()
        figure.savefig(file, format=kind)
        assert len(file.getvalue()) > 1000


@pytest.mark.slow
def test_without_pyplot_and_without_changing_the_users_defaults(records):
    before = dict(matplotlib.rcParams)
    plots.curves(records)
    assert dict(matplotlib.rcParams) == before
    code = (  # newer Keras imports it on its own
        "import sys, tfpfl.studies.records; before = 'matplotlib.pyplot' in sys.modules; "
        "import tfpfl.studies.plots; print('matplotlib.pyplot' in sys.modules and not before)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize("diverged", [(2, 5), range(CLIENTS)])
def test_clients_that_diverged_are_told_in_the_label(diverged, recwarn):
    """An infinite RMSE cannot be drawn: the line has a gap, and a label says how many are missing."""
    some, local = (made(name, kind="regression") for name in ("fedavg_ft", "local"))
    some.evaluations[:] = [
        e._replace(score=np.inf, loss=np.inf)
        if e.client_id in diverged and e.model == some.predicts and e.round_num > ROUNDS - 2
        else e
        for e in some.evaluations
    ]
    x, y = line(plots.curves([some, local]), "FedAvg-FT, 2 rounds diverged")
    assert x[np.isnan(y)].tolist() == [ROUNDS - 1, ROUNDS]
    assert np.isfinite(line(plots.curves([some, local]), "Local")[1]).all()
    many = f"FedAvg-FT, {len(diverged)} diverged"
    figures = [plots.distribution([some, local]), plots.fairness([some, local], [local])]
    assert all(many in text(figure).replace("\n", " ") for figure in figures)
    assert (many in text(plots.distribution([some, local], kind="ecdf"))) == (len(diverged) < CLIENTS)
    gains = plots.gains([some, local], local)
    assert f"{len(diverged)} diverged" in text(gains)
    assert sum(bar.get_height() for bar in gains.axes[0].patches) == CLIENTS - len(diverged)
    for figure in (*figures, gains, plots.curves([some], y="loss"), plots.curves([some], "bytes")):
        figure.savefig(io.BytesIO())
    assert not [w for w in recwarn.list if issubclass(w.category, RuntimeWarning | UserWarning)]


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_gains_of_targets_in_any_unit_are_drawn(unit):
    """Three of four clients are worse by some thousandths of their RMSE; none of them counts as equal."""
    some, local = (made(name, kind="regression") for name in ("fedavg_ft", "local"))
    for record, more in ((some, 1.0), (local, 0.0)):
        record.evaluations[:] = [
            e._replace(score=unit * (1 + more * (0.003 if e.client_id % 4 else -0.001))) for e in record.evaluations
        ]
    (axes,) = plots.gains([some], local).axes
    worse = np.mean([bool(client % 4) for client in {e.client_id for e in some.evaluations}])
    assert f"{100 * worse:.0f} % worse" in axes.get_title("left")
    heights = [bar.get_height() for bar in axes.patches]
    assert sum(heights) == CLIENTS and 5 < len(heights) < 40
