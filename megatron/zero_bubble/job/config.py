"""What a user decides, as one frozen value, and whether the job around it can honour it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from megatron.zero_bubble.costs.units import parse_memory_limit
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.job.source import AUTO, ScheduleSource, SourceOnRanks
from megatron.zero_bubble.schedules import recipe


@dataclass(frozen=True)
class ZeroBubbleConfig:
    """Options of zero-bubble training.

    Attributes:
        schedule: a name of ``zero-bubble list``, or ``zb-auto``, which measures the run and plans for it.
        num_chunks: stages a rank of an interleaved schedule; None is its default.
        placement: where ``zb-auto`` has its stages; the model is built before it plans.
        schedule_file: a file that ``zero-bubble plan --format json`` wrote; exactly one of the two is given.
        memory_limit: what ``zb-auto`` may keep on a rank, as ``zero-bubble plan --memory-limit``: ``1p`` is what 1F1B
            keeps at the most.
        post_validation: step the optimizer before the norm of all gradients is known; validate in the next iteration.
        rollback: how a step is taken back that turns out wrong: ``exact`` keeps what it overwrites until it is
            validated, ``inverse`` computes Adam backwards, which costs no memory and is right to rounding only.
        fuse_wgrad: accumulate the weight gradients of a W in one call, straight into Megatron's float32 buffers; False
            keeps upstream's arithmetic, which rounds each to the weight's dtype first: the bits of stock Megatron.
        wgrad_stream: on a GPU, compute fused weight gradients on a stream of their own, beside the passes that follow;
            they may then keep their inputs longer than planned.
        measure_memory: count, once, what a microbatch keeps on each stage (``Pipeline.memory``).
        peer_timeout_s: how long a message may take before its peer counts as dead; None leaves the default of
            torch.distributed. A peer that dies closes its connections and is noticed at once whatever this says.
    """

    schedule: str | None = None
    num_chunks: int | None = None
    placement: Literal["linear", "vee"] = "linear"
    schedule_file: str | None = None
    memory_limit: str = "1p"
    post_validation: bool = False
    rollback: Literal["exact", "inverse"] = "exact"
    fuse_wgrad: bool = True
    wgrad_stream: bool = False
    measure_memory: bool = False
    peer_timeout_s: float | None = None

    def __post_init__(self) -> None:
        parse_memory_limit(self.memory_limit)
        if (self.schedule is None) == (self.schedule_file is None):
            raise UserError(
                "exactly one of a schedule's name and a schedule file must be given; got "
                f"schedule={self.schedule!r} and schedule_file={self.schedule_file!r}; drop one"
            )
        if self.placement != "linear" and self.schedule != AUTO:
            raise UserError(
                f"the placement {self.placement!r} is for {AUTO}; other schedules have one of their own; leave it out"
            )
        if self.memory_limit != "1p" and self.schedule != AUTO:
            raise UserError(
                f"the memory limit {self.memory_limit!r} is for {AUTO}; other schedules have a peak of their own; "
                "leave it out"
            )
        if self.rollback != "exact" and not self.post_validation:
            raise UserError(
                f"the rollback {self.rollback!r} is for post_validation, which is not asked for; leave it out"
            )
        if self.num_chunks is not None and not self.takes_chunks:
            raise UserError(
                f"a number of stages a rank is for interleaved schedules by name; got {self.num_chunks} with "
                f"{self.schedule or self.schedule_file}; leave it out"
            )
        if self.wgrad_stream and (self.schedule == AUTO or not self.fuse_wgrad):
            raise UserError(
                "a stream of their own is for fused weight gradients under a schedule that is fixed, since on it W's "
                f"cannot be timed; got fuse_wgrad={self.fuse_wgrad} and schedule={self.schedule!r}; leave it out"
            )
        if self.peer_timeout_s is not None and not self.peer_timeout_s > 0:
            raise UserError(f"the peer timeout must be positive; got {self.peer_timeout_s} s; give it in seconds")

    @property
    def takes_chunks(self) -> bool:
        """Whether a number of stages a rank can be given: for schedules by name."""
        return self.schedule not in (None, AUTO)

    def placement_on(self, num_ranks: int) -> Placement:
        """Where the stages lie on a pipeline of ``num_ranks``; a schedule file has its own number of ranks.

        Raises:
            UserError: an unknown schedule, a number of chunks that it does not have, or a bad schedule file.
        """
        return self.sources()(num_ranks).placement

    def sources(self) -> SourceOnRanks:
        """Where the schedules come from, by the number of pipeline ranks. A file is read in this call and not again.

        Raises:
            UserError: as ``placement_on``; the number of chunks only once the ranks are known.
        """
        if self.schedule_file is not None:
            source = ScheduleSource.from_file(self.schedule_file)
            return lambda _: source
        if self.schedule == AUTO:
            return functools.partial(ScheduleSource.automatic, self.placement)
        assert self.schedule is not None, "one of the two is given"
        return functools.partial(ScheduleSource.by_name, recipe(self.schedule).name, num_chunks=self.num_chunks)
