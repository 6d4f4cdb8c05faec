"""Runs a program in its own network namespace; from outside it can be reached through one socket only.

    python isolated.py unix:PATH|HOST:PORT INSIDE_PORT PROGRAM ...
    python isolated.py probe                                            # only tries whether the system allows it

TFF's worker listens on every address and asks for no password. In a network namespace these addresses are private: no
address outside leads to its port. This process makes the one socket before it enters the namespace, and forwards its
connections to the program. It needs Linux; it needs no root if the system allows user namespaces. It is a script and
not imported, because only a process with a single thread may enter a user namespace. It and the program end when the
parent process ends.
"""

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
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
    listener, here = socket.socket(socket.AF_UNIX), os.open(".", os.O_PATH)
    folder, name = os.path.split(outside.removeprefix("unix:"))
    os.chdir(folder)  # a socket's path has at most 107 characters, and a folder for temporary files may have more
    listener.bind(name)
    os.fchdir(here)  # the program reads paths that are relative to this folder
    os.close(here)
    listener.listen(64)
    return listener


def enter_namespace() -> None:
    """Enters a network with only a loopback device.

    Root needs nothing else. Other users enter a user namespace with it, where a network needs no root. Root does so
    only where it must (in some containers), because there it could no longer read other users' files.

    Exits with `os.EX_NOPERM` and a message if the system does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        with suppress(OSError):
            unshare(_CLONE_NEWNET)
            return switch_loopback_on()
        unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        switch_loopback_on()
    except OSError as error:
        print(
            f"this system does not let this user make a network namespace ({error.strerror}; see sysctl "
            "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, or the container's profile)",
            file=sys.stderr,
        )
        sys.exit(os.EX_NOPERM)  # `tfpfl.engines.tff.worker` recognizes the reason by this code


def unshare(namespaces: int) -> None:
    """Moves this process into new namespaces; an OSError if the system does not allow it."""
    if _libc.unshare(namespaces):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def switch_loopback_on() -> None:
    """Switches the loopback device of this network on, without which 127.0.0.1 leads nowhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def accept(listener: socket.socket, port: int) -> None:
    """Accepts connections for ever, and forwards each to `port` on a thread of its own."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the client is gone already, or this process has too many open files for now
            time.sleep(0.05)
            continue
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
    try:
        splice(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EPERM):  # a kernel or a sandbox without splice
            with suppress(OSError):
                while data := source.recv(2**20):
                    target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def splice(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes within the kernel; through this process (`recv`, `send`), large messages took a third longer."""
    out, into = os.pipe()
    try:
        with suppress(PermissionError):  # this user's pipes have used up what they may have together
            fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 2**20)
        while size := os.splice(source.fileno(), into, 2**20):
            while size:
                size -= os.splice(out, target.fileno(), size)
    finally:
        os.close(out)
        os.close(into)


if __name__ == "__main__":
    if sys.argv[1:] == ["probe"]:
        enter_namespace()
        sys.exit()
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
