"""Train a small model with experts, by stock Megatron with and without its own overlap, and by plans with pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.zero_bubble
from megatron.zero_bubble import PassCosts, PassMemory, Placement, build, simulate
from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.costs.experts import ExpertParts
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir.passes import BW, B, F, W
from megatron.zero_bubble.core.search.pairs import pairs_auto
from tests.helpers.weights import draw_by_name

SEQUENCE, VOCABULARY = 8, 32
PLAIN, COMBINED = "stock", "stock, combined"
PLAIN_V = "zb-v"
"""A schedule without pairs, in which W of the experts runs beneath the dispatch of its own backward."""
Result = tuple[list[str], dict[str, str]]
"""The losses on the last rank; digests of weights by their names in the whole model, and of every step the norms of
their gradients."""


def references(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The runs of stock whose bits are expected.

    With megatron-core 0.15 and shared experts, stock's own two schedules differ in the rounding of the gradient that
    experts and shared experts give to their common input: only the plain one adds that of the shared experts last.
    """
    import megatron.core

    if megatron.core.__version__.startswith("0.15.") and "moe_shared_expert_intermediate_size" in options:
        return (COMBINED,)
    return PLAIN, COMBINED


def plan_files(folder: Path, pipeline: int, num_microbatches: int) -> list[str]:
    """Files of all schedules with pairs."""
    files = []
    for name, num_chunks in (("interleaved-1f1b", 2), ("dualpipe-v", None)):
        sizes = {"num_ranks": pipeline, "num_microbatches": num_microbatches}
        schedule = build(name, **sizes, num_chunks=num_chunks, pairs=True)
        assert schedule.pairs, "a schedule with pairs"
        file = folder / f"{name}.json"
        file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1, 1, 1))))
        files.append(str(file))
    return files


def searched_plan_file(folder: Path, pipeline: int, num_microbatches: int) -> str:
    """The file of a searched order on a loop, in which some weight gradients are apart from their backwards."""
    on = Placement.interleaved(pipeline, 2)
    parts = ExpertParts(1, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 2.0, 2.0)
    costs = PassCosts.uniform(on, 18.0, 18.0, 8.0).with_experts((parts,) * on.num_stages)
    figures, goal = (costs, PassMemory.uniform(on)), Goal(limit=4.0 * pipeline)
    schedule = pairs_auto(lambda _: figures, [on], num_microbatches, goal, effort=0.02)
    assert schedule.pairs and {p.kind for p in schedule.passes()} == {F, B, W, BW}
    file = folder / "searched.json"
    file.write_text(plan_to_json(simulate(schedule, costs)))
    return str(file)


def differences(names: Sequence[str], results: Sequence[Sequence[Result]]) -> list[str]:
    """What differs between the runs with ``names``, whose results ``train_with_experts`` gave per rank, and the first.

    One line for the losses of a run, and one per weight and per norm of a gradient.
    """
    found: list[str] = []
    stock: dict[str, str] = {}
    for run, name in enumerate(names):
        losses = [of_rank[run][0] for of_rank in results if of_rank[run][0]]
        figures = {key: digest for of_rank in results for key, digest in of_rank[run][1].items()}
        if not run:
            stock, of_stock = figures, losses
        if losses != of_stock:
            found.append(f"{name}: losses {losses} in place of {of_stock}")
        found += [f"{name}: {key} differs" for key in stock if figures.get(key) != stock[key]]
    return found


def batches() -> Iterator[torch.Tensor]:
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(5 + parallel_state.get_data_parallel_rank())
    while True:
        yield torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)


def forward_step(data: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    text = next(data).cuda()
    positions = torch.arange(SEQUENCE, device=text.device).expand(2, -1)
    mask = torch.ones(2, SEQUENCE, device=text.device)
    call = model.build_schedule_plan if return_schedule_plan else model
    made = call(text[:, :-1], positions, None, labels=text[:, 1:], loss_mask=mask)
    return made, partial(_loss, mask)


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, str]]:
    mean = (output.float() * mask).sum() / mask.sum()
    return mean, {"loss": float(mean.item()).hex()}


def train_with_experts(
    rank: int, names: Sequence[str], num_microbatches: int, pipeline: int, options: Mapping[str, Any], steps: int
) -> list[Result]:
    """Train with each of ``names``: ``PLAIN``, ``COMBINED``, ``PLAIN_V``, or the name of a plan file with pairs."""
    from megatron.core.transformer.moe import moe_utils

    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16 asks for it without TransformerEngine, too
            patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        return [train(name, num_microbatches, pipeline, dict(options), steps) for name in names]


def train(name: str, num_microbatches: int, pipeline: int, options: dict[str, Any], steps: int = 1) -> Result:
    from megatron.core import parallel_state, tensor_parallel

    sizes: dict[str, Any] = {
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    }
    parallel_state.destroy_model_parallel()
    stock = name in (PLAIN, COMBINED)
    chosen: dict[str, Any] = {"fuse_wgrad": False, "overlap_experts": name == PLAIN_V}
    own = None if stock else megatron.zero_bubble.ZeroBubbleConfig(name, **chosen)
    ends = (
        {} if own is None else {"get_embedding_ranks": megatron.zero_bubble.ModelStages(own, pipeline).embedding_ranks}
    )
    parallel_state.initialize_model_parallel(**sizes, **ends, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    if own is not None:
        megatron.zero_bubble.apply(own)
    try:
        chunks = _chunks(sizes, options, overlap=name != PLAIN, stock=stock)
        losses, norms = _steps(chunks, num_microbatches, steps)
        return losses, norms | {n: _digest(p) for chunk in chunks for n, p in _named(chunk)}
    finally:
        if own is not None:
            megatron.zero_bubble.revert()


def _chunks(sizes: Mapping[str, Any], options: dict[str, Any], overlap: bool, stock: bool) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    dtype = options.pop("dtype", torch.bfloat16)
    config = TransformerConfig(
        **sizes,
        num_layers=options.pop("num_layers", 4),
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=32,
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        moe_router_topk=options.pop("moe_router_topk", 2),
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        overlap_moe_expert_parallel_comm=overlap,
        overlap_p2p_comm=True,  # without it, gloo takes an activation for a gradient between two ranks
        batch_p2p_comm=False,
        **options,
    )
    config.finalize_model_grads_func = finalize_model_grads

    def make(pre_process: bool, post_process: bool, vp_stage: int | None = None, **more: Any) -> Any:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
        if config.mtp_num_layers:
            more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, False, vp_stage=vp_stage)
        chunk = GPTModel(
            config,
            spec,
            VOCABULARY,
            SEQUENCE,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **more,
        )
        draw_by_name(_named(chunk))
        return chunk.cuda()

    if stock:
        chunks = []
        for vp_stage in range(2):
            parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
            chunks.append(make(first, last, vp_stage))
    else:
        chunks = megatron.zero_bubble.build_stages(make)
    of_ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    if dtype is not torch.float32:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return [DistributedDataParallel(config, of_ddp, chunk) for chunk in chunks]


def _steps(chunks: list[Any], num_microbatches: int, steps: int) -> Result:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    data, losses = [batches() for _ in chunks], []
    norms: dict[str, str] = {}
    for step in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        losses += get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=2,
        )
        with torch.no_grad():
            parameters: Iterator[tuple[str, Any]] = (named for chunk in chunks for named in _named(chunk))
            for name, parameter in parameters:
                norms[f"norm of {name} in step {step}"] = float(parameter.main_grad.norm()).hex()
                parameter -= 0.5 * parameter.main_grad
    return losses, norms


def _named(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a chunk by their names in the whole model."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    from megatron.core import parallel_state

    expert_rank = parallel_state.get_expert_model_parallel_rank()
    for name, parameter in chunk.named_parameters():
        of_layer = name.split("decoder.layers.")[-1].split(".", 1)
        if of_layer[0].isdecimal():
            name = f"{chunk.decoder.layers[int(of_layer[0])].layer_number}.{of_layer[1]}"
        yield (f"{name} of {expert_rank}" if "experts" in name else name), parameter


def _digest(parameter: torch.nn.Parameter) -> str:
    return hashlib.sha1(parameter.detach().float().cpu().numpy().tobytes()).hexdigest()
