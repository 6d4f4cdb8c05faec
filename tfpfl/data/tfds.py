"""Image data sets of TensorFlow Datasets (TFDS), read from prepared files."""

import difflib
import os
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.source import Source

# The data sets that `list_datasets` shows. Any other image classification data set of TFDS works too, by its name.
TFDS_IMAGES = {
    "mnist": ((28, 28, 1), 10),
    "fashion_mnist": ((28, 28, 1), 10),
    "kmnist": ((28, 28, 1), 10),
    "emnist/byclass": ((28, 28, 1), 62),
    "emnist/balanced": ((28, 28, 1), 47),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
    "svhn_cropped": ((32, 32, 3), 10),
    "omniglot": ((28, 28, 1), 1623),
}


def data_folder(data_dir: str | os.PathLike | None) -> Path:
    """The folder of TFDS's data: `data_dir`, or if None the environment's TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    return Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def prepared_folder(name: str, data_dir: Path) -> Path | None:
    """The folder of the newest prepared version of a TFDS data set; None if there is none in `data_dir`."""
    versions = [p.parent for p in (data_dir / name).glob("*/dataset_info.json")]
    numbers = {p: [int(n) for n in p.name.split(".")] for p in versions if p.name.replace(".", "").isdigit()}
    return max(numbers, key=numbers.__getitem__, default=None)


def tfds_folder(name: str, data_dir: str | os.PathLike | None, allow_download: bool) -> Path:
    """The folder of a prepared TFDS data set; downloads and prepares it first if that is needed and allowed.

    Args:
        name: the name of the data set in TFDS, such as mnist or emnist/byclass.
        data_dir: where TFDS keeps its data; None for the default, see `data_folder`.
        allow_download: whether to download a data set that is not there.

    Raises:
        InvalidArgument: TFDS has no data set of this name.
        FileNotFoundError: the data set is not in `data_dir`, and `allow_download` is false.
    """
    if not name or not all(part.isidentifier() for part in name.replace("-", "_").split("/")):
        raise InvalidArgument(f"{name!r} is not the name of a data set; names look like mnist or emnist/byclass")
    where = data_folder(data_dir)
    folder = prepared_folder(name, where)
    if folder:
        return folder
    if name not in TFDS_IMAGES:
        import tensorflow_datasets as tfds

        known = tfds.list_builders(with_community_datasets=False)
        if name.split("/")[0] not in known:
            names = dict.fromkeys(["digits", "synthetic", *TFDS_IMAGES, *known])
            near = difflib.get_close_matches(name, list(names), cutoff=0.5)
            raise InvalidArgument(f"unknown data set {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    if not allow_download:
        raise FileNotFoundError(
            f"data set {name!r} is not in {where}. Set TFDS_DATA_DIR or data_dir to the folder that has it, or allow "
            "the download: load_source(..., allow_download=True), or --allow-download on the command line"
        )
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=where)
    builder.download_and_prepare()
    return Path(builder.data_dir)


def tfds_builder(folder: Path) -> Any:
    """The TFDS builder of a prepared data set. It uses no network, while `tfds.builder(name)` would."""
    import tensorflow_datasets as tfds

    return tfds.builder_from_directory(folder)


def load_tfds_images(name: str, folder: Path) -> Source:
    """Reads a prepared image classification data set of TFDS into memory.

    Args:
        name: the name of the data set, for the manifest.
        folder: from `tfds_folder`.

    Raises:
        InvalidArgument: the data set has no image and class label, no uint8 images of one size, or no train split with
            a test or validation split.
    """
    builder = tfds_builder(folder)
    features, splits = builder.info.features, builder.info.splits
    if "image" not in features or "label" not in features or not hasattr(features["label"], "names"):
        raise InvalidArgument(f"{name} needs the features image and label (a class), found {sorted(features)}")
    if None in features["image"].shape or features["image"].dtype != np.uint8:
        raise InvalidArgument(f"the images of {name} are {features['image'].dtype} of shape {features['image'].shape}; "
                         "uint8 images of one size are needed")  # fmt: skip
    test = "test" if "test" in splits else "validation"
    if "train" not in splits or test not in splits:
        raise InvalidArgument(f"{name} needs a train split, and a test or validation split; found {sorted(splits)}")
    arrays = []
    for split in ("train", test):
        data = builder.as_dataset(split, batch_size=-1)
        arrays += [np.asarray(data["image"]), np.asarray(data["label"])]
    return Source.from_arrays(
        *arrays, name=name, version=str(builder.info.version), class_names=features["label"].names
    )
