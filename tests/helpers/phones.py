"""Ten phones with a few digits each."""

import numpy as np


def federation(folder):
    """Ten named clients with 2, 3 or 4 classes and 27 to 72 training examples each, as a federation in `folder`."""
    from tfpfl.data import Federation, load_source

    source, rng = load_source("digits"), np.random.default_rng(0)
    clients = {}
    for i in range(10):
        classes = np.sort(rng.permutation(10)[: 2 + i % 3])
        rows = rng.permutation(np.flatnonzero(np.isin(source.y_train, classes)))[: 40 + 6 * i]
        clients[f"phone {i}"] = (source.x_train[rows], source.y_train[rows])
    return Federation.from_clients(clients, out=folder, name="digits", scale=1 / 16, validation=0.0)
