"""Runs whose dropout masks depend on measured times say so once, on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.integration.adapter.dropout import DropoutNotice


def call(hidden: float, attention: float, num_chunks: int, forward_only: bool = False) -> Any:
    config = SimpleNamespace(hidden_dropout=hidden, attention_dropout=attention)
    return SimpleNamespace(step=SimpleNamespace(config=config, forward_only=forward_only), chunks=[None] * num_chunks)


@pytest.mark.parametrize(
    ("hidden", "attention", "num_chunks", "says"),
    [(0.1, 0.0, 2, True), (0.0, 0.1, 4, True), (0.1, 0.1, 1, False), (0.0, 0.0, 2, False)],
)
def test_a_run_that_cannot_be_repeated_says_so_once(
    hidden: float, attention: float, num_chunks: int, says: bool
) -> None:
    lines: list[str] = []
    notice = DropoutNotice(lines.append)
    notice.begin(call(hidden, attention, num_chunks, forward_only=True))
    assert not lines, "an evaluation drops nothing"
    for _ in range(2):
        notice.begin(call(hidden, attention, num_chunks))
    assert len(lines) == says
    DropoutNotice(None).begin(call(hidden, attention, num_chunks))
