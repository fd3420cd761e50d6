"""What a pipeline costs, and what a memory limit means with it."""

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
    """What a pipeline costs: ``on(placement)`` are its figures cut into the stages of any placement on its ranks.

    ``memory_given`` says that its memory is somebody's figure, not just counted in microbatches. ``message_bytes`` goes
    between two stages, ``most_layers`` are on one rank, and ``weight_bytes`` are every rank's weights, gradients and
    optimizer state on a placement; None where nobody knows. ``notes`` tell what was assumed.
    """

    num_ranks: int
    num_microbatches: int
    on: Callable[[Placement], tuple[PassCosts, PassMemory]]
    memory_given: bool = False
    message_bytes: float | None = None
    most_layers: int | None = None
    weight_bytes: Callable[[Placement], tuple[float, ...]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def microbatch(self) -> float:
        """What one microbatch keeps on the fullest rank at one stage a rank: M_B, in the unit of memory."""
        return max(self.on(Placement.linear(self.num_ranks))[1].activation)

    @property
    def in_bytes(self) -> bool:
        """Whether memory is in bytes: given, and not in some small unit such as microbatches."""
        return self.memory_given and self.microbatch >= 2**10

    def limit(self, text: str) -> float:
        """``1p``, ``0.5p`` or ``60GiB`` in the unit of memory; p stands for the number of ranks times M_B.

        Raises:
            UserError: for another form, or bytes where memory is not in bytes.
        """
        amount, unit = parse_memory_limit(text)
        if unit == "p":
            return amount * self.num_ranks * self.microbatch
        if not self.in_bytes:
            raise UserError(
                f"a memory limit of {text} needs memory in bytes: give --activation-memory, a costs file with "
                "activation and wgrad, or --config; or write the limit in microbatches, 1p"
            )
        return amount * _BYTES[unit]

    def show(self, amount: float) -> str:
        """An amount of memory for people."""
        microbatches = f"{amount / self.microbatch:.4g} microbatches"
        return f"{microbatches}, {amount / 2**30:.4g} GiB" if self.in_bytes else microbatches


def measured(
    file: CostsFile,
    num_ranks: int,
    num_microbatches: int,
    memory: Callable[[Placement], PassMemory] | None = None,
) -> Figures:
    """The figures of a costs file.

    Args:
        memory: of a microbatch, in place of the file's; without either it is counted in microbatches.

    Raises:
        UserError: figures for another number of ranks.
    """

    def on(placement: Placement) -> tuple[PassCosts, PassMemory]:
        # A file's halves of ranks cannot be cut into thirds; its whole ranks can be cut into anything.
        read_as = placement if placement.num_stages <= 2 * num_ranks else Placement.linear(num_ranks)
        costs, kept = file.on(read_as)
        if memory is not None:
            kept = memory(read_as)
        elif kept is None:
            kept = PassMemory.uniform(read_as)
        return (costs, kept) if read_as == placement else (costs.fit(placement), kept.fit(placement))

    given = memory is not None or file.on(Placement.linear(num_ranks))[1] is not None
    return Figures(num_ranks, num_microbatches, on, given)


def beyond_floats(error: OverflowError) -> str:
    """What to tell about figures whose products or quotients are no numbers any more."""
    return f"some number is too large or small to plan with: {error}; choose ones nearer to 1"
