"""``scripts/pretrain_gpt.py`` under the condition that the environment variable ``CONDITION`` names.

bound    the process group is bound to the device of its rank, so that torch creates communicators eagerly
nan      a gradient of the last rank is NaN in the third iteration
hang     the last rank stops in a backward of the third iteration
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from pretrain import model
from pretrain.run import main

MICROBATCHES = 8
THIRD_ITERATION = range(2 * MICROBATCHES, 3 * MICROBATCHES)


def bind() -> None:
    """Bind the default process group to the device of the rank."""
    join = dist.init_process_group

    def join_bound(*args: Any, **options: Any) -> None:
        join(*args, **options, device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        # The first collective creates the communicator of the default group.
        dist.all_reduce(torch.zeros(1, device="cuda"))

    dist.init_process_group = join_bound


def spoil(change: Any) -> None:
    """Pass a gradient of the last rank to ``change`` in the fourth backward of the third iteration."""
    build = model.build_model

    def build_spoiled(*args: Any, **options: Any) -> Any:
        chunks = build(*args, **options)
        names = dict(chunks[0].named_parameters())
        norm = next(weight for name, weight in names.items() if name.endswith("layernorm.weight"))
        backwards = iter(range(10**6))
        if dist.get_rank() == dist.get_world_size() - 1:
            norm.register_hook(lambda grad: change(grad) if next(backwards) == THIRD_ITERATION[3] else grad)
        return chunks

    model.build_model = build_spoiled


def never_return(_grad: torch.Tensor) -> torch.Tensor:
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    condition = os.environ["CONDITION"]
    if condition == "bound":
        bind()
    else:
        spoil({"nan": lambda grad: grad * float("nan"), "hang": never_return}[condition])
    sys.exit(main(sys.argv[1:]))
