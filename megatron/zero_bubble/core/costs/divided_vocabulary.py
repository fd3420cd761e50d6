"""Costs of vocabulary parallelism, derived from those of the undivided embedding and output layer."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, Divided

_MEASURED: dict[Algorithm, dict[int, float]] = {
    1: {1: 1.0, 8: 0.913, 16: 0.842, 32: 0.806},
    2: {1: 1.0, 8: 0.867, 16: 0.798, 32: 0.759},
}
"""By algorithm and number of shards: the time of an undivided output layer over that of all its shards together, with
256k tokens in the vocabulary and sequences of 2048 tokens on A100s (arXiv 2411.05288, section 6.5)."""


def efficiency(algorithm: Algorithm, num_shards: int) -> float:
    """The assumed share of the undivided output layer's throughput that its shards reach.

    Between the measured numbers of shards it is linear in their logarithm; beyond the largest, it stays.
    """
    points = [(math.log2(count), share) for count, share in _MEASURED[algorithm].items()]
    at = math.log2(num_shards)
    for (low, most), (high, least) in pairwise(points):
        if at <= high:
            return most + (least - most) * (at - low) / (high - low)
    return points[-1][1]


def divide(whole: LayerCosts, num_ranks: int, divided: Divided, throughput: float | None = None) -> LayerCosts:
    """Divide the embedding and the output layer of ``whole`` over the ranks.

    F of the output layer is in S, and W in T; B is in T with algorithm 1, in S with algorithm 2. From S to T, a rank
    keeps its part of the softmax and the hidden states; only the latter where T computes the logits again.

    Args:
        throughput: the share of the undivided layer's throughput that shards reach, above 0 (default:
            ``efficiency``).
    """
    loss, embedding, algorithm, again = whole.loss, whole.embedding, divided.of_run, divided.recompute_logits
    share = 1 / (num_ranks * (efficiency(algorithm, num_ranks) if throughput is None else throughput))
    s = loss.forward_ms + (loss.backward_ms if algorithm == 2 else 0.0)
    t = loss.wgrad_ms + (loss.backward_ms if algorithm == 1 else 0.0) + (loss.forward_ms if again else 0.0)
    # An undivided output layer keeps the hidden states twice: as its input, and as that of the final norm.
    states = min((1 + whole.predictions) * whole.input_memory, loss.activation / 2)
    kept = states + (0.0 if again else (loss.activation - 2 * states) / num_ranks)
    times = VocabularyCosts.uniform(
        num_ranks,
        s * share,
        t * share,
        embedding.forward_ms / num_ranks,
        (embedding.backward_ms + embedding.wgrad_ms) / num_ranks,
    )
    # The rows of the tokens travel with the hidden states to the layers of multi-token prediction.
    travelling = 2 if whole.predictions else 1
    links = {ends: ms * travelling for ends, ms in whole.links.items()}
    divided_costs = replace(whole, comm_ms=whole.comm_ms * travelling, links=links)
    nothing = LayerFigures()
    return replace(divided_costs, embedding=nothing, loss=nothing, vocabulary=times, logits=(kept,) * num_ranks)
