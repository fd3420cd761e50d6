"""The keys of a plan's JSON: what each one has and when it is written, and whether a run takes it from the file.

docs/plan-json.md prints this table; the writer writes no other key.
"""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """A key of the plan's JSON.

    Attributes:
        name: the key.
        form: the type of its value, in words.
        meaning: what the value says, with its unit.
        section: the feature with which it is written; keys of ``plan`` are in every file.
        decides: whether a run takes it from the file. The others follow from the costs, and readers ignore them.
    """

    name: str
    form: str
    meaning: str
    section: str = "plan"
    decides: bool = False


_LAYOUT = "`--pipeline-model-parallel-layout`"
PLAN_KEYS = (
    Key("schedule", "string", "name of the schedule", decides=True),
    Key("num_ranks", "integer", "pipeline ranks", decides=True),
    Key("num_stages", "integer", "stages of the model, at least one per rank", decides=True),
    Key("num_microbatches", "integer", "microbatches per iteration", decides=True),
    Key("stage_to_rank", "list of integers", "the rank of every stage, in model order", decides=True),
    Key(
        "order",
        "list of lists of strings",
        "the passes of every rank, first to last; the two passes of a pair, which run at the same time, "
        "are one string, `3F7&0B4`",
        decides=True,
    ),
    Key(
        "overlap_experts",
        "`true`",
        "the all-to-all of experts runs beneath the weight gradients of its own backward; missing if it does not, or "
        "if the order has pairs, which hide it anyway",
        decides=True,
    ),
    Key("num_slices", "integer", "slices of every sequence; missing if sequences are whole", decides=True),
    Key(
        "slice_shares",
        "list of numbers",
        "the share of the tokens in each slice; missing if the slices are equally long",
        decides=True,
    ),
    Key(
        "vocabulary",
        "integer",
        "the algorithm of [vocabulary parallelism](vocabulary.md), 1 or 2; missing if the embedding and the output "
        "layer are not divided",
        decides=True,
    ),
    Key(
        "recompute_logits",
        "`true`",
        "the weight gradient of the divided output layer computes the logits again; missing if it keeps their softmax",
        decides=True,
    ),
    Key("makespan_ms", "number", "end of the last pass minus start of the first pass, over all ranks"),
    Key("span_ms", "number", "end of a rank's last pass minus start of its first pass, for the longest rank"),
    Key("bubble_rate_makespan", "number", "(makespan - work) / makespan, with the work of the busiest rank"),
    Key("bubble_rate_span", "number", "(span - work) / span, with the work of the busiest rank"),
    Key("idle_rate_makespan", "number", "(makespan - work) / makespan, with the mean work of the ranks"),
    Key("idle_rate_span", "number", "(span - work) / span, with the mean work of the ranks"),
    Key("imbalance", "number", "work of the busiest rank, divided by the mean of the ranks: 1 if all have equal work"),
    Key("peak_activation", "list of numbers", "per rank: its peak, in units of what one microbatch keeps on it"),
    Key(
        "facts",
        "object",
        "the [facts of the job](#facts-of-the-job) that it was planned for; missing if they are unknown. A run of "
        "another job says which differ",
    ),
    Key(
        "message_peak",
        "list of numbers",
        "per rank: the most bytes of messages that it sends and receives at a time",
        "config",
    ),
    Key("objective", "string", "`span` or `makespan`: the length that the bound and the gap refer to", "limit"),
    Key(
        "memory_limit",
        "number",
        "in the unit of the costs' memory: bytes, or 1 for what one microbatch keeps on a rank",
        "limit",
    ),
    Key(
        "memory_limit_microbatches",
        "number",
        "the same in microbatches, on the rank on which a microbatch keeps most",
        "limit",
    ),
    Key(
        "lower_bound_ms",
        "number",
        "no schedule on this placement within the limit is shorter ([what the bound "
        "means](planning.md#what-the-bound-means)); with sharded units, for units of any size",
        "limit",
    ),
    Key("lower_bound_reason", "string", "what the bound follows from", "limit"),
    Key("gap", "number", "(cost - bound) / cost; below 0 only where the schedule exceeds the limit", "limit"),
    Key("planning_seconds", "number", "time that the search took", "limit"),
    Key("dropped", "object", "the reason for each of these variants, by its name", "dropped"),
    Key("offload", "string", "what was requested: `auto`, `all` or a share", "offload", decides=True),
    Key("offloaded_share", "number", "share of the forwards that move", "offload"),
    Key("offload_added_ms", "number", "what the copies add to the makespan", "offload"),
    Key(
        "device_peak",
        "list of numbers",
        "per rank: memory of microbatches on the device, in the unit of the costs' memory",
        "offload",
    ),
    Key("host_peak", "list of numbers", "per rank: the same on the host", "offload"),
    Key("pending_wgrad", "list of numbers", "per rank: the most operands of W that wait on the device", "offload"),
    Key(
        "moves",
        "list of `[pass, after, out, back]`",
        "the forwards that move, and numbers of passes: between the forward and the start of the copy, during the copy "
        "to the host, and during the copy back",
        "offload",
        decides=True,
    ),
    Key(
        "shard_weights", "`true`", "weights and gradients are [sharded over replicas](sharded-units.md)", "shards", True
    ),
    Key("replicas", "integer", "the data-parallel replicas that the plan was made for", "shards"),
    Key("unit_microbatches", "integer", "microbatches after which gradients are reduced", "shards", decides=True),
    Key("whole_stages", "integer", "the most stages of a rank whose weights are whole at a time", "shards", True),
    Key("gathers", "list of integers", "per rank: gathers of weights per iteration", "shards"),
    Key("reductions", "list of integers", "per rank: reductions of gradients per iteration", "shards"),
    Key(
        "replica_traffic_bytes",
        "list of numbers, or null",
        "per rank: bytes that it sends to its replicas per iteration; null if the size of the weights is unknown",
        "shards",
    ),
    Key(
        "static_bytes",
        "list of numbers, or null",
        "per rank: bytes of its shards, and of the weights and gradients that are whole at a time; null if unknown",
        "shards",
    ),
    Key(
        "collectives_ms", "number", "what the collectives take together, on the rank where they take longest", "shards"
    ),
    Key(
        "needed_layout",
        "string",
        f"the {_LAYOUT} that the job needs, because its other flags cannot divide the layers",
        "division",
        decides=True,
    ),
    Key(
        "is_lower_bound",
        "boolean",
        "true if the stages of the costs differ and their layers are unknown, so that an iteration takes longer than "
        "the plan ([why](costs-json.md))",
        "division",
    ),
    Key(
        "pipeline_model_parallel_layout",
        "string",
        "the layers of every stage, as Megatron's flag of this name takes them",
        "layout",
        decides=True,
    ),
    Key("layers_per_stage", "list of integers", "the same as numbers, in model order", "layout", decides=True),
    Key(
        "shorter_than",
        "object",
        "by how much the plan is shorter than with other layouts, as a share of their length, at least (`zb-auto` "
        "searches for no schedule for a layout that cannot be shorter): `even_split`, and "
        "`even_split_with_layers_moved_from_the_last_stage`",
        "layout",
    ),
)
