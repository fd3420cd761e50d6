"""The costs file.

A costs file is JSON with the keys ``forward_ms``, ``backward_ms``, ``wgrad_ms`` and, optionally, ``comm_ms``, ``links``
(a list of ``[source rank, destination rank, ms]``), ``message_ms``, and both ``activation`` and ``wgrad`` (memory).
Each figure of a pass is either one number, for a rank's whole share of the model, or a list with one number per stage.
A list for another number of chunks per rank is converted, as ``PassCosts.fit`` does. Only sequence slices need
``attention`` and ``backward_attention`` (the shares of F and B that attention takes), ``history`` (the memory of keys
and values), ``sequence_length`` and ``least_slice_tokens`` (tokens of a sequence, and the fewest of a slice), and
``slice_overhead`` (the share of a pass that every slice takes, however short it is). Only vocabulary parallelism needs
the keys of ``core/formats/vocabulary.py``, only offloading ``host_ms`` (the time to copy what F saves to host memory,
or back), and only sharded units ``gather_ms`` and ``reduce_ms`` (the times to gather the weights, and to reduce the
gradients). Models with experts have their all-to-alls in ``experts`` (``core/formats/experts.py``). A recorded file has
the ``facts`` of its job (``core/formats/facts.py``).

Costs per layer, from which layouts are made, are in ``layers`` and ``parts`` (see ``core/formats/layers.py``) instead
of figures of passes, or are derived from lists per stage with ``layers_per_stage``. With them, no layer is ever
divided; without, a list for fewer stages than a placement has is divided evenly, which is too short if the stages
differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import mul
from pathlib import Path
from typing import Any

from megatron.zero_bubble.core.costs.layers import LayerCosts, Part, of_stages
from megatron.zero_bubble.core.costs.memory import KEY_HISTORY, LOGITS, MEMORY, PassMemory
from megatron.zero_bubble.core.costs.passes import (
    ATTENTION,
    COMM,
    KEY_HOST,
    MESSAGE,
    OVERHEAD,
    SHARDS,
    TIMES,
    PassCosts,
)
from megatron.zero_bubble.core.costs.slice_tokens import LEAST_SLICE_TOKENS, SEQUENCE_LENGTH, TOKENS, SliceTokens
from megatron.zero_bubble.core.costs.units import (
    checked_figure,
    checked_figures,
    checked_share,
    recut,
    refuse_huge,
    refuse_no_time,
    spread,
)
from megatron.zero_bubble.core.errors import UserError, nearest
from megatron.zero_bubble.core.formats.experts import EXPERTS, ExpertFigures, experts_content, experts_from
from megatron.zero_bubble.core.formats.facts import KEY_FACTS, Facts, facts_from
from megatron.zero_bubble.core.formats.files import json_object, naming, read_file, read_key
from megatron.zero_bubble.core.formats.layers import ENDS, LAYERS, PARTS, ends_content, ends_from, layers_from
from megatron.zero_bubble.core.formats.vocabulary import KEYS, VocabularyFigures, vocabulary_content, vocabulary_from
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.sizes import check_layers
from megatron.zero_bubble.core.search.cut import even

Figure = float | tuple[float, ...]
"""A figure as written in the file: one number, for a rank's whole share, or one number per stage."""

_LAYOUT = "layers_per_stage"
_SHARES = {"attention": "forward_attention", "backward_attention": "backward_attention"}
"""The keys of shares, and the attributes of ``PassCosts`` that they give; ``ATTENTION`` has them in the same order."""
_OF_STAGES = (*TIMES, *MEMORY, KEY_HISTORY, KEY_HOST, *SHARDS, *_SHARES, _LAYOUT, *ENDS, *KEYS, EXPERTS)
_KEYS = frozenset((*_OF_STAGES, LAYERS, PARTS, *TOKENS, COMM, "links", MESSAGE, OVERHEAD, KEY_FACTS))
_WHAT = "costs file"
_ALIKE = 0.01
"""Relative difference of figures up to which stages count as alike."""


def costs_to_json(
    costs: PassCosts,
    memory: PassMemory | None = None,
    tokens: SliceTokens | None = None,
    layers_per_stage: Sequence[int] = (),
    facts: Facts | None = None,
) -> str:
    """Write a costs file with one figure per stage; ``CostsFile.parse`` reads it back unchanged.

    Shares of attention, the history and ``message_ms`` are left out where they are all 0, and the layers per stage if
    they are unknown. With these, the parts ``embedding`` and ``loss`` are derived by ``of_stages``.
    """
    content: dict[str, Any] = {name: list(getattr(costs, name)) for name in TIMES}
    if any(any(getattr(costs, name)) for name in ATTENTION):
        content |= {key: list(getattr(costs, name)) for key, name in _SHARES.items()}
    content |= {name: list(getattr(costs, name)) for name in (KEY_HOST, *SHARDS) if any(getattr(costs, name))}
    content[COMM] = costs.comm_ms
    content["links"] = [[source, destination, ms] for (source, destination), ms in costs.links.items()]
    if costs.message_ms:
        content[MESSAGE] = costs.message_ms
    if costs.slice_overhead:
        content[OVERHEAD] = costs.slice_overhead
    if memory is not None:
        content |= {name: list(getattr(memory, name)) for name in MEMORY}
        if any(memory.history):
            content[KEY_HISTORY] = list(memory.history)
    content |= vocabulary_content(costs, memory) | experts_content(costs)
    if tokens is not None:
        content |= {key: number for key, number in zip(TOKENS, tokens, strict=True) if number is not None}
    if layers_per_stage:
        content[_LAYOUT] = list(layers_per_stage)
        content |= ends_content(of_stages(costs, memory, layers_per_stage))
    if facts:
        content[KEY_FACTS] = dict(facts)
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items()) + "\n}\n"


@dataclass(frozen=True)
class CostsFile:
    """The checked content of a costs file; ``on(placement)`` returns its figures per stage of a placement.

    Attributes:
        times: figures of the passes, by key; also of copies to the host, if the file has them.
        memory: figures of memory, by key; None when the file has none.
        comm_ms: duration of a transfer between two ranks.
        links, message_ms, slice_overhead: as in ``PassCosts``.
        path: path of the file, for error messages.
        shares: shares of attention, by key; the same on every stage, or one per stage.
        tokens: tokens of a sequence, and the fewest of a slice; None if the file does not have them.
        layers: costs per layer, if the file has them instead of figures of passes.
        layers_per_stage: the layout of the lists per stage; empty if unknown.
        ends: the embedding and the output layer with the loss, as far as known besides the lists.
        vocabulary: figures of vocabulary parallelism; None if the file has none.
        experts: the all-to-alls of experts and their computation; None if the file has none.
        facts: those of the job that was measured; empty for files written by hand.
    """

    times: Mapping[str, Figure]
    memory: Mapping[str, Figure] | None
    comm_ms: float
    links: Mapping[tuple[int, int], float]
    path: str | Path | None = None
    shares: Mapping[str, Figure] = field(default_factory=dict)
    tokens: SliceTokens | None = None
    layers: LayerCosts | None = None
    layers_per_stage: tuple[int, ...] = ()
    ends: Mapping[str, Part] = field(default_factory=dict)
    vocabulary: VocabularyFigures | None = None
    message_ms: float = 0.0
    experts: ExpertFigures | None = None
    slice_overhead: float = 0.0
    facts: Facts = field(default_factory=dict)

    @property
    def embedding_is_known(self) -> bool:
        """Whether the time of the embedding is not just assumed to be 0, as that of a file of two stages is."""
        given = self.ends.get("embedding")
        return len(self.layers_per_stage) != 2 or (given is not None and given.work_ms > 0)

    def halves(self, placement: Placement) -> bool:
        """Whether ``on`` divides stages that differ, without knowing their layers: schedules then seem too short."""
        if self.layers is not None or self.layers_per_stage:
            return False
        given = {**self.times, **(self.memory or {})}
        lists = (figures for name in (*TIMES, *MEMORY) if isinstance(figures := given.get(name), tuple))
        # Only a multiple of the stages of the placement can be merged.
        return any(len(each) % placement.num_stages and max(each) > min(each) * (1 + _ALIKE) for each in lists)

    @property
    def num_stages(self) -> int | None:
        """The number of stages for which the times are given one by one; None if they are those of whole ranks."""
        return next((len(figure) for figure in self.times.values() if isinstance(figure, tuple)), None)

    @classmethod
    def parse(cls, text: str) -> CostsFile:
        """Read the text of a costs file.

        Raises:
            UserError: when a key is invalid; the message states its required form.
        """
        content = json_object(text)
        if unknown := sorted(content.keys() - _KEYS):
            if (meant := nearest(unknown[0], sorted(_KEYS))) is not None:
                raise UserError(
                    f"keys must be those of costs files; got {unknown[0]!r}; did you mean {meant}? rename or remove it"
                )
            raise UserError(f"allowed keys are {', '.join(sorted(_KEYS))}; got {unknown[0]!r}; remove or rename it")
        if content.keys() & {LAYERS, PARTS}:
            return cls._per_layer(content)
        for name in content.keys() - {"links", KEY_FACTS}:
            values = content[name] if isinstance(content[name], list) else [content[name]]
            for value in values:
                refuse_huge(**{name: value})
        passes = {name: _figure(content, name) for name in TIMES}
        refuse_no_time(*passes.values())
        times = passes | _given(content, (KEY_HOST, *SHARDS))
        comm_ms, message_ms = (checked_figure(name, content.get(name, 0.0)) for name in (COMM, MESSAGE))
        links = _links(content.get("links", []))
        memory = None
        if content.keys() & {*MEMORY, KEY_HISTORY, LOGITS}:
            memory = {name: _figure(content, name) for name in MEMORY} | _given(content, (KEY_HISTORY,))
        shares = _given(content, _SHARES)
        for key, share in shares.items():
            for one in share if isinstance(share, tuple) else (share,):
                checked_share(key, one)
        return cls(
            times,
            memory,
            comm_ms,
            links,
            shares=shares,
            tokens=_tokens(content),
            layers_per_stage=_layout(content),
            ends=ends_from(content),
            vocabulary=vocabulary_from(content),
            message_ms=message_ms,
            experts=experts_from(content),
            slice_overhead=_overhead(content),
            facts=facts_from(content),
        )

    @classmethod
    def _per_layer(cls, content: dict[str, Any]) -> CostsFile:
        if both := [key for key in _OF_STAGES if key in content]:
            raise UserError(
                f"a costs file has either figures per layer ({LAYERS} and {PARTS}) or figures of passes; got "
                f"{both[0]} as well as {LAYERS} or {PARTS}; remove one of them"
            )
        refuse_huge(**{name: content.get(name) for name in (COMM, MESSAGE)})
        comm_ms, message_ms = (checked_figure(name, content.get(name, 0.0)) for name in (COMM, MESSAGE))
        links = _links(content.get("links", []))
        layers = layers_from(content, comm_ms, links)
        layers = replace(layers, message_ms=message_ms, slice_overhead=_overhead(content))
        return cls({}, None, comm_ms, links, tokens=_tokens(content), layers=layers, facts=facts_from(content))

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
        with nullcontext() if self.path is None else naming(_WHAT, self.path):
            return self._parts()

    def on(self, placement: Placement) -> tuple[PassCosts, PassMemory | None]:
        """Return the costs of the stages of ``placement``, and their memory if the file has any.

        Raises:
            UserError: for lists with another number of stages, a link that is not a time, an activation of 0, or fewer
                layers than stages.
        """
        with nullcontext() if self.path is None else naming(_WHAT, self.path):
            self.check_links(placement.num_ranks)
            if self.layers is not None:
                return self.layers.on(even(placement, self.layers.num_layers))
            if self.layers_per_stage and placement.num_stages != len(self.layers_per_stage):
                return self.on_layout(placement, even(placement, sum(self.layers_per_stage)))
            f, b, w = (_per_stage(name, self.times[name], placement) for name in TIMES)
            host, gather, reduce = (
                _per_stage(name, self.times[name], placement) if name in self.times else ()
                for name in (KEY_HOST, *SHARDS)
            )
            costs = PassCosts(f, b, w, self.comm_ms, self.links, message_ms=self.message_ms)
            costs = replace(costs, host_ms=host, gather_ms=gather, reduce_ms=reduce)
            costs = replace(costs, slice_overhead=self.slice_overhead)
            forward, backward = (self._shares(key, of, placement) for key, of in zip(_SHARES, TIMES, strict=False))
            if forward or backward:
                costs = costs.with_attention(forward or (0.0,) * len(f), backward)
            costs = self._with_experts(self._with_vocabulary(costs, placement), placement)
            if self.memory is None:
                return costs, None
            kept = {name: _per_stage(name, figure, placement) for name, figure in self.memory.items()}
            logits = () if self.vocabulary is None else self.vocabulary.memory(placement.num_ranks)
            return costs, PassMemory(kept["activation"], kept["wgrad"], kept.get(KEY_HISTORY, ()), logits=logits)

    def on_layout(self, placement: Placement, layout: Sequence[int]) -> tuple[PassCosts, PassMemory | None]:
        """Return what ``on`` does for a number of layers per stage, if the file has costs per layer.

        Raises:
            UserError: as ``on``, or for other numbers of layers.
        """
        layers = self.layer_costs()
        assert layers is not None, "the file has no costs per layer"
        costs, memory = layers.on(layout)
        if self.layers is None and self.memory is None:
            return self._with_vocabulary(costs, placement), None
        logits = () if self.vocabulary is None else self.vocabulary.memory(placement.num_ranks)
        return self._with_vocabulary(costs, placement), replace(memory, logits=logits)

    def _with_vocabulary(self, costs: PassCosts, placement: Placement) -> PassCosts:
        own = None if self.vocabulary is None else self.vocabulary.costs(placement.num_ranks)
        return replace(costs, vocabulary=own)

    def _with_experts(self, costs: PassCosts, placement: Placement) -> PassCosts:
        if self.experts is None:
            return costs
        parts = self.experts.of(costs, lambda name, figure: _per_stage(name, figure, placement))
        return replace(costs, experts=parts, contention=self.experts.contention)

    def _parts(self) -> LayerCosts:
        """Derive the costs per layer from those of the stages of the lists; figures of ranks have no part in it."""
        on = replace(self, vocabulary=None, path=None).on(Placement.linear(len(self.layers_per_stage)))
        return of_stages(*on, self.layers_per_stage, *(self.ends.get(end) for end in ENDS))

    def _shares(self, key: str, times: str, placement: Placement) -> tuple[float, ...]:
        """Return the shares under ``key`` per stage; those of merged stages are averaged by the times of their passes.

        Empty if the file does not have the key.
        """
        given = self.shares.get(key, ())
        if isinstance(given, float):
            return (given,) * placement.num_stages
        if not given:
            return ()
        _check_length(key, given, placement)
        ms, length = self.times[times], len(given)
        of_pass = recut(ms, length) if isinstance(ms, tuple) else (1.0,) * length
        parts, whole = (recut(each, placement.num_stages) for each in (tuple(map(mul, of_pass, given)), of_pass))
        return tuple(min(1.0, part / all_) if all_ else 0.0 for part, all_ in zip(parts, whole, strict=True))


def read_costs_file(path: str | Path) -> CostsFile:
    """Read a costs file with ``CostsFile.parse``; errors, including those of ``on``, name the file."""
    return replace(read_file(path, _WHAT, CostsFile.parse), path=path)


def _figure(content: Mapping[str, Any], name: str) -> Figure:
    if name not in content:
        raise UserError(f"it must have the key {name}, one number or a list with one number per stage; it is missing")
    value = content[name]
    return checked_figures(name, value) if isinstance(value, list) else checked_figure(name, value)


def _given(content: Mapping[str, Any], names: Iterable[str]) -> dict[str, Figure]:
    return {name: _figure(content, name) for name in names if name in content}


def _overhead(content: Mapping[str, Any]) -> float:
    return checked_share(OVERHEAD, content.get(OVERHEAD, 0.0))


def _tokens(content: dict[str, Any]) -> SliceTokens | None:
    if not content.keys() & {*TOKENS}:
        return None
    sequence = _count(content, SEQUENCE_LENGTH)
    return SliceTokens(sequence, _count(content, LEAST_SLICE_TOKENS) if LEAST_SLICE_TOKENS in content else None)


def _count(content: dict[str, Any], key: str) -> int:
    return int(
        read_key(content, key, "a number of tokens, 1 or more", lambda number: type(number) is int and number > 0)
    )


def _per_stage(name: str, figure: Figure, placement: Placement) -> tuple[float, ...]:
    if isinstance(figure, float):
        return spread(placement, figure)
    _check_length(name, figure, placement)
    return recut(figure, placement.num_stages)


def _check_length(name: str, figures: Sequence[float], placement: Placement) -> None:
    if len(figures) != placement.num_stages and (not figures or len(figures) % placement.num_ranks):
        raise UserError(
            f"{name} must have one figure for each of the {placement.num_stages} stages; got {len(figures)}; "
            "give as many, or a single number for the whole share of each rank"
        )


def _layout(content: dict[str, Any]) -> tuple[int, ...]:
    key = _LAYOUT
    if key not in content:
        return ()
    form = "a list with the number of layers of every stage, each 0 or above, as in [3, 4, 3]"
    counts = read_key(content, key, form, lambda v: isinstance(v, list) and all(type(c) is int and c >= 0 for c in v))
    for name in TIMES:
        if not isinstance(content[name], list) or len(content[name]) != len(counts):
            raise UserError(
                f"with layers_per_stage, {name} must be a list with one number for each of its {len(counts)} stages; "
                f"got {content[name]!r:.40}"
            )
    check_layers(key, sum(counts))
    return tuple(counts)


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
