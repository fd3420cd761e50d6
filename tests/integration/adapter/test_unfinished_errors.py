"""Errors that the user's code raises at every place where the passes call it: each ends the call on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import megatron.zero_bubble
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_unfinished import (
    JOB_TIMEOUT_S,
    REFUSED,
    REJOIN,
    SOON_S,
    WAYS,
    Ending,
    Mistake,
    Way,
    built,
    call,
    ending,
    forward_step,
)
from tests.loops import models

NUMBER = 2
"""Which use of the user's code fails in a call."""


class Fault:
    """Code of the user that raises an error when it is called for the second time in a call."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error, self._calls = error, 0

    def __call__(self, *_: Any) -> None:
        self._calls += 1
        if self._calls == NUMBER:
            raise self._error("of the user")


Step = Callable[..., Any]
Place = Callable[[Fault, Sequence[Any], ExitStack], Step]
"""Puts a fault somewhere into the chunks of a model while the context lasts, or into the step function."""


def in_forward(fault: Fault, _chunks: Sequence[Any], _context: ExitStack) -> Step:
    def step(data: Iterator[torch.Tensor], model: Any) -> Any:
        fault()
        return forward_step(data, model)

    return step


def in_loss(fault: Fault, _chunks: Sequence[Any], _context: ExitStack) -> Step:
    def step(data: Iterator[torch.Tensor], model: Any) -> Any:
        output, loss = forward_step(data, model)

        def failing(output: torch.Tensor) -> Any:
            fault()
            return loss(output)

        return output, failing

    return step


def in_tensor_hook(fault: Fault, chunks: Sequence[Any], context: ExitStack) -> Step:
    """A hook of an activation, which B calls."""

    def hooked(_module: Any, _inputs: Any, outputs: Any) -> None:
        if outputs[0].requires_grad:
            outputs[0].register_hook(fault)

    context.enter_context(removed(last_layer(chunks).mlp.register_forward_hook(hooked)))
    return forward_step


def in_parameter_hook(fault: Fault, chunks: Sequence[Any], context: ExitStack) -> Step:
    """A hook of a weight, which W calls."""
    context.enter_context(removed(last_layer(chunks).mlp.linear_fc1.weight.register_hook(fault)))
    return forward_step


def in_accumulation_hook(fault: Fault, chunks: Sequence[Any], context: ExitStack) -> Step:
    """A hook of a bias, which is called when its gradient has been added."""
    bias = last_layer(chunks).mlp.linear_fc2.bias
    context.enter_context(removed(bias.register_post_accumulate_grad_hook(fault)))
    return forward_step


def last_layer(chunks: Sequence[Any]) -> Any:
    return chunks[-1].module.decoder.layers[-1]


@contextmanager
def removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


class Case(NamedTuple):
    """An error of one rank; in the call of a second model, if not that of the trained one."""

    place: Place
    rank: int
    error: type[BaseException] = Mistake
    evaluates: bool = False
    of_second: bool = False


QUICK = (
    Case(in_tensor_hook, 1),
    Case(in_parameter_hook, 0),
    Case(in_loss, 1, KeyboardInterrupt),
    Case(in_forward, 0, evaluates=True, of_second=True),
)
ALL = tuple(
    Case(place, rank, error, *call)
    for error in (Mistake, KeyboardInterrupt)
    for place, evaluates in (
        (in_forward, True),
        (in_loss, True),
        (in_tensor_hook, False),
        (in_parameter_hook, False),
        (in_accumulation_hook, False),
    )
    for rank in (0, 1)
    for call in (((False, False), (True, False), (True, True)) if evaluates else ((False, False),))
)


class After(NamedTuple):
    """What a rank saw: the failed call and what was left of it, the next calls, and whether it joined again."""

    failed: Ending
    num_pending: int
    following: list[Ending]
    joined_again: bool


def errors(rank: int, name: str, cases: Sequence[Case]) -> list[After]:
    """Fail in each case, one after the other, in a job with two models."""
    way = WAYS[name]
    pipeline, chunks = built(way)
    second = models.build(way.virtual_size, "second")
    try:
        expected = call(way, chunks, 1), call(way, second, 1, forward_only=True)
        found = []
        for case in cases:
            failing = second if case.of_second else chunks
            with ExitStack() as context:
                step = case.place(Fault(case.error), failing, context) if case.rank == rank else forward_step
                how = {"forward_step": step, "forward_only": case.evaluates}
                failed = ending(partial(call, way, failing, 2, **how))
            num_pending = pipeline.num_pending
            following = [
                ending(partial(call, way, chunks, 3)),
                ending(partial(call, way, second, 3, forward_only=True)),
            ]
            torch.distributed.barrier()
            megatron.zero_bubble.disconnect()
            again = call(way, chunks, 1), call(way, second, 1, forward_only=True)
            found.append(After(failed, num_pending, following, again == expected))
        return found
    finally:
        megatron.zero_bubble.revert()
        models.destroy_groups()


def check(case: Case, of_ranks: Sequence[After]) -> None:
    """The failing rank has its own error, and the other one a sentence that names the rank and the error."""
    for rank, (failed, num_pending, following, joined_again) in enumerate(of_ranks):
        named = f"; pipeline rank {case.rank} ended with {case.error.__name__}: of the user"
        if rank == case.rank:
            assert (failed.kind, failed.sentence) == (case.error.__name__, "of the user"), failed
        elif failed.kind:
            assert failed.kind == "PeerError" and failed.sentence.endswith(named), failed
        sentences = [each.sentence for each in following]
        if not failed.kind:  # the call needed nothing more of the rank that failed; the next one does
            assert following[0].kind == "PeerError" and sentences.pop(0).endswith(named), following
        kind = failed.kind or "PeerError"
        for sentence in sentences:
            assert sentence.startswith(f"{REFUSED}ended with {kind}; start the job again") and REJOIN in sentence
        assert num_pending == 0
        assert max(each.seconds for each in (failed, *following)) < SOON_S
        assert joined_again


def check_all(ranks: RankPool, name: str, cases: Sequence[Case]) -> None:
    of_ranks = ranks.run(2, errors, name, cases, timeout=JOB_TIMEOUT_S)
    for case, *afters in zip(cases, *of_ranks, strict=True):
        check(case, afters)


def test_an_error_of_the_user_is_named_on_all_ranks(ranks: RankPool) -> None:
    check_all(ranks, "line", QUICK)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if not way.has_headers])
def test_errors_of_the_user(ranks: RankPool, name: str) -> None:
    loss_rank = 0 if name in ("V", "searched wave") else 1
    check_all(ranks, name, [case for case in ALL if case.place is not in_loss or case.rank == loss_rank])


LATE_S = 0.5


def validated(rank: int, case: Case) -> list[Ending]:
    """Fail after a step that was taken ahead; the next calls, and what a loop does with the optimizer at its end."""
    way = Way({"schedule": "zb-h2", "post_validation": True})
    pipeline, chunks = built(way)
    try:
        optimizer = pipeline.post_validated(models.optimizer_of(chunks), chunks)
        for seed in (1, 2):
            call(way, chunks, seed)
            if rank != case.rank:
                time.sleep(LATE_S)  # then the sums of the step are under way where the next call fails
            optimizer.step_ahead()
        with ExitStack() as context:
            step = case.place(Fault(case.error), chunks, context) if case.rank == rank else forward_step
            failed = ending(partial(call, way, chunks, 3, forward_step=step))
        return [failed, ending(partial(call, way, chunks, 4)), ending(optimizer.settle)]
    finally:
        megatron.zero_bubble.revert()
        models.destroy_groups()


@pytest.mark.parametrize("case", [Case(in_forward, 0), Case(in_tensor_hook, 1)])
def test_errors_with_post_validation(ranks: RankPool, case: Case) -> None:
    """The ranks cannot join again, because they may disagree on the last step."""
    for rank, (failed, following, settled) in enumerate(ranks.run(2, validated, case, timeout=JOB_TIMEOUT_S)):
        assert failed.kind == ("Mistake" if rank == case.rank else "PeerError"), failed
        assert following.sentence == f"{REFUSED}ended with {failed.kind}; start the job again from its last checkpoint"
        assert not settled.kind and max(each.seconds for each in (failed, following, settled)) < SOON_S
