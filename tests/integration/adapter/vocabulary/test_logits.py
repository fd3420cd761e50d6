"""Memory with vocabulary parallelism: what a rank keeps at most is what was planned, with the logits from S to T."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.divided_vocabulary import divide
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.layers import LayerCosts
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.ir.vocabulary import FLOWS, Algorithm, Divided
from tests.helpers.parity import Layout
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_parity import UNTIED
from tests.integration.adapter.test_placements import Peaks, peaks

HIDDEN, LENGTH, BATCH, MICROBATCHES = 64, 16, 2, 6
VOCABULARY = 16 * HIDDEN


def measured(
    ranks: RankPool, schedule: str, algorithm: Algorithm, layout: Layout, more: str = "", rows: int = VOCABULARY
) -> list[Peaks]:
    """The memory of all ranks in one iteration; the tokenizer has one more token than the flag says."""
    flags = (
        f"--hidden-size {HIDDEN} --seq-length {LENGTH} --max-position-embeddings {LENGTH} --vocab-size {rows - 1} "
        f"--train-iters 1 --eval-iters 0 --zero-bubble-schedule {schedule} "
        f"--zero-bubble-vocabulary-parallel {algorithm} {more}"
    )
    found: list[Peaks] = ranks.run(layout.num_ranks, peaks, layout.flags(MICROBATCHES, flags), timeout=60)
    return found


def estimated_layers(layout: Layout) -> LayerCosts:
    """The costs of the layers, of one tensor-parallel rank."""
    shape = (HIDDEN, 4 * HIDDEN, 4, 4, HIDDEN // 4, LENGTH, BATCH, VOCABULARY)
    parallel = {"tensor_parallel": layout.tensor, "sequence_parallel": layout.tensor > 1}
    return layer_costs(Model((1,) * layout.pipeline, *shape, **parallel), DEVICES["a100"])


PEAKS = [(schedule, algorithm) for algorithm in FLOWS for schedule in ("1f1b", "zb-h1", "zb-v")]


@pytest.mark.parametrize(("schedule", "algorithm"), some(PEAKS, *PEAKS[1::2]))
def test_measured_peak_memory_is_near_the_plan(ranks: RankPool, schedule: str, algorithm: Algorithm) -> None:
    """The logits are a tenth or more of what a microbatch keeps, so a plan without them would be too low."""
    for found in measured(ranks, schedule, algorithm, Layout(2, num_layers=4)):
        assert found.measured == pytest.approx(found.planned, rel=0.05)
        assert min(found.memory.logits) >= 0.1 * max(found.memory.activation)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(2, num_layers=4), UNTIED),
        (Layout(3), ""),
        (Layout(2, tensor=2), "--sequence-parallel"),
    ],
    ids=["untied", "padding", "tp=2 and sequence parallel"],
)
def test_estimated_logits_are_near_what_s_saves(ranks: RankPool, layout: Layout, more: str) -> None:
    """In bfloat16, as estimated; the statistics of the tokens, which S saves as well, are not in the estimate."""
    estimated = divide(estimated_layers(layout), layout.pipeline, Divided(2)).logits
    for found in measured(ranks, "zb-h1", 2, layout, f"--bf16 {more}"):
        assert found.memory.logits == pytest.approx(estimated, rel=0.05)


def test_recomputed_logits_leave_only_hidden_states_and_labels(ranks: RankPool) -> None:
    """In bfloat16; the labels, 8 bytes per token, are not in the estimate. Receivers also keep those of the message."""
    layout, labels = Layout(2), 8 * LENGTH * BATCH
    estimated = divide(estimated_layers(layout), 2, Divided(2, recompute_logits=True)).logits
    for found in measured(ranks, "zb-h1", 2, layout, "--bf16 --zero-bubble-recompute logits"):
        assert found.memory.logits == (estimated[0] + 2 * labels, estimated[1] + labels)
        assert found.measured == pytest.approx(found.planned, rel=0.05)
