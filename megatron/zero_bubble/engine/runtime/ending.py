"""How a rank ends that cannot return from its training loop: a line on stderr, and the end of the process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading


def report(line: str) -> None:
    # One write, because other ranks print too; not to sys.stderr, which torch.distributed buffers after an error.
    print(f"zero-bubble: {line}\n", end="", file=sys.__stderr__, flush=True)


def end_process(code: int) -> None:
    """Exit without the interpreter's clean-up, after killing child processes and flushing stdout."""
    for child in multiprocessing.active_children():
        child.kill()
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # flush blocks while the main thread prints
    flush.start()
    flush.join(1.0)
    os._exit(code)
