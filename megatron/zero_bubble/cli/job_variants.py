"""Changes of a job that are not of its schedule, which ``advise --may-change`` tries as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import job_layers
from megatron.zero_bubble.planning.change import ORDER, ROUNDED, SAME

VARIANTS = ("micro-batch-size", "recompute", "pipeline")
"""What may change."""
_PARTS = 4
"""Quarters of the layers of a stage are tried."""
_RECOMPUTE = (
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-activations",
    "--recompute-modules",
)


class SizeVariant(NamedTuple):
    """A job with other sizes.

    Attributes:
        flags, drops: the flags to add and to leave out.
        numbers: a key of ``NUMBERS``.
    """

    name: str
    flags: tuple[str, ...]
    drops: tuple[str, ...] = ()
    numbers: str = SAME


def chosen_variants(text: str | None, args: Any, costs: str | None) -> Iterator[SizeVariant]:
    """Yield the variants that ``--may-change`` allows.

    Args:
        args: the checked flags of the job.
        costs: the costs file, if there is one.

    Raises:
        UserError: something else than ``VARIANTS``, or costs of a run, which hold only for its own sizes.
    """
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if name not in VARIANTS]:
        raise UserError(f"--may-change takes {', '.join(VARIANTS)}; got {wrong[0]!r}; give some of them, with commas")
    if names and costs is not None:
        raise UserError(
            f"--may-change {text} needs estimates, because measured costs hold only for the sizes of their run; got "
            f"--costs {costs}; leave one of them out"
        )
    if "micro-batch-size" in names:
        yield from _sizes("--micro-batch-size", "micro batch", args.micro_batch_size, ROUNDED)
    if "recompute" in names and args.recompute_granularity is not None:
        if args.recompute_granularity == "full":
            yield SizeVariant("selective recomputation", ("--recompute-granularity", "selective"), _RECOMPUTE)
            yield from _counts(args)
        yield SizeVariant("no recomputation", (), _RECOMPUTE)
    if "pipeline" in names:
        drops = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
        for each in _sizes("--pipeline-model-parallel-size", "pipeline", args.pipeline_model_parallel_size, ORDER):
            if each.flags[1] != "1":
                yield each._replace(drops=(*drops, "--pipeline-model-parallel-layout"))


def _counts(args: Any) -> Iterator[SizeVariant]:
    """Some layers of every stage, the first ones, which Megatron computes again by the method of blocks."""
    most = max(job_layers(args))
    for count in sorted({most * part // _PARTS for part in range(1, _PARTS)} - {0, most}):
        flags = "--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", str(count)
        yield SizeVariant(f"recomputation of {count} layers per stage", flags)


def _sizes(flag: str, name: str, size: int, numbers: str) -> Iterator[SizeVariant]:
    """Half and twice a size."""
    for other in (size // 2 if size % 2 == 0 else 0, 2 * size):
        if other:
            yield SizeVariant(f"{name} {other}", (flag, str(other)), (), numbers)
