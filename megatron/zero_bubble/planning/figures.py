"""Costs of a pipeline, and the conversion of memory limits to their unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.zero_bubble.costs import PassCosts, PassMemory
from megatron.zero_bubble.costs.units import parse_memory_limit
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.costs import CostsFile
from megatron.zero_bubble.ir import Placement

_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Figures:
    """Costs of a pipeline; ``on(placement)`` returns them per stage for any placement on its ranks.

    Attributes:
        on: the pass costs and pass memory for the stages of a placement.
        memory_given: whether the user gave memory figures; otherwise memory is counted in microbatches.
        message_bytes: size of a message between two stages; None if unknown.
        most_layers: the largest number of layers on one rank; None if unknown.
        weight_bytes: bytes of weights, gradients and optimizer state per rank on a placement; None if unknown.
        notes: the assumptions made, as sentences.
        sequence: tokens of a sequence; None if unknown.
        least_slice_tokens: fewest tokens of a slice, as a run has measured; None if unknown.
    """

    num_ranks: int
    num_microbatches: int
    on: Callable[[Placement], tuple[PassCosts, PassMemory]]
    memory_given: bool = False
    message_bytes: float | None = None
    most_layers: int | None = None
    weight_bytes: Callable[[Placement], tuple[float, ...]] | None = None
    notes: tuple[str, ...] = ()
    sequence: int | None = None
    least_slice_tokens: int | None = None

    @property
    def microbatch(self) -> float:
        """Activation of one microbatch on the fullest rank with one stage per rank: M_B, in the unit of memory."""
        return max(self.on(Placement.linear(self.num_ranks))[1].activation)

    @property
    def in_bytes(self) -> bool:
        """Whether memory is in bytes: figures are given, and not in a coarse unit such as microbatches."""
        return self.memory_given and self.microbatch >= 2**10

    def limit(self, text: str) -> float:
        """Convert ``1p``, ``0.5p`` or ``60GiB`` to the unit of memory; p means the number of ranks times M_B.

        Raises:
            UserError: for any other form, or for bytes when memory is not in bytes.
        """
        amount, unit = parse_memory_limit(text)
        if unit == "p":
            return amount * self.num_ranks * self.microbatch
        if not self.in_bytes:
            raise UserError(
                f"a memory limit of {text} needs activation memory in bytes; give --activation-memory, a costs file "
                "with activation and wgrad, or --config, or a limit in microbatches, such as 1p"
            )
        return amount * _BYTES[unit]

    def show(self, amount: float) -> str:
        """Format an amount of memory."""
        microbatches = f"{amount / self.microbatch:.4g} microbatches"
        return f"{microbatches}, {amount / 2**30:.4g} GiB" if self.in_bytes else microbatches


def measured(
    file: CostsFile,
    num_ranks: int,
    num_microbatches: int,
    memory: Callable[[Placement], PassMemory] | None = None,
) -> Figures:
    """Make the figures of a costs file.

    Args:
        memory: memory of a microbatch, which overrides the file's; without either, memory is counted in microbatches.

    Raises:
        UserError: when the figures are for another number of ranks.
    """

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        # Figures for half ranks cannot be divided into thirds; figures for whole ranks can be divided into any number.
        read_as = placement if placement.num_stages <= 2 * num_ranks else Placement.linear(num_ranks)
        costs, kept = file.on(read_as)
        if memory is not None:
            kept = memory(read_as)
        elif kept is None:
            kept = PassMemory.uniform(read_as)
        return (costs, kept) if read_as == placement else (costs.fit(placement), kept.fit(placement))

    given = memory is not None or file.on(Placement.linear(num_ranks))[1] is not None
    sequence, least = file.tokens or (None, None)
    return Figures(num_ranks, num_microbatches, on, given, sequence=sequence, least_slice_tokens=least)


def beyond_floats(error: OverflowError) -> str:
    """Return the error message for figures whose products or quotients overflow."""
    return f"some figures are too large or too small to plan with: {error}; give figures nearer to 1"
