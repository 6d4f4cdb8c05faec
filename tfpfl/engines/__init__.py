"""Engines execute the rounds of an algorithm: in this process, through TensorFlow Federated, or on a Ray cluster."""

from tfpfl.engines.local.simulation import Simulation
from tfpfl.engines.machines import Machines, MachinesError
from tfpfl.engines.scoring import Scorer
from tfpfl.engines.tff.evaluation import federated_evaluation
from tfpfl.engines.tff.notebook_kernel import continue_with_tff
from tfpfl.engines.tff.process import federate, federated_shard
from tfpfl.engines.tff.worker import answers, start_worker
from tfpfl.engines.visit import RoundOutput, Visit, WithLogits, visits

__all__ = [
    "Machines",
    "MachinesError",
    "RoundOutput",
    "Scorer",
    "Simulation",
    "Visit",
    "WithLogits",
    "answers",
    "continue_with_tff",
    "federate",
    "federated_evaluation",
    "federated_shard",
    "start_worker",
    "visits",
]
