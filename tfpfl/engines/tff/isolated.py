"""Runs a program in a network of its own; what listens there is reached through one socket outside, and no other way.

    python isolated.py unix:PATH|HOST:PORT INSIDE_PORT PROGRAM ...

TFF's worker listens on every address and asks nobody for a password. In a network namespace those addresses are its
own: from outside no address leads to its port. The one socket is made before this process enters the namespace, and
what connects there is passed on. Linux, without root where user namespaces are allowed. A program by itself, and not
imported: only a process with a single thread may enter a user namespace. It and its program end with its parent.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_libc = ctypes.CDLL(None, use_errno=True)


def main(outside: str, port: int, program: list) -> int:
    """Runs it to its end."""
    end_with_parent()
    listener = listen(outside)
    enter_namespace()
    end_with_parent()  # said again: a change of credentials may clear it
    child = subprocess.Popen(program, preexec_fn=end_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: child.kill())
    threading.Thread(target=accept, args=(listener, port), daemon=True).start()
    return child.wait()


def end_with_parent() -> None:
    """The kernel kills this process when its parent goes."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def listen(outside: str) -> socket.socket:
    """The way in."""
    if not outside.startswith("unix:"):
        host, _, port = outside.rpartition(":")
        return socket.create_server((host, int(port)), backlog=64)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(outside.removeprefix("unix:"))
    listener.listen(64)
    return listener


def enter_namespace() -> None:
    """A user namespace, where making a network needs no root; and a network with a loopback device, nothing else."""
    uid, gid = os.getuid(), os.getgid()
    try:
        if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    except OSError as error:
        print(
            f"isolate: this system lets its users make no network namespace ({error.strerror}); leave it out, or allow "
            "them: sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, or the container's "
            "profile",
            file=sys.stderr,
        )
        sys.exit(os.EX_NOPERM)  # by which `tfpfl.engines.tff.worker` knows that this was the reason


def accept(listener: socket.socket, port: int) -> None:
    """Passes every connection on."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=relay, args=(connection, port), daemon=True).start()


def relay(connection: socket.socket, port: int) -> None:
    """Bytes both ways, until one side ends."""
    try:
        inside = socket.create_connection(("127.0.0.1", port))
    except OSError:
        connection.close()  # the program is not there yet: who connected tries again
        return
    inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, inside:
        back = threading.Thread(target=pump, args=(inside, connection), daemon=True)
        back.start()
        pump(connection, inside)
        back.join()


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copies until the source ends, then ends both."""
    with suppress(OSError):
        while data := source.recv(2**20):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
