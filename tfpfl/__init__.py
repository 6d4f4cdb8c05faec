"""tfpfl: personalized federated learning on TensorFlow Federated and Keras.

Names are imported when they are first used: `import tfpfl` costs nothing, and TFF is imported only by what needs it
(`federate`, the 'tff' engine).
"""

from importlib import import_module

_HOME = {
    "Adaptation": "algorithm",
    "Algorithm": "algorithm",
    "ClientData": "algorithm",
    "ClientInfo": "algorithm",
    "ClientOutput": "algorithm",
    "Head": "algorithm",
    "Population": "algorithm",
    "Rows": "algorithm",
    "Sampling": "algorithm",
    "Weights": "algorithm",
    "ALGORITHMS": "algorithms",
    "build_algorithm": "algorithms",
    "Federation": "data",
    "Evaluation": "simulate",
    "RoundOutput": "visit",
    "Run": "run",
    "RunConfig": "run",
    "Simulation": "simulate",
    "SplitModel": "models",
    "Training": "training",
    "Visit": "visit",
    "federate": "federated",
    "federated_evaluation": "federated",
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
