"""Derive what each op of a plan waits for, from the effects that the ops declare; prover and simulator use this.

A rank runs its ops in order, so the op that produced a value for a later one is known from the row. Only the times at
which the tokens of other ranks hold are found by running.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple, TypeGuard

from megatron.zero_bubble.core.ir import Op, Pass, Plan, Schedule, Value
from megatron.zero_bubble.core.ir.pairs import computes
from megatron.zero_bubble.core.ir.passes import groups

Report = Callable[[str, int, int], None]
"""A callback for a fault: a sentence, the rank, and the position of the op."""


class Step(NamedTuple):
    """An op, the positions in its row of the ops that produced its inputs, and the tokens that it waits for and makes.

    In a plan without messages, a value is its own token.
    """

    op: Op
    after: tuple[int, ...]
    waits: tuple[Hashable, ...]
    makes: tuple[Hashable, ...]


def steps_of(schedule: Schedule) -> list[Iterator[Step]]:
    """Return the steps of a schedule without ops: a pass is its own token, and waits for the passes it depends on.

    A step is made when it is its turn, so that a run keeps only its results.
    """
    dependencies, pairs = schedule.dependencies, schedule.pairs

    def needed(works: tuple[Pass, ...]) -> tuple[Pass, ...]:
        return dependencies(*works) if len(works) == 1 else sum(map(dependencies, works), ())

    return [
        map(Step, computes(row, pairs), repeat(()), map(needed, groups(row, pairs)), groups(row, pairs))
        for row in schedule.order
    ]


def steps(plan: Plan, report: Report = lambda *_: None, stopped: bool = False) -> list[list[Step]]:
    """Return the steps of every rank.

    Args:
        report: called for every op that uses a value that is not on its rank, or that gives one that no op takes.
        stopped: whether the ranks stop before their last passes, and so drop all values.
    """
    return [_Row(plan, rank, report, stopped).steps() for rank in range(len(plan.ops))]


class _Row:
    """The ops of one rank, walked in order."""

    def __init__(self, plan: Plan, rank: int, report: Report, stopped: bool) -> None:
        self._plan, self._rank, self._report, self._stopped = plan, rank, report, stopped
        self._flow, self._ops = plan.schedule.flow, plan.ops[rank]
        self._taken: set[Hashable] = set()  # by an op before

    def steps(self) -> list[Step]:
        travels = not self._plan.has_messages
        # Not ``plan.effects``: it would keep the effects of all ranks in memory.
        declared = [op.effects(self._flow) for op in self._ops]
        last_use = {value: position for position, effects in enumerate(declared) for value in effects.uses}
        # By value: the position of its giver, and the tokens with which it arrives.
        given: dict[Hashable, tuple[int, tuple[Hashable, ...]]] = {}
        found = []
        for position, (op, effects) in enumerate(zip(self._ops, declared, strict=True)):
            uses, gives, takes, waits, makes, arrives = effects
            after: list[int] = []
            tokens: list[Hashable] = [*waits]
            for value in (*uses, *takes) if takes else uses:
                giver, arrivals = given.get(value) or self._absent(value, position)
                if giver is not None:
                    after.append(giver)
                tokens += arrivals
            for value in uses:
                if last_use[value] == position:
                    given.pop(value, None)
            for value in takes:
                given.pop(value, None)
                self._taken.add(value)
            # What the passes of one op give may be there at different times, so it is a token on its own rank, too.
            apart = len(op.works) > 1
            for value in gives:
                if value in given:
                    self._report(f"{op} gives {value}, which rank {self._rank} has already", self._rank, position)
                given[value] = position, (*arrives, value) if apart else arrives
            found.append(Step(op, tuple(after), tuple(tokens), makes + gives if travels or apart else makes))
        self._check_left(given)
        return found

    def _absent(self, value: Hashable, position: int) -> tuple[None, tuple[Hashable, ...]]:
        """Handle a value that no earlier op of the row gives. Without messages, it may come from another rank."""
        if not self._plan.has_messages and value not in self._taken:
            return None, (value,)
        if self._stopped and isinstance(value, Value):
            return None, ()
        op = self._ops[position]
        if not self._is_of_a_pass(value):
            why = f"{op} needs {value}, which rank {self._rank} does not have"
        elif self._plan.schedule.placement.stage_to_rank[value.producer.stage] == self._rank:
            why = f"the output {value} is used by {op} but is not there: it is not computed yet, or it was moved away"
        else:
            why = f"the output of {value} is used by {op} but no receive was posted for it"
        self._report(why, self._rank, position)
        return None, ()

    def _check_left(self, given: Mapping[Hashable, tuple[int, tuple[Hashable, ...]]]) -> None:
        for value, (position, _) in given.items():
            forgotten = self._stopped and isinstance(value, Value)
            is_for_another_rank = not self._plan.has_messages and self._is_of_a_pass(value)
            if not (forgotten or is_for_another_rank):
                op = self._ops[position]
                self._report(f"{op} leaves {value} behind: no later op takes it", self._rank, position)

    def _is_of_a_pass(self, value: Hashable) -> TypeGuard[Value]:
        return isinstance(value, Value) and value in self._flow.outputs(value.producer)


class Blocked(Exception):
    """Raised when no rank can proceed.

    Attributes:
        positions: the position that each rank reached.
        waits_for: by rank, the token that its next op waits for.
    """

    def __init__(self, positions: Sequence[int], waits_for: Mapping[int, Hashable]) -> None:
        super().__init__(f"blocked at {list(positions)}")
        self.positions = positions
        self.waits_for = waits_for


def advance(rows: Iterable[Iterable[Step]], made: Collection[Hashable]) -> Iterator[tuple[int, int, Step]]:
    """Run all ranks, each as far as possible, and yield (rank, position, step). Every step comes after the steps of
    other ranks whose tokens it waits for. The time is linear in the number of ops.

    Args:
        made: the tokens that hold. The caller adds those that a step makes before it takes the next step; what it
            stores with them is its own affair.

    Raises:
        Blocked: when no rank can proceed.
    """
    left = list(map(iter, rows))
    nexts = [next(row, None) for row in left]
    positions = [0] * len(left)
    waiting: dict[Hashable, list[int]] = {}
    ready = list(range(len(left)))
    while ready:
        rank = ready.pop()
        row, step, position = left[rank], nexts[rank], positions[rank]
        while step is not None:
            for token in step.waits:
                if token not in made:
                    break
            else:
                yield rank, position, step
                position += 1
                for token in step.makes:
                    if token in waiting:
                        ready.extend(waiting.pop(token))
                step = next(row, None)
                continue
            waiting.setdefault(token, []).append(rank)
            break
        nexts[rank], positions[rank] = step, position
    if any(step is not None for step in nexts):
        raise Blocked(positions, {rank: token for token, ranks in waiting.items() for rank in ranks})


def run_to_end(rows: Iterable[Iterable[Step]], given: Iterable[Hashable] = ()) -> None:
    """Run all ranks without time.

    Args:
        given: tokens that hold from the start.

    Raises:
        Blocked: when no rank can proceed.
    """
    made = set(given)
    for _, _, step in advance(rows, made):
        made.update(step.makes)
