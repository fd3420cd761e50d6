"""The flags that another one has replaced: they work until the next minor release, and then are refused.

``--zero-bubble-help-all`` and a line at start-up name the replacement; no other help and no table of flags has them.
"""

from __future__ import annotations

from megatron.zero_bubble.planning.decision import NEGATABLE, SWITCH, Decision, PlanFlag, token_counts
from megatron.zero_bubble.planning.setup import DEFAULT_CUTS

LOGITS = "logits"
"""What ``--zero-bubble-recompute`` has for logits that are computed again."""
RETIRED = (
    Decision(
        "recompute-logits",
        "retired",
        SWITCH,
        "give --zero-bubble-recompute logits",
        path="vocabulary.recompute_logits",
        plan=PlanFlag(
            "recompute-logits",
            SWITCH,
            None,
            "T computes the logits again, so that only the hidden states are kept from S to T; for estimates of "
            "--vocabulary",
        ),
        within="early_recompute",
        word=LOGITS,
    ),
    Decision(
        "rollback",
        "retired",
        ("exact", "inverse"),
        "give --zero-bubble-post-validation exact or inverse",
        path="step.rollback",
        within="post_validation",
    ),
    Decision(
        "schedule-file",
        "retired",
        "FILE",
        "give --zero-bubble-schedule FILE",
        path="order.file",
        plan=PlanFlag("schedule-file", "FILE"),
        within="schedule",
        by_auto=True,
    ),
    Decision(
        "num-slices",
        "retired",
        "N",
        "give --zero-bubble-slices N",
        parse=int,
        path="cuts.number",
        plan=PlanFlag(
            "num-slices",
            "N",
            None,
            "cut every sequence into N slices, or auto: 1, 2, 4, ... slices, whichever is shortest within the memory "
            f"limit (default: {DEFAULT_CUTS} for schedules whose name begins with seq-, which compare lists only with "
            "this flag, else 1)",
            True,
        ),
        within="slices",
        by_auto=True,
    ),
    Decision(
        "slice-ends",
        "retired",
        "TOKENS",
        "give --zero-bubble-slices TOKENS",
        parse=token_counts,
        path="cuts.places",
        plan=PlanFlag(
            "slice-cuts",
            "CUTS",
            None,
            "even: equally long slices; balanced: slices that take equal time, which differ in length because a token "
            "attends to all earlier ones; or the ends of all slices as shares of the sequence, such as 0.3,0.6,1 "
            "(default: balanced if attention takes more than a tenth of F and B, else even)",
            True,
        ),
        within="slices",
        by_auto=True,
    ),
    Decision(
        "fuse-wgrad",
        "retired",
        NEGATABLE,
        "it is the default, and --no-zero-bubble-fuse-wgrad is --zero-bubble-exact",
        path="exact",
    ),
    Decision(
        "nccl-collective-ctas",
        "retired",
        "N",
        "give --zero-bubble-nccl-ctas with two numbers",
        parse=int,
        path="messages.collective_ctas",
        within="nccl_ctas",
    ),
    Decision(
        "shard-transport",
        "retired",
        ("collective", "on-demand"),
        "give --zero-bubble-shard-weights collective or on-demand",
        path="shards.transport",
        within="shard_weights",
    ),
)
"""One row per flag, whose help is the replacement."""
