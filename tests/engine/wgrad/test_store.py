"""Tests of the store of deferred weight gradients: order, grouping and batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.wgrad.gradients import Product
from megatron.zero_bubble.engine.wgrad.store import WgradStore


@dataclass
class Use:
    """One use of a weight; logs each operation on its deferred gradient."""

    weight: torch.nn.Parameter
    name: str
    log: list[str]
    gathers: bool = False
    num_elements: int = 1

    def prefetch(self) -> None:
        self.log.append(f"fetch {self.name}")

    def run(self) -> tuple[Product, ...]:
        self.log.append(f"run {self.name}")
        return (Product(self.weight, None, self.name, None),)  # type: ignore[arg-type]

    def tensors(self) -> Iterator[torch.Tensor]:
        return iter(())

    operands = tensors

    def copy(self, written: torch.Tensor) -> None:
        raise AssertionError("nothing is written")


@dataclass
class Log:
    """An accumulator that logs its uses; products of one use are joined with a plus."""

    lines: list[str]

    def add(self, uses: Sequence[Sequence[Product]], ready: bool) -> None:
        names = " ".join("+".join(str(product.x) for product in use) for use in uses)
        self.lines.append(f"add {names}{' ready' if ready else ''}")

    def join(self) -> None:
        self.lines.append("join")


WEIGHTS = {name: torch.nn.Parameter(torch.zeros(1)) for name in "abc"}


def filled(microbatches: list[str], log: list[str]) -> tuple[WgradStore, list[Pass]]:
    """Fill a store: the B of microbatch i defers one gradient per weight named in ``microbatches[i]``."""
    store = WgradStore(Log(log))
    for i, names in enumerate(microbatches):
        with store.defer(Pass(0, Kind.B, i)):
            for name in names:
                store.put(Use(WEIGHTS[name], f"{i}{name}", log))
    return store, [Pass(0, Kind.W, i) for i in range(len(microbatches))]


def test_each_gradient_is_prefetched_while_the_previous_runs() -> None:
    log: list[str] = []
    store, (work,) = filled(["abc"], log)
    store.run(work)
    assert log == ["fetch 0a", "fetch 0b", "run 0a", "fetch 0c", "run 0b", "run 0c", "add 0a 0b 0c"] and not len(store)


def test_group_orders_weights_as_the_last_microbatch() -> None:
    log: list[str] = []
    store, works = filled(["abc", "abc", "bca"], log)
    store.group(works)
    portions = []
    for work in works:
        store.run(work)
        portions.append([line for line in log if line.startswith("run")])
        log.clear()
    assert portions == [
        ["run 0b", "run 1b", "run 2b"],
        ["run 0c", "run 1c", "run 2c"],
        ["run 0a", "run 1a", "run 2a"],
    ]


def test_gathered_inputs_are_accumulated_at_once() -> None:
    log: list[str] = []
    store = WgradStore(Log(log))
    with store.defer(Pass(0, Kind.B, 0)):
        for name, gathers in (("a", True), ("b", False), ("c", True), ("a", False)):
            store.put(Use(WEIGHTS[name], name, log, gathers))
    store.run(Pass(0, Kind.W, 0))
    ran = [line for line in log if not line.startswith("fetch")]
    assert ran == ["run a", "run b", "run c", "add b c", "run a", "add a+a"]


def test_uses_of_a_weight_within_a_microbatch_are_added_together() -> None:
    log: list[str] = []
    store, works = filled(["aba", "aba"], log)
    store.group(works)
    for work in works:
        store.run(work)
    assert [line for line in log if line.startswith("add")] == ["add 0a+0a 1a+1a", "add 0b 1b"]


@given(microbatches=st.lists(st.text("abc", max_size=5), min_size=1, max_size=5))
def test_grouping_keeps_the_order_of_every_weight(microbatches: list[str]) -> None:
    log: list[str] = []
    store, works = filled(microbatches, log)
    store.group(works)
    for work in works:
        store.run(work)
    ran = [line.removeprefix("run ") for line in log if line.startswith("run")]
    assert sorted(ran) == sorted(f"{i}{name}" for i, names in enumerate(microbatches) for name in names)
    for name in "abc":
        own = [use for use in ran if use.endswith(name)]
        assert own == sorted(own), "uses must be in microbatch order"
        places = [i for i, use in enumerate(ran) if use.endswith(name)]
        assert not places or places[-1] - places[0] == len(places) - 1, "uses of a weight must be consecutive"
    assert not len(store)


def test_late_gradients_are_batched_and_others_run_one_by_one() -> None:
    log: list[str] = []

    @contextmanager
    def late() -> Iterator[None]:
        log.append("late")
        yield
        log.append("in time")

    store, works = filled(["ab", "ab", "ab"], log)
    store.group(works)
    for work in works:
        store.run(work, lambda origin: origin.microbatch != 2, late)
    assert [line for line in log if not line.startswith("fetch")] == [
        *("late", "run 0a", "run 1a", "add 0a 1a", "in time", "run 2a", "add 2a ready"),
        *("late", "run 0b", "add 0b", "in time", "late", "run 1b", "add 1b", "in time", "run 2b", "add 2b ready"),
    ]


def test_gradient_outside_a_split_backward_is_rejected() -> None:
    with pytest.raises(AssertionError, match="outside a split B"):
        WgradStore(Log([])).put(Use(WEIGHTS["a"], "a", []))


def test_fused_backward_defers_nothing() -> None:
    store = WgradStore(Log([]))
    with store.defer(Pass(0, Kind.BW, 0), split=False):
        assert not store.deferring and store.current is None
