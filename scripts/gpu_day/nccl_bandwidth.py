"""Bandwidth of messages between two ranks with N CTAs of NCCL, alone and next to matrix products, and what these lose.

A CTA of a transfer occupies a multiprocessor, so that more of them move a message faster and slow the passes next to
it. On the CPU the messages go over gloo, where the number has no effect.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gpu_day import mps, step
from megatron.zero_bubble.engine.platforms import Platform, select
from pretrain.process import Launch

NUM_MESSAGES, NUM_PRODUCTS = 60, 20
"""In one measurement; the messages take longer than the products next to them."""


def main() -> int:
    """Measure every number of CTAs; return 1 if a message did not arrive."""
    parser = step.parser(__doc__)
    parser.add_argument("--megabytes", type=float, required=True, help="size of a message")
    parser.add_argument("--size", type=int, required=True, help="rows and columns of the square products")
    parser.add_argument("--ctas", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    platform = select(options.device)
    device = platform.setup(Launch.from_environment().local_rank)
    os.environ.pop("NCCL_MAX_CTAS", None)  # it would win over the numbers of the groups
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    message = torch.zeros(int(options.megabytes * 1e6 / 2), dtype=torch.bfloat16, device=device)
    # All ranks make and connect the communicators in one order, before anything else runs.
    sends = {number: _sender(_group(number, options.device), message) for number in options.ctas}
    arrived = [_arrives(send, message) for send in sends.values()]
    product = _product(options.size, device)
    rows = [{"ctas": number, **_measure(send, product, platform, options)} for number, send in sends.items()]
    step.write(options.output, {**figures(rows), "mps": mps.is_used(), "rows": rows})
    dist.destroy_process_group()
    return int(not all(arrived))


def figures(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The fastest number of CTAs, the first with nine tenths of its bandwidth, and what products lose next to these."""
    best = max(rows, key=lambda row: row["gb_per_s"])
    enough = next(row for row in rows if row["gb_per_s"] >= 0.9 * best["gb_per_s"])
    return {
        "best_ctas": best["ctas"],
        "best_gb_per_s": best["gb_per_s"],
        "enough_ctas": enough["ctas"],
        "enough_gb_per_s": enough["gb_per_s"],
        "slowdown": enough["slowdown"],
    }


def _group(max_ctas: int, device: str) -> dist.ProcessGroup:
    if device == "cpu":
        return dist.new_group(backend="gloo")
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.max_ctas = 1, max_ctas
    return dist.new_group(backend="nccl", pg_options=options)


def _sender(group: dist.ProcessGroup, message: torch.Tensor) -> Callable[[], dist.Work]:
    """Start a transfer from rank 0 to rank 1."""
    if dist.get_rank():
        return lambda: _work(dist.irecv(message, 0, group=group))
    return lambda: _work(dist.isend(message, 1, group=group))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "both ranks are in the group"
    return work


def _arrives(send: Callable[[], dist.Work], message: torch.Tensor) -> bool:
    """Connect, and see whether all of a message arrives."""
    message.fill_(0.0 if dist.get_rank() else 1.0)
    send().wait()
    return bool((message == 1).all())


def _product(size: int, device: torch.device) -> Callable[[], object]:
    a, b, out = (torch.ones(size, size, dtype=torch.bfloat16, device=device) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def _measure(
    send: Callable[[], dist.Work], product: Callable[[], object], platform: Platform, options: Any
) -> dict[str, float]:
    """Medians over the rounds; both ranks multiply, and both begin at the same time."""
    num_bytes = options.megabytes * 1e6

    def messages_s() -> float:
        began = time.perf_counter()
        for work in [send() for _ in range(NUM_MESSAGES)]:
            work.wait()
        platform.synchronize()
        return time.perf_counter() - began

    def products_ms(is_next_to_messages: bool) -> float:
        works = [send() for _ in range(NUM_MESSAGES)] if is_next_to_messages else []
        start = platform.mark()
        for _ in range(NUM_PRODUCTS):
            product()
        ms = platform.elapsed_ms(start, platform.mark())
        for work in works:
            work.wait()
        platform.synchronize()
        return ms

    def rounds(measure: Callable[[], float]) -> float:
        found = []
        for number in range(1 + options.rounds):
            dist.barrier()
            platform.synchronize()
            value = measure()
            if number:
                found.append(value)
        return median(found)

    alone_ms, next_ms = rounds(lambda: products_ms(False)), rounds(lambda: products_ms(True))
    return {
        "gb_per_s": num_bytes * NUM_MESSAGES / rounds(messages_s) / 1e9,
        "products_ms": alone_ms,
        "slowdown": next_ms / alone_ms - 1,
    }


if __name__ == "__main__":
    sys.exit(main())
