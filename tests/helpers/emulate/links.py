"""Links with latency, and collectives, on the virtual clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.ir import Message, Op, Plan
from megatron.zero_bubble.core.ir.collectives import AllGather, Collective, Finish, Spread, Sum
from megatron.zero_bubble.engine.runtime.collectives import collective_kinds
from megatron.zero_bubble.engine.runtime.groups import group_beside_passes
from megatron.zero_bubble.engine.runtime.handler import Awaited, Handler
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.clock import VirtualClock


class VirtualLinks:
    """A transport that adds the latency of a link to its messages: the first element of a tensor is the time at which
    it was produced, and after arrival the time at which it arrived.
    """

    def __init__(self, transport: Transport, costs: PassCosts) -> None:
        self._transport, self._costs = transport, costs
        self.rank, self.send, self.settle = transport.rank, transport.send, transport.settle

    def post(self, message: Message, buffer: torch.Tensor) -> Awaited:
        """As ``Transport.post``."""
        return _Late(self._transport.post(message, buffer), self._costs.comm(*message.channel))


class _Late(Awaited):
    def __init__(self, receive: Awaited, ms: float) -> None:
        self._receive, self._ms = receive, ms

    def wait(self, needed_by: object) -> torch.Tensor:
        tensor: torch.Tensor = self._receive.wait(needed_by)
        tensor[0] += self._ms
        return tensor


class VirtualCollectives:
    """Collectives on virtual clocks: the ranks exchange the times at which they start them, in a group per kind.

    Args:
        group: the ranks of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._groups: dict[str, dist.ProcessGroup] = {}

    def open(self, plan: Plan) -> None:
        """Make the groups that are missing. A collective call of all ranks of the job."""
        for kind in sorted(collective_kinds(plan) - self._groups.keys()):
            self._groups[kind] = group_beside_passes(self._group)

    @contextmanager
    def handlers(self, plan: Plan, costs: PassCosts, clock: VirtualClock) -> Iterator[dict[type[Op], Handler]]:
        """Context with the handlers of the collectives of one iteration, which are complete at its end."""
        exchanges: list[_ExchangedTimes] = []

        def start(op: Collective, inputs: Sequence[torch.Tensor]) -> list[_ExchangedTimes]:
            ready_ms = max((float(tensor[0]) for tensor in inputs), default=0.0)
            end = clock.occupy(op, ready_ms, op.duration_ms(costs, plan.schedule.slices))
            exchanges.append(_ExchangedTimes(end, op.rank, self._groups[op.lane], costs))
            return exchanges[-1:] * len(op.effects(plan.schedule.flow).gives)

        yield {Spread: start, AllGather: start, Sum: start, Finish: lambda _op, _inputs: None}
        for exchange in exchanges:
            exchange.wait("end")

    def close(self) -> None:
        """Destroy the groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


class _ExchangedTimes(Awaited):
    """The result of a collective: the time at which it is complete, from the times at which the ranks started it.

    Args:
        end_ms: when this rank's part ends.
        group: all ranks of the pipeline; the collectives of a group run in the same order on all of them.
    """

    def __init__(self, end_ms: float, rank: int, group: dist.ProcessGroup, costs: PassCosts) -> None:
        self._rank, self._costs = rank, costs
        self._ends = [torch.zeros(1, dtype=torch.float64) for _ in range(group.size())]
        self._work = dist.all_gather(self._ends, torch.tensor([end_ms], dtype=torch.float64), group, async_op=True)

    def wait(self, needed_by: object) -> torch.Tensor:
        self._work.wait()
        arrivals = (end.item() + self._costs.comm(source, self._rank) for source, end in enumerate(self._ends))
        return torch.tensor([max(arrivals)], dtype=torch.float64)
