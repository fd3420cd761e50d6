"""A job that prints its flags, those that are not as by default."""

from megatron.training.initialize import initialize_megatron

args = initialize_megatron()
for name, value in sorted(vars(args).items()):
    if value not in (None, False):
        print(f"{name} = {value}")
