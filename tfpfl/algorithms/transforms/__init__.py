"""Transforms: functions from an algorithm to a changed algorithm, such as screening and robust statistics."""

from tfpfl.algorithms.transforms.along import AlongWith
from tfpfl.algorithms.transforms.compression import compressed
from tfpfl.algorithms.transforms.normalization import normalized
from tfpfl.algorithms.transforms.objective import with_objective
from tfpfl.algorithms.transforms.own_part import own_part
from tfpfl.algorithms.transforms.robust import median, trimmed_mean
from tfpfl.algorithms.transforms.schedule import at_round, scheduled
from tfpfl.algorithms.transforms.screening import screened
from tfpfl.algorithms.transforms.secure import secured
from tfpfl.algorithms.transforms.server_optimizer import server_optimized

__all__ = [
    "AlongWith",
    "at_round",
    "compressed",
    "median",
    "normalized",
    "own_part",
    "scheduled",
    "screened",
    "secured",
    "server_optimized",
    "trimmed_mean",
    "with_objective",
]
