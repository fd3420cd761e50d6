"""Options of Megatron-LM jobs that schedules do not support are rejected at the start, in one sentence per rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.formats.plan import plan_to_json
from tests.examples.pretrain.data.test_batches import write_constant
from tests.helpers.megatron_lm import VARIABLE, Checkout, checkouts, pretrain_gpt

CHECKOUTS = checkouts()
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
    pytest.mark.timeout(300),
]
PIPELINE = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"


def check_refused(checkout: Checkout, flags: str, schedule: str, sentence: str) -> None:
    """Check that both ranks exit on their own and print ``sentence``."""
    log = pretrain_gpt(checkout, 2, f"{PIPELINE} {flags}", schedule)
    assert log.exit_codes == (1, 1), log.text[-4000:]
    assert [line.count(sentence) for line in log.of("zero-bubble: ") if sentence in line] == [1, 1], log.text[-4000:]
    assert "Traceback" not in log.text


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
@pytest.mark.parametrize(
    ("flags", "schedule", "sentence"),
    [
        (
            "--microbatch-group-size-per-virtual-pipeline-stage 3 --num-virtual-stages-per-pipeline-rank 2",
            "interleaved-1f1b",
            "got --microbatch-group-size-per-virtual-pipeline-stage 3 and 2 ranks; drop the flag",
        ),
        (
            "--no-overlap-p2p-communication --num-virtual-stages-per-pipeline-rank 2",
            "interleaved-1f1b",
            "--no-overlap-p2p-communication does not work with a zero-bubble schedule",
        ),
    ],
)
def test_options_of_megatrons_own_schedules_are_rejected(
    checkout: Checkout, flags: str, schedule: str, sentence: str
) -> None:
    check_refused(checkout, flags, schedule, sentence)


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_default_microbatch_group_size_is_accepted(checkout: Checkout) -> None:
    flags = "--microbatch-group-size-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2"
    log = pretrain_gpt(checkout, 2, f"{PIPELINE} {flags} --train-iters 3", "interleaved-1f1b")
    assert log.exit_codes == (0, 0), log.text[-4000:]


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_overlap_at_both_ends_is_switched_off_with_a_line(checkout: Checkout) -> None:
    flags = "--overlap-p2p-communication-warmup-flush --num-virtual-stages-per-pipeline-rank 2"
    log = pretrain_gpt(checkout, 2, f"{PIPELINE} {flags} --train-iters 3", "interleaved-1f1b")
    assert log.exit_codes == (0, 0), log.text[-4000:]
    lines = log.of("zero-bubble: --overlap-p2p-communication-warmup-flush is switched off")
    assert len(lines) == 1, log.text[-4000:]


class TestScheduleFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        schedule = build("1f1b", num_ranks=2, num_microbatches=4)
        file = tmp_path / "plan.json"
        file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))))
        return file

    def refused(self, checkout: Checkout, file: Path, flags: str, sentence: str) -> None:
        log = pretrain_gpt(checkout, 2, f"{PIPELINE} --zero-bubble-schedule-file {file} {flags}", None)
        assert log.exit_codes == (1, 1), log.text[-4000:]
        assert [sentence in line for line in log.of("zero-bubble: ")].count(True) == 2, log.text[-4000:]
        assert "Traceback" not in log.text
        assert log.figures == []

    @pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
    def test_growing_batch_is_rejected(self, checkout: Checkout, file: Path) -> None:
        if int(checkout.minor.partition(".")[2]) < 18:
            flags = "--rampup-batch-size 4 1 24 --global-batch-size 6 --train-samples 60 --lr-decay-samples 50"
            counts = "4, 5 and 6"
        else:
            flags = "--step-batch-size-schedule=0:4,640:5 --train-samples 60 --lr-decay-samples 50 --eval-iters 0"
            counts = "4 and 5"
        self.refused(
            checkout, file, flags, f"the schedule file is for 4 microbatches, but this job runs {counts} (batch ramp-up"
        )

    @pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
    def test_other_batch_size_is_rejected(self, checkout: Checkout, file: Path) -> None:
        words = "is for 2 ranks and 4 microbatches, but the job runs 2 pipeline ranks and 6 microbatches"
        self.refused(checkout, file, "--global-batch-size 6", words)

    @pytest.mark.parametrize(
        "checkout", [each for each in CHECKOUTS if int(each.minor.partition(".")[2]) >= 18], ids=str
    )
    def test_other_evaluation_batch_size_is_rejected(self, checkout: Checkout, file: Path) -> None:
        words = "but this job runs 2 and 4 (batch ramp-up or evaluation)"
        self.refused(checkout, file, "--global-batch-size 4 --eval-global-batch-size 2", words)

    @pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
    def test_record_costs_with_fused_backwards_is_rejected(self, checkout: Checkout, file: Path) -> None:
        flags = f"--global-batch-size 4 --zero-bubble-record-costs {file.parent}/costs.json"
        self.refused(checkout, file, flags, "needs a schedule that splits every backward into B and W, got")

    @pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
    def test_matching_batch_size_trains(self, checkout: Checkout, file: Path) -> None:
        flags = f"{PIPELINE} --zero-bubble-schedule-file {file} --global-batch-size 4 --train-iters 3"
        log = pretrain_gpt(checkout, 2, flags, None)
        assert log.exit_codes == (0, 0), log.text[-4000:]
        assert len(log.figures) >= 2


class TestData:
    """Forty documents, of which ``--split 99,1,0`` leaves none for the validation split."""

    @pytest.fixture
    def prefix(self, tmp_path: Path) -> str:
        return write_constant(tmp_path / "mine", 10)

    @pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
    @pytest.mark.parametrize("listed", [False, True], ids=["flags", "file"])
    def test_split_without_documents_is_rejected(self, checkout: Checkout, prefix: str, listed: bool) -> None:
        flags = f"--data-path {prefix}"
        if listed:
            Path(f"{prefix}.list").write_text(f"1.0 {prefix}\n")
            flags = f"--data-args-path {prefix}.list"
        words = f"the valid split of {prefix} without documents (train 40, valid 0, test 0 of 40 documents)"
        check_refused(checkout, flags, "zb-h1", words)

    @pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
    def test_splits_with_documents_train(self, checkout: Checkout, prefix: str) -> None:
        log = pretrain_gpt(checkout, 2, f"{PIPELINE} --data-path {prefix} --split 9,1,0 --train-iters 3", "zb-h1")
        assert log.exit_codes == (0, 0), log.text[-4000:]
        assert len(log.figures) >= 3
