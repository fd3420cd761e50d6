"""The model of a job: its shapes, and the layout of its layers where they do not divide evenly among the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from megatron.zero_bubble.core.costs.adapters import TARGETS, Adapters
from megatron.zero_bubble.core.costs.delta import GatedDelta
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.expert_layers import Experts
from megatron.zero_bubble.core.costs.kept import MLP, MOE
from megatron.zero_bubble.core.costs.mamba import Mamba
from megatron.zero_bubble.core.costs.model import ESTIMATED_KINDS, PARTS, Model, Part, Recompute
from megatron.zero_bubble.core.costs.predictions import prediction_parts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.layout import layout_text
from megatron.zero_bubble.core.formats.layout_string import HYBRID_KINDS, layout_layers, predictions_of
from megatron.zero_bubble.core.formats.pattern import Pattern
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.search.cut import cut
from megatron.zero_bubble.planning.division import Division
from megatron.zero_bubble.planning.job.graphs import ENGINE, ITERATION, graphs_of
from megatron.zero_bubble.planning.job.kept import indexer_of, kept_of, latent_of, linear_precision
from megatron.zero_bubble.planning.job.pattern import pattern_of

GPT2_VOCAB_SIZE = 50_304
"""Size of GPT-2's vocabulary, padded to a multiple of 128."""
_SHAPES = ("hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
_DELTA = {
    "key_heads": "num_key_heads",
    "value_heads": "num_value_heads",
    "key_size": "key_head_dim",
    "value_size": "value_head_dim",
    "convolution": "conv_kernel_dim",
}
"""Fields of ``GatedDelta``, and Megatron's options after ``linear_``."""
_EMBEDDING = 0.02
"""Work of the embedding in layers: it hardly takes time, but with it the first rank is the last to get one more layer
than others.
"""


def model_of(args: Any, layers: tuple[int, ...], flash: bool = True) -> Model:
    """Build the model from the shapes in ``args``; ``layers`` has one number per rank or per stage.

    Raises:
        UserError: as ``experts_of``.
    """
    return replace(_without_experts(args, layers, flash), experts=experts_of(args))


def rank_model(args: Any, layers: tuple[int, ...]) -> Model:
    """Build the model of a rank, which with context parallelism has only a part of every sequence."""
    parts = args.context_parallel_size
    return replace(model_of(args, layers), sequence=args.seq_length // parts, context_parallel=parts)


def _without_experts(args: Any, layers: tuple[int, ...], flash: bool = True) -> Model:
    pattern = pattern_of(args)
    backend = getattr(args.attention_backend, "name", args.attention_backend)  # an enum in Megatron-LM's jobs
    return Model(
        layers=layers,
        hidden=args.hidden_size,
        ffn=_ffn(args),
        heads=args.num_attention_heads,
        groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_size=args.kv_channels or args.hidden_size // args.num_attention_heads,
        sequence=args.seq_length,
        microbatch=args.micro_batch_size,
        vocab_size=args.vocab_size or GPT2_VOCAB_SIZE,
        gated=args.swiglu,
        flash=flash and backend not in ("unfused", "local"),
        recompute=_recompute(args),
        again=args.recompute_num_layers if getattr(args, "recompute_method", None) == "block" else None,
        tensor_parallel=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        overlaps_tensor=bool(getattr(args, "tp_comm_overlap", False)),
        precision=linear_precision(args),
        pattern="" if pattern is None or unestimated_kinds(args) else pattern.layers,
        mamba=mamba_of(args),
        delta=delta_of(args),
        latent=latent_of(args),
        indexer=indexer_of(args),
        kept=kept_of(args),
        joined=_joined(args),
        captured=_captured(args),
        adapters=_adapters(args),
        frozen=_frozen(args),
        streams=_streams(args),
        **_window(args),
    )


def _trained(args: Any, layers: tuple[int, ...]) -> Model:
    """The model without experts, all of which is trained, because the run that divides it knows no other."""
    return replace(_without_experts(args, layers), adapters=None, frozen=0)


def _adapters(args: Any) -> Adapters | None:
    """The adapters that a job asks for.

    Raises:
        UserError: a rank below 1, or the name of a linear layer that estimates do not know.
    """
    if (rank := getattr(args, "lora_rank", None)) is None:
        return None
    if rank < 1:
        raise UserError(f"--lora-rank must be 1 or more; got {rank}; drop the flag if the job has no adapters")
    if unknown := [name for name in args.target_modules if name not in TARGETS]:
        raise UserError(
            f"adapters are estimated for {', '.join(TARGETS)}; got --target-modules {' '.join(unknown)}; give the "
            "megatron-core names of the layers that have them"
        )
    return Adapters(rank, tuple(args.target_modules))


def _frozen(args: Any) -> int:
    """The number of layers below all that is trained.

    Raises:
        UserError: a negative one, or more than there are.
    """
    number = getattr(args, "frozen_layers", None) or 0
    most = getattr(args, "num_layers", None) or number
    if not 0 <= number <= most:
        raise UserError(f"--frozen-layers must be from 0 to the number of layers, {most}; got {number}; change it")
    return number


def _streams(args: Any) -> int:
    """The residual streams of hyper-connections, by the options of Megatron's dev branch, or of its main branch."""
    for enabled, number in (
        ("enable_hyper_connections", "num_residual_streams"),
        ("enable_mhc_connections", "mhc_num_residual_streams"),
    ):
        if getattr(args, enabled, False):
            return int(getattr(args, number))
    return 1


def _window(args: Any) -> dict[str, Any]:
    """To how many tokens attention looks back, if not to all, and the share of the layers in which it does."""
    before, every = getattr(args, "window_size", None), getattr(args, "window_attn_skip_freq", None)
    if isinstance(before, (tuple, list)):  # in megatron-core's configuration
        before = before[0]
    if before is None or before < 0:
        return {}
    windowed = sum(every) / len(every) if isinstance(every, list) and every else 1.0 - (1.0 / every if every else 0.0)
    return {"window": before + 1, "windowed": windowed}


def _joined(args: Any) -> tuple[Part, ...]:
    """The parts of layers that compute their weight gradients in B."""
    graphed = _captured(args) if _has_graphs(args, ENGINE) and not _has_graphs_of_w(args) else ()
    fuses = _fuses(args) and not getattr(args, "use_grouped_gemm_for_dense_mlp", False)  # which has a queue for them
    return (*graphed, *(("mlp",) if fuses and "mlp" not in graphed else ()))


def _captured(args: Any) -> tuple[Part, ...]:
    """The parts of layers inside CUDA graphs of layers, or of stages; that of an iteration reuses memory within it."""
    if (graphs := graphs_of(args)) is None or graphs.implementation == ITERATION:
        return ()
    return tuple(part for part in PARTS if part in graphs.inside)


def _has_graphs(args: Any, implementation: str) -> bool:
    graphs = graphs_of(args)
    return graphs is not None and graphs.implementation == implementation


def _has_graphs_of_w(args: Any) -> bool:
    """Whether W of a layer can be a graph of its own, as far as the job decides it; TransformerEngine must be able to
    do it, too.
    """
    return not args.add_bias_linear and args.gradient_accumulation_fusion and not _fuses(args)


def _fuses(args: Any) -> bool:
    """Whether TransformerEngine's fused operations compute MLPs."""
    return bool(getattr(args, "use_transformer_engine_op_fuser", False))


def _ffn(args: Any) -> int:
    """Return the width of an MLP."""
    wide = 4 * args.hidden_size
    return int(args.ffn_hidden_size or (int(wide * 2 / 3 / 64) * 64 or wide if args.swiglu else wide))


def experts_of(args: Any) -> Experts | None:
    """Build the shapes of layers with experts from the flags of a job; None without experts.

    Raises:
        UserError: a list of layers with experts that has not one entry per layer.
    """
    if not (count := _num_experts(args)):
        return None
    dispatcher = getattr(args, "moe_token_dispatcher_type", None)
    return Experts(
        count,
        args.moe_router_topk,
        args.moe_ffn_hidden_size or _ffn(args),
        args.moe_shared_expert_intermediate_size or 0,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        dispatcher == "allgather",
        dispatcher == "flex",
        tuple(has_experts(args)) if pattern_of(args) is None else (),
        bool(getattr(args, "use_transformer_engine_op_fuser", False)),
        getattr(args, "moe_router_num_groups", None) or 1,
        getattr(args, "moe_router_group_topk", None) or 1,
        getattr(args, "moe_latent_size", None),
    )


def unestimated_kinds(args: Any) -> tuple[str, ...]:
    """Return the kinds of a hybrid model's layers whose costs are not estimated, in words."""
    pattern = pattern_of(args)
    needed = {"E": _num_experts(args), "+": latent_of(args), "D": latent_of(args) and indexer_of(args)}
    estimated = {kind for kind in ESTIMATED_KINDS if needed.get(kind, True)}
    kinds = () if pattern is None else {*pattern.layers, *"".join(pattern.predictions)} - estimated
    return tuple(sorted(HYBRID_KINDS[kind] for kind in kinds))


def division_of(args: Any, vocab_size: int | None) -> Division:
    """Return how the flags ``args`` divide the layers.

    Args:
        vocab_size: its padded size; None if it is not known yet.

    Raises:
        UserError: when ``on`` of the result is called: as ``uneven_layout``.
    """
    pattern, layout = pattern_of(args), args.pipeline_model_parallel_layout

    @cache
    def otherwise(placement: Placement) -> tuple[int, ...]:
        if pattern is not None:
            return hybrid_layers(args, pattern, placement, vocab_size)
        return layout_layers(uneven_layout(args, placement, vocab_size))

    predictions = predictions_of(layout) if layout is not None else (len(predicted_layers(args)),)
    return Division(
        args.num_layers,
        args.num_layers_in_first_pipeline_stage,
        args.num_layers_in_last_pipeline_stage,
        bool(args.account_for_embedding_in_pipeline_split),
        bool(args.account_for_loss_in_pipeline_split),
        () if layout is None else layout_layers(layout),
        otherwise,
        predictions if pattern is None else (),  # of a hybrid model, they are on the last stage
        pattern,
    )


def hybrid_layers(args: Any, pattern: Pattern, placement: Placement, vocab_size: int | None) -> tuple[int, ...]:
    """Return the layers of a hybrid model per stage with the least work for the busiest rank.

    Raises:
        UserError: for too few layers to fill every stage.
    """
    work, embedding, loss = work_of_kinds(args, vocab_size)
    predictions = sum(loss + sum(work[kind] for kind in letters) for letters in pattern.predictions)
    return cut(placement, [work[kind] for kind in pattern.layers], embedding, loss + predictions)


def predicted_layers(args: Any) -> tuple[str, ...]:
    """Return the letters of each layer of multi-token prediction, which is like the last layer if it has none."""
    pattern, number = pattern_of(args), getattr(args, "mtp_num_layers", None) or 0
    return pattern.predictions if pattern is not None and pattern.predictions else ("",) * number


def uneven_layout(args: Any, placement: Placement, vocab_size: int | None) -> str:
    """Return the ``--pipeline-model-parallel-layout`` with the least work for the busiest rank (``cut``).

    The work of layers and of the output layer is estimated from the job's shapes. Without them, or without
    ``vocab_size``, the embedding and the output layer count as one layer each. Multi-token prediction is on the last
    stage, and counts as a layer, a projection and an output layer each time.

    Args:
        args: the job's flags, in our loop or in Megatron-LM.
        vocab_size: the padded size of the vocabulary; None if it is not known yet.

    Raises:
        UserError: for too few layers to fill every stage, and for a list of layers with experts that has not one entry
            per layer.
    """
    predictions = getattr(args, "mtp_num_layers", None) or 0

    def text(work: Sequence[float], embedding: float, last: float) -> str:
        return layout_text(cut(placement, work, embedding, last))[:-1] + "m" * predictions + "L"

    if vocab_size is None or not all(getattr(args, name, None) for name in _SHAPES):
        return text((1.0,) * args.num_layers, 1.0, 1.0 + 2.0 * predictions)
    dense = replace(_trained(args, (1,)), vocab_size=vocab_size)
    device = DEVICES["a100"]
    costs, kinds = layer_costs(dense, device), has_experts(args)
    models = dense, _active(dense, args)
    layer = [costs.layers[0].work_ms, layer_costs(models[1], device).layers[0].work_ms]
    work = [layer[kind] for kind in kinds]
    predicting = prediction_parts(models[kinds[-1]], device).work_ms  # layers of the last kind
    return text(work, _EMBEDDING * min(work), costs.loss.work_ms + predictions * predicting)


def mamba_of(args: Any) -> Mamba:
    """Build the shapes of Mamba layers from the flags of a job, with Megatron's defaults where it has none."""
    defaults = Mamba()
    return Mamba(
        getattr(args, "mamba_num_heads", None),
        getattr(args, "mamba_head_dim", None) or defaults.head_size,
        getattr(args, "mamba_state_dim", None) or defaults.state,
        getattr(args, "mamba_num_groups", None) or defaults.groups,
    )


def delta_of(args: Any) -> GatedDelta:
    """Build the shapes of gated delta nets from the flags of a job, with Megatron's defaults where it has none."""
    given = {name: getattr(args, f"linear_{option}", None) for name, option in _DELTA.items()}
    return GatedDelta(**{name: value for name, value in given.items() if value is not None})


def work_of_kinds(args: Any, vocab_size: int | None) -> tuple[dict[str, float], float, float]:
    """Return the work of a hybrid model's layers by letter, of the embedding and of the output layer, in any unit.

    Layers with experts count as their active part, sparse attention without an indexer as attention. Without shapes
    or ``vocab_size``, all count as one layer.

    Args:
        args: the flags of a Megatron-LM job.
        vocab_size: the padded size of the vocabulary; None if it is not known yet.
    """
    if vocab_size is None or not all(getattr(args, name, None) for name in _SHAPES):
        return dict.fromkeys(HYBRID_KINDS, 1.0), 1.0, 1.0
    dense, device = replace(_trained(args, (6,)), vocab_size=vocab_size, pattern="M*-G+D"), DEVICES["a100"]
    costs = layer_costs(dense, device)
    work = {kind: layer.work_ms for kind, layer in zip(dense.kinds, costs.layers, strict=True)}
    work["E"] = layer_costs(replace(_active(dense, args), pattern="-"), device).layers[0].work_ms
    return work, _EMBEDDING * min(work.values()), costs.loss.work_ms


def has_experts(args: Any) -> list[bool]:
    """Return whether each layer has experts: every one, every n-th, or those of a list (``--moe-layer-freq``).

    Raises:
        UserError: the list has not one entry per layer.
    """
    if not _num_experts(args):
        return [False] * args.num_layers
    frequency = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [frequency > 0 and layer % frequency == 0 for layer in range(args.num_layers)]
    if len(frequency) != args.num_layers:
        raise UserError(
            f"--moe-layer-freq must have one entry per layer, got {len(frequency)} entries and {args.num_layers} "
            "layers; change the list, or give a number"
        )
    return [bool(each) for each in frequency]


def _active(dense: Model, args: Any) -> Model:
    """Return a dense model whose layers take as many operations as those with experts."""
    if not _num_experts(args):
        return dense
    shared = args.moe_shared_expert_intermediate_size or 0
    modules = tuple(MLP if module == MOE else module for module in dense.kept.modules if module != MLP)
    ffn = args.moe_router_topk * (args.moe_ffn_hidden_size or dense.ffn) + shared
    return replace(dense, ffn=ffn, kept=replace(dense.kept, modules=modules))


def _num_experts(args: Any) -> int | None:
    """Return the number of experts; megatron-core and Megatron-LM call it by different names."""
    count = getattr(args, "num_moe_experts", None) or getattr(args, "num_experts", None)
    return None if count is None else int(count)


def stated_vocab_size(args: Any) -> int | None:
    """Return the padded size of the vocabulary in ``--padded-vocab-size`` or ``--vocab-size``; None without them, since
    it is the tokenizer's.
    """
    if padded := getattr(args, "padded_vocab_size", None):
        return int(padded)
    if not (size := getattr(args, "vocab_size", None)):
        return None
    return padded_size(args, size + (args.tokenizer_type == "NullTokenizer"))


def padded_size(args: Any, size: int) -> int:
    """Return the size to which a job pads its vocabulary."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-size // multiple) * multiple)


def _recompute(args: Any) -> Recompute:
    if args.recompute_granularity == "full":
        return "full"
    # Megatron-LM turns the first flag into the second, and deletes it.
    return "selective" if getattr(args, "recompute_activations", False) or args.recompute_granularity else "none"
