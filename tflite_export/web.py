"""A static site in which a browser is the device: the built page of web/ with a bundle in it.

site.json       every file's size and sha256, which the page checks, and the size of its compressed copy, if it has one;
                by it, a folder is known to be a site
bundle/         what the page loads: manifest.json, program_browser.tflite, theta.bin, head.bin, client.safetensors;
                with members, members.json and members.safetensors, too
NAME.gz         a compressed copy of what the page loads itself: files of the bundle, and WebAssembly
index.html ...  the page, as `make web` built it; LiteRT.js and its WebAssembly are part of it
"""

import gzip
import json
import os
import shutil
import tempfile
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from tflite_export.device.files import describe_content
from tflite_export.device.layout import BROWSER_PROGRAM, CLIENT, HEAD, MANIFEST, MEMBERS, MEMBERS_ABOUT, THETA
from tflite_export.device.runtime import Bundle, BundleError
from tfpfl.checks import check_type, one_line

SITE_FORMAT = 1
PAGE = Path(__file__).resolve().parents[1] / "web" / "dist"
_BUNDLE_FILES = (MANIFEST, BROWSER_PROGRAM, THETA, HEAD)
_OTHER_RUNTIMES = ("_compat_", "_threaded_")  # a visitor's browser takes one of them instead of the plain one
_WORTHWHILE = 0.95  # weights hardly become smaller: then no copy is written


class Site(NamedTuple):
    """The folder and the size of a site that was written."""

    folder: Path
    files: int
    bytes: int
    visit: int  # bytes that a first visit loads, with the compressed copies


def write_site(
    source,
    out: str | os.PathLike,
    *,
    client: int | str | None = None,
    page=None,
    members: int | None = None,
    member_classes: int | None = None,
    start: str = "initial",
) -> Site:
    """Writes a static site to the folder `out`. If it fails, `out` stays as it was.

    Args:
        source: the folder of a bundle that was exported with `browser`, or of a run.
        out: the folder to make. A site that is there already is renewed; what else lies beside its files stays, such
            as `.git`.
        client: of a run: the number or the name of the client whose head and examples the page shows; default its
            first.
        page: the built page; default web/dist of this checkout.
        members: of a run of PFLEGO: its first so many clients become members of a federation that the page plays.
            Everyone who can open the site can see up to 32 training and 32 test examples of each. None: no members.
        member_classes: of each member only the examples of its first so many classes; None: all.
        start: the theta that the page's federation starts with: 'initial' (the run's, before its first round) or
            'trained' (the run's newest).

    Raises:
        InvalidArgument: the source is no path.
        BundleError: the page is not built, the bundle has no program for browsers, or `out` is something else.
        ExportError: a run that cannot be exported, or whose clients cannot be members.
    """
    check_type("source", source, (str, os.PathLike), "the path of a folder, of a run or of a bundle")
    out, source, page = Path(out), Path(source), require_page(page)
    if out.exists() and not _is_site(out):
        raise BundleError(f"{out} exists and is not a site that tfpfl wrote: take another folder, or remove it")
    if not out.absolute().parent.is_dir():
        raise BundleError(f"{out.parent} is not a folder")
    with tempfile.TemporaryDirectory() as folder:
        bundle, shown = _bundle(source, client, Path(folder) / "bundle", members, member_classes, start)
        place = out.resolve()  # of a link, what it leads to: the link stays
        temporary = place.with_name(f"{place.name}.{uuid.uuid4().hex[:8]}.new")
        try:
            shutil.copytree(page, temporary)
            (temporary / "bundle").mkdir()
            for name in (*_BUNDLE_FILES, CLIENT):
                if name in _BUNDLE_FILES or name in bundle.manifest["files"]:
                    shutil.copyfile(bundle.folder / name, temporary / "bundle" / name)
            for name, content in shown.items():
                (temporary / "bundle" / name).write_bytes(content)
            listed = {p.relative_to(temporary).as_posix(): p for p in sorted(temporary.rglob("*")) if p.is_file()}
            files = {name: _described(name, path) for name, path in listed.items()}
            site = {"format": SITE_FORMAT, "made_by": f"tfpfl {_version()}", "files": files}
            (temporary / "site.json").write_text(json.dumps(site, indent=1) + "\n", encoding="utf-8")
            _keep_others(place, temporary)
            _put(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    copies = [file["gzip"] for file in files.values() if "gzip" in file]
    every = sum(file["bytes"] for file in files.values()) + sum(copies)
    needed = [file for name, file in files.items() if not any(part in name for part in _OTHER_RUNTIMES)]
    visit = sum(file.get("gzip", file["bytes"]) for file in needed)
    return Site(out, len(files) + len(copies) + 1, every, visit)


def _described(name: str, path: Path) -> dict:
    """A file's entry in site.json. Writes its copy NAME.gz, if the page can unpack it and it is smaller."""
    content = path.read_bytes()
    entry = describe_content(content)
    if not (name.startswith("bundle/") or name.endswith(".wasm")):
        return entry  # the browser itself loads these, and knows nothing of a copy
    copy = gzip.compress(content, 9, mtime=0)
    if len(copy) > _WORTHWHILE * len(content):
        return entry
    path.with_name(f"{path.name}.gz").write_bytes(copy)
    return entry | {"gzip": len(copy)}


def require_page(page: str | os.PathLike | None) -> Path:
    """The folder of the built page; None: web/dist of this checkout.

    Raises:
        BundleError: it holds no page.
    """
    found = PAGE if page is None else Path(page)
    if not (found / "index.html").is_file():
        raise BundleError(
            f"{found} holds no built page: `make web` in a checkout of tfpfl makes it (Node.js is needed)"
        )
    return found


def _bundle(source, client, temporary, members, member_classes, start) -> tuple[Bundle, dict[str, bytes]]:
    """The bundle to show; of a run, made for it. And the members' files, {name: content}."""
    shown: dict[str, bytes] = {}
    if (source / MANIFEST).is_file():
        bundle = Bundle(source)
        number, name = (bundle.manifest.get(entry) for entry in ("client", "client_name"))
        if client is not None and str(client) not in (f"{number}", f"number:{number}", f"{name}", f"name:{name}"):
            found = f"{number}" + ("" if name in (None, str(number)) else f" ({one_line(name, 40)})")
            raise BundleError(f"{source} is a bundle of client {found}; only a run has others")
        if members is not None:
            raise BundleError(
                f"{source} is a bundle, which has examples of one client only; members need the run's folder"
            )
    else:
        from tflite_export.convert.browser import ROOM  # needs TensorFlow
        from tflite_export.convert.bundle import export
        from tflite_export.convert.members import members_of
        from tfpfl.runs.run import Run

        with Run.open(source, engine="local") as run:
            client, room = int(run.population.client_ids[0]) if client is None else client, ROOM
            if members is not None:
                playing = members_of(run, members, classes=member_classes, start=start)
                room = max(room, playing.room)
                shown = dict(zip((MEMBERS_ABOUT, MEMBERS), playing.files(), strict=True))
            bundle = export(run, client, temporary, inference=False, browser=True, room=room)
    if BROWSER_PROGRAM not in bundle.manifest["files"]:
        raise BundleError(f"{source} was exported without a program for browsers: export it again with --browser")
    return bundle, shown


def _is_site(folder):
    """Whether a folder is empty, or was written here."""
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        site = json.loads((folder / "site.json").read_text(encoding="utf-8"))
        return isinstance(site, dict) and str(site.get("made_by", "")).startswith("tfpfl ")
    except (OSError, ValueError):
        return False


def _keep_others(old, new):
    """Copies what lies in the folder of the old site, and is not of a site, to that of the new one."""
    if not (old / "site.json").is_file():
        return
    files = json.loads((old / "site.json").read_text(encoding="utf-8")).get("files", {})
    own = {"site.json", *(name.partition("/")[0] for name in files), *(f"{name}.gz" for name in files)}
    for other in old.iterdir():
        to = new / other.name
        if other.name in own or to.exists():
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.copytree(other, to, symlinks=True)
        else:
            shutil.copy2(other, to, follow_symlinks=False)


def _put(temporary, out):
    """The new folder in place of the old one."""
    if not out.exists():
        os.rename(temporary, out)
        return
    old = out.with_name(f"{out.name}.{uuid.uuid4().hex[:8]}.old")
    os.rename(out, old)
    try:
        os.rename(temporary, out)
    except OSError:
        os.rename(old, out)
        raise
    shutil.rmtree(old)


def _version():
    try:
        return version("tfpfl")
    except PackageNotFoundError:
        return "of unknown version"
