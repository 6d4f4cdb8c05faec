"""What an experiment of a paper is: a table of cells, what is run and measured for them, and which orders must hold.

A cell is one method in one column of a table. Its configuration has everything but rounds and seed. So two tables that
a paper made of the same runs have equal cells and share the runs here, too.
"""

from collections.abc import Callable
from typing import NamedTuple

from tfpfl.studies.papers.published import Published

SCALES = ("smoke", "laptop", "full")
BOUND = 1.0  # points: the smallest difference that counts, from a value of the paper or from the best method


class Cell(NamedTuple):
    """One method in one column of a table, with the value that the paper printed."""

    column: str
    method: str  # a name in ALGORITHMS
    config: dict  # entries of `RunConfig`, without rounds and seed
    published: Published | None
    label: str = ""  # tells cells of one method apart that have other hyperparameters
    protocol: str = ""  # a name in PROTOCOLS, if this method is measured in another way than the rest of the table


class Size(NamedTuple):
    """How much of an experiment is run at a scale."""

    rounds: int
    seeds: int
    # The entries of every cell's configuration that are smaller than in the paper; or a function that makes them from
    # the cell's configuration.
    config: dict | Callable[[dict], dict] = {}
    said: str = ""  # the same in words


class Ordering(NamedTuple):
    """An order of methods in some columns that must hold, because the specification or the paper says so."""

    text: str
    columns: tuple
    pairs: Callable  # (names of the column) -> [Pair], see orderings.py
    methods: tuple = ()  # that it is about; (): all of the column


class Experiment(NamedTuple):
    """One table or figure of a paper."""

    title: str
    source: str
    measures: str  # 'accuracy', 'seconds', 'rounds to 70 %' or 'gain over Local'
    protocol: str  # how the paper measures, a name in PROTOCOLS
    cells: tuple
    sizes: dict  # scale -> Size
    orderings: tuple = ()
    note: str = ""
    reference: str = ""  # the method at whose cost the others are compared; '': none

    def at(self, size: Size) -> "Experiment":
        """The experiment with the configuration of every cell changed to this size."""

        def changed(config: dict) -> dict:
            return config | (size.config(config) if callable(size.config) else size.config)

        return self._replace(cells=tuple(cell._replace(config=changed(cell.config)) for cell in self.cells))
