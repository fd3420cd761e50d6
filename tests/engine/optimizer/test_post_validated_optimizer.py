"""Tests of PostValidatedOptimizer in a foreign loop: return values, visible state and schedulers.

test_post_validation.py tests it in our training loop.
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
"""Per step, the rank with a spike; far enough apart for steps to be taken ahead in between. For a spike of rank 1,
rank 0 repeats its step and rank 1 waits."""

STEPS = 26
KINDS = {"fp32": {}, "bf16": {"bf16": True}, "distributed": {"bf16": True, "use_distributed_optimizer": True}}


def both(rank: int, pipeline: int, empty: list[int], options: dict[str, Any]) -> tuple[Any, Any, Counter[str]]:
    plain = take_steps(Job(rank, False, pipeline, empty=empty, **options), SPIKES, STEPS)
    job = Job(rank, True, pipeline, empty=empty, **options)
    return plain, take_steps(job, SPIKES, STEPS), job.optimizer.counts


@pytest.mark.parametrize("kind", KINDS)
def test_scheduler_may_step_before_the_validation(ranks: RankPool, kind: str) -> None:
    """Repeated and late steps use the learning rate and weight decay of their iteration, and keep the new values."""
    results = ranks.run(2, both, 2, [], KINDS[kind])
    for plain, ahead, _ in results:
        assert ahead == plain
    first, last = (counts for *_, counts in results)
    assert first["repeated"] == 2 and last["waited"] == 3, (first, last)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_without_parameters(ranks: RankPool, kind: str) -> None:
    results = ranks.run(3, both, 3, [1], KINDS[kind] | {"log_num_zeros_in_grad": True})
    for plain, ahead, counts in results:
        assert ahead == plain
        assert counts["ahead"] > 5, counts


def inverse_and_exact(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Counter[str]]:
    jobs = []
    for rollback in ("exact", "inverse"):
        jobs.append(Job(rank, True, 2, rollback))
        take_steps(jobs[-1], {6: 1}, 7)
    return jobs[0].weights(), jobs[1].weights(), jobs[1].optimizer.counts


def test_inverse_uses_the_steps_learning_rate(ranks: RankPool) -> None:
    """By the time of the rollback the scheduler has set another learning rate."""
    exact, inverse, counts = ranks.run(2, inverse_and_exact)[0]
    assert counts["repeated"] == 1, counts
    for expected, found in zip(exact, inverse, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def step_results(rank: int, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Take every third step ahead; return results and optimizer contents per step, of the plain and the wrapped run."""
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
def test_step_returns_what_the_wrapped_optimizer_returns(ranks: RankPool, options: dict[str, Any]) -> None:
    """All three return values are equal, also for clipped and skipped steps and after steps taken ahead."""
    for plain, wrapped in ranks.run(2, step_results, options):
        assert wrapped == plain
        assert {answer[0] for answer, *_ in plain} == ({True, False} if options else {True})


def pending(rank: int, **options: Any) -> Job:
    """Return a job with a pending step that rank 0 will repeat."""
    job = Job(rank, True, 2, **options)
    take_steps(job, {}, 6)
    job.gradients(6, SPIKE if rank == 1 else 1.0)
    job.optimizer.step_ahead()
    assert job.optimizer.is_pending
    return job


def access_every_name(rank: int) -> tuple[set[str], set[str]]:
    """Access every name of the optimizer while a step is pending; return the accessible and the rejected names."""
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.engine.optimizer.surface import SETTLES_FIRST

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
        except TypeError:  # arguments are missing, but the call was allowed
            opened.add(name)
    assert job.optimizer.is_pending
    job.optimizer.settle()
    return opened, refused


def test_only_listed_names_are_accessible_while_a_step_is_pending(ranks: RankPool) -> None:
    from megatron.zero_bubble.engine.optimizer.surface import ANY_TIME

    for opened, refused in ranks.run(2, access_every_name):
        assert opened == ANY_TIME | {"param_groups"}
        assert {"state_dict", "get_parameters", "state", "chained_optimizers", "optimizer", "get_grad_norm"} <= refused


def save_while_pending(rank: int) -> None:
    """Everything read from the optimizer equals the synchronous optimizer's state."""
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.engine.optimizer.surface import SETTLES_FIRST

    job = Job(rank, False, 2, bf16=True)
    expected = take_steps(job, SPIKES, 7)[-1]
    names = sorted(name for name in SETTLES_FIRST if hasattr(job.plain, name))
    assert {"sharded_state_dict", "load_state_dict", "save_parameter_state", "reload_model_params"} <= set(names)
    for name in names:
        job = pending(rank, bf16=True)
        job.scheduler.step(1)
        setattr(job.plain, name, job.contents)  # replaces a method that reads or writes the optimizer's state
        assert getattr(job.optimizer, name)() == expected, name
        assert not job.optimizer.is_pending
    job = pending(rank, bf16=True)
    save = job.optimizer.state_dict
    for look in (save, lambda: job.optimizer.param_groups[0]["params"][0]):
        try:
            look()
        except UserError:
            continue
        raise AssertionError("a pending step can still be undone, so its state must not be accessible")
    job.scheduler.step(1)
    assert "params" not in dict(job.optimizer.param_groups[0])
    assert len(job.optimizer.param_groups[0]["params"]) == len(job.plain.param_groups[0]["params"])
    job.optimizer.settle()
    assert job.contents() == expected
    assert save().keys() == job.plain.state_dict().keys()
    assert job.optimizer.param_groups[0]["params"] is job.plain.param_groups[0]["params"]


def asked_for_a_stub(rank: int) -> tuple[bool, bool]:
    """Ask as Megatron does in every iteration, with a stub optimizer on rank 1; return whether a step is pending, and
    whether forwards ran on wrong weights.
    """
    job = pending(rank)
    job.plain.is_stub_optimizer = rank == 1
    assert job.optimizer.is_stub_optimizer == (rank == 1)
    is_pending = job.optimizer.is_pending
    return is_pending, not job.optimizer.validate()


def test_stub_optimizer_stays_pending_with_the_others(ranks: RankPool) -> None:
    """Else its rank would run its forwards once after a rejected step, and the other ranks twice."""
    assert ranks.run(2, asked_for_a_stub) == [(True, True), (True, True)]


def test_unvalidated_steps_are_not_saved(ranks: RankPool) -> None:
    ranks.run(2, save_while_pending)


def decide_together(rank: int) -> Counter[str]:
    job = Job(rank, True, 2, together=True)
    take_steps(job, {6: 3}, 7)
    return job.optimizer.counts


def test_replicas_reach_the_same_decision(ranks: RankPool) -> None:
    """Only one replica's norm exceeds the clip threshold.

    Both replicas' forwards exchange tokens, so both last stages wait and both first stages repeat their step.
    """
    counts = ranks.run(4, decide_together)
    assert counts == [{"synchronous": 1, "ahead": 5, how: 1} for how in ("repeated", "repeated", "waited", "waited")]


def rejected_by_one(rank: int) -> str:
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.engine.runtime.refusals import refused_together

    try:
        with refused_together():
            if rank == 1:
                raise UserError("the rule; the remedy")
    except UserError as error:
        return str(error)
    return "accepted"


def test_error_of_one_rank_is_raised_on_all_ranks(ranks: RankPool) -> None:
    """For example, a rank without parameters has no optimizer of an unsupported kind, but must stop as well."""
    assert ranks.run(2, rejected_by_one) == ["the rule; the remedy"] * 2


@pytest.mark.parametrize(
    ("options", "tags", "refusal"),
    [
        ({"grad_norm_skip_threshold": 5.0}, {}, "got grad_norm_skip_threshold=5.0; drop one"),
        ({}, {"grad_norm_group": "mtp"}, "clips all gradients by one norm, but --mtp-detach-heads"),
    ],
)
def test_options_beyond_a_single_gradient_norm_are_rejected(
    options: dict[str, Any], tags: dict[str, str], refusal: str
) -> None:
    """The last two options exist only in newer versions of megatron-core."""
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.engine.optimizer.surface import check_optimizers

    def part(tags: dict[str, str], **options: Any) -> Any:
        return SimpleNamespace(config=SimpleNamespace(**options), get_parameters=lambda: [SimpleNamespace(**tags)])

    check_optimizers([part({}, grad_norm_skip_threshold=float("inf"))])
    with pytest.raises(UserError, match=refusal):
        check_optimizers([part({}), part(tags, **options)])


def test_a_chain_of_several_optimizers_is_accepted() -> None:
    """A rank with a part of the experts has two: a chain of two fails when asked for parameters."""
    from megatron.core.optimizer import ChainedOptimizer

    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.engine.optimizer.surface import check_optimizers

    weight = SimpleNamespace()
    parts: Any = [SimpleNamespace(config=SimpleNamespace(), get_parameters=lambda: [weight]) for _ in range(2)]
    chain: Any = object.__new__(ChainedOptimizer)
    chain.config, chain.chained_optimizers = SimpleNamespace(), parts
    check_optimizers([chain, *parts])
    weight.grad_norm_group = "mtp"
    with pytest.raises(UserError, match="--mtp-detach-heads"):
        check_optimizers([chain, *parts])
