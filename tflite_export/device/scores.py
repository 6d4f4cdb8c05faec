"""The choice of held-out examples. Needs NumPy only."""

import numpy as np

from tflite_export.device.runtime import BundleError


def cut(x, y, part):
    """Sets a part of the examples aside, of each class if labels are classes: ((x, y) to fit, (x, y) held out).

    Targets that are not classes are taken in the order of the first one, so that small and large ones are in both.

    Raises:
        BundleError: the part is not in (0, 1), or there are fewer than 4 examples.
    """
    if not 0 < part < 1:
        raise BundleError(f"the held-out part must lie in (0, 1), found {part}")
    if len(x) < 4:
        raise BundleError(f"{len(x)} examples are too few to hold some out; give held_out examples, or None")
    order = np.argsort(y if y.ndim == 1 else y[:, 0], kind="stable")
    every = max(int(round(1 / part)), 2)
    out = np.zeros(len(x), bool)
    out[order[every - 1 :: every]] = True
    return (x[~out], y[~out]), (x[out], y[out])
