from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pretrain.data.batches import MicrobatchOrder
from tests.helpers.ranks import RankPool
from tests.helpers.training import SMALL


def order(data_rank: int, consumed: int = 0, samples: int = 26) -> list[list[int]]:
    return list(MicrobatchOrder(samples, consumed, micro_batch_size=2, data_rank=data_rank, data_parallel_size=3))


class TestOrder:
    def test_microbatches_alternate_between_data_ranks(self) -> None:
        assert order(0)[:2] == [[0, 1], [6, 7]]
        assert order(2)[:2] == [[4, 5], [10, 11]]

    def test_every_complete_round_is_read_exactly_once(self) -> None:
        read = sorted(sample for rank in range(3) for batch in order(rank) for sample in batch)
        assert read == list(range(24)), "the last two samples do not fill a round"

    def test_resuming_skips_consumed_samples(self) -> None:
        assert order(1, consumed=12) == order(1)[2:]

    @pytest.mark.parametrize("consumed", [0, 6, 24])
    def test_length_equals_the_number_of_batches(self, consumed: int) -> None:
        batches = MicrobatchOrder(26, consumed, 2, 0, 3)
        assert len(batches) == len(list(batches))


def write_constant(prefix: Path, token: int) -> str:
    """Write documents that repeat one token, so that a sample identifies its file."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(40):
        builder.add_document(torch.full((50,), token), [50])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def read_splits(rank: int, num_ranks: int, flags: str) -> dict[str, Any]:
    """Return the first token of every training sample, and which other splits exist."""
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse
    from megatron.zero_bubble.planning.job.arguments.tokenizer import build_tokenizer
    from pretrain.data.batches import build_splits, microbatches
    from pretrain.distributed import lay_out

    args = parse([*SMALL.split(), *flags.split()])
    check(args, num_ranks)
    lay_out(args)
    splits = build_splits(args, build_tokenizer(args))
    found: dict[str, Any] = {"valid": splits.has_valid, "test": splits.has_test, "first": []}
    [batches] = microbatches(splits.train, args, 0, vocab_size=int(1e6), num_chunks=1)
    for batch in batches:
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert batch["tokens"].shape == (2, args.seq_length)
        found["first"] += batch["tokens"][:, 0].tolist()
    return found


@pytest.fixture
def constants(tmp_path: Path) -> list[str]:
    return [write_constant(tmp_path / f"token{token}", token) for token in (10, 20, 30)]


def test_blend_weights_determine_the_shares_of_samples(ranks: RankPool, constants: list[str]) -> None:
    flags = f"--data-path 3 {constants[0]} 1 {constants[1]} --split 100,0,0"
    [found] = ranks.run(1, read_splits, 1, flags)
    counts = [found["first"].count(token) for token in (10, 20)]
    assert sum(counts) == len(found["first"]) == 96
    assert counts == pytest.approx([72, 24], abs=2)
    assert not found["valid"] and not found["test"]


def test_each_split_reads_its_own_files(ranks: RankPool, constants: list[str]) -> None:
    flags = f"--train-data-path {constants[0]} --valid-data-path {constants[1]} --eval-iters 1"
    [found] = ranks.run(1, read_splits, 1, flags)
    assert set(found["first"]) == {10}
    assert found["valid"] and not found["test"]


def test_middle_ranks_read_no_data_but_know_the_splits(ranks: RankPool, constants: list[str]) -> None:
    flags = f"--data-path {constants[0]} --split 50,50,0 --eval-iters 1 --pipeline-model-parallel-size 4"
    found = ranks.run(4, read_splits, 4, flags)
    assert len(found[0]["first"]) >= 96 and found[1]["first"] == found[2]["first"] == []
    assert found[0]["first"] == found[3]["first"], "labels and tokens must come from the same samples"
    assert [(rank["valid"], rank["test"]) for rank in found] == [(True, False)] * 4


def read_a_large_id(_rank: int) -> tuple[str, bool]:
    from megatron.core import parallel_state

    from megatron.zero_bubble.core.errors import UserError
    from pretrain.data.batches import microbatches

    parallel_state.initialize_model_parallel()
    samples = [{"tokens": torch.tensor([1, 2]), "labels": torch.tensor([2, 300])} for _ in range(2)]
    args = Namespace(micro_batch_size=2, data_parallel_size=1, num_workers=0)
    [batches] = microbatches(samples, args, 0, vocab_size=300, num_chunks=1)  # type: ignore[arg-type]
    try:
        next(batches)
    except UserError as error:
        return str(error), error.everywhere
    return "", True


def test_token_id_outside_the_vocabulary_is_reported_by_the_reading_rank(ranks: RankPool) -> None:
    [(message, everywhere)] = ranks.run(1, read_a_large_id)
    assert message.startswith("token ids must be in the vocabulary, 0..299, got 1..300")
    assert not everywhere
