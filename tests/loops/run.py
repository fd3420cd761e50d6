"""Compare loops with the megatron-core on the path: ``python -m tests.loops.run RANK STORE ROWS``, on two ranks.

The rows are JSON: by name, a loop (or a kind of varied lengths) and the options of its models. Rank 0 prints what
differs, one line each, and the version and the rows that it has compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from megatron.zero_bubble import use_cpu_ranks


def main(rank: int, store: str, rows: Mapping[str, tuple[str, dict[str, Any]]]) -> None:
    """Run every row under stock and under every schedule."""
    use_cpu_ranks()
    from megatron.core import __version__

    from tests.loops.compare import SCHEDULES, differences, outcomes
    from tests.loops.varied import KINDS, rows_of_two_ranks

    joined = torch.distributed.FileStore(store, 2)
    torch.distributed.init_process_group("gloo", store=joined, rank=rank, world_size=2)
    for name, (loop, options) in rows.items():
        results: list[Any] = [None, None]
        if loop in KINDS:
            lines = rows_of_two_ranks(rank, loop)
        else:
            torch.distributed.all_gather_object(results, outcomes(rank, loop, list(SCHEDULES), options))
            lines = differences(results, list(SCHEDULES))
        if rank == 0:
            for line in lines:
                print(f"{name}: {line}", flush=True)
            print(f"compared {name} on {__version__}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
