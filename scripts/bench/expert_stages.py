"""Stages with experts whose passes only take time: their computation and their all-to-alls sleep, each on a lane.

A rank has two lanes, as a GPU has two streams. The stages have the plans of layers that megatron-core's combined
schedule asks of a model, so that it and our handler of pairs run them alike.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan

from megatron.zero_bubble import Kind, Pass, PassCosts
from megatron.zero_bubble.core.ir.ops import ALL_TO_ALL, COMPUTE
from megatron.zero_bubble.core.ir.parts import LanePart
from megatron.zero_bubble.engine.platforms.streams import Result, ThreadLane
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from tests.helpers.emulate.clock import sleep_until

WIDTH, TOKENS = 8, 1024
"""Elements per token of a message, and its tokens."""


class Lanes:
    """The lanes of a rank, on which parts take their time.

    Attributes:
        sleeps: whether passes take time.
        took_ms: times of the ops that ran, by the kinds of their passes.
    """

    def __init__(self) -> None:
        self._lanes = {COMPUTE: ThreadLane(), ALL_TO_ALL: ThreadLane()}
        self.took_ms: dict[tuple[Kind, ...], list[float]] = defaultdict(list)
        self.sleeps = False

    def run(self, kinds: tuple[Kind, ...], parts: Sequence[LanePart]) -> None:
        """Run an op; returns when all of its parts have ended."""
        if not self.sleeps:
            return
        begun = time.perf_counter()
        last: dict[str, Result] = {}
        of_pass: dict[int, Result] = {}
        for lane, ms, work in parts:
            after = [result for result in (last.get(lane), None if work is None else of_pass.get(work)) if result]
            last[lane] = self._lanes[lane].start(partial(_sleep, begun, after, ms), ())
            if work is not None:
                of_pass[work] = last[lane]
        for result in last.values():
            result.wait()
        self.took_ms[kinds].append((time.perf_counter() - begun) * 1e3)

    def medians(self) -> dict[str, float]:
        """The time in ms of the ops that ran, by the kinds of their passes."""
        return {" ".join(kind.name for kind in kinds): median(times) for kinds, times in self.took_ms.items()}

    def close(self) -> None:
        """Stop the threads."""
        for lane in self._lanes.values():
            lane.close(10.0)


def _sleep(begun: float, after: Sequence[Result], ms: float) -> float:
    """Sleep for ``ms`` from the end of the parts before, and return its own end.

    Ends are exact: a thread that wakes up late does not delay the next part, as a device does not wait for its host.
    """
    end = max([begun, *(result.wait() for result in after)]) + ms / 1e3
    sleep_until(end)
    return end


class _Copy(torch.autograd.Function):
    """A copy of the input, and of the gradient; takes time only in passes that have no plan of their layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _weight: torch.Tensor, stage: Stage, planned: bool) -> torch.Tensor:
        ctx.stage, ctx.planned = stage, planned
        if not planned:
            stage.take(Kind.F)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        stage = ctx.stage
        kind = stage.backward_kind
        if kind is Kind.B:
            stage.store.put(_Wgrad(stage))
        if not ctx.planned:
            stage.take(kind)
        return grads[0].clone(memory_format=torch.contiguous_format), None, None, None


class Stage(GPTModel):
    """A stage whose passes only take time, with what megatron-core requires of models with plans of their layers."""

    def __init__(
        self, config: Any, costs: PassCosts, stage: int, num_stages: int, lanes: Lanes, store: WgradStore | None
    ) -> None:
        from megatron.core.enums import ModelType

        torch.nn.Module.__init__(self)
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.pre_process, self.post_process = stage == 0, stage == num_stages - 1
        self.share_embeddings_and_output_weights = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.store, self.vp_stage = store, None
        self._stage, self._costs, self._lanes = stage, costs, lanes
        self._input: torch.Tensor | None = None
        self.fuses = False  # whether the running backward includes its W although the store waits for one

    def set_input_tensor(self, input_tensor: Any) -> None:
        self._input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    @property
    def backward_kind(self) -> Kind:
        """What the running backward is: without its W if the store waits for one."""
        return Kind.BW if self.fuses or self.store is None or self.store.current is None else Kind.B

    def take(self, kind: Kind) -> None:
        """Take the time of a pass whose parts run one after the other."""
        self._lanes.run((kind,), [LanePart(COMPUTE, self._costs.duration(Pass(self._stage, kind, 0)), 0)])

    def overlap(self, *passes: tuple[Stage, Kind]) -> None:
        """Take the time of a pass, or of a pair, whose parts run on both lanes."""
        works = tuple(Pass(stage._stage, kind, 0) for stage, kind in passes)
        self._lanes.run(tuple(kind for _, kind in passes), self._costs.overlapping(True).parts(works))

    def forward(self) -> torch.Tensor:
        return self.copied(planned=False)

    def build_schedule_plan(self) -> LayerPlan:
        return LayerPlan(self)

    def copied(self, planned: bool) -> torch.Tensor:
        """The output of the microbatch whose input was set."""
        x = self._input if self._input is not None else torch.zeros(TOKENS, 1, WIDTH)
        y: torch.Tensor = _Copy.apply(x, self.weight, self, planned)
        return y


class _Node:
    """A node with weights, as our stages ask for it; ``bwd_dw_callables`` are set where its W is part of a backward."""

    delay_wgrad_compute = False
    bwd_dw_callables: Any = None


class LayerPlan(AbstractSchedulePlan):
    """A microbatch of a stage, whose parts run on the lanes."""

    def __init__(self, stage: Stage) -> None:
        self.mlp = self.attn = _Node()
        self.stage, self.vp_stage, self.event = stage, stage.vp_stage, torch.cuda.Event()
        self.y: torch.Tensor | None = None

    def num_layers(self) -> int:
        return 1

    def get_layer(self, _: int) -> LayerPlan:
        return self

    @staticmethod
    def run(
        f_schedule_plan: LayerPlan | None,
        b_schedule_plan: LayerPlan | None,
        b_grad: torch.Tensor | None = None,
        pre_forward: Callable[..., None] | None = None,
        pre_backward: Callable[..., None] | None = None,
        post_forward: Callable[..., None] | None = None,
        post_backward: Callable[..., None] | None = None,
    ) -> torch.Tensor | None:
        """Run a forward, a backward, or both, as megatron-core's plans do."""
        f, b = f_schedule_plan, b_schedule_plan
        passes: list[tuple[Stage, Kind]] = []
        x: list[torch.Tensor] = []
        if f is not None:
            if pre_forward is not None:
                pre_forward(f.vp_stage)
            f.y = f.stage.copied(planned=True)
            passes.append((f.stage, Kind.F))
        if b is not None:
            if pre_backward is not None:
                pre_backward(b.vp_stage)
            assert b.y is not None
            b.y.register_hook(x.append)  # the gradient of a copy is that of its input
            b.stage.fuses = b.mlp.bwd_dw_callables is not None
            kind = b.stage.backward_kind
            torch.autograd.backward(b.y, b_grad)
            b.stage.fuses = False
            passes.append((b.stage, kind))
        passes[0][0].overlap(*passes)
        if f is not None and post_forward is not None:
            post_forward(f.y, f.vp_stage)
        if b is not None and post_backward is not None:
            post_backward(x[0], b.vp_stage)
        return None if f is None else f.y


class _Wgrad:
    """A deferred weight gradient, which only takes time; see ``wgrad.store.Deferred``."""

    num_elements, gathers = 1, False

    def __init__(self, stage: Stage) -> None:
        self.weight, self._stage = stage.weight, stage

    def prefetch(self) -> None:
        """It needs no communication."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """It keeps none."""
        return ()

    def run(self) -> tuple[()]:
        """Take the time of W."""
        self._stage.take(Kind.W)
        return ()
