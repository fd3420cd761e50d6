"""Attention in microbatches of packed samples, for layers without TransformerEngine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's description of packed samples.

    Attributes:
        lengths: the tokens of each sample, for code on the host, which would otherwise wait for the device.
    """

    lengths: tuple[int, ...] = ()


def packed_sequences(ends: torch.Tensor, on_device: torch.Tensor) -> PackedSequences:
    """Describe the samples of a microbatch.

    Args:
        ends: 0 and the end of every sample, int32, on the host.
        on_device: the same on the device of the model.
    """
    lengths = tuple(ends.diff().tolist())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
    )


class PackedAttention(DotProductAttention):
    """megatron-core's attention, for one packed sample after the other: a block-diagonal causal mask."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *arguments: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return the context, [tokens, heads * head size], of queries, keys and values [tokens, heads, head size]."""
        if packed_seq_params is None:
            return super().forward(query, key, value, *arguments, **options)
        assert isinstance(packed_seq_params, PackedSequences)
        parts = zip(*(tensor[:, None].split(packed_seq_params.lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([super(PackedAttention, self).forward(*own, *arguments, **options) for own in parts])[:, 0]
