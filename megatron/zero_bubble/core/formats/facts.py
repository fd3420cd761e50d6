"""The facts of a job that its costs, its plan and the decision of ``auto`` follow from.

All three kinds of files have them under one key, so that a file of another job is recognized. docs/plan-json.md prints
the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.zero_bubble.core.formats.files import read_optional

KEY_FACTS = "facts"

Facts = Mapping[str, str | int | bool]
"""Facts by name. One that is missing is unknown."""


class Fact(NamedTuple):
    """A fact of a job.

    Attributes:
        name: its key.
        words: what it is, for people.
        of_passes: whether times and memory of passes follow from it; the others matter to a decision only.
    """

    name: str
    words: str
    of_passes: bool = True


FACTS = (
    Fact("num_layers", "layers"),
    Fact("layer_kinds", "kinds of layers"),
    Fact("hidden_size", "hidden size"),
    Fact("ffn_hidden_size", "hidden size of an MLP"),
    Fact("gated_mlp", "gated MLPs"),
    Fact("num_attention_heads", "attention heads"),
    Fact("num_query_groups", "groups of queries"),
    Fact("head_size", "size of a head"),
    Fact("vocabulary_size", "vocabulary"),
    Fact("num_experts", "experts"),
    Fact("experts_per_token", "experts per token"),
    Fact("expert_hidden_size", "hidden size of an expert"),
    Fact("shared_expert_hidden_size", "hidden size of shared experts"),
    Fact("num_prediction_layers", "layers of multi-token prediction"),
    Fact("sequence_length", "sequence length"),
    Fact("microbatch_size", "sequences of a microbatch"),
    Fact("attention", "attention kernel"),
    Fact("recompute", "recomputation"),
    Fact("precision", "precision"),
    Fact("tensor_parallel_size", "tensor-parallel ranks"),
    Fact("sequence_parallel", "sequence parallelism"),
    Fact("context_parallel_size", "context-parallel ranks"),
    Fact("expert_parallel_size", "expert-parallel ranks"),
    Fact("expert_tensor_parallel_size", "tensor-parallel ranks of experts"),
    Fact("gpu", "GPU"),
    Fact("pipeline_parallel_size", "pipeline ranks", False),
    Fact("data_parallel_size", "data-parallel replicas", False),
    Fact("gpus_per_node", "GPUs per node", False),
    Fact("gpu_memory", "memory of a GPU", False),
    Fact("stages_per_rank", "stages per rank", False),
    Fact("layers_per_stage", "layers per stage", False),
    Fact("global_batch_size", "global batch", False),
    Fact("optimizer", "optimizer", False),
    Fact("tied_embeddings", "tied embeddings", False),
    Fact("exact", "exact sums", False),
    Fact("memory_limit", "memory limit", False),
    Fact("options", "other flags of this package", False),
    Fact("costs", "costs", False),
    Fact("version", "version of this package", False),
)
_MOST = 4
"""How many facts a sentence names."""


def facts_from(content: Mapping[str, object]) -> Facts:
    """Read the facts in a file; none if it has none. Unknown facts are kept, since later versions may add some.

    Raises:
        UserError: they are not an object of text, numbers, true or false.
    """
    form = "an object of facts, each a string, a whole number, true or false"
    facts: Facts | None = read_optional(content, KEY_FACTS, form, _are_facts)
    return facts or {}


def differences(theirs: Facts, ours: Facts) -> list[str]:
    """Return what a file says of its job and is otherwise in ours, in words; what one of them leaves open is equal."""
    return _differing([fact for fact in FACTS if fact.name in theirs and fact.name in ours], theirs, ours)


def all_differences(theirs: Facts, ours: Facts) -> list[str]:
    """Return the same for all facts; what only one of them has differs."""
    return _differing([fact for fact in FACTS if fact.name in theirs or fact.name in ours], theirs, ours)


def listed(different: Sequence[str]) -> str:
    """Join differences for a sentence, the first few of many."""
    more = len(different) - _MOST
    return "; ".join(different[:_MOST]) + (f"; and {more} more" if more > 0 else "")


def _differing(facts: Sequence[Fact], theirs: Facts, ours: Facts) -> list[str]:
    return [
        f"{fact.words}: {_shown(theirs.get(fact.name))} there, {_shown(ours.get(fact.name))} here"
        for fact in facts
        if theirs.get(fact.name) != ours.get(fact.name)
    ]


def _shown(value: str | int | bool | None) -> str:
    if value is None:
        return "unknown"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _are_facts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, (str, int)) for each in value.values())
