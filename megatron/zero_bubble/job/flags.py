"""The ``--zero-bubble-*`` flags, shared by this package's training loop and Megatron-LM jobs under the launcher."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir.vocabulary import Algorithm
from megatron.zero_bubble.job.config import DEFAULT_NCCL_COLLECTIVE_CTAS, DEFAULT_NCCL_CTAS, ZeroBubbleConfig
from megatron.zero_bubble.planning.source import AUTO, DEFAULT_LIMIT
from megatron.zero_bubble.schedules import SCHEDULES, sliced
from megatron.zero_bubble.schedules.recipe import DEFAULT_SLICES

_MOST_RECORDED = 1000
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group ``zero bubble``. Flags that are not given are None, except the device; see ``config_of``."""
    parser.set_defaults(zero_bubble_plan=None)  # the content of the schedule file, once it is read
    add, fuse = parser.add_argument_group("zero bubble").add_argument, argparse.BooleanOptionalAction
    add(
        "--zero-bubble-schedule",
        metavar="NAME|FILE",
        help=f"pipeline schedule to run: {', '.join(SCHEDULES)} or {AUTO}; `zero-bubble list` describes them; or a "
        "file that ends in .json or has a folder in its path, as --zero-bubble-schedule-file; default: Megatron's own "
        "schedule",
    )
    add(
        "--zero-bubble-schedule-file",
        metavar="FILE",
        help="plan to run, from a file written by `zero-bubble plan --format json`: all that it decides, such as its "
        "layout, sharded units, vocabulary parallelism and what moves to host memory; a flag that contradicts it is "
        "refused",
    )
    of_slices = ", ".join(sliced())
    add(
        "--zero-bubble-num-slices",
        metavar="N",
        type=int,
        help=f"slices into which {of_slices} or {AUTO} cut every sequence; default: {len(DEFAULT_SLICES)}, or 1 "
        f"for {AUTO} without --zero-bubble-attention-share",
    )
    add(
        "--zero-bubble-slice-ends",
        metavar="TOKENS",
        type=token_counts,
        help="ends of the slices in tokens, e.g. 1536,2560,3392,4096, the last one being the sequence length; default: "
        "equally long slices",
    )
    add(
        "--zero-bubble-attention-share",
        metavar="SHARE",
        type=float,
        help="share of a forward that attention takes, from 0 to 1: cut sequences into slices that take equal time, "
        "instead of equally long ones; a run with equally long slices and --zero-bubble-record-costs measures it; with "
        "--zero-bubble-balance-microbatches, the share for --seq-length tokens, instead of an estimate",
    )
    add(
        "--zero-bubble-vocabulary-parallel",
        choices=("off", "1", "2"),
        help="divide embedding and output layer over all pipeline ranks, so that no rank waits for the last one: with "
        "algorithm 1, all ranks wait for each other twice per microbatch, with algorithm 2 once, for one more product "
        "of matrices in the forward and one less in the backward; default: off",
    )
    _add_switch(
        add,
        "--zero-bubble-recompute-logits",
        "with --zero-bubble-vocabulary-parallel: compute the logits again, in blocks of tokens, for the weight "
        "gradient of the output layer, instead of keeping their softmax, 4 bytes per token and entry of the rank's "
        "part of the vocabulary",
    )
    add(
        "--zero-bubble-placement",
        choices=("linear", "vee"),
        help=f"stage placement for {AUTO}: one stage per rank (linear) or two per rank in a V (vee); default: linear "
        "(`zero-bubble plan --placement auto` shows which of the two is better)",
    )
    add(
        "--zero-bubble-memory-limit",
        metavar="LIMIT",
        help=f"activation-memory limit per rank for {AUTO}, and for the units of zero-pp that auto chooses, e.g. 1p "
        f"(1F1B's peak) or 60GiB, which zero-pp needs --zero-bubble-costs for; default: {DEFAULT_LIMIT} for {AUTO}, "
        "with --zero-bubble-vocabulary-parallel the peak of the first schedule",
    )
    _add_switch(
        add,
        "--zero-bubble-post-validation",
        "step the optimizer before the global gradient norm is known and validate the step in the next iteration, so "
        "that ranks do not wait for each other between iterations: an iteration takes the schedule's span instead of "
        "its makespan",
    )
    add(
        "--zero-bubble-rollback",
        choices=("exact", "inverse"),
        help="how --zero-bubble-post-validation undoes a rejected step: restore a copy, which with Adam takes 12 bytes "
        "per parameter that the rank steps (exact), or invert the Adam update, which takes no memory and is correct "
        "only up to rounding (inverse); default: exact",
    )
    _add_switch(
        add,
        "--zero-bubble-exact",
        "match stock Megatron bit for bit: round each weight gradient to the weight's dtype before it is accumulated; "
        "the same as --no-zero-bubble-fuse-wgrad",
    )
    add(
        "--zero-bubble-fuse-wgrad",
        action=fuse,
        help="accumulate all weight gradients of a W pass in one call, in float32, without rounding each of them to "
        "the weight's dtype first; on by default",
    )
    _add_switch(
        add,
        "--zero-bubble-wgrad-stream",
        "compute weight gradients on a separate CUDA stream, concurrently with the following passes; its effect has "
        f"not been measured; excludes {AUTO}, --zero-bubble-exact, --zero-bubble-trace, --zero-bubble-record-costs and "
        "--zero-bubble-log-bubble",
    )
    add(
        "--zero-bubble-post-receives",
        choices=("early", "late"),
        help="when a rank posts the receive of a message: one pass ahead of the pass that needs it, so that the "
        "transfer overlaps the previous pass (early), or directly before that pass, so that no receive of NCCL takes "
        "multiprocessors from the previous pass while it waits (late); which is faster has not been measured; late "
        "receives of schedules with several stages per rank may need CUDA_DEVICE_MAX_CONNECTIONS above 1; default: "
        "early",
    )
    add(
        "--zero-bubble-nccl-ctas",
        metavar="N",
        type=int,
        help="largest number of CTAs, and so of multiprocessors, that NCCL occupies for a message between two pipeline "
        "ranks, also while it waits: fewer leave more of the GPU to the passes, more make the transfer faster; the "
        "best number has not been measured; Megatron's --nccl-communicator-config-path takes precedence; without "
        f"effect over gloo; default: {DEFAULT_NCCL_CTAS}",
    )
    add(
        "--zero-bubble-nccl-collective-ctas",
        metavar="N",
        type=int,
        help="the same for a collective of --zero-bubble-vocabulary-parallel, which all pipeline ranks start for each "
        "microbatch; the best number has not been measured; Megatron's --nccl-communicator-config-path takes "
        f"precedence; without effect over gloo; default: {DEFAULT_NCCL_COLLECTIVE_CTAS}",
    )
    add(
        "--zero-bubble-offload",
        metavar="auto|all|N%|none",
        help="keep activations in host memory between forward and backward: all of them, N%% of each rank's "
        "microbatches, longest lifespan first, or auto for those that delay no pass, as planned after some iterations "
        "from the measured times of passes and copies; those whose backward follows too closely stay on the device; "
        "default: none, or what the plan in --zero-bubble-schedule-file moves",
    )
    add(
        "--zero-bubble-host-memory",
        metavar="LIMIT",
        help="limit per rank of the host memory that --zero-bubble-offload takes, e.g. 60GiB; a rank that needs more "
        "ends the run; default: no limit",
    )
    _add_switch(
        add,
        "--zero-bubble-shard-weights",
        "keep of each stage only a shard per data-parallel replica: gather its weights when its passes need them, once "
        "per unit of microbatches, so that at most --zero-bubble-whole-stages of a rank are whole, and reduce its "
        "gradients once per unit; the optimizer steps shards; needs --use-distributed-optimizer and 2 or more stages "
        "per rank, for example --zero-bubble-schedule zero-pp; without effect on the results but for the order in "
        "which the gradients of units are added",
    )
    add(
        "--zero-bubble-shard-transport",
        choices=("collective", "on-demand"),
        help="how the replicas of --zero-bubble-shard-weights exchange shards: by collectives, or on demand, point to "
        "point, so that no replica waits until the others reach the same unit; experimental; default: collective",
    )
    add(
        "--zero-bubble-unit-microbatches",
        metavar="U|auto",
        type=unit_microbatches,
        help="microbatches of a unit of zero-pp, and after which --zero-bubble-shard-weights reduces gradients: larger "
        "units communicate less and keep more activations; default: auto, for zero-pp the smallest units that take no "
        "longer than one unit of all microbatches, or with --zero-bubble-costs or --zero-bubble-memory-limit those of "
        "the shortest schedule, and else one microbatch per pipeline rank",
    )
    add(
        "--zero-bubble-costs",
        metavar="FILE",
        help="costs file of an earlier run, as --zero-bubble-record-costs writes it, by which zero-pp chooses its "
        "units; if that run sharded weights too, the file has the times of its collectives; default: passes of equal "
        "length, and collectives that take no time",
    )
    add(
        "--zero-bubble-whole-stages",
        metavar="K",
        type=int,
        help="the most stages of a rank whose weights are whole at a time with --zero-bubble-shard-weights: fewer take "
        "less memory and more gathers, and with 1 no gather runs during passes; default: 2",
    )
    _add_switch(
        add,
        "--zero-bubble-balance-microbatches",
        "train on documents of their own lengths, cut only at --seq-length, and give every data-parallel replica equal "
        "work instead of equally many microbatches; a microbatch has at most --micro-batch-size * --seq-length tokens "
        "with its padding; --global-batch-size counts documents; needs --calculate-per-token-loss",
    )
    add(
        "--zero-bubble-trace",
        metavar="DIR",
        help="write recorded iterations to DIR: planned and measured timelines as HTML, SVG, Perfetto trace and JSON",
    )
    add(
        "--zero-bubble-trace-iterations",
        metavar="LIST",
        type=iterations,
        help="iterations to record for --zero-bubble-trace and --zero-bubble-record-costs, e.g. 10-12,50; default: the "
        "last eight of the run",
    )
    add(
        "--zero-bubble-record-costs",
        metavar="FILE",
        help="write measured pass times and memory to FILE, as input for `zero-bubble plan --costs`",
    )
    _add_switch(
        add, "--zero-bubble-log-bubble", "log the measured and the planned bubble rate by span at every --log-interval"
    )
    add(
        "--zero-bubble-device",
        default="auto",
        choices=("cpu", "cuda", "auto"),
        help="device to train on; auto selects cuda if a GPU is available; default: auto",
    )


def _add_switch(add: Callable[..., argparse.Action], flag: str, text: str) -> None:
    add(flag, action="store_true", default=None, help=text)


def token_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of tokens such as ``1536,2560,4096``.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"ends of slices are numbers of tokens, such as 1536,2560,4096; got {text!r}")
    return tuple(map(int, parts))


AUTO_UNIT = 0
"""``auto`` as a number of microbatches, because a flag that is not given is None."""


def unit_microbatches(text: str) -> int:
    """Parse a number of microbatches, or ``auto``.

    Raises:
        argparse.ArgumentTypeError: any other text, or a number below 1.
    """
    if text == "auto":
        return AUTO_UNIT
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a unit has 1 or more microbatches, or auto; got {text!r}")
    return int(text)


def iterations(text: str) -> tuple[range, ...]:
    """Parse numbers and ranges of iterations, both ends included, such as ``10-12,50``.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    matches = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1) for m in matches if m]
    if len(ranges) < len(matches) or not all(some and some[0] for some in ranges):
        raise argparse.ArgumentTypeError(
            f"iterations must be positive numbers or ranges of them, such as 10-12,50; got {text!r}"
        )
    if sum(len(some) for some in ranges) > _MOST_RECORDED:
        raise argparse.ArgumentTypeError(
            f"at most {_MOST_RECORDED} iterations can be recorded, because all are held in memory; got {text!r}; list "
            "fewer"
        )
    return tuple(ranges)


def has_schedule(options: argparse.Namespace) -> bool:
    """Whether a zero-bubble schedule is selected, by name or by file."""
    return bool(options.zero_bubble_schedule or options.zero_bubble_schedule_file)


def records(options: argparse.Namespace) -> bool:
    """Whether the flags request recording of iterations."""
    return bool(options.zero_bubble_trace or options.zero_bubble_record_costs)


def config_of(
    options: argparse.Namespace,
    num_chunks: int | None = None,
    measure_memory: bool = False,
    peer_timeout_s: float | None = None,
) -> ZeroBubbleConfig:
    """Convert the parsed flags to a configuration.

    Args:
        num_chunks: stages per rank, if the job defines it.
        measure_memory: whether to measure the memory of each pass, once.
        peer_timeout_s: timeout of messages between ranks.

    Raises:
        UserError: flags that exclude each other, or an invalid configuration.
    """
    return ZeroBubbleConfig(
        schedule=options.zero_bubble_schedule,
        schedule_file=options.zero_bubble_schedule_file,
        plan=options.zero_bubble_plan,
        num_chunks=num_chunks,
        num_slices=options.zero_bubble_num_slices,
        slice_ends=options.zero_bubble_slice_ends,
        # With balanced microbatches, it is for the cost of samples.
        attention_share=None if options.zero_bubble_balance_microbatches else options.zero_bubble_attention_share,
        vocabulary=vocabulary_algorithm(options),
        recompute_logits=bool(options.zero_bubble_recompute_logits),
        placement=options.zero_bubble_placement or "linear",
        memory_limit=options.zero_bubble_memory_limit,
        post_validation=bool(options.zero_bubble_post_validation),
        rollback=options.zero_bubble_rollback or "exact",
        fuse_wgrad=_fuses(options),
        wgrad_stream=bool(options.zero_bubble_wgrad_stream),
        post_receives=options.zero_bubble_post_receives or "early",
        nccl_ctas=_or(options.zero_bubble_nccl_ctas, DEFAULT_NCCL_CTAS),
        nccl_collective_ctas=_or(options.zero_bubble_nccl_collective_ctas, DEFAULT_NCCL_COLLECTIVE_CTAS),
        offload=options.zero_bubble_offload,
        host_memory=options.zero_bubble_host_memory,
        shard_weights=bool(options.zero_bubble_shard_weights),
        shard_transport=options.zero_bubble_shard_transport or "collective",
        unit_microbatches=options.zero_bubble_unit_microbatches or None,
        costs_file=options.zero_bubble_costs,
        whole_stages=options.zero_bubble_whole_stages,
        measure_memory=measure_memory,
        peer_timeout_s=peer_timeout_s,
    )


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def vocabulary_algorithm(options: argparse.Namespace) -> Algorithm | None:
    """The algorithm of vocabulary parallelism; None if it is off."""
    algorithms: dict[str | None, Algorithm] = {"1": 1, "2": 2}
    return algorithms.get(options.zero_bubble_vocabulary_parallel)


def _fuses(options: argparse.Namespace) -> bool:
    if options.zero_bubble_exact and options.zero_bubble_fuse_wgrad:
        raise UserError(
            "--zero-bubble-exact matches stock Megatron bit for bit and --zero-bubble-fuse-wgrad does not; got both; "
            "drop one"
        )
    return options.zero_bubble_fuse_wgrad is not False and not options.zero_bubble_exact


class StrictParser(argparse.ArgumentParser):
    """An argument parser that raises UserError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_ours(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a job's arguments into the parsed ``--zero-bubble-*`` flags and the remaining arguments, unchanged.

    Raises:
        UserError: an invalid value for one of our flags, or an unknown ``--zero-bubble-*`` flag.
    """
    parser = StrictParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    options, others = parser.parse_known_args(list(arguments))
    for argument in others:
        if argument.startswith(("--zero-bubble-", "--no-zero-bubble-")):
            raise UserError(f"unknown flag {argument.partition('=')[0]}; --help lists all flags")
    return options, others
