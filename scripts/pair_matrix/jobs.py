"""What a row runs: its flags, and why the product, or stock megatron-core on CPU ranks, refuses it."""

from __future__ import annotations

import argparse
import functools

from megatron.zero_bubble import SCHEDULES
from pair_matrix.options import OPTIONS, Row, value_of
from tests.helpers.parity import BASE_FLAGS, Layout

STEPS = 5
SEQUENCE = 16
VOCABULARY = 255
AT_RUN = "run: "
"""Begins the reason of a refusal by the ranks of a job."""
_MOST_RANKS = 4
RUN_RULES: tuple[tuple[dict[str, tuple[str, ...]], str], ...] = (
    (
        {"loop": ("logits",), "vocabulary": ("1", "2", "2-recomputed")},
        "with vocabulary parallelism, no rank has all logits, so the model must compute the losses",
    ),
    *(
        (
            {"loop": ("logits",), **cut},
            "sequence slices need the model to compute the loss of every token",
        )
        for cut in (
            {"slices": ("2", "uneven", "of-one-token")},
            {"schedule": ("seq-1f1b", "seq-zb-h1", "seq-interleaved-1f1b")},
        )
    ),
)
"""What only the ranks of a job refuse, because its flags do not show it: values, and how the sentence begins."""


def layout_of(row: Row) -> Layout:
    """The ranks of a row, and two layers per rank, or one more on the first."""
    pipeline = int(row["ranks"])
    layers = 2 * pipeline + (row["layers"] != "even")
    tensor = 1 if row["tensor"] == "1" else 2
    return Layout(pipeline, tensor, 1 if row["data"] == "1" else 2, layers)


def microbatches_of(row: Row) -> int:
    """The number of microbatches of a row in its last iterations."""
    ranks = int(row["ranks"])
    return {"3p": 3 * ranks, "p": ranks, "p-1": ranks - 1, "1": 1}[row["microbatches"]]


def modes_of(row: Row) -> dict[str, str]:
    """The flags of each run: ``stock``, the ``schedule``, and its ``variant`` if the row has one."""
    layout = layout_of(row)
    count = microbatches_of(row)
    parts = [value_of(row, option) for option in OPTIONS]
    size = int(row["sequences"]) * layout.data
    words = [
        BASE_FLAGS,
        f"--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --vocab-size {VOCABULARY}",
        f"--train-iters {STEPS} --lr 1e-3",
        layout.flags(count, f"--global-batch-size {size * count}"),
        *(part.job for part in parts),
        f"--rampup-batch-size {size} {size} {size * count * 2}" if row["batch"] == "growing" and count > 1 else "",
    ]
    job = " ".join(" ".join(words).split())
    schedule = " ".join(part.schedule for part in parts if part.schedule)
    variant = " ".join(part.variant for part in parts if part.variant)
    stock = job if row["layers"] == "even" else f"{job} {_layout(layout.pipeline, layout.pipeline)}"
    schedule += f" {_layout(layout.pipeline, _stages(row))}" if row["layers"] == "laid-out" else ""
    modes: dict[str, str] = {"stock": stock, "schedule": f"{job} {schedule}"}
    return modes | ({"variant": f"{job} {schedule} {variant}"} if variant else {})


def _layout(num_ranks: int, num_stages: int) -> str:
    """The flag for stages with two layers per rank, and one more on the first rank."""
    layers = "t" * (2 * num_ranks // num_stages)
    return f"--pipeline-model-parallel-layout E{layers}t|" + f"{layers}|" * (num_stages - 2) + f"{layers}L"


def _stages(row: Row) -> int:
    """The number of stages of the schedule of a row."""
    ranks, known = int(row["ranks"]), SCHEDULES.get(row["schedule"])
    if known is None:
        return ranks if row["schedule"] == "zb-auto" else 2 * ranks
    return known.placement(ranks, known.num_chunks(None)).num_stages


def own_refusal(row: Row) -> str | None:
    """Why the matrix itself does not run a row, or None."""
    if layout_of(row).num_ranks > _MOST_RANKS:
        return f"matrix: more than {_MOST_RANKS} ranks"
    if row["fault"] == "nan" and row["dtype"] != "fp16":
        return "matrix: without a loss scale, stock stops at a gradient that is NaN"
    if row["batch"] == "growing" and microbatches_of(row) == 1:
        return "matrix: a batch of one microbatch cannot grow"
    for values, sentence in RUN_RULES:
        if all(row[option] in names for option, names in values.items()):
            return AT_RUN + sentence
    return None


def refusal(row: Row) -> str | None:
    """Why a row is refused, by the checks that every job makes before it starts its ranks; None if it can run.

    Stock megatron-core must accept its flags too.
    """
    reason = own_refusal(row)
    if reason is not None:
        return reason
    modes = modes_of(row)
    # A variant has all flags of the schedule, and more.
    for mode in ("stock", "variant" if "variant" in modes else "schedule"):
        reason = refused(modes[mode], layout_of(row).num_ranks)
        if reason is not None:
            return f"{mode}: {reason}"
    return None


@functools.cache
def refused(flags: str, num_ranks: int) -> str | None:
    """The sentence with which a job is refused before its ranks start, or None."""
    import torch

    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.flags import as_given, taken
    from megatron.zero_bubble.planning.job.planned import run_of
    from pretrain.model import build_config

    try:
        args = _parser().parse_args(flags.split())
        args.run = run_of(taken(args), as_given)
        check(args, num_ranks)
        build_config(args, torch.device("cpu"))
    except UserError as error:
        return str(error)
    return None


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from megatron.zero_bubble.planning.job.arguments.parser import build_parser

    return build_parser()
