"""A plan file decides what a job runs; flags may repeat it, and are refused where they contradict it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import Placement, ZeroBubbleConfig, build, simulate
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.megatron_job import checked_megatron_job
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import LAYOUT, NEEDED_LAYOUT, job_layers
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.formats.schedule import sharding_content
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.planning.job.arguments.checks import check_layout
from megatron.zero_bubble.planning.job.arguments.parser import parse
from megatron.zero_bubble.planning.setup import Cuts
from tests.helpers.sources import named

JOB = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3
    --train-iters 3 --global-batch-size 8 --pipeline-model-parallel-size 2"""
PLANNED = Sharding(4, 1)


def written(folder: Path, name: str, more: dict[str, Any] | None = None, **size: Any) -> str:
    source = named(name, 2, **size)
    file = folder / "plan.json"
    file.write_text(plan_to_json(simulate(source.make(4), even_costs(source.placement)), more=more))
    return str(file)


def sharded(folder: Path) -> str:
    return written(folder, "zero-pp", sharding_content(PLANNED), stages=2, unit=4)


def checked(flags: str) -> Any:
    args = parse([*JOB.split(), *flags.split()])
    check_layout(args, 4)
    return args


def test_planned_sharding_is_what_runs(tmp_path: Path) -> None:
    """With the file alone, and with flags that repeat it."""
    file = sharded(tmp_path)
    for given in ({"schedule": file}, {"schedule_file": file}, {"schedule": file, "whole_stages": 1}):
        config = ZeroBubbleConfig(**given)  # type: ignore[arg-type]
        assert config.setup.shards is not None and config.sharding(2) == PLANNED
        assert config.setup.name == file
        assert replace(config, measure_memory=True).sharding(2) == PLANNED
    more = "--use-distributed-optimizer"
    for flags in (
        f"--zero-bubble-schedule {file}",
        f"--zero-bubble-schedule-file {file}",
        f"--zero-bubble-schedule {file} --zero-bubble-shard-weights --zero-bubble-unit-microbatches auto",
        f"--zero-bubble-schedule {file} --zero-bubble-whole-stages 1 --zero-bubble-shard-transport on-demand",
    ):
        args = checked(f"{flags} {more}")
        assert args.zero_bubble.setup.shards is not None and args.zero_bubble.sharding(2) == PLANNED
        assert args.run.setup.shards is not None, "the checks of the job read it"
        of_megatron = checked_megatron_job(f"{JOB} {flags} {more}".split(), 4, 4).args
        assert of_megatron.run.setup.shards is not None and of_megatron.zero_bubble.sharding(2) == PLANNED
    with pytest.raises(UserError, match="sharded units need use_distributed_optimizer=True"):
        checked(f"--zero-bubble-schedule {file}")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--zero-bubble-whole-stages 2", "--zero-bubble-whole-stages must be that of the schedule file, 1; got 2 with"),
        ("--zero-bubble-whole-stages 0", "--zero-bubble-whole-stages must be that of the schedule file, 1; got 0 with"),
        ("--zero-bubble-unit-microbatches 2", "--zero-bubble-unit-microbatches must be .* file, 4; got 2 with .*json"),
        ("--zero-bubble-vocabulary-parallel 2", "--zero-bubble-vocabulary-parallel must be .* off; got 2 with"),
        ("--zero-bubble-num-slices 2", "--zero-bubble-slices must be that of the schedule file, 1; got 2"),
        ("--zero-bubble-placement vee", "--zero-bubble-placement must be .* file, loop; got vee with"),
        ("--zero-bubble-num-chunks 3", "--zero-bubble-num-chunks must be that of the schedule file, 2; got 3 with"),
        (
            "--zero-bubble-post-validation",
            "--zero-bubble-shard-weights and --zero-bubble-post-validation; leave",
        ),
        ("--zero-bubble-attention-share 0.3", "--zero-bubble-attention-share 0.3 works only with .*; got "),
        ("--num-virtual-stages-per-pipeline-rank 3", "the schedule has 2 stages per rank, the job 3; drop"),
        ("--zero-bubble-schedule-file other.json", "the schedule is given twice: "),
    ],
)
def test_flags_that_contradict_the_file_are_refused(flags: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        checked(f"--use-distributed-optimizer --zero-bubble-schedule {sharded(tmp_path)} {flags}")


def test_flags_that_repeat_the_file_are_accepted(tmp_path: Path) -> None:
    divided = written(tmp_path, "zb-h1", {"recompute_logits": True}, vocabulary=2)
    args = checked(f"--zero-bubble-schedule {divided} --zero-bubble-vocabulary-parallel 2")
    assert args.zero_bubble.setup.vocabulary == Divided(2, True)
    assert args.run.setup.vocabulary == Divided(2, True)
    cut = written(tmp_path, "seq-zb-h1", cuts=Cuts(None, (20, 32)))
    for flags in ("--zero-bubble-num-slices 2", "--zero-bubble-slice-ends 20,32", "--zero-bubble-placement linear"):
        assert len(checked(f"--zero-bubble-schedule {cut} {flags}").source.make(4).slices) == 2
    with pytest.raises(UserError, match="slices must be .* file, 20,32; got 16,32 with"):
        checked(f"--zero-bubble-schedule {cut} --zero-bubble-slice-ends 16,32")


@pytest.mark.parametrize("key", [LAYOUT, NEEDED_LAYOUT])
def test_job_gets_the_planned_layout(key: str, tmp_path: Path) -> None:
    """In both loops; flags that give the same layers may stay."""
    file = written(tmp_path, "zb-v", {key: "Et|tt|t|L"})
    for flags in ("", "--num-virtual-stages-per-pipeline-rank 2", "--pipeline-model-parallel-layout Et|(t)*2|t|L"):
        args = checked(f"--zero-bubble-schedule {file} {flags}")
        assert job_layers(args) == (1, 2, 1, 0)
        words = f"{JOB} --zero-bubble-schedule {file} {flags}".split()
        of_megatron = checked_megatron_job(words, 4, 4).args
        assert job_layers(of_megatron) == (1, 2, 1, 0)
        assert of_megatron.num_virtual_stages_per_pipeline_rank is None
        assert of_megatron.virtual_pipeline_model_parallel_size == 2


def test_flags_that_already_divide_layers_as_planned_stay(tmp_path: Path) -> None:
    even = checked(f"--zero-bubble-schedule {written(tmp_path, 'zb-h1', {LAYOUT: 'Ett|ttL'})}")
    assert even.pipeline_model_parallel_layout is None
    ends = "--decoder-first-pipeline-num-layers 1"
    planned = checked(f"--zero-bubble-schedule {written(tmp_path, 'zb-h1', {LAYOUT: 'Et|t*3L'})} {ends}")
    assert planned.pipeline_model_parallel_layout is None and job_layers(planned) == (1, 3)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--pipeline-model-parallel-layout Ett|ttL",
            r"got --pipeline-model-parallel-layout Ett\|ttL; give --pipeline-model-parallel-layout 'Et\|t\*3L' instead",
        ),
        ("--decoder-last-pipeline-num-layers 2", "got --decoder-last-pipeline-num-layers 2; give --pipeline-model"),
        ("--num-layers 6", "is for 4 layers, but the job has --num-layers 6; plan the schedule for this model"),
    ],
)
def test_other_layouts_are_refused_with_the_one_to_give(flags: str, sentence: str, tmp_path: Path) -> None:
    file = written(tmp_path, "zb-h1", {LAYOUT: "Et|t*3L"})
    with pytest.raises(UserError, match=sentence):
        checked(f"--zero-bubble-schedule {file} {flags}")
    with pytest.raises(UserError, match=sentence):
        checked_megatron_job(f"{JOB} --zero-bubble-schedule {file} {flags}".split(), 4, 4)


def test_planned_moves_and_choice(tmp_path: Path) -> None:
    file = written(tmp_path, "zb-h2", {"offload": "50%", "moves": [["0F1", 0, 1, 1]]})
    for given in ({}, {"offload": "50%"}):
        config = ZeroBubbleConfig(file, **given)  # type: ignore[arg-type]
        select = config.selection(config.sources()(2))
        assert select is not None and [str(move.forward) for move in select(config.sources()(2).make(4))] == ["0F1"]
    with pytest.raises(UserError, match="offload must be that of the schedule file, 50%; got auto with"):
        _ = ZeroBubbleConfig(file, offload="auto").setup


def test_planned_vee_is_a_vee(tmp_path: Path) -> None:
    file = written(tmp_path, "zb-v")
    config = ZeroBubbleConfig(file, placement="vee")
    assert config.placement_on(2) == Placement.vee(2)
    assert build("zb-v", num_ranks=2, num_microbatches=4) == config.sources()(2).make(4)


def test_dry_run_has_the_planned_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file alone, from ``plan`` to the dry run of a job."""
    times = "--forward-ms 4 --backward-ms 5 --wgrad-ms 3 --gather-ms 1 --reduce-ms 1 --replicas 2"
    size = "--num-ranks 2 --num-microbatches 4 --num-chunks 2 --unit-microbatches 4 --whole-stages 1"
    assert main(f"plan --schedule zero-pp {size} {times} --shard-weights --format json".split()) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    job = f"{JOB} --mock-data --use-distributed-optimizer --zero-bubble-schedule {file}"
    assert main(f"dry-run --nodes 1 --gpus-per-node 4 -- {job}".split()) == 0
    assert "Sharded units, 1 whole stages per rank" in capsys.readouterr().out
