"""The addresses of this machine, and who listens at them."""

import fcntl
import os
import socket
import struct


def addresses() -> list:
    """Of this machine: ::1 and all IPv4 addresses of its interfaces."""
    found = ["::1"]
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                answer = fcntl.ioctl(s, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:  # it has none
                continue
        found.append(socket.inet_ntoa(answer[20:24]))
    return found


def reached(port: int) -> list:
    """The addresses at which somebody listens on a port."""
    found = []
    for address in addresses():
        try:
            socket.create_connection((address, port), 2).close()
        except OSError:
            continue
        found.append(address)
    return found


def listening(processes: list) -> list:
    """The TCP ports of this process's network, in increasing order, on which one of these processes listens."""
    ports = {}
    for file in ("tcp", "tcp6"):
        with open(f"/proc/net/{file}") as rows:
            for row in list(rows)[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = row.split()
                if state == "0A":  # LISTEN
                    ports[f"socket:[{inode}]"] = int(local.rpartition(":")[2], 16)
    return sorted({ports[file] for pid in processes for file in _open_files(pid) if file in ports})


def _open_files(pid: int) -> list:
    found = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:  # it ended, or closed a file meanwhile
        pass
    return found
