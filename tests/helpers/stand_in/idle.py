"""A script that does not use ``megatron.training``, although it is importable."""

print("done")
