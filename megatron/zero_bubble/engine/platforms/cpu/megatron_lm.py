"""CPU equivalents of the CUDA functions that Megatron-LM's scripts use in addition to megatron-core's."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.zero_bubble.engine.platforms.cpu import Point, always

# The compute capability of the only device; Megatron-LM reads it to choose kernels.
_COMPUTE_CAPABILITY = (8, 0)


class _Properties:
    name = "cpu"
    major, minor = _COMPUTE_CAPABILITY
    total_memory = 1 << 36
    multi_processor_count = 1


def _returning(value: Any) -> Callable[[Any], Any]:
    """Make a function that returns ``value``; a new one per name, because torch.compile registers them by identity."""

    def make(_original: Any) -> Any:
        return lambda *_args, **_kwargs: value

    return make


def _folders_of_helpers() -> list[str]:
    """Folders with megatron-core's compiled dataset helpers: usually an installed wheel, rarely a checkout."""
    folders = (Path(entry, "megatron", "core", "datasets") for entry in sys.path)
    return [str(folder) for folder in folders if any(folder.glob("helpers_cpp*.so"))]


def _with_compiled_helpers(package_path: Any) -> Any:
    return [*package_path, *_folders_of_helpers()]


def _unless_compiled(compile_helpers: Any) -> Any:
    return _returning(None)(compile_helpers) if _folders_of_helpers() else compile_helpers


def _with_norm_of_core(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def stand_in(*args: Any, **more: Any) -> None:
        given = signature.bind(*args, **more)
        given.apply_defaults()
        norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
        own = {name: norm for name, value in given.arguments.items() if value is torch.nn.LayerNorm}
        given.arguments.update(own)
        init(*given.args, **given.kwargs)

    return stand_in


JOB_POINTS: tuple[Point, ...] = (
    Point("torch.cuda", "is_available", _returning(True), "Megatron-LM's scripts start only with CUDA"),
    Point("torch.accelerator", "is_available", _returning(False), "optimizers check for graph capture"),
    Point("torch.cuda", "device_count", _returning(1), "Megatron-LM's choice of a device"),
    Point("torch.cuda", "set_device", _returning(None), "Megatron-LM's choice of a device"),
    Point("torch.cuda", "get_device_capability", _returning(_COMPUTE_CAPABILITY), "choice of kernels"),
    Point("torch.cuda", "get_device_properties", _returning(_Properties()), "choice of kernels"),
    Point("torch.cuda", "set_stream", _returning(None), "model building on a separate stream"),
    Point("torch.cuda", "is_current_stream_capturing", _returning(False), "CUDA graphs"),
    Point("torch.cuda", "reset_peak_memory_stats", _returning(None), "memory reports"),
    Point("torch.cuda", "memory_stats", _returning({}), "memory reports"),
    *(
        Point("torch.cuda", name, _returning(0), "memory reports")
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "device_memory_used",
        )
    ),
    Point(
        "torch.utils.data._utils.pin_memory",
        "pin_memory",
        always(lambda data, device=None: data),
        "data loaders pin batches for the copy to a GPU",
    ),
    Point("torch.cuda.nvtx", "range_push", _returning(0), "profiler ranges"),
    Point("torch.cuda.nvtx", "range_pop", _returning(0), "profiler ranges"),
    Point(
        "megatron.core.datasets",
        "__path__",
        _with_compiled_helpers,
        "a checkout has dataset helpers as source only; uses the compiled ones of an installed megatron-core",
    ),
    Point(
        "megatron.core.datasets.utils",
        "compile_helpers",
        _unless_compiled,
        "compiles the dataset helpers with make; not needed if compiled ones were found",
    ),
    Point(
        "megatron.core.tensor_parallel.inference_layers",
        "is_inference_column_parallel_linear",
        always(lambda _module: False),
        "core 0.20 calls it for multi-token prediction, but its classes exist only with TransformerEngine",
        optional=True,
    ),
    Point(
        "megatron.core.models.vision.clip_vit_model:CLIPViTModel",
        "__init__",
        _with_norm_of_core,
        "without TransformerEngine, its norm is torch's, which does not take the arguments that the model gives it",
    ),
    Point("megatron.legacy.fused_kernels", "load", _returning(None), "compiles CUDA kernels"),
)
