"""Tests of install() and revert(): every replaced name is restored, and unknown seams are rejected as a whole."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.zero_bubble.planning.job.flags import parse_ours
from tests.helpers.ranks import RankPool

STAND_IN = Path(__file__).resolve().parents[2] / "helpers" / "stand_in"
MODULES = (
    "megatron.training.arguments",
    "megatron.training.initialize",
    "megatron.training.training",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.distributed.finalize_model_grads",
)
ENDS = ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
V = ["--zero-bubble-schedule", "zb-v"]


def with_fake_megatron(rank: int, test: Callable[[], None]) -> None:
    """Run ``test`` on a rank, where megatron-core is available, with the fake ``megatron.training``."""
    import importlib

    sys.path.insert(0, str(STAND_IN))
    argv, sys.argv = sys.argv, ["job.py", "--pipeline-model-parallel-size", "2", *V]
    try:
        for name in MODULES:
            importlib.import_module(name)
        test()
    finally:
        sys.argv = argv
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if name.startswith("megatron.training")]:
            del sys.modules[name]


def names() -> dict[str, int]:
    """What every name of Megatron refers to, in modules and in their classes."""
    of_megatron = re.compile(r"megatron\.(core|training)\b|torch\.autograd$")
    found = {}
    for module in [name for name in sys.modules if of_megatron.match(name)]:
        for name, value in tuple(vars(sys.modules[module]).items()):
            found[f"{module}.{name}"] = id(value)
            if isinstance(value, type) and value.__module__ == module:
                found |= {f"{module}.{name}.{own}": id(of) for own, of in vars(value).items()}
    return found


def changed(before: dict[str, int]) -> set[str]:
    now = names()
    return {name for name in before if now.get(name) != before[name]}


def installs_and_reverts() -> None:
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    before, said = names(), []
    megatron_lm.install(parse_ours(V)[0], said.append)
    try:
        at_once = (
            MODULES[0] + ".add_megatron_arguments",
            MODULES[1] + ".validate_args",
            MODULES[3] + ".initialize_model_parallel",
        )
        assert changed(before) == set(at_once)
        assert said == []
        sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
        taken = changed(before)
        assert taken == {line.partition(":")[0] for line in megatron_lm.report()}
        assert {MODULES[2] + ".get_model", MODULES[3] + ".initialize_model_parallel"} < taken
        assert all(name.removeprefix("megatron.") in said[0] for name in taken)
    finally:
        megatron_lm.revert()
    assert changed(before) == set()
    assert megatron_lm.report() == []


def test_revert_restores_every_name(ranks: RankPool) -> None:
    ranks.run(1, with_fake_megatron, installs_and_reverts)


def rejects(spoil: Callable[[Any], None], sentence: str) -> None:
    from megatron.zero_bubble.core.errors import SeamError
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    with pytest.MonkeyPatch.context() as patch:
        spoil(patch)
        before = names()
        with pytest.raises(SeamError, match=sentence):
            megatron_lm.install(parse_ours(V)[0])
        assert changed(before) == set()


def changed_signature() -> None:
    def spoil(patch: Any) -> None:
        patch.setattr(f"{MODULES[2]}.get_model", lambda provider: provider)

    rejects(spoil, r"training\.get_model must accept model_provider_func, model_type in this order")


def missing_name() -> None:
    rejects(
        lambda patch: patch.delattr(f"{MODULES[0]}.add_megatron_arguments"),
        "megatron.training.arguments has no add_megatron_arguments, which zero-bubble training replaces",
    )


def unknown_version() -> None:
    rejects(
        lambda patch: patch.setattr("megatron.core.__version__", "0.21.0"),
        r"supports megatron-core 0\.13, 0\.14, .*, 0\.20; this is 0\.21\.0; install a supported version",
    )


@pytest.mark.parametrize("test", [changed_signature, missing_name, unknown_version], ids=lambda t: t.__name__)
def test_unknown_seams_are_rejected_before_the_job_starts(ranks: RankPool, test: Callable[[], None]) -> None:
    ranks.run(1, with_fake_megatron, test)


def initializes_twice() -> None:
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    before, said = names(), []
    megatron_lm.install(parse_ours(V)[0], said.append)
    try:
        sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
        once = megatron_lm.report()
        sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
        assert megatron_lm.report() == once
        assert len(said) == 2
    finally:
        megatron_lm.revert()
    assert changed(before) == set()


def test_initializing_twice_in_one_process(ranks: RankPool) -> None:
    ranks.run(1, with_fake_megatron, initializes_twice)


def sets_the_jobs_stages() -> None:
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    line = ["--zero-bubble-schedule", "zb-h1"]
    for schedule, more, name, value in (
        (V, [], "num_virtual_stages_per_pipeline_rank", 2),
        (V, ["--num-layers", "5"], "pipeline_model_parallel_layout", "Et|tt|t|tL"),
        (V, ["--num-layers", "5", *ENDS], "account_for_embedding_in_pipeline_split", False),
        (V, ["--num-layers", "6", *ENDS], "num_virtual_stages_per_pipeline_rank", 2),
        (line, ["--num-layers", "5"], "pipeline_model_parallel_layout", "Et*3|ttL"),
        (line, ["--num-layers", "5", *ENDS[:1]], "pipeline_model_parallel_layout", None),
        (
            line,
            ["--num-layers", "5", "--decoder-first-pipeline-num-layers", "2"],
            "pipeline_model_parallel_layout",
            None,
        ),
        (line, ["--num-layers", "5", "--mtp-num-layers", "1"], "pipeline_model_parallel_layout", "Et*4|tmL"),
        (V, ["--num-layers", "5", "--mtp-num-layers", "1"], "pipeline_model_parallel_layout", "Et|(tt|)*2mL"),
        (V, ["--mtp-num-layers", "1"], "num_virtual_stages_per_pipeline_rank", 2),
        (line, [], "num_virtual_stages_per_pipeline_rank", None),
    ):
        said: list[str] = []
        sys.argv = ["job.py", "--pipeline-model-parallel-size", "2", *schedule, *more]
        megatron_lm.install(parse_ours(schedule)[0], said.append)
        try:
            args = sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
        finally:
            megatron_lm.revert()
        assert getattr(args, name) == value, (schedule, more)
        layout = args.pipeline_model_parallel_layout
        assert [line for line in said if "by stage" in line] == ([f"layers by stage: {layout}"] if layout else [])


def test_v_sets_two_stages_per_rank(ranks: RankPool) -> None:
    ranks.run(1, with_fake_megatron, sets_the_jobs_stages)


def accepts_one_weight_shard_per_rank() -> None:
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    flags = ["--zero-bubble-schedule", "zb-h1"]
    sizes = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
    sys.argv = ["job.py", *sizes.split(), *flags]
    megatron_lm.install(parse_ours(flags)[0], lambda line: None)
    try:
        args = sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
    finally:
        megatron_lm.revert()
    assert (args.tensor_parallel_num_weight_shards, args.expert_tensor_parallel_num_weight_shards) == (2, 1)


def test_default_number_of_weight_shards_is_accepted(ranks: RankPool) -> None:
    """Since core_r0.19, a job's default is one shard per rank."""
    ranks.run(1, with_fake_megatron, accepts_one_weight_shard_per_rank)


def loads_a_tied_embedding_on_one_rank() -> None:
    import megatron.core
    from megatron.core import process_groups_config

    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    def job(version: str, *more: str) -> None:
        sys.argv = ["job.py", "--pipeline-model-parallel-size", "2", *V, "--load", "somewhere", *more]
        megatron_lm.install(parse_ours(V)[0], lambda line: None)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(megatron.core, "__version__", version)
                for name in ("ModelCommProcessGroups", "GradFinalizeProcessGroups"):  # of 0.14
                    groups = process_groups_config.ProcessGroupCollection
                    patch.setattr(process_groups_config, name, groups, raising=False)
                sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
        finally:
            megatron_lm.revert()

    job("0.15.3")
    job("0.14.0", "--untie-embeddings-and-output-weights")
    with pytest.raises(UserError) as caught:
        job("0.14.0")
    assert str(caught.value) == (
        "megatron-core 0.14.0 cannot load a checkpoint if one rank holds both ends of a tied embedding, as under "
        "this schedule; use Megatron-LM core_r0.15 or newer, a schedule with one stage per rank, or "
        "--untie-embeddings-and-output-weights"
    )
    with pytest.raises(UserError, match="the embedding and its copy for multi-token prediction, as under this"):
        job("0.14.0", "--untie-embeddings-and-output-weights", "--mtp-num-layers", "1")


def test_old_versions_reject_loading_a_tied_embedding_on_one_rank(ranks: RankPool) -> None:
    ranks.run(1, with_fake_megatron, loads_a_tied_embedding_on_one_rank)


def refuses_a_provider_of_whole_ranks(rank: int) -> None:
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.core.ir import Placement
    from megatron.zero_bubble.integration.megatron_lm.builder import Builder

    build = Builder(Placement.vee(2), divides_vocabulary=False).building(lambda provider: provider)
    build(lambda pre_process, post_process, vp_stage: None)
    build(lambda *groups, **of_chunk: None)
    with pytest.raises(UserError, match="the arguments pre_process, post_process; choose a schedule with one stage"):
        build(lambda pre_process, post_process: None)


def test_a_v_needs_a_script_that_builds_virtual_stages(ranks: RankPool) -> None:
    ranks.run(1, refuses_a_provider_of_whole_ranks)


def rejects_the_job(flags: list[str], sentence: str) -> None:
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    pipeline = [] if "--pipeline-model-parallel-size" in flags else ["--pipeline-model-parallel-size", "2"]
    sys.argv = ["job.py", *pipeline, *flags]
    megatron_lm.install(parse_ours(flags)[0])
    try:
        with pytest.raises(UserError) as caught:
            sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
    finally:
        megatron_lm.revert()
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            (
                "--zero-bubble-schedule zb-h1 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
                "--expert-tensor-parallel-num-weight-shards 2"
            ),
            (
                "zero-bubble schedules need --expert-tensor-parallel-num-weight-shards to be 1, one per expert "
                "tensor-parallel rank, because the gradients of weights in more shards are reduced where they are "
                "computed; got 2; drop the flag"
            ),
        ),
        (
            "--zero-bubble-schedule zb-h1 --pipeline-model-parallel-size 1",
            (
                "a zero-bubble schedule needs a pipeline of 2 or more ranks, got --pipeline-model-parallel-size 1; "
                "raise it or drop the schedule"
            ),
        ),
        (
            "--zero-bubble-schedule zb-v --num-virtual-stages-per-pipeline-rank 3",
            ("schedule 'zb-v' has 2 stages per rank; got 3; leave the number out"),
        ),
        (
            "--zero-bubble-schedule zb-v --save x --ckpt-format torch",
            (
                "--ckpt-format torch stores checkpoints by rank, and this schedule has its stages on other ranks than "
                "Megatron's schedules; use --ckpt-format torch_dist"
            ),
        ),
        (
            "--zero-bubble-schedule zb-auto --num-virtual-stages-per-pipeline-rank 2",
            (
                "the schedule has 1 stage per rank, the job 2; drop --num-layers-per-virtual-pipeline-stage or "
                "--num-virtual-stages-per-pipeline-rank, or give --zero-bubble-placement loop"
            ),
        ),
        (
            "--zero-bubble-schedule zb-h1 --mtp-num-layers 1 --pipeline-model-parallel-layout Et|t|tt|mL",
            (
                "the schedule has 1 stage per rank, the layout of the job 2; give a layout of 2 stages: "
                "--pipeline-model-parallel-layout 'Ett|ttmL'"
            ),
        ),
    ],
)
def test_unsupported_jobs_are_rejected_in_one_sentence(ranks: RankPool, flags: str, sentence: str) -> None:
    ranks.run(1, with_fake_megatron, functools.partial(rejects_the_job, flags.split(), sentence))


def refuses_a_ramp() -> None:
    """Before the job trains, as the run would when it reaches the size."""
    from unittest.mock import patch

    from megatron.zero_bubble.core.errors import PlanError
    from megatron.zero_bubble.integration.megatron_lm import install as megatron_lm

    flags = ["--zero-bubble-schedule", "zb-interleaved", "--num-virtual-stages-per-pipeline-rank", "2"]
    batches = "--global-batch-size 4 --rampup-batch-size 2 2 8 --eval-iters 0 --distributed-backend nccl"
    for backend, is_refused in (("nccl", True), ("gloo", False)):
        sys.argv = ["job.py", "--pipeline-model-parallel-size", "2", *flags, *batches.split()]
        with (
            patch.dict("os.environ", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
            patch.object(megatron_lm, "select", lambda _, backend=backend: SimpleNamespace(backend=backend)),
            patch.object(megatron_lm, "has_ramps", lambda: True),
        ):
            megatron_lm.install(parse_ours(flags)[0])
            try:
                with pytest.raises(PlanError, match="with 4 microbatches") if is_refused else nullcontext():
                    sys.modules[MODULES[1]].initialize_megatron()  # type: ignore[attr-defined]
            finally:
                megatron_lm.revert()


def test_a_ramp_to_what_cannot_run_is_refused(ranks: RankPool) -> None:
    ranks.run(1, with_fake_megatron, refuses_a_ramp)
