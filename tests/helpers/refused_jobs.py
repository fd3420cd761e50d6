"""How jobs of a Megatron-LM checkout end before training starts: its own parser and checks, with the launcher's.

Run as a script, once per checkout: ``refused_jobs.py CHECKOUT < JOBS``, with a JSON list of lists of flags; it
prints a JSON list with a sentence per job, "" for a job that would start, and "Megatron: ..." where Megatron itself
refuses it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

_DIVIDING = {
    "--context-parallel-size",
    "--tensor-model-parallel-size",
    "--tensor-parallel-num-weight-shards",
    "--expert-model-parallel-size",
}


def main(checkout: str) -> None:
    """Check the jobs from standard input."""
    sys.path.insert(0, checkout)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    from megatron.zero_bubble.engine.platforms import cpu, select
    from megatron.zero_bubble.engine.platforms.cpu.megatron_lm import JOB_POINTS

    select("cpu")
    cpu.install(JOB_POINTS)
    answer, jobs = sys.stdout, json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        said = [_sentence(job) for job in jobs]
    json.dump(said, answer)


def num_ranks(job: list[str]) -> int:
    """The ranks that the job's two pipeline stages need: two each where a flag divides a stage among ranks."""
    return 4 if _DIVIDING.intersection(job) else 2


def _sentence(job: list[str]) -> str:
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.integration.megatron_lm.checks import check_format
    from megatron.zero_bubble.integration.megatron_lm.fork_flags import modernize
    from megatron.zero_bubble.planning.job.effects import Job
    from megatron.zero_bubble.planning.job.flags import parse_ours
    from megatron.zero_bubble.planning.job.rules import check_job

    os.environ["WORLD_SIZE"] = str(num_ranks(job))
    printed = io.StringIO()
    try:
        arguments, _ = modernize(job)
        run, _ = parse_ours(arguments)
        check_format(run, "x" if "--yaml-cfg" in arguments else None)
        check_job(Job(run, under_launcher=True))
        with contextlib.redirect_stderr(printed):
            _validate(arguments, run)
    except UserError as error:
        return str(error)
    except SystemExit:
        return f"Megatron: {printed.getvalue().strip().splitlines()[-1]}"
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"Megatron: {type(error).__name__}: {error}"
    return ""


def _validate(arguments: list[str], run: Any) -> None:
    """Parse and validate the flags up to the point at which the schedule would be put in force."""
    from megatron.training import arguments as megatron_arguments

    from megatron.zero_bubble.integration.megatron_lm import install
    from megatron.zero_bubble.integration.megatron_lm.meeting import Meeting
    from megatron.zero_bubble.integration.patching.seams import installed_seams

    original, argv = megatron_arguments.add_megatron_arguments, sys.argv
    megatron_arguments.add_megatron_arguments = install._with_our_flags(original)
    sys.argv = ["job.py", *arguments]
    try:
        args = megatron_arguments.parse_args()
        install._validated(megatron_arguments.validate_args, run, installed_seams(), print, Meeting())(args)
    finally:
        megatron_arguments.add_megatron_arguments, sys.argv = original, argv
        install.revert()


if __name__ == "__main__":
    main(sys.argv[1])
