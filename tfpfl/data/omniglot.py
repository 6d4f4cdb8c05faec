"""Omniglot with its alphabets as clients; the drawings are made smaller, and rotated."""

from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import Stream, generator
from tfpfl.data.source import Source
from tfpfl.data.tfds import tfds_builder

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
    import tensorflow as tf

    builder = tfds_builder(folder)

    def shrink(batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        # The three channels of a drawing are equal: each is the grey value.
        grey = 255.0 - tf.cast(batch["image"][..., :1], tf.float32)
        small = tf.image.resize(grey, [28, 28], method="bilinear", antialias=antialias)
        return tf.cast(tf.round(small), tf.uint8), batch["label"], batch["alphabet"]

    pooled = builder.as_dataset("train+test").batch(1_000).map(shrink).as_numpy_iterator()
    x, y, alphabet = (np.concatenate(part) for part in zip(*pooled, strict=True))
    counts = np.bincount(y)
    if (counts != 20).any():
        raise InvalidArgument(f"omniglot has 20 drawings of every character, found {counts.min()} to {counts.max()}")
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
    """[characters, n] drawings -> [characters, 4n] images; image 4d + r is drawing d rotated by r * 90 degrees."""
    return (4 * drawings[..., None] + np.arange(4)).reshape(len(drawings), -1)


def _rotated(x: np.ndarray, images: np.ndarray) -> np.ndarray:
    out = np.empty((len(images), *x.shape[1:]), x.dtype)
    for r in range(4):
        out[images % 4 == r] = np.rot90(x[images[images % 4 == r] // 4], r, axes=(1, 2))
    return out
