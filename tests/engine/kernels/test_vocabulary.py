"""Compare the softmax, losses and gradients of vocabulary shards with torch's on the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble.engine.kernels import vocabulary
from megatron.zero_bubble.engine.kernels.vocabulary import ShardRows

HIDDEN, SHAPE = 8, (6, 3)


class Case:
    """Hidden states, labels and weights of a vocabulary, and what torch computes from them in float64."""

    def __init__(self, vocab_size: int, num_shards: int, seed: int = 0, label_outside: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(*SHAPE, HIDDEN, generator=generator)
        self.weight = 3 * torch.randn(vocab_size, HIDDEN, generator=generator)
        self.labels = torch.randint(vocab_size, SHAPE, generator=generator)
        self.gradient = torch.rand(SHAPE, generator=generator)
        if label_outside:
            self.labels[1, 2], self.gradient[1, 2] = -100, 0.0  # masked by the job
        self.rows = [ShardRows.of(shard, num_shards, vocab_size) for shard in range(num_shards)]
        padded = torch.zeros(num_shards * self.rows[0].num_rows, HIDDEN)
        padded[:vocab_size] = self.weight
        self.shards = padded.chunk(num_shards)
        hidden, weight = (tensor.double().requires_grad_() for tensor in (self.hidden, self.weight))
        logits = hidden @ weight.t()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), self.labels.flatten(), reduction="none", ignore_index=-100
        )
        self.losses = losses.view(SHAPE).detach()
        self.hidden_grad, self.weight_grad = torch.autograd.grad(
            (losses.view(SHAPE) * self.gradient).sum(), (hidden, weight)
        )

    def softmaxes(self) -> list[vocabulary.LocalSoftmax]:
        return [
            vocabulary.local_softmax(self.hidden, shard, self.labels, rows)
            for shard, rows in zip(self.shards, self.rows, strict=True)
        ]


CASES = {
    "even": Case(24, 3),
    "one shard": Case(24, 1),
    "padding": Case(23, 4),
    "a shard of nothing but padding": Case(9, 6),
    "a label outside": Case(24, 3, label_outside=True),
}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.double() - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_torchs(name: str) -> None:
    case = CASES[name]
    softmaxes = case.softmaxes()
    whole = vocabulary.combined([softmax.statistics for softmax in softmaxes])
    counted = case.labels >= 0
    close(vocabulary.cross_entropy(whole)[counted], case.losses[counted])
    assert vocabulary.cross_entropy(whole).isfinite().all()
    ahead = torch.zeros_like(case.hidden)
    for softmax, shard in zip(softmaxes, case.shards, strict=True):
        mean, of_label = vocabulary.hidden_gradient_parts(softmax, shard)
        ahead += mean * vocabulary.share(softmax.statistics, whole)[..., None] - of_label
    close(ahead * case.gradient[..., None], case.hidden_grad)  # algorithm 2
    grads = [vocabulary.logits_gradient(softmax, whole, case.gradient) for softmax in softmaxes]
    of_shards = [grad @ shard for grad, shard in zip(grads, case.shards, strict=True)]
    close(torch.stack(of_shards).sum(0), case.hidden_grad)  # algorithm 1
    weight_grad = torch.cat([grad.flatten(0, 1).t() @ case.hidden.flatten(0, 1) for grad in grads])
    close(weight_grad[: len(case.weight)], case.weight_grad)
    assert not weight_grad[len(case.weight) :].any()


def test_statistics_combine_in_any_grouping() -> None:
    """Tensor-parallel ranks combine theirs first."""
    parts = [softmax.statistics for softmax in Case(24, 4).softmaxes()]
    pairs = [vocabulary.combined(parts[:2]), vocabulary.combined(parts[2:])]
    torch.testing.assert_close(vocabulary.combined(pairs), vocabulary.combined(parts))


def test_large_logits_do_not_overflow() -> None:
    case = Case(24, 3)
    case.hidden *= 1e4
    whole = vocabulary.combined([softmax.statistics for softmax in case.softmaxes()])
    assert vocabulary.cross_entropy(whole).isfinite().all()


def test_nan_in_one_shard_reaches_all_losses_and_shares() -> None:
    case = Case(24, 3)
    case.shards[1][2, 0] = torch.nan
    softmaxes = case.softmaxes()
    whole = vocabulary.combined([softmax.statistics for softmax in softmaxes])
    assert vocabulary.cross_entropy(whole).isnan().all()
    assert all(vocabulary.share(softmax.statistics, whole).isnan().all() for softmax in softmaxes)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_the_embedding_and_their_gradient(name: str) -> None:
    case = CASES[name]
    ids = case.labels.t().clamp(min=0)
    found = [vocabulary.look_up(shard, ids, rows) for shard, rows in zip(case.shards, case.rows, strict=True)]
    assert torch.equal(torch.stack(found).sum(0), torch.nn.functional.embedding(ids, case.weight))
    gradient = torch.randn(*ids.shape, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(len(case.weight), HIDDEN, dtype=torch.float64)
    expected.index_add_(0, ids.flatten(), gradient.double().flatten(0, 1))
    grads = torch.cat([vocabulary.rows_gradient(gradient, ids, rows) for rows in case.rows])
    close(grads[: len(case.weight)], expected)
    assert not grads[len(case.weight) :].any()


def test_shards_are_equally_large_and_complete() -> None:
    rows = [ShardRows.of(shard, 6, 9) for shard in range(6)]
    assert {row.num_rows for row in rows} == {2} and sum(row.num_used for row in rows) == 9
    assert [row.first for row in rows] == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_softmax_in_blocks_equals_that_of_all_tokens(name: str, with_gradient: bool) -> None:
    case = CASES[name]
    for whole, shard, rows in zip(case.softmaxes(), case.shards, case.rows, strict=True):
        statistics, *parts = vocabulary.softmax_in_blocks(case.hidden, shard, case.labels, rows, with_gradient)
        torch.testing.assert_close(statistics, whole.statistics)
        expected = vocabulary.hidden_gradient_parts(whole, shard) if with_gradient else ()
        assert len(parts) == len(expected)
        for part, other in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, other)


@pytest.mark.parametrize(("num_tokens", "num_rows", "most"), [(1, 8, 1), (6, 8, 2), (100, 8, 25), (4096, 2**15, 256)])
def test_blocks_are_short_and_cover_all_tokens(num_tokens: int, num_rows: int, most: int) -> None:
    """At most a quarter of the tokens, and 2**24 logits of two sequences."""
    found = vocabulary.blocks(torch.empty(num_tokens, 2, 1), torch.empty(num_rows, 1))
    tokens = [token for block in found for token in range(num_tokens)[block]]
    assert tokens == list(range(num_tokens))
    assert max(len(range(num_tokens)[block]) for block in found) == most


def test_operands_of_any_strides_take_one_product() -> None:
    """torch.matmul would compute one product per token for these strides."""
    case = CASES["even"]
    hidden = case.hidden.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        softmax = vocabulary.local_softmax(hidden, case.shards[0], case.labels, case.rows[0])
        strided = softmax.probabilities.transpose(0, 1).contiguous().transpose(0, 1)
        product = vocabulary.product_in_float32(strided, case.shards[0])
    names = [event.name for event in profile.events()]
    assert (names.count("aten::mm"), names.count("aten::bmm")) == (2, 0)
    own = vocabulary.local_softmax(case.hidden, case.shards[0], case.labels, case.rows[0])
    assert torch.equal(softmax.probabilities, own.probabilities)
    assert torch.equal(product, vocabulary.product_in_float32(own.probabilities, case.shards[0]))
