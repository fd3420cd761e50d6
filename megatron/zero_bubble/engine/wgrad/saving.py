"""Saves the input of a linear once, for upstream's function and for W, as the saved-tensor hooks in force want it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class SavedInput:
    """The input of one use of a linear, from its forward until its backward has run.

    Without hooks it is the tensor itself, which upstream's function saves as well. With hooks, which may move it, or
    drop it to compute it again, it is what they return when upstream's backward unpacks it.

    Args:
        x: the input.
        passed: the weight as it is passed to upstream's function; detached, so it is another tensor than the parameter.
        weight: the parameter, which hooks get in place of ``passed``: some leave parameters alone.
    """

    __slots__ = ("_hooks", "_packed", "_passed", "_weight", "_x")

    def __init__(self, x: torch.Tensor, passed: torch.Tensor, weight: torch.nn.Parameter) -> None:
        self._hooks: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._x: torch.Tensor | None = x
        self._passed, self._weight = passed, weight
        self._packed: Any = None  # by us, if upstream's function does not save the input

    def around(self) -> AbstractContextManager[Any]:
        """Context around upstream's forward."""
        if self._hooks is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def forwarded(self) -> None:
        """The forward has run; with hooks, no reference to the input is left."""
        if self._hooks is not None and self._x is not None:
            self._packed = self._hooks[0](self._x)
            self._x = None

    def take(self) -> torch.Tensor:
        """The input, in a backward; afterwards it is gone, unless the graph is to be used again."""
        x = self._x
        if x is None:
            assert self._hooks is not None, "a graph that is used again must be kept with retain_graph=True"
            x = self._hooks[1](self._packed)
        if self._hooks is not None or not torch._C._autograd._get_current_graph_task_keep_graph():
            self._x = None
        return x

    def drop(self) -> None:
        """Do not keep what a backward has unpacked for nothing."""
        if self._hooks is not None:
            self._x = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        assert self._hooks is not None
        pack = self._hooks[0]
        if tensor is self._passed:
            return False, pack(self._weight)
        if tensor is self._x:
            packed = pack(tensor)
            self._x = None
            return True, packed
        return False, pack(tensor)

    def _unpack(self, saved: tuple[bool, Any]) -> torch.Tensor:
        assert self._hooks is not None
        is_input, packed = saved
        tensor = self._hooks[1](packed)
        if is_input:
            self._x = tensor
        return tensor
