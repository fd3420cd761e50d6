"""The registry entry of a schedule: how to build it, its bubble and its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import WHOLE, Placement, Schedule, Slices

DEFAULT_SLICES = Slices.even(4)
"""The cuts of a sliced schedule for which the user gives none."""

Shape = Literal["linear", "vee", "interleaved"]
_PLACEMENTS: dict[Shape, Callable[[int, int], Placement]] = {
    "linear": lambda num_ranks, _: Placement.linear(num_ranks),
    "vee": lambda num_ranks, _: Placement.vee(num_ranks),
    "interleaved": Placement.interleaved,
}


@dataclass(frozen=True)
class Recipe:
    """A named schedule.

    ``build(num_ranks, num_microbatches, num_chunks)`` builds it; only interleaved schedules use ``num_chunks``.
    ``bubble`` is the idle time of the longest rank without communication, and ``memory`` the peak over ranks. Both are
    formulas in p (ranks), v (chunks per rank), F, B, W (durations on a rank), M (activation of a microbatch on a
    rank), n (slices per sequence) and U (microbatches per unit), valid when there are enough microbatches or slices to
    fill the pipeline.

    Attributes:
        shape: the placement of its stages.
        sliced: whether it cuts sequences into slices; ``build`` then also accepts their ``Slices``.
        has_units: whether it runs units of microbatches; ``build`` then also accepts their size.
        has_pairs: whether it can run forwards at the same time as backwards, to hide the all-to-all of experts;
            ``build`` then also accepts ``pairs``.
        only_compared: whether another schedule is at least as good in every respect.
        adapts: whether it is made for equal passes, so that the search can refit it to known costs in the same memory.
    """

    name: str
    summary: str
    bubble: str
    memory: str
    build: Callable[..., Schedule]
    shape: Shape = "linear"
    adapts: bool = False
    sliced: bool = False
    has_units: bool = False
    has_pairs: bool = False
    only_compared: bool = False

    def placement(self, num_ranks: int, num_chunks: int) -> Placement:
        """Return the placement of its stages; only an interleaved schedule uses ``num_chunks``."""
        return _PLACEMENTS[self.shape](num_ranks, num_chunks)

    def num_chunks(self, asked: int | None) -> int:
        """Return the number of chunks per rank; ``asked`` is the user's choice, if any.

        Raises:
            UserError: when this schedule does not support ``asked``.
        """
        own = {"linear": 1, "vee": 2, "interleaved": asked or 2}[self.shape]
        if asked is not None and asked != own:
            has = "one stage" if own == 1 else f"{own} stages"
            raise UserError(f"schedule {self.name!r} has {has} per rank; got {asked}; leave the number out")
        if own < 1 or (self.shape == "interleaved" and own < 2):
            raise UserError(f"schedule {self.name!r} needs 2 or more stages per rank; got {own}; use 1f1b for one")
        return own

    def units(self, asked: int | None) -> dict[str, int]:
        """Return the further argument of ``build``: the microbatches of a unit; ``asked`` is the user's choice, if any.

        Raises:
            UserError: when this schedule does not support ``asked``, or it is below 1.
        """
        if asked is None:
            return {}
        if not self.has_units or asked < 1:
            what = "has no units of microbatches" if not self.has_units else "needs 1 or more microbatches per unit"
            raise UserError(f"schedule {self.name!r} {what}; got units of {asked}; leave the number out")
        return {"unit_microbatches": asked}

    def pairs(self, asked: bool) -> dict[str, bool]:
        """Return the further argument of ``build``: whether forwards run at the same time as backwards.

        Raises:
            UserError: when this schedule does not support pairs.
        """
        if asked and not self.has_pairs:
            raise UserError(
                f"schedule {self.name!r} has no pairs of a forward and a backward; got pairs=True; use "
                "interleaved-1f1b, dualpipe-v or 1f1b, or leave pairs out"
            )
        return {"pairs": True} if asked else {}

    def slices(self, asked: int | Slices | None) -> Slices:
        """Return the cuts of every sequence; ``asked`` is the user's choice, if any: a number means even slices.

        Raises:
            UserError: when this schedule does not support ``asked``.
        """
        cuts = Slices.even(asked) if isinstance(asked, int) else asked
        if not self.sliced:
            if cuts is not None and len(cuts) > 1:
                raise UserError(
                    f"schedule {self.name!r} does not cut sequences into slices; got {len(cuts)} slices; use one "
                    "whose name begins with seq-"
                )
            return WHOLE
        return DEFAULT_SLICES if cuts is None else cuts
