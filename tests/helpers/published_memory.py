"""Published recipes in flags of Megatron-LM, with all that decides their memory; each runs on the GPU that it is for.

Sources: the performance recipes and the performance summary of Megatron-Bridge (26.08), and the DeepSeek-V3 scripts of
Megatron-MoE-ModelZoo. Megatron-Bridge reduces gradients in bf16 in all of them.
"""

from __future__ import annotations

from typing import NamedTuple

_COMMON = (
    "--bf16 --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights --use-distributed-optimizer "
    "--mock-data --overlap-grad-reduce --overlap-param-gather --train-iters 100 --lr 1e-4 --swiglu --hidden-dropout 0 "
    "--attention-dropout 0 --disable-bias-linear --normalization RMSNorm --micro-batch-size 1 "
)
_LATENT = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --kv-channels 128 "
)
_DEEPSEEK = (
    _COMMON
    + _LATENT
    + (
        "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --seq-length 4096 "
        "--max-position-embeddings 4096 --vocab-size 129279 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) "
        "--moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-grouped-gemm "
        "--moe-token-dispatcher-type flex --expert-tensor-parallel-size 1 --mtp-num-layers 1 "
        "--recompute-granularity selective "
    )
)
_KIMI = (
    _COMMON
    + _LATENT
    + (
        "--num-layers 61 --hidden-size 7168 --num-attention-heads 64 --ffn-hidden-size 18432 --seq-length 4096 "
        "--max-position-embeddings 4096 --vocab-size 163839 --num-experts 384 --moe-layer-freq ([0]*1+[1]*60) "
        "--moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-grouped-gemm "
        "--moe-token-dispatcher-type flex --expert-tensor-parallel-size 1 --recompute-granularity selective "
    )
)
_QWEN = _COMMON + (
    "--num-layers 94 --hidden-size 4096 --num-attention-heads 64 --group-query-attention --num-query-groups 4 "
    "--kv-channels 128 --ffn-hidden-size 12288 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 151935 "
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 "
)
_LLAMA = _COMMON + (
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128255 "
)
_70B = _LLAMA + "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 "
_405B = _LLAMA + "--num-layers 126 --hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248 "
_AWARE = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
_FP8 = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --grad-reduce-in-bf16 "
_BLOCKS = "--fp8-format e4m3 --fp8-recipe blockwise "
_MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag "
_BRIDGES_MXFP8 = f"{_MXFP8} --grad-reduce-in-bf16 "
_NVFP4 = "--fp4-format e2m1 --fp4-param-gather --grad-reduce-in-bf16 "
_OF_61 = "--pipeline-model-parallel-layout Et*4|(t*4|)*14tmL "


class Published(NamedTuple):
    """A recipe, its GPU, and how many there are."""

    gpu: str
    num_gpus: int
    flags: str


def _sizes(tensor: int, pipeline: int, batch: int, experts: int = 1, context: int = 1, chunks: int = 1) -> str:
    return (
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} --global-batch-size {batch} "
        + (f"--context-parallel-size {context} " if context > 1 else "")
        + (f"--expert-model-parallel-size {experts} " if experts > 1 else "")
        + (f"--num-virtual-stages-per-pipeline-rank {chunks} " if chunks > 1 else "")
        + ("--sequence-parallel " if tensor > 1 else "")
    )


RECIPES = {
    "DeepSeek-V3, 1024 H100, blockwise FP8": Published(
        "h100",
        1024,
        f"{_DEEPSEEK} {_BLOCKS} --fp8-param-gather {_AWARE} --recompute-modules mla_up_proj mlp "
        f"{_sizes(2, 8, 8192, 64)} --pipeline-model-parallel-layout Et|(tt|)*30mL",
    ),
    "DeepSeek-V3, 256 H100, states on the host": Published(
        "h100",
        256,
        f"{_DEEPSEEK} {_BLOCKS} {_AWARE} --optimizer-cpu-offload --recompute-modules mla_up_proj moe mlp layernorm "
        f"{_sizes(1, 8, 8192, 32)} --pipeline-model-parallel-layout Et*2|(tt|)*22t|(tt|)*7mL",
    ),
    "DeepSeek-V3, 256 B200, MXFP8": Published(
        "b200",
        256,
        f"{_DEEPSEEK} {_MXFP8} {_AWARE} --recompute-modules mla_up_proj mlp {_sizes(1, 8, 8192, 32)} {_OF_61}",
    ),
    "DeepSeek-V3, 256 GB200, MXFP8": Published(
        "gb200",
        256,
        f"{_DEEPSEEK} {_BRIDGES_MXFP8} --recompute-modules mla_up_proj {_sizes(1, 4, 4096, 64)} {_OF_61}",
    ),
    "DeepSeek-V3, 256 GB300, MXFP8": Published(
        "gb300",
        256,
        f"{_DEEPSEEK} {_BRIDGES_MXFP8} --recompute-modules {_sizes(1, 2, 4096, 32)} {_OF_61}",
    ),
    "Kimi K2, 256 GB300, MXFP8, 2 sequences": Published(
        "gb300",
        256,
        f"{_KIMI} {_BRIDGES_MXFP8.replace('--fp8-param-gather', '')} --optimizer muon --recompute-modules mla_up_proj "
        f"{_sizes(1, 4, 4096, 64)} --micro-batch-size 2 --pipeline-model-parallel-layout Et*4|(t*4|)*14tL",
    ),
    "Qwen3-235B, 256 H100, FP8": Published(
        "h100",
        256,
        f"{_QWEN} {_FP8} {_sizes(2, 8, 8192, 32)} --pipeline-model-parallel-layout Ett|(t*3|)*30ttL",
    ),
    "Qwen3-235B, 256 GB200, MXFP8": Published(
        "gb200",
        256,
        f"{_QWEN} {_BRIDGES_MXFP8} {_sizes(1, 8, 8192, 32)} --pipeline-model-parallel-layout Et*3|(t*4|)*22t*3L",
    ),
    "Llama 3 70B, 64 H100, bf16": Published(
        "h100", 64, f"{_70B} --grad-reduce-in-bf16 {_sizes(4, 4, 256, context=2, chunks=5)}"
    ),
    "Llama 3 70B, 64 H100, FP8": Published(
        "h100", 64, f"{_70B} {_FP8} {_sizes(4, 8, 256)} --pipeline-model-parallel-layout Et*2|(t*2|)*34t*3|(t*2|)*3tL"
    ),
    "Llama 3 70B, 64 GB300, NVFP4": Published("gb300", 64, f"{_70B} {_NVFP4} {_sizes(1, 4, 256, chunks=5)}"),
    "Llama 3.1 405B, 1024 H100, FP8": Published(
        "h100",
        1024,
        f"{_405B} {_FP8} {_sizes(8, 8, 1536, context=2)} --pipeline-model-parallel-layout Et|(tt|)*62tL",
    ),
    "Llama 3.1 405B, 256 GB200, NVFP4": Published(
        "gb200",
        256,
        f"{_405B} {_NVFP4} {_sizes(4, 16, 1536)} --pipeline-model-parallel-layout E|(t|)*126L",
    ),
}
