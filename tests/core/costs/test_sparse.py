"""Tests of the estimate for sparse attention, with the shapes of DeepSeek-V3.2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.core.costs.attention import Latent
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.costs.sparse import Indexer
from megatron.zero_bubble.core.costs.transformer import work_of

INDEXER = Indexer(64, 128, 2048, trained=True)
LATENT = Latent(1536, 512)
MODEL = Model((2,), 7168, 18432, 128, 128, 128, 131072, 1, 129_280, pattern="+D", latent=LATENT, indexer=INDEXER)
H100 = DEVICES["h100"]


def test_weights_are_those_of_the_layers_projections() -> None:
    assert INDEXER.weights(7168, 1536) == 1536 * 64 * 128 + 7168 * 128 + 7168 * 64
    assert MODEL.weights_of("D") - MODEL.weights_of("+") == INDEXER.weights(7168, 1536)
    halves = replace(MODEL, tensor_parallel=2)
    assert halves.weights_of("D") - halves.weights_of("+") == INDEXER.weights(7168, 1536), "each rank has all of it"


def test_attention_counts_the_tokens_that_are_picked() -> None:
    """The first of them attend to all tokens before, and a short sequence to all of them."""
    by_hand = [min(token + 0.5, 2048) for token in range(8192)]
    assert INDEXER.attended(8192) == pytest.approx(sum(by_hand) / 8192)
    assert INDEXER.attended(1024) == 512
    attention = work_of("D", replace(MODEL, indexer=replace(INDEXER, trained=False))).forward_scores
    assert attention == 2.0 * 131072 * INDEXER.attended(131072) * 128 * (512 + 64 + 512)


def test_long_sequences_take_less_and_w_only_weights() -> None:
    latent, sparse = (work_of(kind, MODEL) for kind in "+D")
    assert sparse.forward_scores < latent.forward_scores / 9
    assert sparse.wgrad - latent.wgrad == 2.0 * 131072 * INDEXER.weights(7168, 1536)
    untrained = work_of("D", replace(MODEL, indexer=replace(INDEXER, trained=False)))
    assert untrained.wgrad == latent.wgrad and untrained.backward < sparse.backward
    of_picked = work_of("D", replace(MODEL, indexer=replace(INDEXER, sparse_loss=True)))
    assert untrained.forward < of_picked.forward < sparse.forward
    costs = layer_costs(replace(MODEL, indexer=replace(INDEXER, trained=False)), H100).layers
    assert costs[1].forward_ms < costs[0].forward_ms


def test_every_tensor_parallel_rank_indexes_all_tokens() -> None:
    def of_indexer(model: Model) -> float:
        return work_of("D", model).wgrad - work_of("+", model).wgrad

    assert of_indexer(replace(MODEL, tensor_parallel=4)) == 4 * of_indexer(MODEL)
