"""A page of precomputed settings, which is one file and needs no server: for a documentation site, or a file to send.

It has the schedules that need no search, for a few costs, ranks and microbatches.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlencode

from megatron.zero_bubble.cli.playground.job import PageJob, add_job, job_of
from megatron.zero_bubble.cli.playground.page import build_page
from megatron.zero_bubble.cli.playground.questions import catalogue, page_answer, read_question
from megatron.zero_bubble.core.analysis.score import within
from megatron.zero_bubble.core.schedules import SCHEDULES

_RANKS, _MULTIPLES = (4, 8), (1, 2, 4)
_CHUNKS = 2
_LEFT_OUT = ("gis", "gis-h", "pipe-offload", "zero-pp")
"""Schedules that are seldom the best choice; without them the page stays small."""
_DIGITS = 1
"""Digits after the decimal point of times in ms in drawings."""
_COMMON = "--bf16 --swiglu --micro-batch-size 1 --seq-length 8192 --untie-embeddings-and-output-weights --mock-data "
_COMMON += "--vocab-size 128256 --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --global-batch-size 32 "
_COMMON += "--use-distributed-optimizer --group-query-attention --num-query-groups 8"
_LLAMA_8B = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
_LLAMA_70B = "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64"


class _Costs(NamedTuple):
    """Costs to choose from: flags of ``zero-bubble plan``, or those of a job with its tensor parallelism."""

    label: str
    times: dict[str, str] | None = None
    job: str = ""
    tensor: int = 1

    def of_job(self, ranks: int) -> PageJob | None:
        """The job on nodes of 8 GPUs, with one replica."""
        if self.times is not None:
            return None
        parser = argparse.ArgumentParser()
        add_job(parser)
        sizes = f"--pipeline-model-parallel-size {ranks} --tensor-model-parallel-size {self.tensor}"
        flags = [*self.job.split(), *_COMMON.split(), *sizes.split()]
        return job_of(parser.parse_args(["--nodes", str(ranks * self.tensor // 8), "--", *flags]))


def _times(forward: str, backward: str, wgrad: str, comm: str, message: str = "0") -> dict[str, str]:
    times = {"forward-ms": forward, "backward-ms": backward, "wgrad-ms": wgrad, "comm-ms": comm}
    return times if message == "0" else {**times, "message-ms": message}


_COSTS = {
    "equal": _Costs("F : B : W = 1 : 1 : 1", _times("10", "10", "10", "0.5")),
    "messages": _Costs("10 : 12 : 7, slow messages", _times("10", "12", "7", "2", "1")),
    "llama-8b": _Costs("Llama 3 8B, H100, tensor parallelism 2", None, _LLAMA_8B, 2),
    "llama-70b": _Costs("Llama 3 70B, H100, tensor parallelism 8", None, _LLAMA_70B, 8),
}


def static_page() -> str:
    """Plan all settings, and return the page."""
    cases = {}
    for name, costs in _COSTS.items():
        for ranks in _RANKS:
            job = costs.of_job(ranks)
            for multiple in _MULTIPLES:
                case = list(_rows(costs, ranks, multiple * ranks, job))
                cases[f"{name} {ranks} {multiple}"] = _packed(case)
    grid = {
        "costs": {name: costs.label for name, costs in _COSTS.items()},
        "ranks": {str(ranks): str(ranks) for ranks in _RANKS},
        "multiple": {str(multiple): "p" if multiple == 1 else f"{multiple} p" for multiple in _MULTIPLES},
    }
    return build_page({**catalogue(), "grid": grid, "cases": cases})


def _rows(costs: _Costs, ranks: int, microbatches: int, job: PageJob | None) -> Iterator[dict[str, Any]]:
    """Yield what the page would ask about every schedule that needs no search, with the answers."""
    for recipe in SCHEDULES.values():
        if recipe.sliced or recipe.only_compared or recipe.name in _LEFT_OUT:
            continue
        asked = {"schedule": recipe.name} | ({"equal-passes": ""} if recipe.adapts else {})
        asked |= {"num-chunks": str(_CHUNKS)} if recipe.shape == "interleaved" else {}
        asked |= {} if costs.times is None else {"num-ranks": str(ranks), **costs.times}
        query = urlencode({**asked, "num-microbatches": str(microbatches)})
        answer = page_answer(read_question(query, job), job)
        _limit(answer.figures, ranks)
        name = f"{recipe.name} x{_CHUNKS}" if recipe.shape == "interleaved" else recipe.name
        yield {"id": name, "summary": recipe.summary, "plan": answer.figures, "drawing": _rounded(answer.drawing)}


def _limit(figures: dict[str, Any], ranks: int) -> None:
    """Compare with 1F1B's memory; a lower bound, which a limit of the question would add, takes most of the time."""
    plan = figures["plan"]
    peak = max(plan["peak_activation"])
    sentence = f"memory limit {ranks} microbatches, peak {peak:.4g} microbatches per rank"
    plan["memory_limit_microbatches"] = ranks
    figures["limit"] = {"kept": within(peak, ranks), "sentence": sentence}


def _rounded(content: Any) -> Any:
    if isinstance(content, float):
        return round(content, _DIGITS)
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    return [_rounded(each) for each in content] if isinstance(content, (list, tuple)) else content


def _packed(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
