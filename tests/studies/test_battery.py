"""The battery finds what is wrong: algorithms with one mistake each, and the check that must fail."""

import re
from inspect import signature

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from tfpfl.algorithms import ditto, feddyn, fedper, lg_fedavg, pflego, scaffold
from tfpfl.models import tree
from tfpfl.models.weights import Weights
from tfpfl.studies import battery


def good(model, population):
    return fedper(model, population, eta=0.2, steps=4)


def changed(function):
    """FedPer whose client's output goes through `function(output, theta, head, data)`."""

    def build(model, population):
        right = good(model, population)

        def client_update(theta, head, data):
            return function(right.client_update(theta, head, data), theta, head, data)

        return right._replace(client_update=client_update)

    return build


def nothing_moves(output, theta, head, data):
    return output._replace(update=tree.zeros_like(theta), state=head)


def negative_weight(output, theta, head, data):
    """The heads still move, but the server never steps."""
    return output._replace(weight=-output.weight)


def climbs(output, theta, head, data):
    """Away from where the loss is small."""
    return output._replace(
        update=tree.scale(-1.0, output.update), state=tree.subtract(tree.scale(2.0, head), output.state)
    )


def uses_own_randomness(output, theta, head, data):
    return output._replace(update=tf.nest.map_structure(lambda u: u + 0.01 * tf.random.normal(u.shape), output.update))


def another_dtype(output, theta, head, data):
    return output._replace(state=tf.nest.map_structure(lambda s: tf.cast(s, tf.float64), output.state))


def head_in_the_metrics(output, theta, head, data):
    return output._replace(metrics=output.metrics | {"bias": output.state.bias})


def keeps_what_it_sends(output, theta, head, data):
    return output._replace(update=output.state)


def counts_in_python(model, population):
    right, visits = good(model, population), tf.Variable(0.0)

    def client_update(theta, head, data):
        output = right.client_update(theta, head, data)
        return output._replace(update=tree.scale(1 / (1 + visits.assign_add(0.1)), output.update))

    return right._replace(client_update=client_update)


def gives_logits(model, population):
    return good(model, population)._replace(personal_model=lambda theta, head, data: head)


def new_clients_forget(model, population):
    """A new client's training goes nowhere."""
    right = good(model, population)
    return right._replace(adapt=right.adapt._replace(epoch=lambda carry, data, n: carry))


def a_global_model_of_its_own(model, population):
    """Each client's message would be its own."""
    right = good(model, population)
    return right._replace(
        message=lambda server, client_id: (server, client_id),
        client_update=lambda message, head, data: right.client_update(message[0], head, data),
        personal_model=lambda message, head, data: right.personal_model(message[0], head, data),
        local_model=lambda message, output: right.local_model(message[0], output),
        adapt=None,
        global_model=lambda message: right.personal_model(
            tree.scale(1.0 + tf.cast(message[1], tf.float32), message[0]), model.shared_head(8), None
        ),
    )


def claims(base, shares, **options):
    """The method, with other words about what it shares."""
    return lambda model, population: base(model, population, **options)._replace(shares=shares)


def its_global_model_has_another_backbone(model, population):
    right = good(model, population)

    def global_model(theta):
        return Weights(tree.scale(2.0, theta), model.shared_head(8))

    return right._replace(global_model=global_model)


def its_backbone_is_that_of_the_last_visit(model, population):
    """All have the same one after a round of everyone, and not the message's after the next round."""
    right = good(model, population)

    def client_update(theta, state, data):
        output = right.client_update(theta, state[1], data)
        return output._replace(state=(theta, output.state))

    return right._replace(
        init_client=lambda info: (model.theta(), right.init_client(info)),
        client_update=client_update,
        personal_model=lambda theta, state, data: Weights(*state),
        local_model=lambda theta, output: right.local_model(theta, output._replace(state=output.state[1])),
        adapt=None,
    )


def its_one_pass_is_not_its_work(model, population):
    """What `algorithm._replace(client_update=...)` does to a method with a `one_pass`."""
    right = pflego(model, population, tau=4, beta=0.3, rho=0.02)

    def client_update(theta, head, data):
        output = right.client_update(theta, head, data)
        return output._replace(update=tree.scale(0.5, output.update))

    return right._replace(client_update=client_update)


def balanced_by(base, balance):
    """The method with another `balance`."""
    return lambda model, population: base(model, population, **SMALL)._replace(balance=balance)


def with_a_constant(field, size, wrap=lambda constant: constant):
    """FedPer, one function of which uses a tensor that the builder made."""

    def build(model, population):
        right, halves = good(model, population), wrap(tf.constant(np.full(size, 0.5, np.float32)))

        def changed(*given):
            once = 2 * tf.reduce_mean(halves)
            found = getattr(right, field)(*given)
            if field == "client_update":
                return found._replace(weight=once * found.weight)
            return tf.nest.map_structure(lambda part: once * part, found)

        functions = {0: lambda: changed(), 1: lambda a: changed(a), 2: lambda a, b: changed(a, b)}
        functions[3] = lambda a, b, c: changed(a, b, c)
        return right._replace(**{field: functions[len(signature(getattr(right, field)).parameters)]})

    return build


FIELDS = ("init_server", "init_client", "message", "client_update", "server_update", "personal_model", "local_model")


@pytest.mark.parametrize("field", slow_but(FIELDS, "client_update"))
@pytest.mark.parametrize("size", slow_but([1, 1000], 1000))
def test_a_tensor_of_the_builder_is_found_with_its_name_and_line(field, size):
    """A NumPy array in its place is right."""
    checks = [battery.functions_take_no_tensor_from_the_builder]
    [finding] = battery.check_algorithm(with_a_constant(field, size), checks=checks)
    told = rf"{field} uses `halves`, which TensorFlow made outside of it \(test_battery.py, line \d+: once = 2 \* tf"
    assert finding.status == "FAILED" and re.search(told, finding.why), finding.why
    assert "np.array for tf.constant" in finding.why
    [finding] = battery.check_algorithm(with_a_constant(field, size, np.asarray), checks=checks)
    assert finding.status == "ok", finding.why


@pytest.mark.slow
def test_tff_refuses_what_this_check_finds(tff):
    """So the local engine alone would not show the mistake."""
    [finding] = battery.check_algorithm(with_a_constant("client_update", 1000), checks=[battery.both_engines_agree])
    assert "Attempting to capture an EagerTensor without building a function" in finding.why
    checks = [battery.rounds_change_something, battery.the_loss_falls]
    findings = battery.check_algorithm(with_a_constant("client_update", 1000), checks=checks)
    assert [finding.status for finding in findings] == ["ok", "ok"]


SMALL = {"eta": 0.2, "steps": 4}
MISTAKES = [
    (changed(nothing_moves), battery.rounds_change_something),
    (changed(negative_weight), battery.rounds_change_something),
    (changed(climbs), battery.the_loss_falls),
    (changed(uses_own_randomness), battery.a_round_is_a_function_of_what_it_is_given),
    (counts_in_python, battery.a_round_is_a_function_of_what_it_is_given),
    (changed(another_dtype), battery.structure_shapes_and_dtypes_stay),
    (changed(head_in_the_metrics), battery.no_personal_weights_leave),
    (changed(keeps_what_it_sends), battery.no_personal_weights_leave),
    (gives_logits, battery.models_are_whole),
    (a_global_model_of_its_own, battery.the_global_model_is_everyones),
    (new_clients_forget, battery.a_new_client_adapts),
    (claims(fedper, None, **SMALL), battery.what_is_shared_is_declared),
    (claims(fedper, "model", **SMALL), battery.what_is_shared_is_declared),
    (claims(fedper, "theta", **SMALL), battery.what_is_shared_is_declared),
    (claims(ditto, "backbone", **SMALL), battery.what_is_shared_is_declared),
    (claims(lg_fedavg, None, **SMALL), battery.what_is_shared_is_declared),
    (its_backbone_is_that_of_the_last_visit, battery.what_is_shared_is_declared),
    (its_global_model_has_another_backbone, battery.what_is_shared_is_declared),
    (its_one_pass_is_not_its_work, battery.one_pass_is_the_work_of_a_client),
    (balanced_by(scaffold, None), battery.a_sum_of_what_clients_keep_is_declared),
    (balanced_by(feddyn, None), battery.a_sum_of_what_clients_keep_is_declared),
    (balanced_by(scaffold, lambda state, output: output.state), battery.a_sum_of_what_clients_keep_is_declared),
    (balanced_by(fedper, lambda head, output: head), battery.a_sum_of_what_clients_keep_is_declared),
]


# The first mistake for each check. `make test` has every other one of them.
FIRST = [mistake for i, mistake in enumerate(MISTAKES) if mistake[1] not in [check for _, check in MISTAKES[:i]]]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "check"), slow_but(MISTAKES, *FIRST[::2]))
def test_a_mistake_is_found(build, check):
    [finding] = battery.check_algorithm(build, checks=[check])
    assert finding.status == "FAILED" and finding.why


@pytest.mark.slow
def test_what_is_said_of_a_wrong_declaration():
    checks = [battery.what_is_shared_is_declared]
    for build, why in (
        (claims(ditto, "backbone", **SMALL), "shares is 'backbone', but no part of the personal models.*: shares=None"),
        (claims(fedper, None, **SMALL), "shares is None, but the backbone of the personal models.*: shares='backbone'"),
        (claims(fedper, "theta", **SMALL), "shares is 'theta'; it may be 'model', 'backbone', 'head' or None"),
        (its_global_model_has_another_backbone, "the global model has another backbone than the personal models"),
    ):
        [finding] = battery.check_algorithm(build, checks=checks)
        assert re.search(why, finding.why), finding.why


@pytest.mark.slow
def test_a_good_one_passes_and_tff_is_asked_for_only_where_it_is(monkeypatch):
    monkeypatch.setattr(battery, "find_spec", lambda name: None)
    found = battery.check_algorithm(good)
    assert [finding.status for finding in found] == ["ok"] * (len(battery.CHECKS) - 1) + ["skipped"]
    assert str(found[0]) == "ok      rounds change something"
    assert "not installed" in str(found[-1])
