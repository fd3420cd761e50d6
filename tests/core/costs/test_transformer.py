"""Tests of the tensors that layers keep, and of what selective recomputation repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.core.costs.attention import Latent
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.kept import Kept
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.precision import PRECISIONS
from megatron.zero_bubble.core.costs.transformer import work_of

DENSE = Model((2,), 1024, 4096, 16, 4, 64, 2048, 1, 1000, gated=True)
EXPERTS = Experts(64, 6, 512, 768, 8, layers=(False, True))
LATENT = replace(DENSE, latent=Latent(384, 128), experts=EXPERTS)
TOKENS, H100 = 2048, DEVICES["h100"]
MOONLIGHT = Model(
    (27,),
    2048,
    11264,
    16,
    16,
    128,
    4096,
    1,
    163_840,
    gated=True,
    tensor_parallel=2,
    sequence_parallel=True,
    experts=Experts(64, 6, 1408, 2816, 8, layers=(False,) + (True,) * 26),
    latent=Latent(None, 512),
)


def selective(model: Model, *modules: str, operand_bytes: float = 2.0) -> Model:
    """The model with these modules recomputed, and without dropout."""
    return replace(model, recompute="selective", kept=Kept(modules, operand_bytes, dropout=False))


def test_fp8_keeps_the_inputs_of_linears_in_one_byte() -> None:
    """What attention and the activation function keep stays in two, also the output of attention."""
    h, q, k, ffn = 1024, 1024, 256, 4096
    states = 2 * 2 * h + 2 * (q + 2 * k) + 2 * q + 2 * 2 * ffn
    assert work_of("dense", selective(DENSE)).activation == TOKENS * (states + 2 * 2 * h + 2 * ffn)
    low = work_of("dense", selective(DENSE, operand_bytes=PRECISIONS["delayed"].operand_bytes))
    assert low.activation == TOKENS * (states + 2 * h + ffn + q)
    assert low.kept_for_wgrad == work_of("dense", DENSE).kept_for_wgrad / 2


@pytest.mark.parametrize(
    ("kind", "module", "dropped", "operations"),
    [
        ("dense", "core_attn", 0, 2 * 1024 * 16 * (192 + 128)),  # half of the 2048 tokens, by the mask
        ("dense", "mla_up_proj", 2 * 16 * (192 + 192 + 128), 2 * (384 * 16 * 192 + 128 * 16 * 256)),
        ("dense", "mlp", 2 * 1024 + 6 * 4096, 2 * 3 * 1024 * 4096),
        ("dense", "layernorm", 2 * 1024, 0),
        ("dense", "moe", 0, 0),
        ("dense", "moe_act", 0, 0),
        ("dense", "shared_experts", 0, 0),
        ("experts", "mlp", 0, 0),
        ("experts", "layernorm", 2 * 2 * 1024, 0),
        ("experts", "moe_act", 6 * 2 * 512, 0),
        ("experts", "shared_experts", 6 * 768, 2 * 3 * 1024 * 768),
        (
            "experts",
            "moe",
            6 * (2 * 1024 + 6 * 512) + 6 * 768 + 8 * 64,
            2 * 3 * 1024 * (6 * 512 + 768) + 2 * 1024 * 64,
        ),
    ],
)
def test_a_module_drops_its_tensors_and_repeats_its_operations(
    kind: str, module: str, dropped: float, operations: float
) -> None:
    """Per token; what the weight gradients take stays as it is, because B makes it again."""
    nothing, own = work_of(kind, selective(LATENT)), work_of(kind, selective(LATENT, module))
    assert nothing.activation - own.activation == own.moved_again == TOKENS * dropped
    assert own.backward - nothing.backward == TOKENS * operations
    assert (own.kept_for_wgrad, own.forward, own.moved) == (nothing.kept_for_wgrad, nothing.forward, nothing.moved)


def test_full_recomputation_keeps_the_input_whatever_the_modules() -> None:
    model = replace(selective(LATENT, "mlp", "moe"), recompute="full")
    for kind in ("dense", "experts"):
        assert work_of(kind, model).activation == TOKENS * 2 * 1024
        assert work_of(kind, model).moved_again == 0


def test_recomputed_experts_receive_their_tokens_again() -> None:
    plain, again = (layer_costs(selective(LATENT, *modules), H100).experts[1] for modules in ((), ("moe",)))
    assert (again.dispatch, again.combine) == (plain.dispatch, plain.combine)
    assert again.combine_grad == again.dispatch_grad == pytest.approx(2 * plain.dispatch_grad)


@pytest.mark.parametrize(("module", "measured"), [("core_attn", 0.004), ("mla_up_proj", 0.716), ("moe_act", 0.677)])
def test_drops_are_near_those_that_nvidia_measured(module: str, measured: float) -> None:
    """Moonlight 16B on 8 H100 (Megatron-Bridge's notes on recomputation), in GB of the peak, at which one layer is made
    again.
    """
    layers = [("dense", 1), ("experts", 26)]
    without, own = (
        sum(count * work_of(kind, selective(MOONLIGHT, *modules)).activation for kind, count in layers)
        for modules in ((), (module,))
    )
    assert (without - own) / 1e9 == pytest.approx(measured, rel=0.35, abs=0.01)
