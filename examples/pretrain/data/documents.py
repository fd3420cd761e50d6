"""Data sets whose samples have lengths of their own: every sample is one document, or a part of a long one.

Documents are the sequences of Megatron's indexed format, which ``scripts/prepare_data.py`` writes one per text. With
``--mock-data``, they are generated with lognormal lengths, as those of post-training data.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch.utils.data import Dataset

from megatron.zero_bubble.planning.job.arguments.tokenizer import Tokenizer
from megatron.zero_bubble.planning.job.document_splits import divide

Sample = dict[str, torch.Tensor]
ENDS = "ends"
"""The key of where the packed samples of a microbatch end."""
_MOCK_DOCUMENTS = 4096
_MOCK_SIGMA = 1.0
"""Standard deviation of the logarithm of a generated length; its median is a quarter of the longest."""


class Texts(Protocol):
    """Documents as token ids.

    Attributes:
        lengths: tokens of every document, an integer array.
    """

    lengths: numpy.ndarray

    def read(self, document: int, start: int, number: int) -> numpy.ndarray:
        """``number`` token ids of a document from ``start`` on."""


class Documents(Dataset):
    """Samples of at most ``longest`` tokens, in an order that depends on ``seed`` and the epoch only.

    A sample has ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), all of shape [its
    length]. A document of n tokens has n - 1 labels; a longer one than ``longest`` is cut into several samples.

    Args:
        number: samples of the data set; the documents are repeated as often as necessary.
        unpredicted: the id of tokens after which the loss ignores the next token; None for none.

    Attributes:
        lengths: the length of every sample, an int64 array.

    Raises:
        ValueError: no document has two tokens or more.
    """

    def __init__(self, texts: Texts, longest: int, number: int, seed: int, unpredicted: int | None = None) -> None:
        self._texts, self._unpredicted = texts, unpredicted
        parts = [
            (document, start, min(longest, tokens - 1 - start))
            for document, tokens in enumerate(texts.lengths.tolist())
            for start in range(0, tokens - 1, longest)
        ]
        if not parts:
            raise ValueError("no document has two tokens or more, one to read and one to predict")
        self._parts = numpy.array(parts, dtype=numpy.int64)
        epochs = range(-(-number // len(parts)))
        orders = [numpy.random.default_rng([seed, epoch]).permutation(len(parts)) for epoch in epochs]
        self._order = numpy.concatenate([numpy.empty(0, dtype=numpy.int64), *orders])[:number]
        self.lengths: numpy.ndarray = self._parts[self._order, 2]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        document, start, length = self._parts[self._order[index]].tolist()
        text = torch.from_numpy(self._texts.read(document, start, length + 1).astype(numpy.int64))
        mask = torch.ones(length)
        if self._unpredicted is not None:
            mask[text[:-1] == self._unpredicted] = 0.0
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": torch.arange(length), "loss_mask": mask}


class IndexedTexts:
    """The documents of one split of a data set in Megatron's indexed format; see ``Texts``."""

    def __init__(self, prefix: str, documents: range | None = None, mmap: bool = True) -> None:
        self._data = IndexedDataset(prefix, mmap=mmap)
        everything = range(len(self._data.sequence_lengths))
        self._first = (documents or everything).start
        self.lengths = self._data.sequence_lengths[self._first : (documents or everything).stop]

    def read(self, document: int, start: int, number: int) -> numpy.ndarray:
        return self._data.get(self._first + document, start, number)


class MockTexts:
    """Documents that count up from 1, with lognormal lengths up to ``longest`` and one more; see ``Texts``."""

    def __init__(self, longest: int, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        drawn = numpy.random.default_rng(seed).lognormal(numpy.log(longest / 4), _MOCK_SIGMA, _MOCK_DOCUMENTS)
        self.lengths = numpy.clip(drawn.astype(numpy.int64), 1, longest) + 1

    def read(self, _document: int, start: int, number: int) -> numpy.ndarray:
        return (numpy.arange(start, start + number) + 1) % self._vocab_size


def build_documents(args: argparse.Namespace, tokenizer: Tokenizer, sizes: Sequence[int]) -> list[Documents | None]:
    """Build the data sets for training, validation and test, with ``sizes`` samples; None for those without data."""
    unpredicted = tokenizer.eod if args.eod_mask_loss else None
    found: list[Documents | None] = []
    for split, size in enumerate(sizes):
        texts = _texts(args, tokenizer, split) if size else None
        found.append(None if texts is None else Documents(texts, args.seq_length, size, args.seed, unpredicted))
    return found


def _texts(args: argparse.Namespace, tokenizer: Tokenizer, split: int) -> Texts | None:
    if args.mock_data:
        return MockTexts(args.seq_length, tokenizer.vocab_size, args.seed + split)
    read = partial(IndexedTexts, mmap=args.mmap_bin_files)
    if args.blend is None:
        blend = args.blend_per_split[split]
        return None if blend is None else read(blend.prefixes[0])
    [prefix] = args.blend.prefixes
    documents = divide(args.split, len(IndexedDataset(prefix, mmap=args.mmap_bin_files)))[split]
    return read(prefix, documents) if documents else None


def packed(samples: Sequence[Sample], multiple: int = 1) -> Sample:
    """A microbatch of ``samples``, one after the other, each with zeros up to a ``multiple``; [1, tokens].

    ``ends`` (int32) has the first token of the first sample, 0, and the end of every sample. The loss mask of the
    zeros is 0, and no other token attends to them, so that they change no result.
    """
    ends = torch.tensor([0, *(padded_length(len(sample["tokens"]), multiple) for sample in samples)])
    more = [padded_length(len(sample["tokens"]), multiple) - len(sample["tokens"]) for sample in samples]
    pad = torch.nn.functional.pad
    batch = {
        name: torch.cat([pad(sample[name], (0, zeros)) for sample, zeros in zip(samples, more, strict=True)])[None]
        for name in samples[0]
    }
    return {**batch, ENDS: ends.cumsum(0, dtype=torch.int32)}


def padded_length(tokens: int, multiple: int) -> int:
    """``tokens`` rounded up to ``multiple``."""
    return -(-tokens // multiple) * multiple
