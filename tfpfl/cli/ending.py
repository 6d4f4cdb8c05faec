"""How a command ends when it is asked to: by Ctrl-C, by SIGTERM (`kill`, a batch system, a container) or by SIGHUP.

The round in progress is dropped; rounds are saved as a whole or not at all. The command says in one line how to
continue, deletes its temporary files, and exits with 128 plus the signal's number: 130, 143 or 129.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click
import psutil

SAME_COMMAND = "the same command, in the same folder"
PATIENCE = 5.0  # seconds; `docker stop` sends SIGKILL after 10


class Ended(KeyboardInterrupt):
    """The process was sent SIGTERM or SIGHUP; the only argument is the signal's number."""


_advice: list[str] = []  # how to continue, of each `resumable` block that is running
_received: list[int] = []  # numbers of the signals that end the command, in the order in which they were acted upon
_told: list[bool] = []  # not empty if the user was told that the command ends


@contextmanager
def resumable(how: str, saved: Callable[[], str] = lambda: "finished rounds are saved") -> Iterator[None]:
    """If the command is asked to end in this block, says how to continue, and ends it.

    Args:
        how: how to continue, such as 'tfpfl resume runs/a'.
        saved: () -> what is saved, such as '3 rounds are saved'.
    """
    _advice.append(how)
    try:
        yield
    except KeyboardInterrupt as end:
        raise exit_of(end, f"; {saved()}. Continue with: {how}") from None
    finally:
        _advice.pop()


def exit_of(end: KeyboardInterrupt, more: str = ".") -> click.exceptions.Exit:
    """Says that the command ends, and what `more` says; returns the exception with which it ends."""
    number = end.args[0] if isinstance(end, Ended) else signal.SIGINT
    _told.append(True)
    _received.append(number)
    click.echo(f"\n{_how(number)}{more}", err=True)
    return click.exceptions.Exit(128 + number)


def end_with_signals() -> None:
    """From now on, SIGTERM and SIGHUP end this process as Ctrl-C does: by an exception, `Ended`.

    Python raises it when the main thread comes back from the call that it is in, which may be a long round of
    TensorFlow; and other threads may have to finish, too. After `PATIENCE` seconds, a thread ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # only there, Python lets us
    # A signal that is ignored, as under nohup, stays so.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to at once, whatever the main thread does
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # its signals are not ours
    threading.Thread(target=_watch, args=(reader, numbers), daemon=True).start()
    for number in numbers:
        signal.signal(number, _raise)


def exit_code() -> int | None:
    """128 + the number of the first signal that ends the command; None if none came."""
    return 128 + _received[0] if _received else None


def _raise(number: int, _: object) -> None:
    _received.append(number)
    if len(_received) == 1:  # a second one must not disturb the end
        raise Ended(number)


def _watch(reader: int, numbers: list) -> None:
    while byte := os.read(reader, 1):
        if byte[0] in numbers:
            time.sleep(PATIENCE)
            _end_now(byte[0])


def end_now() -> None:
    """Ends the process, which a signal has asked to end, without waiting for any thread.

    TensorFlow's threads may still compute the work of a cohort; Python's own end would wait for them, and nobody else
    can end the process then. What asks for the end, such as `docker stop`, kills after ten seconds. And Ray may crash
    if it is shut down while it has work.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not disturb the end
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may be there any more to read it
            stream.flush()
    _told.append(True)  # the command has said what it had to
    _end_now(_received[0])


def _end_now(number: int) -> None:
    """Ends the process without waiting for any thread, and the processes that it has started."""
    if not _told:
        how = f"; finished rounds are saved. Continue with: {_advice[-1]}" if _advice else "."
        with suppress(OSError):  # nobody may be there any more to read it
            sys.stderr.write(f"\n{_how(number)}{how}\n")
            sys.stderr.flush()
    children = _halted_children()  # else Ray's processes write into their folders until they end
    if temporary := sys.modules.get("tfpfl.engines.temporary"):  # otherwise there are no such folders
        temporary.delete_all()
    # Last of all: when a thread that still computes sees that they have ended, Ray may crash this process, and TFF's
    # work is begun again on a new worker.
    for child in children:
        with suppress(psutil.Error):
            child.kill()
    os._exit(128 + number)


def _halted_children() -> set:
    """Halts the processes that this one has started, and those that they have started; they can be killed then."""
    found: set = set()
    while new := set(psutil.Process().children(recursive=True)) - found:
        found |= new
        for child in new:
            with suppress(psutil.Error):
                child.suspend()  # so that it starts no other one
    return found


def _how(number: int) -> str:
    return "Interrupted" if number == signal.SIGINT else f"Ended by {signal.Signals(number).name}"
