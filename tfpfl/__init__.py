"""tfpfl: personalized federated learning on TensorFlow Federated and Keras.

Names are imported when they are first used: `import tfpfl` costs nothing, and TFF is imported only by what needs it
(`federate`, the 'tff' engine).
"""

from importlib import import_module

_HOME = {
    "Adaptation": "algorithms.contract",
    "Algorithm": "algorithms.contract",
    "ClientData": "algorithms.contract",
    "ClientInfo": "data.population",
    "ClientOutput": "algorithms.contract",
    "Head": "models.weights",
    "Population": "data.population",
    "Rows": "algorithms.contract",
    "Sampling": "data.population",
    "Weights": "models.weights",
    "ALGORITHMS": "algorithms.catalog",
    "build_algorithm": "algorithms.catalog",
    "Federation": "data.federation",
    "Scorer": "engines.scoring",
    "RoundOutput": "engines.visit",
    "Run": "runs.run",
    "RunConfig": "runs.config",
    "Simulation": "engines.local.simulation",
    "SplitModel": "models.split",
    "Training": "runs.training",
    "Visit": "engines.visit",
    "federate": "engines.tff.process",
    "federated_evaluation": "engines.tff.evaluation",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'tfpfl' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(import_module(f"tfpfl.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOME})
