"""The table of all names that the CPU platform replaces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.engine.platforms.cpu.stand_ins import (
    CPU,
    NoEvent,
    NoLinear,
    NoStream,
    get_rng_state,
    manual_seed,
    mark_sequence_parallel,
    no_jit,
    no_range,
    no_stream,
    nothing,
    send_aliases,
    set_rng_state,
    split_sizes_as_lists,
    takes_channels,
)

ABSENT = object()


@dataclass(frozen=True, slots=True)
class Point:
    """One name that the CPU platform replaces.

    Attributes:
        owner: the module that has the name, or ``module:Class``. A ``torch`` module is changed at once, a ``megatron``
            module as soon as it is imported.
        name: name of the attribute.
        make: maps the original object to its replacement.
        why: the code that needs the replacement, or the reason for it.
        optional: whether the name may be absent; ``make`` then gets ``ABSENT``.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    why: str
    optional: bool = False

    @property
    def module(self) -> str:
        return self.owner.partition(":")[0]


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _original: value


POINTS: tuple[Point, ...] = (
    Point("torch.cuda", "current_device", always(lambda: CPU), "device= of nearly all tensors that core allocates"),
    Point("torch.cuda", "synchronize", always(nothing), "stock p2p and the collectives' barriers"),
    Point("torch.cuda", "current_stream", always(no_stream), "DDP and the MoE dispatchers order streams"),
    Point("torch.cuda", "default_stream", always(no_stream), "gradient reduction with several optimizer instances"),
    Point("torch.cuda", "stream", always(lambda _stream: contextlib.nullcontext()), "with-blocks that select a stream"),
    Point("torch.cuda", "Stream", always(NoStream), "created by DDP, the MoE dispatchers and the dataset exchange"),
    Point("torch.cuda", "Event", always(NoEvent), "recorded by the MoE dispatchers"),
    Point(
        "torch.cuda.nvtx", "range_push", always(nothing), "megatron-core's layer plans name their ranges in profiles"
    ),
    Point("torch.cuda.nvtx", "range_pop", always(nothing), "ends of those ranges"),
    Point("torch.cuda.nvtx", "range", always(no_range), "ranges around weight gradients"),
    Point(
        "torch:Tensor",
        "record_stream",
        always(nothing),
        "layer plans keep memory for the streams that use it",
        optional=True,
    ),
    Point("torch.cuda", "empty_cache", always(nothing), "release of gradient buffers"),
    Point("torch.cuda", "manual_seed", always(manual_seed), "random states per tensor-parallel rank"),
    Point("torch.cuda", "get_rng_state", always(get_rng_state), "random states, saved to be restored"),
    Point("torch.cuda", "set_rng_state", always(set_rng_state), "random states, restored"),
    Point("torch.cuda.random", "get_rng_state", always(get_rng_state), "random states, under another module name"),
    Point(
        "torch.distributed",
        "all_to_all_single",
        split_sizes_as_lists,
        "the MoE dispatcher converts split sizes to lists only when it copies them from a GPU",
    ),
    Point(
        "megatron.core.jit",
        "jit_fuser",
        always(no_jit),
        "torch.compile at import takes seconds and needs a C++ compiler",
    ),
    Point(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        always(get_rng_state),
        "reads a CUDA generator directly",
    ),
    Point(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        always(set_rng_state),
        "writes a CUDA generator directly",
    ),
    Point(
        "megatron.core.pipeline_parallel.p2p_communication",
        "_p2p_ops",
        send_aliases,
        "stock schedules free a sent tensor at once, which is safe on a CUDA stream, but gloo may still read it",
    ),
    Point(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        lambda original: None if original is ABSENT else original,
        "core 0.16 reads the name in the router, but it exists only with TransformerEngine",
        optional=True,
    ),
    Point(
        "megatron.core.transformer.dot_product_attention:DotProductAttention",
        "__init__",
        takes_channels,
        "multi-latent attention passes the widths of keys and values, which only TransformerEngine's attention takes",
    ),
    Point(
        "megatron.core.transformer.multi_latent_attention",
        "TELinear",
        lambda original: original if isinstance(original, type) else NoLinear,
        "core 0.16 asks whether a linear is of this class, which is none without TransformerEngine",
        optional=True,
    ),
    Point(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        mark_sequence_parallel,
        "core rejects torch's norms under sequence parallelism, but they work if their weights are marked",
    ),
)
