"""Train a row's job on ranks: with stock megatron-core, with the schedule, and with the variant of the schedule."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.ir import Compute, Kind, Op, Schedule
from megatron.zero_bubble.engine.runtime.observer import IterationObserver
from megatron.zero_bubble.planning.setup import Named, Searched, Setup
from megatron.zero_bubble.planning.source import ScheduleSource
from megatron.zero_bubble.planning.worker import Request
from tests.helpers.parity import Outcome, Tokens, _named, _splits, _train_once, rebuild_process_groups
from tests.helpers.shards import read_each

SPIKE = 1e6
_SPOILED = "decoder.layers.1.input_layernorm.weight", "decoder.layers.2.input_layernorm.weight"
"""Weights of the first rank, and of another one, under every placement."""


@dataclass(frozen=True)
class Job:
    """What the ranks train: flags per mode, the fault, and whether the loop takes logits out of the model."""

    modes: dict[str, str]
    fault: str
    takes_logits: bool


@dataclass(frozen=True)
class TrainingResult:
    """The results of one rank.

    Attributes:
        outcome: what can be compared bit for bit; ``counted`` has samples, learning rate and skips of each iteration.
        weights: the parameters after the last step, by their names in the whole model.
        start: the same before the first step, of all ranks of the pipeline; a divided vocabulary is whole.
    """

    outcome: Outcome
    weights: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor]


class _Faults(IterationObserver):
    """Spoils gradients of layer norms in the second iteration and, on another layer, in the fourth."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._seen: Any = None
        self._backward = False

    def attach(self, chunks: Any, seen: Any) -> None:
        self._seen = seen
        weights = dict(_named(chunks))
        for iteration, name in zip((2, 4), _SPOILED, strict=True):
            if name in weights:
                weights[name].register_hook(partial(self._spoil, iteration))

    def begin(self, op: Op) -> None:
        if isinstance(op, Compute) and op.work.kind in (Kind.B, Kind.BW):
            self._backward = op.work.microbatch == 0

    def end(self, op: Op) -> None:
        self._backward = False

    def _spoil(self, iteration: int, grad: torch.Tensor) -> torch.Tensor | None:
        return grad * self._factor if self._backward and self._seen.iteration == iteration else None


_FACTORS = {"none": None, "spike": SPIKE, "nan": math.nan}


def train(rank: int, job: Job) -> dict[str, TrainingResult]:
    """Train in every mode, from the same initial weights; call it on a rank pool."""
    done: dict[str, TrainingResult] = {}
    start = None
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if job.takes_logits:
            _take_logits(patch)
        _plan_soon(patch)
        for mode, flags in job.modes.items():
            if mode == "variant":
                _step_ahead_always(patch)
            done[mode], start = _train(flags, mode == "stock", _FACTORS[job.fault], start)
    return done


def _train(
    flags: str, stock: bool, factor: float | None, start: dict[str, torch.Tensor] | None
) -> tuple[TrainingResult, dict[str, torch.Tensor]]:
    from megatron.zero_bubble.integration.patching import apply, observe, revert
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse

    args = parse(flags.split())
    check(args, torch.distributed.get_world_size())
    rebuild_process_groups(args)
    faults = [] if factor is None else [_Faults(factor)]
    pipeline = None
    chunks: list[Any] = []
    iterations: list[str] = []

    def on_start(own: Any, seen: Any) -> None:
        chunks.extend(own)
        record = seen.iterations

        def recorded(done: Any, bubble: Any = None) -> None:
            iterations.extend(f"{m.consumed_samples} {m.learning_rate.hex()} {m.skipped}" for m in done)
            record(done, bubble)

        seen.iterations = recorded
        for fault in faults:
            fault.attach(own, seen)

    if stock:
        observe(faults)
    else:
        pipeline = apply(args.zero_bubble, faults, say=lambda _line: None, source=args.source)
    try:
        outcome, start = _train_once(args, _data(args), start, pipeline, on_start)
        assert pipeline is None or pipeline.num_pending == 0, "the run left gradients or messages behind"
        weights: dict[str, torch.Tensor] = {}
        read_each(pipeline and pipeline.units, chunks, partial(_keep, weights))
    finally:
        revert()
    before = {name: weight.detach().float() for name, weight in start.items()}
    return TrainingResult(replace(outcome, counted=tuple(iterations)), weights, before), start


def _data(args: Any) -> Any:
    """Samples for training, and for evaluations, whose batches do not begin small."""
    if args.run.balance is not None:
        return _splits(args)
    from pretrain.data.batches import Splits, reads_data

    sizes = args.batch_sizes
    samples = Tokens(max(sizes.samples_after(args.train_iters), sizes.final), args.seq_length, args.vocab_size)
    read = samples if reads_data(args) else None
    return Splits(read, read, None, has_valid=True, has_test=False)


def _keep(weights: dict[str, torch.Tensor], chunks: Any) -> dict[str, str]:
    weights.update((name, weight.detach().float().clone()) for name, weight in _named(chunks))
    return {}


def _step_ahead_always(patch: pytest.MonkeyPatch) -> None:
    """Take steps ahead whatever the forecast, except the first one, so that many are repeated."""
    from megatron.zero_bubble.engine.optimizer.clip_forecast import ClipForecast

    usual = ClipForecast.probability
    patch.setattr(ClipForecast, "probability", lambda self, clip: usual(self, clip) if not self._logs else 0.0)


def _plan_soon(patch: pytest.MonkeyPatch) -> None:
    """Let ``zb-auto`` and ``--zero-bubble-offload auto`` plan after the first iteration.

    The plan of ``zb-auto`` is a schedule by name instead of the result of a search, which may take minutes.
    """
    from megatron.zero_bubble.integration.adapter import auto, auto_offload

    module = importlib.import_module(
        "megatron.zero_bubble.integration.patching.apply"
    )  # the package has a function of this name
    patch.setattr(module, "AutoOptions", partial(auto.AutoOptions, warm_up=0, measured=1))
    patch.setattr(auto, "Planner", _Planner)
    patch.setattr(auto_offload, "_WARM_UP", 0)
    patch.setattr(auto_offload, "_MEASURED", 1)


class _Planner:
    """Plans at once: another schedule than the first, on the same placement, with the same slices and vocabulary."""

    limit = None

    def __init__(self, request: Request) -> None:
        setup, order = request.setup, request.setup.order
        is_line = isinstance(order, Searched) and order.of_run == "linear"
        if setup.cuts is None or setup.cuts.number == 1:
            setup = Setup(Named("zb-h2" if is_line else "v-half"), vocabulary=setup.vocabulary)
        elif is_line:
            setup = Setup(Named("seq-1f1b"), cuts=setup.cuts)
        else:  # no schedule by name has slices on a V
            setup = Setup(Searched("vee"), cuts=setup.cuts)
        self._plan = ScheduleSource.of(setup, request.num_ranks).make(request.num_microbatches)

    def finished(self) -> bool:
        return True

    def kill(self) -> None:
        pass

    def result(self) -> tuple[Schedule, str]:
        return self._plan, f"planned {self._plan.name}"


def _take_logits(patch: pytest.MonkeyPatch) -> None:
    """Make the loop compute the loss itself, from the logits that the model returns without labels."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.utils import get_attr_wrapped_model

    from pretrain import loop

    def loss_of(batch: Any, logits: torch.Tensor) -> Any:
        # Flat, with sequences first: the output layer then gets a transposed gradient, as in most loops of this kind.
        losses = vocab_parallel_cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        return loop._loss(batch, losses)

    class FromLogits(loop.Trainer):
        def _forward_step(
            self, batches: Iterator[Any], model: torch.nn.Module, return_schedule_plan: bool = False
        ) -> tuple[Any, Any]:
            ends = get_attr_wrapped_model(model, "pre_process") or get_attr_wrapped_model(model, "post_process")
            batch = next(batches) if ends else {}
            run = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
            output = run(batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"))
            return output, partial(loss_of, batch)

    patch.setattr(loop, "Trainer", FromLogits)
