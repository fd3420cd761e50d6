"""Softmax and cross entropy over a vocabulary that is divided into shards (arXiv 2411.05288, sections 3 and 4).

A shard computes its logits and their softmax as if it had the whole vocabulary, and three statistics per token. From
the statistics of all shards follow the losses, and the factor that makes a shard's softmax its part of the softmax over
the whole vocabulary. So the logits never leave their shard. Arithmetic is megatron-core's
(``tensor_parallel.vocab_parallel_cross_entropy``): logits in the dtype of the weights, everything else in float32.

Shapes: s tokens of a sequence, b sequences, h hidden, v rows of the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Tensor = torch.Tensor

MAXIMUM, TOTAL, LABEL = range(3)
"""The statistics: the largest logit, the sum of exp(logit - maximum), and the logit of the label, which is -inf in all
shards that do not have the label. Statistics are one float32 tensor, (3, s, b)."""


_FEWEST_BLOCKS, _MOST_LOGITS = 4, 2**24
"""The logits of a block of tokens are at most a quarter of all, and 64 MiB in float32."""

_HAS_OUTPUT_DTYPE = torch.version.cuda is not None and hasattr(torch.ops.aten.mm, "dtype")


class ShardRows(NamedTuple):
    """The rows of the vocabulary that a shard has.

    Attributes:
        first: number of the shard's first row in the whole vocabulary.
        num_rows: rows of the shard, with its padding.
        num_used: the rows before the padding, which only makes all shards equally large and takes part in nothing.
    """

    first: int
    num_rows: int
    num_used: int

    @classmethod
    def of(cls, shard: int, num_shards: int, vocab_size: int) -> ShardRows:
        """The rows of shard ``shard`` of ``num_shards`` equally large ones, the last of which may have padding."""
        num_rows = -(-vocab_size // num_shards)
        first = shard * num_rows
        return cls(first, num_rows, max(0, min(num_rows, vocab_size - first)))

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the ``ids`` the shard has, and the ids as rows of the shard, 0 for those of other shards."""
        owned = (ids >= self.first) & (ids < self.first + self.num_used)
        return owned, (ids - self.first).where(owned, 0)


class LocalSoftmax(NamedTuple):
    """What T needs of the S of the same microbatch and shard.

    Attributes:
        probabilities: softmax over the rows of the shard, (s, b, v) in float32.
        statistics: the statistics that belong to ``probabilities``.
        owned: whether the shard has the label, (s, b).
        labels: the labels as rows of the shard, (s, b).
    """

    probabilities: Tensor
    statistics: Tensor
    owned: Tensor
    labels: Tensor


def local_softmax(hidden: Tensor, weight: Tensor, labels: Tensor, rows: ShardRows) -> LocalSoftmax:
    """S: the softmax of a shard.

    Args:
        hidden: (s, b, h).
        weight: (v, h), of the same dtype.
        labels: (s, b), as numbers of the whole vocabulary.
    """
    logits = _product(hidden, weight.t()).float()
    if rows.num_used < rows.num_rows:
        # Not -inf: a shard of nothing but padding would have nan. The factor of its softmax is 0.
        logits[..., rows.num_used :] = torch.finfo(torch.float32).min
    owned, local = rows.find(labels)
    of_label = logits.gather(-1, local[..., None])[..., 0].masked_fill(~owned, -torch.inf)
    maximum = logits.amax(-1)
    exponentials = logits.sub_(maximum[..., None]).exp_()
    total = exponentials.sum(-1)
    statistics = torch.stack([maximum, total, of_label])
    return LocalSoftmax(exponentials.div_(total[..., None]), statistics, owned, local)


def blocks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Blocks of tokens whose logits are computed at a time: at least ``_FEWEST_BLOCKS``, of at most ``_MOST_LOGITS``
    logits if these are those of more than one token.

    Args:
        hidden: (s, b, h).
        weight: (v, h).
    """
    num_tokens, logits = len(hidden), hidden.shape[1] * len(weight)
    length = max(1, min(-(-num_tokens // _FEWEST_BLOCKS), _MOST_LOGITS // logits))
    return [slice(first, first + length) for first in range(0, num_tokens, length)]


def softmax_in_blocks(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: ShardRows, with_gradient: bool
) -> tuple[Tensor, ...]:
    """S that keeps no softmax, with the logits of one block of tokens at a time. Arguments as ``local_softmax``.

    Returns:
        the statistics, and ``with_gradient`` also the results of ``hidden_gradient_parts``.
    """
    found = []
    for block in blocks(hidden, weight):
        softmax = local_softmax(hidden[block], weight, labels[block], rows)
        found.append((softmax.statistics, *(hidden_gradient_parts(softmax, weight) if with_gradient else ())))
    statistics, *parts = zip(*found, strict=True)
    return torch.cat(statistics, dim=1), *map(torch.cat, parts)


def combined(parts: Sequence[Tensor]) -> Tensor:
    """The statistics of several shards together, (3, s, b)."""
    maxima, totals, labels = torch.stack(list(parts), dim=1)
    maximum = maxima.amax(0)
    return torch.stack([maximum, (totals * (maxima - maximum).exp()).sum(0), labels.amax(0)])


def share(own: Tensor, whole: Tensor) -> Tensor:
    """The factor that makes a shard's softmax its part of the softmax of all shards, (s, b).

    Args:
        own, whole: statistics of the shard, and of all shards; of ``whole``, only maximum and total are used.
    """
    return own[TOTAL] * (own[MAXIMUM] - whole[MAXIMUM]).exp() / whole[TOTAL]


def cross_entropy(whole: Tensor) -> Tensor:
    """The losses, (s, b), from the statistics of all shards.

    A label outside the vocabulary counts as the largest logit, as in megatron-core; its loss is masked by the job.
    """
    maximum, total, of_label = whole
    shifted = (of_label - maximum).masked_fill(of_label == -torch.inf, 0.0)
    return total.log() - shifted


def hidden_gradient_parts(softmax: LocalSoftmax, weight: Tensor) -> tuple[Tensor, Tensor]:
    """With algorithm 2: what the shard adds to the gradient of the hidden states, before the statistics are known.

    Returns:
        A, (s, b, h) in float32, and G, (s, b, h) in the dtype of ``weight``. The gradient, for losses of gradient 1, is
        the sum over all shards of ``share * A - G``.
    """
    mean = product_in_float32(softmax.probabilities.to(weight.dtype), weight)
    return mean, weight[softmax.labels].masked_fill(~softmax.owned[..., None], 0)


def logits_gradient(softmax: LocalSoftmax, whole: Tensor, gradient: Tensor) -> Tensor:
    """T: the gradient of the shard's logits, (s, b, v) in float32; overwrites ``softmax.probabilities``.

    Args:
        whole: statistics of all shards; only maximum and total are used.
        gradient: gradient of the losses, (s, b) in float32.
    """
    grad = softmax.probabilities.mul_(share(softmax.statistics, whole)[..., None])
    grad.scatter_add_(-1, softmax.labels[..., None], -softmax.owned[..., None].to(grad.dtype))
    return grad.mul_(gradient[..., None])


def product_in_float32(left: Tensor, weight: Tensor) -> Tensor:
    """The product of ``left``, (s, b, v), and ``weight``, (v, h), of the same dtype: (s, b, h) in float32.

    It is a shard's part of a sum over all shards. Rounded to 16 bits only after that sum, the sum is as near to the
    exact one as the product with the whole vocabulary. torch before 2.8 has no such product of 16-bit matrices on GPUs;
    there every part is rounded.
    """
    if left.device.type == "cpu":
        return _product(left.float(), weight.float())
    if left.dtype == torch.float32 or not _HAS_OUTPUT_DTYPE:
        return _product(left, weight).float()
    product = torch.mm(left.flatten(0, 1), weight, out_dtype=torch.float32)
    return product.view(*left.shape[:-1], -1)


def _product(left: Tensor, matrix: Tensor) -> Tensor:
    """One product of ``left``, (s, b, v), and ``matrix``, (v, h), for any strides: (s, b, h).

    For strides that do not fold into (s * b, v), torch.matmul would compute s products unless the matrix requires a
    gradient.
    """
    return torch.mm(left.flatten(0, 1), matrix).view(*left.shape[:-1], -1)


def look_up(weight: Tensor, ids: Tensor, rows: ShardRows) -> Tensor:
    """I: the rows of ``ids`` that the shard has, and zeros for the others.

    Args:
        ids: (b, s), as numbers of the whole vocabulary.

    Returns:
        (b, s, h)
    """
    owned, local = rows.find(ids)
    return weight[local].masked_fill(~owned[..., None], 0)


def rows_gradient(gradient: Tensor, ids: Tensor, rows: ShardRows) -> Tensor:
    """J: the gradient of the shard's rows, (v, h), from that of the output of ``look_up``, (b, s, h)."""
    owned, local = rows.find(ids)
    found = gradient.new_zeros(rows.num_rows, gradient.shape[-1])
    return found.index_add_(0, local.flatten(), gradient.masked_fill(~owned[..., None], 0).flatten(0, 1))
