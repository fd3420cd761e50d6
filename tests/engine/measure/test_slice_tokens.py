"""Tests of what slices take, with products whose times are set by the test."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.zero_bubble.engine.measure.slice_tokens import (
    fixed_share,
    gather_least_tokens,
    gather_overhead,
    largest_linear,
    least_tokens,
    plain_layer,
)
from megatron.zero_bubble.engine.platforms.cpu import CpuPlatform
from tests.helpers.ranks import RankPool


class Clock(CpuPlatform):
    """A clock on which a product takes ``start_ms`` and 1 ms per token, and the first of each length much longer."""

    def __init__(self, start_ms: float, patch: pytest.MonkeyPatch) -> None:
        self.now_ms, self._start_ms, self.lengths = 0.0, start_ms, list[int]()
        self._product = torch.mm
        patch.setattr(torch, "mm", self._timed)

    def mark(self) -> float:
        return self.now_ms / 1e3

    def _timed(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self._product(x, weight, out=out)
        is_first = len(x) not in self.lengths
        self.lengths.append(len(x))
        self.now_ms += self._start_ms + len(x) + 1e6 * is_first


def test_time_per_token_may_exceed_that_of_the_sequence_by_a_tenth() -> None:
    def least(start: float) -> int:
        return least_tokens(lambda tokens: start + tokens, 64)

    # 32 tokens with a start of s take (32 + s) / 32 each; 1.1 times (64 + s) / 64 is more if s is below 7.1.
    assert [least(0), least(7), least(7.2)] == [1, 32, 64]
    assert least_tokens(float, 1000) == 1
    assert least_tokens(float, 1) == 1


def test_lengths_are_tried_until_the_first_that_takes_too_long() -> None:
    """A short product that happens to be fast does not make those between it and the sequence fast."""
    times = {800: 800.0, 400: 401.0, 200: 300.0, 100: 1.0}
    assert least_tokens(times.__getitem__, 800) == 400


def of_rank(rank: int) -> tuple[int | None, list[int], bool]:
    """Measure sequences of 64 tokens in microbatches of 2; products of rank 1 take longer to start."""
    group = dist.group.WORLD
    assert group is not None
    chunks = [torch.nn.Linear(3, 5)] if rank else [torch.nn.Linear(4, 2), torch.nn.LayerNorm(9)]
    before = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock((1.0, 10.0)[rank], patch)
        least = gather_least_tokens(clock, chunks, 64, 2, group)
    return least, clock.lengths, torch.equal(before, torch.get_rng_state())


def test_the_largest_of_the_ranks_counts(ranks: RankPool) -> None:
    (first, of_first, kept), (second, of_second, _) = ranks.run(2, of_rank)
    assert first == second == 32
    # 8 tokens of rank 0 take (16 + 1) / 8 each, at most 1.1 times (128 + 1) / 64; 4 tokens take more.
    assert sorted(set(of_first)) == [4 * 2, 8 * 2, 16 * 2, 32 * 2, 64 * 2]
    assert sorted(set(of_second)) == [16 * 2, 32 * 2, 64 * 2]
    assert kept, "the random state of the job is unchanged"


def with_too_little_memory(rank: int) -> int | None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    assert dist.group.WORLD is not None
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(torch, "mm", full)
        return gather_least_tokens(CpuPlatform(), [torch.nn.Linear(4, 2)], 64, 2, dist.group.WORLD)


def test_a_rank_with_too_little_memory_does_not_fail_the_run(ranks: RankPool) -> None:
    assert ranks.run(2, with_too_little_memory) == [None, None]


def without_linears(rank: int) -> int | None:
    assert dist.group.WORLD is not None
    return gather_least_tokens(CpuPlatform(), [torch.nn.LayerNorm(4)], 64, 2, dist.group.WORLD)


def test_a_rank_without_linears_needs_no_minimum(ranks: RankPool) -> None:
    assert ranks.run(1, without_linears) == [1]


def test_largest_linear_is_not_an_embedding() -> None:
    small, large = torch.nn.Linear(3, 4), torch.nn.Linear(5, 6)
    chunks = [
        torch.nn.Sequential(torch.nn.Embedding(100, 8), small),
        torch.nn.Sequential(large, torch.nn.LayerNorm(99)),
    ]
    assert largest_linear(chunks) is large.weight
    assert largest_linear([torch.nn.Embedding(100, 8)]) is None


def test_the_fixed_share_is_what_no_tokens_would_take() -> None:
    tokens = [64, 32, 16, 8]
    assert fixed_share(tokens, [16.0 + count for count in tokens]) == pytest.approx(0.2)
    assert fixed_share(tokens, [float(count) for count in tokens]) == pytest.approx(0.0, abs=1e-12)
    assert fixed_share(tokens, [count - 4.0 for count in tokens]) == 0.0, "longer sequences may be less efficient"
    attention = [4.0 + count + count**2 / 64 for count in tokens]
    assert fixed_share(tokens, attention) == pytest.approx(4 / 132), "attention takes the square"
    saturated = [max(16.0, float(count)) for count in tokens]
    assert 0.2 < fixed_share(tokens, saturated) <= 0.25, "short slices do not fill the device"
    sublinear = [float(count) ** 0.5 for count in tokens]
    assert 0.1 < fixed_share(tokens, sublinear) < 0.5
    assert fixed_share([1], [3.0]) == 0.0


def overhead_of(rank: int) -> tuple[float, float, bool, bool]:
    """What is measured with layers, and with one on rank 0 only; whether the random and the training state are kept."""
    group = dist.group.WORLD
    assert group is not None
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    try:
        layer, clock, now = small_layer(), CpuPlatform(), [0.0]
        before, original = torch.get_rng_state(), TransformerLayer.forward

        def forward(self: TransformerLayer, hidden: torch.Tensor, **others: object) -> object:
            now[0] += (16.0 if rank else 4.0) + len(hidden)
            return original(self, hidden, **others)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TransformerLayer, "forward", forward)
            patch.setattr(clock, "mark", lambda: now[0] / 1e3)
            both = gather_overhead(clock, [layer], 64, 2, group)
            one = gather_overhead(clock, [torch.nn.Linear(2, 3) if rank else layer], 64, 2, group)
        kept = torch.equal(before, torch.get_rng_state())
        return both, one, kept, all(module.training for module in layer.modules())
    finally:
        parallel_state.destroy_model_parallel()


def small_layer() -> TransformerLayer:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    return TransformerLayer(config, get_gpt_layer_local_spec().submodules)


def test_the_overhead_of_a_pass_is_that_of_a_layer(ranks: RankPool) -> None:
    (both, one, *kept), (other, *_) = ranks.run(2, overhead_of)
    assert (
        both == other == pytest.approx((4 / 68 + 16 / 80) / 2) and one == pytest.approx(4 / 68) and kept == [True, True]
    )
    assert plain_layer([torch.nn.Linear(2, 2)]) is None


def which_layers_run(rank: int) -> list[bool]:
    """Whether a layer would be run: as it is, with a hook, without the memory of a weight, and divided."""
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    try:
        layers = [small_layer() for _ in range(4)]
        layers[1].mlp.linear_fc2.register_forward_pre_hook(lambda module, inputs: None)
        layers[2].self_attention.linear_qkv.weight.untyped_storage().resize_(0)
        layers[3].config.tensor_model_parallel_size = 2
        return [plain_layer([layer]) is layer for layer in layers]
    finally:
        parallel_state.destroy_model_parallel()


def test_layers_with_hooks_or_divided_weights_are_not_run(ranks: RankPool) -> None:
    """Hooks gather weights that the optimizer has divided; units keep only a shard of theirs, tensor ranks a part."""
    assert ranks.run(1, which_layers_run) == [[True, False, False, False]]
