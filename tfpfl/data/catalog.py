"""Where examples come from: scikit-learn's digits, TensorFlow Datasets, arrays, and data that are per client already.

A `Source` is a train and a test set of examples with global labels, checked once, here. Who holds which of them is the
partitioner's business, not the source's.
"""

import os

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.omniglot import AUGMENT, load_omniglot
from tfpfl.data.partitioners import check_seed
from tfpfl.data.source import Source, every_nth
from tfpfl.data.synthetic import blobs
from tfpfl.data.tfds import TFDS_IMAGES, data_folder, load_tfds_images, prepared_folder, tfds_folder


def load_source(
    name: str = "digits",
    *,
    allow_download: bool = False,
    data_dir: str | os.PathLike | None = None,
    pixels: str = "unit",
    augment: str = "before_split",
    antialias: bool = False,
    seed: int = 0,
) -> Source:
    """The data set of that name.

    Args:
        name: 'digits' (scikit-learn's 1,797 images of 8 x 8), 'synthetic', or an image classification data set of
            TensorFlow Datasets, such as mnist, cifar10, omniglot or emnist/byclass (stored transposed there).
        allow_download: whether TFDS may fetch what is not in `data_dir`.
        data_dir: where TFDS keeps its data; default the environment's TFDS_DATA_DIR, else ~/tensorflow_datasets.
        pixels: 'unit' maps uint8 pixels to [0, 1]; 'signed' to [-1, 1], that is (x/255 - 0.5)/0.5.
        augment: for omniglot, see `load_omniglot`: before_split, train_only, after_split, none.
        antialias: for omniglot, whether the resize averages over all the pixels that it drops.
        seed: of omniglot's split into train and test, and of 'synthetic'. Other data sets bring their own split.

    Raises:
        ValueError: an unknown name or option, or a data set that is not classified images of one size.
        FileNotFoundError: the data set is not in `data_dir` and may not be downloaded.
    """
    if pixels not in ("unit", "signed"):
        raise InvalidArgument(f"unknown pixels {pixels!r}: one of unit, signed")
    if augment not in AUGMENT:
        raise InvalidArgument(f"unknown augment {augment!r}: one of {', '.join(AUGMENT)}")
    check_seed(seed)
    if name == "synthetic":
        x, y = blobs(4_000, seed=seed)
        return Source.from_arrays(x, y, name="synthetic", options={"seed": seed})
    if name == "digits":
        source = _digits()
    else:
        folder = tfds_folder(name, data_dir, allow_download)
        source = (
            load_omniglot(folder, augment, antialias, seed) if name == "omniglot" else load_tfds_images(name, folder)
        )
    return source._replace(scale=2 * source.scale, shift=-1.0) if pixels == "signed" else source


def list_datasets(data_dir: str | os.PathLike | None = None) -> list[dict]:
    """The data sets that `load_source` knows by name: rows of name, shape, classes and whether they are present."""
    rows = [
        {"name": "digits", "shape": (8, 8, 1), "classes": 10, "present": True},
        {"name": "synthetic", "shape": (8,), "classes": 10, "present": True},
    ]
    for name, (shape, classes) in TFDS_IMAGES.items():
        present = prepared_folder(name, data_folder(data_dir)) is not None
        rows.append({"name": name, "shape": shape, "classes": classes, "present": present})
    return rows


def _digits() -> Source:
    """scikit-learn's digits, pixels 0..16, a fifth of each class for test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = data.images.astype(np.uint8)[..., None], data.target
    test = every_nth(y, 5)
    return Source.from_arrays(x[~test], y[~test], x[test], y[test], name="digits", version="1", scale=1 / 16)
