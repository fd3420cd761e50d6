"""The names that mean something else on the CPU platform, one table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.platforms.cpu.platform import CPU
from megatron.zero_bubble.platforms.cpu.stand_ins import (
    NoEvent,
    NoStream,
    get_rng_state,
    manual_seed,
    mark_sequence_parallel,
    no_jit,
    no_stream,
    nothing,
    send_aliases,
    set_rng_state,
    split_sizes_as_lists,
)

ABSENT = object()


@dataclass(frozen=True, slots=True)
class Point:
    """One name that means something else on the CPU platform.

    Attributes:
        owner: the module that holds the name, or ``module:Class``. A ``torch`` owner is changed at once; one of
            ``megatron`` as soon as it is imported.
        name: the attribute.
        make: from the original to what stands in for it.
        why: what needs it.
        optional: the name may be absent; ``make`` is then given ``ABSENT``.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    why: str
    optional: bool = False

    @property
    def module(self) -> str:
        """The module to wait for."""
        return self.owner.partition(":")[0]


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _original: value


POINTS: tuple[Point, ...] = (
    Point("torch.cuda", "current_device", always(lambda: CPU), "device= of nearly every tensor core allocates"),
    Point("torch.cuda", "synchronize", always(nothing), "stock p2p and the collectives' barriers"),
    Point("torch.cuda", "current_stream", always(no_stream), "DDP and the MoE dispatchers order streams"),
    Point("torch.cuda", "default_stream", always(no_stream), "gradient reduction with several optimizer instances"),
    Point("torch.cuda", "stream", always(lambda _stream: contextlib.nullcontext()), "with-blocks around the same"),
    Point("torch.cuda", "Stream", always(NoStream), "created by DDP, the MoE dispatchers and the dataset exchange"),
    Point("torch.cuda", "Event", always(NoEvent), "recorded by the MoE dispatchers"),
    Point("torch.cuda", "empty_cache", always(nothing), "gradient buffers being given back"),
    Point("torch.cuda", "manual_seed", always(manual_seed), "random states per tensor-parallel rank"),
    Point("torch.cuda", "get_rng_state", always(get_rng_state), "the same states, forked and put back"),
    Point("torch.cuda", "set_rng_state", always(set_rng_state), "the same"),
    Point("torch.cuda.random", "get_rng_state", always(get_rng_state), "the same, under its other name"),
    Point(
        "torch.distributed",
        "all_to_all_single",
        split_sizes_as_lists,
        "the MoE dispatcher converts split sizes to lists only when it copies them off a GPU",
    ),
    Point("megatron.core.jit", "jit_fuser", always(no_jit), "torch.compile at import: seconds, and a C++ compiler"),
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
        "stock schedules empty a sent tensor at once: safe on a CUDA stream, wrong data when gloo still reads it",
    ),
    Point(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        lambda original: None if original is ABSENT else original,
        "core 0.16 reads the name in the router although only TransformerEngine binds it",
        optional=True,
    ),
    Point(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        mark_sequence_parallel,
        "torch's norms work under sequence parallelism once their weights are marked; core refuses them",
    ),
)
