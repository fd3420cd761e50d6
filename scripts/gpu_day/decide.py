"""What ``zero-bubble advise`` promises for a job, and what its changes and ``auto`` reach; ranks may share a GPU.

The bench ``auto_wall`` with real passes: a run records costs, ``advise --costs`` predicts the gains, and the job as it
is, the advised change, some by name and ``auto`` are run. Of ranks that share a GPU, times mean nothing without CUDA's
Multi-Process Service.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bench import auto_wall, emulated_device, ranks
from gpu_day import gpt, mps, step

LOGGED = ("--log-interval", "1", "--eval-iters", "0")
GFLOPS = 2.0
"""Speed of the devices that CPU ranks seem to have."""


def main() -> int:
    """Measure a job, and write the predicted and the measured gains."""
    parser = step.parser(__doc__)
    step.add_sizes(parser)
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--named", nargs="*", default=[], help="schedules to run, besides the advised one")
    parser.add_argument("--planning", type=int, default=auto_wall.PLANNING, help="iterations until a run has planned")
    options = parser.parse_args()
    named = {name: f"--zero-bubble-schedule {name}" for name in options.named}
    compared = partial(
        auto_wall.compared, [*gpt.flags(options), *LOGGED], named, None, options.num_ranks, options.rounds
    )
    if options.device == "cpu":
        torch.set_num_threads(1)
        run = partial(emulated_device.run, auto_wall.SCRIPT, num_ranks=options.num_ranks, gflops=GFLOPS)
        step.write(options.output, figures(compared(run, planning=options.planning), False))
        return 0
    per_gpu = -(-options.num_ranks // torch.cuda.device_count())
    memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30 / per_gpu
    run = partial(_on_gpus, num_ranks=options.num_ranks)
    found = compared(run, ["--gpu-memory", f"{memory_gib:.1f}GiB"], options.planning)
    step.write(options.output, figures(found, mps.is_used()))
    return 0


def _on_gpus(argv: Sequence[str], num_ranks: int) -> str:
    """Run the script; return what it prints.

    Raises:
        RuntimeError: it fails; with what it printed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*command, str(auto_wall.SCRIPT), *argv],
        env=ranks.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def figures(found: Mapping[str, Any], is_shared: bool) -> dict[str, Any]:
    """The gains of the advised change, predicted and measured, that of ``auto``, and everything measured."""
    auto_wall.show("job", found)
    advised = found["advised"] or auto_wall.STOCK
    return {
        "advised": advised,
        "predicted_gain": found["predicted"].get(advised, 0.0),
        "measured_gain": found["measured"][advised],
        "auto_gain": found["measured"][auto_wall.AUTO],
        "slice_overhead": found["costs"].get("slice_overhead", 0.0),
        "mps": is_shared,
        "cores": os.cpu_count(),
        **found,
    }


if __name__ == "__main__":
    sys.exit(main())
