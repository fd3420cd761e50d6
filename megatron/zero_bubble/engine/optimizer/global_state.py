"""Exchange of the global state that an optimizer step needs: the gradient norm and whether a gradient is infinite.

It uses separate process groups, concurrently with the passes. The full state is reduced by the collective that
megatron-core uses, over the same ranks, so the result is the same bit for bit; ranks wait for it only when they need
it. Before that, a partial state with the figures of all previous ranks is passed from rank to rank. A rank sends it
after its passes, so it arrives before the first activation of the next iteration, for which the next rank must wait
anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.groups import destroy, new_group

Group = dist.ProcessGroup


class RankChain:
    """Passes figures from each pipeline rank to the next. The constructor is a collective call of the whole job.

    Args:
        pipeline: the pipeline-parallel group; its ranks are in the order of the first stages.
    """

    def __init__(self, pipeline: Group, timeout: timedelta | None = None) -> None:
        self._rank, self._size = pipeline.rank(), pipeline.size()
        members = dist.get_process_group_ranks(pipeline)
        self._group = new_group(members, "gloo", timeout)
        self._peers = [dist.get_group_rank(self._group, member) for member in members]
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    def receive(self, count: int) -> torch.Tensor | None:
        """Wait for ``count`` float64 figures from the previous rank; None on the first rank."""
        if self._rank == 0:
            return None
        figures = torch.empty(count, dtype=torch.float64)
        self._group.recv([figures], self._peers[self._rank - 1], 0).wait()
        return figures

    def send(self, figures: torch.Tensor) -> None:
        """Start to send float64 figures to the next rank, which expects the same number; no-op on the last rank."""
        self.settle()
        if self._rank + 1 < self._size:
            self._sent = self._group.send([figures], self._peers[self._rank + 1], 0), figures

    @property
    def num_in_flight(self) -> int:
        """Number of sends not yet settled: 0 or 1."""
        return int(self._sent is not None)

    def settle(self) -> None:
        """Wait until the last send has arrived."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None

    def close(self) -> None:
        """Destroy the process group, when the last send has arrived."""
        self.settle()
        destroy(self._group)
        del self._group


class DecidingRanks:
    """Ranks that decide alike, although their norms may differ in a bit. The constructor is a collective call of the
    whole job.

    Args:
        group: the ranks; None if this one decides alone.
    """

    def __init__(self, group: Group | None, timeout: timedelta | None) -> None:
        members = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        self._group = new_group(members, "gloo", timeout)

    def any(self, holds: bool) -> bool:
        """Whether ``holds`` is true on any of them."""
        if self._group.size() == 1:
            return holds
        flag = torch.tensor([float(holds)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, self._group)
        return flag.item() > 0

    def close(self) -> None:
        destroy(self._group)
        del self._group


class Reduction:
    """An all-reduce of a few figures, in flight."""

    def __init__(self, figures: torch.Tensor, op: Any, group: Group) -> None:
        self._figures = figures
        self._work = dist.all_reduce(figures, op, group, async_op=True)

    def wait(self) -> list[float]:
        """Wait for the reduced figures and return them; neither waits for the passes, nor they for the reduction."""
        return select(self._figures.device.type).to_host(self._figures, after=self._work).wait().tolist()


_BASE, _DIGITS = 2**12, 4
"""Digits of a count; in fp32, they add up exactly over 4096 ranks."""


def split(count: float) -> list[float]:
    """Split a count into figures of which ``joined`` makes the count over all ranks from their fp32 sums.

    megatron-core counts in fp32 until 0.16, where sums are rounded, and in integers since then.
    """
    digits = [float(int(count) // _BASE**place % _BASE) for place in range(_DIGITS)]
    return [float(count), float(isinstance(count, float)), *digits]


def joined(sums: Sequence[float]) -> float:
    """The count over all ranks: rounded if they count in fp32, else exact."""
    total, is_rounded, *digits = sums
    return total if is_rounded else sum(int(digit) * _BASE**place for place, digit in enumerate(digits))


class GlobalState:
    """Reductions over the ranks of megatron-core's groups. The constructor is a collective call of the whole job.

    Args:
        pipeline: the pipeline-parallel group.
        groups: the groups over which the optimizer reduces its statistics; None means all ranks.
        device: device of the reduced figures.

    Raises:
        UserError: ranks have different numbers of groups.
    """

    def __init__(
        self, pipeline: Group, groups: Sequence[Group | None], device: torch.device, timeout: timedelta | None
    ) -> None:
        self._device = device
        self._whole: list[Group] = []
        self._flags: list[Group] = []
        self._stage: list[Group] = []
        pipeline_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pipeline_ranks, (pipeline.rank(), len(groups)))
        if len({count for _, count in pipeline_ranks}) > 1:
            raise UserError(
                "post-validation needs the same number of parameter kinds (dense, experts) on all ranks; got "
                f"{[count for _, count in pipeline_ranks]}; leave out --zero-bubble-post-validation"
            )
        for group in groups:
            group = dist.group.WORLD if group is None else group
            assert group is not None
            members = dist.get_process_group_ranks(group)
            of_stage = [rank for rank in members if pipeline_ranks[rank][0] == pipeline.rank()]
            self._whole.append(new_group(members, dist.get_backend(group), timeout))
            # Separate from the norm's group, because one NCCL communicator runs its reductions one after the other.
            # A flag may use gloo, since its result does not depend on the order of the reduction.
            self._flags.append(new_group(members, "gloo", timeout))
            self._stage.append(new_group(of_stage, "gloo", timeout))

    def sum(self, index: int, figures: Sequence[float]) -> Reduction:
        """Start to add up fp32 figures over the ranks of group ``index``, each with the bits of its own reduction.

        They travel together: with a single hardware queue, a second reduction would wait until all ranks join the first
        one, and every later kernel behind it.
        """
        on_host = torch.tensor(figures, dtype=torch.float32)
        on_device = select(self._device.type).to_device(on_host, self._device)
        return Reduction(on_device, dist.ReduceOp.SUM, self._whole[index])

    def reduce_flag(self, index: int, flag: bool) -> Reduction:
        """Start to reduce a flag over the ranks of group ``index``; it becomes positive if any rank has it set."""
        return Reduction(torch.tensor([float(flag)]), dist.ReduceOp.MAX, self._flags[index])

    def of_stage(self, index: int, figures: Sequence[float]) -> list[float]:
        """The sums of ``figures`` over the ranks of group ``index`` that have the same stages as this rank."""
        total = torch.tensor(figures, dtype=torch.float64)
        dist.all_reduce(total, group=self._stage[index])
        return total.tolist()

    def close(self) -> None:
        """Destroy the process groups; nothing may be in flight."""
        destroy(*self._whole, *self._flags, *self._stage)
        del self._whole, self._flags, self._stage
