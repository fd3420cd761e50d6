"""Layers of hybrid models without TransformerEngine, for ``--spec hybrid_layers stack``.

megatron-core has specifications of hybrid layers only with TransformerEngine's classes. These have its local classes
in the same places, and norms of their own where TransformerEngine's linear layers include them.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import moe_module_specs
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


def _block() -> tuple[Any, Any, Any]:
    """The module that builds stacks of hybrid layers, its class of a stack, and that of its layers' classes."""
    try:
        block = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    except ImportError:  # before core_r0.19
        block = importlib.import_module("megatron.core.ssm.mamba_block")
        return block, block.MambaStack, block.MambaStackSubmodules
    return block, block.HybridStack, block.HybridStackSubmodules


def _mlp() -> Any:
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if hasattr(MLP, "as_mlp_submodule"):
        return partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


block, _stack, _submodules = _block()
block.TENorm = WrappedTorchNorm  # the final norm, which specifications do not choose

_MAMBA = ModuleSpec(
    module=MambaLayer,
    submodules=MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(
            module=MambaMixer,
            submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        ),
        mamba_bda=get_bias_dropout_add,
    ),
)
_ATTENTION = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
    ),
)
_DELTA = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=importlib.import_module("delta_layers").gated_delta_net,
        self_attn_bda=get_bias_dropout_add,
    ),
)
_EXPERTS = moe_module_specs.get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)


def _feed_forward(layer: type, mlp: Any) -> ModuleSpec:
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
        ),
    )


def _predictions() -> dict[str, Any]:
    """Multi-token prediction, where patterns can have it; Megatron builds its layers by the pattern."""
    if "mtp_block_spec" not in _submodules.__dataclass_fields__:
        return {}
    prediction = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    layer = prediction.MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=WrappedTorchNorm,
    )
    layers = [ModuleSpec(module=prediction.MultiTokenPredictionLayer, submodules=layer)]
    block = prediction.MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    return {"mtp_block_spec": ModuleSpec(module=prediction.MultiTokenPredictionBlock, submodules=block)}


stack = ModuleSpec(
    module=_stack,
    submodules=_submodules(
        mamba_layer=_MAMBA,
        attention_layer=_ATTENTION,
        mlp_layer=_feed_forward(MLPLayer, _mlp()),
        moe_layer=_feed_forward(MoETransformerLayer, _EXPERTS),
        **({"gdn_layer": _DELTA} if "gdn_layer" in _submodules.__dataclass_fields__ else {}),
        **_predictions(),
    ),
)
