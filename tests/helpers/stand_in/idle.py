"""A script beside ``megatron.training`` that has no use for it."""

print("done")
