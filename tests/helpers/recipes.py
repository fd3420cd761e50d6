"""Published training recipes, in flags of Megatron-LM: the pipeline, batch and shapes that their authors give.

Sources: the performance summary and recipes of Megatron-Bridge (26.08), and table 5 of the Zero Bubble paper.
"""

from __future__ import annotations

from typing import NamedTuple


class Recipe(NamedTuple):
    """A recipe.

    Attributes:
        nodes: of 8 GPUs.
        stages: stages of the pipeline.
        bubble: (p - 1) / (v m + p - 1).
        pays: whether a change is worth it by estimates, compared with Megatron's own overlap of experts.
    """

    nodes: int
    gpu: str
    flags: str
    stages: int
    bubble: float
    pays: bool


COMMON = "--bf16 --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights --use-distributed-optimizer "
COMMON += "--mock-data --train-iters 100 --lr 1e-4 --swiglu"
DEEPSEEK = (
    "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --seq-length 4096 "
    "--max-position-embeddings 4096 --vocab-size 129280 --num-experts 256 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-token-dispatcher-type alltoall "
)
KIMI = DEEPSEEK.replace("--num-experts 256", "--num-experts 384").replace("attention-heads 128", "attention-heads 64")
QWEN = (
    "--num-layers 94 --hidden-size 4096 --num-attention-heads 64 --group-query-attention --num-query-groups 4 "
    "--ffn-hidden-size 12288 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 151936 --num-experts 128 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-token-dispatcher-type alltoall "
)
LLAMA_405B = (
    "--num-layers 126 --hidden-size 16384 --num-attention-heads 128 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 53248 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 "
    "--tensor-model-parallel-size 8 --sequence-parallel "
)
LLAMA_70B = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 28672 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 "
)
OF_61 = "--pipeline-model-parallel-layout 'Et*4|(t*4|)*14t{}L' "


def _sizes(pipeline: int, microbatches: int, replicas: int, experts: int = 1) -> str:
    batch = f"--micro-batch-size 1 --global-batch-size {microbatches * replicas} "
    more = f"--expert-model-parallel-size {experts} " if experts > 1 else ""
    return f"--pipeline-model-parallel-size {pipeline} {batch}{more}"


RECIPES = {
    "DeepSeek-V3, 256 GB300": Recipe(
        32, "b200", DEEPSEEK + _sizes(2, 32, 128, 32) + OF_61.format("m") + "--mtp-num-layers 1", 16, 0.0039, False
    ),
    "DeepSeek-V3, 256 GB200": Recipe(
        32, "b200", DEEPSEEK + _sizes(4, 64, 64, 64) + OF_61.format("m") + "--mtp-num-layers 1", 16, 0.0116, False
    ),
    "DeepSeek-V3, 256 B300, one stage per rank": Recipe(
        32,
        "b200",
        DEEPSEEK + _sizes(8, 64, 32, 32) + "--pipeline-model-parallel-layout 'Et*7|(t*8|)*6t*6L'",
        8,
        0.0986,
        True,
    ),
    "DeepSeek-V3, 256 B300, two stages per rank": Recipe(
        32, "b200", DEEPSEEK + _sizes(8, 64, 32, 32) + OF_61.format(""), 16, 0.0519, False
    ),
    "DeepSeek-V3, 4 microbatches": Recipe(
        32, "b200", DEEPSEEK + _sizes(4, 4, 64, 64) + OF_61.format(""), 16, 0.158, False
    ),
    "Qwen3-235B, 256 GB200": Recipe(
        32,
        "b200",
        QWEN + _sizes(8, 256, 32, 32) + "--pipeline-model-parallel-layout 'Et*3|(t*4|)*22t*3L'",
        24,
        0.009,
        False,
    ),
    "Qwen3-235B, 256 B300": Recipe(
        32,
        "b200",
        QWEN + _sizes(8, 128, 32, 32) + "--pipeline-model-parallel-layout 'Et*11|(t*12|)*6t*11L'",
        8,
        0.0519,
        True,
    ),
    "Qwen3-235B, 256 H100": Recipe(
        32,
        "h100",
        QWEN + _sizes(8, 512, 32, 32) + "--pipeline-model-parallel-layout 'Ett|(t*3|)*30ttL'",
        32,
        0.0034,
        False,
    ),
    "Kimi K2, 256 GB300": Recipe(32, "b200", KIMI + _sizes(4, 32, 64, 64) + OF_61.format(""), 16, 0.0229, False),
    "Llama 3.1 405B, 1024 H100": Recipe(
        128,
        "h100",
        LLAMA_405B + _sizes(8, 192, 16) + "--pipeline-model-parallel-layout 'Et|(tt|)*62tL'",
        64,
        0.0045,
        False,
    ),
    "Llama 3 70B, 32 GB200": Recipe(
        4,
        "b200",
        LLAMA_70B
        + "--tensor-model-parallel-size 2 --sequence-parallel "
        + _sizes(8, 8, 2)
        + "--num-virtual-stages-per-pipeline-rank 10",
        80,
        0.0805,
        True,
    ),
    "28.3B of the Zero Bubble paper, 32 A100": Recipe(
        4,
        "a100",
        "--num-layers 62 --hidden-size 6144 --num-attention-heads 48 --seq-length 1024 --max-position-embeddings 1024 "
        "--vocab-size 50304 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1 "
        + _sizes(32, 96, 1),
        32,
        0.244,
        True,
    ),
}
