"""What ``advise`` says of the published recipes must not change unnoticed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron.zero_bubble.core.search.loops import compiled
from tests.cli.test_advise import Capture, advice, job_of
from tests.helpers.recipes import RECIPES

STORED = Path(__file__).parents[2] / "tests/golden/advice.json"
SLOW = ("256 GB200", "256 B300", "256 H100", "32 GB200")
"""How the names of recipes end whose plans take longer than some seconds."""
SEARCHED = ("DeepSeek-V3, 4 microbatches", "Kimi K2, 256 GB300", "Llama 3.1 405B, 1024 H100")
"""Recipes that are also advised with searches."""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(
            pytest.param(name, ["--quick"], marks=pytest.mark.full if any(of in name for of in SLOW) else ())
            for name in RECIPES
        ),
        *(pytest.param(name, [], marks=pytest.mark.full) for name in SEARCHED),
    ],
)
def test_recipes_are_advised_as_before(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str, more: list[str]
) -> None:
    """``UPDATE_GOLDEN=1`` rewrites the advice; then say in the commit why it is better."""
    if not more and compiled() is None:
        pytest.skip("without compiled loops the search has a smaller budget")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    flags, own = job_of(name)
    found, key = advice(capsys, flags, *own, *more), ", ".join((name, *more))
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        stored[key] = found
        STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    assert found == stored.get(key)


def test_every_stored_advice_is_asked() -> None:
    assert set(json.loads(STORED.read_text())) == {*SEARCHED, *(f"{name}, --quick" for name in RECIPES)}
