"""What connects the ranks of a pipeline: messages and collectives, usual ones and those staged in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.plan.nccl import Ctas, collective_ctas
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.backends import is_nccl
from megatron.zero_bubble.engine.runtime.collectives import Lanes, collective_kinds
from megatron.zero_bubble.engine.runtime.groups import Directions, is_alive, job_timeout, torchs
from megatron.zero_bubble.engine.runtime.hosts import Hosts
from megatron.zero_bubble.engine.runtime.transport import Transport
from megatron.zero_bubble.engine.runtime.watchdog import Watchdog
from megatron.zero_bubble.integration.adapter.loss_reports import LossReportList, LossReports
from megatron.zero_bubble.integration.adapter.staging import Carriers, Staging, spins


class Connection:
    """The process groups of one pipeline, and what runs on them.

    The constructor and the methods that open something are collective calls of all ranks of the job.

    Args:
        group: the ranks of the pipeline.
        plan: the first plan, whose messages can be sent from now on.
        timeout: maximum time that a message may take; None is the job's.
        ctas: how many CTAs transfers of NCCL may take.
        say: prints that collectives take fewer; None to print nothing.

    Attributes:
        group: torch's group of the ranks of the pipeline.
        platform: that of the devices whose memory is sent.
        watchdog: with NCCL, follows the waits of the GPU; None if the host waits.
        reports: brings losses to the last rank; None if they are there in all plans so far.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: Plan,
        timeout: timedelta | None,
        ctas: Ctas,
        say: Callable[[str], None] | None,
    ) -> None:
        timeout = timeout or job_timeout()
        directions = Directions.of(group, timeout, ctas.message)
        self._group, self.group, self.platform = group, torchs(group), select(directions.device)
        self.watchdog = Watchdog(select("cuda"), timeout) if is_nccl(directions.backend) else None
        transport = Transport(directions, plan.channels, self.watchdog)
        most = collective_ctas(ctas, plan, self.platform.num_multiprocessors(), say)
        self._links = Carriers(transport, Lanes(group, self.platform.lane, timeout, most, self.watchdog))
        self._staging = Staging(group, self.platform.thread_lane, timeout) if spins(directions.backend) else None
        self._timeout = timeout
        self.reports: LossReports | None = None
        if self.watchdog is not None:
            self.watchdog.start()

    def follow(self, group: dist.ProcessGroup) -> bool:
        """Whether this still connects the ranks of ``group``; joins groups again that the job has made again.

        A collective call of all ranks of the job if ``group`` is not what it was. A job may have destroyed groups for a
        rollout and made them again, those of this connection too, in wrappers that stay (``groups.torchs``).
        """
        if self.reports is not None and not self.reports.is_connected:
            return False
        current = torchs(group)
        if current is self.group:
            return True
        own = (*self._links.groups, *(() if self._staging is None else self._staging.groups))
        if group is not self._group or not all(map(is_alive, own)):
            return False
        self.group = current
        self._links.rejoin()
        if self._staging is not None:
            self._staging.rejoin()
        return True

    def open_messages(self, plan: Plan) -> None:
        self._links.transport.open(plan.channels)

    def open_collectives(self, plan: Plan) -> None:
        """Connect everything else that ``plan`` uses. Replicas open the same kinds of collectives."""
        self._links.lanes.open(collective_kinds(plan))
        self._links.transport.check_streams()
        if self._staging is not None:
            self._staging.open(plan)

    def open_reports(self, wait: bool) -> None:
        """Connect the ranks for losses, unless they are; see ``LossReports``."""
        if self.reports is None:
            self.reports = LossReports(self._group, wait, self._timeout)

    def new_losses(self) -> list[Any]:
        return [] if self.reports is None else LossReportList()

    def deliver(self, losses: list[Any], holder: int, device: torch.device, trains: bool) -> list[Any]:
        """The ``losses`` of the rank ``holder`` on the last rank, if it is another; see ``LossReports``."""
        if self.reports is None or not isinstance(losses, LossReportList):
            return losses
        return self.reports.deliver(losses, holder, device, trains)

    def settle(self) -> None:
        """Wait until the last rank has the losses."""
        if self.reports is not None:
            self.reports.settle()

    def links(self, steps: Collection[Hashable]) -> Carriers:
        """What moves values in the next iteration, which does ``steps``; see ``Staging.of``."""
        return self._links if self._staging is None else self._staging.of(steps, self._links)

    @property
    def hosts(self) -> Hosts:
        """The hosts of the pipeline, which tell each other numbers over gloo."""
        return Hosts(self._links.transport if self._staging is None else self._staging.transport)

    @property
    def num_in_flight(self) -> int:
        """Number of sends not yet settled; 0 between iterations."""
        others = (each for each in (self._staging, self.reports) if each is not None)
        return self._links.transport.num_in_flight + sum(each.num_in_flight for each in others)

    def forget(self) -> None:
        """Release what is under way, because the iteration has failed; the groups must be ``cut``."""
        for each in (self._links.transport, self._staging, self.reports):
            if each is not None:
                each.forget()

    def close(self) -> None:
        """Stop the lanes and destroy the process groups."""
        self._links.lanes.close()
        if self._staging is not None:
            self._staging.close()
        self._links.transport.close()
        if self.reports is not None:
            self.reports.close()
