"""Tests of the vocabulary of a job that does not say it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.planning.job.model import stated_vocab_size
from megatron.zero_bubble.planning.job.vocab_size import tokenizers_vocab_size


def args(kind: str | None, model: Path | None = None, **more: Any) -> Namespace:
    """The flags that matter."""
    return Namespace(
        **more,
        tokenizer_type=kind,
        tokenizer_model=None if model is None else str(model),
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=2,
    )


@pytest.mark.parametrize(
    ("file", "content", "size"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 255}}}, 256),
        ("tokenizer.json", {"model": {"vocab": [["a", 0.0], ["b", 0.0]]}, "added_tokens": [{"id": 256}]}, 512),
        ("tokenizer.json", {"model": {"vocab": {"a": 256}}, "added_tokens": [{"id": 3}]}, 512),
        ("config.json", {"vocab_size": 128_256}, 128_256),
        ("config.json", {"text_config": {"vocab_size": 300}}, 512),
    ],
)
def test_a_folder_says_it(tmp_path: Path, file: str, content: dict[str, Any], size: int) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    assert tokenizers_vocab_size(args("HuggingFaceTokenizer", tmp_path)) == (size, str(tmp_path / file))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}', '{"model": {"vocab": {}}}', "[" * 100_000])
def test_another_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert tokenizers_vocab_size(args("HuggingFaceTokenizer", tmp_path)) is None
    assert tokenizers_vocab_size(args("Llama2Tokenizer", tmp_path)) == (32_000, "Llama2Tokenizer")


def message(field: int, content: bytes) -> bytes:
    """A field of a protocol buffer."""
    assert len(content) < 128
    return bytes([field << 3 | 2, len(content)]) + content


PIECES = b"".join(message(1, message(1, f"piece {number}".encode())) for number in range(300))
TRAINER = (
    message(2, b"ignored") + bytes([3 << 3, 200, 1]) + bytes([4 << 3 | 5]) + b"four" + bytes([5 << 3 | 1, *range(8)])
)


@pytest.mark.parametrize(
    ("name", "content", "size"),
    [
        ("tokenizer.model", PIECES, 512),
        ("tokenizer.model", TRAINER + message(1, b"piece"), 256),
        ("vocab.json", b'{"a": 0, "b": 299}', 512),
        ("vocab.txt", b"one\n" * 257, 512),
        ("any.tiktoken", b"b25l 0\n" * 256, 256),
        ("any.model", PIECES[:-1], None),
        ("any.model", bytes([7]), None),
        ("vocab.json", b"3", None),
        ("elsewhere/model", None, None),
    ],
)
def test_a_file_says_it(tmp_path: Path, name: str, content: bytes | None, size: int | None) -> None:
    """By both flags, and by that of its folder, if a tokenizer always calls it so."""
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    expected = None if size is None else (size, str(file))
    assert tokenizers_vocab_size(args("SentencePieceTokenizer", file)) == expected
    assert tokenizers_vocab_size(args("BertWordPieceCase", vocab_file=str(file))) == expected
    if name in ("tokenizer.model", "vocab.json"):
        assert tokenizers_vocab_size(args("HuggingFaceTokenizer", tmp_path)) == expected


def test_a_cut_vocabulary_is_not_that_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"a": 300}')
    assert tokenizers_vocab_size(args("TikTokenizer", tmp_path / "tokenizer.json")) == (131_072, "TikTokenizer")


def test_a_padded_size_is_taken_as_it_is() -> None:
    assert stated_vocab_size(args("HuggingFaceTokenizer", padded_vocab_size=129, vocab_size=7)) == 129
    assert stated_vocab_size(args("HuggingFaceTokenizer", padded_vocab_size=None, vocab_size=7)) == 256


def test_nothing_is_known_of_others() -> None:
    assert tokenizers_vocab_size(args("HuggingFaceTokenizer")) is None and tokenizers_vocab_size(args(None)) is None
