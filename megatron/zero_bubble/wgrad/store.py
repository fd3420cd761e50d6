"""The store of deferred weight gradients: B puts, W takes, in the order of the microbatches.

A deferred gradient is a value that knows how to compute and accumulate itself; the store only keeps them by the pass
they belong to. One store serves all the stages of a rank.

The W's at the end of an iteration may be grouped by weight: the same gradients in the same order for every weight, but
one weight is ready after the other, so that data parallelism reduces the first while the last are computed (Zero
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


class Product(NamedTuple):
    """What the gradient of one use of a linear is made of.

    Attributes:
        weight: (out, in).
        bias: (out,); None where it has none, or its gradient does not wait for W.
        x: the input, (tokens, in).
        grad_output: (tokens, out), of the same dtype.
        by_kernel: whether the job itself asks for fused accumulation.
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
        """Says which gradients belong together; the first of several that one call computes."""
        ...

    @property
    def num_elements(self) -> int:
        """Of all that it computes."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether it holds more when it runs than ``tensors`` says."""
        ...

    def prefetch(self) -> None:
        """Start the communication that ``run`` needs, if any."""
        ...

    def run(self) -> Iterable[Product]:
        """What the gradient is made of, for the accumulator; nothing where this has accumulated it already."""
        ...

    def tensors(self) -> Iterable[torch.Tensor]:
        """What is kept until ``run``."""
        ...


class Accumulator(Protocol):
    """Where deferred gradients go when they run."""

    def add(self, uses: Sequence[Sequence[Product]], ready: bool) -> None:
        """Accumulate gradients.

        Args:
            uses: all products of one weight in one microbatch, for several weights or microbatches, these in order.
            ready: whether these were the last for their weights in this iteration, so that data parallelism may reduce
                them.
        """
        ...

    def join(self) -> None:
        """Order what comes after this behind all that was added."""
        ...


class Source(Protocol):
    """What puts gradients in and keeps a queue of its own behind them."""

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """These run the iteration that comes."""
        ...

    def backward(self, split: bool) -> AbstractContextManager[None]:
        """Around a backward; ``split`` says whether it has a W of its own."""
        ...

    def clear(self) -> None:
        """Forget everything that was put in."""
        ...


class _Entry(NamedTuple):
    origin: Pass
    deferred: Deferred

    @property
    def use(self) -> tuple[Pass, int]:
        """The microbatch and the weight."""
        return self.origin, id(self.deferred.weight)


class WgradStore:
    """Deferred weight gradients by (stage, microbatch, slice).

    Args:
        accumulator: of the gradients that are put in.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._stored: dict[Pass, list[_Entry]] = {}
        self._sources: list[Source] = []
        self._current: Pass | None = None

    def attach(self, source: Source) -> None:
        """Tell ``source`` from now on what the store is told."""
        self._sources.append(source)

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """These model chunks run the iteration that comes.

        Raises:
            UserError: a source cannot serve them.
        """
        for source in self._sources:
            source.watch(chunks)

    @property
    def current(self) -> Pass | None:
        """The W that a gradient belongs to which is put now, if any."""
        return self._current

    @property
    def deferring(self) -> bool:
        """Whether the pass that runs now has a W of its own, so that linears leave their weight gradient here."""
        return self._current is not None

    @contextmanager
    def defer(self, work: Pass, split: bool = True) -> Iterator[None]:
        """Within the F and the B of a split microbatch: linears defer, and B's gradients are stored for its W.

        With ``split=False``, within an unsplit backward: nothing is stored.
        """
        w = Pass(work.stage, Kind.W, work.microbatch, work.slice)
        self._current = w if split else None
        try:
            with ExitStack() as sources:
                for source in self._sources if work.kind is not Kind.F else ():
                    sources.enter_context(source.backward(split))
                yield
        finally:
            self._current = None

    def put(self, deferred: Deferred) -> None:
        """Store a gradient for the W of the pass that runs now."""
        assert self._current is not None, "a deferred linear ran its backward outside a split B"
        self._stored.setdefault(self._current, []).append(_Entry(self._current, deferred))

    def group(self, works: Sequence[Pass]) -> None:
        """Order the gradients of these W's by weight, those of the last of ``works`` saying in which order, and give
        each of ``works`` an equal share of the elements: together they do what they did before.
        """
        entries = [entry for work in works for entry in self._stored.pop(work, ())]
        last_first = sorted(entries, key=lambda entry: entry.origin != works[-1])
        order = {weight: i for i, weight in enumerate(dict.fromkeys(id(e.deferred.weight) for e in last_first))}
        entries.sort(key=lambda entry: order[id(entry.deferred.weight)])
        sizes = [entry.deferred.num_elements for entry in entries]
        share, use = 0, None
        for entry, before, size in zip(entries, accumulate(sizes, initial=0), sizes, strict=False):
            if entry.use != use:  # several uses of a weight in one microbatch stay together
                share = (2 * before + size) * len(works) // (2 * sum(sizes))  # where its middle lies
                use = entry.use
            self._stored.setdefault(works[share], []).append(entry)

    def run(
        self,
        work: Pass,
        is_late: Callable[[Pass], bool] = lambda origin: True,
        late: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run the W ``work``: each gradient while the next one's communication is under way.

        Args:
            is_late: whether the gradients of a W make no weight ready. Those are computed together, but for inputs that
                were gathered; of the others each is finished before the next begins, so that its reduction can start.
            late: entered around those.
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

    def join(self) -> None:
        """Order what comes after this, an unsplit backward, say, behind all W's so far."""
        self._accumulator.join()

    def tensors(self, work: Pass) -> Iterator[torch.Tensor]:
        """What is kept until the W ``work``."""
        for entry in self._stored.get(work, ()):
            yield from entry.deferred.tensors()

    def clear(self) -> None:
        """Forget everything: the schedule starts anew (Megatron re-runs a step that it wants to attribute)."""
        self._stored.clear()
        self._accumulator.join()
        for source in self._sources:
            source.clear()

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))
