"""The facts of a job (``core/formats/facts.py``), from its flags: in planning and in the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.model import Model
from megatron.zero_bubble.core.formats.costs import read_costs_file
from megatron.zero_bubble.core.formats.facts import Facts, differences, listed
from megatron.zero_bubble.core.formats.layout import job_layers, stages_text
from megatron.zero_bubble.planning.job import experts, recomputation
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.model import has_experts, model_of
from megatron.zero_bubble.planning.source import ScheduleSource


def gpu_kind(name: str) -> str:
    """Return the name that the estimates have for a GPU, else the name that its driver gives it."""
    return next((known for known in DEVICES if re.search(rf"\b{known}\b", name, re.IGNORECASE)), name)


def facts_of(args: Any, gpu: str | None = None, vocab_size: int | None = None) -> Facts:
    """Return what the passes of a job follow from.

    Args:
        args: its checked flags, in our loop, in Megatron-LM or in planning.
        gpu: its GPU; None if unknown.
        vocab_size: that of its vocabulary, if ``args`` do not say it.
    """
    model = model_of(args, (args.num_layers,))
    size = args.vocab_size or vocab_size  # without the padding, which depends on the version of Megatron-LM
    facts: dict[str, str | int | bool | None] = {
        "num_layers": args.num_layers,
        "layer_kinds": _kinds(args, model),
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "gated_mlp": bool(model.gated),
        "num_attention_heads": model.heads,
        "num_query_groups": model.groups,
        "head_size": model.head_size,
        "vocabulary_size": size,
        "num_prediction_layers": getattr(args, "mtp_num_layers", None) or 0,
        "sequence_length": model.sequence,
        "microbatch_size": model.microbatch,
        "attention": "flash" if model.flash else "unfused",
        "recompute": _recompute(args, model),
        "precision": _precision(args),
        "tensor_parallel_size": model.tensor_parallel,
        "sequence_parallel": bool(model.sequence_parallel) and model.tensor_parallel > 1,
        "context_parallel_size": args.context_parallel_size,
        "gpu": gpu,
    }
    if (routed := model.experts) is not None:
        facts |= {
            "num_experts": routed.count,
            "experts_per_token": routed.top_k,
            "expert_hidden_size": routed.ffn,
            "shared_expert_hidden_size": routed.shared,
            "expert_parallel_size": routed.parallel,
            "expert_tensor_parallel_size": routed.tensor_parallel,
        }
    return {name: value for name, value in facts.items() if value is not None}


def job_facts(args: Any) -> Facts:
    """Return what else a decision follows from, for checked ``args`` of a job that Megatron-LM runs."""
    placement = args.placement
    divided = ", distributed" if args.use_distributed_optimizer else ""
    reduced = ", gradients in bf16" if args.grad_reduce_in_bf16 else ""
    return {
        "pipeline_parallel_size": args.pipeline_model_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "stages_per_rank": placement.num_stages // placement.num_ranks,
        "layers_per_stage": stages_text(job_layers(args)),
        "global_batch_size": args.batch_sizes.final,
        "optimizer": f"{args.optimizer}{divided}{reduced}",
        "tied_embeddings": not args.untie_embeddings_and_output_weights,
    }


def remarks_at_start(
    args: Any,
    source: ScheduleSource | None,
    num_microbatches: int,
    config: ZeroBubbleConfig | None,
    facts: Callable[[], Facts],
) -> Iterator[str]:
    """Yield what the user of a job should know before it runs: what its options cost under its schedules, and which of
    its files are of another job.

    Args:
        source, config: its schedules, and what it asks of this package; None for Megatron's own.
        facts: as in ``remarks``.
    """
    yield from filter(None, (recomputation.remark(args, source, num_microbatches), experts.remark(args, source)))
    yield from () if config is None else remarks(config, facts)


def remarks(config: ZeroBubbleConfig, facts: Callable[[], Facts]) -> Iterator[str]:
    """Yield a sentence for each file of a configuration that is of another job than the one with these facts, which are
    asked for only if a file has any.
    """
    files = [] if config.setup.plan is None else [("plan", config.setup.name, config.setup.plan.facts)]
    if config.costs_file is not None:
        files.append(("costs", config.costs_file, read_costs_file(config.costs_file).facts))
    for what, file, theirs in files:
        if theirs and (different := differences(theirs, facts())):
            yield f"{file} has the {what} of another job: {listed(different)}"


def _kinds(args: Any, model: Model) -> str | None:
    """The layers of a hybrid model, or those with experts among others; None if all are alike."""
    if model.pattern:
        return model.pattern
    kinds = has_experts(args)
    return None if len(set(kinds)) < 2 else "".join("E" if each else "t" for each in kinds)


def _recompute(args: Any, model: Model) -> str:
    if model.recompute == "full":
        return f"full, {args.recompute_method} {args.recompute_num_layers}"
    modules = sorted(getattr(args, "recompute_modules", None) or ["core_attn"])
    return f"selective, {' '.join(modules)}" if model.recompute == "selective" else "none"


def _precision(args: Any) -> str:
    name = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    lower = [each for each in ("fp8", "fp4") if getattr(args, each, None)]
    return " ".join((name, *lower))
