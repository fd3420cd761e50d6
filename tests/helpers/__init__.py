"""What tests share: the pool of ranks."""
