"""Finds and reads the files of data sets that other projects publish. Nothing is downloaded, and nothing is unpacked.

A data set may lie in a folder, in an archive as its maker publishes it (.zip, .whl, .tar.*, .deb), or in an installed
package.
"""

import io
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from tfpfl.checks import InvalidArgument

VARIABLE = "TFPFL_PEOPLE"  # of the environment: the folder with the files that the user has got
MOST_BYTES = 2**30  # of all files that are read of one data set


def people_folder(data_dir: str | os.PathLike | None) -> Path | None:
    """The folder (or the one file) with the data of people: `data_dir`, or the environment's TFPFL_PEOPLE, or None."""
    where = data_dir or os.environ.get(VARIABLE)
    return Path(where).expanduser() if where else None


def find(
    patterns: Sequence[str], packages: Sequence[tuple[str, str]], data_dir: str | os.PathLike | None
) -> Path | None:
    """The file or folder of a data set; None if it is not on this machine.

    Args:
        patterns: what it may be called in the folder of `people_folder`, best first, such as 'seglearn-*.whl'. Of
            several that match, the last by name is taken; numbers in names count as numbers.
        packages: (name of an installed package, path inside of it) in which it may be, too. The package is not
            imported.
        data_dir: as in `people_folder`; it may be the file itself.
    """
    where = people_folder(data_dir)
    if where is not None:
        if where.is_file():
            return where if any(where.match(pattern) for pattern in patterns) else None
        for pattern in patterns:
            if found := list(where.glob(pattern)):
                return max(found, key=_order)
    for package, inside in packages:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(folder) / inside).exists():
                return path
    return None


def _order(path: Path) -> tuple[list[tuple[int, str]], str]:
    """By name, but release 1.0.10 comes after 1.0.9."""
    return [(int(number or 0), text) for number, text in re.findall(r"([0-9]+)|([^0-9]+)", path.name)], path.name


def read_members(path: Path, wanted: str) -> dict[str, bytes]:
    """The content of the files of a folder or an archive whose path matches: {path: content}, sorted by path.

    Args:
        path: a folder, an archive, or one file, which is taken whatever its name is.
        wanted: a regular expression that the end of a path must match, such as 'recordings/[^/]*[.]wav'.

    Raises:
        InvalidArgument: the archive is damaged, or what matches has more than 1 GB.
    """
    fits = re.compile(rf"(^|.*/)({wanted})").fullmatch
    found: dict[str, bytes] = {}
    left = MOST_BYTES
    try:
        for name, size, read in _members(path):
            if path.is_file() and name == path.name or fits(name):
                left -= size
                if left < 0:
                    raise InvalidArgument(f"{path} has more than {MOST_BYTES} bytes of data: it is not what it seems")
                found[name] = read()
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}. Get the file again") from error
    except RuntimeError as error:  # of zipfile: a password, or a compression that Python does not have
        raise InvalidArgument(f"{path} cannot be read: {error}. Unpack it, and give the folder") from error
    return dict(sorted(found.items()))


def _members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """(path inside, bytes, function that reads it) of every file."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                yield file.relative_to(path.parent).as_posix(), file.stat().st_size, file.read_bytes
    elif path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                yield entry.filename, entry.file_size, lambda entry=entry: archive.read(entry)  # type: ignore[misc]
    elif path.suffix == ".deb":
        yield from _of_tar(tarfile.open(fileobj=io.BytesIO(_deb_data(path))))
    elif re.search(r"\.(tar(\.\w+)?|tgz)$", path.name):
        yield from _of_tar(tarfile.open(path))
    else:
        yield path.name, path.stat().st_size, path.read_bytes


def _of_tar(archive: tarfile.TarFile) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    with archive:
        for entry in archive:
            if entry.isfile():
                file = archive.extractfile(entry)
                assert file is not None
                yield entry.name, entry.size, file.read


def _deb_data(path: Path) -> bytes:
    """The archive data.tar.* in a package of Debian, which is an archive of `ar`: a header of 60 bytes for each file.

    Python has no reader of it.

    Raises:
        InvalidArgument: there is none, or it is compressed in a way that Python does not know.
    """
    content = path.read_bytes()
    place = 8  # after '!<arch>\n'
    while content.startswith(b"!<arch>\n") and place + 60 <= len(content):
        name, size = content[place : place + 16].decode("latin-1").strip(" /"), content[place + 48 : place + 58].strip()
        if not size.isdigit():
            break
        start, place = place + 60, place + 60 + int(size) + int(size) % 2
        if name == "data.tar.zst":
            raise InvalidArgument(
                f"{path} is compressed with zstd, as Ubuntu's packages are, which Python does not read: unpack it with "
                f"`dpkg-deb -x {path.name} .`, and give the folder usr/lib/R/site-library"
            )
        if name.startswith("data.tar"):
            return content[start : start + int(size)]
    raise InvalidArgument(f"{path} is not a package of Debian: get the file again")
