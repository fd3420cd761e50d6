"""Measures the memory of microbatches in bytes: M_B and M_W of the Zero Bubble paper, and a rank's peak.

Sizes are counted from the tensors, so that CPU and GPU give the same figures. M_B is the total size of the storages
that a forward saves for its backward, without parameters; with slices of sequences, of all slices of a microbatch, and
with the keys and values that they share (the history). M_W is the size of the operands that deferred weight
gradients hold between B and W, again of all slices. With vocabulary parallelism, the size of what S saves for its T is
measured as well. The peak is the maximum total size of these storages after any pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.ir import Kind, Op, Pass
from megatron.zero_bubble.engine.runtime.observer import IterationObserver, IterationStart
from megatron.zero_bubble.engine.runtime.saved import SavedTensors


class MemoryMeter(IterationObserver):
    """Measures the first iteration that completes; inactive afterwards.

    Attributes:
        activation: M_B by stage, in bytes.
        wgrad: M_W by stage, in bytes.
        history: keys and values that the slices of a microbatch share, by stage, in bytes; none without slices.
        rebuilt: what an R saves for its B, by stage, in bytes; none without R.
        states: what a slice hands to the next one besides, likewise.
        logits: what S saves for T on the rank, by the stage of S, in bytes; none without vocabulary parallelism.
        peak: peak of the rank, in bytes.
    """

    def __init__(self) -> None:
        self._tensors: SavedTensors | None = None
        self._operands: Callable[[Pass], Iterable[torch.Tensor]] = lambda _: ()
        self._histories: Callable[..., Iterable[torch.Tensor]] = lambda *_: ()
        self._states: Callable[..., Iterable[torch.Tensor]] = lambda *_: ()
        self._watches = False
        self._done = False
        self._start()

    def _start(self) -> None:
        self.activation: dict[int, int] = {}
        self.wgrad: dict[int, int] = {}
        self.history: dict[int, int] = {}
        self.rebuilt: dict[int, int] = {}
        self.states: dict[int, int] = {}
        self.logits: dict[int, int] = {}
        self.peak = 0
        self._split: dict[int, int] = {}  # by stage, the first microbatch whose backward is split
        self._alive = _Alive()
        self._saved: set[int] = set()
        self._deferred: dict[Pass, list[_Kept]] = {}

    def begin_iteration(self, start: IterationStart) -> None:
        self._watches = not self._done and start.saved is not None
        if start.saved is not None and self._watches:
            self._start()
            self._operands, self._histories, self._states = start.operands, start.histories, start.states
            self._tensors = start.saved
            self._tensors.counter = self._count_saved

    def end_iteration(self, completed: bool) -> None:
        self._done = self._done or (completed and self._watches)
        self._watches = False
        if self._tensors is not None:
            self._tensors.counter = None
            self._tensors = None

    def restarted(self) -> None:
        if self._watches:
            self._start()

    def begin(self, op: Op) -> None:
        if self._watches and any(work.kind in (Kind.F, Kind.R) for work in op.works):
            self._saved.clear()

    def end(self, op: Op) -> None:
        if not self._watches or not op.works:
            return
        for work in op.works:
            self._count(work)
        histories = _storages(self._histories()) | _storages(self._states())
        outside = sum(size for pointer, size in histories.items() if pointer not in self._alive.size)
        self.peak = max(self.peak, self._alive.num_bytes + outside)

    def _count(self, work: Pass) -> None:
        """Count what a pass has saved or stored, or forget what it has used."""
        if work.kind is Kind.F:
            if not work.microbatch:
                self._count_activation(work, self.activation)
        elif work.kind is Kind.R:
            if not work.microbatch:
                self._count_activation(work, self.rebuilt)
        elif work.kind is Kind.B:
            size = self._defer(work, Kind.W)
            if work.microbatch == self._split.setdefault(work.stage, work.microbatch):
                self.wgrad[work.stage] = self.wgrad.get(work.stage, 0) + size
        elif work.kind is Kind.S:
            self.logits[work.stage] = self._defer(work, Kind.T)
        elif work.kind in (Kind.W, Kind.T):
            self._deferred.pop(work, None)

    def _defer(self, work: Pass, kind: Kind) -> int:
        """Count what ``work`` has stored for its pass of ``kind`` as alive until that pass, and return its size."""
        later = work._replace(kind=kind)
        tensors = list(self._operands(later))
        self._deferred[later] = [_Kept(self._alive, tensor.untyped_storage()) for tensor in tensors]
        return storage_bytes(tensors)

    def _count_activation(self, work: Pass, total: dict[int, int]) -> None:
        """Add what a slice of microbatch 0 has saved, and what no earlier slice has, to that of its stage."""
        history = _storages(self._histories(work.stage, 0))
        states = _storages(self._states(work.stage, 0))
        if not work.slice:
            self.states[work.stage] = sum(states.values())
        sizes = {pointer: self._alive.size.get(pointer, 0) for pointer in self._saved} | history
        new = sizes.keys() - self._alive.counted - states.keys()
        self._alive.counted |= new
        total[work.stage] = total.get(work.stage, 0) + sum(sizes[pointer] for pointer in new)
        if history:
            self.history[work.stage] = sum(history.values())

    def gather(self, group: dist.ProcessGroup) -> PassMemory:
        """M_B, M_W, history and states of all stages, and what S saves on all ranks, in bytes.

        A collective call of the pipeline's ``group``.
        """
        figures: list[Any] = [None] * group.size()
        own = self.activation, self.wgrad, self.history, self.rebuilt, self.logits
        own = self.activation, self.wgrad, self.history, self.states, self.logits
        dist.all_gather_object(figures, own, group=group)
        of_stages = [{s: b for kept in kind for s, b in kept.items()} for kind in zip(*figures, strict=True)]
        stages, logits = sorted(of_stages[0]), of_stages.pop()
        kept = (tuple(float(kind.get(stage, 0)) for stage in stages) for kind in of_stages)
        activation, wgrad, history, rebuilt = kept
        of_ranks = tuple(float(logits[stage]) for stage in sorted(logits))
        return PassMemory(activation, wgrad, history, rebuilt=rebuilt, logits=of_ranks)
        activation, wgrad, history, states = kept
        of_ranks = tuple(float(logits[stage]) for stage in sorted(logits))
        return PassMemory(activation, wgrad, history, states=states, logits=of_ranks)

    def _count_saved(self, storage: torch.UntypedStorage) -> _Kept:
        self._saved.add(storage.data_ptr())
        return _Kept(self._alive, storage)


class _Alive:
    """Number of references to each live storage and its size in bytes, by address.

    Attributes:
        counted: addresses of the storages that are part of an M_B. A storage that is allocated where one was freed, for
            example because it moved to the host, is another one.
    """

    def __init__(self) -> None:
        self.counted: set[int] = set()
        self.count: Counter[int] = Counter()
        self.size: dict[int, int] = {}
        self.num_bytes = 0


class _Kept:
    """Counts a storage, held by autograd or the store, as long as it is alive itself."""

    def __init__(self, alive: _Alive, storage: torch.UntypedStorage) -> None:
        self._alive, self._pointer = alive, storage.data_ptr()
        if not alive.count[self._pointer]:
            alive.size[self._pointer] = storage.nbytes()
            alive.num_bytes += storage.nbytes()
        alive.count[self._pointer] += 1

    def __del__(self) -> None:
        self._alive.count[self._pointer] -= 1
        if not self._alive.count[self._pointer]:
            self._alive.num_bytes -= self._alive.size.pop(self._pointer)
            self._alive.counted.discard(self._pointer)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The total size in bytes of the distinct storages of ``tensors``."""
    return sum(_storages(tensors).values())


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Sizes in bytes of the distinct storages of ``tensors``, by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
