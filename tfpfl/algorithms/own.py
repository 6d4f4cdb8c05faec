"""Methods of the user's own, by name: FILE.py:function, package.module:function, or the name of an entry point.

Other functions of the user's own, such as metrics, are loaded in the same way (`OwnCode`). Loading a method runs its
code. So a name is looked up here only if the user has given it. The method of a run folder, which may come from
somebody else, is loaded by `tfpfl.runs.own_methods`, which asks for consent first.
"""

import ast
import hashlib
import importlib
import importlib.util
import traceback
from collections.abc import Iterable, Mapping
from functools import reduce
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, packages_distributions, version
from inspect import Parameter, getdoc, isclass, signature
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, NamedTuple, get_args

from tfpfl.algorithms.beside import PREFIX, run_file
from tfpfl.algorithms.catalog import ALGORITHMS
from tfpfl.algorithms.method import Method
from tfpfl.checks import InvalidArgument, one_line, unknown
from tfpfl.models.modules_beside import hash_of, modules_beside

GROUP = "tfpfl.algorithms"  # the group of entry points by which an installed package offers its methods
HOW = "a method of your own is named FILE.py:function, package.module:function, or by an entry point of a package"
LONGEST_TITLE = 30  # characters
NO_TENSORS = (
    "TFF cannot compute such a function. Write the constant as a NumPy array in the builder (np.array for "
    "tf.constant), or make it with TensorFlow inside the function that uses it"
)
# What a run's configuration keeps; `beside` is missing in runs that are older than this entry.
ENTRY = ("kind", "name", "place", "function", "package", "sha256", "beside", "title")


class OwnCode(NamedTuple):
    """A function of the user's own: where it comes from, and the module that has it."""

    kind: str  # 'file', 'module' or 'entry point'
    name: str  # as a run's configuration has it, such as 'fedala.py:fedala'
    place: str  # the absolute path of the file, or the name of the module
    function: str  # its name in the module
    package: str | None  # the installed package that has the module, and its version, such as 'fedala 1.2'
    sha256: str  # of the source file
    beside: str  # the `hash_of` the modules beside a file that it imports
    content: bytes  # the source file
    module: ModuleType

    @property
    def found(self) -> Any:
        """What the module has under the name `function`.

        Raises:
            InvalidArgument: nothing.
        """
        return _attribute(self.module, self.function, self.place)


class OwnMethod(NamedTuple):
    """A method of the user's own: where it comes from, and the method itself."""

    code: OwnCode
    method: Method

    @property
    def entry(self) -> dict[str, Any]:
        """What a run's configuration keeps of it: {name: text} for `ENTRY`."""
        given = self.code._asdict() | {"title": self.method.title}
        return {name: given[name] for name in ENTRY}


def method_named(name: str) -> Method:
    """The `Method` of a name: one of `ALGORITHMS`, or one of the user's own, whose code is run.

    Args:
        name: a name in `ALGORITHMS`, FILE.py:function, package.module:function, or the name of an entry point in the
            group 'tfpfl.algorithms' of an installed package.

    Raises:
        InvalidArgument: there is no such method, its file cannot be imported, or it is no method.
    """
    return ALGORITHMS[name] if name in ALGORITHMS else own_method(name).method


def own_method(name: str) -> OwnMethod:
    """Loads a method of the user's own by its name; see `method_named`. This runs its code, once for each content."""
    place, colon, function = name.rpartition(":")
    if place.endswith(".py"):
        path = _path(place)
        return load_file(_content(path), function, path)
    if colon:
        return load_installed("module", name)
    return load_installed("entry point", name)


def load_installed(kind: str, name: str, sha256: str | None = None) -> OwnMethod:
    """Loads a method from a module or by an entry point.

    Args:
        kind: 'module', or 'entry point'.
        name: package.module:function, or the name of the entry point.
        sha256: what the module's source file must have; otherwise nothing is imported. None: anything.

    Raises:
        InvalidArgument: it is not installed, has another sha256, cannot be imported, or is no method.
    """
    if kind == "module":
        return _made_once(code_of_module(name, sha256))
    point = _entry_point(name)
    package = _named(point.dist) if point.dist else None
    return _made_once(_code_of_module(kind, name, point.module, point.attr, package, sha256))


def load_file(content: bytes, function: str, path: Path, entry: Mapping[str, Any] | None = None) -> OwnMethod:
    """Loads a method from the content of a Python file.

    Args:
        content: the file's content.
        function: the name of the builder or of the `Method` in it.
        path: where the file is, or was. Modules that lie beside it can be imported.
        entry: what a run's configuration keeps of it; `is_loaded` then finds it by this entry.

    Raises:
        InvalidArgument: the file cannot be imported, has nothing of this name, or it is no method; or the modules
            beside it are not those of the entry.
    """
    return _made_once(code_of_file(content, function, path, entry.get("beside") if entry else None), entry)


def code_named(name: str) -> OwnCode:
    """Loads a function of the user's own that is named FILE.py:function or package.module:function.

    Raises:
        InvalidArgument: the file or module is missing, or cannot be imported.
    """
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        path = _path(place)
        return code_of_file(_content(path), function, path)
    return code_of_module(name)


def code_of_file(content: bytes, function: str, path: Path, beside: str | None = None) -> OwnCode:
    """Loads a function from the content of a Python file; see `load_file`.

    The file is run once for each folder, content, and content of the modules beside it.

    Args:
        beside: the `hash_of` the modules beside it that is expected; None: any.
    """
    modules = modules_beside(content, path.parent)
    found, sha256 = hash_of(modules), hashlib.sha256(content).hexdigest()
    if beside not in (None, found):
        names = ", ".join(sorted(modules)) or "a module that it imports from there is missing"
        raise InvalidArgument(
            f"what {path} imports from beside it ({names}) was changed since the run was created. The run would go on "
            "with other rules. Put the original modules back, or start a new run"
        )
    name = PREFIX + hashlib.sha256(f"{sha256} {found} {path.parent}".encode()).hexdigest()[:16]
    try:
        module = run_file(name, content, path, modules)
    except (Exception, SystemExit) as error:
        raise _not_imported(str(path), error) from error
    return OwnCode("file", f"{path.name}:{function}", str(path), function, None, sha256, found, content, module)


def code_of_module(name: str, sha256: str | None = None) -> OwnCode:
    """Loads a function that is named package.module:function; see `load_installed`."""
    module, _, function = name.rpartition(":")
    return _code_of_module("module", name, module, function, None, sha256)


def user_place(error: BaseException) -> str | None:
    """Where in the user's own code an error was raised, as 'FUNCTION (FILE, line N)'; None if in none of it.

    Args:
        error: an error that was caught. The user's own code is what was loaded here, and the modules beside it.
    """
    codes = [loaded.code for loaded in _loaded.values()]
    installed = tuple({code.place.split(".")[0] for code in codes if code.kind != "file"} - {"tfpfl"})
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(PREFIX) or module.split(".")[0] in installed:
            function = frame.f_code.co_qualname.replace(".<locals>", "")
            place = f"{function} ({frame.f_code.co_filename}, line {line})"
    return place


def forget_used() -> None:
    """A command begins: `told` blames no method that only an earlier command of the same process has used."""
    _used.clear()


def told(error: BaseException) -> str | None:
    """An error of the user's own method in a short sentence or two; None if no such method was used.

    Args:
        error: an error that is not of tfpfl's classes.
    """
    names = sorted(_used)
    if not names:
        return None
    lines = str(error).strip().splitlines() or [""]
    what = f"{type(error).__name__}: {one_line(lines[0], 300)}"
    if "Attempting to capture an EagerTensor" in str(error):
        return (
            f"a function of your method {' or '.join(names)} uses a tensor that TensorFlow made outside of it. "
            f"{NO_TENSORS}. `tfpfl.check_algorithm` names the variable and the line ({what})"
        )
    if place := user_place(error):
        return f"your method raised an error in {place}: {what}"
    return (
        f"{what}. It was raised while your method {' or '.join(names)} was computed, but not in its code: perhaps one "
        "of its functions returns something else than the contract says. `tfpfl.check_algorithm` names the function"
    )


def check_entry(own: dict[str, Any]) -> None:
    """Checks what a run's configuration says of the user's own method; it may come from somebody else.

    Raises:
        InvalidArgument: a key is missing or unknown, a value is no text, or the values do not go together.
    """
    texts = {k: v for k, v in own.items() if isinstance(v, str) or (k == "package" and v is None)}
    if {*own, "beside"} != {*ENTRY} or texts != own:
        raise InvalidArgument(f"own_method must have texts for {', '.join(ENTRY)}; found {one_line(own, 200)}")
    place, function = own["place"], own["function"]
    names = {"file": f"{Path(place).name}:{function}", "module": f"{place}:{function}"}
    named = ":" not in own["name"] if own["kind"] == "entry point" else own["name"] == names.get(own["kind"])
    if not named or own["kind"] == "module" and place.endswith(".py"):
        raise InvalidArgument(f"own_method: kind, name, place and function do not go together; found {own}")


def is_loaded(entry: Mapping[str, Any]) -> OwnMethod | None:
    """The method of a configuration's entry, if this process has loaded it already; None otherwise."""
    found = _loaded.get(key_of(entry))
    return _use(found) if found else None


def key_of(entry: Mapping[str, Any]) -> tuple:
    """By which loaded code is found again. Two files of one content can import, or read, other files beside them."""
    place = str(Path(entry["place"]).parent) if entry["kind"] == "file" else entry["place"]
    return entry["kind"], place, entry["function"], entry["sha256"], entry.get("beside")


def source_of(module: str) -> Path | None:
    """The source file of a module, found without importing anything; None if there is no such module."""
    top, *inner = module.split(".")
    if top == "__main__":
        return None  # the program that runs now
    found: ModuleSpec | None = None
    try:
        found = importlib.util.find_spec(top)
        name = top
        for part in inner:
            name = f"{name}.{part}"
            found = PathFinder.find_spec(name, found.submodule_search_locations) if found else None
    except (ImportError, ValueError):  # ValueError: no name of a module
        return None
    return Path(found.origin) if found and found.origin and Path(found.origin).is_file() else None


def offered() -> dict[str, str]:
    """{name: package and version} of the methods that installed packages offer by entry points; none is imported."""
    return {point.name: _named(point.dist) if point.dist else "" for point in entry_points(group=GROUP)}


_loaded: dict[tuple, OwnMethod] = {}  # `key_of` an entry -> what was loaded
_used: set[str] = set()  # the names of the methods that were loaded or found again since `forget_used`


def _use(method: OwnMethod) -> OwnMethod:
    _used.add(method.code.name)
    return method


def _made_once(code: OwnCode, entry: Mapping[str, Any] | None = None) -> OwnMethod:
    """The method of loaded code, made once for each `key_of` its entry."""
    key = key_of(entry or code._asdict())
    if key not in _loaded:
        _loaded[key] = OwnMethod(code, _method(code))
    known = _loaded[key]  # its code is what the method was made of, under the name and place by which it was asked for
    return _use(known._replace(code=known.code._replace(name=code.name, place=code.place)))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"the file {path} cannot be read: {error.strerror}") from error


def _path(place: str) -> Path:
    return Path(place).expanduser().resolve()


def _not_imported(where: str, error: BaseException) -> InvalidArgument:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == where]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    hint = ""
    if isinstance(error, ModuleNotFoundError):
        hint = ". A module that the file imports must be installed, on PYTHONPATH, or lie beside the original file"
    told = f"{type(error).__name__}: {one_line(error)}"
    return InvalidArgument(f"{where} cannot be imported: {told}{f' (line {line})' if line else ''}{hint}")


def _code_of_module(
    kind: str, name: str, module: str, function: str, package: str | None, expected: str | None
) -> OwnCode:
    source = source_of(module)
    if source is None:
        more = f", which the entry point {name!r} of {package} names" if kind == "entry point" else ""
        raise InvalidArgument(
            f"there is no module {module!r}{more}: install its package, or put its folder on PYTHONPATH. A file is "
            "named with its ending: FILE.py:function"
        )
    content = _content(source)
    sha256 = hashlib.sha256(content).hexdigest()
    package = package or _package_of(module)
    if expected not in (None, sha256):
        raise InvalidArgument(
            f"{source} was changed since the run was created: its sha256 is another one{package and f', in {package}'}."
            " The run would go on with other rules. Install the version that it was created with, or start a new run"
        )
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise _not_imported(module, error) from error
    return OwnCode(kind, name, module, function, package, sha256, "", content, imported)


def _entry_point(name: str) -> EntryPoint:
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        if name.endswith(".py"):
            raise InvalidArgument(f"{name} names no function: write {name}:FUNCTION{_functions(Path(name))}")
        raise InvalidArgument(f"{unknown('algorithm', name, [*ALGORITHMS, *offered()])}; {HOW}")
    if len({point.value for point in found}) > 1:
        packages = ", ".join(_named(point.dist) for point in found if point.dist)
        raise InvalidArgument(f"several packages offer a method {name!r}: {packages}. Write package.module:function")
    return found[0]


def _functions(path: Path) -> str:
    """Which methods and functions a file has, for a message; the file is not run."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    values = {ast.unparse(a.targets[0]): ast.unparse(a.value) for a in body if isinstance(a, ast.Assign)}
    found = [f"{name} (a Method)" for name, made in values.items() if made.startswith(("Method(", "tfpfl.Method("))]
    found += [each.name for each in body if isinstance(each, ast.FunctionDef)]
    return f". It has {', '.join(found)}" if found else ""


def _package_of(module: str) -> str | None:
    """The installed package that has the module, with its version; None if it belongs to none."""
    for package in packages_distributions().get(module.split(".")[0], ()):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return None


def _named(package: Any) -> str:
    return f"{package.name} {package.version}"


def _attribute(module: ModuleType, function: str, where: str) -> Any:
    try:
        return reduce(getattr, function.split("."), module)
    except AttributeError:
        known = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
        own = [n for n, value in vars(module).items() if isinstance(value, Method) and not n.startswith("_")]
        own += [n for n, value in known.items() if getattr(value, "__module__", None) == module.__name__]
        raise InvalidArgument(unknown(f"function in {where}", function, own)) from None


def _method(code: OwnCode) -> Method:
    """The method in a module, made from a builder if it is one.

    Raises:
        InvalidArgument: it is neither a `Method` nor a builder.
    """
    found, where = code.found, f"{code.function} in {code.place}"
    if not isinstance(found, Method):
        if not callable(found) or isclass(found):
            raise InvalidArgument(
                f"{where} is {type(found).__name__}, neither a builder (model, population, *, "
                "hyperparameters) -> Algorithm nor a tfpfl.Method"
            )
        found = _method_of_builder(found, code.function.rpartition(".")[2])
    _check_arguments(found, where)
    return found


def _method_of_builder(builder: Any, name: str) -> Method:
    """The `Method` of a builder of which nothing else is known: it shares one head, which is right for every method.

    The title and the reference are the first sentence of the docstring. The title ends at a colon or a bracket, as in
    'FedALA (Zhang et al., AAAI 2023): ...'; if that is too long, it is `name`.
    """
    told = " ".join((getdoc(builder) or "").split("\n\n")[0].split())
    title = min((told.partition(mark)[0] for mark in (": ", " (", ". ")), key=len).rstrip(".")
    title = title if 0 < len(title) <= LONGEST_TITLE else name
    no = "unknown"
    return Method(name, title, builder, "shared", message=no, state=no, down=no, up=no, reference=told or name)


def _check_arguments(method: Method, where: str) -> None:
    """Checks that a builder takes a model and a population, and that its hyperparameters can be options."""
    try:
        arguments = list(signature(method.builder).parameters.values())
        hyperparameters = method.hyperparameters
    except (TypeError, ValueError, NameError) as error:  # NameError: an annotation that cannot be evaluated
        raise InvalidArgument(f"{where}: its arguments cannot be read: {error}") from error
    places = [p for p in arguments if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(places) != 2:
        found = ", ".join(p.name for p in places) or "none"
        raise InvalidArgument(
            f"{where} must take (model, population, *, hyperparameters), with the hyperparameters after a star; found "
            f"these arguments before the star: {found}"
        )
    for name, p in hyperparameters.items():
        kinds = {*_kinds(p)} - {NoneType}
        if name in ("name", "preset"):
            raise InvalidArgument(f"{where}: the hyperparameter {name} has a name that tfpfl needs: take another one")
        if p.default is Parameter.empty or len(kinds) != 1 or not kinds <= {int, float, bool, str}:
            raise InvalidArgument(
                f"{where}: the hyperparameter {name} must have a default, and a type that an option can have: int, "
                f"float, bool or str, or one of these or None. Write for example {name}: float = 0.1"
            )


def _kinds(parameter: Parameter) -> Iterable[Any]:
    annotation = parameter.annotation
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
