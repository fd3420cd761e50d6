"""What loops do with their process groups between rollouts: rebuild them, with or without the world, or reload them."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


def initialize(virtual_size: int | None) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual_size,
        create_gloo_process_groups=False,
    )


def rebuild_groups(virtual_size: int | None, _store: str) -> None:
    """Destroy all groups but the world, this package's too, and make Megatron's again."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    initialize(virtual_size)


def rebuild_world(virtual_size: int | None, store: str) -> None:
    """Leave the job, and join another one with the same ranks."""
    from megatron.core import parallel_state

    rank = dist.get_rank()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    initialize(virtual_size)


def leave_and_rebuild(virtual_size: int | None, store: str) -> None:
    """As ``rebuild_world``, with the call that says so."""
    import megatron.zero_bubble

    megatron.zero_bubble.disconnect()
    rebuild_world(virtual_size, store)


def reload_groups(_virtual_size: int | None, _store: str) -> None:
    """Destroy what the wrappers wrap, and make it again."""
    Reloadable.destroy_all()
    Reloadable.make_all()


WAYS: dict[str, Callable[[int | None, str], None]] = {
    "groups rebuilt": rebuild_groups,
    "world rebuilt": rebuild_world,
    "disconnected, world rebuilt": leave_and_rebuild,
    "groups reloaded in wrappers": reload_groups,
}


class Reloadable(dist.ProcessGroup):
    """A process group that can be destroyed and made again in place."""

    every: list[tuple[Reloadable | None, Callable[[], Any]]] = []  # noqa: RUF012 (those of the process)

    def __init__(self, group: Any) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group

    def __getattribute__(self, name: str) -> Any:
        own = ("group", "rank", "size", "__class__")
        return object.__getattribute__(self, name) if name in own else getattr(self.group, name)

    @classmethod
    def destroy_all(cls) -> None:
        for wrapper, _ in cls.every:
            if wrapper is not None:
                dist.destroy_process_group(wrapper.group)
                wrapper.group = None

    @classmethod
    def make_all(cls) -> None:
        for wrapper, make in cls.every:
            made = make()  # collective, also for ranks that are not members
            if wrapper is not None:
                wrapper.group = made


_TAKE_GROUPS = (
    "get_rank", "get_world_size", "get_backend", "get_process_group_ranks", "get_group_rank", "get_global_rank",
    "all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier",
)  # fmt: skip


@contextmanager
def reloadable() -> Iterator[None]:
    """Context in which torch.distributed makes wrappers, and its functions take them."""
    originals = {name: getattr(dist, name) for name in (*_TAKE_GROUPS, "new_group")}

    def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            inner = [each.group if type(each) is Reloadable else each for each in args]
            return function(
                *inner, **{key: each.group if type(each) is Reloadable else each for key, each in kwargs.items()}
            )

        return call

    def new_group(*args: Any, **kwargs: Any) -> Any:
        make = functools.partial(originals["new_group"], *args, **kwargs)
        made = make()
        wrapper = Reloadable(made) if isinstance(made, dist.ProcessGroup) else None
        Reloadable.every.append((wrapper, make))
        return wrapper or made

    for name in _TAKE_GROUPS:
        setattr(dist, name, unwrapped(originals[name]))
    dist.new_group = new_group
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        Reloadable.every.clear()


class InUse(NamedTuple):
    """What a process has: threads, open files but for sockets, sockets, and resident memory in bytes."""

    threads: int
    files: int
    sockets: int
    memory: int


def in_use() -> InUse:
    """What this process has when all ranks have dropped what they no longer need, and nothing ends by itself."""
    gc.collect()
    dist.barrier()
    last, quiet = None, 0
    for _ in range(100):
        now = _in_use()
        quiet = quiet + 1 if now[:3] == last else 0
        if quiet == 3:
            break
        last = now[:3]
        time.sleep(0.02)
    return now


def _in_use() -> InUse:
    kinds = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself
            kinds.append(str(file.readlink()).partition(":")[0])
    sockets = kinds.count("socket")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(list(Path("/proc/self/task").iterdir()))
    return InUse(threads, len(kinds) - sockets, sockets, pages * os.sysconf("SC_PAGE_SIZE"))


def plain_steps(chunks: list[Any], data: list[Any]) -> list[Any]:
    """Log-probabilities, and a step of plain SGD on a model without wrappers, whose groups nothing else keeps."""
    from tests.loops.loops import log_probabilities, passes

    def scores(batch: Any, logits: torch.Tensor) -> Any:
        found = log_probabilities(logits, batch["tokens"])
        return -found.mean(), {"log_probs": found.detach()}

    seen = passes(chunks, data, scores, forward_only=True) + passes(chunks, data, scores)
    with torch.no_grad():
        for weight in (weight for chunk in chunks for weight in chunk.parameters()):
            weight -= 0.1 * weight.grad
            weight.grad = None
    return seen
