"""Which schedules and placements a Megatron model can run."""

from __future__ import annotations

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Placement, Schedule

_IN_ORDER = tuple(kind for kind in Kind if kind not in (Kind.B, Kind.W, Kind.BW, Kind.R))
"""The kinds of passes that a stage runs in the order of the data; R runs in that of the backwards."""


def is_megatrons_own(placement: Placement) -> bool:
    """Whether every stage is on the rank where Megatron would put it."""
    return all(rank == stage % placement.num_ranks for stage, rank in enumerate(placement.stage_to_rank))


def check_placement(placement: Placement, num_ranks: int) -> None:
    """Reject placements that Megatron cannot be made to support.

    Raises:
        UserError: another number of ranks than the job's; a rank that does not have exactly one of stages 0..P-1, one
            of P..2P-1, and so on; or first and last stages on ranks where Megatron would not find a tied embedding.
    """
    if placement.num_ranks != num_ranks:
        raise UserError(
            f"the schedule is for {placement.num_ranks} ranks, but the job runs {num_ranks} pipeline ranks; plan the "
            f"schedule for {num_ranks} ranks"
        )
    rank_of = placement.stage_to_rank
    rounds = [rank_of[first : first + num_ranks] for first in range(0, placement.num_stages, num_ranks)]
    ends = rank_of[0], rank_of[-1]
    if any(sorted(row) != list(range(num_ranks)) for row in rounds) or not (
        ends[0] == ends[1] or ends == (0, num_ranks - 1)
    ):
        raise UserError(
            "each rank must have one of stages 0..P-1, one of P..2P-1, and so on, and the first and last stage must "
            f"share a rank or be on the first and last rank; got stages on ranks {list(rank_of)}; choose another "
            "placement"
        )


def check_runnable(schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    """Reject a schedule that does not have the job's size, or that a Megatron model cannot run.

    A plan can express schedules that training does not support: forwards of a stage out of the order of the data, and W
    passes in another order than the backwards.

    Raises:
        UserError: the rule, the values and the remedy.
    """
    if schedule.num_ranks != num_ranks or schedule.num_microbatches != num_microbatches:
        raise UserError(
            f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} "
            f"microbatches, but the job runs {num_ranks} pipeline ranks and {num_microbatches} microbatches "
            "(global batch size / micro batch size / data-parallel size); plan the schedule for these numbers"
        )
    check_trainable(schedule)


def check_trainable(schedule: Schedule) -> None:
    """Reject a schedule that no Megatron model can run, whatever its size.

    Raises:
        UserError: the rule, the values and the remedy.
    """
    check_placement(schedule.placement, schedule.num_ranks)
    for stage, rank in enumerate(schedule.placement.stage_to_rank):
        row = [p for p in schedule.order[rank] if p.stage == stage]
        for kind in _IN_ORDER:
            run = [p for p in row if p.kind is kind]
            if run != sorted(run):
                labels = ", ".join(p.label for p in run)
                raise UserError(
                    f"each stage must run its {kind} passes in the order of the data, by microbatch and slice; "
                    f"{schedule.name!r} runs those of stage {stage} in the order {labels}; sort them"
                )
        backward, weight = (
            [p._replace(kind=Kind.W) for p in row if p.kind in (kind, Kind.BW)] for kind in (Kind.B, Kind.W)
        )
        if weight != backward:
            early = next(w for w, b in zip(weight, backward, strict=True) if w != b)
            raise UserError(
                "each stage must run its W passes in the order of its B passes, so that accumulated gradients are "
                f"exact and can be reduced after the last W; stage {stage} of {schedule.name!r} runs W of microbatch "
                f"{early.label} too early; move it behind the W passes of earlier backwards"
            )
