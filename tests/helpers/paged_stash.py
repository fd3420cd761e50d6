"""A fake of megatron-core's paged stash of experts, on the CPU, with its rules.

- ``paged_stash_reset`` begins an iteration. The first one of training records the order of forwards and backwards, and
  every later one must have the same order.
- From then on, what a forward saves is away until the order says that its backward comes next.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

NAME = "megatron.core.transformer.moe.paged_stash"


class PagedStashManager:
    STASH_MGR: Any = None

    def __init__(self) -> None:
        self.status, self.enabled = "begin", False
        self.order: list[int] = []
        self.index = self.count = 0
        self.pages: dict[int, list[torch.Tensor]] = {}
        self.fetched: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def get_instance(cls) -> PagedStashManager:
        if cls.STASH_MGR is None:
            cls.STASH_MGR = cls()
        return cls.STASH_MGR

    def release_stash_buffers(self) -> None:
        assert not self.pages, "pages are in use"

    def reset(self) -> None:
        if not self.enabled:
            return
        assert not self.pages, "an earlier iteration has left pages"
        self.status = {"begin": "capture"}.get(self.status, "captured")
        self.index = self.count = 0

    def pass_by(self, number: int) -> None:
        """A forward of a group of experts (positive) or a backward."""
        if self.status == "capture":
            self.order.append(number)
        assert self.order[self.index] == number, f"schedule {self.order[self.index]} != {number}"
        self.index += 1
        self.fetched = {own: pages for own, pages in self.fetched.items() if own == -number}
        if self.status == "captured" and self.index < len(self.order) and self.order[self.index] < 0:
            self.fetched[-self.order[self.index]] = self.pages.pop(-self.order[self.index])


def paged_stash_reset(enabled: bool = True, config: Any = None) -> None:
    manager = PagedStashManager.get_instance()
    assert config.moe_paged_stash
    manager.enabled = enabled
    manager.reset()


class _Commit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        PagedStashManager.get_instance().pass_by(number)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        PagedStashManager.get_instance().pass_by(-ctx.number)
        return grad, None


def stashed(forward: Any) -> Any:
    """The forward of experts whose saved tensors are in pages."""

    def run(experts: Any, *args: Any) -> Any:
        manager = PagedStashManager.get_instance()
        if not manager.enabled:
            return forward(experts, *args)
        manager.count += 1
        number, pages = manager.count, []

        def pack(tensor: torch.Tensor) -> Any:
            if manager.status != "captured":
                return tensor
            pages.append(tensor)
            return number, len(pages) - 1

        def unpack(saved: Any) -> torch.Tensor:
            return manager.fetched[saved[0]][saved[1]] if isinstance(saved, tuple) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output, bias = forward(experts, *args)
        if manager.status == "captured":
            manager.pages[number] = pages
        return _Commit.apply(output, number), bias

    return run


@contextmanager
def installed() -> Iterator[type[PagedStashManager]]:
    """Give megatron-core the stash within this context, and its experts the calls of it."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    module = ModuleType(NAME)
    module.PagedStashManager, module.paged_stash_reset = PagedStashManager, paged_stash_reset  # type: ignore[attr-defined]
    before, PagedStashManager.STASH_MGR = SequentialMLP.forward, None
    sys.modules[NAME], SequentialMLP.forward = module, stashed(before)
    try:
        yield PagedStashManager
    finally:
        SequentialMLP.forward = before
        del sys.modules[NAME]
