"""The log line with what stayed on the device."""

from __future__ import annotations

import torch

from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.offload import Offloader
from megatron.zero_bubble.engine.runtime.saved import SavedTensors
from tests.engine.runtime.test_offload import SIZE, Rank


def test_what_stayed_is_said_once() -> None:
    """Of a held tensor, its exponential, and 4 bytes; nothing is said of later iterations."""
    rank, said = Rank(SavedTensors(), select("cpu").host_memory()), list[str]()
    rank.offloader.close()
    offloader = Offloader(rank.saved, rank.host, *(select("cpu").lane() for _ in range(2)), said.append)
    rank.offloader, rank.by_op = offloader, offloader.handlers(None)
    shared, x, little = torch.randn(SIZE), torch.randn(SIZE, requires_grad=True), torch.randn(1)
    for _ in range(2):
        with offloader.iteration():
            y = rank.forward(lambda: (x * shared).exp().sum() * (little * 1.0))
            rank.fetch(rank.release(rank.evict(x, y)))
        y.backward()
    (line,) = said
    whole, held, tiny = (size / 2**20 for size in (2 * x.nbytes + 4, x.nbytes, 4))
    assert line == (
        f"offload: of {whole:.4g} MiB planned to move in the first iteration, {tiny:.3g} MiB because their storages "
        f"are below 4096 bytes, {held:.3g} MiB because something else refers to them stayed on the device"
    )
    offloader.close()
