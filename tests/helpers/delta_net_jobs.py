"""Jobs of Megatron-LM that train gated delta nets on CPU ranks, with slow stand-ins for the kernels of ``fla``."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.helpers.hybrid_models import STAND_INS
from tests.helpers.megatron_lm import Checkout, Log, gpt_job, warm_ranks

_SIZES = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 16 --normalization RMSNorm"
)


def pretrain_delta_nets(
    checkout: Checkout, num_ranks: int, flags: str, schedule: str | None, more: Sequence[str] = ()
) -> Log:
    """Run a job whose every second layer has attention, and all others gated delta nets, to its end."""
    job = gpt_job(checkout, num_ranks, f"{flags} {_SIZES}", schedule, more)
    job = replace(job, script=STAND_INS / "pretrain_delta_nets.py")
    warm = warm_ranks(job.script, Path(f"{STAND_INS}{os.pathsep}{checkout.path}"))
    log = job.run(warm=warm)
    return job.run(warm=warm) if log.aborted_at_exit else log


@functools.cache
def stock_delta_nets(checkout: Checkout, num_ranks: int, flags: str, more: tuple[str, ...] = ()) -> Log:
    """Run the same job with Megatron's own schedule; the result is cached."""
    log = pretrain_delta_nets(checkout, num_ranks, flags, None, more)
    assert log.exit_codes == (0,) * num_ranks, log.text[-4000:]
    return log
