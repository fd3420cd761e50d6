"""Data for the training loop: batches, documents, and the shares of replicas."""
