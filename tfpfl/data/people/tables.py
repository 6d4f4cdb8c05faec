"""Data of people that packages of R have: Deterding's vowels (mlbench) and sleepstudy (lme4).

They are read from a CSV file, as R's write.csv writes it, or from what the packages hold: files .rda, Debian's .deb and
CRAN's .tar.gz. The latter need the package rdata.
"""

import csv
import io
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tfpfl.checks import InvalidArgument, Unavailable, extra
from tfpfl.data.people.files import read_members
from tfpfl.data.source import Source

VOWELS = ["hid", "hId", "hEd", "hAd", "hYd", "had", "hOd", "hod", "hUd", "hud", "hed"]  # words; the order of mlbench
TEST_DAYS = (2, 5, 8)


def load_vowels(path: Path) -> Source:
    """Reads Deterding's vowels with the 15 speakers as natural clients; the last two of six frames are for test.

    Each speaker said 11 words once, and from the vowel of each, six frames were taken: nine numbers each (log area
    ratios). The frames of one vowel are alike, so accuracy on the test frames of a speaker who trained is higher than
    it would be on new words of this speaker. A speaker who did not train has no such advantage.

    Raises:
        InvalidArgument: there are not 15 speakers with 6 frames of 11 vowels.
        Unavailable: the file is not CSV, and rdata is not installed.
    """
    columns = read_table(path, "Vowel")
    names = [f"V{i}" for i in range(1, 11)]
    _check_columns(path, columns, [*names, "Class"])
    speaker, word = _numbers(path, columns, "V1").astype(int), columns["Class"]
    x = np.stack([_numbers(path, columns, name) for name in names[1:]], 1)
    frame, y = np.zeros(len(x), int), np.zeros(len(x), int)
    for s in np.unique(speaker):
        for k, name in enumerate(VOWELS):
            rows = np.flatnonzero((speaker == s) & (word == name))
            frame[rows], y[rows] = np.arange(len(rows)), k
            if len(rows) != 6:
                raise InvalidArgument(f"{path}: speaker {s} has {len(rows)} frames of {name}, and must have 6")
    if not np.array_equal(np.unique(speaker), np.arange(15)) or len(x) != 990:
        raise InvalidArgument(
            f"{path} has {len(x)} rows, and speakers {np.unique(speaker)}, but the vowels have 990 rows of 15"
        )
    test = frame >= 4
    key = np.array([f"speaker {s:02d}" for s in range(15)])[speaker]
    return Source.from_arrays(
        x[~test],
        y[~test],
        x[test],
        y[test],
        name="vowels",
        version="mlbench",
        class_names=VOWELS,
        key=key[~test],
        key_test=key[test],
    )


def load_sleepstudy(path: Path) -> Source:
    """Reads sleepstudy with its 18 people as natural clients: the reaction time after each of ten days, in 100 ms.

    The example is the day, stored as 0 to 9 and decoded to [0, 1]. Days 2, 5 and 8 are for test. The target is a
    number, so learning is regression.

    Raises:
        InvalidArgument: there are not 18 people with the days 0 to 9.
        Unavailable: the file is not CSV, and rdata is not installed.
    """
    columns = read_table(path, "sleepstudy")
    _check_columns(path, columns, ["Reaction", "Days", "Subject"])
    day, person = _numbers(path, columns, "Days"), columns["Subject"]
    people, counts = np.unique(person, return_counts=True)
    each = {(p, d) for p, d in zip(person.tolist(), day.tolist(), strict=True)}
    if len(people) != 18 or len(day) != 180 or each != {(p, d) for p in people.tolist() for d in range(10)}:
        raise InvalidArgument(
            f"{path} has {len(people)} people with {counts.min()} to {counts.max()} days, but sleepstudy has 18 with "
            "the days 0 to 9"
        )
    test = np.isin(day, TEST_DAYS)
    y = (_numbers(path, columns, "Reaction")[:, None] / 100).astype(np.float32)
    source = Source.from_arrays(
        day[~test],
        np.zeros((~test).sum(), int),
        day[test],
        np.zeros(test.sum(), int),
        name="sleepstudy",
        version="lme4",
        class_names=["reaction / 100 ms"],
        scale=1 / 9,
        key=person[~test],
        key_test=person[test],
    )
    return source._replace(targets="real", y_train=y[~test], y_test=y[test])


def read_table(path: Path, name: str) -> dict[str, np.ndarray]:
    """The columns of a data set of R, as text: {name of a column: [N]}.

    Args:
        path: a CSV file, a file .rda, or the .deb or the .tar.gz of the package.
        name: the name of the data set in R.

    Raises:
        InvalidArgument: it is not there, or the file cannot be read.
        Unavailable: the file is not CSV, and rdata is not installed.
    """
    if path.suffix.lower() == ".csv":
        try:
            rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline="")))
        except (UnicodeDecodeError, csv.Error, OSError) as error:
            raise InvalidArgument(f"{path} cannot be read as CSV in UTF-8: {error}") from error
        return {str(key): np.array([row[key] or "" for row in rows]) for key in (rows[0] if rows else ())}
    found = read_members(path, rf"data/({name}\.rda|Rdata\.rd[bx])")
    frame = _r_value(found, name, path)
    return {str(column): np.array([str(value) for value in frame[column]]) for column in frame.columns}


def _r_value(found: dict[str, bytes], name: str, path: Path) -> Any:
    """A data set in the files of a package: NAME.rda, or Rdata.rdb and its index Rdata.rdx."""
    try:
        import rdata
    except ImportError as error:
        raise Unavailable(
            f"reading {path} needs rdata, which is not installed: {extra('people')}; or let R write a CSV file "
            f"{name.lower()}{'s' if name == 'Vowel' else ''}.csv (docs/people_data.md has the command)"
        ) from error

    def value(content: bytes, extension: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown encoding: all names are ASCII
            return rdata.conversion.convert(rdata.parser.parse_data(content, extension=extension))

    by_ending = {Path(member).suffix: content for member, content in found.items()}
    try:
        if ".rda" in by_ending:
            return value(by_ending[".rda"], ".rda")[name]
        start, size = (int(n) for n in value(by_ending[".rdx"], ".rds")["variables"][name])
        # Behind its length in four bytes, the value is compressed.
        return value(zlib.decompress(by_ending[".rdb"][start + 4 : start + size]), ".rds")
    except Exception as error:  # whatever a damaged file makes of the parser
        raise InvalidArgument(
            f"{path} has no data set {name} that can be read ({error!r}). Get the file again"
        ) from error


def _check_columns(path: Path, columns: dict[str, np.ndarray], names: list[str]) -> None:
    missing = [name for name in names if name not in columns]
    if missing:
        raise InvalidArgument(f"{path} does not have the columns {', '.join(missing)}; it has {', '.join(columns)}")


def _numbers(path: Path, columns: dict[str, np.ndarray], name: str) -> np.ndarray:
    try:
        return columns[name].astype(np.float64)
    except ValueError as error:
        raise InvalidArgument(f"{path}: column {name} has a value that is no number: {error}") from error
