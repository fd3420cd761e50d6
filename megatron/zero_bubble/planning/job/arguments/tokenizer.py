"""Tokenizers for megatron-core's datasets: one for bytes, and one for data that is already tokenized.

Training reads token ids, never text: megatron-core only needs the size of the vocabulary, the end-of-document id, and
an identity for the names of its cached indices.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from megatron.zero_bubble.planning.job.model import padded_size, stated_vocab_size


class ByteLevelTokenizer:
    """Ids 0 to 255 for UTF-8 bytes, and id 256 for the end of a document."""

    vocab_size = 257
    eod = 256
    eos = 256
    pad = -1  # no padding id: megatron-core masks the loss at the padding id, and every id here is text

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict([("class", type(self).__name__)])

    def tokenize(self, text: str) -> list[int]:
        """The ids of ``text``, without an end-of-document id."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: list[int]) -> str:
        """The text of ``ids``; document ends and invalid bytes become the replacement character."""
        return b"".join(bytes([i]) if i < self.eod else b"\xff" for i in ids).decode("utf-8", errors="replace")


class NullTokenizer:
    """Ids below ``vocab_size``, whose meaning only the data's tokenizer knows, and ``vocab_size`` to end a document."""

    pad = -1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = self.eos = vocab_size
        self.unique_identifiers = OrderedDict([("class", type(self).__name__), ("vocab_size", vocab_size)])


Tokenizer = ByteLevelTokenizer | NullTokenizer


def build_tokenizer(args: Any) -> Tokenizer:
    """The tokenizer of ``--tokenizer-type``."""
    return NullTokenizer(args.vocab_size) if args.tokenizer_type == "NullTokenizer" else ByteLevelTokenizer()


def padded_vocab_size(args: Any, tokenizer: Tokenizer) -> int:
    """The vocabulary rounded up to a multiple of ``--make-vocab-size-divisible-by`` times the tensor-parallel size."""
    return padded_size(args, tokenizer.vocab_size)


def known_vocab_size(args: Any) -> int | None:
    """Return the padded size of the vocabulary, or None if only Megatron-LM knows the job's tokenizer."""
    is_ours = args.tokenizer_type == "ByteLevelTokenizer"
    return padded_vocab_size(args, build_tokenizer(args)) if is_ours else stated_vocab_size(args)
