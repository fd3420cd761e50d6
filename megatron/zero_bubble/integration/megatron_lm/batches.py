"""Batch sizes and numbers of microbatches of a Megatron-LM job, derived from its flags; also for the dry run."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import UserError

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class JobBatches(NamedTuple):
    """The global batch sizes of a job's training iterations.

    Attributes:
        steps: all sizes, in the order in which they occur.
        granule: the samples of one microbatch on every data-parallel rank.
    """

    steps: tuple[int, ...]
    granule: int

    @property
    def final(self) -> int:
        """The size at the end of the run."""
        return self.steps[-1]


def num_microbatches(args: Any, has_ramps: bool = True) -> list[int]:
    """All numbers of microbatches that a data-parallel rank may run, by the job's flags.

    Args:
        has_ramps: whether Megatron has ramps of the batch size, or else ignores their flag.

    The division rounds down, as Megatron does where it decreases a batch to a multiple of one microbatch per
    data-parallel rank.

    Raises:
        UserError: as ``job_batches``.
    """
    counts = in_training(args, has_ramps)
    if args.eval_iters != 0:
        each = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
        together = each * args.data_parallel_size
        # Since core_r0.18, evaluations have separate flags. With steps, Megatron leaves them one microbatch.
        size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size or together
        counts.append(size // together)
    return counts


def in_training(args: Any, has_ramps: bool = True) -> list[int]:
    """The numbers of microbatches of training iterations, in the order in which they occur.

    Args:
        has_ramps: as in ``num_microbatches``.

    Raises:
        UserError: as ``job_batches``.
    """
    batches = job_batches(args, has_ramps)
    return [size // batches.granule for size in batches.steps]


def job_batches(args: Any, has_ramps: bool = True) -> JobBatches:
    """Return the batch sizes that the flags define; ``args.data_parallel_size`` is known.

    Upstream: ``megatron.core.num_microbatches_calculator``, which has ramps until core_r0.17; from then on it has steps
    and ignores ramps. An invalid ramp is left for Megatron to report.

    Args:
        has_ramps: as in ``num_microbatches``.

    Raises:
        UserError: no batch size, steps that Megatron cannot read, or a size that is not divided into microbatches.
    """
    granule = args.micro_batch_size * args.data_parallel_size
    if (steps := getattr(args, "step_batch_size_schedule", None)) is not None:
        return JobBatches(_steps(steps, granule), granule)
    check_batch_size(args)
    ramp = [int(number) for number in getattr(args, "rampup_batch_size", None) or ()]
    if not has_ramps or len(ramp) != 3 or ramp[1] < 1:
        sizes: tuple[int, ...] = (args.global_batch_size,)
    else:
        sizes = (*range(ramp[0], args.global_batch_size, ramp[1]), args.global_batch_size)
    if not getattr(args, "decrease_batch_size_if_needed", False):
        _check_divisible(sizes, args.micro_batch_size, args.data_parallel_size)
    return JobBatches(sizes, granule)


def last_iteration(args: Any) -> int | None:
    """Return the number of the last iteration, also of a run that ends after ``--train-samples`` in equal batches.

    Megatron drops samples that do not fill a batch. None if the flags do not say.
    """
    iterations: int | None = getattr(args, "train_iters", None)
    samples, size = getattr(args, "train_samples", None), getattr(args, "global_batch_size", None)
    ramps = any(getattr(args, name, None) for name in ("rampup_batch_size", "step_batch_size_schedule"))
    return iterations if iterations is not None or not samples or not size or ramps else samples // size


def check_batch_size(args: Any) -> None:
    """Reject a job whose flags set no batch size, for which Megatron would take one microbatch per iteration.

    Raises:
        UserError: neither flag is given.
    """
    if args.global_batch_size is None and getattr(args, "step_batch_size_schedule", None) is None:
        raise UserError(
            "a job needs --global-batch-size, or --step-batch-size-schedule from core_r0.17 on, because Megatron would "
            "run one microbatch per iteration, which fills no pipeline; got neither; give one of them"
        )


def _check_divisible(sizes: tuple[int, ...], micro_batch_size: int, replicas: int) -> None:
    """Megatron has an assertion for this, once training reaches the size."""
    granule = micro_batch_size * replicas
    for size in sizes:
        if size % granule or not size:
            raise UserError(
                "the global batch size must be divisible by micro batch size * data-parallel size, got "
                f"{size} and {micro_batch_size} * {replicas}; change --global-batch-size or --rampup-batch-size to "
                f"multiples of {granule}, or give --decrease-batch-size-if-needed"
            )


def _steps(text: str, granule: int) -> tuple[int, ...]:
    """Return the batch sizes of ``0:768 250B:1536``, by increasing threshold."""
    try:
        entries = [entry.split(":", 1) for entry in text.replace(",", " ").split()]
        steps = sorted((_number(threshold), _number(size)) for threshold, size in entries)
    except ValueError:
        steps = []
    thresholds = [threshold for threshold, _ in steps]
    if thresholds[:1] != [0] or len({*thresholds}) < len(thresholds) or min(size for _, size in steps) < granule:
        raise UserError(
            "--step-batch-size-schedule must have entries THRESHOLD:SIZE with different thresholds, the first of them "
            f"0, and sizes of {granule} (micro batch size * data-parallel size) or more; got {text!r}; write it like "
            "'0:768 250B:1536'"
        )
    return tuple(size for _, size in steps)


def _number(text: str) -> int:
    """Convert ``250B`` to a number; K, M, B and T are powers of a thousand."""
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)
