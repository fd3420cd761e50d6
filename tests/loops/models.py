"""The models of the loops: small GPTs whose layers have the same weights wherever they are."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

LAYERS, HIDDEN, SEQUENCE, VOCABULARY, MICROBATCH = 4, 16, 8, 32, 2


def build(
    virtual_size: int | None,
    salt: str,
    edit: Callable[[Any], None] = lambda _chunk: None,
    is_trained: bool = True,
    overlaps: bool = False,
    packs: bool = False,
    by_framework: bool = False,
    **options: Any,
) -> list[Any]:
    """The chunks of a model on this rank; ``edit`` changes each before it is wrapped, ``salt`` its weights.

    With ``packs``, documents of different lengths are packed, and the job says so to Megatron. With ``by_framework``,
    they are built without ``build_stages``.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    import megatron.zero_bubble

    kind = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    config = kind(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        **on_pipeline(2, virtual_size),
        **{**({"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"} if packs else {}), **options},
    )
    config.finalize_model_grads_func = finalize_model_grads

    of_layers = {
        "num_experts": config.num_moe_experts,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "normalization": config.normalization,
    }

    def make_chunk(**stage: Any) -> Any:
        spec = get_gpt_layer_local_spec(**of_layers)
        if packs:
            spec.submodules.self_attention.submodules.core_attention = PackedAttention
        chunk = GPTModel(config, spec, VOCABULARY, 2 * SEQUENCE, **stage)
        edit(chunk)
        for name, parameter in named(chunk):
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{salt} {name}".encode()))
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return chunk

    chunks = (built_by_framework if by_framework else megatron.zero_bubble.build_stages)(make_chunk)
    if not is_trained:
        return chunks
    of_ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlaps, use_distributed_optimizer=overlaps)
    wrapped = [DistributedDataParallel(config, of_ddp, chunk) for chunk in chunks]
    if overlaps:
        no_syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_syncs if virtual_size else no_syncs[0]
    return wrapped


def built_by_framework(make_chunk: Callable[..., Any]) -> list[Any]:
    """The chunks of a framework that asks Megatron for the ends of each, as mbridge and mcore-bridge do."""
    from megatron.core import parallel_state

    size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if size is None:
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        return [make_chunk(pre_process=first, post_process=last)]
    chunks = []
    for number in range(size):
        place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": number}
        first, last = parallel_state.is_pipeline_first_stage(**place), parallel_state.is_pipeline_last_stage(**place)
        chunks.append(make_chunk(pre_process=first, post_process=last, vp_stage=number))
    return chunks


def destroy_groups() -> None:
    """Destroy Megatron's process groups, as at the start of a job."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state._EMBEDDING_GLOBAL_RANKS = None  # which 0.13 leaves, and then takes for the ranks of the next group


def on_pipeline(num_ranks: int, virtual_size: int | None) -> dict[str, Any]:
    """What all models have in their configurations: a pipeline, float32 and no dropout."""
    return {
        "pipeline_model_parallel_size": num_ranks,
        "virtual_pipeline_model_parallel_size": virtual_size,
        "overlap_p2p_comm": virtual_size is not None,  # stock needs it with 2 ranks
        "batch_p2p_comm": virtual_size is None,
        "pipeline_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


class PackedAttention(torch.nn.Module):
    """Causal attention within each document of a packed sequence."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        """Returns (tokens, hidden) from (tokens, heads, size)."""
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        documents = zip(*(each.transpose(0, 1).split(sizes, 1) for each in (query, key, value)), strict=True)
        attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return torch.cat([attend(*each) for each in documents], 1).transpose(0, 1).flatten(1)


class ShardAttention(torch.nn.Module):
    """Causal attention within the tokens of one rank, in the place of one over all parts of a sequence."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        """Returns (tokens, sequences, hidden) from (tokens, sequences, heads, size)."""
        by_head = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def packed_params(sizes: Sequence[int]) -> Any:
    """What Megatron's layers must know of the documents of a packed sequence."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *sizes]).cumsum(0).int()
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=max(sizes), max_seqlen_kv=max(sizes))


def named(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a chunk by their names in the whole model."""
    for name, parameter in chunk.named_parameters():
        before, _, after = name.partition("decoder.layers.")
        if not after:
            yield name, parameter
            continue
        number, _, rest = after.partition(".")
        yield f"{before}{chunk.decoder.layers[int(number)].layer_number}.{rest}", parameter


def digests(chunks: Sequence[Any]) -> dict[str, str]:
    """The exact weights of a model on this rank, by their names in the whole model."""
    weights = (weight for chunk in chunks for weight in named(getattr(chunk, "module", chunk)))
    return {name: hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()[:16] for name, weight in weights}


class Head(torch.nn.Linear):
    """A head with one output in the place of the output layer, for values and rewards."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, 1, bias=False)

    def forward(self, hidden: torch.Tensor, **_: Any) -> Any:
        """Megatron's output layers return a bias too."""
        return super().forward(hidden), None


def with_head(chunk: Any) -> None:
    """Give the last stage a head with one output."""
    if chunk.post_process:
        chunk.output_layer = Head()


class Adapter(torch.nn.Module):
    """A linear of Megatron with a low-rank addition, which can be switched off."""

    is_on = True

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        sizes = base.weight.shape
        self.down = torch.nn.Linear(sizes[1], 2, bias=False)
        self.up = torch.nn.Linear(2, sizes[0], bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        """The linear's output and bias."""
        y, bias = self.base(x)
        return (y + self.up(self.down(x)) if Adapter.is_on else y), bias


def with_adapters(chunk: Any) -> None:
    """Freeze a chunk, and add trainable adapters to its attention, and to its MLP unless it has experts."""
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        layer.self_attention.linear_qkv = Adapter(layer.self_attention.linear_qkv)
        if hasattr(layer.mlp, "linear_fc2"):
            layer.mlp.linear_fc2 = Adapter(layer.mlp.linear_fc2)


def frozen_up_to(last: int) -> Callable[[Any], None]:
    """Freeze the embedding and the first layers, so that whole stages have nothing to train."""

    def freeze(chunk: Any) -> None:
        for layer in chunk.decoder.layers:
            if layer.layer_number <= last:
                layer.requires_grad_(False)
        if chunk.pre_process:
            chunk.embedding.requires_grad_(False)

    return freeze


def optimizer_of(chunks: Sequence[Any], **options: Any) -> Any:
    """Megatron's own optimizer of a model; without clipping, since other placements sum the norm in another order."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sharded = chunks[0].ddp_config.use_distributed_optimizer
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=sharded, weight_decay=0.0, **options
    )
    return get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)


class Released:
    """Context in which the memory of a model's parameters and gradients is freed, as frameworks do for a rollout."""

    def __init__(self, chunks: Sequence[Any], gradients_only: bool = False) -> None:
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._gradients = [buffer.grad_data for buffer in buffers]
        self._weights = [] if gradients_only else [weight.data for chunk in chunks for weight in chunk.parameters()]
        self._kept: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._sizes = [each.untyped_storage().size() for each in self._gradients]
        self._weights = list({each.untyped_storage().data_ptr(): each for each in self._weights}.values())
        for gradient in self._gradients:
            gradient.untyped_storage().resize_(0)
        for weight in self._weights:
            self._kept.append(torch.UntypedStorage(weight.untyped_storage().size()).copy_(weight.untyped_storage()))
            weight.untyped_storage().resize_(0)

    def __exit__(self, *_: object) -> None:
        for gradient, size in zip(self._gradients, self._sizes, strict=True):
            gradient.untyped_storage().resize_(size)
            gradient.zero_()
        for weight, kept in zip(self._weights, self._kept, strict=True):
            weight.untyped_storage().resize_(kept.size())
            weight.untyped_storage().copy_(kept)
