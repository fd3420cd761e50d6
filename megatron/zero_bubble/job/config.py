"""What a user decides, as one frozen value, and whether the job around it can honour it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.zero_bubble.costs.units import parse_memory_limit
from megatron.zero_bubble.formats.plan import read_schedule_file
from megatron.zero_bubble.ir import Kind, Placement, Schedule
from megatron.zero_bubble.schedules import recipe

AUTO = "zb-auto"


class JobError(ValueError):
    """A job and its schedule do not fit each other; one sentence: the rule, the values, the remedy."""


@dataclass(frozen=True)
class ZeroBubbleConfig:
    """Options of zero-bubble training.

    Attributes:
        schedule: a name of ``zero-bubble list``, or ``zb-auto``, which measures the run and plans for it.
        num_chunks: stages a rank of an interleaved schedule; None is its default.
        placement: where ``zb-auto`` has its stages; the model is built before it plans.
        schedule_file: a file that ``zero-bubble plan --format json`` wrote; exactly one of the two is given.
        memory_limit: what ``zb-auto`` may keep on a rank, as ``zero-bubble plan --memory-limit``: ``1p`` is what 1F1B
            keeps at the most.
        post_validation: step the optimizer before the norm of all gradients is known; validate in the next iteration.
        rollback: how a step is taken back that turns out wrong: ``exact`` keeps what it overwrites until it is
            validated, ``inverse`` computes Adam backwards, which costs no memory and is right to rounding only.
        fuse_wgrad: accumulate the weight gradients of a W in one call, straight into Megatron's float32 buffers; False
            keeps upstream's arithmetic, which rounds each to the weight's dtype first: the bits of stock Megatron.
        wgrad_stream: on a GPU, compute fused weight gradients on a stream of their own, beside the passes that follow;
            they may then keep their inputs longer than planned.
        measure_memory: count, once, what a microbatch keeps on each stage (``Pipeline.gather_memory``).
        peer_timeout_s: how long a message may take before its peer counts as dead; None leaves the default of
            torch.distributed. A peer that dies closes its connections and is noticed at once whatever this says.
    """

    schedule: str | None = None
    num_chunks: int | None = None
    placement: Literal["linear", "vee"] = "linear"
    schedule_file: str | None = None
    memory_limit: str = "1p"
    post_validation: bool = False
    rollback: Literal["exact", "inverse"] = "exact"
    fuse_wgrad: bool = True
    wgrad_stream: bool = False
    measure_memory: bool = False
    peer_timeout_s: float | None = None

    def __post_init__(self) -> None:
        parse_memory_limit(self.memory_limit)
        if (self.schedule is None) == (self.schedule_file is None):
            raise ValueError(
                "exactly one of a schedule's name and a schedule file must be given; got "
                f"schedule={self.schedule!r} and schedule_file={self.schedule_file!r}; drop one"
            )
        if self.placement != "linear" and self.schedule != AUTO:
            raise ValueError(
                f"the placement {self.placement!r} is for {AUTO}; other schedules have one of their own; leave it out"
            )
        if self.memory_limit != "1p" and self.schedule != AUTO:
            raise ValueError(
                f"the memory limit {self.memory_limit!r} is for {AUTO}; other schedules have a peak of their own; "
                "leave it out"
            )
        if self.rollback != "exact" and not self.post_validation:
            raise ValueError(
                f"the rollback {self.rollback!r} is for post_validation, which is not asked for; leave it out"
            )
        if self.num_chunks is not None and not self.takes_chunks:
            raise ValueError(
                f"a number of stages a rank is for interleaved schedules by name; got {self.num_chunks} with "
                f"{self.schedule or self.schedule_file}; leave it out"
            )
        if self.wgrad_stream and (self.schedule == AUTO or not self.fuse_wgrad):
            raise ValueError(
                "a stream of their own is for fused weight gradients under a schedule that is fixed, since on it W's "
                f"cannot be timed; got fuse_wgrad={self.fuse_wgrad} and schedule={self.schedule!r}; leave it out"
            )
        if self.peer_timeout_s is not None and not self.peer_timeout_s > 0:
            raise ValueError(f"the peer timeout must be positive; got {self.peer_timeout_s} s; give it in seconds")

    @property
    def takes_chunks(self) -> bool:
        """Whether a number of stages a rank can be given: for schedules by name."""
        return self.schedule not in (None, AUTO)

    def placement_on(self, num_ranks: int) -> Placement:
        """Where the stages lie on a pipeline of ``num_ranks``; a schedule file has its own number of ranks.

        Raises:
            ValueError: an unknown schedule, a number of chunks that it does not have, or a bad schedule file.
        """
        if self.schedule_file is not None:
            return read_schedule_file(self.schedule_file).placement
        if self.schedule == AUTO:
            return Placement.vee(num_ranks) if self.placement == "vee" else Placement.linear(num_ranks)
        assert self.schedule is not None, "one of the two is given"
        known = recipe(self.schedule)
        return known.placement(num_ranks, known.num_chunks(self.num_chunks))


def check_placement(placement: Placement, num_ranks: int) -> None:
    """Refuse stages where Megatron cannot be made to have them.

    Raises:
        ValueError: a rank without one of the first P stages, one of the next P, and so on; or a tied embedding that
            Megatron would look for elsewhere.
    """
    if placement.num_ranks != num_ranks:
        raise ValueError(
            f"the schedule is for {placement.num_ranks} ranks, but the job runs {num_ranks} pipeline ranks; plan it "
            "for the job's figures"
        )
    rank_of = placement.stage_to_rank
    rounds = [rank_of[first : first + num_ranks] for first in range(0, placement.num_stages, num_ranks)]
    ends = rank_of[0], rank_of[-1]
    if any(sorted(row) != list(range(num_ranks)) for row in rounds) or not (
        ends[0] == ends[1] or ends == (0, num_ranks - 1)
    ):
        raise ValueError(
            "training needs one of the first P stages on every rank, one of the next P, and so on, and the first and "
            f"the last stage on one rank or on the first and the last; got stages on ranks {list(rank_of)}; choose "
            "another placement"
        )


def check_runnable(schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    """Refuse a schedule of another size than the job's, and what a plan could do and a Megatron model, or exact
    accumulation, cannot.

    Raises:
        ValueError: the rule, the values and the remedy.
    """
    if schedule.num_ranks != num_ranks or schedule.num_microbatches != num_microbatches:
        raise ValueError(
            f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} "
            f"microbatches, but the job runs {num_ranks} pipeline ranks and {num_microbatches} microbatches "
            "(global batch / micro batch / data-parallel size); plan it for the job's figures"
        )
    if schedule.num_slices > 1:
        raise ValueError(
            f"training needs a schedule of whole sequences; {schedule.name!r} has {schedule.num_slices} slices; plan "
            "one without"
        )
    placement = schedule.placement
    check_placement(placement, schedule.num_ranks)
    for stage, rank in enumerate(placement.stage_to_rank):
        row = [p for p in schedule.order[rank] if p.stage == stage]
        forward = [p.microbatch for p in row if p.kind is Kind.F]
        if forward != sorted(forward):
            raise ValueError(
                f"forwards of a stage must come in the order of the microbatches, as its data do; {schedule.name!r} "
                f"runs stage {stage} in the order {forward}; sort them"
            )
        backward = [p.microbatch for p in row if p.kind in (Kind.B, Kind.BW)]
        weight = [p.microbatch for p in row if p.kind in (Kind.W, Kind.BW)]
        if weight != backward:
            early = next(w for w, b in zip(weight, backward, strict=True) if w != b)
            raise ValueError(
                f"weight gradients must be accumulated in the order of the backwards, which keeps them exact and lets "
                f"data parallelism reduce them after the last; stage {stage} of {schedule.name!r} runs W of microbatch "
                f"{early} before that of an earlier backward; move it behind"
            )


def check_model_config(config: Any) -> None:
    """Refuse what a reordered backward cannot honour in a Megatron ``TransformerConfig``.

    Raises:
        ValueError: the rule, the value and the remedy.
    """
    for option, allowed, why, flag in _REFUSED:
        value = getattr(config, option, allowed)
        if value not in (allowed, None):
            raise ValueError(f"zero-bubble schedules need {option}={allowed!r} because {why}; got {value!r}; {flag}")
    group = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if group is not None and group != config.pipeline_model_parallel_size:  # by default Megatron makes them equal
        raise ValueError(
            "zero-bubble schedules run microbatches in groups of the pipeline's ranks or not in groups at all, got "
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} and {config.pipeline_model_parallel_size} "
            "ranks; drop the flag"
        )


# option, the one value that works, why, what to do about it
_REFUSED: tuple[tuple[str, Any, str, str], ...] = (
    # Before 0.15 graphs have flags of their own.
    (
        "enable_cuda_graph",
        False,
        "Megatron captures its graphs in the order of its own 1F1B",
        "drop --enable-cuda-graph",
    ),
    (
        "external_cuda_graph",
        False,
        "Megatron captures its graphs in the order of its own 1F1B",
        "drop --external-cuda-graph",
    ),
    (
        "cuda_graph_impl",
        "none",
        "Megatron captures its graphs in the order of its own 1F1B",
        "set --cuda-graph-impl none",
    ),
    (
        "overlap_moe_expert_parallel_comm",
        False,
        "it schedules B and W inside a layer itself",
        "drop --overlap-moe-expert-parallel-comm",
    ),
    ("delay_wgrad_compute", False, "it defers W a second time", "drop --delay-wgrad-compute"),
    (
        "overlap_dispatch_backward_with_experts_wgrad",
        False,
        "it runs the W of experts inside their B",
        "drop --overlap-dispatch-backward-with-experts-wgrad",
    ),
    (
        "use_transformer_engine_op_fuser",
        False,
        "fused operations compute the weight gradients of modules whose gradients wait for W",
        "drop --use-transformer-engine-op-fuser",
    ),
    (
        "fine_grained_activation_offloading",
        False,
        "it assumes Megatron's order of chunks",
        "drop --fine-grained-activation-offloading",
    ),
    ("cpu_offloading", False, "it assumes Megatron's order of backwards", "drop --cpu-offloading-num-layers"),
    (
        "moe_paged_stash",
        False,
        "Megatron resets its pages at the head of its own iterations",
        "drop --moe-paged-stash",
    ),
    (
        "overlap_p2p_comm_warmup_flush",
        False,
        "messages overlap passes in the order of the schedule",
        "drop --overlap-p2p-communication-warmup-flush",
    ),
    ("variable_seq_lengths", False, "receives are posted before the shape is known", "pad to --seq-length"),
    (
        "use_ring_exchange_p2p",
        False,
        "the transport posts its own sends and receives",
        "drop --use-ring-exchange-p2p",
    ),
)
