"""Runs the passes of vocabulary parallelism (``ir.vocabulary``) on megatron-core's GPTModel."""

from megatron.zero_bubble.integration.adapter.vocabulary.transfers import VocabularyTransfers

__all__ = ["VocabularyTransfers"]
