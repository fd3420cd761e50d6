"""What is wrong with the lengths of microbatches is one sentence per rank, and no rank waits longer than for a peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import megatron.zero_bubble
from megatron.zero_bubble.core.errors import PeerError, UserError
from tests.helpers.ranks import RankPool
from tests.loops.varied import ONE_STAGE, batches, build, passes, shapes_of

PEER_TIMEOUT_S = 3.0
Shapes = list[tuple[int, int]]
Given = Callable[[int, Shapes], Any]
"""Returns the arguments of ``shapes`` for a rank and the right list; None for a rank that gives none."""

SAME = "all ranks of a pipeline must know the same shapes"
PLAN = "all ranks of a pipeline must run the same plan"
SHORT = "the list of shapes must have one element per microbatch; got 3 for 4 microbatches; give the shapes"
OUTPUT = "the output of a stage must have the shape given for its microbatch"
LOST = "pipeline rank"


def _longer(shapes: Shapes) -> Shapes:
    return [(sequences, tokens + 1) for sequences, tokens in shapes]


CASES: dict[str, tuple[Given, tuple[str, str]]] = {
    "another list on one rank": (lambda rank, right: [_longer(right) if rank else right], (SAME, SAME)),
    "another order on one rank": (lambda rank, right: [right[::-1] if rank else right], (SAME, SAME)),
    "a list on one rank only": (lambda rank, right: None if rank else [right], (SAME, SAME)),
    "a source on one rank only": (lambda rank, right: [right, 0] if rank else None, (SAME, SAME)),
    "short lists": (lambda _, right: [right[:3]], (SHORT, SHORT)),
    "short on one rank": (lambda rank, right: [right[:3] if rank else right], (SAME, SAME)),
    "short on the rank that tells": (lambda rank, right: [None if rank else right[:3], 0], (SHORT, SHORT)),
    "other lengths than those of the model": (lambda _, right: [_longer(right)], (OUTPUT, LOST)),
}


def said(rank: int, case: str, is_first_call: bool) -> tuple[str, float]:
    """The sentence of a call, which may be the first or follow a right one, and its time in seconds."""
    from megatron.core import parallel_state, tensor_parallel

    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    parallel_state.destroy_model_parallel()
    megatron.zero_bubble.apply(ZeroBubbleConfig(schedule="zb-h1", peer_timeout_s=PEER_TIMEOUT_S))
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        chunks, data = build(2, ONE_STAGE, "dense"), batches(4, 0, "dense")
        if not is_first_call:
            passes(chunks, data)
        given, start = CASES[case][0](rank, shapes_of(data)), time.monotonic()
        with nullcontext() if given is None else megatron.zero_bubble.shapes(*given):
            try:
                passes(chunks, data)
            except (UserError, PeerError) as error:
                return str(error), time.monotonic() - start
        return "", time.monotonic() - start
    finally:
        megatron.zero_bubble.revert()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_first_call", [False, pytest.param(True, marks=pytest.mark.full)])
def test_wrong_lists_end_with_a_sentence(ranks: RankPool, case: str, is_first_call: bool) -> None:
    for (sentence, seconds), expected in zip(ranks.run(2, said, case, is_first_call), CASES[case][1], strict=True):
        if is_first_call and "only" in case:
            expected = PLAN
        assert sentence.startswith(expected)
        assert seconds < PEER_TIMEOUT_S + 20  # on a slow machine


@pytest.mark.parametrize(
    ("tokens", "source", "sentence"),
    [
        ([8, 0], None, "the shape of a microbatch is its number of tokens, or a pair .* got 0; give such numbers"),
        ([(2, 8, 1)], None, "got \\(2, 8, 1\\)"),
        ([8.0], None, "got 8.0"),
        (None, None, "must know the shapes of their microbatches, or one must tell the others; got None without"),
    ],
)
def test_other_elements_than_shapes_are_refused(tokens: Any, source: int | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence), megatron.zero_bubble.shapes(tokens, source):
        pass


def test_without_a_schedule_shapes_do_nothing() -> None:
    with megatron.zero_bubble.shapes([8, (2, 16)]):
        pass


@pytest.mark.parametrize(("context", "tensor", "sequence_parallel"), [(2, 1, False), (1, 2, True), (2, 2, True)])
def test_tokens_that_cannot_be_divided_are_refused(context: int, tensor: int, sequence_parallel: bool) -> None:
    from megatron.zero_bubble.core.costs.lengths import SequenceShape
    from megatron.zero_bubble.integration.adapter.boundary import ShapedBoundary

    sizes = {name: SimpleNamespace(size=lambda size=size: size) for name, size in (("cp", context), ("tp", tensor))}
    config, parts = SimpleNamespace(sequence_parallel=sequence_parallel), context * tensor
    shapes = (SequenceShape(1, 4 * parts), SequenceShape(2, 4 * parts + 1))
    with pytest.raises(UserError, match=f"must be a multiple .*: {parts}; got {4 * parts + 1} for microbatch 1; pad"):
        ShapedBoundary.of_shapes(shapes, config, SimpleNamespace(**sizes))
