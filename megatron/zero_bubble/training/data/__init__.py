"""The data of the training loop: corpora, indexed files, blends, batches."""
