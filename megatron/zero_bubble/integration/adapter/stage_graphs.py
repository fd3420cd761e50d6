"""CUDA graphs of whole stages: what ``cuda_graph_impl=local`` is under a schedule of this package.

megatron-core would record every layer for every microbatch, in the order of its own 1F1B. Here the layers of a stage
are recorded once per slot, so a plan in any order, for any number of microbatches, repeats the same few graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.tensor_parallel.random import get_all_rng_states
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.engine.platforms import Platform
from megatron.zero_bubble.engine.platforms.graphs import GraphPool
from megatron.zero_bubble.engine.runtime.handlers import Stage
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from megatron.zero_bubble.integration.adapter.graphed_block import GraphedBlock, Key, Layers
from megatron.zero_bubble.integration.adapter.part import IterationFacts, Joined, Part
from megatron.zero_bubble.integration.adapter.stage import StageFacts, StageParts
from megatron.zero_bubble.integration.adapter.versions import check_recomputation_in_graphs
from megatron.zero_bubble.planning.job.graphs import LOCAL, graphs_of


class StageGraphs(Part):
    """Repeats graphs of the layers of each stage, after some iterations without, if the model's options ask for that.

    Args:
        store: has the weight gradients that wait for W.
        accumulate: accumulates them.
        is_settled: whether the schedule stays for now. Until it does, its passes are measured without graphs.
    """

    def __init__(
        self, store: WgradStore, accumulate: GradAccumulator, is_settled: Callable[[], bool] = lambda: True
    ) -> None:
        self._store, self._accumulate, self._is_settled = store, accumulate, is_settled
        self._platform: Platform | None = None
        self._blocks: WeakKeyDictionary[torch.nn.Module, GraphedBlock] = WeakKeyDictionary()
        self._running: list[GraphedBlock] = []

    def check(self, config: Any, schedule: Schedule) -> None:
        graphs = graphs_of(config)
        if graphs is not None and graphs.implementation == LOCAL:
            check_recomputation_in_graphs(config)

    def connect(self, to: Joined) -> None:
        self._platform = to.platform

    def stages(self, iteration: IterationFacts, chunks: Sequence[StageParts]) -> Mapping[int, Stage]:
        """Record the graphs that are missing, while no message is under way: a capture waits for the device."""
        config = iteration.call.step.config
        self._running = []
        graphs = None if iteration.forward_only else graphs_of(config)
        if graphs is None or graphs.implementation != LOCAL:
            return {}
        self._running = [self._begin(own.model) for own in chunks]
        if not self._runs_graphs(config.cuda_graph_warmup_steps):
            for block in self._running:
                block.run_without_graphs()
            return {}
        for block, own in zip(self._running, chunks, strict=True):
            keys = _keys(own.facts, iteration.prepared.slots[own.facts.stage])
            block.run_with_graphs(own.facts.stage, keys, self._pool, _unreduced(own))
        return {}

    def _runs_graphs(self, num_without: int) -> bool:
        """Whether the model of this iteration has run often enough without graphs; from then on it has graphs."""
        first = self._running[0]
        if not first.has_graphs:
            known = all(block.is_known for block in self._running)
            first.has_graphs = first.num_without >= num_without and known and self._is_settled()
            first.num_without += not first.has_graphs
        return first.has_graphs

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        """See ``Part``. The layers are those of Megatron again afterwards."""
        with ExitStack() as installed:
            for block in self._running:
                installed.enter_context(block.installed())
            self._running = []
            yield

    def close(self) -> None:
        self._running.clear()
        self._blocks.clear()

    def _begin(self, chunk: torch.nn.Module) -> GraphedBlock:
        block = self._blocks.setdefault(chunk, GraphedBlock(self._store))
        block.begin(Layers(chunk, _layers_of(chunk), self._accumulate))
        return block

    def _pool(self) -> GraphPool:
        assert self._platform is not None, "the ranks are connected when their plan is prepared"
        states = get_all_rng_states().values()
        return self._platform.graph_pool([state for state in states if isinstance(state, torch.Generator)])


def _layers_of(chunk: torch.nn.Module) -> Any:
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    layers = getattr(model, "decoder", None)
    if not isinstance(layers, TransformerBlock):
        raise UserError(
            "CUDA graphs of stages need models whose layers are a TransformerBlock, such as GPTModel; got a "
            f"{type(model).__name__}; set cuda_graph_impl='none'"
        )
    return layers


def _keys(facts: StageFacts, slots: Sequence[int]) -> list[Key]:
    return [(slot, (microbatch, 0) not in facts.fused) for microbatch, slot in enumerate(slots)]


def _unreduced(own: StageParts) -> Callable[[], AbstractContextManager[None]]:
    return nullcontext if own.sync is None else own.sync.paused


def without_graphs(
    original: Callable[..., Any], manager: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **more: Any
) -> Any:
    """Run what a manager of megatron-core would record, without graphs; those of inference stay."""
    if kwargs.get("inference_context") is not None or getattr(manager, "_inline_capture", False):
        return original(manager, module, args, kwargs, **more)
    function = getattr(manager, "func", None)
    if function is not None:  # of the module, which has the manager's in its place
        return function(*args, **kwargs)
    return super(MegatronModule, module).__call__(*args, **kwargs)
