"""``--lengths``: a plan whose microbatches have different numbers of tokens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs.lengths import LengthCost, Load, PackedCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.plan import plan_without_messages
from megatron.zero_bubble.planning.offer import Offer
from megatron.zero_bubble.planning.ordering import Simulator

_LISTED = 32
"""The most microbatches of which the order is listed."""


def add_lengths(verb: argparse.ArgumentParser) -> None:
    """Add the flag."""
    verb.add_argument(
        "--lengths",
        metavar="N,N,...",
        help="tokens of each microbatch, in order; samples packed into one are joined by +, as in 4096,1024+2048. The "
        "plan is that for as many equal microbatches, as in a run, which json and csv have too; times and picture are "
        "those of these lengths. Costs are for a sequence as long as --config or the costs file says, else for the "
        "mean of the tokens. Memory counts each microbatch as one such sequence",
    )


def loads_of(options: argparse.Namespace) -> tuple[Load, ...] | None:
    """The microbatches that the flag says; None without it.

    Raises:
        UserError: another form, another number than --num-microbatches, or a flag that needs equal microbatches.
    """
    text: str | None = options.lengths
    if text is None:
        return None
    parts = [microbatch.split("+") for microbatch in text.split(",")]
    if not all(tokens.isascii() and tokens.isdigit() and int(tokens) for samples in parts for tokens in samples):
        raise UserError(
            f"--lengths is a list of numbers of tokens; got {text[:40]!r}; give it as 4096,8192, or with several "
            "samples in a microbatch as 4096,1024+2048"
        )
    if options.num_microbatches not in (None, len(parts)):
        raise UserError(
            f"--lengths needs one element per microbatch; got {len(parts)} for --num-microbatches "
            f"{options.num_microbatches}; leave --num-microbatches out"
        )
    if options.step_ms is not None:
        raise only_equal("--step-ms")
    return tuple(Load.of(map(int, samples)) for samples in parts)


def only_equal(flag: str) -> UserError:
    """The refusal of a flag that needs equal microbatches, together with their lengths."""
    return UserError(f"{flag} is only computed for equal microbatches; got --lengths; leave one of them out")


@dataclass(frozen=True)
class PlanOfLengths:
    """A plan with microbatches of different lengths.

    Attributes:
        made: the plan for equal ones.
        costs: of the passes of these microbatches, for the stages of the plan.
    """

    made: Offer
    costs: PackedCosts

    @classmethod
    def of(cls, made: Offer, own: Sequence[Load]) -> PlanOfLengths:
        equal = made.costs.on(made.schedule.placement)[0]
        sequence = made.costs.sequence or max(1, round(mean(load.tokens for load in own)))
        return cls(made, PackedCosts(**vars(equal), sequence=sequence, loads=tuple(own)))

    def timeline(self, order: Sequence[int] | None = None) -> Timeline:
        """The timeline of the microbatches in the given or another order."""
        own = self.costs.loads if order is None else tuple(self.costs.loads[at] for at in order)
        costs = PackedCosts(**{**vars(self.costs), "loads": own})
        plan = plan_without_messages(self.made.schedule, self.made.added)
        return simulate(plan, costs, self.made.costs.on(self.made.schedule.placement)[1])

    def best_order(self) -> list[int]:
        """The order in which ``megatron.zero_bubble.balance`` would run the microbatches."""
        schedule, cost = self.made.schedule, LengthCost.of_passes(self.costs, self.costs.sequence)
        return Simulator(lambda _: schedule, cost).best(self.costs.loads)[1]

    def text(self) -> str:
        """What the lengths are, and what another order would take."""
        tokens, own, order = [load.tokens for load in self.costs.loads], self.timeline(), self.best_order()
        text = (
            f"{len(tokens)} microbatches of {min(tokens):,} to {max(tokens):,} tokens, {sum(tokens):,} in all; costs "
            f"are for {self.costs.sequence:,}\n"
        )
        best = self.timeline(order)
        if best.makespan_ms >= own.makespan_ms:
            return f"{text}this is the order that megatron.zero_bubble.balance would choose, or one as good\n"
        shorter = 1 - best.makespan_ms / own.makespan_ms
        listed = " ".join(map(str, order[:_LISTED])) + (" ..." if len(order) > _LISTED else "")
        return (
            f"{text}in the order of megatron.zero_bubble.balance: makespan {best.makespan_ms:.3f} ms, {shorter:.1%} "
            f"less, span {best.span_ms:.3f} ms; microbatches {listed}\n"
        )
