"""Data sets of documents of different lengths, and their division over replicas."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from corpus import write_documents

from megatron.zero_bubble import Schedule, build
from megatron.zero_bubble.core.costs.lengths import LengthCost
from megatron.zero_bubble.planning.job.arguments.batch_sizes import BatchSizes
from pretrain.data.documents import Documents, IndexedTexts, MockTexts, packed
from pretrain.data.shares import Balance, BalancedOrder
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


def test_the_samples_of_a_microbatch_are_packed() -> None:
    """Each sample is rounded up to the multiple, and there is no other padding."""
    data = Documents(Texts(4, 6), 64, 2, seed=0)
    samples = [data[0], data[1]]
    batch = packed(samples, multiple=4)
    lengths = [len(sample["tokens"]) for sample in samples]
    assert sorted(lengths) == [3, 5]
    ends = batch.pop("ends")
    assert ends.dtype == torch.int32 and ends.tolist() == ([0, 4, 12] if lengths == [3, 5] else [0, 8, 12])
    for name, values in batch.items():
        assert values.shape == (1, 12) and values.dtype == samples[0][name].dtype
        for sample, start in zip(samples, ends.tolist(), strict=False):
            assert torch.equal(values[0, start : start + len(sample[name])], sample[name])
    assert batch["loss_mask"].sum() == 8
    assert batch["position_ids"].max() == 4, "positions begin again in every sample"


def two_ranks(num_microbatches: int) -> Schedule:
    return build("zb-h1", num_ranks=2, num_microbatches=num_microbatches)


def own(replica: int) -> Balance:
    return Balance(replica, 2, 2, 1, LengthCost(1.0, 0.0, 4.0), most_tokens=32, multiple=2, make=two_ranks)


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
    from pretrain.data.batches import check_same_lengths

    check_same_lengths([Documents(Texts(4, 6 + rank), 64, 2, seed=0)])


def test_every_rank_refuses_documents_of_other_lengths(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, read_other_documents)
    assert all("all ranks must read the same documents" in report for report in caught.value.reports.values())
    assert len(caught.value.reports) == 2


def test_an_iteration_has_the_tokens_of_its_samples_rounded_up() -> None:
    lengths = numpy.array([31, 3, 4, 3, 8, 9])
    orders = [BalancedOrder(lengths, lambda _: 6, 0, own(replica)) for replica in range(2)]
    tokens = [ends[-1] for order in orders for ends in order.ends()]
    assert sum(tokens) == 32 + 4 + 4 + 4 + 8 + 10
    assert max(tokens) <= 32
    for order in orders:
        for microbatch, ends in zip(order, order.ends(), strict=True):
            assert [end - start for start, end in pairwise(ends)] == [int(-(-lengths[s] // 2) * 2) for s in microbatch]
