"""The vocabulary of a job whose flags do not say it, for estimates: that of its tokenizer, as far as it is known here.

Megatron-LM itself asks the tokenizer when the job starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.zero_bubble.planning.job.model import padded_size

_SIZES = {"Llama2Tokenizer": 32_000, "GPT2BPETokenizer": 50_257, "TikTokenizer": 131_072}
"""Of the kinds of tokenizers that have one size."""
_FLAGS = ("tokenizer_model", "vocab_file")
_NAMES = ("tokenizer.json", "config.json", "tokenizer.model", "vocab.json")
"""Files of a folder that say the size, the best first."""
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}
"""Wire types of protocol buffers, and the sizes of those that are fixed."""


class VocabSize(NamedTuple):
    """A vocabulary: its padded size, and where it is from."""

    size: int
    source: str


def tokenizers_vocab_size(args: Any) -> VocabSize | None:
    """Return what the tokenizer in the flags of a job has; None if it is not known here."""
    kind = args.tokenizer_type
    named = [Path(model) for flag in _FLAGS if (model := getattr(args, flag, None)) is not None]
    files = [own for path in named for own in ([path / name for name in _NAMES] if path.is_dir() else [path])]
    if kind != "TikTokenizer":  # which cuts the vocabulary of its file
        for file in files:
            if (size := _read(file)) is not None:
                return VocabSize(padded_size(args, size), str(file))
    return VocabSize(padded_size(args, _SIZES[kind]), kind) if kind in _SIZES else None


def _read(file: Path) -> int | None:
    """The size that a file says; None if it says none."""
    try:
        size = _READERS.get(file.suffix, _size_of_pieces)(file.read_bytes())
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None  # Megatron-LM says what is wrong with it
    return size if type(size) is int and size > 0 else None


def _size_of_json(content: bytes) -> Any:
    """The tokens of ``tokenizer.json``, with those added to its model, or of a table of tokens and ids; or what the
    configuration of a model says.
    """
    found = json.loads(content)
    if "model" in found:
        vocab = found["model"]["vocab"]
        last = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1
        return int(1 + max([last, *(token["id"] for token in found.get("added_tokens") or ())]))
    if "vocab_size" in found or "text_config" in found:
        return found.get("vocab_size", (found.get("text_config") or {}).get("vocab_size"))
    return 1 + max(found.values())


def _size_of_lines(content: bytes) -> int:
    """The tokens of a file with one per line."""
    return len(content.splitlines())


def _size_of_pieces(content: bytes) -> int:
    """The pieces of a model of SentencePiece: a protocol buffer, in which each is a message in field 1."""
    return sum(field == 1 for field in _fields(content))


def _fields(content: bytes) -> Iterator[int]:
    """Yield the numbers of the fields of a protocol buffer.

    Raises:
        ValueError, IndexError: it is none.
    """
    at = 0
    while at < len(content):
        key, at = _number(content, at)
        kind = key & 7
        if kind == _VARINT:
            _, at = _number(content, at)
        elif kind == _BYTES:
            size, at = _number(content, at)
            at += size
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"no wire type of protocol buffers: {kind}")
        yield key >> 3
    if at > len(content):
        raise ValueError("the last field is longer than the file")


def _number(content: bytes, at: int) -> tuple[int, int]:
    """The number in base 128 at a place, and the place after it."""
    number = shift = 0
    while True:
        byte = content[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at


_READERS: dict[str, Callable[[bytes], Any]] = {
    ".json": _size_of_json,
    ".txt": _size_of_lines,
    ".tiktoken": _size_of_lines,
}
"""By the ends of names; others are models of SentencePiece."""
