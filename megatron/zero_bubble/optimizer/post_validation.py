"""Post-validation: an optimizer that steps first and validates later, without a synchronization of the pipeline.

Megatron's optimizer reduces the gradient norm over the whole pipeline before it clips and steps, so every rank waits
for the slowest. Here (arXiv 2401.10241, section 4) a rank steps on the partial state of its own stage and the previous
ranks, which for nearly every step shows that the step is neither skipped nor clipped. The global state arrives in the
next iteration, before the rank's first backward. A step that it rejects is undone and repeated as in a synchronous
optimizer, and the forwards that ran on the wrong weights run again.

The repetition is exact, because gradients are zeroed only after the validation, a step that would clip is never taken
ahead (clipping changes gradients in place), and the overwritten state is kept until the validation.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron.zero_bubble.optimizer.global_state import Chain, GlobalState, refused_together
from megatron.zero_bubble.optimizer.rollback import Optimizers, Rollback, SnapshotRollback
from megatron.zero_bubble.optimizer.step import Outcome, PartialState, Step, StepMode, Tally
from megatron.zero_bubble.optimizer.step_options import StepOptions
from megatron.zero_bubble.optimizer.surface import OptimizerSurface, check_optimizers
from megatron.zero_bubble.platforms.device import device_of
from megatron.zero_bubble.runtime.transport import new_group

_NEAR = 0.8
"""The next step is synchronous if a recent norm reaches this fraction of the clipping threshold."""

_RECENT = 4
"""Number of recent norms."""


class PostValidatedOptimizer(OptimizerSurface):
    """Wraps a megatron-core optimizer so that steps can be taken before they are validated.

    ``step`` is the optimizer's own synchronous step, so this object can replace the optimizer. ``step_ahead`` leaves a
    step pending: the passes of the next iteration, or ``settle``, make it final, and ``take_outcomes`` then returns its
    outcome. While a step is pending, parameters and states must not be accessed: methods that a job calls on all ranks
    settle the step first, and every other access raises UserError (``OptimizerSurface``).

    The constructor is a collective call of all ranks of the job.

    Args:
        optimizer: the result of ``get_megatron_optimizer``.
        chunks: the model chunks of this rank.
        pipeline: the pipeline-parallel group.
        rollback: makes the object that undoes steps.
        replicas: ranks of the same stage that exchange tokens in their forwards, so that these must be repeated
            together.
        timeout: maximum time to wait for figures of another rank.

    Raises:
        UserError: the optimizer's steps cannot be undone or validated later.

    Attributes:
        counts: number of steps of this rank by mode.
        on_settle: called by ``settle``, to settle messages that the pipeline still has in flight.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        chunks: Sequence[DistributedDataParallel],
        pipeline: dist.ProcessGroup,
        rollback: Callable[[Optimizers], Rollback] = SnapshotRollback,
        replicas: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._chunks = list(chunks)
        self._parts = list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        steppers = [part.optimizer for part in self._parts if not part.is_stub_optimizer]
        with refused_together():
            check_optimizers(self._parts)
            self._rollback = rollback(steppers)
        self._options = StepOptions(steppers)
        groups = [part.get_grad_stats_parallel_group() for part in self._parts]
        self._one_norm = len(groups) == 1 or optimizer.grads_states_parallel_group_is_shared()
        self._alone = new_group([dist.get_rank()], dist.get_backend(pipeline), timeout)
        self._state = GlobalState(pipeline, groups, device_of(chunks), timeout)
        self._chain = Chain(pipeline, timeout)
        members = [dist.get_rank()] if replicas is None else dist.get_process_group_ranks(replicas)
        self._replicas = new_group(members, "gloo", timeout)
        self._pending: Step | None = None
        self._wrong = False
        self._zero_later: Callable[[], None] | None = None
        self._norms: deque[float] = deque(maxlen=_RECENT)
        self._outcomes: list[Outcome] = []
        self.on_settle: Callable[[], None] = lambda: None
        self.counts: Counter[str] = Counter()

    # Called by a training loop.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of optimizer and model; delayed while a pending step may still need them."""
        if self._pending is not None and self._pending.can_be_wrong:
            self._zero_later = functools.partial(self.zero_grad, set_to_none)
            return
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad(set_to_none)

    def step(self) -> tuple[bool, float | None, float | None]:
        """Run the optimizer's own step; returns (updated, gradient norm, number of zeros).

        The step is final and adds nothing to ``take_outcomes``.
        """
        self._settle_step()
        updated, norm, zeros = self._optimizer.step()
        if updated and norm is not None:
            self._norms.append(norm)
        self.counts[StepMode.SYNCHRONOUS.value] += 1
        return updated, norm, zeros

    @torch.no_grad()
    def step_ahead(self) -> None:
        """Take a step on the partial state if possible; ``take_outcomes`` returns its outcome once it is final."""
        self._settle_step()
        step, known = self._begin()
        self._options.keep()
        self._decide(step, known)
        if step.how is StepMode.SYNCHRONOUS:
            self._complete(step)
        else:
            self._pending = step

    def take_outcomes(self) -> list[Outcome]:
        """The outcomes of steps that became final since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def settle(self) -> None:
        """Make the last step final. All ranks must call it before weights or states are saved, evaluated or dropped."""
        self._settle_step()
        self._chain.settle()
        self.on_settle()

    def tally(self) -> Tally:
        """Count the final steps so far by mode. A collective call of all ranks."""
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, self.counts)
        waited, repeated = (
            sum(of_rank[how.value] for of_rank in counts) for how in (StepMode.WAITED, StepMode.REPEATED)
        )
        return Tally(counts[0], waited, repeated, len(counts))

    def summary(self) -> str:
        """A log message with the number of steps by mode. A collective call of all ranks."""
        tally = self.tally()
        words = [f"{number} {how}" for how, number in tally.first.most_common()]
        return (
            f"{tally.steps} optimizer steps, on the first rank {', '.join(words) or 'none'}; {tally.repeated} repeated "
            f"and {tally.waited} waited for on all {tally.num_ranks} ranks"
        )

    # Called by the pipeline.

    @property
    def is_pending(self) -> bool:
        """Whether the last step is not final."""
        return self._pending is not None

    @property
    def may_run_again(self) -> bool:
        """Whether validation may find that the forwards before it ran on wrong weights."""
        return self._pending is not None and self._pending.can_be_wrong and self._pending.someone_ahead

    @property
    def num_in_flight(self) -> int:
        """Number of steps and figures that ``settle`` would wait for."""
        return int(self.is_pending) + self._chain.num_in_flight

    def before_forwards(self) -> None:
        """Take a delayed step now, because the forwards need its weights; waits for the global state."""
        if self._pending is not None and self._pending.how is StepMode.WAITED:
            self._complete(self._pending)

    def validate(self) -> bool:
        """Wait for the global state and make the last step final. Returns False if forwards ran on wrong weights."""
        self._complete_pending()
        wrong, self._wrong = self._wrong, False
        return not wrong

    # Implementation of the step.

    def _settle_step(self) -> None:
        """Make the last step final outside the passes, when no forward has run since the step."""
        self._complete_pending()
        self._wrong = False

    def _complete_pending(self) -> None:
        if self._pending is not None:
            self._complete(self._pending)

    def _begin(self) -> tuple[Step, PartialState]:
        """Prepare the gradients and start to reduce their figures; the second result is the state of this stage."""
        with self._reducing_alone():
            found = [_prepare(part) for part in self._parts]
            norms = self._own_norms()
            zeros = self._own_zeros()
        squares = [float(norm) ** 2 for norm in norms]
        scaled = [i for i, part in enumerate(self._parts) if getattr(part, "grad_scaler", None)]
        step = Step(
            [self._state.reduce_flag(i, found[i]) for i in scaled],
            [self._state.reduce(i, square, dist.ReduceOp.SUM) for i, square in enumerate(squares)],
            [self._state.reduce(i, count, dist.ReduceOp.SUM) for i, count in enumerate(zeros)],
            can_be_wrong=self._optimizer.config.clip_grad > 0 or bool(scaled),
        )
        unsafe = step.can_be_wrong and not self._near_the_clip() and not self._rollback.is_safe()
        known = PartialState()
        for i, infinite in enumerate(found):
            square = squares[i] if i < len(squares) else 0.0
            figures = self._state.of_stage(i, [square, infinite, unsafe])
            known.add(figures[0], found_inf=figures[1] > 0, waits=figures[2] > 0)
        return step, known

    @contextlib.contextmanager
    def _reducing_alone(self) -> Iterator[None]:
        """Context in which the optimizer's own reductions include only this rank."""
        missing = object()
        before = [part.__dict__.get("grad_stats_parallel_group", missing) for part in self._parts]
        for part in self._parts:
            part.grad_stats_parallel_group = self._alone
        try:
            yield
        finally:
            for part, group in zip(self._parts, before, strict=True):
                if group is missing:
                    del part.grad_stats_parallel_group
                else:
                    part.grad_stats_parallel_group = group

    def _own_norms(self) -> list[float]:
        """The norm of this rank's gradients; one norm per part if megatron-core reduces parts over different ranks."""
        if self._one_norm:
            return [self._optimizer.get_grad_norm()]
        return [part.get_grad_norm() or 0.0 for part in self._parts]

    def _own_zeros(self) -> list[float]:
        if not self._optimizer.config.log_num_zeros_in_grad:
            return []
        return [self._optimizer.count_zeros()] if self._one_norm else [part.count_zeros() for part in self._parts]

    def _decide(self, step: Step, known: PartialState) -> None:
        """Decide on the mode from the partial state, pass the state on, and step if the mode is ``AHEAD``."""
        before = self._chain.receive(4)
        if before is not None:
            known.add(float(before[0]), found_inf=bool(before[1]), waits=bool(before[2]))
        clip = self._optimizer.config.clip_grad
        exceeds = clip > 0 and not clip / (math.sqrt(known.square) + 1.0e-6) >= 1.0  # NaN does
        reasons = ((StepMode.SYNCHRONOUS, self._near_the_clip()), (StepMode.SKIPPED, known.found_inf))
        for how, holds in (*reasons, (StepMode.WAITED, known.waits or exceeds)):
            if step.how is StepMode.AHEAD and self._any_replica(holds):
                step.how = how
        # Ranks after a waiting rank wait too, so the first rank determines whether any rank is ahead.
        known.waits = step.how is StepMode.WAITED
        step.someone_ahead = step.how is StepMode.AHEAD if before is None else bool(before[3])
        figures = [known.square, known.found_inf, known.waits, step.someone_ahead]
        self._chain.send(torch.tensor(figures, dtype=torch.float64))
        if step.how is StepMode.AHEAD:
            if step.can_be_wrong:
                self._rollback.keep()
            self._optimizer.step_with_ready_grads()
            self._options.stepped()

    def _any_replica(self, holds: bool) -> bool:
        """Whether ``holds`` is true on any replica; replicas must decide alike, but their norms may differ in a bit."""
        if self._replicas.size() == 1:
            return holds
        flag = torch.tensor([float(holds)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, self._replicas)
        return flag.item() > 0

    def _near_the_clip(self) -> bool:
        """Whether this step is likely to be clipped, judged by the recent norms, which are the same on all ranks."""
        clip = self._optimizer.config.clip_grad
        return clip > 0 and not (self._norms and all(norm < _NEAR * clip for norm in self._norms))

    @torch.no_grad()
    def _complete(self, step: Step) -> None:
        """Wait for the global state and make a step final: keep, repeat, take or skip it."""
        found = [reduction.wait() > 0 for reduction in step.found_inf]
        norm = self._norm([reduction.wait() for reduction in step.squares])
        zeros = sum(reduction.wait() for reduction in step.zeros) if step.zeros else None
        clip = self._optimizer.config.clip_grad
        updated = not any(found)
        assert step.how is not StepMode.SKIPPED or not updated, "a rank skips only if a gradient is infinite"
        wrong = self._any_replica(not updated or (clip > 0 and clip / (norm + 1.0e-6) < 1.0))
        if step.how is StepMode.AHEAD and wrong:
            step.how = StepMode.REPEATED
            with self._options.of_step():
                self._undo(norm, repeat=updated)
        elif step.how is not StepMode.AHEAD and updated:
            with self._options.of_step():
                self._clip_and_step(norm, clip)
        self._rollback.forget()
        if updated:
            self._norms.append(norm)
        for part, infinite in zip(self._scaled(), found, strict=True):
            part.grad_scaler.update(infinite)
        self._pending = None
        self._wrong = step.someone_ahead and wrong
        self.counts[step.how.value] += 1
        zero, self._zero_later = self._zero_later, None
        if zero is not None:
            zero()
        reported = (norm if self._reports_norm else None, zeros) if updated else (None, None)
        self._outcomes.append(Outcome(updated, *reported, self.get_loss_scale().item()))

    def _scaled(self) -> list[Any]:
        """The optimizers in ``_parts`` with a loss scale."""
        return [part for part in self._parts if getattr(part, "grad_scaler", None)]

    def _norm(self, squares: list[float]) -> float:
        """The norm of all gradients, rounded as in megatron-core."""
        norms = [square ** (1.0 / 2.0) for square in squares]
        return norms[0] if self._one_norm else math.sqrt(sum([norm**2 for norm in norms]))

    @property
    def _reports_norm(self) -> bool:
        return isinstance(self._optimizer, ChainedOptimizer) or self._optimizer.config.clip_grad > 0

    def _clip_and_step(self, norm: float, clip: float) -> None:
        for part in self._parts:
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and clip > 0:
                clip_grad_by_total_norm_fp32(
                    parameters, clip, norm, part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                )
        self._optimizer.step_with_ready_grads()

    def _undo(self, norm: float, repeat: bool) -> None:
        """Undo the step; then repeat it with clipping, or restore the previous weights if ``repeat`` is False."""
        clip = self._optimizer.config.clip_grad
        gathered = [chunk for chunk in self._chunks if chunk.ddp_config.use_distributed_optimizer]
        for chunk in gathered:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)  # waits for gathers in flight
        self._rollback.undo()
        if repeat:
            self._clip_and_step(norm, clip)
        else:
            for part in self._parts:
                if not part.is_stub_optimizer and hasattr(part, "_copy_main_params_to_model_params"):
                    part._copy_main_params_to_model_params()
        for chunk in gathered:
            if chunk.ddp_config.overlap_param_gather or not repeat:
                chunk.start_param_sync(force_sync=True)


def _prepare(part: MegatronOptimizer) -> bool:
    """Run ``prepare_grads`` of one optimizer without changing its loss scale; True if a gradient is infinite."""
    scaler = getattr(part, "grad_scaler", None)
    before = scaler.state_dict() if scaler else None
    found_inf = part.prepare_grads()
    if scaler:
        scaler.load_state_dict(before)
    return found_inf
