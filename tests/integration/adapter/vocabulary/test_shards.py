"""Every rank has equally many weights of the vocabulary layers, whatever their size."""

from __future__ import annotations

from inspect import signature

import pytest

from tests.helpers.parity import BASE_FLAGS, Layout, rebuild_process_groups
from tests.helpers.ranks import RankPool
from tests.integration.adapter.test_parity import UNTIED

HIDDEN = 16
ODD = "--make-vocab-size-divisible-by 1"


def num_weights(rank: int, flags: str) -> int:
    """The number of elements in this rank's weights of the embedding and the output layer."""
    import torch

    from megatron.zero_bubble.engine.platforms import select
    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.arguments import tokenizer
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse
    from pretrain import model
    from pretrain.distributed import seed

    args = parse([*BASE_FLAGS.split(), *flags.split()])
    check(args, torch.distributed.get_world_size())
    rebuild_process_groups(args)
    device = select("cpu").device(rank)
    apply(args.zero_bubble)
    try:
        seed(args)
        size = tokenizer.padded_vocab_size(args, tokenizer.build_tokenizer(args))
        chunks = model.build_model(args, model.build_config(args, device), size, device)
    finally:
        revert()
    names = ("word_embeddings.weight", "output_layer.weight")
    weights = {p for chunk in chunks for name, p in chunk.named_parameters() if name.endswith(names)}
    marked = {
        p for chunk in chunks for p in chunk.parameters() if getattr(p, "is_embedding_or_output_parameter", False)
    }
    assert weights <= marked
    return sum(weight.numel() for weight in weights)


@pytest.mark.parametrize(
    ("layout", "tokens", "options", "rows"),
    [
        (Layout(2), 32, "", 16),
        (Layout(3), 32, UNTIED, 2 * 11),
        (Layout(2, num_layers=4), 33, f"--zero-bubble-schedule zb-v {ODD}", 17),
        (Layout(2, tensor=2), 33, f"{ODD} {UNTIED}", 2 * 9),
        (Layout(3), 7, ODD, 3),
        (Layout(4), 5, ODD, 2),
    ],
    ids=["tied", "p=3, untied", "V", "tp=2, untied", "p=3, few tokens", "a rank with nothing but padding"],
)
def test_every_rank_has_as_many_weights(ranks: RankPool, layout: Layout, tokens: int, options: str, rows: int) -> None:
    """Rows per rank: Megatron's padded vocabulary, divided by the ranks and rounded up; twice if not tied."""
    schedule = "" if "schedule" in options else "--zero-bubble-schedule zb-h1"
    flags = layout.flags(1, f"--vocab-size {tokens - 1} {schedule} --zero-bubble-vocabulary-parallel 2 {options}")
    assert ranks.run(layout.num_ranks, num_weights, flags) == [rows * HIDDEN] * layout.num_ranks


def test_the_output_layer_takes_the_argument_of_megatrons_by_name() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megatron.zero_bubble.integration.adapter.vocabulary import shards

    layers = (ColumnParallelLinear, shards.OutputShard, shards._LastOutput)
    assert {list(signature(layer.forward).parameters)[1] for layer in layers} == {"input_"}
