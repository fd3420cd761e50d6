"""Offloading as a part of a pipeline; ``runtime.offload`` runs its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from megatron.zero_bubble.core.ir import Op, Schedule
from megatron.zero_bubble.core.plan.offload import MoveSelection, offload
from megatron.zero_bubble.engine.runtime.handler import Handler
from megatron.zero_bubble.engine.runtime.offload import Offloader
from megatron.zero_bubble.integration.adapter.part import IterationFacts, Joined, Part
from megatron.zero_bubble.integration.adapter.prepared import Lowering


class OffloadPart(Part):
    """Moves what forwards saved to host memory, and back.

    Args:
        select: what moves in a schedule; the same on all ranks.
        host_limit: most bytes of host memory of this rank; None for no limit.
        say: prints how much stayed on the device that was planned to move; None on all ranks but one.
    """

    def __init__(
        self, select: MoveSelection, host_limit: int | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self._select, self._host_limit, self._say = select, host_limit, say
        self._offloader: Offloader | None = None
        self._copying: list[Offloader] = []  # closed before their copies ended, which still use their memory

    def lowering(self, schedule: Schedule, forward_only: bool) -> Lowering | None:
        moves = () if forward_only else self._select(schedule)
        return Lowering(partial(offload, moves=moves), moves) if moves else None

    def connect(self, to: Joined) -> None:
        if self._offloader is None:
            host, lane = to.platform.host_memory(self._host_limit), to.platform.lane
            self._offloader = Offloader(to.saved, host, lane(), lane(), self._say)

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        if self._offloader is None or iteration.forward_only:
            yield
            return
        prepared = iteration.prepared
        self._offloader.expect(prepared.plan.executable(prepared.rank).ops)
        with self._offloader.iteration():
            yield

    def handlers(self, iteration: IterationFacts) -> Mapping[type[Op], Handler]:
        return {} if self._offloader is None else self._offloader.handlers(iteration.observer)

    @property
    def num_pending(self) -> int:
        return 0 if self._offloader is None else self._offloader.num_away

    @property
    def host_peak(self) -> int:
        """The most bytes of host memory in use so far."""
        return 0 if self._offloader is None else self._offloader.host_peak

    def close(self) -> None:
        offloader, self._offloader = self._offloader, None
        if offloader is not None and not offloader.close():
            self._copying.append(offloader)
