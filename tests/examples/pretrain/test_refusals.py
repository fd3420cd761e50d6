"""Invalid jobs are rejected early: every rank exits with code 2, and one rank prints one sentence."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.schedules import build
from pretrain.run import main
from tests.helpers.launch import run_training
from tests.helpers.parity import BASE_FLAGS, Layout
from tests.helpers.reads import log_reads

pytestmark = pytest.mark.timeout(200)

ROOT = Path(__file__).resolve().parents[3]
BASE = BASE_FLAGS.split()
PAIR = Layout(2).flags(3).split()
VIRTUAL = [*Layout(2, num_layers=4).flags(4).split(), "--num-virtual-stages-per-pipeline-rank", "2"]
ZERO_BUBBLE = ["--zero-bubble-schedule", "zb-h1"]
SLICES = ["--zero-bubble-schedule", "seq-zb-h1"]


def data(prefix: Path) -> list[str]:
    """Return the base flags with a data file instead of mock data."""
    return [*(word for word in BASE if word != "--mock-data"), "--data-path", str(prefix)]


def broken_data(folder: Path) -> list[str]:
    (folder / "text.bin").write_bytes(bytes(10))
    (folder / "text.idx").write_bytes(b"not an index")
    return [*data(folder / "text"), *PAIR]


BEFORE_TORCH: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "unknown flag": (lambda _: [*BASE, *PAIR, "--zero-buble", "x"], "unrecognized arguments: --zero-buble x"),
    "layers not divisible": (
        lambda _: [*BASE, *PAIR, "--num-layers", "5"],
        "--num-layers must be divisible by the number of pipeline stages, got 5 layers for 2 stages; use 6 layers",
    ),
    "data file missing": (
        lambda folder: [*data(folder / "none"), *PAIR],
        "none.bin, which does not exist; make it with scripts/prepare_data.py",
    ),
    "data file corrupt": (broken_data, "text.idx is not an index of Megatron's indexed format"),
    "schedule file missing": (
        lambda folder: [*BASE, *PAIR, "--zero-bubble-schedule-file", str(folder / "none.json")],
        "none.json: No such file or directory; check the path",
    ),
    "no pipeline": (
        lambda _: [*BASE, *Layout(1, data=2).flags(3).split(), *ZERO_BUBBLE],
        "needs a pipeline of 2 or more ranks, got --pipeline-model-parallel-size 1; raise it or drop the schedule",
    ),
    "slices of a schedule without slices": (
        lambda _: [*BASE, *PAIR, *ZERO_BUBBLE, "--zero-bubble-slices", "2"],
        "--zero-bubble-slices 2 works only with a schedule of slices or zb-auto; got zb-h1; leave",
    ),
    "slices of another length": (
        lambda _: [*BASE, *PAIR, *SLICES, "--zero-bubble-slices", "4,9"],
        "the length of the sequences, --seq-length 8; got --zero-bubble-slices 4,9; give 8 as the last end",
    ),
    "more slices than tokens": (
        lambda _: [*BASE, *PAIR, *SLICES, "--zero-bubble-slices", "9"],
        "a sequence of 8 tokens has at most 8 slices of 1 tokens each; got 9 slices; use fewer",
    ),
    "more slices than tokens with zb-auto": (
        lambda _: [*BASE, *PAIR, "--zero-bubble-schedule", "zb-auto", "--zero-bubble-slices", "9"],
        "a sequence of 8 tokens has at most 8 slices of 1 tokens each; got 9 slices; use fewer",
    ),
    "virtual pipeline": (
        lambda _: [*BASE, *VIRTUAL, *ZERO_BUBBLE],
        "'zb-h1' has one stage per rank; got 2; leave the number out",
    ),
}


@pytest.mark.parametrize("case", BEFORE_TORCH)
def test_invalid_flags_and_files_are_rejected_before_torch_is_imported(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_flags, sentence = BEFORE_TORCH[case]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(make_flags(tmp_path)) == 2
    check(capsys.readouterr().err, sentence)


def plan_for(num_ranks: int, num_microbatches: int) -> Callable[[], str]:
    def plan() -> str:
        schedule = build("zb-h1", num_ranks=num_ranks, num_microbatches=num_microbatches)
        return plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0, 0.0)))

    return plan


def plan_of(placement: Placement, *rows: str) -> Callable[[], str]:
    schedule = Schedule.from_text("by hand", placement, 3, [row.split() for row in rows])
    return lambda: plan_to_json(simulate(schedule, PassCosts.uniform(placement, 1.0, 1.0, 1.0, 0.0)))


OUT_OF_ORDER = (
    "0F0 0F1 0F2 0B0 0B1 0W1 0W0 0B2 0W2",
    "1F0 1B0 1W0 1F1 1B1 1W1 1F2 1B2 1W2",
)
IN_BLOCKS = (
    "0F0 1F0 0F1 1F1 0F2 1F2 1BW0 0BW0 1BW1 0BW1 1BW2 0BW2",
    "2F0 3F0 3BW0 2BW0 2F1 3F1 3BW1 2BW1 2F2 3F2 3BW2 2BW2",
)

FILES: dict[str, tuple[Callable[[], str], str]] = {
    "W passes out of order": (
        plan_of(Placement.linear(2), *OUT_OF_ORDER),
        "stage 0 of 'by hand' runs W of microbatch 1 too early",
    ),
    "two of the first stages on one rank": (
        plan_of(Placement((0, 0, 1, 1)), *IN_BLOCKS),
        "each rank must have one of stages 0..P-1",
    ),
    "not JSON": (lambda: "{", r"schedule file .*plan\.json"),
    "missing pass": (lambda: plan_for(2, 3)().replace(', "1W2"', ""), r"schedule file .*plan\.json.*1W2"),
    "other number of ranks": (plan_for(4, 3), "is for 4 ranks, but the job runs 2 pipeline ranks"),
    "other number of microbatches": (
        plan_for(2, 4),
        "is for 2 ranks and 4 microbatches, but the job runs 2 pipeline ranks",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_invalid_schedule_files_are_rejected_by_all_ranks(case: str, tmp_path: Path) -> None:
    write, sentence = FILES[case]
    file = tmp_path / "plan.json"
    file.write_text(write())
    check_all_refuse([*BASE, *PAIR, "--zero-bubble-schedule-file", str(file)], tmp_path, None, sentence)


def test_all_ranks_end_if_one_cannot_apply_the_schedule(tmp_path: Path) -> None:
    check_all_refuse([*BASE, *PAIR, *ZERO_BUBBLE], tmp_path, refuse_on_rank_1, "rank 1 has another megatron-core")


def refuse_on_rank_1(rank: int) -> None:
    patches = importlib.import_module(
        "megatron.zero_bubble.integration.patching.apply"
    )  # the package has a function of that name

    from megatron.zero_bubble.core.errors import SeamError

    def another() -> Any:
        raise SeamError("rank 1 has another megatron-core")

    if rank == 1:
        patches.installed_seams = another


def test_schedule_file_is_read_once_per_rank(tmp_path: Path) -> None:
    file, log = tmp_path / "plan.json", tmp_path / "reads"
    file.write_text(plan_for(2, 3)())
    words = [*BASE, *PAIR, "--zero-bubble-schedule-file", str(file)]
    ended = run_training(2, words, tmp_path, partial(count_reads, file=file, log=log))
    assert [rank.exit_code for rank in ended] == [0, 0], ended[0].output
    assert sorted(log.read_text().split()) == ["rank-0", "rank-1"]


def count_reads(rank: int, file: Path, log: Path) -> None:
    log_reads(file, log, f"rank-{rank}")


@pytest.mark.parametrize("flags", [[], ["--eval-iters", "0"]])
def test_split_without_documents_is_rejected(tmp_path: Path, flags: list[str]) -> None:
    """The default ``--split`` of forty documents leaves none for the test split; evaluation need not be enabled."""
    articles = tmp_path / "articles.jsonl"
    articles.write_text("".join(json.dumps({"text": f"article {number}"}) + "\n" for number in range(40)))
    prepare = [sys.executable, str(ROOT / "scripts/prepare_data.py"), "--input", str(articles)]
    subprocess.run([*prepare, "--output-prefix", str(tmp_path / "mine")], check=True)
    words = [*data(tmp_path / "mine"), *PAIR, *flags]
    sentence = (
        "the test split of .*mine without documents .train 39, valid 1, test 0 of 40 documents.; give test a larger"
    )
    check_all_refuse(words, tmp_path, None, sentence)


def test_invalid_memory_limit_is_rejected(tmp_path: Path) -> None:
    words = [*BASE, *PAIR, "--zero-bubble-schedule", "zb-auto", "--zero-bubble-memory-limit", "60GB"]
    check_all_refuse(words, tmp_path, None, "a memory limit is written like 1p .* or 60GiB; got '60GB'")


def test_unknown_megatron_core_is_rejected(tmp_path: Path) -> None:
    sentence = "core 0.13, 0.14, 0.15, 0.16, 0.17, 0.18, 0.19, 0.20; this is 0.99.0; install a supported version"
    check_all_refuse([*BASE, *PAIR, *ZERO_BUBBLE], tmp_path, another_version, sentence)


def another_version(_rank: int) -> None:
    import megatron.core

    from pretrain import model

    def too_late(*_: Any) -> Any:
        raise AssertionError("a model was built")

    megatron.core.__version__ = "0.99.0"
    model.build_model = too_late


def test_too_old_megatron_core_is_rejected(tmp_path: Path) -> None:
    sentence = "needs megatron-core 0.15 or newer, got 0.14.1; install 0.16.1, or run Megatron-LM's own script under"
    check_all_refuse([*BASE, *PAIR], tmp_path, an_old_version, sentence)


def an_old_version(_rank: int) -> None:
    import megatron.core

    megatron.core.__version__ = "0.14.1"


def test_changed_seam_is_rejected(tmp_path: Path) -> None:
    sentence = r"layers\.linear_with_grad_accumulation_and_async_allreduce must accept .* it has \(x, w\)"
    check_all_refuse([*BASE, *PAIR, *ZERO_BUBBLE], tmp_path, another_linear, sentence)


def another_linear(_rank: int) -> None:
    from megatron.core.tensor_parallel import layers

    layers.linear_with_grad_accumulation_and_async_allreduce = lambda x, w: x @ w.t()


def test_variable_sequence_lengths_are_rejected_with_slices(tmp_path: Path) -> None:
    sentence = "exclude each other, because sequences are cut at the same tokens .* and schedule=seq-zb-h1"
    check_all_refuse([*BASE, *PAIR, *SLICES], tmp_path, variable_lengths, sentence)


def variable_lengths(_rank: int) -> None:
    from pretrain import model

    connect = model.connect

    def connect_and_change(args: Any, chunks: Any, optimizer: Any) -> None:
        connect(args, chunks, optimizer)
        chunks[0].config.variable_seq_lengths = True

    model.connect = connect_and_change


def check_all_refuse(words: list[str], folder: Path, setup: Callable[[int], object] | None, sentence: str) -> None:
    """Run two ranks; both must exit with code 2, and only rank 0 prints the error."""
    first, second = run_training(2, words, folder, setup)
    assert (first.exit_code, second.exit_code) == (2, 2), first.output + second.output
    check(
        "".join(line for line in first.output.splitlines(keepends=True) if "zero-bubble: 2 ranks" not in line), sentence
    )
    assert "error" not in second.output


def check(output: str, sentence: str) -> None:
    """Check that ``output`` has exactly one error, which contains ``sentence`` or matches it as a pattern."""
    assert len(re.findall("^error: ", output, re.MULTILINE)) == 1, output
    assert "Traceback" not in output
    assert sentence in output or re.search(sentence, output, re.DOTALL), output
