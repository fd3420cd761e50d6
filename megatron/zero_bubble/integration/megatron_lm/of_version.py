"""Rules of a Megatron-LM job that depend on the version of Megatron that runs it; a dry run does not know it."""

from __future__ import annotations

from typing import Any

import megatron.core
from megatron.core import num_microbatches_calculator

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.integration.patching.seams import installed_seams


def has_ramps() -> bool:
    """Whether ``--rampup-batch-size`` has an effect; a Megatron with ``--step-batch-size-schedule`` ignores it."""
    return hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator")


def check_loading(args: Any, placement: Placement) -> None:
    """Reject loading an embedding that is on one rank twice, where Megatron cannot do that.

    Raises:
        UserError: the rule, the version and the remedies.
    """
    ends_meet = placement.stage_to_rank[0] == placement.stage_to_rank[-1]
    if not (ends_meet and args.load) or installed_seams().loads_both_ends:
        return
    version = megatron.core.__version__
    if args.mtp_num_layers:
        raise UserError(
            f"megatron-core {version} cannot load a checkpoint if one rank holds the embedding and its copy for "
            "multi-token prediction, as under this schedule; use Megatron-LM core_r0.15 or newer, or a schedule with "
            "one stage per rank"
        )
    if not args.untie_embeddings_and_output_weights:
        raise UserError(
            f"megatron-core {version} cannot load a checkpoint if one rank holds both ends of a tied embedding, as "
            "under this schedule; use Megatron-LM core_r0.15 or newer, a schedule with one stage per rank, or "
            "--untie-embeddings-and-output-weights"
        )
