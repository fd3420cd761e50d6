"""Numbers of microbatches in the iterations and evaluations of a Megatron-LM job, derived from its flags."""

from __future__ import annotations

from typing import Any

from megatron.core import num_microbatches_calculator


def num_microbatches(args: Any) -> list[int]:
    """All numbers of microbatches that a data-parallel rank may run, by the job's validated flags.

    The division rounds down, as Megatron does where it decreases a batch to a multiple of one microbatch per
    data-parallel rank.
    """
    counts = in_training(args)
    if args.eval_iters != 0:
        # Since core_r0.18, evaluations have separate flags.
        size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
        each = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
        counts.append(size // (each * args.data_parallel_size))
    return counts


def in_training(args: Any) -> list[int]:
    """The numbers of microbatches of training iterations, in the order in which they occur."""
    together = args.micro_batch_size * args.data_parallel_size
    return [size // together for size in _batch_sizes(args)]


def _batch_sizes(args: Any) -> list[int]:
    """Global batch sizes of the iterations.

    Upstream: ``megatron.core.num_microbatches_calculator``, which has ramps until core_r0.17; from then on it has steps
    and ignores ramps. An invalid ramp is left for Megatron to report.
    """
    steps = getattr(args, "step_batch_size_schedule", None)
    if steps is not None:
        calculator = num_microbatches_calculator.StepBatchsizeNumMicroBatchesCalculator
        sizes = (args.micro_batch_size, args.data_parallel_size)
        quiet = 1  # the calculator logs on rank 0 only
        return [size for _, size in calculator(*sizes, False, quiet, steps, args.seq_length).schedule]
    ramp = [int(number) for number in getattr(args, "rampup_batch_size", None) or ()]
    has_ramps = hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator")
    if not has_ramps or len(ramp) != 3 or ramp[1] < 1:
        return [args.global_batch_size]
    return [*range(ramp[0], args.global_batch_size, ramp[1]), args.global_batch_size]
