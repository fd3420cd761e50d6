"""Which layers are on which stage of any placement, as a job's flags or a costs file say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.job.layers import layout_text, stage_layers
from megatron.zero_bubble.job.layout_string import layout_layers
from megatron.zero_bubble.job.model import uneven_layout
from megatron.zero_bubble.search.cut import even


@dataclass(frozen=True)
class Division:
    """How a job divides its layers; they are never cut.

    Megatron divides by the flags below. Where these give no whole number of layers per stage, a job has to be without
    them: every stage has as many layers, or, where that is impossible too, those of ``otherwise``.

    Attributes:
        first, last: ``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``.
        embedding, loss: ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``.
        given: the layers per stage of a known layout, for every placement with as many stages.
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

    @classmethod
    def of_job(cls, args: Any, vocabulary: int | None) -> Division:
        """The division of the flags ``args``; ``vocabulary`` is its padded size, None if unknown (``uneven_layout``).

        Raises:
            UserError: when ``on`` is called: as ``uneven_layout``.
        """

        def otherwise(placement: Placement) -> tuple[int, ...]:
            return layout_layers(uneven_layout(args, placement, vocabulary))

        layout = args.pipeline_model_parallel_layout
        return cls(
            args.num_layers,
            args.num_layers_in_first_pipeline_stage,
            args.num_layers_in_last_pipeline_stage,
            bool(args.account_for_embedding_in_pipeline_split),
            bool(args.account_for_loss_in_pipeline_split),
            () if layout is None else layout_layers(layout),
            otherwise,
        )

    def on(self, placement: Placement) -> tuple[int, ...]:
        """The layers of every stage, in model order.

        Raises:
            UserError: for fewer layers than stages between the first and the last.
        """
        if len(self.given) == placement.num_stages:
            return self.given
        if (found := self._by_flags(placement)) is not None:
            return found
        if self.otherwise is None or self.num_layers % placement.num_stages == 0:
            return even(placement, self.num_layers)
        return self.otherwise(placement)

    def needed_layout(self, placement: Placement) -> str | None:
        """The ``--pipeline-model-parallel-layout`` that gives these layers; None if the flags or a known layout do."""
        if len(self.given) == placement.num_stages or self._by_flags(placement) is not None:
            return None
        return layout_text(self.on(placement))

    def _by_flags(self, placement: Placement) -> tuple[int, ...] | None:
        """The layers per stage by Megatron's flags, if these can divide them."""
        found = stage_layers(
            placement, self.num_layers, first=self.first, last=self.last, embedding=self.embedding, loss=self.loss
        )
        return found if sum(found) == self.num_layers and min(found[1:-1], default=1) > 0 <= min(found) else None
