"""``McaTrainer`` of ROLL's mcore_adapter, which LLaMA-Factory trains with, on a model that its ``AutoModel`` loads.

It runs on CPUs by itself. The data are drawn here; LLaMA-Factory's templates are not used.
"""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path
from typing import Any

from tests.helpers.clients.models import VOCABULARY, weights_of, write_model

MICROBATCHES, STEPS = 6, 3
# What has no kernel for CPUs.
_OFF = ("gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm", "bias_dropout_fusion")


def load(_checkout: Path, folder: Path) -> None:
    """Import the trainer, and write the model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    importlib.import_module("mcore_adapter.trainer")
    write_model(_model(folder))


def _model(folder: Path) -> Path:
    return folder / f"model-{os.environ['RANK']}"


def train(run: dict[str, Any], folder: Path) -> tuple[Any, dict[str, str]]:
    """Fine-tune; returns what the trainer logs."""
    import torch.distributed as dist
    from mcore_adapter.models import AutoModel
    from mcore_adapter.trainer import McaTrainer
    from mcore_adapter.training_args import Seq2SeqTrainingArguments
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq

    if run["variables"]:
        importlib.import_module("megatron.zero_bubble.auto")
    dist.init_process_group("gloo", f"file://{folder}/{run['name']}", rank=int(os.environ["RANK"]), world_size=2)
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder / "output"),
        pipeline_model_parallel_size=2,
        tensor_model_parallel_size=1,
        transformer_impl="local",
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        cross_entropy_loss_fusion=False,
        additional_configs=dict.fromkeys(_OFF, False),
        use_distributed_optimizer=True,
        bf16=True,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=MICROBATCHES,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        **run["settings"],
    )
    tokenizer = AutoTokenizer.from_pretrained(_model(folder))
    trainer = McaTrainer(
        model=AutoModel.from_pretrained(str(_model(folder)), args),
        args=args,
        tokenizer=tokenizer,
        train_dataset=_samples(2 * MICROBATCHES * STEPS),
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding="max_length", max_length=32),
    )
    trainer.train()
    logged = [_timeless(each) for each in trainer.state.log_history]
    return logged, weights_of({"model": trainer.model.models})


def _samples(count: int) -> list[dict[str, list[int]]]:
    """Prompts, which are not learned, and answers."""
    drawn = random.Random(5)
    samples = []
    for _ in range(count):
        prompt, answer = ([drawn.randrange(4, VOCABULARY) for _ in range(drawn.randint(1, 12))] for _ in range(2))
        tokens = prompt + answer
        samples.append(
            {
                "input_ids": tokens,
                "attention_mask": [1] * len(tokens),
                "labels": [*[-100] * (len(prompt) - 1), *answer, -100],
            }
        )
    return samples


def _timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not any(each in name for each in ("runtime", "per_sec"))}
