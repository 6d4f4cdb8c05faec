"""Finds the children of a process, and tells whether a process is alive."""

import subprocess


def children_of(pid: int) -> list:
    """The process ids of a process's children."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


def descendants(pid: int) -> list:
    """The process ids of a process's children, of their children, and so on."""
    children = children_of(pid)
    return children + [p for child in children for p in descendants(child)]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
