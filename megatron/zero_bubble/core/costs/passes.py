"""Duration of passes, and of transfers between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise

from megatron.zero_bubble.core.costs.experts import ExpertParts, exposed_share, length_ms, parts_of, recut_parts
from megatron.zero_bubble.core.costs.terms import fitted, settle
from megatron.zero_bubble.core.costs.units import checked_figure, checked_share, refuse_huge, spread
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts, required
from megatron.zero_bubble.core.ir import WHOLE, Chain, Pass, Placement, Slices, Value
from megatron.zero_bubble.core.ir.parts import LanePart
from megatron.zero_bubble.core.ir.passes import BW, VOCABULARY_KINDS, B, F, R, W


@dataclass(frozen=True)
class PassCosts:
    """Milliseconds per stage of F, B and W, and of a transfer between two ranks.

    ``forward_attention`` and ``backward_attention`` are the shares, per stage, of F and of B that attention takes
    (default: 0). In the slice from x to y of a sequence, attention takes y^2 - x^2 of its time, because a token attends
    to all tokens before it, and everything else takes y - x.

    ``recompute_ms`` is the part per stage of ``backward_ms`` in which B computes activations again (default: 0). A pass
    of its own (R) takes that time instead for each (stage, microbatch, slice) in ``apart``.

    ``host_ms`` is the time per stage to copy what F saves to host memory, and also the time to copy it back; only plans
    that offload need it (default: 0).

    ``gather_ms`` and ``reduce_ms`` are the times per stage to gather its weights from all replicas, and to add its
    gradients over them; only plans with sharded units need them (default: 0).

    ``vocabulary`` has the figures of vocabulary parallelism, which only schedules with its passes need.

    ``experts`` has the parts of every stage with experts, of which F, B and W consist (default: none), and
    ``contention`` is the factor by which computation is slower next to their all-to-alls (default: 1). Only with
    ``overlaps`` do these run beneath computation.

    ``links`` overrides ``comm_ms`` for (source rank, destination rank). A transfer is pure latency: it delays the
    receiver and does not occupy any rank.

    ``message_ms`` is the time for which a message occupies the rank at each of its ends (default: 0): an F, B or BW
    whose input comes from another rank takes this much longer before it computes, and one whose output goes to another
    rank takes this much longer before the transfer begins. ``duration`` does not include it; ``costs.messages`` does.

    ``slice_overhead`` is the share of a pass that does not depend on its tokens, such as the time to queue its kernels
    (default: 0): every slice of a sequence takes that, besides its tokens' part of the rest.

    Raises:
        UserError: for a negative or non-finite figure, a share above 1, or when the lists differ in length.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    wgrad_ms: tuple[float, ...]
    comm_ms: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    _: KW_ONLY
    message_ms: float = 0.0
    # Slices of sequences.
    forward_attention: tuple[float, ...] = ()
    backward_attention: tuple[float, ...] = ()
    slice_overhead: float = 0.0
    # Recomputation.
    recompute_ms: tuple[float, ...] = ()
    apart: frozenset[tuple[int, int, int]] = frozenset()
    # Copies to the host, and collectives over replicas.
    host_ms: tuple[float, ...] = ()
    gather_ms: tuple[float, ...] = ()
    reduce_ms: tuple[float, ...] = ()
    # Models whose vocabulary is divided, and models with experts.
    vocabulary: VocabularyCosts | None = None
    experts: tuple[ExpertParts, ...] = ()
    contention: float = 1.0
    overlaps: bool = False

    def __post_init__(self) -> None:
        settle(self, "passes")
        links = {link: checked_figure(f"links{list(link)}", ms) for link, ms in self.links.items()}
        object.__setattr__(self, "links", links)

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        forward_ms: float,
        backward_ms: float,
        wgrad_ms: float,
        comm_ms: float = 0.0,
        attention: float = 0.0,
    ) -> PassCosts:
        """Use the same costs on every rank; each of its chunks gets an equal part of them.

        Args:
            attention: the share of F that attention takes; ``backward_share`` gives that of B.

        Raises:
            UserError: also for a figure above ``MAX_FIGURE``.
        """
        refuse_huge(forward_ms=forward_ms, backward_ms=backward_ms, wgrad_ms=wgrad_ms, comm_ms=comm_ms)
        f, b, w = (spread(placement, ms) for ms in (forward_ms, backward_ms, wgrad_ms))
        return cls(f, b, w, comm_ms).with_attention((checked_share("attention", attention),) * len(f))

    def with_attention(self, forward: tuple[float, ...], backward: tuple[float, ...] = ()) -> PassCosts:
        """Set the shares of attention in F and in B, per stage; by default ``backward_share`` gives those of B."""
        shares = backward or tuple(map(backward_share, forward, self.forward_ms, self.backward_ms))
        return replace(self, forward_attention=forward, backward_attention=shares)

    def with_experts(self, parts: tuple[ExpertParts, ...], contention: float = 1.0) -> PassCosts:
        """Set the parts of the passes of every stage, of which attention is what they take besides the others."""
        stages = zip(parts, self.forward_ms, self.backward_ms, self.wgrad_ms, strict=True)
        return replace(self, experts=tuple(own.within(*times) for own, *times in stages), contention=contention)

    @property
    def num_stages(self) -> int:
        return len(self.forward_ms)

    def fit(self, placement: Placement) -> PassCosts:
        """Convert to the stages of ``placement`` for the same model: stages are divided evenly, or neighbours merged.

        Raises:
            UserError: when neither number of stages is a multiple of the other.
        """
        experts = recut_parts(self.experts, placement.num_stages) if self.experts else ()
        return replace(self, **fitted(self, "passes", placement.num_stages), experts=experts)

    def overlapping(self, overlaps: bool) -> PassCosts:
        """Return the costs of a plan in which the all-to-alls of experts do or do not run beneath computation."""
        return self if self.overlaps == overlaps else replace(self, overlaps=overlaps)

    def recomputing(self, apart: frozenset[tuple[int, int, int]]) -> PassCosts:
        """Return the costs of a schedule with an R for each of these (stage, microbatch, slice)."""
        return self if self.apart == apart else replace(self, apart=apart)

    def duration(self, p: Pass, slices: Slices = WHOLE) -> float:
        """Milliseconds of ``p``, for the slice of the sequence that it computes."""
        if p.kind in VOCABULARY_KINDS:
            return required(self.vocabulary).duration(p)
        if self.apart and (p.kind is B or p.kind is BW) and (p.stage, p.microbatch, p.slice) in self.apart:
            return self._computed(p, slices) - self._computed(p._replace(kind=R), slices)
        return self._computed(p, slices)

    def _computed(self, p: Pass, slices: Slices) -> float:
        """As ``duration``, where the backward computes again what F did not keep."""
        if p.kind is F:
            whole, attention = self.forward_ms[p.stage], self.forward_attention[p.stage]
        elif p.kind is R:
            whole, attention = self.recompute_ms[p.stage], self.forward_attention[p.stage]
        elif p.kind is W:
            whole, attention = self.wgrad_ms[p.stage], 0.0
        else:
            whole, attention = self.backward_ms[p.stage], self.backward_attention[p.stage]
        tokens = part = slices.shares[p.slice]
        if attention:
            start, end = slices.bounds(p.slice)
            part = (1 - attention) * part + attention * (end * end - start * start)
        if self.slice_overhead and len(slices) > 1:
            tokens, part = (self.slice_overhead + (1 - self.slice_overhead) * each for each in (tokens, part))
        return whole * part + (self.wgrad_ms[p.stage] * tokens if p.kind is BW else 0.0)

    def pair(self, forward: Pass, backward: Pass, slices: Slices = WHOLE) -> float:
        """Milliseconds of a forward and a backward that run at the same time; without ``experts``, as long as one after
        the other.
        """
        parts = self.overlapping(True).parts((forward, backward))
        return length_ms(parts) if parts else self.duration(forward, slices) + self.duration(backward, slices)

    def parts(self, works: tuple[Pass, ...]) -> tuple[LanePart, ...]:
        """The parts of passes that run at the same time, or of one that runs alone; empty if nothing overlaps."""
        if not self.overlaps or not self.experts:
            return ()
        stages = tuple([self.experts[p.stage] for p in works])
        return parts_of(tuple([p.kind for p in works]), stages, self.contention)

    @property
    def without_transfers(self) -> PassCosts:
        """The same where neither messages nor collectives between ranks take time."""
        vocabulary = None if self.vocabulary is None else replace(self.vocabulary, collective_ms=0.0)
        return replace(self, comm_ms=0.0, links={}, message_ms=0.0, vocabulary=vocabulary)

    @property
    def has_all_to_alls(self) -> bool:
        """Whether it knows the all-to-alls of experts."""
        return bool(self.experts)

    @property
    def exposed_share(self) -> float:
        """The share of a microbatch's F, B and W that all-to-alls of experts take if nothing hides them."""
        return exposed_share(self.experts)

    def copy(self, value: Value, slices: Slices = WHOLE) -> float:
        """Milliseconds to copy what an F saved, ``value``, to host memory or back."""
        return self.host_ms[value.producer.stage] * slices.shares[value.producer.slice]

    def gather(self, stage: int) -> float:
        """Milliseconds to gather the weights of ``stage`` from all replicas."""
        return self.gather_ms[stage]

    def reduce(self, stage: int) -> float:
        """Milliseconds to add the gradients of ``stage`` over all replicas, so that each has its shard of the sum."""
        return self.reduce_ms[stage]

    def collective(self) -> float:
        """Milliseconds that a collective takes in addition to one transfer between its ranks."""
        return self.vocabulary.collective_ms if self.vocabulary is not None else 0.0

    def hops(self, placement: Placement) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For every stage of a chain, the transfer times in ms of the input of its F and of the input of its B."""
        chain, rank_of = Chain(placement.num_stages), placement.stage_to_rank

        def hop(p: Pass) -> float:
            source = chain.source(p)
            return 0.0 if source is None else self.comm(rank_of[source.stage], rank_of[p.stage])

        stages = range(placement.num_stages)
        return tuple(hop(Pass(s, F, 0)) for s in stages), tuple(hop(Pass(s, B, 0)) for s in stages)

    def messages_on(self, placement: Placement) -> tuple[tuple[float, float], ...]:
        """For every stage of a chain, the time in ms that a message to or from the stage above takes from a pass, and
        one to or from the stage below; 0 for neighbours on the same rank. An F receives from above and sends below, a
        B does the opposite.
        """
        ranks = placement.stage_to_rank
        times = (0.0, *(self.message_ms if a != b else 0.0 for a, b in pairwise(ranks)), 0.0)
        return tuple(pairwise(times))

    def comm(self, source_rank: int, destination_rank: int) -> float:
        """Milliseconds from the end of a pass on one rank to its result on another; 0 within a rank."""
        if source_rank == destination_rank:
            return 0.0
        return self.links.get((source_rank, destination_rank), self.comm_ms)


def backward_share(forward_share: float, forward_ms: float, backward_ms: float) -> float:
    """The share of B that attention takes, if it takes twice its time in F: it has two products in F and four in B."""
    return min(1.0, 2 * forward_share * forward_ms / backward_ms) if backward_ms else 0.0
