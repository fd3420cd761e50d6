"""Training and evaluation on megatron-core's pipeline schedules."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch.utils.data import Dataset

from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.engine.measure.bubble_meter import BubbleMeter
from megatron.zero_bubble.engine.optimizer.loss_scale import LossScale
from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer
from megatron.zero_bubble.engine.optimizer.step import Outcome
from megatron.zero_bubble.engine.platforms import Platform
from pretrain.checkpoint import TrainedObjects, TrainState, save
from pretrain.data.batches import Batch, Splits, microbatches
from pretrain.data.documents import ENDS
from pretrain.data.shares import Share, share_of
from pretrain.failure import during
from pretrain.packing import packed_sequences
from pretrain.report import BubbleMetrics, IterationMetrics, Progress
from pretrain.stop import StopRequest

Reports = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class _Iteration:
    """An iteration whose optimizer step was taken but may not be final yet."""

    number: int
    consumed_samples: int
    share: Share
    loss: torch.Tensor | None
    learning_rate: float
    seconds: float


@dataclass
class Trainer:
    """One training run: the objects it trains with, and its progress.

    Attributes:
        device: device that this rank computes on.
        vocab_size: size of the embedding; all token ids are smaller.
        meter: measures the bubble of every iteration, for the log.
        loads: those of the microbatches of the iteration under way, if they have packed samples.
    """

    args: argparse.Namespace
    platform: Platform
    device: torch.device
    trained: TrainedObjects
    splits: Splits
    vocab_size: int
    state: TrainState
    progress: Progress
    meter: BubbleMeter | None = None
    loads: tuple[Load, ...] = ()
    _unfinished: deque[_Iteration] = field(default_factory=deque)
    _unreported: list[tuple[IterationMetrics, torch.Tensor | None]] = field(default_factory=list)
    _has_reported: bool = False
    _loss_scale: LossScale = field(default_factory=LossScale)
    _saved: int | None = None
    _stop: StopRequest | None = None

    def run(self, stop: StopRequest) -> None:
        """Train until ``--train-iters``, ``--exit-interval`` or a stop request; save, and test a completed training."""
        args, state = self.args, self.state
        self._stop = stop
        self._saved = state.iteration  # the checkpoint just loaded, or nothing yet
        batches = self._microbatches(self.splits.train, state.consumed_samples)
        while state.iteration < args.train_iters:
            with during(f"iteration {state.iteration + 1}"):
                seconds = self._iteration(batches)
            self.progress.reached(state.iteration)
            if self._due(args.log_interval):
                self._report()
            elif self._unreported and not self._has_reported:  # the first iteration, whatever the interval
                self._report_iterations()
            if self._due(args.eval_interval):
                self._report()
                self.evaluate("valid", self.splits.valid, self.splits.has_valid)
            if self._due(args.save_interval):
                self._save()
            if self._due(args.exit_interval) or stop.decided():
                break
            stop.vote(seconds)
        stop.decided()
        stop.ended()
        self._settle()
        self._report()
        self._save()
        if self._ahead is not None:
            self.progress.say(f" post-validation: {self._ahead.tally()}")
        if state.iteration == args.train_iters:
            self.evaluate("test", self.splits.test, self.splits.has_test)

    def evaluate(self, split: str, dataset: Dataset | None, present: bool) -> None:
        """Report the mean loss over ``--eval-iters`` global batches, always the first samples of ``dataset``."""
        if not present or not self.args.eval_iters:
            return
        self._settle()
        self._report()
        samples = self.args.batch_sizes.final
        batches = self._microbatches(dataset, 0, lambda _: samples)
        reports: Reports = []
        with during(f"evaluation after iteration {self.state.iteration}"), self._whole_parameters(), torch.no_grad():
            for chunk in self.trained.model:
                chunk.eval()
            for number in range(self.args.eval_iters):
                share = share_of(self.args, dataset, number * samples, samples)
                reports += self._passes(batches, share, forward_only=True)
                if self._stop is not None:
                    self._stop.alive()
            for chunk in self.trained.model:
                chunk.train()
        loss = _mean_loss(reports)
        self.progress.evaluation(self.state.iteration, split, None if loss is None else loss.item())

    def _iteration(self, batches: list[Iterator[Batch]]) -> float:
        """Run one training iteration; return its duration in seconds."""
        started = time.perf_counter()
        state, optimizer, sizes = self.state, self.trained.optimizer, self.args.batch_sizes
        samples = sizes.at(state.consumed_samples)
        share = share_of(self.args, self.splits.train, state.consumed_samples, samples)
        self.loads = share.loads
        self._zero_gradients()
        with during("passes"):
            reports = self._passes(batches, share)
        self._finish()  # the learning rate depends on whether the previous step was skipped
        groups = optimizer.param_groups
        learning_rate = groups[0]["lr"] if groups else math.nan  # a stage may have no parameters
        result = None
        with during("optimizer step"):
            if isinstance(optimizer, PostValidatedOptimizer):
                optimizer.step_ahead()
            else:
                result = optimizer.step()
        state.iteration += 1
        state.consumed_samples += samples
        loss = _mean_loss(reports)
        seconds = time.perf_counter() - started
        self._unfinished.append(
            _Iteration(state.iteration, state.consumed_samples, share, loss, learning_rate, seconds)
        )
        if result is not None:
            updated, grad_norm, num_zeros = result
            self._finish_one(Outcome(updated, grad_norm, num_zeros, self._loss_scale.of(optimizer.get_loss_scale())))
        self._finish()
        return seconds

    @property
    def _ahead(self) -> PostValidatedOptimizer | None:
        """The optimizer if it uses post-validation, else None."""
        optimizer = self.trained.optimizer
        return optimizer if isinstance(optimizer, PostValidatedOptimizer) else None

    def _zero_gradients(self) -> None:
        for chunk in self.trained.model:
            chunk.zero_grad_buffer()
        self.trained.optimizer.zero_grad()

    def _finish(self) -> None:
        """Finish the iterations whose optimizer steps post-validation has made final."""
        for outcome in () if self._ahead is None else self._ahead.take_outcomes():
            self._finish_one(outcome)

    def _finish_one(self, outcome: Outcome) -> None:
        done = self._unfinished.popleft()
        if outcome.updated:
            self.trained.scheduler.step(increment=done.share.samples)
        self.state.skipped_iterations += not outcome.updated
        self._unreported.append(
            (
                IterationMetrics(
                    iteration=done.number,
                    consumed_samples=done.consumed_samples,
                    num_microbatches=done.share.num_microbatches,
                    lm_loss=None,
                    grad_norm=outcome.grad_norm,
                    learning_rate=done.learning_rate,
                    loss_scale=outcome.loss_scale,
                    skipped=not outcome.updated,
                    iteration_ms=done.seconds * 1000.0,
                    tokens_per_second=done.share.tokens / done.seconds,
                    num_zeros=outcome.num_zeros,
                ),
                done.loss,
            )
        )

    def _settle(self) -> None:
        """Make the last optimizer step final, before weights or counters are read."""
        if self._ahead is not None:
            with during("validating the last optimizer step"):
                self._ahead.settle()
        self._finish()

    def _passes(self, batches: list[Iterator[Batch]], share: Share, forward_only: bool = False) -> Reports:
        """Run all passes of one global batch; the last stage returns one loss report per microbatch."""
        model = self.trained.model
        return get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=batches if len(model) > 1 else batches[0],
            model=model,
            num_microbatches=share.num_microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            decoder_seq_length=self.args.seq_length,
            forward_only=forward_only,
            **(
                {} if share.shapes is None else {"shapes": share.shapes}
            ),  # Megatron's own schedule has no such argument
        )

    def _forward_step(
        self, batches: Iterator[Batch], model: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        """Megatron's forward step: the output of one chunk for the next microbatch, or a plan of its layers, and its
        loss function.
        """
        batch: Batch = {}
        more: dict[str, Any] = {}
        ends = get_attr_wrapped_model(model, "pre_process") or get_attr_wrapped_model(model, "post_process")
        packs = self.args.run.balance is not None
        if ends or packs or self.args.reset_attention_mask:
            read = next(batches)
            batch = {name: self.platform.to_device(tensor, self.device) for name, tensor in read.items()}
            if packs:
                more["packed_seq_params"] = packed_sequences(read[ENDS], batch.pop(ENDS))
        run = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
        output = run(
            batch.get("tokens"),
            batch.get("position_ids"),
            batch.get("attention_mask"),
            labels=batch.get("labels"),
            **more,
        )
        return output, partial(_loss, batch)

    def _microbatches(
        self, dataset: Dataset | None, consumed_samples: int, samples_at: Callable[[int], int] | None = None
    ) -> list[Iterator[Batch]]:
        chunks = len(self.trained.model)
        return microbatches(dataset, self.args, consumed_samples, self.vocab_size, chunks, samples_at)

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.state.iteration % interval == 0

    def _report(self) -> None:
        self._report_iterations(self._bubble())

    def _report_iterations(self, bubble: BubbleMetrics | None = None) -> None:
        done, self._unreported = self._unreported, []
        self._has_reported = True
        self.progress.iterations(
            [metrics if loss is None else replace(metrics, lm_loss=loss.item()) for metrics, loss in done], bubble
        )

    def _bubble(self) -> BubbleMetrics | None:
        """Bubble of the iterations since the previous call, None without a meter; a collective call with one."""
        if self.meter is None:
            return None
        bubble = self.meter.read(parallel_state.get_pipeline_model_parallel_group())
        if bubble is None:
            return None
        steps = None if self._ahead is None else self._ahead.tally()
        return BubbleMetrics(
            **asdict(bubble),
            iteration=self.state.iteration,
            steps=steps and steps.steps,
            waited=steps and steps.waited,
            repeated=steps and steps.repeated,
        )

    def _save(self) -> None:
        if not self.args.save or self._saved == self.state.iteration:
            return
        self._settle()
        patience = contextlib.nullcontext() if self._stop is None else self._stop.patience()
        with during(f"saving iteration {self.state.iteration}"), self._whole_parameters(), patience:
            path = save(self.args, self.trained, self.state)
        self._saved = self.state.iteration
        self.progress.say(f" saved iteration {self.state.iteration} to {path}")

    @contextlib.contextmanager
    def _whole_parameters(self) -> Iterator[None]:
        """Gather all parameters for this block; ``--overlap-param-gather`` gathers them in each forward instead."""
        if not self.args.overlap_param_gather:
            yield
            return
        for chunk in self.trained.model:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in self.trained.model:
            chunk.enable_forward_pre_hook()


def _loss(batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of unmasked tokens, number of these tokens (int32), and both as a report, as in Megatron."""
    mask = batch["loss_mask"].view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int32)
    return loss, num_tokens, {"lm loss": torch.stack((loss.detach(), num_tokens.float()))}


def _mean_loss(reports: Reports) -> torch.Tensor | None:
    """Loss per token over all microbatches and data-parallel ranks; None on ranks without the last stage."""
    if not reports:
        return None
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total[0] / total[1]
