"""Two hundred settings of ``plan`` and ``compare``: schedules, sizes, limits, and every feature alone and in pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from megatron.zero_bubble.core.schedules import SCHEDULES, has_units
from megatron.zero_bubble.core.schedules.recipe import Recipe

TIMES = "--forward-ms 4 --backward-ms 5 --wgrad-ms 3"
SIZES = ((2, 3), (3, 7), (4, 8))
LAYERS = "layers.json"
"""The costs file with ``LAYER_COSTS``, in the folder where the commands run."""
LAYER_COSTS = {
    "comm_ms": 0.2,
    "layers": ["dense*2", "moe*6"],
    "parts": {
        "dense": {"forward_ms": 2.0, "backward_ms": 2.2, "wgrad_ms": 1.6, "activation": 8e8, "wgrad": 5e8},
        "moe": {"forward_ms": 4.0, "backward_ms": 4.6, "wgrad_ms": 3.1, "activation": 11e8, "wgrad": 7e8},
        "embedding": {"forward_ms": 0.1, "wgrad_ms": 0.2},
        "loss": {"forward_ms": 6.0, "backward_ms": 6.0, "wgrad_ms": 6.0, "activation": 6e8},
    },
}
_SHARDS = "--shard-weights --gather-ms 1 --reduce-ms 1 --replicas 2"
_VOCABULARY = "--vocabulary auto --output-ms 0.8 --output-wgrad-ms 0.6 --embedding-ms 0.1 --collective-ms 0.2"
FEATURES = {
    "limit": "--memory-limit 0.7p",
    "slices": "--num-slices 2 --attention-share 0.3",
    "vocabulary": _VOCABULARY,
    "offload": "--offload auto --host-ms 3",
    "shards": _SHARDS,
    "messages": "--comm-ms 0.5 --message-ms 0.2",
    "span": "--objective span",
}


def is_quick(command: str) -> bool:
    """Whether the command takes less than about a second of a processor: it searches for little."""
    wide = "zb-auto" in command and any(word in command for word in ("offload", "vocabulary", "layout", "config"))
    return not (wide or command.startswith("compare") or ("vocabulary" in command and "zb-h" not in command))


def settings() -> Iterator[str]:
    """Yield the commands, without ``zero-bubble``."""
    yield from _by_schedule()
    yield from _by_feature()
    yield from _by_costs()
    yield from _compared()


def _by_schedule() -> Iterator[str]:
    for name, recipe in SCHEDULES.items():
        for p, m in SIZES:
            yield _plan(name, p, m)
        yield _plan(name, 3, 4, "--memory-limit 0.8p", "--comm-ms 0.5")
        for feature in ("offload", "vocabulary", "shards"):
            if _takes(recipe, feature):
                yield _plan(name, 3, 5, FEATURES[feature])


def _by_feature() -> Iterator[str]:
    for name in ("zb-h1", "zb-v", "v-half", "interleaved-1f1b", "zb-auto"):
        yield _plan(name, 3, 6, "--equal-passes") if name in ("zb-v", "v-half") else _plan(name, 3, 6)
        yield _plan(name, 3, 6, FEATURES["messages"], FEATURES["span"], "--step-ms 2")
        yield from (_plan(name, 3, 6, flags) for flags in FEATURES.values())
    for pair in combinations(FEATURES.values(), 2):
        yield _plan("zb-auto", 3, 6, *pair)
        yield _plan("zb-h1", 3, 4, *pair)
    for chunks in ("3", "auto"):
        yield _plan("interleaved-1f1b", 2, 4, f"--num-chunks {chunks}", _SHARDS)
        yield _plan("zero-pp", 2, 4, f"--num-chunks {chunks}", _SHARDS, "--unit-microbatches auto --whole-stages auto")
    for share in ("50%", "all"):
        yield _plan("zb-h2", 3, 6, f"--offload {share} --host-ms 3 --host-memory 2GiB", "--activation-memory 1e9")
    for placement in ("linear", "vee", "auto"):
        yield _plan("zb-auto", 3, 6, f"--placement {placement}", "--memory-limit 0.9p")


def _by_costs() -> Iterator[str]:
    for placement in ("linear", "vee", "auto"):
        yield _of_file("zb-auto", f"--placement {placement}", "--layout auto")
    for name in ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "zb-auto"):
        yield _of_file(name)
        yield _of_file(name, "--layout auto")
        yield _of_file(name, "--vocabulary auto")
    yield "plan --schedule zb-auto --config configs/gpt_1.5b.yaml --gpu h100 --num-microbatches 8 --num-ranks 4"
    yield "plan --schedule zb-v --config configs/llama_8b.yaml --gpu h100 --memory-limit 40GiB"


def _compared() -> Iterator[str]:
    for more in ("", "--vocabulary auto --layout auto", "--memory-limit 0.6p", "--objective span"):
        yield f"compare --costs {LAYERS} --num-ranks 4 --num-microbatches 6 {more}".strip()
    for flags in FEATURES.values():
        yield f"compare {TIMES} --num-ranks 4 --num-microbatches 6 {flags}"


def _takes(recipe: Recipe, feature: str) -> bool:
    """Whether the feature says more about this schedule than that it is refused."""
    if recipe.sliced:
        return False
    return feature != "shards" or recipe.shape == "interleaved" or has_units(recipe.name)


def _plan(name: str, num_ranks: int, num_microbatches: int, *more: str) -> str:
    size = f"--num-ranks {num_ranks} --num-microbatches {num_microbatches}"
    return " ".join((f"plan --schedule {name} {TIMES} {size}", *more))


def _of_file(name: str, *more: str) -> str:
    return " ".join((f"plan --schedule {name} --costs {LAYERS} --num-ranks 3 --num-microbatches 5", *more))
