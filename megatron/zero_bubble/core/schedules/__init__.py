"""The named schedules, one module per schedule; ``build(name, ...)`` builds one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from megatron.zero_bubble.core.errors import UserError, nearest
from megatron.zero_bubble.core.ir import Schedule, Slices
from megatron.zero_bubble.core.ir.sizes import check_size
from megatron.zero_bubble.core.schedules import (
    breadth_first,
    dualpipe_v,
    gis,
    gis_h,
    interleaved,
    one_f_one_b,
    pipe_offload,
    seq_1f1b,
    seq_interleaved,
    seq_zb_h1,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_interleaved,
    zb_v,
    zero_pp,
)
from megatron.zero_bubble.core.schedules.recipe import Recipe

_MODULES = (
    one_f_one_b,
    interleaved,
    breadth_first,
    zb_h1,
    zb_h2,
    zb_v,
    v_half,
    v_min,
    zb_interleaved,
    dualpipe_v,
    gis,
    gis_h,
    pipe_offload,
    seq_1f1b,
    seq_interleaved,
    seq_zb_h1,
    zero_pp,
)
SCHEDULES: dict[str, Recipe] = {module.RECIPE.name: module.RECIPE for module in _MODULES}
ZB_AUTO = "zb-auto"
"""The name that selects a search instead of one of these."""


def sliced() -> tuple[str, ...]:
    """The names of the schedules that cut sequences into slices."""
    return tuple(name for name, known in SCHEDULES.items() if known.sliced)


def has_units(name: str | None) -> bool:
    """Whether ``name`` is a schedule of units of microbatches."""
    return name in SCHEDULES and SCHEDULES[name].has_units


def recipe(name: str) -> Recipe:
    """Return the recipe of the schedule called ``name``.

    Raises:
        UserError: for an unknown name; the message lists the known ones.
    """
    if name == ZB_AUTO:
        raise UserError(
            f"{ZB_AUTO} has no order of its own, because it is searched for given costs; got {name!r}; use "
            f"`zero-bubble plan --schedule {ZB_AUTO}`, or one of {', '.join(SCHEDULES)}"
        )
    if name not in SCHEDULES:
        meant = nearest(name, (*SCHEDULES, ZB_AUTO))
        hint = "" if meant is None else f"; did you mean {meant}?"
        raise UserError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}, or {ZB_AUTO}{hint}")
    return SCHEDULES[name]


def build(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    num_slices: int | Slices | None = None,
    unit_microbatches: int | None = None,
    pairs: int = False,
) -> Schedule:
    """Build the schedule called ``name``.

    Args:
        num_chunks: the stages per rank of an interleaved schedule (default: 2).
        num_slices: the slices of every sequence of a sliced schedule, or their cuts (default: 4 even slices).
        unit_microbatches: the most microbatches per unit of a schedule of units (default: one per rank).
        pairs: whether forwards run at the same time as backwards of other microbatches, so that each hides the
            all-to-all of the other's experts.

    Raises:
        UserError: for an unknown name, counts below 1, a size that is too large, or a number of chunks, slices or
            microbatches per unit, or pairs, that the schedule does not support.
    """
    known = recipe(name)
    for count, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise UserError(f"{count} must be 1 or more; got {value}")
    chunks, slices = known.num_chunks(num_chunks), known.slices(num_slices)
    check_size(num_ranks, num_microbatches, chunks, len(slices))
    sizes = num_ranks, num_microbatches, chunks
    more = known.units(unit_microbatches) | known.pairs(bool(pairs))
    return _built(known, (*sizes, slices) if known.sliced else sizes, tuple(more.items()))


@lru_cache(maxsize=2)  # a plan and the checks of its job ask for the same schedule, which may be large
def _built(known: Recipe, arguments: tuple[Any, ...], more: tuple[tuple[str, int], ...]) -> Schedule:
    return known.build(*arguments, **dict(more))
