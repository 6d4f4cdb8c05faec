"""FedDBE: its listing written out by GradientTape over rounds with absent clients; FedAvg without its two parts."""

import keras
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.rounds import COHORTS, nothing_arrives, play, shared
from helpers.toys import distance, gradient, identical, initial_states, run
from tfpfl.algorithms import fedavg, feddbe
from tfpfl.algorithms.feddbe import Agreement, shifted
from tfpfl.algorithms.transforms import screened
from tfpfl.models import tree

WORK = {"eta": 0.2, "steps": 3}


def phi_of(data, i, theta):
    return data.model.features(theta, tf.constant(data.data[i][0]))


def loss_on(data, i, phi, head):
    logits = phi @ head.kernel + head.bias
    log_p = logits - tf.reduce_logsumexp(logits, 1, keepdims=True)
    return -tf.reduce_mean(tf.gather(log_p, data.data[i][1], batch_dims=1))


def visit(data, i, w, c, z, *, agreed, kappa, mu, eta=0.2, eta_p=0.2, steps=3):
    """(w_i, c_i, the running mean) after full-batch steps."""
    m = tf.zeros([data.model.num_features], tf.float64)
    for _ in range(steps):
        old = m

        def objective(w, c, old=old):
            phi = phi_of(data, i, w.theta)
            m = (1 - mu) * old + mu * tf.reduce_mean(phi, 0)
            if not agreed:
                return loss_on(data, i, phi, w.head)
            return loss_on(data, i, phi + c, w.head) + kappa * tf.reduce_mean(0.5 * (m - z) ** 2)

        m = (1 - mu) * old + mu * tf.reduce_mean(phi_of(data, i, w.theta), 0)
        by_w, by_c = gradient(objective, w, c)
        w = tree.add_scaled(w, -eta, by_w)
        c = c if by_c is None else c - eta_p * by_c
    return w, c, m


@pytest.mark.parametrize(("mu", "agreement_rounds"), slow_but([(1.0, 1), (0.3, 2)], (0.3, 2)))
def test_rounds_are_written_out(data, mu, agreement_rounds):
    """Clients that skip rounds and come late; a client that comes twice in the agreement counts twice."""
    hyper = {"kappa": 20.0, "mu": mu}
    algorithm = feddbe(data.model, data.population, agreement_rounds=agreement_rounds, eta_p=0.5, **hyper, **WORK)
    path, states = play(algorithm, data)
    w, m = algorithm.init_server().w, data.model.num_features
    z, mass = tf.zeros([m], tf.float64), 0.0
    c = {i: tf.zeros([m], tf.float64) for i in data.ids}
    for t, cohort in enumerate(COHORTS):
        n = {i: float(data.population.num_examples[i]) for i in cohort}
        agreed = t >= agreement_rounds
        done = {i: visit(data, i, w, c[i], z, agreed=agreed, eta_p=0.5, **hyper) for i in cohort}
        if agreed:
            moved = [tree.scale(n[i] / sum(n.values()), tree.subtract(done[i][0], w)) for i in cohort]
            w = tf.nest.map_structure(lambda u, *others: u + sum(others), w, *moved)
            c |= {i: done[i][1] for i in cohort}
        else:
            z = (mass * z + sum(n[i] * done[i][2] for i in cohort)) / (mass + sum(n.values()))
            mass += sum(n.values())
        assert (
            distance(
                path[t], Agreement(w, z, tf.constant(mass, tf.float64), tf.constant(0))._replace(rounds=path[t].rounds)
            )
            < 1e-9
        )
        assert int(path[t].rounds) == min(t + 1, agreement_rounds)
    assert distance(states, c) < 1e-9 and min(float(tf.norm(v)) for v in c.values()) > 1e-3
    for i in data.ids:
        found = data.model.logits(
            algorithm.personal_model(algorithm.message(path[-1]), states[i], data.visit(i)), data.visit(i).x
        )
        assert distance(found, (phi_of(data, i, w.theta) + c[i]) @ w.head.kernel + w.head.bias) < 1e-9


@pytest.mark.slow
def test_without_its_parts_it_is_fedavg_after_the_agreement(data):
    """Mini-batches too: round t + 1 does what FedAvg's round t + 1 would do from w^0."""
    work = {"eta": 0.1, "epochs": 2, "batch_size": 2, "momentum": 0.5}
    algorithm = feddbe(data.model, data.population, kappa=0.0, eta_p=0.0, **work)
    path, states = play(algorithm, data)
    assert identical(path[0].w, algorithm.init_server().w)
    expected, _ = play(fedavg(data.model, data.population, **work), data, COHORTS[1:], first=2)
    assert distance([server.w for server in path[1:]], expected) < 1e-9
    assert all(distance(c, tf.zeros_like(c)) == 0 for c in states.values())
    with_kappa, _ = play(feddbe(data.model, data.population, eta_p=0.0, **work), data)
    assert distance(with_kappa[-1].w, expected[-1]) > 1e-3
    with_c, _ = play(feddbe(data.model, data.population, kappa=0.0, **work), data)
    assert distance(with_c[-1].w, expected[-1]) > 1e-3


@pytest.mark.slow
def test_a_strong_regularization_brings_the_mean_feature_to_z(data):
    """A client alone, many small steps: the mean of its features ends at z."""
    w, z = shared(data), tf.constant([0.1] * data.model.num_features, tf.float64)
    algorithm = feddbe(data.model, data.population, kappa=1000.0, eta=0.005, steps=400)
    state = initial_states(algorithm, data.population)[1]
    message = algorithm.message(algorithm.init_server()._replace(w=w, z=z, rounds=tf.constant(1)))
    theta = tree.add(w, algorithm.client_update(message, state, data.visit(1)).update.w).theta
    before, after = (distance(tf.reduce_mean(phi_of(data, 1, t), 0), z) for t in (w.theta, theta))
    assert before > 0.5 and after < 0.05


def test_the_shifted_head_is_the_head_on_shifted_features(data):
    head, c = shared(data).head, tf.constant([0.3, -1.0, 2.0, 0.5, 0.1, 0.7], tf.float64)[: data.model.num_features]
    phi = phi_of(data, 2, data.model.theta())
    one, other = (phi + c) @ head.kernel + head.bias, phi @ shifted(head, c).kernel + shifted(head, c).bias
    assert distance(one, other) < 1e-12


@pytest.mark.slow
def test_a_new_client_adapts_its_vector_alone(data):
    algorithm = feddbe(data.model, data.population, eta_p=0.3, **WORK)
    message = algorithm.message(algorithm.init_server()._replace(w=shared(data)))
    state, w = initial_states(algorithm, data.population)[1], message.w
    carry, c = algorithm.adapt.start(message, state, data.visit(1)), state
    for n in range(4):
        carry = algorithm.adapt.epoch(carry, data.visit(1), tf.constant(n))
        c = c - 0.3 * gradient(lambda c: loss_on(data, 1, phi_of(data, 1, w.theta) + c, w.head), c)[0]
    found = algorithm.adapt.model(carry)
    assert identical(found.theta, w.theta) and distance(found.head, shifted(w.head, c)) < 1e-9


@pytest.mark.slow
def test_absent_clients_and_rounds_without_updates(data):
    algorithm = feddbe(data.model, data.population, **WORK)
    some = [(0, 2, 3), (2, 3), (0, 2), (3,)]  # 1 and 4 never come
    path, states = play(algorithm, data, some)
    fresh = initial_states(algorithm, data.population)
    for i in (1, 4):
        assert identical(states[i], fresh[i])
        model = algorithm.personal_model(algorithm.message(path[-1]), states[i], data.visit(i))
        assert distance(model, path[-1].w) < 1e-12
    assert identical(nothing_arrives(algorithm, data, path[-1]), path[-1])
    before = algorithm.init_server()  # the agreement waits until somebody comes
    assert identical(nothing_arrives(algorithm, data, before), before)


def test_what_is_sent_says_no_more_than_the_agreement_needs(data):
    """First no difference of weights, then no mean feature."""
    algorithm = feddbe(data.model, data.population, **WORK)
    server, state = algorithm.init_server(), initial_states(algorithm, data.population)[1]
    first = algorithm.client_update(algorithm.message(server), state, data.visit(1)).update
    later = algorithm.client_update(algorithm.message(server._replace(rounds=tf.constant(1))), state, data.visit(1))
    assert distance(first.w, tree.zeros_like(first.w)) == 0 and float(tf.norm(first.z)) > 0.01
    assert float(tf.norm(later.update.z)) == 0 and distance(later.update.w, first.w) > 1e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [("kappa", -1.0), ("mu", 1.1), ("mu", -0.1), ("agreement_rounds", 0), ("eta", -1.0), ("eta_p", -1.0)]
    + [("momentum", -1.0), ("steps", 0), ("weighting", "q")],
)
def test_a_bad_hyperparameter_is_refused_by_name(data, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        feddbe(data.model, data.population, **{name: value})


def test_the_rate_of_the_vector_beside_an_optimizer_object(data):
    """The object's rate is for all steps: 0 leaves c_i at 0 all the same, and another one would have no effect."""
    adam = keras.optimizers.Adam(0.1)
    _, states = play(feddbe(data.model, data.population, steps=2, eta_p=0.0, client_opt=adam), data)
    assert not any(tf.reduce_any(c != 0) for c in states.values())
    _, states = play(feddbe(data.model, data.population, steps=2, client_opt=adam), data)
    assert all(tf.reduce_any(c != 0) for c in states.values())
    with pytest.raises(ValueError, match=r"eta_p=0\.5 would have no effect.*as a name or a class"):
        feddbe(data.model, data.population, steps=2, eta_p=0.5, client_opt=adam)
    feddbe(data.model, data.population, steps=2, eta_p=0.5, client_opt=keras.optimizers.Adam)


def test_a_limit_of_the_norm_limits_the_mean_feature_of_the_agreement(data):
    """As the docstring warns: z is shorter by the factor of the clipping, in the same direction."""
    plain = feddbe(data.model, data.population, **WORK)
    free, _ = run(plain, data, cohort=[1])
    held, _ = run(screened(plain, clip_norm=float(tf.norm(free.z)) / 4), data, cohort=[1])
    assert distance(held.z, free.z / 4) < 1e-12
