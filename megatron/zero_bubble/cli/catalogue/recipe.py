"""A recipe: the flags of a job as a script gives them, and where the job runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megatron.zero_bubble.cli.launcher import processes_of
from megatron.zero_bubble.planning.job.arguments.parser import flags_of_text

_NODE = 8
"""GPUs of a node, where a recipe does not say it."""

_PATH = "given-to-the-script"


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        name: the path of its file in the folder, and what else it takes to tell it from others of the file.
        flags: the flags of the training script.
        program: the file name of the training script; empty if it is not known.
        gpus: the GPUs that the recipe gives; None if it gives none.
        gpus_per_node: the same for a node.
        gpu: a key of ``DEVICES``; None if the recipe does not say it.
        problem: why it has no flags, as a sentence; None if it has.
    """

    name: str
    flags: tuple[str, ...] = ()
    program: str = ""
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpu: str | None = None
    problem: str | None = None


def of_command(name: str, command: Sequence[str], header: Mapping[str, str]) -> Recipe | None:
    """The recipe that a command starts; None if it starts no job with flags of Megatron.

    Args:
        header: options of the scheduler, such as ``{"nodes": "4"}``, for what the command does not say.
    """
    place = next((at for at, word in reversed(list(enumerate(command))) if word.endswith(".py")), None)
    if place is None:
        place = next((at + 1 for at, word in enumerate(command) if word == "-m"), None)
    if place is None:
        place = next((at for at, word in enumerate(command) if word.startswith("--")), len(command)) - 1
    flags = with_paths(command[place + 1 :])
    if not any(word.startswith("--") and ("num-layers" in word or "layer-pattern" in word) for word in flags):
        return None
    nodes, per_node = processes_of(command[: max(place, 0)], header)
    gpus = None if nodes is None and per_node is None else (nodes or 1) * (per_node or _NODE)
    program = PurePath(command[place]).name if 0 <= place < len(command) else ""
    return Recipe(name, flags, program, gpus, per_node)


def with_paths(flags: Sequence[str]) -> tuple[str, ...]:
    """The flags with a value for those of paths that have none, because a script takes it from its own arguments."""
    texts = flags_of_text()
    found = []
    for word, after in zip(flags, [*flags[1:], "--"], strict=False):
        found += [word, _PATH] if word in texts and after.startswith("--") else [word]
    return tuple(found)


def world_of(recipe: Recipe, sizes: Mapping[str, int]) -> tuple[int, int, bool]:
    """The nodes and the GPUs per node of a job, and whether they are assumed.

    Args:
        sizes: the sizes of its parallelism: ``tensor``, ``pipeline``, ``context``, ``expert`` and ``expert_tensor``.
    """
    dense = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    least = math.lcm(dense, sizes["expert_tensor"] * sizes["expert"] * sizes["pipeline"])
    per_node = recipe.gpus_per_node or _NODE
    if recipe.gpus and recipe.gpus % least == 0:
        together = math.gcd(recipe.gpus, per_node) if recipe.gpus > per_node else recipe.gpus
        return recipe.gpus // together, together, False
    gpus = least if least < per_node else math.lcm(least, per_node)
    together = min(gpus, per_node)
    return gpus // together, together, True
