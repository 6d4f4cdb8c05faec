"""Modules that lie beside a file of the user's own: each folder has its own, also if two folders have the same names.

Python has one list of modules for a process. There, the `helper.py` of the folder that was first would be the one of
all folders. So the modules of a folder are loaded under names of their own, `tfpfl_own_method_beside_HASH.helper`, and
`import helper` in a file of the folder finds them. An installed module of this name comes first.
"""

import builtins
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PREFIX = "tfpfl_own_method_"  # of the names of all modules that are the user's own files
_BESIDE = PREFIX + "beside_"


def builtins_beside(folder: Path) -> dict[str, Any]:
    """What Python calls `__builtins__`, for a file in this folder: its `import` also finds the modules beside it."""
    package = _BESIDE + sha256(str(folder).encode()).hexdigest()[:16]
    if package not in sys.modules:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
        made = ModuleType(package)
        made.__path__ = [str(folder)]
        sys.modules[package] = made

    def own_import(name: str, where: Any = None, local: Any = None, wanted: Any = (), level: int = 0) -> Any:
        top = name.partition(".")[0]
        if level or _is_installed(top, folder) or not _has(folder, top):
            return builtins.__import__(name, where, local, wanted, level)
        found = builtins.__import__(f"{package}.{name}", where, local, wanted or ("__name__",), 0)
        return found if wanted else sys.modules[f"{package}.{top}"]

    return vars(builtins) | {"__import__": own_import}


class _Finder:
    """Finds the modules of such a folder, and gives them its `import`."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(_BESIDE) or path is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            (folder,) = sys.modules[name.partition(".")[0]].__path__

            def exec_module(module: ModuleType) -> None:
                module.__dict__["__builtins__"] = builtins_beside(Path(folder))
                load(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _has(folder: Path, top: str) -> bool:
    return PathFinder.find_spec(top, [str(folder)]) is not None


def _is_installed(top: str, folder: Path) -> bool:
    """Whether Python's own import finds the module that is meant: an installed one, or the one of this folder."""
    if top in sys.stdlib_module_names:
        return True
    spec = sys.modules[top].__spec__ if top in sys.modules else find_spec(top)
    if spec is None:
        return top in sys.modules
    places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    found = {Path(place).parent.resolve() for place in places}
    return folder in found or found.isdisjoint({Path.cwd(), Path(sys.path[0]).resolve()})  # where a program runs
