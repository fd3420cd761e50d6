"""Compare all loops with the megatron-core on the path: ``python -m tests.loops.run RANK STORE``, on two ranks.

Rank 0 prints what differs, one line each, and the version and the loops that it has compared.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from megatron.zero_bubble import use_cpu_ranks


def main(rank: int, store: str) -> None:
    """Run every loop under stock and under every schedule."""
    use_cpu_ranks()
    from megatron.core import __version__

    from tests.loops.compare import SCHEDULES, differences, outcomes
    from tests.loops.loops import LOOPS

    joined = torch.distributed.FileStore(store, 2)
    torch.distributed.init_process_group("gloo", store=joined, rank=rank, world_size=2)
    for loop in LOOPS:
        results: list[Any] = [None, None]
        torch.distributed.all_gather_object(results, outcomes(rank, loop, list(SCHEDULES)))
        if rank == 0:
            for line in differences(results, list(SCHEDULES)):
                print(f"{loop}: {line}", flush=True)
            print(f"compared {loop} on {__version__}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
