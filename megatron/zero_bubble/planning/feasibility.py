"""What a run can run: the question that every search, every row of advice and every switch of schedules asks.

A schedule that cannot be lowered and proved for the GPUs of a job is no plan for it, however short it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from megatron.zero_bubble.core.analysis.memory import host_peaks
from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.costs.units import format_bytes
from megatron.zero_bubble.core.errors import PlanError, Refusal, UserError, attempted
from megatron.zero_bubble.core.ir import Plan, Schedule
from megatron.zero_bubble.core.ir.queues import HardwareQueues
from megatron.zero_bubble.core.plan import (
    NOTHING,
    Additions,
    PostReceives,
    plan_of,
    plan_of_evaluation,
    prove,
    prove_for_queues,
)
from megatron.zero_bubble.core.plan.nccl import Ctas, collective_ctas
from megatron.zero_bubble.core.plan.offload import select_longest

ONE_QUEUE = HardwareQueues(1, "one hardware queue per GPU", "CUDA_DEVICE_MAX_CONNECTIONS is 1", "32")
"""The fewest that a GPU has: what is proved for them ends with any number."""
LESS_MEMORY = 0.85
"""Where an order of passes needs several hardware queues, one within so much of its memory is tried: the less is under
way at a time, the less waits for each other. Within the least memory, microbatches run one after the other.
"""


@dataclass(frozen=True)
class Feasibility:
    """What a run has for its plans, and what it adds to them.

    Attributes:
        queues: of its GPUs; None for a run without NCCL, in which no transfer holds up others.
        post_receives: see ``communicate``; ``late`` where headers come before messages.
        post_validation: whether an iteration validates the optimizer step before it.
        moved: the share of forwards that move to host memory.
        host_memory: bytes per rank for what moves; None for no limit.
        ctas: those of NCCL.
        num_multiprocessors: of a GPU; None if unknown.
    """

    queues: HardwareQueues | None = None
    post_receives: PostReceives = "early"
    post_validation: bool = False
    moved: float = 0.0
    host_memory: int | None = None
    ctas: Ctas = field(default_factory=Ctas)
    num_multiprocessors: int | None = None

    def check(self, schedule: Schedule, added: Additions = NOTHING, memory: PassMemory | None = None) -> Plan:
        """Lower and prove a schedule as the run does, for training and for evaluations; return the plan of training.

        Args:
            added: what moves to host memory, by default what the run itself selects, and how weights are sharded.
            memory: of microbatches, in bytes; None if unknown.

        Raises:
            UserError: why it cannot run.
        """
        validate(schedule)
        moves = added.moves or (tuple(select_longest(schedule, self.moved)) if self.moved else ())
        own = {"post_receives": self.post_receives, "post_validation": self.post_validation, "moves": moves}
        added = replace(added, **own)  # type: ignore[arg-type]
        proofs = _Proof(self.queues), _Proof(self.queues)
        training = plan_of(schedule, added, proofs[0])
        plan_of_evaluation(schedule, added, proofs[1])
        if self.queues is not None:
            collective_ctas(self.ctas, training, self.num_multiprocessors)
        for proof in proofs:
            if proof.refused is not None:
                raise proof.refused
        if moves and memory is not None and self.host_memory is not None:
            self._check_host(max(host_peaks(training, memory)))
        return training

    def _check_host(self, peak: float) -> None:
        if not within(peak, self.host_memory):
            raise UserError(
                f"what moves must fit into {format_bytes(self.host_memory or 0)} of host memory per rank; got "
                f"{format_bytes(peak)}; raise --zero-bubble-host-memory, or move less with --zero-bubble-offload"
            )

    def refusal(self, schedule: Schedule, added: Additions = NOTHING, memory: PassMemory | None = None) -> str | None:
        """Why a schedule cannot run, in one sentence; None if it can. The arguments are those of ``check``."""
        refused = attempted(partial(self.check, schedule, added, memory))
        return refused.reason.splitlines()[0] if isinstance(refused, Refusal) else None


@dataclass
class _Proof:
    """Proves plans for the hardware queues of a GPU first, from which a proof for a queue per channel follows.

    Attributes:
        refused: why the last plan that was proved needs more hardware queues; None if it does not.
    """

    queues: HardwareQueues | None
    refused: PlanError | None = None

    def __call__(self, plan: Plan) -> None:
        """Prove a plan for a queue per channel; keep why it needs more than those of the GPU.

        Raises:
            PlanError: it cannot run with any number of queues.
        """
        own, self.refused = self.queues, None
        try:
            if own is not None and prove_for_queues(plan, own.number, own.setting, own.several):
                return
        except PlanError as error:
            self.refused = error
        prove(plan)


ANY_RUN = Feasibility()
"""A run without NCCL, options or limits, in which every schedule can run that can be lowered."""
