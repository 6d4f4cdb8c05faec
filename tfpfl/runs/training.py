"""The round loop: draws the clients, executes a round, evaluates, and saves all in one transaction.

It works with every algorithm and every engine. All random numbers are functions of (seed, round, client), and the store
holds everything that the next round needs. So a run that is killed and resumed gives the same numbers as without that.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.transforms.schedule import at_round
from tfpfl.algorithms.transforms.screening import REASONS
from tfpfl.checks import InvalidArgument, TfpflError, check_whole_number, traced_by_design
from tfpfl.data.client_names import number_and_name
from tfpfl.data.federation import Federation
from tfpfl.engines.engine import make_engine
from tfpfl.engines.machines import Machines
from tfpfl.engines.packed import initial_states, side_by_side
from tfpfl.engines.scoring import Scorer
from tfpfl.engines.tff.aggregators import Aggregated
from tfpfl.engines.visit import GLOBAL, Visit, WithLogits, client_state_spec, of_global, visits
from tfpfl.models import tree
from tfpfl.runs import protocols
from tfpfl.runs.availability import Availability
from tfpfl.runs.metrics import ALWAYS, as_metric, measurer
from tfpfl.runs.store import RunStore
from tfpfl.runs.training_arguments import as_list, check_training


class DivergedError(TfpflError, RuntimeError):
    """A client's update or the server's state has NaN or infinity. All earlier rounds are saved."""


@dataclass
class Training:
    """Trains an algorithm on a federation, round after round.

    Args:
        algorithm: the algorithm to train.
        federation: the clients' examples.
        seed: the clients of a round, shuffles and all other draws are functions of (seed, round, client).
        store: where rounds are saved; if it holds rounds, they are continued, and must be of this seed. Default: in
            memory.
        engine: 'local', 'tff' or 'ray'.
        grouping, threads: how the local engine computes the clients of a round; see `Simulation`.
        machines: the TFF workers or the Ray cluster that do the clients' work.
        availability: which clients come back from a round, and when.
        quorum: (number of clients with which a round began) -> how many must come back; with fewer, the round changes
            nothing. Default: one is enough. See `tfpfl.algorithms.transforms.secure.quorum`.
        passes: how often an example goes forward and backward through the backbone in a visit, for the virtual clock.
        aggregator: a TFF aggregator factory, or a function () -> one, for 'tff' on one worker; see
            `tfpfl.runs.aggregators`. Other engines can evaluate what was trained with one, but cannot continue it.
        recipe: (federation) -> the same algorithm, for 'ray'. It must be picklable, because an algorithm is not.
        model_name: the name of the algorithm's `personal_model` in evaluations.
        evaluate_every: rounds from one evaluation to the next. The last ten rounds are evaluated in any case; 0: only
            those.
        splits: the held-out splits that are scored; () for none.
        callbacks: see `tfpfl.runs.callbacks`.
        metrics: what is measured besides score and loss: names, functions (labels [N], logits [N, K]) -> number, or
            `tfpfl.runs.Metric`s; see `tfpfl.runs.metrics`.

    Raises:
        InvalidArgument: an argument has a wrong type; the seed, `passes` or `evaluate_every` is negative; the algorithm
            was built for other data; the engine, a split or a metric is unknown; the machines are not for the engine;
            'ray' has no recipe; or `model_name` is 'global' although the algorithm has a global model beside the
            personal ones.
        OtherRun: the store holds rounds of another seed. (One that was made with a `run_id` is named by that alone.)
        Unavailable: TFF (for 'tff') or Ray (for 'ray') is not installed.
    """

    algorithm: Algorithm
    federation: Federation
    seed: int = 0
    store: RunStore = cast(RunStore, None)  # once it is made, one in memory
    engine: str = "local"
    grouping: str = "auto"
    threads: int | None = None
    machines: Machines = Machines()
    availability: Availability = Availability()
    quorum: Callable[[int], int] | None = None
    passes: float = 1.0
    aggregator: Any = None
    recipe: Callable | None = None
    model_name: str = "personal"
    evaluate_every: int = 10
    splits: Sequence[str] = ("validation", "test")
    callbacks: Sequence = ()
    metrics: Sequence = ()

    def __post_init__(self):
        self.callbacks, self.splits, self.metrics = map(as_list, (self.callbacks, self.splits, self.metrics))
        check_training(self)
        kind = self.algorithm.model.kind.label
        self.score, always = kind.score, (*ALWAYS, kind.score.name)
        self.metrics = [as_metric(metric, kind) for metric in self.metrics if metric not in always]
        labels = self.algorithm.population.labels
        self._measure = measurer(self.metrics, self.federation, labels) if self.metrics else None
        self.store = RunStore() if self.store is None else self.store
        self.store.check_seed(self.seed)
        self.store.set_score(self.score)
        self.stop_reason = None
        self._init_server = traced_by_design(tf.function(self.algorithm.init_server, autograph=False))
        self._initial_states = initial_states(self.algorithm)
        self._spec = client_state_spec(self.algorithm)
        self._matrices = traced_by_design(tf.function(self.algorithm.matrices or (lambda server: {}), autograph=False))
        self._like = None
        self._engines = {}
        self._evaluations = {}

    def run(self, rounds: int) -> None:
        """Trains until the store holds `rounds` rounds, or a callback stops the training.

        A later call with a larger number gives the same states as one longer training. But other rounds are evaluated,
        because the last ten rounds of the shorter training were; so early stopping may differ. And with
        grouping='stacked' the states are equal up to rounding only, because clients of an evaluated round are computed
        one by one.

        Args:
            rounds: the total number of rounds, at least 1.

        Raises:
            DivergedError: a client's work or the server's state is not finite; the message names the round and the
                clients. All earlier rounds are saved.
            MachinesError: the TFF workers or the Ray cluster are lost. All earlier rounds are saved.
            StoreError: a round could not be saved, the store holds states of another algorithm, or the state is too
                large for it.
            InvalidArgument: `rounds` is less than 1 or no int, or there is an aggregator and not the TFF engine on
                one worker.
        """
        check_whole_number(1, rounds=rounds)
        if self.aggregator is not None and (self.engine != "tff" or self.machines.workers):
            raise InvalidArgument(
                f"a TFF aggregator needs engine 'tff' with one worker, found engine {self.engine!r} and "
                f"{len(self.machines.workers)} other workers"
            )
        server = self._saved_state()
        self.store.check_size(server)
        self.store.keep_seed(self.seed)
        self.stop_reason = None  # of an earlier call; a callback that still wants to stop says so when it starts
        with ExitStack() as started:
            for callback in self.callbacks:
                callback.start(self, rounds)
                started.callback(callback.end, self)
            while self.store.round_num < rounds and self.stop_reason is None:
                server = self._round(self.store.round_num + 1, rounds, server)

    def server_state(self):
        """The server's state after the last committed round."""
        return self._own(self._saved_state())

    def _saved_state(self):
        """The server's state as the store has it: if there is a TFF aggregator, together with its state in bytes."""
        like = tree.arrays(self._init_server())
        if self.aggregator is not None:
            like = Aggregated(like, np.zeros(0, np.uint8))
        return self.store.server_state(like)

    def _own(self, saved):
        return saved if self.aggregator is None else saved.own

    def client_states(self, client_ids: Sequence[int]) -> list:
        """The clients' states after the last committed round; the initial states of clients that never took part."""
        if self._like is None:
            (self._like,) = self._new_states(self.algorithm.population.client_ids[:1])
        states = self.store.client_states(client_ids, lambda client_id: None, like=self._like)
        new = [i for i, state in enumerate(states) if state is None]
        for i, state in zip(new, self._new_states([client_ids[i] for i in new]), strict=True):
            states[i] = state
        return states

    def evaluate(self, server, *, new_states: dict | None = None, splits: Sequence[str] | None = None) -> list:
        """Scores all clients' personal models (EV-all) and, if the algorithm has one beside them, its global model.

        Args:
            server: the server's state.
            new_states: {client id: state} of a round that is not saved yet; other states are read from the store.
            splits: the splits to score; default: those of this training.

        Returns:
            A list of `Score`, for the last committed round, or for the next one if `new_states` is given. First those
            of the personal models, called `model_name`, then those of the model 'global'.
        """
        splits, known = tuple(splits or self.splits), new_states or {}
        ids = self.algorithm.population.client_ids.tolist()
        if splits not in self._evaluations:
            grouping = "one_by_one" if self.grouping == "one_by_one" else "auto"
            self._evaluations[splits] = Scorer(
                self.algorithm, self.federation, self._scored(splits), grouping=grouping, threads=self.threads
            )
        others = [i for i in ids if i not in known]
        known = dict(zip(others, self.client_states(others), strict=True)) | known
        t = self.store.round_num + (new_states is not None)
        scores = self._evaluations[splits](server, [known[i] for i in ids], self.visits(t, ids))
        rows = protocols.evaluation_rows(scores, ids, t, self.model_name, self._measure)
        return rows + protocols.evaluation_rows(map(of_global, scores), ids, t, GLOBAL, self._measure)

    def _scored(self, splits: tuple) -> tuple:
        """The splits to score, with the clients' logits where metrics need them."""
        return WithLogits(splits) if self.metrics else splits

    def matrices(self, server) -> dict[str, np.ndarray]:
        """The algorithm's matrices, {name: [I, I]}, for this server state; {} if the algorithm has none."""
        return {} if self.algorithm.matrices is None else tree.arrays(self._matrices(server))

    def visits(self, round_num: int, client_ids) -> list[Visit]:
        """Makes what these clients are given in a round: their scalars and the random keys of the round."""
        return visits(self.algorithm, round_num, client_ids, seed=self.seed)

    def is_evaluated(self, round_num: int, rounds: int) -> bool:
        """Whether a round is evaluated: every `evaluate_every`th is, and the last ten; none without splits."""
        regular = self.evaluate_every and round_num % self.evaluate_every == 0
        return bool(self.splits) and (bool(regular) or round_num > rounds - protocols.LAST_ROUNDS)

    def _round(self, t: int, rounds: int, server):
        started = time.perf_counter()
        ids, gone, row = self._enough(*self._arrived(t))
        states, evaluations = {}, []
        evaluated = self.is_evaluated(t, rounds)
        if len(ids) or len(gone):
            engine = self._engine(tuple(self.splits) if evaluated else ())
            server = at_round(server, t)  # where rates follow a schedule; rounds without clients count, too
            everyone = np.concatenate([ids, gone]) if len(gone) else ids
            how = {"gone": gone.tolist()} if len(gone) else {}
            out = engine.next(server, self.client_states(everyone), self.visits(t, everyone), **how)
            server = out.server
            self._check(t, everyone, out._replace(server=self._own(server)))
            came = slice(len(ids))
            out = out._replace(client_states=out.client_states[came], client_metrics=out.client_metrics[came])
            states = dict(zip(ids.tolist(), out.client_states, strict=True))
            metrics = {name: np.asarray(value).item() for name, value in out.metrics.items() if name != "finite"}
            row |= {name: value for name, value in metrics.items() if value == value}  # NaN: a mean over no client
            by_client = dict(zip(ids.tolist(), out.client_metrics, strict=True))
            rejected = {i: int(m["rejected"]) for i, m in by_client.items() if int(m.get("rejected", 0))}
            if rejected:
                row["rejected_clients"] = "; ".join(f"{i}: {REASONS[why]}" for i, why in rejected.items())
            if evaluated and len(ids):
                good = {i: m for i, m in by_client.items() if i not in rejected}
                evaluations = protocols.evaluation_rows(good.values(), good, t, protocols.LOCAL_COPY, self._measure)
        seconds = time.perf_counter() - started
        if evaluated:
            evaluations += self.evaluate(self._own(server), new_states=states)
        for (model, split), score in protocols.summarize(evaluations, self.score).items():
            row |= {f"{model} {split} {name}": value for name, value in score.items()}
        row["seconds"] = seconds  # of the round alone, without the evaluation of all clients and without saving
        matrices = self.matrices(self._own(server)) if evaluated else {}
        states = {i: tree.arrays(s) for i, s in states.items()}
        self.store.commit_round(t, tree.arrays(server), states, row, evaluations, matrices)
        for callback in self.callbacks:
            callback.round(self, row)
        return server

    def _arrived(self, t):
        """The clients whose work reaches the server in round t, and the first entries of its history row.

        Returns:
            The ids of the clients that come back; of those that leave between the two exchanges of a round; the row.
        """
        population, availability = self.algorithm.population, self.availability
        found = availability.of_round(self.seed, t, population, population.num_examples * self.passes)
        row: dict[str, Any] = {"round": t, "clients": len(found.came)}
        if not availability.is_perfect:
            row |= {"dropped": len(found.dropped), "late": len(found.late)}
        gone = found.between if self.algorithm.first is not None else found.between[:0]
        return found.came, gone, row | ({"virtual_seconds": found.seconds} if availability.seconds else {})

    def _enough(self, ids, gone, row):
        """The same, or no ids if too few clients came back; the row then says how many in `too_few`."""
        began = len(ids) + row.get("dropped", 0) + row.get("late", 0)
        if self.quorum is None or not began or len(ids) >= self.quorum(began):
            return ids, gone, row
        return ids[:0], gone[:0], row | {"clients": 0, "too_few": len(ids)}

    def _check(self, t, ids, out) -> None:
        bad = [int(i) for i, m in zip(ids, out.client_metrics, strict=True) if not int(m["finite"])]
        if bad:
            losses = ", ".join(
                f"client {number_and_name(self.federation, int(i))}"
                + (f" (loss {float(m['loss']):.3g})" if "loss" in m else "")
                for i, m in zip(ids, out.client_metrics, strict=True)
                if int(i) in bad
            )
            raise DivergedError(
                f"round {t} diverged: the work of {losses} is not finite, or its weight is negative. A smaller "
                f"learning rate may help; rounds up to {t - 1} are saved"
            )
        for leaf in tf.nest.flatten(out.server):
            leaf = np.asarray(leaf)
            if np.issubdtype(leaf.dtype, np.floating) and not np.isfinite(leaf).all():
                clients = ", ".join(number_and_name(self.federation, int(i)) for i in ids)
                raise DivergedError(
                    f"round {t} diverged: the server's state is no longer finite after adding the updates of clients "
                    f"{clients}. Rounds up to {t - 1} are saved"
                )

    def _engine(self, held_out: tuple):
        """The engine for rounds that score these splits; it is made once."""
        if held_out not in self._engines:
            self._engines[held_out] = make_engine(
                self.engine,
                self.algorithm,
                self.federation,
                held_out=self._scored(held_out),
                grouping=self.grouping,
                threads=self.threads,
                machines=self.machines,
                aggregator=self.aggregator,
                recipe=self.recipe,
            )
        return self._engines[held_out]

    def _new_states(self, client_ids) -> list:
        """The initial states of clients."""
        if not len(client_ids):
            return []
        info, dtype = self.algorithm.population.info, self.algorithm.model.dtype
        infos = side_by_side([info(int(i), dtype) for i in client_ids])
        return self._initial_states(infos).each(self._spec)
