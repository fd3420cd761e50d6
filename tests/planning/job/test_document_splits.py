"""Tests of document splits: same division as megatron-core's, and errors for empty splits."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.zero_bubble.planning.job.document_splits import check_divided, check_whole, divide

_SHARES = st.one_of(st.integers(0, 1000), st.floats(0, 1).map(lambda share: round(share, 4)))


@given(st.lists(_SHARES, min_size=1, max_size=3), st.integers(0, 10**6))
def test_documents_are_divided_as_in_megatron(shares: list[float], num_documents: int) -> None:
    if not sum(shares):
        return
    text = ",".join(map(str, shares))
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    expected = [ends and range(*(round(end * float(num_documents)) for end in ends)) for ends in matrix]
    assert list(divide(text, num_documents)) == expected


def write(prefix: Path, lengths: list[int]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in lengths:
        builder.add_document(torch.ones(length, dtype=torch.long), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize("split", ["969,30,0", "100,0,0", "9,1,1"])
def test_splits_with_documents_are_accepted(tmp_path: Path, split: str) -> None:
    check_divided([write(tmp_path / "a", [50] * 317)], weighted=False, split=split, seq_length=1000)


@pytest.mark.parametrize(
    ("lengths", "weighted", "split", "words"),
    [
        ([50] * 317, True, "969,30,1", "the test split of {} without documents .train 307, valid 10, test 0 of 317"),
        ([50] * 317, False, "969,30,1", "give test a larger share, or 0 to skip it"),
        ([50] * 30 + [0] * 10, False, "3,1,0", "valid split of {} without tokens .* give valid a larger share"),
        ([0] * 5000 + [50] * 5000, False, "1,1", "train split of {} without tokens .* give train a larger share"),
    ],
)
def test_split_without_documents_or_tokens_is_rejected(
    tmp_path: Path, lengths: list[int], weighted: bool, split: str, words: str
) -> None:
    prefix = write(tmp_path / "a", lengths)
    with pytest.raises(ValueError, match=words.format(prefix)):
        check_divided([prefix], weighted, split, seq_length=32)


def test_blend_without_weights_needs_a_sample_of_each_file(tmp_path: Path) -> None:
    blend = [write(tmp_path / "a", [50] * 4), write(tmp_path / "b", [8] * 4)]
    check_divided(blend, weighted=False, split="1,0,0", seq_length=31)
    check_divided(blend, weighted=True, split="3,1,0", seq_length=1000)
    with pytest.raises(ValueError, match="at least one sample .33 tokens. .* of .*b only 32 tokens; put a weight"):
        check_divided(blend, weighted=False, split="1,0,0", seq_length=32)
    with pytest.raises(ValueError, match="b has 4 documents with 32 tokens; replace it or leave it out"):
        check_whole("valid", blend, weighted=False, seq_length=32)
    check_whole("valid", blend[1:], weighted=False, seq_length=32)
    with pytest.raises(
        ValueError, match="of the test split needs at least one token; .*c has 2 documents with 0 tokens"
    ):
        check_whole("test", [write(tmp_path / "c", [0, 0])], weighted=False, seq_length=32)


def test_unreadable_files_are_ignored(tmp_path: Path) -> None:
    whole = Path(f"{write(tmp_path / 'c', [50] * 40)}.idx")
    whole.write_bytes(whole.read_bytes()[:60])
    check_divided([str(tmp_path / "c")], weighted=True, split="9,1,0", seq_length=32)
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX")
    check_divided([str(tmp_path / name) for name in "ab"], weighted=True, split="969,30,1", seq_length=32)
