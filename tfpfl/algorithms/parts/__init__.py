"""Parts that methods share: local training, the linear head, optimizers, adaptation, and tables on the server."""

from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.local_training import (
    arrival_of,
    batch_loop,
    body_solver,
    example_weight,
    head_solver,
    local_solver,
    one_pass_update,
    support_and_query,
    value_and_gradient,
)
from tfpfl.algorithms.parts.optimizers import OPTIMIZERS, Optimizer, adam, optimizer, sgd
from tfpfl.algorithms.parts.server_rows import check_table, row_of

__all__ = [
    "OPTIMIZERS",
    "Optimizer",
    "adam",
    "adaptation",
    "arrival_of",
    "batch_loop",
    "body_solver",
    "check_table",
    "example_weight",
    "head_solver",
    "local_solver",
    "one_pass_update",
    "optimizer",
    "row_of",
    "sgd",
    "support_and_query",
    "value_and_gradient",
]
