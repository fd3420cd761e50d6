"""CUDA graphs of TransformerEngine by slots, in the place of graphs in the order of Megatron's own schedule.

megatron-core captures its layers with one call of ``make_graphed_callables``, in the order of its 1F1B. All of these
graphs share memory, so they may be replayed in this order only, for all microbatches. Here every stage and slot gets a
call of its own, with one microbatch and memory that no other slot shares, so the graphs fit every order. Each graph
that is returned stands for all slots of its layer, and replays the slot of the running pass. Slots are captured when an
iteration needs them, so batch sizes and schedules may change.

* If W can be a graph of its own (TransformerEngine 2.13 and newer, fused accumulation, no biases), every layer is a
  chunk to TransformerEngine, as it demands, and the store has the replay of W. Otherwise W is part of the graph of B.
* Gradients that leave the graphs are copied, because the next replay overwrites them: those that are sent to another
  rank, and those that wait for the W of a module outside.
* What a graph keeps must stay until W where a module outside defers its gradient, so graphs of parts of layers share
  no buffers. Those of whole layers do, as Megatron's.
* Every graph accumulates into ``main_grad``, which Megatron zeroes; outside of graphs, the first microbatch overwrites
  it.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from math import ceil
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.zero_bubble.engine.optimizer.replay import Replay
from megatron.zero_bubble.engine.wgrad.delayed import DelayedModule
from megatron.zero_bubble.engine.wgrad.transformer_engine import TransformerEngineSplit
from megatron.zero_bubble.integration.adapter.graph_slots import GraphSlots
from megatron.zero_bubble.integration.adapter.graphed_block import is_of_data_parallelism
from megatron.zero_bubble.planning.job.graphs import MODULES, PREPROCESSING, graphs_of

_PER_LAYER = ("enabled", "fp8_enabled")
"""Options of ``make_graphed_callables`` that may have a value per layer."""
_SHARED = "_reuse_graph_input_output_buffers"
"""The option of ``make_graphed_callables``, of some releases, with which graphs share buffers."""


def inside(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The submodules of ``module`` that run inside of CUDA graphs of TransformerEngine."""
    for layer in module.modules():
        if hasattr(layer, "cuda_graph_manual_hooks"):  # a layer of a model with such graphs
            for part in _parts(layer):
                yield from part.modules()


def _parts(layer: Any) -> Iterator[torch.nn.Module]:
    if (graphs := graphs_of(layer.config)) is None:
        return
    if graphs.whole_layers or not hasattr(layer, "mlp"):
        if graphs.whole_layers or "mamba" in graphs.inside:
            yield layer
        return
    names = graphs.inside - {"mlp"} if hasattr(layer.mlp, "experts") else graphs.inside
    places = [place for name in names for place in MODULES.get(name, ())]
    for place in dict.fromkeys((*places, *(PREPROCESSING if graphs.preprocesses else ()))):
        found = functools.reduce(lambda owner, part: getattr(owner, part, None), place.split("."), layer)
        if isinstance(found, torch.nn.Module):
            yield found


def graphing(
    original: Callable[..., Any], slots: GraphSlots, split: TransformerEngineSplit
) -> Callable[..., tuple[GraphedLayer, ...]]:
    """The replacement for ``make_graphed_callables``, which megatron-core's helper calls.

    Args:
        slots: how many there are, and that of the running pass.
        split: the split of TransformerEngine's linears.
    """

    @functools.wraps(original)
    def make_graphed_callables(
        modules: Sequence[torch.nn.Module],
        sample_args: Sequence[Any],
        *,
        sample_kwargs: Sequence[Any] | None = None,
        _order: Sequence[float],
        _num_layers_per_chunk: Sequence[int] | None = None,
        **options: Any,
    ) -> tuple[GraphedLayer, ...]:
        num_chunks = max(map(ceil, _order))
        num_microbatches = len(_order) // num_chunks // 2
        lengths = _num_layers_per_chunk or [len(modules) // num_chunks] * num_chunks
        graphed: list[GraphedLayer] = []
        first = 0
        for length in lengths:
            own = slice(first, first + length)
            samples = slice(first * num_microbatches, first * num_microbatches + length)  # of its first microbatch
            of_stage = {
                name: value[own] if name in _PER_LAYER and isinstance(value, tuple) else value
                for name, value in options.items()
            }
            inputs = sample_args[samples], None if sample_kwargs is None else sample_kwargs[samples]
            stage = _Stage(original, split, modules[own], of_stage, *inputs)
            if length:
                slots.add(stage)
            graphed += [GraphedLayer(stage, number, slots) for number in range(length)] * num_microbatches
            first += length
        return tuple(graphed)

    return make_graphed_callables


class _Stage:
    """The graphed layers of a stage.

    Args:
        options: other arguments of ``make_graphed_callables``.
        args, kwargs: inputs of one microbatch, by layer.

    Attributes:
        split: the split of TransformerEngine's linears.
        graphs: by slot, and by layer.
        delayed: for every layer, the modules whose W is a graph of its own.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        split: TransformerEngineSplit,
        layers: Sequence[Any],
        options: dict[str, Any],
        args: Sequence[Any],
        kwargs: Sequence[Any] | None,
    ) -> None:
        self._original, self.split = original, split
        self._options, self._inputs = options, (args, kwargs)
        self.layers = layers
        self.graphs: list[tuple[Any, ...]] = []
        self.delayed: list[Sequence[DelayedModule]] = [() for _ in layers]

    @property
    def num_slots(self) -> int:
        return len(self.graphs)

    def is_in(self, chunk: torch.nn.Module) -> bool:
        return any(module is self.layers[0] for module in chunk.modules())

    def capture(self, num_slots: int) -> None:
        """Capture one microbatch of all layers per slot, in memory that no other slot uses."""
        with ExitStack() as context:
            context.enter_context(_unchanged(self.layers))
            context.enter_context(_as_in_the_helper(self.layers))
            self.delayed = [context.enter_context(self.split.capturing(layer)) for layer in self.layers]
            context.enter_context(_accumulating(self.layers))
            while self.num_slots < num_slots:
                self._inputs = args, kwargs = _copies(self._inputs[0]), _copies(self._inputs[1])
                own = self._options | self._order() | ({} if kwargs is None else {"sample_kwargs": kwargs})
                self.graphs.append(tuple(self._original(tuple(self.layers), args, **own)))

    def reset(self) -> None:
        """Free the graphs."""
        graphs, self.graphs = self.graphs, []
        for graph in itertools.chain.from_iterable(graphs):
            graph.reset()

    def _order(self) -> dict[str, Any]:
        """The order of the captures, and the layers of each chunk, as TransformerEngine has them."""
        number = len(self.layers)
        order: list[float] = [1, -1]
        lengths = [number]
        if any(self.delayed):
            chunks = range(1, number + 1)
            with_w = [-chunk - 0.5 for chunk in reversed(chunks) if self.delayed[chunk - 1]]
            order, lengths = [*chunks, *(-chunk for chunk in reversed(chunks)), *with_w], [1] * number
        own: dict[str, Any] = {"_order": order, "_num_layers_per_chunk": lengths}
        if _SHARED in self._options:
            own[_SHARED] = not any(self.delayed) and all(map(_is_whole, self.layers))
        return own


class GraphedLayer:
    """The graphs of a layer, by slot; replays those of the slot of the running pass.

    Args:
        number: of the layer in its stage.
    """

    def __init__(self, stage: _Stage, number: int, slots: GraphSlots) -> None:
        self._stage, self._number, self._slots = stage, number, slots
        self._delayed = stage.delayed[number]
        self._parameters = {id(parameter) for parameter in stage.layers[number].parameters()}
        self._dropped = {id(weight) for module in self._delayed for weight in module.weights}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = self._stage.graphs[self._slots.current][self._number]
        outputs = graph(*args, **kwargs)
        node = next((output.grad_fn for output in tree_leaves(outputs) if output.grad_fn is not None), None)
        if node is not None:
            before = [each.grad_fn for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            leaves = not any(each is not None and each.name() == node.name() for each in before)
            if leaves or self._delayed:
                node.register_hook(functools.partial(self._after_backward, graph, node.next_functions, leaves))
        return outputs

    def reset(self) -> None:
        """Free the graphs of the stage; megatron-core's helper calls it for each layer, once per microbatch."""
        self._slots.remove(self._stage)
        self._stage.reset()

    def _after_backward(
        self, graph: Any, inputs: Sequence[Any], leaves: bool, grads: Sequence[Any], _: Any
    ) -> tuple[Any, ...]:
        """Returns the gradients of the layer's inputs and parameters, after a replay of its B.

        Args:
            inputs: what they are gradients of, as edges of autograd.
            leaves: whether those of its inputs leave the graphs.
        """
        kept = []
        for (node, _), grad in zip(inputs, grads, strict=True):
            of = id(getattr(node, "variable", None))
            if of in self._dropped:  # only stands for one that W accumulates
                grad = None
            elif leaves and grad is not None and of not in self._parameters:
                grad = grad.clone()
            kept.append(grad)
        if self._delayed:
            self._stage.split.replayed(self._delayed, graph.backward_dw)
        return tuple(kept)


def _is_whole(layer: Any) -> bool:
    graphs = graphs_of(layer.config)
    return graphs is not None and graphs.whole_layers


def _copies(samples: Any) -> Any:
    """Inputs of one microbatch in memory of their own; what several layers share, they share here, too."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copy, samples)


@contextmanager
def _unchanged(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context that leaves all as it was, though TransformerEngine runs the layers some times before each capture.

    Gradients may be those of a step that is not validated yet, and what forwards change may be needed to repeat them.
    """
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    gradients = [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    kept, before = [gradient.clone() for gradient in gradients], Replay(layers, ())
    try:
        yield
    finally:
        before.rewind()
        for gradient, value in zip(gradients, kept, strict=True):
            gradient.copy_(value)


@contextmanager
def _as_in_the_helper(layers: Sequence[Any]) -> Iterator[None]:
    """Context in which layers are captured as they are by megatron-core's helper, which captures all graphs at once.

    They have no graphs yet, data parallelism neither gathers their weights nor reduces their gradients, and random
    numbers are those of the blocks of layers.
    """
    is_helper = cuda_graphs.is_graph_capturing()
    modules = [module for layer in layers for module in layer.modules()]
    graphs, hooks = [layer.cuda_graphs for layer in layers], [module._forward_pre_hooks for module in modules]
    cuda_graphs._set_capture_start()
    try:
        for layer in layers:
            layer.cuda_graphs = []
        for module, own in zip(modules, hooks, strict=True):
            others = ((key, hook) for key, hook in own.items() if not is_of_data_parallelism(hook))
            module._forward_pre_hooks = OrderedDict(others)
        with get_cuda_rng_tracker().fork() if layers[0].config.sequence_parallel else nullcontext():
            yield
    finally:
        for layer, before in zip(layers, graphs, strict=True):
            layer.cuda_graphs = before
        for module, own in zip(modules, hooks, strict=True):
            module._forward_pre_hooks = own
        if not is_helper:
            cuda_graphs._set_capture_end()


@contextmanager
def _accumulating(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context in which no microbatch counts as the first one, whose weight gradients overwrite those before."""
    modules = [module for layer in layers for module in layer.modules() if hasattr(module, "is_first_microbatch")]
    handles = [module.register_forward_pre_hook(_not_first) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _not_first(module: Any, _: Any) -> None:
    module.is_first_microbatch = False
