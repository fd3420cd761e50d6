"""The launcher and what it does to a job, tested on a stand-in for ``megatron.training``."""
