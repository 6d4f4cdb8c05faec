"""Plots of runs: accuracy by rounds, bytes, passes or seconds; clients; fairness; gains; who listens to whom.

Every function takes `Record`s, or a matrix, and returns a matplotlib Figure that is made without pyplot, so nothing
stays open. `figure.savefig("curves.svg")` writes PNG, SVG or PDF, by the file's ending. Runs that differ only in their
seed are one line or one row: the mean over the seeds, with the 95 % interval of `statistics.over_seeds`. A `Protocol`
says how the numbers were measured; it is written under the title. An algorithm looks the same in every plot.
"""

from tfpfl.studies.plots.clients import distribution, fairness, gains
from tfpfl.studies.plots.curves import curves
from tfpfl.studies.plots.federation import classes
from tfpfl.studies.plots.heatmap import heatmap
from tfpfl.studies.plots.new_clients import new_clients
from tfpfl.studies.plots.style import Style, style, words

__all__ = [
    "Style",
    "classes",
    "curves",
    "distribution",
    "fairness",
    "gains",
    "heatmap",
    "new_clients",
    "style",
    "words",
]
