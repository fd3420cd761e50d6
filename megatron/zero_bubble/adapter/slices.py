"""Run one slice of a sequence at a time through an unmodified GPTModel.

Forward hooks on the modules of a chunk do what a slice needs beyond what megatron-core does for a shorter sequence:

- GPTModel gets the slice's part of tokens, positions, labels and masks. On the last stage, its losses per token are
  padded with zeros to the length of the sequence, so that the job's loss function, which knows the whole loss mask and
  number of tokens, stays right: the losses of the slices add up to the loss of the sequence.
- Rotary embeddings start at the position of the slice.
- Attention gets the keys and values of all slices up to its own. They are rows of one buffer per layer and microbatch,
  so nothing is copied for a later slice. Backward goes through the slices from the last to the first; the gradients of
  the keys and values of earlier slices are kept until their own turn.

The order of the passes is that of Seq1F1B (arXiv 2406.03488); its authors' code and other implementations concatenate
keys and values for every slice instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Pass, Schedule
from megatron.zero_bubble.job.sliced import check_sliced

if TYPE_CHECKING:
    from megatron.zero_bubble.adapter.stage import StepArguments

_ARGUMENTS = ("input_ids", "position_ids", "attention_mask", "decoder_input", "labels")
"""The arguments that GPTModel accepts by position."""
_OF_ATTENTION = ("query", "key", "value", "attention_mask")
_PER_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
_FEW_SLICES = 8
"""Up to this number, gradients of keys and values are added in their own dtype, as autograd adds gradients."""

_Where = tuple[int, int, int]
"""Stage, microbatch, and number of the attention layer in the chunk."""


def slice_ends(schedule: Schedule, step: StepArguments, seq_length: int) -> tuple[int, ...]:
    """The ends of the slices in tokens; none for whole sequences.

    Raises:
        UserError: a sequence that cannot be cut, or an option that slices do not support.
    """
    if schedule.num_slices == 1:
        return ()
    config = step.config
    check_sliced(config, schedule.name)
    if step.collect_non_loss_data:
        raise UserError(
            "slices of sequences do not support collect_non_loss_data, because only losses can be put together from "
            f"slices; choose a schedule without slices instead of {schedule.name}"
        )
    return schedule.slices.in_tokens(seq_length, config.tensor_model_parallel_size if config.sequence_parallel else 1)


class Histories:
    """The keys and values that later slices attend to, and their gradients, of all microbatches of a rank."""

    def __init__(self) -> None:
        self._of: dict[_Where, _History] = {}

    def __len__(self) -> int:
        return len(self._of)

    def at(self, where: _Where, keys: torch.Tensor, values: torch.Tensor, length: int) -> _History:
        """The history of an attention layer; the first slice makes it, for ``length`` tokens."""
        if where not in self._of:
            self._of[where] = _History(keys, values, length)
        return self._of[where]

    def __getitem__(self, where: _Where) -> _History:
        return self._of[where]

    def drop(self, where: _Where) -> None:
        del self._of[where]

    def drop_microbatch(self, stage: int, microbatch: int) -> None:
        """Free the histories of a microbatch whose slices have no backward."""
        for where in [where for where in self._of if where[:2] == (stage, microbatch)]:
            del self._of[where]

    def tensors(self, stage: int | None = None, microbatch: int | None = None) -> Iterator[torch.Tensor]:
        """All buffers that exist, or those of a stage or microbatch."""
        for (of_stage, of_microbatch, _), history in self._of.items():
            if stage in (None, of_stage) and microbatch in (None, of_microbatch):
                yield from history.tensors()

    def clear(self) -> None:
        self._of.clear()


class _History:
    """Keys and values of one microbatch in one attention layer: tensors (sequence, microbatch, heads, head size)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        self._buffers = tuple(part.new_empty((length, *part.shape[1:])) for part in (keys, values))
        self._grads: tuple[torch.Tensor, ...] = ()

    def extend(self, parts: Iterable[torch.Tensor], start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Store the rows of a slice; returns the rows of all slices up to it. A repeated forward stores them again."""
        for buffer, part in zip(self._buffers, parts, strict=True):
            # Autograd has saved views of the rows of earlier slices. Those rows do not change, so their version
            # counters, which an assignment to the buffer itself would advance, must not change either.
            buffer.data[start:end] = part
        return tuple(buffer.data[:end] for buffer in self._buffers)

    def take(
        self, grads: Iterable[torch.Tensor], start: int, end: int, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, ...]:
        """Add the gradients of rows up to ``end``; returns those of the slice, to which all later slices have added."""
        grads = tuple(grads)
        if not self._grads:
            self._grads = tuple(grad.to(dtype or grad.dtype, copy=True) for grad in grads)
        else:
            for mine, grad in zip(self._grads, grads, strict=True):
                mine[:end] += grad
        return tuple(mine[start:end].to(grad.dtype) for mine, grad in zip(self._grads, grads, strict=True))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self._buffers, *self._grads)


class _Extend(torch.autograd.Function):
    """Maps keys and values of a slice to those of all slices up to it."""

    @staticmethod
    def forward(ctx: Any, keys: torch.Tensor, values: torch.Tensor, now: SlicedChunk, layer: int) -> Any:
        where, start, end = (now.stage, now.microbatch, layer), now.start, now.end
        ctx.set_materialize_grads(True)
        ctx.now = now.histories, where, start, end, torch.float32 if len(now.ends) > _FEW_SLICES else None
        return now.histories.at(where, keys, values, now.ends[-1]).extend((keys, values), start, end)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        histories, where, start, end, dtype = ctx.now
        own = histories[where].take(grads, start, end, dtype)
        if not start:
            histories.drop(where)
        return (*own, None, None)


class SlicedChunk:
    """A model chunk that computes one slice at a time while its hooks are attached.

    Args:
        stage: the stage of the chunk.
        ends: the ends of the slices in tokens.
        histories: the histories of the rank, which are empty again after the backward of every first slice.

    Raises:
        UserError: a model other than GPTModel, or attention that cannot attend to earlier slices.
    """

    def __init__(self, chunk: torch.nn.Module, stage: int, ends: tuple[int, ...], histories: Histories) -> None:
        self.stage, self.ends, self.histories = stage, ends, histories
        self.microbatch = self._slice = 0
        models = [module for module in chunk.modules() if isinstance(module, GPTModel)]
        if len(models) != 1:
            raise UserError(
                "slices of sequences need a GPTModel of megatron-core in every chunk of the model, got "
                f"{type(chunk).__name__} with {len(models)}; choose a schedule whose name does not begin with seq-"
            )
        self._model = models[0]

    @property
    def start(self) -> int:
        """The first token of the current slice."""
        return self.ends[self._slice - 1] if self._slice else 0

    @property
    def end(self) -> int:
        """The token behind the current slice."""
        return self.ends[self._slice]

    @property
    def share(self) -> float:
        """The share of the sequence's tokens in the current slice."""
        return (self.end - self.start) / self.ends[-1]

    @property
    def is_last(self) -> bool:
        """Whether the current slice is the last of its sequence."""
        return self._slice == len(self.ends) - 1

    def turn_to(self, work: Pass) -> None:
        """Compute the slice of ``work`` from now on; recomputation needs it in backwards, too."""
        self.microbatch, self._slice = work.microbatch, work.slice

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks, and remove them and all histories afterwards."""
        with ExitStack() as handles:
            handles.callback(self.histories.clear)
            model, before, after = self._model, "register_forward_pre_hook", "register_forward_hook"

            def attach(module: torch.nn.Module, kind: str, hook: Callable[..., Any]) -> None:
                handles.callback(getattr(module, kind)(hook, with_kwargs=True).remove)

            attach(model, before, self._cut)
            attach(model, after, self._pad)
            for module in model.modules():
                if isinstance(module, RotaryEmbedding):
                    attach(module, before, self._rotate)
            layers = [getattr(layer, "self_attention", None) for layer in model.decoder.layers]
            for number, attention in enumerate(layers):
                core = _core_of(attention)
                attach(core, before, self._attend(number, _mask_of(core)))
            yield

    def _cut(self, model: GPTModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's arguments, for the slice."""
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        for name in ("packed_seq_params", "decoder_input", "inference_context", "inference_params"):
            if given.get(name) is not None:
                raise UserError(
                    f"slices of sequences do not support {name} of GPTModel, got {type(given[name]).__name__}; leave "
                    "it out, or choose a schedule whose name does not begin with seq-"
                )
        if model.post_process and given.get("labels") is None:
            raise UserError(
                "slices of sequences need labels in the call of GPTModel, because only losses per token can be put "
                "together from slices, got none; give labels, or choose a schedule whose name does not begin with seq-"
            )
        for name in _PER_TOKEN:
            if given.get(name) is not None:
                given[name] = given[name][:, self.start : self.end]
        if given.get("attention_mask") is not None:
            given["attention_mask"] = given["attention_mask"][..., self.start : self.end, : self.end]
        first = [given.pop(name, None) for name in _ARGUMENTS]
        return (*first, *args[len(_ARGUMENTS) :]), given

    def _pad(self, model: GPTModel, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: torch.Tensor) -> Any:
        """On the last stage, the losses of all tokens, which are zero outside the slice."""
        if not model.post_process:
            return None
        return torch.nn.functional.pad(output, (self.start, self.ends[-1] - self.end))

    def _rotate(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "offset": self.start}

    def _attend(self, layer: int, mask_of: Callable[[Any, Any, Any], dict[str, Any]]) -> Callable[..., Any]:
        """A hook that gives an attention layer the keys and values of all slices up to the current one."""

        def hook(_core: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = dict(zip(_OF_ATTENTION, args, strict=False)) | kwargs
            given["key"], given["value"] = _Extend.apply(given["key"], given["value"], self, layer)
            given |= mask_of(given["attention_mask"], given["query"], given["key"])
            first = [given.pop(name) for name in _OF_ATTENTION]
            return (*first, *args[len(_OF_ATTENTION) :]), given

        return hook


class OncePerMicrobatch:
    """A data iterator that returns the items of a microbatch again to every slice of it.

    Consumers get copies of dicts and lists, because they may replace the entries: Megatron-LM slices batches in place.
    """

    def __init__(self, source: Any, now: SlicedChunk) -> None:
        self._source, self._now = source, now
        self._items: list[Any] = []
        self._given: tuple[int, int] | None = None
        self._next = 0

    def __iter__(self) -> OncePerMicrobatch:
        return self

    def __next__(self) -> Any:
        now = self._now.microbatch, self._now.start
        if now != self._given:
            self._given, self._next = now, 0
            if not self._now.start:
                self._items.clear()
        if self._next == len(self._items):
            self._items.append(next(self._source))
        item = self._items[self._next]
        self._next += 1
        return copy(item) if isinstance(item, (dict, list)) else item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def merged(reports: list[Any]) -> Any:
    """The report of a microbatch, from what the job's loss function reports for each of its slices.

    A report is a dict of losses, each as Megatron's own loops log them: a tensor with a sum and a number of tokens, a
    pair of both, or a mean. Sums and means of the padded losses add up; the tokens are those of the whole sequence in
    every report.
    """
    first = reports[0]
    if isinstance(first, dict):
        return {key: merged([report[key] for report in reports]) for key in first}
    if isinstance(first, (tuple, list)) and len(first) == 2:
        return (merged([report[0] for report in reports]), first[1])
    if isinstance(first, torch.Tensor) and first.numel() == 2:
        total = torch.stack([report.flatten() for report in reports]).sum(0)
        return torch.stack([total[0], first.flatten()[1]]).reshape(first.shape)
    return sum(reports[1:], first) if isinstance(first, (torch.Tensor, int, float)) else first


def _core_of(attention: torch.nn.Module | None) -> torch.nn.Module:
    core: torch.nn.Module | None = getattr(attention, "core_attention", None)
    if core is None:
        raise UserError(
            "slices of sequences need attention with a core_attention that can attend to earlier slices, got "
            f"{type(attention).__name__}; choose a schedule whose name does not begin with seq-"
        )
    return core


def _mask_of(core: torch.nn.Module) -> Callable[[Any, Any, Any], dict[str, Any]]:
    """The arguments with which the layer lets every token of a slice attend to all tokens before it, and itself."""
    if isinstance(core, DotProductAttention):
        return _explicit_mask
    causal = getattr(AttnMaskType, "causal_bottom_right", None)
    if causal is None:
        raise UserError(
            f"slices of sequences need megatron-core 0.15 or newer for attention of {type(core).__name__}; upgrade it, "
            "give --transformer-impl local, or choose a schedule whose name does not begin with seq-"
        )
    return lambda _mask, _query, _keys: {"attention_mask": None, "attn_mask_type": causal}


def _explicit_mask(mask: torch.Tensor | None, query: torch.Tensor, keys: torch.Tensor) -> dict[str, Any]:
    """The job's own mask, or True where a token must not attend: behind itself."""
    return {"attention_mask": _causal(query.size(0), keys.size(0), query.device) if mask is None else mask}


@lru_cache(maxsize=64)
def _causal(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    behind = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).triu(num_keys - num_queries + 1)
    return behind[None, None]
