"""What the command of a launcher says: torchrun, srun, mpirun and the like before the training script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePath
from typing import NamedTuple

_OF_SLURM = {"N": "nodes", "n": "ntasks"}
_OF_MPI = {"n": "ntasks", "np": "ntasks", "N": "ntasks-per-node", "npernode": "ntasks-per-node"}
_SHORT = {"srun": _OF_SLURM, "mpirun": _OF_MPI, "mpiexec": _OF_MPI}
"""The options with one dash of a program, by their long names."""
_NODE = 8
"""The processes of a node of a job that says only how many there are in all."""


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
    options = {_OF_SLURM.get(name, name): value for name, value in (header or {}).items()} | _options(words)
    nodes = _number(options, "nnodes", "nodes")
    per_node = _number(options, "nproc-per-node", "gpus-per-node", "ntasks-per-node")
    total = _number(options, "ntasks")
    return (
        Processes(nodes, per_node) if total is None else _divided(total, nodes, per_node, "nproc-per-node" in options)
    )


def _divided(total: int, nodes: int | None, per_node: int | None, starts_more: bool) -> Processes:
    """The processes of a job with ``total`` tasks, each of which may start those of a node."""
    if per_node is not None:
        in_tasks = total if starts_more else total // per_node
        return Processes(nodes or in_tasks or None, per_node)
    if nodes is not None:
        return Processes(nodes, total // nodes if total > nodes else None)
    if total == 1:
        return Processes(None, None)
    return Processes(1, total) if total <= _NODE else Processes(total // _NODE, _NODE)


def _options(words: Sequence[str]) -> dict[str, str]:
    """The options of a launcher, by their long names without dashes."""
    found, short = {}, _OF_SLURM
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if given else after
        elif match := re.fullmatch(r"-([A-Za-z_]+)=?(\d*)", word):
            name, value = match.groups()
            found[short.get(name, name.replace("_", "-"))] = value or after
        else:
            short = _SHORT.get(PurePath(word).name, short)
    return found


def _number(options: Mapping[str, str], *names: str) -> int | None:
    """The first of several options that is a number."""
    return next((int(value) for name in names if (value := options.get(name, "")).isdecimal() and int(value)), None)
