"""PGFed's Figure 9 (arXiv 2212.01448): accuracy of clients that took no part in training.

80 of 100 clients train. Each of the other 20 then fine-tunes for 20 epochs by the protocol 'global' of
`tfpfl.studies.new_clients`. If a method cannot do this, its clients adapt in its own way, and the figure says so.
"""

import numpy as np
from matplotlib.figure import Figure

from tfpfl.algorithms import get_method
from tfpfl.checks import InvalidArgument
from tfpfl.runs import statistics
from tfpfl.runs.run import Run
from tfpfl.studies.new_clients import CannotAdapt, adapt_new_clients
from tfpfl.studies.plots import style
from tfpfl.studies.plots.style import STYLE, TICKS, in_style

EPOCHS = {"smoke": 2, "laptop": 20, "full": 20}
ETA, BATCH_SIZE = 0.005, 10  # from the authors' example commands, the same for all methods


def measure(runs: dict, *, scale: str = "full", kept=None, save=lambda data: None, tell=print, **_) -> dict:
    """Lets the new clients of every run adapt.

    Args:
        runs: {name: run folder}, of runs with `new_clients`.
        scale: number of epochs, see `EPOCHS`.
        kept: what an interrupted call has saved; used for runs with the same rounds and epochs.
        save: called with the data after each run.
        tell: called with a line of text after each run.

    Returns:
        {name: {"algorithm", "run", "rounds", "epochs", "protocol": 'global' | 'own' | None, "accuracy": [n, epochs + 1]
        in [0, 1], None without test examples}}; protocol None: the method's new clients cannot adapt.
    """
    data = {}
    for name, folder in runs.items():
        with Run.open(folder) as run:
            how = {"run": run.config.run_id, "rounds": run.store.round_num, "epochs": EPOCHS[scale]}
            before = (kept or {}).get(name, {})
            if all(before.get(k) == value for k, value in how.items()):
                data[name] = before
                continue
            data[name] = how | {"algorithm": run.config.algorithm, **_adapted(run, EPOCHS[scale])}
        save((kept or {}) | data)
        tell(f"new clients adapted: {name}")
    return data


def _adapted(run, epochs: int) -> dict:
    for protocol, rates in (("global", {"eta": ETA, "batch_size": BATCH_SIZE}), ("own", {})):
        try:
            found = adapt_new_clients(run, epochs=epochs, protocol=protocol, **rates)
        except CannotAdapt:
            continue
        rows = [[None if np.isnan(value) else value for value in row] for row in found.accuracy.tolist()]
        return {"protocol": protocol, "accuracy": rows}
    return {"protocol": None, "accuracy": []}


def numbers(data: dict) -> dict:
    """{name: {"value", "half"}}: mean test accuracy over new clients after the last epoch, in %."""
    last = {f"{label}, after {values.shape[1] - 1} epochs (%)": values[:, -1] for label, _, values in _rows(data)}
    return {
        what: {"value": statistics.mean_over_clients(values), "half": statistics.ci95(values)}
        for what, values in last.items()
    }


@in_style
def draw(data: dict) -> Figure:
    """Draws bars of the mean accuracy after the last epoch, the best on top; below, curves over epochs.

    Raises:
        InvalidArgument: no method lets new clients adapt.
    """
    rows = _rows(data)
    if not rows:
        raise InvalidArgument("there is nothing to draw: no method that was run lets new clients adapt")
    rows.sort(key=lambda row: -statistics.mean_over_clients(row[2][:, -1]))
    epochs = max(values.shape[1] for *_, values in rows) - 1
    people = statistics.num_tested(rows[0][2][:, -1])
    figure = Figure(figsize=(STYLE["figure.figsize"][0], 3.6 + 0.27 * len(rows)), layout="constrained")
    bars, lines = figure.subplots(2, 1, height_ratios=[0.5 + 0.27 * len(rows), 2.4])
    for place, (label, algorithm, values) in enumerate(rows):
        look = style(algorithm)
        mean = np.array([statistics.mean_over_clients(column) for column in values.T])
        half = statistics.ci95(values[:, -1])
        bars.barh(place, mean[-1], xerr=half, color=look.color, alpha=0.75, error_kw={"elinewidth": 1})
        every = max(1, len(mean) // 5)
        lines.plot(range(len(mean)), mean, label=label, markevery=every, **look._asdict())
    bars.set_yticks(range(len(rows)), [label for label, *_ in rows])
    bars.set_ylim(len(rows) - 0.5, -0.5)
    bars.grid(False, axis="y")
    bars.set(xlabel=f"test accuracy after {epochs} epochs (%)")
    bars.set_title(f"{people} clients that never trained")
    lines.set(xlabel="epochs of adapting", ylabel="test accuracy (%)")
    lines.xaxis.get_major_locator().set_params(integer=True)
    for axes in (bars, lines):
        axes.tick_params(labelsize=TICKS)
    handles, labels = lines.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, handlelength=2.8)
    return figure


def _rows(data: dict) -> list[tuple[str, str, np.ndarray]]:
    """[(label, algorithm, accuracies [n, epochs + 1] in %)] of the methods whose new clients can adapt."""
    found = []
    for row in data.values():
        if row["protocol"] is not None:
            label = get_method(row["algorithm"]).title + (", own way" if row["protocol"] == "own" else "")
            found.append((label, row["algorithm"], 100 * np.array(row["accuracy"], np.float64)))
    return found
