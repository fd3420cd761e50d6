"""Two lines add a schedule to a foreign training loop on megatron-core, two more one on a V; the results stay equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import megatron.zero_bubble
from megatron.zero_bubble.core.errors import UserError
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.weights import draw_by_name

LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4}
LATENT |= {"kv_channels": 4, "rope_type": "rope", "normalization": "RMSNorm", "multi_latent_attention": True}
COMPILED = ("eager", "aot_eager")
SEQUENCE, VOCABULARY, MICROBATCHES, STEPS = 8, 32, 5, 3


def samples() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)


def build_model(kind: str = "plain") -> Any:
    """The model of a loop: ``plain``, with ``latent`` attention, or with layers that a backend of torch compiles."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    config = (MLATransformerConfig if kind == "latent" else TransformerConfig)(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **(LATENT if kind == "latent" else {}),
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(multi_latent_attention=kind == "latent"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope" if kind == "latent" else "learned_absolute",
    )
    if kind in COMPILED:
        for index, layer in enumerate(model.decoder.layers):
            model.decoder.layers[index] = torch.compile(layer, backend=kind)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    text = next(data)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    losses = model(text[:, :-1], positions, None, labels=text[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.mean().item().hex()})


def train(kind: str = "plain") -> tuple[list[Any], list[str]]:
    """Take three steps of plain SGD; return the losses (on the last rank) and the exact sum of each weight."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    model = build_model(kind)
    return steps([model]), [parameter.detach().double().sum().item().hex() for parameter in model.parameters()]


def steps(model: Sequence[Any]) -> list[Any]:
    """Take three steps of plain SGD on the chunks of a model; return the losses."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    data, losses = [samples() for _ in model], []
    for _ in range(STEPS):
        for chunk in model:
            chunk.zero_grad_buffer()
        losses += get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=list(model),
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=2,
        )
        with torch.no_grad():
            for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
                parameter -= 0.5 * parameter.main_grad
    return losses


def both(rank: int, schedule: str, kind: str) -> tuple[Any, Any]:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    stock = train(kind)
    megatron.zero_bubble.apply(megatron.zero_bubble.ZeroBubbleConfig(schedule=schedule, fuse_wgrad=False))
    try:
        assert len(megatron.zero_bubble.report()) == 6
        exact = train(kind)
    finally:
        megatron.zero_bubble.revert()
    megatron.zero_bubble.apply(schedule)
    try:
        fused = train(kind)
    finally:
        megatron.zero_bubble.revert()
    assert exact == stock
    return stock, fused


def compiled(rank: int, backend: str) -> tuple[list[int], int]:
    """Train with compiled layers; return how many weight gradients waited in each W, and the number of graphs."""
    from torch._dynamo.utils import counters

    from megatron.zero_bubble.engine.wgrad.store import WgradStore

    waiting, run = [], WgradStore.run

    def noting(store: Any, *arguments: Any) -> None:
        waiting.append(len(store))
        run(store, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "0")  # the pool of ranks has set it
        patch.setattr(WgradStore, "run", noting)
        both(rank, "zb-h1", backend)
    return waiting, counters["stats"]["unique_graphs"]


@pytest.mark.full
@pytest.mark.parametrize("backend", COMPILED)
def test_compiled_layers_keep_the_results(ranks: RankPool, backend: str) -> None:
    plain, own = (ranks.run(2, compiled, kind) for kind in ("plain", backend))
    for (waiting, _), (of_compiled, graphs) in zip(plain, own, strict=True):
        assert of_compiled == waiting != [] and graphs > 10


APPLIED = [("zb-h1", "plain"), ("zb-h2", "plain"), ("zb-h1", "latent")]


@pytest.mark.parametrize(("schedule", "kind"), some(APPLIED, *APPLIED[::2]))
def test_apply_in_a_foreign_loop_keeps_the_results(ranks: RankPool, schedule: str, kind: str) -> None:
    first, last = ranks.run(2, both, schedule, kind)
    assert first[0][0] == first[1][0] == []  # only the last rank has losses
    stock, fused = ([float.fromhex(loss["loss"]) for loss in losses] for losses, _ in last)
    assert len(stock) == STEPS * MICROBATCHES
    assert stock[-1] < stock[0]
    assert fused == pytest.approx(stock, rel=1e-5)


def build_chunks(virtual_size: int | None) -> list[Any]:
    """The model chunks of this rank; every layer has the same weights wherever it is."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual_size,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    config.finalize_model_grads_func = finalize_model_grads

    def make_chunk(**stage: Any) -> Any:
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            SEQUENCE,
            share_embeddings_and_output_weights=True,
            **stage,
        )
        draw_by_name(named(chunk))
        return chunk

    chunks = megatron.zero_bubble.build_stages(make_chunk)
    return [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]


def named(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a chunk by their names in the whole model; both weights of a tied embedding have one name."""
    for name, parameter in chunk.named_parameters():
        of_layer = name.split("decoder.layers.")[-1].split(".", 1)
        if of_layer[0].isdecimal():
            yield f"{chunk.decoder.layers[int(of_layer[0])].layer_number}.{of_layer[1]}", parameter
        else:
            yield name.replace("output_layer", "embedding.word_embeddings"), parameter


def train_chunks(virtual_size: int | None) -> tuple[list[Any], dict[str, str]]:
    """The losses, and the exact sum of each weight by its name in the whole model."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    model = build_chunks(virtual_size)
    losses = steps(model)
    weights = (weight for chunk in model for weight in named(chunk.module))
    return losses, {name: weight.detach().double().sum().item().hex() for name, weight in weights}


def on_a_v(rank: int, groups_first: bool) -> tuple[Any, Any]:
    """Stock 1F1B, and ``zb-v``; the loop makes its process groups before or after it chooses the schedule."""
    from megatron.core import parallel_state

    of_stock: dict[str, Any] = {"pipeline_model_parallel_size": 2, "create_gloo_process_groups": False}
    parallel_state.initialize_model_parallel(**of_stock)
    stock = train_chunks(None)
    parallel_state.destroy_model_parallel()
    of_v, ends = {**of_stock, "virtual_pipeline_model_parallel_size": 2}, {}
    if groups_first:
        ends = {"get_embedding_ranks": megatron.zero_bubble.ModelStages("zb-v", 2).embedding_ranks}
        parallel_state.initialize_model_parallel(**of_v, **ends)
    megatron.zero_bubble.apply(megatron.zero_bubble.ZeroBubbleConfig(schedule="zb-v", fuse_wgrad=False))
    try:
        if not groups_first:
            parallel_state.initialize_model_parallel(**of_v)
        return stock, train_chunks(2)
    finally:
        megatron.zero_bubble.revert()


@pytest.mark.parametrize("groups_first", [False, True])
def test_build_stages_puts_a_foreign_loop_on_a_v(ranks: RankPool, groups_first: bool) -> None:
    first, last = ranks.run(2, on_a_v, groups_first)
    losses = [losses for (losses, _), _ in (first, last)], [losses for _, (losses, _) in (first, last)]
    assert losses[0] == losses[1]
    assert len(losses[0][1]) == STEPS * MICROBATCHES
    stock, ours = ({**first[which][1], **last[which][1]} for which in (0, 1))
    assert len(stock) == 4 * 12 + 4
    assert ours == stock


def wrong_sizes(rank: int) -> list[str]:
    """The refusals of groups and configurations that do not fit a V of 2 ranks."""
    from megatron.core import parallel_state, tensor_parallel

    def refusal(virtual_size: int | None, of_config: int | None) -> str:
        of_groups: dict[str, Any] = {"pipeline_model_parallel_size": 2, "create_gloo_process_groups": False}
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**of_groups, virtual_pipeline_model_parallel_size=virtual_size)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        with pytest.raises(UserError) as caught:
            build_chunks(of_config)
        return str(caught.value)

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    megatron.zero_bubble.apply("zb-v")
    try:
        with pytest.raises(UserError) as wrong_ends:
            build_chunks(2)
        return [str(wrong_ends.value), refusal(None, 2), refusal(2, None)]
    finally:
        megatron.zero_bubble.revert()


def test_build_stages_refuses_other_groups_and_models(ranks: RankPool) -> None:
    for rank, (ends, groups, config) in enumerate(ranks.run(2, wrong_sizes)):
        got = [0, 1]
        assert ends.startswith("the stages with the embedding are on ranks [0], which must form the embedding group; ")
        assert f"; got {got}; call apply() before initialize_model_parallel, or" in ends, rank
        start = "the schedule has 2 stages per rank, so {} needs virtual_pipeline_model_parallel_size=2; got None; give"
        assert groups.startswith(start.format("initialize_model_parallel"))
        assert config.startswith(start.format("the TransformerConfig of a chunk"))
