"""Where examples come from: scikit-learn's digits, TensorFlow Datasets, arrays, and data that are per client already.

A `Source` is a train and a test set of examples with global labels, checked once, here. Who holds which of them is the
partitioner's business, not the source's.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.partitioners import check_seed
from tfpfl.data.randomness import Stream, generator
from tfpfl.data.synthetic import blobs

# What `list_datasets` shows; any other image classification data set of TFDS works by its name too.
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
AUGMENT = ("before_split", "train_only", "after_split", "none")


class Source(NamedTuple):
    """Examples and global labels. Make one with `load_source` or `Source.from_arrays`, which check them."""

    name: str
    version: str
    x_train: np.ndarray  # uint8 or float32 [N, ...]
    y_train: np.ndarray  # int32 [N], in [0, C)
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: Sequence[str]  # [C]
    scale: float = 1.0  # x as floats is raw * scale + shift
    shift: float = 0.0
    key_train: np.ndarray | None = None  # [N]: the natural owner of every example, for the partitioner `natural`
    key_test: np.ndarray | None = None
    group_train: np.ndarray | None = None  # int [N], >= 0: examples of one group stay together in a validation cut
    options: Mapping[str, Any] = {}  # what else made this source, for the manifest

    @classmethod
    def from_arrays(
        cls,
        x,
        y,
        x_test=None,
        y_test=None,
        *,
        name: str = "arrays",
        version: str = "",
        class_names: Sequence[str] | None = None,
        scale: float | None = None,
        shift: float = 0.0,
        key=None,
        key_test=None,
        options: Mapping[str, Any] | None = None,
    ) -> "Source":
        """A source of arrays in memory.

        Args:
            x, y: training examples [N, ...] and integer labels [N]. uint8 stays as it is; other numbers become float32.
            x_test, y_test: the test set; by default every fourth example of each class is set aside for it.
            name, version: for the manifest.
            class_names: of all C classes; default the numbers 0..C-1 up to the largest label.
            scale, shift: x as floats is raw * scale + shift; scale defaults to 1/255 for uint8 and to 1 otherwise.
            key, key_test: the natural owner of every example, if there is one.
            options: what else to write into the manifest.

        Raises:
            ValueError: nothing there, x and y of different length, not numbers, not finite, or labels that are not
                integers in [0, C).
        """
        x, y = _examples(x, "training"), _labels(y, "training")
        _same_length(x, y, "training")
        if not len(x):
            raise InvalidArgument("there are no training examples")
        if (x_test is None) != (y_test is None):
            raise InvalidArgument("x_test and y_test come together: one of them is missing")
        key = None if key is None else np.asarray(key)
        if key is not None and len(key) != len(x):
            raise InvalidArgument(f"key must have one entry per training example: {len(key)} for {len(x)}")
        if x_test is None:
            test = _every(y, 4)
            x, y, x_test, y_test = x[~test], y[~test], x[test], y[test]
            if key is not None:
                key, key_test = key[~test], key[test]
        x_test, y_test = _examples(x_test, "test"), _labels(y_test, "test")
        _same_length(x_test, y_test, "test")
        if x.shape[1:] != x_test.shape[1:] or (len(x_test) and x.dtype != x_test.dtype):
            raise InvalidArgument(
                f"training and test examples must be alike: {x.dtype} {x.shape[1:]}, {x_test.dtype} {x_test.shape[1:]}"
            )
        key_test = None if key_test is None else np.asarray(key_test)
        if (key is None) != (key_test is None) or (key_test is not None and len(key_test) != len(x_test)):
            raise InvalidArgument("key and key_test come together, one entry per example")
        top = int(max(y.max(initial=-1), y_test.max(initial=-1)))
        class_names = [str(c) for c in (range(top + 1) if class_names is None else class_names)]
        if top >= len(class_names):
            raise InvalidArgument(f"labels go up to {top}, but there are only {len(class_names)} class names")
        scale = (1 / 255 if x.dtype == np.uint8 else 1.0) if scale is None else float(scale)
        if not (np.isfinite(scale) and np.isfinite(shift)):
            raise InvalidArgument(f"scale and shift must be finite, found {scale} and {shift}")
        return cls(name, version, x, y, x_test.astype(x.dtype), y_test, class_names, scale, float(shift), key, key_test,
                   None, dict(options or {}))  # fmt: skip


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
        augment: for omniglot, see `_omniglot`: before_split, train_only, after_split, none.
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
        folder = _tfds_folder(name, data_dir, allow_download)
        source = _omniglot(folder, augment, antialias, seed) if name == "omniglot" else _tfds_images(name, folder)
    return source._replace(scale=2 * source.scale, shift=-1.0) if pixels == "signed" else source


def list_datasets(data_dir: str | os.PathLike | None = None) -> list[dict]:
    """The data sets that `load_source` knows by name: rows of name, shape, classes and whether they are present."""
    rows = [
        {"name": "digits", "shape": (8, 8, 1), "classes": 10, "present": True},
        {"name": "synthetic", "shape": (8,), "classes": 10, "present": True},
    ]
    for name, (shape, classes) in TFDS_IMAGES.items():
        present = _prepared(name, _data_dir(data_dir)) is not None
        rows.append({"name": name, "shape": shape, "classes": classes, "present": present})
    return rows


def client_arrays(clients: Any, test: Any = None) -> dict[Any, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Data that come per client, as {id: {split: (x, y)}}; see `Federation.from_clients` for what may come.

    A ClientData of TFF is told by its methods, so that TFF is imported by those who use it only.
    """
    if hasattr(clients, "client_ids") and hasattr(clients, "create_tf_dataset_for_client"):
        absent = [] if test is None else sorted(set(clients.client_ids) - set(test.client_ids))
        if absent:
            raise InvalidArgument(f"{len(absent)} clients have no test data, the first is {absent[0]!r}")
        found = {}
        for client in clients.client_ids:
            found[client] = {"train": _dataset_arrays(clients.create_tf_dataset_for_client(client), client)}
            if test is not None:
                found[client]["test"] = _dataset_arrays(test.create_tf_dataset_for_client(client), client)
        return found
    if test is not None:
        raise InvalidArgument(
            "test= goes with a ClientData; give arrays as {'train': (x, y), 'test': (x, y)} per client"
        )
    found = {}
    for client, data in clients.items() if isinstance(clients, Mapping) else enumerate(clients):
        parts = dict(data) if isinstance(data, Mapping) else {"train": data}
        unknown = set(parts) - {"train", "validation", "test"}
        if unknown or "train" not in parts:
            raise InvalidArgument(f"client {client!r} has parts {sorted(parts)}: train, perhaps validation, test")
        found[client] = {}
        for split, pair in parts.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InvalidArgument(f"client {client!r}: {split} must be a pair (x, y), found {type(pair).__name__}")
            what = f"client {client!r}: {split}"
            x, y = np.asarray(pair[0]), np.asarray(pair[1])
            if split == "train" and not len(x):
                raise InvalidArgument(f"client {client!r} has no training examples")
            found[client][split] = (_examples(x, what), _labels(y, what)) if len(x) else (x, y)
            _same_length(x, y, what)
    return found


def _dataset_arrays(dataset, client) -> tuple[np.ndarray, np.ndarray]:
    """A client's tf.data.Dataset of (x, y), or of a dict of a label and one other feature."""
    xs, ys = [], []
    for element in dataset.as_numpy_iterator():
        if isinstance(element, Mapping):
            label = [k for k in ("label", "labels", "y") if k in element]
            others = [k for k in element if k not in label]
            if len(label) != 1 or len(others) != 1:
                raise InvalidArgument(
                    f"client {client!r} has features {sorted(element)}: a label and one other are needed; "
                    "map the ClientData to pairs (x, y) with preprocess()"
                )
            element = element[others[0]], element[label[0]]
        xs.append(element[0])
        ys.append(element[1])
    if not xs:
        raise InvalidArgument(f"client {client!r} has no examples")
    return _examples(np.stack(xs), f"client {client!r}:"), _labels(np.stack(ys), f"client {client!r}:")


def _examples(x, what: str) -> np.ndarray:
    x = np.asarray(x)
    if x.ndim < 1 or x.dtype.kind not in "biuf":
        raise InvalidArgument(
            f"{what} examples must be an array of numbers [N, ...], found {x.dtype} of shape {x.shape}"
        )
    if x.ndim == 1:
        x = x[:, None]  # one feature
    if x.dtype == np.uint8:
        return x
    bad = ~np.isfinite(x).reshape(len(x), -1).all(1) if len(x) else np.zeros(0, bool)
    if bad.any():
        raise InvalidArgument(f"{what} examples must be finite: {bad.sum()} are not, first number {int(bad.argmax())}")
    return x.astype(np.float32)


def _labels(y, what: str) -> np.ndarray:
    y = np.asarray(y)
    if y.ndim != 1:
        raise InvalidArgument(f"{what} labels must be a vector of class ids, found shape {y.shape}")
    if y.dtype.kind not in "iu" and len(y):
        raise InvalidArgument(f"{what} labels must be integers, found {y.dtype}")
    if len(y) and (y.min() < 0 or y.max() > np.iinfo(np.int32).max):
        raise InvalidArgument(f"{what} labels must be class ids >= 0, found {y.min()}..{y.max()}")
    return y.astype(np.int32)


def _same_length(x, y, what: str) -> None:
    if len(x) != len(y):
        raise InvalidArgument(f"{what} examples and labels differ in number: {len(x)} and {len(y)}")


def _every(y: np.ndarray, n: int) -> np.ndarray:
    """bool [N]: every n-th example of each class, in the order they come. Stratified, and without a random number."""
    chosen = np.zeros(len(y), bool)
    for c in np.unique(y):
        chosen[np.flatnonzero(y == c)[n - 1 :: n]] = True
    return chosen


def _digits() -> Source:
    """scikit-learn's digits, pixels 0..16, a fifth of each class for test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = data.images.astype(np.uint8)[..., None], data.target
    test = _every(y, 5)
    return Source.from_arrays(x[~test], y[~test], x[test], y[test], name="digits", version="1", scale=1 / 16)


def _data_dir(data_dir) -> Path:
    return Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def _prepared(name: str, data_dir: Path) -> Path | None:
    """The folder of the newest version of a prepared TFDS data set."""
    versions = [p.parent for p in (data_dir / name).glob("*/dataset_info.json")]
    numbers = {p: [int(n) for n in p.name.split(".")] for p in versions if p.name.replace(".", "").isdigit()}
    return max(numbers, key=numbers.get, default=None)


def _tfds_folder(name: str, data_dir, allow_download: bool) -> Path:
    if not name or not all(part.isidentifier() for part in name.replace("-", "_").split("/")):
        raise InvalidArgument(f"{name!r} is not the name of a data set")
    where = _data_dir(data_dir)
    folder = _prepared(name, where)
    if folder:
        return folder
    if name not in TFDS_IMAGES:
        import tensorflow_datasets as tfds

        known = tfds.list_builders(with_community_datasets=False)
        if name.split("/")[0] not in known:
            near = difflib.get_close_matches(name, ["digits", "synthetic", *TFDS_IMAGES, *known], cutoff=0.5)
            raise InvalidArgument(f"unknown data set {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    if not allow_download:
        raise FileNotFoundError(
            f"data set {name!r} is not in {where}. Set TFDS_DATA_DIR or data_dir to where it is, or allow the "
            "download: load_source(..., allow_download=True), on the command line --allow-download"
        )
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=where)
    builder.download_and_prepare()
    return Path(builder.data_dir)


def _builder(folder: Path):
    """From the folder alone: `tfds.builder(name)` would ask the network for news of the data set first."""
    import tensorflow_datasets as tfds

    return tfds.builder_from_directory(folder)


def _tfds_images(name: str, folder: Path) -> Source:
    builder = _builder(folder)
    features, splits = builder.info.features, builder.info.splits
    if "image" not in features or "label" not in features or not hasattr(features["label"], "names"):
        raise InvalidArgument(f"{name} is not image classification: its features are {sorted(features)}")
    if None in features["image"].shape or features["image"].dtype != np.uint8:
        raise InvalidArgument(f"the images of {name} are {features['image'].dtype} of shape {features['image'].shape}; "
                         "uint8 images of one size are needed")  # fmt: skip
    test = "test" if "test" in splits else "validation"
    if "train" not in splits or test not in splits:
        raise InvalidArgument(f"{name} has no train and test split: its splits are {sorted(splits)}")
    arrays = []
    for split in ("train", test):
        data = builder.as_dataset(split, batch_size=-1)
        arrays += [np.asarray(data["image"]), np.asarray(data["label"])]
    return Source.from_arrays(
        *arrays, name=name, version=str(builder.info.version), class_names=features["label"].names
    )


def _omniglot(folder: Path, augment: str, antialias: bool, seed: int) -> Source:
    """Omniglot as in PFLEGO (arXiv 2202.09848): 28 x 28, white on black, with the alphabet as the natural client.

    Both splits of the data set are pooled, as they lie between alphabets: 1,623 characters, 20 drawings of each. Images
    are inverted, turned grey, resized bilinearly from 105 to 28 and kept as uint8, rounded. A drawing rotated by 0, 90,
    180 and 270 degrees keeps its label. With

        before_split  the 80 images of a character are shuffled, 60 for train and 20 for test. As published; copies of
                      one drawing then lie on both sides, so that the test accuracy is too high
        train_only    the 20 drawings are shuffled, 15 for train, rotated, and 5 for test, as drawn
        after_split   15 and 5 drawings, both rotated
        none          15 and 5 drawings as drawn

    A validation cut keeps the rotations of a drawing together in all of them.
    """
    import tensorflow as tf

    builder = _builder(folder)

    def shrink(batch):
        # The three channels of a drawing are equal, so that the first is its grey value.
        grey = 255.0 - tf.cast(batch["image"][..., :1], tf.float32)
        small = tf.image.resize(grey, [28, 28], method="bilinear", antialias=antialias)
        return tf.cast(tf.round(small), tf.uint8), batch["label"], batch["alphabet"]

    pooled = builder.as_dataset("train+test").batch(1_000).map(shrink).as_numpy_iterator()
    x, y, alphabet = (np.concatenate(part) for part in zip(*pooled, strict=True))
    counts = np.bincount(y)
    if (counts != 20).any():
        raise InvalidArgument(f"omniglot has 20 drawings of a character, found {counts.min()} to {counts.max()}")
    drawings = np.argsort(y, kind="stable").reshape(-1, 20)
    rng = generator(seed, Stream.SOURCE)
    if augment == "before_split":
        images = rng.permuted(_rotations(drawings), axis=1)
        train, test = images[:, :60], images[:, 60:]
    else:
        mixed = rng.permuted(drawings, axis=1)
        train, test = mixed[:, :15] * 4, mixed[:, 15:] * 4
        train = train if augment == "none" else _rotations(train // 4)
        test = _rotations(test // 4) if augment == "after_split" else test
    train, test = train.ravel(), test.ravel()
    alphabets = np.array(builder.info.features["alphabet"].names)[alphabet]
    source = Source.from_arrays(
        _rotated(x, train),
        y[train // 4],
        _rotated(x, test),
        y[test // 4],
        name="omniglot",
        version=str(builder.info.version),
        class_names=builder.info.features["label"].names,
        key=alphabets[train // 4],
        key_test=alphabets[test // 4],
        options={"augment": augment, "antialias": antialias, "seed": seed},
    )
    return source._replace(group_train=train // 4)


def _rotations(drawings: np.ndarray) -> np.ndarray:
    """[characters, n] drawings -> [characters, 4n] images; image 4d + r is drawing d turned by r quarters."""
    return (4 * drawings[..., None] + np.arange(4)).reshape(len(drawings), -1)


def _rotated(x: np.ndarray, images: np.ndarray) -> np.ndarray:
    out = np.empty((len(images), *x.shape[1:]), x.dtype)
    for r in range(4):
        out[images % 4 == r] = np.rot90(x[images[images % 4 == r] // 4], r, axes=(1, 2))
    return out
