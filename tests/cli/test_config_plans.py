"""What we expect of the configurations that we ship is stored beside them, with the command that prints it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.search.loops import compiled

ROOT = Path(__file__).parents[2]
PLANS = sorted((ROOT / "configs/plans").glob("*.txt"))


def test_every_configuration_has_its_plan() -> None:
    configs = {path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"gpt_tiny"}
    assert {path.stem for path in PLANS} == configs


@pytest.mark.skipif(compiled() is None, reason="without its C++ part the search is on a smaller budget")
@pytest.mark.parametrize("file", PLANS, ids=lambda path: path.stem)
def test_a_stored_plan_is_what_its_command_prints(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``UPDATE_GOLDEN=1`` writes it anew."""
    monkeypatch.chdir(ROOT)
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
