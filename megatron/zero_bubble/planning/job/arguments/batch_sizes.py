"""Number of samples that each iteration consumes, with or without ``--rampup-batch-size``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.core.errors import UserError


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size as a function of the samples consumed so far.

    It starts at ``start`` and grows in equal steps of ``increment``, reaching ``final`` after ``rampup_samples``. Each
    step is rounded down to a multiple of ``granule``, the samples of one microbatch on every data-parallel rank; with
    balanced microbatches, that is 1.
    """

    final: int
    granule: int
    start: int
    increment: int
    rampup_samples: int

    @classmethod
    def from_arguments(cls, args: Any) -> BatchSizes:
        """Build from the batch-size flags.

        Raises:
            UserError: the global batch size is not a positive multiple of the granule, or not reached by the ramp-up.
        """
        granule = args.micro_batch_size * args.data_parallel_size
        final = granule if args.global_batch_size is None else args.global_batch_size
        if args.run.balance is not None:
            granule = 1
        if final <= 0 or final % granule:
            raise UserError(
                "--global-batch-size must be a positive multiple of micro batch size * data-parallel size, got "
                f"{final} and {args.micro_batch_size} * {args.data_parallel_size}; "
                f"use {max(1, final // granule) * granule}"
            )
        if args.rampup_batch_size is None:
            return cls(final, granule, final, 0, 0)
        start, increment, samples = args.rampup_batch_size
        if start < granule or increment <= 0 or samples < 0 or start > final or (final - start) % increment:
            raise UserError(
                "--rampup-batch-size START INCREMENT SAMPLES must reach the global batch size in whole increments from "
                f"a START of at least {granule}, got {start} {increment} {samples} with global batch size {final}; "
                "change START"
            )
        return cls(final, granule, start, increment, samples)

    def at(self, consumed_samples: int) -> int:
        """The global batch size of the iteration that begins after ``consumed_samples``."""
        if consumed_samples >= self.rampup_samples:
            return self.final
        steps_in_all = (self.final - self.start) // self.increment
        steps = consumed_samples * steps_in_all // self.rampup_samples
        return (self.start + steps * self.increment) // self.granule * self.granule

    @property
    def steps(self) -> tuple[int, ...]:
        """All batch sizes that iterations have."""
        ramp = range(self.start, self.final, self.increment) if self.rampup_samples and self.increment else ()
        return (*(size // self.granule * self.granule for size in ramp), self.final)

    def samples_after(self, iterations: int, consumed: int = 0) -> int:
        """Total samples consumed after ``iterations`` more iterations, the first of which begins after ``consumed``."""
        for done in range(iterations):
            if consumed >= self.rampup_samples:
                return consumed + (iterations - done) * self.final
            consumed += self.at(consumed)
        return consumed
