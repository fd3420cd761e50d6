"""What a microbatch keeps on a stage, in bytes: the M_B and M_W of the Zero Bubble paper, measured.

Counted from the tensors themselves, so that CPU and GPU give the same figures: M_B is every storage that a forward
saves for its backward, parameters left out; M_W is what the deferred weight gradients hold between B and W.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.zero_bubble.ir import Kind, Pass
from megatron.zero_bubble.runtime.wgrad_store import WgradStore


class MemoryMeter:
    """A ``PassObserver`` that measures one F and its B on each stage, then watches no more.

    Args:
        store: where B leaves what W needs.
    """

    def __init__(self, store: WgradStore) -> None:
        self.activation: dict[int, int] = {}
        self.wgrad: dict[int, int] = {}
        self._store = store
        self._parameters: frozenset[int] = frozenset()
        self._saved: dict[int, int] = {}
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def ignore(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Do not count the parameters of the model chunks: they stay anyway."""
        self._parameters = frozenset(p.untyped_storage().data_ptr() for chunk in chunks for p in chunk.parameters())

    def begin(self, work: Pass) -> None:
        if work.kind is Kind.F and work.stage not in self.activation and torch.is_grad_enabled():
            self._saved.clear()
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)
            self._hooks.__enter__()

    def end(self, work: Pass) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None
            self.activation[work.stage] = sum(self._saved.values())
        elif work.kind is Kind.B and work.stage not in self.wgrad:
            w = Pass(work.stage, Kind.W, work.microbatch, work.slice)
            self.wgrad[work.stage] = storage_bytes(self._store.tensors(w))

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the distinct storages behind ``tensors``."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
