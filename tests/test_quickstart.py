"""Tests of the device that the quickstart trains on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import quickstart

from megatron.zero_bubble.engine import platforms


@pytest.mark.parametrize(("name", "num_gpus", "on_cpu"), [("cpu", 0, False), ("cuda", 1, True), ("cuda", 2, False)])
def test_too_few_gpus_are_not_shared(
    name: str, num_gpus: int, on_cpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    platform = SimpleNamespace(name=name, device_count=lambda: num_gpus)
    monkeypatch.setattr(platforms, "select", lambda _: platform)
    assert quickstart._device() == (["--zero-bubble-device", "cpu"] if on_cpu else [])
    assert ("needs 2 GPUs; found 1" in capsys.readouterr().out) is on_cpu
