"""What the command of a launcher says: torchrun, srun and the like before the training script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple


class Assumed(int):
    """A number that nobody gave."""


class Processes(NamedTuple):
    """The nodes of a job and the processes of a node; None where a launcher does not say it."""

    nodes: int | None
    per_node: int | None


def processes_of(words: Sequence[str], header: Mapping[str, str] | None = None) -> Processes:
    """What the words before a training script say.

    Args:
        header: options of the scheduler, such as ``{"nodes": "4"}``, for what the words do not say.
    """
    options = {**(header or {}), **_options(words)}
    return Processes(
        _number(options, "nnodes", "nodes", "N"),
        _number(options, "nproc-per-node", "gpus-per-node", "ntasks-per-node"),
    )


def _options(words: Sequence[str]) -> dict[str, str]:
    """The options of a launcher, without their dashes."""
    found = {}
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("-"):
            name, given, value = word.lstrip("-").partition("=")
            found[name.replace("_", "-")] = value if given else after
    return found


def _number(options: Mapping[str, str], *names: str) -> int | None:
    """The first of several options that is a number."""
    return next((int(value) for name in names if (value := options.get(name, "")).isdecimal() and int(value)), None)
