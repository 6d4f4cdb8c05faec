"""The round loop: cohort, one round of the engine, evaluation, one transaction. It knows no algorithm and no engine.

Everything random is a function of (seed, round, client), and everything that a next round needs is in the store: a run
that is killed and resumed goes on as if nothing had happened.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Algorithm
from tfpfl.algorithms.transforms.screening import REASONS
from tfpfl.checks import InvalidArgument, TfpflError
from tfpfl.data.cohorts import cohort
from tfpfl.data.randomness import client_key
from tfpfl.engines.engine import check_engine, check_grouping, make_engine
from tfpfl.engines.machines import Machines
from tfpfl.engines.packed import initial_states, side_by_side
from tfpfl.engines.ray.engine import check_recipe
from tfpfl.engines.rounds import check_fits
from tfpfl.engines.scoring import Scorer
from tfpfl.engines.tff.aggregators import Aggregated
from tfpfl.engines.visit import GLOBAL, Visit, client_state_spec, of_global
from tfpfl.models import tree
from tfpfl.runs import protocols
from tfpfl.runs.availability import Availability
from tfpfl.runs.store import RunStore


class DivergedError(TfpflError, RuntimeError):
    """A client's work, or the server's state, is no longer finite. The rounds before are saved."""


@dataclass
class Training:
    """A run of rounds.

    Args:
        algorithm, federation: what is trained, on what.
        seed: cohorts, shuffles and other draws are functions of (seed, round, client).
        store: where rounds are committed; a store that holds rounds is continued.
        engine: 'local', 'tff' or 'ray'.
        grouping, threads: how the local engine takes clients through a round, see `Simulation`.
        machines: where else the work of rounds is done.
        availability: who comes back from a round, and when.
        passes: forward and backward through the backbone that an example makes in a visit, for the virtual clock.
        aggregator: () -> a factory of TFF's aggregators, for 'tff'; see `tfpfl.runs.aggregators`. Other
            engines can evaluate what was trained with one, but cannot continue it.
        recipe: for 'ray': (federation) -> the same algorithm; it must pickle, which an algorithm does not.
        model_name: what the algorithm's `personal_model` is called in evaluations.
        evaluate_every: rounds between evaluations; the last ten rounds are evaluated in any case. 0: only those.
        splits: the held-out parts that are scored; () for none.
        callbacks: see `tfpfl.runs.callbacks`.

    Raises:
        ValueError: the algorithm was built for other data than the federation's, or an argument is out of range.
        RuntimeError: the TFF engine is asked for where TFF is not installed, or the Ray engine without Ray.
    """

    algorithm: Algorithm
    federation: object
    seed: int = 0
    store: RunStore | None = None
    engine: str = "local"
    grouping: str = "auto"
    threads: int | None = None
    machines: Machines = Machines()
    availability: Availability = Availability()
    passes: float = 1.0
    aggregator: Callable | None = None
    recipe: Callable | None = None
    model_name: str = "personal"
    evaluate_every: int = 10
    splits: Sequence[str] = ("validation", "test")
    callbacks: Sequence = ()

    def __post_init__(self):
        check_engine(self.engine)
        check_grouping(self.grouping, self.engine)
        if self.engine == "ray":
            check_recipe(self.recipe)
        check_fits(self.algorithm, self.federation)
        if self.evaluate_every < 0:
            raise InvalidArgument(f"evaluate_every must not be negative, found {self.evaluate_every}")
        if self.model_name == GLOBAL and self.algorithm.global_model is not None:
            raise InvalidArgument(
                f"model_name={GLOBAL!r} is what the algorithm's global model is called, and its clients predict with "
                "another: take a name for that"
            )
        self.store = RunStore() if self.store is None else self.store
        self.stop_reason = None
        self._init_server = tf.function(self.algorithm.init_server, autograph=False)
        self._initial_states = initial_states(self.algorithm)
        self._spec = client_state_spec(self.algorithm)
        self._matrices = tf.function(self.algorithm.matrices or (lambda server: {}), autograph=False)
        self._like = None
        self._engines = {}
        self._evaluations = {}

    def run(self, rounds: int) -> None:
        """Trains until `rounds` rounds are committed, or a callback stops it.

        To go on after that with a larger number gives the states of a single longer run. Its evaluations are of other
        rounds, since "the last ten" are those of the shorter run; early stopping, which counts them, may differ too.

        Raises:
            DivergedError: names the round and the clients.
            MachinesError: the machines that did a round's work are gone. The rounds before are saved.
            StoreError: the store did not take a round, holds another algorithm's states, or cannot take this one's.
            ValueError: rounds < 1.
        """
        if rounds < 1:
            raise InvalidArgument(f"rounds must be at least 1, found {rounds}")
        if self.aggregator is not None and (self.engine != "tff" or self.machines.workers):
            raise InvalidArgument("an aggregator of TFF's is for the TFF engine on one worker")
        server = self._saved_state()
        self.store.check_size(server)
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
        """The server's state as it is saved: with the aggregator's, in bytes, where there is one."""
        like = tree.arrays(self._init_server())
        if self.aggregator is not None:
            like = Aggregated(like, np.zeros(0, np.uint8))
        return self.store.server_state(like)

    def _own(self, saved):
        return saved if self.aggregator is None else saved.own

    def client_states(self, client_ids: Sequence[int]) -> list:
        """Their states after the last committed round; the initial ones for clients that never took part."""
        if self._like is None:
            (self._like,) = self._new_states(self.algorithm.population.client_ids[:1])
        states = self.store.client_states(client_ids, lambda client_id: None, like=self._like)
        new = [i for i, state in enumerate(states) if state is None]
        for i, state in zip(new, self._new_states([client_ids[i] for i in new]), strict=True):
            states[i] = state
        return states

    def evaluate(self, server, *, new_states: dict | None = None, splits: Sequence[str] | None = None) -> list:
        """Scores all clients' personal models (EV-all), and where the algorithm has one beside them, its global model.

        Args:
            server: the server's state.
            new_states: by client id, states of a round that is not committed yet; others are read from the store.
            splits: default: the training's.

        Returns:
            `evaluation.evaluation_rows`, of the last committed round; of the one after it if `new_states` are given.
            First those of the algorithm's own model, called `model_name`, then those of the model 'global'.
        """
        splits, known = tuple(splits or self.splits), new_states or {}
        ids = self.algorithm.population.client_ids.tolist()
        if splits not in self._evaluations:
            ways = {"grouping": "one_by_one" if self.grouping == "one_by_one" else "auto", "threads": self.threads}
            self._evaluations[splits] = Scorer(self.algorithm, self.federation, splits, **ways)
        others = [i for i in ids if i not in known]
        known = dict(zip(others, self.client_states(others), strict=True)) | known
        t = self.store.round_num + (new_states is not None)
        scores = self._evaluations[splits](server, [known[i] for i in ids], self.visits(t, ids))
        rows = protocols.evaluation_rows(scores, ids, t, self.model_name)
        return rows + protocols.evaluation_rows(map(of_global, scores), ids, t, GLOBAL)

    def matrices(self, server) -> dict[str, np.ndarray]:
        """The algorithm's matrices, [I, I] each, by name; {} where it has none."""
        return {} if self.algorithm.matrices is None else tree.arrays(self._matrices(server))

    def visits(self, round_num: int, client_ids) -> list[Visit]:
        """What the coordinator hands to these clients in a round."""
        info = self.algorithm.population.info
        keys = client_key(self.seed, round_num, client_ids)
        dtype = self.algorithm.model.dtype
        return [Visit(info(i, dtype), key) for i, key in zip(client_ids, keys, strict=True)]

    def is_evaluated(self, round_num: int, rounds: int) -> bool:
        """Whether a round is: every `evaluate_every`th, and the last ten; none where there are no splits."""
        regular = self.evaluate_every and round_num % self.evaluate_every == 0
        return bool(self.splits) and (bool(regular) or round_num > rounds - protocols.LAST_ROUNDS)

    def _round(self, t: int, rounds: int, server):
        started = time.perf_counter()
        ids, row = self._arrived(t)
        states, evaluations = {}, []
        evaluated = self.is_evaluated(t, rounds)
        if len(ids):
            engine = self._engine(tuple(self.splits) if evaluated else ())
            out = engine.next(server, self.client_states(ids), self.visits(t, ids))
            server = out.server
            self._check(t, ids, out._replace(server=self._own(server)))
            states = dict(zip(ids.tolist(), out.client_states, strict=True))
            metrics = {name: np.asarray(value).item() for name, value in out.metrics.items() if name != "finite"}
            row = {**row, **metrics}
            by_client = dict(zip(ids.tolist(), out.client_metrics, strict=True))
            rejected = {i: int(m["rejected"]) for i, m in by_client.items() if int(m.get("rejected", 0))}
            if rejected:
                row["rejected_clients"] = "; ".join(f"{i}: {REASONS[why]}" for i, why in rejected.items())
            if evaluated:
                good = {i: m for i, m in by_client.items() if i not in rejected}
                evaluations = protocols.evaluation_rows(good.values(), good, t, protocols.LOCAL_COPY)
        seconds = time.perf_counter() - started
        if evaluated:
            evaluations += self.evaluate(self._own(server), new_states=states)
        for (model, split), score in protocols.summarize(evaluations).items():
            row |= {f"{model} {split} {name}": value for name, value in score.items()}
        row["seconds"] = seconds  # the round's work, without evaluation of all clients and without saving
        matrices = self.matrices(self._own(server)) if evaluated else {}
        states = {i: tree.arrays(s) for i, s in states.items()}
        self.store.commit_round(t, tree.arrays(server), states, row, evaluations, matrices)
        for callback in self.callbacks:
            callback.round(self, row)
        return server

    def _arrived(self, t):
        """(the clients whose work of round t reaches the server, the beginning of its history row)."""
        population, availability = self.algorithm.population, self.availability
        if availability.is_perfect:
            ids = cohort(self.seed, t, population)
            return ids, {"round": t, "clients": len(ids)}
        sampled = cohort(self.seed, t, population, availability.present(t, population.client_ids))
        examples = population.num_examples[np.searchsorted(population.client_ids, sampled)]
        found = availability.round(self.seed, t, sampled, examples * self.passes)
        row = {"round": t, "clients": len(found.came), "dropped": len(found.dropped), "late": len(found.late)}
        return found.came, row | ({"virtual_seconds": found.seconds} if availability.seconds else {})

    def _check(self, t, ids, out) -> None:
        bad = [int(i) for i, m in zip(ids, out.client_metrics, strict=True) if not int(m["finite"])]
        if bad:
            losses = ", ".join(
                f"client {i} (loss {float(m['loss']):.3g})"
                for i, m in zip(ids, out.client_metrics, strict=True)
                if int(i) in bad
            )
            raise DivergedError(
                f"round {t} diverged: the work of {losses} is not finite. A smaller learning rate may help; rounds "
                f"up to {t - 1} are saved"
            )
        for leaf in tf.nest.flatten(out.server):
            leaf = np.asarray(leaf)
            if np.issubdtype(leaf.dtype, np.floating) and not np.isfinite(leaf).all():
                raise DivergedError(
                    f"round {t} diverged: the server's state is no longer finite after adding the updates of clients "
                    f"{', '.join(map(str, ids))}. Rounds up to {t - 1} are saved"
                )

    def _engine(self, held_out: tuple):
        """The engine of rounds that score these splits, made once."""
        if held_out not in self._engines:
            self._engines[held_out] = make_engine(
                self.engine,
                self.algorithm,
                self.federation,
                held_out=held_out,
                grouping=self.grouping,
                threads=self.threads,
                machines=self.machines,
                aggregator=self.aggregator,
                recipe=self.recipe,
            )
        return self._engines[held_out]

    def _new_states(self, client_ids) -> list:
        """The states of clients that never took part."""
        if not len(client_ids):
            return []
        info, dtype = self.algorithm.population.info, self.algorithm.model.dtype
        infos = side_by_side([info(int(i), dtype) for i in client_ids])
        return self._initial_states(infos).each(self._spec)
