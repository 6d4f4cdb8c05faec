"""Protocols: which model is measured, on which clients, with which mean, in which rounds. Every result names its own.

In an evaluated round two models are scored. The *local copy* is the model that a client of the round holds right after
its local work, before aggregation (the protocol of PFLEGO's authors, EV-local). The other is the model with which a
client predicts after the server's step: *personal*, *global* or *fine-tuned*. It is scored on all clients (EV-all, as
in PGFed and FedAMP).
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument, check_type, unknown
from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.runs import statistics
from tfpfl.runs.scores import Score as Score
from tfpfl.runs.scores import evaluation_rows as evaluation_rows
from tfpfl.runs.scores import metrics_of as metrics_of
from tfpfl.runs.scores import summarize as summarize

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
MODELS = tuple(_MODELS)[1:]  # that are scored; of those that are, clients predict with the first
_CLIENTS = {
    "all": "all clients",
    "seen": "clients that had taken part by then",
    "unseen": "clients that had never taken part by then",
    "sampled": "the round's clients",
    "new": "clients that never trained",
}
_MEANS = {"clients": "mean over clients", "examples": "pooled over examples"}
_WHENS = {
    "last": "last round",
    "last10": f"mean of the last {LAST_ROUNDS} evaluated rounds",
    "best_validation": "round with the best validation mean",
    "best_test": "best round on test, selected on test",
}
_SPLITS = {name: f"{name} examples" for name in ("test", "validation", "train")}


class Protocol(NamedTuple):
    """How a number was measured. `str()` describes it in words.

    Attributes:
        model: 'local copy', 'personal', 'fine-tuned', 'global', or 'predicts': that of the last three with which the
            algorithm's clients predict.
        clients: 'all', 'seen' (those whose work the server had used in this round or an earlier one), 'unseen' (the
            others of all clients), 'sampled' (the clients of the round, whose local copies are scored) or 'new'
            (clients that never trained, whom `tfpfl.studies.new_clients` scores, and no run).
        mean: 'clients' (every client has the same weight) or 'examples' (every example has the same weight).
        when: 'last', 'last10', 'best_validation' or 'best_test', of the evaluated rounds. 'best_test' selects the round
            on test data, as several papers do; it does not estimate the score on new data. For 'seen' and 'unseen'
            the rounds are those for 'all'; a round without such a client is left out.
        split: 'test', 'validation' or 'train'.
    """

    model: str = PREDICTS
    clients: str = "all"
    mean: str = "clients"
    when: str = "last10"
    split: str = "test"

    def check(self) -> "Protocol":
        """Checks the five entries, and returns this protocol.

        Raises:
            InvalidArgument: an entry is not one of the values above.
        """
        for name, value, known in zip(self._fields, self, (_MODELS, _CLIENTS, _MEANS, _WHENS, _SPLITS), strict=True):
            if value not in known:
                raise InvalidArgument(unknown(f"{name} of a protocol", value, known))
        return self

    @property
    def selects_on_test(self) -> bool:
        """Whether the round was selected on test examples."""
        return self.when == "best_test"

    def __str__(self) -> str:
        words = (_MODELS[self.model], _CLIENTS[self.clients], _MEANS[self.mean], _WHENS[self.when], _SPLITS[self.split])
        return "; ".join(words)


EV_ALL = Protocol()
EV_SEEN = Protocol(clients="seen")
EV_UNSEEN = Protocol(clients="unseen")
EV_LOCAL = Protocol(LOCAL_COPY, "sampled")
SIDES = ("seen", "unseen")  # the two parts of all clients
TookPart = Mapping[int, int]  # {client id: the first round in which the server used its work}

# The protocols of papers. PFLEGO: the authors' code logs the sampled clients' local copies, pooled over their examples;
# the paper averages the last ten rounds. PGFed: mean over all clients; its code keeps the best round, but scores
# FedBABU once, after the last round ("final"). FedAMP: "best mean testing accuracy" (BMTA). PFLlib: correct answers of
# all clients divided by all their test examples, best round.
PROTOCOLS = {
    "EV-all": EV_ALL,
    "EV-seen": EV_SEEN,
    "EV-unseen": EV_UNSEEN,
    "EV-local": EV_LOCAL,
    "global": EV_ALL._replace(model="global"),
    "validated": EV_ALL._replace(when="best_validation"),
    "pflego": EV_LOCAL._replace(mean="examples"),
    "pgfed": EV_ALL._replace(when="best_test"),
    "final": EV_ALL._replace(when="last"),
    "fedamp": EV_ALL._replace(when="best_test"),
    "pfllib": EV_ALL._replace(mean="examples", when="best_test"),
}


class Result(NamedTuple):
    """One result with its protocol; `entries` gives what the entry `results` in summary.json has."""

    model: str  # the first five fields are its `Protocol`
    clients: str
    mean: str
    when: str
    split: str
    score: float  # that of the run's kind, such as the accuracy, in [0, 1]
    score_ci95: float  # half the width of its 95 % interval over clients; NaN for one client, see `half_interval`
    worst_decile: float  # mean score of the worst tenth of the clients
    loss: float  # mean loss
    num_clients: int  # clients that have examples in this split, in the last of the rounds
    rounds: list  # the rounds over which this is the mean
    metrics: Mapping[str, float] = {}  # {name: mean, over the rounds that have it} of other metrics the run asked for
    named: ScoreName = ACCURACY  # what the score is called, its unit and direction

    @property
    def accuracy(self) -> float:
        """The score, which is the accuracy of classes."""
        return self.score

    @property
    def accuracy_ci95(self) -> float:
        """Half the interval of the score."""
        return self.score_ci95

    def entries(self) -> dict[str, Any]:
        """The result as summary.json has it: the score under its own name, such as 'accuracy' and 'accuracy_ci95'."""
        names = {"score": self.named.name, "score_ci95": f"{self.named.name}_ci95"}
        return {names.get(k, k): v for k, v in self._asdict().items() if k != "named"}

    @property
    def protocol(self) -> Protocol:
        """The `Protocol` with which this result was measured."""
        return Protocol._make(self[: len(Protocol._fields)])


def protocol(name: str) -> Protocol:
    """Returns the protocol of this name from `PROTOCOLS`.

    Raises:
        InvalidArgument: no protocol has this name; the message gives the nearest name.

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


def as_protocol(given: Protocol | str) -> Protocol:
    """A protocol that is given itself, or by its name in `PROTOCOLS`.

    Raises:
        InvalidArgument: no protocol has this name, it is something else, or one of its entries has no such value.
    """
    if isinstance(given, str):
        return protocol(given)
    check_type("the protocol", given, Protocol, "a Protocol, or the name of one, such as 'EV-all'")
    return given.check()


def results(evaluations: list[Score], took_part: TookPart | None = None, named: ScoreName = ACCURACY) -> list[Result]:
    """Computes the results of a run for every protocol that its evaluations allow.

    A round in which no scored client has examples of a split does not count as evaluated for that split. Where some
    clients had never taken part in one of the rounds, 'seen' and 'unseen' follow the results over all clients.

    Args:
        evaluations: the scores of the run.
        took_part: the first round of every client that took part; None: unknown, so that only 'all' is computed.
        named: the score's name, unit and direction, which decides what is better; `RunConfig.score` has it.
    """
    found, table = [], _table(evaluations)
    for model, split in sorted(table):
        kinds = ("sampled",) if model == LOCAL_COPY else ("all", *SIDES)
        for when in _WHENS:
            mixed = bool(_chosen(table, Protocol(model, "unseen", "clients", when, split), took_part, named))
            for clients in kinds if mixed else kinds[:1]:
                for mean in _MEANS:
                    wanted = Protocol(model, clients, mean, when, split)
                    if by_round := _chosen(table, wanted, took_part, named):
                        found.append(_result(wanted, by_round, named))
    return found


def result(
    evaluations: list[Score], wanted: Protocol, took_part: TookPart | None = None, named: ScoreName = ACCURACY
) -> Result | None:
    """The result of one protocol; None if no round has such clients. The arguments are those of `results`."""
    table, wanted = _table(evaluations), wanted.check()
    if wanted.model == PREDICTS:
        wanted = wanted._replace(model=_predicts({model for model, _ in table}) or PREDICTS)
    by_round = _chosen(table, wanted, took_part, named)
    return _result(wanted, by_round, named) if by_round else None


def find(found: list[Result], wanted: Protocol) -> Result | None:
    """Finds the result that was measured with a protocol; None if there is none.

    Args:
        found: the results of one run.
        wanted: the protocol; its model 'predicts' stands for the model with which the run's clients predict.
    """
    if wanted.check().model == PREDICTS:
        wanted = wanted._replace(model=predicts(found) or PREDICTS)
    return next((r for r in found if r.protocol == wanted), None)


def predicts(rows: Iterable[Any]) -> str | None:
    """The model with which clients predict: 'personal' or 'fine-tuned' if one was scored, otherwise 'global'.

    Args:
        rows: `Result`s or `Score`s of one run; None is returned if no such model was scored.
    """
    return _predicts({r.model for r in rows})


def _predicts(models: Container[str]) -> str | None:
    return next((m for m in MODELS if m in models and m != LOCAL_COPY), None)


def rows_of(
    evaluations: list[Score], wanted: Protocol, took_part: TookPart | None = None, named: ScoreName = ACCURACY
) -> dict[int, list[Score]]:
    """The scores from which a result of this protocol is computed: {round: scores}; {} if there are none.

    A round counts if a client has examples of the split. The best round is the first one with the best mean; the
    mean is that of the protocol, over all clients.
    """
    return _chosen(_table(evaluations), wanted.check(), took_part, named)


def _chosen(table: dict, wanted: Protocol, took_part: TookPart | None, named: ScoreName) -> dict:
    return _only(_rounds_of(table, wanted, named), wanted, took_part)


def _rounds_of(table: dict, wanted: Protocol, named: ScoreName) -> dict:
    """{round: rows} of the protocol's rounds, with all the clients that were scored."""
    by_round = _by_round(table, wanted)
    tested = {t: rows for t, rows in by_round.items() if any(e.num_examples for e in rows)}
    by_round = tested or by_round
    rounds = sorted(by_round)
    if wanted.when in ("last", "last10"):
        return {t: by_round[t] for t in rounds[-1 if wanted.when == "last" else -LAST_ROUNDS :]}
    judge = wanted.when.removeprefix("best_")
    if wanted.split == "train" or (judge == "test" and wanted.split != "test"):
        return {}
    judged = {t: _mean(rows, wanted.mean, named) for t, rows in _by_round(table, wanted._replace(split=judge)).items()}
    judged = {t: value for t, value in judged.items() if t in by_round and not np.isnan(value)}
    sign = 1 if named.larger_is_better else -1
    best = max(judged, key=lambda t: (sign * judged[t], -t), default=None)
    return {} if best is None else {best: by_round[best]}


def _only(by_round: dict, wanted: Protocol, took_part: TookPart | None) -> dict:
    """Of these rows, those of the clients that the protocol names as seen or as unseen; rounds without any left out."""
    if wanted.clients not in SIDES:
        return by_round
    if took_part is None:
        return {}
    seen = wanted.clients == "seen"
    found = {
        t: [e for e in rows if (took_part.get(e.client_id, math.inf) <= t) == seen] for t, rows in by_round.items()
    }
    return {t: rows for t, rows in found.items() if any(e.num_examples for e in rows)}


def per_client(
    evaluations: list[Score], wanted: Protocol = EV_ALL, took_part: TookPart | None = None, named: ScoreName = ACCURACY
) -> dict[int, float]:
    """The score of every client, averaged over the protocol's rounds in which it was scored: {client id: score}.

    NaN for a client without examples in the split. A client that first took part within the rounds of the protocol is
    'unseen' in the rounds before, and 'seen' afterwards.
    """
    by_client: dict[int, list[float]] = {}
    for rows in rows_of(evaluations, wanted, took_part, named).values():
        for e in rows:
            by_client.setdefault(e.client_id, []).append(e.score)
    return {i: statistics.mean_over_clients(values) for i, values in sorted(by_client.items())}


def worst(
    evaluations: list[Score],
    fraction: float,
    wanted: Protocol = EV_ALL,
    took_part: TookPart | None = None,
    named: ScoreName = ACCURACY,
) -> float:
    """The mean score of the worst `fraction` of the clients in each round of the protocol, averaged over the rounds.

    With 0.1 it is `Result.worst_decile`, which tables call "worst 10 %". NaN if nothing was scored.
    """
    by_round = rows_of(evaluations, wanted, took_part, named)
    return statistics.mean_over_clients(
        [statistics.worst([e.score for e in r], fraction, named.direction) for r in by_round.values()]
    )


def curve(
    evaluations: list[Score],
    wanted: Protocol = EV_ALL,
    what: str | None = None,
    took_part: TookPart | None = None,
    named: ScoreName = ACCURACY,
) -> dict[int, float]:
    """The mean score or loss of every evaluated round, {round: mean}; the protocol's `when` is ignored.

    Args:
        evaluations: the scores of a run.
        wanted: the protocol.
        what: None or the score's name, such as 'accuracy', for the score; 'loss'; or a metric that the run measured.
        took_part: see `results`; needed for 'seen' and 'unseen'.
        named: see `results`.
    """
    if what == named.name:
        what = None
    elif what == "accuracy":
        return {}  # of a kind that has none
    by_round = _only(_by_round(_table(evaluations), wanted.check()), wanted, took_part)
    means = {t: _mean(rows, wanted.mean, named, what) for t, rows in sorted(by_round.items())}
    return {t: value for t, value in means.items() if not np.isnan(value)}


def rounds_to(
    evaluations: list[Score], score: float, wanted: Protocol = EV_ALL, named: ScoreName = ACCURACY
) -> int | None:
    """The first evaluated round whose mean is `score` or better (PGFed's Table 2: 0.70); None if there is none.

    Better is at least `score`, or at most where a smaller score is better, as for RMSE.
    """
    sign = 1 if named.larger_is_better else -1
    means = curve(evaluations, wanted, named=named)
    return next((t for t, value in means.items() if sign * value >= sign * score), None)


def _table(evaluations: Iterable[Score]) -> dict:
    """{(model, split): {round: rows}}."""
    table: dict[tuple[str, str], dict[int, list[Score]]] = {}
    for e in evaluations:
        table.setdefault((e.model, e.split), {}).setdefault(e.round_num, []).append(e)
    return table


def _by_round(table: dict, wanted: Protocol) -> dict:
    """{round: rows}; {} of clients that are not scored: the local copy is of the round's, other models are of all."""
    if wanted.clients == "new" or (wanted.clients == "sampled") != (wanted.model == LOCAL_COPY):
        return {}
    model = _predicts({model for model, _ in table}) if wanted.model == PREDICTS else wanted.model
    return table.get((model, wanted.split), {})


def _result(wanted: Protocol, by_round: dict, named: ScoreName) -> Result:
    def over_rounds(function: Callable) -> float:
        return float(np.mean([function(rows) for rows in by_round.values()]))

    return Result(
        *wanted,
        score=over_rounds(lambda rows: _mean(rows, wanted.mean, named)),
        score_ci95=half_interval(by_round.values(), wanted.mean, named),
        worst_decile=over_rounds(lambda rows: statistics.worst([e.score for e in rows], 0.1, named.direction)),
        loss=over_rounds(lambda rows: _mean(rows, wanted.mean, named, "loss")),
        num_clients=statistics.num_tested([e.score for e in by_round[max(by_round)]]),
        rounds=sorted(by_round),
        metrics={
            # A round in which it is defined for no client is left out, as such clients are in the others.
            name: statistics.mean_over_clients([_mean(rows, wanted.mean, named, name) for rows in by_round.values()])
            for name in metrics_of(e for rows in by_round.values() for e in rows)
        },
        named=named,
    )


def _mean(rows: Iterable[Score], mean: str, named: ScoreName, what: str | None = None) -> float:
    values, examples = _values(rows, named, what)
    if mean == "clients":
        return statistics.mean_over_clients(values)
    if (what or named.name) == "rmse":  # the root comes last: that of all examples' squares
        return math.sqrt(statistics.pooled(np.square(values), examples))
    return statistics.pooled(values, examples)


def _values(rows: Iterable[Score], named: ScoreName, what: str | None) -> tuple[list[float], list[int]]:
    """(the values of the clients, their numbers of examples; 0 where a metric is not defined for a client)."""
    rows = list(rows)
    values = [e.score if what is None else e.value(what) for e in rows]
    left_out = what not in (None, named.name, "accuracy", "loss")
    return values, [0 if left_out and value != value else e.num_examples for e, value in zip(rows, values, strict=True)]


def half_interval(rounds: Iterable[Iterable[Score]], mean: str, named: ScoreName, what: str | None = None) -> float:
    """Half the width of the 95 % interval over clients of the mean over rounds; NaN if one client was scored.

    Args:
        rounds: the scores of each round.
        mean: 'clients' or 'examples', see `Protocol`.
        named: the score's name.
        what: None for the score, or a metric that the run measured.
    """
    found, squares = [], mean == "examples" and (what or named.name) == "rmse"
    for rows in map(list, rounds):
        values, examples = _values(rows, named, what)
        weights = examples if mean == "examples" else ~np.isnan(values)
        found.append(([e.client_id for e in rows], np.square(values) if squares else values, weights))
    return statistics.rounds_ci95(found, np.sqrt if squares else np.asarray)
