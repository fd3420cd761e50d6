"""The plans stored for the shipped configurations must equal the output of the commands stored with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.search.loops import compiled
from tests.helpers.rows import some

ROOT = Path(__file__).parents[2]
PLANS = sorted((ROOT / "configs/plans").glob("*.txt"))


def test_every_configuration_has_a_stored_plan() -> None:
    configs = {path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"gpt_tiny"}
    assert {path.stem for path in PLANS} == configs


@pytest.mark.skipif(compiled() is None, reason="without compiled loops the search has a smaller budget")
@pytest.mark.parametrize("file", some(PLANS, PLANS[0], PLANS[-1]), ids=lambda path: path.stem)
def test_stored_plan_equals_its_commands_output(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``UPDATE_GOLDEN=1`` rewrites the stored plan."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    first, stored = file.read_text().split("\n", 1)
    prompt, command, *arguments = first.split()
    assert (prompt, command) == ("$", "zero-bubble")
    assert f"configs/{file.stem}.yaml" in arguments
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(f"{first}\n{printed}")
    else:
        assert printed == stored
