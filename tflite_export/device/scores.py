"""The choice of held-out examples. Needs NumPy only."""

import numpy as np

from tflite_export.device.runtime import BundleError


def cut(x, y, part):
    """Sets a part of the examples aside, of each class if labels are classes: ((x, y) to fit, (x, y) held out).

    Of N examples floor(N part) are set aside, evenly in the order of the labels. Targets that are not classes are taken
    in the order of the first one, so that small and large ones are in both.

    Raises:
        BundleError: the part is not in (0, 1), there are fewer than 4 examples, or the part is less than one of them.
    """
    if not 0 < part < 1:
        raise BundleError(f"the held-out part must lie in (0, 1), found {part}")
    if len(x) < 4:
        raise BundleError(f"{len(x)} examples are too few to hold some out; give held_out examples, or None")
    order = np.argsort(y if y.ndim == 1 else y[:, 0], kind="stable")
    aside = np.floor(np.arange(len(x) + 1) * part)  # of the first so many
    out = np.zeros(len(x), bool)
    out[order] = aside[1:] > aside[:-1]
    if not out.any():
        raise BundleError(
            f"a held-out part of {part} of {len(x)} examples is not one whole example; give a larger part, held_out "
            "examples, or None"
        )
    return (x[~out], y[~out]), (x[out], y[out])
