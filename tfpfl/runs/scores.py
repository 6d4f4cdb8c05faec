"""The scores of single clients in a round: what an evaluation gives, and what a run's store keeps."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.runs import statistics


class Score(NamedTuple):
    """One client's loss and score with one model on one split; both NaN if it has no examples in the split.

    The score is that of the run's kind: the accuracy of classes, in [0, 1]; see `tfpfl.data.kinds`. If the client has
    examples and its model diverged, the loss is infinite, and so is a score of which less is better.
    """

    round_num: int
    client_id: int
    model: str  # global, local, personal, ...
    split: str  # train, validation or test
    num_examples: int
    loss: float
    score: float
    metrics: Mapping[str, float] = {}  # the other metrics that the run asked for; see `tfpfl.runs.metrics`

    @property
    def accuracy(self) -> float:
        """The score, which is the accuracy of classes."""
        return self.score

    def value(self, what: str) -> float:
        """The number of this name: a metric, 'accuracy' (the score) or 'loss'; NaN if it was not measured."""
        return float(getattr(self, what) if what in ("accuracy", "loss") else self.metrics.get(what, np.nan))


def or_worst(values: Any) -> Any:
    """Losses, or scores of which less is better, of clients with examples: infinity in place of what is not finite.

    NaN would say that a client has no examples. It would be left out of the means, which would look better for it.
    """
    return np.where(np.isfinite(values), values, np.inf)


def evaluation_rows(
    scores: Iterable[dict], client_ids: Iterable[int], round_num: int, model: str, measure: Callable | None = None
) -> list[Score]:
    """Makes a `Score` for every client and split.

    Args:
        scores: a dict '{split}_{correct|examples|loss}' -> scalar for every client; where the score is not a fraction
            of right examples, '{split}_score' in place of '{split}_correct'.
        client_ids: the clients, in the same order.
        round_num: the evaluated round.
        model: the name of the scored model.
        measure: (client id, split, scores) -> {name: value}, the other metrics; see `tfpfl.runs.metrics.measurer`.
    """
    rows = []
    for client_id, score in zip(client_ids, scores, strict=True):
        for split in ("train", "validation", "test"):
            if f"{split}_examples" not in score:
                continue
            examples = int(score[f"{split}_examples"])
            loss, found = np.nan, np.nan
            if examples:
                right = score.get(f"{split}_correct")
                # Of all scores that are no counts less is better.
                found = float(or_worst(score[f"{split}_score"])) if right is None else int(right) / examples
                loss = float(or_worst(score[f"{split}_loss"]))
            others = measure(int(client_id), split, score) if measure else {}
            rows.append(Score(round_num, int(client_id), model, split, examples, loss, found, others))
    return rows


def summarize(rows: list[Score], named: ScoreName = ACCURACY) -> dict:
    """The means over clients of one round's scores, for history.csv: {(model, split): {'accuracy', 'loss', ...}}.

    Args:
        rows: the scores.
        named: how the score is called.
    """
    summary = {}
    for model, split in sorted({(e.model, e.split) for e in rows}):
        chosen = [e for e in rows if (e.model, e.split) == (model, split)]
        summary[model, split] = {
            named.name: statistics.mean_over_clients([e.score for e in chosen]),
            "loss": statistics.mean_over_clients([e.loss for e in chosen]),
        } | {name: statistics.mean_over_clients([e.value(name) for e in chosen]) for name in metrics_of(chosen)}
    return summary


def metrics_of(rows: Iterable[Any]) -> list[str]:
    """The names of the other metrics that some of these `Score`s or `Result`s have, sorted."""
    return sorted({name for row in rows for name in row.metrics})
