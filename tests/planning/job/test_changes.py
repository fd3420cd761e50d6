"""Tests of the changes of a job: what is asked of the planner for it."""

from __future__ import annotations

from megatron.zero_bubble.cli.advise import defaults
from megatron.zero_bubble.cli.job_as_is import JobAsIs, read_job
from megatron.zero_bubble.planning.advice import Adviser
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.change import Change
from megatron.zero_bubble.planning.job.changes import JobChanges
from tests.cli.test_advise_experts import EXPERTS

PAIRS = "interleaved-1f1b x2 with pairs"
GPU = 2.0**36
"""Bytes that a plan may take."""


def job_with_experts(network_bandwidth: float, *flags: str) -> JobAsIs:
    """One on nodes of one GPU each."""
    options = defaults()
    options.nodes, options.gpus_per_node, options.network_bandwidth = 8, 1, network_bandwidth
    return read_job(options, [*EXPERTS, *flags])


def change_of(job: JobAsIs, name: str) -> Change:
    changes = JobChanges(job.today.timeline.schedule.placement, job.costs, GPU, 1.0, setup=job.parsed.setup)
    (found,) = (each for each in changes.changes() if each.name == name)
    return found


def test_layers_are_divided_by_cost_for_pairs_too() -> None:
    """The last rank has the loss: with fewer layers there, pairs take less time, in a job that accepts the layout."""
    job = job_with_experts(50.0)
    evenly, by_cost = (change_of(job, name) for name in (PAIRS, f"{PAIRS}, layout"))
    before, after = (answer(each.question) for each in (evenly, by_cost))
    assert after.timeline.makespan_ms < 0.95 * before.timeline.makespan_ms
    setup = by_cost.of_plan(by_cost.setup, after)
    assert setup.pairs and setup.layout is not None and by_cost.searches
    assert job.parsed.refused(setup, by_cost.adds, by_cost.drops) is None
    placement = job.parsed.changed(setup, by_cost.adds, by_cost.drops).args.placement
    assert placement == after.schedule.placement


def test_no_plan_with_pairs_is_shorter_than_its_bound() -> None:
    """With many microbatches, all-to-alls that run beneath computation are not added to it."""
    job = job_with_experts(20.0, "--global-batch-size", "128", "--vocab-size", "1024")
    adviser = Adviser(job.today, "makespan", None, lambda *_: None, 0.02)
    found = answer(change_of(job, PAIRS).question).timeline.makespan_ms
    passes, _ = job.costs.on(job.today.timeline.schedule.placement)
    one_by_one = sum((*passes.forward_ms, *passes.backward_ms, *passes.wgrad_ms)) / 4 * job.costs.num_microbatches
    assert 0 < adviser._least(change_of(job, f"{PAIRS}, layout")) <= found < one_by_one
