"""Table 4 of the Zero Bubble paper (arXiv 2401.10241): how much faster than 1F1B schedules ran, and what plans say.

The models are those of ``configs/gpt_*.yaml``: the embedding and the output layer take about as long as a layer each,
so the first and the last of the ranks have one layer less. A layer takes its part of the pass times of a rank, which
the paper measured in the same runs (Table 9).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron.zero_bubble import Schedule, build
from megatron.zero_bubble.cli.model_config import read_model
from megatron.zero_bubble.core.analysis.score import Goal
from megatron.zero_bubble.core.costs.devices import DEVICES
from megatron.zero_bubble.core.costs.estimate import layer_costs
from megatron.zero_bubble.core.costs.layers import LayerCosts
from megatron.zero_bubble.core.search.timed import timed
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import auto

CONFIGS = Path(__file__).parents[2] / "configs"
LIMITS = {"zb_1p": "1p", "zb_2p": "2p"}
INTERLEAVED, PLAIN = "one_f_one_b_interleaved", "one_f_one_b"


def _rows(table: str) -> list[dict[str, str]]:
    lines = (CONFIGS / f"published/zero_bubble_{table}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@dataclass(frozen=True)
class PublishedRun:
    """The published figures of one model and number of microbatches.

    Attributes:
        measured: samples per GPU and second, by schedule (Table 4).
        profile: times in ms and bubble rates, by column (Tables 9 and 5).
    """

    model: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int
    measured: dict[str, float]
    profile: dict[str, float]

    def __str__(self) -> str:
        return f"{self.model}-m{self.num_microbatches}"

    @property
    def config(self) -> Path:
        return CONFIGS / f"gpt_{self.model.lower()}.yaml"

    def measured_gain(self, schedule: str) -> float:
        """How much faster than 1F1B it ran."""
        return self.measured[schedule] / self.measured[PLAIN] - 1

    def implied_gain(self, schedule: str) -> float:
        """How much faster it is by the bubble rates of Table 5, which have no other overhead."""
        return (1 - self.profile[schedule]) / (1 - self.profile[PLAIN]) - 1

    def layers(self) -> LayerCosts:
        """The costs of its layers; memory is estimated from the shapes, with the scores of attention."""
        model, *_ = read_model(str(self.config), None, flash=False)
        of_rank = {f"{name}_ms": self.profile[f"t_{name[0]}_ms"] for name in ("forward", "backward", "wgrad")}
        own = layer_costs(model, DEVICES["a100"])
        each = replace(own.layers[0], **{name: ms / max(model.layers) for name, ms in of_rank.items()})
        return replace(
            own, layers=(each,) * own.num_layers, embedding=each, loss=each, comm_ms=self.profile["t_comm_ms"]
        )

    def figures(self) -> Figures:
        own = self.layers()
        blank = Figures(self.num_ranks, self.num_microbatches, lambda _: own.on(()), memory_given=True, layers=own)
        return blank.evenly()

    def schedule(self, name: str, figures: Figures) -> Schedule:
        """The schedule that the column ``name`` of the tables is of."""
        if name in LIMITS:
            return auto(figures, "linear", Goal("span", figures.limit(LIMITS[name])))
        sizes: dict[str, Any] = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches}
        if name == INTERLEAVED:
            return build("interleaved-1f1b", **sizes, num_chunks=self.num_chunks)
        return build("1f1b", **sizes)

    def span_ms(self, name: str, figures: Figures) -> float:
        schedule = self.schedule(name, figures)
        return timed(schedule, *figures.on(schedule.placement)).span_ms


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All rows of Table 4."""
    runs = []
    for row, profile in zip(_rows("table4"), _rows("table5"), strict=True):
        name, p, m = (row.pop(key) for key in ("model", "p", "m"))
        assert (name, p, m) == tuple(profile.pop(key) for key in ("model", "p", "m"))
        chunks = int(row.pop("num_chunks"))
        numbers = ({key: float(value) for key, value in each.items()} for each in (row, profile))
        runs.append(PublishedRun(name, int(p), int(m), chunks, *numbers))
    return tuple(runs)
