"""`tfpfl.studies.battery` for every entry of `ALGORITHMS`, and whether the list says of it what is true.

A new algorithm is tested by being in the list. If its hyperparameters have names of their own, a quick value goes into
`QUICK` of helpers/quick.py; a value that only one algorithm needs, into `SPECIAL`.
"""

import re

import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.normalized import model_for
from helpers.quick import SPECIAL, quick
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.algorithms.contract import Algorithm
from tfpfl.data.cohorts import cohort
from tfpfl.data.population import Population
from tfpfl.studies import battery

# Ten more rounds of each method; what one of them breaks, its own file's tests notice. In both engines: see below.
SLOW = (battery.the_loss_falls, battery.both_engines_agree)
CHECKS = slow_but(battery.CHECKS, *(check for check in battery.CHECKS if check not in SLOW))


# One method of each sort: gradients, updates, control variates, messages for each.
FAST = ("pflego", "fedavg", "scaffold", "fedamp")


@pytest.fixture(scope="module", params=slow_but(list(ALGORITHMS), *FAST, ci=ALGORITHMS))
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def algorithm(name, federation) -> Algorithm:
    """Small steps, three of seven clients a round."""
    return build_algorithm(name, model_for(name), battery.small_population(federation), **quick(name))


@pytest.fixture(scope="module")
def subject(algorithm, federation) -> battery.Subject:
    return battery.Subject(algorithm, federation)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_battery(request, subject, check):
    if check in battery.NEED_TFF:
        request.getfixturevalue("tff")
    check(subject)


@pytest.mark.parametrize("name", slow_but(["pflego", "fedrep", "fedamp"], "pflego"), indirect=True)
def test_both_engines_agree(name, subject, tff):
    """One method for each way of messages and sums; `test_battery` has all of them."""
    battery.both_engines_agree(subject)


def scalars(formula: str, b: int, h: int, **known) -> int:
    """'2d + h' in numbers."""
    python = re.sub(r"(\d)\s*([bhdnIKM])", r"\1*\2", formula)
    return eval(python, {"__builtins__": {}}, {"b": b, "h": h, "d": b + h, **known})


def model_n(model) -> int:
    """n, the number of weights of theta that stay with the client."""
    return sum(int(w.size) for w, own in zip(model.initial_theta, model.own, strict=True) if own)


def test_bytes_are_those_of_the_list(name, algorithm, subject):
    """Single numbers in a message (a count, a norm) are not in the formula."""
    row, model, population = ALGORITHMS[name], algorithm.model, algorithm.population
    for t, output in enumerate(subject.trained.outputs, 1):
        for i, metrics in zip(cohort(0, t, population), output.client_metrics, strict=True):
            width = int(population.num_classes[i]) if row.head == "personal" else population.shared_labels()
            h = (model.num_features + 1) * width
            for formula, found in ((row.down, metrics["bytes_down"]), (row.up, metrics["bytes_up"])):
                known = {"I": population.num_clients, "n": model_n(model), "M": model.num_features, "K": width}
                known["C"] = population.num_labels
                known |= SPECIAL.get(name, {})
                extra = int(found) - 4 * scalars(formula, model.num_backbone_weights, h, **known)
                assert 0 <= extra <= 8, f"client {i}: {found} bytes, the list says {formula}"


def test_heads_and_models_are_those_of_the_list(name, algorithm, subject):
    row = ALGORITHMS[name]
    assert subject.head_width(0) == (battery.CLASSES[0] if row.head == "personal" else max(battery.CLASSES))
    assert algorithm.message_per_client == (row.message == "per client")
    assert (algorithm.shares == "model") == (row.evaluates == "global")
    if row.evaluates == "fine-tuned":
        assert algorithm.global_model is not None  # the model that it is a fit of


def test_where_a_new_client_starts(name, algorithm, subject):
    """From what it would predict with at once; a personal model that is a fit, from the global one.

    PGFed's new clients start from the newest w, too; before that, they would predict with w^0.
    """
    if algorithm.adapt is None:
        return
    row, (message, _, data, _) = ALGORITHMS[name], subject.visit(battery.WIDEST)
    state = algorithm.init_client(data.info)
    start, epoch, model, _, message_of = algorithm.adapt
    sent = message
    if message_of is not None:  # what a client outside of the population is sent
        server = subject.trained.server
        sent, message = message_of(server), algorithm.message(server, tf.constant(len(battery.CLASSES)))
    first = model(start(sent, state, data))
    from_global = row.evaluates == "fine-tuned" or name in ("pgfed", "pgfedmo")
    predicts = algorithm.global_model(message) if from_global else algorithm.personal_model(message, state, data)
    assert battery.distance(first, predicts) < 1e-6
    if algorithm.shares == "backbone":
        later = model(epoch(start(sent, state, data), data, tf.constant(0)))
        assert battery.identical(later.theta, first.theta)  # what all share is not the new client's to move


def test_the_defaults_build(name, algorithm):
    """The builder without hyperparameters, and with every preset."""
    for preset in (None, *ALGORITHMS[name].presets):
        build_algorithm(name, algorithm.model, algorithm.population, preset=preset)


def test_clients_of_different_width_share_a_head_only_where_that_is_said(name):
    """Output k of a shared head would mean a different class for each client."""
    model, people = model_for(name), {"num_examples": [5, 6, 7], "num_classes": [3, 2, 4]}
    if ALGORITHMS[name].head == "shared":
        with pytest.raises(ValueError, match="client 1 has 2 classes and client 2 has 4.*--labels global.*_slots"):
            build_algorithm(name, model, Population(**people))
        build_algorithm(name, model, Population(**people, num_labels=4))
    else:
        build_algorithm(name, model, Population(**people))
