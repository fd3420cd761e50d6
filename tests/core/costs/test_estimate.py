"""Compare estimates with the published formulas and the published profiles."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.costs.attention import Latent
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate
from megatron.zero_bubble.core.costs.kept import CORE_ATTENTION, UP_PROJECTION, Kept
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.precision import PRECISIONS
from megatron.zero_bubble.core.errors import UserError

PUBLISHED = Path(__file__).parents[3] / "configs/published/zero_bubble_table5.csv"
IN_VEE = (1, *(2,) * 14, 1)
SHAPES = {"1.5B": (24, 2304, 24, 6), "6.2B": (32, 4096, 32, 3), "14.6B": (48, 5120, 40, 1), "28.3B": (64, 6144, 48, 1)}
"""Layers, hidden size, heads and microbatch size (arXiv 2401.10241, table 3). The first and last rank have one layer
less than ``layers / p``."""


def published(name: str, p: int) -> Model:
    layers, hidden, heads, microbatch = SHAPES[name]
    each = layers // p
    by_rank = (each - 1, *(each,) * (p - 2), each - 1)
    return Model(by_rank, hidden, 4 * hidden, heads, heads, hidden // heads, 1024, microbatch, 51_200, flash=False)


@pytest.mark.parametrize("name", SHAPES)
def test_memory_per_layer_equals_the_papers(name: str) -> None:
    """M_B is sb(34h + 5as) and M_W is 32sbh, in bytes."""
    model = published(name, 8)
    _, memory = estimate(model, DEVICES["a100"], Placement.linear(8))
    s, b, h, a = model.sequence, model.microbatch, model.hidden, model.heads
    assert memory.activation[3] == pytest.approx(model.layers[3] * s * b * (34 * h + 5 * a * s))
    assert memory.wgrad[3] == pytest.approx(model.layers[3] * 32 * s * b * h)
    _, flash = estimate(replace(model, flash=True), DEVICES["a100"], Placement.linear(8))
    assert flash.activation[3] == pytest.approx(model.layers[3] * 34 * s * b * h)
    _, full = estimate(replace(model, recompute="full"), DEVICES["a100"], Placement.linear(8))
    assert full.activation[3] == pytest.approx(model.layers[3] * 2 * s * b * h)


def test_slices_count_the_keys_and_values_of_a_recomputed_up_projection() -> None:
    """Recomputation drops them from what a microbatch keeps, but later slices attend to them."""
    model = replace(published("6.2B", 8), latent=Latent(1536, 512), recompute="selective")
    _, memory = estimate(model, DEVICES["a100"], Placement.linear(8))
    repeated = replace(model, kept=Kept(modules=(CORE_ATTENTION, UP_PROJECTION)))
    _, less = estimate(repeated, DEVICES["a100"], Placement.linear(8))
    assert less.recomputed and not memory.recomputed
    assert less.activation[3] < memory.activation[3] and less.history == memory.history


def test_operations_per_layer_equal_the_papers() -> None:
    """F is sbh(24h+4s), B is sbh(24h+8s) and W is 24sbh^2, on a device where nothing else takes time."""
    model = published("6.2B", 8)
    device = replace(DEVICES["a100"], tflops=1e-9, efficiency=1.0, memory_tbs=1e30)
    s, b, h = model.sequence, model.microbatch, model.hidden
    layers = model.layers[3]

    def times(model: Model) -> tuple[float, float, float]:
        costs, _ = estimate(model, device, Placement.linear(8))
        return costs.forward_ms[3], costs.backward_ms[3], costs.wgrad_ms[3]

    f, b_, w = s * b * h * (24 * h + 4 * s), s * b * h * (24 * h + 8 * s), s * b * h * 24 * h
    assert times(model) == pytest.approx((layers * f, layers * b_, layers * w))
    selective = layers * f, layers * (b_ + 4 * s * s * b * h), layers * w
    assert times(replace(model, recompute="selective")) == pytest.approx(selective)
    # Flash kernels skip the half that a causal mask leaves out, in five products instead of four.
    flash = s * b * h * (24 * h + 2 * s), s * b * h * (24 * h + 5 * s), w
    assert times(replace(model, flash=True)) == pytest.approx(tuple(layers * each for each in flash))
    window = s * b * h * (24 * h + 2 * s * 0.5 + 4 * 128 * 0.5)  # in half of the layers, 128 tokens instead of s / 2
    assert times(replace(model, flash=True, window=128, windowed=0.5))[0] == pytest.approx(layers * window)
    assert times(replace(model, flash=True, window=s)) == times(replace(model, flash=True)), "more than there are"
    half = replace(model, sequence=s // 2, context_parallel=2)
    assert times(half) == pytest.approx(tuple(layers * each / 2 for each in (f, b_, w)))
    assert times(replace(model, recompute="full")) == pytest.approx((layers * f, layers * (b_ + f), layers * w))


@pytest.mark.parametrize(
    "row",
    list(csv.DictReader(line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#"))),
    ids=lambda row: f"{row['model']}-{row['m']}",
)
def test_times_are_within_5_percent_of_the_papers_profiles(row: dict[str, str]) -> None:
    p = int(row["p"])
    costs, _ = estimate(published(row["model"], p), DEVICES["a100"], Placement.linear(p))
    for figures, key in ((costs.forward_ms, "t_f_ms"), (costs.backward_ms, "t_b_ms"), (costs.wgrad_ms, "t_w_ms")):
        assert figures[p // 2] == pytest.approx(float(row[key]), rel=0.05)
    assert costs.comm_ms == pytest.approx(float(row["t_comm_ms"]), rel=0.25)


def test_output_layer_is_on_the_last_stage_of_any_placement() -> None:
    model = published("6.2B", 8)
    linear, kept = estimate(model, DEVICES["h100"], Placement.linear(8))
    vee, kept_in_vee = estimate(replace(model, layers=IN_VEE), DEVICES["h100"], Placement.vee(8))
    assert linear.forward_ms[7] > linear.forward_ms[0]
    assert vee.forward_ms[15] - vee.forward_ms[0] == pytest.approx(linear.forward_ms[7] - linear.forward_ms[0])
    assert sum(vee.forward_ms) == pytest.approx(sum(linear.forward_ms))
    assert sum(kept_in_vee.activation) == pytest.approx(sum(kept.activation))
    assert kept.activation[7] > kept.activation[0]


def test_layers_are_not_divided() -> None:
    model = published("6.2B", 8)
    merged, _ = estimate(replace(model, layers=IN_VEE), DEVICES["h100"], Placement.linear(8))
    assert merged.forward_ms == pytest.approx(estimate(model, DEVICES["h100"], Placement.linear(8))[0].forward_ms)
    for make in (lambda: estimate(model, DEVICES["h100"], Placement.vee(8)), lambda: model.weights(Placement.vee(8))):
        with pytest.raises(UserError, match="the layers of 8 stages cannot be divided among 16 stages"):
            make()


def test_tensor_parallelism_divides_work_and_memory() -> None:
    model = replace(published("6.2B", 8), flash=True)
    one, kept = estimate(model, DEVICES["h100"], Placement.linear(8))
    divided = replace(model, tensor_parallel=4)
    split, kept_split = estimate(divided, DEVICES["h100"], Placement.linear(8))
    _, kept_all = estimate(
        replace(model, tensor_parallel=4, sequence_parallel=True), DEVICES["h100"], Placement.linear(8)
    )
    assert split.wgrad_ms[3] == pytest.approx(one.wgrad_ms[3] / 4)
    # Two reductions per layer, in each of which a rank sends 2 (t-1)/t of the hidden states in 16 bits.
    reductions = model.layers[3] * 2 * (2 * 3 / 4) * 2 * model.tokens * model.hidden
    hidden, _ = estimate(replace(divided, overlaps_tensor=True), DEVICES["h100"], Placement.linear(8))
    far, _ = estimate(divided, replace(DEVICES["h100"], domain=2), Placement.linear(8))
    for costs, share, gbs in ((split, 1.0, 340), (hidden, 0.6, 340), (far, 1.0, 50)):
        waits = share * reductions / (gbs * 1e6)
        assert costs.wgrad_ms == split.wgrad_ms
        assert costs.backward_ms[3] - waits == pytest.approx(split.backward_ms[3] - reductions / 340e6)
    # Of 34 sbh, 24 are always divided, and 10 only with sequence parallelism (arXiv 2205.05198, equations 2 and 4).
    assert kept_split.activation[3] == pytest.approx(kept.activation[3] * (10 + 24 / 4) / 34)
    assert kept_all.activation[3] == pytest.approx(kept.activation[3] / 4)


def test_a_fused_mlp_computes_its_weight_gradients_in_b() -> None:
    """Two thirds of the weights of such a layer; what W reads of the MLP, 20 of 32 sbh, is then kept no longer."""
    model = published("6.2B", 8)
    (split, kept), (fused, kept_fused) = (
        estimate(replace(model, joined=("mlp",) if fuses else ()), DEVICES["h100"], Placement.linear(8))
        for fuses in (False, True)
    )
    assert fused.wgrad_ms[3] == pytest.approx(split.wgrad_ms[3] / 3)
    assert fused.backward_ms[3] == pytest.approx(split.backward_ms[3] + split.wgrad_ms[3] * 2 / 3)
    assert fused.forward_ms == split.forward_ms
    assert kept_fused.wgrad[3] == pytest.approx(kept.wgrad[3] * (1 - 20 / 32))


def test_the_savings_of_fp8_are_where_the_weight_gradients_of_a_fused_mlp_are() -> None:
    model = replace(published("6.2B", 8), precision=PRECISIONS["mxfp8"])
    split, fused = (
        estimate(replace(model, joined=("mlp",) if fuses else ()), DEVICES["b200"], Placement.linear(8))[0]
        for fuses in (False, True)
    )
    assert fused.wgrad_ms[3] == pytest.approx(split.wgrad_ms[3] / 3)
    assert fused.backward_ms[3] == pytest.approx(split.backward_ms[3] + split.wgrad_ms[3] * 2 / 3)
    assert fused.forward_ms == split.forward_ms, "operands are quantized all the same"


def test_graphs_keep_what_their_parts_take_from_f_to_w() -> None:
    model, on = published("6.2B", 8), Placement.linear(8)
    (eager, kept), (graphed, inside), (_, whole) = (
        estimate(replace(model, captured=captured), DEVICES["h100"], on)
        for captured in ((), ("attention",), ("attention", "mlp"))
    )
    assert graphed == eager
    assert inside.activation == kept.activation
    assert inside.wgrad[3] == pytest.approx(kept.wgrad[3] * 20 / 32 + inside.captured[3]), "and what W takes of the MLP"
    assert whole.activation[3] == whole.wgrad[3] == whole.captured[3] == kept.activation[3]


def test_weights_of_gated_and_grouped_layers() -> None:
    """As in Llama: three MLP matrices, and keys and values for a quarter of the heads."""
    model = replace(published("6.2B", 8), gated=True, groups=8, ffn=11_008)
    h = model.hidden
    assert model.layer_weights == 2 * h * h + 2 * h * h // 4 + 3 * h * 11_008
    linear, vee = model.weights(Placement.linear(8)), replace(model, layers=IN_VEE).weights(Placement.vee(8))
    assert (linear[0], linear[3]) == (3 * model.layer_weights + 51_200 * h, 4 * model.layer_weights)
    # The first rank of a V has both ends of the model.
    assert vee[0] == 2 * model.layer_weights + 2 * 51_200 * h
    assert sum(vee) == sum(linear)


def test_rank_without_layers_stores_the_received_message() -> None:
    model = replace(published("6.2B", 8), layers=(0, 5, 5, 5, 5, 5, 5, 0))
    costs, memory = estimate(model, DEVICES["a100"], Placement.linear(8))
    assert costs.forward_ms[0] == 0.0
    assert memory.activation[0] == model.message_bytes


def test_hyper_connections_widen_messages_and_what_layers_read() -> None:
    plain = replace(published("6.2B", 8), recompute="full")
    wide, device = replace(plain, streams=4), DEVICES["a100"]
    assert wide.message_bytes == 4 * plain.message_bytes == 4 * wide.state_bytes
    (one, of_one), (four, of_four) = (estimate(model, device, Placement.linear(8)) for model in (plain, wide))
    assert four.comm_ms - device.latency_ms == pytest.approx(4 * (one.comm_ms - device.latency_ms))
    assert four.forward_ms == one.forward_ms
    assert of_four.activation[3] == pytest.approx(4 * of_one.activation[3])
    assert wide.assumed(device)[0].startswith("Hyper-connections hand on 4 streams; ") and not plain.assumed(device)
