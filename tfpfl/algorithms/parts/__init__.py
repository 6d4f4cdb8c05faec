"""Parts that methods share: local training, the linear head, optimizers, adaptation, and tables on the server."""

from tfpfl.algorithms.parts.adaptation import adaptation
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.parts.local_training import (
    LocalStep,
    arrival_of,
    batch_loop,
    body_solver,
    example_weight,
    head_solver,
    local_solver,
    local_step,
    one_pass_update,
    support_and_query,
    value_and_gradient,
)
from tfpfl.algorithms.parts.optimizers import (
    OPTIMIZERS,
    Optimizer,
    OptimizerChoice,
    adagrad,
    adam,
    adamw,
    adaptive,
    client_optimizer,
    decayed,
    optimizer,
    sgd,
    yogi,
)
from tfpfl.algorithms.parts.schedules import paced, rate
from tfpfl.algorithms.parts.server_rows import check_table, row_of

__all__ = [
    "LocalStep",
    "OPTIMIZERS",
    "Optimizer",
    "OptimizerChoice",
    "adagrad",
    "adam",
    "adamw",
    "adaptation",
    "adaptive",
    "arrival_of",
    "as_optimizer",
    "batch_loop",
    "body_solver",
    "check_table",
    "client_optimizer",
    "decayed",
    "example_weight",
    "head_solver",
    "local_solver",
    "local_step",
    "one_pass_update",
    "optimizer",
    "paced",
    "rate",
    "row_of",
    "sgd",
    "support_and_query",
    "value_and_gradient",
    "yogi",
]
