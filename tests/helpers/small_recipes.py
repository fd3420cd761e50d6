"""The published recipes in sizes that CPU ranks train in seconds, and the rows that ``advise`` prints for them.

The flags are those of the recipes with smaller values, plus what the models have and costs do not depend on.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple

from megatron.zero_bubble.cli.advise import changed
from megatron.zero_bubble.planning.change import ORDER, ROUNDED, SAME
from tests.helpers.recipes import COMMON, RECIPES

_SIZES = {
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--num-query-groups": 2,
    "--ffn-hidden-size": 64,
    "--seq-length": 32,
    "--max-position-embeddings": 32,
    "--vocab-size": 500,
    "--num-experts": 4,
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--tensor-model-parallel-size": 2,
    "--expert-model-parallel-size": 2,
    "--train-iters": 4,
}
_NORMS = "--normalization RMSNorm --disable-bias-linear"
_DEEPSEEK = (
    f"{_NORMS} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --qk-layernorm --moe-layer-freq ([0]*{dense}+[1]*{rest}) --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32"
)
_QWEN = (
    f"{_NORMS} --qk-layernorm --kv-channels 16 --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32"
)
_LAYOUT = "--pipeline-model-parallel-layout"
_STAGES = "--num-virtual-stages-per-pipeline-rank"
_OVERLAP = "--overlap-moe-expert-parallel-comm"


class Row(NamedTuple):
    """A row of the advice.

    Attributes:
        flags: the flags to add, with values that fit the small job.
        drops: the flags to leave out.
        numbers: how the numbers compare with those of the job as it is.
    """

    flags: str
    drops: str
    numbers: str


class Pipeline(NamedTuple):
    """Sizes of a small job and its advice.

    Attributes:
        ranks: pipeline ranks.
        layout: layers per stage, if the recipe has them.
        dense: layers before the first with experts.
        rows: those by estimates, with searches and without, and those by even costs.
    """

    ranks: int
    layers: int
    microbatches: int
    rows: tuple[Row, ...]
    layout: str = ""
    dense: int = 0


def _named(name: str, drops: str = "", more: str = "", numbers: str = SAME) -> Row:
    return Row(" ".join(["--zero-bubble-schedule", name, *more.split()]), drops, numbers)


def _in_place(name: str) -> Row:
    """A row that keeps the stages."""
    return _named(name, _OVERLAP)


def _moved(name: str, num_chunks: int | None = None, pairs: bool = False, drops: str = f"{_OVERLAP} {_LAYOUT}") -> Row:
    """A row with other stages."""
    more = "" if num_chunks is None else f"--zero-bubble-num-chunks {num_chunks}"
    return _named(name, drops, f"{more} --zero-bubble-overlap-experts" if pairs else more, ORDER)


def _sliced(name: str, drops: str = f"{_OVERLAP} {_LAYOUT}", ends: str = "8,16,24,32") -> Row:
    return _named(name, drops, f"--zero-bubble-slice-ends {ends}", ROUNDED)


_ENDS = "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers"
_AUTO = "--zero-bubble-placement {} --zero-bubble-memory-limit {}GiB"
SMALL = {
    "DeepSeek-V3, 256 GB300": Pipeline(2, 16, 4, (_in_place("gis-h"),), "Et*2|(t|)*14mL", 3),
    "DeepSeek-V3, 256 GB200": Pipeline(
        2, 9, 4, (_moved("v-min"), _moved("zb-v"), _in_place("zb-interleaved"), _in_place("gis")), "Et*2|(t|)*6tmL", 3
    ),
    "DeepSeek-V3, 256 B300, one stage per rank": Pipeline(
        2,
        9,
        6,
        (
            _moved("dualpipe-v", pairs=True),
            _moved("gis-h", 4),
            _sliced("seq-1f1b", ""),
            _named("zb-auto", "", _AUTO.format("linear", 102.59)),
            _moved("zb-interleaved", 4),
            _in_place("zb-h1"),
            _moved("v-min"),
        ),
        "Et*4|t*5L",
        3,
    ),
    "DeepSeek-V3, 256 B300, two stages per rank": Pipeline(
        2,
        9,
        6,
        (
            _moved("interleaved-1f1b", 4, pairs=True),
            _moved("gis-h", 4),
            _sliced("seq-1f1b"),
            _moved("zb-interleaved", 4),
            _in_place("zb-interleaved"),
            _moved("v-half"),
            _moved("v-min"),
        ),
        "Et*3|(t*2|)*2t*2L",
        3,
    ),
    "DeepSeek-V3, 4 microbatches": Pipeline(
        2, 9, 2, (_moved("v-min"), _sliced("seq-1f1b"), _in_place("zb-interleaved")), "Et*2|(t|)*6tL", 3
    ),
    "Qwen3-235B, 256 GB200": Pipeline(2, 10, 6, (_moved("v-min"),), "Et|(t*2|)*4tL"),
    "Qwen3-235B, 256 B300": Pipeline(
        2,
        8,
        6,
        (
            _moved("interleaved-1f1b", 4, pairs=True),
            _moved("gis-h", 4),
            _in_place("zb-h1"),
            _moved("zb-v"),
            _moved("v-min"),
            _sliced("seq-zb-h1", ""),
            _moved("zb-interleaved", 4),
        ),
        "Et*4|t*4L",
    ),
    "Qwen3-235B, 256 H100": Pipeline(
        2, 14, 6, (_in_place("gis-h"), _moved("dualpipe-v", pairs=True), _moved("v-min")), "Et|(t*2|)*6tL"
    ),
    "Kimi K2, 256 GB300": Pipeline(
        2,
        9,
        4,
        (_moved("v-min"), _sliced("seq-1f1b"), _in_place("zb-interleaved"), _in_place("gis")),
        "Et*2|(t|)*6tL",
        1,
    ),
    "Llama 3.1 405B, 1024 H100": Pipeline(2, 14, 6, (_in_place("gis"), _in_place("gis-h")), "Et|(tt|)*6tL"),
    "Llama 3 70B, 32 GB200": Pipeline(
        2,
        20,
        2,
        (
            _in_place("zb-interleaved"),
            _moved("gis", 5, drops=_STAGES),
            _in_place("gis-h"),
            _moved("v-min", drops=_STAGES),
            _sliced("seq-1f1b", _STAGES, "4,8,12,16,20,24,28,32"),
            _sliced("seq-zb-h1", _STAGES, "4,8,12,16,20,24,28,32"),
            _named(
                "zb-auto",
                _STAGES,
                f"{_AUTO.format('loop', 107.3)} --zero-bubble-num-chunks 4 {_LAYOUT} Ett|(t*3|)*5tt|tL",
                ORDER,
            ),
        ),
    ),
    "28.3B of the Zero Bubble paper, 32 A100": Pipeline(
        4,
        6,
        12,
        (
            _in_place("zb-h2"),
            _in_place("zb-h1"),
            _named("zb-auto", _ENDS, f"{_AUTO.format('vee', 56.71)} {_LAYOUT} E|(t|)*6L", ORDER),
        ),
    ),
}


class SmallJob(NamedTuple):
    """A job of ``pretrain_gpt.py`` on CPU ranks, without the flags that all of them need there."""

    flags: list[str]
    num_ranks: int

    def with_row(self, row: Row) -> list[str]:
        """Return the flags with a row's change."""
        return changed(self.flags, row.flags.split(), row.drops.split())


def small_job(name: str, numbers: str = SAME) -> SmallJob:
    """Shrink a recipe; jobs with experts and several stages per rank run Megatron's combined schedule, as published.

    Args:
        numbers: the kind of the rows to compare with. What is rounded differently is compared in float32, which the
            combined schedule refuses, and with plain attention.
    """
    pipeline = SMALL[name]
    flags = shlex.split(f"{COMMON} {RECIPES[name].flags}")
    experts = "--num-experts" in flags
    tensor = 2 if "--tensor-model-parallel-size" in flags else 1
    replicas = 2 if experts else 1
    num_ranks = pipeline.ranks * tensor * replicas
    sizes: dict[str, object] = _SIZES | {
        "--num-layers": pipeline.layers,
        "--pipeline-model-parallel-size": pipeline.ranks,
        "--global-batch-size": pipeline.microbatches * replicas,
        _LAYOUT: pipeline.layout,
    }
    for place, flag in enumerate(flags):
        if flag in sizes:
            flags[place + 1] = str(sizes[flag])
    if numbers == ROUNDED:
        flags.remove("--bf16")
        flags += _NORMS.split()
        return SmallJob(flags, num_ranks)
    flags += _of_the_model(name).split()
    if experts and RECIPES[name].stages > _pipeline_ranks(name):
        flags.append(_OVERLAP)
    return SmallJob(flags, num_ranks)


def _pipeline_ranks(name: str) -> int:
    """The pipeline ranks of the recipe itself."""
    words = RECIPES[name].flags.split()
    return int(words[words.index("--pipeline-model-parallel-size") + 1])


def _of_the_model(name: str) -> str:
    pipeline = SMALL[name]
    if pipeline.dense:
        return _DEEPSEEK.format(dense=pipeline.dense, rest=pipeline.layers - pipeline.dense)
    if name.startswith("Qwen"):
        return _QWEN
    return _NORMS if name.startswith("Llama") else ""
