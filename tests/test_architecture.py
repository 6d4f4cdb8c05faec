"""The rooms of the two packages, and what each may import: only rooms that stand before it in the list.

The imports are read from the source, those inside functions too. A breach is named by file and line.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lower rooms first. A room is a module or a package; its files may import one another.
ROOMS = (
    "tfpfl.checks",
    "tfpfl.data",
    "tfpfl.models",
    "tfpfl.algorithms",
    "tfpfl.engines",
    "tfpfl.runs",
    "tfpfl.studies",
    "tfpfl.live",
    "tfpfl.cli",
)
# The device stands beside tfpfl: its first room imports nothing of tfpfl, since a phone or a board has no TensorFlow.
DEVICE_ROOMS = ("tflite_export.device", "tflite_export.convert", "tflite_export", "tflite_export.cli")
MAY_USE = {  # the rooms of tfpfl that a room of the device may import
    "tflite_export.device": (),
    "tflite_export.convert": ROOMS[: ROOMS.index("tfpfl.runs") + 1],
    "tflite_export": ROOMS[: ROOMS.index("tfpfl.runs") + 1],
    "tflite_export.cli": ROOMS,
}
USES_DEVICES = {  # and the other way round: live rounds are a server of devices
    "tfpfl.live": ("tflite_export.device", "tflite_export.convert"),
    "tfpfl.cli": ("tflite_export.device",),
}
NEIGHBOURS = ("benchmarks", "docs", "notebooks")  # stand on everything
ROOT_ENTRIES = {"__init__.py", "__main__.py", "py.typed"} | {
    name + (".py" if name == "checks" else "") for name in (room.split(".")[1] for room in ROOMS)
}
WITHOUT_TENSORFLOW = ("tfpfl.checks", "tflite_export.device")
EXCEPTIONS: dict[str, str] = {}  # 'file:imported module' -> why; it may only shrink
MOST_LINES = 460
LONGEST_CHAIN = 10


def sources():
    """(path, module name, parsed source) of both packages."""
    for package in ("tfpfl", "tflite_export"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts), ast.parse(path.read_text())


FILES = list(sources())
MODULES = {module for _, module, _ in FILES}
PACKAGES = {module for path, module, _ in FILES if path.name == "__init__.py"}


def for_type_checkers(tree) -> set:
    """Nodes under `if TYPE_CHECKING:`, which never run."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            found |= {id(inner) for part in node.body for inner in ast.walk(part)}
    return found


def imports(tree):
    """(line, module) of every import that can run; of `from package import module`, the module."""
    skipped = for_type_checkers(tree)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import in line {node.lineno}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in MODULES else node.module


def room_of(module: str) -> str:
    """The longest name among the rooms that the module's name begins with; 'tfpfl' for the package itself."""
    module = {"tflite_export.__main__": "tflite_export.cli"}.get(module, module)
    names = [room for room in (*ROOMS, *DEVICE_ROOMS) if f"{module}.".startswith(f"{room}.")]
    if module == "tfpfl.__main__":
        return module
    return max(names, key=len, default=module.split(".")[0])


def may_import(room: str, other: str) -> bool:
    """Whether a file of `room` may import one of `other`."""
    if room == other:
        return True
    if room in ROOMS:
        return other in (*ROOMS[: ROOMS.index(room)], *USES_DEVICES.get(room, ()))
    if room in DEVICE_ROOMS:
        return other in DEVICE_ROOMS[: DEVICE_ROOMS.index(room)] or other in MAY_USE[room]
    return other in ROOMS or room == "tfpfl.__main__"  # the two entrances


def breaches():
    """Every import that a rule forbids, as 'file:line imports module: why'."""
    for path, module, tree in FILES:
        room, where = room_of(module), path.relative_to(ROOT)
        for line, imported in imports(tree):
            top = imported.split(".")[0]
            if room in WITHOUT_TENSORFLOW and top in ("tensorflow", "tensorflow_federated", "keras"):
                if not any(isinstance(n, ast.FunctionDef) and n.lineno <= line <= n.end_lineno for n in ast.walk(tree)):
                    yield f"{where}:{line} imports {imported}: {room} runs without TensorFlow"
            if top not in ("tfpfl", "tflite_export"):
                continue
            if imported in MODULES:
                other = room_of(imported)
                if not may_import(room, other) and f"{where}:{imported}" not in EXCEPTIONS:
                    yield f"{where}:{line} imports {imported}: {room} stands before {other}"
                inside = module != imported and f"{module}.".startswith(f"{imported}.")
                if imported in PACKAGES and other == room and inside:
                    yield f"{where}:{line} imports {imported}, the package it lies in: import the module itself"
            else:
                yield f"{where}:{line} imports {imported}, which does not exist"


def test_every_import_goes_to_a_room_before():
    found = list(breaches())
    assert not found, "\n" + "\n".join(found)


def test_there_are_no_exceptions():
    assert not EXCEPTIONS


def test_no_file_imports_itself_by_way_of_others():
    """The graph of files has no circle, imports inside functions included."""
    graph = {module: {name for _, name in imports(tree) if name in MODULES} - {module} for _, module, tree in FILES}
    for module, needed in graph.items():  # a package's __init__ hands on what its files define; they never import it
        graph[module] = {n for n in needed if not f"{module}.".startswith(f"{n}.")}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("these files import each other: " + " -> ".join(error.args[1]))


def room_graph() -> dict[str, set]:
    """Which rooms a room imports, the neighbours and the two packages' entrances included."""
    graph = {}
    for _, module, tree in FILES:
        room = room_of(module)
        graph.setdefault(room, set()).update(room_of(name) for _, name in imports(tree) if name in MODULES)
    for neighbour in NEIGHBOURS:
        graph[neighbour] = set()
        for path in (ROOT / neighbour).rglob("*.py"):
            graph[neighbour] |= {room_of(name) for _, name in imports(ast.parse(path.read_text())) if name in MODULES}
    return {room: needed - {room} for room, needed in graph.items()}


def test_the_longest_chain_of_rooms():
    graph = room_graph()
    length: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():  # raises CycleError where rooms stand on each other
        length[room] = 1 + max((length[other] for other in graph[room]), default=0)
    assert max(length.values()) <= LONGEST_CHAIN, sorted(length.items(), key=lambda pair: pair[1])


def test_the_root_shows_the_rooms():
    entries = (ROOT / "tfpfl").iterdir()
    found = {path.name for path in entries if path.is_file() or any(path.glob("*.py"))}  # a folder of caches is none
    assert found == ROOT_ENTRIES


def test_no_file_is_longer_than_a_reader_can_hold():
    lines = {path.relative_to(ROOT): path.read_text().count("\n") for path, _, _ in FILES}
    assert not {str(path): n for path, n in lines.items() if n > MOST_LINES}
