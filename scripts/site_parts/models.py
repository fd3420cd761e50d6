"""The table of models for docs/models.md: which choices each of them trains with, and why not with the others.

A row is a job at toy size. The dry run checks it with every choice, so a refusal is the sentence of the program. What
flags do not show, such as the class of a model, is looked up among the messages of the package.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.core.errors import Refusal, attempted
from site_parts.markdown import code, table
from site_parts.refusals import message

CHOICES = {
    "order": "--zero-bubble-schedule zb-h1",
    "V": "--zero-bubble-schedule zb-v",
    "slices": "--zero-bubble-schedule seq-zb-h1 --zero-bubble-num-slices 4",
    "vocabulary": "--zero-bubble-schedule zb-h1 --zero-bubble-vocabulary-parallel 1",
    "shards": "--zero-bubble-schedule zero-pp --zero-bubble-shard-weights",
    "pairs": "--zero-bubble-schedule dualpipe-v --zero-bubble-overlap-experts",
}
"""What a job may choose, in our flags; a pair hides the all-to-all of experts behind another microbatch."""
EQUAL, NEAR, STARTS = "equal", "near", "starts"
_RANKS = 8
_COMMON = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 32 --train-iters 10 --lr 1e-4 --vocab-size 1000 --tokenizer-type NullTokenizer --mock-data "
    "--bf16 --untie-embeddings-and-output-weights --use-distributed-optimizer --pipeline-model-parallel-size 2 "
    "--no-rope-fusion"
)
_LAYERS = "--num-layers 8"
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
_LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16"
)
_GROUPED = "--group-query-attention --num-query-groups 2"
_JOBS, _MEGATRON, _ADAPTER = "tests/jobs/table.py", "tests/integration/megatron_lm", "tests/integration/adapter"
_FLAGSHIPS = f"{_MEGATRON}/test_flagships.py"
_PAIRED = (EQUAL, f"{_FLAGSHIPS}::test_pairs_equal_stock")
_DIVIDED = (NEAR, f"{_FLAGSHIPS}::test_shards_of_the_vocabulary_are_near_stock")
_CUT = (NEAR, f"{_FLAGSHIPS}::test_slices_are_near_stock")
_OTHER_SLICES, _OTHER_VOCABULARY = "sequence slices need a GPTModel or", "vocabulary parallelism needs a GPTModel"
_ONE_STAGE = "several stages per rank need a script"
_ALL = tuple(CHOICES)


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        parts: what is particular about it.
        script: Megatron-LM's.
        flags: those of its parts, in addition to those of every row.
        trained: by choice, how a test compares it with stock, and the test, as a file and a name in it.
        unlike: by choice, how the message begins that refuses it for what flags do not show.
        upstream: why Megatron itself does not train it in a pipeline.
    """

    parts: str
    flags: str = ""
    script: str = "pretrain_gpt.py"
    trained: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    unlike: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    upstream: str = ""


MODELS = {
    "GPT-3, Llama": Model(
        "dense",
        _LAYERS,
        trained={
            "order": (EQUAL, f"{_MEGATRON}/test_parity.py::test_logs_equal_stock"),
            "V": (EQUAL, f"{_MEGATRON}/test_placements.py::test_logs_equal_stock_on_a_v"),
            "slices": (NEAR, f"{_MEGATRON}/test_slices.py::test_logs_are_near_stock"),
            "vocabulary": (NEAR, f"{_MEGATRON}/test_vocabulary.py::test_logs_are_near_stock"),
            "shards": (EQUAL, f"{_MEGATRON}/test_shards.py::test_logs_equal_stock"),
        },
    ),
    "DeepSeek-V3": Model(
        "latent attention, experts, multi-token prediction",
        f"{_LAYERS} {_LATENT} {_EXPERTS} --mtp-num-layers 1",
        trained={
            "order": (EQUAL, f"{_JOBS}::moe-modelzoo deepseek-v3 gb200"),
            "V": (EQUAL, f"{_JOBS}::moe-modelzoo deepseek-v3 h100"),
            "slices": (
                NEAR,
                f"{_MEGATRON}/test_slices.py::test_experts_with_latent_attention_and_prediction_are_near_stock",
            ),
            "vocabulary": (
                NEAR,
                f"{_MEGATRON}/test_vocabulary.py::test_experts_with_latent_attention_and_prediction_are_near_stock",
            ),
            "pairs": _PAIRED,
            "shards": (EQUAL, f"{_MEGATRON}/test_shards_models.py::DeepSeek-V3"),
        },
    ),
    "DeepSeek-V4": Model(
        "hyper-connections (dev branch), here of a dense model",
        f"{_LAYERS} --enable-hyper-connections",
        trained={
            "order": (EQUAL, f"{_MEGATRON}/test_models.py::test_hyper_connections_equal_stock"),
            "V": (EQUAL, f"{_MEGATRON}/test_models.py::test_hyper_connections_equal_stock_on_a_v"),
            "slices": (NEAR, f"{_MEGATRON}/test_models.py::test_hyper_connections_are_near_stock"),
            "vocabulary": (NEAR, f"{_MEGATRON}/test_models.py::test_hyper_connections_are_near_stock"),
            "shards": (EQUAL, f"{_MEGATRON}/test_models.py::test_hyper_connections_on_two_replicas_equal_stock"),
        },
    ),
    "Qwen3-235B": Model(
        "experts, grouped queries",
        f"{_LAYERS} {_GROUPED} --qk-layernorm {_EXPERTS}",
        trained={
            "order": (EQUAL, f"{_JOBS}::verl qwen3-235b"),
            "V": (EQUAL, f"{_JOBS}::verl qwen3-235b"),
            "slices": (NEAR, f"{_ADAPTER}/test_slices.py::experts"),
            "vocabulary": (NEAR, f"{_ADAPTER}/test_vocabulary.py::m=1, experts, full recompute"),
            "shards": (EQUAL, f"{_MEGATRON}/test_shards_models.py::Qwen3-235B"),
            "pairs": (EQUAL, f"{_MEGATRON}/test_experts.py::test_logs_equal_both_schedules_of_stock"),
        },
    ),
    "Qwen3.5": Model(
        "gated delta nets, experts",
        f"{_LAYERS} --experimental-attention-variant gated_delta_net {_EXPERTS}",
        trained={
            "order": (EQUAL, f"{_FLAGSHIPS}::test_orders_equal_stock"),
            "V": (EQUAL, f"{_FLAGSHIPS}::test_a_v_continues_a_checkpoint_as_stock_does"),
            "vocabulary": _DIVIDED,
            "pairs": _PAIRED,
            "slices": (NEAR, f"{_ADAPTER}/test_slices_hybrid.py::gated delta nets, attention, experts"),
            "shards": (EQUAL, f"{_FLAGSHIPS}::test_sharded_units_equal_stock"),
        },
    ),
    "GPT-OSS": Model(
        "sinks, windows, experts",
        f"{_LAYERS} {_GROUPED} --softmax-type learnable --window-size 15,0 --window-attn-skip-freq 2 {_EXPERTS}",
        trained={
            "order": (EQUAL, f"{_JOBS}::megatron-lm gpt-oss"),
            "V": (EQUAL, f"{_JOBS}::megatron-lm gpt-oss"),
            "slices": _CUT,
            "vocabulary": _DIVIDED,
            "pairs": _PAIRED,
            "shards": (EQUAL, f"{_MEGATRON}/test_shards_models.py::GPT-OSS"),
        },
    ),
    "Nemotron 3": Model(
        "Mamba, attention, experts",
        f"--hybrid-layer-pattern M*MEM*ME {_GROUPED} {_EXPERTS}",
        "pretrain_hybrid.py",
        trained={
            "order": (EQUAL, f"{_JOBS}::megatron-lm rl nemotron6"),
            "V": (EQUAL, f"{_JOBS}::megatron-lm rl nemotron6"),
            "slices": (NEAR, f"{_MEGATRON}/test_hybrid.py::test_slices_are_near_stock"),
            "vocabulary": (NEAR, f"{_MEGATRON}/test_hybrid.py::test_divided_vocabulary_is_near_stock"),
            "shards": (EQUAL, f"{_MEGATRON}/test_shards_models.py::test_hybrid_models_with_experts_equal_stock"),
        },
    ),
    "Mamba": Model(
        "Mamba, attention, MLP",
        f"--hybrid-layer-pattern M*M-M*M- {_GROUPED}",
        "pretrain_hybrid.py",
        trained={
            "order": (EQUAL, f"{_MEGATRON}/test_hybrid.py::test_one_stage_per_rank_equals_stock"),
            "V": (EQUAL, f"{_MEGATRON}/test_hybrid.py::test_a_v_equals_stock"),
            "slices": (NEAR, f"{_MEGATRON}/test_hybrid.py::test_slices_are_near_stock"),
            "vocabulary": (NEAR, f"{_MEGATRON}/test_hybrid.py::test_divided_vocabulary_is_near_stock"),
            "shards": (EQUAL, f"{_MEGATRON}/test_hybrid.py::test_sharded_units_equal_stock"),
        },
    ),
    "Kimi K2": Model(
        "latent attention, experts",
        f"{_LAYERS} {_LATENT} {_EXPERTS}",
        trained={
            "order": (EQUAL, f"{_JOBS}::verl deepseek-671b"),
            "V": (EQUAL, f"{_JOBS}::moe-modelzoo kimi-k2"),
            "slices": _CUT,
            "vocabulary": (NEAR, f"{_ADAPTER}/test_vocabulary_models.py::Kimi K2: latent attention, experts"),
            "pairs": _PAIRED,
            "shards": (EQUAL, f"{_MEGATRON}/test_shards_models.py::Kimi K2"),
        },
    ),
    "Kimi K3": Model(
        "attention residuals (dev branch)", f"{_LAYERS} --enable-attention-residuals {_LATENT} {_EXPERTS}"
    ),
    "LLaVA": Model(
        "a vision model before the language model",
        _LAYERS,
        "pretrain_vlm.py",
        trained={"order": (EQUAL, f"{_MEGATRON}/test_models.py::test_vision_language_model_equals_stock")},
        unlike={
            "V": _ONE_STAGE,
            "slices": _OTHER_SLICES,
            "vocabulary": _OTHER_VOCABULARY,
            "shards": _ONE_STAGE,
        },
    ),
    "BERT": Model(
        "attention to both sides",
        _LAYERS,
        "pretrain_bert.py",
        trained={
            "order": (EQUAL, f"{_JOBS}::megatron-lm bert"),
            "shards": (EQUAL, f"{_FLAGSHIPS}::test_attention_to_both_sides_in_sharded_units_equals_stock"),
        },
        unlike={"slices": _OTHER_SLICES, "vocabulary": _OTHER_VOCABULARY},
    ),
    "T5": Model(
        "encoder and decoder",
        _LAYERS,
        script="pretrain_t5.py",
        unlike=dict.fromkeys(CHOICES, "zero-bubble schedules need a model with one stack of layers"),
    ),
    "ViT": Model(
        "classification of images",
        script="pretrain_vision_classify.py",
        upstream="Megatron-LM core_r0.16, the last to have it, gives its model provider a config, which that does not "
        "take",
    ),
    "RETRO": Model(
        "retrieved neighbours",
        script="pretrain_retro.py",
        upstream="Megatron-LM core_r0.15, the last to have it: retro currently does not support pipeline parallelism.",
    ),
}
"""By the name of its best known example."""


def models() -> str:
    """The table, and below it the reasons by their numbers."""
    reasons: dict[str, int] = {}
    rows = [
        (name, model.parts, code(model.script), *(_cell(model, choice, reasons) for choice in _ALL))
        for name, model in MODELS.items()
    ]
    said = table(("", "reason"), [(str(number), text) for text, number in reasons.items()])
    return f"{table(('', 'parts', 'script', *_ALL), rows)}\n\n{said}"


def refusal_of(model: Model, choice: str) -> str:
    """Why a model is refused with a choice, without the values of the job; "" where it is not."""
    if model.upstream:
        return model.upstream
    flags = shlex.split(f"{_COMMON} {model.flags} {CHOICES[choice]}")
    found = attempted(partial(checked_megatron_job, flags, _RANKS, _RANKS))
    if isinstance(found, Refusal):
        return found.reason.partition("; got ")[0]
    start = model.unlike.get(choice)
    return "" if start is None else message(start).partition("; got ")[0]


def outcome_of(model: Model, choice: str) -> str:
    """How tests compare a model with stock."""
    return model.trained[choice][0] if choice in model.trained else STARTS


def _cell(model: Model, choice: str, reasons: dict[str, int]) -> str:
    if why := refusal_of(model, choice):
        return f"no ({reasons.setdefault(why, len(reasons) + 1)})"
    return outcome_of(model, choice)


PARTS: dict[str, Callable[[], str]] = {"models": models}
