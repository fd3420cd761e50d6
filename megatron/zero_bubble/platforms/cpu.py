"""The CPU platform: lets an unmodified megatron-core train on gloo ranks with no GPU.

megatron-core names CUDA throughout: ``device=torch.cuda.current_device()``, ``device="cuda"``, ``.cuda()``, CUDA
random states, the string ``"torch.cuda.FloatTensor"``. :func:`install` gives each of those names its CPU meaning
and :func:`revert` puts the originals back. What is replaced, and why, is the table :data:`POINTS` and the class
:class:`CudaMeansCpu`; nothing else is touched. ``torch.cuda.is_available()`` keeps telling the truth.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import importlib
import logging
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.zero_bubble.platforms.beside import RightAway
from megatron.zero_bubble.platforms.import_hook import PostImportHook

CPU = torch.device("cpu")
_ABSENT = object()


class CpuPlatform:
    """CPU cores over gloo. Marks are readings of the process clock."""

    name = "cpu"
    backend = "gloo"

    def setup(self, local_rank: int) -> torch.device:
        install()
        _keep_freed_memory()
        return CPU

    def device(self, local_rank: int) -> torch.device:
        return CPU

    def current_device(self) -> torch.device:
        return CPU

    def device_count(self) -> int:
        return 1

    def describe(self) -> str:
        return f"cpu ({torch.get_num_threads()} thread(s) a rank; no GPU is used)"

    def synchronize(self) -> None:
        """Nothing to wait for: CPU operators have finished when they return."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1000.0

    def reset_peak_memory(self) -> None:
        """The operating system keeps one peak for the life of the process; it cannot be started anew."""

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def beside(self) -> RightAway:
        return RightAway()


def _keep_freed_memory() -> None:
    """Have the C library keep what is freed, as torch's allocator does on a GPU. By default glibc gives every large
    tensor back to the system: each pass then pays for its pages anew, up to a tenth of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


class CudaMeansCpu(TorchFunctionMode):
    """Reads ``cuda`` as the CPU in every torch call of this thread, wherever the word stands.

    ``device="cuda"`` (loss scale, gradient norms, token counts), ``.to("cuda")`` and ``.cuda()`` give CPU tensors;
    ``tensor.type()`` says ``torch.cuda.FloatTensor``, the strings by which megatron-core's optimizers tell
    parameter precisions apart.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
        elif func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(CPU if _names_cuda(argument) else argument for argument in args)
        return func(*args, **(kwargs or {}))


def _names_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


class NoStream:
    """A stream on a device that runs everything in the order it is called."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def wait_stream(self, _stream: object) -> None:
        pass

    def wait_event(self, _event: object) -> None:
        pass

    def record_event(self, event: NoEvent | None = None) -> NoEvent:
        return event or NoEvent()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class NoEvent:
    """An event on such a device: always reached."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def record(self, _stream: object = None) -> None:
        pass

    def wait(self, _stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def nothing(*_args: object, **_kwargs: object) -> None:
    """Stands in for what a CPU has no need of."""


def _no_stream(*_args: object, **_kwargs: object) -> NoStream:
    return NoStream()


def _get_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def _no_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _split_sizes_as_lists(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    def stand_in(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return all_to_all_single(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), *args, **kwargs
        )

    return stand_in


def _send_aliases(p2p_ops: Callable[..., Any]) -> Callable[..., Any]:
    def alias(tensor: torch.Tensor | None) -> torch.Tensor | None:
        # A tensor of its own over the same storage: gloo's Work keeps it, and with it the storage, until sent.
        return None if tensor is None else tensor.detach()

    def stand_in(*, tensor_send_prev: Any, tensor_send_next: Any, **kwargs: Any) -> Any:
        return p2p_ops(tensor_send_prev=alias(tensor_send_prev), tensor_send_next=alias(tensor_send_next), **kwargs)

    return stand_in


def _mark_sequence_parallel(original: staticmethod[..., Any]) -> staticmethod[..., Any]:
    new = original.__func__

    def stand_in(cls: type, config: Any, hidden_size: int, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return new(cls, config, hidden_size, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = new(cls, without, hidden_size, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(stand_in)


@dataclass(frozen=True, slots=True)
class Point:
    """One name that means something else on the CPU platform.

    Attributes:
        owner: the module that holds the name, or ``module:Class``. A ``torch`` owner is changed at once; one of
            ``megatron`` as soon as it is imported.
        name: the attribute.
        make: from the original to what stands in for it.
        why: what needs it.
        optional: the name may be absent; ``make`` is then given ``_ABSENT``.
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
    Point("torch.cuda", "current_stream", always(_no_stream), "DDP and the MoE dispatchers order streams"),
    Point("torch.cuda", "default_stream", always(_no_stream), "gradient reduction with several optimizer instances"),
    Point("torch.cuda", "stream", always(lambda _stream: contextlib.nullcontext()), "with-blocks around the same"),
    Point("torch.cuda", "Stream", always(NoStream), "created by DDP, the MoE dispatchers and the dataset exchange"),
    Point("torch.cuda", "Event", always(NoEvent), "recorded by the MoE dispatchers"),
    Point("torch.cuda", "empty_cache", always(nothing), "gradient buffers being given back"),
    Point("torch.cuda", "manual_seed", always(_manual_seed), "random states per tensor-parallel rank"),
    Point("torch.cuda", "get_rng_state", always(_get_rng_state), "the same states, forked and put back"),
    Point("torch.cuda", "set_rng_state", always(_set_rng_state), "the same"),
    Point("torch.cuda.random", "get_rng_state", always(_get_rng_state), "the same, under its other name"),
    Point(
        "torch.distributed",
        "all_to_all_single",
        _split_sizes_as_lists,
        "the MoE dispatcher converts split sizes to lists only when it copies them off a GPU",
    ),
    Point("megatron.core.jit", "jit_fuser", always(_no_jit), "torch.compile at import: seconds, and a C++ compiler"),
    Point(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        always(_get_rng_state),
        "reads a CUDA generator directly",
    ),
    Point(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        always(_set_rng_state),
        "writes a CUDA generator directly",
    ),
    Point(
        "megatron.core.pipeline_parallel.p2p_communication",
        "_p2p_ops",
        _send_aliases,
        "stock schedules empty a sent tensor at once: safe on a CUDA stream, wrong data when gloo still reads it",
    ),
    Point(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        lambda original: None if original is _ABSENT else original,
        "core 0.16 reads the name in the router although only TransformerEngine binds it",
        optional=True,
    ),
    Point(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        _mark_sequence_parallel,
        "torch's norms work under sequence parallelism once their weights are marked; core refuses them",
    ),
)


def _not_about_shared_generator(record: logging.LogRecord) -> bool:
    """Drops core's warning that the CPU generator moved while the device's was in use: here they are one."""
    return "CPU RNG state changed" not in record.getMessage()


class _Installation:
    """What :func:`install` changed, in order, so that :func:`revert` can undo it backwards."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._points = tuple(points)
        self._undo: list[tuple[object, str, object]] = []
        self._mode = CudaMeansCpu()
        self._hook = PostImportHook({point.module for point in self._points}, self._apply_to)
        self._logger = logging.getLogger("megatron.core.tensor_parallel.random")

    def install(self) -> None:
        try:
            for name in dict.fromkeys(point.module for point in self._points):
                if name in sys.modules or not name.startswith("megatron."):
                    self._apply_to(importlib.import_module(name))
        except RuntimeError:
            self._put_back()
            raise
        sys.meta_path.insert(0, self._hook)
        self._logger.addFilter(_not_about_shared_generator)
        self._mode.__enter__()

    def revert(self) -> None:
        if torch.overrides._get_current_function_mode() is not self._mode:
            raise RuntimeError(
                "the CPU platform is reverted in the reverse order of installation, by the thread that installed it; "
                "leave the torch function modes entered since then first"
            )
        self._mode.__exit__(None, None, None)
        self._logger.removeFilter(_not_about_shared_generator)
        sys.meta_path.remove(self._hook)
        self._put_back()

    def _put_back(self) -> None:
        for owner, name, original in reversed(self._undo):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _apply_to(self, module: ModuleType) -> None:
        for point in self._points:
            if point.module != module.__name__:
                continue
            owner = getattr(module, point.owner.partition(":")[2]) if ":" in point.owner else module
            # Read past the descriptor protocol, so that what is put back is the very object that was there.
            original = vars(owner).get(point.name, _ABSENT)
            if original is _ABSENT and not point.optional:
                raise RuntimeError(
                    f"the CPU platform needs {point.owner}.{point.name} ({point.why}), and this version has no such "
                    "name; use a megatron-core that is known (see README)"
                )
            setattr(owner, point.name, point.make(original))
            self._undo.append((owner, point.name, original))


_installed: list[_Installation] = []


def installed() -> bool:
    """Whether the CPU platform is in force in this process."""
    return bool(_installed)


def install(more: Iterable[Point] = ()) -> None:
    """Put the CPU platform in force; a second call does nothing. Call it before megatron.core is imported.

    Args:
        more: points beyond :data:`POINTS`, for jobs that use more of CUDA than megatron-core does.
    """
    if not _installed:
        installation = _Installation((*POINTS, *more))
        installation.install()
        _installed.append(installation)


def revert() -> None:
    """Put every name back, by identity. Functions that megatron-core decorated meanwhile stay uncompiled."""
    while _installed:
        _installed[-1].revert()
        _installed.pop()
