"""Which model, on which clients, which mean, when: a number without these four is not a result.

Two models are scored on an evaluated round. The *local copy*: what every client of the cohort holds right after its
local work, before aggregation (the PFLEGO authors' protocol, EV-local). And what the algorithm gives a client to
predict with, *personal*, *global* or *fine-tuned*, after the server's step, on all clients (EV-all; PGFed, FedAMP).
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.runs import statistics


class Score(NamedTuple):
    """One client's result with one model on one split; NaN where it has no examples there."""

    round_num: int
    client_id: int
    model: str  # global, local, personal, ...
    split: str  # train, validation or test
    num_examples: int
    loss: float
    accuracy: float


LOCAL_COPY = "local copy"
PREDICTS = "predicts"
LAST_ROUNDS = 10

_MODELS = {
    PREDICTS: "the model that a client predicts with after the server's step",
    "personal": "the client's personal model after the server's step",
    "fine-tuned": "the model that the client fine-tunes for itself after the server's step",
    "global": "the one model for all after the server's step",
    LOCAL_COPY: "the model that a client holds right after its local work, before aggregation",
}
_CLIENTS = {"all": "all clients", "sampled": "the round's clients", "new": "clients that never trained"}
_MEANS = {"clients": "mean over clients", "examples": "pooled over examples"}
_WHENS = {
    "last": "last round",
    "last10": f"mean of the last {LAST_ROUNDS} evaluated rounds",
    "best_validation": "round with the best validation mean",
    "best_test": "best round on test, selected on test",
}
_SPLITS = {name: f"{name} examples" for name in ("test", "validation", "train")}


class Protocol(NamedTuple):
    """How a number was measured. `str()` says it in words.

    Attributes:
        model: 'local copy', 'personal', 'fine-tuned', 'global'; or 'predicts', whichever of the last three the
            algorithm's clients predict with.
        clients: 'all', 'sampled' (the round's cohort) or 'new' (that never trained).
        mean: 'clients' (every client counts the same) or 'examples' (every example does).
        when: 'last', 'last10', 'best_validation' or 'best_test', of the evaluated rounds. The last of these selects on
            test, as several papers do; it is no estimate of how the model does on new data.
        split: 'test', 'validation' or 'train'.
    """

    model: str = PREDICTS
    clients: str = "all"
    mean: str = "clients"
    when: str = "last10"
    split: str = "test"

    def check(self) -> "Protocol":
        """Itself.

        Raises:
            ValueError: an entry that there is not, with those that there are.
        """
        for name, value, known in zip(self._fields, self, (_MODELS, _CLIENTS, _MEANS, _WHENS, _SPLITS), strict=True):
            if value not in known:
                raise InvalidArgument(unknown(f"{name} of a protocol", value, known))
        return self

    @property
    def selects_on_test(self) -> bool:
        """Whether test examples chose the round."""
        return self.when == "best_test"

    def __str__(self) -> str:
        words = (_MODELS[self.model], _CLIENTS[self.clients], _MEANS[self.mean], _WHENS[self.when], _SPLITS[self.split])
        return "; ".join(words)


EV_ALL = Protocol()
EV_LOCAL = Protocol(LOCAL_COPY, "sampled")

# How others measure. PFLEGO: the authors' code logs the sampled clients' local copies, pooled over their examples, and
# the paper averages the last ten rounds. PGFed: mean over all clients, and its code keeps the best round. FedAMP: "best
# mean testing accuracy" (BMTA). PFLlib: correct answers of all clients by all their test examples, best round.
PROTOCOLS = {
    "EV-all": EV_ALL,
    "EV-local": EV_LOCAL,
    "global": EV_ALL._replace(model="global"),
    "validated": EV_ALL._replace(when="best_validation"),
    "pflego": EV_LOCAL._replace(mean="examples"),
    "pgfed": EV_ALL._replace(when="best_test"),
    "fedamp": EV_ALL._replace(when="best_test"),
    "pfllib": EV_ALL._replace(mean="examples", when="best_test"),
}


class Result(NamedTuple):
    """One number with its protocol; the fields are those of `results` in summary.json."""

    model: str  # these five are its `Protocol`
    clients: str
    mean: str
    when: str
    split: str
    accuracy: float  # in [0, 1]
    accuracy_ci95: float  # half the 95 % interval over clients (1.96 std / sqrt n), the mean of it over the rounds
    worst_decile: float  # mean accuracy of the worst tenth of the clients
    loss: float
    num_clients: int  # with examples in this split, in the last of the rounds
    rounds: list  # which rounds this is over

    @property
    def protocol(self) -> Protocol:
        """How it was measured."""
        return Protocol(*self[: len(Protocol._fields)])


def evaluation_rows(scores: Iterable[dict], client_ids, round_num: int, model: str) -> list[Score]:
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
            rows.append(Score(round_num, int(client_id), model, split, examples, loss, accuracy))
    return rows


def summarize(rows: list[Score]) -> dict:
    """{(model, split): {accuracy, loss}} over clients, of one round's rows: what history.csv shows of it."""
    summary = {}
    for model, split in sorted({(e.model, e.split) for e in rows}):
        chosen = [e for e in rows if (e.model, e.split) == (model, split)]
        summary[model, split] = {
            "accuracy": statistics.mean_over_clients([e.accuracy for e in chosen]),
            "loss": statistics.mean_over_clients([e.loss for e in chosen]),
        }
    return summary


def protocol(name: str) -> Protocol:
    """A protocol by its name in `PROTOCOLS`.

    Raises:
        ValueError: an unknown name, with the nearest one.

    Examples:
        >>> for part in str(protocol("EV-local")).split("; "):
        ...     print(part)
        the model that a client holds right after its local work, before aggregation
        the round's clients
        mean over clients
        mean of the last 10 evaluated rounds
        test examples
    """
    if name not in PROTOCOLS:
        raise InvalidArgument(unknown("protocol", name, PROTOCOLS))
    return PROTOCOLS[name]


def results(evaluations: list[Score]) -> list[Result]:
    """Every combination of protocol that the evaluations of a run allow.

    A round in which no client of the cohort has examples of the split is not an evaluated one.
    """
    found, table = [], _table(evaluations)
    for model, split in sorted(table):
        clients = "sampled" if model == LOCAL_COPY else "all"
        for when in _WHENS:
            for mean in _MEANS:
                wanted = Protocol(model, clients, mean, when, split)
                if by_round := _chosen(table, wanted):
                    found.append(_result(wanted, by_round))
    return found


def find(found: list[Result], wanted: Protocol | None = None, **fields) -> Result | None:
    """The result of a protocol; or the first whose fields are as wanted.

    Args:
        found: of one run, which has one of personal, fine-tuned and global that its clients predict with.
        wanted: 'predicts' stands for that one.
        fields: of `Result`.
    """
    if wanted is not None:
        fields = wanted._asdict() | {"model": predicts(found) if wanted.model == PREDICTS else wanted.model} | fields
    return next((r for r in found if all(getattr(r, k) == v for k, v in fields.items())), None)


def predicts(rows) -> str | None:
    """What clients predict with after the server's step: personal or fine-tuned where there is one, else global.

    Args:
        rows: `Result`s or `Score`s of one run.
    """
    return _predicts({r.model for r in rows})


def _predicts(models) -> str | None:
    return next((m for m in ("personal", "fine-tuned", "global") if m in models), None)


def rows_of(evaluations: list[Score], wanted: Protocol) -> dict[int, list[Score]]:
    """The evaluations that a number of this protocol is made of, by round; {} where there are none.

    A round counts where some client has examples of the split. The best round is the first one with the highest mean,
    of the protocol's own kind.
    """
    return _chosen(_table(evaluations), wanted)


def _chosen(table: dict, wanted: Protocol) -> dict:
    by_round = _by_round(table, wanted)
    tested = {t: rows for t, rows in by_round.items() if any(e.num_examples for e in rows)}
    by_round = tested or by_round
    rounds = sorted(by_round)
    if wanted.when in ("last", "last10"):
        return {t: by_round[t] for t in rounds[-1 if wanted.when == "last" else -LAST_ROUNDS :]}
    judge = wanted.when.removeprefix("best_")
    if wanted.split == "train" or (judge == "test" and wanted.split != "test"):
        return {}
    judged = {t: _mean(rows, wanted.mean) for t, rows in _by_round(table, wanted._replace(split=judge)).items()}
    judged = {t: value for t, value in judged.items() if t in by_round and not np.isnan(value)}
    best = max(judged, key=lambda t: (judged[t], -t), default=None)
    return {} if best is None else {best: by_round[best]}


def per_client(evaluations: list[Score], wanted: Protocol = EV_ALL) -> dict[int, float]:
    """{client id: its accuracy}, the mean over those of the protocol's rounds that scored it; NaN without examples."""
    by_client = {}
    for rows in rows_of(evaluations, wanted).values():
        for e in rows:
            by_client.setdefault(e.client_id, []).append(e.accuracy)
    return {i: statistics.mean_over_clients(values) for i, values in sorted(by_client.items())}


def curve(evaluations: list[Score], wanted: Protocol = EV_ALL, what: str = "accuracy") -> dict[int, float]:
    """{round: mean accuracy or loss} of all evaluated rounds; `when` is not looked at."""
    by_round = _by_round(_table(evaluations), wanted)
    means = {t: _mean(rows, wanted.mean, what) for t, rows in sorted(by_round.items())}
    return {t: value for t, value in means.items() if not np.isnan(value)}


def rounds_to(evaluations: list[Score], accuracy: float, wanted: Protocol = EV_ALL) -> int | None:
    """The first evaluated round whose mean is at least `accuracy` (PGFed's Table 2: 0.70); None if there is none."""
    return next((t for t, value in curve(evaluations, wanted).items() if value >= accuracy), None)


def _table(evaluations) -> dict:
    """{(model, split): {round: rows}}."""
    table = {}
    for e in evaluations:
        table.setdefault((e.model, e.split), {}).setdefault(e.round_num, []).append(e)
    return table


def _by_round(table: dict, wanted: Protocol) -> dict:
    model = _predicts({model for model, _ in table}) if wanted.model == PREDICTS else wanted.model
    return table.get((model, wanted.split), {})


def _result(wanted: Protocol, by_round: dict) -> Result:
    def over_rounds(function):
        return float(np.mean([function(rows) for rows in by_round.values()]))

    return Result(
        *wanted,
        accuracy=over_rounds(lambda rows: _mean(rows, wanted.mean)),
        accuracy_ci95=over_rounds(lambda rows: statistics.ci95([e.accuracy for e in rows])),
        worst_decile=over_rounds(lambda rows: statistics.worst([e.accuracy for e in rows], 0.1)),
        loss=over_rounds(lambda rows: _mean(rows, wanted.mean, "loss")),
        num_clients=statistics.num_tested([e.accuracy for e in by_round[max(by_round)]]),
        rounds=sorted(by_round),
    )


def _mean(rows, mean, what="accuracy"):
    values = [getattr(e, what) for e in rows]
    if mean == "clients":
        return statistics.mean_over_clients(values)
    return statistics.pooled(values, [e.num_examples for e in rows])
