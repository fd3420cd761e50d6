"""What the registry knows of a schedule: how to build it, and what to expect of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement, Schedule

Shape = Literal["linear", "vee", "interleaved"]
_PLACEMENTS: dict[Shape, Callable[[int, int], Placement]] = {
    "linear": lambda num_ranks, _: Placement.linear(num_ranks),
    "vee": lambda num_ranks, _: Placement.vee(num_ranks),
    "interleaved": Placement.interleaved,
}


@dataclass(frozen=True)
class Recipe:
    """A named way to order the passes.

    ``build(num_ranks, num_microbatches, num_chunks)`` makes the schedule; only an interleaved one looks at the chunks.
    ``bubble`` is the idle time of the longest rank without communication and ``memory`` the peak over ranks: formulas
    in p ranks, v chunks a rank, the durations F, B, W of a rank and the activation M of a microbatch on a rank. They
    hold once there are enough microbatches to fill the pipeline.

    Attributes:
        shape: where its stages lie.
        adapts: made for equal passes; with the costs at hand, the search does better in the same memory.
    """

    name: str
    summary: str
    bubble: str
    memory: str
    build: Callable[[int, int, int], Schedule]
    shape: Shape = "linear"
    adapts: bool = False

    def placement(self, num_ranks: int, num_chunks: int) -> Placement:
        """Where its stages lie with ``num_chunks`` chunks a rank, if that is for the user to say."""
        return _PLACEMENTS[self.shape](num_ranks, num_chunks)

    def num_chunks(self, asked: int | None) -> int:
        """How many chunks a rank holds.

        Raises:
            UserError: when ``asked`` for what this schedule does not have.
        """
        own = {"linear": 1, "vee": 2, "interleaved": asked or 2}[self.shape]
        if asked is not None and asked != own:
            has = "one stage" if own == 1 else f"{own} stages"
            raise UserError(f"schedule {self.name!r} has {has} a rank; got {asked}; leave the number out")
        if own < 1 or (self.shape == "interleaved" and own < 2):
            raise UserError(f"schedule {self.name!r} needs 2 or more stages a rank; got {own}; choose 1f1b for one")
        return own
