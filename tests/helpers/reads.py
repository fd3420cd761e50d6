"""Count how often a process reads a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def log_reads(file: Path, log: Path, who: str) -> None:
    """Make this process append the line ``who`` to ``log`` each time it reads ``file``."""
    read_text = Path.read_text

    def logged(path: Path, *args: Any, **kwargs: Any) -> str:
        if path == file:
            with log.open("a") as lines:
                print(who, file=lines)
        return read_text(path, *args, **kwargs)

    Path.read_text = logged  # type: ignore[method-assign, assignment]
