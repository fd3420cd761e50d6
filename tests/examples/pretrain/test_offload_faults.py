"""Faults of offloading: a sentence on every rank, no rank that waits for ever, and no result."""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import Setup, run_training
from tests.helpers.parity import BASE_FLAGS, Layout
from tests.helpers.plans import plan_from_text
from tests.integration.adapter.test_offload import LARGE

pytestmark = pytest.mark.timeout(300)
LIMIT_S = 60.0


def fill_the_host(rank: int) -> None:
    """A limit of the size of files stands for a full host: both refuse the pages before anything is written."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fail_a_copy(kind: str, rank: int) -> None:
    """Make the fifth copy of ``kind`` on rank 1 read memory of another size."""
    if rank != 1:
        return
    from megatron.zero_bubble.engine.runtime import offload

    copy, calls = offload._copy, []

    def failing(op: Any, pairs: Any) -> None:
        own = type(op).__name__ == kind  # the other kind is copied by another thread, at any time
        calls.extend([op] * own)
        copy(op, [(pairs[0][0], pairs[0][1][1:]), *pairs[1:]] if own and len(calls) == 5 else pairs)

    offload._copy = failing  # type: ignore[assignment]


def fetch_too_late(rank: int) -> None:
    """Move every Fetch and Reclaim behind its backward, by the text of the plan."""
    from megatron.zero_bubble.core.ir import Plan
    from megatron.zero_bubble.integration.adapter import offloading

    place = offloading.offload

    def late(plan: Plan, moves: Any) -> Plan:
        rows = []
        for row in place(plan, moves).to_text():
            late = [op for op in row if op[-1] not in "v_"]
            for op in reversed(row):
                if op[-1] in "v_":
                    late.insert(late.index(op[:-1].replace("F", "B")) + 1, op)
            rows.append(late)
        return replace(plan, ops=plan_from_text(plan.schedule, rows).ops)

    offloading.offload = late


EXCEEDED = "must fit in --zero-bubble-host-memory, 614400 bytes per rank; this rank has"
ESTIMATED = "must fit in --zero-bubble-host-memory, 100KiB per rank; zb-v needs an estimated 512 KiB on pipeline rank 0"
FAULTS: dict[str, tuple[Setup | None, str, str, str]] = {
    "limit, before the run": (None, "--zero-bubble-host-memory 100KiB", ESTIMATED, ""),
    "limit": (None, "--zero-bubble-host-memory 600KiB", EXCEEDED, f"{EXCEEDED}|stopped because rank 0"),
    "host": (
        fill_the_host,
        "",
        "stopped because rank 1",
        "activations in host memory need .* more bytes on this machine, got File too large",
    ),
    "copy out": (partial(fail_a_copy, "Evict"), "", "stopped because rank 1", "F.*\\^, a copy between .* failed"),
    "copy back": (partial(fail_a_copy, "Fetch"), "", "stopped because rank 1", "F.*v, a copy between .* failed"),
    "late": (fetch_too_late, "", "plan for 'zb-v' refused: .*:saved is used by .* but is not there", ""),
}
"""What happens, flags, and what ranks 0 and 1 say: nothing on rank 1 if rank 0 says the same."""


@pytest.mark.parametrize("name", FAULTS)
def test_fault_ends_the_run_with_a_sentence(tmp_path: Path, name: str) -> None:
    setup, more, *sentences = FAULTS[name]
    flags = f"{BASE_FLAGS} {Layout(2, num_layers=4).flags(4, LARGE)} --zero-bubble-schedule zb-v {more}"
    metrics = tmp_path / "metrics.jsonl"
    flags += f" --zero-bubble-offload all --log-interval 1 --metrics-file {metrics}"
    ended = run_training(2, flags.split(), tmp_path, setup)
    for rank, sentence in zip(ended, sentences, strict=True):
        assert rank.exit_code, "the rank has ended as if nothing had happened"
        assert re.search(sentence, rank.output), rank.output
        assert "Traceback" not in rank.output or name.startswith("copy"), rank.output
        assert rank.ended_s < LIMIT_S
    assert not metrics.exists() or '"train"' not in metrics.read_text(), "no iteration was complete"
