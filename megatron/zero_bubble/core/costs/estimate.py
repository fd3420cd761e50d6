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

from dataclasses import replace

from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.devices import Device
from megatron.zero_bubble.core.costs.expert_layers import CONTENTION
from megatron.zero_bubble.core.costs.experts import NO_EXPERTS, ExpertParts
from megatron.zero_bubble.core.costs.kept import MOE, UP_PROJECTION
from megatron.zero_bubble.core.costs.layer_work import LayerWork
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.precision import BF16, Precision
from megatron.zero_bubble.core.costs.transformer import output_layer, routed, work_of
from megatron.zero_bubble.core.ir import Placement

_FORWARD_SWEEPS, _BACKWARD_SWEEPS = 5.0, 4.3
"""How often element-wise kernels move the bytes that a layer stores. Fitted, together with the A100's matrix
efficiency, to the 12 profiles of the Zero Bubble paper (table 9); F, B and W deviate from them by at most 5 %."""
_LAUNCH_MS = 0.005
"""The time that a kernel takes at least, because it is launched."""
_EXPOSED = 0.6
"""The share of tensor-parallel collectives that passes wait for where they run beneath the products."""


def estimate(model: Model, device: Device, placement: Placement) -> tuple[PassCosts, PassMemory]:
    """Estimate costs in ms and memory in bytes on ``placement``, whose stages have the layers ``model.layers``.

    The output layer and the loss are on the last stage. The embedding look-up is assumed to cost nothing.

    Raises:
        UserError: as ``Model.layers_on``.
    """
    return layer_costs(model, device).on(model.layers_on(placement))


def layer_costs(model: Model, device: Device) -> LayerCosts:
    """Estimate the costs of the layers of ``model`` in ms and bytes, for any division among stages."""
    parts = {kind: _part(work_of(kind, model), model, device) for kind in set(model.kinds)}
    experts = {kind: _experts(kind, model, device) for kind in parts}
    for kind, own in experts.items():
        parts[kind] = _with_all_to_alls(parts[kind], own)
    return LayerCosts(
        tuple(map(_below, model.untrained, (parts[kind] for kind in model.kinds))),
        loss=_part(output_layer(model), model, device),
        comm_ms=_transfer_ms(model, device),
        input_memory=model.message_bytes,
        recomputed=_recomputes_keys(model),
        experts=tuple(map(_forward_only, model.untrained, (experts[kind] for kind in model.kinds)))
        if any(own.layers for own in experts.values())
        else (),
        contention=CONTENTION if model.experts is not None and model.experts.parallel > 1 else 1.0,
        again=model.again if model.recompute == "full" else None,
    )


def _below(is_below: bool, part: LayerFigures) -> LayerFigures:
    """A layer that has only F, and keeps nothing, if it is below all that is trained."""
    return LayerFigures(part.forward_ms, forward_attention=part.forward_attention) if is_below else part


def _forward_only(is_below: bool, own: ExpertParts) -> ExpertParts:
    """The parts of such a layer."""
    nothing = dict.fromkeys(("combine_grad", "experts_grad", "dispatch_grad", "experts_wgrad"), 0.0)
    return own._replace(**nothing) if is_below else own


def _recomputes_keys(model: Model) -> bool:
    return model.recompute == "full" or (model.latent is not None and model.keeping.repeats(UP_PROJECTION))


def _experts(kind: str, model: Model, device: Device) -> ExpertParts:
    if (own := model.experts_of(kind)) is None:
        return NO_EXPERTS
    sent = own.all_to_all_ms(model.state_bytes * own.width(model.hidden) / model.hidden, device)
    f, b, w, _ = _milliseconds(routed(kind, model, own), model, device)
    again = 2.0 if model.recompute == "full" or model.keeping.repeats(MOE) else 1.0  # B repeats those of F
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
        recompute_ms=part.recompute_ms and part.recompute_ms + own.dispatch + own.combine,
        forward_attention=part.forward_attention and part.forward_attention * part.forward_ms / forward,
        backward_attention=part.backward_attention and part.backward_attention * part.backward_ms / backward,
    )


def _part(work: LayerWork, model: Model, device: Device) -> LayerFigures:
    rate, (f, b, w, again) = _rate(model, device) / device.pace, _milliseconds(work, model, device)
    return LayerFigures(
        f,
        b,
        w,
        work.activation,
        work.kept_for_wgrad,
        work.history,
        forward_attention=work.forward_scores and work.forward_scores / rate / f,
        backward_attention=work.backward_scores and work.backward_scores / rate / b,
        captured=work.captured,
        recompute_ms=again,
        rebuilt=work.rebuilt if again else 0.0,
        states=work.states,
    )


def _rate(model: Model, device: Device, precision: Precision = BF16) -> float:
    """Return operations per ms."""
    return device.reached(precision) * 1e9 * model.tensor_parallel


def _milliseconds(layer: LayerWork, model: Model, device: Device) -> tuple[float, float, float, float]:
    """Return the time in ms of F, B and W, and of the part of B that repeats F."""
    rate, sweep = _rate(model, device), device.memory_tbs * 1e9  # bytes per ms
    added = 1 / _rate(model, device, model.precision) - 1 / rate  # ms per operation, what the precision adds or saves
    # F quantizes the inputs of linear layers, B the gradients of their outputs: each half of what W takes.
    quantized = layer.operands - layer.quantized_inside if layer.linear else 0.0
    waits = quantized / model.kept.operand_bytes / 2 * device.supported(model.precision).moved / sweep
    waits += layer.reductions * _reduction_ms(model, device) + layer.permuted / sweep
    launching = max(0.0, layer.products * _LAUNCH_MS - layer.grouped * (1 / rate + added))
    waits += launching
    forward = layer.forward / rate + layer.linear * added + waits
    again = forward if layer.is_recomputed and model.recompute == "full" else 0.0
    swept = _BACKWARD_SWEEPS * layer.moved + _FORWARD_SWEEPS * layer.moved_again + layer.permuted_again
    deferred = min(layer.wgrad, layer.linear - layer.frozen)  # the W of joined parts is in B
    in_backward = 2 * layer.linear - layer.frozen - deferred + layer.repeated
    backward = layer.backward / rate + in_backward * added + waits + again
    times = (
        forward + _FORWARD_SWEEPS * layer.moved / sweep,
        backward + swept / sweep,
        layer.wgrad / rate + deferred * added + launching,
        again,
    )
    f, b, w, r = (device.pace * ms for ms in times)
    return f, b, w, r


def _reduction_ms(model: Model, device: Device) -> float:
    """Return the time for which a pass waits until hidden states are added over the tensor-parallel ranks, or gathered
    and scattered with sequence parallelism, which sends as much.
    """
    ranks, states = model.tensor_parallel, 2.0 * model.tokens * model.hidden
    sent = 2 * (ranks - 1) / ranks * states
    return sent / (device.collective_gbs(ranks) * 1e6) * (_EXPOSED if model.overlaps_tensor else 1.0)


def _transfer_ms(model: Model, device: Device) -> float:
    return device.latency_ms + model.message_bytes / (device.link_gbs * 1e6)
