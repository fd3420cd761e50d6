"""Slots of CUDA graphs: which captured graph of a layer runs a microbatch, and how many must be captured.

A slot has graphs, and memory, of its own. So any order of passes that respects a plan is right: a replay writes only to
the slot of its microbatch, and the slot is used again when the microbatch has run its W (``core.plan.slots``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core import parallel_state

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Compute, Op, Pass, Plan, Schedule
from megatron.zero_bubble.core.plan.plan_of import plan_without_messages
from megatron.zero_bubble.core.plan.slots import Slots, slots
from megatron.zero_bubble.engine.runtime.handler import Handler
from megatron.zero_bubble.integration.adapter.part import Call, IterationFacts, Part

_Sizes = tuple[tuple[int, ...], ...]
"""For every rank, the number of slots of each of its stages."""


class GraphSlots(Part):
    """Tells graphed layers the slot of the running pass.

    Args:
        make_schedule: the schedule of a number of ranks and of microbatches.
    """

    def __init__(self, make_schedule: Callable[[int, int], Schedule]) -> None:
        self._make_schedule = make_schedule
        self._most_microbatches = 0
        self._captured: _Sizes | None = None
        self._plan: Plan | None = None
        self._slots: Slots = {}
        self._work: Pass | None = None

    def capture(self, num_microbatches: int) -> tuple[int, ...]:
        """Returns how many slots each stage of this rank needs in an iteration; more must not be needed later.

        It is called once for the decoder, and again for an encoder that has graphs, too.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        self._most_microbatches = max(num_microbatches, self._most_microbatches)
        plan = plan_without_messages(self._make_schedule(group.size(), self._most_microbatches))
        self._captured, self._plan = _sizes(plan), None
        return self._captured[group.rank()]

    @property
    def current(self) -> int:
        """The slot of the running pass."""
        work = self._work
        return 0 if work is None or work.stage not in self._slots else self._slots[work.stage][work.microbatch]

    def begin(self, call: Call) -> None:
        """See ``Part``.

        Raises:
            UserError: lengths that differ.
        """
        if self._captured is not None and call.lengths.differ:
            raise UserError(
                "CUDA graphs need microbatches of one length, because they are captured for it; got different lengths; "
                "pad them to one length, or set --cuda-graph-impl none"
            )

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        """See ``Part``.

        Raises:
            UserError: more slots are needed than were captured; on all ranks alike.
        """
        prepared = iteration.prepared
        if self._captured is not None and prepared.plan is not self._plan and not iteration.forward_only:
            self._check(self._captured, prepared.plan)
            self._plan, self._slots = prepared.plan, slots(prepared.plan, prepared.rank)
        try:
            yield
        finally:
            self._work = None

    def replacing(self, iteration: IterationFacts, basic: Mapping[type[Op], Handler]) -> Mapping[type[Op], Handler]:
        """See ``Part``. An evaluation keeps nothing, and so needs one slot."""
        if self._captured is None or iteration.forward_only:
            return {}
        return {Compute: partial(self._run, basic[Compute])}

    def _run(self, run: Handler, op: Any, inputs: Sequence[Any]) -> Any:
        self._work = op.work
        return run(op, inputs)

    def _check(self, captured: _Sizes, plan: Plan) -> None:
        for rank, (has, needs) in enumerate(zip(captured, _sizes(plan), strict=True)):
            if any(more > number for number, more in zip(has, needs, strict=True)):
                raise UserError(
                    "CUDA graphs are captured for the microbatches in flight of one batch size, and serve others with "
                    f"no more; on rank {rank}, stages have graphs for {_counts(has)} microbatches, and this iteration "
                    f"needs {_counts(needs)}; capture them with the number of "
                    "microbatches that needs most, or set --cuda-graph-impl none"
                )


def _sizes(plan: Plan) -> _Sizes:
    placement = plan.schedule.placement
    sizes = []
    for rank in range(placement.num_ranks):
        own = slots(plan, rank)
        sizes.append(tuple(max(own[stage]) + 1 for stage in placement.stages_of(rank)))
    return tuple(sizes)


def _counts(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
