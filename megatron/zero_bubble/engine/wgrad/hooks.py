"""Finds the hooks of parameters that only autograd would call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel

_OF_DATA_PARALLELISM = f"{DistributedDataParallel._make_backward_post_hook.__qualname__}."


class GatedHook:
    """A hook of data parallelism on the node of a parameter; autograd calls it too early if the gradient waits for W.

    Args:
        hook: the hook.
        waits: whether the gradient waits.
    """

    def __init__(self, hook: Callable[[], None], waits: Callable[[], bool]) -> None:
        self._hook, self._waits = hook, waits

    def __call__(self, *_: Any) -> None:
        """Called by autograd after it has accumulated a gradient."""
        if not self._waits():
            self._hook()


class _NodeHooks(NamedTuple):
    """The hooks of the node that accumulates a parameter's gradient.

    Attributes:
        node: kept, because autograd itself has only a weak reference to it.
        hooks: all of them; the node's own dictionary.
        num_own: how many of them belong to data parallelism.
    """

    node: Any
    hooks: Mapping[int, Any]
    num_own: int


class ParameterHooks:
    """Knows the parameters whose gradients others than data parallelism want to see."""

    def __init__(self) -> None:
        self._of_nodes: dict[torch.Tensor, _NodeHooks] = {}

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """From now on, notice also hooks on the nodes that accumulate the gradients of these parameters."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                # A node lists its hooks only in the handle of one of them.
                handle = node.register_hook(_nothing)
                hooks = handle.hooks_dict_ref()
                handle.remove()
                self._of_nodes[parameter] = _NodeHooks(node, hooks, sum(map(_is_own, hooks.values())))

    def are_on(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has hooks now."""
        if has_hooks(parameter):
            return True
        of_node = self._of_nodes.get(parameter)
        return of_node is not None and len(of_node.hooks) > of_node.num_own


def has_hooks(parameter: Any) -> bool:
    """Whether hooks are registered on the parameter itself, before or after its gradient is accumulated."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _nothing(*_: Any) -> None:
    """A hook without effect."""


def _is_own(hook: Any) -> bool:
    return isinstance(hook, GatedHook) or getattr(hook, "__qualname__", "").startswith(_OF_DATA_PARALLELISM)
