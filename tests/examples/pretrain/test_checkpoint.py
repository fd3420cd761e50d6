import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.batch_sizes import BatchSizes
from pretrain.checkpoint_folder import (
    MANIFEST,
    TRACKER,
    checkpoint_path,
    incompleteness,
    latest_iteration,
)
from pretrain.data.batches import Splits, check_length
from tests.helpers.ranks import RankFailure, RankPool
from tests.helpers.training import losses, train

DROPOUT = "--mock-data --attention-dropout 0.1 --hidden-dropout 0.1"
EXPERTS = "--num-experts 4 --swiglu --disable-bias-linear --moe-token-dispatcher-type alltoall"
PIPELINE = f"{DROPOUT} --pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--pipeline-model-parallel-size 2", marks=pytest.mark.full),
        "--pipeline-model-parallel-size 2 --zero-bubble-schedule zb-h2 --zero-bubble-post-validation --bf16",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16",
        pytest.param(f"{EXPERTS} --expert-model-parallel-size 2", marks=pytest.mark.full),
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel --fp16 --initial-loss-scale 1024",
            marks=pytest.mark.full,
        ),
    ],
)
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(ranks: RankPool, tmp_path: Path, flags: str) -> None:
    flags = f"{DROPOUT} {flags} --global-batch-size 8"
    whole = losses(train(ranks, 2, flags, tmp_path / "whole"))
    cut = losses(train(ranks, 2, f"{flags} --save {tmp_path}/saved --exit-interval 3", tmp_path / "cut"))
    resumed = losses(train(ranks, 2, f"{flags} --load {tmp_path}/saved", tmp_path / "resumed"))
    assert list(cut) == [1, 2, 3] and list(resumed) == [4, 5, 6]
    assert {**cut, **resumed} == whole


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of iteration 2 from two pipeline ranks; tests that damage it use the copy ``own``."""
    folder = tmp_path_factory.mktemp("saved")
    train(ranks, 2, f"{PIPELINE} --train-iters 2 --save {folder}")
    return folder


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "own"))


def refusal(ranks: RankPool, flags: str) -> str:
    """Train and return the error that both ranks must raise."""
    with pytest.raises(RankFailure) as caught:
        train(ranks, 2, flags)
    name = f"{UserError.__module__}.{UserError.__qualname__}: "
    sentences = {
        line.removeprefix(name)
        for report in caught.value.reports.values()
        for line in report.splitlines()
        if line.startswith(name)
    }
    [sentence] = sentences
    assert all(name in report for report in caught.value.reports.values()), (
        "every rank must raise the error, or it would hang"
    )
    return sentence


def test_tracker_names_a_complete_checkpoint(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["iter_0000002", TRACKER]
    assert latest_iteration(saved) == 2
    assert (checkpoint_path(saved, 2) / MANIFEST).is_file()


def test_checkpoint_loads_with_another_parallel_layout(ranks: RankPool, saved: Path, tmp_path: Path) -> None:
    """Evaluations are compared, because training differs in dropout: random states belong to ranks."""
    test = f"--load {saved} --train-iters 2 --eval-iters 2"
    same = losses(train(ranks, 2, f"{PIPELINE} {test}", tmp_path / "same"), "evaluation")
    other = losses(train(ranks, 2, f"{DROPOUT} {test}", tmp_path / "other"), "evaluation")
    assert same[2][0] == pytest.approx(other[2][0], rel=1e-5)


def test_finetune_loads_weights_and_resets_progress(ranks: RankPool, saved: Path, tmp_path: Path) -> None:
    tuned = losses(train(ranks, 2, f"{PIPELINE} --load {saved} --finetune --train-iters 1", tmp_path / "tuned"))
    fresh = losses(train(ranks, 2, f"{PIPELINE} --train-iters 1", tmp_path / "fresh"))
    assert list(tuned) == [1] and tuned[1][4] == fresh[1][4] == 16, "iterations and samples must start from zero"
    assert tuned[1][0] < fresh[1][0]


def test_missing_checkpoint_starts_from_scratch_unless_forbidden(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"{PIPELINE} --load {tmp_path}/none"
    assert list(losses(train(ranks, 2, f"{flags} --train-iters 1", tmp_path / "metrics"))) == [1]
    assert "--load needs a checkpoint" in refusal(ranks, f"{flags} --exit-on-missing-checkpoint")


def test_unwritable_save_directory_is_rejected_before_training(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--save needs a writable directory" in refusal(ranks, f"{PIPELINE} --save {tmp_path}/file/x")


def test_foreign_checkpoint_requires_finetune(ranks: RankPool, own: Path) -> None:
    common = checkpoint_path(own, 2) / "common.pt"
    contents = torch.load(common, weights_only=False)
    del contents["train_state"], contents["layout"]
    torch.save(contents, common)
    (checkpoint_path(own, 2) / MANIFEST).unlink()
    assert "add --finetune" in refusal(ranks, f"{PIPELINE} --load {own}")
    train(ranks, 2, f"{PIPELINE} --load {own} --finetune --train-iters 1")


class TestDamage:
    def test_truncated_file_is_reported(self, own: Path) -> None:
        path = checkpoint_path(own, 2)
        assert incompleteness(path) is None
        victim = next(path.glob("*.distcp"))
        victim.write_bytes(victim.read_bytes()[:-100])
        sentence = incompleteness(path) or ""
        assert f"bytes in {victim.name}, got {victim.stat().st_size}" in sentence
        assert TRACKER in sentence, "the error must name the remedy"

    def test_missing_file_is_reported(self, own: Path) -> None:
        (checkpoint_path(own, 2) / "common.pt").unlink()
        assert "bytes in common.pt, got no such file" in (incompleteness(checkpoint_path(own, 2)) or "")

    def test_checkpoint_without_manifest_is_accepted(self, own: Path) -> None:
        (checkpoint_path(own, 2) / MANIFEST).unlink()
        assert incompleteness(checkpoint_path(own, 2)) is None

    def test_invalid_tracker_is_rejected(self, own: Path) -> None:
        (own / TRACKER).write_text("noise\n")
        with pytest.raises(UserError, match="must contain an iteration number, got 'noise'"):
            latest_iteration(own)

    def test_missing_directory_is_rejected_by_every_rank(self, ranks: RankPool, own: Path) -> None:
        (own / TRACKER).write_text("7")
        sentence = refusal(ranks, f"{PIPELINE} --load {own}")
        assert f"iter_0000007, which {TRACKER} names, does not exist" in sentence

    def test_corrupt_file_is_rejected_by_every_rank(self, ranks: RankPool, own: Path) -> None:
        """Only one rank reads the corrupt file; the other must not wait for it."""
        victim = max(checkpoint_path(own, 2).glob("*.distcp"), key=lambda file: file.stat().st_size)
        victim.write_bytes(b"\x5a" * victim.stat().st_size)
        assert "cannot be loaded into this model" in refusal(ranks, f"{PIPELINE} --load {own}")


@pytest.mark.parametrize(
    "other",
    [
        "--hidden-size 64",
        pytest.param("--num-layers 6", marks=pytest.mark.full),
        pytest.param("--untie-embeddings-and-output-weights", marks=pytest.mark.full),
    ],
)
def test_checkpoint_of_another_model_is_rejected(ranks: RankPool, saved: Path, other: str) -> None:
    assert "use the model flags it was saved with" in refusal(ranks, f"{PIPELINE} --load {saved} {other}")


def test_an_optimizer_state_by_rank_needs_the_same_layers_per_stage(ranks: RankPool, tmp_path: Path) -> None:
    by_rank = "--use-distributed-optimizer --no-dist-ckpt-optim-fully-reshardable --zero-bubble-schedule zb-h1"
    flags = f"{PIPELINE} --num-layers 5 {by_rank}"
    train(ranks, 2, f"{flags} --train-iters 2 --pipeline-model-parallel-layout Et|t*4L --save {tmp_path}")
    assert (
        "can only be loaded with the layers per stage it was saved with, 1, 4; this job has 3, 2; "
        "give --pipeline-model-parallel-layout 'Et|t*4L', save with --dist-ckpt-optim-fully-reshardable, or add"
    ) in refusal(ranks, f"{flags} --load {tmp_path}")
    train(ranks, 2, f"{flags} --train-iters 3 --load {tmp_path} --no-load-optim")
    common = checkpoint_path(tmp_path, 2) / "common.pt"
    contents = torch.load(common, weights_only=False)
    del contents["layers"]
    torch.save(contents, common)
    (checkpoint_path(tmp_path, 2) / MANIFEST).unlink()
    said = refusal(ranks, f"{flags} --load {tmp_path}")
    assert "saved with, with --pipeline-model-parallel-layout 'Et*3|ttL' if it was saved by version 0.1, or" in said


def resume_with_a_smaller_batch(_rank: int, num_samples: int) -> None:
    """Check the data after four iterations of eight samples, with two iterations of four samples left."""
    args = Namespace(batch_sizes=BatchSizes(4, 4, 4, 0, 0), train_iters=6)
    check_length(args, Splits(range(num_samples), None, None, False, False), iteration=4, consumed_samples=32)


def test_too_few_samples_after_resuming_are_rejected(ranks: RankPool) -> None:
    ranks.run(1, resume_with_a_smaller_batch, 40)
    with pytest.raises(RankFailure) as caught:
        ranks.run(1, resume_with_a_smaller_batch, 39)
    assert "needs 40 samples, 32 of them consumed before it was resumed" in caught.value.reports[0]
