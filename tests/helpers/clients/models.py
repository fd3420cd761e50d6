"""The model of the clients: a Qwen of toy size in Hugging Face's format, with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.loops.compare import exact
from tests.loops.models import named

VOCABULARY = 96


def write_model(folder: Path, layers: int = 4) -> None:
    """Write the model's configuration, weights and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
    )
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def weights_of(models: dict[str, Iterable[Any]]) -> dict[str, str]:
    """Digests of the weights of models, each a list of chunks, by the names of model and weight."""
    import torch

    return {
        f"{model} {name}": exact(weight.detach().view(-1).view(torch.uint8))[-1]
        for model, chunks in models.items()
        for chunk in chunks
        for name, weight in named(_unwrapped(chunk))
    }


def _unwrapped(chunk: Any) -> Any:
    """A chunk without Megatron's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
