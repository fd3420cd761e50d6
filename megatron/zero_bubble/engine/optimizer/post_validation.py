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

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.optimizer.clip_forecast import ClipForecast
from megatron.zero_bubble.engine.optimizer.clipping import Clipping
from megatron.zero_bubble.engine.optimizer.global_state import DecidingRanks, GlobalState, RankChain, joined, split
from megatron.zero_bubble.engine.optimizer.loss_scale import LossScale
from megatron.zero_bubble.engine.optimizer.own_state import prepare, reducing_over
from megatron.zero_bubble.engine.optimizer.rollback import Optimizers, Rollback, SnapshotRollback
from megatron.zero_bubble.engine.optimizer.step import OptimizerStep, Outcome, PartialState, StepMode, Tally, Verdict
from megatron.zero_bubble.engine.optimizer.step_options import StepOptions
from megatron.zero_bubble.engine.optimizer.surface import OptimizerSurface, check_optimizers
from megatron.zero_bubble.engine.platforms.device import device_of
from megatron.zero_bubble.engine.runtime.groups import destroy, new_group
from megatron.zero_bubble.engine.runtime.refusals import refused_together

_NEGLIGIBLE = 1e-3
"""Probability of a clipped step up to which a step is taken ahead even if the schedule gains nothing from it."""


class PostValidatedOptimizer(OptimizerSurface):
    """Wraps a megatron-core optimizer so that steps can be taken before they are validated.

    ``step`` is the optimizer's own synchronous step, so this object can replace the optimizer. ``step_ahead`` leaves a
    step pending: the passes of the next iteration, or ``settle``, make it final, and ``take_outcomes`` then returns its
    outcome. While a step is pending, parameters and states must not be accessed: methods that a job calls on all ranks
    settle the step first, and every other access raises UserError (``OptimizerSurface``). So does ``state_dict`` of the
    model chunks.

    The constructor is a collective call of all ranks of the job.

    Args:
        optimizer: the result of ``get_megatron_optimizer``.
        chunks: the model chunks of this rank; ``pipeline`` is the pipeline-parallel group.
        rollback: makes the object that undoes steps.
        replicas: ranks of the same stage that exchange tokens, and so must repeat their forwards together.
        timeout: maximum time to wait for figures of another rank.

    Raises:
        UserError: the optimizer's steps cannot be undone or validated later.

    Attributes:
        counts: number of steps of this rank by mode.
        break_even: the probability of a clipped step at which stepping ahead gains as much time as it loses; the
            pipeline sets it for the schedule of each iteration (``analysis.period.break_even``).
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
            check_optimizers([optimizer, *self._parts])
            self._rollback = rollback(steppers)
        for one in (optimizer, *self._parts):
            one.config.barrier_with_L1_time = False  # ranks do not step together: such a barrier would never end
        self._options = StepOptions(steppers)
        groups = [part.get_grad_stats_parallel_group() for part in self._parts]
        self._one_norm = len(groups) == 1 or optimizer.grads_states_parallel_group_is_shared()
        self._alone = new_group([dist.get_rank()], dist.get_backend(pipeline), timeout)
        self._state = GlobalState(pipeline, groups, device_of(chunks), timeout)
        self._chain = RankChain(pipeline, timeout)
        self._replicas = DecidingRanks(replicas, timeout)
        self._pending: OptimizerStep | None = None
        self._wrong = False
        self._zero_later: list[Callable[[], object]] = []
        self._forecast = ClipForecast()
        self._clipping = Clipping(optimizer, self._parts, device_of(chunks))
        self._loss_scale = LossScale()
        self._outcomes: list[Outcome] = []
        self._stepped = self._closed = False
        self.break_even = 0.5
        self.on_settle: Callable[[], None] = lambda: None
        self.counts: Counter[str] = Counter()
        for chunk in self._chunks:
            for module in chunk.modules():  # checkpoints ask single modules for their state as well
                module.register_state_dict_pre_hook(self._refuse_state_dict)

    # Called by a training loop.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of the optimizer; delayed while a pending step may still need them."""
        self.zero(functools.partial(self._optimizer.zero_grad, set_to_none))

    def zero(self, zero: Callable[[], object]) -> None:
        """Call ``zero``, which zeroes gradients: now, or when the pending step no longer needs them."""
        if self._pending is not None and self._pending.can_be_wrong:
            self._zero_later.append(zero)
        else:
            zero()

    def steps(self, chunk: DistributedDataParallel) -> bool:
        """Whether this optimizer steps the parameters of ``chunk``."""
        return any(chunk is own for own in self._chunks)

    def step(self) -> tuple[bool, float | None, float | None]:
        """Run the optimizer's own step; returns (updated, gradient norm, number of zeros).

        The step is final and adds nothing to ``take_outcomes``.

        Raises:
            UserError: a step of the same iteration was already taken ahead.
        """
        self._check_first_step()
        updated, norm, zeros = self._optimizer.step()
        if updated and norm is not None:
            self._forecast.add(norm)
        self.counts[StepMode.SYNCHRONOUS.value] += 1
        return updated, norm, zeros

    @torch.no_grad()
    def step_ahead(self, of: Any = None) -> None:
        """Take a step on the partial state if possible; ``take_outcomes`` returns its outcome once it is final.

        Args:
            of: anything; the outcome of the step has it as ``of``.

        Raises:
            UserError: a step of the same iteration was already taken ahead, or the schedule is no longer applied.
        """
        self._check_first_step()
        if self._closed:
            raise UserError(
                "post-validation no longer holds for this optimizer: revert() was called, or another one was wrapped; "
                "call step() of the job's own optimizer, or apply() again and wrap that optimizer"
            )
        step, known = self._begin(of)
        self._options.keep()
        self._stepped = True
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
        self._complete_pending()
        self._wrong = False  # no forward has run since the step
        self._chain.settle()
        self.on_settle()
        if self._closed:
            self.close()

    def tally(self) -> Tally:
        """Count the final steps so far by mode. A collective call of all ranks."""
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, self.counts)
        waited, repeated = (sum(of[how.value] for of in counts) for how in (StepMode.WAITED, StepMode.REPEATED))
        return Tally(counts[0], waited, repeated, len(counts))

    # Called by the pipeline.

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    @property
    def may_run_again(self) -> bool:
        """Whether validation may find that the forwards before it ran on wrong weights."""
        return self._pending is not None and self._pending.can_be_wrong and self._pending.someone_ahead

    @property
    def num_in_flight(self) -> int:
        """Number of steps and figures that ``settle`` would wait for."""
        return int(self.is_pending) + self._chain.num_in_flight

    def begin_passes(self) -> None:
        """Called before the passes of a training iteration, whose gradients the next step is for."""
        self._stepped = False

    def before_forwards(self) -> None:
        """Take a delayed step now, because the forwards need its weights; waits for the global state."""
        if self._pending is not None and self._pending.how is StepMode.WAITED:
            self._complete(self._pending)

    def is_right(self) -> bool:
        """Wait for the global state. Returns False if forwards ran on wrong weights, which ``validate`` corrects.

        Launches nothing that could wait for messages in flight, as a first undoing could (``adapter.staging``).
        """
        step = self._pending
        return not (self._wrong if step is None else step.someone_ahead and self._learn(step).wrong)

    def await_sums(self) -> None:
        """Wait for what is under way of a pending step, before a failed call closes the connections."""
        if self._pending is not None:
            self._pending.arrive()

    def validate(self) -> bool:
        """Wait for the global state and make the last step final. Returns False if forwards ran on wrong weights."""
        self._complete_pending()
        wrong, self._wrong = self._wrong, False
        return not wrong

    def close(self) -> None:
        """Take no more steps ahead, and destroy the process groups: now, or in ``settle`` if a step is pending."""
        self._closed = True
        if not self.is_pending and "_alone" in self.__dict__:
            destroy(self.__dict__.pop("_alone"))
            for own in (self._state, self._chain, self._replicas):
                own.close()

    # Implementation of the step.

    def _check_first_step(self) -> None:
        if self._stepped or self._pending is not None:
            raise UserError(
                "an iteration has one optimizer step, but its step was already taken ahead; call step_ahead() once "
                "after the passes of each iteration, and no other step"
            )

    def _refuse_state_dict(self, *_: object) -> None:
        if self._pending is not None:
            raise UserError(
                "the model's weights cannot be saved while an optimizer step is pending, because the step may still be "
                "undone; call settle() of the post-validated optimizer on all ranks first"
            )

    def _complete_pending(self) -> None:
        if self._pending is not None:
            self._complete(self._pending)

    def _begin(self, of: Any) -> tuple[OptimizerStep, PartialState]:
        """Prepare the gradients and start to reduce their figures; the second result is the state of this stage."""
        with reducing_over(self._alone, self._parts):
            found = [prepare(part) for part in self._parts]
            norms = self._own_norms()
            zeros = self._own_zeros()
        squares = [float(norm) ** 2 for norm in norms]
        figures = [[square, *(split(zeros[i]) if zeros else ())] for i, square in enumerate(squares)]
        scaled = [i for i, part in enumerate(self._parts) if getattr(part, "grad_scaler", None)]
        step = OptimizerStep(
            [self._state.reduce_flag(i, found[i]) for i in scaled],
            [self._state.sum(i, of_group) for i, of_group in enumerate(figures)],
            can_be_wrong=self._optimizer.config.clip_grad > 0 or bool(scaled),
            of=of,
        )
        unsafe = step.can_be_wrong and not self._expects_clipping() and not self._rollback.is_safe()
        known = PartialState()
        for i, infinite in enumerate(found):
            square = squares[i] if i < len(squares) else 0.0
            of_stage = self._state.of_stage(i, [square, infinite, unsafe])
            known.add(of_stage[0], found_inf=of_stage[1] > 0, waits=of_stage[2] > 0)
        return step, known

    def _own_norms(self) -> list[float]:
        """The norm of this rank's gradients; one norm per part if megatron-core reduces parts over different ranks."""
        if self._one_norm:
            return [self._optimizer.get_grad_norm()]
        return [part.get_grad_norm() or 0.0 for part in self._parts]

    def _own_zeros(self) -> list[float]:
        if not self._optimizer.config.log_num_zeros_in_grad:
            return []
        return [self._optimizer.count_zeros()] if self._one_norm else [part.count_zeros() for part in self._parts]

    def _decide(self, step: OptimizerStep, known: PartialState) -> None:
        """Decide on the mode from the partial state, pass the state on, and step if the mode is ``AHEAD``."""
        before = self._chain.receive(5)
        if before is not None:
            known.add(float(before[0]), found_inf=bool(before[1]), waits=bool(before[2]))
        clip = self._optimizer.config.clip_grad
        exceeds = clip > 0 and not clip / (math.sqrt(known.square) + 1.0e-6) >= 1.0  # NaN does
        # All ranks must agree on synchronous steps, so the first rank decides.
        synchronous = self._expects_clipping() if before is None else bool(before[4])
        reasons = ((StepMode.SYNCHRONOUS, synchronous), (StepMode.SKIPPED, known.found_inf))
        for how, holds in (*reasons, (StepMode.WAITED, known.waits or exceeds)):
            if step.how is StepMode.AHEAD and self._replicas.any(holds):
                step.how = how
        # Ranks after a waiting rank wait too, so the first rank determines whether any rank is ahead.
        known.waits = step.how is StepMode.WAITED
        step.someone_ahead = step.how is StepMode.AHEAD if before is None else bool(before[3])
        synchronous = step.how is StepMode.SYNCHRONOUS
        figures = [known.square, known.found_inf, known.waits, step.someone_ahead, synchronous]
        self._chain.send(torch.tensor(figures, dtype=torch.float64))
        if step.how is StepMode.AHEAD:
            if step.can_be_wrong:
                self._rollback.keep()
            self._optimizer.step_with_ready_grads()
            self._options.stepped()

    def _expects_clipping(self) -> bool:
        """Whether stepping ahead is expected to lose time, because the step is likely to be clipped."""
        likely = self._forecast.probability(self._optimizer.config.clip_grad)
        return likely > max(self.break_even, _NEGLIGIBLE)

    @torch.no_grad()
    def _complete(self, step: OptimizerStep) -> None:
        """Wait for the global state and make a step final: keep, repeat, take or skip it."""
        found, norm, zeros, wrong = self._learn(step)
        updated = not any(found)
        assert step.how is not StepMode.SKIPPED or not updated, "a rank skips only if a gradient is infinite"
        if step.how is StepMode.AHEAD and wrong:
            step.how = StepMode.REPEATED
            with self._options.of_step():
                self._undo(norm, repeat=updated)
        elif step.how is not StepMode.AHEAD and updated:
            with self._options.of_step():
                self._clip_and_step(norm)
        self._rollback.forget()
        if updated:
            self._forecast.add(norm)
        for part, infinite in zip(self._scaled(), found, strict=True):
            part.grad_scaler.update(infinite)
        self._pending = None
        self._wrong = step.someone_ahead and wrong
        self.counts[step.how.value] += 1
        delayed, self._zero_later = self._zero_later, []
        for zero in delayed:
            zero()
        reported = (norm if self._reports_norm else None, zeros) if updated else (None, None)
        scale = self._loss_scale.of(self.get_loss_scale())
        self._outcomes.append(Outcome(updated, *reported, scale, step.how, step.of))

    def _learn(self, step: OptimizerStep) -> Verdict:
        """Wait for the global state of a step."""
        if step.verdict is None:
            found = [flag > 0 for reduction in step.found_inf for flag in reduction.wait()]
            sums = [reduction.wait() for reduction in step.sums]
            norm = self._norm([square for square, *_ in sums])
            counts = [joined(parts) for _, *parts in sums if parts]
            wrong = self._replicas.any(any(found) or self._clipping.clips(norm))
            step.verdict = Verdict(found, norm, sum(counts) if counts else None, wrong)
        return step.verdict

    def _scaled(self) -> list[Any]:
        """The optimizers in ``_parts`` with a loss scale."""
        return [part for part in self._parts if getattr(part, "grad_scaler", None)]

    def _norm(self, squares: Sequence[float]) -> float:
        """The norm of all gradients, rounded as in megatron-core."""
        norms = [square ** (1.0 / 2.0) for square in squares]
        return norms[0] if self._one_norm else math.sqrt(sum([norm**2 for norm in norms]))

    @property
    def _reports_norm(self) -> bool:
        return isinstance(self._optimizer, ChainedOptimizer) or self._optimizer.config.clip_grad > 0

    def _clip_and_step(self, norm: float) -> None:
        self._clipping.clip(norm)
        self._optimizer.step_with_ready_grads()

    def _undo(self, norm: float, repeat: bool) -> None:
        """Undo the step; then repeat it with clipping, or restore the previous weights if ``repeat`` is False."""
        gathered = [chunk for chunk in self._chunks if chunk.ddp_config.use_distributed_optimizer]
        for chunk in gathered:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)  # waits for gathers in flight
        self._rollback.undo()
        if repeat:
            self._clip_and_step(norm)
        else:
            for part in self._parts:
                if not part.is_stub_optimizer and hasattr(part, "_copy_main_params_to_model_params"):
                    part._copy_main_params_to_model_params()
        for chunk in gathered:
            if chunk.ddp_config.overlap_param_gather or not repeat:
                chunk.start_param_sync(force_sync=True)
