"""The cost of a sample, by which a job balances samples of different length over its replicas."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import estimate
from megatron.zero_bubble.core.costs.lengths import LengthCost
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.job.model import model_of
from megatron.zero_bubble.planning.run_options import Balance

FIXED_PART = 1 / 16
"""The fixed time of a microbatch, as that of a short sample with this part of ``--seq-length``. It stands for kernels
that are too short to fill the device; without it, no two samples would share a microbatch."""


def length_cost(balance: Balance, job: Any, vocab_size: int | None) -> LengthCost:
    """The cost of samples, from ``--zero-bubble-attention-share`` if given, else from the shapes of the model.

    Args:
        vocab_size: the padded size of the vocabulary, if it is known.
    """
    length = job.seq_length
    if balance.attention_share is not None:
        return LengthCost.of_share(balance.attention_share, length, FIXED_PART * length)
    model = model_of(job, (job.num_layers,))
    if vocab_size is not None:
        model = replace(model, vocab_size=vocab_size)
    costs, _ = estimate(model, DEVICES["a100"], Placement.linear(1))
    return LengthCost.of_passes(costs, length, FIXED_PART * length)


def replicas_of_experts(job: Any) -> int:
    """The replicas of a job that have one copy of its experts together, and so run equally many microbatches."""
    if not job.num_moe_experts:
        return 1
    tensor = job.tensor_model_parallel_size
    ranks = job.expert_model_parallel_size * (job.expert_tensor_parallel_size or tensor)
    return int(ranks // gcd(ranks, tensor))
