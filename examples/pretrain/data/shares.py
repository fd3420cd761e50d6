"""What a data-parallel replica trains in an iteration: equal numbers of equal microbatches, or its balanced part."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy
from megatron.core import parallel_state

from megatron.zero_bubble.core.costs.lengths import LengthCost, Load, SequenceShape
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.planning.balance import Microbatches, balance
from megatron.zero_bubble.planning.job.arguments.tokenizer import known_vocab_size
from megatron.zero_bubble.planning.job.balance import length_cost, replicas_of_experts
from pretrain.data.documents import padded_length


class Share(NamedTuple):
    """The part of a replica in an iteration.

    Attributes:
        shapes: the shape of each of its microbatches; None if all have the job's.
        samples, tokens: those of all replicas, without padding.
        loads: the load of each of its microbatches, if it has ``shapes``.
    """

    num_microbatches: int
    shapes: tuple[SequenceShape, ...] | None
    samples: int
    tokens: int
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True)
class Balance:
    """Divides the samples of every iteration over the replicas; the same on every rank of the job.

    Attributes:
        replica: that of this rank.
        num_ranks: pipeline ranks of a replica.
        together: replicas that share experts.
        most_tokens: the most tokens of a microbatch.
        multiple: of what the length of a packed sample must be a multiple.
        make: the job's schedule for a number of microbatches.
    """

    replica: int
    num_replicas: int
    num_ranks: int
    together: int
    cost: LengthCost
    most_tokens: int
    multiple: int
    make: Callable[[int], Schedule]

    @classmethod
    def of(cls, args: argparse.Namespace) -> Balance:
        """For this rank, from the checked flags."""
        return cls(
            parallel_state.get_data_parallel_rank(),
            args.data_parallel_size,
            args.pipeline_model_parallel_size,
            replicas_of_experts(args),
            length_cost(args.run.balance, args, known_vocab_size(args)),
            args.micro_batch_size * args.seq_length,
            args.tensor_model_parallel_size if args.sequence_parallel else 1,
            args.source.make,
        )

    def own(self, lengths: numpy.ndarray) -> Microbatches:
        """The microbatches of this replica, of indices into ``lengths``."""
        return _replicas(self, self._whole(lengths))[self.replica]

    def ends(self, microbatch: Sequence[int], lengths: numpy.ndarray) -> tuple[int, ...]:
        """Where its packed samples end, as ``documents.packed`` says."""
        own = (padded_length(int(lengths[sample]), self.multiple) for sample in microbatch)
        return tuple(accumulate(own, initial=0))

    def load(self, microbatch: Sequence[int], lengths: numpy.ndarray) -> Load:
        """What its time depends on."""
        return Load.of(end - start for start, end in pairwise(self.ends(microbatch, lengths)))

    def _whole(self, lengths: numpy.ndarray) -> tuple[int, ...]:
        return tuple(padded_length(int(tokens), self.multiple) for tokens in lengths)


@functools.lru_cache(maxsize=4)  # the loop and the loaders of all chunks ask for the same iterations
def _replicas(of: Balance, lengths: tuple[int, ...]) -> tuple[Microbatches, ...]:
    return balance(lengths, of.num_replicas, of.num_ranks, of.most_tokens, of.make, of.cost, of.together)


def share_of(args: argparse.Namespace, dataset: Any, consumed_samples: int, samples: int) -> Share:
    """The share of this replica in the iteration of ``samples`` samples that begins after ``consumed_samples``."""
    if args.run.balance is None:
        return Share(samples // args.batch_sizes.granule, None, samples, samples * args.seq_length)
    lengths = dataset.lengths[consumed_samples : consumed_samples + samples]
    of_all = Balance.of(args)
    loads = tuple(of_all.load(microbatch, lengths) for microbatch in of_all.own(lengths))
    shapes = tuple(SequenceShape(1, load.tokens) for load in loads)
    return Share(len(shapes), shapes, samples, int(lengths.sum()), loads)


@dataclass(frozen=True)
class BalancedOrder:
    """The samples of this replica, by microbatch, for a loader: one iteration after the other.

    Attributes:
        lengths: of all samples of the data set.
        samples_at: the samples of the iteration that begins after a number of samples.
    """

    lengths: numpy.ndarray
    samples_at: Callable[[int], int]
    consumed_samples: int
    balance: Balance

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples
        while (end := first + self.samples_at(first)) <= len(self.lengths):
            for microbatch in self.balance.own(self.lengths[first:end]):
                yield [first + sample for sample in microbatch]
            first = end

    def ends(self) -> Iterator[tuple[int, ...]]:
        """Where the packed samples of each microbatch end."""
        return (self.balance.ends(microbatch, self.lengths) for microbatch in self)
