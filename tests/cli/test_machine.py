"""Tests of the GPU that is assumed."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.machine import ASSUMED, Gpu
from tests.cli.test_advise import SMALL

CONFIG = "configs/gpt_6.2b.yaml"


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--schedule", "zb-h1", "--config", CONFIG],
        ["advise", "--quick", "--gpus-per-node", "4", "--", *SMALL],
        ["dry-run", "--megatron-lm", "--gpus-per-node", "4", "--", *SMALL],
    ],
    ids=lambda words: words[0],
)
def test_all_commands_assume_the_same_gpu(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Figures of one command can be compared with those of another."""
    assert main(words) == 0
    assert f"\n{ASSUMED}: " in capsys.readouterr().out
    assert Gpu().estimated == ASSUMED
