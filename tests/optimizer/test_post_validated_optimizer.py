"""The post-validated optimizer in a loop that is not ours: what it answers, what it shows, what a scheduler may do.

Its own loop is in test_post_validation.py.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPool
from tests.helpers.steps import SPIKE, Job, take_steps

SPIKES = {6: 1, 13: 1, 20: 0}
"""Far enough apart for steps to be taken ahead. Rank 0 repeats its step for a spike of rank 1, which waits."""

STEPS = 26
KINDS = {"fp32": {}, "bf16": {"bf16": True}, "distributed": {"bf16": True, "use_distributed_optimizer": True}}


def both(rank: int, pipeline: int, empty: list[int], options: dict[str, Any]) -> tuple[Any, Any, Counter[str]]:
    plain = take_steps(Job(rank, False, pipeline, empty=empty, **options), SPIKES, STEPS)
    job = Job(rank, True, pipeline, empty=empty, **options)
    return plain, take_steps(job, SPIKES, STEPS), job.optimizer.counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_need_not_wait_for_the_validation(ranks: RankPool, kind: str) -> None:
    """Repeated and late steps use the learning rate and weight decay of their time, and leave the new ones in place."""
    results = ranks.run(2, both, 2, [], KINDS[kind])
    for plain, ahead, _ in results:
        assert ahead == plain
    first, last = (counts for *_, counts in results)
    assert first["repeated"] == 2 and last["waited"] == 3, (first, last)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_may_have_no_parameters(ranks: RankPool, kind: str) -> None:
    results = ranks.run(3, both, 3, [1], KINDS[kind] | {"log_num_zeros_in_grad": True})
    for plain, ahead, counts in results:
        assert ahead == plain
        assert counts["ahead"] > 5, counts


def inverse_beside_exact(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Counter[str]]:
    jobs = []
    for rollback in ("exact", "inverse"):
        jobs.append(Job(rank, True, 2, rollback))
        take_steps(jobs[-1], {6: 1}, 7)
    return jobs[0].weights(), jobs[1].weights(), jobs[1].optimizer.counts


def test_inverse_uses_the_learning_rate_of_the_step(ranks: RankPool) -> None:
    """The scheduler has set another one by then."""
    exact, inverse, counts = ranks.run(2, inverse_beside_exact)[0]
    assert counts["repeated"] == 1, counts
    for expected, found in zip(exact, inverse, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def answers(rank: int, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Every third step is ahead; what the others answer, and what all led to."""
    seen: tuple[list[Any], list[Any]] = ([], [])
    for ahead, found in zip((False, True), seen, strict=True):
        job = Job(rank, ahead, 2, log_num_zeros_in_grad=True, **options)
        for step in range(12):
            job.gradients(step, SPIKE if step in (7, 9) and rank == 1 else 1.0)
            if ahead and step % 3 == 2:
                job.optimizer.step_ahead()
                job.optimizer.settle()
                (outcome,) = job.optimizer.take_outcomes()
                answer: Any = (outcome.updated, outcome.grad_norm, outcome.num_zeros)
            else:
                answer = job.optimizer.step()
            found.append((answer, job.contents(), job.optimizer.get_loss_scale().item()))
            if ahead:
                assert not job.optimizer.is_pending and not job.optimizer.take_outcomes()
    return seen


@pytest.mark.parametrize("options", [{}, {"fp16": True, "initial_loss_scale": 1024.0}], ids=["fp32", "fp16"])
def test_a_step_answers_what_the_optimizer_answers(ranks: RankPool, options: dict[str, Any]) -> None:
    """Three values, also of a step that is clipped or skipped, after steps taken ahead too."""
    for plain, wrapped in ranks.run(2, answers, options):
        assert wrapped == plain
        assert {answer[0] for answer, *_ in plain} == ({True, False} if options else {True})


def pending(rank: int, **options: Any) -> Job:
    """With a step ahead on rank 0 that will be repeated."""
    job = Job(rank, True, 2, **options)
    take_steps(job, {}, 6)
    job.gradients(6, SPIKE if rank == 1 else 1.0)
    job.optimizer.step_ahead()
    assert job.optimizer.is_pending
    return job


def look_at_everything(rank: int) -> tuple[set[str], set[str]]:
    """The names of the optimizer that are open while a step is pending, and those that are refused."""
    from megatron.zero_bubble.errors import UserError
    from megatron.zero_bubble.optimizer.surface import SETTLES_FIRST

    job = pending(rank, bf16=True)
    own = {name for name in dir(type(job.optimizer)) if name not in ("state", "param_groups")}
    opened, refused = set(), set()
    for name in set(dir(job.plain)) - own - SETTLES_FIRST:
        try:
            value = getattr(job.optimizer, name)
            if callable(value):
                value()
            opened.add(name)
        except UserError as error:
            rule, remedy = str(error).split("; ")
            assert rule.startswith(f"optimizer.{name} cannot be used while a step is pending"), rule
            assert remedy == "call PostValidatedOptimizer.settle() on all ranks first"
            refused.add(name)
        except TypeError:  # without its arguments, but it was called
            opened.add(name)
    assert job.optimizer.is_pending
    job.optimizer.settle()
    return opened, refused


def test_what_may_be_seen_of_a_pending_step_is_a_closed_list(ranks: RankPool) -> None:
    from megatron.zero_bubble.optimizer.surface import ANY_TIME

    for opened, refused in ranks.run(2, look_at_everything):
        assert opened == ANY_TIME | {"param_groups"}
        assert {"state_dict", "get_parameters", "state", "chained_optimizers", "optimizer", "get_grad_norm"} <= refused


def save_and_look(rank: int) -> None:
    """Whatever is read of the optimizer is what the synchronous optimizer has."""
    from megatron.zero_bubble.errors import UserError
    from megatron.zero_bubble.optimizer.surface import SETTLES_FIRST

    job = Job(rank, False, 2, bf16=True)
    expected = take_steps(job, SPIKES, 7)[-1]
    names = sorted(name for name in SETTLES_FIRST if hasattr(job.plain, name))
    assert {"sharded_state_dict", "load_state_dict", "save_parameter_state", "reload_model_params"} <= set(names)
    for name in names:
        job = pending(rank, bf16=True)
        job.scheduler.step(1)
        setattr(job.plain, name, job.contents)  # stands where the optimizer would read or write what it holds
        assert getattr(job.optimizer, name)() == expected, name
        assert not job.optimizer.is_pending
    job = pending(rank, bf16=True)
    save = job.optimizer.state_dict
    for look in (save, lambda: job.optimizer.param_groups[0]["params"]):
        try:
            look()
        except UserError:
            continue
        raise AssertionError("the step is pending, and may still be undone")
    job.scheduler.step(1)
    assert "params" not in dict(job.optimizer.param_groups[0])
    job.optimizer.settle()
    assert job.contents() == expected
    assert save().keys() == job.plain.state_dict().keys()
    assert job.optimizer.param_groups[0]["params"] is job.plain.param_groups[0]["params"]


def save_beside_a_stub(rank: int) -> bool:
    """Whether a step is still pending after what Megatron does on every rank at a checkpoint; rank 1 has a stub."""
    job = pending(rank)
    if rank == 1:
        job.plain.is_stub_optimizer = True
    else:
        job.plain.save_parameter_state = job.contents
    if not job.optimizer.is_stub_optimizer:
        job.optimizer.save_parameter_state()
    return job.optimizer.is_pending


def test_a_stub_settles_with_the_others(ranks: RankPool) -> None:
    assert ranks.run(2, save_beside_a_stub) == [False, False]


def test_no_unvalidated_step_is_saved(ranks: RankPool) -> None:
    ranks.run(2, save_and_look)


def decide_together(rank: int) -> Counter[str]:
    job = Job(rank, True, 2, together=True)
    take_steps(job, {6: 3}, 7)
    return job.optimizer.counts


def test_replicas_decide_alike(ranks: RankPool) -> None:
    """One of them alone has a norm that exceeds the clip. The forwards of both exchange tokens, so both wait, and both
    of the first stage repeat their step."""
    counts = ranks.run(4, decide_together)
    assert counts == [{"synchronous": 1, "ahead": 5, how: 1} for how in ("repeated", "repeated", "waited", "waited")]


def refused_by_one(rank: int) -> str:
    from megatron.zero_bubble.errors import UserError
    from megatron.zero_bubble.optimizer.global_state import refused_together

    try:
        with refused_together():
            if rank == 1:
                raise UserError("the rule; the remedy")
    except UserError as error:
        return str(error)
    return "accepted"


def test_all_ranks_are_refused_alike(ranks: RankPool) -> None:
    """A rank without parameters, for example, has no optimizer of the wrong kind."""
    assert ranks.run(2, refused_by_one) == ["the rule; the remedy"] * 2


@pytest.mark.parametrize(
    ("options", "tags", "refusal"),
    [
        ({"overlap_param_gather_with_optimizer_step": True}, {}, "gathers weights that post-validation may undo"),
        ({"grad_norm_skip_threshold": 5.0}, {}, "got grad_norm_skip_threshold=5.0; drop one"),
        ({}, {"grad_norm_group": "mtp"}, "clips all gradients by one norm, but --mtp-detach-heads"),
    ],
)
def test_options_that_one_norm_cannot_answer_are_refused(
    options: dict[str, Any], tags: dict[str, str], refusal: str
) -> None:
    """Newer versions have the last two."""
    from megatron.zero_bubble.errors import UserError
    from megatron.zero_bubble.optimizer.surface import check_optimizers

    def part(tags: dict[str, str], **options: Any) -> Any:
        return SimpleNamespace(config=SimpleNamespace(**options), get_parameters=lambda: [SimpleNamespace(**tags)])

    check_optimizers([part({}, grad_norm_skip_threshold=float("inf"))])
    with pytest.raises(UserError, match=refusal):
        check_optimizers([part({}), part(tags, **options)])
