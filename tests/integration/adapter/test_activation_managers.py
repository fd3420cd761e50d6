"""Managers of activations follow a schedule: the paged stash of experts records its order, again when it changes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.integration.adapter.activation_managers import ActivationManagers
from tests.helpers import paged_stash
from tests.helpers.parity import Layout, Outcome, assert_same_bits, train
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_parity import EXPERTS, UNTIED


def train_with_pages(rank: int, flags: str, schedules: Sequence[str | None]) -> list[Any]:
    """Train under the schedules with a stash; return the outcomes, and how often an order was recorded in each."""
    from pretrain import model

    build_config, records = model.build_config, []

    def with_stash(*args: Any) -> Any:
        config = build_config(*args)
        config.moe_paged_stash = True
        return config

    outcomes: list[Outcome] = []
    model.build_config = with_stash
    try:
        for schedule in schedules:
            with paged_stash.installed() as manager:
                outcomes += train(rank, flags, [schedule])
                records.append((manager.get_instance().status, len(manager.get_instance().order)))
    finally:
        model.build_config = build_config
    return [outcomes, records]


BATCHES = ["", "--rampup-batch-size 2 4 4"]


@pytest.mark.parametrize("batches", some(BATCHES, BATCHES[1]), ids=["one order", "orders that change"])
def test_same_bits_as_stock_without_a_stash(ranks: RankPool, batches: str) -> None:
    flags = Layout(2, num_layers=4).flags(5, f"{EXPERTS} {UNTIED} {batches}")
    schedules = ["1f1b", "zb-h1"]
    stock = ranks.run(2, train, flags, [None], timeout=120)
    stashed = ranks.run(2, train_with_pages, flags, schedules, timeout=120)
    assert_same_bits(
        [[*before, *outcomes] for before, (outcomes, _) in zip(stock, stashed, strict=True)], [None, *schedules]
    )
    # Of two layers, a forward and a backward for each of the last iteration's five microbatches.
    assert all(records == [("captured", 2 * 2 * 5)] * 2 for _, records in stashed)


def test_a_changed_schedule_is_recorded_again_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(paged_stash.NAME)
    vars(module).update(
        PagedStashManager=paged_stash.PagedStashManager, paged_stash_reset=paged_stash.paged_stash_reset
    )
    monkeypatch.setitem(sys.modules, paged_stash.NAME, module)
    monkeypatch.setattr(paged_stash.PagedStashManager, "STASH_MGR", None)
    said: list[str] = []
    part, config = ActivationManagers(said.append), SimpleNamespace(moe_paged_stash=True)
    schedules = [build("zb-h1", num_ranks=2, num_microbatches=number) for number in (2, 3)]

    def run(schedule: Any, forward_only: bool = False) -> tuple[str, bool]:
        call, prepared = SimpleNamespace(step=SimpleNamespace(config=config)), SimpleNamespace(schedule=schedule)
        with part.iteration(SimpleNamespace(call=call, prepared=prepared, forward_only=forward_only)):  # type: ignore[arg-type]
            manager = paged_stash.PagedStashManager.get_instance()
            return manager.status, manager.enabled

    assert [run(schedules[0]) for _ in range(3)] == [("capture", True), ("captured", True), ("captured", True)]
    assert run(schedules[1], forward_only=True) == ("captured", False)
    assert run(replace(schedules[0])) == ("captured", True) and not said
    manager = paged_stash.PagedStashManager.get_instance()
    assert run(schedules[1]) == ("capture", True)
    assert manager is paged_stash.PagedStashManager.get_instance() and len(said) == 1
    config.moe_paged_stash = False  # while an iteration whose experts overflow is repeated
    assert run(schedules[0]) == ("capture", True) and len(said) == 1


@pytest.mark.parametrize("version", ["0.16", "0.19"])
def test_an_iteration_of_the_offloading_ends_as_under_stock(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import schedules

    ended: list[Any] = []
    if version == "0.19":
        monkeypatch.setattr(schedules, "_reset_activation_offload", ended.append, raising=False)
    else:
        monkeypatch.setattr(
            schedules, "off_interface", SimpleNamespace(reset=lambda: ended.append("groups")), raising=False
        )
    part, config = ActivationManagers(None), SimpleNamespace(fine_grained_activation_offloading=True)
    for forward_only in (False, True):
        call = SimpleNamespace(step=SimpleNamespace(config=config), groups="groups")
        with part.iteration(SimpleNamespace(call=call, forward_only=forward_only)):  # type: ignore[arg-type]
            assert len(ended) == forward_only
    assert ended == ["groups"] * (2 if version == "0.19" else 1)
    config.fine_grained_activation_offloading = False
    with part.iteration(SimpleNamespace(call=call, forward_only=False)):  # type: ignore[arg-type]
        pass
    assert len(ended) <= 2
