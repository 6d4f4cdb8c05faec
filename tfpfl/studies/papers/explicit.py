"""PGFed's figure of fine-tuning (arXiv 2212.01448): how much would a client gain from the other clients' risks?

Each client fine-tunes a trained global model in S steps, on all examples at once, in two ways. Implicit: it minimizes
its own risk l_i. Explicit: it minimizes l_i + mu / (I - 1) sum_{j != i} l_j. The gradient of this needs the data of all
I clients in every step, so only a simulation can do it. PGFed itself uses the others' risks to first order.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from tfpfl.algorithms.contract import ClientData
from tfpfl.algorithms.parts.local_training import whole_gradient
from tfpfl.engines.graphs import relaxed
from tfpfl.engines.rounds import Messages
from tfpfl.engines.visit import evaluate, federation_readers
from tfpfl.models import tree
from tfpfl.models.losses import client_loss
from tfpfl.runs import statistics
from tfpfl.runs.run import Run
from tfpfl.studies.new_clients import fine_tuning
from tfpfl.studies.plots.style import PALETTE, STYLE, TICKS, in_style

STEPS = 6
# The paper gives neither number. mu is the one in the authors' commands for PGFed. The rate was tried on the
# training examples of five clients, from FedAvg's model after three rounds: 0.03 lowers the risk in every step, and 0.1
# overshoots. Momentum 0.9 with rates from 0.003 to 0.03 does not end at a lower risk.
MU, ETA = 0.1, 0.03
CLIENTS = {"smoke": 2, "laptop": 10, "full": None}  # number of clients that fine-tune, drawn with the seed; None: all
KINDS = {"explicit": (PALETTE[2], "solid", "o"), "implicit": (PALETTE[1], "dashed", "s")}


def gradient(of: Callable, weights, i: int, people: int, mu: float):
    """The gradient of l_i + mu / (I - 1) sum_{j != i} l_j at `weights`.

    Args:
        of: function (weights, j) -> the gradient of l_j on all examples of client j.
        weights: where the gradient is taken.
        i, people: the client, and the number I of clients.
        mu: weight of the other clients' risks; 0 is the implicit way, which needs no other client.
    """
    own = of(weights, i)
    if not mu or people == 1:
        return own
    others = tree.zeros_like(own)
    for j in range(people):
        if j != i:
            others = tree.add(others, of(weights, j))
    return tree.add_scaled(own, mu / (people - 1), others)


def fine_tune(
    of: Callable, weights, i: int, people: int, *, mu: float, eta: float = ETA, steps: int = STEPS
) -> Iterator:
    """Yields the weights before the first step of gradient descent and after each step. Arguments: see `gradient`."""
    yield weights
    for _ in range(steps):
        weights = tree.add_scaled(weights, -eta, gradient(of, weights, i, people, mu))
        yield weights


def measure(runs: dict, *, scale: str = "full", seed: int = 0, kept=None, save=lambda data: None, tell=print) -> dict:
    """Lets clients of a run fine-tune its global model in both ways.

    Args:
        runs: {name: run folder}, one run of a method with a global model.
        scale: number of clients, see `CLIENTS`. A larger scale keeps the clients of a smaller one.
        seed: which clients are drawn.
        kept: what an interrupted call has saved; used if it belongs to the same run.
        save: called with the data after each client.
        tell: called with a line of text after each client.

    Returns:
        {"run", "rounds", "mu", "eta", "momentum", "steps", "clients": {id: {"implicit" | "explicit": [S + 1] test
        accuracies in [0, 1], None without examples}}}.

    Raises:
        CannotAdapt: the method gives clients neither a common model nor a common backbone.
    """
    (folder,) = runs.values()
    with Run.open(folder) as run:
        algorithm = run.algorithm
        how = {"run": run.config.run_id, "rounds": run.store.round_num}
        how |= {"mu": MU, "eta": ETA, "steps": STEPS}
        same = kept and all(kept.get(name) == value for name, value in how.items())
        data: dict[str, Any] = how | {"clients": dict(kept["clients"]) if same else {}}
        people = algorithm.population.num_clients
        who = np.random.default_rng(seed).permutation(people)[: CLIENTS[scale]]
        left = [int(i) for i in who if str(algorithm.population.client_ids[i]) not in data["clients"]]
        if not left:
            return data
        of, score, weights = _parts(run)
        for n, i in enumerate(left):
            ways = {"implicit": 0.0, "explicit": MU}
            data["clients"][str(algorithm.population.client_ids[i])] = {
                name: [score(w, i) for w in fine_tune(of, weights, i, people, mu=mu)] for name, mu in ways.items()
            }
            save(data)
            tell(f"fine-tuned: {len(who) - len(left) + n + 1} of {len(who)} clients")
    return data


def _parts(run: Run):
    """(gradient of l_j, test accuracy of client j, global model); j is a client's place in the population."""
    algorithm, training = run.algorithm, run.training()
    ids = algorithm.population.client_ids.tolist()
    visits = training.visits(run.store.round_num + 1, ids)
    readers = federation_readers(algorithm, run.federation, ["test"])
    risk = client_loss(algorithm.model)

    @relaxed
    def of(weights, visit):
        x, y = readers.train(visit)
        return whole_gradient(risk, weights, ClientData(x, y, visit.info, visit.key))[1]

    @relaxed
    def scores(weights, visit):
        return evaluate(algorithm.model, weights, *readers.held_out["test"](visit))

    def score(weights, j):
        found = scores(weights, visits[j])
        examples = int(found["examples"])
        return int(found["correct"]) / examples if examples else None

    # The model that clients fine-tune is the one that new clients get.
    x, y = run.federation.arrays(ids[0], "train", labels=algorithm.population.labels)
    data = ClientData(tf.constant(x), tf.constant(y), visits[0].info, tf.constant(visits[0].key))
    message, tuning = Messages(algorithm)(training.server_state(), visits[:1])(0), fine_tuning(algorithm, eta=ETA)
    weights = tuning.model(tuning.start(message, algorithm.init_client(visits[0].info), data))
    return lambda w, j: of(w, visits[j]), score, weights


def curves(data: dict) -> dict[str, np.ndarray]:
    """{way: float [n, S + 1]}: test accuracies in % by step, of the clients that have test examples."""
    rows = data["clients"].values()
    return {
        kind: 100 * np.array([r[kind] for r in rows if r[kind][0] is not None], np.float64).reshape(-1, STEPS + 1)
        for kind in KINDS
    }


def numbers(data: dict) -> dict:
    """{name: {"value", "half"}}: mean gains over clients after the last step, in points, and the number of clients."""
    found = curves(data)
    gains = {kind: values[:, -1] - values[:, 0] for kind, values in found.items()}
    told = {f"{kind} gain (points)": gain for kind, gain in gains.items()}
    told["explicit above implicit (points)"] = gains["explicit"] - gains["implicit"]
    told["accuracy before (%)"] = found["explicit"][:, 0]
    means = {
        what: {"value": statistics.mean_over_clients(values), "half": statistics.ci95(values)}
        for what, values in told.items()
    }
    return means | {"clients that fine-tuned": {"value": len(found["explicit"])}}


@in_style
def draw(data: dict) -> Figure:
    """Draws the mean test accuracy by step with its 95 % interval; below, a histogram of single clients' gains."""
    found = curves(data)
    figure = Figure(figsize=(STYLE["figure.figsize"][0], 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[1.2, 1])
    gains = [values[:, -1] - values[:, 0] for values in found.values()]
    for kind, values in found.items():
        color, line, marker = KINDS[kind]
        mean = values.mean(0)
        half = np.array([statistics.ci95(column) for column in values.T])
        above.plot(range(len(mean)), mean, label=kind, color=color, linestyle=line, marker=marker)
        above.fill_between(range(len(mean)), mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
    edges = np.histogram_bin_edges(np.concatenate(gains), bins=min(15, max(4, len(gains[0]) // 2)))
    colors = [KINDS[kind][0] for kind in found]
    _, _, bars = below.hist(gains, edges, color=colors, label=list(found))
    for patch in bars[1]:
        patch.set_hatch("////")
        patch.set_edgecolor("white")
    below.axvline(0, color="black", linewidth=0.8)
    for axes in (above, below):
        axes.tick_params(labelsize=TICKS)
    above.set(xlabel="step", ylabel="test accuracy (%)")
    above.set_title(f"Fine-tuning FedAvg's model: {len(gains[0])} clients, after {data['rounds']} rounds")
    above.legend()
    below.set(xlabel=f"a client's gain in {data['steps']} steps (points)", ylabel="clients")
    below.yaxis.get_major_locator().set_params(integer=True)
    below.legend()
    return figure
