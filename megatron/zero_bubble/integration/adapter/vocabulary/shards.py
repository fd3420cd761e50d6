"""The vocabulary layers of a language model, divided over all ranks of the pipeline.

A stock model is built first, and then loses its vocabulary layers: every rank gets as many rows of the embedding and of
the output layer, as parameters of its first chunk with stock's names. The forward of the model stays megatron-core's.
In it, the modules here hand over what the passes of the vocabulary compute: the embedding of the first stage returns
rows that were delivered, and the output layer of the last stage keeps the hidden states.

From 0.18 on, ``GPTModel.forward`` also takes an ``output_processor``, which gets the hidden states and labels. It would
be a second way for some versions, and not replace the modules: they hold the weights under stock's names, and it is the
job's forward step that passes arguments to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import MegatronModule

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.engine.kernels import vocabulary
from megatron.zero_bubble.engine.kernels.vocabulary import ShardRows
from megatron.zero_bubble.engine.runtime.refusals import refused_together
from megatron.zero_bubble.engine.wgrad.hooks import has_hooks
from megatron.zero_bubble.integration.adapter.language_models import is_divisible, unwrapped
from megatron.zero_bubble.integration.adapter.versions import check_divided_predictions
from megatron.zero_bubble.integration.adapter.vocabulary.checkpoint import (
    EMBEDDING,
    EXTRA_STATE,
    OUTPUT,
    extra_state,
    sharded,
)


class EmbeddingShard(torch.nn.Module):
    """This rank's rows of the embedding.

    Args:
        weight: (v, h).
        rows: which rows of the vocabulary these are.
        num_shards: shards of the whole vocabulary.
        scatters: whether the embedding's output is divided among tensor-parallel ranks along the sequence.
    """

    def __init__(self, weight: torch.nn.Parameter, rows: ShardRows, num_shards: int, scatters: bool) -> None:
        super().__init__()
        self.weight = weight
        self.rows = rows
        self.num_shards = num_shards
        self._scatters = scatters
        self._delivered: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._are_sums = False

    def forward(self, ids: torch.Tensor | None) -> torch.Tensor:
        """The rows of ``ids`` that are on this rank, (b, s, h), with zeros for the others; while rows are delivered,
        the sum of these over the tensor-parallel ranks, as the embedding of megatron-core returns it.

        Without ids, the weights: whoever reads them calls the module, because data parallelism gathers them before.
        """
        if ids is None:
            return self.weight
        if self._delivered is None:
            assert not torch.is_grad_enabled(), "a model gets its rows delivered; only I looks up those of its rank"
            return vocabulary.look_up(self.weight, ids, self.rows)
        rows = self._delivered(ids)
        if self._scatters:
            scatter = tensor_parallel.reduce_scatter_to_sequence_parallel_region
            if self._are_sums:
                scatter = tensor_parallel.scatter_to_sequence_parallel_region
            return scatter(rows.transpose(0, 1).contiguous())
        return rows if self._are_sums else tensor_parallel.reduce_from_tensor_model_parallel_region(rows)

    def sharded_state_dict(self, prefix: str = "", *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """The rows of this rank, for megatron-core's distributed checkpoints."""
        return {f"{prefix}weight": sharded(f"{prefix}weight", self.weight, self.rows, self.num_shards)}

    @contextmanager
    def delivering(self, rows_of: Callable[[torch.Tensor], torch.Tensor], are_sums: bool = False) -> Iterator[None]:
        """Context around the forward of a stage with an embedding, which returns ``rows_of(ids)``, (b, s, h).

        Args:
            are_sums: whether these are sums over the tensor-parallel ranks already.
        """
        self._delivered, self._are_sums = rows_of, are_sums
        try:
            yield
        finally:
            self._delivered = None


class OutputShard(torch.nn.Module):
    """This rank's rows of the output layer.

    Attributes:
        gather_output: as of ``ColumnParallelLinear``: what it returns is not divided among tensor-parallel ranks.

    Args:
        weight: (v, h); None if the output layer is tied to the embedding, whose weights are then used.
        embedding: this rank's rows of the embedding, which has the same rows.
        sequence_parallel: whether hidden states are divided among tensor-parallel ranks along the sequence.

    Attributes:
        is_last: whether it is in the place of stock's output layer, which is on the last stage.
    """

    is_last = False

    def __init__(self, weight: torch.nn.Parameter | None, embedding: EmbeddingShard, sequence_parallel: bool) -> None:
        super().__init__()
        if weight is not None:
            self.weight = weight
        self.rows, self.num_shards = embedding.rows, embedding.num_shards
        self.sequence_parallel, self.gather_output = sequence_parallel, True
        self._embedding = (embedding,)  # a tuple, so that the embedding is no module of this one
        self._hidden: torch.Tensor | None = None
        self._labels: torch.Tensor | None = None
        self._answer: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def used_weight(self) -> torch.nn.Parameter:
        """The weights, (v, h), of this module or of the embedding."""
        return self._embedding[0].weight if self.is_tied else self.weight

    @property
    def is_tied(self) -> bool:
        """Whether the weights are those of the embedding."""
        return "weight" not in self._parameters

    def forward(self, input_: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Keep the hidden states, and return them in place of the logits; called by the forward of the model.

        Without hidden states, the weights, as from ``EmbeddingShard``.
        """
        if input_ is None:
            return self._embedding[0](None) if self.is_tied else self.weight
        if self._answer is not None:
            return self._answer(input_), None
        self._hidden = input_
        return input_, None

    def sharded_state_dict(self, prefix: str = "", *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """The rows of this rank, for megatron-core's distributed checkpoints; none if the embedding has them."""
        found = extra_state(prefix) if self.is_last else {}
        if self.is_tied:
            return found
        return found | {f"{prefix}weight": sharded(f"{prefix}weight", self.weight, self.rows, self.num_shards)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(f"{prefix}{EXTRA_STATE}", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def keep_labels(self, labels: torch.Tensor, _logits: torch.Tensor) -> torch.Tensor:
        """In place of the model's ``compute_language_model_loss``: keep the labels, (b, s).

        Returns:
            zeros in the shape of the losses, which L computes later.
        """
        self._labels = labels
        return torch.zeros_like(labels, dtype=torch.float32)

    def keep(self, hidden: torch.Tensor, labels: torch.Tensor) -> None:
        """Keep hidden states and labels that the model does not bring here itself."""
        self._hidden, self._labels = hidden, labels

    @contextmanager
    def answering(self, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Context in which nothing is kept, and the result is ``logits_of(hidden states)``."""
        self._answer = logits_of
        try:
            yield
        finally:
            self._answer = None

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states and labels of the forward that has just run; they are not kept any longer.

        Raises:
            UserError: the model was run without labels, and so had to return logits.
        """
        hidden, labels, self._hidden, self._labels = self._hidden, self._labels, None, None
        if hidden is None or labels is None:
            raise UserError(
                "with vocabulary parallelism, no rank has all logits, so the model must compute the losses; got no "
                "labels; pass labels to the model, or train with --zero-bubble-vocabulary-parallel off"
            )
        return hidden, labels


class VocabularyShards(NamedTuple):
    """The shards of a rank, which are an attribute of its first chunk."""

    embedding: EmbeddingShard
    output: OutputShard

    @classmethod
    def of(cls, chunk: torch.nn.Module) -> VocabularyShards:
        """The shards in a rank's first chunk.

        Raises:
            UserError: the vocabulary of this model is not divided over the ranks.
        """
        model = language_model_of(chunk)
        shards = getattr(model, "vocabulary_shards", None)
        if shards is None:
            raise UserError(
                "vocabulary parallelism needs a model whose vocabulary is divided over the ranks of the pipeline; got "
                "whole vocabulary layers; call shard_vocabulary(models, placement) before the model is wrapped, or "
                "train with --zero-bubble-vocabulary-parallel off"
            )
        return shards


class _Embedding(MegatronModule):
    """In the place of the model's ``embedding`` on ranks without the first stage: only holds the rank's rows."""

    def __init__(self, config: Any, word_embeddings: EmbeddingShard) -> None:
        super().__init__(config)
        self.word_embeddings = word_embeddings


def language_model_of(chunk: torch.nn.Module) -> Any:
    """The language model inside a chunk, as wrapped by Megatron.

    Raises:
        UserError: another model.
    """
    model = unwrapped(chunk)
    if not is_divisible(model):
        raise UserError(
            "vocabulary parallelism needs a GPTModel or a HybridModel of megatron-core, whose vocabulary layers it "
            f"divides; got a {type(model).__name__}; train with --zero-bubble-vocabulary-parallel off"
        )
    return model


def shard_vocabulary(models: Sequence[torch.nn.Module], placement: Placement) -> None:
    """Divide the vocabulary layers of stock models over the ranks of the pipeline, with their initial weights.

    A collective call of all ranks, before the models are wrapped.

    Args:
        models: the chunks of this rank, on the device, with the data type of training.

    Raises:
        UserError: other models than ``language_models.DIVIDED``.
    """
    chunks = [language_model_of(model) for model in models]
    group = parallel_state.get_pipeline_model_parallel_group()
    first = next((chunk for chunk in chunks if chunk.pre_process), None)
    last = next((chunk for chunk in chunks if chunk.post_process), None)
    tied = chunks[0].share_embeddings_and_output_weights
    roots = placement.stage_to_rank[0], placement.stage_to_rank[-1]
    config, home = chunks[0].config, chunks[0]
    words = None if first is None else first.embedding.word_embeddings
    predicting = next((chunk for chunk in chunks if getattr(chunk, "mtp_process", False)), None)
    copied = None if predicting is None else predicting.embedding.word_embeddings
    with refused_together(group):
        _check_hooks(words, copied, None if last is None else last.output_layer)
        if last is not None and getattr(last.config, "mtp_num_layers", None):
            check_divided_predictions(last)
    weight, rows = _own_rows(None if words is None else words.weight, home, roots[0], group)
    scatters = any(layer is not None and layer.reduce_scatter_embeddings for layer in (words, copied))
    num_shards = group.size() * parallel_state.get_tensor_model_parallel_group().size()
    embedding = EmbeddingShard(weight, rows, num_shards, scatters)
    own = None
    if not tied:
        own, _ = _own_rows(None if last is None else last.output_layer.weight, home, roots[1], group)
    output = OutputShard(own, embedding, config.sequence_parallel)
    for chunk in chunks:  # their gradients are complete without a reduction
        chunk.share_embeddings_and_output_weights = False
        chunk.shared_embedding_or_output_weight = _no_weight
    if last is not None:
        last.compute_language_model_loss = output.keep_labels
        last.output_layer = _LastOutput(output)
    if predicting is not None:
        predicting.embedding.word_embeddings = embedding if predicting is home else _DeliveredEmbedding(embedding)
        _describe_embedding_once(predicting)
    if first is not None:
        first.embedding.word_embeddings = embedding
    elif predicting is not home:
        home.embedding = _Embedding(config, embedding)
    if not tied:
        home.output_layer, output.is_last = output, home is last
    home.vocabulary_shards = VocabularyShards(embedding, output)


def _no_weight() -> None:
    """In place of ``GPTModel.shared_embedding_or_output_weight``: no weight has a copy."""


def _describe_embedding_once(gpt: Any) -> None:
    """Have a chunk with multi-token prediction describe no copy of the embedding, which it has in stock."""
    describe = gpt.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        gpt.mtp_process = False
        try:
            return describe(*args, **kwargs)
        finally:
            gpt.mtp_process = True

    gpt.sharded_state_dict = sharded_state_dict


def _check_hooks(*layers: torch.nn.Module | None) -> None:
    if any(has_hooks(weight) for layer in layers if layer is not None for weight in layer.parameters()):
        raise UserError(
            "with vocabulary parallelism, every rank gets new weights in place of the embedding and the output layer; "
            "got hooks on the old ones, which would be lost; register them on the new ones, once the model is built, "
            "or train with --zero-bubble-vocabulary-parallel off"
        )


class _DeliveredEmbedding(torch.nn.Module):
    """The embedding for multi-token prediction where the first chunk of the rank has the weights."""

    def __init__(self, embedding: EmbeddingShard) -> None:
        super().__init__()
        self._embedding = (embedding,)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``EmbeddingShard``, to which rows must be delivered."""
        rows: torch.Tensor = self._embedding[0](ids)
        return rows

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Nothing: the first chunk has the entry."""
        return {}


class _LastOutput(torch.nn.Module):
    """The output layer of the last stage where another module has its weights: the first chunk, or the embedding.

    megatron-core expects the weights of the last stage's output layer in a checkpoint, so they are an entry of this
    module too, which is only loaded, and then dropped.
    """

    def __init__(self, output: OutputShard) -> None:
        super().__init__()
        self._output = (output,)
        self.sequence_parallel, self.gather_output = output.sequence_parallel, output.gather_output

    def forward(self, input_: torch.Tensor, *_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, None]:
        """See ``OutputShard``."""
        return self._output[0](input_)

    def sharded_state_dict(self, prefix: str = "", *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        (output,) = self._output
        key = f"{prefix.removesuffix(OUTPUT)}{EMBEDDING}weight" if output.is_tied else f"{prefix}weight"
        weight = sharded(key, output.used_weight, output.rows, output.num_shards, is_copy=True)
        return {f"{prefix}weight": weight, **extra_state(prefix)}

    def _load_from_state_dict(self, *_args: Any, **_kwargs: Any) -> None:
        """Accept the entry."""


def _own_rows(
    weight: torch.Tensor | None, model: Any, root: int, group: dist.ProcessGroup
) -> tuple[torch.nn.Parameter, ShardRows]:
    """This rank's rows of a vocabulary layer, cut from the stock layer of rank ``root``; padding is zero.

    Args:
        weight: on the root, the rows of its tensor-parallel rank.
        model: a chunk of this rank.
    """
    tensor, size = parallel_state.get_tensor_model_parallel_group(), group.size()
    device = next(model.parameters()).device
    rank, count = group.rank() * tensor.size() + tensor.rank(), size * tensor.size()
    rows = ShardRows.of(rank, count, model.vocab_size)
    own = torch.empty(rows.num_rows, model.config.hidden_size, dtype=model.config.params_dtype, device=device)
    parts = None
    if group.rank() == root:
        assert weight is not None, "the root has the layer"
        pieces = [torch.empty_like(weight.data) for _ in range(tensor.size())]
        dist.all_gather(pieces, weight.data, group=tensor)
        whole = torch.cat([*pieces, weight.new_zeros(count * rows.num_rows - model.vocab_size, weight.shape[1])])
        parts = [part.contiguous() for part in whole.detach().chunk(count)[tensor.rank() :: tensor.size()]]
    dist.scatter(own, parts, dist.get_global_rank(group, root), group=group)
    parameter: Any = torch.nn.Parameter(own)
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    parameter.is_embedding_or_output_parameter = True
    parameter.vocabulary_rows = rows  # of which the last may be padding
    return parameter, rows
