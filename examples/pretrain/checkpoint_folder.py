"""The folder of a run's checkpoints: where they are, which one is the newest, and whether it is complete."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from megatron.zero_bubble.core.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "files.json"
WRITING = ".writing"
"""Suffix of a checkpoint, and of the tracker, until it is complete."""


def checkpoint_path(directory: str | Path, iteration: int) -> Path:
    """Path of the checkpoint of ``iteration`` under ``directory``."""
    return Path(directory) / f"iter_{iteration:07d}"


def latest_iteration(directory: str | Path) -> int | None:
    """The iteration of the newest complete checkpoint under ``directory``; None when there is none.

    Raises:
        UserError: the tracker file does not contain a number.
    """
    tracker = Path(directory) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{tracker} must contain an iteration number, got {text[:40]!r}; write the one to load")
    return int(text)


def publish(writing: Path, final: Path, iteration: int) -> None:
    """Rename a finished directory to the final checkpoint, and name it in the tracker file."""
    files = {file.name: file.stat().st_size for file in sorted(writing.iterdir())}
    (writing / MANIFEST).write_text(json.dumps(files, indent=1))
    replaced = final.with_name(final.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    writing.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    tracker = final.parent / TRACKER
    temporary = tracker.with_name(tracker.name + WRITING)
    with temporary.open("w") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(tracker)


def incompleteness(path: Path) -> str | None:
    """What is missing from the checkpoint at ``path``; None if it is complete or has no list of files (Megatron's)."""
    remedy = f"restore it, or write an earlier iteration into {path.parent / TRACKER}"
    if not (path / "metadata.json").is_file():
        return f"the checkpoint {path}, which {TRACKER} names, does not exist; {remedy}"
    if not (path / MANIFEST).is_file():
        return None
    try:
        files = dict(json.loads((path / MANIFEST).read_text()))
    except (ValueError, TypeError):
        return f"the checkpoint {path} has an unreadable {MANIFEST}; {remedy}"
    for name, size in files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            return f"the checkpoint {path} must have {size} bytes in {name}, got {found or 'no such file'}; {remedy}"
    return None
