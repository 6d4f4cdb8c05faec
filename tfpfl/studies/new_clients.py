"""Measures how well new clients do, which took no part in training, while they adapt a trained run to their examples.

This is PGFed's experiment (Luo et al., ICCV 2023): 80 of 100 clients train. Each of the other 20 then fine-tunes for 20
epochs, and their mean score (PGFed's: the accuracy) is drawn over the epochs 0 to 20. There are two protocols:

own     Every method adapts in its own way (`Algorithm.adapt`): PFLEGO fits a head to the frozen backbone, Ditto trains
        a model near the global one, FedAvg trains all of the global one. Learning rates, momentum and batch size are
        those of the run.
global  Every method adapts in the same way, as in PGFed: SGD with momentum 0.9 on all weights. It starts from the
        global model; from the shared backbone and a new head if heads are personal; from w^0 for Local, which shares
        nothing. With mini-batches the momentum starts at 0 in every epoch, as in the authors' code; without, an epoch
        is one step, and the momentum goes on. (In 'own' it always goes on from epoch to epoch.)

An epoch is one pass over the client's training examples; without mini-batches, it is one step. The run is not changed.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import Adaptation, Algorithm, ClientData
from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.optimizers import sgd
from tfpfl.algorithms.transforms.normalization import with_fixed_statistics
from tfpfl.algorithms.transforms.schedule import counted_part
from tfpfl.checks import InvalidArgument, check_rates, check_type, check_whole_number, unknown
from tfpfl.data.kinds import ACCURACY, ScoreName
from tfpfl.engines.graphs import check_threads, in_order, relaxed
from tfpfl.engines.rounds import Messages, for_new_clients
from tfpfl.engines.visit import evaluate, federation_readers
from tfpfl.models import tree
from tfpfl.runs import files, statistics
from tfpfl.runs.client_model import new_visits
from tfpfl.runs.config import read_config
from tfpfl.runs.run import Run
from tfpfl.runs.scores import or_worst
from tfpfl.studies.records import Described
from tfpfl.studies.run_groups import check_comparable

WAYS = ("own", "global")


class CannotAdapt(InvalidArgument):
    """New clients cannot adapt to this algorithm by this protocol. The message says why."""


class Adapted(NamedTuple):
    """The scores of new clients while they adapt. Column e holds the scores after e epochs; 0 is before the first."""

    name: str  # what tables and plots call it, such as the run folder
    protocol: str  # 'own' or 'global'
    split: str  # the examples that were scored: 'train', 'validation' or 'test'
    client_ids: np.ndarray  # int [n]
    num_examples: np.ndarray  # int [n], in the split
    score: np.ndarray  # float [n, epochs + 1], such as the accuracy; NaN for a client without examples in the split
    loss: np.ndarray  # float [n, epochs + 1], mean loss; NaN likewise; infinity if the client diverged
    client_names: Sequence[str] = ()  # [n], the clients' names in the federation; () if they are not known
    named: ScoreName = ACCURACY  # what the score is called, its unit and direction

    @property
    def accuracy(self) -> np.ndarray:
        """The score, which is the accuracy of classes."""
        return self.score

    @property
    def means(self) -> np.ndarray:
        """float [epochs + 1]: mean score over the clients, each with the same weight."""
        return np.array([statistics.mean_over_clients(column) for column in self.score.T])

    @property
    def intervals(self) -> np.ndarray:
        """float [epochs + 1]: half the 95 % interval of the mean over the clients."""
        return np.array([statistics.ci95(column) for column in self.score.T])


def fine_tuning(
    algorithm: Algorithm, *, eta: float, momentum: float = 0.9, batch_size: int | None = None, name: str = "this method"
) -> Adaptation:
    """The protocol 'global': fine-tuning of all weights by SGD, as an `Adaptation`.

    Args:
        algorithm: the algorithm that was trained.
        eta, momentum: learning rate and momentum of SGD. With mini-batches, the momentum starts at 0 in every epoch.
        batch_size: examples in a step; None: all examples of the client.
        name: what error messages call the algorithm.

    Raises:
        CannotAdapt: when a client starts: the method gives clients neither a common model nor a common backbone.
        InvalidArgument: `eta` or `momentum` is negative or not finite.
    """
    check_rates(eta=eta, momentum=momentum)

    def start(message, state, data):
        if algorithm.global_model is not None:
            return algorithm.global_model(message)
        nothing_is_sent = not tf.nest.flatten(counted_part(message))  # Local: a new client starts from w^0, as all did
        if algorithm.shares_backbone or nothing_is_sent:
            if algorithm.adapt is None:
                return algorithm.personal_model(message, state, data)
            return algorithm.adapt.model(algorithm.adapt.start(message, state, data))
        raise CannotAdapt(
            f"{name} cannot be fine-tuned with --protocol global: it gives clients neither a common model nor a common "
            f"backbone.{'' if algorithm.adapt is None else ' Use --protocol own.'}"
        )

    optimizer = sgd(eta, momentum)

    def tuning_from(start):
        tuning = adaptation(algorithm.model, start, optimizer, batch_size=batch_size)
        if batch_size is None:
            return tuning

        def epoch(fit, data, n):
            return tuning.epoch(fit._replace(slots=optimizer.init(fit.weights)), data, n)

        return tuning._replace(epoch=epoch)

    return with_fixed_statistics(algorithm.model, start, tuning_from)


def adapt_clients(
    algorithm: Algorithm,
    federation,
    server,
    client_ids: Sequence[int] | None = None,
    *,
    epochs: int = 20,
    adapt: Adaptation | None = None,
    split: str = "test",
    seed: int = 0,
    round_num: int = 0,
    threads: int | None = None,
    name: str = "",
    protocol: str = "own",
    only: Callable[[int], np.ndarray] | None = None,
) -> Adapted:
    """Lets new clients adapt, and scores them before the first epoch and after each one.

    New clients are those of the federation that are not in `algorithm.population`.

    Args:
        algorithm: the algorithm that was trained.
        federation: the federation, with more clients than the population.
        server: the server's state after training.
        client_ids: the new clients that adapt; default: all of them.
        epochs: number of epochs of each client.
        adapt: how a client adapts; default: `algorithm.adapt`.
        split: the examples that are scored: 'train', 'validation' or 'test'.
        seed, round_num: decide, with the client and the epoch, how examples are shuffled.
        threads: number of clients that are computed at the same time; None: chosen for this machine.
        name, protocol: what the result is called.
        only: (client id) -> the places, int [m], of those among its training examples that a client adapts to; None:
            to all.

    Raises:
        CannotAdapt: the algorithm has no `adapt`, and none is given.
        InvalidArgument: there is no new client; a client id is not in the federation, or in the population; a client
            has more classes than the shared head has outputs; `epochs` is negative; `threads` is less than 1.
    """
    adapt = adapt or algorithm.adapt
    if adapt is None:
        raise CannotAdapt(
            "a client of this method becomes personal only by taking part in rounds (its `adapt` is None; its file in "
            "tfpfl/algorithms says why)"
        )
    check_whole_number(0, epochs=epochs)
    ids, threads = _new_ids(algorithm.population, federation, client_ids), check_threads(threads)
    readers = federation_readers(algorithm, federation, [split])
    visits = new_visits(algorithm, federation, ids, seed, round_num)
    message_for = Messages(for_new_clients(algorithm, adapt))(server, visits)

    dtype, kind = algorithm.model.dtype, algorithm.model.kind
    wanted = ("correct" if kind.counts else "score", "loss")

    def work(message, visit, *places):
        x, y = readers.train(visit)
        if places:
            x, y = tree.gather_rows((x, y), *places)
        data = ClientData(x, y, visit.info, visit.key)
        held_out = readers.held_out[split](visit)

        def write(arrays, n, carry):
            outputs = None if adapt.predictor is None else adapt.predictor(carry, data)
            scores = evaluate(algorithm.model, adapt.model(carry), *held_out, outputs=outputs)
            return tuple(array.write(n, scores[name]) for array, name in zip(arrays, wanted, strict=True))

        def one_epoch(n, carry, arrays):
            new = adapt.epoch(carry, data, n)
            # What is known of a shape must not be lost from one epoch to the next.
            carry = tf.nest.map_structure(lambda now, before: tf.ensure_shape(now, before.shape), new, carry)
            return n + 1, carry, write(arrays, n + 1, carry)

        carry = adapt.start(message, algorithm.init_client(visit.info), data)
        arrays = tuple(tf.TensorArray(tf.int32 if name == "correct" else dtype, epochs + 1) for name in wanted)
        arrays = tf.while_loop(
            lambda n, *_: n < epochs, one_epoch, (0, carry, write(arrays, 0, carry)), parallel_iterations=1
        )[2]
        return tuple(array.stack() for array in arrays)

    work, chosen = relaxed(work), [()] * len(ids)
    if only is not None:
        chosen = [(tf.constant(only(i), tf.int64),) for i in ids.tolist()]
        counts = [np.int32(len(places)) for (places,) in chosen]
        visits = [v._replace(info=v.info._replace(num_examples=n)) for v, n in zip(visits, counts, strict=True)]
    found = list(in_order(lambda i: work(message_for(i), visits[i], *chosen[i]), range(len(ids)), threads))
    examples, names = federation.num_examples(split)[ids], [federation.client_names[i] for i in ids]
    score, loss = (np.stack([np.asarray(each[k], float) for each in found]) for k in (0, 1))
    untested = examples[:, None] == 0
    # A client that diverged must not look like one without examples, which is left out of the means.
    score = score / np.maximum(examples, 1)[:, None] if kind.counts else or_worst(score)
    loss = or_worst(loss)
    score, loss = (np.where(untested, np.nan, each) for each in (score, loss))
    return Adapted(name, protocol, split, ids, examples, score, loss, names, kind.label.score)


def adapt_new_clients(
    run,
    *,
    epochs: int = 20,
    protocol: str = "own",
    eta: float | None = None,
    batch_size: int | None = None,
    split: str = "test",
    only: Callable[[int], np.ndarray] | None = None,
) -> Adapted:
    """Lets the clients of a federation adapt that the run did not train on. See `adapt_clients`.

    Args:
        run: an open `Run` with at least one round. It is only read.
        epochs, split, only: as in `adapt_clients`.
        protocol: 'own' or 'global'; see the module.
        eta, batch_size: for the protocol 'global' only; default: the run's hyperparameters of these names.

    Raises:
        CannotAdapt: the method cannot adapt by this protocol.
        InvalidArgument: as in `adapt_clients`; an unknown protocol; the run has no rounds; the protocol 'global' needs
            `eta`, and the run has none; the protocol is 'own' and `eta` or `batch_size` is given.
    """
    check_type("the run", run, Run, "a tfpfl.Run: tfpfl.Run.open(folder) opens one")
    if protocol not in WAYS:
        raise InvalidArgument(unknown("protocol", protocol, WAYS))
    if run.store.round_num == 0:
        raise InvalidArgument(f"{run.folder} has no rounds yet")
    adapt = None
    if protocol == "global":
        known = run.config.hyperparameters
        eta = known.get("eta") if eta is None else eta
        if eta is None:
            raise InvalidArgument(f"{run.config.algorithm} has no hyperparameter eta: say with which rate to fine-tune")
        batch_size = known.get("batch_size") if batch_size is None else batch_size
        adapt = fine_tuning(run.algorithm, eta=eta, batch_size=batch_size, name=run.config.algorithm)
    elif eta is not None or batch_size is not None:
        raise InvalidArgument("eta and batch_size are for the protocol 'global'; 'own' takes what the run trained with")
    return adapt_clients(
        run.algorithm,
        run.examples,
        run.training().server_state(),
        epochs=epochs,
        adapt=adapt,
        split=split,
        seed=run.config.seed,
        round_num=run.store.round_num + 1,
        name=str(run.folder),
        protocol=protocol,
        only=only,
    )


def write_csv(results: Sequence[Adapted], path) -> None:
    """Writes the scores as CSV to the file `path`: a row for each run, client and epoch; accuracies in [0, 1].

    Raises:
        InvalidArgument: the runs are of different kinds, whose scores cannot stand in one column.
    """
    score = check_one_score(results).name
    columns, rows = ["run", "protocol", "split", "client", "name", "num_examples", "epoch", score, "loss"], []
    for r in results:
        for i, client_id in enumerate(r.client_ids.tolist()):
            name = r.client_names[i] if r.client_names else str(client_id)
            for e, (value, loss) in enumerate(zip(r.score[i].tolist(), r.loss[i].tolist(), strict=True)):
                row = [r.name, r.protocol, r.split, client_id, name, int(r.num_examples[i]), e, value, loss]
                rows.append(dict(zip(columns, row, strict=True)))
    files.write_csv(Path(path), columns, rows)


def check_same_clients(folders: Sequence[str | os.PathLike]) -> None:
    """Checks, before any client adapts, that the runs have new clients, and the same ones.

    Args:
        folders: run folders whose results are to stand side by side.

    Raises:
        RunError: a folder is no run folder.
        InvalidArgument: a run keeps no clients out of training, or two runs have other data; see `check_comparable`.
    """
    runs = [Described(Path(folder), read_config(folder)) for folder in folders]
    for run in runs:
        if not run.config.new_clients:
            raise InvalidArgument(
                f"no client is new in {run.folder}: all of its clients were trained on. Train with --new-clients N, or "
                "leave this run out"
            )
    check_comparable(runs)


def check_one_score(results: Sequence[Adapted]) -> ScoreName:
    """The score of all the results.

    Raises:
        InvalidArgument: two have different scores.
    """
    other = next((r for r in results if r.named != results[0].named), None)
    if other is not None:
        raise InvalidArgument(
            f"{results[0].name} and {other.name} cannot be compared: their scores are {results[0].named.title} and "
            f"{other.named.title}. Let the clients of each kind adapt in a command of their own"
        )
    return results[0].named


def _new_ids(population, federation, client_ids) -> np.ndarray:
    """int64 [n]: the ids of the new clients that adapt.

    Raises:
        InvalidArgument: there are none, or one that is given is not new or not in the federation.
    """
    everyone = np.arange(federation.num_clients)
    new = np.setdiff1d(everyone, population.client_ids)
    ids = new if client_ids is None else np.asarray(client_ids, np.int64)
    if not len(ids):
        raise InvalidArgument(
            f"no client is new: all {federation.num_clients} of the federation were trained on. Keep some out of the "
            "population (new_clients of a run's configuration), or take a larger federation"
        )
    if not np.isin(ids, everyone).all():
        raise InvalidArgument(f"client {ids[~np.isin(ids, everyone)][0]} is not in the federation")
    if not np.isin(ids, new).all():
        raise InvalidArgument(f"client {ids[~np.isin(ids, new)][0]} is not new: it is one of the population")
    if population.labels == "local" and population.num_labels is not None:
        classes = federation.num_classes[ids]
        if classes.max() > population.num_labels:
            raise InvalidArgument(
                f"client {ids[classes.argmax()]} has {classes.max()} classes, but a head that clients share has "
                f"{population.num_labels} outputs"
            )
    return ids
