"""PFLEGO's illustration of round robin (arXiv 2202.09848v2): how our partitioner deals one class to three clients."""

import numpy as np
from matplotlib.figure import Figure

from tfpfl.data.partitioners import Labels, round_robin
from tfpfl.studies.plots.style import PALETTE, STYLE, in_style

EXAMPLES, CLIENTS = 7, 3
_NUMBER = "examples of client {}"


def measure(runs: dict, *, seed: int = 0, **_) -> dict:
    """Runs the partitioner. Returns {"clients": [indices of the examples of each client]}."""
    labels = Labels(train=np.zeros(EXAMPLES, np.int64), test=np.zeros(0, np.int64))
    return {"clients": [np.sort(of).tolist() for of in round_robin(labels, CLIENTS, seed, K=1).train]}


def numbers(data: dict) -> dict:
    """{name: {"value"}}: the number of examples of each client."""
    return {_NUMBER.format(i): {"value": len(of)} for i, of in enumerate(data["clients"])}


@in_style
def draw(data: dict) -> Figure:
    """Draws the examples of the class in a row, and below them each client with its examples."""
    colors = PALETTE[1:]
    total = sum(map(len, data["clients"]))
    figure = Figure(figsize=(STYLE["figure.figsize"][0], 2.4), layout="constrained")
    axes = figure.subplots()
    width = (total - 1) / (len(data["clients"]) - 1)
    for i, of in enumerate(data["clients"]):
        centre = i * width
        for place, example in enumerate(of):
            below = centre + 0.6 * (place - (len(of) - 1) / 2)
            axes.plot([example, below], [1, 0], color=colors[i], linewidth=0.8, alpha=0.6, zorder=1)
            for x, y in ((example, 1), (below, 0)):
                axes.scatter(x, y, s=190, color=colors[i], zorder=2)
                axes.text(x, y, str(example), color="white", ha="center", va="center", fontsize=8.5)
        axes.text(centre, -0.28, f"client {i}: {len(of)}", ha="center", va="top")
    axes.set(xlim=(-1, total), ylim=(-0.7, 1.3), title=f"Round robin: {total} examples of one class")
    axes.set_axis_off()
    return figure
