"""What a Megatron-LM job prints about its options when a schedule takes it over; on a fake ``megatron.training``."""

from __future__ import annotations

import sys

from megatron.zero_bubble.planning.job.flags import parse_ours
from tests.helpers.ranks import RankPool
from tests.integration.megatron_lm.test_install import MODULES, with_fake_megatron


def says_what_recomputation_costs() -> None:
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    for name, is_said in (("zb-h1", True), ("1f1b", False), ("zb-auto", False)):
        said: list[str] = []
        flags = ["--zero-bubble-schedule", name]
        layers = "--num-layers 4 --hybrid-layer-pattern D*D*"  # which are not estimated without their sizes
        job = f"--pipeline-model-parallel-size 2 {layers} --recompute-granularity full --recompute-method uniform"
        sys.argv = ["job.py", *job.split(), *flags]
        megatron_lm.install(parse_ours(flags)[0], said.append)
        try:
            sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
        finally:
            megatron_lm.revert()
        lines = [line for line in said if "--recompute-granularity full, zb-h1 keeps more activations" in line]
        assert len(lines) == is_said, name


def test_job_says_what_full_recomputation_costs(ranks: RankPool) -> None:
    ranks.run(1, with_fake_megatron, says_what_recomputation_costs)


def says_what_is_not_hidden() -> None:
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    for ranks in (1, 2):
        said: list[str] = []
        flags = ["--zero-bubble-schedule", "zb-h1"]
        sizes = f"--pipeline-model-parallel-size 2 --num-experts 4 --expert-model-parallel-size {ranks}"
        sys.argv = ["job.py", *sizes.split(), *flags]
        megatron_lm.install(parse_ours(flags)[0], said.append)
        try:
            sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
        finally:
            megatron_lm.revert()
        lines = [line for line in said if "all-to-all of experts over 2 ranks is not hidden by schedule zb-h1" in line]
        assert len(lines) == ranks - 1


def test_job_says_that_the_all_to_all_is_not_hidden(ranks: RankPool) -> None:
    ranks.run(1, with_fake_megatron, says_what_is_not_hidden)


def switches_off_what_the_schedule_does() -> None:
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    said: list[str] = []
    flags = ["--zero-bubble-schedule", "zb-h1"]
    sys.argv = ["job.py", "--pipeline-model-parallel-size", "2", "--delay-wgrad-compute", *flags]
    megatron_lm.install(parse_ours(flags)[0], said.append)
    try:
        args = sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
    finally:
        megatron_lm.revert()
    assert args.delay_wgrad_compute is False
    assert said[-1] == "--delay-wgrad-compute is switched off: the schedule delays all weight gradients itself, to W"


def test_what_the_schedule_does_itself_is_switched_off(ranks: RankPool) -> None:
    ranks.run(1, with_fake_megatron, switches_off_what_the_schedule_does)
