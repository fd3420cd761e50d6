"""A job that prints its flags, except those that are None or False."""

from megatron.training.initialize import initialize_megatron

args = initialize_megatron()
for name, value in sorted(vars(args).items()):
    if value not in (None, False):
        print(f"{name} = {value}")
