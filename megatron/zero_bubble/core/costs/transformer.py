"""What the layers of a model take, before a device is known: operations, and the tensors that they keep."""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.core.costs.delta import GatedDelta
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.kept import (
    CORE_ATTENTION,
    LAYER_NORM,
    MLP,
    MOE,
    SHARED_EXPERTS,
    UP_PROJECTION,
    Tensor,
    operand,
)
from megatron.zero_bubble.core.costs.layer_work import LayerWork
from megatron.zero_bubble.core.costs.mamba import Mamba
from megatron.zero_bubble.core.costs.model import WITH_EXPERTS, Model, Part


def work_of(kind: str, model: Model) -> LayerWork:
    """Return what a layer takes, without all-to-alls; with full recomputation, it keeps only its input."""
    if model.recompute != "full":
        return _computed(kind, model)
    layer = _computed(kind, replace(model, captured=()))
    kept = model.message_bytes
    layer = replace(layer, activation=kept, rebuilt=max(0.0, layer.activation - kept))
    return layer.in_graphs() if model.captured else layer


def _computed(kind: str, model: Model) -> LayerWork:
    """Return what a layer takes, as far as it is not recomputed as a whole."""
    if kind in "MG":
        shapes: Mamba | GatedDelta = model.mamba if kind == "M" else model.delta
        work = shapes.work(model.tokens, model.hidden, *model.divisions, model.keeping)
        states = model.microbatch * shapes.states(model.hidden) / model.tensor_parallel
        return _as("mamba" if kind == "M" else "delta", kind, model, replace(work, states=states))
    attention = _as("attention", kind, model, _attention(model, kind) + _index(model, kind))
    if (experts := model.experts_of(kind)) is None:
        mlp = _as("mlp", kind, model, _mlp(model))
        return attention if kind in "*+D" else mlp if kind == "-" else attention + mlp
    shared = _mlp(replace(model, ffn=experts.shared), (SHARED_EXPERTS, MOE), of_experts=True)
    shared = _as("shared experts", kind, model, shared)
    scores = experts.scores(model.tokens, model.hidden, model.divisions[1], model.keeping)
    scores = _as("router", kind, model, scores)
    layer = shared + routed(kind, model, experts) + scores
    return attention + layer if kind == WITH_EXPERTS else layer


def routed(kind: str, model: Model, experts: Experts) -> LayerWork:
    """Return what the experts of a layer take, without the shared ones."""
    work = experts.routed(model.tokens, model.hidden, *model.divisions, model.gated, model.keeping)
    return _as("experts", kind, model, work)


def _as(part: Part, kind: str, model: Model, work: LayerWork) -> LayerWork:
    """Return what a part takes if it is joined or captured, or has adapters."""
    if (adapters := model.adapters) is not None and part != "router":
        rows = model.experts.top_k if model.experts is not None and part == "experts" else 1
        work = adapters.added_to(work, model.linears_of(part, kind), model.tokens * rows)
    work = work.without_w() if part in model.joined else work
    return work.in_graphs() if part in model.captured else work


def _attention(m: Model, kind: str) -> LayerWork:
    """Compute the figures of the attention of a layer of this kind, with its norm.

    Scores take 4 s^2 b h operations forward, twice that backward, and 5 a s^2 b bytes. Flash attention takes half of
    that, as the mask is causal, stores none of these bytes, and repeats the first half of the scores in B.
    """
    own, (split, whole) = m.attention_of(kind), m.divisions
    is_latent = bool(own.compressed)
    attended, width = _scored(m, kind)
    matrices, scores = 2.0 * m.tokens * own.computed(split, whole), 2.0 * m.tokens * attended * width
    again = (scores / 2 if m.flash else 0.0) + (scores if m.keeping.repeats(CORE_ATTENTION) else 0.0)
    up = 2.0 * m.tokens * own.up_weights if m.keeping.repeats(UP_PROJECTION) else 0.0

    # Bytes in bf16; the comments give multiples of h for heads * head_size = h, and one key per head.
    states, inside = 2.0 * m.tokens * m.hidden / whole, 2.0 * m.tokens / split
    tensors = [
        Tensor(states),  # the norm's input: 2h
        # The norm's output: 2h. It is part of the first product, except before the projections down: two take it.
        operand(states) if not is_latent else Tensor(states, (LAYER_NORM,)),
        Tensor(inside * own.made, () if not is_latent else (UP_PROJECTION,)),  # q, k and v: 6h
        Tensor(inside * own.outputs, of_product=True),  # the input of the last product, which attention keeps, too: 2h
        *([] if m.flash else [Tensor(5.0 * m.heads * attended * m.tokens / split, (CORE_ATTENTION,))]),
    ]
    if own.compressed:
        compressed = 2.0 * m.tokens * own.compressed / whole
        tensors += [Tensor(compressed), operand(compressed)]  # the input of their norms, and the output
    layer = _with_tensors(m, tensors)
    for_wgrad = 2 * m.hidden / whole + (2 * own.made + 2 * own.outputs) / split + 2 * m.hidden / whole
    for_wgrad += 4 * own.compressed / whole
    return replace(
        layer,
        forward=matrices + scores,
        backward=matrices + 2 * scores + again + up,
        wgrad=matrices,
        kept_for_wgrad=m.tokens * for_wgrad * m.kept.operand_share,
        forward_scores=scores,
        backward_scores=2 * scores + again + (scores if m.recompute == "full" else 0.0),
        history=2.0 * m.tokens * (own.keys + own.values) / split,
        linear=matrices,
        repeated=up,
        reductions=1,
    )


def _scored(m: Model, kind: str) -> tuple[float, int]:
    """The tokens that attention computes for each one, and the features of keys and values that it takes of each.

    The kernels of sparse attention take latent features, which all heads share, in place of their keys and values.
    """
    own, indexer = m.attention_of(kind), m.indexer_of(kind)
    if indexer is None or m.latent is None:
        return m.attended, own.queries + own.outputs
    return indexer.attended(m.sequence * m.context_parallel), m.heads * (2 * m.latent.rank + m.latent.position_size)


def _index(m: Model, kind: str) -> LayerWork:
    """Compute the figures of the indexer of sparse attention; nothing for other layers."""
    if (indexer := m.indexer_of(kind)) is None:
        return LayerWork(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    sequence, target = m.sequence * m.context_parallel, m.attention_of(kind).queries
    return indexer.work(m.tokens, sequence, m.hidden, m.indexed, target, m.tensor_parallel)


def _mlp(m: Model, modules: tuple[str, ...] = (MLP,), of_experts: bool = False) -> LayerWork:
    """Compute the figures of the MLP of a transformer layer, or of shared experts, with the norm before it.

    Args:
        modules: those whose recomputation repeats it.
        of_experts: whether the norm is a module of its own, because a router takes its output, too.
    """
    split, whole = m.divisions
    matrices = 2.0 * m.tokens * m.mlp_weights
    again = matrices if m.keeping.repeats(*modules) else 0.0
    wide = m.ffn * (2 if m.gated else 1)
    # Bytes in bf16; the comments give multiples of h for an MLP of 4h.
    states, inside = 2.0 * m.tokens * m.hidden / whole, 2.0 * m.tokens / split
    normalized = Tensor(states, (LAYER_NORM,), of_product=m.ffn > 0) if of_experts else operand(states, *modules)
    tensors = [
        Tensor(states),  # the norm's input: 2h
        normalized,  # its output: 2h
        Tensor(inside * wide, modules),  # the input of the activation function: 8h
        operand(inside * m.ffn, *modules),  # its output: 8h
    ]
    for_wgrad = (2 * wide + 2 * m.ffn) / split + 4 * m.hidden / whole
    return replace(
        _with_tensors(m, tensors),
        forward=matrices,
        backward=matrices + again,
        wgrad=matrices,
        kept_for_wgrad=m.tokens * for_wgrad * m.kept.operand_share if m.ffn else 0.0,
        linear=matrices,
        repeated=again,
        reductions=1 if m.ffn else 0,
    )


def _with_tensors(m: Model, tensors: list[Tensor]) -> LayerWork:
    """A half of a layer with these tensors and a mask of dropout, but no operations."""
    moved, kept, dropped = m.keeping.of(tensors, mask=m.tokens * m.hidden / m.divisions[1])
    return LayerWork(0.0, 0.0, 0.0, moved, kept, 0.0, moved_again=dropped)


def output_layer(m: Model) -> LayerWork:
    """Compute the figures of the output layer: logits in 4 bytes for the loss, their bf16 gradient, and the input."""
    operations = 2.0 * m.tokens * m.hidden * m.vocab_size
    logits = m.tokens * m.vocab_size / m.tensor_parallel
    states, trained = m.state_bytes, m.adapters is None
    return LayerWork(
        operations,
        operations,
        operations * trained,
        4 * logits,
        4 * logits + 2 * states,
        (2 * logits + states) * trained,
        is_recomputed=False,
    )
