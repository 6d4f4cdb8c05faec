"""Makes an example of a drawing, for a page or an app with a canvas. Needs NumPy only.

A drawing is a square grey image of black ink on white paper, uint8. `web/src/preprocess.ts` computes the same numbers.

    ink     255 - grey
    size    ink is resized to the example's height and width. 'area': the mean of a block of pixels. 'bilinear', as
            Omniglot is prepared: interpolation between 2 x 2 pixels (tf.image.resize without antialiasing)
    raw     ink in 0 .. `levels`, rounded half to even: the numbers that the federation stores
    x       raw * scale + shift, float32, as for every example (the manifest's preprocessing)
"""

import numpy as np

from tflite_export.device.errors import InvalidInput


def drawing_settings(dataset: str | None, example_shape, preprocessing: dict, antialias: bool = False) -> dict | None:
    """How a drawing becomes an example of a data set; None if examples are not square grey images of uint8.

    Full ink is where x is 1, so None too if no raw level from 1 to 255 gives that, as where white is 1.

    Returns:
        {'size': side of the drawing in pixels, 'pen': width of a line in pixels, 'resample': 'area' or 'bilinear',
        'levels': the raw value of full ink}.
    """
    grey = len(example_shape) in (2, 3) and tuple(example_shape[2:]) in ((), (1,))
    if not grey or example_shape[0] != example_shape[1] or preprocessing.get("stored_dtype") != "uint8":
        return None
    scale, shift = preprocessing.get("scale", 1), preprocessing.get("shift", 0)
    ink = (1 - shift) / scale if scale else 0.0
    if not 0.5 < ink < 255.5:
        return None
    levels = round(ink)
    if dataset in ("omniglot", "omniglot_drawers") and not antialias:
        return {"size": 105, "pen": 3, "resample": "bilinear", "levels": levels}
    size = example_shape[0] * max(1, round(280 / example_shape[0]))
    return {"size": size, "pen": round(0.08 * size), "resample": "area", "levels": levels}


def example_of_drawing(grey: np.ndarray, settings: dict, example_shape) -> np.ndarray:
    """The raw example, uint8 `example_shape`, of a drawing, uint8 [size, size]; black is ink.

    Raises:
        InvalidInput: the drawing has another shape or dtype.
    """
    size, (height, width) = settings["size"], example_shape[:2]
    if grey.shape != (size, size) or grey.dtype != np.uint8:
        raise InvalidInput(f"a drawing must be uint8 [{size}, {size}], found {grey.dtype} {list(grey.shape)}")
    ink = 255.0 - grey.astype(np.float64)
    if settings["resample"] == "area":
        block = size // height
        small = ink.reshape(height, block, width, block).sum((1, 3)) / (block * block)
    else:
        top, bottom, down = _neighbours(height, size)
        left, right, across = _neighbours(width, size)
        rows = ink[top] * (1 - down)[:, np.newaxis] + ink[bottom] * down[:, np.newaxis]
        small = rows[:, left] * (1 - across) + rows[:, right] * across
    return np.rint(small * settings["levels"] / 255).astype(np.uint8, order="C").reshape(example_shape)


def _neighbours(pixels, size):
    """For each pixel of the example: the two pixels of the drawing around its centre, and the weight of the second."""
    centre = (np.arange(pixels) + 0.5) * (size / pixels) - 0.5
    first = np.floor(centre)
    weight = centre - first
    return np.maximum(first, 0).astype(int), np.minimum(first + 1, size - 1).astype(int), weight
