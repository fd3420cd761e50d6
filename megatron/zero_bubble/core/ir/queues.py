"""The hardware queues of a GPU, which decide what a plan may wait for."""

from __future__ import annotations

from typing import NamedTuple


class HardwareQueues(NamedTuple):
    """How many queues bring the work of streams to a GPU. Streams that share one start in the order of the host.

    Attributes:
        number: of queues per GPU.
        what: the consequence, if there is one queue.
        setting: the variable and its value.
        several: the value with which transfers start independently; None where a job cannot choose it.
    """

    number: int
    what: str
    setting: str
    several: str | None
