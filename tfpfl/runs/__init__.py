"""Runs: a run is a folder that holds a configuration, the state after the last round, and the results."""

from tfpfl.runs.aggregators import AGGREGATORS
from tfpfl.runs.availability import Availability
from tfpfl.runs.callbacks import Callback, EarlyStopping, Progress, TensorBoard
from tfpfl.runs.config import RunConfig, RunError, read_config
from tfpfl.runs.federations import open_federation
from tfpfl.runs.privacy import Privacy, privacy
from tfpfl.runs.protocols import EV_ALL, EV_LOCAL, PROTOCOLS, Protocol, Result, Score, curve, per_client
from tfpfl.runs.run import Run
from tfpfl.runs.store import RunStore, StoreError
from tfpfl.runs.training import DivergedError, Training

__all__ = [
    "AGGREGATORS",
    "EV_ALL",
    "EV_LOCAL",
    "PROTOCOLS",
    "Availability",
    "Callback",
    "DivergedError",
    "EarlyStopping",
    "Privacy",
    "Progress",
    "Protocol",
    "Result",
    "Run",
    "RunConfig",
    "RunError",
    "RunStore",
    "Score",
    "StoreError",
    "TensorBoard",
    "Training",
    "curve",
    "open_federation",
    "per_client",
    "privacy",
    "read_config",
]
