"""Hyperparameters with which a few rounds on small clients are fast, and still change the models visibly."""

from tfpfl.algorithms import ALGORITHMS

QUICK = {"tau": 4, "steps": 4, "beta": 0.3, "eta": 0.2, "rho": 0.02, "tau_h": 3, "tau_b": 2, "steps_ft": 3}
SPECIAL = {  # algorithm -> hyperparameters
    "per_fedavg": {"eta_inner": 0.1},
    "pfedme": {"lam": 5.0, "eta_p": 0.15, "beta": 1.0},
    "fedfomo": {"candidates": 2},
    "pfedhn": {"momentum": 0.0, "eta_new": 0.5, "alpha": 0.05, "hidden_dim": 10, "n_hidden": 1},
    "fedamp": {"alpha": 0.5, "sigma": 4.0},
    "fedpac": {"tau_g": 2, "tau_f": 3, "unit": "steps", "eta_g": 0.3, "eta_f": 0.2, "momentum": 0.0},
    "heurfedamp": {"alpha": 0.5},
    "feddbe": {"kappa": 1.0},
}


def quick(name: str) -> dict:
    """The quick hyperparameters of the algorithm of this name."""
    return {k: v for k, v in QUICK.items() if k in ALGORITHMS[name].hyperparameters} | SPECIAL.get(name, {})
