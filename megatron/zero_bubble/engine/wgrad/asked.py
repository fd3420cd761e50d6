"""Gradients of weights that are asked for by name, with ``torch.autograd.grad``, although their linear defers them.

A loss may weight its parts by the gradients of the last weight. The graph has no edge to that weight, so autograd alone
would answer that it was not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.wgrad.linear import Use
from megatron.zero_bubble.engine.wgrad.store import WgradStore


def answering(original: Callable[..., Any], store: WgradStore) -> Callable[..., Any]:
    """The replacement for ``torch.autograd.grad``: within a pass, it finds the weights whose gradients are deferred."""

    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        uses = _deferred_uses(outputs, inputs) if store.deferring else []
        if not uses:
            return original(outputs, inputs, *args, **named)
        return _grad(original, uses, _as_tuple(outputs), _as_tuple(inputs), *args, **named)

    return grad


def _grad(
    original: Callable[..., Any],
    uses: Sequence[Use],
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    if create_graph or is_grads_batched:
        raise UserError(
            "under a zero-bubble schedule, the gradient of a weight that waits for W is a plain value: got "
            f"create_graph={create_graph}, is_grads_batched={is_grads_batched}; leave it out, ask for the gradient of "
            "an activation, or train without --zero-bubble-schedule"
        )
    found: dict[int, torch.Tensor] = {}

    def add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        before = found.get(id(parameter))
        found[id(parameter)] = gradient if before is None else before + gradient

    for use in uses:
        use.answer = add
    try:
        others = original(
            outputs, [*inputs, *(use.passed for use in uses)], grad_outputs, retain_graph, allow_unused=True
        )
    finally:
        for use in uses:
            use.answer = None
    for use, derivative in zip(uses, others[len(inputs) :], strict=True):
        if derivative is not None:  # reaches the weight through an input gradient, which the outputs were computed from
            add(use.weight, derivative)
    results = [_sum(_hooked(x, found.get(id(x))), other) for x, other in zip(inputs, others, strict=False)]
    if materialize_grads:
        results = [torch.zeros_like(x) if one is None else one for x, one in zip(inputs, results, strict=True)]
    if any(one is None for one in results) and not allow_unused:
        raise RuntimeError(
            "One of the differentiated tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    return tuple(results)


def _hooked(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """``gradient`` as the parameter's own hooks return it; autograd calls them only for what it computes itself."""
    if gradient is None:
        return None
    hooks: Mapping[int, Callable[[torch.Tensor], torch.Tensor | None]] = parameter._backward_hooks or {}
    for hook in hooks.values():
        returned = hook(gradient)
        gradient = gradient if returned is None else returned
    return gradient


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a if b is None else b if a is None else a + b


def _deferred_uses(outputs: Any, inputs: Any) -> list[Use]:
    """The uses of linears in the graph of ``outputs`` that defer the gradients of parameters among ``inputs``."""
    wanted = {id(x) for x in _as_tuple(inputs) if isinstance(x, torch.nn.Parameter)}
    if not wanted:
        return []
    nodes: list[Any] = [x.grad_fn for x in _as_tuple(outputs) if isinstance(x, torch.Tensor)]
    seen, uses = set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        use = getattr(node, "grad_output_buffer", None)
        if isinstance(use, Use) and wanted & set(map(id, (use.weight, use.bias))):
            uses.append(use)
        nodes += (following for following, _ in node.next_functions)
    return uses


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    is_one = isinstance(tensors, (torch.Tensor, torch.autograd.graph.GradientEdge))
    return (tensors,) if is_one and not isinstance(tensors, tuple) else tuple(tensors)
