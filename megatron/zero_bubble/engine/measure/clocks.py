"""A common clock for the ranks of a group: the offset of each rank's host clock from the first rank's.

Ranks on one host share a clock (``time.perf_counter`` is the system's monotonic clock), so their offset is exactly 0.
Ranks on different hosts gather each other's times several times. No rank leaves a gather before all have entered it, so
with ``enter`` and ``exit`` read on each rank's own clock, every gather bounds the offset on both sides::

    enter - exit of the first  <=  offset  <=  exit - enter of the first

The offset is the middle of the tightest bounds of all gathers, and its error is half their distance. This is a proved
bound, about as large as the duration of the fastest gather. It is valid at the time of the measurement; because host
clocks drift, each recorded iteration repeats the measurement.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 8

Visit = tuple[float, float]
"""The times when a rank entered and left a gather, in seconds of its own clock."""


class Offset(NamedTuple):
    """Seconds by which a clock is ahead of the first rank's; the absolute error is at most ``error_s``."""

    seconds: float = 0.0
    error_s: float = 0.0


def offset_between(own: Sequence[Visit], first: Sequence[Visit]) -> Offset:
    """The offset between a rank and the first rank, from their times of the same gathers."""
    low = max(enter - first_exit for (enter, _), (_, first_exit) in zip(own, first, strict=True))
    high = min(own_exit - enter for (_, own_exit), (enter, _) in zip(own, first, strict=True))
    return Offset((low + high) / 2, (high - low) / 2)


class GroupClock:
    """Measures the clock offsets of a group's ranks. The constructor is a collective call of the group.

    Args:
        group: process group; offsets are relative to the clock of its first rank.
        clock: returns seconds on this host.
        host: identifier that is equal on two ranks if and only if they share a clock.
    """

    def __init__(
        self, group: dist.ProcessGroup, clock: Callable[[], float] = time.perf_counter, host: str | None = None
    ) -> None:
        self.group = group
        self._clock = clock
        self._device = "cpu" if dist.get_backend(group) == "gloo" else "cuda"
        hosts = [""] * group.size()
        dist.all_gather_object(hosts, _host() if host is None else host, group=group)
        self._is_shared = len(set(hosts)) == 1
        self._is_the_first = hosts[group.rank()] == hosts[0]

    def measure(self) -> Offset:
        """Synchronize the ranks and return the offset of this rank. A collective call."""
        if self._is_shared:
            dist.barrier(group=self.group)
            return Offset()
        visits: list[Visit] = []
        gathered: list[list[Visit]] = []
        for _ in range(_ROUNDS + 1):  # the last gather exchanges the exit times of the one before
            enter = self._clock()
            gathered.append(self._exchange((enter, visits[-1][1] if visits else 0.0)))
            visits.append((enter, self._clock()))
        first = [(now[0][0], later[0][1]) for now, later in pairwise(gathered)]
        return Offset() if self._is_the_first else offset_between(visits[:-1], first)

    def _exchange(self, times: tuple[float, float]) -> list[Visit]:
        """Gather a pair of times from every rank (float64, shape (2,)); the host waits for the result."""
        rows = [torch.empty(2, dtype=torch.float64, device=self._device) for _ in range(self.group.size())]
        dist.all_gather(rows, torch.tensor(times, dtype=torch.float64, device=self._device), group=self.group)
        return [(enter, left) for enter, left in torch.stack(rows).tolist()]


def _host() -> str:
    """The boot ID of the system; containers on one machine share it, and also share its monotonic clock."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else str(uuid.getnode())
