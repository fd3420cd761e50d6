"""What megatron-core's datasets ask of a tokenizer, for bytes and for data that is tokenised already.

Training reads token ids, never text: core needs the size of the vocabulary, the id that ends a document, and an
identity for the names of its cached indices.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict


class ByteLevelTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 between documents."""

    vocab_size = 257
    eod = 256
    eos = 256
    pad = -1  # no id pads: core masks the loss wherever the pad id stands, and every id here is text

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict([("class", type(self).__name__)])

    def tokenize(self, text: str) -> list[int]:
        """The ids of ``text``, without a document end."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: list[int]) -> str:
        """The text of ``ids``; document ends and broken characters show as the replacement character."""
        return b"".join(bytes([i]) if i < self.eod else b"\xff" for i in ids).decode("utf-8", errors="replace")


class NullTokenizer:
    """Ids below ``vocab_size`` that mean whatever they meant to who wrote the data; the last ends a document."""

    pad = -1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = self.eos = vocab_size
        self.unique_identifiers = OrderedDict([("class", type(self).__name__), ("vocab_size", vocab_size)])


Tokenizer = ByteLevelTokenizer | NullTokenizer


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer of ``--tokenizer-type``."""
    return NullTokenizer(args.vocab_size) if args.tokenizer_type == "NullTokenizer" else ByteLevelTokenizer()


def padded_vocab_size(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """The vocabulary rounded up to a multiple of ``--make-vocab-size-divisible-by`` times the tensor-parallel size."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-tokenizer.vocab_size // multiple) * multiple
