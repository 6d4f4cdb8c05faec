"""Plots of runs and of federations.

    curves        accuracy or loss by rounds, bytes, passes or seconds
    distribution  accuracies of single clients
    fairness      how evenly accuracy is spread over the clients
    gains         what single clients gain over a baseline
    heatmap       how much clients take from each other
    new_clients   accuracy of clients that did not train, while they adapt
    classes       which client of a federation has which classes

Every function returns a matplotlib Figure that is made without pyplot, so no figure stays open.
`figure.savefig("curves.svg")` writes PNG, SVG or PDF, by the file's ending. In plots of `Record`s, runs that differ
only in their seed are one line or one row: the mean over the seeds, with its 95 % interval. A `Protocol` says how
the numbers were measured; it is written under the title. An algorithm looks the same in all plots.
"""

from tfpfl.studies.plots.clients import distribution, fairness, gains
from tfpfl.studies.plots.curves import curves
from tfpfl.studies.plots.federation import classes
from tfpfl.studies.plots.files import write_picture
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
    "write_picture",
]
