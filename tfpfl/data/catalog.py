"""The data sets that have a name: scikit-learn's digits, synthetic data, data of people, and TensorFlow Datasets.

`load_source` returns a `Source`: a train and a test set with global labels. A partitioner then divides it among
clients.
"""

import hashlib
import os
from collections.abc import Collection

import numpy as np

from tfpfl.checks import InvalidArgument, check_choice, check_type
from tfpfl.data.class_choice import with_classes
from tfpfl.data.omniglot import AUGMENT, DRAWERS, load_drawers, load_omniglot
from tfpfl.data.partitioners import check_seed
from tfpfl.data.people.catalog import PEOPLE, is_present, load_people
from tfpfl.data.people.files import find
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
    features: str = "log_mel",
    step: int | None = None,
    label: str = "alphabet",
    only_classes: str | None = None,
    seed: int = 0,
) -> Source:
    """Loads a data set by its name.

    Args:
        name: 'digits' (scikit-learn's 1,797 images of 8 x 8), 'synthetic' (4,000 vectors of 8 numbers), data of people
            (fsdd, watch, vowels, sleepstudy, shakespeare), or an image classification data set of TensorFlow Datasets
            (TFDS), such as mnist, cifar10, omniglot or emnist/byclass (whose images TFDS stores transposed). The
            natural clients of omniglot are its alphabets, those of omniglot_drawers the people who drew.
        allow_download: whether TFDS may download a data set that is not in `data_dir`.
        data_dir: where TFDS keeps its data; default: the environment's TFDS_DATA_DIR, or ~/tensorflow_datasets. Of
            data of people, the folder with the files that you have got, or the file; default: the environment's
            TFPFL_PEOPLE.
        pixels: 'unit' maps uint8 pixels to [0, 1]; 'signed' maps them to [-1, 1] by (x / 255 - 0.5) / 0.5.
        augment: only for omniglot: which drawings are rotated; see `load_omniglot`.
        antialias: only for omniglot: whether resizing averages over all pixels that it drops.
        features: only for fsdd: 'log_mel', 'wave' or 'word'.
        step: only for watch and shakespeare: samples or characters from one example to the next; None for 50 and 20.
        label: only for omniglot_drawers: 'alphabet' or 'character'; see `load_drawers`.
        only_classes: only the examples of these classes, see `with_classes`; None for all.
        seed: the seed of 'synthetic', and of the train and test split of omniglot and of watch, >= 0. Other data sets
            have a split.

    Raises:
        InvalidArgument: the name or an option is unknown, the data set does not have this option, or it is not image
            classification with uint8 images of one size and a train and a test split.
        FileNotFoundError: the data set is not in `data_dir`, and `allow_download` is false or does not help.
        Unavailable: a package that reads data of people is missing.
    """
    check_type("the data set", name, str, "the name of one, such as 'digits'")
    if only_classes is not None:
        check_type("only_classes", only_classes, str, "a text, such as 'cat,dog' or 'first_half'")
    check_choice(features=(features, ("log_mel", "wave", "word")))
    if pixels not in ("unit", "signed"):
        raise InvalidArgument(f"unknown pixels {pixels!r}: one of unit, signed")
    if augment not in AUGMENT:
        raise InvalidArgument(f"unknown augment {augment!r}: one of {', '.join(AUGMENT)}")
    check_seed(seed)
    given = {"pixels": pixels, "augment": augment, "antialias": antialias, "features": features, "step": step}
    _check_used(name, given | {"label": label})
    if name == "synthetic":
        source = Source.from_arrays(*blobs(4_000, seed=seed), name="synthetic", options={"seed": seed})
    elif name == "digits":
        source = _digits()
    elif name in PEOPLE:
        source = load_people(name, data_dir, features=features, seed=seed, **({} if step is None else {"step": step}))
    elif name == DRAWERS:
        source = load_drawers(tfds_folder("omniglot", data_dir, allow_download), label, antialias, seed)
    elif name == "omniglot":
        source = load_omniglot(tfds_folder(name, data_dir, allow_download), augment, antialias, seed)
    else:
        source = load_tfds_images(name, tfds_folder(name, data_dir, allow_download))
    if pixels == "signed":
        source = source._replace(scale=2 * source.scale, shift=-1.0)
    return source if only_classes is None else with_classes(source, only_classes)


def identity(name: str, data_dir: str | os.PathLike | None = None) -> str:
    """What the data of a data set are on this machine, as a text: another text, if the data may be other ones.

    Of data of people it is a sha256 of the files, of a data set of TFDS its prepared version. It is empty if the data
    set is not on this machine, or comes with a package.

    Args:
        name, data_dir: as in `load_source`.
    """
    if name in ("digits", "synthetic"):
        return ""
    if name not in PEOPLE:
        folder = prepared_folder("omniglot" if name == DRAWERS else name, data_folder(data_dir))
        return folder.name if folder else ""
    path = find(PEOPLE[name].patterns, PEOPLE[name].packages, data_dir)
    if path is None:
        return ""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            inside = file.relative_to(path).as_posix()
            found.update(f"{inside} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def _check_used(name: str, given: dict) -> None:
    """Checks that no option is given that is only for other data sets. A default value changes nothing."""
    of: dict[str, Collection[str]] = {"augment": ("omniglot",), "antialias": ("omniglot", DRAWERS), "label": (DRAWERS,)}
    of |= {option: [k for k, about in PEOPLE.items() if option in about.options] for option in ("features", "step")}
    defaults = load_source.__kwdefaults__ or {}
    for option, value in given.items():
        if value == defaults[option]:
            continue
        if option == "pixels" and (name == "synthetic" or name in PEOPLE):
            raise InvalidArgument(f"pixels={value!r} is for images, and {name} has none: leave it out")
        if option in of and name not in of[option]:
            whose = " and ".join(of[option])
            raise InvalidArgument(f"{option}={value!r} is only for {whose}, found {name}: leave it out")


def list_datasets(data_dir: str | os.PathLike | None = None) -> list[dict]:
    """The best known data sets of `load_source`: one dict of name, shape, classes, clients and present each.

    'classes' is None if the target is a number, 'clients' is the number of natural clients or None, and 'present' says
    whether the data set is on this machine.

    Args:
        data_dir: where TFDS keeps its data, as in `load_source`; data of people are looked for in TFPFL_PEOPLE.
    """

    def row(name: str, shape: tuple[int, ...], classes: int | None, clients: int | None, present: bool) -> dict:
        return {"name": name, "shape": shape, "classes": classes, "clients": clients, "present": present}

    rows = [row("digits", (8, 8, 1), 10, None, True), row("synthetic", (8,), 10, None, True)]
    for name, (shape, classes) in TFDS_IMAGES.items():
        present = prepared_folder(name, data_folder(data_dir)) is not None
        rows.append(row(name, shape, classes, 50 if name == "omniglot" else None, present))
    present = prepared_folder("omniglot", data_folder(data_dir)) is not None
    rows.append(row(DRAWERS, (28, 28, 1), 50, 20, present))
    rows += [row(name, about.shape, about.classes, about.clients, is_present(name)) for name, about in PEOPLE.items()]
    return rows


def _digits() -> Source:
    """scikit-learn's digits with pixels 0..16; every fifth example of each class is for test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = data.images.astype(np.uint8)[..., None], data.target
    test = every_nth(y, 5)
    return Source.from_arrays(x[~test], y[~test], x[test], y[test], name="digits", version="1", scale=1 / 16)
