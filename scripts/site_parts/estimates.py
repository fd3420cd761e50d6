"""The tables of docs/estimates.md: GPUs, precisions, and what ``zero-bubble advise`` estimates for published runs."""

from __future__ import annotations

import argparse
import shlex
from typing import NamedTuple

from megatron.zero_bubble.cli.advise import defaults
from megatron.zero_bubble.cli.job_as_is import read_job
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.precision import PRECISIONS
from megatron.zero_bubble.planning.job.kept import linear_precision
from site_parts.markdown import table
from site_parts.published_runs import RUNS, Run

WITHIN = 0.15
"""The deviation up to which an estimate counts as confirmed."""


class Estimated(NamedTuple):
    """A run, its job, the published and the estimated time of an iteration in seconds, and the bytes of the fullest
    rank.
    """

    run: Run
    args: argparse.Namespace
    published: float
    estimated: float
    memory: float

    @property
    def deviation(self) -> float:
        """Of the estimate, as a share of the published time."""
        return self.estimated / self.published - 1


def estimated(run: Run) -> Estimated:
    """Estimate a run as ``zero-bubble advise`` does."""
    where = {"nodes": run.nodes, "gpus_per_node": run.gpus_per_node, "gpu": run.gpu}
    job = read_job(argparse.Namespace(**{**vars(defaults()), **where}), shlex.split(run.flags))
    published = run.seconds if run.tokens is None else job.batch.tokens / job.batch.gpus / run.tokens
    assert published is not None, "a run has a time or a rate"
    return Estimated(run, job.read.args, published, job.today.timeline.makespan_ms / 1e3, job.today.need.most)


def runs() -> str:
    """One row per run."""
    head = ("model", "GPUs", "precision", "parallel", "batch", "published", "estimated", "deviation", "GiB", "source")
    return table(head, [_row(estimated(run)) for run in RUNS])


def _row(found: Estimated) -> tuple[str, ...]:
    run, args = found.run, found.args
    chunks = args.placement.num_stages // args.placement.num_ranks
    sizes = {
        "TP": args.tensor_model_parallel_size,
        "PP": args.pipeline_model_parallel_size,
        "VP": chunks,
        "CP": args.context_parallel_size,
        "EP": args.expert_model_parallel_size,
    }
    deviation = f"{found.deviation:+.1%}"
    return (
        run.model,
        f"{run.nodes * run.gpus_per_node} {run.gpu.upper()}",
        linear_precision(args).name,
        " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1),
        f"{args.batch_sizes.final} x {args.seq_length}",
        f"{found.published:.2f} s",
        f"{found.estimated:.2f} s",
        deviation if abs(found.deviation) <= WITHIN else f"**{deviation}**",
        f"{found.memory / 2**30:.0f} of {DEVICES[run.gpu].memory_gib}",
        run.source,
    )


def gpus() -> str:
    """One row per GPU."""
    head = ("`--gpu`", "bf16", "FP8", "FP4", "reached", "GiB", "TB/s", "domain", "GB/s within", "GB/s between")
    rows = [
        (
            f"`{device.name}`",
            f"{device.tflops:,.0f}",
            f"{device.fp8_tflops:,.0f}" if device.fp8_tflops else "-",
            f"{device.fp4_tflops:,.0f}" if device.fp4_tflops else "-",
            f"{device.efficiency:.0%}",
            f"{device.memory_gib}",
            f"{device.memory_tbs:g}",
            f"{device.domain}",
            f"{device.node_gbs:g}",
            f"{device.network_gbs:g}",
        )
        for device in DEVICES.values()
    ]
    return table(head, rows)


def precisions() -> str:
    """One row per precision of linear layers."""
    head = ("flags", "precision", "share of what bf16 reaches", "bytes moved per element")
    flags = {name: f"`--fp8-format ... --fp8-recipe {name}`" for name in PRECISIONS} | {"nvfp4": "`--fp4-format ...`"}
    return table(
        head, [(flags[name], each.name, f"{each.share:.0%}", f"{each.moved:g}") for name, each in PRECISIONS.items()]
    )


PARTS = {"published-runs": runs, "gpus": gpus, "precisions": precisions}
