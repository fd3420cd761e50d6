import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from corpus import write_documents

from megatron.zero_bubble.__main__ import main
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.training import SMALL, losses, run, train

EXPERTS = "--num-experts 4 --swiglu --disable-bias-linear"
DROPOUT = "--mock-data --attention-dropout 0.1 --hidden-dropout 0.1"


def test_two_pipeline_ranks_learn_a_text(ranks: RankPool, tmp_path: Path) -> None:
    """The loss falls from that of random guessing among 257 ids, ln 257 = 5.55, to less than half of it."""
    write_documents(str(tmp_path / "text"), [b"the quick brown fox jumps over the lazy dog. " * 20] * 20)
    data = f"--data-path {tmp_path}/text --split 90,5,5 --eval-iters 1"
    flags = f"{data} --pipeline-model-parallel-size 2 --train-iters 30 --lr 1e-2"
    flags += " --position-embedding-type rope"
    lines = train(ranks, 2, flags, tmp_path / "metrics")
    seen = losses(lines)
    assert list(seen) == list(range(1, 31))
    assert seen[1][0] == pytest.approx(5.55, abs=0.2)
    assert seen[30][0] < 2.5
    assert losses(lines, "evaluation")[30][0] == pytest.approx(seen[30][0], abs=0.5)


@pytest.mark.parametrize(
    "schedule", [pytest.param("", marks=pytest.mark.full), "--zero-bubble-schedule zb-v --zero-bubble-post-validation"]
)
def test_log_bubble_reports_bubbles_and_changes_no_result(ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    """Evaluations do not count as iterations; with post-validation, counts of steps are reported as well."""
    flags = f"--mock-data --pipeline-model-parallel-size 2 {schedule} --train-iters 7 --log-interval 3"
    flags += " --global-batch-size 8"
    seen = train(ranks, 2, f"{flags} --zero-bubble-log-bubble --eval-iters 1 --eval-interval 3", tmp_path / "seen")
    assert losses(seen) == losses(train(ranks, 2, flags, tmp_path / "plain"))
    bubbles = [line for line in seen if line["kind"] == "bubble"]
    assert [(line["iteration"], line["num_iterations"]) for line in bubbles] == [(3, 3), (6, 3), (7, 1)]
    for line in bubbles:
        assert 0.0 <= line["planned"] < 0.5  # zb-v can have no planned bubble
        assert 0.0 < line["measured"] < 1.0
        assert ("steps" in line) == ("post-validation" in schedule)
        assert line.get("steps", line["iteration"]) in (line["iteration"] - 1, line["iteration"])


def test_batch_size_ramp_up(ranks: RankPool, tmp_path: Path) -> None:
    lines = train(ranks, 1, "--mock-data --rampup-batch-size 4 4 30 --global-batch-size 12", tmp_path / "metrics")
    assert [line["num_microbatches"] for line in lines] == [2, 2, 2, 2, 4, 4]
    assert [line["consumed_samples"] for line in lines] == [4, 8, 12, 16, 24, 32]


def test_evaluation_is_repeatable_and_does_not_affect_training(ranks: RankPool, tmp_path: Path) -> None:
    """Holds with parameters gathered during the forward and independent of the random states of dropout."""
    flags = f"{DROPOUT} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --train-iters 4"
    often = train(ranks, 2, f"{flags} --eval-iters 1 --eval-interval 2", tmp_path / "often")
    plain = train(ranks, 2, flags, tmp_path / "plain")
    assert losses(often) == losses(plain)
    evaluations = [line for line in often if line["kind"] == "evaluation"]
    assert [(line["iteration"], line["split"]) for line in evaluations] == [(2, "valid"), (4, "valid"), (4, "test")]
    frozen = train(ranks, 1, f"{DROPOUT} --lr 0 --eval-iters 1 --eval-interval 1 --train-iters 2", tmp_path / "frozen")
    valid = [line["lm_loss"] for line in frozen if line.get("split") == "valid"]
    assert valid[0] == valid[1], "every evaluation must use the same samples, without dropout"


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.full),
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01",
        pytest.param(
            "--pipeline-model-parallel-size 2 --reset-attention-mask --reset-position-ids --eod-mask-loss",
            marks=pytest.mark.full,
        ),
        pytest.param("--optimizer sgd --fp16 --loss-scale 128 --squared-relu", marks=pytest.mark.full),
    ],
)
def test_megatron_core_features_train(ranks: RankPool, tmp_path: Path, flags: str) -> None:
    seen = losses(train(ranks, 2, f"--mock-data {flags}", tmp_path / "metrics"))
    assert seen[6][0] < seen[1][0]


def test_last_iterations_are_reported_with_any_log_interval(ranks: RankPool, tmp_path: Path) -> None:
    lines = train(ranks, 1, "--mock-data --log-interval 4 --train-iters 6 --exit-interval 5", tmp_path / "metrics")
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]


def screen(rank: int, num_ranks: int, words: list[str]) -> str:
    """Run one rank and return its standard output."""
    with redirect_stdout(StringIO()) as out:
        run(rank, num_ranks, words)
    return out.getvalue()


def test_start_and_dry_run_say_what_full_recomputation_costs(
    ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    job = f"{SMALL} --mock-data --pipeline-model-parallel-size 2 --train-iters 1 {recompute} --zero-bubble-schedule"
    shown = "".join(ranks.run(2, screen, 2, f"{job} zb-h1".split(), timeout=100))
    (sentence,) = re.findall("zero-bubble: (with --recompute-granularity full, .*)", shown)
    assert "zb-h1 keeps an estimated" in sentence
    for schedule in ("zb-h1", "1f1b"):
        assert main(["dry-run", "--gpus-per-node", "2", "--", *f"{job} {schedule}".split()]) == 0
        assert (f"\n{sentence}\n" in capsys.readouterr().out) == (schedule == "zb-h1")


def test_start_and_dry_run_say_that_the_all_to_all_is_not_hidden(
    ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, by the first rank; not without expert parallelism, with pairs or under Megatron's own schedule."""
    experts = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16"
    job = f"{SMALL} --mock-data --pipeline-model-parallel-size 2 --disable-bias-linear --train-iters 1"
    h1 = "--zero-bubble-schedule zb-h1"
    shown = "".join(ranks.run(4, screen, 4, f"{job} {experts} {h1}".split(), timeout=100))
    (sentence,) = re.findall("zero-bubble: (the all-to-all of experts .*)", shown)
    assert "over 2 ranks is not hidden by schedule zb-h1; where it takes" in sentence
    pairs = "--zero-bubble-schedule interleaved-1f1b --zero-bubble-overlap-experts"
    for flags, is_said in ((f"{experts} {h1}", True), (h1, False), (f"{experts} {pairs}", False), (experts, False)):
        assert main(["dry-run", "--gpus-per-node", "4", "--", *f"{job} {flags}".split()]) == 0
        assert (f"\n{sentence}\n" in capsys.readouterr().out) == is_said, flags


AHEAD = "--zero-bubble-schedule zb-h1 --zero-bubble-post-validation"


@pytest.mark.parametrize("flags", some(["", AHEAD], AHEAD))
def test_first_iteration_is_logged_with_any_log_interval(ranks: RankPool, flags: str) -> None:
    """With post-validation, the first iteration is logged once its step is final."""
    job = f"{SMALL} --mock-data --pipeline-model-parallel-size 2 --log-interval 100 {flags}"
    shown = "".join(ranks.run(2, screen, 2, job.split(), timeout=100))
    assert re.findall(r"iteration (\d+)/6 ", shown) == ["1", "6"]
