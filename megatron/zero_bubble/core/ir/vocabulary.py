"""Vocabulary parallelism: every rank has a shard of the output layer and of the embedding (arXiv 2411.05288).

The passes of a microbatch, in addition to F, B and W, with the stage 0 on rank 0 and the last stage on rank p-1:

    I on every rank   look up the tokens whose rows the rank has; F of stage 0 takes the sum
    S on every rank   logits of the shard from the output of the last F, and their softmax
    L                 the job's loss function, on the losses that follow from all S
    T on every rank   gradient of the shard's weights, from the gradient of the losses
    J on every rank   gradient of the embedding's rows, from the output of B of stage 0

With algorithm 1, the B of the last stage takes the sum that all T compute: two barriers between its F and its B. With
algorithm 2, S prepares the gradient of the hidden states, which needs only the factors that L finds: one barrier, and T
runs whenever there is time, like a W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.flow import OUT, SAVED, Chain, Value
from megatron.zero_bubble.core.ir.passes import BW, B, F, I, J, Kind, L, Pass, S, T
from megatron.zero_bubble.core.ir.schedule import Schedule, chain_of

HIDDEN = "hidden"
"""Output of the last stage and the labels: the input of S on all ranks."""
PART = "part"
"""The contribution of one rank, of which another pass takes the sum over all ranks."""
FACTORS = "factors"
"""What T needs of all ranks: the gradient of each token's loss, and the normalizer of its softmax."""
TOKENS = "tokens"
"""Token numbers of a microbatch, from the rank that reads the data."""
ROWS = "rows"
"""Gradient of the output of the embedding."""

TO_ALL_RANKS = (HIDDEN, FACTORS, TOKENS, ROWS)
"""Values that one rank makes and all ranks use."""

Algorithm = Literal[1, 2]


@dataclass(frozen=True)
class Divided:
    """Embedding and output layer are divided over all pipeline ranks.

    Attributes:
        algorithm: the number of barriers per microbatch is two with 1, and one with 2; ``auto`` leaves it to the
            planner.
        recompute_logits: whether they are computed again for the weight gradient of the output layer.
    """

    algorithm: Algorithm | Literal["auto"]
    recompute_logits: bool = False

    @property
    def of_run(self) -> Algorithm:
        """The algorithm of a run."""
        assert self.algorithm != "auto", "a run has an algorithm"
        return self.algorithm


@dataclass(frozen=True)
class Vocabulary:
    """The flow of a chain whose embedding and output layer are divided over all ranks.

    Attributes:
        chain: the flow of the stages.
        num_ranks: the ranks, of which rank r holds stage r.
        algorithm: 1 or 2.
    """

    chain: Chain
    num_ranks: int
    algorithm: Algorithm

    @property
    def sinks(self) -> tuple[int, ...]:
        return self.chain.sinks

    @property
    def barriers(self) -> int:
        """How often all ranks wait for each other between F and B of the last stage."""
        return 2 if self.algorithm == 1 else 1

    @property
    def last(self) -> int:
        return self.chain.num_stages - 1

    def shards(self, kind: Kind, microbatch: int) -> tuple[Pass, ...]:
        """The passes of ``kind`` (S, T, I or J) of all ranks."""
        return tuple([Pass(rank, kind, microbatch) for rank in range(self.num_ranks)])

    def passes(self, rank: int, root: int, microbatch: int) -> tuple[Pass, ...]:
        """The passes of ``rank`` in addition to those of its stages; ``root`` is the rank of the last stage."""
        shards = (Pass(rank, kind, microbatch) for kind in ((I, S) if self.chain.forward_only else (I, S, T, J)))
        loss = (Pass(self.last, L, microbatch),) if rank == root else ()
        return (*shards, *loss)

    def inputs(self, p: Pass) -> tuple[Value, ...]:
        stage, kind, microbatch, _ = p
        if kind is S:
            return (Value(Pass(self.last, F, microbatch), HIDDEN),)
        if kind is L:
            return self._parts(S, microbatch)
        if kind is T:
            return Value(Pass(self.last, L, microbatch), FACTORS), Value(Pass(stage, S, microbatch), SAVED)
        if kind is I:
            return (Value(Pass(0, I, microbatch), TOKENS),) if stage else ()
        if kind is J:
            return Value(self.chain.backward_of(0, microbatch), ROWS), Value(Pass(stage, I, microbatch), SAVED)
        inputs = self.chain.inputs(p)
        if kind is F and stage == 0:
            return (*self._parts(I, microbatch), *inputs)
        if stage == self.last and kind in (B, BW):
            return (*(self._parts(T, microbatch) if self.algorithm == 1 else (self._gradient(microbatch),)), *inputs)
        return inputs

    def outputs(self, p: Pass) -> tuple[Value, ...]:
        stage, kind, _, _ = p
        trains = not self.chain.forward_only
        saved = (Value(p, SAVED),) if trains else ()
        if kind is S:
            return (Value(p, PART), *saved)
        if kind is L:
            gradient = (Value(p, OUT),) if self.algorithm == 2 else ()
            return (Value(p, FACTORS), *gradient) if trains else ()
        if kind is T:
            return (Value(p, PART),) if self.algorithm == 1 else ()
        if kind is I:
            tokens = (Value(p, TOKENS),) if stage == 0 and self.num_ranks > 1 else ()
            return (*tokens, Value(p, PART), *saved)
        if kind is J:
            return ()
        outputs = self.chain.outputs(p)
        if kind is F and stage == self.last:
            return (Value(p, HIDDEN), *outputs)
        if stage == 0 and kind in (B, BW):
            return (Value(p, ROWS), *outputs)
        return outputs

    def consumers(self, value: Value) -> tuple[Pass, ...]:
        (stage, kind, microbatch, _), name = value
        if name == HIDDEN:
            return self.shards(S, microbatch)
        if name == FACTORS:
            return self.shards(T, microbatch)
        if name == TOKENS:
            return self.shards(I, microbatch)[1:]
        if name == ROWS:
            return self.shards(J, microbatch)
        if name == PART:
            if kind is S:
                return (Pass(self.last, L, microbatch),)
            return (Pass(0, F, microbatch),) if kind is I else (self._last_backward(microbatch),)
        if kind is L:
            return (self._last_backward(microbatch),)
        if name == SAVED and kind is S:
            return (Pass(stage, T, microbatch),)
        if name == SAVED and kind is I:
            return (Pass(stage, J, microbatch),)
        return self.chain.consumers(value)

    def is_scaled(self, value: Value) -> bool:
        """Whether all ranks must know something of each other's parts before these can be added: the softmax of a shard
        is a part of the whole one only after it is scaled, and so is the gradient that S prepares with algorithm 2.
        """
        return value.name == PART and value.producer.kind is S and self.algorithm == 2 and not self.chain.forward_only

    def _parts(self, kind: Kind, microbatch: int) -> tuple[Value, ...]:
        return tuple([Value(shard, PART) for shard in self.shards(kind, microbatch)])

    def _gradient(self, microbatch: int) -> Value:
        """The gradient of the last stage's output, for algorithm 2."""
        return Value(Pass(self.last, L, microbatch), OUT)

    def _last_backward(self, microbatch: int) -> Pass:
        return self.chain.backward_of(self.last, microbatch)


def algorithm_1(schedule: Schedule) -> Vocabulary:
    """The flow of algorithm 1: two barriers, and nothing to compute twice."""
    return _vocabulary(schedule, 1)


def algorithm_2(schedule: Schedule) -> Vocabulary:
    """The flow of algorithm 2: one barrier."""
    return _vocabulary(schedule, 2)


FLOWS: dict[Algorithm, Callable[[Schedule], Vocabulary]] = {1: algorithm_1, 2: algorithm_2}


def algorithm_of(schedule: Schedule) -> Algorithm | None:
    """The algorithm of vocabulary parallelism of a schedule; None if it has none."""
    return next((number for number, flow in FLOWS.items() if schedule.make_flow is flow), None)


def _vocabulary(schedule: Schedule, algorithm: Algorithm) -> Vocabulary:
    ranks = schedule.placement.stage_to_rank[: schedule.num_ranks]
    if ranks != tuple(range(schedule.num_ranks)):
        raise UserError(
            "vocabulary parallelism names the shard of a rank by the rank's first stage, so stage r must be on rank r; "
            f"got stage_to_rank={list(schedule.placement.stage_to_rank)}; number the ranks by their first stages"
        )
    if schedule.num_slices > 1:
        raise UserError(
            f"vocabulary parallelism does not support sequence slices; got {schedule.num_slices} slices; leave one out"
        )
    return Vocabulary(chain_of(schedule), schedule.num_ranks, algorithm)
