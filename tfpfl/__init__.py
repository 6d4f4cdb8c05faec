"""tfpfl: personalized federated learning on TensorFlow Federated and Keras.

Names are imported when they are first used: `import tfpfl` costs nothing, and TFF is imported only by what needs it
(`federate`, `federated_evaluation`, the 'tff' engine). TensorFlow's own messages are not shown, except with
TFPFL_VERBOSE=1.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("tfpfl does not run on Windows itself: install it in the Windows Subsystem for Linux (WSL 2)")

from tfpfl.checks import quiet_tensorflow as _quiet_tensorflow

if TYPE_CHECKING:
    from tfpfl.algorithms import ALGORITHMS as ALGORITHMS
    from tfpfl.algorithms import Adaptation as Adaptation
    from tfpfl.algorithms import Algorithm as Algorithm
    from tfpfl.algorithms import Between as Between
    from tfpfl.algorithms import ClientData as ClientData
    from tfpfl.algorithms import ClientOutput as ClientOutput
    from tfpfl.algorithms import Exchange as Exchange
    from tfpfl.algorithms import Method as Method
    from tfpfl.algorithms import OnePass as OnePass
    from tfpfl.algorithms import Rows as Rows
    from tfpfl.algorithms import build_algorithm as build_algorithm
    from tfpfl.data import PARTITIONERS as PARTITIONERS
    from tfpfl.data import ClientInfo as ClientInfo
    from tfpfl.data import Federation as Federation
    from tfpfl.data import Population as Population
    from tfpfl.data import Sampling as Sampling
    from tfpfl.data import Source as Source
    from tfpfl.data import load_source as load_source
    from tfpfl.engines import Machines as Machines
    from tfpfl.engines import RoundOutput as RoundOutput
    from tfpfl.engines import Scorer as Scorer
    from tfpfl.engines import Simulation as Simulation
    from tfpfl.engines import Visit as Visit
    from tfpfl.engines import federate as federate
    from tfpfl.engines import federated_evaluation as federated_evaluation
    from tfpfl.models import NETWORKS as NETWORKS
    from tfpfl.models import Head as Head
    from tfpfl.models import SplitModel as SplitModel
    from tfpfl.models import Weights as Weights
    from tfpfl.models import build_network as build_network
    from tfpfl.runs import PROTOCOLS as PROTOCOLS
    from tfpfl.runs import Callback as Callback
    from tfpfl.runs import Protocol as Protocol
    from tfpfl.runs import Run as Run
    from tfpfl.runs import RunConfig as RunConfig
    from tfpfl.runs import RunStore as RunStore
    from tfpfl.runs import Training as Training
    from tfpfl.studies import Record as Record
    from tfpfl.studies import adapt_new_clients as adapt_new_clients
    from tfpfl.studies import check_algorithm as check_algorithm
    from tfpfl.studies import compare_runs as compare_runs
    from tfpfl.studies import search_hyperparameters as search_hyperparameters
    from tfpfl.studies import write_report as write_report

# name -> the room that hands it on; a test holds this against the imports above
_HOME = {
    "ClientInfo": "data",
    "Federation": "data",
    "PARTITIONERS": "data",
    "Population": "data",
    "Sampling": "data",
    "Source": "data",
    "load_source": "data",
    "NETWORKS": "models",
    "Head": "models",
    "SplitModel": "models",
    "Weights": "models",
    "build_network": "models",
    "ALGORITHMS": "algorithms",
    "Adaptation": "algorithms",
    "Algorithm": "algorithms",
    "Between": "algorithms",
    "ClientData": "algorithms",
    "ClientOutput": "algorithms",
    "Exchange": "algorithms",
    "Method": "algorithms",
    "OnePass": "algorithms",
    "Rows": "algorithms",
    "build_algorithm": "algorithms",
    "Machines": "engines",
    "RoundOutput": "engines",
    "Scorer": "engines",
    "Simulation": "engines",
    "Visit": "engines",
    "federate": "engines",
    "federated_evaluation": "engines",
    "Callback": "runs",
    "PROTOCOLS": "runs",
    "Protocol": "runs",
    "Run": "runs",
    "RunConfig": "runs",
    "RunStore": "runs",
    "Training": "runs",
    "Record": "studies",
    "adapt_new_clients": "studies",
    "check_algorithm": "studies",
    "compare_runs": "studies",
    "search_hyperparameters": "studies",
    "write_report": "studies",
}
__all__ = list(_HOME)

_quiet_tensorflow()

if not TYPE_CHECKING:  # to a type checker every name would exist, a typo too

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'tfpfl' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
        if _HOME[name] != "data":  # the other rooms import TensorFlow
            import_module("tfpfl.checks").check_address_space()
        value = getattr(import_module(f"tfpfl.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
