"""How much of a GPU the transfers of NCCL may take, while passes run next to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.ir.collectives import Collective
from megatron.zero_bubble.core.plan.prove import num_channels

DEFAULT_NCCL_CTAS = 2
DEFAULT_NCCL_COLLECTIVE_CTAS = 8
MOST_KINDS = 7
"""Kinds of collectives of vocabulary parallelism, each of which may have one that waits."""


class Ctas(NamedTuple):
    """The largest numbers of CTAs that NCCL occupies alongside passes."""

    message: int = DEFAULT_NCCL_CTAS
    collective: int = DEFAULT_NCCL_COLLECTIVE_CTAS


def collective_ctas(
    ctas: Ctas, plan: Plan, num_multiprocessors: int | None, say: Callable[[str], None] | None = None
) -> int:
    """The largest number of CTAs per collective with which transfers leave half of the multiprocessors to the passes.

    A CTA of NCCL has 640 threads with 96 registers each, so next to it a multiprocessor has no room for a pass. If the
    transfers that wait take all of them, the passes for which they wait cannot run: the ranks hang.

    Args:
        ctas: as configured; a collective gets fewer if necessary.
        plan: of an iteration; those of later iterations may have more kinds of collectives.
        num_multiprocessors: of the GPU, as far as this rank can use them; None if NCCL is not used.
        say: prints that there are fewer than configured.

    Raises:
        UserError: not even one CTA fits for each kind.
    """
    if num_multiprocessors is None or not any(isinstance(op, Collective) for row in plan.stem.ops for op in row):
        return ctas.collective
    messages = num_channels(plan) * ctas.message
    fitting = (num_multiprocessors // 2 - messages) // MOST_KINDS
    if fitting < 1:
        raise UserError(
            "transfers of NCCL may take half of a GPU's multiprocessors, because passes cannot run where transfers "
            f"wait; got {num_multiprocessors} multiprocessors, {messages} CTAs for messages and {MOST_KINDS} kinds of "
            "collectives; lower --zero-bubble-nccl-ctas, give every rank more of a GPU, or leave out "
            "--zero-bubble-vocabulary-parallel"
        )
    if fitting < ctas.collective and say is not None:
        say(
            f"collectives take {fitting} CTAs of NCCL instead of {ctas.collective}, so that transfers leave half of "
            f"the {num_multiprocessors} multiprocessors to the passes"
        )
    return min(ctas.collective, fitting)
