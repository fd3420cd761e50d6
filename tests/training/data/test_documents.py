"""Data sets of documents of different lengths, and their division over replicas."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from corpus import write_documents

from megatron.zero_bubble.costs.lengths import LengthCost, Shape
from megatron.zero_bubble.training.batch_sizes import BatchSizes
from megatron.zero_bubble.training.data.documents import Documents, IndexedTexts, MockTexts, padded
from megatron.zero_bubble.training.data.shares import Balance, BalancedOrder
from tests.helpers.ranks import RankFailure, RankPool

EOD = 256


class Texts:
    """Documents whose token ids are 100 times their number, plus the position."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = numpy.array(lengths)

    def read(self, document: int, start: int, number: int) -> numpy.ndarray:
        assert start + number <= self.lengths[document]
        return 100 * document + numpy.arange(start, start + number)


def test_long_documents_are_cut_and_every_label_is_read_once_per_epoch() -> None:
    data = Documents(Texts(5, 1, 9, 2), longest=4, number=8, seed=3)
    assert len(data) == 8 and all(len(data[index]["tokens"]) == data.lengths[index] for index in range(8))
    for epoch in (range(4), range(4, 8)):
        labels = sorted(label for index in epoch for label in data[index]["labels"].tolist())
        assert labels == [1, 2, 3, 4, *range(201, 209), 301]
    sample = data[int(data.lengths.argmax())]
    assert torch.equal(sample["tokens"] + 1, sample["labels"])
    assert sample["position_ids"].tolist() == [0, 1, 2, 3] and sample["loss_mask"].tolist() == [1.0] * 4


def test_the_order_depends_on_the_seed_only() -> None:
    first, again, other = (Documents(Texts(*range(2, 40)), 64, 60, seed) for seed in (1, 1, 2))
    assert first.lengths.tolist() == again.lengths.tolist() != other.lengths.tolist()


def test_documents_without_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="no document has two tokens or more"):
        Documents(Texts(1, 1), 4, 8, 0)


def test_indexed_documents(tmp_path: Path) -> None:
    write_documents(str(tmp_path / "text"), [b"ab", b"cdefg", b"hi"])
    texts = IndexedTexts(str(tmp_path / "text"), range(1, 3))
    assert texts.lengths.tolist() == [6, 3]
    assert bytes(texts.read(0, 1, 3).tolist()) == b"def"
    data = Documents(texts, 64, 2, seed=0, unpredicted=ord("h"))
    [short] = (data[index] for index in range(2) if data.lengths[index] == 2)
    assert short["labels"].tolist() == [ord("i"), EOD] and short["loss_mask"].tolist() == [0.0, 1.0]


def test_generated_documents_have_lengths_up_to_the_longest() -> None:
    texts = MockTexts(64, 31, seed=5)
    assert texts.lengths.min() >= 2 and texts.lengths.max() == 65
    assert len(set(texts.lengths.tolist())) > 30
    assert max(texts.read(0, 0, 64).tolist()) == 30


def test_a_microbatch_is_padded_to_its_longest_sample() -> None:
    data = Documents(Texts(4, 6), 64, 2, seed=0)
    batch = padded([data[0], data[1]], multiple=4)
    assert batch["tokens"].shape == (2, 8)
    assert batch["loss_mask"].sum() == 8
    assert batch["tokens"].dtype == torch.int64


def own(replica: int) -> Balance:
    return Balance(replica, 2, 2, LengthCost(1.0, 0.0, 4.0), most_tokens=32, multiple=2)


def test_replicas_read_every_sample_of_an_iteration_once() -> None:
    lengths = numpy.array([31, 3, 4, 3, 8, 9, 2, 17, 5, 6, 7, 8, 1])
    sizes = BatchSizes(6, 1, 3, 3, 3)
    orders = [BalancedOrder(lengths, sizes.at, 0, own(replica)) for replica in range(2)]
    read = [[sorted(microbatch) for microbatch in order] for order in orders]
    samples = sorted(sample for replica in read for microbatch in replica for sample in microbatch)
    assert samples == list(range(9)), "iterations have 3 and 6 samples, and the rest fills no iteration"
    for replica in range(2):
        resumed = list(BalancedOrder(lengths, sizes.at, 3, own(replica)))
        assert [sorted(microbatch) for microbatch in resumed] == read[replica][-len(resumed) :]


def read_other_documents(rank: int) -> None:
    from megatron.zero_bubble.training.data.batches import check_same_lengths

    check_same_lengths([Documents(Texts(4, 6 + rank), 64, 2, seed=0)])


def test_every_rank_refuses_documents_of_other_lengths(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, read_other_documents)
    assert all("all ranks must read the same documents" in report for report in caught.value.reports.values())
    assert len(caught.value.reports) == 2


def test_shapes_are_those_of_the_microbatches() -> None:
    lengths = numpy.array([31, 3, 4, 3, 8, 9])
    for replica in range(2):
        microbatches, shapes = own(replica).own(lengths)
        for microbatch, shape in zip(microbatches, shapes, strict=True):
            longest = int(lengths[list(microbatch)].max())
            assert shape == Shape(len(microbatch), longest + longest % 2)
