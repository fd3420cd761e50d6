"""Iterations of a model with experts whose all-to-all is exposed, or hidden beneath another microbatch's passes.

The times are those of the trace that DeepSeek published of DeepSeek-V3 on H800 (64 GPUs per expert group), from a costs
file; all figures are simulated. The columns scale the all-to-all: as profiled (with the waits of its notification),
its kernels only, half of these, and a quarter. Every row has the length of an iteration in ms, in brackets compared
with Megatron's combined interleaved schedule with two stages per rank, and the peak of a rank in microbatches.

    bash scripts/bench.sh experts [--num-ranks 16 --num-microbatches 64 --layers 4]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.zero_bubble import Schedule, build, simulate
from megatron.zero_bubble.core.costs.experts import exposed_share
from megatron.zero_bubble.core.formats.costs import CostsFile
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.schedules.alone import fuse_alone, split_alone

COSTS = Path(__file__).parents[2] / "configs/published/deepseek_v3_h800.json"
_LAYERS = 4
"""The layers per rank of the costs file."""
_KERNELS = {("forward", "dispatch_ms"): 4.35, ("forward", "combine_ms"): 6.18}
_KERNELS |= {("backward", "combine_ms"): 3.41, ("backward", "dispatch_ms"): 6.18}
"""Milliseconds per layer of the kernels of the all-to-alls, without the waits of their notification."""
SCALES = (None, 1.0, 0.5, 0.25)
"""The columns: as profiled, or this factor of the kernels."""
STOCK = "stock combined interleaved v=2"


def costs_file(scale: float | None, layers: int) -> CostsFile:
    """The costs of ranks with this number of layers, with all-to-alls as profiled or scaled from their kernels."""
    content: dict[str, Any] = json.loads(COSTS.read_text(encoding="utf-8"))
    experts = content["experts"]
    for (pass_, part), ms in _KERNELS.items():
        scaled = experts[pass_][part] if scale is None else ms * scale * _LAYERS
        content[f"{pass_}_ms"] += scaled - experts[pass_][part]
        experts[pass_][part] = scaled
    more = layers / _LAYERS
    for name in ("forward_ms", "backward_ms", "wgrad_ms"):
        content[name] *= more
    for pass_ in ("forward", "backward", "wgrad"):
        experts[pass_] = {part: ms * more for part, ms in experts[pass_].items()}
    experts["layers"] = layers
    return CostsFile.parse(json.dumps(content))


@dataclass(frozen=True)
class Row:
    """A schedule, or several of which the shortest counts."""

    title: str
    schedules: tuple[Callable[..., Schedule], ...]

    def length(self, costs: CostsFile, num_ranks: int, num_microbatches: int) -> tuple[float, float]:
        """The makespan in ms and the peak in microbatches of the shortest."""
        found = []
        for make in self.schedules:
            schedule = make(num_ranks=num_ranks, num_microbatches=num_microbatches)
            timeline = simulate(schedule, costs.on(schedule.placement)[0])
            found.append((timeline.makespan_ms, max(timeline.peak_activation)))
        return min(found)


def _hidden(name: str, **sizes: int) -> Schedule:
    return replace(fuse_alone(build(name, **sizes)), overlap_experts=True)


def _pairs(name: str, change: Callable[[Schedule], Schedule] = lambda schedule: schedule, **sizes: Any) -> Schedule:
    return change(build(name, pairs=True, **sizes))


ROWS = (
    Row("stock 1F1B, no overlap", (partial(build, "1f1b"),)),
    Row("zb-h1, no overlap", (partial(build, "zb-h1"),)),
    Row("zb-v, no overlap", (partial(build, "zb-v"),)),
    Row("zb-v, W beneath its own B's all-to-all", (partial(_hidden, "zb-v"),)),
    Row(STOCK, (partial(_pairs, "interleaved-1f1b", num_chunks=2),)),
    Row("stock combined interleaved v=4", (partial(_pairs, "interleaved-1f1b", num_chunks=4),)),
    Row("  the same, backwards alone split", (partial(_pairs, "interleaved-1f1b", split_alone, num_chunks=4),)),
    Row("1f1b, pairs, warm-up 2(p-r)-1", (partial(_pairs, "1f1b", split_alone),)),
    Row("dualpipe-v, pairs", (partial(_pairs, "dualpipe-v", fuse_alone), partial(_pairs, "dualpipe-v", split_alone))),
)


def table(num_ranks: int, num_microbatches: int, layers: int) -> Iterator[tuple[str, list[float], float]]:
    """Yield the title of every row, its lengths in ms by column, and its peak in microbatches."""
    files = [costs_file(scale, layers) for scale in SCALES]
    for row in ROWS:
        found = [row.length(file, num_ranks, num_microbatches) for file in files]
        yield row.title, [ms for ms, _ in found], found[0][1]


def shares(layers: int = _LAYERS) -> list[float]:
    """The share of a microbatch that exposed all-to-alls take, by column."""
    on = Placement.linear(1)
    return [exposed_share(costs_file(scale, layers).on(on)[0].experts) for scale in SCALES]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=16, help="pipeline ranks (default: 16)")
    parser.add_argument("--num-microbatches", type=int, default=64, help="microbatches per iteration (default: 64)")
    parser.add_argument("--layers", type=int, default=4, help="layers per rank, a multiple of 4 (default: 4)")
    options = parser.parse_args()
    rows = list(table(options.num_ranks, options.num_microbatches, options.layers))
    stock = next(lengths for title, lengths, _ in rows if title == STOCK)
    size = f"p={options.num_ranks}, m={options.num_microbatches}, {options.layers} layers per rank"
    head = f"{size}; all-to-all of a microbatch:"
    print(f"{head:52}" + "".join(f"{share:>16.0%}" for share in shares()) + f"{'peak':>7}")
    for title, lengths, peak in rows:
        cells = (f"{ms:9.0f} ({ms / of - 1:+4.0%})" for ms, of in zip(lengths, stock, strict=True))
        print(f"{title:52}" + "".join(f"{cell:>16}" for cell in cells) + f"{peak:7.1f}")


if __name__ == "__main__":
    main()
