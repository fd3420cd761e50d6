"""The vocabulary of a job whose flags do not say it, for estimates: that of its tokenizer, as far as it is known here.

Megatron-LM itself asks the tokenizer when the job starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron.zero_bubble.planning.job.model import padded_vocabulary

_SIZES = {"Llama2Tokenizer": 32_000, "GPT2BPETokenizer": 50_257}
"""Of the kinds of tokenizers that have one size."""


class JobVocabulary(NamedTuple):
    """A vocabulary: its padded size, and where it is from."""

    size: int
    source: str


def tokenizers_vocabulary(args: Any) -> JobVocabulary | None:
    """Return what the tokenizer in the flags of a job has; None if it is not known here."""
    model, kind = getattr(args, "tokenizer_model", None), args.tokenizer_type
    if model is not None:
        for name, size_of in (("tokenizer.json", _size_of_tokenizer), ("config.json", _size_of_model)):
            size = _read(Path(model) / name, size_of)
            if size is not None:
                return JobVocabulary(padded_vocabulary(args, size), str(Path(model) / name))
    return JobVocabulary(padded_vocabulary(args, _SIZES[kind]), kind) if kind in _SIZES else None


def _read(file: Path, size_of: Callable[[Any], Any]) -> int | None:
    try:
        size = size_of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # Megatron-LM says what is wrong with it
    return size if type(size) is int and size > 0 else None


def _size_of_tokenizer(content: Any) -> int:
    """The tokens of ``tokenizer.json``, with those added to its model."""
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    return int(1 + max([last, *(token["id"] for token in content.get("added_tokens") or ())]))


def _size_of_model(content: Any) -> Any:
    return content.get("vocab_size", (content.get("text_config") or {}).get("vocab_size"))
