"""What the tests of the command line have in common."""

import pytest


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands print no lines of progress, however slow the machine is."""
    monkeypatch.setattr("megatron.zero_bubble.cli.progress._QUIET_S", 3600.0)
