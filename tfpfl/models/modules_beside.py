"""Which modules a file of the user's own imports from the folder in which it lies, found without running anything.

Their sha256 stands in a run's configuration beside that of the file, because they decide a run's numbers as much.
"""

import ast
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_OURS = ("tfpfl", "tflite_export")  # they may lie beside the file, in a checkout
_PACKAGES = ("site-packages", "dist-packages")  # folders of installed packages, which no one keeps files of his own in


def modules_beside(content: bytes, folder: Path) -> dict[str, bytes]:
    """The modules beside a file that it imports, and those that they import: {path in the folder: content}.

    Found are the statements `import` and `from ... import`, also in functions. What is imported by a name that the code
    computes is not found, and neither are files that the code reads.

    Args:
        content: the file's content.
        folder: the folder that the file is in.
    """
    invalidate_caches()  # a module may just have been written
    found: dict[str, bytes] = {}
    left: list[tuple[bytes, tuple[str, ...] | None]] = [(content, None)]  # (content, package of the module)
    seen: set[tuple[str, ...]] = set()
    while left:
        for name, is_relative in _imported(*left.pop()):
            if not is_relative and not is_beside(name[0], folder):
                continue
            for i in range(1, len(name) + 1):
                part = name[:i]
                spec = PathFinder.find_spec(part[-1], [str(folder.joinpath(*part[:-1]))])
                if spec is None:
                    break
                is_package = spec.submodule_search_locations is not None
                if part not in seen and spec.origin is not None:
                    with suppress(OSError):  # Python will say that it cannot read it
                        inner, package = Path(spec.origin).read_bytes(), part if is_package else part[:-1]
                        found["/".join((*package, Path(spec.origin).name))] = inner
                        left.append((inner, package))
                seen.add(part)
                if not is_package:
                    break
    return found


def hash_of(modules: dict[str, bytes]) -> str:
    """One sha256 of the modules that `modules_beside` found, by names and contents; '' of none."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in modules.items()}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest() if hashes else ""


def with_beside(sha256: str, beside: str | None) -> str:
    """One sha256 of a file and the modules beside it.

    Args:
        sha256: of the file.
        beside: the `hash_of` its modules. If it is '', or None (not known, of an older run), this is that of the file.
    """
    return hashlib.sha256(f"{sha256} {beside}".encode()).hexdigest() if beside else sha256


def sha256_of(entry: Mapping[str, Any]) -> str:
    """`with_beside` of what a run's configuration keeps of a method or a metric of the user's own."""
    return with_beside(entry["sha256"], entry.get("beside"))


def is_beside(top: str, folder: Path) -> bool:
    """Whether `import top` in a file of this folder means a module of the folder: an installed one comes first."""
    if top in sys.stdlib_module_names or top in _OURS or folder.name in _PACKAGES:
        return False
    if PathFinder.find_spec(top, [str(folder)]) is None:
        return False
    spec = getattr(sys.modules[top], "__spec__", None) if top in sys.modules else find_spec(top)
    if spec is None:
        return top not in sys.modules
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    found = {Path(place).parent.resolve() for place in places}
    return not found.isdisjoint({folder.resolve(), Path.cwd(), Path(sys.path[0]).resolve()})  # where a program runs


def _imported(content: bytes, package: tuple[str, ...] | None) -> Iterator[tuple[tuple[str, ...], bool]]:
    """(name, whether it is relative) of all that a module may import; the names begin in the folder."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever runs the file is warned
            nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError):  # no source, or whoever runs the file is told
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((tuple(alias.name.split(".")), False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base: tuple[str, ...] = ()
            if node.level:
                if package is None or node.level - 1 > len(package):
                    continue  # Python refuses it
                base = package[: len(package) - (node.level - 1)]
            base += tuple(node.module.split(".")) if node.module else ()
            if base:
                yield base, bool(node.level)
            yield from (((*base, alias.name), bool(node.level)) for alias in node.names if alias.name != "*")
