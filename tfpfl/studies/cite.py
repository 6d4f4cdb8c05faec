"""BibTeX entries for what a run uses: its algorithm, data set, partition and software. They stand in references.bib."""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from tfpfl.checks import InvalidArgument, unknown

_NAMES = re.compile(r"^\s*tfpfl\s*=\s*\{([^}]*)\},?\s*$\n?", re.MULTILINE)


class Entry(NamedTuple):
    """One work of references.bib, with the names that it is found by."""

    key: str
    names: tuple  # of algorithms, data sets, ... that it belongs to
    text: str  # the BibTeX entry


@lru_cache
def entries() -> tuple[Entry, ...]:
    """All works, in the order of the file.

    Raises:
        InvalidArgument: references.bib has an entry without a key or without names.
    """
    text = files("tfpfl.studies").joinpath("references.bib").read_text(encoding="utf-8")
    found = []
    for block in re.split(r"^(?=@)", text, flags=re.MULTILINE)[1:]:
        key, names = re.match(r"@\w+\{([\w-]+),\n", block), _NAMES.search(block)
        if not key or not names:
            raise InvalidArgument(f"references.bib has an entry without a key or without names: {block[:60]!r}")
        shown = re.sub(r",\s*\}\s*$", "\n}", _NAMES.sub("", block).strip())
        found.append(Entry(key[1], tuple(name.strip() for name in names[1].split(",")), shown))
    return tuple(found)


def names() -> dict[str, list[str]]:
    """{name of an algorithm, data set, ...: the BibTeX keys of its works}."""
    found: dict[str, list[str]] = {}
    for entry in entries():
        for name in entry.names:
            found.setdefault(name, []).append(entry.key)
    return found


def bibtex(wanted: Iterable[str]) -> str:
    """The BibTeX entries of the works behind the names, each entry once.

    Raises:
        InvalidArgument: an unknown name. The message has the closest known one.

    Examples:
        >>> bibtex(["keras"]).splitlines()[0]
        '@misc{chollet2015keras,'
    """
    wanted, known = list(wanted), names()
    for name in wanted:
        if name not in known:
            of_run = f". For the run in this folder: tfpfl cite --run {name}" if Path(name).is_dir() else ""
            raise InvalidArgument(unknown("name to cite", name, known) + of_run)
    return "\n\n".join(entry.text for entry in entries() if set(entry.names) & set(wanted))


def listing() -> str:
    """A table for the terminal: every known name with the BibTeX keys of its works."""
    known = names()
    width = max(map(len, known))
    return "\n".join(f"{name.ljust(width)}  {', '.join(keys)}" for name, keys in sorted(known.items()))


def names_of_run(folder: str | Path) -> list[str]:
    """The names to cite for a run folder; the user's own data set and partition have none.

    Raises:
        InvalidArgument: the folder has no config.json that can be read.
    """
    from tfpfl.data.omniglot import DRAWERS
    from tfpfl.data.tfds import TFDS_IMAGES

    algorithm, dataset, partition, engine, more = _used(folder)
    software = ["tfpfl", "tensorflow", "keras", *(["tff"] if engine == "tff" else [])]
    software += ["tfds"] if dataset in (*TFDS_IMAGES, DRAWERS) else []
    known = names()
    return [name for name in (algorithm, dataset, partition, *more, *software) if name in known]


def method_without_work(folder: str | Path) -> str | None:
    """The name of a run's method if no work of it is known, as of a method of the user's own; else None.

    Raises:
        InvalidArgument: as `names_of_run`.
    """
    algorithm = _used(folder)[0]
    return None if algorithm in names() else algorithm


def _used(folder: str | Path) -> list:
    """Algorithm, data set, partition and engine of a run, and what else it has: adapters, an objective, own norms."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        more = [str(config.get(name) or "").partition(":")[0] for name in ("adapters", "objective")]
        if config.get("batch_norm") == "local" and config["algorithm"] != "fedbn":
            more.append("fedbn")
        return [*(config[name] for name in ("algorithm", "dataset", "partition", "engine")), more]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{folder} is not a run folder: {path} cannot be read ({error})") from error
