"""Other pipeline runtimes, with a model that only sleeps: stock megatron-core and torch.distributed.pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from megatron.zero_bubble import Kind, Pass, PassCosts, Placement, Schedule, build, simulate, validate
from tests.helpers.emulate.clock import sleep_until

HIDDEN_SIZE = 256
_TORCH_KINDS = {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW}


@dataclass(frozen=True)
class Emulation:
    """A pipeline of ``num_ranks`` whose passes sleep; times in ms are for a rank's whole share of the model."""

    num_ranks: int
    num_microbatches: int
    forward_ms: float
    backward_ms: float
    wgrad_ms: float
    kib: int
    transfer_ms: float = 0.0
    recompute_ms: float = 0.0

    def costs(self, placement: Placement) -> PassCosts:
        times = self.forward_ms, self.backward_ms, self.wgrad_ms
        own = PassCosts.uniform(placement, *times, self.transfer_ms)
        again = self.recompute_ms * placement.num_ranks / placement.num_stages
        return replace(own, recompute_ms=(again,) * placement.num_stages)

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """[sequence, microbatch, hidden], which is Megatron's order; float32."""
        return (self.kib, 1, HIDDEN_SIZE)


@dataclass(frozen=True)
class Contestant:
    """A runtime's iteration on this rank, with the schedule and the costs that it was planned for."""

    schedule: Schedule
    costs: PassCosts
    run: Callable[[], None]

    @property
    def planned_ms(self) -> float:
        return simulate(self.schedule, self.costs).makespan_ms


def stock(emulation: Emulation, num_chunks: int = 1) -> Contestant:
    """megatron-core's 1F1B, interleaved if a rank has several chunks, with its own P2P communication.

    The CPU platform must be set up and the parallel groups created.
    """
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_config import TransformerConfig

    interleaved = num_chunks > 1
    config = TransformerConfig(
        num_layers=emulation.num_ranks * num_chunks,
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=1,
        pipeline_model_parallel_size=emulation.num_ranks,
        virtual_pipeline_model_parallel_size=num_chunks if interleaved else None,
        microbatch_group_size_per_vp_stage=emulation.num_ranks,
        pipeline_dtype=torch.float32,
    )
    chunks = [_MegatronModel(emulation, config, ModelType.encoder_or_decoder, num_chunks) for _ in range(num_chunks)]

    def forward_step(_batches: Any, model: _MegatronModel) -> tuple[torch.Tensor, Callable[..., Any]]:
        return model(), lambda output: (output.sum(), {})

    def run() -> None:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(num_chunks if interleaved else None)
        forward_backward = (
            schedules.forward_backward_pipelining_with_interleaving
            if interleaved
            else schedules.forward_backward_pipelining_without_interleaving
        )
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=[None] * num_chunks if interleaved else None,
            model=chunks if interleaved else chunks[0],
            num_microbatches=emulation.num_microbatches,
            seq_length=emulation.kib,
            micro_batch_size=1,
        )

    name = "interleaved-1f1b" if interleaved else "1f1b"
    sizes = {"num_ranks": emulation.num_ranks, "num_microbatches": emulation.num_microbatches}
    schedule = build(name, **sizes, num_chunks=num_chunks if interleaved else None)
    return Contestant(schedule, emulation.costs(schedule.placement), run)


def torch_1f1b(emulation: Emulation, rank: int) -> Contestant:
    """torch's ``Schedule1F1B``.

    It runs in the order of our ``1f1b``. The order of its ``_get_pipeline_order`` (torch 2.13), which starts the last
    rank with microbatch 1, is not used.
    """
    stages = [_torch_stage(rank, emulation.num_ranks, _fused(emulation))]
    schedule = Schedule1F1B(stages[0], emulation.num_microbatches, _loss, scale_grads=False)
    planned = build("1f1b", num_ranks=emulation.num_ranks, num_microbatches=emulation.num_microbatches)
    return Contestant(planned, emulation.costs(planned.placement), _torch_step(emulation, stages, schedule))


def torch_zb1p(emulation: Emulation, rank: int) -> Contestant:
    """torch's ``ScheduleInterleavedZeroBubble`` with one stage per rank: the paper's ZB1P."""
    model = _SleepingModel(emulation.forward_ms, emulation.backward_ms, emulation.wgrad_ms)
    stages = [_torch_stage(rank, emulation.num_ranks, model)]
    schedule = ScheduleInterleavedZeroBubble(stages, emulation.num_microbatches, _loss, scale_grads=False)
    return _torch_split("torch zb1p", emulation, stages, schedule, Placement.linear(emulation.num_ranks))


def torch_interleaved_zero_bubble(emulation: Emulation, rank: int, num_chunks: int = 2) -> Contestant:
    """torch's ``ScheduleInterleavedZeroBubble`` with several stages per rank, each with its part of the cost."""
    placement = Placement.interleaved(emulation.num_ranks, num_chunks)
    times = emulation.forward_ms, emulation.backward_ms, emulation.wgrad_ms
    model = _SleepingModel(*(ms / num_chunks for ms in times))
    stages = [_torch_stage(s, placement.num_stages, model) for s in placement.stages_of(rank)]
    schedule = ScheduleInterleavedZeroBubble(stages, emulation.num_microbatches, _loss, scale_grads=False)
    return _torch_split("torch interleaved zb", emulation, stages, schedule, placement)


def torch_zbv(emulation: Emulation, rank: int) -> Contestant:
    """torch's ``ScheduleZBVZeroBubble``: two stages per rank, each with half the cost."""
    placement = Placement.vee(emulation.num_ranks)
    model = _SleepingModel(emulation.forward_ms / 2, emulation.backward_ms / 2, emulation.wgrad_ms / 2)
    stages = [_torch_stage(s, placement.num_stages, model) for s in placement.stages_of(rank)]
    schedule = ScheduleZBVZeroBubble(stages, emulation.num_microbatches, _loss, scale_grads=False)
    return _torch_split("torch zbv", emulation, stages, schedule, placement)


def schedule_of(name: str, order: Mapping[int, Iterable[Any]], placement: Placement, num_microbatches: int) -> Schedule:
    """Convert a ``pipeline_order`` of torch.distributed.pipelining to a validated schedule.

    torch writes I for our B and B for our BW; its idle slots (None) and its reductions are left out.
    """
    rows = tuple(
        tuple(
            Pass(action.stage_index, _TORCH_KINDS[action.computation_type.value], action.microbatch_index)
            for action in order[rank]
            if action is not None and action.computation_type.value != "REDUCE_GRAD"
        )
        for rank in range(placement.num_ranks)
    )
    schedule = Schedule(name, placement, num_microbatches, rows)
    validate(schedule)
    return schedule


def _torch_split(
    name: str, emulation: Emulation, stages: list[PipelineStage], schedule: Any, placement: Placement
) -> Contestant:
    planned = schedule_of(name, schedule.pipeline_order, placement, emulation.num_microbatches)
    costs = emulation.costs(placement)
    # On stage 0, torch skips B and runs the whole backward as W.
    backward_ms = (0.0, *costs.backward_ms[1:])
    wgrad_ms = (costs.backward_ms[0] + costs.wgrad_ms[0], *costs.wgrad_ms[1:])
    return Contestant(
        planned, replace(costs, backward_ms=backward_ms, wgrad_ms=wgrad_ms), _torch_step(emulation, stages, schedule)
    )


def _torch_stage(stage: int, num_stages: int, model: torch.nn.Module) -> Any:
    # Any: the schedules take lists of a private base class, and a list of a subclass is another type.
    return PipelineStage(model, stage, num_stages, torch.device("cpu"), group=dist.group.WORLD)


def _torch_step(emulation: Emulation, stages: list[PipelineStage], schedule: Any) -> Callable[[], None]:
    """A function that runs one iteration; the first stage gets the batch, the last stage gets the targets."""
    sequence, _, hidden = emulation.message_shape
    batch = torch.zeros(emulation.num_microbatches * sequence, 1, hidden)
    inputs = (batch,) if any(stage.is_first for stage in stages) else ()
    targets = torch.zeros(emulation.num_microbatches) if any(stage.is_last for stage in stages) else None

    def run() -> None:
        schedule.step(*inputs, target=targets, return_outputs=False)

    return run


def _loss(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    return output.sum()


class _Sleep(torch.autograd.Function):
    """A copy whose forward and backward take the given times, which include the copying."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        started = time.perf_counter()
        ctx.backward_ms = backward_ms
        y = x.clone()
        sleep_until(started + forward_ms / 1e3)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        started = time.perf_counter()
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        sleep_until(started + ctx.backward_ms / 1e3)
        return grad, None, None


class _Join(torch.autograd.Function):
    """Returns ``x`` and also sends a gradient to ``weight``: the node where torch splits a backward into two parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], grads[0].new_zeros(())


class _SleepingModel(torch.nn.Module):
    """A stage whose forward, input gradient and weight gradient sleep, the last two in separate autograd nodes."""

    def __init__(self, forward_ms: float, backward_ms: float, wgrad_ms: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self._times = forward_ms, backward_ms, wgrad_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward_ms, backward_ms, wgrad_ms = self._times
        weight = _Sleep.apply(self.weight, 0.0, wgrad_ms) if wgrad_ms else self.weight
        return _Sleep.apply(_Join.apply(x, weight), forward_ms, backward_ms)


def _fused(emulation: Emulation, num_chunks: int = 1) -> _SleepingModel:
    """A model for schedules that never split a backward: each backward sleeps once."""
    backward_ms = emulation.backward_ms + emulation.wgrad_ms
    return _SleepingModel(emulation.forward_ms / num_chunks, backward_ms / num_chunks, 0.0)


class _MegatronModel(torch.nn.Module):
    """The same model, with the interface that megatron-core's schedules require."""

    def __init__(self, emulation: Emulation, config: Any, model_type: Any, num_chunks: int) -> None:
        super().__init__()
        self.config = config
        self.model_type = model_type
        self._model = _fused(emulation, num_chunks)
        self._batch = torch.zeros(emulation.message_shape)
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        self._input = tensors[0]

    def forward(self) -> torch.Tensor:
        return self._model(self._batch if self._input is None else self._input)
