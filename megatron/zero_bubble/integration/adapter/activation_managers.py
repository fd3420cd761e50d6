"""Tells megatron-core's managers of saved activations, which follow the order of a schedule, what its own schedules do.

With ``moe_paged_stash`` (0.18 and newer), a manager keeps in pages what fused experts save for their backwards. It
records the order of forwards and backwards in the first training iteration. From the next one on, it fetches the pages
of the backward that follows by that order, which must stay the same. With ``fine_grained_activation_offloading``,
another one moves to host memory what some modules save, and brings it back in the order of Megatron's own schedules.
With one stage per rank, that is the order of the microbatches, as in every schedule; ``planning/job/options.py``
refuses several. W is in neither order: it holds what B has fetched.

Upstream: ``megatron.core.transformer.moe.paged_stash``, ``pipeline_parallel.fine_grained_activation_offload``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.integration.adapter.part import IterationFacts, Part
from megatron.zero_bubble.integration.adapter.versions import end_activation_offloading, paged_stash


class ActivationManagers(Part):
    """Tells the managers that an iteration begins or has ended, in models that have them.

    Args:
        say: prints that an order is recorded again; None on all ranks but one.
    """

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self._say = say
        self._recorded: Schedule | None = None

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        config, trains = iteration.call.step.config, not iteration.forward_only
        if getattr(config, "moe_paged_stash", False):
            stash = paged_stash()
            if trains:
                self._follow(iteration.prepared.schedule, stash.PagedStashManager.get_instance())
            stash.paged_stash_reset(enabled=trains, config=config)
        yield
        if getattr(config, "fine_grained_activation_offloading", False):
            end_activation_offloading(iteration.call.groups, trains)

    def _follow(self, schedule: Schedule, manager: Any) -> None:
        """Let the manager of pages record the order of a schedule that differs from the one before it."""
        if self._recorded not in (None, schedule):
            manager.release_stash_buffers()
            manager.__init__()  # the same object, to which others refer
            if self._say is not None:
                self._say(
                    "the paged stash of experts records its order again, because the schedule has changed; in this "
                    "iteration nothing is in pages"
                )
        self._recorded = schedule
