"""The battery's check of algorithms whose rounds have two exchanges."""

import tensorflow as tf

from tfpfl.studies.battery_subject import EVERYONE, WIDEST, Broken, Subject, distance, keep, kinds, require


def a_first_exchange_keeps_what_it_declares(subject: Subject) -> None:
    """A round with two exchanges has no `one_pass` and no `balance`, and a client keeps between them what `keeps` says.

    A client that leaves between them keeps its state, and one that stays does not: only the first aggregate has both.
    """
    algorithm, trained = subject.algorithm, subject.trained
    if algorithm.first is None:
        return
    for name in ("one_pass", "balance"):
        require(getattr(algorithm, name) is None, f"it has a `first` and a `{name}`: leave one of them out")
    for client in (0, WIDEST):
        _, _, data, output = subject.first_visit(client)
        declared = algorithm.first.keeps(data.info)
        try:
            tf.nest.assert_same_structure(declared, output.state)
        except (TypeError, ValueError) as error:
            raise Broken(f"after the first exchange a client does not keep what `keeps` declares: {error}") from error
        same = kinds(declared) == kinds(output.state)
        require(same, f"`keeps` declares {kinds(declared)}, and client {client} keeps {kinds(output.state)}")
    visits, states = subject.visits(EVERYONE, 5), trained.states(EVERYONE)
    some = subject.engine.next(trained.server, states, visits, gone=[1, 4])
    keep(some.client_states, states, (1, 4))
    everyone = subject.engine.next(trained.server, states, visits)
    fewer = subject.engine.next(trained.server, states[2:], visits[2:])
    away = [distance(some.server, other.server) for other in (everyone, fewer)]
    require(min(away) > 1e-12, "a client that leaves between the exchanges counts in both of them, or in neither")
