"""The options of a run, as a table: their values, and the flags of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Row = Mapping[str, str]
"""A job: the name of one value per option."""


@dataclass(frozen=True)
class Value:
    """One value of an option.

    Attributes:
        name: without spaces, so that a row can be given as ``option=value`` words.
        job: flags of every run of the job, also of stock megatron-core.
        schedule: flags of the runs with a schedule.
        variant: flags of the last run only, whose results must be those of the schedule without them.
        needs: values of other options without which the product refuses this one.
    """

    name: str
    job: str = ""
    schedule: str = ""
    variant: str = ""
    needs: Mapping[str, str] = field(default_factory=dict)


FP16 = "--fp16 --initial-loss-scale 1024 --hysteresis 1 --loss-scale-window 2"
"""The scale changes every other step. It is far from the one at which gradients overflow, so that rounding decides
nothing: a fault makes steps overflow.
"""
BUCKETS = "--ddp-bucket-size 1000"
EXPERTS = "--num-experts 4 --swiglu --disable-bias-linear"
SELECTIVE = "--recompute-granularity selective"
WHOLE_LAYERS = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
SHARDED = {"data": "distributed", "schedule": "zero-pp"}
SLICED = {"schedule": "seq-zb-h1"}
PAIRED = {"experts": "on-2-ranks", "data": "2", "dtype": "bf16", "schedule": "dualpipe-v"}


def _schedule(name: str) -> Value:
    return Value(name, schedule=f"--zero-bubble-schedule {name}")


def _vocabulary(number: str, more: str = "") -> str:
    return f"--zero-bubble-vocabulary-parallel {number} {more}".strip()


def _shards(unit: int, more: str = "") -> str:
    return f"--zero-bubble-shard-weights --zero-bubble-unit-microbatches {unit} {more}".strip()


OPTIONS: dict[str, tuple[Value, ...]] = {
    "schedule": (
        *map(_schedule, ("zb-h1", "1f1b", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v", "interleaved-1f1b")),
        *map(_schedule, ("breadth-first", "gis", "gis-h", "pipe-offload", "zb-interleaved", "zero-pp")),
        *map(_schedule, ("seq-1f1b", "seq-zb-h1", "seq-interleaved-1f1b", "zb-auto")),
        Value("zb-auto-on-a-v", schedule="--zero-bubble-schedule zb-auto --zero-bubble-placement vee"),
    ),
    "ranks": (Value("2"), Value("3"), Value("4")),
    "microbatches": (Value("3p"), Value("p"), Value("p-1"), Value("1")),
    "sequences": (Value("2", "--micro-batch-size 2"), Value("1", "--micro-batch-size 1")),
    "dtype": (Value("fp32"), Value("bf16", "--bf16"), Value("fp16", FP16)),
    "wgrad": (Value("exact", schedule="--zero-bubble-exact"), Value("fused", schedule="")),
    "step": (
        Value("synchronous"),
        Value("ahead", variant="--zero-bubble-post-validation"),
        Value("ahead-inverse", variant="--zero-bubble-post-validation inverse"),
    ),
    "fault": (Value("none"), Value("spike"), Value("nan", needs={"dtype": "fp16"})),
    "vocabulary": (
        Value("whole"),
        Value("1", schedule=_vocabulary("1")),
        Value("2", schedule=_vocabulary("2")),
        Value("2-recomputed", schedule=_vocabulary("2", "--zero-bubble-recompute logits")),
    ),
    "recompute": (
        Value("none"),
        Value("selective", SELECTIVE),
        Value("mlp", f"{SELECTIVE} --recompute-modules mlp --disable-bias-linear"),
        Value("full", f"{WHOLE_LAYERS} uniform"),
        Value("block", f"{WHOLE_LAYERS} block"),
        Value("early", f"{WHOLE_LAYERS} uniform", variant="--zero-bubble-recompute early"),
    ),
    "offload": (
        Value("none"),
        Value("50%", variant="--zero-bubble-offload 50%"),
        Value("all", variant="--zero-bubble-offload all"),
        Value("auto", variant="--zero-bubble-offload auto"),
    ),
    "receives": (Value("early"), Value("late", variant="--zero-bubble-post-receives late")),
    "data": (
        Value("1"),
        Value("2"),
        Value("overlapped", f"--overlap-grad-reduce {BUCKETS}"),
        Value("not-aligned", f"--overlap-grad-reduce --no-align-grad-reduce {BUCKETS}"),
        Value("distributed", "--use-distributed-optimizer"),
        Value("gathered", f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {BUCKETS}"),
    ),
    "shards": (
        Value("off"),
        Value("units-of-1", schedule=_shards(1), needs=SHARDED),
        Value("one-unit", schedule=_shards(99, "--zero-bubble-whole-stages 1"), needs=SHARDED),
        Value("on-demand", schedule=_shards(2, "--zero-bubble-shard-weights on-demand"), needs=SHARDED),
        Value("of-plans", schedule=_shards(99), needs={"data": "distributed", "schedule": "zb-auto-on-a-v"}),
    ),
    "embeddings": (Value("tied"), Value("untied", "--untie-embeddings-and-output-weights")),
    "layers": (Value("even"), Value("uneven"), Value("laid-out")),
    "experts": (
        Value("none"),
        Value("auxiliary-loss", f"{EXPERTS} --moe-aux-loss-coeff 0.01"),
        Value("z-loss", f"{EXPERTS} --moe-z-loss-coeff 0.01 --moe-token-dispatcher-type alltoall"),
        Value("shared", f"{EXPERTS} --moe-shared-expert-intermediate-size 32"),
        Value(
            "on-2-ranks",
            f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
            needs={"data": "2"},
        ),
    ),
    "overlap": (Value("off"), Value("pairs", schedule="--zero-bubble-overlap-experts", needs=PAIRED)),
    "samples": (
        Value("equal"),
        Value(
            "balanced",
            "--calculate-per-token-loss",
            "--zero-bubble-balance-microbatches",
            needs={"data": "2"},
        ),
    ),
    "tensor": (
        Value("1"),
        Value("2", "--tensor-model-parallel-size 2"),
        # gloo gathers only equal shapes: on the CPU, stock megatron-core cannot split an expert over ranks.
        Value("2-sequence", "--tensor-model-parallel-size 2 --sequence-parallel"),
    ),
    "slices": (
        Value("default"),
        Value("2", schedule="--zero-bubble-slices 2", needs=SLICED),
        Value("uneven", schedule="--zero-bubble-slices 6,12,14,16", needs=SLICED),
        Value("of-one-token", schedule="--zero-bubble-slices 16", needs=SLICED),
    ),
    "clip": (Value("off", "--clip-grad 0"), Value("always", "--clip-grad 0.1"), Value("rarely", "--clip-grad 100")),
    "loss": (Value("per-microbatch"), Value("per-token", "--calculate-per-token-loss")),
    "loop": (Value("losses"), Value("logits")),
    "optimizer": (Value("adam"), Value("sgd", "--optimizer sgd --lr 0.03")),
    "evaluation": (Value("none", "--eval-iters 0"), Value("between", "--eval-iters 1 --eval-interval 2")),
    "batch": (Value("constant"), Value("growing")),
    "model": (
        Value("gpt"),
        Value(
            "llama",
            "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --disable-bias-linear "
            "--position-embedding-type rope",
        ),
    ),
}
"""The first value of an option is the one that a row has if it names none."""

NEUTRAL: dict[str, str] = {option: values[0].name for option, values in OPTIONS.items()}


def value_of(row: Row, option: str) -> Value:
    """The value of ``option`` in ``row``."""
    return next(value for value in OPTIONS[option] if value.name == row[option])


def text_of(row: Row) -> str:
    """The row as words ``option=value``, without neutral values; :func:`row_of` parses it."""
    return " ".join(f"{option}={name}" for option, name in row.items() if name != NEUTRAL[option]) or "schedule=zb-h1"


def row_of(text: str) -> dict[str, str]:
    """Parse words ``option=value``; options that are not named have their neutral values.

    Raises:
        ValueError: an unknown option or value.
    """
    row = dict(NEUTRAL)
    for word in text.split():
        option, _, name = word.partition("=")
        names = [value.name for value in OPTIONS.get(option, ())]
        if name not in names:
            known = f"{option} has the values {', '.join(names)}" if names else f"options are {', '.join(OPTIONS)}"
            raise ValueError(f"a row consists of words option=value; got {word}; {known}")
        row[option] = name
    return row
