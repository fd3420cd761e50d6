"""The replacement for Megatron's forward-backward function: make a plan once, then run it in every iteration.

Upstream: ``megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving``. Arguments,
results and the order of the steps after the passes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from megatron.zero_bubble.core.costs.lengths import SequenceShape
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Pass, Plan, Schedule
from megatron.zero_bubble.engine.measure.memory import MemoryMeter
from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer
from megatron.zero_bubble.engine.platforms.device import device_of
from megatron.zero_bubble.engine.runtime.hosts import Hosts
from megatron.zero_bubble.engine.runtime.observer import IterationObserver, IterationStart, Observers, observed
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.engine.wgrad.grad_sync import GradSync, reduced_in_order, reduces_early
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from megatron.zero_bubble.integration.adapter.activation_managers import ActivationManagers
from megatron.zero_bubble.integration.adapter.boundary import BoundaryMaker
from megatron.zero_bubble.integration.adapter.connection import Connection
from megatron.zero_bubble.integration.adapter.equal_counts import EqualCounts
from megatron.zero_bubble.integration.adapter.expert_overlap import ExpertOverlap
from megatron.zero_bubble.integration.adapter.finalize import finalized, finish_grad_sync, per_chunk, timed
from megatron.zero_bubble.integration.adapter.iteration import Iteration, Slicing
from megatron.zero_bubble.integration.adapter.lengths import Agreed, GivenShapes, LengthComparison, Lengths, compared
from megatron.zero_bubble.integration.adapter.models import Models
from megatron.zero_bubble.integration.adapter.options import Options
from megatron.zero_bubble.integration.adapter.part import Call, IterationFacts, Joined, Part
from megatron.zero_bubble.integration.adapter.prepared import (
    Lowering,
    PreparedPlan,
    as_scheduled,
    check_model,
    check_queues,
    check_same_plan,
    check_stepping,
    loss_rank,
    lowered,
)
from megatron.zero_bubble.integration.adapter.recent import Recent
from megatron.zero_bubble.integration.adapter.shards import ShardedUnits
from megatron.zero_bubble.integration.adapter.stage import StepArguments, StepResults
from megatron.zero_bubble.integration.adapter.stage_graphs import StageGraphs
from megatron.zero_bubble.integration.adapter.staging import Carriers
from megatron.zero_bubble.integration.adapter.unfinished import Unfinished
from megatron.zero_bubble.integration.adapter.versions import check_one_model, check_one_pipeline, process_groups
from megatron.zero_bubble.integration.adapter.vocabulary_parallel import VocabularyParallel
from megatron.zero_bubble.planning.job.runnable import check_runnable

P = TypeVar("P", bound=Part)
_MOST_PLANS = 64
"""Plans kept; loops that pack samples of different lengths run many numbers of microbatches."""


class Pipeline:
    """Runs schedules on the pipeline-parallel group of this process.

    Args:
        make_schedule: maps (number of ranks, number of microbatches) to a valid schedule, the same on all ranks. It is
            called in every iteration; a changed schedule is checked and lowered again.
        parts: what features add to plans and iterations, in the order of their lowering passes.
        observers: observe training iterations. They nest: the last sees the least overhead of the others.
        memory: the observer among them that measures the memory of microbatches, if any; it becomes the first.
        options: the options of the configuration.
        accumulate: accumulates weight gradients into their parameters; default: bit-for-bit as upstream.
        say: prints which options are switched off, and that collectives take fewer CTAs than configured; None on all
            ranks but one.

    Attributes:
        microbatch: tokens of a sequence, and sequences of a microbatch, in the last training iteration.
    """

    def __init__(
        self,
        make_schedule: Callable[[int, int], Schedule],
        parts: Sequence[Part] = (),
        observers: Sequence[IterationObserver] = (),
        memory: MemoryMeter | None = None,
        options: Options = Options(),  # noqa: B008 (an immutable value)
        accumulate: GradAccumulator | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.accumulate = GradAccumulator() if accumulate is None else accumulate
        self.store = WgradStore(self.accumulate)
        self.microbatch = 0, 0
        self._vocabulary = VocabularyParallel(self.accumulate, options.setup.vocabulary)
        self._slicing = Slicing()
        graphs = StageGraphs(self.store, self.accumulate, options.is_settled)
        own = EqualCounts(options.timeout), ExpertOverlap(options.setup), ActivationManagers(say), graphs
        self._parts: tuple[Part, ...] = (self._vocabulary, self._slicing, *own, *parts)
        self._make_schedule, self._memory = make_schedule, memory
        self._observers = Observers((*(() if memory is None else (memory,)), *observers))
        self._options, self._say = options, say
        self._optimizer: PostValidatedOptimizer | None = None
        self._unfinished = Unfinished()
        self._prepared: Recent[tuple[int, bool, bool, bool], PreparedPlan] = Recent(_MOST_PLANS)
        self._given: GivenShapes | None = None
        self._models = Models()
        self._connection: Connection | None = None

    def part(self, kind: type[P]) -> P | None:
        return next((each for each in self._parts if isinstance(each, kind)), None)

    @property
    def units(self) -> ShardedUnits | None:
        """The sharded units, if any: jobs read whole weights from them."""
        return self.part(ShardedUnits)

    @property
    def num_pending(self) -> int:
        """Number of weight gradients not computed, values that parts keep, messages not settled and optimizer steps not
        validated.

        It is 0 between iterations; with post-validation, only after ``PostValidatedOptimizer.settle``.
        """
        under_way = (self._connection, self._optimizer)
        kept = len(self.store) + sum(each.num_pending for each in self._parts)
        return kept + sum(each.num_in_flight for each in under_way if each is not None)

    def _operands(self, work: Pass) -> Iterator[torch.Tensor]:
        """The tensors held in memory until ``work``, a W or T."""
        yield from self.store.tensors(work)
        yield from self._vocabulary.saved.tensors(work)

    def post_validated(
        self, optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]
    ) -> PostValidatedOptimizer:
        """Wrap ``optimizer``, so that every following iteration validates the step taken before it.

        A collective call of all ranks of the job.

        Args:
            optimizer: the result of ``get_megatron_optimizer``.
            chunks: the model chunks of this rank.

        Raises:
            UserError: the configuration is without post-validation, or the optimizer or the model do not support it.
        """
        options = self._options
        if options.rollback is None:
            raise UserError(
                "only a schedule with post-validation can validate optimizer steps; apply "
                "ZeroBubbleConfig(..., post_validation=True)"
            )
        config = get_model_config(chunks[0])
        check_stepping(config, optimizer.config, self._options.setup, self._say)
        group = parallel_state.get_pipeline_model_parallel_group()
        # Tokens travel between the replicas of a stage with experts, so these must repeat their forwards together.
        replicas = parallel_state.get_expert_model_parallel_group() if config.num_moe_experts else None
        ahead = PostValidatedOptimizer(optimizer, chunks, group, options.rollback, replicas, options.timeout)
        ahead.on_settle = self._settle_reports
        if self._optimizer is not None:
            self._optimizer.close()
        self._optimizer = ahead
        return ahead

    @property
    def optimizer(self) -> PostValidatedOptimizer | None:
        return self._optimizer

    def _settle_reports(self) -> None:
        if self._connection is not None:
            self._connection.settle()

    @contextmanager
    def shapes(self, given: GivenShapes) -> Iterator[None]:
        """Context in which the microbatches of every call have the ``given`` shapes."""
        before, self._given = self._given, given
        try:
            yield
        finally:
            self._given = before

    def forward_backward(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        grad_finalize_pgs: Any = None,
        force_all_reduce: bool | None = False,
        shapes: Sequence[SequenceShape] | None = None,
    ) -> list[Any]:
        """Run one iteration. Returns the losses of the microbatches on the last rank, and an empty list elsewhere.

        Replicas may run different numbers of microbatches, of the ``shapes`` given, if all of them give shapes.

        Raises:
            UserError: the schedule cannot be built or does not fit this job, or the model does not support it.
            PeerError: another rank failed or hangs. With NCCL, the watchdog ends the process instead.
        """
        check_one_model(p2p_communicator, pg_collection)
        chunks = list(model) if isinstance(model, list) else [model]
        iterators = list(data_iterator) if isinstance(data_iterator, list) else [data_iterator] * len(chunks)
        config = get_model_config(chunks[0])
        groups = process_groups(pg_collection or grad_finalize_pgs)
        check_one_pipeline(p2p_communicator, groups)
        what = forward_only, collect_non_loss_data, first_val_step
        step = StepArguments(forward_step_func, num_microbatches, config, groups.cp.size(), *what)
        equal = seq_length, micro_batch_size, decoder_seq_length
        boundary = BoundaryMaker(equal, config, groups, adjust_tensor_shapes_fn, chunks[0], device_of(chunks)).make
        given = self._given if shapes is None else GivenShapes.of(shapes)
        lengths = Lengths.of(num_microbatches, config, given)
        call = Call(step, groups, chunks, iterators, boundary, force_all_reduce, lengths)
        if forward_only:
            return self._run(call, None)
        self.microbatch = decoder_seq_length or seq_length, micro_batch_size
        kept = self._operands, *self._slicing.kept, self.store.saved, lengths.differ, lengths.need_headers
        start = IterationStart(groups.pp, num_microbatches, chunks, *kept)
        with observed(self._observers, start):
            return self._run(call, self._observers or None)

    def _run(self, call: Call, observer: IterationObserver | None) -> list[Any]:
        self._unfinished.check(can_join_again=self._optimizer is None)
        if self._connection is not None and not self._connection.follow(call.groups.pp):
            self.disconnect()  # the job has rebuilt its process groups, but not those of this pipeline
        for each in self._parts:
            each.begin(call)
        noted = self._unfinished.noted(self._forget, call.groups.pp)
        with noted, compared(call.lengths, self._hosts) as comparison:
            prepared = self._prepare(call, comparison)
            self._models.check_chunks(call.groups.pp, prepared, call.chunks)
            return self._run_prepared(call, prepared, comparison.agreed(), observer)

    def _run_prepared(
        self, call: Call, prepared: PreparedPlan, agreed: Agreed, observer: IterationObserver | None
    ) -> list[Any]:
        step, config, chunks = call.step, call.step.config, call.chunks
        boundary = call.boundary(agreed.lengths, prepared.schedule)
        losses = self._joined.new_losses()
        results = StepResults(torch.zeros([], dtype=torch.int, device=boundary.device), losses)
        self.store.clear()
        links = self._links(prepared, call)
        if observer is not None:
            observer.planned(prepared.schedule)
        move = boundary.checked if self._models.sends_first(chunks[0], boundary.outputs) else boundary.channels
        channels = partial(agreed.channels, partial(move, links.transport))
        facts = IterationFacts(prepared, call, boundary, links, channels, observer)
        begin = self._unfinished.begin_passes
        iteration = Iteration(facts, results, self.store, self._slicing, self._parts, begin)
        with timed(config):
            if step.forward_only:
                if self._optimizer is not None:
                    self._optimizer.settle()
                iteration.evaluate()
            else:
                finalizing = [each.finalizing for each in self._parts]
                with finalized(config, call.groups, prepared, chunks, results, call.force_all_reduce, finalizing):
                    self._train(iteration)
        return self._joined.deliver(losses, prepared.last_stage_rank, boundary.device, not step.forward_only)

    def _links(self, prepared: PreparedPlan, call: Call) -> Carriers:
        validates = not call.step.forward_only and self._optimizer is not None and self._optimizer.is_pending
        steps = prepared.steps | {"validate"} if validates else prepared.steps
        number = self._models.number(call.chunks[0])  # each model has kernels of its own
        return self._joined.links({(number, each) for each in steps})

    def _train(self, iteration: Iteration) -> None:
        """Run all passes of a training step, then start the gradient reductions that no pass has started."""
        call, prepared = iteration.facts.call, iteration.facts.prepared
        chunks, config = call.chunks, call.step.config
        self.accumulate.connect(iteration.facts.boundary.device)
        self.accumulate.watch(chunks)
        self.store.watch(chunks)
        syncs = [GradSync(no_sync) for no_sync in per_chunk(config.no_sync_func, len(chunks))]
        reducible = config.no_sync_func is not None or any(map(reduces_early, chunks))
        # With --align-grad-reduce only the first rank reduces during its passes; the others reduce in their bubbles.
        overlap = reducible and (config.grad_sync_func is None or prepared.rank == 0)
        if self._optimizer is not None:
            self._optimizer.break_even = prepared.break_even
            self._optimizer.begin_passes()
        with reduced_in_order(chunks) if call.lengths.differ else nullcontext():
            iteration.train(syncs, overlap, self._optimizer)
            finish_grad_sync(config, chunks, syncs)

    @property
    def memory(self) -> MemoryMeter:
        """The memory of microbatches, measured in the first training iteration."""
        assert self._memory is not None, "the configuration needs measure_memory=True"
        return self._memory

    def finish(self) -> None:
        """Stop background work of the observers; called at the end of training."""
        self._observers.close()

    def close(self) -> None:
        """Disconnect from the other ranks for good."""
        self.disconnect()
        if self._optimizer is not None:
            self._optimizer.close()

    def disconnect(self) -> None:
        """Disconnect from the other ranks and forget the plans; the next iteration connects them again.

        All ranks of the job call it, between iterations.
        """
        for each in self._parts:
            each.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._prepared.clear()
        self._unfinished.disconnected()

    def _forget(self) -> None:
        if self._optimizer is not None:
            self._optimizer.await_sums()
        self.store.clear()
        if self._connection is not None:
            self._connection.forget()

    @property
    def _joined(self) -> Connection:
        assert self._connection is not None, "the ranks are connected when their plan is prepared"
        return self._connection

    def _hosts(self) -> Hosts | None:
        return None if self._connection is None else self._connection.hosts

    def _prepare(self, call: Call, comparison: LengthComparison) -> PreparedPlan:
        """The plan for this number of microbatches; made, checked and compared between ranks when it is new.

        The options of every model are checked: several may run in turn, for example a policy and its reference.
        """
        group, config, forward_only = call.groups.pp, call.step.config, call.step.forward_only
        lengths, num_microbatches = comparison.lengths, comparison.lengths.num_microbatches
        key = (num_microbatches, forward_only, lengths.differ, lengths.need_headers)
        schedule = self._make_schedule(group.size(), num_microbatches)
        if self._options.rollback is not None and self._optimizer is None and not forward_only:
            raise UserError(
                "post-validation needs the optimizer whose steps the passes validate, got none; wrap it with "
                "post_validated(optimizer, model) of the pipeline that apply() returns, or leave post_validation out"
            )
        of_parts = (each.lowering(schedule, forward_only) for each in self._parts)
        lowerings = tuple(lowering for lowering in of_parts if lowering is not None)
        prepared = self._prepared.get(key)
        is_new = prepared is None or (prepared.schedule, prepared.lowerings) != (schedule, lowerings)
        if is_new:
            self._models.forget_checks(key)
        if self._models.is_unchecked(config, key):
            check_model(call.chunks, self._options.setup, schedule, self._say)
            for each in self._parts:
                each.check(config, schedule)
            self._models.mark_checked(config, key)
        if prepared is None or is_new:
            check_runnable(schedule, group.size(), num_microbatches)
            comparison.check()
            lengths.check(as_scheduled(self._options.setup, schedule))
            plan = self._plan(schedule, lowerings, forward_only, lengths.need_headers)
            check_queues(group, plan)
            self._connect(group, plan)
            prepared = self._prepared[key] = PreparedPlan(schedule, lowerings, plan, group.rank(), forward_only)
        return prepared

    def _plan(
        self, schedule: Schedule, lowerings: Sequence[Lowering], forward_only: bool, needs_headers: bool = False
    ) -> Plan:
        # A receive needs a shape, and a header comes no earlier than its message.
        post_receives = "late" if needs_headers else self._options.setup.messages.receives
        return lowered(schedule, lowerings, forward_only, post_receives, self._options.rollback is not None)

    def _connect(self, group: dist.ProcessGroup, plan: Plan) -> None:
        """Check that all ranks have the same plan, and open its channels."""
        check_same_plan(plan, group, "ranks of a pipeline")
        options, connection = self._options, self._connection
        if connection is None:
            connection = Connection(group, plan, options.timeout, options.setup.messages.nccl, self._say)
            self._connection = connection
        else:
            connection.open_messages(plan)
        joined = Joined(group, plan, connection.platform, connection.watchdog, self.store.saved)
        for each in self._parts:
            each.connect(joined)
        connection.open_collectives(plan)
        if loss_rank(plan.schedule) != group.size() - 1:
            connection.open_reports(wait=options.rollback is None)
