"""The jobs of today: scripts of Megatron-LM, runs of Megatron-Bridge, and loops of frameworks around megatron-core.

A row has the features of a job that the schedule sees, at toy size, for the parts that a CPU can run: local layers in
place of TransformerEngine's, and no FP8, context parallelism, grouped matrix products or kernels of DeepEP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REFUSED, EQUAL = "refused", "equal"
VARIABLE_LENGTHS = EQUAL
"""What a job comes to whose microbatches may have other lengths than ``--seq-length``."""

Runs = Mapping[str, tuple[str, str]]
"""By schedule: what differs between stock's flags and ours (the layers of the stages)."""


def same(words: str = "") -> tuple[str, str]:
    """The same flags for stock and for us."""
    return words, words


@dataclass(frozen=True)
class ScriptJob:
    """A job under the launcher.

    Attributes:
        flags: Megatron's, in addition to those of every job of the tests.
        runs: the schedules that have to equal stock; for hybrid models with patterns in the place of flags.
        script: ``gpt``, ``hybrid``, ``vlm`` or ``bert``, which only core_r0.16 can run.
        since: the first minor of megatron-core that has all flags.
        refused: flags that the job may have besides, and how they are refused.
    """

    flags: str
    runs: Runs
    script: str = "gpt"
    num_ranks: int = 2
    since: int = 16
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BridgeJob:
    """A run of Megatron-Bridge.

    Attributes:
        settings: fields of the configuration, by their dotted names.
        runs: the schedules that have to equal stock, with more fields.
        provider: kind of the model.
        refused: fields, each with a value and how it is refused.
        lengths: what becomes of the run if it sets ``variable_seq_lengths``; None if it does not.
    """

    settings: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any]]
    provider: str = ""
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    lengths: str | None = None


@dataclass(frozen=True)
class LoopJob:
    """A loop of a framework.

    Attributes:
        loop: its name in ``tests.loops.loops.LOOPS``.
        options: fields of the configurations of its models.
        packed: the loop that sets ``variable_seq_lengths`` and packs; None if the framework pads.
    """

    loop: str
    options: Mapping[str, Any]
    packed: str | None = None


_UNTIED = "--untie-embeddings-and-output-weights"
_LLAMA = f"{_UNTIED} --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2"
_MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
_BALANCED = f"{_MOE} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
_SIGMOID = (
    f"{_MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-dtype fp32"
)
_LATENT = (
    f"{_UNTIED} --normalization RMSNorm --disable-bias-linear --swiglu --multi-latent-attention --q-lora-rank 32 "
    "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-channels 16"
)
_DEEPSEEK = (
    f"{_LATENT} {_SIGMOID} --moe-layer-freq [0]+[1]*3 --moe-shared-expert-intermediate-size 64 "
    "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-4 --bf16"
)
_DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_EP2 = f"--expert-model-parallel-size 2 {_DISTRIBUTED} --global-batch-size 12"
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
_LAYOUT = "--pipeline-model-parallel-layout"

_NEEDS = "zero-bubble schedules need {}, because {}; got {}; "
_OVERLAPPED = {
    "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --expert-model-parallel-size 2": _NEEDS.format(
        "overlap_moe_expert_parallel_comm=False", "this option itself orders B and W inside each layer", "True"
    )
    + "drop --overlap-moe-expert-parallel-comm",
}
_GRAPHS = _NEEDS.format(
    "cuda_graph_impl to be off with --num-{}experts",
    "experts get other numbers of tokens in every microbatch, and a CUDA graph of a stage repeats one size",
    "'local'",
)
_NO_GRAPHS = "set --cuda-graph-impl none, or, with --perform-rl-step, drop --rl-training-cuda-graphs"

SCRIPTS = {
    "megatron-lm gpt3": ScriptJob(
        "--fp16 --initial-loss-scale 256 --tensor-model-parallel-size 2 --position-embedding-type learned_absolute "
        "--rampup-batch-size 2 2 12 --train-samples 60 --lr-decay-samples 50",
        {"zb-h1": same()},
        num_ranks=4,
    ),
    "megatron-lm mixtral": ScriptJob(
        f"{_LLAMA} --swiglu --bf16 {_BALANCED} {_EP2}",
        {"zb-h1": same()},
        num_ranks=4,
    ),
    "megatron-lm mamba": ScriptJob(
        f"{_LLAMA} --position-embedding-type none --bf16 --use-distributed-optimizer",
        {"zb-h1": same("M-M*|M-M-"), "interleaved-1f1b": same("M-|M*|M-|M-")},
        script="hybrid",
    ),
    "megatron-lm gpt-oss": ScriptJob(
        f"{_LLAMA} --bf16 --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 "
        f"--softmax-type learnable --window-size 15,0 --window-attn-skip-freq 2 {_BALANCED} --moe-z-loss-coeff 1e-3 "
        "--moe-router-dtype fp32 --moe-ffn-hidden-size 64",
        {"zb-h1": same(), "zb-v": same()},
    ),
    "megatron-lm llava sft": ScriptJob(
        f"{_LLAMA} --swiglu --freeze-ViT --log-params-norm --log-num-zeros-in-grad",
        {"zb-h1": same()},
        script="vlm",
        since=20,
    ),
    "megatron-lm bert": ScriptJob("--fp16 --initial-loss-scale 256", {"zb-h1": same()}, script="bert"),
    "megatron-lm rl nemotron6": ScriptJob(
        f"{_LLAMA} --position-embedding-type none --squared-relu {_SIGMOID} --cross-entropy-loss-fusion",
        {"zb-h1": same("M*ME|M-ME"), "interleaved-1f1b": same("M*|ME|M-|ME"), "zb-v": ("M*ME|M-ME", "M*|ME|M-|ME")},
        script="hybrid",
        refused={"--cuda-graph-impl local": _GRAPHS.format("") + _NO_GRAPHS},
    ),
    "moe-modelzoo deepseek-v3 h100": ScriptJob(
        f"{_DEEPSEEK} --mtp-num-layers 1 {_RECOMPUTED}",
        {
            "interleaved-1f1b": same(f"{_LAYOUT} Et|tt|t|mL"),
            "zb-v": (f"{_LAYOUT} Ettt|tmL", f"{_LAYOUT} Et|tt|t|mL"),
        },
        refused={
            **_OVERLAPPED,
            "--zero-bubble-schedule zb-h1": "the schedule has 1 stage per rank, the layout of the job 2; "
            "give a layout of 2 stages",
        },
    ),
    "moe-modelzoo deepseek-v3 gb200": ScriptJob(
        f"{_DEEPSEEK} --mtp-num-layers 1",
        {"zb-h1": same(f"{_LAYOUT} Ettt|tmL"), "zb-v": same()},
        refused={
            **_OVERLAPPED,
            "--cuda-graph-impl local": _GRAPHS.format("") + _NO_GRAPHS,
        },
    ),
    "moe-modelzoo qwen3-235b": ScriptJob(
        f"{_LLAMA} --swiglu --bf16 --qk-layernorm {_BALANCED} --moe-router-dtype fp32 --recompute-activations {_EP2}",
        {"interleaved-1f1b": same(_TWO_CHUNKS)},
        num_ranks=4,
        refused=_OVERLAPPED,
    ),
    "moe-modelzoo mixtral": ScriptJob(
        f"{_LLAMA} --swiglu --bf16 {_BALANCED} --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --use-distributed-optimizer",
        {"zb-h1": same(), "interleaved-1f1b": same(_TWO_CHUNKS)},
        num_ranks=4,
    ),
    "moe-modelzoo kimi-k2": ScriptJob(
        f"{_DEEPSEEK} {_RECOMPUTED}",
        {"zb-v": (f"{_LAYOUT} Ettt|tL", f"{_LAYOUT} Et|tt|t|L")},
        refused={
            "--fine-grained-activation-offloading --offload-modules core_attn": _NEEDS.format(
                "fine_grained_activation_offloading=False", "offloading assumes Megatron's order of chunks", "True"
            )
        },
    ),
    "primus deepseek-v3": ScriptJob(
        f"{_DEEPSEEK} --moe-router-force-load-balancing --calculate-per-token-loss {_RECOMPUTED}",
        {"zb-h1": same(), "zb-h2": same()},
    ),
}

_EXPERTS: Mapping[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "moe_router_dtype": "fp32",
}
_SCORED: Mapping[str, Any] = {
    **_EXPERTS,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 16,
}
_OF_DEEPSEEK: Mapping[str, Any] = {
    **_SCORED,
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "kv_channels": 4,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}
_QWEN3: Mapping[str, Any] = {
    **_EXPERTS,
    "qk_layernorm": True,
    "num_query_groups": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}

LOOPS = {
    "verl deepseek-671b": LoopJob("verl", _OF_DEEPSEEK, "verl, packed"),
    "verl qwen3-235b": LoopJob("verl", _QWEN3, "verl, packed"),
    "slime deepseek-r1": LoopJob("slime, loss per token", _OF_DEEPSEEK, "slime, packed"),
    "slime glm-4.7": LoopJob(
        "slime, loss per token", {**_SCORED, "qk_layernorm": True, "num_query_groups": 2}, "slime, packed"
    ),
    "ms-swift qwen3-moe sft": LoopJob("ms-swift", _QWEN3, "ms-swift, padding-free"),
    "ms-swift grpo": LoopJob(
        "ms-swift", {"qk_layernorm": True, "moe_token_dispatcher_type": "alltoall"}, "ms-swift, padding-free"
    ),
    "nemo-rl grpo": LoopJob("nemo-rl", _QWEN3),
}

_BRIDGE_EXPERTS = {
    "model.num_moe_experts": 4,
    "model.moe_router_topk": 2,
    "model.moe_token_dispatcher_type": "alltoall",
    "model.add_bias_linear": False,
    "model.gated_linear_unit": True,
    "model.normalization": "RMSNorm",
}
_BRIDGE_DEEPSEEK = {
    **{f"model.{name}": value for name, value in {**_OF_DEEPSEEK, "moe_shared_expert_intermediate_size": 64}.items()},
    "mixed_precision": "bf16_mixed",
}
_BRIDGE_QWEN3 = {"model.qk_layernorm": True, "model.num_query_groups": 2, "model.normalization": "RMSNorm"}
_CHUNKS = {
    "model.virtual_pipeline_model_parallel_size": 2,
    "model.overlap_p2p_comm": True,
    "model.batch_p2p_comm": False,
}
BRIDGE = {
    "bridge deepseek-v3": BridgeJob(
        {**_BRIDGE_DEEPSEEK, "model.recompute_granularity": "selective"},
        {"zb-h1": {}, "interleaved-1f1b": _CHUNKS},
        provider="latent",
        refused={"model.cuda_graph_impl": ("local", _GRAPHS.format("moe-"))},
    ),
    "bridge qwen3 sft": BridgeJob(
        {**_BRIDGE_QWEN3, "model.calculate_per_token_loss": True, "model.moe_token_dispatcher_type": "alltoall"},
        {"zb-h1": {}},
        lengths=VARIABLE_LENGTHS,
    ),
    "bridge nemotron": BridgeJob(
        {"model.hybrid_layer_pattern": "M*M-|M-M*", "model.num_layers": 8}, {"zb-h1": {}}, provider="hybrid"
    ),
    "bridge qwen3-vl": BridgeJob({**_BRIDGE_QWEN3, **_BRIDGE_EXPERTS}, {"zb-h1": {}, "interleaved-1f1b": _CHUNKS}),
}
