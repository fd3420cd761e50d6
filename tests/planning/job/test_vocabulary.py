"""Tests of the vocabulary of a job that does not say it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.planning.job.vocabulary import tokenizers_vocabulary


def args(kind: str | None, model: Path | None = None) -> Namespace:
    """The flags that matter."""
    return Namespace(
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
    assert tokenizers_vocabulary(args("HuggingFaceTokenizer", tmp_path)) == (size, str(tmp_path / file))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3}', '{"model": {"vocab": {}}}', "[" * 100_000])
def test_another_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert tokenizers_vocabulary(args("HuggingFaceTokenizer", tmp_path)) is None
    assert tokenizers_vocabulary(args("Llama2Tokenizer", tmp_path)) == (32_000, "Llama2Tokenizer")


def test_nothing_is_known_of_others() -> None:
    assert tokenizers_vocabulary(args("HuggingFaceTokenizer")) is None and tokenizers_vocabulary(args(None)) is None
