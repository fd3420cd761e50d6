"""Data for the training loop: corpora, indexed files, blends, tokenizers and batches."""
