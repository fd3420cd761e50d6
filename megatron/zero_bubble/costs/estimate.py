"""Estimate pass costs and memory from a model's shapes before a run; a recorded costs file is more accurate.

Floating-point operations and bytes of a transformer layer are the published ones (Zero Bubble paper, arXiv 2401.10241,
appendix B, after Korthikanti et al., arXiv 2205.05198), computed per part so that they also cover grouped queries and
gated MLPs. With h = hidden size, s = sequence, b = microbatch, a = heads, and an MLP of 4h, F takes sbh(24h+4s)
operations, B sbh(24h+8s) and W 24sbh^2; F stores sb(34h+5as) bytes, and B leaves 32sbh bytes to W. Times are these
operations at an assumed share of the device's peak, plus several sweeps over the stored bytes at memory bandwidth for
the element-wise kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.costs.layers import LayerCosts, Part
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement

Recompute = Literal["none", "selective", "full"]

_FORWARD_SWEEPS, _BACKWARD_SWEEPS = 5.0, 4.3
"""How often element-wise kernels move the bytes that a layer stores. Fitted, together with the A100's matrix
efficiency, to the 12 profiles of the Zero Bubble paper (table 9); F, B and W deviate from them by at most 5 %."""


@dataclass(frozen=True)
class Device:
    """The assumed performance of an accelerator.

    ``tflops`` is the dense bf16 peak, of which matrix products reach the share ``efficiency``; ``memory_tbs`` is the
    memory bandwidth in TB/s. A transfer between neighbours takes ``latency_ms`` plus its bytes at ``link_gbs`` GB/s.
    """

    name: str
    tflops: float
    memory_tbs: float
    efficiency: float
    link_gbs: float
    latency_ms: float = 0.3

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tflops:g} TFLOPS at {self.efficiency:.0%} in matrix products, memory "
            f"{self.memory_tbs:g} TB/s, transfers {self.latency_ms:g} ms + bytes at {self.link_gbs:g} GB/s"
        )


DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312.0, 2.0, 0.80, 100.0),
        Device("h100", 989.0, 3.35, 0.65, 200.0, 0.1),
        Device("h200", 989.0, 4.8, 0.65, 200.0, 0.1),
        Device("b200", 2250.0, 8.0, 0.65, 400.0, 0.1),
    )
}
"""Peaks are from the vendor; efficiency and link of the A100 are fitted to the paper's 4 nodes, the others assumed."""


@dataclass(frozen=True)
class Model:
    """The shapes of a GPT. ``layers`` is the number of layers of every stage in model order.

    ``heads * head_size`` need not equal ``hidden``; ``groups`` is the number of key-value heads; a ``gated`` MLP has
    three matrices. ``tensor_parallel`` divides all of it; the activations between matrix products are divided only with
    ``sequence_parallel``.
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

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.sequence * self.microbatch

    @property
    def layer_weights(self) -> int:
        """Number of weights in a layer's matrices: 12 h^2 if the MLP is 4h wide and every head has separate keys."""
        queries, keys = self.heads * self.head_size, self.groups * self.head_size
        return self.hidden * (2 * queries + 2 * keys) + (3 if self.gated else 2) * self.hidden * self.ffn

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
        per_stage = [float(count * self.layer_weights) for count in self.layers_on(placement)]
        per_stage[0] += self.vocabulary * self.hidden
        per_stage[-1] += self.vocabulary * self.hidden
        return tuple(count / self.tensor_parallel for count in per_stage)

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


@dataclass(frozen=True)
class _Layer:
    """One layer or the output layer: operations of F, B, W, bytes that element-wise kernels move, and bytes stored; of
    these, the operations of F and B for attention scores, and the bytes of keys and values.
    """

    forward: float
    backward: float
    wgrad: float
    moved: float
    activation: float
    kept_for_wgrad: float
    forward_scores: float = 0.0
    backward_scores: float = 0.0
    history: float = 0.0


def estimate(model: Model, device: Device, placement: Placement) -> tuple[PassCosts, PassMemory]:
    """Estimate costs in ms and memory in bytes on ``placement``, whose stages have the layers ``model.layers``.

    The output layer and the loss are on the last stage. The embedding look-up is assumed to cost nothing.

    Raises:
        UserError: as ``Model.layers_on``.
    """
    return layer_costs(model, device).on(model.layers_on(placement))


def layer_costs(model: Model, device: Device) -> LayerCosts:
    """Estimate the costs of the layers of ``model`` in ms and bytes, for any division among stages."""
    body, head = _transformer_layer(model), _output_layer(model)
    rate, (f, b, w) = _rate(model, device), _milliseconds(body, model, device)
    layer = Part(
        f,
        b,
        w,
        body.activation,
        body.kept_for_wgrad,
        body.history,
        forward_attention=body.forward_scores / rate / f,
        backward_attention=body.backward_scores / rate / b,
    )
    return LayerCosts(
        (layer,) * sum(model.layers),
        loss=Part(*_milliseconds(head, model, device), head.activation, head.kept_for_wgrad),
        comm_ms=_transfer_ms(model, device),
        input_memory=model.message_bytes,
        recomputed=model.recompute == "full",
    )


def _rate(model: Model, device: Device) -> float:
    """Return operations per ms."""
    return device.tflops * 1e9 * device.efficiency * model.tensor_parallel


def _milliseconds(layer: _Layer, model: Model, device: Device) -> tuple[float, float, float]:
    """Return the times of F, B and W."""
    rate, sweep = _rate(model, device), device.memory_tbs * 1e9  # bytes per ms
    again = layer.forward if layer.history and model.recompute == "full" else 0.0  # not of the output layer
    return (
        layer.forward / rate + _FORWARD_SWEEPS * layer.moved / sweep,
        (layer.backward + again) / rate + _BACKWARD_SWEEPS * layer.moved / sweep,
        layer.wgrad / rate,
    )


def _transfer_ms(model: Model, device: Device) -> float:
    return device.latency_ms + model.message_bytes / (device.link_gbs * 1e6)


def _transformer_layer(m: Model) -> _Layer:
    """Compute the figures of one transformer layer of ``m``.

    Attention scores take 4 s^2 b h operations forward, twice that backward, and 5 a s^2 b bytes. Instead of storing
    these bytes, selective recomputation repeats the scores in B, and flash attention repeats the first half of them.
    """
    queries, keys = m.heads * m.head_size, m.groups * m.head_size
    matrices = 2.0 * m.tokens * m.layer_weights
    scores = 4.0 * m.tokens * m.sequence * queries
    score_bytes = 5.0 * m.heads * m.sequence * m.tokens
    again = scores / 2 if m.flash else scores if m.recompute == "selective" else 0.0
    kept_scores = 0.0 if again else score_bytes

    # Bytes in bf16; the comments give multiples of h for heads * head_size = h, one key per head and an MLP of 4h.
    inner = 2 * queries + 2 * keys + 2 * keys + 2 * queries  # q, k, v and the projection's input: 8h
    inner += (6 if m.gated else 4) * m.ffn  # the activation function's input and output: 16h
    outer = 10 * m.hidden  # two norms 4h, two matrices' inputs 4h, two dropout masks 2h
    split, whole = m.tensor_parallel, m.tensor_parallel if m.sequence_parallel else 1
    outside_scores = m.tokens * (inner / split + outer / whole)
    moved = outside_scores + (0.0 if m.flash else score_bytes / split)
    kept = outside_scores + kept_scores / split
    # Inputs and output gradients of the four matrices: 8h + 4h + 10h + 10h.
    wide = m.ffn * (2 if m.gated else 1)
    for_wgrad_inner = 2 * (queries + 2 * keys) + 2 * queries + 2 * wide + 2 * m.ffn
    for_wgrad = m.tokens * (for_wgrad_inner / split + 8 * m.hidden / whole)
    activation = 2.0 * m.tokens * m.hidden / whole if m.recompute == "full" else kept
    in_backward = 2 * scores + again
    return _Layer(
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


def _output_layer(m: Model) -> _Layer:
    """Compute the figures of the output layer: logits in 4 bytes for the loss, their bf16 gradient, and the input."""
    operations = 2.0 * m.tokens * m.hidden * m.vocabulary
    logits = m.tokens * m.vocabulary / m.tensor_parallel
    states = m.message_bytes
    return _Layer(operations, operations, operations, 4 * logits, 4 * logits + 2 * states, 2 * logits + states)
