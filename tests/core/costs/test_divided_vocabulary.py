"""Costs of the shards of the embedding and the output layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.divided_vocabulary import divide, efficiency
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, Divided

MODEL = Model((4,) * 8, 3072, 12288, 24, 24, 128, 2048, 1, 256_000)
WHOLE = LayerCosts(
    (LayerFigures(1.0, 1.0, 1.0, 8.0, 4.0),) * 8,
    embedding=LayerFigures(forward_ms=0.5, wgrad_ms=1.0),
    loss=LayerFigures(4.0, 6.0, 8.0, activation=20.0, wgrad=8.0),
    input_memory=2.0,
)


@pytest.mark.parametrize("algorithm, s, t", [(1, 4.0, 14.0), (2, 10.0, 8.0)])
def test_all_shards_together_take_the_time_of_the_whole(algorithm: Algorithm, s: float, t: float) -> None:
    shards = divide(WHOLE, 4, Divided(algorithm), throughput=1.0)
    times = shards.vocabulary
    assert (times.output_ms, times.output_wgrad_ms) == ((s / 4,) * 4, (t / 4,) * 4)
    assert (times.embedding_ms, times.embedding_wgrad_ms) == ((0.125,) * 4, (0.25,) * 4)
    costs, memory = shards.on((2, 2, 2, 2))
    assert costs.forward_ms == (2.0,) * 4 and memory.activation == (16.0,) * 4
    assert shards.logits == ((20.0 - 4.0) / 4 + 2.0,) * 4


def test_computing_the_logits_again_keeps_only_the_hidden_states() -> None:
    kept, again = (divide(WHOLE, 4, Divided(2, recompute), throughput=1.0) for recompute in (False, True))
    assert again.logits == (2.0,) * 4
    assert again.vocabulary.output_wgrad_ms[0] - kept.vocabulary.output_wgrad_ms[0] == pytest.approx(4.0 / 4)
    assert again.vocabulary.output_ms == kept.vocabulary.output_ms


def test_shards_are_as_fast_as_published() -> None:
    assert [efficiency(1, count) for count in (1, 8, 16, 32, 64)] == [1.0, 0.913, 0.842, 0.806, 0.806]
    assert 0.759 < efficiency(2, 24) < 0.798
    slow, fast = divide(WHOLE, 16, Divided(2)).vocabulary, divide(WHOLE, 16, Divided(2), throughput=1.0).vocabulary
    assert slow.output_ms[0] == pytest.approx(fast.output_ms[0] / 0.798)


def test_estimated_softmax_is_in_float32() -> None:
    """4 bytes per token and entry of the shard, and the hidden states in bfloat16."""
    whole = layer_costs(MODEL, DEVICES["a100"])
    assert divide(whole, 8, Divided(1)).logits == ((4 * 2048 * 256_000 / 8 + 2 * 2048 * 3072),) * 8
    assert whole.on((4,) * 8)[0].num_stages == Placement.linear(8).num_stages


def test_predictions_keep_states_of_all_depths_and_their_rows_travel() -> None:
    """Two heads: S keeps both hidden states, and every message has the rows of the tokens too."""
    heads = LayerFigures(8.0, 12.0, 16.0, activation=40.0, wgrad=16.0)
    predicting = replace(WHOLE, layers=(*WHOLE.layers, WHOLE.layers[0]), loss=heads, predictions=1, comm_ms=0.5)
    shards = divide(predicting, 4, Divided(1), throughput=1.0)
    assert shards.logits == ((40.0 - 8.0) / 4 + 4.0,) * 4
    assert shards.comm_ms == 1.0 and divide(replace(WHOLE, comm_ms=0.5), 4, Divided(1)).comm_ms == 0.5
