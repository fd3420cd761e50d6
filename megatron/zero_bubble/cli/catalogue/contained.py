"""Programs of others, run so that nothing of them is left: neither after they end or take too much, nor after our end.

A keeper starts the program in a session and watches it. It is a process of its own, this file as a program without
packages, so that it is still there when our process is killed: it notices that by a socket whose other end we hold.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ENDLESS, CROWDED = "it does not end", "it starts too many processes"
_INTERVAL = 0.01
"""How often the processes of a session are counted, in seconds."""
_PATIENCE = 10
"""Seconds in which a process that was killed has ended."""


def run_contained(command: list[str], seconds: float, most: int, **given: Any) -> tuple[str, int]:
    """Run a program until it and all that it has started have ended.

    Args:
        seconds: the time after which all of them are ended.
        most: the number of processes beyond which all of them are ended.
        given: further arguments of ``subprocess.Popen``, such as the standard streams.

    Returns:
        which of the two limits has ended it ("" if none has), and its exit status, as ``Popen.wait`` returns it.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", __file__, str(theirs.fileno()), str(seconds), str(most), *command],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # what is sent to our group, as from a terminal, does not end it before us
                **given,
            )
        try:
            report = ours.recv(4096)
        finally:
            ours.close()
            status = keeper.wait()
    why, ended = json.loads(report) if report else ("", status)
    return str(why), int(ended)


def content(file: IO[bytes]) -> str:
    """All that was written to a standard stream."""
    file.seek(0)
    return file.read().decode(errors="replace")


def main(us: int, seconds: float, most: int, command: list[str]) -> None:
    """Be the keeper: run the command, and tell the socket why it was ended, and its exit status."""
    reading, writing = os.pipe()  # of which all processes of the program, and no others, have the second end open
    running = subprocess.Popen(command, pass_fds=(writing,), start_new_session=True)
    os.close(writing)
    until, why = time.monotonic() + seconds, ""
    try:
        while not why and not _is_closed(reading) and not select.select([us], [], [], 0)[0]:
            why = ENDLESS if time.monotonic() > until else ""
            why = CROWDED if len(_processes_of(running.pid)) > most else why
    finally:
        _end(running.pid)
    report = json.dumps([why, running.wait()]).encode()
    with socket.socket(fileno=us) as we, suppress(BrokenPipeError):  # the catalogue may have ended
        we.sendall(report)


def _is_closed(pipe: int) -> bool:
    """Whether all others have closed the pipe, after waiting a little; what they write to it is dropped."""
    return bool(select.select([pipe], [], [], _INTERVAL)[0]) and not os.read(pipe, 4096)


def _end(session: int) -> None:
    """End all processes of a session, also those that others start meanwhile: stopped ones start none."""
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        before: set[int] = set()
        while (left := set(_processes_of(session))) - before:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, sent)
            before = left
    until = time.monotonic() + _PATIENCE
    while _processes_of(session) and time.monotonic() < until:
        time.sleep(_INTERVAL)


def _processes_of(session: int) -> list[int]:
    """The processes of a session that have not ended, where the system tells them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, own = file.read_text(errors="replace").rpartition(")")[2].split()[:4]
            found += [int(file.parent.name)] if int(own) == session and state != "Z" else []
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
