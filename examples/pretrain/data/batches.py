"""Microbatches for this rank, read from megatron-core's ``GPTDataset`` with its blended builder.

Only ranks that hold the first or the last stage read samples; the other ranks receive their input from the pipeline.
All tensor-parallel ranks of a stage read the same samples from the same files, so nothing is broadcast.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from torch.utils.data import DataLoader, Dataset

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.tokenizer import Tokenizer
from pretrain.data.documents import ENDS, Documents, build_documents, packed
from pretrain.data.shares import Balance, BalancedOrder
from pretrain.distributed import agree, gather

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Splits:
    """The data sets of this rank; None for a split that this rank does not read or the user did not give."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    has_valid: bool
    has_test: bool


def build_splits(args: argparse.Namespace, tokenizer: Tokenizer) -> Splits:
    """Build the three data sets with the number of samples that the run needs; a collective call.

    Raises:
        UserError: on every rank, if any rank cannot build its data sets.
    """
    evaluation = args.eval_iters * args.global_batch_size
    sizes = [args.batch_sizes.samples_after(args.train_iters), evaluation, evaluation]
    problem: str | None = None
    train = valid = test = None
    try:
        if args.run.balance is not None:
            # All ranks need the lengths, which decide the shapes of messages.
            train, valid, test = build_documents(args, tokenizer, sizes)
        else:
            config = _dataset_config(args, tokenizer)
            dataset = MockGPTDataset if args.mock_data else GPTDataset
            train, valid, test = BlendedMegatronDatasetBuilder(dataset, sizes, lambda: reads_data(args), config).build()
    except (AssertionError, IndexError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        problem = f"the data sets cannot be built ({type(error).__name__}: {text}); check the data flags and files"
    agree(problem)
    if args.run.balance is not None:
        check_same_lengths([split for split in (train, valid, test) if isinstance(split, Documents)])
    found = gather([split is not None and len(split) > 0 for split in (train, valid, test)])
    present = [any(of_ranks) for of_ranks in zip(*found, strict=True)]
    if not present[0]:
        raise UserError(f"--split {args.split} leaves no training data; raise its first share")
    return Splits(train, valid, test, has_valid=present[1], has_test=present[2])


def check_same_lengths(splits: Sequence[Documents]) -> None:
    """Raise UserError on every rank if the samples of some have other lengths; a collective call."""
    digests = gather(hashlib.sha256(b"".join(split.lengths.tobytes() for split in splits)).hexdigest()[:16])
    if len(set(digests)) > 1:
        raise UserError(
            "with --zero-bubble-balance-microbatches, all ranks must read the same documents, whose lengths decide the "
            f"shapes of messages; the fingerprints of the lengths are {digests}; give every machine the same files"
        )


def check_length(args: argparse.Namespace, splits: Splits, iteration: int, consumed_samples: int) -> None:
    """Check that the training data last until ``--train-iters``; a collective call.

    Raises:
        UserError: on every rank, if a resumed run consumed more samples than with the current batch sizes.
    """
    needed = args.batch_sizes.samples_after(args.train_iters - iteration, consumed_samples)
    there = needed if splits.train is None else len(splits.train)  # type: ignore[arg-type]  # GPTDataset has a length
    problem = None
    if there < needed:
        problem = (
            f"training needs {needed} samples, {consumed_samples} of them consumed before it was resumed, but its "
            f"data set was built for {args.train_iters} iterations with the current batch sizes and has {there}; "
            "resume with the batch sizes of the first run, or lower --train-iters"
        )
    agree(problem)


def reads_data(args: argparse.Namespace) -> bool:
    """Whether this rank reads samples: it holds the first or last stage, or every stage needs the attention mask."""
    rank_of = args.placement.stage_to_rank
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return rank in (rank_of[0], rank_of[-1]) or args.reset_attention_mask


def microbatches(
    dataset: Dataset | None,
    args: argparse.Namespace,
    consumed_samples: int,
    vocab_size: int,
    num_chunks: int,
    samples_at: Callable[[int], int] | None = None,
) -> list[Iterator[Batch]]:
    """One iterator of microbatches per model chunk, from ``consumed_samples`` to the end of the data.

    Each microbatch has ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), all of shape
    [micro batch, sequence], and with ``--reset-attention-mask`` also ``attention_mask``. With
    ``--zero-bubble-balance-microbatches``, microbatches have the shapes of ``shares.share_of``, and also ``ends``,
    where their packed samples end; a chunk between the first and the last stage gets only these.

    Args:
        samples_at: the samples of all replicas in the iteration that begins after a number of samples; default: those
            of training.
    """
    if dataset is None:
        return [iter(()) for _ in range(num_chunks)]
    order: Iterable[list[int]]
    collate = None
    if isinstance(dataset, Documents):
        balance = Balance.of(args)
        order = BalancedOrder(dataset.lengths, samples_at or args.batch_sizes.at, consumed_samples, balance)
        collate = partial(packed, multiple=balance.multiple)
    else:
        order = MicrobatchOrder(
            len(dataset),  # type: ignore[arg-type]  # GPTDataset has a length
            consumed_samples,
            args.micro_batch_size,
            parallel_state.get_data_parallel_rank(),
            args.data_parallel_size,
        )

    # A separate random generator: the loader would otherwise draw from the one that dropout uses, and resuming or
    # another --eval-interval would change the training.
    generator = torch.Generator()
    loader = DataLoader(
        dataset, batch_sampler=order, num_workers=args.num_workers, collate_fn=collate, generator=generator
    )
    if not isinstance(order, BalancedOrder):
        return [_read(loader, vocab_size) for _ in range(num_chunks)]
    ends = (0, args.placement.num_stages - 1)
    stages = args.placement.stages_of(parallel_state.get_pipeline_model_parallel_rank())
    return [_read(loader, vocab_size) if stage in ends else _read_ends(order) for stage in stages]


def _read_ends(order: BalancedOrder) -> Iterator[Batch]:
    for ends in order.ends():
        yield {ENDS: torch.tensor(ends, dtype=torch.int32)}


def _read(batches: DataLoader, vocab_size: int) -> Iterator[Batch]:
    for batch in batches:  # starts the loader's workers at first use; a middle chunk never starts any
        ids = torch.stack((batch["tokens"], batch["labels"]))
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= vocab_size:
            raise UserError(
                f"token ids must be in the vocabulary, 0..{vocab_size - 1}, got {smallest}..{largest}; use the "
                "tokenizer that the data was made with (--tokenizer-type NullTokenizer --vocab-size N)",
                everywhere=False,
            )
        yield batch


@dataclass(frozen=True)
class MicrobatchOrder:
    """Samples of this data-parallel rank, by microbatch: as in Megatron, microbatches go to the ranks in turn."""

    num_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_rank: int
    data_parallel_size: int

    def __iter__(self) -> Iterator[list[int]]:
        together = self.micro_batch_size * self.data_parallel_size
        for start in range(self.consumed_samples, self.num_samples - together + 1, together):
            first = start + self.data_rank * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))

    def __len__(self) -> int:
        return (self.num_samples - self.consumed_samples) // (self.micro_batch_size * self.data_parallel_size)


def _dataset_config(args: argparse.Namespace, tokenizer: Tokenizer) -> GPTDatasetConfig:
    per_split = any(blend is not None for blend in args.blend_per_split)
    blends = [None if blend is None else blend.for_core() for blend in args.blend_per_split]
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if args.blend is None else args.blend.for_core(),
        blend_per_split=blends if per_split else None,
        split=None if per_split or args.mock_data else args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # megatron-core's attention builds the causal mask itself; a seq x seq mask per sample is only for other masks.
        create_attention_mask=args.reset_attention_mask,
    )
