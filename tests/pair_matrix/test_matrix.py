"""The first jobs of the pair matrix, and jobs that were not equal once; ``scripts/pair_matrix.sh --full`` runs all."""

from __future__ import annotations

import functools
from itertools import islice

import pytest

from pair_matrix.matrix import DEFAULT_JOBS, Matrix, refused_rows, rule_of
from pair_matrix.options import Row, row_of
from pair_matrix.run import run
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some

NOT_EQUAL_ONCE = (
    "loop=logits sequences=1",  # the gradient of logits that leave the model is transposed
    "schedule=zb-h2 dtype=fp16 vocabulary=2 step=ahead clip=rarely",  # L before the step that changes the loss scale
)


MATRIX = Matrix(0)


@functools.cache
def first_rows() -> list[Row]:
    return list(islice(MATRIX.rows(), DEFAULT_JOBS))


def check(row: Row, pool: RankPool) -> None:
    verdict = run(row, pool)
    assert verdict.passed, "\n".join([f'--only "{verdict.row}" is {verdict.status}', *verdict.details])


@pytest.mark.parametrize("number", some(range(DEFAULT_JOBS), 0))
def test_jobs_are_equal_to_stock_as_promised(ranks: RankPool, number: int) -> None:
    check(first_rows()[number], ranks)


@pytest.mark.full
@pytest.mark.parametrize("text", NOT_EQUAL_ONCE)
def test_jobs_that_were_not_equal_once(ranks: RankPool, text: str) -> None:
    check(row_of(text), ranks)


@pytest.mark.full  # each refusal replaces the pool of ranks, which takes 17 s
def test_what_only_the_ranks_refuse_is_refused(ranks: RankPool) -> None:
    for row in refused_rows():
        check(row, ranks)


def test_the_first_jobs_cover_many_pairs_and_known_rules_exclude_the_others() -> None:
    first_rows()
    assert MATRIX.covered >= 0.4 * MATRIX.pairs
    assert all(rule_of(reason) is not None for reason in MATRIX.refused())


def test_a_sentence_that_only_begins_as_a_rule_is_none() -> None:
    rule = (
        "sharded units need overlap_grad_reduce=False, because the schedule itself reduces gradients, during the passes"
    )
    assert rule_of(f"stock: {rule}; got True; drop --overlap-grad-reduce") == rule
    assert rule_of("stock: sharded units need overlap_grad_reduce=False; got True") is None
    assert rule_of("schedule: sharded units need a defect") is None


@pytest.mark.full
def test_known_rules_exclude_all_pairs_that_no_row_covers() -> None:
    matrix = Matrix(0)
    assert 200 <= sum(1 for _ in matrix.rows()) <= 250
    assert matrix.covered >= 0.9 * matrix.pairs
    assert all(rule_of(reason) is not None for reason in matrix.refused())
