"""Tests of the table of GPUs, and of estimates in lower precisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.costs.attention import Latent
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate, layer_costs
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.operations import operations
from megatron.zero_bubble.core.costs.precision import BF16, PRECISIONS
from megatron.zero_bubble.core.costs.terms import TIMES

LLAMA = Model((80,), 8192, 28672, 64, 8, 128, 8192, 1, 128_256, gated=True)
LINE = Placement.linear(1)


def test_peaks_double_with_half_the_bits() -> None:
    """On every GPU that has the format; the newest gain more in FP4 and FP8."""
    assert len(DEVICES) == 13
    for device in DEVICES.values():
        assert device.fp8_tflops is None or device.fp8_tflops >= 1.99 * device.tflops, device.name
        assert device.fp4_tflops is None or device.fp4_tflops >= 1.99 * (device.fp8_tflops or 0), device.name
        assert device.network_gbs < device.node_gbs < device.memory_tbs * 1e3, device.name
        assert 80 <= device.memory_gib <= 288 and device.domain in (8, 72), device.name


@pytest.mark.parametrize(("name", "gpu"), [("tensorwise", "h100"), ("mxfp8", "b200"), ("nvfp4", "gb300")])
def test_only_linear_layers_compute_in_a_lower_precision(name: str, gpu: str) -> None:
    device, precision = DEVICES[gpu], PRECISIONS[name]
    high, low = layer_costs(LLAMA, device), layer_costs(replace(LLAMA, precision=precision), device)
    assert low.loss == high.loss, "the output layer stays"
    one, other = high.layers[0], low.layers[0]
    assert other.wgrad_ms * device.reached(precision) == pytest.approx(one.wgrad_ms * device.reached(BF16))
    # What F gains is that of its products, which are as many as those of W, but for the quantization of its inputs.
    quantized = one.wgrad / 2 / 2 * precision.moved / (device.memory_tbs * 1e9)
    for pass_ms in ("forward_ms", "backward_ms"):
        gained = getattr(one, pass_ms) - getattr(other, pass_ms)
        assert gained == pytest.approx(one.wgrad_ms - other.wgrad_ms - quantized), pass_ms
    assert other.forward_attention > one.forward_attention


def test_a_gpu_without_a_format_computes_in_bf16() -> None:
    for name, gpu in (("tensorwise", "a100"), ("nvfp4", "h100")):
        asked = replace(LLAMA, precision=PRECISIONS[name])
        assert layer_costs(asked, DEVICES[gpu]) == layer_costs(LLAMA, DEVICES[gpu])
        assert DEVICES[gpu].peak(PRECISIONS[name]) == DEVICES[gpu].tflops


def test_a_pace_scales_passes_and_no_transfers() -> None:
    device = replace(DEVICES["h100"], pace=1.25)
    model = replace(LLAMA, tensor_parallel=4)
    costs, _ = estimate(model, DEVICES["h100"], LINE)
    slower, _ = estimate(model, device, LINE)
    for name in TIMES:
        assert getattr(slower, name) == pytest.approx([1.25 * ms for ms in getattr(costs, name)])
    assert slower.comm_ms == costs.comm_ms and slower.forward_attention == pytest.approx(costs.forward_attention)
    assert "52% in matrix products" in str(device)


def test_operations_are_those_that_logs_count() -> None:
    """Of Llama 3 70B: 1,602 tokens per second are 719 TFLOP/s (Megatron-Bridge, performance summary of 25.11)."""
    assert operations(LLAMA) * 1602 / 1e12 == pytest.approx(719, rel=0.001)
    for same in ({"recompute": "full"}, {"flash": False}, {"tensor_parallel": 8, "precision": PRECISIONS["mxfp8"]}):
        assert operations(replace(LLAMA, **same)) == operations(LLAMA)  # type: ignore[arg-type]
    assert operations(replace(LLAMA, sequence=4096, context_parallel=2)) == operations(LLAMA)


def test_latent_attention_has_its_own_widths() -> None:
    """Of DeepSeek-V3, arXiv 2412.19437, section 4.2: 187 million weights in the attention of a layer."""
    latent = Latent(1536, 512)
    model = Model((1,), 7168, 18432, 128, 128, 56, 4096, 1, 129_280, gated=True, latent=latent)
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert model.attention_weights == by_hand == 187_105_280
    device = replace(DEVICES["h100"], tflops=1e-9, efficiency=1.0, memory_tbs=1e30)
    scores = 2 * 4096 * 2048 * 128 * (192 + 128)
    forward = layer_costs(model, device).layers[0].forward_ms
    assert forward == pytest.approx(2 * 4096 * (by_hand + 3 * 7168 * 18432) + scores)
