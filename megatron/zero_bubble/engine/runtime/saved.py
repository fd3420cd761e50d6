"""What forwards save for their backwards: the one pair of saved-tensor hooks of a rank.

Of nested pairs of hooks, torch calls only the innermost, so measuring and offloading share this pair. The hooks exist
only around a forward that is measured or moves; all others run without.

The unit is the storage, not the tensor: views and aliases of one storage are saved many times, and its bytes move once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.zero_bubble.core.ir import Compute, Kind, Pass
from megatron.zero_bubble.engine.runtime.handler import Handler

Counter = Callable[[torch.UntypedStorage], object]
"""Called for each storage that is saved; what it returns is kept as long as the device has the storage for it."""


class Place:
    """A storage that a forward saved, on the device or elsewhere.

    Attributes:
        storage: None while its bytes are not on the device.
    """

    __slots__ = ("_count", "_counted", "device", "num_bytes", "storage")

    def __init__(self, storage: torch.UntypedStorage, count: Counter | None) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.num_bytes = storage.nbytes()
        self.device = storage.device
        self._count = count
        self._counted = None if count is None else count(storage)

    def leave(self) -> bool:
        """Drop the storage, unless something else refers to it, too: then it would free nothing, and what else refers
        to it may need it. Returns whether it is gone.
        """
        assert self.storage is not None, "a storage leaves the device once"
        weak = StorageWeakRef(self.storage)
        self.storage = None
        self.storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        if self.storage is None:
            self._counted = None
        return self.storage is None

    def come_back(self, storage: torch.UntypedStorage) -> None:
        """Continue with ``storage``, which has, or is to receive, the same bytes."""
        self.storage = storage
        self._counted = None if self._count is None else self._count(storage)


class Window:
    """What autograd keeps in place of a tensor: its view of a storage.

    With hooks, autograd does not notice that a saved tensor is changed in place; the window does, also after it left.
    """

    __slots__ = ("_alias", "_has_left", "_version", "_view", "place")

    def __init__(self, place: Place, tensor: torch.Tensor) -> None:
        self.place = place
        self._alias = tensor.detach()  # shares the version, and has no graph: no cycle
        self._version = tensor._version
        self._view = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._has_left = False

    def leave(self) -> None:
        """Refer to the storage only through ``place``."""
        self._has_left = True
        self._alias.data = self._alias.new_empty(0)  # without the bytes, it still shares the version

    def tensor(self) -> torch.Tensor:
        """The tensor, without gradient.

        Raises:
            RuntimeError: it was changed in place after it was saved.
        """
        alias = self._alias
        _check_unchanged(alias, self._version, self._view[1])
        if not self._has_left:
            return alias
        storage = self.place.storage
        assert storage is not None, "a backward ran before its values were fetched"
        return torch.empty(0, dtype=alias.dtype, device=storage.device).set_(storage, *self._view)


class SavedTensors:
    """The hooks of one rank.

    Attributes:
        counter: called for each storage that a forward saves, if set.
    """

    def __init__(self) -> None:
        self.counter: Counter | None = None
        self._parameters: frozenset[int] = frozenset()
        self._moving: frozenset[Pass] = frozenset()
        self._windows: list[Window] | None = None  # of the running forward
        self._places: dict[int, Place] = {}
        self._of: dict[Pass, list[Window]] = {}

    def expect(self, moving: Iterable[Pass]) -> None:
        """Keep the windows of these forwards, and of no others, until something takes them."""
        self._moving = frozenset(moving)

    def take(self, forward: Pass) -> list[Window]:
        """The windows of a forward that moves, once."""
        return self._of.pop(forward)

    def clear(self) -> None:
        """Forget the windows that nothing has taken, after a failed iteration."""
        self._of.clear()

    def around(self, compute: Handler, chunks: Iterable[torch.nn.Module]) -> Handler:
        """The handler of the passes of an iteration, with the hooks around forwards.

        Args:
            chunks: model chunks of this rank, whose parameters are not activations: they are recognized by storage,
                because linears save them detached or transposed, and sharded units move their bytes.
        """
        self.clear()
        if self.counter is None and not self._moving:
            return compute
        weights = (p for chunk in chunks for p in chunk.parameters())
        self._parameters = frozenset(p.untyped_storage()._cdata for p in weights if _has_storage(p))

        def run(op: Compute, inputs: Sequence[Any]) -> Any:
            with self.of(op.work):
                return compute(op, inputs)

        return run

    def of(self, work: Pass) -> AbstractContextManager[None]:
        """Context around a pass, or around a forward and what runs at the same time: with the hooks, if it is a forward
        that is measured or moves, or one that runs again and is measured.
        """
        measured = self.counter is not None and work.kind in (Kind.F, Kind.R)
        collects = measured or (work.kind is Kind.F and work in self._moving)
        return self._hooked(work) if collects else nullcontext()

    @contextmanager
    def _hooked(self, forward: Pass) -> Iterator[None]:
        windows: list[Window] = []
        self._windows = windows
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            self._windows = None
            self._places.clear()
        if forward in self._moving:
            self._of[forward] = windows

    def pack(self, tensor: torch.Tensor) -> Any:
        """What to keep in place of ``tensor`` until the backward; ``unpack`` returns the tensor."""
        if self._windows is None:
            return tensor
        if not _has_storage(tensor):
            return _Whole(None, tensor)
        storage = tensor.untyped_storage()
        if storage._cdata in self._parameters:
            return tensor
        place = self._places.get(storage._cdata)
        if place is None:
            place = self._places[storage._cdata] = Place(storage, self.counter)
        if type(tensor) is not torch.Tensor:  # a view of a storage does not describe it
            return _Whole(place, tensor)
        window = Window(place, tensor)
        self._windows.append(window)
        return window


class _Whole:
    """A tensor of a subclass, which stays as it is, and its storage, which is counted if it has one."""

    __slots__ = ("_place", "_tensor", "_version")

    def __init__(self, place: Place | None, tensor: torch.Tensor) -> None:
        self._place = place
        # Without its graph, because what saves it may be a part of the graph. A leaf has none.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def tensor(self) -> torch.Tensor:
        """See ``Window``."""
        _check_unchanged(self._tensor, self._version, self._tensor.size())
        return self._tensor


def unpack(kept: Any) -> torch.Tensor:
    """The tensor that was given to ``SavedTensors.pack``."""
    return kept.tensor() if isinstance(kept, (Window, _Whole)) else kept


def _has_storage(tensor: torch.Tensor) -> bool:
    """Whether it has a storage of its own, unlike a subclass that consists of other tensors, for example of fp8."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch has no function that asks
        return False
    return True


def _check_unchanged(tensor: torch.Tensor, version: int, size: torch.Size) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the tensors needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} of shape {list(size)} is at version {tensor._version}; expected version {version}"
        )
