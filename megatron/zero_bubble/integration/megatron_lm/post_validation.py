"""Post-validation in a Megatron-LM job: its loop takes a step ahead, and reports an iteration when its step is final.

Megatron-LM's own functions run unchanged. ``train_step`` gets an optimizer that steps ahead and claims success, and a
scheduler whose step is undone if the optimizer's step turns out to be skipped. The call of ``training_log`` is kept
until the step is final, at the latest to the end of the next iteration, and then made with the final figures and the
counters of its own iteration. Functions that read weights or end the training make the step final first.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator

from megatron.zero_bubble.engine.optimizer.log_sums import LogSums
from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer
from megatron.zero_bubble.engine.optimizer.step import Outcome, StepMode
from megatron.zero_bubble.integration.adapter.pipeline import Pipeline
from megatron.zero_bubble.integration.patching.loop_seams import LoopSeams
from megatron.zero_bubble.integration.patching.replaced import Replacement, around

_Function = Callable[..., Any]

_COUNTERS = ("consumed_train_samples", "skipped_train_samples")
"""Arguments of the job that its loop has advanced by the time a late line is written."""

_RATES = ("learning_rate", "decoupled_learning_rate")
"""Parameters of ``training_log`` that the scheduler determines."""


def barriers(args: Any, has_ends_together: bool) -> list[str]:
    """What makes all ranks of a job wait for each other in every iteration, so that post-validation gains less.

    Args:
        has_ends_together: whether one rank has the first and the last stage.
    """
    rerun_mode = getattr(args, "rerun_mode", "disabled")
    tied = not args.untie_embeddings_and_output_weights
    reasons = {
        f"--rerun-mode {rerun_mode} (--rerun-mode disabled avoids it)": rerun_mode != "disabled",
        "--exit-signal-handler": args.exit_signal_handler,
        "--exit-duration-in-mins": args.exit_duration_in_mins,
        "--log-params-norm": args.log_params_norm,
        f"--timing-log-level {args.timing_log_level}": args.timing_log_level > 0 and args.barrier_with_L1_time,
        "--calculate-per-token-loss": args.calculate_per_token_loss,
        "the log of experts' losses": args.num_experts,
        "the statistics of packed sequences": getattr(args, "sft", False),
        "the log of multi-token prediction": args.mtp_num_layers,
        "the tied embedding (--untie-embeddings-and-output-weights or zb-v avoids it)": tied and not has_ends_together,
    }
    return [reason for reason, holds in reasons.items() if holds]


@dataclass
class _Iteration:
    """The optimizer step of an iteration, and its outcome once it is final."""

    increment: int = 0
    outcome: Outcome | None = None


@dataclass
class _Line:
    """A call of ``training_log`` that waits for the outcome of its iteration, with the state that it reads."""

    log: _Function
    arguments: inspect.BoundArguments
    iteration: _Iteration
    counters: dict[str, Any] = field(default_factory=dict)
    batch_size: dict[str, Any] = field(default_factory=dict)
    sums: LogSums | None = None


class JobSteps:
    """The optimizer steps of a job, and the log lines that wait for them.

    Args:
        pipeline: runs the passes, which validate the steps.
        args: the job's validated arguments, read during training, because Megatron sets some of them late.
        say: prints a line to the job's log on rank 0.
    """

    def __init__(self, pipeline: Pipeline, args: Any, say: Callable[[str], None]) -> None:
        self._pipeline, self._args, self._say = pipeline, args, say
        self._optimizer: PostValidatedOptimizer | None = None
        self._scheduler: Any = None
        self._agrees = True
        self._has_updated = False
        self._iteration: _Iteration | None = None
        self._line: _Line | None = None
        self._is_late = False
        self._reports_memory: Any = None
        self._rates: dict[str, Any] = {}
        self._modes: Counter[str] = Counter()

    def replacements(self, seams: LoopSeams) -> list[Replacement]:
        return [
            (seams.built, around(self._build)),
            (seams.step, around(self._train_step)),
            (seams.log, around(self._training_log)),
            (seams.training, around(self._train)),
            (seams.timer, around(self._elapsed)),
            *((seam, around(self._reduce)) for seam in seams.agreed),
            *((seam, around(self._settle_before)) for seam in seams.settled),
        ]

    # Replacements of Megatron-LM's functions.

    def _build(self, original: _Function, *args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        if optimizer is not None:
            rates: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(rates, _has_learning_rate(optimizer))
            self._agrees = all(rates)
            self._optimizer = optimizer = self._pipeline.post_validated(optimizer, model)
        return model, optimizer, scheduler

    def _train_step(self, original: _Function, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        if self._optimizer is None or call.arguments["optimizer"] is not self._optimizer:
            return original(*args, **kwargs)
        if self._records_forwards():
            self.settle()  # forwards that run again would be recorded twice
        self._scheduler = call.arguments["opt_param_scheduler"]
        call.arguments |= {"optimizer": _Stepping(self._optimizer, self), "opt_param_scheduler": _Scheduling(self)}
        found = original(*call.args, **call.kwargs)
        if self._iteration is None:
            self.settle()  # Megatron ends the job instead of taking a step
        return found

    def _training_log(self, original: _Function, *args: Any, **kwargs: Any) -> Any:
        line = _Line(original, inspect.signature(original).bind(*args, **kwargs), self._iteration or _Iteration())
        self._write_late_line()
        if self._iteration is None:
            return original(*args, **kwargs)
        self._iteration = None
        if line.iteration.outcome is None and self._ends_with(line.arguments.arguments["iteration"]):
            self._settle_step()
        if line.iteration.outcome is None:
            self._keep(line)
        else:
            self._write(line)
        return self._reports_memory

    def _train(self, original: _Function, *args: Any, **kwargs: Any) -> Any:
        try:
            found = original(*args, **kwargs)
        except SystemExit:  # all ranks exit together, after a signal for example
            self._end()
            raise
        self._end()
        return found

    def _settle_before(self, original: _Function, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        return original(*args, **kwargs)

    def _reduce(self, original: _Function, figure: Any, *args: Any, **kwargs: Any) -> Any:
        """Figures of a step are the same on all ranks, so no reduction is needed, which would be a barrier.

        The learning rate is the same as well, unless a rank has none.
        """
        if self._optimizer is None or not self._agrees:
            return original(figure, *args, **kwargs)
        return figure if isinstance(figure, bool) else _in_fp32(figure)

    def _elapsed(self, original: _Function, timer: Any, reset: bool = True, barrier: bool = False) -> float:
        """A late line reads the time since the line before it without a barrier, which would stop the pipeline."""
        return float(original(timer, reset=reset, barrier=barrier and not self._is_late))

    # Steps.

    def step(self) -> tuple[bool, float | None, float | None]:
        """Step for ``train_step``; the result is final only if no step is pending afterwards."""
        assert self._optimizer is not None
        self._take_outcomes()
        self._iteration = iteration = _Iteration()
        self._optimizer.step_ahead(iteration)
        if not self._has_updated or self._saves_weights():
            # Until the first successful step, the loop asks whether a step was skipped.
            self._optimizer.settle()
        self._take_outcomes()
        if iteration.outcome is None:
            return True, None, None
        return iteration.outcome.updated, iteration.outcome.grad_norm, iteration.outcome.num_zeros

    def schedule(self, increment: int) -> None:
        """Advance the scheduler; undone later if the step is skipped."""
        self._scheduler.step(increment=increment)
        if self._iteration is not None:
            self._iteration.increment = increment

    def settle(self) -> None:
        """Make the last step final and write its line; all ranks call it."""
        if self._optimizer is not None:
            self._settle_step()
            self._write_late_line()

    def _settle_step(self) -> None:
        assert self._optimizer is not None
        self._optimizer.settle()
        self._take_outcomes()

    def _take_outcomes(self) -> None:
        assert self._optimizer is not None
        for outcome in self._optimizer.take_outcomes():
            iteration: _Iteration = outcome.of
            iteration.outcome = outcome
            self._has_updated |= outcome.updated
            if not outcome.updated and iteration.increment:
                self._scheduler.num_steps -= iteration.increment
                self._scheduler.step(increment=0)

    def _saves_weights(self) -> bool:
        """Whether ``train_step`` itself saves the weights after the step."""
        return _is_due(self._args, "save_params_interval", self._args.curr_iteration + 1)

    def _records_forwards(self) -> bool:
        names = ("save_activations_interval", "save_tokens_per_expert_interval")
        return any(_is_due(self._args, name, self._args.curr_iteration + 1) for name in names)

    # Log lines.

    def _ends_with(self, iteration: int) -> bool:
        """Whether the line of an iteration cannot wait, because no other iteration follows or it tells its number."""
        tells = getattr(self._args, "enable_one_logger", False) and importlib.util.find_spec("one_logger") is not None
        return iteration >= self._args.train_iters or (tells and iteration % self._args.log_interval == 0)

    def _keep(self, line: _Line) -> None:
        line.counters = {name: getattr(self._args, name) for name in _COUNTERS if hasattr(self._args, name)}
        line.batch_size = dict(vars(_calculator()))
        line.sums = LogSums.taken()
        self._line = line
        if self._reports_memory is None:
            self._reports_memory = line.arguments.arguments["report_memory_flag"]

    def _write_late_line(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        now = {name: getattr(self._args, name) for name in line.counters}
        assert line.sums is not None
        self._is_late = True
        try:
            with (
                _replaced(vars(self._args), line.counters, now),
                _replaced(vars(_calculator()), line.batch_size, dict(vars(_calculator()))),
                line.sums.shown(),
            ):
                self._write(line)
        finally:
            self._is_late = False

    def _write(self, line: _Line) -> None:
        """Call ``training_log`` with the final figures of an iteration."""
        outcome, arguments = line.iteration.outcome, line.arguments.arguments
        assert outcome is not None and self._optimizer is not None
        arguments["skipped_iter"] = int(not outcome.updated)
        arguments["grad_norm"], arguments["num_zeros_in_grad"] = map(_in_fp32, (outcome.grad_norm, outcome.num_zeros))
        if not self._optimizer.is_stub_optimizer:
            arguments["loss_scale"] = outcome.loss_scale
        if not outcome.updated and line.iteration.increment:
            arguments |= self._rates  # the scheduler has not moved since the line before
        self._rates = {name: arguments[name] for name in _RATES if name in arguments}
        if self._reports_memory is not None:
            arguments["report_memory_flag"] = self._reports_memory
        self._reports_memory = line.log(*line.arguments.args, **line.arguments.kwargs)
        self._count(arguments["iteration"], outcome)

    def _count(self, iteration: int, outcome: Outcome) -> None:
        """Log, for each interval in which a step was not taken ahead, how the steps were taken."""
        self._modes[outcome.how.value] += 1
        if iteration % self._args.log_interval:
            return
        modes, self._modes = self._modes, Counter()
        if set(modes) != {StepMode.AHEAD.value}:
            words = ", ".join(f"{count} {how}" for how, count in modes.most_common())
            self._say(f"optimizer steps up to iteration {iteration}, on the first rank: {words}")

    def _end(self) -> None:
        self.settle()
        if self._optimizer is not None:
            self._say(f"post-validation: {self._optimizer.tally()}")


class _Stepping:
    """The optimizer that ``train_step`` gets: its step may be final only later."""

    def __init__(self, optimizer: PostValidatedOptimizer, steps: JobSteps) -> None:
        self._optimizer, self.step = optimizer, steps.step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class _Scheduling:
    """The scheduler that ``train_step`` gets."""

    def __init__(self, steps: JobSteps) -> None:
        self._steps = steps

    def step(self, increment: int) -> None:
        self._steps.schedule(increment)


def _has_learning_rate(optimizer: Any) -> bool:
    """Whether a rank reads the job's learning rate from its own parameters; else it gets it by a reduction."""
    if optimizer.is_stub_optimizer:
        return False
    return any(len(group["params"]) and not group.get("is_decoupled_lr") for group in optimizer.param_groups)


def _in_fp32(figure: float | None) -> float | None:
    """Rounded as by the reductions of Megatron-LM."""
    return None if figure is None else torch.tensor(figure, dtype=torch.float32).item()


def _is_due(args: Any, interval: str, iteration: int) -> bool:
    each = getattr(args, interval, None)
    return each is not None and iteration % each == 0


def _calculator() -> Any:
    return num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR


@contextmanager
def _replaced(values: dict[str, Any], then: dict[str, Any], now: dict[str, Any]) -> Iterator[None]:
    """Context in which ``values`` has the items ``then``; afterwards, it has ``now`` again."""
    values.update(then)
    try:
        yield
    finally:
        values.update(now)
