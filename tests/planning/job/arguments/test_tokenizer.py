import argparse

import pytest

from megatron.zero_bubble.planning.job.arguments.tokenizer import (
    ByteLevelTokenizer,
    NullTokenizer,
    build_tokenizer,
    padded_vocab_size,
)


def test_bytes_round_trip() -> None:
    tokenizer = ByteLevelTokenizer()
    ids = tokenizer.tokenize("naïve → 文")
    assert max(ids) < tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.detokenize(ids) == "naïve → 文"
    assert tokenizer.detokenize([104, tokenizer.eod, 105]) == "h\ufffdi"


def test_null_tokenizer_adds_the_end_of_document_id() -> None:
    args = argparse.Namespace(tokenizer_type="NullTokenizer", vocab_size=1000)
    tokenizer = build_tokenizer(args)
    assert isinstance(tokenizer, NullTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1001, 1000)


def test_index_caches_differ_between_vocabularies() -> None:
    assert NullTokenizer(10).unique_identifiers != NullTokenizer(11).unique_identifiers


@pytest.mark.parametrize(
    ("multiple", "tensor_parallel", "padded"), [(8, 1, 264), (128, 1, 384), (128, 2, 512), (257, 1, 257)]
)
def test_vocabulary_is_padded_to_a_multiple_per_tensor_rank(multiple: int, tensor_parallel: int, padded: int) -> None:
    args = argparse.Namespace(make_vocab_size_divisible_by=multiple, tensor_model_parallel_size=tensor_parallel)
    assert padded_vocab_size(args, ByteLevelTokenizer()) == padded
