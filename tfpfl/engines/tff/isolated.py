"""Runs a program in its own network namespace; from outside it can be reached through one socket only.

    python isolated.py unix:PATH|HOST:PORT INSIDE_PORT PROGRAM ...

TFF's worker listens on every address and asks for no password. In a network namespace these addresses are private: no
address outside leads to its port. This process makes the one socket before it enters the namespace, and forwards its
connections to the program. It needs Linux; it needs no root if the system allows user namespaces. It is a script and
not imported, because only a process with a single thread may enter a user namespace. It and the program end when the
parent process ends.
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
    """Runs `program` in a namespace, forwards connections at `outside` to its `port`, and returns its exit code."""
    end_with_parent()
    listener = listen(outside)
    enter_namespace()
    end_with_parent()  # again, because a change of credentials may clear it
    child = subprocess.Popen(program, preexec_fn=end_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: child.kill())
    threading.Thread(target=accept, args=(listener, port), daemon=True).start()
    return child.wait()


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def listen(outside: str) -> socket.socket:
    """Opens the socket through which the program is reached: 'unix:PATH' or 'HOST:PORT'."""
    if not outside.startswith("unix:"):
        host, _, port = outside.rpartition(":")
        return socket.create_server((host, int(port)), backlog=64)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(outside.removeprefix("unix:"))
    listener.listen(64)
    return listener


def enter_namespace() -> None:
    """Enters a user namespace, where a network needs no root, and a network with only a loopback device.

    Exits with `os.EX_NOPERM` and a message if the system does not allow it.
    """
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
            f"isolate: this system does not let users make a network namespace ({error.strerror}). Leave out isolate, "
            "or allow it: sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, or the "
            "container's profile",
            file=sys.stderr,
        )
        sys.exit(os.EX_NOPERM)  # `tfpfl.engines.tff.worker` recognizes the reason by this code


def accept(listener: socket.socket, port: int) -> None:
    """Accepts connections for ever, and forwards each to `port` on a thread of its own."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=relay, args=(connection, port), daemon=True).start()


def relay(connection: socket.socket, port: int) -> None:
    """Copies bytes in both directions until one side closes."""
    try:
        inside = socket.create_connection(("127.0.0.1", port))
    except OSError:
        connection.close()  # the program does not listen yet; the client will connect again
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
    """Copies bytes until the source closes, then closes both sockets."""
    with suppress(OSError):
        while data := source.recv(2**20):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
