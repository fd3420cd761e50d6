"""What an optimizer step needs to know of all gradients: whether one is infinite, and their norm.

It travels on groups of its own, beside the passes. The whole of it is reduced by the collective that megatron-core
uses, over the same ranks, so that it has the same bits; only nobody waits for it until it is needed. Ahead of it a part
goes from rank to rank, the figures of all ranks before: it leaves when a rank has ended its passes, so it is there
before the first activation of the next iteration, which the rank has to wait for anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.runtime.transport import new_group

Group = dist.ProcessGroup


class Chain:
    """Figures that go from each rank of a pipeline to the next; made by all ranks of the job at the same time.

    Args:
        pipeline: its ranks are in the order of the first stages.
    """

    def __init__(self, pipeline: Group, timeout: timedelta | None = None) -> None:
        self._rank, self._size = pipeline.rank(), pipeline.size()
        members = dist.get_process_group_ranks(pipeline)
        self._group = new_group(members, "gloo", timeout)
        self._peers = [dist.get_group_rank(self._group, member) for member in members]
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    def receive(self, count: int) -> torch.Tensor | None:
        """``count`` float64 of the rank before, once they are here; None on the first rank."""
        if self._rank == 0:
            return None
        figures = torch.empty(count, dtype=torch.float64)
        self._group.recv([figures], self._peers[self._rank - 1], 0).wait()
        return figures

    def send(self, figures: torch.Tensor) -> None:
        """Start giving float64 to the next rank, which expects as many; the last rank has none."""
        self.settle()
        if self._rank + 1 < self._size:
            self._sent = self._group.send([figures], self._peers[self._rank + 1], 0), figures

    @property
    def num_in_flight(self) -> int:
        """Figures sent and not settled."""
        return int(self._sent is not None)

    def settle(self) -> None:
        """Wait until what was sent has arrived."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None


class Reduction:
    """A figure of all ranks, on its way."""

    def __init__(self, figure: torch.Tensor, op: Any, group: Group) -> None:
        self._figure = figure
        self._work = dist.all_reduce(figure, op, group, async_op=True)

    def wait(self) -> float:
        """The figure."""
        self._work.wait()
        return self._figure.item()


@contextlib.contextmanager
def refused_together() -> Iterator[None]:
    """Within, a UserError of one rank is raised on all of them; a collective call of all ranks of the job."""
    problem = None
    try:
        yield
    except UserError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next(filter(None, problems), None)
    if first is not None:
        raise UserError(first)


class GlobalState:
    """Reductions over the ranks of megatron-core's own groups; made by all ranks of the job at the same time.

    Args:
        pipeline: the pipeline-parallel group.
        groups: those that the optimizer reduces its statistics over; None is all ranks.
        device: of the figures.

    Raises:
        UserError: ranks with other numbers of groups.
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
                "all ranks must have the same kinds of parameters (dense, experts) to validate a step together; got "
                f"{[count for _, count in pipeline_ranks]} kinds; leave out --zero-bubble-post-validation"
            )
        for group in groups:
            group = dist.group.WORLD if group is None else group
            assert group is not None
            members = dist.get_process_group_ranks(group)
            of_stage = [rank for rank in members if pipeline_ranks[rank][0] == pipeline.rank()]
            self._whole.append(new_group(members, dist.get_backend(group), timeout))
            # One NCCL communicator works off its reductions one after the other, and a flag has no bits to keep.
            self._flags.append(new_group(members, "gloo", timeout))
            self._stage.append(new_group(of_stage, "gloo", timeout))

    def reduce(self, index: int, figure: float, op: Any) -> Reduction:
        """Start reducing an fp32 figure over the ranks of the group ``index``."""
        return Reduction(torch.tensor([figure], dtype=torch.float32, device=self._device), op, self._whole[index])

    def reduce_flag(self, index: int, flag: bool) -> Reduction:
        """Start finding out whether a rank of the group ``index`` has it set: more than 0."""
        return Reduction(torch.tensor([float(flag)]), dist.ReduceOp.MAX, self._flags[index])

    def of_stage(self, index: int, figures: Sequence[float]) -> list[float]:
        """The sums over the ranks of the group ``index`` that hold the same stages, equal on all of them."""
        total = torch.tensor(figures, dtype=torch.float64)
        dist.all_reduce(total, group=self._stage[index])
        return total.tolist()
