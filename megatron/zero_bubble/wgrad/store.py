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

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from megatron.zero_bubble.ir import Kind, Pass
from megatron.zero_bubble.runtime.saved import SavedTensors


class Product(NamedTuple):
    """The operands of the weight gradient of one use of a linear.

    Attributes:
        weight: (out, in).
        bias: (out,); None if the linear has none or its gradient is not deferred.
        x: the input, (tokens, in).
        grad_output: (tokens, out), same dtype as ``x``.
        by_kernel: whether the job itself uses fused accumulation (``gradient_accumulation_fusion``).
    """

    weight: torch.nn.Parameter
    bias: torch.Tensor | None
    x: torch.Tensor
    grad_output: torch.Tensor
    by_kernel: bool = False


class Deferred(Protocol):
    """The weight gradient of one use of one weight in one microbatch."""

    @property
    def weight(self) -> torch.nn.Parameter:
        """Identifies gradients of the same weight; if the object computes several weights, the first of them."""
        ...

    @property
    def num_elements(self) -> int:
        """Number of elements of all gradients that it computes."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether ``run`` gathers its input, and so needs more memory than ``tensors``."""
        ...

    def prefetch(self) -> None:
        """Start the communication that ``run`` needs, if any."""
        ...

    def run(self) -> Iterable[Product]:
        """The operands of the gradient, for the accumulator; empty if this call has accumulated it itself."""
        ...

    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors that are held in memory until ``run``."""
        ...


class Accumulator(Protocol):
    """Computes and accumulates deferred gradients."""

    def add(self, uses: Sequence[Sequence[Product]], ready: bool) -> None:
        """Accumulate gradients.

        Args:
            uses: one item per weight and microbatch, in microbatch order, with all products of this weight in this
                microbatch.
            ready: whether these are the last gradients of their weights in this iteration, so that data parallelism may
                reduce them.
        """
        ...

    def join(self) -> None:
        """Make later work wait for all gradients added so far."""
        ...


class Source(Protocol):
    """A producer of deferred gradients that also keeps its own queue, such as TransformerEngine's modules."""

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Prepare for an iteration of these model chunks."""
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

    @property
    def use(self) -> tuple[Pass, int]:
        """Key of the weight and the pass."""
        return self.origin, id(self.deferred.weight)


class WgradStore:
    """Deferred weight gradients by (stage, microbatch, slice).

    Args:
        accumulator: accumulates the stored gradients.
        saved: keeps what linears need from F until B, as it keeps what autograd saves.
    """

    def __init__(self, accumulator: Accumulator, saved: SavedTensors | None = None) -> None:
        self._accumulator = accumulator
        self.saved = SavedTensors() if saved is None else saved
        self._stored: dict[Pass, list[_Entry]] = {}
        self._sources: list[Source] = []
        self._current: Pass | None = None
        self._deferring = False

    def attach(self, source: Source) -> None:
        """Forward ``watch``, ``clear`` and the backward context of the store to ``source`` from now on."""
        self._sources.append(source)

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Prepare for an iteration of these model chunks.

        Raises:
            UserError: a source does not support them.
        """
        for source in self._sources:
            source.watch(chunks)

    @property
    def current(self) -> Pass | None:
        """The W pass for which ``put`` stores gradients now; None outside F and B of a split microbatch."""
        return self._current

    @property
    def deferring(self) -> bool:
        """Whether the running forward belongs to a split microbatch, so that linears must defer weight gradients."""
        return self._deferring

    @contextmanager
    def defer(self, work: Pass, split: bool = True) -> Iterator[None]:
        """Context around the F or B of a split microbatch: linears defer, and gradients are stored for its W.

        With ``split=False``, context around an unsplit backward, in which nothing is deferred.
        """
        w = Pass(work.stage, Kind.W, work.microbatch, work.slice)
        self._current = w if split else None
        self._deferring = split
        try:
            with ExitStack() as sources:
                for source in self._sources if work.kind is not Kind.F else ():
                    sources.enter_context(source.backward(split))
                yield
        finally:
            self._current, self._deferring = None, False

    def put(self, deferred: Deferred) -> None:
        """Store a gradient for the W pass of the running B.

        W adds it to the parameter, and then calls the hook of data parallelism, which expects a gradient. If W has
        added to ``main_grad`` itself, the hook gets a zero in its place (``stand_in``), and does not add it.
        """
        assert self._current is not None, "a deferred linear ran its backward outside a split B"
        self._stored.setdefault(self._current, []).append(_Entry(self._current, deferred))

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
        products: dict[tuple[Pass, int], list[Product]] = defaultdict(list)
        if entries:
            entries[0].deferred.prefetch()
        while entries:
            together = is_late(entries[0].origin)
            with late() if together else nullcontext():
                more, complete = True, []
                while more:
                    entry = entries.popleft()
                    if entries:
                        entries[0].deferred.prefetch()
                    products[entry.use] += entry.deferred.run()
                    left[entry.use] -= 1
                    if not left[entry.use]:
                        complete.append(products.pop(entry.use))
                    more = together and bool(entries) and is_late(entries[0].origin)
                    if complete and (entry.deferred.gathers or not more):
                        self._accumulator.add(complete, ready=not together)
                        complete = []

    def settle(self) -> None:
        """Called within a backward, before the gradients that it has deferred so far are run."""
        for source in self._sources:
            source.settle()

    def join(self) -> None:
        """Make later work, for example an unsplit backward, wait for all W passes so far."""
        self._accumulator.join()

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
        self._accumulator.join()
        for source in self._sources:
            source.clear()

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))
