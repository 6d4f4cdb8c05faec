"""A plot of a federation: the classes and the number of examples of each client."""

import numpy as np
from matplotlib.figure import Figure

from tfpfl.data.federation import Federation
from tfpfl.studies.plots.style import Drawing, short

NAMED = 40  # clients whose names can be read under a plot


def classes(federation: Federation, split: str = "train") -> Figure:
    """Draws which classes each client has (above) and how many examples (below).

    Above, the area of a dot is the number of examples of a client and class; more than 1,200 dots become a heat map. Of
    more than 200 clients, 200 at even distances are shown there. The lower panel always counts all clients.

    Args:
        federation: the federation to draw.
        split: the examples to count: 'train', 'validation' or 'test'.

    Raises:
        ValueError: another split, or the federation's targets are numbers, which have no classes.
    """
    ids = np.unique(np.linspace(0, federation.num_clients - 1, min(federation.num_clients, 200)).astype(int))
    counts = federation.class_counts(split, ids)
    figure = Drawing(figsize=(min(max(7, 0.18 * len(ids)), 14), 6.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=[3, 1])
    if np.count_nonzero(counts) <= 1_200:
        client, label = np.nonzero(counts)
        area = counts[client, label] / counts.max()
        top.scatter(client, label, s=8 + 140 * area, c=counts[client, label], cmap="cividis_r", vmin=0)
        top.grid(alpha=0.25)
        top.set_axisbelow(True)
        top.margins(y=0.06)
        beside = max(0.6, 0.03 * len(ids))  # room for the outer dots, and for the outer bars below
        top.set_xlim(-beside, len(ids) - 1 + beside)
    else:
        top.imshow(np.where(counts, counts, np.nan).T, aspect="auto", origin="lower", cmap="cividis_r", vmin=0,
                   interpolation="nearest")  # fmt: skip
    figure.colorbar(top.collections[0] if top.collections else top.images[0], ax=top, label=f"{split} examples")
    if federation.num_labels <= 20:
        top.set_yticks(range(federation.num_labels), [short(name, 30) for name in federation.class_names])
    shown = "" if len(ids) == federation.num_clients else f", {len(ids)} of {federation.num_clients} clients shown"
    told = federation.describe()
    top.set_title(f"{short(told['source'], 90)}{shown}\n{short(told['partitioner'], 90)}", fontsize=9, loc="left")
    top.set_ylabel("class" if federation.targets is None else "output")
    if len(ids) == federation.num_clients:
        bottom.bar(np.arange(len(ids)), federation.num_examples(split), color="#33538c")
        bottom.set(xlabel="client", ylabel=f"{split} examples", xlim=top.get_xlim())
        if len(ids) <= NAMED and "names" in federation.manifest["clients"]:
            named = [short(f"{i}: {name}", 24) for i, name in enumerate(federation.client_names)]
            bottom.set_xticks(range(len(ids)), named, rotation=90, fontsize=7)
    else:
        top.set(xlabel=f"client, from 0 to {federation.num_clients - 1}", xticks=[])
        sizes = federation.num_examples(split)
        edges = np.linspace(sizes.min() - 0.5, sizes.max() + 0.5, min(np.ptp(sizes) + 2, 41))
        bottom.hist(sizes, bins=edges, color="#33538c")
        bottom.set(xlabel=f"{split} examples of a client", ylabel="clients")
    return figure
