"""Which layers are on which stage of any placement, as a job's flags or a costs file say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.zero_bubble.core.formats.layout import layout_text, stage_layers
from megatron.zero_bubble.core.formats.pattern import Pattern
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.search.cut import even


@dataclass(frozen=True)
class Division:
    """How a job divides its layers; they are never cut.

    Megatron divides by the flags below. Where these give no whole number of layers per stage, a job has to be without
    them: every stage has as many layers, or, where that is impossible too, those of ``otherwise``.

    Attributes:
        first, last: ``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``.
        embedding, loss: ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``.
        given: the layers per stage of a known layout, for every placement with as many stages.
        predictions: layers of multi-token prediction per stage of the job, which count together as one part of a model
            (``LayerCosts.predictions``); with another number of stages, they are on the last one.
        pattern: the letters of a hybrid model, which Megatron itself divides for one stage per rank only.
        otherwise: divides layers that do not divide evenly (default: ``even``, where the embedding and the output layer
            count as one layer each).
    """

    num_layers: int
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    given: tuple[int, ...] = ()
    otherwise: Callable[[Placement], tuple[int, ...]] | None = field(default=None, compare=False)
    predictions: tuple[int, ...] = ()
    pattern: Pattern | None = None

    def on(self, placement: Placement) -> tuple[int, ...]:
        """The layers of every stage, in model order.

        Raises:
            UserError: for fewer layers than stages between the first and the last.
        """
        if len(self.given) == placement.num_stages:
            return self.given
        if (found := self._by_flags(placement)) is not None:
            return found
        if self.otherwise is None or (self._is_by_megatron(placement) and self.num_layers % placement.num_stages == 0):
            return even(placement, self.num_layers)
        return self.otherwise(placement)

    def parts(self, placement: Placement) -> tuple[int, ...]:
        """The parts of a model on every stage, which are its layers, and at last its multi-token prediction.

        Raises:
            UserError: as ``on``.
        """
        found = list(self.on(placement))
        if (stage := self.predicting(placement)) is not None:
            found[stage] += 1
        return tuple(found)

    def predicting(self, placement: Placement) -> int | None:
        """The stage with multi-token prediction; None without it."""
        counts = self.predictions
        if not any(counts):
            return None
        is_known = len(counts) == placement.num_stages
        return max(stage for stage, count in enumerate(counts) if count) if is_known else placement.num_stages - 1

    def needed_layout(self, placement: Placement) -> str | None:
        """The ``--pipeline-model-parallel-layout`` that gives these layers; None if the flags or a known layout do."""
        if len(self.given) == placement.num_stages or self._by_flags(placement) is not None:
            return None
        return layout_text(self.parts(placement), sum(self.predictions))

    def _by_flags(self, placement: Placement) -> tuple[int, ...] | None:
        """The layers per stage by Megatron's flags, if these can divide them."""
        if not self._is_by_megatron(placement):
            return None
        found = stage_layers(
            placement, self.num_layers, first=self.first, last=self.last, embedding=self.embedding, loss=self.loss
        )
        return found if sum(found) == self.num_layers and min(found[1:-1], default=1) > 0 <= min(found) else None

    def _is_by_megatron(self, placement: Placement) -> bool:
        """Whether Megatron divides these layers itself, as far as it can."""
        return self.pattern is None or placement.num_stages == placement.num_ranks
