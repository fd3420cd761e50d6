"""The costs file: times and memory of passes as JSON.

The terms of costs (``core/costs/terms.py``) are keys of the file, and ``cost_keys.py`` lists all other keys;
docs/costs-json.md prints both tables. Figures of passes are single numbers or lists; costs per layer are in ``layers``
and ``parts`` instead (``layers.py``), or are derived from lists per stage with ``layers_per_stage``. With these, layers
are never divided; without, a list for fewer stages than a placement has is divided evenly, which is too short if the
stages differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.zero_bubble.core.costs.layers import LayerCosts, LayerFigures, of_stages
from megatron.zero_bubble.core.costs.memory import PassMemory
from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.costs.sequence_tokens import SequenceTokens
from megatron.zero_bubble.core.costs.terms import BY_KEY, MEMORY, OF, SHARED, TIMES, Figure
from megatron.zero_bubble.core.costs.terms import per_stage as converted
from megatron.zero_bubble.core.costs.units import refuse_huge, refuse_no_time
from megatron.zero_bubble.core.errors import UserError, nearest
from megatron.zero_bubble.core.formats.cost_figures import (
    LINKS,
    costs_content,
    figures_from,
    figures_on,
    with_ranks,
    written,
)
from megatron.zero_bubble.core.formats.cost_keys import COST_KEYS
from megatron.zero_bubble.core.formats.experts import ExpertFigures, experts_content, experts_from
from megatron.zero_bubble.core.formats.facts import KEY_FACTS, Facts, facts_from
from megatron.zero_bubble.core.formats.files import is_text, json_object, list_of, naming, read_file, read_key
from megatron.zero_bubble.core.formats.layers import ENDS, LAYERS, PARTS, ends_content, ends_from, layers_from
from megatron.zero_bubble.core.formats.pattern import FLAG as PATTERN
from megatron.zero_bubble.core.formats.pattern import Pattern
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.sizes import check_layers
from megatron.zero_bubble.core.search.cut import even

_LAYOUT = "layers_per_stage"
_KEYS = (*BY_KEY, *(key.name for key in COST_KEYS))
_BESIDE_LAYERS = frozenset((*SHARED, *(term.key for term in OF["tokens"]), LINKS, LAYERS, PARTS, KEY_FACTS))
"""The keys of a file with costs per layer: all others are figures of stages or ranks."""
_WHAT = "costs file"
_ALIKE = 0.01
"""Relative difference of figures up to which stages count as alike."""


def costs_to_json(
    costs: PassCosts,
    memory: PassMemory | None = None,
    tokens: SequenceTokens | None = None,
    layers_per_stage: Sequence[int | str] = (),
    facts: Facts | None = None,
) -> str:
    """Write a costs file with one figure per stage; ``CostsFile.parse`` reads it back unchanged.

    Figures that need not be there are left out where they are all 0, and the layers per stage if they are unknown. With
    these, the parts ``embedding`` and ``loss`` are derived by ``of_stages``.

    Args:
        layers_per_stage: their number, or the letters of those of a hybrid model.
    """
    content = costs_content(costs, memory) | written("tokens", tokens) | experts_content(costs)
    if layers_per_stage:
        content[_LAYOUT] = list(layers_per_stage)
        layout, letters = _counted(layers_per_stage)
        content |= ends_content(of_stages(costs, memory, layout, kinds="".join(letters)))
    if facts:
        content[KEY_FACTS] = dict(facts)
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items()) + "\n}\n"


@dataclass(frozen=True)
class CostsFile:
    """The checked content of a costs file; ``on(placement)`` returns its figures per stage of a placement.

    Attributes:
        figures: those of the terms of costs, by key.
        links: as in ``PassCosts``.
        path: path of the file, for error messages.
        layers: costs per layer, if the file has them instead of figures of passes.
        layers_per_stage: the layout of the lists per stage; empty if unknown.
        letters: those of the layers of a hybrid model, on each stage of this layout, or all in one text with
            ``layers``; empty for other models.
        ends: the embedding and the output layer with the loss, as far as known besides the lists.
        experts: the all-to-alls of experts and their computation; None if the file has none.
        facts: those of the job that was measured; empty for files written by hand.
    """

    figures: Mapping[str, Figure]
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    path: str | Path | None = None
    layers: LayerCosts | None = None
    layers_per_stage: tuple[int, ...] = ()
    letters: tuple[str, ...] = ()
    ends: Mapping[str, LayerFigures] = field(default_factory=dict)
    experts: ExpertFigures | None = None
    facts: Facts = field(default_factory=dict)

    @property
    def tokens(self) -> SequenceTokens | None:
        """Tokens of a sequence, and the fewest of a slice; None if the file does not have them."""
        own = figures_on(self.figures, "tokens", Placement.linear(1))
        return SequenceTokens(**own) if own else None

    @property
    def pattern(self) -> Pattern | None:
        """The layers of a hybrid model; None for other models."""
        return Pattern(PATTERN, "|".join(self.letters), self.letters, ()) if self.letters else None

    @property
    def embedding_is_known(self) -> bool:
        """Whether the time of the embedding is not just assumed to be 0, as that of a file of two stages is."""
        given = self.ends.get("embedding")
        return len(self.layers_per_stage) != 2 or (given is not None and given.work_ms > 0)

    def halves(self, placement: Placement) -> bool:
        """Whether ``on`` divides stages that differ, without knowing their layers: schedules then seem too short."""
        if self.layers is not None or self.layers_per_stage:
            return False
        lists = (figures for name in (*TIMES, *MEMORY) if isinstance(figures := self.figures.get(name), tuple))
        # Only a multiple of the stages of the placement can be merged.
        return any(len(each) % placement.num_stages and max(each) > min(each) * (1 + _ALIKE) for each in lists)

    @property
    def num_stages(self) -> int | None:
        """The number of stages for which the times are given one by one; None if they are those of whole ranks."""
        times = (self.figures.get(name) for name in TIMES)
        return next((len(figure) for figure in times if isinstance(figure, tuple)), None)

    @property
    def is_of_ranks(self) -> bool:
        """Whether all figures are single numbers, so that they suit any number of stages."""
        return self.experts is None and not any(isinstance(figure, tuple) for figure in self.figures.values())

    @classmethod
    def parse(cls, text: str) -> CostsFile:
        """Read the text of a costs file.

        Raises:
            UserError: when a key is invalid; the message states its required form.
        """
        content = json_object(text)
        if unknown := sorted(content.keys() - set(_KEYS)):
            if (meant := nearest(unknown[0], sorted(_KEYS))) is not None:
                raise UserError(
                    f"keys must be those of costs files; got {unknown[0]!r}; did you mean {meant}? rename or remove it"
                )
            raise UserError(f"allowed keys are {', '.join(sorted(_KEYS))}; got {unknown[0]!r}; remove or rename it")
        is_per_layer = bool(content.keys() & {LAYERS, PARTS})
        for key in _KEYS:
            if is_per_layer and key in content and key not in _BESIDE_LAYERS:
                raise UserError(
                    f"a costs file has either figures per layer ({LAYERS} and {PARTS}) or figures of passes; got "
                    f"{key} as well as {LAYERS} or {PARTS}; remove one of them"
                )
            if not is_per_layer and key in TIMES and key not in content:
                raise UserError(f"it must have the key {key}, {BY_KEY[key].form}; it is missing")
        figures, links, facts = figures_from(content, *OF), _links(content.get(LINKS, [])), facts_from(content)
        if is_per_layer:
            shared = {key: figures[key] for key in SHARED if key in figures}
            layers, letters = layers_from(content, {**shared, LINKS: links}), content[LAYERS]
            of_hybrid = (letters,) if isinstance(letters, str) else ()
            return cls(figures, links, layers=layers, letters=of_hybrid, facts=facts)
        refuse_no_time(*(figures[name] for name in TIMES))
        (layout, letters), ends, experts = _layout(content), ends_from(content), experts_from(content)
        return cls(figures, links, layers_per_stage=layout, letters=letters, ends=ends, experts=experts, facts=facts)

    def check_links(self, num_ranks: int) -> None:
        """Check that the links are those of a pipeline with this number of ranks.

        Raises:
            UserError: for another rank.
        """
        for link, ms in self.links.items():
            if max(link) >= num_ranks:
                raise UserError(
                    f"links must be between ranks 0 to {num_ranks - 1} of the pipeline; got {[*link, ms]}; remove it, "
                    "or use the costs with as many ranks"
                )

    def layer_costs(self) -> LayerCosts | None:
        """Return the costs per layer, given or derived from the figures of stages; None if the file has neither.

        Raises:
            UserError: when ``layers_per_stage`` does not suit the lists.
        """
        if self.layers is not None or not self.layers_per_stage:
            return self.layers
        of_stages_only = {key: figure for key, figure in self.figures.items() if not BY_KEY[key].of_ranks}
        with self._naming():
            on = replace(self, figures=of_stages_only, path=None).on(Placement.linear(len(self.layers_per_stage)))
            embedding, loss = (self.ends.get(end) for end in ENDS)
            return of_stages(*on, self.layers_per_stage, embedding, loss, "".join(self.letters))

    def on(self, placement: Placement) -> tuple[PassCosts, PassMemory | None]:
        """Return the costs of the stages of ``placement``, and their memory if the file has any.

        Raises:
            UserError: for lists with another number of stages, a link that is not a time, an activation of 0, or fewer
                layers than stages.
        """
        with self._naming():
            self.check_links(placement.num_ranks)
            if self.layers is not None:
                return self.layers.on(even(placement, self.layers.num_layers))
            if self.layers_per_stage and placement.num_stages != len(self.layers_per_stage):
                return self.on_layout(placement, even(placement, sum(self.layers_per_stage)))
            own = PassCosts(**figures_on(self.figures, "passes", placement), links=self.links)
            costs = with_ranks(own, self.figures, placement)
            if "attention" in self.figures and "backward_attention" not in self.figures:
                costs = costs.with_attention(costs.forward_attention)
            if self.experts is not None:
                parts = self.experts.of(costs, lambda name, figure: converted(name, figure, placement))
                costs = replace(costs, experts=parts, contention=self.experts.contention)
            memory = figures_on(self.figures, "memory", placement)
            return costs, PassMemory(**memory) if memory else None

    def on_layout(self, placement: Placement, layout: Sequence[int]) -> tuple[PassCosts, PassMemory | None]:
        """Return what ``on`` does for a number of layers per stage, if the file has costs per layer.

        Raises:
            UserError: as ``on``, or for other numbers of layers.
        """
        layers = self.layer_costs()
        assert layers is not None, "the file has no costs per layer"
        costs, memory = layers.on(layout)
        costs = with_ranks(costs, self.figures, placement)
        if self.layers is None and "activation" not in self.figures:
            return costs, None
        of_ranks = {key: figure for key, figure in self.figures.items() if BY_KEY[key].of_ranks}
        return costs, replace(memory, **figures_on(of_ranks, "memory", placement))

    def _naming(self) -> AbstractContextManager[None]:
        return nullcontext() if self.path is None else naming(_WHAT, self.path)


def read_costs_file(path: str | Path) -> CostsFile:
    """Read a costs file with ``CostsFile.parse``; errors, including those of ``on``, name the file."""
    return replace(read_file(path, _WHAT, CostsFile.parse), path=path)


def _layout(content: dict[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The number of layers of every stage, and their letters in a hybrid model; both empty if unknown."""
    if _LAYOUT not in content:
        return (), ()
    form = (
        "a list with the number of layers of every stage, each 0 or above, as in [3, 4, 3], or with the letters of a "
        'hybrid model, as in ["M-M*", "M-ME"]'
    )
    listed = read_key(content, _LAYOUT, form, _is_layout)
    for name in TIMES:
        if not isinstance(content[name], list) or len(content[name]) != len(listed):
            raise UserError(
                f"with layers_per_stage, {name} must be a list with one number for each of its {len(listed)} stages; "
                f"got {content[name]!r:.40}"
            )
    layout, letters = _counted(listed)
    check_layers(_LAYOUT, sum(layout))
    return layout, letters


def _is_layout(value: object) -> bool:
    return list_of(lambda count: type(count) is int and count >= 0)(value) or list_of(is_text)(value)


def _counted(listed: Sequence[int | str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The number of layers of every stage, and their letters if ``listed`` has these."""
    letters = tuple(each for each in listed if isinstance(each, str))
    return tuple(len(each) if isinstance(each, str) else each for each in listed), letters


def _links(rows: object) -> dict[tuple[int, int], float]:
    links = {}
    for row in rows if isinstance(rows, list) else [rows]:
        if not (isinstance(row, list) and len(row) == 3 and type(row[0]) is int and type(row[1]) is int):
            raise UserError(f"links must be a list of [source rank, destination rank, ms]; got {row!r}")
        refuse_huge(links=row[2])
        if (link := (row[0], row[1])) in links or row[0] == row[1] or min(link) < 0:
            raise UserError(
                f"links must have every pair of two ranks, 0 or above, at most once; got {row!r}; remove or correct it"
            )
        links[link] = row[2]
    return links
