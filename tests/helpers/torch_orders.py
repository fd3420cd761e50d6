"""The schedules of torch.distributed.pipelining, as it writes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def csv_of_torch(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> str:
    """The passes of all ranks of a schedule with several stages per rank; one process makes all of them."""
    from torch.distributed.pipelining import schedules

    def stage(chunk: int) -> Any:
        sizes = {"group_size": num_ranks, "num_stages": num_ranks * num_chunks, "stage_index": chunk * num_ranks}
        return SimpleNamespace(**sizes, group=None, group_rank=0, submod=torch.nn.Identity(), is_last=False)

    made = getattr(schedules, name)([stage(chunk) for chunk in range(num_chunks)], num_microbatches)
    rows = (made.pipeline_order[rank] for rank in range(num_ranks))
    return "".join(",".join("" if each is None else str(each) for each in row) + "\n" for row in rows)
