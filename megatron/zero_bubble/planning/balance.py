"""Divide samples of different lengths among data-parallel replicas and their microbatches.

A replica of a pipeline meets the others once per iteration, when gradients are reduced. So replicas need equal work,
not equal numbers of microbatches (LB-Mini of arXiv 2601.19362), and megatron-core's own reduction serves them.

Replicas get their samples by the largest differencing method of Karmarkar and Karp. The samples of a microbatch are
packed: one after the other, without padding, and none attends to another. So those of a replica are divided by the same
method, and the order of its microbatches is found by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf

from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.costs.lengths import LengthCost
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.alike import alike
from megatron.zero_bubble.planning.ordering import Simulator
from megatron.zero_bubble.planning.packing import Microbatches, karmarkar_karp, load_of, pack

_HIDDEN_SIZE, _FIXED_PART, _MORE, _MUCH = 4096, 1 / 16, 1.25, 1.05


def balance(
    lengths: Sequence[int],
    replicas: int,
    ranks: int,
    most_tokens: int,
    schedule: str | Callable[[int], Schedule] = "zb-h1",
    cost: LengthCost | None = None,
    together: int = 1,
) -> tuple[Microbatches, ...]:
    """Divide samples over replicas and microbatches, such that the slowest replica takes as little time as possible.

    The result depends on the arguments only, so every rank can compute it, and nothing is exchanged.

    Args:
        lengths: the tokens of each sample.
        replicas: data-parallel replicas, which may have different numbers of microbatches.
        ranks: pipeline ranks of a replica.
        most_tokens: the most tokens of a microbatch.
        schedule: the name of the schedule, or what makes it for a number of microbatches.
        cost: that of a sample of s tokens; default: ``12 h s + s^2`` with a hidden size h of 4096, and a microbatch
            costs 1/16 of ``most_tokens`` short tokens more, so that few short ones are made.
        together: replicas that share experts. So many neighbours have equally many microbatches, because they exchange
            tokens in every layer, and those that run at the same time take nearly equal times.

    Returns:
        for each replica, its microbatches of indices into ``lengths`` in the order in which they are to run, with every
        sample exactly once.

    Raises:
        UserError: fewer samples than replicas, a sample without tokens, or one that is longer than a microbatch may be;
            replicas or samples that are no multiple of the replicas that share experts; or a schedule that does not
            exist, or that only supports microbatches of equal length.
    """
    for name, value in (("replicas", replicas), ("ranks", ranks), ("most_tokens", most_tokens), ("together", together)):
        if value < 1:
            raise UserError(f"{name} must be 1 or more; got {value}")
    lengths = [int(tokens) for tokens in lengths]  # squares of numpy's integers could overflow
    if len(lengths) < replicas:
        raise UserError(
            f"an iteration needs one sample or more per data-parallel replica; got {len(lengths)} samples for "
            f"{replicas} replicas; raise --global-batch-size"
        )
    if min(lengths) < 1 or max(lengths) > most_tokens:
        raise UserError(
            f"samples must have 1 to {most_tokens} tokens, the most of a microbatch; got {min(lengths)} to "
            f"{max(lengths)}; raise --micro-batch-size or --seq-length, or cut the samples"
        )
    for what, number in (("replicas", replicas), ("samples", len(lengths))):
        if number % together:
            raise UserError(
                f"{what} must be a multiple of the {together} replicas that share experts, because these run equally "
                f"many microbatches; got {number}; give another number, or train with less expert parallelism"
            )
    cost = LengthCost.of_hidden_size(_HIDDEN_SIZE, _FIXED_PART * most_tokens) if cost is None else cost
    if together > 1:
        return alike(lengths, replicas // together, together, ranks, most_tokens, simulator_of(schedule, ranks, cost))
    costs = [cost.sample(tokens) for tokens in lengths]
    # The longest sample of a replica also fills and drains its pipeline, so it can count once per rank.
    longest = sorted(range(len(costs)), key=lambda sample: (-costs[sample], sample))[:replicas]
    drained = [own * ranks if sample in longest else own for sample, own in enumerate(costs)]
    candidates = [
        tuple(microbatches(part, lengths, ranks, cost, most_tokens) for part in karmarkar_karp(work, replicas))
        for work in (costs, drained)
    ]
    found = min(candidates, key=lambda parts: max(duration(own, lengths, ranks, cost) for own in parts))
    return tuple(_ordered(own, lengths, simulator_of(schedule, ranks, cost)) for own in found)


def _ordered(own: Microbatches, lengths: Sequence[int], simulator: Simulator) -> Microbatches:
    """The microbatches of a replica in the best order, from that of their first samples on."""
    own = tuple(sorted(own))
    _, order = simulator.best([load_of(microbatch, lengths) for microbatch in own])
    return tuple(own[at] for at in order)


@lru_cache(maxsize=8)
def simulator_of(schedule: str | Callable[[int], Schedule], ranks: int, cost: LengthCost) -> Simulator:
    """What simulates a schedule; repeated calls return the same, which keeps the schedules that it has prepared."""
    if isinstance(schedule, str):
        name = schedule
        return Simulator(lambda count: build(name, num_ranks=ranks, num_microbatches=count), cost)
    return Simulator(schedule, cost)


def duration(own: Microbatches, lengths: Sequence[int], ranks: int, cost: LengthCost) -> float:
    """Estimate the time of a replica: its microbatches in turn, and the longest once more for every other rank."""
    times = [cost.microbatch(load_of(microbatch, lengths)) for microbatch in own]
    return sum(times) + (ranks - 1) * max(times)


def microbatches(
    samples: Sequence[int], lengths: Sequence[int], ranks: int, cost: LengthCost, most_tokens: int
) -> Microbatches:
    """Pack the samples of a replica into microbatches of at most ``most_tokens``.

    Fewer microbatches have fewer fixed costs, but larger ones take longer to fill and drain the pipeline. So several
    numbers are tried, from the fewest on.
    """
    # Of equal times, that of more microbatches is taken: they leave smaller bubbles than the estimate says.
    number = -(-sum(lengths[sample] for sample in samples) // most_tokens)
    best, least = None, inf
    while True:
        packed = pack(samples, lengths, cost, most_tokens, number)
        time = inf if packed is None else duration(packed, lengths, ranks, cost)
        if packed is not None and time <= least * (1 + ROUNDING):
            best, least = packed, min(time, least)
        if best is not None and (number == len(samples) or time > least * _MUCH):
            return best
        number = min(max(number + 1, int(number * _MORE)), len(samples))
