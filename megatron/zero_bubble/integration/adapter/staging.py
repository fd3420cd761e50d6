"""Iterations that may load kernels send everything between pipeline ranks through host memory.

CUDA loads a kernel when it is launched for the first time, and the host may wait there until everything on the GPU has
ended. A receive of NCCL ends when its message arrives, and this may need what the waiting host has not launched yet;
so may a broadcast. Triton's kernels, which are compiled when they are needed, cannot be loaded any earlier.

Therefore an iteration in which a pipeline does something for the first time uses gloo: messages are staged in host
memory, and collectives run on threads, as where ranks share a GPU. Then nothing on a GPU waits for another rank, every
wait for an idle GPU ends, and the hosts wait for each other only where the proof of the plan says so. Messages have the
same bits; sums over a divided vocabulary are added in gloo's order.

Collectives of other groups need no such care: gathers and reductions of sharded units, and those of tensor, context,
expert and data parallelism. Their ranks run the same steps in the same order, so the host that is behind waits only for
what all of them have started.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.engine.platforms.streams import Lane
from megatron.zero_bubble.engine.runtime.backends import is_nccl
from megatron.zero_bubble.engine.runtime.collectives import Lanes, collective_kinds
from megatron.zero_bubble.engine.runtime.groups import Directions, destroy, join, new_group, ranks_of
from megatron.zero_bubble.engine.runtime.transport import Transport


class Carriers(NamedTuple):
    """What moves values between the ranks of a pipeline in one iteration: messages, and collectives."""

    transport: Transport
    lanes: Lanes

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups of both."""
        return (*self.transport.groups, *self.lanes.groups)

    def rejoin(self) -> None:
        """Join all groups again, because the job has made them again within their wrappers."""
        self.transport.reopen()
        self.lanes.rejoin()


class Staging:
    """Staged messages and collectives, and what a pipeline has already done.

    The constructor is a collective call of all ranks of the job.

    Args:
        group: the ranks of the pipeline.
        make_lane: makes a lane on a thread.
        timeout: maximum time that a message may take; None is the job's.
    """

    def __init__(
        self, group: dist.ProcessGroup, make_lane: Callable[[], Lane], timeout: timedelta | None = None
    ) -> None:
        self._group = new_group(ranks_of(group), "gloo", timeout)
        transport = Transport(Directions.of(self._group, timeout), ())
        self._links = Carriers(transport, Lanes(self._group, make_lane, timeout))
        self._done: set[Hashable] = set()

    def open(self, plan: Plan) -> None:
        """Connect what ``plan`` uses. A collective call of all ranks of the job."""
        self._links.transport.open(plan.channels)
        self._links.lanes.open(collective_kinds(plan))

    def of(self, steps: Collection[Hashable], usual: Carriers) -> Carriers:
        """What the next iteration uses: ``usual``, unless some of its ``steps`` are new.

        All ranks of the pipeline must call this once per iteration, with the same steps.
        """
        is_new = not self._done.issuperset(steps)
        self._done.update(steps)
        return self._links if is_new else usual

    @property
    def transport(self) -> Transport:
        return self._links.transport

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self._group, *self._links.groups)

    def rejoin(self) -> None:
        """Join all groups again, because the job has made them again within their wrappers."""
        join(self._group)
        self._links.rejoin()

    def forget(self) -> None:
        """See ``Transport.forget``."""
        self._links.transport.forget()

    @property
    def num_in_flight(self) -> int:
        """Number of sends not yet settled; 0 between iterations."""
        return self._links.transport.num_in_flight

    def close(self) -> None:
        """Destroy the process groups; no message may be in flight."""
        self._links.lanes.close()
        self._links.transport.close()
        destroy(self._group)


def spins(backend: str) -> bool:
    """Whether messages of a backend occupy the GPU while they wait for the other rank."""
    return is_nccl(backend)


def steps_of(plan: Plan, forward_only: bool, parts: Collection[Hashable]) -> frozenset[Hashable]:
    """What an iteration with ``plan`` does that may need kernels of its own, whatever the number of microbatches.

    Args:
        parts: what parts add, such as moves to host memory, which is allocated when it is needed for the first time.
    """
    ops = {(type(op), *((work.kind, work.stage) for work in op.works)) for row in plan.stem.ops for op in row}
    return frozenset({(op, forward_only) for op in ops} | {plan.schedule.slices} | set(parts))
