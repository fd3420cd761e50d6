#!/usr/bin/env python3
"""A training loop of one's own on megatron-core, under stock Megatron's schedule, ZB-H1 or ZB-V: the losses are equal.

torchrun --nproc-per-node 2 examples/own_loop.py stock --cpu
torchrun --nproc-per-node 2 examples/own_loop.py zb-h1 --cpu
torchrun --nproc-per-node 2 examples/own_loop.py zb-v --cpu

Every process is a pipeline rank; without --cpu, each needs a GPU. Only the lines that name zero_bubble are not stock
megatron-core.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

import megatron.zero_bubble

if "--cpu" in sys.argv:
    megatron.zero_bubble.use_cpu_ranks()  # before megatron.core is imported

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 8, 64, 32, 128
MICROBATCH, MICROBATCHES, STEPS, RATE = 2, 8, 5, 0.5


def batches(device):
    """Yield microbatches of sequences that count up; all ranks have the same."""
    generator = torch.Generator().manual_seed(5)
    while True:
        first = torch.randint(VOCABULARY, (MICROBATCH, 1), generator=generator)
        yield ((first + torch.arange(SEQUENCE + 1)) % VOCABULARY).to(device)


def forward_step(data, model):
    """Run one microbatch through one chunk; return its output, and the function that makes a loss of the last one's."""
    tokens = next(data)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(MICROBATCH, -1)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.mean().item()})


def initialize(chunk):
    """Give every layer the same weights under all schedules, whichever rank and chunk has it."""
    for name, parameter in chunk.named_parameters():
        if parameter.dim() > 1:
            _, _, after = name.partition("decoder.layers.")
            layer = chunk.decoder.layers[int(after.split(".")[0])].layer_number if after else 0
            generator = torch.Generator().manual_seed(1000 * layer + parameter.numel())
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def train(schedule, device):
    """Train for a few steps of plain SGD; return the mean loss of each on the last rank, nothing on the others."""
    num_ranks = dist.get_world_size()
    stages_per_rank = 2 if schedule == "zb-v" else None  # Megatron's virtual pipeline size
    if schedule != "stock":
        megatron.zero_bubble.apply(schedule)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=stages_per_rank,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=stages_per_rank,
        pipeline_dtype=torch.float32,
    )
    config.finalize_model_grads_func = finalize_model_grads

    def build(**stage):
        model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, **stage).to(device)
        initialize(model)
        return model

    chunks = megatron.zero_bubble.build_stages(build)
    model = [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    data = [batches(device) for _ in model]  # every chunk reads every microbatch once
    means = []
    for _ in range(STEPS):
        for chunk in model:
            chunk.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICROBATCH,
        )
        with torch.no_grad():
            for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
                parameter -= RATE * parameter.main_grad
        if losses:
            means.append(sum(each["loss"] for each in losses) / MICROBATCHES)
    return means


def main():
    """Train under the given schedule, and print the losses."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("schedule", choices=("stock", "zb-h1", "zb-v"))
    options.add_argument("--cpu", action="store_true", help="run without a GPU")
    args = options.parse_args()
    if not args.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if args.cpu else "nccl")
    for step, loss in enumerate(train(args.schedule, "cpu" if args.cpu else "cuda")):
        print(f"step {step}: loss {loss:.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
