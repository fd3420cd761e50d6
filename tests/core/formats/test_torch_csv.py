"""Schedules in torch's CSV form: equal after a round trip, and run by torch's own runtime with the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.analysis.errors import ScheduleError
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import read_plan_file
from megatron.zero_bubble.core.formats.torch_csv import plan_to_csv, schedule_from_csv, schedule_to_csv
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.plan import plan_of
from megatron.zero_bubble.core.schedules import build
from tests.helpers.ranks import RankPool
from tests.helpers.torch_orders import csv_of_torch

NAMES = ("1f1b", "zb-h2", "zb-v", "dualpipe-v", "interleaved-1f1b", "gis", "zero-pp")


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_are_read_as_they_were_written(name: str) -> None:
    schedule = build(name, num_ranks=3, num_microbatches=7)
    assert schedule_from_csv(schedule_to_csv(schedule), name) == schedule
    lowered = plan_to_csv(plan_of(schedule))
    assert "SEND_F" in lowered and "RECV_B" in lowered
    assert schedule_from_csv(lowered, name) == schedule


@pytest.mark.parametrize("name", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_schedules_that_torch_writes_are_read(name: str, tmp_path: Path) -> None:
    """DualPipeV has overlapped pairs of passes in one cell."""
    file = tmp_path / f"{name}.csv"
    file.write_text(csv_of_torch(name, 4, 8))
    schedule = read_plan_file(file).schedule
    assert (schedule.name, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (name, 4, 8, 8)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,0B0\n0F1", "every stage must be on one rank; got 0F1 on rank 1, and stage 0 on rank 0 before"),
        ("", "it must have passes of every stage from 0 on, .*; got none of stage 0"),
        ("0F0,2F0", "got none of stage 1; write them as 1F0, 1I0, 1W0 or 1B0"),
        ("0F0,0B0\n900000000F0,900000000B0", "got none of stage 1; write them"),
        ("0F0," + 140_000 * "x", "it must be CSV with one action in each cell; field larger than field limit"),
        ("0F\u0663,0B\u0663", "a cell is <stage><action><microbatch>"),  # a digit of another script
        ("0F0,0X0", "a cell is <stage><action><microbatch> .*; got '0X0' on line 1"),
        ("0F0,0B0,0W0", "got 0B0 and 0W0; in files of torch before 2.6, B is the gradient of the input, .*: write I"),
        ("0F0,0BW0", r"got '0BW0' on line 1; correct it \(in files of torch before 2.6, B is the gradient of the"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        schedule_from_csv(text, "x")


def test_an_order_that_cannot_run_is_refused_with_its_grid() -> None:
    with pytest.raises(ScheduleError, match="0B0"):
        schedule_from_csv("0I0,0F0,0W0", "x")


def test_slices_are_refused() -> None:
    with pytest.raises(UserError, match="torch's CSV has passes of whole sequences"):
        schedule_to_csv(build("seq-zb-h1", num_ranks=2, num_microbatches=2))


def test_plan_reads_and_writes_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = "--num-ranks 2 --num-microbatches 3 --forward-ms 1 --backward-ms 1 --wgrad-ms 1"
    for form in ("csv", "lowered-csv"):
        assert main(f"plan --schedule zb-v {size} --equal-passes --format {form}".split()) == 0
        file = tmp_path / f"{form}.csv"
        file.write_text(capsys.readouterr().out)
        assert read_plan_file(file).schedule.order == build("zb-v", num_ranks=2, num_microbatches=3).order
        assert main(f"plan --schedule-file {file} {size}".split()) == 0
        assert capsys.readouterr().out.startswith(f"{form}: 2 ranks, 3 microbatches")


WIDTH, BATCH = 8, 2


def blocks(num_stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(num_stages)]


def batch(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(num_microbatches * BATCH, WIDTH), torch.randn(num_microbatches * BATCH, WIDTH)


def gradients_on_torch(rank: int, schedule: Schedule, folder: str) -> dict[str, dict[int, list[torch.Tensor]]]:
    """Run a schedule in both forms on torch's runtime; the gradients of this rank's stages."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    found = {}
    group = torch.distributed.new_group([*range(schedule.num_ranks)])
    inputs, targets = batch(schedule.num_microbatches)
    texts = {"compute_only": schedule_to_csv(schedule), "compute_comms": plan_to_csv(plan_of(schedule))}
    for form, text in texts.items():
        file = Path(folder) / f"{form}{rank}.csv"
        file.write_text(text)
        modules = blocks(schedule.num_stages)
        own = schedule.placement.stages_of(rank)
        stages = [
            PipelineStage(
                modules[s], s, schedule.num_stages, torch.device("cpu"), group=group, input_args=inputs[:BATCH]
            )
            for s in own
        ]
        runtime = _PipelineScheduleRuntime(
            stages, schedule.num_microbatches, loss_fn=torch.nn.functional.mse_loss, scale_grads=False
        )
        runtime._load_csv(str(file), form)
        first, last = 0 in own, schedule.num_stages - 1 in own
        runtime.step(*([inputs] if first else []), target=targets if last else None, losses=[] if last else None)
        found[form] = {s: [weight.grad for weight in modules[s].parameters()] for s in own}
    return found


@pytest.mark.parametrize("name", ["zb-interleaved", pytest.param("zb-v", marks=pytest.mark.full)])
def test_torch_runs_our_schedules_with_equal_gradients(ranks: RankPool, name: str, tmp_path: Path) -> None:
    schedule = build(name, num_ranks=2, num_microbatches=4)
    results = ranks.run(2, gradients_on_torch, schedule, str(tmp_path), timeout=60)
    modules, (inputs, targets) = blocks(schedule.num_stages), batch(schedule.num_microbatches)
    for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        torch.nn.functional.mse_loss(torch.nn.Sequential(*modules)(x), y).backward()
    for forms in results:
        for stages in forms.values():
            for stage, gradients in stages.items():
                wanted = [weight.grad for weight in modules[stage].parameters()]
                assert len(gradients) == len(wanted)
                torch.testing.assert_close(gradients, wanted)
