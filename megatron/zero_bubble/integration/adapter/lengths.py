"""What a call of the forward-backward function knows of the lengths of its microbatches.

They are equal, or their shapes are given, or, with ``config.variable_seq_lengths``, only the sender of an activation
knows its shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron.zero_bubble.core.costs.lengths import SequenceShape
from megatron.zero_bubble.core.errors import PeerError, UserError
from megatron.zero_bubble.engine.runtime.agreement import AgreedChannels, Agreement
from megatron.zero_bubble.engine.runtime.handlers import Channels
from megatron.zero_bubble.engine.runtime.hosts import Hosts
from megatron.zero_bubble.engine.runtime.transport import is_silent
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Setup

_UNKNOWN, _KNOWN, _AT_SOURCE = range(3)


class GivenShapes(NamedTuple):
    """The shapes of the microbatches of a call, as this rank knows them.

    Attributes:
        shapes: None if this rank does not know them.
        source: the pipeline rank that tells the others; None if all know them.
    """

    shapes: tuple[SequenceShape, ...] | None
    source: int | None = None

    @classmethod
    def of(cls, tokens: Sequence[int | tuple[int, int]] | None, source: int | None = None) -> GivenShapes:
        """Read the argument of ``megatron.zero_bubble.shapes``.

        Raises:
            UserError: an element that is neither a number of tokens nor a pair, or is not positive; or no list without
                a rank that has it.
        """
        if tokens is None:
            if source is None:
                raise UserError(
                    "the ranks of a pipeline must know the shapes of their microbatches, or one must tell the others; "
                    "got None without a source; give shapes(None, source=RANK) the pipeline rank that has the list, on "
                    "all ranks"
                )
            return cls(None, source)
        return cls(tuple(map(_shape, tokens)), source)


@dataclass(frozen=True)
class Lengths:
    """What one rank knows of the lengths of the microbatches of a call.

    Attributes:
        num_microbatches: of the call.
        varies: whether the model says that lengths vary (``config.variable_seq_lengths``).
        given: None if no shapes are given.
    """

    num_microbatches: int
    varies: bool
    given: GivenShapes | None

    @classmethod
    def of(cls, num_microbatches: int, config: Any, given: GivenShapes | None) -> Lengths:
        return cls(num_microbatches, bool(getattr(config, "variable_seq_lengths", False)), given)

    @property
    def differ(self) -> bool:
        """Whether microbatches may have different lengths."""
        return self.varies or self.given is not None

    @property
    def need_headers(self) -> bool:
        """Whether only the sender of an activation knows its shape."""
        return self.varies and self.given is None

    @property
    def has_source(self) -> bool:
        """Whether one rank tells the others the shapes."""
        return self.given is not None and self.given.source is not None

    @property
    def shapes(self) -> tuple[SequenceShape, ...] | None:
        """Those of all microbatches; None if they are equal or unknown.

        Raises:
            UserError: shapes for another number of microbatches.
        """
        shapes = None if self.given is None else self.given.shapes
        if shapes is not None and len(shapes) != self.num_microbatches:
            raise UserError(
                f"the list of shapes must have one element per microbatch; got {len(shapes)} for "
                f"{self.num_microbatches} microbatches; give the shapes of all microbatches of the call"
            )
        return shapes

    def check(self, setup: Setup) -> None:
        """Refuse what cannot be combined with different lengths.

        Args:
            setup: what runs.

        Raises:
            UserError: the rule, the values and the remedy.
        """
        if self.differ:
            refuse_excluded(RunOptions(setup, lengths=("variable_seq_lengths" if self.varies else "shapes", True)))

    def informed(self, hosts: Hosts) -> Lengths:
        """With the shapes that the source among the ranks knows. A collective call if there is one.

        Raises:
            PeerError: another rank died.
        """
        if self.given is None or self.given.source is None:
            return self
        number, source = self.num_microbatches, self.given.source
        own = self.given.shapes or () if hosts.rank == source else ()
        words = [len(own), *(size for shape in own for size in shape)]
        count, *sizes = hosts.broadcast((words + [0] * 2 * number)[: 1 + 2 * number], source)
        shapes = [SequenceShape(*sizes[at : at + 2]) for at in range(0, 2 * min(count, number), 2)]
        shapes += [SequenceShape(0, 0)] * (count - len(shapes))  # too many, which is refused
        return replace(self, given=GivenShapes(tuple(shapes)))

    @property
    def digest(self) -> tuple[int, int, int, int]:
        """What the ranks of a pipeline compare: the number of microbatches; what is known; and the number of shapes and
        a hash of them, or the rank that has them.
        """
        if self.given is None:
            return self.num_microbatches, _UNKNOWN, 0, 0
        if self.given.source is not None:
            return self.num_microbatches, _AT_SOURCE, self.given.source, 0
        shapes = [tuple(shape) for shape in self.given.shapes or ()]
        content = hashlib.sha256(str(shapes).encode()).digest()[:7]
        return self.num_microbatches, _KNOWN, len(shapes), int.from_bytes(content, "big")

    def differs(self, rank: int, other: Sequence[int]) -> UserError:
        """The error if another rank has another ``digest``."""
        return UserError(
            "all ranks of a pipeline must know the same shapes of their microbatches, in the same order; got "
            f"{_described(*self.digest)} on this rank, and {_described(*other)} on pipeline rank {rank}; give all of "
            "them the same list, or none"
        )


class Agreed(NamedTuple):
    """What all ranks know in an iteration.

    Attributes:
        lengths: of its microbatches.
        hosts: of the pipeline.
        agreement: None if nothing is compared.
    """

    lengths: Lengths
    hosts: Hosts
    agreement: Agreement | None

    def channels(self, make: Callable[[Hosts], Channels]) -> Channels:
        """Make channels, which expect no message of another rank before it is known to agree."""
        made = make(self.hosts)
        return made if self.agreement is None else AgreedChannels(made, self.agreement)


class LengthComparison:
    """Compares what the ranks know of the lengths of a call, as soon as they are connected.

    Args:
        hosts: returns those of the pipeline; None before they are connected.

    Attributes:
        lengths: what this rank knows.
    """

    def __init__(self, lengths: Lengths, hosts: Callable[[], Hosts | None]) -> None:
        self.lengths, self._hosts = lengths, hosts
        self._agreement: Agreement | None = None
        self._begin()

    def _begin(self) -> None:
        hosts = self._hosts()
        if self.lengths.differ and self._agreement is None and hosts is not None:
            self._agreement = Agreement(hosts, self.lengths.digest, self.lengths.differs)

    def check(self) -> None:
        """Wait until the others have begun the call, before a collective call that depends on what they know.

        Raises:
            UserError: another rank knows something else.
            PeerError: another rank died.
        """
        if self._agreement is not None:
            self._agreement.check_all()

    def agreed(self) -> Agreed:
        """What all ranks know, when they are connected.

        Raises:
            UserError, PeerError: see ``check``.
        """
        hosts, is_first = self._hosts(), self._agreement is None
        assert hosts is not None, "the ranks are connected when their plan is prepared"
        self._begin()
        if is_first or self.lengths.has_source:  # collective calls follow
            self.check()
        return Agreed(self.lengths.informed(hosts), hosts, self._agreement)

    def settle(self) -> None:
        """Wait until the others know what this rank knows."""
        if self._agreement is not None:
            self._agreement.settle()


@contextmanager
def compared(lengths: Lengths, hosts: Callable[[], Hosts | None]) -> Iterator[LengthComparison]:
    """Context of a call, in which its ranks compare what they know; also if it fails by a mistake of the user."""
    comparison = LengthComparison(lengths, hosts)
    try:
        yield comparison
    except UserError:
        with suppress(PeerError):  # a rank that died may have had the same mistake
            comparison.settle()
        raise
    except PeerError as error:
        if not is_silent(error):  # it has gone, perhaps because it knows something else
            with suppress(PeerError):
                comparison.check()
        raise
    comparison.check()
    comparison.settle()


def _described(count: int, kind: int, detail: int, hash_: int) -> str:
    if kind == _UNKNOWN:
        return f"no shapes for {count} microbatches"
    what = (
        f"those of pipeline rank {detail}" if kind == _AT_SOURCE else f"{detail} shapes with fingerprint {hash_:014x}"
    )
    return f"{what} for {count} microbatches"


def _shape(element: int | tuple[int, int]) -> SequenceShape:
    sizes = (1, element) if isinstance(element, int) else element
    if (
        isinstance(sizes, (tuple, list))
        and len(sizes) == 2
        and all(isinstance(size, int) and size > 0 for size in sizes)
    ):
        return SequenceShape(*sizes)
    raise UserError(
        "the shape of a microbatch is its number of tokens, or a pair (sequences, tokens of each), of positive "
        f"integers; got {element!r}; give such numbers, as .tolist() of a tensor does"
    )
