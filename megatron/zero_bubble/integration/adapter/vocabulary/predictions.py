"""The losses of multi-token prediction, whose logits S computes together with those of the next token.

``GPTModel._postprocess`` runs the layers of the predictions, and then, for every depth, the output layer and the loss.
Here it runs twice. In F it ends before the output layer, as on a stage that computes no losses, and returns the hidden
states of all depths, one after the other. In L it runs again without the layers, and with the losses that all S have
found. So what becomes of the losses of a depth, in the log and in the backward, is megatron-core's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron.zero_bubble.integration.adapter.vocabulary.shards import OutputShard

Tensor = torch.Tensor
_Compute = Callable[[int, Tensor, Any], Tensor]
"""Computes the losses, (b, s), of a depth of prediction, 0 for the next token, from its labels and logits."""

_OF_LAYERS = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "decoder_input", "attention_mask", "padding_mask")
"""Arguments of ``GPTModel._postprocess`` that only the layers of the predictions use."""


class PredictedLosses:
    """The heads of the last stage during an iteration.

    Args:
        gpt: its GPTModel.
        output: the rank's shard of the output layer, in place of the model's.
        num_parts: tensor-parallel ranks that divide the sequences, from which S gathers the hidden states of all.
    """

    def __init__(self, gpt: Any, output: OutputShard, num_parts: int) -> None:
        self._gpt, self._output, self._num_parts = gpt, output, num_parts
        self._num_heads = 1 + gpt.config.mtp_num_layers
        self._given: dict[int, dict[str, Any]] = {}  # of the microbatches between F and L

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Context around the model's forward in F, after which the shard of the output layer has the hidden states and
        the labels of all depths.
        """
        gpt, run = self._gpt, type(self._gpt)._postprocess
        signature = inspect.signature(run)

        def postprocess(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(gpt, *args, **kwargs).arguments
            with _changed(gpt, post_process=False):
                hidden = run(**given)
            if given.get("labels") is None:
                return self._output(hidden)[0]
            more = {"mtp_in_postprocess": False, "runtime_gather_output": None}
            self._given[microbatch] = given | more | dict.fromkeys(given.keys() & _OF_LAYERS)
            labels: dict[int, Tensor] = {}

            def note(depth: int, tokens: Tensor, _: Any) -> Tensor:
                labels[depth] = tokens
                return torch.zeros_like(tokens, dtype=torch.float32)

            with torch.no_grad(), _changed(gpt, training=False):  # which has nothing logged
                losses = self._run_heads(microbatch, hidden.device, note)
            self._output.keep(hidden, self._joined([labels[depth] for depth in range(self._num_heads)]))
            return losses

        gpt._postprocess = postprocess
        try:
            yield
        finally:
            del gpt._postprocess

    def losses(self, microbatch: int, losses: Tensor, least: Tensor) -> Tensor:
        """The losses of the next token, (b, s), whose gradient also is that of the losses of all other depths, which
        megatron-core logs.

        Args:
            losses: of all depths, as the labels of F.
            least: the losses if the labels had the largest logits.
        """
        found, hits = self._parted(losses), self._parted(losses.detach() <= least)

        def take(depth: int, labels: Tensor, logits: Any) -> Tensor:
            logits.tokens = labels.where(hits[depth], -1).t()
            return found[depth] + logits.sum()  # zero: only the way back to other losses

        result = self._run_heads(microbatch, losses.device, take)
        del self._given[microbatch]
        return result

    def _run_heads(self, microbatch: int, device: torch.device, compute: _Compute) -> Tensor:
        """Run what follows the layers; every depth calls the output layer, then its loss, and the next token is last.

        Hidden states do not matter, but megatron-core leads gradients through them.
        """
        depths = iter((*range(1, self._num_heads), 0))
        given = self._given[microbatch] | {"hidden_states": torch.zeros(self._num_heads, 1, 1, device=device)}

        def losses_of(labels: Tensor, logits: Any) -> Tensor:
            return compute(next(depths), labels, logits)

        with self._output.answering(_Logits.of), _changed(self._gpt, compute_language_model_loss=losses_of):
            result: Tensor = type(self._gpt)._postprocess(**given)
            return result

    def _joined(self, depths: Sequence[Tensor]) -> Tensor:
        """What is (b, s) for each depth, in the order of the tokens of gathered hidden states, which begin with all
        depths of the first part.
        """
        whole = torch.stack(list(depths), dim=1)
        return whole.unflatten(2, (self._num_parts, -1)).transpose(1, 2).flatten(1)

    def _parted(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The inverse of ``_joined``."""
        parts = tokens.unflatten(1, (self._num_parts, self._num_heads, -1))
        return parts.transpose(1, 2).flatten(2).unbind(1)


class _Logits(Tensor):
    """In place of logits, of which megatron-core asks the largest ones to count right predictions.

    Attributes:
        tokens: the tokens that have them, (s, b): the labels where these do, even if others have the same, else -1.
    """

    tokens: Tensor

    @staticmethod
    def of(hidden: Tensor) -> _Logits:
        return hidden.as_subclass(_Logits)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.argmax:
            return args[0].tokens
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@contextmanager
def _changed(model: Any, **attributes: Any) -> Iterator[None]:
    """Context in which a model has other attributes."""
    before = {name: getattr(model, name) for name in attributes}
    for name, value in attributes.items():
        setattr(model, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)
