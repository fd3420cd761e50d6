"""The store of deferred weight gradients: filled by B passes, emptied by W passes in microbatch order.

A deferred gradient is an object that can compute itself; the store keeps these objects by the W pass that they belong
to. One store serves all stages of a rank.

Registers prove, stores hold: for the executor, the operands of a W are a value without content, which B gives and W
takes, so that the proof of a plan covers them. Their tensors are here, because linears put them here during B, and no
pass returns them. So it is with the keys and values of slices (``adapter.history``).

The W passes at the end of an iteration can be grouped by weight. The order of gradients per weight stays the same, but
weights become ready one after the other, so that data parallelism reduces the first while the last are computed (Zero
Bubble paper, appendix A).
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.runtime.saved import SavedTensors
from megatron.zero_bubble.engine.wgrad.gradients import ComputedGradient, Deferred, Product
from megatron.zero_bubble.engine.wgrad.operands import SharedGradients, Versions, in_same_memory, versions_of

_NO_TASK = -1
"""What autograd answers where it runs no backward."""


class Accumulator(Protocol):
    """Computes and accumulates deferred gradients."""

    def add(self, uses: Sequence[Sequence[Product | ComputedGradient]], ready: bool) -> None:
        """Accumulate gradients.

        Args:
            uses: one item per weight and microbatch, in microbatch order, with all gradients of this weight in this
                microbatch.
            ready: whether these are the last gradients of their weights in this iteration, so that data parallelism may
                reduce them.
        """
        ...


class Source(Protocol):
    """A producer of deferred gradients that also keeps its own queue, such as TransformerEngine's modules."""

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Prepare for an iteration of these model chunks."""
        ...

    def forward(self) -> AbstractContextManager[None]:
        """Context around a forward pass."""
        ...

    def backward(self, split: bool) -> AbstractContextManager[None]:
        """Context around a backward pass; ``split`` is whether it has a separate W pass."""
        ...

    def settle(self) -> None:
        """Complete the gradients that the running backward has deferred so far, so that they can run within it."""
        ...

    def clear(self) -> None:
        """Discard all deferred gradients."""
        ...


class _Entry(NamedTuple):
    origin: Pass
    deferred: Deferred
    versions: Versions

    @property
    def use(self) -> tuple[Pass, int]:
        """Key of the weight and the pass."""
        return self.origin, id(self.deferred.weight)


class WgradStore:
    """Deferred weight gradients by (stage, microbatch, slice).

    Args:
        accumulator: accumulates the stored gradients.
        saved: keeps what forwards save.

    Attributes:
        shared: copies the output gradients that others may write to.
        running: the F or backward of a training iteration that runs now; None between them.
    """

    def __init__(self, accumulator: Accumulator, saved: SavedTensors | None = None) -> None:
        self._accumulator = accumulator
        self.saved = SavedTensors() if saved is None else saved
        self.shared = SharedGradients()
        self._stored: dict[Pass, list[_Entry]] = {}
        self._sources: list[Source] = []
        self._chunks: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.running: Pass | None = None
        self._forward: Pass | None = None
        self._backward: Pass | None = None
        self._deferring = False
        self._accumulating = -1, False  # the last graph task that was asked, and whether it accumulates

    def attach(self, source: Source) -> None:
        """Forward ``watch``, ``clear`` and the backward context of the store to ``source`` from now on."""
        self._sources.append(source)

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Prepare for an iteration of these model chunks.

        Raises:
            UserError: a source does not support them.
        """
        self._chunks.update(chunks)
        for source in self._sources:
            source.watch(chunks)

    @property
    def current(self) -> Pass | None:
        """The W pass for which ``put`` stores gradients now; None outside the B of a split microbatch."""
        return self._backward

    @property
    def origin(self) -> Pass | None:
        """The W pass of the linears that run now: in an F or, if they are recomputed, in a B."""
        recomputes = self._backward is not None and torch._C._current_graph_task_id() != _NO_TASK
        return self._backward if recomputes else self._forward

    @property
    def deferring(self) -> bool:
        """Whether the running forward belongs to a split microbatch, so that linears must defer weight gradients."""
        return self._deferring

    @contextmanager
    def defer(self, work: Pass, split: bool = True, alongside: Pass | None = None) -> Iterator[None]:
        """Context around the F, R or B of a split microbatch: linears defer, and gradients are stored for its W.

        With ``split=False``, context around those of an unsplit microbatch: nothing is deferred.

        Args:
            alongside: an F that runs at the same time as the B ``work``.
        """
        is_backward = work.kind not in (Kind.F, Kind.R)
        w = _w_of(work) if split else None
        self._backward = w if is_backward else None
        self._forward = w if alongside is None else _w_of(alongside)
        self._deferring, self.running = split, work
        try:
            with ExitStack() as sources:
                for source in self._sources:
                    sources.enter_context(source.backward(split) if is_backward else source.forward())
                yield
            self.shared.settle()
        finally:
            self._forward, self._backward, self._deferring, self.running = None, None, False, None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context around passes that a graph records: they cannot compare values."""
        self.shared.tries = False
        try:
            yield
        finally:
            self.shared.tries = True

    def wants(self, origin: Pass | None, weight: torch.nn.Parameter, leaf: torch.Tensor) -> bool:
        """Whether the backward that autograd runs now is to accumulate the gradients of weights.

        If it returns gradients instead (``torch.autograd.grad``), nobody has asked for those of weights.

        Args:
            origin: the W pass of the linear whose backward runs.
            weight: its weight.
            leaf: a leaf of autograd in its graph.

        Raises:
            UserError: the backward accumulates them outside of the B of their microbatch.
        """
        task = torch._C._current_graph_task_id()
        if task != self._accumulating[0]:
            self._accumulating = task, _accumulates(leaf)
        if not self._accumulating[1]:
            return False
        if self._backward is None or self._backward != origin:
            raise UserError(
                "under a zero-bubble schedule, only the schedule's own backward accumulates gradients; "
                f"{self.name_of(weight)} got one from another, such as a backward() within the forward step; compute "
                "it with torch.autograd.grad(), or add its loss to the loss of the microbatch"
            )
        return True

    def name_of(self, weight: torch.nn.Parameter) -> str:
        for chunk in self._chunks:
            for name, parameter in chunk.named_parameters():
                if parameter is weight:
                    return name
        return f"a weight of shape {tuple(weight.shape)}"

    def put(self, deferred: Deferred) -> None:
        """Store a gradient for the W pass of the running B.

        W adds it to the parameter, and then calls the hook of data parallelism, which expects a gradient. If W has
        added to ``main_grad`` itself, the hook gets a zero in its place (``stand_in``), and does not add it.
        """
        assert self._backward is not None, "a deferred linear ran its backward outside a split B"
        entry = _Entry(self._backward, deferred, versions_of(deferred.operands()))
        self._stored.setdefault(self._backward, []).append(entry)

    @torch.no_grad()
    def before_writing(self, tensor: torch.Tensor) -> None:
        """Let W keep copies of the operands of the running B in the memory of ``tensor``, which is to be changed."""
        entries = self._stored.get(self._backward, []) if self._backward is not None else []
        for index, (origin, deferred, _) in enumerate(entries):
            if any(in_same_memory(operand, tensor) for operand in deferred.operands()):
                deferred.copy(tensor)
                entries[index] = _Entry(origin, deferred, versions_of(deferred.operands()))

    def group(self, works: Sequence[Pass]) -> None:
        """Sort the gradients of these W passes by weight, and distribute them over the passes again.

        The weights are in the order of the last pass in ``works``. Each pass gets about the same number of elements.
        """
        entries = [entry for work in works for entry in self._stored.pop(work, ())]
        last_first = sorted(entries, key=lambda entry: entry.origin != works[-1])
        order = {weight: i for i, weight in enumerate(dict.fromkeys(id(e.deferred.weight) for e in last_first))}
        entries.sort(key=lambda entry: order[id(entry.deferred.weight)])
        sizes = [entry.deferred.num_elements for entry in entries]
        share, use = 0, None
        for entry, before, size in zip(entries, accumulate(sizes, initial=0), sizes, strict=False):
            if entry.use != use:  # keep several uses of a weight in one microbatch together
                share = (2 * before + size) * len(works) // (2 * sum(sizes))  # by the middle of the entry
                use = entry.use
            self._stored.setdefault(works[share], []).append(entry)

    def run(
        self,
        work: Pass,
        is_late: Callable[[Pass], bool] = lambda origin: True,
        late: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run the W pass ``work``; each gradient overlaps with the communication of the next one.

        Args:
            is_late: whether the gradients of a W pass do not make their weights ready. Such gradients are accumulated
                in one call, except those that gather their input. Every other gradient is finished before the next
                begins, so that its reduction can start.
            late: context for the accumulation of gradients for which ``is_late`` is true.
        """
        entries = deque(self._stored.pop(work, ()))
        left = Counter(entry.use for entry in entries)
        products: dict[tuple[Pass, int], list[Product | ComputedGradient]] = defaultdict(list)
        if entries:
            self._begin(entries[0])
        while entries:
            together = is_late(entries[0].origin)
            with late() if together else nullcontext():
                more, complete = True, []
                while more:
                    entry = entries.popleft()
                    if entries:
                        self._begin(entries[0])
                    products[entry.use] += entry.deferred.run()
                    left[entry.use] -= 1
                    if not left[entry.use]:
                        complete.append(products.pop(entry.use))
                    more = together and bool(entries) and is_late(entries[0].origin)
                    if complete and (entry.deferred.gathers or not more):
                        self._accumulator.add(complete, ready=not together)
                        complete = []

    def _begin(self, entry: _Entry) -> None:
        """Start what ``entry`` needs from other ranks.

        Raises:
            UserError: its operands are not those of B.
        """
        if versions_of(entry.deferred.operands()) != entry.versions:
            raise UserError(
                "the operands of a weight gradient that waits for W must stay as they were in B; something has changed "
                f"those of {self.name_of(entry.deferred.weight)} in place after its backward; change a copy, for "
                "example with mul() in place of mul_() in the backward of an autograd function"
            )
        entry.deferred.prefetch()

    def settle(self) -> None:
        """Called within a backward, before the gradients that it has deferred so far are run."""
        for source in self._sources:
            source.settle()

    def tensors(self, work: Pass) -> Iterator[torch.Tensor]:
        """The tensors held in memory until the W pass ``work``."""
        for entry in self._stored.get(work, ()):
            yield from entry.deferred.tensors()

    def has(self, work: Pass) -> bool:
        """Whether gradients wait for the W pass ``work``."""
        return bool(self._stored.get(work))

    def clear(self) -> None:
        """Discard everything; called when an iteration starts, which may be a repetition by Megatron."""
        self._stored.clear()
        self.shared.clear()
        for source in self._sources:
            source.clear()

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))


def _w_of(work: Pass) -> Pass:
    return Pass(work.stage, Kind.W, work.microbatch, work.slice)


def _accumulates(leaf: torch.Tensor) -> bool:
    """Whether the backward that runs now accumulates the gradient of ``leaf``."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad() returns it
        return False
