"""Jobs of Megatron-LM that train hybrid models on CPU ranks, with slow stand-ins for the kernels of ``mamba_ssm``."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace

from tests.helpers.hybrid_models import STAND_INS
from tests.helpers.megatron_lm import Checkout, Job, Log, gpt_job, warm_ranks

_SIZES = "--mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 2 --spec hybrid_layers stack"


def hybrid_job(
    checkout: Checkout, num_ranks: int, pattern: str, flags: str, schedule: str | None, more: Sequence[str] = ()
) -> Job:
    """Return the job of a model with the layers of ``pattern``, in the script that the checkout has for it."""
    job = gpt_job(checkout, num_ranks, f"{flags} {_SIZES}", schedule, more)
    words = re.sub(r"--num-layers \d+ ", "", " ".join(job.flags)).split()
    script = checkout.path / "pretrain_hybrid.py"
    if script.is_file():
        return replace(job, script=script, flags=(*words, "--hybrid-layer-pattern", pattern))
    own = ("--hybrid-override-pattern", pattern, "--num-layers", str(len(pattern)), "--is-hybrid-model")
    return replace(job, script=checkout.path / "pretrain_mamba.py", flags=(*words, *own))


def pretrain_hybrid(
    checkout: Checkout, num_ranks: int, pattern: str, flags: str, schedule: str | None, more: Sequence[str] = ()
) -> Log:
    """Run the job of :func:`hybrid_job` to its end."""
    job = hybrid_job(checkout, num_ranks, pattern, flags, schedule, more)
    warm = warm_ranks(job.script, STAND_INS)
    log = job.run(warm=warm)
    return job.run(warm=warm) if log.aborted_at_exit else log


@functools.cache
def stock_hybrid(checkout: Checkout, num_ranks: int, pattern: str, flags: str, more: tuple[str, ...] = ()) -> Log:
    """Run the same job with Megatron's own schedule; the result is cached."""
    log = pretrain_hybrid(checkout, num_ranks, pattern, flags, None, more)
    assert log.exit_codes == (0,) * num_ranks, log.text[-4000:]
    return log
