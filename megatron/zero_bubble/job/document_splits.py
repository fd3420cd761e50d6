"""What ``--split`` leaves of Megatron's indexed data for training, validation and test, read off the index alone.

Upstream: ``BlendedMegatronDatasetBuilder`` divides the documents so, and ``GPTDataset`` counts epochs until it has
tokens enough, without end where a split has none.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO

from megatron.zero_bubble.errors import UserError

NAMES = ("train", "valid", "test")
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")  # version, code of the dtype, number of documents and of their bounds
_AT_ONCE = 4096


def divide(split: str, num_documents: int) -> tuple[range | None, ...]:
    """The documents of each split by ``--split``; None where its share is 0."""
    shares = [float(share) for share in re.findall(r"[.0-9]+", split)]
    shares += [0.0] * (len(NAMES) - len(shares))
    total = sum(shares) or 1.0
    ends = list(accumulate((share / total for share in shares), initial=0.0))
    return tuple(
        range(round(first * num_documents), round(end * num_documents)) if end > first else None
        for first, end in pairwise(ends)
    )


def check_divided(prefixes: Sequence[str], weighted: bool, split: str, seq_length: int) -> None:
    """Refuse a ``--split`` that leaves a data set without the documents that one of its splits needs.

    Args:
        prefixes: of the files, without ``.idx``; one that this machine does not have is left to those that read it.
        weighted: whether the data sets of a blend have weights.

    Raises:
        UserError: the number of documents, what each split gets of them, and what to do.
    """
    needed = _tokens_needed(prefixes, weighted, seq_length)
    for prefix in prefixes:
        num_documents = _num_documents(prefix)
        parts = divide(split, num_documents or 0)
        for name, documents in zip(NAMES, parts, strict=True):
            if num_documents is None or documents is None:
                continue
            tokens = _tokens(prefix, documents, needed)
            if tokens < needed:
                train, valid, test = (0 if part is None else len(part) for part in parts)
                raise UserError(
                    f"every split needs {_words(needed)}, but --split {split} gives train {train}, valid {valid} and "
                    f"test {test} of the {num_documents} documents in {prefix}, and those of {name} have {tokens} "
                    f"tokens; give {name} a larger share, or 0 to leave it out"
                )


def check_whole(name: str, prefixes: Sequence[str], weighted: bool, seq_length: int) -> None:
    """The same for data that are those of one split, ``name``.

    Raises:
        UserError: what the data set has, and what to do.
    """
    needed = _tokens_needed(prefixes, weighted, seq_length)
    for prefix in prefixes:
        num_documents = _num_documents(prefix)
        if num_documents is None:
            continue
        tokens = _tokens(prefix, range(num_documents), needed)
        if tokens < needed:
            raise UserError(
                f"each data set of the {name} split needs {_words(needed)}, got {num_documents} documents with "
                f"{tokens} tokens in {prefix}; give another one or leave it out"
            )


def _tokens_needed(prefixes: Sequence[str], weighted: bool, seq_length: int) -> int:
    """Megatron repeats what there is, but for a blend without weights, which reads every data set once."""
    return 1 if weighted or len(prefixes) == 1 else seq_length + 1


def _words(tokens: int) -> str:
    return "tokens" if tokens == 1 else f"{tokens} tokens, a sample, in each data set of a blend without weights"


def _num_documents(prefix: str) -> int | None:
    """None where the file is missing or of another format."""
    path = Path(f"{prefix}.idx")
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(len(MAGIC) + HEADER.size)
    if not head.startswith(MAGIC) or len(head) < len(MAGIC) + HEADER.size:
        return None
    return int(HEADER.unpack_from(head, len(MAGIC))[2])


def _tokens(prefix: str, documents: range, enough: int) -> int:
    """Of these documents, counted until there are ``enough``."""
    tokens = 0
    with Path(f"{prefix}.idx").open("rb") as file:
        for first in range(documents.start, documents.stop, _AT_ONCE):
            tokens += sum(_lengths(file, first, min(_AT_ONCE, documents.stop - first)))
            if tokens >= enough:
                break
    return tokens


def _lengths(file: BinaryIO, first: int, count: int) -> tuple[int, ...]:
    file.seek(len(MAGIC) + HEADER.size + 4 * first)
    return struct.unpack(f"<{count}i", file.read(4 * count))
