"""Runs: a run is a folder that holds a configuration, the state after the last round, and the results.

Names are imported when they are first used: the command line reads the table of options without TensorFlow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfpfl.runs.aggregators import AGGREGATORS as AGGREGATORS
    from tfpfl.runs.availability import Availability as Availability
    from tfpfl.runs.callbacks import Callback as Callback
    from tfpfl.runs.callbacks import EarlyStopping as EarlyStopping
    from tfpfl.runs.callbacks import Progress as Progress
    from tfpfl.runs.callbacks import TensorBoard as TensorBoard
    from tfpfl.runs.client_model import ClientModel as ClientModel
    from tfpfl.runs.client_model import ClientModels as ClientModels
    from tfpfl.runs.config import RunConfig as RunConfig
    from tfpfl.runs.config import RunError as RunError
    from tfpfl.runs.config import read_config as read_config
    from tfpfl.runs.consent import allow_code as allow_code
    from tfpfl.runs.federations import open_federation as open_federation
    from tfpfl.runs.metrics import METRICS as METRICS
    from tfpfl.runs.metrics import Metric as Metric
    from tfpfl.runs.metrics import register_metric as register_metric
    from tfpfl.runs.privacy import Privacy as Privacy
    from tfpfl.runs.protocols import EV_ALL as EV_ALL
    from tfpfl.runs.protocols import EV_LOCAL as EV_LOCAL
    from tfpfl.runs.protocols import PROTOCOLS as PROTOCOLS
    from tfpfl.runs.protocols import Protocol as Protocol
    from tfpfl.runs.protocols import Result as Result
    from tfpfl.runs.protocols import Score as Score
    from tfpfl.runs.protocols import curve as curve
    from tfpfl.runs.protocols import per_client as per_client
    from tfpfl.runs.run import Run as Run
    from tfpfl.runs.store import RunStore as RunStore
    from tfpfl.runs.store import StoreError as StoreError
    from tfpfl.runs.trackers import MLflow as MLflow
    from tfpfl.runs.trackers import Tracker as Tracker
    from tfpfl.runs.trackers import WandB as WandB
    from tfpfl.runs.training import DivergedError as DivergedError
    from tfpfl.runs.training import Training as Training

# name -> the module that defines it; a test holds this against the imports above
_HOME = {
    "AGGREGATORS": "aggregators",
    "EV_ALL": "protocols",
    "EV_LOCAL": "protocols",
    "METRICS": "metrics",
    "MLflow": "trackers",
    "PROTOCOLS": "protocols",
    "Availability": "availability",
    "Callback": "callbacks",
    "ClientModel": "client_model",
    "ClientModels": "client_model",
    "DivergedError": "training",
    "EarlyStopping": "callbacks",
    "Metric": "metrics",
    "Privacy": "privacy",
    "Progress": "callbacks",
    "Protocol": "protocols",
    "Result": "protocols",
    "Run": "run",
    "RunConfig": "config",
    "RunError": "config",
    "RunStore": "store",
    "Score": "protocols",
    "StoreError": "store",
    "TensorBoard": "callbacks",
    "Tracker": "trackers",
    "Training": "training",
    "WandB": "trackers",
    "allow_code": "consent",
    "curve": "protocols",
    "open_federation": "federations",
    "per_client": "protocols",
    "read_config": "config",
    "register_metric": "metrics",
}
__all__ = list(_HOME)


if not TYPE_CHECKING:  # to a type checker every name would exist, a typo too

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'tfpfl.runs' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
        value = getattr(import_module(f"tfpfl.runs.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
