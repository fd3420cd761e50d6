"""Published training runs, in flags of Megatron-LM: those of the publication, or of its recipe."""

from __future__ import annotations

from typing import NamedTuple

_BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary-archive.md"
_DGXC = "https://github.com/NVIDIA/dgxc-benchmarking"
_LLAMA_70B_PAGE = f"[DGX Cloud Benchmarking]({_DGXC}), Llama 3.1 70B"
_OLDER_70B_PAGE = f"[the same, 24.12]({_DGXC}/blob/8f5cbb3/llama3.1/README_70b.md)"
_LLAMA_405B_PAGE = f"[DGX Cloud, Llama 3.1 405B]({_DGXC}/blob/14fb6ae/llama3.1/README.md)"
_NEMOTRON_PAGE = f"[DGX Cloud, Nemotron 4 340B]({_DGXC}/blob/80634ad/nemotron4-340b/README.md)"
_GROK_PAGE = f"[DGX Cloud, Grok 1]({_DGXC}/blob/1f6d9f4/grok1/README.md)"
_DEEPSEEK_PAGE = f"[DGX Cloud, DeepSeek-V3]({_DGXC}/blob/46e4201/deepseek_v3/pretrain/megatron_bridge/README.md)"
_SELECTIVE_PAPER = "[arXiv 2205.05198](https://arxiv.org/abs/2205.05198), table 5"
_DEEPSEEK_PAPER = "[arXiv 2412.19437](https://arxiv.org/abs/2412.19437), table 1"


def _bridge(release: str) -> str:
    return f"[Megatron-Bridge {release}]({_BRIDGE})"


_LATER = "--hidden-dropout 0 --attention-dropout 0 --grad-reduce-in-bf16"
"""What all but the oldest runs have."""


class Run(NamedTuple):
    """A published run.

    Attributes:
        model: its name.
        gpu, nodes, gpus_per_node: where it ran.
        flags: those of Megatron-LM.
        seconds: of an iteration; None if tokens per second and GPU are published instead, ``tokens``.
        source: the publication.
    """

    model: str
    gpu: str
    nodes: int
    gpus_per_node: int
    flags: str
    source: str
    seconds: float | None = None
    tokens: float | None = None


def _shapes(layers: int, hidden: int, heads: int, ffn: int, length: int, vocabulary: int, more: str = "") -> str:
    return (
        "--bf16 --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights --use-distributed-optimizer "
        f"--mock-data --train-iters 100 --lr 1e-4 --num-layers {layers} --hidden-size {hidden} "
        f"--num-attention-heads {heads} --ffn-hidden-size {ffn} --seq-length {length} "
        f"--max-position-embeddings {length} --vocab-size {vocabulary} {more}"
    )


def _grouped(groups: int) -> str:
    return f"{_LATER} --swiglu --group-query-attention --num-query-groups {groups}"


def _experts(count: int, top_k: int, ffn: int, dispatcher: str) -> str:
    return (
        f" --num-experts {count} --moe-router-topk {top_k} --moe-ffn-hidden-size {ffn} "
        f"--moe-token-dispatcher-type {dispatcher}"
    )


def _split(pipeline: int, batch: int, *, tensor: int = 1, chunks: int = 1, context: int = 1, experts: int = 1) -> str:
    """The flags of parallelism, with the overlap of tensor parallelism that all these recipes but the oldest have."""
    words = f" --pipeline-model-parallel-size {pipeline} --global-batch-size {batch}"
    if tensor > 1:
        words += f" --tensor-model-parallel-size {tensor} --sequence-parallel --tp-comm-overlap"
    if chunks > 1:
        words += f" --num-virtual-stages-per-pipeline-rank {chunks}"
    if context > 1:
        words += f" --context-parallel-size {context}"
    if experts > 1:
        words += f" --expert-model-parallel-size {experts} --expert-tensor-parallel-size 1"
    return words


def _layout(text: str) -> str:
    return f" --pipeline-model-parallel-layout '{text}'"


_ONE, _TWO = " --micro-batch-size 1", " --micro-batch-size 2"
_CURRENT, _BLOCKS = " --fp8-format hybrid --fp8-recipe tensorwise", " --fp8-format e4m3 --fp8-recipe blockwise"
_MXFP8, _NVFP4 = " --fp8-format e4m3 --fp8-recipe mxfp8", " --fp4-format e2m1 --fp4-param-gather"
_CURRENT, _BLOCKS, _MXFP8 = (f"{flags} --fp8-param-gather" for flags in (_CURRENT, _BLOCKS, _MXFP8))
_BLOCKS += " --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
_OVERLAP, _FUSED = " --overlap-moe-expert-parallel-comm", " --use-transformer-engine-op-fuser"
_AGAIN, _NORMS, _MORE_AGAIN = (
    f" --recompute-granularity selective --recompute-modules {modules}"
    for modules in ("mla_up_proj", "mla_up_proj layernorm", "mla_up_proj mlp")
)
_70B = _shapes(80, 8192, 64, 28672, 8192, 128_256, _grouped(8)) + _ONE
_70B_SHORT = _shapes(80, 8192, 64, 28672, 4096, 128_256, _grouped(8)) + _ONE
_405B = _shapes(126, 16384, 128, 53248, 8192, 128_256, _grouped(8)) + _ONE
_405B += " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
_340B = _shapes(
    96, 18432, 96, 73728, 4096, 256_000, f"{_LATER} --squared-relu --group-query-attention --num-query-groups 8"
)
_340B += f" --kv-channels 192{_ONE}"
_GROK = _shapes(64, 6144, 48, 32768, 8192, 128_256, _grouped(8)) + _experts(8, 2, 32768, "alltoall") + _ONE
_LATENT = (
    f"{_LATER} --swiglu --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --moe-shared-expert-intermediate-size 2048"
)
_DEEPSEEK = _shapes(61, 7168, 128, 18432, 4096, 129_280, _LATENT) + _experts(256, 8, 2048, "flex")
_DEEPSEEK += " --moe-layer-freq '([0]*3+[1]*58)' --moe-router-num-groups 8 --moe-router-group-topk 4"
_KIMI = _shapes(61, 7168, 64, 18432, 4096, 163_840, _LATENT) + _experts(384, 8, 2048, "flex")
_KIMI += " --moe-layer-freq '([0]*1+[1]*60)'"
_QWEN = _shapes(94, 4096, 64, 12288, 4096, 151_936, f"{_grouped(4)} --kv-channels 128")
_QWEN_ALL, _QWEN_FLEX = (_QWEN + _experts(128, 8, 1536, kind) for kind in ("alltoall", "flex"))
_PREDICTING = " --mtp-num-layers 1"
_OF_16 = "Et*4|(t*4|)*14t{}L"


def _gpt(layers: int, hidden: int, heads: int) -> str:
    unfused = "--attention-backend unfused --recompute-activations"
    return _shapes(layers, hidden, heads, 4 * hidden, 2048, 51_200, unfused) + _ONE


def _plain(words: str) -> str:
    return words.replace(" --tp-comm-overlap", "")


RUNS = (
    Run("Llama 3.1 70B", "h100", 8, 8, _70B + _split(4, 128, tensor=4, chunks=5, context=2), _LLAMA_70B_PAGE, 14.66),
    Run("Llama 3.1 70B", "h100", 8, 8, _70B + _split(8, 128, tensor=4, chunks=5) + _CURRENT, _LLAMA_70B_PAGE, 9.86),
    Run(
        "Llama 3.1 70B",
        "h100",
        8,
        8,
        _70B + _split(4, 128, tensor=4, chunks=5, context=2) + " --fp8-format hybrid",
        _OLDER_70B_PAGE,
        10.46,
    ),
    Run(
        "Llama 3 70B",
        "h100",
        8,
        8,
        _70B + _split(8, 256, tensor=4) + _layout("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL") + _CURRENT,
        _bridge("26.04.01"),
        tokens=1664,
    ),
    Run(
        "Llama 3 70B, fine-tuning",
        "h100",
        4,
        8,
        _70B_SHORT + _split(4, 32, tensor=4, chunks=5) + _CURRENT,
        _bridge("26.06"),
        tokens=1638,
    ),
    Run(
        "Llama 3.1 405B",
        "h100",
        128,
        8,
        _405B + _split(8, 1536, tensor=8, chunks=8, context=2) + _CURRENT,
        _bridge("26.04.01"),
        tokens=328,
    ),
    Run("Nemotron 4 340B", "h100", 32, 8, _340B + _split(8, 64, tensor=8, chunks=12), _NEMOTRON_PAGE, 4.31),
    Run(
        "Nemotron 4 340B", "b200", 16, 8, _340B + _split(4, 512, tensor=8, chunks=12) + _CURRENT, _NEMOTRON_PAGE, 21.542
    ),
    Run(
        "Llama 3.1 405B",
        "b200",
        16,
        8,
        _405B + _split(8, 64, tensor=4, chunks=8, context=2) + _CURRENT,
        _bridge("25.11"),
        tokens=661,
    ),
    Run(
        "Llama 3.1 405B",
        "b200",
        16,
        8,
        _405B + _split(8, 64, tensor=4, chunks=8, context=2) + _MXFP8,
        _bridge("25.11"),
        tokens=624,
    ),
    Run(
        "Llama 3.1 405B",
        "gb200",
        32,
        4,
        _405B + _split(8, 64, tensor=4, chunks=8, context=2),
        _LLAMA_405B_PAGE,
        9.347,
    ),
    *(
        Run("Llama 3.1 405B", gpu, 64, 4, _405B + split + precision, _bridge("26.04.01"), tokens=tokens)
        for gpu, split, precision, tokens in (
            ("gb200", _split(16, 1536, tensor=4, chunks=4), _CURRENT, 864),
            ("gb200", _split(16, 1536, tensor=4, chunks=8), _MXFP8, 800),
            ("gb200", _split(16, 1536, tensor=4, chunks=8), _NVFP4, 1184),
            ("gb300", _split(8, 1536, tensor=4, chunks=4), _CURRENT, 1024),
            ("gb300", _split(8, 1536, tensor=2, chunks=4, context=2), _MXFP8, 960),
            ("gb300", _split(8, 1536, tensor=4, chunks=4), _NVFP4, 1440),
        )
    ),
    *(
        Run("Llama 3 70B", gpu, 16, 4, _70B + split + precision, _bridge("26.04.01"), tokens=tokens)
        for gpu, split, precision, tokens in (
            ("gb200", _split(4, 256, tensor=2, chunks=5), _MXFP8, 3712),
            ("gb200", _split(4, 256, tensor=2, chunks=5), _NVFP4, 4864),
            ("gb300", _split(4, 256, chunks=5), _MXFP8, 4864),
            ("gb300", _split(4, 256, chunks=5), _NVFP4, 7296),
        )
    ),
    Run(
        "Llama 3 70B, fine-tuning",
        "gb200",
        8,
        4,
        _70B_SHORT + _split(8, 32, chunks=10) + _CURRENT,
        _bridge("26.06"),
        tokens=3864,
    ),
    *(
        Run(
            "Grok 1 314B",
            "h100",
            64,
            8,
            _GROK + _split(8, 1024, tensor=4, chunks=8, context=2, experts=8) + precision,
            _GROK_PAGE,
            s,
        )
        for precision, s in (("", 15.933), (_CURRENT, 13.433))
    ),
    Run(
        "Qwen3 235B",
        "h100",
        32,
        8,
        _QWEN_ALL + _ONE + _split(8, 8192, tensor=2, experts=32) + _layout("Ett|(t*3|)*30ttL") + _CURRENT + _OVERLAP,
        _bridge("26.02"),
        tokens=1633,
    ),
    *(
        Run("Qwen3 235B", gpu, 64, 4, _QWEN_FLEX + split + precision, _bridge(release), tokens=tokens)
        for gpu, split, precision, release, tokens in (
            (
                "gb200",
                _ONE + _split(8, 8192, experts=32) + _layout("Et*3|(t*4|)*22t*3L"),
                _MXFP8 + _FUSED,
                "26.06",
                7376,
            ),
            ("gb300", _TWO + _split(4, 8192, experts=32) + _layout("Et|(t*2|)*46tL"), _MXFP8 + _FUSED, "26.06", 9015),
            ("gb300", _TWO + _split(4, 8192, experts=16) + _layout("Et|(t*2|)*46tL"), "", "25.11", 6131),
        )
    ),
    Run(
        "DeepSeek-V3",
        "h800",
        256,
        8,
        _DEEPSEEK + _ONE + _split(16, 15360, experts=64) + _BLOCKS + _NORMS + " --zero-bubble-schedule dualpipe-v",
        _DEEPSEEK_PAPER,
        tokens=1e12 / (180e3 * 3600),
    ),
    Run(
        "DeepSeek-V3",
        "h100",
        128,
        8,
        _DEEPSEEK + _MORE_AGAIN + _ONE + _split(8, 8192, tensor=2, experts=64) + _layout("Et*2|(t*2|)*29t|L") + _BLOCKS,
        _bridge("25.09"),
        tokens=1297,
    ),
    Run(
        "DeepSeek-V3",
        "b200",
        32,
        8,
        _DEEPSEEK
        + _MORE_AGAIN
        + _ONE
        + _split(8, 4096, experts=32)
        + _layout(_OF_16.format("m"))
        + _PREDICTING
        + _MXFP8
        + _OVERLAP,
        _bridge("26.04.01"),
        tokens=3328,
    ),
    Run(
        "DeepSeek-V3",
        "b300",
        32,
        8,
        _DEEPSEEK + _AGAIN + _TWO + _split(8, 4096, experts=8) + _layout("Et*7|(t*8|)*6t*6L") + _MXFP8,
        _bridge("26.06"),
        tokens=3541,
    ),
    Run(
        "DeepSeek-V3",
        "gb200",
        64,
        4,
        _DEEPSEEK + _AGAIN + _ONE + _split(4, 2048, experts=64) + _layout(_OF_16.format("m")) + _PREDICTING,
        _DEEPSEEK_PAGE,
        11.071,
    ),
    Run(
        "DeepSeek-V3",
        "gb200",
        64,
        4,
        _DEEPSEEK
        + _AGAIN
        + _ONE
        + _split(4, 4096, experts=64)
        + _layout(_OF_16.format("m"))
        + _PREDICTING
        + _MXFP8
        + _FUSED,
        _bridge("26.06"),
        tokens=4969,
    ),
    Run(
        "DeepSeek-V3",
        "gb300",
        64,
        4,
        _DEEPSEEK + _ONE + _split(2, 4096, experts=32) + _layout(_OF_16.format("m")) + _PREDICTING + _MXFP8 + _FUSED,
        _bridge("26.06"),
        tokens=6338,
    ),
    Run(
        "Kimi K2",
        "gb300",
        64,
        4,
        _KIMI + _AGAIN + _TWO + _split(4, 4096, experts=64) + _layout(_OF_16.format("")) + _MXFP8,
        _bridge("26.06"),
        tokens=5372,
    ),
    Run(
        "GPT 175B",
        "a100",
        8,
        8,
        _gpt(96, 12288, 96) + _plain(_split(8, 64, tensor=8, chunks=3)),
        _SELECTIVE_PAPER,
        13.75,
    ),
    Run(
        "GPT 530B",
        "a100",
        35,
        8,
        _gpt(105, 20480, 128) + _plain(_split(35, 280, tensor=8, chunks=3)),
        _SELECTIVE_PAPER,
        37.83,
    ),
    Run("GPT 1T", "a100", 64, 8, _gpt(128, 25600, 160) + _plain(_split(64, 512, tensor=8)), _SELECTIVE_PAPER, 71.49),
)
