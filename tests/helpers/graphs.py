"""A stand-in for CUDA graphs on the CPU: it records the operators of some work, and repeats them in the same memory.

What it takes from CUDA graphs, so that a test without a GPU sees what a GPU would do:

- A replay runs no Python of the work: it reads and writes the addresses of the capture.
- A capture changes no memory that existed before it, and what it makes has no values before a replay: they are NaN.
- Memory of a pool that was free when a graph was captured may be written by every replay of that graph. The worst case
  is assumed: a replay fills it with NaN, before it runs (what was free before the capture), and after it (what the
  work itself has freed).
- The host cannot read a result during a capture.
- Random numbers come from the state that was set when they were captured, and each replay goes on where the last one
  has ended. Only the states of registered generators can be used.
- What ranks exchange is part of a graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

READS = {"aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero"}
_OF_NUMBERS = "aten.lift_fresh"
"""What ``torch.tensor`` calls; megatron-core passes a mask's type through a recomputed function as such a tensor."""
_DRAWS = torch.Tag.nondeterministic_seeded
_Call = tuple[Any, Any, Any, Any, "torch.Generator | None"]
"""An operator, its arguments, what it returns, and where it has its random numbers from."""
_NAN = 0xFF  # in every byte: NaN in every floating-point type


class Captured:
    """A storage that operators of a pool have used.

    Args:
        is_of_pool: whether a captured operator has made it.
    """

    def __init__(self, storage: torch.UntypedStorage, is_of_pool: bool) -> None:
        self.storage, self.is_of_pool = storage, is_of_pool

    @property
    def is_free(self) -> bool:
        """Whether the pool may give the memory to another tensor: none is left in it."""
        return self.is_of_pool and torch._C._storage_Use_Count(self.storage._cdata) == 1

    def bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.storage)

    def spoil(self) -> None:
        self.bytes().fill_(_NAN)


class RandomStates:
    """The states of random numbers on a GPU, where a tracker of megatron-core selects one for some operators.

    Attributes:
        current: the one that is selected.
    """

    def __init__(self) -> None:
        self.default = self.current = torch.Generator()

    def get(self, *_: Any, clone: bool = False, graph_safe: bool = False) -> Any:
        """In place of ``_get_cuda_rng_state``."""
        if not graph_safe:
            return torch.get_rng_state()
        self.current.set_state(torch.get_rng_state())
        return self.current.clone_state() if clone else self.current

    def set(self, new: Any, *_: Any, graph_safe: bool = False) -> None:
        """In place of ``_set_cuda_rng_state``."""
        if not graph_safe:
            torch.set_rng_state(new)
        elif new is not self.current:
            self.current.set_state(torch.get_rng_state())
            torch.set_rng_state(new.get_state())
            self.current = new

    @contextmanager
    def of(self, source: torch.Generator | None) -> Iterator[None]:
        """Context in which random numbers come from ``source``."""
        before = self.current
        self.set(before if source is None else source, graph_safe=True)
        yield
        self.set(before, graph_safe=True)

    @contextmanager
    def kept(self, registered: Sequence[torch.Generator]) -> Iterator[None]:
        """Context of a capture, which draws no numbers."""
        states = [(each, each.get_state()) for each in registered if each is not self.current]
        state = torch.get_rng_state()
        yield
        for each, before in states:
            each.set_state(before)
        torch.set_rng_state(state)


class _Argument:
    """A tensor that a recorded operator takes or returns."""

    def __init__(self, captured: Captured, tensor: torch.Tensor) -> None:
        self._captured, self._dtype = captured, tensor.dtype
        self._where = tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())

    def tensor(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype).set_(self._captured.storage, *self._where)


class StandInPool:
    """See ``platforms.graphs.GraphPool``.

    Attributes:
        generators: that are registered with each graph.
        random: the states of random numbers.
        of_host: what would be in host memory on a GPU as well, by its identity.
    """

    def __init__(self, generators: Sequence[torch.Generator] = (), random: RandomStates | None = None) -> None:
        self.generators, self.random = generators, random or RandomStates()
        self.of_host: dict[int, torch.UntypedStorage] = {}
        self._captured: dict[int, Captured] = {}

    def capture(self, work: Callable[[], Any]) -> tuple[StandInGraph, Any]:
        assert not gc.isenabled(), "what garbage frees can end a capture"
        before = self._free()
        with self.random.kept(self.generators), _Recorder(self) as recorder:
            result = work()
        recorder.undo()
        return StandInGraph(recorder.calls, before, self._free(), self.random), result

    def known(self, tensor: torch.Tensor, is_made: bool) -> Captured:
        """What is known of the storage of a tensor; ``is_made`` is whether an operator has just returned the tensor."""
        storage = tensor.untyped_storage()
        return self._captured.setdefault(storage._cdata, Captured(storage, is_made))

    def _free(self) -> list[Captured]:
        return [each for each in self._captured.values() if each.is_free]


class StandInGraph:
    """See ``platforms.graphs.Graph``."""

    def __init__(self, calls: Sequence[_Call], before: list[Captured], after: list[Captured], random: RandomStates):
        self._calls, self._before, self._after, self._random = calls, before, after, random

    @torch.no_grad()
    def replay(self) -> None:
        for each in self._before:
            each.spoil()
        for operator, args, kwargs, outputs, source in self._calls:
            args, kwargs = tree_map_only(_Argument, _Argument.tensor, (args, kwargs))
            with self._random.of(source):
                results, _ = tree_flatten(operator(*args, **kwargs))
            for output, result in zip(outputs, results, strict=True):
                if isinstance(result, torch.ScriptObject):
                    _ended(result)
                if isinstance(output, _Argument):
                    target = output.tensor()
                    if target.data_ptr() != result.data_ptr() or target.stride() != result.stride():
                        target.copy_(result)
        for each in self._after:
            each.spoil()


class _Recorder(TorchDispatchMode):
    """Records the operators of a capture, which run meanwhile, because the next ones need tensors."""

    def __init__(self, pool: StandInPool) -> None:
        super().__init__()
        self._pool = pool
        self._old: dict[Captured, torch.Tensor] = {}
        self._made: set[Captured] = set()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        name = str(getattr(func, "overloadpacket", func))
        if name == _OF_NUMBERS or (tensors and all(map(self._is_of_host, tensors))):
            results = func(*args, **kwargs)
            for storage in (each.untyped_storage() for each in _tensors(results)):
                self._pool.of_host[storage._cdata] = storage
            return results
        if name in READS:
            raise RuntimeError(f"{func} gives a result to the host, which no graph can do")
        taken = tree_map_only(torch.Tensor, lambda tensor: self._argument(tensor, False), (args, kwargs))
        results = tree_map_only(torch.ScriptObject, _ended, func(*args, **kwargs))
        given = tree_map_only(torch.Tensor, lambda tensor: self._argument(tensor, True), tree_flatten(results)[0])
        self.calls.append((func, *taken, given, self._source() if _DRAWS in func.tags else None))
        return results

    def _source(self) -> torch.Generator:
        """Where the running operator has its random numbers from."""
        current = self._pool.random.current
        if current is not self._pool.random.default and not any(current is own for own in self._pool.generators):
            raise RuntimeError("random numbers come from a generator that is not registered with the graph")
        return current

    def undo(self) -> None:
        """Give memory the bytes that it had before the capture, and no values to what the capture has made."""
        for captured, before in self._old.items():
            captured.bytes().copy_(before)
        for captured in self._made:
            captured.spoil()

    def _argument(self, tensor: torch.Tensor, is_made: bool) -> _Argument:
        captured = self._pool.known(tensor, is_made)
        if captured.is_of_pool:
            self._made.add(captured)
        elif captured not in self._old:
            self._old[captured] = captured.bytes().clone()
        return _Argument(captured, tensor)

    def _is_of_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor would be in host memory on a GPU as well: states of random numbers, tensors that Python's
        numbers are put into, and what is computed of these.
        """
        return tensor.dtype is torch.uint8 or tensor.untyped_storage()._cdata in self._pool.of_host


def _ended(work: Any) -> Any:
    """Work that has ended, in place of an exchange between ranks, which on gloo may run operators when it ends."""
    work.wait()
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()


def _tensors(results: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(results)[0] if isinstance(each, torch.Tensor)]


@contextmanager
def stand_in(pool: Callable[..., StandInPool] = StandInPool) -> Iterator[None]:
    """Context in which ranks on the CPU have graphs, in pools that ``pool`` makes, and models can ask for them."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    from megatron.zero_bubble.engine.platforms.cpu.platform import CpuPlatform

    states = RandomStates()

    def without_gpu(self: Any, *_args: Any, **_kwargs: Any) -> None:
        torch.nn.Module.__init__(self)

    def graph_pool(_: Any, generators: Sequence[torch.Generator] = ()) -> StandInPool:
        made = pool(generators)
        made.random = states
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "graph_pool", graph_pool)
        patch.setattr(CudaGraphManager, "__init__", without_gpu)
        patch.setattr(random, "_get_cuda_rng_state", states.get)
        patch.setattr(random, "_set_cuda_rng_state", states.set)
        patch.setattr(
            torch.cuda.CUDAGraph, "register_generator_state", None, raising=False
        )  # megatron-core looks for it
        yield
