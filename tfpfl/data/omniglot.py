"""Omniglot with its alphabets as clients, or with those who drew; the drawings are made smaller, and rotated."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, check_choice
from tfpfl.data.randomness import Stream, generator
from tfpfl.data.source import Source
from tfpfl.data.tfds import tfds_builder

DRAWERS = "omniglot_drawers"  # the name of the data set of `load_drawers`
AUGMENT = ("before_split", "train_only", "after_split", "none")


def load_omniglot(folder: Path, augment: str, antialias: bool, seed: int) -> Source:
    """Omniglot as in PFLEGO (arXiv 2202.09848): 28 x 28, white on black, with the alphabet as the natural client.

    The two splits of the data set contain different alphabets, so they are joined: 1,623 characters with 20 drawings
    each. Images are inverted, turned grey, resized bilinearly from 105 to 28 pixels and rounded to uint8. Drawings are
    rotated by 0, 90, 180 and 270 degrees and keep their label. `augment` says which drawings are rotated:

        before_split  all. The 80 images of a character are shuffled: 60 for train, 20 for test. As published. Copies of
                      one drawing are then in train and in test, so that the test accuracy is too high
        train_only    the 20 drawings are shuffled: 15 for train, which are rotated, 5 for test, which are not
        after_split   15 drawings for train and 5 for test, all rotated
        none          15 drawings for train and 5 for test, none rotated

    A validation cut never separates the rotations of one drawing.

    Args:
        folder: from `tfds_folder`.
        augment: see above.
        antialias: whether resizing averages over all pixels that it drops.
        seed: the seed of the shuffles, >= 0.
    """
    builder = tfds_builder(folder)
    x, y, alphabet = _drawings(builder, "train+test", antialias)
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


def load_drawers(folder: Path, label: str, antialias: bool, seed: int) -> Source:
    """Omniglot with those who drew as the natural clients: 20 clients with one drawing of each of 1,623 characters.

    Every alphabet was drawn by 20 people, and each drew all of its characters once. Client d is the d-th of them in
    each of the 50 alphabets: whether drawers of two alphabets with the same number are one person, Omniglot does not
    say. Of the 20 drawings of a character, 5 are for test and 15 for training, so that a client is tested on
    characters that others have shown. Drawings are prepared as in `load_omniglot`, and none is rotated.

    TFDS does not keep who drew. But it sorts its examples by the md5 of the names of the files, and these names have
    the drawer's number, so that it follows from the place of an example. The classes at all places must agree.

    Args:
        folder: from `tfds_folder`.
        label: 'alphabet', for 50 classes, or 'character', for 1,623: a client then has one example of a class, in
            training or in test, and a head of its own cannot learn the classes that it is tested on.
        antialias, seed: as in `load_omniglot`.

    Raises:
        InvalidArgument: `label` is unknown, or the examples are in another order.
    """
    check_choice(label=(label, ("alphabet", "character")))
    builder = tfds_builder(folder)
    names = builder.info.features["label"].names
    splits = {split: _drawings(builder, split, antialias) for split in ("train", "test")}  # apart, for their order
    drawer = np.concatenate([_drawers(y, names, split) for split, (_, y, _) in splits.items()])
    x, y, alphabet = (np.concatenate(arrays) for arrays in zip(*splits.values(), strict=True))
    drawings = np.lexsort([drawer, y]).reshape(-1, 20)
    mixed = generator(seed, Stream.SOURCE).permuted(drawings, axis=1)
    train, test = np.sort(mixed[:, :15].ravel()), np.sort(mixed[:, 15:].ravel())
    key = np.array([f"drawer {d:02d}" for d in range(21)])[drawer]
    y, names = (y, names) if label == "character" else (alphabet, builder.info.features["alphabet"].names)
    return Source.from_arrays(
        x[train],
        y[train],
        x[test],
        y[test],
        name=DRAWERS,
        version=str(builder.info.version),
        class_names=names,
        key=key[train],
        key_test=key[test],
        options={"label": label, "antialias": antialias, "seed": seed},
    )


def _drawings(builder: Any, split: str, antialias: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The drawings of a split, in the order of TFDS: uint8 [N, 28, 28, 1], their classes and alphabets, int [N] each.

    Raises:
        InvalidArgument: a character does not have 20 drawings.
    """
    import tensorflow as tf

    def shrink(batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        # The three channels of a drawing are equal: each is the grey value.
        grey = 255.0 - tf.cast(batch["image"][..., :1], tf.float32)
        small = tf.image.resize(grey, [28, 28], method="bilinear", antialias=antialias)
        return tf.cast(tf.round(small), tf.uint8), batch["label"], batch["alphabet"]

    pooled = builder.as_dataset(split).batch(1_000).map(shrink).as_numpy_iterator()
    x, y, alphabet = (np.concatenate(part) for part in zip(*pooled, strict=True))
    counts = np.unique(y, return_counts=True)[1]
    if (counts != 20).any():
        raise InvalidArgument(f"omniglot has 20 drawings of every character, found {counts.min()} to {counts.max()}")
    return x, y, alphabet


def _drawers(y: np.ndarray, names: list[str], split: str) -> np.ndarray:
    """Who drew the drawings of a split, from their order: int [n], 1 to 20.

    Raises:
        InvalidArgument: the classes are not those that the order must have.
    """

    def place(label: int, drawer: int) -> str:
        return hashlib.md5(f"{split}{names[label]}_{label + 1:04d}_{drawer:02d}.png".encode()).hexdigest()

    expected = sorted((place(c, d), c, d) for c in np.unique(y).tolist() for d in range(1, 21))
    if [c for _, c, _ in expected] != y.tolist():
        raise InvalidArgument(
            f"the examples of omniglot's split {split} are not in the order of their files' names, so that their "
            "drawers are unknown: prepare omniglot anew with tensorflow-datasets 4.9.4 or later"
        )
    return np.array([d for _, _, d in expected])


def _rotations(drawings: np.ndarray) -> np.ndarray:
    """[characters, n] drawings -> [characters, 4n] images; image 4d + r is drawing d rotated by r * 90 degrees."""
    return (4 * drawings[..., None] + np.arange(4)).reshape(len(drawings), -1)


def _rotated(x: np.ndarray, images: np.ndarray) -> np.ndarray:
    out = np.empty((len(images), *x.shape[1:]), x.dtype)
    for r in range(4):
        out[images % 4 == r] = np.rot90(x[images[images % 4 == r] // 4], r, axes=(1, 2))
    return out
