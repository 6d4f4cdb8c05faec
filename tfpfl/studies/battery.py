"""A battery of checks that every algorithm must pass, tfpfl's and your own: does it keep the contract?

    for finding in check_algorithm(lambda model, population: mine(model, population, eta=0.2)):
        print(finding)

The checks train the algorithm on seven clients with 6 to 14 examples of 2 to 8 classes, a backbone of 65 weights and
three clients a round. All of them together take some seconds. A check is a function that takes a `Subject` and raises
`Broken` if the algorithm fails it. `CHECKS` lists all checks; battery_subject.py has what they train and compare with.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfpfl.algorithms.contract import check_is_algorithm
from tfpfl.algorithms.own import NO_TENSORS
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.checks import InvalidArgument, check_choice
from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.scoring import shared_theta
from tfpfl.models import SplitModel
from tfpfl.models.weights import Weights
from tfpfl.runs.store import RunStore
from tfpfl.studies.battery_exchanges import a_first_exchange_keeps_what_it_declares
from tfpfl.studies.battery_new_clients import a_new_client_adapts
from tfpfl.studies.battery_subject import (
    CLASSES,
    EVERYONE,
    EXAMPLES,
    ROUNDS,
    SCORED,
    WIDEST,
    Broken,
    Subject,
    Trained,
    backbone,
    distance,
    identical,
    keep,
    kinds,
    require,
    small_federation,
    small_population,
)
from tfpfl.studies.battery_tensors import tensors_from_outside


class Finding(NamedTuple):
    """The result of one check: passed, failed or skipped, and why."""

    check: str
    status: str  # 'ok', 'FAILED' or 'skipped'
    why: str = ""

    def __str__(self) -> str:
        return f"{self.status:8}{self.check}" + (f": {self.why}" if self.why else "")


def check_algorithm(
    build: Callable, *, checks: Sequence[Callable] | None = None, kind: str = "classification", dtype: str = "float32"
) -> list[Finding]:
    """Runs the checks on an algorithm and says which of them it fails.

    Args:
        build: function (model, population) -> Algorithm. Choose learning rates with which the loss falls by a fifth in
            25 rounds, or the check of the loss fails.
        checks: which of `CHECKS` to run; default: all. Those in `NEED_TFF` are skipped if TFF is not installed.
        kind: the kind of the heads, such as 'regression'; see `SplitModel`.
        dtype: of the weights, 'float32' or 'float64'. With large learning rates rounding errors may grow from round to
            round, and two engines may differ by more than 1e-5. In float64, where 1e-10 is allowed, they do not.

    Returns:
        One `Finding` for each check, in the order of the checks. An error that the algorithm raises is a finding, too.

    Raises:
        InvalidArgument: `build` is no function, or what it returns is no `Algorithm`; `kind` or `dtype` is unknown.
    """
    if not callable(build):
        raise InvalidArgument(
            f"build must be a function (model, population) -> Algorithm, found {build!r}. For a method of tfpfl, give "
            "lambda model, population: tfpfl.build_algorithm(name, model, population)"
        )
    check_choice(dtype=(dtype, ("float32", "float64")))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        federation = small_federation(Path(folder) / "federation", kind=kind)
        model = SplitModel(backbone(dtype), kind=kind)
        algorithm = build(model, small_population(federation))
        check_is_algorithm(algorithm)
        subject = Subject(algorithm, federation)
        for each in checks or CHECKS:
            name = each.__name__.replace("_", " ")
            if each in NEED_TFF and find_spec("tensorflow_federated") is None:
                found.append(Finding(name, "skipped", "TensorFlow Federated is not installed"))
                continue
            try:
                each(subject)
            except Exception as error:
                why = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
                found.append(Finding(name, "FAILED", why))
            else:
                found.append(Finding(name, "ok"))
    return found


def both_engines_agree(subject):
    """TFF's federated computation and the local engine give the same states, metrics and scores after ten rounds."""
    from tfpfl.engines.tff.evaluation import federated_evaluation
    from tfpfl.engines.tff.process import federate

    algorithm, federation, trained = subject.algorithm, subject.federation, subject.trained
    near = partial(_near, allowed=subject.rounding)
    other = Trained(algorithm, federate(algorithm, federation, held_out=["test"])).rounds(ROUNDS)
    near(other.server, trained.server, "the server's state")
    for i in EVERYONE:
        near(other.states([i]), trained.states([i]), f"the state of client {i}")
    for ours, theirs in zip(trained.outputs, other.outputs, strict=True):
        near(theirs.metrics, ours.metrics, "metrics")
        for mine, its in zip(ours.client_metrics, theirs.client_metrics, strict=True):
            near(its, mine, "a client's metrics")
    visits = subject.visits(EVERYONE, 99)
    states = trained.states(EVERYONE)
    scores = federated_evaluation(algorithm, federation, SCORED)(trained.server, states, visits)
    expected = subject.scorer(trained.server, states, visits)
    score = "correct" if algorithm.model.kind.counts else "score"
    names = {f"{split}_{what}" for split in SCORED for what in (score, "examples", "loss")}
    if algorithm.global_model is not None:
        names |= {f"global_{name}" for name in names}
    for theirs, ours in zip(scores, expected, strict=True):
        require(set(ours) == names, f"scores are {sorted(ours)}, expected {sorted(names)}")
        near(theirs, ours, "scores")


def rounds_change_something(subject):
    """Ten rounds change the server's state or the state of some client by more than 1e-3, by work that can be used."""
    new, trained = Trained(subject.algorithm, subject.engine), subject.trained
    sound = all(int(m["finite"]) for out in trained.outputs for m in out.client_metrics)
    require(sound, "the work of a client is not finite, or its weight is negative")
    moved = distance((trained.server, trained.states(EVERYONE)), (new.server, new.states(EVERYONE)))
    require(moved > 1e-3, f"{ROUNDS} rounds moved no number by more than {moved:.1e}")


def the_order_of_clients_is_irrelevant(subject):
    """Another order of a round's clients changes the server and the clients by rounding only."""
    trained, engine = subject.trained, subject.engine
    visits, states = subject.visits(EVERYONE, 5), trained.states(EVERYONE)
    forward = engine.next(trained.server, states, visits)
    back = engine.next(trained.server, states[::-1], visits[::-1])
    back = back._replace(client_states=back.client_states[::-1], client_metrics=back.client_metrics[::-1])
    for what, away in _apart(forward, back):
        require(away < subject.rounding / 10, f"with the cohort in reverse order, {what} differs by {away:.1e}")


def structure_shapes_and_dtypes_stay(subject):
    """Rounds keep the structure, shapes and dtypes of the server's state and of every client's state."""
    trained = subject.trained
    last = trained.outputs[-1]
    news = [("the server's state", subject.engine.initialize(), last.server)]
    news += [("a client's state", trained.initial[0], new) for new in last.client_states]
    for what, first, new in news:
        try:
            tf.nest.assert_same_structure(first, new)
        except (TypeError, ValueError) as error:
            raise Broken(f"{what} has another structure after a round: {error}") from error
    pairs = {"the server's state": (subject.engine.initialize(), trained.server)}
    pairs |= {f"the state of client {i}": (trained.initial[i], *trained.states([i])) for i in EVERYONE}
    for what, (first, now) in pairs.items():
        same = kinds(first) == kinds(now)
        require(same, f"{what} was {kinds(first)}, and is {kinds(now)} after {ROUNDS} rounds")


def saved_loaded_and_continued_is_continued(subject):
    """A run that is saved, loaded and continued ends bit for bit where the uninterrupted `Subject.trained` ends."""
    algorithm, engine, trained = subject.algorithm, subject.engine, subject.trained
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.sqlite"
        with RunStore(file, "run") as store:
            Trained(algorithm, engine, store).rounds(4)
        with RunStore(file, "run") as store:
            resumed = Trained(algorithm, engine, store).rounds(ROUNDS)
            require(len(resumed.outputs) == ROUNDS - 4, "rounds were lost")
            same = identical(resumed.server, trained.server)
            require(same, "the server's state differs from that of an uninterrupted run")
            same = identical(resumed.states(EVERYONE), trained.states(EVERYONE))
            require(same, "clients' states differ from those of an uninterrupted run")


def absent_clients_keep_their_state(subject):
    """The state of a client does not change by a single bit in rounds that it does not take part in."""
    run = Trained(subject.algorithm, subject.engine).rounds(3, cohorts=lambda t: [1, 4])
    before = run.states(EVERYONE)
    keep(before, [run.initial[i] for i in EVERYONE], (0, 2, 3, 5, 6))
    run.rounds(6, cohorts=lambda t: [0, 5])
    keep(run.states(EVERYONE), before, (1, 2, 3, 4, 6))


def a_round_is_a_function_of_what_it_is_given(subject):
    """A round run twice gives the same bits: `ClientData.key` is the only randomness, and nothing is remembered."""
    trained, engine = subject.trained, subject.engine
    visits, states = subject.visits([1, 5], 7), trained.states([1, 5])
    first, second = (engine.next(trained.server, states, visits) for _ in range(2))
    require(identical(first, second), "the same round, run twice, gave two results")


def the_loss_falls(subject):
    """25 rounds of all clients lower their personal models' training loss by a fifth, on well separated classes.

    For other kinds, what counts is the loss above that of a perfect prediction.
    """
    algorithm, federation = subject.algorithm, subject.federation
    least = np.mean([algorithm.model.kind.least(federation.arrays(i)[1]) for i in EVERYONE])

    def loss(run):
        visits = subject.visits(EVERYONE, 99)
        return np.mean([s["train_loss"] for s in subject.scorer(run.server, run.states(EVERYONE), visits)]) - least

    run = Trained(algorithm, subject.engine)
    first = loss(run)
    last = loss(run.rounds(25, cohorts=lambda t: EVERYONE))
    require(last < 0.8 * first, f"the training loss was {first:.3g} and is {last:.3g} after 25 rounds of everyone")


def no_graph_is_traced_again_for_other_clients(subject):
    """Clients of all sizes, in cohorts of several sizes, share one graph of a client's work, or two."""
    engine = subject.engine
    Trained(subject.algorithm, engine).rounds(5, cohorts=lambda t: [[0, 1, 2], [2, 4], [3, 4, 5], EVERYONE, [6]][t - 1])
    much = []
    for rounds in filter(None, (engine, engine.first)):
        work = getattr(rounds._clients, "_work", None) or rounds._clients._visit
        parts = [("a client's work", work), ("the message", rounds._messages._message)]
        parts.append(("the server's update", rounds._finish))
        traces = [(what, function.experimental_get_tracing_count()) for what, function in parts]
        much += [f"{what} {count} times" for what, count in traces if count > 2]  # 2: any number of classes
    require(not much, f"in rounds of other clients, graphs were traced again: {', '.join(much)}")


def no_personal_weights_leave(subject):
    """An update holds no tensor shaped like a head that stays on the device, and no part of the client's state.

    Methods that send each client a message of its own are not checked for this: their server knows every client's
    model.
    """
    _, state, _, output = subject.visit(WIDEST)
    require("loss" in output.metrics, f"the metrics have no 'loss', but {sorted(output.metrics)}")
    scalars = {"weight": output.weight} | output.metrics
    wide = [name for name, value in scalars.items() if np.ndim(value)]
    require(not wide, f"weight and metrics are scalars, and {', '.join(wide)} is none")
    if subject.algorithm.message_per_client:
        return
    updates = [output.update]
    if subject.algorithm.first is not None:
        updates.append(subject.first_visit(WIDEST)[3].update)
    sent = [np.asarray(u) for u in tf.nest.flatten(updates)]
    if subject.head_width(0) == CLASSES[0]:
        heads = [u.shape for u in sent if CLASSES[WIDEST] in u.shape]
        require(not heads, f"heads are personal, and an update of a client of {CLASSES[WIDEST]} classes has {heads}")
    kept = [np.asarray(s) for s in tf.nest.flatten((state, output.state)) if np.size(s) > 1 and np.any(s)]
    for u in sent:
        equal = any(u.shape == s.shape and np.allclose(u, s) for s in kept)
        require(not equal, f"a part of the update, {list(u.shape)}, is what the client keeps")


def models_are_whole(subject):
    """`personal_model` and `local_model` return `Weights` whose head has the client's classes, or those of all."""
    algorithm = subject.algorithm
    for client in (0, WIDEST):
        message, _, data, output = subject.visit(client)
        widths = {max(CLASSES)} if algorithm.shares in ("model", "head") else {CLASSES[client], max(CLASSES)}
        models = {
            "personal_model": algorithm.personal_model(message, output.state, data),
            "local_model": algorithm.local_model(message, output),
        }
        for name, weights in models.items():
            require(isinstance(weights, Weights), f"{name} gives {type(weights).__name__}, not Weights")
            found, expected = algorithm.model.logits(weights, data.x).shape, [(EXAMPLES[client], k) for k in widths]
            why = f"logits of client {client}'s {name} are {found}, expected {' or '.join(map(str, expected))}"
            require(any(found == shape for shape in expected), why)
            widths = {int(found[1])}  # the second model is as wide as the first
        if algorithm.predictor is None:
            continue
        phi = algorithm.model.features(models["personal_model"].theta, data.x)
        outputs = algorithm.predictor(message, output.state, data)(phi)
        require(
            outputs.shape == (EXAMPLES[client], *widths) and outputs.dtype == phi.dtype,
            f"the outputs of client {client}'s predictor are {outputs.dtype.name} {outputs.shape}, expected "
            f"{phi.dtype.name} [{EXAMPLES[client]}, {widths}]",
        )


def the_global_model_is_everyones(subject):
    """If the method has a global model, it is a whole model, and the same one whichever client receives the message."""
    algorithm = subject.algorithm
    if algorithm.global_model is None:
        return
    models = [algorithm.global_model(subject.visit(client)[0]) for client in (0, WIDEST)]
    require(isinstance(models[0], Weights), f"global_model gives {type(models[0]).__name__}, not Weights")
    require(identical(*models), "two clients' messages hold two global models")
    found = algorithm.model.logits(models[0], subject.federation.reader("train")(WIDEST)[0]).shape
    expected = (EXAMPLES[WIDEST], max(CLASSES))
    require(found == expected, f"its logits are {found}, expected {expected}")
    model = algorithm.model
    whole = (*model.initial_theta, *(model.statistics() if model.batch_statistics else ()))
    shapes, theirs = ([tuple(w.shape) for w in theta] for theta in (models[0].theta, whole))
    require(shapes == theirs, f"its theta is {shapes}, the model's {theirs}")


def what_is_shared_is_declared(subject):
    """`Algorithm.shares` is what the personal models of two clients have in common, whatever their states.

    Weights are compared by value: for each client's first state, its last state and its state after one more visit.
    Declaring less than what is shared is a mistake, too: evaluation becomes slow, and `new-clients --protocol global`
    refuses the method.
    """
    algorithm, models = subject.algorithm, []
    declared = algorithm.shares
    known = declared is None or declared in ("model", "backbone", "head")
    require(known, f"shares is {declared!r}; it may be 'model', 'backbone', 'head' or None")
    for client in (0, WIDEST):
        message, state, data, output = subject.visit(client)
        for each in (algorithm.init_client(data.info), state, output.state):
            models.append(algorithm.personal_model(message, each, data))
    backbone, head = (all(_same(part, parts[0]) for part in parts) for parts in zip(*models, strict=True))
    head = head and algorithm.predictor is None  # which is then a part of what predicts
    found = "model" if backbone and head else "backbone" if backbone else "head" if head else None
    common = {"model": "all weights", "backbone": "the backbone", "head": "the head", None: "no part"}[found]
    require(
        found == declared,
        f"shares is {declared!r}, but {common} of the personal models of clients 0 and {WIDEST} is the same in all "
        f"states: shares={found!r}",
    )
    if not algorithm.shares_backbone:
        return
    same = _same(shared_theta(algorithm)(message), models[0].theta)
    require(same, "the backbone of personal_model is another one if the client has a single example, of zeros")
    if algorithm.global_model is not None:
        require(declared != "model", "all personal models are the same: there is no global_model beside them")
        same = _same(algorithm.global_model(message).theta, models[0].theta)
        require(same, f"shares is {declared!r}, but the global model has another backbone than the personal models")


def one_pass_is_the_work_of_a_client(subject):
    """A method's `one_pass`, if any, gives a cohort the same result as `client_update` for one client after another."""
    algorithm, trained = subject.algorithm, subject.trained
    if algorithm.one_pass is None:
        return
    visits, states = subject.visits(EVERYONE, 5), trained.states(EVERYONE)
    engines = subject.engine, Simulation(algorithm, subject.federation, held_out=["test"], grouping="one_by_one")
    fused, plain = (engine.next(trained.server, states, visits) for engine in engines)
    for what, away in _apart(fused, plain):
        require(away < subject.rounding, f"{what} differs by {away:.1e} between one_pass and client_update")


def a_sum_of_what_clients_keep_is_declared(subject):
    """A server's number that is always the sum or mean over all clients of what they keep needs `Algorithm.balance`.

    With `balance`, that is still so when clients' updates are clipped to half of their norm.
    """
    algorithm, trained = subject.algorithm, subject.trained
    found = _balanced(trained, subject.rounding)
    if algorithm.balance is None:
        require(
            not found,
            f"the server's tensors {found} are sums or means of what all clients keep: without `balance`, clipping an "
            "update would break that",
        )
        return
    require(found, "it has a `balance`, but no tensor of the server is the sum or mean of what all clients keep")
    norms = [float(tf.linalg.global_norm(tf.nest.flatten(subject.visit(i)[3].update))) for i in EVERYONE]
    clipped = screened(algorithm, clip_norm=min(norms) / 2)
    now = _balanced(Trained(clipped, Simulation(clipped, subject.federation)).rounds(4), subject.rounding)
    broken = sorted(set(found) - set(now))
    require(not broken, f"where updates are clipped, the server's tensors {broken} are not what all clients keep")


def functions_take_no_tensor_from_the_builder(subject):
    """Constants are NumPy arrays, or made inside the function: TFF refuses a function with an eager tensor in it."""
    found = tensors_from_outside(subject, WIDEST)
    require(not found, f"{'; '.join(found)}. {NO_TENSORS}")


CHECKS = (
    rounds_change_something,
    the_loss_falls,
    the_order_of_clients_is_irrelevant,
    a_round_is_a_function_of_what_it_is_given,
    structure_shapes_and_dtypes_stay,
    saved_loaded_and_continued_is_continued,
    absent_clients_keep_their_state,
    no_personal_weights_leave,
    models_are_whole,
    the_global_model_is_everyones,
    what_is_shared_is_declared,
    one_pass_is_the_work_of_a_client,
    a_sum_of_what_clients_keep_is_declared,
    a_first_exchange_keeps_what_it_declares,
    a_new_client_adapts,
    functions_take_no_tensor_from_the_builder,
    no_graph_is_traced_again_for_other_clients,
    both_engines_agree,
)
NEED_TFF = (both_engines_agree,)


def _same(a, b) -> bool:
    """Whether two structures have the same dtypes, shapes and bits."""
    return kinds(a) == kinds(b) and identical(a, b)


def _apart(ours, theirs) -> Iterator[tuple[str, float]]:
    """(what it is, how far two outputs of a round are apart in it)."""
    yield "the server's state", distance(ours.server, theirs.server)
    yield "a client's state", distance(ours.client_states, theirs.client_states)
    metrics = ([dict(m) for m in each.client_metrics] for each in (ours, theirs))
    yield "a client's metric", distance(*metrics)


def _balanced(trained: Trained, rounding: float) -> list[int]:
    """Which tensors of the server's state have moved, and are the sum or mean over all clients of one they keep."""
    first, found = tf.nest.flatten(trained.algorithm.init_server()), []
    alpha = [float(trained.population.info(i).alpha) for i in EVERYONE]
    kept = list(zip(*map(tf.nest.flatten, trained.states(EVERYONE)), strict=True))
    kept = [np.asarray(leaves, float) for leaves in kept if len({np.shape(leaf) for leaf in leaves}) == 1]
    for place, (before, now) in enumerate(zip(first, tf.nest.flatten(trained.server), strict=True)):
        sums = (np.tensordot(w, k, 1) for k in kept for w in (np.ones(len(k)), np.full(len(k), 1 / len(k)), alpha))
        same = any(np.shape(s) == np.shape(now) and distance(s, now) < rounding for s in sums)
        if same and distance(before, now) > 10 * rounding:
            found.append(place)
    return found


def _near(theirs, ours, what, allowed):
    if isinstance(ours, Mapping):
        require(set(theirs) == set(ours), f"{what} are {sorted(theirs)} in TFF and {sorted(ours)} in the local engine")
        for name in ours:
            _near(theirs[name], ours[name], f"{what}: {name}", allowed)
        return
    away = distance(theirs, ours)
    require(away < allowed, f"{what} differs by {away:.1e} between TFF and the local engine")
