"""The replacement for Megatron's forward-backward function: make a plan once, then run it in every iteration.

Upstream: ``megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving``. Arguments,
results and the order of the steps after the passes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from megatron.zero_bubble.adapter.boundary import Boundary, make_boundary
from megatron.zero_bubble.adapter.finalize import finalized, finish_grad_sync, per_chunk
from megatron.zero_bubble.adapter.history import Histories
from megatron.zero_bubble.adapter.iteration import Call, ChainStages, Iteration, StageMaker
from megatron.zero_bubble.adapter.loss_reports import Collected, LossReports
from megatron.zero_bubble.adapter.prepared import Prepared, check_queues, check_same_plan, loss_rank
from megatron.zero_bubble.adapter.shards import ShardedUnits
from megatron.zero_bubble.adapter.stage import StepArguments, StepResults
from megatron.zero_bubble.adapter.staging import Links, Staging, spins
from megatron.zero_bubble.adapter.versions import check_one_model, process_groups
from megatron.zero_bubble.adapter.vocabulary.build import VocabularyStages
from megatron.zero_bubble.adapter.vocabulary.logits import KeptLogits, Logits, RecomputedLogits, SavedForT
from megatron.zero_bubble.analysis.validate import validate
from megatron.zero_bubble.costs.lengths import Shape
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Pass, Plan, Schedule
from megatron.zero_bubble.ir.vocabulary import algorithm_of
from megatron.zero_bubble.job.config import Ctas
from megatron.zero_bubble.job.nccl import collective_ctas
from megatron.zero_bubble.job.options import check_options
from megatron.zero_bubble.job.runnable import check_runnable
from megatron.zero_bubble.measure.memory import MemoryMeter
from megatron.zero_bubble.optimizer.post_validation import PostValidatedOptimizer
from megatron.zero_bubble.optimizer.rollback import Optimizers, Rollback
from megatron.zero_bubble.plan import PostReceives, lower_forward_only, lower_training
from megatron.zero_bubble.plan.offload import Move, MoveSelection
from megatron.zero_bubble.platforms import select
from megatron.zero_bubble.platforms.device import device_of
from megatron.zero_bubble.runtime.backends import is_nccl
from megatron.zero_bubble.runtime.collectives import Lanes, collective_kinds
from megatron.zero_bubble.runtime.groups import Directions, backend_of
from megatron.zero_bubble.runtime.observer import IterationObserver, IterationStart, Observers, observed
from megatron.zero_bubble.runtime.offload import Offloader
from megatron.zero_bubble.runtime.transport import Transport
from megatron.zero_bubble.runtime.watchdog import Watchdog
from megatron.zero_bubble.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.wgrad.grad_sync import GradSync, reduced_in_order, reduces_early
from megatron.zero_bubble.wgrad.store import WgradStore


class Pipeline:
    """Runs schedules on the pipeline-parallel group of this process.

    Args:
        make_schedule: maps (number of ranks, number of microbatches) to a valid schedule, the same on all ranks. It is
            called in every iteration; a changed schedule is checked and lowered again.
        observers: observe training iterations. They nest: the last sees the least overhead of the others.
        memory: measures the memory of microbatches in the first training iteration.
        rollback: makes what undoes rejected optimizer steps, which the passes then validate, so that ``post_validated``
            must be called; None if steps are final.
        accumulate: accumulates weight gradients into their parameters; default: bit-for-bit as upstream.
        peer_timeout_s, post_receives, ctas, recompute_logits: see ``ZeroBubbleConfig``.
        select_moves: as ``make_schedule``, for what moves to at most ``host_limit`` bytes of host memory; or None.
        units: shards chunks over their data-parallel replicas, or None.
        say: prints how much stayed on the device that was planned to move; None on all ranks but one.

    Attributes:
        microbatch: tokens of a sequence, and sequences of a microbatch, in the last training iteration.
    """

    def __init__(
        self,
        make_schedule: Callable[[int, int], Schedule],
        peer_timeout_s: float | None = None,
        observers: Sequence[IterationObserver] = (),
        memory: MemoryMeter | None = None,
        rollback: Callable[[Optimizers], Rollback] | None = None,
        accumulate: GradAccumulator | None = None,
        post_receives: PostReceives = "early",
        ctas: Ctas = Ctas(),  # noqa: B008 (an immutable value)
        recompute_logits: bool = False,
        select_moves: MoveSelection | None = None,
        host_limit: int | None = None,
        units: ShardedUnits | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.accumulate = GradAccumulator() if accumulate is None else accumulate
        self.store = WgradStore(self.accumulate)
        self.histories = Histories()
        self.saved_for_t = SavedForT()
        self.microbatch = 0, 0
        self._make_schedule = make_schedule
        self._timeout = None if peer_timeout_s is None else timedelta(seconds=peer_timeout_s)
        self._memory = memory
        self._observers = Observers((*(() if memory is None else (memory,)), *observers))
        self._rollback = rollback
        self._post_receives, self._ctas = post_receives, ctas
        self._logits: Logits = RecomputedLogits() if recompute_logits else KeptLogits()
        self._select_moves, self._host_limit = select_moves, host_limit
        self.units, self._say = units, say
        self.offloader: Offloader | None = None
        self._optimizer: PostValidatedOptimizer | None = None
        self._reports: LossReports | None = None
        self._prepared: dict[tuple[int, bool], Prepared] = {}
        self._transport: Transport | None = None
        self._lanes: Lanes | None = None
        self._watchdog: Watchdog | None = None
        self._staging: Staging | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def num_pending(self) -> int:
        """Number of weight gradients not computed, keys, values, logits and host memory not freed, messages not settled
        and optimizer steps not validated.

        It is 0 between iterations; with post-validation, only after ``PostValidatedOptimizer.settle``.
        """
        under_way = (self._transport, self._staging, self._reports, self._optimizer)
        kept = len(self.store) + len(self.histories) + len(self.saved_for_t)
        kept += 0 if self.offloader is None else self.offloader.num_away
        return kept + sum(part.num_in_flight for part in under_way if part is not None)

    def _operands(self, work: Pass) -> Iterator[torch.Tensor]:
        """The tensors held in memory until ``work``, a W or T."""
        yield from self.store.tensors(work)
        yield from self.saved_for_t.tensors(work)

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
        if self._rollback is None:
            raise UserError(
                "only a schedule with post-validation can validate optimizer steps; apply "
                "ZeroBubbleConfig(..., post_validation=True)"
            )
        config = get_model_config(chunks[0])
        check_options(config, post_validation=True)
        group = parallel_state.get_pipeline_model_parallel_group()
        # Tokens travel between the replicas of a stage with experts, so these must repeat their forwards together.
        replicas = parallel_state.get_expert_model_parallel_group() if config.num_moe_experts else None
        ahead = PostValidatedOptimizer(optimizer, chunks, group, self._rollback, replicas, self._timeout)
        ahead.on_settle = self._settle_reports
        if self._optimizer is not None:
            self._optimizer.close()
        self._optimizer = ahead
        return ahead

    @property
    def optimizer(self) -> PostValidatedOptimizer | None:
        """The optimizer whose steps are validated, if any."""
        return self._optimizer

    def _settle_reports(self) -> None:
        if self._reports is not None:
            self._reports.settle()

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
        shapes: Sequence[Shape] | None = None,
    ) -> list[Any]:
        """Run one iteration. Returns the losses of the microbatches on the last rank, and an empty list elsewhere.

        Replicas may run different numbers of microbatches, of the ``shapes`` given, if all of them give shapes.

        Raises:
            UserError: the schedule cannot be built or does not fit this job, or the model does not support it.
            PeerError: another rank died or hangs. With NCCL, the watchdog ends the process instead.
        """
        check_one_model(p2p_communicator, pg_collection)
        chunks = list(model) if isinstance(model, list) else [model]
        iterators = list(data_iterator) if isinstance(data_iterator, list) else [data_iterator] * len(chunks)
        config = get_model_config(chunks[0])
        groups = process_groups(pg_collection or grad_finalize_pgs)
        what = forward_only, collect_non_loss_data, first_val_step
        step = StepArguments(forward_step_func, num_microbatches, config, groups.cp.size(), *what)
        equal = seq_length, micro_batch_size, decoder_seq_length
        boundary = make_boundary(shapes, equal, config, groups, adjust_tensor_shapes_fn, chunks[0], device_of(chunks))
        call = Call(step, groups, chunks, iterators, boundary, force_all_reduce, shapes is not None)
        if forward_only:
            return self._run(call, None)
        self.microbatch, saved = (decoder_seq_length or seq_length, micro_batch_size), self.store.saved
        start = IterationStart(groups.pp, num_microbatches, chunks, self._operands, self.histories.tensors, saved)
        with observed(self._observers, start):
            return self._run(call, self._observers or None)

    def _run(self, call: Call, observer: IterationObserver | None) -> list[Any]:
        step, config, chunks = call.step, call.step.config, call.chunks
        if self._group is not None and call.groups.pp is not self._group:
            self._disconnect()  # the job has rebuilt its process groups
        if self.units is not None:
            self.units.check_replicas(step.num_microbatches, step.forward_only)
        prepared = self._prepare(call.groups.pp, config, step.num_microbatches, step.forward_only)
        prepared.check_chunks(chunks)
        boundary = call.boundary(prepared.schedule.slices)
        losses = [] if self._reports is None else Collected()
        results = StepResults(torch.zeros([], dtype=torch.int, device=boundary.device), losses)
        self.store.clear()
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        links = self._links(prepared, step.forward_only)
        if observer is not None:
            observer.planned(prepared.schedule)
        iteration = Iteration(
            prepared.plan,
            prepared.stages,
            chunks,
            call.iterators,
            step,
            results,
            boundary,
            links.transport,
            self.store,
            self.histories,
            observer,
            self._maker(call, prepared, boundary, links.lanes),
            None if step.forward_only else self.offloader,
            None if self.units is None else self.units.of(step.forward_only),
        )
        if step.forward_only:
            if self._optimizer is not None:
                self._optimizer.settle()
            iteration.evaluate()
        else:
            around = None if self.units is None else self.units.finalize
            with finalized(config, call.groups, prepared, chunks, results, call.force_all_reduce, around):
                self._train(iteration, prepared, call.is_uneven)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        if self._reports is None:
            return losses
        return self._reports.deliver(losses, prepared.last_stage_rank, boundary.device)

    def _links(self, prepared: Prepared, forward_only: bool) -> Links:
        """What moves values between ranks in this iteration."""
        assert self._transport is not None and self._lanes is not None
        links = Links(self._transport, self._lanes)
        if self._staging is None:
            return links
        validates = not forward_only and self._optimizer is not None and self._optimizer.is_pending
        return self._staging.of(prepared.steps | {"validate"} if validates else prepared.steps, links)

    def _maker(self, call: Call, prepared: Prepared, boundary: Boundary, lanes: Lanes) -> StageMaker:
        if prepared.vocabulary is None:
            return ChainStages()
        facts, tensor = prepared.vocabulary, call.groups.tp
        return VocabularyStages(facts, boundary, tensor, lanes, self.accumulate, self._logits, self.saved_for_t)

    def _train(self, iteration: Iteration, prepared: Prepared, is_uneven: bool) -> None:
        """Run all passes of a training step, then start the gradient reductions that no pass has started."""
        chunks, config = iteration.chunks, iteration.step.config
        self.accumulate.connect(iteration.boundary.device)
        self.accumulate.watch(chunks)
        self.store.watch(chunks)
        syncs = [GradSync(no_sync) for no_sync in per_chunk(config.no_sync_func, len(chunks))]
        reducible = config.no_sync_func is not None or any(map(reduces_early, chunks))
        # With --align-grad-reduce only the first rank reduces during its passes; the others reduce in their bubbles.
        overlap = reducible and (config.grad_sync_func is None or prepared.rank == 0)
        if self._optimizer is not None:
            self._optimizer.break_even = prepared.break_even
            self._optimizer.begin_passes()
        with reduced_in_order(chunks) if is_uneven else nullcontext():
            iteration.train(syncs, overlap, self._optimizer)
            self.store.join()
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
        self._disconnect()
        if self._optimizer is not None:
            self._optimizer.close()

    def _disconnect(self) -> None:
        """Disconnect from the other ranks; the next iteration connects them again."""
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        if self.offloader is not None and self.offloader.close():
            self.offloader = None  # else copies still use its memory
        if self.units is not None:
            self.units.close()
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        if self._reports is not None:
            self._reports.close()
            self._reports = None
        self._prepared.clear()

    def _prepare(self, group: dist.ProcessGroup, config: Any, num_microbatches: int, forward_only: bool) -> Prepared:
        """The plan for this number of microbatches; made, checked and compared between ranks when it is new."""
        key = (num_microbatches, forward_only)
        schedule = self._make_schedule(group.size(), num_microbatches)
        if self._rollback is not None and self._optimizer is None and not forward_only:
            raise UserError(
                "post-validation needs the optimizer whose steps the passes validate, got none; wrap it with "
                "post_validated(optimizer, model) of the pipeline that apply() returns, or leave post_validation out"
            )
        moves = () if forward_only or self._select_moves is None else self._select_moves(schedule)
        prepared = self._prepared.get(key)
        if prepared is None or (prepared.schedule, prepared.moves) != (schedule, moves):
            check_options(config, num_slices=schedule.num_slices, vocabulary=algorithm_of(schedule) is not None)
            check_runnable(schedule, group.size(), num_microbatches)
            if self.units is not None:
                self.units.agree()
                self.units.check(config, schedule)
            plan = self._plan(schedule, moves, forward_only)
            check_queues(group, plan)
            self._connect(group, plan)
            prepared = self._prepared[key] = Prepared.of(schedule, moves, plan, group.rank(), forward_only)
        return prepared

    def _plan(self, schedule: Schedule, moves: Collection[Move], forward_only: bool) -> Plan:
        """Validate the schedule and lower it to a plan."""
        validate(schedule)
        sharding = None if self.units is None else self.units.sharding_of(schedule, forward_only)
        if forward_only:
            return lower_forward_only(schedule, self._post_receives, sharding)
        return lower_training(schedule, self._post_receives, self._rollback is not None, moves, sharding)

    def _connect(self, group: dist.ProcessGroup, plan: Plan) -> None:
        """Check that all ranks have the same plan, and open its channels."""
        check_same_plan(plan, group, "ranks of a pipeline")
        if self._transport is None or self._group is not group:
            self._disconnect()
            directions = Directions.of(group, self._timeout, self._ctas.message)
            self._watchdog = Watchdog(select("cuda"), self._timeout) if is_nccl(directions.backend) else None
            self._transport, self._group = Transport(directions, plan.channels, self._watchdog), group
            device = select(directions.device)
            ctas = collective_ctas(self._ctas, plan, device.num_multiprocessors(), self._say)
            make_lane, more = device.lane, (self._timeout, ctas, self._watchdog)
            self._lanes = Lanes(group, make_lane, *more)
            if spins(directions.backend):
                self._staging = Staging(group, select(directions.device).thread_lane, self._timeout)
            if self._select_moves is not None:
                host = select(directions.device).host_memory(self._host_limit)
                self.offloader = Offloader(self.store.saved, host, make_lane(), make_lane(), self._say)
            if self._watchdog is not None:
                self._watchdog.start()
        else:
            self._transport.open(plan.channels)
        if self.units is not None:
            self.units.connect(plan, select("cpu" if backend_of(group) == "gloo" else "cuda").lane, self._watchdog)
        assert self._lanes is not None
        self._lanes.open(collective_kinds(plan))
        self._transport.check_streams()
        if self._staging is not None:
            self._staging.open(plan)
        if self._reports is None and loss_rank(plan.schedule) != group.size() - 1:
            self._reports = LossReports(group, wait=self._rollback is None, timeout=self._timeout)
