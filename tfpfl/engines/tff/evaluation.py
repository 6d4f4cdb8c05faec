"""Scores the clients' models in a federated computation of TFF."""

from collections.abc import Sequence

from tfpfl.algorithms.contract import Algorithm, check_is_algorithm
from tfpfl.checks import InvalidArgument, check_listed
from tfpfl.engines.rounds import RoundCheck
from tfpfl.engines.tff.computations import checked, client_computation, messenger, tff_type, visit_type_and_readers
from tfpfl.engines.tff.worker import require_tff, use_local_worker
from tfpfl.engines.visit import client_state_spec, evaluation_work, server_state_spec


def federated_evaluation(algorithm: Algorithm, federation, splits: Sequence[str] = ("validation", "test")):
    """Makes the TFF computation (server@SERVER, state@CLIENTS, visit@CLIENTS) -> scores@CLIENTS.

    The scores are those of `Scorer`: '{split}_{loss|correct|examples}' -> scalar, for every client.

    Args:
        algorithm: its personal models, and its global model if it has one, are scored.
        federation: the clients' examples.
        splits: the parts of every client's data to score, at least one.

    Raises:
        Unavailable: TFF is not installed.
        InvalidArgument: the examples are not those of a `Federation`, or there are no splits.
    """
    check_is_algorithm(algorithm)
    check_listed("splits", splits, "['test']")
    tff = require_tff()
    if not hasattr(federation, "reader") or not splits:
        raise InvalidArgument(
            "held-out splits are scored on the clients' examples in a tfpfl.Federation, and at least one split is "
            f"needed; found {type(federation).__name__} and splits={tuple(splits)}. Where visits carry the examples, "
            "score `algorithm.personal_model` yourself"
        )
    use_local_worker()
    visit_type, readers = visit_type_and_readers(algorithm, federation, splits)
    server_type, state_type = tff_type(server_state_spec(algorithm)), tff_type(client_state_spec(algorithm))
    to_clients, message_type, unpack = messenger(algorithm)
    work = evaluation_work(algorithm, readers)
    run_client = client_computation(work, message_type, state_type, visit_type, unpack)

    @tff.federated_computation(
        tff.FederatedType(server_type, tff.SERVER),
        tff.FederatedType(state_type, tff.CLIENTS),
        tff.FederatedType(visit_type, tff.CLIENTS),
    )
    def evaluate(server, client_states, visits):
        return tff.federated_map(run_client, (to_clients(server, visits), client_states, visits))

    return checked(evaluate, RoundCheck(algorithm))
