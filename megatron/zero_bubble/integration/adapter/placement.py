"""Maps stages to Megatron's terms: a pipeline rank and a ``vp_stage``.

Megatron places stage s on pipeline rank s mod P as its chunk s div P, and derives layers, embedding, loss and
checkpoints from these two numbers. A stage on another rank, for example on a V, is therefore built, run and saved while
Megatron sees this process as rank s mod P. This supports every placement in which each rank has one of stages 0..P-1,
one of P..2P-1, and so on.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.integration.adapter.versions import models_process_groups


def megatron_rank(placement: Placement, rank: int, chunk: int) -> int:
    """The pipeline rank where Megatron would put the stage that is chunk ``chunk`` of rank ``rank``."""
    return placement.stages_of(rank)[chunk] % placement.num_ranks


_taken_for: contextvars.ContextVar[int | None] = contextvars.ContextVar("pipeline rank", default=None)


@contextlib.contextmanager
def as_pipeline_rank(rank: int) -> Iterator[None]:
    """Context in which megatron-core sees this process as pipeline rank ``rank``."""
    before = parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK
    parallel_state.set_pipeline_model_parallel_rank(rank)
    token = _taken_for.set(rank)
    try:
        yield
    finally:
        _taken_for.reset(token)
        parallel_state.set_pipeline_model_parallel_rank(before)


def is_taken_for_another() -> bool:
    """Whether ``as_pipeline_rank`` is in force, so that a stage is already where Megatron expects it."""
    return _taken_for.get() is not None


def groups_as(rank: int, groups: Any = None) -> Any:
    """Process groups that present this process as pipeline rank ``rank``; default: based on Megatron's own groups."""
    groups = groups or models_process_groups()
    if groups.pp.rank() != rank:
        groups = copy(groups)
        groups.pp = group_as(groups.pp, rank)
    return groups


def group_as(group: Any, rank: int, size: int | None = None) -> Any:
    """``group`` with another ``rank()`` and, if given, another ``size()``; only for callers that do not communicate
    through it.
    """
    return _GroupAs(group, rank, size)


def original_group(group: Any) -> Any:
    """The group of which ``group_as`` made ``group``; itself if none did."""
    return group.original if isinstance(group, _GroupAs) else group


class _GroupAs:
    """Proxy of a process group with another ``rank()`` and ``size()``; all other attributes are the group's."""

    def __init__(self, group: Any, rank: int, size: int | None = None) -> None:
        self.original, self._rank, self._size = group, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        number: int = self.original.size() if self._size is None else self._size
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __deepcopy__(self, _memo: dict[int, Any]) -> _GroupAs:
        return self


def describe_state_as(chunk: Any, rank_of_chunk: int) -> None:
    """Make a chunk describe its checkpoint state as if on the pipeline rank where Megatron would place the chunk."""
    describe = chunk.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        with as_pipeline_rank(rank_of_chunk):
            return describe(*args, **kwargs)

    chunk.sharded_state_dict = sharded_state_dict


def segment_of_stage(original: Callable[..., Any]) -> Callable[..., Any]:
    """``select_pipeline_segment``, which gives a hybrid model the layers of its stage, for groups of ``group_as``.

    torch.distributed does not know these. Without a group, upstream counts stages instead of chunks.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def select_pipeline_segment(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        group, chunk = bound.arguments["pp_group"], bound.arguments["vp_stage"]
        if isinstance(group, _GroupAs):
            bound.arguments |= {"pp_group": None, "vp_stage": (chunk or 0) * group.size() + group.rank()}
        return original(*bound.args, **bound.kwargs)

    return select_pipeline_segment


@dataclass(frozen=True)
class EmbeddingRanks:
    """A function for ``initialize_model_parallel(get_embedding_ranks=...)``.

    It returns the ranks of the stages with a copy of the embedding, or one rank if it has all of them.

    Attributes:
        placement_on: the placement for a number of ranks.
        stages: the stages; default: the first and the last, as with a tied embedding.
    """

    placement_on: Callable[[int], Placement]
    stages: Collection[int] = ()

    def __call__(self, ranks: list[int], *_: Any) -> list[int]:
        placement = self.placement_on(len(ranks))
        on = {placement.stage_to_rank[stage] for stage in self.stages or (0, placement.num_stages - 1)}
        return [ranks[rank] for rank in sorted(on)]


def embedding_ranks(placement: Placement, stages: Collection[int] = ()) -> EmbeddingRanks:
    """The same for one placement."""
    return EmbeddingRanks(lambda _: placement, stages)


def grouping_ends(
    initialize: Callable[..., None], placement_on: Callable[[int], Placement], with_embedding: Collection[int] = ()
) -> Callable[..., None]:
    """``parallel_state.initialize_model_parallel`` with the embedding group of the placement of a number of ranks.

    That of a caller stays if it is for a placement too; Megatron-LM's scripts give one for Megatron's own.

    Args:
        with_embedding: the stages that have a copy of the embedding; default: the first and the last.
    """

    @functools.wraps(initialize)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        if not isinstance(kwargs.get("get_embedding_ranks"), EmbeddingRanks):
            kwargs["get_embedding_ranks"] = EmbeddingRanks(placement_on, with_embedding)
        initialize(*args, **kwargs)

    return initialize_model_parallel


def last_stage_of(placement_on: Callable[[int], Placement], original: Callable[..., bool]) -> Callable[..., bool]:
    """``parallel_state.is_pipeline_last_stage`` for the placement of a number of ranks.

    For a chunk (``vp_stage``), it returns whether the chunk is the last stage of the placement. Without a chunk, it
    returns the result of ``original``: Megatron's loops log on the last rank, which receives our losses.
    """

    @functools.wraps(original)
    def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        if ignore_virtual or vp_stage is None:
            return original(ignore_virtual, vp_stage)
        group = original_group(parallel_state.get_pipeline_model_parallel_group())  # while a chunk is built
        placement = placement_on(group.size())
        return placement.stages_of(group.rank())[vp_stage] == placement.num_stages - 1

    return is_pipeline_last_stage


def add_tied_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``finalize_model_grads._allreduce_word_embedding_grads`` for ranks that have several copies of an embedding.

    There the gradients are summed locally, with the same result. ``original`` then adds the copies of other ranks to
    the sum: a stage that only predicts more tokens may be on any rank.
    """

    @functools.wraps(original)
    def allreduce_word_embedding_grads(model: Sequence[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        gradients = [weight.main_grad for weight in _copies_of_embedding(model) if weight.requires_grad]
        for gradient in gradients[1:]:
            gradients[0] += gradient
        original(model, *args, **kwargs)
        for gradient in gradients[1:]:
            gradient.copy_(gradients[0])

    return allreduce_word_embedding_grads


def copy_embedding(model: Sequence[torch.nn.Module]) -> None:
    """Copy the embedding's initial values to its copies in later chunks of this rank.

    These are the output layer, if it is tied, and the embedding for multi-token prediction.
    """
    weights = _copies_of_embedding(model)
    for weight in weights[1:]:
        weight.data.copy_(weights[0].data)


def has_vocabulary(chunk: torch.nn.Module) -> bool:
    """Whether a chunk has the embedding, a copy of it, or the output layer."""
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    return bool(model.pre_process or model.post_process or getattr(model, "mtp_process", False))


def has_copies_of_embedding(chunk: torch.nn.Module) -> bool:
    """Whether several stages of the model of a chunk have its embedding: it is tied, or predicts more tokens."""
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    return _is_tied(model) or _predicts(model)


def _copies_of_embedding(model: Sequence[torch.nn.Module]) -> list[Any]:
    """The weights of the embedding in several chunks of this rank, the first stage's first; empty for fewer than two.

    The embedding and the output layer of one chunk have one weight if they are tied.
    """
    if len(model) == 1:  # of any class, which need not have a method that returns the weight
        return []
    chunks = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in model]
    weights = [chunk.shared_embedding_or_output_weight() for chunk in chunks if _has_embedding(chunk)]
    copies = [weight for weight in weights if weight is not None]  # a divided embedding has none
    return copies if chunks[0].pre_process and len(copies) > 1 else []


def _has_embedding(chunk: Any) -> bool:
    """Whether a chunk has an embedding of which other chunks have copies, or one of these copies.

    As in megatron-core, a model says so, and only then must have the method that returns the weight.
    """
    if chunk.pre_process:
        return _is_tied(chunk) or _predicts(chunk)
    return bool(getattr(chunk, "mtp_process", False) or (chunk.post_process and _is_tied(chunk)))


def _is_tied(chunk: Any) -> bool:
    return bool(getattr(chunk, "share_embeddings_and_output_weights", False))


def _predicts(chunk: Any) -> bool:
    return bool(getattr(getattr(chunk, "config", None), "mtp_num_layers", None))
