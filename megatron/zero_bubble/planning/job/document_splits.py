"""The documents that ``--split`` assigns to training, validation and test, from the index of Megatron's indexed data.

Upstream: ``BlendedMegatronDatasetBuilder`` divides the documents this way. ``GPTDataset`` then adds epochs until it has
enough tokens, which is an endless loop if a split has none.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO

from megatron.zero_bubble.core.errors import UserError

NAMES = ("train", "valid", "test")
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")  # version, code of the dtype, number of documents and of their bounds
_AT_ONCE = 4096


def divide(split: str, num_documents: int) -> tuple[range | None, ...]:
    """The documents that ``--split`` assigns to each split; None for a split whose share is 0."""
    shares = [float(share) for share in re.findall(r"[.0-9]+", split)]
    shares += [0.0] * (len(NAMES) - len(shares))
    total = sum(shares) or 1.0
    ends = list(accumulate((share / total for share in shares), initial=0.0))
    return tuple(
        range(round(first * num_documents), round(end * num_documents)) if end > first else None
        for first, end in pairwise(ends)
    )


def check_divided(prefixes: Sequence[str], weighted: bool, split: str, seq_length: int) -> None:
    """Reject a ``--split`` that gives a split fewer documents or tokens of a data set than it needs.

    Args:
        prefixes: paths of the data sets, without ``.idx``; files that cannot be read on this machine are skipped.
        weighted: whether the data sets of a blend have weights.

    Raises:
        UserError: the number of documents, the documents per split, and the remedy.
    """
    needed = _tokens_needed(prefixes, weighted, seq_length)
    for prefix in prefixes:
        num_documents = _num_documents(prefix)
        parts = divide(split, num_documents or 0)
        for name, documents in zip(NAMES, parts, strict=True):
            if num_documents is None or documents is None:
                continue
            tokens = _tokens(prefix, documents, needed)
            if tokens is None or tokens >= needed:
                continue
            counts = ", ".join(f"{n} {len(part or ())}" for n, part in zip(NAMES, parts, strict=True))
            if needed > 1:
                raise UserError(
                    f"a blend without weights needs at least one sample ({needed} tokens) from each data set, but "
                    f"--split {split} gives the {name} split of {prefix} only {tokens} tokens; put a weight before "
                    "each path, or leave this data set out"
                )
            raise UserError(
                f"--split {split} leaves the {name} split of {prefix} without "
                f"{'tokens' if documents else 'documents'} ({counts} of {num_documents} documents); give {name} a "
                "larger share, or 0 to skip it"
            )


def check_whole(name: str, prefixes: Sequence[str], weighted: bool, seq_length: int) -> None:
    """Reject data sets that are too small, for data given to a single split ``name`` instead of divided.

    Raises:
        UserError: the size of the data set, and the remedy.
    """
    needed = _tokens_needed(prefixes, weighted, seq_length)
    for prefix in prefixes:
        num_documents = _num_documents(prefix)
        if num_documents is None:
            continue
        tokens = _tokens(prefix, range(num_documents), needed)
        if tokens is not None and tokens < needed:
            what = "one token" if needed == 1 else f"one sample ({needed} tokens), because the blend has no weights"
            raise UserError(
                f"each data set of the {name} split needs at least {what}; {prefix} has {num_documents} documents with "
                f"{tokens} tokens; replace it or leave it out"
            )


def _tokens_needed(prefixes: Sequence[str], weighted: bool, seq_length: int) -> int:
    """Minimum tokens per data set. Megatron repeats short data, except in a blend without weights, read once."""
    return 1 if weighted or len(prefixes) == 1 else seq_length + 1


def _num_documents(prefix: str) -> int | None:
    """The number of documents in an index, or None if the file cannot be read or has another format."""
    path = Path(f"{prefix}.idx")
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC) + HEADER.size)
    except OSError:
        return None
    if not head.startswith(MAGIC) or len(head) < len(MAGIC) + HEADER.size:
        return None
    return int(HEADER.unpack_from(head, len(MAGIC))[2])


def _tokens(prefix: str, documents: range, enough: int) -> int | None:
    """Count the tokens of ``documents`` until there are ``enough``; None if the file cannot be read.

    Megatron reports unreadable files itself.
    """
    tokens = 0
    try:
        with Path(f"{prefix}.idx").open("rb") as file:
            for first in range(documents.start, documents.stop, _AT_ONCE):
                tokens += sum(_lengths(file, first, min(_AT_ONCE, documents.stop - first)))
                if tokens >= enough:
                    break
    except (OSError, struct.error):
        return None
    return tokens


def _lengths(file: BinaryIO, first: int, count: int) -> tuple[int, ...]:
    file.seek(len(MAGIC) + HEADER.size + 4 * first)
    return struct.unpack(f"<{count}i", file.read(4 * count))
