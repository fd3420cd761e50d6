"""Compare loops with the megatron-core on the path: ``python -m tests.loops.run RANK RANKS STORE ROWS``.

The rows are JSON: by name, a loop (or a kind of varied lengths, or CUDA graphs of stages or of layers) and its options.
Loops are for two ranks, varied lengths for any number. Rank 0 prints what differs, one line each, and the version and
the rows that it has compared.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron.zero_bubble import use_cpu_ranks


@contextmanager
def joined(rank: int, num_ranks: int, store: str) -> Iterator[None]:
    """Context with the process group of all ranks, at whose end the threads of all groups end."""
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    yield
    gc.collect()
    dist.destroy_process_group()


def main(rank: int, num_ranks: int, store: str, rows: Mapping[str, tuple[str, dict[str, Any]]]) -> None:
    """Run every row under stock and under every schedule."""
    use_cpu_ranks()
    from megatron.core import __version__

    from tests.helpers import layer_graphs, stage_graphs
    from tests.loops import compare, varied

    for number, (name, (loop, options)) in enumerate(rows.items()):
        lines = []
        if loop in (stage_graphs.KIND, layer_graphs.KIND):
            graphs = stage_graphs if loop == stage_graphs.KIND else layer_graphs
            with joined(rank, num_ranks, f"{store}-{number}"):
                lines = graphs.compared(rank, **options)
        elif loop in varied.KINDS:
            for schedule in varied.SCHEDULES:
                with joined(rank, num_ranks, f"{store}-{number}-{schedule}"):
                    lines += varied.compared(rank, loop, schedule)
        else:
            schedules, results = list(compare.SCHEDULES), [None] * num_ranks
            with joined(rank, num_ranks, f"{store}-{number}"):
                dist.all_gather_object(results, compare.outcomes(rank, loop, schedules, options))
                lines = compare.differences(results, schedules)
        if rank == 0:
            for line in lines:
                print(f"{name}: {line}", flush=True)
            print(f"compared {name} on {__version__}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
