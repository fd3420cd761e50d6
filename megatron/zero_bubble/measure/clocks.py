"""One clock for the ranks of a group: how far each rank's host clock is ahead of the first rank's.

The ranks of one host read one clock (``time.perf_counter`` is the monotonic clock of the system), so their offset is 0,
exactly. Across hosts the ranks gather each other's times a few times over. Nobody leaves a gather before everybody has
entered it, so with ``enter`` and ``exit`` read on each rank's own clock, every gather bounds the offset both ways::

    enter - exit of the first  <=  offset  <=  exit - enter of the first

The tightest bounds of several gathers are kept, the middle of what they leave is taken, and half its width is an error
that is proved, not estimated: it is about the time that the fastest gather took. It holds at the time of the
measurement; the clocks of two hosts drift apart, so each recorded iteration measures anew.
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
"""When a rank entered a gather and when it left, in seconds of its own clock."""


class Offset(NamedTuple):
    """Seconds by which a clock is ahead of the first rank's, give or take ``error_s``."""

    seconds: float = 0.0
    error_s: float = 0.0


def offset_between(own: Sequence[Visit], first: Sequence[Visit]) -> Offset:
    """The offset that the same gathers, seen by a rank and by the first, leave possible."""
    low = max(enter - first_exit for (enter, _), (_, first_exit) in zip(own, first, strict=True))
    high = min(own_exit - enter for (_, own_exit), (enter, _) in zip(own, first, strict=True))
    return Offset((low + high) / 2, (high - low) / 2)


class GroupClock:
    """Measures the offsets of a group's ranks; every rank makes one, and measures, at the same time.

    Args:
        group: the first rank of it has the clock that counts.
        clock: seconds on this host.
        host: equal on two ranks exactly when they read one clock.
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
        """The ranks meet, and this one's offset; a collective call."""
        if self._is_shared:
            dist.barrier(group=self.group)
            return Offset()
        visits: list[Visit] = []
        told: list[list[Visit]] = []
        for _ in range(_ROUNDS + 1):  # the last one tells when the ranks left the one before
            enter = self._clock()
            told.append(self._exchange((enter, visits[-1][1] if visits else 0.0)))
            visits.append((enter, self._clock()))
        first = [(now[0][0], later[0][1]) for now, later in pairwise(told)]
        return Offset() if self._is_the_first else offset_between(visits[:-1], first)

    def _exchange(self, times: tuple[float, float]) -> list[Visit]:
        """Every rank's pair of times, float64, shape (2,); the host waits for them."""
        rows = [torch.empty(2, dtype=torch.float64, device=self._device) for _ in range(self.group.size())]
        dist.all_gather(rows, torch.tensor(times, dtype=torch.float64, device=self._device), group=self.group)
        return [(enter, left) for enter, left in torch.stack(rows).tolist()]


def _host() -> str:
    """The boot of the system that runs this process: containers of one machine share it, and its monotonic clock."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else str(uuid.getnode())
