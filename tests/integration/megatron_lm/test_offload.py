"""``pretrain_gpt.py`` with activations in host memory: its log is that of the same run without offloading."""

from __future__ import annotations

import re

import pytest

from tests.helpers.megatron_lm import VARIABLE, Checkout, checkouts, pretrain_gpt
from tests.integration.megatron_lm.test_parity import COMBINED, PLAIN, job_of, same

CHECKOUTS = checkouts()
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(1200),
]
ROWS = {
    "plain": (PLAIN, "zb-h2", ""),
    "half": (COMBINED["half"], "zb-h1", ""),
    "slices": (PLAIN, "seq-zb-h1", "--zero-bubble-num-slices 2"),
}


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_log_is_that_of_the_run_without_offloading(checkout: Checkout, name: str) -> None:
    row, schedule, flags = ROWS[name]
    job, more = job_of(checkout, 2, row), tuple(flags.split())
    same(
        pretrain_gpt(*job, schedule, (*more, "--zero-bubble-offload", "all")),
        pretrain_gpt(*job, schedule, more),
    )


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_too_little_host_memory_ends_the_job_with_a_sentence(checkout: Checkout) -> None:
    limit = ("--zero-bubble-offload", "all", "--zero-bubble-host-memory", "100KiB")
    own = pretrain_gpt(*job_of(checkout, 2, PLAIN), "zb-h2", limit)
    assert all(own.exit_codes), "a rank has ended as if nothing had happened"
    # Before the run by an estimate, or else when a rank takes too much.
    sentence = r"must fit in --zero-bubble-host-memory, (100KiB|102400 bytes) per rank"
    assert re.search(sentence, own.text), own.text[-3000:]
    assert "Traceback" not in own.text
