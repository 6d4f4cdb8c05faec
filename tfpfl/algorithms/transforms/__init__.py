"""Functions from an algorithm to an algorithm: screening, robust statistics, compression, faults."""

from tfpfl.algorithms.transforms.along import AlongWith
from tfpfl.algorithms.transforms.compression import compressed
from tfpfl.algorithms.transforms.robust import median, trimmed_mean
from tfpfl.algorithms.transforms.screening import screened

__all__ = [
    "AlongWith",
    "compressed",
    "median",
    "screened",
    "trimmed_mean",
]
