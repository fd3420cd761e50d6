"""Sizes of published models, which recipes of Megatron-Bridge name instead of giving them.

They have the names of megatron-core's configuration, and the values that Megatron-Bridge (067f987) takes from a model's
``config.json``. Each was compared with one of these sources, as the comments in ``MODELS`` say:

- *file*: the model's own ``config.json``, of which ai-dynamo/aiconfigurator (095f58a) has copies;
- *provider*: the sizes that Megatron-Bridge itself once had per model (``llama_provider.py`` at 2afd2d3,
  ``qwen_provider.py`` at 07d0d14);
- *bridge*: the configuration in Megatron-Bridge's test of its conversion (``test_glm45_bridge.py``);
- *zoo*: the model's benchmark in yanring/Megatron-MoE-ModelZoo (e865051).

A test adds up the parameters of each and compares them with the number that its authors give.
"""

from __future__ import annotations

from typing import Any


def _dense(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **more: Any) -> dict[str, Any]:
    """A transformer with SwiGLU and grouped queries."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads}
    grouped = {"group_query_attention": True, "num_query_groups": groups} if groups != heads else {}
    other = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False}
    return sizes | grouped | other | {"vocab_size": vocab, "untie_embeddings_and_output_weights": True} | more


def _experts(number: int, top: int, ffn: int, shared: int = 0, dense: int = 0, layers: int = 0) -> dict[str, Any]:
    """Experts in all layers but the first ``dense`` ones."""
    fields: dict[str, Any] = {"num_moe_experts": number, "moe_router_topk": top, "moe_ffn_hidden_size": ffn}
    fields |= {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}  # unless a recipe says otherwise
    fields |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_overlap": True} if shared else {}
    return fields | ({"moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})"} if dense else {})


def _grouped(groups: int, top: int) -> dict[str, Any]:
    """Groups of experts, from some of which those of a token are."""
    return {"moe_router_num_groups": groups, "moe_router_group_topk": top}


def _latent(q_rank: int | None) -> dict[str, Any]:
    """Multi-head latent attention as in DeepSeek-V2 and its successors."""
    ranks = {"q_lora_rank": q_rank, "kv_lora_rank": 512, "qk_layernorm": True}
    return {"multi_latent_attention": True, **ranks, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """The sizes that the two models share; every other layer attends to 128 tokens."""
    sizes = _dense(layers, 2880, 2880, 64, 8, 201088, kv_channels=64, add_bias_linear=True, add_qkv_bias=True)
    return sizes | {"window_size": "127,0", "window_attn_skip_freq": 2} | _experts(experts, 4, 2880)


_WIDE: dict[str, Any] = {"kv_channels": 128, "qk_layernorm": True}
_V3: dict[str, Any] = {"mtp_num_layers": 1, **_grouped(8, 4)}
_GLM: dict[str, Any] = {"kv_channels": 128, "add_qkv_bias": True, "mtp_num_layers": 1}
_LLAMA, _QWEN, _DEEPSEEK_2, _DEEPSEEK_3 = 128256, 151936, 102400, 129280
MODELS: dict[str, dict[str, Any]] = {
    # provider; the vocabulary is that of transformers' LlamaConfig, and of Llama 3.1's file
    "meta-llama/Llama-2-7b-hf": _dense(32, 4096, 11008, 32, 32, 32000),
    "meta-llama/Llama-3.2-1B": _dense(16, 2048, 8192, 32, 8, _LLAMA, untie_embeddings_and_output_weights=False),
    "meta-llama/Llama-3.2-3B": _dense(28, 3072, 8192, 24, 8, _LLAMA, untie_embeddings_and_output_weights=False),
    "meta-llama/Meta-Llama-3-8B": _dense(32, 4096, 14336, 32, 8, _LLAMA),
    "meta-llama/Meta-Llama-3-70B": _dense(80, 8192, 28672, 64, 8, _LLAMA),
    # file
    "meta-llama/Meta-Llama-3.1-8B": _dense(32, 4096, 14336, 32, 8, _LLAMA),
    "meta-llama/Meta-Llama-3.1-70B": _dense(80, 8192, 28672, 64, 8, _LLAMA),
    "meta-llama/Meta-Llama-3.1-405B": _dense(126, 16384, 53248, 128, 8, _LLAMA),
    # provider
    "Qwen/Qwen2-72B": _dense(80, 8192, 29568, 64, 8, 152064, add_qkv_bias=True),
    "Qwen/Qwen2.5-14B": _dense(48, 5120, 13824, 40, 8, 152064, add_qkv_bias=True),
    "Qwen/Qwen2.5-32B": _dense(64, 5120, 27648, 40, 8, 152064, add_qkv_bias=True),
    "Qwen/Qwen2.5-72B": _dense(80, 8192, 29568, 64, 8, 152064, add_qkv_bias=True),
    "Qwen/Qwen3-14B": _dense(40, 5120, 17408, 40, 8, _QWEN, **_WIDE),
    # file
    "Qwen/Qwen3-32B": _dense(64, 5120, 25600, 64, 8, _QWEN, **_WIDE),
    "Qwen/Qwen3-30B-A3B": _dense(48, 2048, 6144, 32, 4, _QWEN, **_WIDE, **_experts(128, 8, 768)),
    "Qwen/Qwen3-235B-A22B": _dense(94, 4096, 12288, 64, 4, _QWEN, **_WIDE, **_experts(128, 8, 1536)),
    # zoo
    "deepseek-ai/DeepSeek-V2-Lite": _dense(
        27, 2048, 10944, 16, 16, _DEEPSEEK_2, **_latent(None), **_experts(64, 6, 1408, 2816, 1, 27)
    ),
    "deepseek-ai/DeepSeek-V2": _dense(
        60, 5120, 12288, 128, 128, _DEEPSEEK_2, **_latent(1536), **_experts(160, 6, 1536, 3072, 1, 60), **_grouped(8, 3)
    ),
    # file
    "deepseek-ai/DeepSeek-V3": _dense(
        61, 7168, 18432, 128, 128, _DEEPSEEK_3, **_latent(1536), **_experts(256, 8, 2048, 2048, 3, 61), **_V3
    ),
    "moonshotai/Kimi-K2-Instruct": _dense(
        61, 7168, 18432, 64, 64, 163840, **_latent(1536), **_experts(384, 8, 2048, 2048, 1, 61)
    ),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    # bridge
    "zai-org/GLM-4.5": _dense(
        92, 5120, 12288, 96, 8, 151552, **_GLM, **_experts(160, 8, 1536, 1536, 3, 92), qk_layernorm=True
    ),
    "zai-org/GLM-4.5-Air": _dense(46, 4096, 10944, 96, 8, 151552, **_GLM, **_experts(128, 8, 1408, 1408, 1, 46)),
}
"""The models by their names on the Hugging Face Hub."""
