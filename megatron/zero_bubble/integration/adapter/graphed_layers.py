"""CUDA graphs of TransformerEngine by slots, in the place of graphs in the order of Megatron's own schedule.

megatron-core captures its layers with one call of ``make_graphed_callables``, in the order of its 1F1B. All of these
graphs share memory, so they may be replayed in this order only, for all microbatches. Here every stage and slot gets a
call of its own, with one microbatch and memory that no other slot shares, so the graphs fit every order. Each graph
that is returned stands for all slots of its layer, and replays the slot of the running pass.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.zero_bubble.engine.wgrad.delayed import DelayedModule
from megatron.zero_bubble.engine.wgrad.transformer_engine import TransformerEngineSplit
from megatron.zero_bubble.integration.adapter.graph_slots import GraphSlots
from megatron.zero_bubble.planning.job.graphs import MODULES, graphs_of

_PER_LAYER = ("enabled", "fp8_enabled")
"""Options of ``make_graphed_callables`` that may have a value per layer."""


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
    for place in (place for name in names for place in MODULES.get(name, ())):
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
        numbers = slots.capture(num_microbatches)
        if len(numbers) != num_chunks:  # an encoder before the first stage
            numbers = (max(numbers),) * num_chunks
        graphed: list[GraphedLayer] = []
        first = 0
        for number, length in zip(numbers, lengths, strict=True):
            own = slice(first, first + length)
            samples = slice(first * num_microbatches, first * num_microbatches + length)  # of its first microbatch
            of_stage = {
                name: value[own] if name in _PER_LAYER and isinstance(value, tuple) else value
                for name, value in options.items()
            }
            stage = _Stage(original, split, modules[own], of_stage)
            inputs = sample_args[samples], None if sample_kwargs is None else sample_kwargs[samples]
            by_slot = [stage.capture(*map(_copies, inputs)) for _ in range(number)]
            layers = zip(modules[own], zip(*by_slot, strict=True), stage.delayed, strict=True)
            graphed += [GraphedLayer(*layer, slots, split) for layer in layers] * num_microbatches
            first += length
        return tuple(graphed)

    return make_graphed_callables


class _Stage:
    """The graphed layers of a stage.

    Args:
        options: other arguments of ``make_graphed_callables``.

    Attributes:
        delayed: for every layer, the modules whose W is a graph of its own; known when graphs were captured.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        split: TransformerEngineSplit,
        layers: Sequence[torch.nn.Module],
        options: dict[str, Any],
    ) -> None:
        self._original, self._split = original, split
        self._layers, self._options = layers, options
        self.delayed: list[Sequence[DelayedModule]] = [() for _ in layers]

    def capture(self, args: Sequence[Any], kwargs: Sequence[Any] | None) -> tuple[Any, ...]:
        """Capture one microbatch of all layers, in memory that no other call uses."""
        if not self._layers:
            return ()
        own = dict(self._options) if kwargs is None else self._options | {"sample_kwargs": kwargs}
        with ExitStack() as context:
            self.delayed = [context.enter_context(self._split.capturing(layer)) for layer in self._layers]
            context.enter_context(_accumulating(self._layers))
            order, lengths = self._order()
            own |= {"_order": order, "_num_layers_per_chunk": lengths}
            if "_reuse_graph_input_output_buffers" in own:
                own["_reuse_graph_input_output_buffers"] = not any(self.delayed) and all(map(_is_whole, self._layers))
            return tuple(self._original(tuple(self._layers), args, **own))

    def _order(self) -> tuple[list[float], list[int]]:
        """The order of the captures, and the layers of each chunk, as TransformerEngine has them."""
        number = len(self._layers)
        if not any(self.delayed):
            return [1, -1], [number]
        chunks = range(1, number + 1)
        with_w = [-chunk - 0.5 for chunk in reversed(chunks) if self.delayed[chunk - 1]]
        return [*chunks, *(-chunk for chunk in reversed(chunks)), *with_w], [1] * number


class GraphedLayer:
    """The graphs of a layer, by slot; replays those of the slot of the running pass.

    Args:
        delayed: the modules whose W is a graph of its own.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        graphs: Sequence[Any],
        delayed: Sequence[DelayedModule],
        slots: GraphSlots,
        split: TransformerEngineSplit,
    ) -> None:
        self._graphs, self._delayed = graphs, delayed
        self._slots, self._split = slots, split
        self._parameters = {id(parameter) for parameter in layer.parameters()}
        self._dropped = {id(weight) for module in delayed for weight in module.weights}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = self._graphs[self._slots.current]
        outputs = graph(*args, **kwargs)
        node = next((output.grad_fn for output in tree_leaves(outputs) if output.grad_fn is not None), None)
        if node is not None:
            before = [each.grad_fn for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            leaves = not any(each is not None and each.name() == node.name() for each in before)
            if leaves or self._delayed:
                node.register_hook(functools.partial(self._after_backward, graph, node.next_functions, leaves))
        return outputs

    def reset(self) -> None:
        """Free the graphs; megatron-core's helper calls it once per microbatch."""
        graphs, self._graphs = self._graphs, ()
        for graph in graphs:
            graph.reset()

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
            self._split.replayed(self._delayed, graph.backward_dw)
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
