"""Nothing of a picture is cut off: points, intervals and bars lie inside their axes, texts inside the figure."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from helpers.made_records import CLIENTS, made
from helpers.marks import slow_but
from tfpfl.algorithms import ALGORITHMS
from tfpfl.data import Federation
from tfpfl.studies import plots
from tfpfl.studies.new_clients import Adapted
from tfpfl.studies.plots.style import DPI

HALF = {i: 1 for i in range(CLIENTS // 2)}  # the other half never takes part
PIXEL = 1.0


def changed(record, accuracy=None, loss=None):
    """The same record; every score's accuracy or loss is a function of (round, client)."""
    scores = [
        e._replace(
            score=e.score if accuracy is None else accuracy(e.round_num, e.client_id),
            loss=e.loss if loss is None else loss(e.round_num, e.client_id),
        )
        for e in record.evaluations
    ]
    new = type(record)(record.folder, record.config, record.history, scores, record.summary)
    new.__dict__["took_part"] = record.took_part
    return new


def usual():
    return [made(a, seed, good=g) for a, g in (("pflego", 0.6), ("fedavg", 0.3), ("local", 0.5)) for seed in range(2)]


def half_never_seen():
    return [made(a, seed, took_part=HALF) for a in ("pflego", "fedavg", "local") for seed in range(2)]


def all_right_or_all_wrong():
    """Accuracies at both ends of the axis, and losses over six powers of ten."""
    ends = [changed(made(a), lambda t, i, x=x: x) for a, x in (("pflego", 1.0), ("fedavg", 0.0))]
    return [*ends, changed(made("local"), lambda t, i: float(i % 2), lambda t, i: 10.0 ** (6 - t))]


def far_apart():
    """Two seeds whose interval reaches far beyond what is possible."""
    return [changed(made(a, seed), lambda t, i, s=seed: 0.05 + 0.9 * s) for a in ("pflego", "local") for seed in (0, 1)]


def every_method():
    return [made(a) for a in ALGORITHMS]


def long_names():
    many = [made("pflego", hyperparameters={"tau": tau, "beta": 0.0123456}, participation=p) for tau, p in
            ((5, 0.2), (50, 0.2), (5, 0.375))]  # fmt: skip
    return [*many, made("local")]


CASES = {f.__name__: f for f in (usual, half_never_seen, all_right_or_all_wrong, far_apart, every_method, long_names)}
DRAW = {
    **{f"curves by {x}": lambda r, x=x: plots.curves(r, x) for x in ("rounds", "bytes", "passes", "seconds")},
    "curves of loss": lambda r: plots.curves(r, y="loss"),
    "curves of training": lambda r: plots.curves(r, y="training loss"),
    "distribution": plots.distribution,
    "ecdf": lambda r: plots.distribution(r, kind="ecdf"),
    "fairness": lambda r: plots.fairness(r, [x for x in r if x.config.algorithm == "local"]),
    "gains": lambda r: plots.gains(r, [x for x in r if x.config.algorithm == "local"]),
}


def cut_off(figure) -> list[str]:
    """What reaches out of its axes, or of the figure, by more than a pixel."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # lays it out
    renderer, found = canvas.get_renderer(), []
    for axes in figure.axes:
        frame = axes.get_window_extent(renderer)
        for artist in axes.get_children():
            if not isinstance(artist, Line2D | Collection | Patch) or artist is axes.patch:
                continue
            if not artist.get_visible() or not artist.get_clip_on() or artist in axes.spines.values():
                continue
            box = artist.get_window_extent(renderer)
            sides = np.array([box.x0, box.y0, -box.x1, -box.y1]) + PIXEL
            if box.width + box.height > 0 and any(
                s < f - 1e-6 for s, f in zip(sides, (frame.x0, frame.y0, -frame.x1, -frame.y1), strict=True)
            ):
                found.append(f"{artist} {box.extents} leaves the axes {frame.extents}")
    for axes in figure.axes:
        if min(axes.get_window_extent(renderer).size) < 10:  # a colour scale is narrow
            found.append(f"{axes} has no room: {axes.get_window_extent(renderer).size}")
    inside, whole = figure.get_tightbbox(renderer), figure.bbox_inches
    edge = 2 * PIXEL / figure.dpi
    if inside.x0 < -edge or inside.y0 < -edge or inside.x1 > whole.x1 + edge or inside.y1 > whole.y1 + edge:
        found.append(f"texts leave the figure: {inside.extents} of {whole.extents}")
    return found


@pytest.mark.parametrize("case", slow_but(CASES, "half_never_seen"))
@pytest.mark.parametrize("what", slow_but(DRAW, "curves by rounds", "fairness"))
def test_nothing_is_cut_off(what, case):
    assert cut_off(DRAW[what](CASES[case]())) == []


def test_the_check_finds_what_is_cut_off():
    figure = plots.curves(usual())
    figure.axes[0].set_ylim(70, 80)
    assert any("leaves the axes" in found for found in cut_off(figure))
    figure = plots.curves(usual())
    figure.text(0.9, 0.5, "much too long for this place")
    assert any("texts leave" in found for found in cut_off(figure))


def adapted(name, accuracy):
    accuracy = np.asarray(accuracy, float)
    n = len(accuracy)
    return Adapted(name, "own", "test", np.arange(n), np.full(n, 9), accuracy, accuracy)


def test_heatmap_and_new_clients_are_whole():
    assert cut_off(plots.heatmap(np.eye(5) - 0.5, title="attention", edges=[2], caption="words " * 40)) == []
    results = [adapted("runs/" + "a_long_name_" * 8, [[0, 1, 1], [0, 0, 1]]), adapted("b", [[0, 0.5, 1], [1, 1, 1]])]
    assert cut_off(plots.new_clients(results)) == []


@pytest.mark.parametrize("clients", slow_but([2, 5, 60, 250], 5))
def test_classes_of_few_and_of_many_clients_are_whole(clients, tmp_path):
    rng = np.random.default_rng(0)
    data = [
        {"train": (rng.random((4, 2), np.float32), np.array([0, 1, i % 5, i % 5])),
         "test": (rng.random((2, 2), np.float32), np.array([0, 1]))}
        for i in range(clients)
    ]  # fmt: skip
    assert cut_off(plots.classes(Federation.from_clients(data, out=tmp_path / "f"))) == []


def test_pictures_have_twice_the_usual_resolution(tmp_path):
    figure = plots.heatmap(np.eye(3))
    assert DPI == 2 * figure.dpi == 200
    figure.savefig(tmp_path / "a.png")
    plots.write_picture(figure, tmp_path / "b.png")
    plots.write_picture(figure, tmp_path / "c.png", dpi=50)
    sizes = []
    for name in "abc":
        head = (tmp_path / f"{name}.png").read_bytes()
        sizes.append(tuple(int.from_bytes(head[i : i + 4], "big") for i in (16, 20)))
    inches = figure.get_size_inches()
    assert sizes == [tuple(inches * 200), tuple(inches * 200), tuple(inches * 50)]


@pytest.mark.parametrize("what", slow_but(DRAW, "fairness"))
def test_texts_stay_legible(what):
    """Letters are at least 7 points high at the size of a column of text, and the figure is not wider than it."""
    figure = DRAW[what](usual())
    from matplotlib.text import Text

    assert figure.get_size_inches()[0] <= 4.8
    assert min(t.get_fontsize() for t in figure.findobj(Text) if t.get_text()) >= 7
