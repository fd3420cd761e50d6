"""What microbatches keep, in bytes: the M_B and M_W of the Zero Bubble paper and a rank's peak, measured.

Counted from the tensors themselves, so that CPU and GPU give the same figures: M_B is every storage that a forward
saves for its backward, parameters left out; M_W is what the deferred weight gradients hold between B and W; the peak is
the most bytes of such storages that were alive after any pass.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron.zero_bubble.ir import Kind, Pass
from megatron.zero_bubble.wgrad.store import WgradStore


class MemoryMeter:
    """A ``PassObserver`` that watches the passes of one iteration, the first that ends well, then no more.

    Args:
        store: where B leaves what W needs.

    Attributes:
        activation: M_B by stage.
        wgrad: M_W by stage.
        peak: of the rank.
    """

    def __init__(self, store: WgradStore) -> None:
        self._store = store
        self._parameters: frozenset[int] = frozenset()
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._watches = False
        self._done = False
        self._start()

    def _start(self) -> None:
        self.activation: dict[int, int] = {}
        self.wgrad: dict[int, int] = {}
        self.peak = 0
        self._alive = _Alive()
        self._saved: set[int] = set()
        self._deferred: dict[Pass, list[_Kept]] = {}

    @contextlib.contextmanager
    def around_iteration(self, chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Watch the passes within. The parameters of ``chunks`` do not count: they stay anyway. An exception of a pass
        leaves nothing behind.
        """
        self._watches = not self._done
        if self._watches:
            self._start()
            self._parameters = frozenset(p.untyped_storage().data_ptr() for chunk in chunks for p in chunk.parameters())
        try:
            yield
            self._done = True
        finally:
            self._watches = False
            self._unhook()

    def begin(self, work: Pass) -> None:
        if self._watches and work.kind is Kind.F:
            self._saved.clear()
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()

    def end(self, work: Pass) -> None:
        if not self._watches:
            return
        if work.kind is Kind.F:
            self._unhook()
            self.activation.setdefault(work.stage, sum(self._alive.size.get(pointer, 0) for pointer in self._saved))
        elif work.kind is Kind.B:
            w = Pass(work.stage, Kind.W, work.microbatch, work.slice)
            tensors = list(self._store.tensors(w))
            self.wgrad.setdefault(work.stage, storage_bytes(tensors))
            self._deferred[w] = [_Kept(self._alive, tensor) for tensor in tensors]
        elif work.kind is Kind.W:
            self._deferred.pop(work, None)
        self.peak = max(self.peak, self._alive.num_bytes)

    def _unhook(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in self._parameters:
            return tensor
        self._saved.add(pointer)
        return _Kept(self._alive, tensor)


class _Alive:
    """Storages that something keeps, by their address: how often, and their bytes."""

    def __init__(self) -> None:
        self.count: Counter[int] = Counter()
        self.size: dict[int, int] = {}
        self.num_bytes = 0


class _Kept:
    """A tensor that autograd or the store keeps, counted for as long as it does."""

    def __init__(self, alive: _Alive, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor = tensor
        self._alive, self._pointer = alive, storage.data_ptr()
        if not alive.count[self._pointer]:
            alive.size[self._pointer] = storage.nbytes()
            alive.num_bytes += storage.nbytes()
        alive.count[self._pointer] += 1

    def __del__(self) -> None:
        self._alive.count[self._pointer] -= 1
        if not self._alive.count[self._pointer]:
            self._alive.num_bytes -= self._alive.size.pop(self._pointer)


def _unpack(kept: Any) -> torch.Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the distinct storages behind ``tensors``."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
