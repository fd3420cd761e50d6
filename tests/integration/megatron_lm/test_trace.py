"""Tests of ``--zero-bubble-trace`` and ``--zero-bubble-record-costs`` with Megatron-LM's ``pretrain_gpt.py``."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.zero_bubble import Placement
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.facts import Facts
from megatron.zero_bubble.core.formats.trace import read_trace_file
from megatron.zero_bubble.planning.job.facts import facts_of
from tests.helpers.megatron_lm import VARIABLE, Checkout, checkouts, gpt_job, pretrain_gpt, stock

CHECKOUTS = checkouts()
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]
JOB = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --log-interval 2"


def planned_facts(checkout: Checkout, num_ranks: int, flags: str) -> Facts:
    """What planning knows of a job, which Megatron-LM has not validated."""
    job = gpt_job(checkout, num_ranks, flags, None)
    return facts_of(checked_megatron_job(job.flags, num_ranks, num_ranks).args, "cpu")


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("flag", [("--zero-bubble-trace", "/proc/nope"), ("--zero-bubble-record-costs", "/proc/no/x")])
def test_unwritable_folder_ends_every_rank(checkout: Checkout, schedule: str, flag: tuple[str, str]) -> None:
    begun = time.monotonic()
    log = pretrain_gpt(checkout, 2, JOB, schedule, flag)
    assert time.monotonic() - begun < 60
    assert log.exit_codes == (1, 1), log.text[-4000:]
    refusals = [line for line in log.text.splitlines() if "cannot write to the folder /proc/no" in line]
    assert [line[:30] for line in refusals] == ["zero-bubble: cannot write to t", "zero-bubble: rank 1: cannot wr"]
    assert "Traceback" not in log.text


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_recording_does_not_change_the_job(checkout: Checkout, tmp_path: Path) -> None:
    flags = (
        *("--zero-bubble-trace", str(tmp_path), "--zero-bubble-record-costs", str(tmp_path / "costs.json")),
        "--zero-bubble-log-bubble",
    )
    log = pretrain_gpt(checkout, 2, JOB, "zb-h1", flags)
    assert log.exit_codes == (0, 0), log.text[-4000:]
    assert log.figures == stock(checkout, 2, JOB).figures
    assert f"zero-bubble: iterations until 10 recorded in {tmp_path}" in log.of("zero-bubble: ")
    bubbles = [line.partition("iteration ")[2] for line in log.of("zero-bubble: iteration ")]
    assert [line.partition(": bubble ")[0] for line in bubbles] == ["2", "4", "6", "8", "10"]
    recording = read_trace_file(tmp_path / "trace.json")
    assert list(recording.traces) == list(range(3, 11))
    for trace in recording.traces.values():
        assert trace.timeline.schedule.num_microbatches == 6
        assert all(row.receives for row in trace.ranks)
    costs = read_costs_file(tmp_path / "costs.json")
    assert costs.on(Placement.linear(2)) == (recording.costs, recording.memory)
    assert costs.tokens is not None, "how short slices may be"
    assert costs.facts == planned_facts(checkout, 2, JOB)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_all_to_alls_of_experts_are_measured(checkout: Checkout, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    job = (
        f"{JOB} --bf16 --swiglu --disable-bias-linear --num-layers 4 --global-batch-size 8 --num-experts 4 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2"
    )
    log = pretrain_gpt(checkout, 4, job, "zb-h1", ("--zero-bubble-record-costs", str(file)))
    assert log.exit_codes == (0,) * 4, log.text[-4000:]
    assert log.figures == stock(checkout, 4, job).figures
    assert len(log.of("zero-bubble: the all-to-all of experts over 2 ranks is not hidden by schedule zb-h1")) == 1
    assert read_costs_file(file).facts == planned_facts(checkout, 4, job)
    costs, _ = read_costs_file(file).on(Placement.linear(2))
    assert [stage.layers for stage in costs.experts] == [2, 2] and 0 < costs.exposed_share < 1
