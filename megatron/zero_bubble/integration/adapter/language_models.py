"""The models of megatron-core whose vocabulary layers can be divided, whatever the layers between them are.

What is asked of one: its embedding has ``word_embeddings``; its forward looks tokens up in the embedding of the first
stage, gives the hidden states of the last one to ``output_layer``, and what that returns, with the labels, to
``compute_language_model_loss``. Models that do more with any of these are not listed, such as BERT.
"""

from __future__ import annotations

from typing import Any

import torch

DIVIDED = {
    "GPTModel": "megatron.core.models.gpt.gpt_model",
    "MambaModel": "megatron.core.models.mamba.mamba_model",  # until 0.17; then a name of the next one
    "HybridModel": "megatron.core.models.hybrid.hybrid_model",
}
"""The classes and their modules, which are not imported, because a job has only one of them."""


def unwrapped(chunk: torch.nn.Module) -> Any:
    """The model inside a chunk, as wrapped by Megatron."""
    model: Any = chunk
    while hasattr(model, "module"):  # DDP, and the wrapper of 16-bit models
        model = model.module
    return model


def is_divisible(model: torch.nn.Module) -> bool:
    """Whether a model is of one of the listed classes, or of one derived from them."""
    return any(DIVIDED.get(each.__name__) == each.__module__ for each in type(model).__mro__)
