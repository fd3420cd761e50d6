"""Slices of hybrid models, and of gated delta nets, against stock megatron-core on whole sequences.

In float64, the recurrences of slices are exactly those of whole sequences (``test_recurrences.py``). In float32,
rounding counts more: in gated delta nets, which normalize the few features of their queries and keys, and in the
weights ``D`` of Mamba layers, whose gradients are long sums that nearly cancel.
"""

from __future__ import annotations

import pytest

from tests.helpers.hybrid_models import DELTA, recurrent_differences
from tests.helpers.parity import Layout
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_parity import EXPERTS, LLAMA, ROPE, UNTIED
from tests.integration.adapter.test_slices import EVEN, FULL_RECOMPUTE, MANY, ODD, UNEVEN, check

SOME = [f"seq-zb-h1 {UNEVEN}"]
ALL = [*MANY, f"seq-zb-h1 {ODD}"]  # a slice of one token, which is less than a convolution sees
_EXPERTS = f"{EXPERTS} {UNTIED} --init-method-std 0.1"
ROWS = {
    "Mamba, attention, MLP, experts": ("M*M-ME", Layout(2, num_layers=6), 3, _EXPERTS, SOME),
    "gated delta nets, attention, experts": (DELTA, Layout(2, num_layers=4), 3, f"{_EXPERTS} {ROPE}", SOME),
    "attention, MLP, experts": ("*-*E*-", Layout(2, num_layers=6), 3, _EXPERTS, ALL),
    "Mamba, all cuts, p=4": ("M*M-M*M-", Layout(4, num_layers=8), 3, f"{LLAMA} {ROPE} {UNTIED}", ALL),
    "Mamba, full recompute, tied": ("MM*-", Layout(2, num_layers=4), 2, FULL_RECOMPUTE, ALL),
    "Mamba, tp=2 and sequence parallel": ("M*MM", Layout(2, tensor=2, num_layers=4), 2, "--sequence-parallel", MANY),
    "gated delta nets, all cuts, p=4": (DELTA, Layout(4, num_layers=8), 3, f"{LLAMA} {ROPE} {UNTIED}", ALL),
    "gated delta nets, full recompute, two stages per rank": (
        DELTA,
        Layout(2, num_layers=4),
        3,
        f"{ROPE} {FULL_RECOMPUTE}",
        [*ALL, f"seq-interleaved-1f1b {EVEN.format(2)}"],
    ),
    "gated delta nets, tp=2 and sequence parallel": (
        DELTA,
        Layout(2, tensor=2, num_layers=4),
        2,
        f"--sequence-parallel {ROPE} {UNTIED}",
        MANY,
    ),
}
"""By name: the layers, the ranks, microbatches, flags and schedules."""


@pytest.mark.parametrize("name", some(ROWS, *list(ROWS)[:2]))
def test_gradients_equal_those_of_whole_sequences(ranks: RankPool, name: str) -> None:
    pattern, layout, num_microbatches, options, schedules = ROWS[name]
    flags = layout.flags(num_microbatches, options)
    found = ranks.run(layout.num_ranks, recurrent_differences, pattern, flags, schedules, timeout=500)
    check(found, *((1e-6, 2e-5, 5e-6) if pattern == DELTA else (1e-6, 1e-5, 1e-6)))
