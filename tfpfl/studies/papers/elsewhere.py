"""A paper's table on another federation: the same methods and hyperparameters, on data that the paper did not use.

Nothing of it is compared with the paper: its numbers and its orders of methods hold for its own data.
"""

import json
from pathlib import Path

from tfpfl.algorithms import get_method
from tfpfl.checks import one_line
from tfpfl.data import Federation
from tfpfl.runs.config import RunConfig, file_hash
from tfpfl.studies.papers.experiment import Experiment
from tfpfl.studies.papers.ledger import part
from tfpfl.studies.run_groups import DATA_ENTRIES

# `new_clients` is among them: a smaller scale leaves clients of the paper's data out; a user's clients all train.
DATA = (*DATA_ENTRIES, "data_seed", "federation")


def on_federation(experiment: Experiment, federation: Federation, network: str | None = None) -> Experiment:
    """The table's methods, hyperparameters and participation on one federation; without the paper's numbers.

    The result has one column. Columns of the paper that differ in nothing but their data become one row for each
    method. A method that has other settings in other columns gets a row for each; its label names the first column
    that has these settings.

    Args:
        experiment: a table of `EXPERIMENTS`, at the size that is run.
        federation: the data.
        network: the backbone of all cells, as in `RunConfig`. Default: the table's own, or, if the table has none, that
            which fits the shape of the examples.
    """
    name = one_line(federation.manifest["source"]["name"])
    settings: dict[str, dict[str, tuple]] = {}
    for cell in experiment.cells:
        config = {key: value for key, value in cell.config.items() if key not in DATA}
        config |= {"federation": str(federation.path)} | ({} if network is None else {"network": network})
        kept = settings.setdefault(cell.method, {})
        kept.setdefault(json.dumps(config, sort_keys=True), (cell, config))
    cells = []
    for its_settings in settings.values():
        for cell, config in its_settings.values():
            label = cell.label
            if len(its_settings) > 1:
                label = f"as for {cell.column}" + (f", {label}" if label else "")
            cells.append(cell._replace(column=name, config=config, published=None, label=label))
    return experiment._replace(
        title=f"{experiment.title}; its methods on {name}", cells=tuple(cells), orderings=(), note=""
    )


def said(name: str, experiment: Experiment, federation: Federation) -> str:
    """What a reader must know of such a table, in one line.

    Args:
        name: the name of the paper's experiment.
        experiment: from `on_federation`.
        federation: the data.
    """
    methods = ", ".join(dict.fromkeys(get_method(cell.method).title for cell in experiment.cells))
    return (
        f"These are the methods of {name} ({methods}) with the paper's hyperparameters, on the federation "
        f"{one_line(federation.manifest['source']['name'])} ({federation.hash[:12]}). They were not searched for these "
        "data, and nothing here is compared with the paper's numbers."
    )


def ledger_name(name: str, scale: str, federation: Federation, network: str | None = None) -> str:
    """The name of a table's results on a federation in the ledger; the papers' own results have other names.

    Args:
        name: the name of the paper's experiment.
        scale: the scale: one whose runs are smaller has a part of its own.
        federation: the data.
        network: the backbone that was asked for: a file counts by its content.
    """
    file = RunConfig(network=network).network_file
    of_network = f"{network} {file_hash(file)[:12]}" if file else network
    return f"{part(name, scale)} on {federation.hash[:12]}" + (f" with {of_network}" if network else "")


def decides(config: dict) -> dict:
    """What decides the numbers of a cell's runs: its configuration, with the contents of files for their paths."""
    found = dict(config)
    if config.get("federation"):
        found["federation"] = Federation.load(config["federation"], verify=False).hash
    if file := RunConfig(network=config.get("network")).network_file:
        found["network"] = f"{config['network'].rpartition(':')[2]} {file_hash(file)}"
    return found


def data_name(config: dict) -> str:
    """What the name of a run folder says of a cell's data: the data set, or the name of the federation's folder."""
    return Path(config["federation"]).name if config.get("federation") else config.get("dataset", "digits")
