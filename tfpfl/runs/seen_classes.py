"""The classes that a pretrained backbone has seen, and whether a federation has them, too.

`tfpfl pretrain` writes a .json beside the backbone that says how it was made.
"""

import hashlib
import json
from pathlib import Path

from tfpfl.checks import one_line, warn_user
from tfpfl.data import Federation
from tfpfl.data.omniglot import DRAWERS


def warn_of_shared_classes(network: Path, federation: Federation) -> None:
    """Warns if a pretrained backbone has been trained on classes of the federation that it is used for.

    Args:
        network: the file of the backbone; `pretrain` writes a .json beside it. Without one, nothing is known.
        federation: the data of the run.
    """
    known = record_beside(network)
    manifest, shared = federation.manifest, set()
    while known:
        source = known["source"]
        shared |= _same_classes(source["name"], source["class_names"], manifest)
        known = known.get("before")
    if shared:
        what, first = manifest["source"]["name"], sorted(shared)[0]
        warn_user(
            f"{network} was trained on {len(shared)} of this federation's classes of {what}, such as {one_line(first)}:"
            " test scores are too good for classes that a backbone has not seen. Choose others with --only-classes"
        )


def record_beside(network: str | Path) -> dict | None:
    """What the .json beside a backbone says of its making; None if there is none, or if it is of another file.

    Args:
        network: the file of the backbone.

    Returns:
        A record of `tfpfl.runs.pretraining.pretrain`; its entry 'before' is that of the file with the first weights.
    """
    path = Path(network).expanduser()
    try:
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["pretraining"]
        same = record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        known = record
        while known:  # from a file: whether it has what is used of it
            str(known["source"]["name"]), set(known["source"]["class_names"])
            known = known.get("before")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return record if same else None


def _same_classes(name: str, classes: list, manifest: dict) -> set:
    """The classes of a federation that a source has, too. Omniglot's are characters, ALPHABET_NUMBER, or alphabets."""
    known, mine, theirs = set(classes), manifest.get("class_names", ()), manifest["source"]["name"]
    if name == theirs and name != DRAWERS:
        return known & set(mine)
    if not {name, theirs} <= {"omniglot", DRAWERS}:
        return set()
    alphabets = {str(c).rpartition("_")[0] for c in known}
    return {c for c in mine if c in known or c in alphabets or c.rpartition("_")[0] in known}
