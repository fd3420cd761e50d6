"""Handcrafted schedules, one file each; ``build(name, ...)`` makes one by name."""

from __future__ import annotations

from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.schedules import one_f_one_b, zb_h1, zb_h2
from megatron.zero_bubble.schedules.recipe import Recipe

SCHEDULES: dict[str, Recipe] = {module.RECIPE.name: module.RECIPE for module in (one_f_one_b, zb_h1, zb_h2)}


def build(name: str, *, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule called ``name``.

    Raises:
        ValueError: for an unknown name (the message lists the known ones), or counts below 1.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    for count, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{count} must be 1 or more; got {value}")
    return SCHEDULES[name].build(num_ranks, num_microbatches)
