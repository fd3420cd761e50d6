"""Transports of sharded units: collectives and on-demand communication, if replicas have equal and uneven work.

Two replicas of a pipeline of two ranks run all passes of a real GPT, without the optimizer. Every F and every B also
sleeps in proportion to the length of its microbatch, so that ranks that share a core behave as if each had a device.
Both replicas have equally many microbatches and equal work per iteration; with uneven lengths (lognormal), units of a
replica take longer than those of the other, for which collectives wait in every unit. Every round runs one iteration of
each variant, and a ratio is the median over rounds of ratios within a round.

    bash scripts/bench.sh shard_transports [--rounds 15] [--num-microbatches 16] [--unit 2] [--pass-ms 15]
        [--hidden-size 64] [--sigma 0.8]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import ranks
from bench.emulated_compute import timed
from bench.real_compute import Job
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

REPLICAS, STAGES, CHUNKS = 2, 2, 4  # with fewer chunks, all weights would be whole all the time
_FLAGS = (
    f"--pipeline-model-parallel-size {STAGES} --num-virtual-stages-per-pipeline-rank {CHUNKS} "
    "--use-distributed-optimizer"
)
WORK, TRANSPORTS = ("equal", "uneven"), ("collective", "on-demand")


def main() -> int:
    """Start the ranks, or run as one of them."""
    options = _parse()
    if not ranks.on_ranks():
        ranks.launch("shard_transports", REPLICAS * STAGES, sys.argv[1:])
        return 0
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about names that megatron-core uses
    job = _Paced(options)
    variants = {(work, transport): _variant(job, options, work, transport) for work in WORK for transport in TRANSPORTS}
    times = ranks.interleaved({" ".join(names): run for names, run in variants.items()}, options.rounds)
    if ranks.is_first():
        _report(options, times)
    ranks.leave()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-microbatches", type=int, default=16, help="per replica")
    parser.add_argument("--unit", type=int, default=2, help="microbatches per unit")
    parser.add_argument("--pass-ms", type=float, default=15.0, help="mean sleep of an F, and of a B")
    parser.add_argument("--sigma", type=float, default=0.8, help="deviation of the logarithm of uneven lengths")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/shard_transports.json"))
    options = parser.parse_args()
    model = {"seq_length": 64, "vocab_size": 256, "dtype": "float32", "num_layers": 8, "flags": _FLAGS}
    return argparse.Namespace(**vars(options), **model, device="cpu", num_ranks=REPLICAS * STAGES)


def lengths(work: str, count: int, sigma: float, replica: int) -> list[float]:
    """The lengths of a replica's microbatches; their mean is 1 on every replica."""
    drawn = random.Random(replica)
    found = [drawn.lognormvariate(0.0, sigma) if work == "uneven" else 1.0 for _ in range(count)]
    return [length * count / sum(found) for length in found]


class _Paced(Job):
    """A job whose F and B also sleep.

    Attributes:
        lengths: of the microbatches of this replica.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, REPLICAS * options.num_microbatches)
        self.lengths: Sequence[float] = ()
        self._mean_s = options.pass_ms / 1e3
        self._num_forwards = [0] * CHUNKS

    @property
    def num_microbatches(self) -> int:
        return int(self.args.global_batch_size) // REPLICAS

    def _forward_step(self, batches: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        chunk = next(index for index, own in enumerate(self.chunks) if own is model)
        seconds = self._mean_s * self.lengths[self._num_forwards[chunk] % self.num_microbatches]
        self._num_forwards[chunk] += 1
        output, loss = super()._forward_step(batches, model)
        time.sleep(seconds)
        output.register_hook(lambda _: time.sleep(seconds))
        return output, loss


def _variant(job: _Paced, options: argparse.Namespace, work: str, transport: Any) -> Callable[[], float]:
    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.patching import apply, revert

    replica = parallel_state.get_data_parallel_rank()
    of_work = lengths(work, options.num_microbatches, options.sigma, replica)
    config = ZeroBubbleConfig(
        "zero-pp",
        num_chunks=CHUNKS,
        shard_weights=True,
        unit_microbatches=options.unit,
        shard_transport=transport,
    )
    measured = timed(job.iteration, job.zero_grad)

    def run() -> float:
        job.lengths = of_work
        apply(config)
        try:
            job.zero_grad()
            job.iteration()  # plans and connects
            return measured()
        finally:
            revert()

    return run


def _report(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    settings = {name: getattr(options, name) for name in ("rounds", "num_microbatches", "unit", "pass_ms", "sigma")}
    ratios = {
        work: [a / b for a, b in zip(times[f"{work} on-demand"], times[f"{work} collective"], strict=True)]
        for work in WORK
    }
    content = {"bench": "shard_transports", "machine": ranks.machine(), **settings, "rounds_ms": times}
    ranks.write(options.output, content)
    print("work    collectives  on demand  on demand / collectives: median (quartiles)")
    for work in WORK:
        low, high = ranks.quartiles(ratios[work])
        each = [median(times[f"{work} {transport}"]) for transport in TRANSPORTS]
        print(f"{work:6}  {each[0]:8.0f} ms {each[1]:7.0f} ms  {median(ratios[work]):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    sys.exit(main())
