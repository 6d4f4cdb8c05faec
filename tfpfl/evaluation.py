"""Which model, on which clients, which mean, when: a number without these four is not a result.

Two models are scored on an evaluated round. The *local copy*: what every client of the cohort holds right after its
local work, before aggregation (the PFLEGO authors' protocol, EV-local). And what the algorithm gives a client to
predict with, *personal*, *global* or *fine-tuned*, after the server's step, on all clients (EV-all; PGFed, FedAMP).
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tfpfl import statistics
from tfpfl.client_store import Evaluation

LOCAL_COPY = "local copy"
LAST_ROUNDS = 10


class Result(NamedTuple):
    """One number with its protocol; the fields are those of `results` in summary.json."""

    model: str  # personal, global, fine-tuned: after the server's step; local copy: right after the client's own
    clients: str  # all, or sampled: the round's cohort
    mean: str  # clients: every client counts the same; examples: every example does
    when: str  # last, last10 (mean of the last ten) or best_validation (best mean over clients), of evaluated rounds
    split: str  # train, validation or test
    accuracy: float  # in [0, 1]
    accuracy_ci95: float  # half the 95 % interval over clients (1.96 std / sqrt n), the mean of it over the rounds
    worst_decile: float  # mean accuracy of the worst tenth of the clients
    loss: float
    num_clients: int  # with examples in this split, in the last of the rounds
    rounds: list  # which rounds this is over


def evaluation_rows(scores: Iterable[dict], client_ids, round_num: int, model: str) -> list[Evaluation]:
    """Rows for the store from '{split}_{correct|examples|loss}' of every client; NaN where there are no examples."""
    rows = []
    for client_id, score in zip(client_ids, scores, strict=True):
        for split in ("train", "validation", "test"):
            if f"{split}_examples" not in score:
                continue
            examples = int(score[f"{split}_examples"])
            loss, accuracy = np.nan, np.nan
            if examples:
                loss, accuracy = float(score[f"{split}_loss"]), int(score[f"{split}_correct"]) / examples
            rows.append(Evaluation(round_num, int(client_id), model, split, examples, loss, accuracy))
    return rows


def summarize(rows: list[Evaluation]) -> dict:
    """{(model, split): {accuracy, loss}} over clients, of one round's rows: what history.csv shows of it."""
    summary = {}
    for model, split in sorted({(e.model, e.split) for e in rows}):
        chosen = [e for e in rows if (e.model, e.split) == (model, split)]
        summary[model, split] = {
            "accuracy": statistics.mean_over_clients([e.accuracy for e in chosen]),
            "loss": statistics.mean_over_clients([e.loss for e in chosen]),
        }
    return summary


def results(evaluations: list[Evaluation]) -> list[Result]:
    """Every combination of protocol that the evaluations of a run allow.

    A round in which no client of the cohort has examples of the split is not an evaluated one.
    """
    table = {}
    for e in evaluations:
        table.setdefault((e.model, e.split), {}).setdefault(e.round_num, []).append(e)
    found = []
    for (model, split), by_round in sorted(table.items()):
        tested = {t: rows for t, rows in by_round.items() if any(e.num_examples for e in rows)}
        by_round = tested or by_round
        rounds = sorted(by_round)
        chosen = {"last": rounds[-1:], "last10": rounds[-LAST_ROUNDS:]}
        validation = {t: _mean(rows, "clients") for t, rows in table.get((model, "validation"), {}).items()}
        validation = {t: v for t, v in validation.items() if t in by_round and not np.isnan(v)}
        if validation and split != "train":
            chosen["best_validation"] = [max(validation, key=lambda t: (validation[t], -t))]
        clients = "sampled" if model == LOCAL_COPY else "all"
        for when, over in chosen.items():
            for mean in ("clients", "examples"):
                found.append(_result(model, clients, mean, when, split, [by_round[t] for t in over], over))
    return found


def find(found: list[Result], **wanted) -> Result | None:
    """The first result whose fields are as wanted."""
    return next((r for r in found if all(getattr(r, k) == v for k, v in wanted.items())), None)


def _result(model, clients, mean, when, split, rounds_rows, rounds) -> Result:
    def over_rounds(function):
        return float(np.mean([function(rows) for rows in rounds_rows]))

    return Result(
        model=model,
        clients=clients,
        mean=mean,
        when=when,
        split=split,
        accuracy=over_rounds(lambda rows: _mean(rows, mean)),
        accuracy_ci95=over_rounds(lambda rows: statistics.ci95([e.accuracy for e in rows])),
        worst_decile=over_rounds(lambda rows: statistics.worst([e.accuracy for e in rows], 0.1)),
        loss=over_rounds(lambda rows: _mean(rows, mean, "loss")),
        num_clients=statistics.num_tested([e.accuracy for e in rounds_rows[-1]]),
        rounds=list(rounds),
    )


def _mean(rows, mean, what="accuracy"):
    values = [getattr(e, what) for e in rows]
    if mean == "clients":
        return statistics.mean_over_clients(values)
    return statistics.pooled(values, [e.num_examples for e in rows])
