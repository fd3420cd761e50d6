"""Runs a model chunk on one slice of its sequences at a time, with forward hooks on megatron-core's modules.

The hooks leave the job's forward step and loss function as they are, which see whole batches:

* The model's inputs are cut to the slice, and the losses of its tokens are padded with zeros to the whole sequence. The
  loss mask, the number of tokens and every sum or mean over the sequence then stay right: the slices add up.
* Rotary embeddings begin at the position of the slice's first token.
* Attention gets the keys and values of all tokens up to the end of the slice, and a mask that is aligned with them.
* Recurrent layers continue from the state after the slice before (see ``recurrences``).
* Multi-token prediction gets the tokens that follow the slice (see ``following``), and routers of experts compute the
  losses of whole sequences (see ``balancing``).

What the slices of a sequence change: dropout draws other random numbers, the capacity of experts counts per slice, and
sums over tokens are rounded in another order.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.integration.adapter.balancing import Balancing
from megatron.zero_bubble.integration.adapter.following import TokensOfSlice
from megatron.zero_bubble.integration.adapter.history import Histories
from megatron.zero_bubble.integration.adapter.recurrences import RECURRENT, Recurrences
from megatron.zero_bubble.integration.adapter.slice_data import RepeatedBatches, merged
from megatron.zero_bubble.integration.adapter.states import Place
from megatron.zero_bubble.integration.adapter.versions import given_to, predictions_roll_padding
from megatron.zero_bubble.planning.job.options import check_softmax

_MODELS = frozenset(("GPTModel", "HybridModel", "MambaModel"))
"""The classes of models that have the inputs of a GPT; hybrid models have the last name until 0.17."""
_PER_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
"""Arguments of a model's forward whose last dimension is the sequence."""
_CUT = (*_PER_TOKEN, "attention_mask")
_ROLLED = (("input_ids", "position_ids"), ("labels", "loss_mask"))
"""What multi-token prediction rolls once per depth: where its layers are, and where the loss is."""


class SlicedChunk:
    """One model chunk, and the slice of the sequences that it runs now. With one slice, it changes nothing.

    Args:
        stage: the stage of the chunk.
        chunk: the chunk, as wrapped by Megatron.
        batches: the data iterator of the chunk; None on ranks without one.
        ends: the end of every slice, in tokens.
        histories: receives keys and values.
        balancing: computes the losses that balance the load of experts.
        recurrences: continues the recurrences of layers.

    Attributes:
        batches: the data iterator for the job's forward step.

    Raises:
        UserError: a model with several slices is no GPT or hybrid model, or has layers that cannot be cut.
    """

    def __init__(
        self,
        stage: int,
        chunk: torch.nn.Module,
        batches: Any,
        ends: tuple[int, ...],
        histories: Histories,
        balancing: Balancing,
        recurrences: Recurrences,
    ) -> None:
        self._stage, self._ends, self._histories, self._balancing = stage, ends, histories, balancing
        self._recurrences = recurrences
        self._chunk = chunk
        self._microbatch = self._slice = 0
        self._mask: tuple[Any, torch.Tensor] | None = None
        self._evaluates = False
        self._rolls: Counter[str] = Counter()  # of the tokens of the slice, for multi-token prediction
        self._logits: list[torch.Tensor] = []  # of the slices of a microbatch so far, in an evaluation without labels
        self._repeated = RepeatedBatches(batches) if len(ends) > 1 and batches is not None else None
        self.batches = batches if self._repeated is None else self._repeated

    @property
    def is_cut(self) -> bool:
        """Whether the sequences are cut into several slices."""
        return len(self._ends) > 1

    @property
    def _bounds(self) -> tuple[int, int]:
        return (self._ends[self._slice - 1] if self._slice else 0), self._ends[self._slice]

    def share(self, work: Pass) -> float:
        """The share of a sequence's tokens in the slice of ``work``; 1 for a whole sequence."""
        start = self._ends[work.slice - 1] if work.slice else 0
        return (self._ends[work.slice] - start) / self._ends[-1]

    def is_last(self, work: Pass) -> bool:
        """Whether ``work`` is for the last slice of its microbatch."""
        return work.slice == len(self._ends) - 1

    def report(self, reports: Sequence[Any]) -> Any:
        """The report of a microbatch, from those of its slices; after logits, that of the last, which has them all."""
        return reports[-1] if self._logits else merged(reports)

    @contextmanager
    def forward(self, work: Pass, frees: bool) -> Iterator[None]:
        """Context around an F pass; ``frees`` is whether no backward follows that would free the histories."""
        self._evaluates = frees
        if work.slice == 0:
            self._logits.clear()
        if self._repeated is not None:
            self._repeated.begin(work.slice)
        kept = self._histories, self._recurrences.states
        for each in kept:
            each.in_forward = True
        try:
            with self.at(work, is_forward=True):
                yield
        finally:
            for each in kept:
                each.in_forward = False
        if self.is_last(work):
            if self._repeated is not None:
                self._repeated.end()
            if frees:
                for each in kept:
                    each.drop((self._stage, work.microbatch))

    @contextmanager
    def at(self, work: Pass, is_forward: bool = False) -> Iterator[None]:
        """Context around a forward or a backward, which may recompute the forward of the same slice."""
        self._microbatch, self._slice, self._mask = work.microbatch, work.slice, None
        of_routers = self._balancing.at((self._stage, work.microbatch), work.slice, self.share(work), is_forward)
        try:
            with of_routers if self.is_cut else nullcontext():
                yield
        finally:
            self._mask = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context around the passes of an iteration, in which the hooks are registered."""
        if not self.is_cut:
            yield
            return
        model = _model_of(self._chunk)
        attention, recurrent = _with_history_in(model)
        handles = [
            model.register_forward_pre_hook(self._cut_inputs, with_kwargs=True),
            model.register_forward_hook(self._whole_output, with_kwargs=True),
        ]
        for number, module in enumerate(model.modules()):
            if isinstance(module, RotaryEmbedding):
                handles.append(module.register_forward_pre_hook(self._from_position, with_kwargs=True))
            if isinstance(module, TopKRouter):
                handles.append(module.register_forward_pre_hook(functools.partial(self._routes, number)))
        for layer, module in enumerate(attention):
            hook = functools.partial(self._with_history, layer)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            with _accumulating(model), self._recurrences.slices_of(recurrent, self._place):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._logits.clear()

    def _cut_inputs(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start, end = self._bounds
        given = given_to(model, args, kwargs)
        if given.get("packed_seq_params") is not None:
            raise UserError(
                "sequence slices do not support packed sequences, whose tokens attend only to their own sample; got "
                "packed_seq_params; pad the samples, or train without slices"
            )
        whole = [name for name in given if name not in _CUT and _has_tensors(given[name])]
        if whole:
            raise UserError(
                f"sequence slices cut only {', '.join(_CUT)} of the arguments of a model; got {', '.join(whole)}, "
                "which would stay whole; leave it out, or train without slices"
            )
        rolled, self._rolls = _rolled_in(model), Counter()
        if "loss_mask" in rolled and given.get("labels") is not None and given.get("loss_mask") is None:
            given["loss_mask"] = torch.ones_like(given["labels"])  # as megatron-core does
        for name in _PER_TOKEN:
            if given.get(name) is not None:
                self._check_length(name, given[name].shape[-1])
                given[name] = self._of_slice(name, given[name], name in rolled)
        if given.get("attention_mask") is not None:
            for length in given["attention_mask"].shape[-2:]:
                self._check_length("attention_mask", length)
            given["attention_mask"] = given["attention_mask"][..., start:end, :end]
        if model.post_process and given.get("labels") is None and not self._evaluates:
            raise UserError(
                "sequence slices need the model to compute the loss of every token, so that the losses of a slice can "
                "be separated from those of others; got no labels; pass labels to the model, or train without slices"
            )
        return (), given

    def _of_slice(self, name: str, tokens: torch.Tensor, is_rolled: bool) -> torch.Tensor:
        if is_rolled:
            return TokensOfSlice.of(tokens, self._bounds, functools.partial(self._rolls.update, (name,)))
        return tokens[..., slice(*self._bounds)]

    def _check_length(self, name: str, length: int) -> None:
        if length != self._ends[-1]:
            raise UserError(
                f"with sequence slices, {name} must have seq_length = {self._ends[-1]} tokens; got {length}; pass the "
                "length of the batches as seq_length"
            )

    def _whole_output(self, model: torch.nn.Module, _args: Any, given: dict[str, Any], output: Any) -> Any:
        """The losses of the slice, padded; without labels, the logits of all slices so far, (batch, tokens, ...)."""
        self._check_rolls(model, given)
        if not model.post_process:
            return None
        if given.get("labels") is None:
            self._logits.append(output)
            return torch.cat(self._logits, dim=1)
        start, end = self._bounds
        return torch.nn.functional.pad(output, (start, self._ends[-1] - end))

    def _check_rolls(self, model: Any, given: dict[str, Any]) -> None:
        expected = {name: model.config.mtp_num_layers for name in _rolled_in(model) if given.get(name) is not None}
        unread = () if _embeds_positions(model) else ("position_ids",)  # not rolled by every version
        rolls = {name: count for name, count in self._rolls.items() if name not in unread}
        if rolls != {name: count for name, count in expected.items() if name not in unread}:
            raise UserError(
                "sequence slices with multi-token prediction need megatron-core to roll the tokens of a model once per "
                f"depth, so that a slice gets those that follow it; expected {expected}, got {rolls}; train without "
                "slices, or report this version of megatron-core"
            )

    def _place(self, layer: int, name: str) -> Place:
        return Place((self._stage, self._microbatch), (layer, name), self._slice, len(self._ends))

    def _routes(self, number: int, router: Any, _args: Any) -> None:
        self._balancing.routes(number, router)

    def _from_position(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "offset": self._bounds[0]}

    def _with_history(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        query, keys, values, mask, *others = args
        of = (self._stage, self._microbatch)
        keys, values = self._histories.extend(of, layer, self._ends, self._slice, (keys, values))
        if isinstance(module, DotProductAttention):
            mask = self._causal_mask(query) if mask is None else mask
        else:
            mask = None
            kwargs = {**kwargs, "attn_mask_type": bottom_right(kwargs.get("attn_mask_type"))}
        return (query, keys, values, mask, *others), kwargs

    def _causal_mask(self, query: torch.Tensor) -> torch.Tensor:
        """The mask of the slice for megatron-core's own attention, True where a token may not look; same in all layers.

        Without a mask, this attention builds that of a whole sequence.
        """
        start, end = self._bounds
        if self._mask is None or self._mask[0] != query.device:
            square = torch.ones(end - start, end, dtype=torch.bool, device=query.device)
            self._mask = query.device, square.triu_(start + 1)[None, None]
        return self._mask[1]


def bottom_right(mask_type: Any) -> Any:
    """The mask type with which TransformerEngine aligns the last token of a slice with the last of its keys.

    Raises:
        UserError: attention that is not causal, or a megatron-core without this mask type.
    """
    if mask_type is not AttnMaskType.causal:
        raise UserError(
            f"sequence slices need causal attention, so that no token attends to a later slice; got {mask_type}; "
            "train without slices"
        )
    if not hasattr(AttnMaskType, "causal_bottom_right"):
        raise UserError(
            "sequence slices with TransformerEngine need megatron-core 0.15 or newer, whose AttnMaskType has "
            "causal_bottom_right; upgrade it, or train with --transformer-impl local"
        )
    return AttnMaskType.causal_bottom_right


def _model_of(chunk: torch.nn.Module) -> Any:
    model: Any = chunk
    while hasattr(model, "module"):  # DDP, and the wrapper of 16-bit models
        model = model.module
    if not _MODELS.intersection(base.__name__ for base in type(model).__mro__):
        raise UserError(
            "sequence slices need a GPTModel or a hybrid model of megatron-core, whose inputs they cut; got a "
            f"{type(model).__name__}; train without slices"
        )
    return model


def _embeds_positions(model: Any) -> bool:
    return getattr(getattr(model, "embedding", None), "add_position_embedding", True)


def _rolled_in(model: Any) -> tuple[str, ...]:
    """The arguments of a chunk that multi-token prediction rolls."""
    if not getattr(model.config, "mtp_num_layers", None):
        return ()
    of_layers = (*_ROLLED[0], "padding_mask") if predictions_roll_padding() else _ROLLED[0]
    return (of_layers if model.mtp_process else ()) + (_ROLLED[1] if model.post_process else ())


def _layers_of(model: Any) -> Iterator[Any]:
    layers = list(model.decoder.layers)
    if getattr(model, "mtp_process", False):
        for layer in model.mtp.layers:  # the name of what it has of a layer is another one since 0.18
            layers.append(getattr(layer, "transformer_layer", None) or layer.mtp_model_layer)
    for layer in layers:
        yield from getattr(layer, "layers", [layer])  # a prediction of a hybrid model has a stack of them


def _with_history_in(model: Any) -> tuple[list[Any], list[Any]]:
    """What looks at earlier tokens in each layer: attention, where queries meet keys and values; and recurrences."""
    attention, recurrent = [], []
    for layer in _layers_of(model):
        mixer = getattr(layer, "mixer", None) or layer.self_attention
        if isinstance(mixer, IdentityOp):
            continue
        if type(mixer).__name__ in RECURRENT:
            recurrent.append(mixer)
            continue
        core: Any = getattr(mixer, "core_attention", None)
        if type(core).__name__ not in ("DotProductAttention", "TEDotProductAttention"):
            raise UserError(
                "sequence slices need layers that can continue from earlier slices: megatron-core's "
                f"DotProductAttention, TEDotProductAttention, {' or '.join(RECURRENT)}; got "
                f"{type(mixer if core is None else core).__name__}; train without slices"
            )
        softmax = getattr(core, "scale_mask_softmax", None)
        check_softmax(softmax is not None and softmax.scaled_masked_softmax_fusion and softmax.input_in_float16)
        attention.append(core)
    return attention, recurrent


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensors, value)))


@contextmanager
def _accumulating(model: torch.nn.Module) -> Iterator[None]:
    """Context in which TransformerEngine's linears never overwrite ``main_grad``.

    With fused accumulation, they overwrite it with the gradient of the slice that Megatron announces as the first
    microbatch, and so would lose those of the later slices of that microbatch, whose backwards come before it. Without
    the cache of transposed FP8 weights, they ignore the announcement.
    """
    cached: list[Any] = [
        module for module in model.modules() if getattr(module, "disable_parameter_transpose_cache", True) is False
    ]
    for module in cached:
        module.disable_parameter_transpose_cache = True
    try:
        yield
    finally:
        for module in cached:
            module.disable_parameter_transpose_cache = False
