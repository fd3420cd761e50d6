"""The shapes of a model, and how its layers and weights are divided among stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal

from megatron.zero_bubble.core.costs.adapters import Adapters, Linear
from megatron.zero_bubble.core.costs.attention import Attention, Latent
from megatron.zero_bubble.core.costs.delta import GatedDelta
from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.kept import IN_16_BITS, Kept
from megatron.zero_bubble.core.costs.mamba import Mamba
from megatron.zero_bubble.core.costs.precision import BF16, Precision
from megatron.zero_bubble.core.costs.sparse import Indexer
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement

Recompute = Literal["none", "selective", "full"]
Part = Literal["attention", "mlp", "mamba", "delta", "router", "shared experts", "experts"]
"""A part of a layer, with its norm; ``mlp`` is that of a layer without experts."""
PARTS: tuple[Part, ...] = ("attention", "mlp", "mamba", "delta", "router", "shared experts", "experts")

ESTIMATED_KINDS = "MG*+D-E"
"""The kinds of layers of hybrid models that are estimated."""
DENSE, WITH_EXPERTS = "dense", "experts"
"""The kinds of transformer layers."""
_LATENT = "+D"
"""The kinds of layers of hybrid models with latent attention."""
_PARTS_OF: dict[str, tuple[Part, ...]] = {
    "M": ("mamba",),
    "G": ("delta",),
    "*": ("attention",),
    "+": ("attention",),
    "D": ("attention",),
    "-": ("mlp",),
    "E": ("router", "shared experts", "experts"),
    DENSE: ("attention", "mlp"),
    WITH_EXPERTS: ("attention", "router", "shared experts", "experts"),
}


@dataclass(frozen=True)
class Model:
    """The shapes of a GPT. ``layers`` is the number of layers of every stage in model order.

    ``heads * head_size`` need not equal ``hidden``; ``groups`` is the number of key-value heads; a ``gated`` MLP has
    three matrices. ``tensor_parallel`` divides all of it; the activations between matrix products are divided only with
    ``sequence_parallel``; ``overlaps_tensor`` runs its collectives beneath the products (``--tp-comm-overlap``).
    ``sequence`` is the part of a rank, of which there are ``context_parallel``. Linear layers compute in ``precision``.
    ``pattern`` has the kind of every layer of a hybrid model, in model order: ``M`` for Mamba, whose shapes are
    ``mamba``, ``G`` for a gated delta net, ``*`` for attention, ``+`` for latent attention, ``D`` for the same with an
    ``indexer``, ``-`` for an MLP, and ``E`` for experts. Other models with ``experts`` have these instead of the MLP in
    some layers or all. ``latent`` has the shapes of latent attention, which has neither groups nor one size of heads;
    next to ``+`` or ``D`` layers, ``*`` layers are without it. ``kept`` says what low precision and recomputation
    change in memory; its modules count only with selective recomputation. The ``joined`` parts of layers compute their
    weight gradients in B, and the ``captured`` ones are inside CUDA graphs, which keep their memory.
    With ``adapters``, only these are trained; of the first ``frozen`` layers and the embedding, nothing is.
    In a share ``windowed`` of the layers, a token attends to at most ``window`` tokens. With hyper-connections, layers
    hand on ``streams`` hidden states per token. Full recomputation is of the first ``again`` layers of every stage, by
    default of all.
    """

    layers: tuple[int, ...]
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_size: int
    sequence: int
    microbatch: int
    vocab_size: int
    gated: bool = False
    flash: bool = True
    recompute: Recompute = "none"
    again: int | None = None
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    overlaps_tensor: bool = False
    precision: Precision = BF16
    pattern: str = ""
    mamba: Mamba = field(default_factory=Mamba)
    delta: GatedDelta = field(default_factory=GatedDelta)
    experts: Experts | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    kept: Kept = IN_16_BITS
    joined: tuple[Part, ...] = ()
    captured: tuple[Part, ...] = ()
    adapters: Adapters | None = None
    frozen: int = 0
    window: int | None = None
    windowed: float = 1.0
    streams: int = 1

    @property
    def tokens(self) -> int:
        return self.sequence * self.microbatch

    @property
    def attended(self) -> float:
        """The tokens that attention computes for each one, in the mean of all layers: flash kernels skip those that the
        mask leaves out.
        """
        every = self.sequence * self.context_parallel
        if not self.flash:
            return every
        return every / 2 - (0.0 if self.window is None else self.windowed * max(0.0, every / 2 - self.window))

    @property
    def layer_weights(self) -> int:
        """Number of weights in a layer's matrices: 12 h^2 if the MLP is 4h wide and every head has separate keys."""
        return self.attention_weights + self.mlp_weights

    @property
    def attention_weights(self) -> int:
        return self.attention.weights

    @property
    def attention(self) -> Attention:
        return self.attention_of(next((kind for kind in _LATENT if kind in self.pattern), DENSE))

    def attention_of(self, kind: str) -> Attention:
        """The attention of a layer of this kind."""
        if self.latent is not None and not (kind == "*" and {*_LATENT} & {*self.pattern}):
            return self.latent.of(self.hidden, self.heads)
        return Attention.of_heads(self.hidden, self.heads, self.groups, self.head_size)

    def indexer_of(self, kind: str) -> Indexer | None:
        """What picks the tokens that a layer of this kind attends to; None if it attends to all."""
        return self.indexer if kind == "D" else None

    @property
    def indexed(self) -> int:
        """The features that an indexer makes its queries of."""
        return (None if self.latent is None else self.latent.query_rank) or self.hidden

    @property
    def keeping(self) -> Kept:
        """What decides which tensors are kept; without selective recomputation, no module is computed again."""
        return self.kept if self.recompute == "selective" else replace(self.kept, modules=())

    @property
    def divisions(self) -> tuple[int, int]:
        """The numbers of ranks that divide what is inside a layer, and the hidden states."""
        return self.tensor_parallel, self.tensor_parallel if self.sequence_parallel else 1

    @property
    def mlp_weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.pattern:
            return tuple(self.pattern)
        number = sum(self.layers)
        if self.experts is None:
            return (DENSE,) * number
        having = self.experts.layers or (True,) * number
        return tuple(WITH_EXPERTS if has else DENSE for has in having)

    @property
    def untrained(self) -> tuple[bool, ...]:
        """Whether each layer is below all that is trained, so that it needs no gradient."""
        return tuple(number < self.frozen for number in range(len(self.kinds)))

    @property
    def parts(self) -> frozenset[Part]:
        """The parts that its layers have."""
        found = {part for kind in self.kinds for part in _PARTS_OF[kind]}
        return frozenset(found if self.experts and self.experts.shared else found - {"shared experts"})

    def weights_of(self, kind: str) -> float:
        """Number of weights of a layer (the part of one tensor-parallel rank)."""
        split = self.tensor_parallel
        if kind in "MG":
            return (self.mamba if kind == "M" else self.delta).weights(self.hidden) / split
        has_attention = kind in (DENSE, WITH_EXPERTS, "*", *_LATENT)
        attention = self.attention_of(kind).rank_weights(split) if has_attention else 0.0
        if (indexer := self.indexer_of(kind)) is not None:
            attention += indexer.weights(self.hidden, self.indexed)
        if (experts := self.experts_of(kind)) is not None:
            others = experts.other_weights(self.hidden, self.gated, split)
            return attention + others + experts.rank_weights(self.hidden, self.gated)
        return attention + (self.mlp_weights / split if kind in (DENSE, "-") else 0.0)

    @property
    def is_divisible(self) -> bool:
        """Whether a group of GPUs may divide its layers by tensor parallelism."""
        return self.tensor_parallel == 1 and self.experts is None

    def assumed(self, device: Device) -> tuple[str, ...]:
        """What estimates assume of what is trained, its experts and its hyper-connections, as sentences."""
        mixing = f"Hyper-connections hand on {self.streams} streams; mixing these is assumed to take no time or memory."
        return (
            *((f"Nothing is trained but {self.adapters}.",) if self.adapters is not None else ()),
            *((f"The embedding and the first {self.frozen} layers are frozen.",) if self.frozen else ()),
            *((self.experts.assumed(device),) if self.experts is not None else ()),
            *((mixing,) if self.streams > 1 else ()),
        )

    def experts_of(self, kind: str) -> Experts | None:
        """The experts of a layer of this kind; None if it has none."""
        return self.experts if kind in (WITH_EXPERTS, "E") else None

    def linears_of(self, part: Part, kind: str) -> tuple[Linear, ...]:
        """The linear layers of a part of a layer of this kind."""
        hidden = self.hidden
        if part == "attention":
            own, latent = self.attention_of(kind), self.latent
            before: tuple[tuple[str, int, int], ...] = (("linear_qkv", hidden, own.made),)
            if own.compressed and latent is not None:
                before = latent.projections(hidden, self.heads)
            return (*(Linear(*each) for each in before), Linear("linear_proj", own.outputs, hidden))
        if part in ("mamba", "delta"):
            shapes = self.mamba if part == "mamba" else self.delta
            inner = shapes.inner(hidden)
            made = shapes.weights(hidden) // hidden - inner
            return Linear("in_proj", hidden, made), Linear("out_proj", inner, hidden)
        if part == "router":
            return ()
        experts, width, ffn = self.experts_of(kind), hidden, self.ffn
        if experts is not None:
            ffn = experts.shared if part == "shared experts" else experts.ffn
            width = experts.width(hidden) if part == "experts" else hidden
        wide = ffn * (2 if self.gated else 1)
        return (Linear("linear_fc1", width, wide), Linear("linear_fc2", ffn, width)) if ffn else ()

    def trained_of(self, kind: str) -> float:
        """Number of the weights in ``weights_of`` that are trained."""
        if self.adapters is None:
            return self.weights_of(kind)
        found = (self.adapters.weights(self.linears_of(part, kind)) for part in _PARTS_OF[kind])
        return sum(found) / self.tensor_parallel

    @property
    def is_trained(self) -> bool:
        """Whether all of it is."""
        return self.adapters is None and not self.frozen

    def trained_experts_of(self, kind: str) -> float:
        """Number of the weights in ``trained_of`` that are of experts, without shared ones."""
        if self.adapters is None or self.experts_of(kind) is None:
            return self.expert_weights_of(kind)
        return self.adapters.weights(self.linears_of("experts", kind)) / self.tensor_parallel

    def trained_weights(self, placement: Placement) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Number of the weights in ``stage_weights``, and in ``expert_weights``, that are trained.

        Raises:
            UserError: as ``layers_on``.
        """
        found, experts = (
            self._sums(placement, of, self.untrained) for of in (self.trained_of, self.trained_experts_of)
        )
        head = self.vocab_size * self.hidden / self.tensor_parallel if self.adapters is None else 0.0
        return (*found[:-1], found[-1] + head), experts

    def weights(self, placement: Placement) -> tuple[float, ...]:
        """Number of weights per rank (the part of one tensor-parallel rank); see ``stage_weights``.

        Raises:
            UserError: as ``layers_on``.
        """
        of_stages = self.stage_weights(placement)
        return tuple(
            sum(of_stages[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)
        )

    def stage_weights(self, placement: Placement) -> tuple[float, ...]:
        """Number of weights per stage (the part of one tensor-parallel rank): its layers, the embedding on the first
        stage, and the output layer on the last one.

        Raises:
            UserError: as ``layers_on``.
        """
        per_stage = self._sums(placement, self.weights_of)
        ends = self.vocab_size * self.hidden / self.tensor_parallel
        last = placement.num_stages - 1
        return tuple(own + ends * ((stage == 0) + (stage == last)) for stage, own in enumerate(per_stage))

    def expert_weights(self, placement: Placement) -> tuple[float, ...]:
        """Number of the weights in ``stage_weights`` that are of experts, without shared ones: the replicas of these
        are other ranks than those of all others.

        Raises:
            UserError: as ``layers_on``.
        """
        return self._sums(placement, self.expert_weights_of)

    def expert_weights_of(self, kind: str) -> float:
        """Number of the weights in ``weights_of`` that are of experts, without shared ones."""
        experts = self.experts_of(kind)
        return 0.0 if experts is None else experts.rank_weights(self.hidden, self.gated)

    def _sums(
        self, placement: Placement, of_kind: Callable[[str], float], left_out: Sequence[bool] = ()
    ) -> tuple[float, ...]:
        """Add up a figure of the layers of every stage, but for those that are left out."""
        ends, each = accumulate(self.layers_on(placement), initial=0), [of_kind(kind) for kind in self.kinds]
        each = [0.0 if is_out else own for is_out, own in zip(left_out, each, strict=True)] if left_out else each
        return tuple(float(sum(each[start:end])) for start, end in pairwise(ends))

    def layers_on(self, placement: Placement) -> tuple[int, ...]:
        """The layers of every stage of ``placement``, which may merge neighbouring stages of ``layers``.

        Raises:
            UserError: for another number of stages, because layers cannot be divided.
        """
        parts, rest = divmod(len(self.layers), placement.num_stages)
        if rest or not parts:
            raise UserError(
                f"the layers of {len(self.layers)} stages cannot be divided among {placement.num_stages} stages, as "
                "a layer is whole; give the number of layers of every stage"
            )
        return tuple(sum(self.layers[s * parts : (s + 1) * parts]) for s in range(placement.num_stages))

    @property
    def state_bytes(self) -> float:
        """Bytes of a rank's part of a microbatch's hidden states in bf16."""
        return 2.0 * self.tokens * self.hidden / self.divisions[1]

    @property
    def message_bytes(self) -> float:
        """Bytes per message between two stages, which is also what a layer reads."""
        return self.streams * self.state_bytes
