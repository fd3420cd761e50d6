"""What megatron-core is asked for one chunk of a model, replaced with placements other than Megatron's."""

from __future__ import annotations

from megatron.zero_bubble.integration.patching.seam import Seam

_SEGMENTS = tuple(
    Seam(
        module,
        "select_pipeline_segment",
        ("main_pattern", "pp_group", "vp_stage"),
        "gives a chunk of a hybrid model the layers of its stage",
    )
    for module in (
        "megatron.core.models.hybrid.hybrid_layer_allocation",
        "megatron.core.ssm.mamba_hybrid_layer_allocation",
    )
)
_COUNTED = "gives a chunk that a framework builds the layers of its stage"
_CONSTRUCTED = "builds a chunk of a framework as on the pipeline rank where Megatron would place it"
_TRANSFORMER = "megatron.core.transformer"
_LAYOUT = f"{_TRANSFORMER}.pipeline_parallel_layer_layout"
_COUNTS = (
    Seam(f"{_TRANSFORMER}.transformer_layer", "get_transformer_layer_offset", ("config", "vp_stage"), _COUNTED),
    Seam(f"{_TRANSFORMER}.transformer_block", "get_num_layers_to_build", ("config", "vp_stage"), _COUNTED),
)
_COUNTS_OF_LAYOUT = tuple(
    Seam(_LAYOUT, f"PipelineParallelLayerLayout.{name}", ("self", "layer_type", "vp_stage"), _COUNTED)
    for name in ("get_num_layers_to_build", "get_layer_offset")
)
_MODELS = tuple(
    Seam(module, name, ("self", "config", "pre_process", "post_process", "vp_stage"), _CONSTRUCTED)
    for module, name in (
        ("megatron.core.models.gpt.gpt_model", "GPTModel.__init__"),
        ("megatron.core.models.hybrid.hybrid_model", "HybridModel.__init__"),
    )
)
BLOCK = Seam(
    f"{_TRANSFORMER}.transformer_block", "TransformerBlock.__init__", ("self", "config", "vp_stage"), _CONSTRUCTED
)


def segment_seams() -> tuple[Seam, ...]:
    """The function that is replaced with placements other than Megatron's, if hybrid models can have several stages per
    rank in the installed version; modules that moved import it from where it is now.
    """
    return tuple(seam for seam in _SEGMENTS if seam.exists())[:1]


def count_seams() -> tuple[Seam, ...]:
    """The functions that return the layers of a chunk, replaced with placements other than Megatron's.

    Frameworks may have imported them by their names.
    """
    return (*(each for seam in _COUNTS for each in seam.importers()), *_COUNTS_OF_LAYOUT)


def model_seams() -> tuple[Seam, ...]:
    """The constructors of models, replaced with placements other than Megatron's."""
    return tuple(seam for seam in _MODELS if seam.exists())
