"""Tests of the division of tests among the workers of pytest-xdist."""

from tests.conftest import scope_of


def test_files_with_ranks_are_not_divided_and_checkouts_have_one_worker() -> None:
    assert scope_of("tests/test_ranks.py") == "tests/test_ranks.py"
    assert scope_of("tests/integration/megatron_lm/test_parity.py") == "checkouts"
    assert scope_of("tests/planning/test_balance.py") is None
