"""Runs the passes of vocabulary parallelism (``ir.vocabulary``) on the language models of megatron-core."""

from megatron.zero_bubble.integration.adapter.vocabulary.transfers import VocabularyTransfers

__all__ = ["VocabularyTransfers"]
