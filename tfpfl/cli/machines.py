"""The command worker: it computes rounds on this machine for runs that were started on another one."""

import errno
import os
import socket
import time

import click

from tfpfl.checks import InvalidArgument, Unavailable
from tfpfl.cli.group import main
from tfpfl.cli.layout import PATH

OPEN = """\
Port {port} has no password and no encryption, and it is open on every address of this machine. Whoever reaches it can
run TensorFlow graphs and read and write files as {user}. Private network only, or use --isolate and an SSH tunnel."""

ISOLATED = """\
Port {port} has no password and no encryption. It is open to the users of this machine (127.0.0.1) and to nobody else:
they can run TensorFlow graphs and read and write files as {user}. To use it from another machine, run there:
ssh -N -L {port}:127.0.0.1:{port} {host}"""


@main.command()
@click.option("--port", type=click.IntRange(1, 65535), default=10000, help="The TCP port that the worker listens on.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Number of clients that are computed at the same time. Default: the number of cores.",
)
@click.option(
    "--isolate",
    is_flag=True,
    help="Listen on 127.0.0.1 only, so that other machines need an SSH tunnel. Works on Linux.",
)
@click.option(
    "--log",
    type=PATH,
    help="File that the worker writes its messages to. Default: a temporary file, deleted when you end the worker.",
)
def worker(port, concurrency, isolate, log):
    """Compute rounds for runs on other machines. It works until you end it with Ctrl-C.

    The other machine runs: tfpfl run --engine tff --workers THIS_HOST:PORT.

    The worker reads the federation itself: its folder must have the same path here as on the other machine.
    """
    from tfpfl.engines.temporary import TemporaryFolder
    from tfpfl.engines.tff.worker import answers, last_line, start_worker, worker_binary

    worker_binary()  # raises an error if TFF is not installed
    _check_free(port)
    folder = None
    if log is None:
        folder = TemporaryFolder("tfpfl-worker-")
        log = folder.path / "log"
    outside, inside = (
        (f"127.0.0.1:{port}", 10000) if isolate else (None, port)
    )  # an isolated worker has its own network, in which every port is free
    with open(log, "ab") as file:
        process = start_worker(inside, file, concurrency or os.cpu_count() or 1, outside=outside)
    try:
        while not answers(f"127.0.0.1:{port}"):
            if process.poll() is not None:
                raise Unavailable(f"TFF's worker did not start: {last_line(log)} (its log is {log})")
            time.sleep(0.05)
        user = f"this user (id {os.getuid()})"
        click.echo((ISOLATED if isolate else OPEN).format(port=port, user=user, host=socket.gethostname()))
        click.echo(f"Ready on port {port}; its log is {log}. Ctrl-C ends it.")
        code = process.wait()
        raise Unavailable(f"TFF's worker ended by itself ({code}): {last_line(log)} (its log is {log})")
    except KeyboardInterrupt:
        click.echo("Ended.")
    except Unavailable:
        if folder is not None:
            folder.keep()  # the message names the log in it
        raise
    finally:
        process.kill()
        process.wait()


def _check_free(port: int) -> None:
    """Refuses a port that is in use. gRPC would share it with another worker, and either of them could get a call."""
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as s:
                s.setsockopt(
                    socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                )  # connections of an earlier worker may still be open
                s.bind((host, port))
                s.listen()
        except OSError as problem:
            if problem.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # this machine has no IPv6
                continue
            raise InvalidArgument(
                f"port {port} cannot be used ({os.strerror(problem.errno)}): take another --port, or end what uses it"
            ) from problem
