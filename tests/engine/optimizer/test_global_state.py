"""Counts that travel as fp32 figures keep their value."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.engine.optimizer.global_state import joined, split


def summed(counts: list[float]) -> list[float]:
    figures = torch.tensor([split(count) for count in counts], dtype=torch.float32)
    return figures.sum(dim=0).tolist()


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=64))
def test_integer_counts_add_up_exactly(counts: list[float]) -> None:
    assert joined(summed(counts)) == sum(counts)


def test_counts_in_fp32_are_rounded_as_in_one_sum() -> None:
    counts = [2.0**24, 1.0, 1.0]  # 2**24 + 1 is not an fp32 number
    expected = torch.tensor(counts, dtype=torch.float32).sum().item()
    assert joined(summed(counts)) == expected != sum(counts)
