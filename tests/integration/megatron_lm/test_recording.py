"""Tests of recordings in Megatron-LM jobs: chosen iterations, in the job's numbering, written after the last one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count, repeat
from pathlib import Path

import pytest

from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.trace import read_trace_file
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_foreign_loop import STEPS, train

MODEL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --vocab-size 32"


@dataclass
class Args:
    """A job's flags; ``curr_iteration`` advances with each read, once per iteration.

    Attributes:
        again: number of repetitions of the first iteration.
    """

    start: int
    train_iters: int
    exit_interval: int | None = None
    rank: int = 0
    again: int = 0

    def __post_init__(self) -> None:
        self._counter = chain(repeat(self.start, self.again), count(self.start))

    @property
    def curr_iteration(self) -> int:
        return next(self._counter)


def job(
    rank: int, folder: str, iterations: str | None, args: Args, in_the_way: str | None = None
) -> tuple[list[str], list[str]]:
    """Run the job on one rank; return the lines printed until its last iteration, and those printed at its end."""
    from megatron.core import parallel_state

    from megatron.zero_bubble import ZeroBubbleConfig
    from megatron.zero_bubble.integration.megatron_lm.trace import JobTrace
    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.arguments.parser import parse_megatron
    from megatron.zero_bubble.planning.job.flags import parse_ours

    for name, value in vars(parse_megatron(MODEL.split())[0]).items():
        vars(args).setdefault(name, value)
    flags = ["--zero-bubble-schedule", "zb-h1", "--zero-bubble-trace", folder]
    flags += ["--zero-bubble-record-costs", f"{folder}/costs.json"]
    flags += ["--zero-bubble-trace-iterations", iterations] if iterations else []
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    said: list[str] = []
    args.rank = rank
    trace = JobTrace(parse_ours(flags)[0], args, said.append)
    if rank == 0:
        trace.make_folders()
    if in_the_way and rank == 0:
        Path(folder, in_the_way).mkdir()
    trace.pipeline = apply(ZeroBubbleConfig("zb-h1", measure_memory=True), [trace, trace.recorder])
    try:
        train()
    finally:
        revert()
    at_end = len(said)
    trace._check()
    return said[:at_end], said[at_end:]


@pytest.mark.parametrize(
    ("iterations", "args", "recorded"),
    [
        (None, Args(0, STEPS), [1, 2, 3]),
        (None, Args(20, 10**6, exit_interval=23), [21, 22, 23]),
        (
            "5-6,8,11-20",
            Args(4, 10),
            [5, 6],
        ),  # the job would run to 10; the last iteration to record is 8, which it does not reach
        ("2,4-1000", Args(1, 4), [2, 4]),
        (None, Args(0, 2, again=1), [1, 2]),
    ],
)
def test_chosen_iterations_are_recorded(
    ranks: RankPool, tmp_path: Path, iterations: str | None, args: Args, recorded: list[int]
) -> None:
    (said, at_end), _ = ranks.run(2, job, str(tmp_path / "x"), iterations, args)
    if recorded == [5, 6]:
        assert said == []
        assert at_end == ["the job ended before iteration 8, the last to record, so no trace was written"]
        assert not list((tmp_path / "x").iterdir())
        return
    assert at_end == []
    assert [line.partition(" recorded in ")[0] for line in said] == [f"iterations until {recorded[-1]}"] * 2
    recording = read_trace_file(tmp_path / "x/trace.json")
    assert list(recording.traces) == recorded
    assert recording.memory is not None
    facts = read_costs_file(tmp_path / "x/costs.json").facts
    assert (facts["hidden_size"], facts["vocabulary_size"], facts["gpu"]) == (16, 32, "cpu")
    assert {path.name for path in (tmp_path / "x").iterdir()} == {
        "trace.json", "timeline.svg", "timeline.html", "perfetto.json", "costs.json",
    }  # fmt: skip


def test_job_that_starts_after_the_chosen_iterations_writes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    (said, at_end), _ = ranks.run(2, job, str(tmp_path), "10-12", Args(100, 103))
    assert at_end == []
    assert [line.partition(" to ")[0] for line in said] == ["no iteration was recorded, so nothing is written"] * 2


def rejection(rank: int, flags: list[str]) -> str:
    """Return the error that a recording raises before the job starts, or an empty string."""
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.integration.megatron_lm.trace import JobTrace
    from megatron.zero_bubble.planning.job.flags import parse_ours

    try:
        JobTrace(parse_ours(flags)[0], Args(0, STEPS), print).make_folders()
    except UserError as error:
        return str(error)
    return ""


def test_unwritable_output_is_rejected_before_the_job_starts(ranks: RankPool, tmp_path: Path) -> None:
    flags = ["--zero-bubble-schedule", "zb-h1", "--zero-bubble-trace", f"{__file__}/x"]
    sentence = f"cannot write to the folder {__file__}/x: Not a directory; give another path"
    assert ranks.run(1, rejection, flags) == [sentence]
    flags[2:] = ["--zero-bubble-record-costs", str(tmp_path)]
    sentence = f"--zero-bubble-record-costs needs a file, got the folder {tmp_path}; name a file"
    assert ranks.run(1, rejection, flags) == [sentence]
    flags[2:] = ["--zero-bubble-record-costs", f"{tmp_path}/costs.json"]
    assert ranks.run(1, rejection, flags) == [""]


def test_unwritable_file_does_not_prevent_the_others(ranks: RankPool, tmp_path: Path) -> None:
    (said, at_end), _ = ranks.run(2, job, str(tmp_path), None, Args(0, STEPS), "trace.json")
    assert at_end == []
    assert said == [
        f"cannot write the recorded iterations to {tmp_path}: Is a directory; they are lost",
        f"iterations until {STEPS} recorded in {tmp_path}/costs.json",
    ]
