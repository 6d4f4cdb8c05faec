"""Packages of Debian: fetched by apt from where this machine gets its own, and unpacked into a folder.

Nothing is installed. The release and the processor may be others than this machine's.
"""

import os
import subprocess
from pathlib import Path

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def own_apt(folder: Path, release: str, architecture: str | None = None) -> dict:
    """An environment in which apt-get knows one release only, by default for this machine's processor."""
    for name in ("state", "lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    what = ["--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"]
    targets = subprocess.run(["apt-get", "indextargets", *what], capture_output=True, text=True, check=True).stdout
    places = [line.split()[2] for line in targets.splitlines() if line.startswith("Debian Debian ")]
    if not places:
        raise SystemExit("apt knows no packages of Debian here: they cannot be fetched")
    (folder / "sources.list").write_text(f"deb [signed-by={KEYS}] {places[0]} {release} main\n")
    settings = {
        "Dir::State": "state",
        "Dir::State::Lists": "lists",
        "Dir::State::Status": "status",
        "Dir::Cache": ".",
        "Dir::Cache::Archives": "archives",
        "Dir::Etc::SourceList": "sources.list",
    }
    lines = [f'{name} "{folder / value}";' for name, value in settings.items()]
    lines += ['Dir::Etc::SourceParts "/dev/null";', 'APT::Sandbox::User "root";']
    if architecture:
        lines += [f'APT::Architecture "{architecture}";', f'APT::Architectures {{ "{architecture}"; }};']
    (folder / "apt.conf").write_text("\n".join(lines) + "\n")
    return {**os.environ, "APT_CONFIG": str(folder / "apt.conf")}


def apt(environment: dict, *command: str, cwd: Path | None = None) -> None:
    """Runs apt-get, which says nothing but what is wrong."""
    subprocess.run(["apt-get", "-qq", *command], env=environment, check=True, stdin=subprocess.DEVNULL, cwd=cwd)


def unpack(packages: Path, root: Path, left_out=()) -> None:
    """Unpacks all packages of a folder into `root`, without the files that a pattern of `left_out` names."""
    excluded = [f"--exclude={pattern}" for pattern in left_out]
    for package in sorted(packages.glob("*.deb")):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as tar:
            subprocess.run(["tar", "-x", "--no-same-owner", "-C", root, *excluded], stdin=tar.stdout, check=True)
