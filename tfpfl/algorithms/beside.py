"""Runs a file of the user's own as a module, which imports the modules of its own folder.

Python has one list of modules for a process. There, the `helper.py` of the folder that was first would be the one of
all folders, also after it was changed. So the modules beside a file are loaded under names of their own,
`tfpfl_own_method_beside_HASH.helper`, and `import helper` in the file finds them. An installed module of this name
comes first. What is run is the content that `modules_beside` has read, also where a function imports a module later.
"""

import builtins
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from tfpfl.models.modules_beside import hash_of, is_beside

PREFIX = "tfpfl_own_method_"  # of the names of all modules that are the user's own files
_BESIDE = PREFIX + "beside_"
_packages: dict[str, tuple[Path, dict[str, bytes], dict]] = {}  # name -> (folder, its modules, their `__builtins__`)


def run_file(name: str, content: bytes, path: Path, modules: dict[str, bytes]) -> ModuleType:
    """Runs a file as a module of this name, which no other module has; once for each name.

    Args:
        name: of the module.
        content: the file's content.
        path: where the file is, or was.
        modules: {path in the file's folder: content} of the modules beside it, see `modules_beside`.
    """
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__loader__ = _Content(content, path)
    module.__dict__["__builtins__"] = _builtins_beside(path.parent, modules)
    sys.modules[name] = module  # dataclasses and NamedTuples of the file look themselves up there
    try:
        exec(compile(content, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _builtins_beside(folder: Path, modules: dict[str, bytes]) -> dict[str, Any]:
    """What Python calls `__builtins__`, for a file in this folder: its `import` also finds the modules beside it."""
    package = _BESIDE + sha256(f"{folder} {hash_of(modules)}".encode()).hexdigest()[:16]
    if package in sys.modules:
        return _packages[package][2]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    made = ModuleType(package)
    made.__path__ = [str(folder)]
    sys.modules[package] = made
    tops = {name.partition("/")[0].partition(".")[0] for name in modules}

    def own_import(name: str, where: Any = None, local: Any = None, wanted: Any = (), level: int = 0) -> Any:
        top = name.partition(".")[0]
        if level or top not in tops and not is_beside(top, folder):
            return builtins.__import__(name, where, local, wanted, level)
        found = builtins.__import__(f"{package}.{name}", where, local, wanted or ("__name__",), 0)
        return found if wanted else sys.modules[f"{package}.{top}"]

    _packages[package] = folder, modules, vars(builtins) | {"__import__": own_import}
    return _packages[package][2]


class _Content(SourceLoader):
    """Loads a module from a content that was read before; also gives tracebacks and AutoGraph its lines.

    The path may name no file: a run's copy has another name. No bytecode is read or written: Python would take that
    of a file which was changed within a second.
    """

    def __init__(self, content: bytes, path: Path):
        self._content, self._path = content, path

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: Any) -> bytes:
        return self._content

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = _packages[module.__name__.partition(".")[0]][2]
        super().exec_module(module)


class _Finder:
    """Finds the modules of such a folder."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(_BESIDE) or path is None:
            return None
        package, *parts = name.split(".")
        folder, modules, _ = _packages[package]
        for file, places in (("/".join([*parts, "__init__.py"]), [str(folder.joinpath(*parts))]), (
            "/".join(parts) + ".py", None)):  # fmt: skip
            if file in modules:
                loader = _Content(modules[file], folder / file)
                return spec_from_file_location(name, folder / file, loader=loader, submodule_search_locations=places)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:  # no source, or its name was computed
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                module.__dict__["__builtins__"] = _packages[package][2]
                load(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
