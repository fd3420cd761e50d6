"""Two lines add a schedule to a foreign training loop on megatron-core; the results stay equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPool

SEQUENCE, VOCABULARY, MICROBATCHES, STEPS = 8, 32, 5, 3


def samples() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)


def build_model() -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    text = next(data)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    losses = model(text[:, :-1], positions, None, labels=text[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.mean().item().hex()})


def train() -> tuple[list[Any], list[str]]:
    """Take three steps of plain SGD; return the losses (on the last rank) and the exact sum of each weight."""
    from megatron.core import tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    model = build_model()
    data, losses = samples(), []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        losses += get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=2,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.main_grad
    return losses, [parameter.detach().double().sum().item().hex() for parameter in model.parameters()]


def both(rank: int, schedule: str) -> tuple[Any, Any]:
    from megatron.core import parallel_state

    import megatron.zero_bubble

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    stock = train()
    megatron.zero_bubble.apply(megatron.zero_bubble.ZeroBubbleConfig(schedule=schedule, fuse_wgrad=False))
    try:
        assert len(megatron.zero_bubble.report()) == 3
        exact = train()
    finally:
        megatron.zero_bubble.revert()
    megatron.zero_bubble.apply(schedule)
    try:
        fused = train()
    finally:
        megatron.zero_bubble.revert()
    assert exact == stock
    return stock, fused


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_apply_in_a_foreign_loop_keeps_the_results(ranks: RankPool, schedule: str) -> None:
    first, last = ranks.run(2, both, schedule)
    assert first[0][0] == first[1][0] == []  # only the last rank has losses
    stock, fused = ([float.fromhex(loss["loss"]) for loss in losses] for losses, _ in last)
    assert len(stock) == STEPS * MICROBATCHES
    assert stock[-1] < stock[0]
    assert fused == pytest.approx(stock, rel=1e-5)
