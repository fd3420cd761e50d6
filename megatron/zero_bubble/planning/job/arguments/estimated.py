"""Flags of Megatron-LM's script that no rule reads, but estimates do, with Megatron's defaults."""

from __future__ import annotations

import argparse

from megatron.zero_bubble.core.costs.adapters import LINEARS
from megatron.zero_bubble.planning.job.arguments.layer_frequency import layer_frequency

_DTYPES = ("main-grads", "main-params", "exp-avg", "exp-avg-sq")


def add_estimated(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    add = parser.add_argument
    for name in _DTYPES:  # of the precision-aware optimizer
        add(f"--{name}-dtype", default="fp32", choices=("fp32", "fp16", "bf16", "fp8"))
    add("--optimizer-offload-fraction", type=float, default=1.0)
    add("--offload-optimizer-states", action="store_true")
    for precision in ("fp8", "fp4"):
        add(f"--{precision}-param-gather", action="store_true")
    add("--q-lora-rank", type=int)
    for name, size in (("kv-lora-rank", 32), ("qk-head-dim", 128), ("qk-pos-emb-head-dim", 64), ("v-head-dim", 128)):
        add(f"--{name}", type=int, default=size)
    for name in ("num-key-heads", "num-value-heads", "key-head-dim", "value-head-dim", "conv-kernel-dim"):
        add(f"--linear-{name}", type=int)  # of gated delta nets
    for name in ("n-heads", "head-dim", "topk"):
        add(f"--dsa-indexer-{name}", type=int)  # of sparse attention
    add("--dsa-indexer-loss-coeff", type=float)
    add("--dsa-indexer-use-sparse-loss", action="store_true")
    add("--moe-router-num-groups", type=int)
    add("--moe-router-group-topk", type=int)
    add("--moe-latent-size", type=int)
    add("--lora-rank", type=int)  # of adapters, which other trainers add; named as by them
    add("--target-modules", nargs="+", default=LINEARS)
    add("--frozen-layers", type=int, default=0)  # below all that is trained
    add("--window-size", type=_window)
    add("--window-attn-skip-freq", type=layer_frequency)
    for enabled, number in (
        ("--enable-hyper-connections", "--num-residual-streams"),
        ("--enable-mhc-connections", "--mhc-num-residual-streams"),
    ):
        add(enabled, action="store_true")
        add(number, type=int, default=4)
    add("--tokenizer-model")  # which may say the size of the vocabulary
    add("--vocab-file")  # as well
    add("--padded-vocab-size", type=int)


def _window(text: str) -> int:
    """The first of Megatron's ``BEFORE,AFTER``: to how many tokens before its own one attends, or -1 for all."""
    return int(text.strip("( )").partition(",")[0])
