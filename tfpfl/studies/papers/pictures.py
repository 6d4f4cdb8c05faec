"""The papers' figures that are not learning curves: their runs, how they are measured, and what the paper says of them.

Each figure has its own file with three functions. `measure` takes runs and returns the figure's data, which are kept in
a file beside the runs. From these data, `numbers` makes the entries of the ledger and `draw` a matplotlib Figure.
"""

from collections.abc import Callable
from typing import NamedTuple

from tfpfl.studies.papers import attention, explicit, newcomers, round_robin, weights_of_risks
from tfpfl.studies.papers.experiment import Cell, Size
from tfpfl.studies.papers.experiments import EXPERIMENTS


class Claim(NamedTuple):
    """What a paper says about a number of a figure, and whether a value agrees with it."""

    text: str
    holds: Callable  # value -> bool


class Picture(NamedTuple):
    """One figure of a paper that is not a learning curve."""

    title: str
    source: str
    cells: tuple  # the `Cell`s whose runs it needs; () if nothing is trained
    sizes: dict  # scale -> Size
    measure: Callable  # (runs {cell: folder}, scale=, seed=, kept=, save=, tell=) -> data
    numbers: (
        Callable  # data -> {name: {"value": float, "half": half an interval, "p": p-value}}; the last two are optional
    )
    draw: Callable  # data -> Figure
    published: dict = {}  # name of a number -> Claim
    note: str = ""


def _of(experiment: str, column: str, *methods: str) -> tuple:
    """The cells of a table's column, so that the figure shares their runs; without `methods`, all of them."""
    return tuple(
        c for c in EXPERIMENTS[experiment].cells if c.column == column and (not methods or c.method in methods)
    )


_NEW_METHODS = ("local", "fedavg", "feddyn", "fedper", "fedrep", "lg_fedavg", "fedbabu", "fedrod", "pgfed", "pgfedmo")


def _with_new_clients():
    for cell in _of("pgfed-table1", "CIFAR-10, 100", *_NEW_METHODS):
        yield Cell("CIFAR-10, 80 and 20 new", cell.method, cell.config | {"new_clients": 20}, None)


_PGFED_SIZES = {"smoke": Size(2, 1), "laptop": Size(8, 1), "full": Size(300, 1)}

FIGURES = {
    "round-robin": Picture(
        title="Illustration: round robin deals 7 examples of one class to 3 clients",
        source="arXiv 2202.09848v2",
        cells=(),
        sizes=dict.fromkeys(("smoke", "laptop", "full"), Size(0, 1)),
        measure=round_robin.measure,
        numbers=round_robin.numbers,
        draw=round_robin.draw,
        published={
            f"examples of client {i}": Claim(str(n), lambda value, n=n: value == n) for i, n in enumerate((3, 2, 2))
        },
    ),
    "pgfed-figure-fine-tuning": Picture(
        title="Explicit against implicit fine-tuning of FedAvg's model",
        source="arXiv 2212.01448",
        cells=_of("pgfed-table1", "CIFAR-10, 100", "fedavg"),
        sizes=_PGFED_SIZES,
        measure=explicit.measure,
        numbers=explicit.numbers,
        draw=explicit.draw,
        published={
            "explicit gain (points)": Claim("7.73", lambda value: value > 0),
            "explicit above implicit (points)": Claim("2.33", lambda value: value > 0),
        },
        note=f"{explicit.STEPS} steps on all of a client's examples, mu = {explicit.MU}, rate {explicit.ETA}: the "
        "paper's are not known, so signs count. Scale laptop fine-tunes "
        f"{explicit.CLIENTS['laptop']} of the 100 clients, each on all clients' data.",
    ),
    "pgfed-figure-A": Picture(
        title="How A changes, and with how much data",
        source="arXiv 2212.01448",
        cells=_of("pgfed-table1", "CIFAR-10, 25", "pgfed"),
        sizes=_PGFED_SIZES,
        measure=weights_of_risks.measure,
        numbers=weights_of_risks.numbers,
        draw=weights_of_risks.draw,
        published={
            "slope of the column mean by n_j (per 1000 examples)": Claim("positive", lambda value: value > 0),
            "slope of the row mean by n_i (per 1000 examples)": Claim("negative", lambda value: value < 0),
        },
        note="From the first evaluated round to the last; means over all clients, p-values of slope 0.",
    ),
    "pgfed-new-clients": Picture(
        title="Clients that never trained",
        source="arXiv 2212.01448, Figure 9",
        cells=tuple(_with_new_clients()),
        sizes={"smoke": Size(1, 1), "laptop": Size(8, 1), "full": Size(150, 1)},
        measure=newcomers.measure,
        numbers=newcomers.numbers,
        draw=newcomers.draw,
        note=f"20 of 100 clients never train. Each then fine-tunes the global model for 20 epochs by SGD with momentum "
        f"0.9, rate {newcomers.ETA}, batches of {newcomers.BATCH_SIZE}; *own way*: a method that has no such model.",
    ),
    "fedamp-figure": Picture(
        title="Single clients by method, and who listens to whom",
        source="arXiv 2007.03797",
        cells=_of("fedamp-practical", "Fashion-MNIST") + _of("fedamp-practical", "EMNIST"),
        sizes=EXPERIMENTS["fedamp-practical"].sizes,
        measure=attention.measure,
        numbers=attention.numbers,
        draw=attention.draw,
        note="The runs of fedamp-practical, in the round that is best on test, as there. The heat maps are after the "
        "last round, with the clients by group: in EMNIST digits, upper case and lower case.",
    ),
}
