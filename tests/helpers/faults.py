"""Training runs with corrupted gradients at chosen iterations, ranks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.ir import Kind, Op
from megatron.zero_bubble.engine.runtime.observer import IterationObserver
from tests.helpers.parity import BASE_FLAGS, Outcome, _digest, _splits, _train_once, rebuild_process_groups


@dataclass(frozen=True)
class Fault:
    """Multiply a gradient of ``rank`` by ``factor`` (may be NaN) in one microbatch of one iteration."""

    iteration: int
    rank: int
    microbatch: int
    factor: float


class _Injector(IterationObserver):
    """Apply each fault to the matching backward, under any schedule and each time the backward runs."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._seen: Any = None
        self._factor = 1.0
        self._chunks: Any = []

    def attach(self, chunks: Any, seen: Any) -> None:
        """Hook the faults into the model's first layer norm, and count the forwards of every chunk."""
        self._seen = seen
        for chunk in chunks:
            chunk.register_buffer("num_forwards", torch.zeros(()))
            chunk.register_forward_pre_hook(_count)
        self._chunks = chunks
        norms = [weight for name, weight in chunks[0].named_parameters() if name.endswith("layernorm.weight")]
        for norm in norms[:1]:  # a stage may have no layer norm
            norm.register_hook(self._spoil)

    def begin(self, op: Op) -> None:
        for work in op.works:
            if work.kind in (Kind.B, Kind.BW):
                now = self._seen.iteration, work.microbatch
                self._factor = next((f.factor for f in self._faults if (f.iteration, f.microbatch) == now), 1.0)

    def end(self, op: Op) -> None:
        if op.works:  # a pair sends what its forward gives while its backward still runs
            self._factor = 1.0

    def counted(self) -> tuple[str, ...]:
        """Return the number of forwards per chunk, and the sums that experts collect for the log."""
        from megatron.zero_bubble.engine.optimizer.log_sums import sums_for_the_log

        forwards = [f"{chunk.num_forwards.item():.0f} forwards" for chunk in self._chunks]
        return (*forwards, *(f"{key} {_digest(value)}" for key, value in sorted(sums_for_the_log().items())))

    def _spoil(self, grad: torch.Tensor) -> torch.Tensor | None:
        return None if self._factor == 1.0 else grad * self._factor


def _count(module: Any, _inputs: Any) -> None:
    module.num_forwards += 1


def train_with_faults(
    rank: int, flags: str, modes: Sequence[str], faults: Sequence[Fault], daring: bool = False
) -> list[Outcome]:
    """Train from the same start once per entry of ``modes`` (additional flags); return the outcomes.

    Args:
        daring: whether steps are taken ahead whatever the forecast, except the first one.
    """
    from megatron.zero_bubble.engine.optimizer.clip_forecast import ClipForecast

    with pytest.MonkeyPatch.context() as patch:
        if daring:
            usual = ClipForecast.probability  # it holds before the first norm
            patch.setattr(ClipForecast, "probability", lambda self, clip: usual(self, clip) if not self._logs else 0.0)
        return [_train(f"{flags} {mode}", faults) for mode in modes]


def _train(flags: str, faults: Sequence[Fault]) -> Outcome:
    from megatron.core import parallel_state

    from megatron.zero_bubble.engine.optimizer.log_sums import sums_for_the_log
    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse

    args = parse([*BASE_FLAGS.split(), *flags.split()])
    check(args, torch.distributed.get_world_size())
    rebuild_process_groups(args)
    own = parallel_state.get_pipeline_model_parallel_rank()
    injector = _Injector([fault for fault in faults if fault.rank == own])
    pipeline = apply(args.zero_bubble, [injector])
    try:
        for value in sums_for_the_log().values():
            value.zero_()
        outcome, _ = _train_once(args, _splits(args), None, pipeline, injector.attach)
        assert pipeline.num_pending == 0
    finally:
        revert()
    return replace(outcome, counted=injector.counted())
