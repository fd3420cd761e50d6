"""Estimate pass costs and memory from a model's shapes before a run; a recorded costs file is more accurate.

Floating-point operations and bytes of a transformer layer are the published ones (Zero Bubble paper, arXiv 2401.10241,
appendix B, after Korthikanti et al., arXiv 2205.05198), computed per part so that they also cover grouped queries and
gated MLPs. With h = hidden size, s = sequence, b = microbatch, a = heads, and an MLP of 4h, F takes sbh(24h+4s)
operations, B sbh(24h+8s) and W 24sbh^2; F stores sb(34h+5as) bytes, and B leaves 32sbh bytes to W. Times are these
operations at an assumed share of the device's peak, plus several sweeps over the stored bytes at memory bandwidth for
the element-wise kernels. A hybrid model has layers of several kinds, of which attention and MLP are the two halves of a
transformer layer. Of a layer with experts, only those that process a token count; ``costs.expert_layers`` has their
all-to-alls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal

from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.expert_layers import CONTENTION, Experts
from megatron.zero_bubble.core.costs.experts import NO_EXPERTS, ExpertParts
from megatron.zero_bubble.core.costs.layer_work import LayerWork
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.costs.mamba import Mamba
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement

Recompute = Literal["none", "selective", "full"]

_FORWARD_SWEEPS, _BACKWARD_SWEEPS = 5.0, 4.3
"""How often element-wise kernels move the bytes that a layer stores. Fitted, together with the A100's matrix
efficiency, to the 12 profiles of the Zero Bubble paper (table 9); F, B and W deviate from them by at most 5 %."""


ESTIMATED_KINDS = "M*-E"
"""The kinds of layers of hybrid models that are estimated."""
_DENSE, _WITH_EXPERTS = "dense", "experts"
"""The kinds of transformer layers."""


@dataclass(frozen=True)
class Model:
    """The shapes of a GPT. ``layers`` is the number of layers of every stage in model order.

    ``heads * head_size`` need not equal ``hidden``; ``groups`` is the number of key-value heads; a ``gated`` MLP has
    three matrices. ``tensor_parallel`` divides all of it; the activations between matrix products are divided only with
    ``sequence_parallel``. ``pattern`` has the kind of every layer of a hybrid model, in model order: ``M`` for Mamba,
    whose shapes are ``mamba``, ``*`` for attention, ``-`` for an MLP, and ``E`` for experts. Other models with
    ``experts`` have these instead of the MLP in some layers or all.
    """

    layers: tuple[int, ...]
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_size: int
    sequence: int
    microbatch: int
    vocabulary: int
    gated: bool = False
    flash: bool = True
    recompute: Recompute = "none"
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pattern: str = ""
    mamba: Mamba = field(default_factory=Mamba)
    experts: Experts | None = None

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.sequence * self.microbatch

    @property
    def layer_weights(self) -> int:
        """Number of weights in a layer's matrices: 12 h^2 if the MLP is 4h wide and every head has separate keys."""
        return self.attention_weights + self.mlp_weights

    @property
    def attention_weights(self) -> int:
        """Number of weights in the matrices of attention."""
        return self.hidden * 2 * (self.heads + self.groups) * self.head_size

    @property
    def mlp_weights(self) -> int:
        """Number of weights in the matrices of an MLP."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer, in model order."""
        if self.pattern:
            return tuple(self.pattern)
        number = sum(self.layers)
        if self.experts is None:
            return (_DENSE,) * number
        having = self.experts.layers or (True,) * number
        return tuple(_WITH_EXPERTS if has else _DENSE for has in having)

    def weights_of(self, kind: str) -> float:
        """Number of weights of a layer (the part of one tensor-parallel rank)."""
        split = self.tensor_parallel
        if kind == "M":
            return self.mamba.weights(self.hidden) / split
        attention = self.attention_weights / split if kind in (_DENSE, _WITH_EXPERTS, "*") else 0.0
        if (experts := self._experts_of(kind)) is not None:
            others = experts.other_weights(self.hidden, self.gated, split)
            return attention + others + experts.rank_weights(self.hidden, self.gated)
        return attention + (self.mlp_weights / split if kind in (_DENSE, "-") else 0.0)

    def _experts_of(self, kind: str) -> Experts | None:
        """The experts of a layer of this kind; None if it has none."""
        return self.experts if kind in (_WITH_EXPERTS, "E") else None

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
        ends = self.vocabulary * self.hidden / self.tensor_parallel
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
        experts = self._experts_of(kind)
        return 0.0 if experts is None else experts.rank_weights(self.hidden, self.gated)

    def _sums(self, placement: Placement, of_kind: Callable[[str], float]) -> tuple[float, ...]:
        """Add up a figure of the layers of every stage."""
        ends, each = accumulate(self.layers_on(placement), initial=0), [of_kind(kind) for kind in self.kinds]
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
    def message_bytes(self) -> float:
        """Bytes per message between two stages: a rank's part of a microbatch's hidden states in bf16."""
        parts = self.tensor_parallel if self.sequence_parallel else 1
        return 2.0 * self.tokens * self.hidden / parts


def estimate(model: Model, device: Device, placement: Placement) -> tuple[PassCosts, PassMemory]:
    """Estimate costs in ms and memory in bytes on ``placement``, whose stages have the layers ``model.layers``.

    The output layer and the loss are on the last stage. The embedding look-up is assumed to cost nothing.

    Raises:
        UserError: as ``Model.layers_on``.
    """
    return layer_costs(model, device).on(model.layers_on(placement))


def layer_costs(model: Model, device: Device) -> LayerCosts:
    """Estimate the costs of the layers of ``model`` in ms and bytes, for any division among stages."""
    parts = {kind: _part(_of_kind(kind, model), model, device) for kind in set(model.kinds)}
    experts = {kind: _experts(kind, model, device) for kind in parts}
    for kind, own in experts.items():
        parts[kind] = _with_all_to_alls(parts[kind], own)
    return LayerCosts(
        tuple(parts[kind] for kind in model.kinds),
        loss=_part(_output_layer(model), model, device),
        comm_ms=_transfer_ms(model, device),
        input_memory=model.message_bytes,
        recomputed=model.recompute == "full",
        experts=tuple(experts[kind] for kind in model.kinds) if any(own.layers for own in experts.values()) else (),
        contention=CONTENTION if model.experts is not None and model.experts.parallel > 1 else 1.0,
    )


def _of_kind(kind: str, model: Model) -> LayerWork:
    """Return what a layer takes, without all-to-alls."""
    split, whole = model.tensor_parallel, model.tensor_parallel if model.sequence_parallel else 1
    if kind == "M":
        return model.mamba.work(model.tokens, model.hidden, split, whole, model.recompute == "full")
    if kind not in (_WITH_EXPERTS, "E"):
        return _transformer_layer(model, attention=kind != "-", mlp=kind != "*")
    assert model.experts is not None, "it has layers with experts"
    shared = _transformer_layer(replace(model, ffn=model.experts.shared), attention=False)
    if not model.experts.shared:
        shared = replace(shared, kept_for_wgrad=0.0)
    routed = model.experts.routed(model.tokens, model.hidden, split, whole, model.gated)
    layer = shared + routed + model.experts.scores(model.tokens, model.hidden, whole)
    if kind == _WITH_EXPERTS:
        layer = _transformer_layer(model, mlp=False) + layer
    return replace(layer, activation=shared.activation) if model.recompute == "full" else layer


def _experts(kind: str, model: Model, device: Device) -> ExpertParts:
    """Return the all-to-alls and the experts of a layer, as far as it has any."""
    if kind not in (_WITH_EXPERTS, "E") or model.experts is None:
        return NO_EXPERTS
    split, whole = model.tensor_parallel, model.tensor_parallel if model.sequence_parallel else 1
    own = model.experts
    sent = own.all_to_all_ms(model.message_bytes, device.node_gbs, device.network_gbs)
    f, b, w = _milliseconds(own.routed(model.tokens, model.hidden, split, whole, model.gated), model, device)
    again = 2.0 if model.recompute == "full" else 1.0  # B repeats those of F
    parts = {"dispatch": sent, "combine": sent, "combine_grad": again * sent, "dispatch_grad": again * sent}
    return NO_EXPERTS._replace(layers=1.0, experts=f, experts_grad=b, experts_wgrad=w, **parts)


def _with_all_to_alls(part: LayerFigures, own: ExpertParts) -> LayerFigures:
    """Return a layer that takes longer by its all-to-alls; its shares of attention fall accordingly."""
    forward = part.forward_ms + own.dispatch + own.combine
    backward = part.backward_ms + own.combine_grad + own.dispatch_grad
    return replace(
        part,
        forward_ms=forward,
        backward_ms=backward,
        forward_attention=part.forward_attention and part.forward_attention * part.forward_ms / forward,
        backward_attention=part.backward_attention and part.backward_attention * part.backward_ms / backward,
    )


def _part(work: LayerWork, model: Model, device: Device) -> LayerFigures:
    rate, (f, b, w) = _rate(model, device), _milliseconds(work, model, device)
    return LayerFigures(
        f,
        b,
        w,
        work.activation,
        work.kept_for_wgrad,
        work.history,
        forward_attention=work.forward_scores and work.forward_scores / rate / f,
        backward_attention=work.backward_scores and work.backward_scores / rate / b,
    )


def _rate(model: Model, device: Device) -> float:
    """Return operations per ms."""
    return device.tflops * 1e9 * device.efficiency * model.tensor_parallel


def _milliseconds(layer: LayerWork, model: Model, device: Device) -> tuple[float, float, float]:
    """Return the times of F, B and W."""
    rate, sweep = _rate(model, device), device.memory_tbs * 1e9  # bytes per ms
    again = layer.forward if layer.is_recomputed and model.recompute == "full" else 0.0
    return (
        layer.forward / rate + _FORWARD_SWEEPS * layer.moved / sweep,
        (layer.backward + again) / rate + _BACKWARD_SWEEPS * layer.moved / sweep,
        layer.wgrad / rate,
    )


def _transfer_ms(model: Model, device: Device) -> float:
    return device.latency_ms + model.message_bytes / (device.link_gbs * 1e6)


def _transformer_layer(m: Model, attention: bool = True, mlp: bool = True) -> LayerWork:
    """Compute the figures of one transformer layer of ``m``, or of one of its halves.

    Attention scores take 4 s^2 b h operations forward, twice that backward, and 5 a s^2 b bytes. Instead of storing
    these bytes, selective recomputation repeats the scores in B, and flash attention repeats the first half of them.
    """
    halves = attention + mlp
    queries, keys = (m.heads * m.head_size, m.groups * m.head_size) if attention else (0, 0)
    ffn = m.ffn if mlp else 0
    matrices = 2.0 * m.tokens * ((m.attention_weights if attention else 0) + (m.mlp_weights if mlp else 0))
    scores = 4.0 * m.tokens * m.sequence * queries
    score_bytes = 5.0 * m.heads * m.sequence * m.tokens if attention else 0.0
    again = scores / 2 if m.flash else scores if m.recompute == "selective" else 0.0
    kept_scores = 0.0 if again else score_bytes

    # Bytes in bf16; the comments give multiples of h for heads * head_size = h, one key per head and an MLP of 4h.
    inner = 2 * queries + 2 * keys + 2 * keys + 2 * queries  # q, k, v and the projection's input: 8h
    inner += (6 if m.gated else 4) * ffn  # the activation function's input and output: 16h
    outer = 5 * halves * m.hidden  # two norms 4h, two matrices' inputs 4h, two dropout masks 2h
    split, whole = m.tensor_parallel, m.tensor_parallel if m.sequence_parallel else 1
    outside_scores = m.tokens * (inner / split + outer / whole)
    moved = outside_scores + (0.0 if m.flash else score_bytes / split)
    kept = outside_scores + kept_scores / split
    # Inputs and output gradients of the four matrices: 8h + 4h + 10h + 10h.
    wide = ffn * (2 if m.gated else 1)
    for_wgrad_inner = 2 * (queries + 2 * keys) + 2 * queries + 2 * wide + 2 * ffn
    for_wgrad = m.tokens * (for_wgrad_inner / split + 4 * halves * m.hidden / whole)
    activation = 2.0 * m.tokens * m.hidden / whole if m.recompute == "full" else kept
    in_backward = 2 * scores + again
    return LayerWork(
        matrices + scores,
        matrices + in_backward,
        matrices,
        moved,
        activation,
        for_wgrad,
        forward_scores=scores,
        backward_scores=in_backward + (scores if m.recompute == "full" else 0.0),
        history=2.0 * m.tokens * 2 * keys / split,
    )


def _output_layer(m: Model) -> LayerWork:
    """Compute the figures of the output layer: logits in 4 bytes for the loss, their bf16 gradient, and the input."""
    operations = 2.0 * m.tokens * m.hidden * m.vocabulary
    logits = m.tokens * m.vocabulary / m.tensor_parallel
    states = m.message_bytes
    return LayerWork(
        operations,
        operations,
        operations,
        4 * logits,
        4 * logits + 2 * states,
        2 * logits + states,
        is_recomputed=False,
    )
